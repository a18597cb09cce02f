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


SHIFTED_WINDOW = {"local_window_size": 3, "key_value_offset": -9}
OFFSETS = {"query_offset": [0, 5], "key_value_offset": [0, 5], "is_causal": True}
REFUSED = {
    "heads": (
        mod(lambda b, h, q, k: HEADS[h]),
        r"<lambda> .* h = 7, .* index 7 on axis 0 .* \(4,\); .* at least 8,",
    ),
    "unsigned": (
        mod(lambda b, h, q, k: HEADS[h.astype(jnp.uint8)]),
        "h = 7, it uses index 7",
    ),
    "alibi": (
        recipes.alibi(4),
        "score_mod alibi.score_mod was created for 4 heads, but the call has 8",
    ),
    "alibi of more heads": (
        recipes.alibi(16),
        "created for 16 heads, but the call has 8",
    ),
    "combined": (
        recipes.combine(mod(lambda b, h, q, k: 0.0), recipes.alibi(16)),
        "16 heads, but the call has 8",
    ),
    "t5_bias": (
        recipes.t5_bias(jnp.zeros((32, 4))),
        "t5_bias.score_mod .* 4 heads, but the call has 8",
    ),
    "block_sparse, heads": (
        recipes.block_sparse(jnp.ones((16, 7, 7), bool), 8),
        "mask_mod .* for 16 heads, but .* 8",
    ),
    "block_diffusion": (
        recipes.block_diffusion(27, 3),
        "created for 54 query positions, but the call has 56",
    ),
    "neighborhood": (
        recipes.neighborhood(5, 11, 3),
        "neighborhood.visible .* 55 query positions, but the call has 56",
    ),
    "shifted_windows": (
        recipes.shifted_windows(jnp.ones((9, 4)), 8, 8, 2),
        "created for 4 heads, but",
    ),
    "sliding_tiles": (
        recipes.sliding_tiles((1, 5, 11), (1, 1, 1), (1, 3, 3)),
        "created for 55 query positions, but",
    ),
    "forgetting, heads": (
        recipes.forgetting(jnp.zeros((B, T, 4))),
        "created for 4 heads, but the call has 8",
    ),
    "forgetting, batch": (
        recipes.forgetting(jnp.zeros((T, 8))),
        "created for 1 batch entries, but the call has 2",
    ),
    "forgetting": (
        recipes.forgetting(jnp.zeros((B, 55, 8))),
        "forgetting.score_mod .* for 55 query positions, but",
    ),
    "relative_terms": (
        recipes.relative_terms(jnp.zeros((B, 8, 55, 9))),
        "created for 55 query positions, but",
    ),
    "relative_terms, heads": (
        recipes.relative_terms(jnp.zeros((B, 9, T, 9))),
        "created for 9 heads, but",
    ),
    "tree_causal": (
        recipes.tree_causal([-1, 0, 1], 52),
        "created for 55 query positions, but the call has 56",
    ),
    "tree_causal, batch": (
        recipes.tree_causal([[-1, 0, 1]] * 3, 53),
        "for 3 batch entries, but the call has 2",
    ),
    "block_sparse, blocks": (
        recipes.block_sparse(jnp.ones((8, 7, 6), bool), 8),
        "created for 48 key positions, but",
    ),
    "batch": (
        mod(lambda b, h, q, k: jnp.ones((1, 8))[b, h]),
        r"b = 1, .* axis 0 .*\(1, 8\)",
    ),
    "one by one": (
        mod(lambda b, h, q, k: jnp.ones((8, 40))[h][q]),
        r"q_idx = 55, .* axis 0 .*\(40,\)",
    ),
    "partial": (
        {"score_mod": functools.partial(partial, table=HEADS)},
        "score_mod partial .*h",
    ),
    "nested jit": (
        mod(jax.jit(lambda b, h, q, k: jax.jit(lambda i: HEADS[i])(h))),
        "h = 7",
    ),
    "dynamic_index": (
        mod(lambda b, h, q, k: jax.lax.dynamic_index_in_dim(HEADS, h, keepdims=False)),
        "h = 7",
    ),
    "a condition on others": (
        mod(lambda b, h, q, k: jnp.where(k < q, HEADS[h], 0.0)),
        "h = 7",
    ),
    "in a part of a mask": (
        {"mask": CausalMask() & ~FunctionMask(lambda b, h, q, k: TABLE[k] > 0)},
        "kv_idx = 55",
    ),
    "in a part of a mask, or": (
        {"mask": CausalMask() | FunctionMask(lambda b, h, q, k: TABLE[k] > 0)},
        "kv_idx = 55",
    ),
    "two masks": (
        recipes.combine(
            recipes.sliding_window(3), mask(lambda b, h, q, k: TABLE[k] > 0)
        ),
        "k.* 55",
    ),
    "last query with a key": (
        mod(lambda b, h, q, k: TABLE[q]) | SHIFTED_WINDOW,
        "q_idx = 49",
    ),
    "bias": (
        mod(lambda b, h, q, k: TABLE[k])
        | {"bias": np.where(np.arange(T) < 40, 0.0, -np.inf)},
        "kv_idx = 55",
    ),
    "heads, other masks": (
        recipes.documents(jnp.arange(T) // 28) | mod(lambda b, h, q, k: HEADS[h]),
        "h = 7",
    ),
    "batch, lengths": (
        mod(lambda b, h, q, k: TABLE[k] + jnp.ones(1)[b])
        | {"key_value_seq_lengths": 40},
        "b = 1",
    ),
    "offsets of each sequence": (
        mod(lambda b, h, q, k: jnp.ones(60)[q]) | OFFSETS,
        "q_idx = 60",
    ),
    "offset": (
        mod(lambda b, h, q, k: jnp.ones(T)[q]) | {"query_offset": 3},
        r"q_idx = 58, .* at least 59",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arguments, message = REFUSED[name]
    refused(message, call, arguments)


# test_recipes.py calls every recipe with the size that it was created for.
KEPT = {
    "in range": mod(lambda b, h, q, k: jnp.ones((2, 8))[b, h] + jnp.ones((T, T))[q, k]),
    "clip": mod(
        lambda b, h, q, k: TABLE[jnp.clip(k, 0, 39)] + HEADS[h % 4] + HEADS[h // 2]
    ),
    "negative": mod(lambda b, h, q, k: jnp.ones(8)[h - 8] + TABLE[-1]),
    "condition": mod(lambda b, h, q, k: jnp.where((k < 40) & (q >= k), TABLE[k], 0.0)),
    "condition of an array": mod(
        lambda b, h, q, k: jnp.where(k < LENGTH, TABLE[k], 0.0)
    ),
    "product": mod(lambda b, h, q, k: TABLE[k] * (k < 40).astype(jnp.float32)),
    "and": mask(lambda b, h, q, k: (k < 40) & (TABLE[k] > 0)),
    "or": mask(lambda b, h, q, k: (k >= LENGTH) | (TABLE[k] > 0)),
    "branch": mod(
        lambda b, h, q, k: jax.lax.cond(
            k < LENGTH, lambda x: x, jnp.zeros_like, TABLE[k]
        )
    ),
    "fill": mod(lambda b, h, q, k: TABLE.at[k].get(mode="fill", fill_value=0.0)),
    "take": mod(lambda b, h, q, k: jnp.take(TABLE, k, mode="clip")),
    "constant": mod(lambda b, h, q, k: TABLE[39] + TABLE[-40]),
    "constant under a condition": mod(
        lambda b, h, q, k: jnp.where(
            k == 60, TABLE[50], jnp.where(q < LENGTH, TABLE[50], 0.0)
        )
    ),
    "distance of each sequence": mod(lambda b, h, q, k: jnp.ones(T)[q - k]) | OFFSETS,
    "limited to a type": mod(
        lambda b, h, q, k: jnp.ones(256)[(1000 * h + k).astype(jnp.uint8)]
    ),
    "no position itself": mod(
        lambda b, h, q, k: (
            TABLE[abs(q - k)] + HEADS[-1 - h] + TABLE[h * 40 + k] + TABLE[50]
        )
    ),
    "another position under a condition": mod(
        lambda b, h, q, k: TABLE[jnp.where(k < 40, k, 0)]
    ),
    "negative under a condition": mod(
        lambda b, h, q, k: TABLE[jnp.where(k % 2 == 0, -1, k % 40)]
    ),
    "distance": mod(lambda b, h, q, k: jnp.ones(2 * T)[q - k + T]),
    "distance from the end": mod(lambda b, h, q, k: jnp.ones(2 * T)[q - k]),
    "distance in a window": recipes.sliding_window(39)
    | mod(lambda b, h, q, k: TABLE[q - k]),
    "distance in documents": recipes.documents(jnp.arange(T) // 28)
    | mod(lambda b, h, q, k: TABLE[q - k]),
    "vmap": mod(
        lambda b, h, q, k: jax.vmap(lambda row: row[h])(jnp.ones((3, 8))).sum()
    ),
    "of what was looked up": mod(lambda b, h, q, k: HEADS[jnp.zeros(T, int)[k]]),
}
BEFORE = np.arange(T) < 40
HIDING = {
    "FunctionMask": mask(lambda b, h, q, k: (q < 40) & (k < 40)),
    "LengthMask": {"mask": LengthMask(40, 40)},
    "lengths": {
        "key_value_seq_lengths": jnp.array([40, 3]),
        "query_seq_lengths": jnp.array([40, 20]),
    },
    "segments": {
        "query_segment_ids": jnp.where(BEFORE, 0, 1),
        "key_value_segment_ids": jnp.where(BEFORE, 0, 2),
    },
    "array": {"mask": BEFORE[:, None] & BEFORE},
    "with a window": {
        "mask": LengthMask(40, 40),
        "is_causal": True,
        "local_window_size": 9,
    },
    "not": {"mask": ~FunctionMask(lambda b, h, q, k: (q >= 40) | (k >= 40))},
    "or": {"mask": LengthMask(40, 40) | FunctionMask(lambda b, h, q, k: q + k < 5)},
}


@pytest.mark.core
@pytest.mark.parametrize("name", HIDING)
def test_other_masks_may_hide_missing_entries(name):
    """Those of a `score_mod`, and of another function in the mask."""
    call(HIDING[name] | mod(lambda b, h, q, k: TABLE[q] + TABLE[k]))
    given = HIDING[name].get("mask", CausalMask())
    given = given if isinstance(given, Mask) else ArrayMask(given)
    call(
        HIDING[name]
        | {"mask": FunctionMask(lambda b, h, q, k: TABLE[q] < TABLE[k]) & given}
    )


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

    def loss(x, table):
        product = mod(lambda b, h, q, k: table[k] * queries[q])
        output = dot_product_attention(
            x, x, x, **product, **HIDING[name], implementation=implementation
        )
        return (output**2).sum(), output

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, output), (d_x, d_table) = run(x, table[:40])
    (_, expected), (want_x, want_table) = run(x, table)
    np.testing.assert_array_equal(output, expected)
    for got, want in ((d_x, want_x), (jnp.pad(d_table, (0, T - 40)), want_table)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(want_table[40:], 0)
    assert np.abs(d_table).max() > 0.01


@pytest.mark.parametrize("name", KEPT)
def test_not_refused(name):
    call(KEPT[name])


@pytest.mark.core
def test_keys_without_queries_are_not_looked_up():
    arguments = mod(lambda b, h, q, k: TABLE[k])
    short = jax.ShapeDtypeStruct((B, 40, N, 4), jnp.float32)
    for causal in (
        {"is_causal": True},
        {"mask": CausalMask()},
        {"local_window_size": (None, 0)},
    ):
        call(arguments | causal, short)
        refused("kv_idx = 40", call, arguments | causal | {"query_offset": 1}, short)
    refused("kv_idx = 55", call, arguments, short)
    empty = jax.ShapeDtypeStruct((B, 0, N, 4), jnp.float32)
    call(arguments, empty, empty)


@pytest.mark.core
def test_unknown_positions():
    """Heads are checked all the same."""

    def run(of, **arguments):
        jax.eval_shape(
            lambda x, i: dot_product_attention(
                x, x, x, query_offset=i, **mod(of), **arguments
            ),
            X,
            LENGTH,
        )

    run(lambda b, h, q, k: TABLE[q] + TABLE[k], is_causal=True)
    refused("kv_idx = 55", run, lambda b, h, q, k: TABLE[k])
    refused(
        "h = 7",
        run,
        lambda b, h, q, k: jnp.where(q >= k, HEADS[h], 0.0),
        is_causal=True,
    )


@pytest.mark.parametrize("window", [None, core(6)])
def test_a_cache_may_be_longer_than_a_table(window):
    """Positions are checked if the index is known; otherwise tokens without an entry
    return NaN.
    """
    x = jnp.ones((B, 1, N, 4))

    def step(x, cache):
        added = mod(lambda b, h, q, k: jnp.ones(3)[k] + jnp.ones(3)[q])
        return cached_attention(
            x, x, x, cache, **added, local_window_size=window and (window, 0)
        )

    cache = KVCache.create(B, 99, N, 4, window=window, per_row=True)
    _, cache = cached_attention(
        x, x, x, cache, lengths=[0, 1], local_window_size=window and (window, 0)
    )
    for last in range(4):
        output, cache = jax.jit(step)(x, cache)
        positions = np.array([last, last + 1])
        np.testing.assert_array_equal(
            np.isnan(output).any(axis=(1, 2, 3)), positions >= 3
        )
        np.testing.assert_array_equal(
            np.isnan(output).all(axis=(1, 2, 3)), positions >= 3
        )
    refused("must not index arrays out of bounds", step, x, cache)


@pytest.mark.core
def test_all_new_tokens_of_a_sequence_need_an_entry():
    """Its padding needs none."""
    x = jnp.ones((2, 2, N, 4))
    cache = KVCache.create(2, 99, N, 4, per_row=True).update(x, x)
    step = jax.jit(
        functools.partial(cached_attention, **mod(lambda b, h, q, k: jnp.ones(3)[q]))
    )
    # At positions 2 and 3, and at 2.
    output, _ = step(x, x, x, cache, lengths=jnp.array([2, 1]))
    np.testing.assert_array_equal(
        np.isnan(output).any(axis=(2, 3)), [[True, True], [False, False]]
    )
    expected, _ = step(x, x, x, cache, lengths=jnp.array([1, 1]))
    output, _ = step.__wrapped__(x, x, x, cache, lengths=[1, 1])
    np.testing.assert_allclose(output, expected, rtol=1e-6)
    refused("q_idx = 3", step.__wrapped__, x, x, x, cache, lengths=[2, 1])


@pytest.mark.parametrize("window", [None, core(6)])
def test_other_masks_may_hide_slots_of_a_cache(window):
    tokens = jax.random.normal(jax.random.key(0), (B, 5, N, 4))
    x = tokens[:, :1]
    table = jnp.cos(jnp.arange(9.0))
    given = mask(lambda b, h, q, k: k < 3) | {
        "local_window_size": window and (window, 0)
    }

    def step(cache, table):
        return cached_attention(
            x, x, x, cache, **mod(lambda b, h, q, k: table[k]), **given
        )[0]

    cache = KVCache.create(B, 9, N, 4, window=window).update(tokens, tokens)
    expected = jax.jit(step)(cache, table)
    for output in (jax.jit(step)(cache, table[:3]), step(cache, table[:3])):
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


def test_a_recipe_of_other_heads_is_refused_by_every_caller():
    x = jnp.ones((B, 5, N, 4))
    cache = KVCache.create(B, 9, N, 4, jnp.int8, per_row=True)
    inputs = jnp.ones((B, 5, 32))
    arguments = recipes.alibi(2 * N)
    module = MultiHeadAttention(N, 32, decode=False, rngs=nnx.Rngs(0))
    decoding = nnx.view(module, decode=True, batch_size=B, max_length=9)
    attend = functools.partial(dot_product_attention, **arguments)
    for run in (
        lambda: jax.eval_shape(lambda module: module(inputs, **arguments), module),
        lambda: jax.eval_shape(lambda module: module(inputs, **arguments), decoding),
        lambda: linen.MultiHeadAttention(N).init_with_output(
            jax.random.key(0), inputs, **arguments
        ),
        lambda: jax.eval_shape(
            lambda cache: cached_attention(x, x, x, cache, **arguments), cache
        ),
        lambda: jax.eval_shape(jax.vmap(attend), x, x, x),
        lambda: jax.eval_shape(jax.grad(lambda x: attend(x, x, x).sum()), x),
        lambda: explain_implementation(x, x, x, **arguments),
    ):
        refused("created for 16 heads, but the call has 8", run)
    attend = jax.vmap(
        functools.partial(dot_product_attention, **recipes.alibi(N)), 2, 2
    )
    refused(
        "created for 8 heads, but the call has 1",
        jax.eval_shape,
        attend,
        *[x[:, :, :, None]] * 3,
    )


def test_a_mask_with_a_short_table_is_still_drawn():
    assert str(FunctionMask(lambda b, h, q_idx, kv_idx: jnp.ones(2, bool)[kv_idx]))
