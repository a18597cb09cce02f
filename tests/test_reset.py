"""Servers: places in a batch are refilled while the other sequences go on, and packed
batches are given as offsets.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import with_core_tuples

import flax_mha
from flax_mha.cache import KVCache, cached_attention
from flax_mha.masks import segments_from_offsets
from flax_mha.rope import RoPE

FEATURES = 16
HEADS = 2


def tokens(seed, length):
    return jax.random.normal(jax.random.key(seed), (1, length, FEATURES))


def make_layer(batch, length=40, **options):
    layer = flax_mha.MultiHeadAttention(
        HEADS, FEATURES, rope=RoPE(), decode=True, rngs=nnx.Rngs(0), **options
    )
    layer.init_cache((batch, length, FEATURES), per_row=True)
    return layer


def alone(prompt, steps, **options):
    """The outputs of a sequence that has a batch of its own: of its last prompt token
    and of each step.
    """
    layer = make_layer(1, **options)
    outputs = [layer(prompt)[:, -1:]]
    outputs += [layer(steps[:, i : i + 1]) for i in range(steps.shape[1])]
    return jnp.concatenate(outputs, axis=1)[0]


@pytest.mark.parametrize(
    ("window", "jitted"),
    with_core_tuples(
        itertools.product([None, (5, 0)], [False, True]), (None, True), ((5, 0), True)
    ),
)
def test_a_refilled_place_equals_a_batch_of_its_own(window, jitted):
    first, second, third = tokens(1, 9), tokens(2, 6), tokens(3, 7)
    steps = [tokens(4, 6), tokens(5, 3), tokens(6, 3)]
    layer = make_layer(2, local_window_size=window)
    call = nnx.jit(lambda layer, x, **more: layer(x, **more)) if jitted else None
    run = functools.partial(call, layer) if jitted else layer
    reset = nnx.jit(lambda layer, rows: layer.reset_cache(rows))

    def prompt_of(row, prompt):
        padded = jnp.zeros((2, prompt.shape[1], FEATURES)).at[row].set(prompt[0])
        lengths = jnp.zeros(2, jnp.int32).at[row].set(prompt.shape[1])
        return run(padded, lengths=lengths)[row, -1:]

    # Two sequences begin; the second ends after three steps, and a third takes its
    # place while the first goes on.
    got = {1: [prompt_of(0, first)], 2: [prompt_of(1, second)], 3: []}
    for i in range(3):
        both = run(jnp.concatenate([steps[0][:, i], steps[1][:, i]])[:, None])
        got[1].append(both[0])
        got[2].append(both[1])
    rows = jnp.array([False, True])
    if jitted:
        reset(layer, rows)
    else:
        layer.reset_cache(rows)
    got[3].append(prompt_of(1, third))
    for i in range(3):
        both = run(jnp.concatenate([steps[0][:, 3 + i], steps[2][:, i]])[:, None])
        got[1].append(both[0])
        got[3].append(both[1])

    for number, prompt in ((1, first), (2, second), (3, third)):
        expected = alone(prompt, steps[number - 1], local_window_size=window)
        np.testing.assert_allclose(jnp.concatenate(got[number]), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_a_reset_hides_what_was_written_also_nan(dtype):
    x = tokens(1, 6)[..., None, :].repeat(2, 0)
    cache = KVCache.create(2, 8, 1, FEATURES, dtype, per_row=True)
    damaged = x.at[1, 2].set(jnp.nan)
    _, cache = cached_attention(damaged, damaged, damaged, cache)

    cache = cache.reset(np.array([False, True]))
    output, cache = cached_attention(x[:, :1], x[:, :1], x[:, :1], cache)

    assert cache.index.tolist() == [7, 1]
    assert np.isfinite(output).all()
    # The only token attends to itself.
    np.testing.assert_allclose(output[1], x[1, :1], atol=0.05)


def test_a_reset_revives_a_sequence_with_a_negative_index():
    cache = KVCache.create(2, 8, 1, FEATURES, per_row=True)
    broken = jax.jit(lambda cache: cache.truncate(jnp.array([0, 3])))(cache)
    assert broken.index.tolist() == [0, -1]

    assert broken.reset(jnp.array([False, True])).index.tolist() == [0, 0]


@pytest.mark.core
def test_wrong_rows_are_errors():
    shared = KVCache.create(2, 8, 1, FEATURES)
    cache = KVCache.create(2, 8, 1, FEATURES, per_row=True)

    refused("create it with per_row=True", shared.reset, jnp.array([True, False]))
    refused(r"rows must be bool with shape \(2,\)", cache.reset, jnp.array([1, 0]))
    rows = jnp.array([True, False, True])
    refused(r"but got bool with shape \(3,\)", cache.reset, rows)


@pytest.mark.core
def test_a_module_without_such_a_cache_says_so():
    layer = flax_mha.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))
    refused("init_cache", layer.reset_cache, jnp.array([True]))

    layer.init_cache((1, 8, FEATURES))
    refused("per_row=True", layer.reset_cache, jnp.array([True]))


def test_stored_keys_cannot_be_reset():
    """They have no index, and their sequences cannot be replaced one by one."""
    layer = flax_mha.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, 8, FEATURES), per_row=True)
    layer(tokens(1, 3), tokens(2, 5), store_keys=True)

    message = "store_keys=True.* pass store_keys=True"
    refused(message, layer.reset_cache, jnp.array([True]))


def test_latent_attention_with_an_indexer_resets_too():
    indexer = flax_mha.Indexer(num_heads=2, head_dim=8, top_k=4)
    layer = flax_mha.MultiHeadLatentAttention(
        HEADS,
        FEATURES,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        rope=RoPE(interleaved=True),
        indexer=indexer,
        decode=True,
        rngs=nnx.Rngs(0),
    )
    layer.init_cache((2, 20, FEATURES), per_row=True)
    x = jnp.concatenate([tokens(1, 9), tokens(2, 9)])
    expected = layer(x)

    layer.reset_cache(jnp.array([True, True]))

    np.testing.assert_allclose(layer(x), expected, atol=1e-6)


@pytest.mark.core
def test_segments_from_offsets_equal_documents_one_by_one():
    offsets = np.array([0, 4, 4, 9], np.int32)
    ids = segments_from_offsets(offsets, 11)
    assert ids.dtype == jnp.int32
    assert ids.tolist() == [0] * 4 + [2] * 5 + [3] * 2

    x = tokens(1, 11)[..., None, :]
    attend = functools.partial(flax_mha.dot_product_attention, is_causal=True)
    packed = attend(
        x, x, x, query_segment_ids=ids[None], key_value_segment_ids=ids[None]
    )

    for begin, end in ((0, 4), (4, 9)):
        part = x[:, begin:end]
        np.testing.assert_allclose(
            packed[:, begin:end], attend(part, part, part), atol=1e-6
        )
    jitted = jax.jit(segments_from_offsets, static_argnums=1)
    assert jitted(offsets, 11).tolist() == ids.tolist()


def test_segments_from_offsets_are_exported_with_symbolic_lengths():
    """Of traced offsets and, with the number of tokens alone, of known ones."""
    known = np.array([0, 2, 5])

    def segments(offsets, x):
        length = x.shape[0]
        ids = segments_from_offsets(offsets, length)
        return ids, segments_from_offsets(known, length)

    ends, length = jax.export.symbolic_shape("ends, length")
    exported = jax.export.export(jax.jit(segments))(
        jax.ShapeDtypeStruct((ends,), jnp.int32),
        jax.ShapeDtypeStruct((length,), jnp.float32),
    )
    for offsets, length in (([0, 4, 4, 9], 11), ([0, 1], 6)):
        offsets = np.array(offsets, np.int32)
        got = exported.call(offsets, np.zeros(length, np.float32))
        for ids, want in zip(got, (offsets, known), strict=True):
            np.testing.assert_array_equal(ids, segments_from_offsets(want, length))


def test_positions_may_exceed_the_dtype_of_offsets():
    ids = segments_from_offsets(np.array([0, 100, 120], np.int8), 300)

    assert ids.tolist() == [0] * 100 + [1] * 20 + [2] * 180


@pytest.mark.core
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([1, 4]), "begin with 0"),
        (np.array([0, 5, 4]), "not decrease"),
        (np.array([0, 5, 4], np.uint32), "not decrease"),
        (np.array([0, 12]), "end at most at length"),
        (np.array([0.0, 4.0]), r"offsets must be ints \[N \+ 1\]"),
        (np.array([[0, 4]]), r"with shape \(1, 2\)"),
        (np.array([], np.int32), r"with shape \(0,\)"),
    ],
)
def test_wrong_offsets_are_errors(offsets, message):
    refused(message, segments_from_offsets, offsets, 11)
