"""Derivatives of every order, forward and reverse, are the same through tiles as
through all scores.

DERIVATIVE_CASES in the environment is a number of random calls to draw; every run has
three, which with those of `test_hessian_products_equal_finite_differences` meet each
argument of `draw`, and most pairs of them.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_fuzz
from cases import close
from flax import nnx
from marks import with_core

import flax_mha
from flax_mha import FunctionMask, dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha._src.math import tiling
from flax_mha._src.math.tiling import TileShape

if "DERIVATIVE_CASES" in os.environ:
    SEEDS = range(int(os.environ["DERIVATIVE_CASES"]))
else:
    SEEDS = (2, 4, 8)
# Relative to the largest number of an array, but at least to this.
compare = functools.partial(close, at_least=1e-2)
T = 20
S = 29


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles each way in lengths of twenty."""
    monkeypatch.setattr(
        schedule,
        "TILE_SHAPES",
        (TileShape(8, 16), TileShape(16, 8, 2), TileShape(8, 8)),
    )
    monkeypatch.setattr(tiling, "CELL", 4)


def draw(seed):
    """A random call: its structure, arrays with gradients, others, and tangents."""
    rng = np.random.default_rng(seed)

    def one_of(*options):
        return options[rng.integers(len(options))]

    def broadcast(*shape):
        sizes = [size if rng.random() < 0.6 else 1 for size in shape]
        # Leading axes may be missing.
        return tuple(sizes[rng.integers(len(shape)) :])

    structure = test_fuzz.structure_of(
        one_of,
        broadcast,
        groups=((1, 1), (1, 3), (2, 2)),
        batches=((), (2,), (2, 2)),
        lengths=((T, S), (T, T), (S, T)),
        windows=((7, 1), (None, 4), (7, None)),
    )
    learned, fixed = test_fuzz.data(structure, seed)
    tangents = {name: rng.standard_normal(x.shape) for name, x in learned.items()}
    return structure, learned, fixed, tangents


def loss_of(structure, fixed, implementation):
    def loss(learned):
        output, lse = test_fuzz.ours(structure, implementation, learned, fixed)
        finite_lse = jnp.where(jnp.isfinite(lse), lse, 0)
        total = jnp.sin(output).sum() + jnp.sin(finite_lse).sum()
        return total, (output, lse)

    return loss


def squares(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree))


def hessian_product(loss_and_aux):
    """The gradient, and its tangents."""

    def answers(x, tangents):
        gradient, product = jax.jvp(
            jax.grad(lambda x: loss_and_aux(x)[0]), (x,), (tangents,)
        )
        return {"gradient": gradient, "Hessian-vector product": product}

    return answers


def derivatives(loss_and_aux):
    """Tangents; Hessian-vector product; gradients of squared tangents, with MeanFlow's
    loss, and of a gradient.
    """

    def mean_flow(x, tangents):
        output, moved = jax.jvp(lambda x: loss_and_aux(x)[1][0], (x,), (tangents,))
        return squares(output - jax.lax.stop_gradient(moved)) + squares(moved), moved

    def answers(x, tangents):
        flow, moved = jax.grad(mean_flow, has_aux=True)(x, tangents)
        of_gradient = jax.grad(
            lambda x: squares(jax.grad(lambda x: loss_and_aux(x)[0])(x))
        )(x)
        others = {
            "tangents": moved,
            "gradient of tangents, MeanFlow": flow,
            "gradient of gradient": of_gradient,
        }
        return hessian_product(loss_and_aux)(x, tangents) | others

    return answers


def compare_with_differences(run, got, x, tangents):
    """Compares a Hessian-vector product with finite differences of the gradients that
    the same program returns.
    """

    def gradient_at(step):
        moved = jax.tree.map(lambda x, d: x + step * d, x, tangents)
        return run(moved, tangents)["gradient"]

    # H d = (g(x + e d) - g(x - e d)) / 2e
    above = gradient_at(1e-5)
    below = gradient_at(-1e-5)
    differences = jax.tree.map(lambda a, b: (a - b) / 2e-5, above, below)
    compare(got["Hessian-vector product"], differences, 1e-7)


@pytest.mark.parametrize("seed", with_core(SEEDS, *SEEDS[:1]))
def test_every_order_equals_that_of_all_scores(seed):
    """Finite differences of gradients agree, too."""
    structure, *arrays = draw(seed)
    with jax.enable_x64(True):
        learned, fixed, tangents = jax.tree.map(
            lambda x: x if x.dtype.kind in "bi" else np.float64(x), arrays
        )
        run = jax.jit(derivatives(loss_of(structure, fixed, "blockwise")))
        dense = jax.jit(derivatives(loss_of(structure, fixed, "xla")))
        got = run(learned, tangents)
        compare(got, dense(learned, tangents), 1e-9)
        compare_with_differences(run, got, learned, tangents)


@pytest.mark.parametrize("seed", [16, 36, 48])
def test_hessian_products_equal_finite_differences(seed):
    """Other pairs of arguments than above."""
    structure, learned, fixed, tangents = draw(seed)
    with jax.enable_x64(True):
        learned, tangents = jax.tree.map(jnp.float64, (learned, tangents))
        run = jax.jit(hessian_product(loss_of(structure, fixed, "blockwise")))
        compare_with_differences(run, run(learned, tangents), learned, tangents)


def inputs(*batch, t=T, n=2, h=4, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal((*batch, t, n, h)), jnp.float32)
        for _ in range(3)
    ]


def under_vmap(loss):
    return lambda x: jax.vmap(jax.hessian(lambda x: loss(x[None])))(x)


def under_scan_and_checkpoint(loss):
    def layers(x):
        # Whole steps amplify rounding.
        step = jax.checkpoint(lambda x, _: (x + 0.1 * jax.grad(loss)(x), None))
        return jnp.sin(jax.lax.scan(step, x, length=3)[0]).sum()

    return lambda x: jax.jvp(jax.grad(layers), (x,), (jnp.cos(x),))


def linearized(loss):
    def products(x):
        _, along = jax.linearize(jax.grad(loss), x)
        several = jax.vmap(along)(jnp.stack([jnp.cos(x), jnp.sin(x)]))
        return several, jax.linear_transpose(along, x)(x)

    return products


def third(loss):
    def along(f):
        return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]

    return lambda x: (along(along(jax.grad(loss)))(x), jax.grad(along(along(loss)))(x))


@pytest.mark.parametrize(
    "transformed", [under_vmap, under_scan_and_checkpoint, linearized, third]
)
def test_transformed_derivatives_equal_those_of_all_scores(transformed):
    """With ids of documents as arguments, so that the bounds of loops over tiles are
    unknown while tracing.
    """
    x = inputs(2, t=9 if transformed is under_vmap else T, n=1, h=2)[0]
    ids = jnp.arange(x.shape[1], dtype=jnp.int32) // 5

    def answers(implementation):
        def run(x, ids):
            def loss(x):
                more = {"query_segment_ids": ids, "implementation": implementation}
                output = dot_product_attention(
                    x, 2 * x, jnp.sin(x), is_causal=True, **more
                )
                return jnp.sin(output).sum()

            return transformed(loss)(x)

        return jax.jit(run)(x, ids)

    compare(answers("blockwise"), answers("xla"), 1e-4)


def test_products_in_16_bits(monkeypatch):
    """As on accelerators, where products are scaled, not queries: some roundings off
    the results of float32.
    """
    monkeypatch.setattr(schedule, "product_dtype", lambda call, tiles: call.query.dtype)

    def second(x, implementation):
        def loss(x):
            output = dot_product_attention(
                *x, is_causal=True, implementation=implementation
            )
            return jnp.sin(output).sum()

        @jax.jit
        def product(x):
            tangents = jax.tree.map(jnp.cos, x)
            return jax.jvp(jax.grad(loss), (x,), (tangents,))[1]

        return jax.device_get(product(x))

    x = [array.astype(jnp.bfloat16) for array in inputs(1, h=8)]
    wide = second([array.astype(jnp.float32) for array in x], "xla")
    close(jax.tree.map(np.float32, second(x, "blockwise")), wide, 8 * 2**-8)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_tangents_of_modules_equal_those_of_all_scores(kind):
    """The tangent of a module's call, along inputs and parameters, inside the loss of a
    training step.
    """
    x = inputs(2)[0].reshape(2, T, 8)

    def answers(implementation):
        if kind == "nnx":
            module = flax_mha.MultiHeadAttention(
                2, 8, decode=False, implementation=implementation, rngs=nnx.Rngs(0)
            )
            graph, params = nnx.split(module)

            def call(params, x):
                return nnx.merge(graph, params)(x)
        else:
            module = flax_mha.linen.MultiHeadDotProductAttention(
                num_heads=2, implementation=implementation
            )
            call = module.apply
            params = module.init(jax.random.key(0), x)

        def loss(params):
            tangents = jax.tree.map(jnp.cos, params)
            output, moved = jax.jvp(call, (params, x), (tangents, jnp.cos(x)))
            # MeanFlow's targets are tangents that get no gradient.
            target = jax.lax.stop_gradient(moved)
            return ((output - target) ** 2).sum() + jnp.sin(moved).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    # Biases of keys change nothing.
    compare(answers("blockwise"), answers("xla"), 1e-4, at_least=1.0)


def nan_programs(implementation):
    """First and second derivatives with keys masked by a function and by lengths, a
    bias and a score_mod.
    """

    @jax.jit
    def run(arrays, seen, lengths):
        def loss(arrays):
            output, lse = dot_product_attention(
                *arrays[:3],
                bias=arrays[3],
                mask=FunctionMask(
                    lambda b, h, q_idx, kv_idx: seen[kv_idx] & (q_idx % 7 != 3)
                ),
                key_value_seq_lengths=lengths,
                score_mod=lambda score, b, h, q_idx, kv_idx: score * arrays[4][kv_idx],
                implementation=implementation,
                return_residual=True,
            )
            finite_lse = jnp.where(lse == -jnp.inf, 0, lse)
            return jnp.sin(output).sum() + jnp.sin(finite_lse).sum(), output

        gradient_of = jax.grad(loss, has_aux=True)
        # Not of the arrays, whose NaN would be in their tangents, too.
        steps = [jnp.arange(x.size).reshape(x.shape).astype(x.dtype) for x in arrays]
        tangents = jax.tree.map(jnp.cos, steps)
        (gradient, output), (product, along) = jax.jvp(
            gradient_of, (arrays,), (tangents,)
        )
        of_gradient = jax.grad(lambda x: squares(gradient_of(x)[0]))(arrays)
        return output, along, gradient, product, of_gradient

    return run


def test_masked_nan_and_masked_rows():
    """In every derivative masked NaN counts as zero; visible NaN only affects the rows
    that attend to it.
    """
    arrays = [*inputs(2), jnp.ones((1, 2, 1, T)), jnp.linspace(0.5, 1.5, T)]
    seen = np.arange(T) % 4 != 1
    lengths = np.asarray([T, 11], np.int32)
    hidden = (~seen[None] | (np.arange(T)[None] >= lengths[:, None]))[..., None, None]
    run = nan_programs("blockwise")

    def filled(value):
        query, key, values, bias, factors = arrays
        return [
            jnp.where((np.arange(T) % 7 == 3)[None, :, None, None], value, query),
            jnp.where(hidden, value, key),
            jnp.where(hidden, value, values),
            jnp.where(~seen[None, None, None], value, bias),
            jnp.where(~seen, value, factors),
        ]

    want = run(filled(0.0), seen, lengths)
    got = run(filled(jnp.nan), seen, lengths)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    jax.tree.map(np.testing.assert_array_equal, got, want)

    arrays[1] = arrays[1].at[0, 4, 0, 1].set(jnp.nan)
    output, along, gradient, product, of_gradient = run(arrays, seen, lengths)
    sees = np.arange(T) % 7 != 3
    assert np.isnan(output[0, sees, 0]).all()
    for x in (output, along, gradient[0], product[0], of_gradient[0]):
        # Other queries, the other head, and the other batch entry.
        unaffected = np.concatenate([x[0, ~sees, 0], x[0, :, 1], *x[1]])
        assert np.isfinite(unaffected).all()
