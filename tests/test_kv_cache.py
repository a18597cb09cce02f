"""`KVCache`: the token in every slot, tokens that are taken back or reordered, and
refusals.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from marks import Refusals, core, pairwise, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha._src.cache.kv_cache import SPARE, KVCache
from flax_mha._src.core.eight_bits import quantize
from flax_mha.cache import cached_attention

B = 3
S = 11
K = 2
H = 5
WINDOW = 4
RING = WINDOW + 1 + SPARE
SLOTS = 72


def create(**given):
    sizes = {"batch": B, "max_length": S, "num_kv_heads": K, "head_size": H}
    return KVCache.create(**sizes | given)


def tokens(first, number, batch=(B,), dtype=jnp.float32):
    """Keys and values that show their place: the batch entry, and in the fraction the
    position.
    """
    entry = np.arange(np.prod(batch, dtype=int)).reshape(*batch, 1, 1, 1)
    first = np.asarray(first)[..., None, None, None]
    position = first + np.arange(number)[:, None, None]
    key = np.broadcast_to(entry + (position + 1) / 1024, (*batch, number, K, H))
    return key.astype(dtype), -key.astype(dtype)


def filled(number, lengths=None, **given):
    """A new cache after so many tokens."""
    return create(**given).update(*tokens(0, number), lengths)


def assert_holds(cache, index):
    """Every slot holds the token of its position in `positions`, and other slots hold
    none.
    """
    np.testing.assert_array_equal(cache.index, index)
    positions = np.asarray(cache.positions())
    ends = np.broadcast_to(index, cache.batch)
    for place in np.ndindex(*cache.batch):
        first = 0
        if cache.window is not None:
            first = max(0, ends[place] - cache.length)
        seen = np.sort(positions[place][positions[place] >= 0])
        np.testing.assert_array_equal(seen, np.arange(first, ends[place]))
    entry = np.arange(np.prod(cache.batch, dtype=int)).reshape(*cache.batch, 1)
    held = (positions >= 0)[..., None, None]
    key = np.float32(entry + (positions + 1) / 1024)[..., None, None]
    key = np.broadcast_to(key * held, cache.key.shape)
    np.testing.assert_array_equal(np.where(held, cache.key, 0), key)
    np.testing.assert_array_equal(np.where(held, cache.value, 0), -key)


# NaN is not equal to itself, and 0 equals -0.
def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@jax.jit
def updated(cache, key, value, lengths=None):
    return cache.update(key, value, lengths)


truncated = jax.jit(KVCache.truncate)


@pytest.mark.core
def test_new_cache_is_empty_with_one_index():
    cache = create(dtype=jnp.bfloat16)
    assert cache.key.shape == cache.value.shape == (B, S, K, H)
    assert cache.key.dtype == jnp.bfloat16
    assert cache.index.dtype == jnp.int32
    assert cache.index.shape == ()
    assert cache.batch == (B,)
    assert cache.length == S
    assert cache.is_per_row is False
    assert cache.window is None
    assert_holds(cache, 0)


@pytest.mark.core
@pytest.mark.parametrize("batch", [0, (), (0, 2), np.int64(2), [2, 1]])
def test_batch_may_have_any_number_of_axes(batch):
    cache = create(batch=batch, per_row=True)
    grown = cache.update(*tokens(0, 3, cache.batch)).truncate(2)
    assert grown.key.shape == (*cache.batch, S, K, H)
    assert_holds(grown, np.full(cache.batch, 2))


@pytest.mark.core
@pytest.mark.parametrize(
    ("length", "slots"), [(RING - 1, RING - 1), (RING, RING), (10 * RING, RING)]
)
def test_cache_is_a_ring_if_it_is_longer_than_window_and_spare_slots(length, slots):
    cache = create(max_length=length, window=WINDOW)
    assert cache.length == slots
    assert cache.window == (WINDOW if slots == RING else None)


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 7), (jnp.float8_e4m3fn, 2)])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 0, 2]])
def test_single_head_write_stores_all_features(dtype, size, lengths):
    # On CPUs the features of a single head may be written in parts.
    number = max(lengths)
    first = 3
    per_row = number > 1
    new = jnp.linspace(-1, 1, B * number * size).reshape(B, number, 1, size)
    new = new.astype(jnp.bfloat16)
    cache = KVCache.create(B, S, 1, size, dtype, per_row=per_row)
    cache = dataclasses.replace(cache, index=cache.index + first)

    grown = updated(cache, new, -new, jnp.array(lengths) if per_row else None)

    stored = new
    if dtype != jnp.bfloat16:
        stored, _ = quantize(new, jnp.dtype(dtype))
    held = np.arange(number) < np.array(lengths)[:, None]
    written = np.where(held[..., None, None], np.asarray(stored, np.float32), 0)
    expected = np.zeros((B, S, 1, size), np.float32)
    expected[:, first : first + number] = written
    np.testing.assert_array_equal(np.asarray(grown.key, np.float32), expected)
    np.testing.assert_array_equal(np.asarray(grown.value, np.float32), -expected)


def test_arrays_that_a_jitted_function_captures_are_known():
    cache = create(per_row=True)
    lengths = jnp.array([3, 0, 2])
    rows = jnp.array([2, 2])

    def write(cache, number):
        return cache.update(*tokens(0, number), lengths=lengths)

    grown = jax.jit(lambda cache: write(cache, 7))(cache)
    assert_holds(grown, [3, 0, 2])

    beams = jax.jit(lambda cache: cache.take(rows))(grown)
    np.testing.assert_array_equal(beams.index, [2, 2])
    too_few = jax.jit(lambda cache: write(cache, 2))
    refused("lengths must be between 0 and 2", too_few, cache)


def test_single_length_counts_for_all_sequences():
    cache = create(per_row=True)
    assert_holds(cache.update(*tokens(0, 7), lengths=4), [4, 4, 4])
    single = create(batch=())
    assert_holds(single.update(*tokens(0, 7, ()), lengths=4), 4)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_cache_of_numpy_arrays_works(window):
    # Checkpoints may hold them.
    to_numpy = functools.partial(jax.tree.map, np.asarray)
    cache = to_numpy(create(max_length=RING, window=window, per_row=True))

    grown = to_numpy(cache.update(*to_numpy(tokens(0, 7))))

    shorter = grown.truncate(np.array([5, 2, 7]))
    assert_holds(to_numpy(shorter), [5, 2, 7])
    beams = grown.take(np.array([2, 2]))
    np.testing.assert_array_equal(beams.key[1], grown.key[2])


@pytest.mark.core
def test_truncate_takes_back_tokens_of_each_sequence():
    cache = filled(9, [9, 5, 7], per_row=True)
    assert_holds(cache.truncate(5), [5, 5, 5])
    shorter = cache.truncate(jnp.array([9, 0, 6]))
    assert_holds(shorter, [9, 0, 6])
    assert_holds(shorter.update(*tokens([9, 0, 6], 2)), [11, 2, 8])
    assert_holds(truncated(cache, jnp.array([1, 2, 3])), [1, 2, 3])
    assert_holds(filled(9).truncate(0), 0)


@pytest.mark.parametrize("truncate", [KVCache.truncate, truncated])
def test_row_of_a_ring_that_has_lost_tokens_can_be_emptied(truncate):
    ring = KVCache.create(2, 999, 1, H, window=3, per_row=True)
    x = jax.random.normal(jax.random.key(0), (2, 100, 1, H))
    ring = ring.update(x, x, lengths=np.array([90, 40]))

    # A finished row makes room for another prompt.
    emptied = truncate(ring, np.array([0, 40]))

    np.testing.assert_array_equal(emptied.index, [0, 40])
    window = {"local_window_size": 3}
    for prompt in (x[:, :3], x[:, :17]):
        output, _ = cached_attention(prompt, prompt, prompt, emptied, **window)
        first = prompt[:1]
        want = dot_product_attention(first, first, first, is_causal=True, **window)
        np.testing.assert_allclose(output[:1], want, rtol=0, atol=1e-6)


def test_truncate_marks_sequences_that_it_cannot_restore():
    cache = filled(9, per_row=True)
    marked = truncated(cache, jnp.array([3, 10, -1]))
    np.testing.assert_array_equal(marked.index, [3, -1, -1])

    has_room = jax.jit(lambda cache: cache.has_room(1))(marked)
    np.testing.assert_array_equal(has_room, [True, False, False])
    same_bits(updated(marked, *tokens(0, 1)).key[1:], marked.key[1:])
    invalid = "the cache is invalid .* under jit got an index or slot outside the cache"
    refused(invalid, marked.update, *tokens(0, 1))
    refused(invalid, marked.truncate, 0)


def test_a_ring_that_was_truncated_too_far_says_so():
    cache = filled(9 * RING, max_length=9 * RING, window=WINDOW)
    marked = truncated(cache, jnp.int32(RING))
    assert int(marked.index) == -1
    lost = "the ring cache no longer contains every token that a query attends to"
    refused(lost, marked.update, *tokens(0, 1))


@pytest.mark.core
def test_ring_can_be_truncated_by_its_spare_slots():
    cache = filled(3 * RING, max_length=9 * RING, window=WINDOW)
    # By one token more than there are spare slots; overwritten tokens are lost.
    oldest = 3 * RING - SPARE - 1

    back = cache.truncate(oldest)

    held = np.asarray(back.positions()) >= oldest - WINDOW
    keys = np.asarray(back.key)
    assert np.isfinite(keys[held]).all()
    assert np.isnan(keys[~held]).all()
    assert_holds(back.update(*tokens(oldest, 2 * RING)), oldest + 2 * RING)
    lost = (
        rf"index must be between {oldest} \(earlier tokens were overwritten\) "
        rf"and {3 * RING} \("
    )
    refused(lost, cache.truncate, oldest - 1)
    assert int(truncated(cache, oldest - 1).index) == -1


@pytest.mark.core
def test_truncate_of_a_ring_that_has_lost_nothing_makes_no_nan():
    cache = filled(3 * RING, max_length=9 * RING, window=WINDOW)
    new = filled(9, max_length=9 * RING, window=WINDOW)
    with jax.debug_nans(True):
        assert int(cache.truncate(3 * RING - 2).index) == 3 * RING - 2
        for truncate in (KVCache.truncate, truncated):
            assert_holds(truncate(new, 5).update(*tokens(5, 2)), 7)


KEEP = pytest.mark.parametrize("keep", [KVCache.keep, core(jax.jit(KVCache.keep))])


@KEEP
def test_keep_moves_the_path_of_a_tree_of_drafts_to_its_place(keep):
    key, value = tokens(0, 9)
    cache = create().update(key, value)

    kept = keep(cache, np.array([4, 6, 7]))

    assert int(kept.index) == 7
    np.testing.assert_array_equal(kept.key[:, :7], key[:, [0, 1, 2, 3, 4, 6, 7]])
    np.testing.assert_array_equal(kept.value, -kept.key)


@KEEP
def test_keep_of_a_path_for_each_sequence(keep):
    key, value = tokens(0, 9)
    cache = create(per_row=True).update(key, value)
    slots = np.array([[4, 5, 7], [5, 0, 0], [3, 4, 8]])
    lengths = np.array([3, 0, 2])

    kept = keep(cache, slots, lengths, np.array([4, 3, 3]))

    np.testing.assert_array_equal(kept.index, [7, 3, 5])
    # The second path is empty.
    for i, path in enumerate(([0, 1, 2, 3, 4, 5, 7], [0, 1, 2], [0, 1, 2, 3, 4])):
        np.testing.assert_array_equal(kept.key[i, : len(path)], key[i, path])
    beams = kept.take([2, 2])
    np.testing.assert_array_equal(beams.update(*tokens(0, 1, (2,))).index, [6, 6])


@pytest.mark.core
def test_keep_of_a_slot_that_follows_the_index_changes_nothing():
    cache = filled(9, per_row=True)
    slots = np.array([4, 5, 3])
    kept = KVCache.keep(cache, slots[:, None], index=slots)
    assert_holds(kept.truncate([5, 6, 4]), [5, 6, 4])


def test_keep_marks_sequences_without_a_path():
    cache = filled(9, [9, 9, 5], per_row=True)
    slots = np.array([[4, 6], [6, 6], [4, 6]])
    # A slot twice, and a slot that the third sequence has not written.
    marked = jax.jit(KVCache.keep)(cache, slots)
    np.testing.assert_array_equal(marked.index, [6, -1, -1])
    same_bits(marked.key[1:], cache.key[1:])


@pytest.mark.core
@pytest.mark.parametrize("take", [KVCache.take, jax.jit(KVCache.take)])
def test_take_reorders_and_repeats_rows(take):
    cache = filled(7, [7, 3, 5], per_row=True)
    rows = jnp.array([2, 0, 0, 2])

    beams = take(cache, rows)

    np.testing.assert_array_equal(beams.index, [5, 7, 7, 5])
    np.testing.assert_array_equal(beams.key, cache.key[rows])
    np.testing.assert_array_equal(beams.value, cache.value[rows])


@pytest.mark.core
def test_take_keeps_a_shared_index():
    shared = filled(7).take([1])
    assert shared.batch == (1,)
    assert int(shared.index) == 7


@pytest.mark.core
def test_rows_that_do_not_exist_become_nan():
    cache = filled(7, [7, 3, 5], per_row=True)
    # Under jit, they cannot raise an error.
    beams = jax.jit(KVCache.take)(cache, jnp.array([0, B, -1, 1]))
    np.testing.assert_array_equal(beams.index, [7, -1, -1, 3])
    np.testing.assert_array_equal(beams.key[::3], cache.key[:2])
    assert np.isnan(beams.key[1:3]).all()


@pytest.mark.core
def test_values_that_are_a_part_of_the_keys_are_not_stored():
    cache = create(num_kv_heads=1, per_row=True, value_size=H - 2)
    key = tokens(0, 7)[0][:, :, :1]

    grown = updated(cache, key, None, jnp.array([7, 3, 5]))
    grown = grown.take([2, 0]).truncate([4, 6])

    assert grown.key.shape == (2, S, 1, H)
    assert grown.value.nbytes == 0
    assert grown.value_size == H - 2
    np.testing.assert_array_equal(grown.key[1, :7], key[0])
    message = "value must be None if the values are part of the cached keys"
    refused(message, cache.update, key, key)


@pytest.mark.core
@pytest.mark.parametrize("size", [0, H + 1, 2.0])
def test_value_size_must_be_a_part_of_the_head_size(size):
    message = rf"value_size must be an int from 1 to head_size \({H}\), but got {size}"
    refused(message, create, num_kv_heads=1, value_size=size)


@pytest.mark.core
def test_room_of_each_sequence_is_traced():
    cache = filled(9, [9, 5, 0], per_row=True)
    assert cache.has_room(2) is True

    room = jax.jit(lambda cache, lengths: cache.has_room(6, lengths))
    has_room = room(cache, jnp.array([2, 6, 7]))
    np.testing.assert_array_equal(has_room, [True, True, False])
    has_room = room(cache, jnp.array([3, -1, 6]))
    np.testing.assert_array_equal(has_room, [False, False, True])
    np.testing.assert_array_equal(room(cache, None), [False, True, True])


@pytest.mark.core
def test_ring_has_room_until_the_largest_position():
    # Old tokens make room, but positions are int32.
    ring = KVCache(*tokens(0, RING), jnp.asarray(2**31 - 3, jnp.int32), WINDOW)
    assert ring.has_room(2) is True
    refused("the cache is too short", ring.has_room, 3)


@pytest.mark.parametrize(
    ("number", "per_row", "dtype"),
    pairwise((2, 65), (False, True), (jnp.float32, jnp.bfloat16)),
)
def test_only_written_tokens_have_a_gradient(number, per_row, dtype):
    cache = create(max_length=SLOTS, dtype=dtype, per_row=per_row)
    places = np.arange(1.0, SLOTS + 1)
    firsts = (3, 6)
    new = tokens(0, number, dtype=dtype)[0]
    olds = jnp.stack([cache.key] * 2)
    news = jnp.stack([new, 2 * new])
    indices = jnp.stack([cache.index + first for first in firsts])

    def total(old, new, index):
        key = KVCache(old, old, index).update(new, new).key
        weights = jnp.asarray(places, jnp.float32)[None, :, None, None]
        return jnp.sum(key.astype(jnp.float32) * weights)

    gradient = jax.grad(total, argnums=(0, 1))
    alone = []
    for i in range(2):
        alone.append(jax.jit(gradient)(olds[i], news[i], indices[i]))

    # The gradient of a slot is its weight if the token is kept, or written.
    for (of_old, of_new), first in zip(alone, firsts, strict=True):
        written = (places > first) & (places <= first + number)
        kept = np.where(written, 0, places)[:, None, None]
        kept = jnp.broadcast_to(kept, of_old.shape).astype(dtype)
        np.testing.assert_array_equal(of_old, kept)
        wanted = jnp.asarray(places[first : first + number], dtype)
        np.testing.assert_array_equal(of_new[0, :, 0, 0], wanted)

    # The order of `jax.vmap` and `jax.grad` does not matter.
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    same_bits(together, jax.jit(jax.vmap(gradient))(olds, news, indices))

    def of_both(olds, news):
        return jax.vmap(total)(olds, news, indices).sum()

    of_all = jax.grad(of_both, argnums=(0, 1))
    same_bits(together, jax.jit(of_all)(olds, news))


# With and without a ring, what gives places, mapped or not, and dtypes.
WRITES = pairwise(
    (False, True),
    ("one index", "an index each", "lengths"),
    (False, True),
    (jnp.float32, jnp.bfloat16),
)


@pytest.mark.parametrize(
    ("ring", "kind", "mapped", "dtype"),
    with_core_tuples(WRITES, (True, "lengths", False, jnp.bfloat16)),
)
def test_updates_of_any_size_change_only_their_slots(ring, kind, mapped, dtype):
    rng = np.random.default_rng(0)
    batch = (2, B) if mapped else (B,)
    update = jax.jit(jax.vmap(KVCache.update) if mapped else updated)
    window = WINDOW if ring else None
    numbers = [1, 3, RING - 1, RING]
    if ring:
        numbers += [RING + 1, 2 * RING + 3]

    def bits(number):
        """Random bits, which include infinity and every kind of NaN."""
        size = (*batch, number, K, H * jnp.dtype(dtype).itemsize)
        return jnp.asarray(rng.integers(0, 256, size, np.uint8).view(dtype))

    for number in numbers:
        old = bits(RING)
        new = bits(number)
        shape = batch if kind != "one index" else batch[:-1]
        # Some updates lack room, or continue at a ring's first slot.
        highest = 3 * RING if ring else max(3, 3 * RING // number)
        index = rng.integers(0, highest, shape)
        lengths = np.full(shape, number)
        given = []
        if kind == "lengths":
            lengths = rng.integers(0, number + 1, shape)
            given.append(jnp.asarray(lengths, jnp.int32))
        cache = KVCache(old, old, jnp.asarray(index, jnp.int32), window)

        got = update(cache, new, new, *given)

        same_bits(got.key, got.value)
        if kind == "one index":
            index = np.stack([index] * B, axis=-1)
            lengths = np.stack([lengths] * B, axis=-1)
        for place in np.ndindex(batch):
            first = index[place]
            written = lengths[place]
            if not ring and first + written > RING:
                written = 0
            wanted = np.array(old[place])
            for step in range(written):
                wanted[(first + step) % RING] = new[place][step]
            found = np.asarray(got.key[place])
            assert found.tobytes() == wanted.tobytes(), (number, place, first, written)


def test_update_without_jit_writes_the_same_bits():
    cache = create(max_length=RING, window=WINDOW, per_row=True)
    expected = cache.update(*tokens(0, 5), lengths=[5, 0, 2])
    with jax.disable_jit():
        same_bits(cache.update(*tokens(0, 5), lengths=[5, 0, 2]), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64])
def test_index_may_have_any_integer_dtype(dtype):
    cache = filled(3, per_row=True)
    want = cache.update(*tokens(3, 2)).key
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        other = KVCache(cache.key, cache.value, jnp.asarray(cache.index, dtype))
        got = updated(other, *tokens(3, 2)).key
        np.testing.assert_array_equal(got, want)


def entry(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def test_mapped_updates_of_a_shared_cache_make_a_cache_for_each():
    cache = filled(2)
    key, value = tokens(2, 4)
    keys = jnp.stack([key, 2 * key])
    values = jnp.stack([value, 2 * value])

    got = jax.vmap(KVCache.update, (None, 0, 0))(cache, keys, values)

    for i in range(2):
        same_bits(entry(got, i), cache.update(keys[i], values[i]))


def test_mapped_updates_write_shared_tokens_to_each_cache():
    cache = filled(2)
    new = tokens(2, 4)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)

    got = jax.vmap(KVCache.update, (0, None, None))(caches, *new)

    for i in range(2):
        same_bits(entry(got, i), cache.update(*new))


def test_mapped_update_of_no_caches_is_empty():
    given = (filled(2), *tokens(2, 4))
    none = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), given)
    assert jax.vmap(KVCache.update)(*none).key.shape == (0, *given[0].key.shape)


ONE = filled(7)
ROWS = filled(7, [7, 3, 5], per_row=True)
RING_CACHE = create(max_length=RING, window=WINDOW)
NEW = tokens(0, 2)


FLOATS = [x.astype(jnp.bfloat16) for x in NEW]
REFUSED = Refusals()
refuses = REFUSED.add
refuses("batch must be an int >= 0, but got -1", create, batch=(2, -1))
refuses("batch must be an int >= 0, but got True", create, batch=True)
refuses("max_length must be an int >= 1, but got 1000.0", create, max_length=1e3)
refuses("num_kv_heads must be an int >= 1, but got 0", create, num_kv_heads=0)
refuses("head_size must be an int >= 1, but got '8'", create, head_size="8")
for dtype, shown in (
    (jnp.int16, "int16"),
    (jnp.float8_e5m2, "float8_e5m2"),
    (None, "None"),
    ("float33", "'float33'"),
):
    dtypes = "of at least 16 bits, int8 or float8_e4m3fn"
    refuses(f"{dtypes}, but got {shown}; ", create, dtype=dtype)
refuses("per_row must be True or False, but got 1", create, per_row=1)
refuses(r"window must be an int >= 0 or None, but got \(3, 0\)", create, window=(3, 0))

# Updates: room, shapes, dtypes and lengths.
refuses(
    "end at position 12, but there are only 11 slots; create a",
    ONE.update,
    *tokens(7, 5),
)
refuses(
    "the cache is full: all 11 slots .*; create a longer",
    ONE.update(*tokens(7, 4)).update,
    *tokens(11, 1),
)
refuses("end at position 12", ROWS.update, *tokens(0, 6), lengths=[5, 1, 1])
refuses(
    "too short: got 12 new tokens for 11 slots",
    jax.eval_shape,
    lambda c: c.update(*tokens(0, S + 1)),
    ONE,
)
refuses(
    r"expected key shape \(3, T, 2, 5\) instead got \(2, 2, 2, 5\)",
    ONE.update,
    *tokens(0, 2, (2,)),
)
refuses(
    r"expected value shape .* instead got \(3, 2, 2, 3\)",
    ONE.update,
    NEW[0],
    NEW[1][..., :3],
)
refuses(
    r"key must have .* dtype, float32, but got bfloat16; use \.astype",
    ONE.update,
    FLOATS[0],
    NEW[1],
)
refuses("value must have the cache's dtype, .*16", ONE.update, NEW[0], FLOATS[1])
refuses("the same length, but got 2 and 1", ONE.update, NEW[0], NEW[1][:, :1])
refuses("lengths must be None .*per_row=True", ONE.update, *NEW, lengths=[1, 1, 1])
refuses(
    "lengths must be between 0 and 2.*got values from -1 to 1",
    ROWS.update,
    *NEW,
    lengths=[1, -1, 1],
)
refuses(
    r"lengths must have shape \[batch...\] = \(3,\)", ROWS.update, *NEW, lengths=[1, 1]
)
refuses(
    "lengths must have an integer dtype.*bool",
    ROWS.update,
    *NEW,
    lengths=jnp.ones(B, bool),
)

# Tokens that are taken back.
refuses(
    r"index must be between 0 and 7 \(the number of tokens so far\)", ONE.truncate, 8
)
refuses(
    r"index must be between 0 and 3 \(.*but got values from 4 to 4", ROWS.truncate, 4
)
refuses("index must have an integer dtype, but got float64", ONE.truncate, 1.0)
refuses(
    r"index must have the same shape as the cache's index, \(3,\)",
    ROWS.truncate,
    [1, 1],
)

# Paths of drafts.
refuses(
    r"slots must be in ascending order, at least index \(4\) .* \(7\), .* \[4, 3\]",
    ONE.keep,
    [4, 3],
)
refuses(r"slots must .* at least index \(4\) and less than .* \(7\)", ONE.keep, [4, 7])
refuses(
    "lengths must be between 0 and 2, but got .* and lengths 3", ONE.keep, [4, 5], 3
)
refuses(
    r"slots must have shape \(3, n\) with n >= 1, but got \(2,\)", ROWS.keep, [1, 2]
)
refuses(r"lengths must have the same shape as .* \(3,\)", ROWS.keep, [[1]] * 3, [1, 1])
refuses(
    "keep does not support ring caches, because the window of 4 positions would count",
    RING_CACHE.keep,
    [0],
)

# Rows.
refuses("rows must be between 0 and 2, but got values from 0 to 3", ONE.take, [0, 3])
refuses(
    r"rows must have shape \[B'\] .*, but got .* for .* batch shape \(3,\)", ONE.take, 1
)
refuses(
    r"rows must have shape \[B'\].*for a cache with batch shape \(\)",
    create(batch=()).take,
    [0],
)
refuses("rows must have an integer dtype, but got float64", ONE.take, [0.0])


@pytest.mark.core
@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_wrong_arguments_raise_errors_of_one_line(message, call):
    refused(message, call)
