"""The gallery: each recipe equals its dense formula, in output and every gradient, those of captured arrays too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, recipes
from flax_mha.conformance import reference

B, N, K, H, S = 2, 6, 2, 8, 67
row, column = np.arange(S)[:, None], np.arange(S)[None, :]
CAUSAL = column <= row
rng = np.random.default_rng(0)
IDS = np.sort(rng.integers(0, 4, (B, S)), -1)
BLOCKS = rng.random((N, 9, 9)) < 0.4
TABLE = rng.standard_normal((12, N)).astype(np.float32)
SINKS = rng.standard_normal(N).astype(np.float32)
SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])  # of six heads: those of four, and every second one of eight


def t5_buckets(distance, buckets=12):
    """Raffel et al.: exact up to half of the buckets, then logarithmic up to the largest distance, 40 here."""
    exact, distance = buckets // 2, np.maximum(distance, 0)
    large = exact + (np.log(np.maximum(distance, 1) / exact) / np.log(40 / exact) * (buckets - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(large, buckets - 1))


BUCKETS = {
    "T5 bias": t5_buckets(row - column),
    "T5 bias of an encoder": t5_buckets(abs(row - column), 6) + 6 * (column > row),
}
PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 1, 0, 2, 3]])
TREES = np.stack([CAUSAL & (column < S - 7)] * B)
for tree, parents in zip(TREES, PARENTS + S - 7, strict=True):
    for i, parent in enumerate(parents, S - 7):
        tree[i] |= (column[0] == i) | (tree[parent] if parent >= S - 7 else False)

# how to make it (of what is learned), what is learned, and the arguments of the dense formula
RECIPES = {
    "causal": (recipes.causal, None, {"mask": CAUSAL}),
    "sliding window": (lambda: recipes.sliding_window(9), None, {"mask": CAUSAL & (column >= row - 9)}),
    "prefix-LM": (lambda: recipes.prefix_lm(20), None, {"mask": CAUSAL | (column < 20)}),
    "documents": (
        lambda: recipes.documents(jnp.asarray(IDS)),
        None,
        {"mask": CAUSAL & (IDS[:, None, :, None] == IDS[:, None, None, :])},
    ),
    "ALiBi": (
        lambda: recipes.alibi(np.int64(N)),
        None,
        {"mask": CAUSAL, "added": -SLOPES[:, None, None] * (row - column)},
    ),
    "T5 bias": (
        lambda table: recipes.t5_bias(table, max_distance=40),
        TABLE,
        {"mask": CAUSAL, "added": np.moveaxis(TABLE[BUCKETS["T5 bias"]], -1, 0)},
    ),
    "T5 bias of an encoder": (
        lambda table: recipes.t5_bias(table, max_distance=40, bidirectional=True),
        TABLE,
        {"mask": np.ones_like(CAUSAL), "added": np.moveaxis(TABLE[BUCKETS["T5 bias of an encoder"]], -1, 0)},
    ),
    "soft cap": (lambda: recipes.soft_cap(1.5), None, {"mask": CAUSAL, "logits_soft_cap": 1.5}),
    "attention sinks": (
        lambda sinks: recipes.attention_sinks(sinks, 9),
        SINKS,
        {"mask": CAUSAL & (column >= row - 9), "sinks": SINKS},
    ),
    "dilated": (lambda: recipes.dilated(3), None, {"mask": CAUSAL & ((row - column) % 3 == 0)}),
    "block-sparse": (
        lambda: recipes.block_sparse(jnp.asarray(BLOCKS), 8),
        None,
        {"mask": BLOCKS[:, row // 8, column // 8]},
    ),
    "tree": (lambda: recipes.tree_causal(jnp.asarray(PARENTS), [S - 7, S - 7]), None, {"mask": TREES[:, None]}),
}


def inputs(dtype=np.float32):
    shapes = {"query": (B, S, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    generator = np.random.default_rng(1)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def run(name, implementation, inputs, cotangent, **more):
    """Output, and the gradients of query, key, value and what is learned."""
    (d_inputs, d_learned), output = jax.jit(graded(name, implementation, cotangent, **more))(inputs, RECIPES[name][1])
    grads = [d_inputs[n] for n in ("query", "key", "value")]
    return output, grads if d_learned is None else [*grads, d_learned]


def graded(name, implementation, cotangent, **more):
    """The function of the inputs and of what is learned that returns their gradients and the output."""
    make = RECIPES[name][0]

    def loss(inputs, learned):
        arguments = make() if learned is None else make(learned)
        output = dot_product_attention(**inputs, **arguments, implementation=implementation, **more)
        return jnp.sum(output * cotangent), output

    return jax.grad(loss, (0, 1), has_aux=True)


def dense(name, inputs, cotangent, keep=None):
    arguments = RECIPES[name][2]
    arrays = {n: np.asarray(x, np.float64) for n, x in inputs.items()}
    cotangents = np.asarray(cotangent, np.float64), np.zeros((B, S, N))
    (output, _), grads = reference.attention(**arrays, **arguments, keep=keep, cotangents=cotangents)
    if "added" in arguments:
        d_added = grads.pop(0)
        if name in BUCKETS:
            d_table = np.zeros((12, N))
            np.add.at(d_table, BUCKETS[name], np.moveaxis(d_added.sum(0), 0, -1))
            grads.append(d_table)
    return output, grads


pytestmark = pytest.mark.usefixtures("small_tiles")


@functools.cache
def kept(rate):
    """What dropout multiplies the weights with: it shows in the output when the values are the identity."""
    flat = {name: np.zeros_like(x) for name, x in inputs().items()}
    flat["value"] = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, K, S))
    shown = dot_product_attention(**flat, dropout_rate=rate, dropout_rng=jax.random.key(0), implementation="xla")
    return (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (1 - rate)


IN_TURNS = [(name, ("xla", "blockwise")[i % 2]) for i, name in enumerate(RECIPES)]


@pytest.mark.parametrize(
    ("name", "implementation", "rate"),
    [
        *(
            pytest.param(name, implementation, 0.0, marks=pytest.mark.core)
            for name, implementation in itertools.product(RECIPES, ("xla", "blockwise"))
        ),
        *((name, implementation, 0.25) for name, implementation in IN_TURNS),
    ],
)
def test_equals_its_dense_formula(name, implementation, rate):
    """To 1e-5 relative; with dropout too."""
    arrays, cotangent = inputs(), rng.standard_normal((B, S, N, H)).astype(np.float32)
    drop = {"dropout_rate": rate, "dropout_rng": jax.random.key(0)}
    output, grads = run(name, implementation, arrays, cotangent, **drop)
    want, want_grads = dense(name, arrays, cotangent, kept(rate) if rate else None)
    for got, expected in zip((output, *grads), (want, *want_grads), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_recipes_combine():
    """Masks by &, score functions in order, all else as it is."""
    mods = [
        lambda score, b, h, q_idx, kv_idx: score * 2,
        lambda score, b, h, q_idx, kv_idx: score + kv_idx.astype(score.dtype),
    ]
    parts = [{"score_mod": mods[0]}, recipes.sliding_window(9), recipes.alibi(N), recipes.soft_cap(1.5)]
    parts += [recipes.documents(jnp.asarray(IDS)), {"score_mod": mods[1]}]
    got = dot_product_attention(**inputs(), **recipes.combine(*parts))
    mask = CAUSAL & (column >= row - 9) & (IDS[:, None, :, None] == IDS[:, None, None, :])
    alibi = recipes.alibi(N)["score_mod"]
    score_mod = lambda score, *place: mods[1](alibi(mods[0](score, *place), *place), *place)  # noqa: E731
    want = dot_product_attention(**inputs(), mask=mask, logits_soft_cap=1.5, score_mod=score_mod)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert recipes.combine() == {}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([recipes.soft_cap(3.0), recipes.soft_cap(5.0)], "logits_soft_cap must be in one of the recipes only, .* in 2"),
        ([recipes.causal(), recipes.causal()["mask"]], r'a recipe must be a dict of arguments, such as {"mask": mask}'),
    ],
)
def test_what_does_not_combine(parts, message):
    with pytest.raises(ValueError, match=message):
        recipes.combine(*parts)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 2, 0], r"parents must come before their tokens, but got \[-1, 2, 0\]"),
        (3, r"parents must be \[T\] or \[B, T\] and index \[\] or \[B\], but got \(\) and \(\)"),
        ([0.0], "parents must be integers"),
    ],
)
def test_a_tree_that_is_none(parents, message):
    with pytest.raises(ValueError, match=message):
        recipes.tree_causal(parents)


@pytest.mark.parametrize(("name", "implementation"), IN_TURNS)
def test_bfloat16_by_the_rule_of_flash_attention(name, implementation):
    """At most twice the error of the dense formula with its scores and weights in bfloat16, plus one rounding."""
    arrays = inputs(jnp.bfloat16)
    arguments = RECIPES[name][2]

    def naive(query, key, value):
        key, value = (jnp.repeat(x, N // K, 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.asarray(np.sqrt(H), jnp.bfloat16)
        if cap := arguments.get("logits_soft_cap"):
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(arguments["mask"], scores + jnp.asarray(arguments.get("added", 0.0), jnp.bfloat16), -jnp.inf)
        sink = jnp.asarray(arguments.get("sinks", np.full(N, -np.inf)), jnp.bfloat16)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], (B, N, S, 1))], -1)
        weights = jnp.nan_to_num(jax.nn.softmax(scores))[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        simple = naive(**jax.tree.map(jnp.asarray, arrays))
    gradient = graded(name, implementation, jnp.ones((B, S, N, H), jnp.bfloat16))
    output = jax.jit(lambda *arguments: gradient(*arguments)[1])(arrays, RECIPES[name][1])  # traced, but not compiled
    truth, _ = dense(name, arrays, np.ones((B, S, N, H)))
    error, naive_error = (np.abs(np.float64(x) - truth).max() for x in (output, simple))
    assert error <= 2 * naive_error + float(jnp.finfo(jnp.bfloat16).eps) * np.abs(truth).max()


@pytest.mark.parametrize("name", ["T5 bias", "attention sinks", "block-sparse"])
def test_under_jit_vmap_and_remat(name):
    make, learned, _ = RECIPES[name]
    arrays = inputs()
    attend = lambda inputs, learned: dot_product_attention(  # noqa: E731
        **inputs, **(make() if learned is None else make(learned)), implementation="blockwise"
    )
    want = np.asarray(attend(arrays, learned))
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(jax.jit(attend)(arrays, learned), want, **close)
    pair = jax.tree.map(lambda x: np.stack([x, x[::-1]]), arrays)
    np.testing.assert_allclose(np.asarray(jax.vmap(attend, (0, None))(pair, learned))[1], want[::-1], **close)
    gradient, again = (
        jax.jit(jax.grad(lambda inputs, f=f: jnp.sum(jnp.sin(f(inputs, learned)))))(arrays)
        for f in (attend, jax.checkpoint(attend))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), gradient, again)


@pytest.mark.parametrize("name", RECIPES)
def test_memory_at_16k(name, monkeypatch):
    """Of the gradient: at most 1/20 of the dense computation's temporaries, and no array that has both lengths."""
    monkeypatch.undo()
    length, heads = 16384, 4
    x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    fixed = {
        "documents": lambda: recipes.documents(jnp.arange(length) // 1024),
        "ALiBi": lambda: recipes.alibi(heads),
        "T5 bias": lambda: recipes.t5_bias(jnp.ones((32, heads))),
        "T5 bias of an encoder": lambda: recipes.t5_bias(jnp.ones((32, heads)), bidirectional=True),
        "attention sinks": lambda: recipes.attention_sinks(jnp.ones(heads)),
        "block-sparse": lambda: recipes.block_sparse(jnp.asarray(rng.random((heads, 32, 32)) < 0.2), 512),
    }
    make = fixed.get(name, RECIPES[name][0])

    def loss(query, key, value):
        return dot_product_attention(query, key, value, **make()).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x)
    assert "16384x16384" not in lowered.as_text()
    dense_bytes = heads * length**2 * 4 * 2  # scores, and the weights' cotangent
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= dense_bytes / 20
