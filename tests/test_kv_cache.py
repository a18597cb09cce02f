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
from marks import core, pairwise, with_core_tuples

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
    return KVCache.create(
        **{"batch": B, "max_length": S, "num_kv_heads": K, "head_size": H} | given
    )


def tokens(first, number, batch=(B,), dtype=jnp.float32):
    """Keys and values that show their place: the batch entry, and in the fraction the
    position.
    """
    entry = np.arange(np.prod(batch, dtype=int)).reshape(*batch, 1, 1, 1)
    position = (
        np.asarray(first).reshape(np.shape(first) + (1,) * 3)
        + np.arange(number)[:, None, None]
    )
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
        first = 0 if cache.window is None else max(0, ends[place] - cache.length)
        seen = np.sort(positions[place][positions[place] >= 0])
        np.testing.assert_array_equal(seen, np.arange(first, ends[place]))
    entry = np.arange(np.prod(cache.batch, dtype=int)).reshape(*cache.batch, 1)
    held = (positions >= 0)[..., None, None]
    expected = held * np.float32(entry + (positions + 1) / 1024)[..., None, None]
    for x, wanted in ((cache.key, expected), (cache.value, -expected)):
        np.testing.assert_array_equal(
            np.where(held, x, 0), np.broadcast_to(wanted, x.shape)
        )


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@jax.jit
def updated(cache, key, value, lengths=None):
    return cache.update(key, value, lengths)


@pytest.mark.core
def test_an_empty_cache():
    cache = create(dtype=jnp.bfloat16)
    assert cache.key.shape == cache.value.shape == (B, S, K, H)
    assert (cache.key.dtype, cache.index.dtype, cache.index.shape) == (
        jnp.bfloat16,
        jnp.int32,
        (),
    )
    assert (cache.batch, cache.length, cache.is_per_row, cache.window) == (
        (B,),
        S,
        False,
        None,
    )
    assert_holds(cache, 0)
    cache = create(batch=(2, 3), per_row=True)
    assert (cache.batch, cache.index.shape, cache.key.dtype) == (
        (2, 3),
        (2, 3),
        jnp.float32,
    )


@pytest.mark.core
@pytest.mark.parametrize("batch", [0, (), (0, 2), np.int64(2), [2, 1]])
def test_batch_axes(batch):
    cache = create(batch=batch, per_row=True)
    grown = cache.update(*tokens(0, 3, cache.batch)).truncate(2)
    assert grown.key.shape == (*cache.batch, S, K, H)
    assert_holds(grown, np.full(cache.batch, 2))


@pytest.mark.core
@pytest.mark.parametrize(
    ("length", "slots"), [(RING - 1, RING - 1), (RING, RING), (10 * RING, RING)]
)
def test_a_ring_needs_a_window_and_some_spare_slots(length, slots):
    cache = create(max_length=length, window=WINDOW)
    assert cache.length == slots
    assert cache.window == (WINDOW if slots == RING else None)


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 7), (jnp.float8_e4m3fn, 2)])
@pytest.mark.parametrize("lengths", [None, [1, 0, 2]])
def test_every_feature_of_one_key_head(dtype, size, lengths):
    """On CPUs they may be written in parts."""
    number = 1 if lengths is None else 2
    first = 3
    new = (
        jnp.linspace(-1, 1, B * number * size)
        .reshape(B, number, 1, size)
        .astype(jnp.bfloat16)
    )
    cache = KVCache.create(B, S, 1, size, dtype, per_row=lengths is not None)
    cache = dataclasses.replace(cache, index=cache.index + first)
    grown = updated(cache, new, -new, None if lengths is None else jnp.array(lengths))
    held = (np.arange(number) < np.array(lengths or [1] * B)[:, None])[..., None, None]
    stored = new if dtype == jnp.bfloat16 else quantize(new, jnp.dtype(dtype))[0]
    expected = np.zeros((B, S, 1, size), np.float32)
    expected[:, first : first + number] = np.where(
        held, np.asarray(stored, np.float32), 0
    )
    np.testing.assert_array_equal(np.asarray(grown.key, np.float32), expected)
    np.testing.assert_array_equal(np.asarray(grown.value, np.float32), -expected)


def test_constants_under_jit():
    """Arrays that a jitted function closes over are known. One length counts for all
    sequences.
    """
    cache = create(per_row=True)
    lengths = jnp.array([3, 0, 2])
    rows = jnp.array([2, 2])
    grown = jax.jit(lambda cache: cache.update(*tokens(0, 7), lengths=lengths))(cache)
    assert_holds(grown, [3, 0, 2])
    np.testing.assert_array_equal(
        jax.jit(lambda cache: cache.take(rows))(grown).index, [2, 2]
    )
    assert_holds(cache.update(*tokens(0, 7), lengths=4), [4, 4, 4])
    assert_holds(create(batch=()).update(*tokens(0, 7, ()), lengths=4), 4)
    with pytest.raises(ValueError, match="lengths must be between 0 and 2"):
        jax.jit(lambda cache: cache.update(*tokens(0, 2), lengths=lengths))(cache)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_arrays_of_numpy(window):
    """Checkpoints may hold them."""
    cache = jax.tree.map(
        np.asarray, create(max_length=RING, window=window, per_row=True)
    )
    grown = jax.tree.map(np.asarray, cache.update(*map(np.asarray, tokens(0, 7))))
    assert_holds(
        jax.tree.map(np.asarray, grown.truncate(np.array([5, 2, 7]))), [5, 2, 7]
    )
    np.testing.assert_array_equal(grown.take(np.array([2, 2])).key[1], grown.key[2])


@pytest.mark.core
def test_truncate():
    cache = filled(9, [9, 5, 7], per_row=True)
    assert_holds(cache.truncate(5), [5, 5, 5])
    shorter = cache.truncate(jnp.array([9, 0, 6]))
    assert_holds(shorter, [9, 0, 6])
    assert_holds(shorter.update(*tokens([9, 0, 6], 2)), [11, 2, 8])
    assert_holds(jax.jit(KVCache.truncate)(cache, jnp.array([1, 2, 3])), [1, 2, 3])
    assert_holds(filled(9).truncate(0), 0)


@pytest.mark.parametrize("jit", [False, True])
def test_a_ring_that_has_lost_tokens_can_be_emptied(jit):
    """A finished row makes room for another prompt."""
    ring = KVCache.create(2, 999, 1, H, window=3, per_row=True)
    x = jax.random.normal(jax.random.key(0), (2, 100, 1, H))
    ring = ring.update(x, x, lengths=np.array([90, 40]))
    emptied = (jax.jit(KVCache.truncate) if jit else KVCache.truncate)(
        ring, np.array([0, 40])
    )
    np.testing.assert_array_equal(emptied.index, [0, 40])
    for new in (x[:, :3], x[:, :17]):
        output, _ = cached_attention(new, new, new, emptied, local_window_size=3)
        want = dot_product_attention(
            new[:1], new[:1], new[:1], is_causal=True, local_window_size=3
        )
        np.testing.assert_allclose(output[:1], want, rtol=0, atol=1e-6)


def test_truncate_marks_sequences_that_it_cannot_restore():
    cache = filled(9, per_row=True)
    marked = jax.jit(KVCache.truncate)(cache, jnp.array([3, 10, -1]))
    np.testing.assert_array_equal(marked.index, [3, -1, -1])
    unknown = jax.jit(lambda cache: cache.has_room(1))(marked)
    np.testing.assert_array_equal(unknown, [True, False, False])
    same_bits(updated(marked, *tokens(0, 1)).key[1:], marked.key[1:])
    refused(
        "the ring cache no longer contains every token that a query attends to",
        marked.update,
        *tokens(0, 1),
    )
    refused("the ring cache no longer contains", marked.truncate, 0)


@pytest.mark.core
def test_truncate_of_a_ring():
    """By one token more than there are spare slots; overwritten tokens are lost."""
    cache = filled(3 * RING, max_length=9 * RING, window=WINDOW)
    oldest = 3 * RING - SPARE - 1
    back = cache.truncate(oldest)
    held = np.asarray(back.positions()) >= oldest - WINDOW
    keys = np.asarray(back.key)
    assert np.isfinite(keys[held]).all()
    assert np.isnan(keys[~held]).all()
    assert_holds(back.update(*tokens(oldest, 2 * RING)), oldest + 2 * RING)
    lost = rf"index must be between {oldest} \(earlier tokens were overwritten\) and {3 * RING} \("
    refused(lost, cache.truncate, oldest - 1)
    assert int(jax.jit(KVCache.truncate)(cache, oldest - 1).index) == -1
    with jax.debug_nans(True):
        assert int(cache.truncate(3 * RING - 2).index) == 3 * RING - 2
        # Nothing is lost yet.
        for truncate in (KVCache.truncate, jax.jit(KVCache.truncate)):
            new = filled(9, max_length=9 * RING, window=WINDOW)
            assert_holds(truncate(new, 5).update(*tokens(5, 2)), 7)


@pytest.mark.parametrize("jit", [False, core(True)])
def test_keep(jit):
    """A path of a tree of drafts; paths of their own, of which one is empty; the tokens
    that follow.
    """
    keep = jax.jit(KVCache.keep) if jit else KVCache.keep
    key, value = tokens(0, 9)
    one, rows = (create(per_row=rows).update(key, value) for rows in (False, True))
    kept = keep(one, np.array([4, 6, 7]))
    assert int(kept.index) == 7
    np.testing.assert_array_equal(kept.key[:, :7], key[:, [0, 1, 2, 3, 4, 6, 7]])
    np.testing.assert_array_equal(kept.value, -kept.key)
    slots = np.array([[4, 5, 7], [5, 0, 0], [3, 4, 8]])
    lengths = np.array([3, 0, 2])
    kept = keep(rows, slots, lengths, np.array([4, 3, 3]))
    np.testing.assert_array_equal(kept.index, [7, 3, 5])
    for i, path in enumerate(([4, 5, 7], [], [3, 4])):
        np.testing.assert_array_equal(
            kept.key[i, : kept.index[i]], key[i, [*range((4, 3, 3)[i]), *path]]
        )
    assert_holds(
        KVCache.keep(rows, slots[:, :1], index=slots[:, 0]).truncate([5, 6, 4]),
        [5, 6, 4],
    )
    beams = kept.take([2, 2])
    np.testing.assert_array_equal(beams.update(*tokens(0, 1, (2,))).index, [6, 6])


def test_keep_marks_sequences_without_a_path():
    cache = filled(9, [9, 9, 5], per_row=True)
    slots = np.array([[4, 6], [6, 6], [4, 6]])
    marked = jax.jit(KVCache.keep)(cache, slots)
    np.testing.assert_array_equal(marked.index, [6, -1, -1])
    same_bits(marked.key[1:], cache.key[1:])


@pytest.mark.core
def test_take():
    """Rows that do not exist become NaN."""
    cache = filled(7, [7, 3, 5], per_row=True)
    rows = jnp.array([2, 0, 0, 2])
    for beams in (cache.take(rows), jax.jit(KVCache.take)(cache, rows)):
        np.testing.assert_array_equal(beams.index, [5, 7, 7, 5])
        np.testing.assert_array_equal(beams.key, cache.key[rows])
        np.testing.assert_array_equal(beams.value, cache.value[rows])
    shared = filled(7).take([1])
    assert (shared.batch, int(shared.index)) == ((1,), 7)
    beams = jax.jit(KVCache.take)(cache, jnp.array([0, B, -1, 1]))
    np.testing.assert_array_equal(beams.index, [7, -1, -1, 3])
    np.testing.assert_array_equal(beams.key[::3], cache.key[:2])
    assert np.isnan(beams.key[1:3]).all()


@pytest.mark.core
def test_values_that_are_a_part_of_the_keys():
    """They are not stored, and `value` is None."""
    cache = create(num_kv_heads=1, per_row=True, value_size=H - 2)
    key = tokens(0, 7)[0][:, :, :1]
    grown = (
        jax.jit(KVCache.update)(cache, key, None, jnp.array([7, 3, 5]))
        .take([2, 0])
        .truncate([4, 6])
    )
    assert (grown.key.shape, grown.value.nbytes, grown.value_size) == (
        (2, S, 1, H),
        0,
        H - 2,
    )
    np.testing.assert_array_equal(grown.key[1, :7], key[0])
    refused(
        "value must be None if the values are part of the cached keys",
        cache.update,
        key,
        key,
    )
    for size in (0, H + 1, 2.0):
        with pytest.raises(
            ValueError,
            match=rf"value_size must be an int from 1 to head_size \({H}\), but got {size}",
        ):
            create(num_kv_heads=1, value_size=size)


@pytest.mark.core
def test_room_if_the_index_is_unknown():
    cache = filled(9, [9, 5, 0], per_row=True)
    assert cache.has_room(2) is True
    room = jax.jit(lambda cache, lengths: cache.has_room(6, lengths))
    np.testing.assert_array_equal(
        room(cache, jnp.array([2, 6, 7])), [True, True, False]
    )
    np.testing.assert_array_equal(
        room(cache, jnp.array([3, -1, 6])), [False, False, True]
    )
    np.testing.assert_array_equal(
        jax.jit(lambda cache: cache.has_room(6))(cache), [False, True, True]
    )
    # A ring is full at the largest position.
    ring = KVCache(*tokens(0, RING), jnp.asarray(2**31 - 3, jnp.int32), WINDOW)
    assert ring.has_room(2) is True
    refused("the cache is too short", ring.has_room, 3)


@pytest.mark.parametrize(
    ("number", "per_row", "dtype"),
    pairwise((2, 65), (False, True), (jnp.float32, jnp.bfloat16)),
)
def test_written_tokens_have_a_gradient(number, per_row, dtype):
    """Replaced ones have none; the order of `jax.vmap` and `jax.grad` does not matter."""
    cache = create(max_length=SLOTS, dtype=dtype, per_row=per_row)
    places = np.arange(1.0, SLOTS + 1)
    firsts = (3, 6)
    new = tokens(0, number, dtype=dtype)[0]
    olds, news, indices = (
        jnp.stack(x)
        for x in ([cache.key] * 2, [new, 2 * new], [cache.index + i for i in firsts])
    )

    def total(old, new, index):
        key = KVCache(old, old, index).update(new, new).key
        return jnp.sum(
            key.astype(jnp.float32)
            * jnp.asarray(places, jnp.float32)[None, :, None, None]
        )

    gradient = jax.grad(total, argnums=(0, 1))
    alone = jax.tree.map(
        lambda *x: jnp.stack(x), *map(jax.jit(gradient), olds, news, indices)
    )
    same_bits(alone, jax.jit(jax.vmap(gradient))(olds, news, indices))
    of_all = jax.grad(lambda *x: jax.vmap(total)(*x, indices).sum(), argnums=(0, 1))
    same_bits(alone, jax.jit(of_all)(olds, news))
    for of_old, of_new, first in zip(*alone, firsts, strict=True):
        kept = np.where((places > first) & (places <= first + number), 0, places)
        np.testing.assert_array_equal(
            of_old, jnp.broadcast_to(kept[:, None, None], of_old.shape).astype(dtype)
        )
        np.testing.assert_array_equal(
            of_new[0, :, 0, 0], jnp.asarray(places[first : first + number], dtype)
        )


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
def test_every_slot_after_updates_of_any_size(ring, kind, mapped, dtype):
    """Other slots keep their bits, also without room, or if a ring continues at its
    first slot.
    """
    rng = np.random.default_rng(0)
    batch = (2, B) if mapped else (B,)
    update = jax.jit(jax.vmap(KVCache.update) if mapped else updated)

    def bits(number):
        """Random bits, which include infinity and every kind of NaN."""
        size = jnp.dtype(dtype).itemsize
        return jnp.asarray(
            rng.integers(0, 256, (*batch, number, K, H * size), np.uint8).view(dtype)
        )

    for number in (
        (1, 3, RING - 1, RING, RING + 1, 2 * RING + 3)
        if ring
        else (1, 3, RING - 1, RING)
    ):
        old = bits(RING)
        new = bits(number)
        shape = batch if kind != "one index" else batch[:-1]
        index = rng.integers(0, 3 * RING if ring else max(3, 3 * RING // number), shape)
        if kind == "lengths":
            lengths = rng.integers(0, number + 1, shape)
        else:
            lengths = np.full(shape, number)
        given = (jnp.asarray(lengths, jnp.int32),) if kind == "lengths" else ()
        got = update(
            KVCache(old, old, jnp.asarray(index, jnp.int32), WINDOW if ring else None),
            new,
            new,
            *given,
        )
        same_bits(got.key, got.value)
        index, lengths = (
            x if x.shape == batch else np.stack([x] * B, axis=-1)
            for x in (index, lengths)
        )
        for place in np.ndindex(batch):
            added = np.arange(
                lengths[place] if ring or index[place] + lengths[place] <= RING else 0
            )
            wanted = np.array(old[place])
            for step in added:
                wanted[(index[place] + step) % RING] = new[place][step]
            assert np.asarray(got.key[place]).tobytes() == wanted.tobytes(), (
                number,
                place,
                index[place],
                added,
            )


def test_without_jit():
    cache = create(max_length=RING, window=WINDOW, per_row=True)
    expected = cache.update(*tokens(0, 5), lengths=[5, 0, 2])
    with jax.disable_jit():
        same_bits(cache.update(*tokens(0, 5), lengths=[5, 0, 2]), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64])
def test_an_index_in_another_dtype(dtype):
    cache = filled(3, per_row=True)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        other = KVCache(cache.key, cache.value, jnp.asarray(cache.index, dtype))
        np.testing.assert_array_equal(
            updated(other, *tokens(3, 2)).key, cache.update(*tokens(3, 2)).key
        )


def test_mapped_updates_of_a_shared_cache():
    """It becomes one cache for each; so do shared tokens, and an axis of length 0 stays
    empty.
    """
    cache, (key, value) = filled(2), tokens(2, 4)
    keys, values = (jnp.stack([x, 2 * x]) for x in (key, value))
    for own, new in (((None, 0, 0), (keys, values)), ((0, None, None), (key, value))):
        if own[0] is None:
            given = cache
        else:
            given = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
        got = jax.vmap(KVCache.update, own)(given, *new)
        for i in range(2):
            each = new if own[1] is None else (keys[i], values[i])
            same_bits(jax.tree.map(lambda x, i=i: x[i], got), cache.update(*each))
    none = jax.tree.map(
        lambda x: jnp.zeros((0, *x.shape), x.dtype), (cache, key, value)
    )
    assert jax.vmap(KVCache.update)(*none).key.shape == (0, *cache.key.shape)


ONE = filled(7)
ROWS = filled(7, [7, 3, 5], per_row=True)
RING_CACHE = create(max_length=RING, window=WINDOW)
NEW = tokens(0, 2)


FLOATS = [x.astype(jnp.bfloat16) for x in NEW]
REFUSED = Refusals()
REFUSED.add("batch must be an int >= 0, but got -1", create, batch=(2, -1))
REFUSED.add("batch must be an int >= 0, but got True", create, batch=True)
REFUSED.add("max_length must be an int >= 1, but got 1000.0", create, max_length=1e3)
REFUSED.add("num_kv_heads must be an int >= 1, but got 0", create, num_kv_heads=0)
REFUSED.add("head_size must be an int >= 1, but got '8'", create, head_size="8")
# TODO *(
#         (
#             functools.partial(create, dtype=dtype),
#             f"of at least 16 bits, int8 or float8_e4m3fn, but got {got}; ",
#         )
#         for dtype, got in {
#             jnp.int16: "int16",
#             jnp.float8_e5m2: "float8_e5m2",
#             None: "None",
#             "float33": "'float33'",
#         }.items()
#     )
REFUSED.add("per_row must be True or False, but got 1", create, per_row=1)
REFUSED.add(
    r"window must be an int >= 0 or None, but got \(3, 0\)", create, window=(3, 0)
)
REFUSED.add(
    "end at position 12, but there are only 11 slots; create a",
    ONE.update,
    *tokens(7, 5),
)
REFUSED.add(
    "the cache is full: all 11 slots .*; create a longer",
    ONE.update(*tokens(7, 4)).update,
    *tokens(11, 1),
)
REFUSED.add("end at position 12", ROWS.update, *tokens(0, 6), lengths=[5, 1, 1])
REFUSED.add(
    "too short: got 12 new tokens for 11 slots",
    jax.eval_shape,
    lambda c: c.update(*tokens(0, S + 1)),
    ONE,
)
REFUSED.add(
    r"expected key shape \(3, T, 2, 5\) instead got \(2, 2, 2, 5\)",
    ONE.update,
    *tokens(0, 2, (2,)),
)
REFUSED.add(
    r"expected key shape .* instead got \(2, 2, 5\)", ONE.update, NEW[0][0], NEW[1][0]
)
REFUSED.add(
    r"expected value shape .* instead got \(3, 2, 2, 3\)",
    ONE.update,
    NEW[0],
    NEW[1][..., :3],
)
REFUSED.add(
    r"key must have .* dtype, float32, but got bfloat16; use \.astype",
    ONE.update,
    FLOATS[0],
    NEW[1],
)
REFUSED.add("value must have the cache's dtype, .*16", ONE.update, NEW[0], FLOATS[1])
REFUSED.add("the same length, but got 2 and 1", ONE.update, NEW[0], NEW[1][:, :1])
REFUSED.add("lengths must be None .*per_row=True", ONE.update, *NEW, lengths=[1, 1, 1])
REFUSED.add(
    "lengths must be between 0 and 2.*got values from -1 to 1",
    ROWS.update,
    *NEW,
    lengths=[1, -1, 1],
)
REFUSED.add(
    r"lengths must have shape \[batch...\] = \(3,\)", ROWS.update, *NEW, lengths=[1, 1]
)
REFUSED.add(
    "lengths must have an integer dtype.*bool",
    ROWS.update,
    *NEW,
    lengths=jnp.ones(B, bool),
)
REFUSED.add(
    r"index must be between 0 and 7 \(the number of tokens so far\)", ONE.truncate, 8
)
REFUSED.add(
    r"index must be between 0 and 3 \(.*but got values from 4 to 4", ROWS.truncate, 4
)
REFUSED.add(
    "index must be between 0 and .*but got values from -1 to -1", ONE.truncate, -1
)
REFUSED.add("index must have an integer dtype, but got float64", ONE.truncate, 1.0)
REFUSED.add(
    r"index must have the same shape as the cache's index, \(3,\)",
    ROWS.truncate,
    [1, 1],
)
REFUSED.add(
    r"slots must be in ascending order, at least index \(4\) .* \(7\), .* \[4, 3\]",
    ONE.keep,
    [4, 3],
)
REFUSED.add(
    r"slots must .* at least index \(4\) and less than .* \(7\)", ONE.keep, [4, 7]
)
REFUSED.add(
    "lengths must be between 0 and 2, but got .* and lengths 3", ONE.keep, [4, 5], 3
)
REFUSED.add(
    r"slots must .* at least index \(5\) and less than .* \(7\)", ONE.keep, [4], index=5
)
REFUSED.add(
    r"slots must have shape \(3, n\) with n >= 1, but got \(2,\)", ROWS.keep, [1, 2]
)
REFUSED.add(
    r"lengths must have the same shape as .* \(3,\)", ROWS.keep, [[1]] * 3, [1, 1]
)
REFUSED.add(
    "keep does not support ring caches, because the window of 4 positions would count",
    RING_CACHE.keep,
    [0],
)
REFUSED.add(
    "rows must be between 0 and 2, but got values from 0 to 3", ONE.take, [0, 3]
)
REFUSED.add(
    "rows must be between 0 and 2, but got values from -1 to -1", ONE.take, [-1]
)
REFUSED.add(
    r"rows must have shape \[B'\] .*, but got .* for .* batch shape \(3,\)", ONE.take, 1
)
REFUSED.add(
    r"rows must have shape \[B'\].*for a cache with batch shape \(\)",
    create(batch=()).take,
    [0],
)
REFUSED.add("rows must have an integer dtype, but got float64", ONE.take, [0.0])


@pytest.mark.core
@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    refused(message, call)
