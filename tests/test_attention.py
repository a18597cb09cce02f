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
from marks import named, pairwise, with_core, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule

IMPLEMENTATIONS = ("xla", "blockwise")
KEY = jax.random.key(5)
# One for each argument, with its edges, and the ways to multiply.
CORE = named("""no batch axis; two batch axes; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; causal; causal, 53 queries and 37 keys; causal, query offset -5;
    causal, a query offset per sequence; window of 7 to the left, 3 to the right;
    window of 2 to the right, open on the left; window that leaves queries without keys; a sequence of length 0;
    segment ids; mask per sequence and head; bias per head and key; soft cap; a sink per head; all arguments at once""")
# One for each way to multiply. The dtype of products is independent of the mask.
MULTIPLIED = named("""no batch axis; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; mask per sequence and head; bias per sequence and head; soft cap; a sink per head;
    all arguments at once""")
# The dense softmax makes one mask. Of masks, biases, caps and sinks its core has all
# arguments at once; test_recipes.py has each of them.
DENSE = named("""no batch axis; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; causal, a query offset per sequence; window that leaves queries without keys;
    all arguments at once""")
ALL = [*itertools.product(CASES, IMPLEMENTATIONS)]
OF_CORE = [
    case
    for case in ALL
    if case[0] in CORE and (case[1] == "blockwise" or case[0] in DENSE)
]

pytestmark = pytest.mark.usefixtures("small_tiles")


def call(case, implementation, arrays, traced, **more):
    more = {
        "implementation": implementation.split()[0],
        "return_residual": True,
        **more,
    }
    return dot_product_attention(**arrays, **traced, **case.static, **more)


def gradients(case, implementation, arrays, cotangents, traced, **more):
    """The results, and all gradients. The loss ignores a log-sum-exp of -inf, so its
    cotangent is 0.

    The largest score has no effect on any gradient.
    """

    def loss(arrays):
        output, lse, *max_score = answer = call(
            case, implementation, arrays, traced, **more
        )
        total = jnp.sum(output * cotangents[0]).astype(lse.dtype) + sum(
            map(jnp.sum, max_score)
        )
        return total + jnp.sum(
            jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1]
        ), answer

    grads, answer = jax.grad(loss, has_aux=True)(arrays)
    # Jax sorts the names of a dict.
    return answer, [grads[name] for name in case.shapes]


def compare(case, name, arrays, cotangents, terms=None, eps=None, keep=None, **more):
    """Compares the results, and all gradients, with the equation in float64. Returns
    them.
    """
    run = jax.jit(
        lambda arrays, cotangents, traced: gradients(
            case, name, arrays, cotangents, traced, **more
        )
    )
    answer, grads = run(arrays, cotangents, case.traced)
    exact, exact_cotangents = jax.tree.map(np.float64, (arrays, cotangents))
    arguments = case.static | {
        name: x for name, x in more.items() if name == "return_max_score"
    }
    for name in ("dropout_rate", "broadcast_dropout"):
        arguments.pop(name, None)
    arguments |= {"keep": keep, "cotangents": exact_cotangents}
    expected, expected_grads = reference.attention(**exact, **case.traced, **arguments)
    for got, want in zip((*answer, *grads), (*expected, *expected_grads), strict=True):
        assert got.shape == want.shape
        tolerance = (terms or case.t + case.s) * (
            eps or float(jnp.finfo(got.dtype).eps)
        )
        close(np.float64(got), want, tolerance, at_least=1.0)
    return *answer, *grads


@pytest.mark.parametrize(("name", "implementation"), with_core_tuples(ALL, *OF_CORE))
def test_forward_and_gradients_under_jit(name, implementation):
    case = CASES[name]
    compare(
        case, implementation, case.arrays(), case.cotangents(), return_max_score=True
    )


MAPPED = named("""no batch axis; a sequence of length 0; segment ids; mask per sequence and head; bias per head and key;
    one causal query at offset 20""")
MAPPED = [
    (name, IMPLEMENTATIONS[i % len(IMPLEMENTATIONS)]) for i, name in enumerate(MAPPED)
]
MAPPED_BY_BOTH = [
    *itertools.product(
        ("6 query heads, 2 key heads", "all arguments at once"), IMPLEMENTATIONS
    )
]


@pytest.mark.parametrize(
    ("name", "implementation"),
    with_core_tuples([*MAPPED, *MAPPED_BY_BOTH], *MAPPED_BY_BOTH[2:]),
)
def test_vmap_is_a_loop(name, implementation):
    """Each result equals the equation for its own arrays."""
    case = CASES[name]
    each = case.arrays(0), case.arrays(7)
    pairs = jax.tree.map(lambda *pair: np.stack(pair), *each)
    together = jax.device_get(
        jax.jit(jax.vmap(lambda a: call(case, implementation, a, case.traced)))(pairs)
    )
    for i, arrays in enumerate(each):
        alone = reference.attention(**arrays, **case.traced, **case.static)
        for got, want in zip(together, alone, strict=True):
            close(
                got[i], want, (case.t + case.s) * np.finfo(np.float32).eps, at_least=1.0
            )


WITH_DROPOUT = with_core_tuples(
    itertools.product(DROPOUT_CASES, IMPLEMENTATIONS),
    ("dropout", "xla"),
    ("dropout, everything", "blockwise"),
)


@pytest.mark.parametrize(("name", "implementation"), WITH_DROPOUT)
def test_dropout_and_its_gradient(name, implementation):
    """If the values are the identity matrix, the output shows which weights are kept."""
    case = DROPOUT_CASES[name]
    arrays = case.arrays()
    rate = case.static["dropout_rate"]
    keys = case.shapes["key"][-2]
    identity = np.broadcast_to(
        np.eye(case.s, dtype=np.float32)[:, None], (*case.batch, case.s, keys, case.s)
    )
    shown, _ = call(
        case, "xla", arrays | {"value": identity}, case.traced, dropout_rng=KEY
    )
    keep = (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (1 - rate)
    terms = (case.t + case.s) / (1 - rate)
    compare(
        case,
        implementation,
        arrays,
        case.cotangents(),
        terms,
        keep=keep,
        dropout_rng=KEY,
    )


@pytest.mark.parametrize("implementation", with_core(IMPLEMENTATIONS, "xla"))
def test_float64(implementation):
    with jax.enable_x64(True):
        case = CASES["all arguments at once"]
        arrays = case.arrays(dtype=np.float64)
        cotangents = case.cotangents(dtype=np.float64)
        assert all(
            x.dtype == jnp.float64
            for x in compare(case, implementation, arrays, cotangents)
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropout_in_float64(implementation):
    """Kept weights are divided by 1 - rate in float64."""
    with jax.enable_x64(True):
        x = np.ones((1, 1, 40, 1))
        more = {
            "dropout_rate": 0.3,
            "dropout_rng": KEY,
            "implementation": implementation,
        }
        got = jax.jit(lambda x: dot_product_attention(x, x, x, **more))(x)
        np.testing.assert_allclose(got[got != 0], 1 / 0.7, rtol=1e-15)


@pytest.fixture
def narrow_products(monkeypatch):
    """As on accelerators: the operands of matrix products keep their 16 bits."""
    monkeypatch.setattr(
        schedule, "product_dtype", lambda call, tiles: call.operands.query.dtype
    )


@pytest.mark.usefixtures("narrow_products")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", with_core(MULTIPLIED, "all arguments at once"))
def test_narrow_products(name, implementation):
    """Weights, and the gradients of scores, are rounded to bfloat16 before they are
    multiplied, once each.
    """
    case = CASES[name]
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in case.arrays().items()}
    cotangents = case.cotangents(dtype=jnp.bfloat16)[0], case.cotangents()[1]
    compare(
        case,
        implementation,
        arrays,
        cotangents,
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

    naive, pull = jax.vjp(
        functools.partial(naive_attention, visible=np.tri(67, dtype=bool)),
        *arrays.values(),
    )
    (output, lse), grads = jax.jit(
        lambda a, c: gradients(case, implementation, a, c, {})
    )(arrays, (d_output, d_lse))
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    (want, _), want_grads = reference.attention(
        **exact, is_causal=True, cotangents=(np.float64(d_output), d_lse)
    )
    assert lse.dtype == jnp.float32
    by_the_rule_of_flash_attention(
        (output, *grads), (naive, *pull(d_output)), (want, *want_grads)
    )
