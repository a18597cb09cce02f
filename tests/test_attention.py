"""Every case of the table x every implementation x {forward, gradients, jit, vmap},
against float64.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import (
    CASES,
    DROPOUT_CASES,
    Case,
    by_the_rule_of_flash_attention,
    close,
    naive_attention,
)
from marks import core, named, pairwise, with_core, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule

IMPLEMENTATIONS = ("xla", "blockwise")
KEY = jax.random.key(5)
# One for each argument, with its edges, and the ways to multiply.
CORE = named(
    """no batch axis; two batch axes; 6 query heads, 2 key heads;
    values of size 5, keys of size 8; one causal query at offset 20; causal;
    causal, 53 queries and 37 keys; causal, query offset -5;
    causal, a query offset per sequence; window of 7 to the left, 3 to the right;
    window of 2 to the right, open on the left;
    window that leaves queries without keys; a sequence of length 0; segment ids;
    mask per sequence and head; bias per head and key; soft cap; a sink per head;
    all arguments at once"""
)
# One for each way to multiply. The dtype of products is independent of the mask.
MULTIPLIED = named(
    """no batch axis; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; mask per sequence and head;
    bias per sequence and head; soft cap; a sink per head; all arguments at once"""
)
# The dense softmax makes one mask. Of masks, biases, caps and sinks its core has all
# arguments at once; test_recipes.py has each of them.
DENSE = named(
    """no batch axis; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; causal, a query offset per sequence;
    window that leaves queries without keys; all arguments at once"""
)
ALL = [*itertools.product(CASES, IMPLEMENTATIONS)]
OF_CORE = [(name, "blockwise") for name in CORE] + [(name, "xla") for name in DENSE]

pytestmark = pytest.mark.usefixtures("small_tiles")


def call(case, implementation, arrays, traced, **more):
    more = {"implementation": implementation, "return_residual": True, **more}
    return dot_product_attention(**arrays, **traced, **case.static, **more)


def gradients(case, implementation, arrays, cotangents, traced, **more):
    """The results, and all gradients. The loss ignores a log-sum-exp of -inf, so its
    cotangent is 0.

    The largest score has no effect on any gradient.
    """
    d_output, d_lse = cotangents

    def loss(arrays):
        answer = call(case, implementation, arrays, traced, **more)
        output, lse, *max_score = answer
        finite_lse = jnp.where(jnp.isfinite(lse), lse, 0)
        of_output = jnp.sum(output * d_output).astype(lse.dtype)
        of_scores = sum(map(jnp.sum, max_score))
        return of_output + of_scores + jnp.sum(finite_lse * d_lse), answer

    grads, answer = jax.grad(loss, has_aux=True)(arrays)
    # Jax sorts the names of a dict.
    return answer, [grads[name] for name in case.shapes]


def compare(
    case,
    implementation,
    arrays,
    cotangents,
    terms=None,
    eps=None,
    keep=None,
    return_max_score=False,
    **more,
):
    """Compares the results, and all gradients, with the equation in float64, and
    returns them. The tolerance is a rounding error `eps` for each of the `terms`.
    """

    @jax.jit
    def run(arrays, cotangents, traced):
        return gradients(
            case,
            implementation,
            arrays,
            cotangents,
            traced,
            return_max_score=return_max_score,
            **more,
        )

    answer, grads = run(arrays, cotangents, case.traced)

    # `keep` stands for dropout in the equation.
    arguments = dict(case.static)
    arguments.pop("dropout_rate", None)
    arguments.pop("broadcast_dropout", None)
    exact, exact_cotangents = jax.tree.map(np.float64, (arrays, cotangents))
    expected, expected_grads = reference.attention(
        **exact,
        **case.traced,
        **arguments,
        keep=keep,
        cotangents=exact_cotangents,
        return_max_score=return_max_score,
    )
    results = (*answer, *grads)
    for got, want in zip(results, (*expected, *expected_grads), strict=True):
        assert got.shape == want.shape
        rounding = eps or float(jnp.finfo(got.dtype).eps)
        tolerance = (terms or case.t + case.s) * rounding
        close(np.float64(got), want, tolerance, at_least=1.0)
    return results


@pytest.mark.parametrize(("name", "implementation"), with_core_tuples(ALL, *OF_CORE))
def test_results_and_gradients_under_jit_equal_the_equation(name, implementation):
    case = CASES[name]
    arrays = case.arrays()
    cotangents = case.cotangents()
    compare(case, implementation, arrays, cotangents, return_max_score=True)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("a sequence of length 0", "blockwise"),
        ("one causal query at offset 20", "blockwise"),
        ("6 query heads, 2 key heads", "xla"),
        ("6 query heads, 2 key heads", "blockwise"),
        core("all arguments at once", "xla"),
        core("all arguments at once", "blockwise"),
    ],
)
def test_vmap_is_a_loop(name, implementation):
    """Each result equals the equation for its own arrays."""
    case = CASES[name]
    entries = (case.arrays(0), case.arrays(7))
    stacked = jax.tree.map(lambda *pair: np.stack(pair), *entries)

    @jax.jit
    @jax.vmap
    def mapped(arrays):
        return call(case, implementation, arrays, case.traced)

    together = jax.device_get(mapped(stacked))

    tolerance = (case.t + case.s) * np.finfo(np.float32).eps
    for i, arrays in enumerate(entries):
        alone = reference.attention(**arrays, **case.traced, **case.static)
        for got, want in zip(together, alone, strict=True):
            close(got[i], want, tolerance, at_least=1.0)


WITH_DROPOUT = with_core_tuples(
    itertools.product(DROPOUT_CASES, IMPLEMENTATIONS),
    ("dropout", "xla"),
    ("dropout, everything", "blockwise"),
)


def kept_weights(case, arrays):
    """1 / (1 - rate) for kept weights, otherwise 0: with the identity matrix as values,
    the output is the weights.
    """
    rate = case.static["dropout_rate"]
    num_kv_heads = case.shapes["key"][-2]
    identity = np.eye(case.s, dtype=np.float32)[:, None]
    identity = np.broadcast_to(identity, (*case.batch, case.s, num_kv_heads, case.s))
    arrays = arrays | {"value": identity}
    weights, _ = call(case, "xla", arrays, case.traced, dropout_rng=KEY)
    return (np.moveaxis(np.asarray(weights), -2, -3) != 0) / (1 - rate)


@pytest.mark.parametrize(("name", "implementation"), WITH_DROPOUT)
def test_dropout_and_its_gradient_equal_the_equation(name, implementation):
    case = DROPOUT_CASES[name]
    arrays = case.arrays()
    compare(
        case,
        implementation,
        arrays,
        case.cotangents(),
        terms=(case.t + case.s) / (1 - case.static["dropout_rate"]),
        keep=kept_weights(case, arrays),
        dropout_rng=KEY,
    )


@pytest.mark.parametrize("implementation", with_core(IMPLEMENTATIONS, "xla"))
def test_results_of_float64_are_float64(implementation):
    with jax.enable_x64(True):
        case = CASES["all arguments at once"]
        arrays = case.arrays(dtype=np.float64)
        cotangents = case.cotangents(dtype=np.float64)
        for x in compare(case, implementation, arrays, cotangents):
            assert x.dtype == jnp.float64


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropout_in_float64(implementation):
    """Kept weights are divided by 1 - rate in float64."""
    attend = functools.partial(
        dot_product_attention,
        dropout_rate=0.3,
        dropout_rng=KEY,
        implementation=implementation,
    )
    with jax.enable_x64(True):
        x = np.ones((1, 1, 40, 1))
        got = jax.jit(attend)(x, x, x)
        np.testing.assert_allclose(got[got != 0], 1 / 0.7, rtol=1e-15)


@pytest.fixture
def narrow_products(monkeypatch):
    """As on accelerators: the operands of matrix products keep their 16 bits."""
    monkeypatch.setattr(schedule, "product_dtype", lambda call, tiles: call.query.dtype)


@pytest.mark.usefixtures("narrow_products")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", with_core(MULTIPLIED, "all arguments at once"))
def test_narrow_products_equal_the_equation(name, implementation):
    """Weights, and the gradients of scores, are rounded to bfloat16 before they are
    multiplied, once each.
    """
    case = CASES[name]
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in case.arrays().items()}
    d_output, _ = case.cotangents(dtype=jnp.bfloat16)
    _, d_lse = case.cotangents()
    compare(
        case,
        implementation,
        arrays,
        (d_output, d_lse),
        terms=4,
        eps=float(jnp.finfo(jnp.bfloat16).eps),
    )


LOW_PRECISION = pairwise(
    IMPLEMENTATIONS, ("bfloat16", "float16"), ("narrow", "float32")
)
LOW_PRECISION = with_core_tuples(LOW_PRECISION, ("blockwise", "float16", "narrow"))


@pytest.mark.parametrize(("implementation", "dtype", "operands"), LOW_PRECISION)
def test_low_precision_by_the_rule_of_flash_attention(
    implementation, dtype, operands, request
):
    """At most twice the error of the naive computation in the same dtype, plus one
    rounding of the result.
    """
    if operands == "narrow":
        request.getfixturevalue("narrow_products")
    case = Case(k=2, t=67, s=67, is_causal=True)
    arrays = {name: jnp.asarray(x, dtype) for name, x in case.arrays().items()}
    d_output = jnp.asarray(case.cotangents()[0], dtype)
    d_lse = np.zeros(case.output_shapes[1], np.float32)

    @jax.jit
    def run(arrays, cotangents):
        return gradients(case, implementation, arrays, cotangents, {})

    (output, lse), grads = run(arrays, (d_output, d_lse))

    attend = functools.partial(naive_attention, visible=np.tri(67, dtype=bool))
    naive, pull = jax.vjp(attend, *arrays.values())
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    (want, _), want_grads = reference.attention(
        **exact, is_causal=True, cotangents=(np.float64(d_output), d_lse)
    )
    assert lse.dtype == jnp.float32
    by_the_rule_of_flash_attention(
        (output, *grads), (naive, *pull(d_output)), (want, *want_grads)
    )
