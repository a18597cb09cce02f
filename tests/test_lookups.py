"""A lookup of `score_mod` or `mask_mod` by a position is refused if the array certainly
has no such entry.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import core

from flax_mha import (
    MultiHeadAttention,
    dot_product_attention,
    explain_implementation,
    linen,
    recipes,
)
from flax_mha._src.core import user_function
from flax_mha.cache import KVCache, cached_attention
from flax_mha.masks import ArrayMask, CausalMask, FunctionMask, LengthMask, Mask

B = 2
T = 56
N = 8
X = jax.ShapeDtypeStruct((B, T, N, 4), jnp.float32)
TABLE = jnp.ones(40)
HEADS = jnp.ones(4)
LENGTH = jnp.int32(40)


def call(arguments, query=X, key=X):
    """Traces only."""
    jax.eval_shape(
        lambda query, key: dot_product_attention(query, key, key, **arguments),
        query,
        key,
    )


def mod(of):
    """A score_mod that adds a function of positions."""
    return {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + of(b, h, q_idx, kv_idx)
    }


def mask(of):
    return {"mask": FunctionMask(of)}


def partial(score, b, h, q_idx, kv_idx, table):
    return score + table[h]


LAST_KEYS = {"local_window_size": 3, "key_value_offset": -9}
OFFSETS = {"query_offset": [0, 5], "key_value_offset": [0, 5], "is_causal": True}


def call_refused(message, arguments):
    refused(message, call, arguments)


# How JAX traces lookups ---------------------------------------------------------------

PAIRS = jnp.ones((2, 8))
CUBE = jnp.ones((8, T, T))
OF_QUERY = [("q_idx", 0, (40,))]
OF_HEAD = [("h", 0, (4,))]
OF_PAIR = [("b", 0, (2, 8)), ("h", 1, (2, 8))]
OF_CUBE = [("h", 0, CUBE.shape), ("q_idx", 1, CUBE.shape), ("kv_idx", 2, CUBE.shape)]
# The indexed expression, the function, and the indices that bounds are checked of.
FORMS = [
    ("x[q_idx]", lambda b, h, q, k: TABLE[q], OF_QUERY),
    ("x[h]", lambda b, h, q, k: HEADS[h], OF_HEAD),
    ("x[b, h]", lambda b, h, q, k: PAIRS[b, h], OF_PAIR),
    ("x[h, q_idx, kv_idx]", lambda b, h, q, k: CUBE[h, q, k], OF_CUBE),
    ("x[0, h]", lambda b, h, q, k: PAIRS[0, h], OF_PAIR[1:]),
    ("x[h, q_idx] (a row)", lambda b, h, q, k: CUBE[h, q].sum(), OF_CUBE[:2]),
    ("x[..., kv_idx]", lambda b, h, q, k: CUBE[..., k].sum(), OF_CUBE[2:]),
    ("x[b][h]", lambda b, h, q, k: PAIRS[b][h], [OF_PAIR[0], ("h", 0, (8,))]),
    ("x[q_idx.astype(int16)]", lambda b, h, q, k: TABLE[q.astype(jnp.int16)], OF_QUERY),
    ("x[q_idx.astype(uint8)]", lambda b, h, q, k: TABLE[q.astype(jnp.uint8)], OF_QUERY),
    (
        "x[where(q_idx < 0, q_idx + 40, q_idx)]",
        lambda b, h, q, k: TABLE[jnp.where(q < 0, q + 40, q)],
        OF_QUERY,
    ),
    ("x.at[q_idx].get()", lambda b, h, q, k: TABLE.at[q].get(), OF_QUERY),
    ("x[q_idx] in a jit", lambda b, h, q, k: jax.jit(lambda i: TABLE[i])(q), OF_QUERY),
    (
        "lax.dynamic_index_in_dim",
        lambda b, h, q, k: jax.lax.dynamic_index_in_dim(TABLE, q, keepdims=False),
        OF_QUERY,
    ),
    # Not checked. Beyond the array, `jnp.take` returns NaN.
    ("jnp.take(x, q_idx)", lambda b, h, q, k: jnp.take(TABLE, q), []),
    ("x[h] in a vmap", lambda b, h, q, k: jax.vmap(lambda x: x[h])(PAIRS).sum(), []),
    # Without an effect on lookups: the sign of an index is no condition on it.
    ("x[h] if k <= q", lambda b, h, q, k: jnp.where(k <= q, HEADS[h], 0.0), OF_HEAD),
    ("x[q_idx] if q_idx < n", lambda b, h, q, k: jnp.where(q < 9, TABLE[q], 0.0), []),
]


@pytest.mark.core
@pytest.mark.parametrize(("form", "of", "want"), FORMS, ids=[x[0] for x in FORMS])
def test_jax_traces_lookups_to_operations_that_are_recognized(form, of, want):
    function = user_function.trace("score_mod", mod(of)["score_mod"], score=X.dtype)
    traced = function.function
    assert traced.lookups == want, (
        f"JAX {jax.__version__} traces {form} to operations in which `lookups` in "
        "flax_mha/_src/core/jaxprs.py does not find the right indices. Calls with "
        "tables that are too short then return wrong numbers instead of an error. "
        "Compare the operations with those that `_positions` and `_conditional` know:\n"
        f"{traced.body}"
    )


@pytest.mark.core
def test_jax_traces_entries_of_heads_to_operations_that_are_recognized():
    """Otherwise gradients of such arrays would take the memory of all heads at every
    tile.
    """

    rows = jnp.ones((2, 8, 9))

    def of(b, h, q, k):
        return PAIRS[b, h] + rows[b, h, q % 9] + HEADS[h]

    function = user_function.trace("score_mod", mod(of)["score_mod"], score=X.dtype)
    traced = function.function
    by_shape = zip(function.constants, traced.entries_of_heads, strict=False)
    found = {x.shape: is_entry for x, is_entry in by_shape if x.shape}
    assert found == {(2, 8): True, (2, 8, 9): True, (4,): False}, (
        f"JAX {jax.__version__} traces x[b, h] to operations that `entries_of_heads` "
        f"in flax_mha/_src/core/jaxprs.py does not find:\n{traced.body}"
    )


# What is certainly missing ------------------------------------------------------------


@pytest.mark.core
def test_a_table_of_fewer_heads_is_refused():
    message = r"<lambda> .* h = 7, .* index 7 on axis 0 .* \(4,\); .* at least 8,"
    call_refused(message, mod(lambda b, h, q, k: HEADS[h]))
    unsigned = mod(lambda b, h, q, k: HEADS[h.astype(jnp.uint8)])
    call_refused("h = 7, it uses index 7", unsigned)
    of_partial = {"score_mod": functools.partial(partial, table=HEADS)}
    call_refused("score_mod partial .*h", of_partial)


@pytest.mark.core
def test_a_table_of_fewer_batch_entries_is_refused():
    by_batch = mod(lambda b, h, q, k: jnp.ones((1, 8))[b, h])
    call_refused(r"b = 1, .* axis 0 .*\(1, 8\)", by_batch)


@pytest.mark.core
def test_recipes_of_another_number_of_heads_are_refused():
    message = "score_mod alibi.score_mod was created for 4 heads, but the call has 8"
    call_refused(message, recipes.alibi(4))
    nothing = mod(lambda b, h, q, k: 0.0)
    combined = recipes.combine(nothing, recipes.alibi(16))
    call_refused("16 heads, but the call has 8", combined)
    t5 = recipes.t5_bias(jnp.zeros((32, 4)))
    call_refused("t5_bias.score_mod .* 4 heads, but the call has 8", t5)
    sparse = recipes.block_sparse(jnp.ones((16, 7, 7), bool), 8)
    call_refused("mask_mod .* for 16 heads, but .* 8", sparse)
    windows = recipes.shifted_windows(jnp.ones((9, 4)), 8, 8, 2)
    call_refused("created for 4 heads, but", windows)
    forgetting = recipes.forgetting(jnp.zeros((B, T, 4)))
    call_refused("created for 4 heads, but the call has 8", forgetting)
    terms = recipes.relative_terms(jnp.zeros((B, 9, T, 9)))
    call_refused("created for 9 heads, but", terms)


@pytest.mark.core
def test_recipes_of_another_number_of_batch_entries_are_refused():
    forgetting = recipes.forgetting(jnp.zeros((T, 8)))
    call_refused("created for 1 batch entries, but the call has 2", forgetting)
    tree = recipes.tree_causal([[-1, 0, 1]] * 3, 53)
    call_refused("for 3 batch entries, but the call has 2", tree)


@pytest.mark.core
def test_recipes_of_another_length_are_refused():
    diffusion = recipes.block_diffusion(27, 3)
    message = "created for 54 query positions, but the call has 56"
    call_refused(message, diffusion)
    neighborhood = recipes.neighborhood(5, 11, 3)
    message = "neighborhood.visible .* 55 query positions, but the call has 56"
    call_refused(message, neighborhood)
    tiles = recipes.sliding_tiles((1, 5, 11), (1, 1, 1), (1, 3, 3))
    call_refused("created for 55 query positions, but", tiles)
    forgetting = recipes.forgetting(jnp.zeros((B, 55, 8)))
    message = "forgetting.score_mod .* for 55 query positions, but"
    call_refused(message, forgetting)
    terms = recipes.relative_terms(jnp.zeros((B, 8, 55, 9)))
    call_refused("created for 55 query positions, but", terms)
    tree = recipes.tree_causal([-1, 0, 1], 52)
    message = "created for 55 query positions, but the call has 56"
    call_refused(message, tree)
    sparse = recipes.block_sparse(jnp.ones((8, 7, 6), bool), 8)
    call_refused("created for 48 key positions, but", sparse)


@pytest.mark.core
def test_a_condition_on_other_positions_does_not_hide_a_missing_entry():
    causal_heads = mod(lambda b, h, q, k: jnp.where(k < q, HEADS[h], 0.0))
    call_refused("h = 7", causal_heads)


@pytest.mark.core
def test_lookups_in_parts_of_a_mask_are_checked():
    by_key = FunctionMask(lambda b, h, q, k: TABLE[k] > 0)
    call_refused("kv_idx = 55", {"mask": CausalMask() & ~by_key})
    call_refused("kv_idx = 55", {"mask": CausalMask() | by_key})
    window = recipes.sliding_window(3)
    call_refused("k.* 55", recipes.combine(window, {"mask": by_key}))


@pytest.mark.core
def test_masks_on_other_axes_do_not_hide_a_missing_entry():
    by_key = mod(lambda b, h, q, k: TABLE[k])
    # A bias is added after the score_mod: its -inf hides no lookup.
    bias = np.where(np.arange(T) < 40, 0.0, -np.inf)
    call_refused("kv_idx = 55", by_key | {"bias": bias})
    documents = recipes.documents(jnp.arange(T) // 28)
    by_head = mod(lambda b, h, q, k: HEADS[h])
    call_refused("h = 7", documents | by_head)
    by_batch = mod(lambda b, h, q, k: TABLE[k] + jnp.ones(1)[b])
    call_refused("b = 1", by_batch | {"key_value_seq_lengths": 40})


@pytest.mark.core
def test_offsets_count():
    # Of the keys, only those before position 47 are there, so query 49 is the last
    # that attends to any.
    by_query = mod(lambda b, h, q, k: TABLE[q])
    call_refused("q_idx = 49", by_query | LAST_KEYS)
    by_query = mod(lambda b, h, q, k: jnp.ones(60)[q])
    call_refused("q_idx = 60", by_query | OFFSETS)
    by_query = mod(lambda b, h, q, k: jnp.ones(T)[q])
    call_refused(r"q_idx = 58, .* at least 59", by_query | {"query_offset": 3})


# What is not certainly missing --------------------------------------------------------

# test_recipes.py calls every recipe with the size that it was created for.


def test_entries_in_range_are_no_error():
    call(mod(lambda b, h, q, k: jnp.ones((2, 8))[b, h] + jnp.ones((T, T))[q, k]))
    call(mod(lambda b, h, q, k: TABLE[39] + TABLE[-40]))
    call(mod(lambda b, h, q, k: jnp.ones(8)[h - 8] + TABLE[-1]))


def test_clipped_and_filled_lookups_are_no_error():
    def clipped(b, h, q, k):
        return TABLE[jnp.clip(k, 0, 39)] + HEADS[h % 4] + HEADS[h // 2]

    call(mod(clipped))
    call(mod(lambda b, h, q, k: TABLE.at[k].get(mode="fill", fill_value=0.0)))
    call(mod(lambda b, h, q, k: jnp.take(TABLE, k, mode="clip")))
    # As numbers of 8 bits they are below 256.
    call(mod(lambda b, h, q, k: jnp.ones(256)[(1000 * h + k).astype(jnp.uint8)]))


def test_lookups_under_a_condition_on_their_position_are_no_error():
    call(mod(lambda b, h, q, k: jnp.where((k < 40) & (q >= k), TABLE[k], 0.0)))
    call(mod(lambda b, h, q, k: jnp.where(k < LENGTH, TABLE[k], 0.0)))
    call(mod(lambda b, h, q, k: TABLE[k] * (k < 40).astype(jnp.float32)))
    call(mask(lambda b, h, q, k: (k < 40) & (TABLE[k] > 0)))
    call(mask(lambda b, h, q, k: (k >= LENGTH) | (TABLE[k] > 0)))


def test_lookups_in_a_branch_are_no_error():
    def in_branch(b, h, q, k):
        return jax.lax.cond(k < LENGTH, lambda x: x, jnp.zeros_like, TABLE[k])

    call(mod(in_branch))


def test_constant_indices_under_a_condition_are_no_error():
    def constant(b, h, q, k):
        otherwise = jnp.where(q < LENGTH, TABLE[50], 0.0)
        return jnp.where(k == 60, TABLE[50], otherwise)

    call(mod(constant))


def test_chosen_indices_are_no_error():
    call(mod(lambda b, h, q, k: TABLE[jnp.where(k < 40, k, 0)]))
    call(mod(lambda b, h, q, k: TABLE[jnp.where(k % 2 == 0, -1, k % 40)]))


def test_indices_computed_from_several_positions_are_no_error():
    def computed(b, h, q, k):
        distance = TABLE[abs(q - k)]
        return distance + HEADS[-1 - h] + TABLE[h * 40 + k] + TABLE[50]

    call(mod(computed))
    call(mod(lambda b, h, q, k: jnp.ones(2 * T)[q - k + T]))
    call(mod(lambda b, h, q, k: jnp.ones(2 * T)[q - k]))
    call(mod(lambda b, h, q, k: jnp.ones(T)[q - k]) | OFFSETS)
    by_distance = mod(lambda b, h, q, k: TABLE[q - k])
    call(recipes.sliding_window(39) | by_distance)
    call(recipes.documents(jnp.arange(T) // 28) | by_distance)


def test_indices_that_were_looked_up_are_no_error():
    call(mod(lambda b, h, q, k: HEADS[jnp.zeros(T, int)[k]]))


# Positions that other masks hide ------------------------------------------------------

BEFORE = np.arange(T) < 40
# Each hides all queries and keys from position 40 on.
HIDING = {
    "FunctionMask": mask(lambda b, h, q, k: (q < 40) & (k < 40)),
    "LengthMask": {"mask": LengthMask(40, 40)},
    "array": {"mask": BEFORE[:, None] & BEFORE},
    "not": {"mask": ~FunctionMask(lambda b, h, q, k: (q >= 40) | (k >= 40))},
    "or": {"mask": LengthMask(40, 40) | FunctionMask(lambda b, h, q, k: q + k < 5)},
}
HIDING["lengths"] = {
    "key_value_seq_lengths": jnp.array([40, 3]),
    "query_seq_lengths": jnp.array([40, 20]),
}
HIDING["segments"] = {
    "query_segment_ids": jnp.where(BEFORE, 0, 1),
    "key_value_segment_ids": jnp.where(BEFORE, 0, 2),
}
HIDING["with a window"] = HIDING["LengthMask"] | {
    "is_causal": True,
    "local_window_size": 9,
}


@pytest.mark.core
@pytest.mark.parametrize("name", HIDING)
def test_other_masks_may_hide_missing_entries_of_a_score_mod(name):
    call(HIDING[name] | mod(lambda b, h, q, k: TABLE[q] + TABLE[k]))


@pytest.mark.core
@pytest.mark.parametrize("name", HIDING)
def test_other_masks_may_hide_missing_entries_of_a_part_of_the_mask(name):
    hiding = HIDING[name].get("mask", CausalMask())
    if not isinstance(hiding, Mask):
        hiding = ArrayMask(hiding)
    reading = FunctionMask(lambda b, h, q, k: TABLE[q] < TABLE[k])

    call(HIDING[name] | {"mask": reading & hiding})


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("FunctionMask", "xla"),
        core("FunctionMask", "blockwise"),
        ("lengths", "xla"),
        ("lengths", "blockwise"),
    ],
)
def test_missing_entries_of_hidden_positions_change_nothing(name, implementation):
    """Output and gradients are the same as with a longer table; its other entries get
    no gradient.
    """
    x = jax.random.normal(jax.random.key(0), (B, T, N, 4))
    table = jax.random.normal(jax.random.key(1), (T,))
    queries = jnp.cos(jnp.arange(40.0))
    attend = functools.partial(
        dot_product_attention, implementation=implementation, **HIDING[name]
    )

    def loss(x, table):
        product = mod(lambda b, h, q, k: table[k] * queries[q])
        output = attend(x, x, x, **product)
        return (output**2).sum(), output

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, output), (d_x, d_table) = run(x, table[:40])
    (_, expected), (want_x, want_table) = run(x, table)

    np.testing.assert_array_equal(output, expected)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    assert_close(d_x, want_x)
    assert_close(d_table, want_table[:40])
    np.testing.assert_array_equal(want_table[40:], 0)
    assert np.abs(d_table).max() > 0.01


@pytest.mark.core
@pytest.mark.parametrize(
    "causal",
    [{"is_causal": True}, {"mask": CausalMask()}, {"local_window_size": (None, 0)}],
)
def test_keys_without_queries_are_not_looked_up(causal):
    arguments = mod(lambda b, h, q, k: TABLE[k])
    short = jax.ShapeDtypeStruct((B, 40, N, 4), jnp.float32)

    call(arguments | causal, short)
    refused("kv_idx = 40", call, arguments | causal | {"query_offset": 1}, short)
    refused("kv_idx = 55", call, arguments, short)


@pytest.mark.core
def test_no_key_is_looked_up_without_queries():
    empty = jax.ShapeDtypeStruct((B, 0, N, 4), jnp.float32)
    call(mod(lambda b, h, q, k: TABLE[k]), empty, empty)


@pytest.mark.core
def test_heads_and_keys_are_checked_if_the_query_offset_is_unknown():
    def run(of, **arguments):
        def attend(x, offset):
            added = mod(of)
            return dot_product_attention(
                x, x, x, query_offset=offset, **added, **arguments
            )

        jax.eval_shape(attend, X, LENGTH)

    # Causality may hide any key. Without it, the last key is visible for sure.
    run(lambda b, h, q, k: TABLE[q] + TABLE[k], is_causal=True)
    refused("kv_idx = 55", run, lambda b, h, q, k: TABLE[k])

    def causal_heads(b, h, q, k):
        return jnp.where(q >= k, HEADS[h], 0.0)

    refused("h = 7", run, causal_heads, is_causal=True)


# Caches -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, core((6, 0))])
def test_a_cache_may_be_longer_than_a_table(window):
    """Positions are checked if the index is known; otherwise tokens without an entry
    return NaN.
    """
    x = jnp.ones((B, 1, N, 4))
    attend = functools.partial(cached_attention, local_window_size=window)
    cache = KVCache.create(B, 99, N, 4, window=window and window[0], per_row=True)
    _, cache = attend(x, x, x, cache, lengths=[0, 1])

    def step(x, cache):
        added = mod(lambda b, h, q, k: jnp.ones(3)[k] + jnp.ones(3)[q])
        return attend(x, x, x, cache, **added)

    for last in range(4):
        output, cache = jax.jit(step)(x, cache)
        is_nan = np.isnan(output)
        has_no_entry = np.array([last, last + 1]) >= 3
        np.testing.assert_array_equal(is_nan.any(axis=(1, 2, 3)), has_no_entry)
        np.testing.assert_array_equal(is_nan.all(axis=(1, 2, 3)), has_no_entry)
    refused("must not index arrays out of bounds", step, x, cache)


@pytest.mark.core
def test_all_new_tokens_of_a_sequence_need_an_entry():
    """Its padding needs none."""
    x = jnp.ones((2, 2, N, 4))
    cache = KVCache.create(2, 99, N, 4, per_row=True).update(x, x)
    three_queries = mod(lambda b, h, q, k: jnp.ones(3)[q])
    step = functools.partial(cached_attention, **three_queries)
    traced = jax.jit(step)

    # New tokens at positions 2 and 3 of the first sequence, and at 2 of the second.
    output, _ = traced(x, x, x, cache, lengths=jnp.array([2, 1]))
    is_nan = np.isnan(output).any(axis=(2, 3))
    np.testing.assert_array_equal(is_nan, [[True, True], [False, False]])
    refused("q_idx = 3", step, x, x, x, cache, lengths=[2, 1])

    expected, _ = traced(x, x, x, cache, lengths=jnp.array([1, 1]))
    output, _ = step(x, x, x, cache, lengths=[1, 1])
    np.testing.assert_allclose(output, expected, rtol=1e-6)


@pytest.mark.parametrize("window", [None, core((6, 0))])
def test_other_masks_may_hide_slots_of_a_cache(window):
    tokens = jax.random.normal(jax.random.key(0), (B, 5, N, 4))
    x = tokens[:, :1]
    table = jnp.cos(jnp.arange(9.0))
    first_keys = mask(lambda b, h, q, k: k < 3)
    cache = KVCache.create(B, 9, N, 4, window=window and window[0])
    cache = cache.update(tokens, tokens)

    def step(cache, table):
        added = mod(lambda b, h, q, k: table[k])
        output, _ = cached_attention(
            x, x, x, cache, **added, **first_keys, local_window_size=window
        )
        return output

    expected = jax.jit(step)(cache, table)
    for run in (jax.jit(step), step):
        output = run(cache, table[:3])
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


# Callers ------------------------------------------------------------------------------

OF_16_HEADS = recipes.alibi(2 * N)
refused_for_its_heads = functools.partial(
    refused, "created for 16 heads, but the call has 8"
)


def test_modules_refuse_a_recipe_of_other_heads():
    inputs = jnp.ones((B, 5, 32))

    def run(module):
        return module(inputs, **OF_16_HEADS)

    module = MultiHeadAttention(N, 32, decode=False, rngs=nnx.Rngs(0))
    refused_for_its_heads(jax.eval_shape, run, module)
    decoding = nnx.view(module, decode=True, batch_size=B, max_length=9)
    refused_for_its_heads(jax.eval_shape, run, decoding)
    init = linen.MultiHeadAttention(N).init_with_output
    refused_for_its_heads(init, jax.random.key(0), inputs, **OF_16_HEADS)


def test_functions_refuse_a_recipe_of_other_heads():
    x = jnp.ones((B, 5, N, 4))
    cache = KVCache.create(B, 9, N, 4, jnp.int8, per_row=True)
    decode = functools.partial(cached_attention, x, x, x, **OF_16_HEADS)
    refused_for_its_heads(jax.eval_shape, decode, cache)
    refused_for_its_heads(explain_implementation, x, x, x, **OF_16_HEADS)


def test_vmap_over_heads_leaves_one_head():
    x = jnp.ones((B, 5, N, 1, 4))
    attend = functools.partial(dot_product_attention, **recipes.alibi(N))
    over_heads = jax.vmap(attend, 2, 2)
    message = "created for 8 heads, but the call has 1"
    refused(message, jax.eval_shape, over_heads, x, x, x)


def test_a_mask_with_a_short_table_is_still_drawn():
    assert str(FunctionMask(lambda b, h, q_idx, kv_idx: jnp.ones(2, bool)[kv_idx]))
