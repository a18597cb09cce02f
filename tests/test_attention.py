"""Every case of the table x every implementation x {forward, gradients, jit, vmap}, against float64."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DROPOUT_CASES, Case
from marks import named, pairwise, with_core, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha.conformance import reference

IMPLEMENTATIONS = ("xla", "blockwise")
KEY = jax.random.key(5)
# One for each argument, with its edges, and the ways to multiply.
CORE = named("""no batch axis; two batch axes; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; causal; causal, 53 queries and 37 keys; causal, query offset -5;
    causal, a query offset per sequence; window of 7 to the left, 3 to the right;
    window of 2 to the right, open on the left; window that leaves queries without keys; a sequence of length 0;
    segment ids; mask per sequence and head; bias per head and key; soft cap; a sink per head; all arguments at once""")
# One for each way to multiply. Which scores are hidden has nothing to do with the dtype of the products.
MULTIPLIED = named("""no batch axis; 6 query heads, 2 key heads; values of size 5, keys of size 8;
    one causal query at offset 20; mask per sequence and head; bias per sequence and head; soft cap; a sink per head;
    all arguments at once""")
MET = [*((name, implementation) for name in CASES for implementation in IMPLEMENTATIONS)]

pytestmark = pytest.mark.usefixtures("small_tiles")


def call(case, implementation, arrays, traced, **more):
    more = {"implementation": implementation.split()[0], "return_residual": True, **more}
    return dot_product_attention(**arrays, **traced, **case.static, **more)


def gradients(case, implementation, arrays, cotangents, traced, **more):
    """What is returned, and all gradients. A log-sum-exp of -inf takes part in no loss, so its cotangent is 0.

    Neither has the largest score an effect on any gradient.
    """

    def loss(arrays):
        output, lse, *max_score = answer = call(case, implementation, arrays, traced, **more)
        total = jnp.sum(output * cotangents[0]).astype(lse.dtype) + sum(map(jnp.sum, max_score))
        return total + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1]), answer

    grads, answer = jax.grad(loss, has_aux=True)(arrays)
    return answer, [grads[name] for name in case.shapes]  # jax sorts the names of a dict


def assert_close(got, expected, terms, eps=None):
    """Up to the rounding of sums of `terms` numbers, relative to the largest result."""
    got, expected = np.asarray(got), np.asarray(expected)
    eps = np.finfo(got.dtype).eps if eps is None else eps
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0, got), np.where(finite, 0, expected))
    scale = max(1.0, np.abs(expected[finite]).max(initial=0))
    np.testing.assert_allclose(
        np.where(finite, got, 0), np.where(finite, expected, 0), rtol=0, atol=terms * eps * scale
    )


def terms(case):
    return case.t + case.s


@pytest.mark.parametrize(("name", "implementation"), with_core_tuples(MET, *(case for case in MET if case[0] in CORE)))
def test_forward_and_gradients_under_jit(name, implementation):
    case = CASES[name]
    arrays, cotangents = case.arrays(), case.cotangents()
    more = {"return_max_score": True}
    run = jax.jit(lambda a, c, t: gradients(case, implementation, a, c, t, **more))
    answer, grads = run(arrays, cotangents, case.traced)

    expected, expected_grads = reference.attention(
        **arrays, **case.traced, **case.static, cotangents=cotangents, **more
    )
    for got, want in zip((*answer, *grads), (*expected, *expected_grads), strict=True):
        assert got.shape == want.shape
        assert_close(got, want, terms(case))


MAPPED = named("""no batch axis; a sequence of length 0; segment ids; mask per sequence and head; bias per head and key;
    one causal query at offset 20""")
MAPPED = [(name, IMPLEMENTATIONS[i % len(IMPLEMENTATIONS)]) for i, name in enumerate(MAPPED)]
MAPPED_BY_BOTH = [*itertools.product(("6 query heads, 2 key heads", "all arguments at once"), IMPLEMENTATIONS)]


@pytest.mark.parametrize(("name", "implementation"), with_core_tuples([*MAPPED, *MAPPED_BY_BOTH], *MAPPED_BY_BOTH[2:]))
def test_vmap_is_a_loop(name, implementation):
    """Each result is that of its arrays alone, by the equation."""
    case = CASES[name]
    each = case.arrays(0), case.arrays(7)
    pairs = jax.tree.map(lambda *pair: np.stack(pair), *each)
    together = jax.device_get(jax.jit(jax.vmap(lambda a: call(case, implementation, a, case.traced)))(pairs))
    for i, arrays in enumerate(each):
        alone = reference.attention(**arrays, **case.traced, **case.static)
        for got, want in zip(together, alone, strict=True):
            assert_close(got[i], want, terms(case))


@pytest.mark.parametrize(
    ("name", "implementation"),
    with_core_tuples(
        [(name, implementation) for name in DROPOUT_CASES for implementation in IMPLEMENTATIONS],
        ("dropout", "xla"),
        ("dropout, everything", "blockwise"),
    ),
)
def test_dropout_and_its_gradient(name, implementation):
    """The weights that are kept show in the output when the values are the identity matrix."""
    case = DROPOUT_CASES[name]
    arrays, cotangents = case.arrays(), case.cotangents()
    keys = case.shapes["key"][-2]
    identity = np.broadcast_to(np.eye(case.s, dtype=np.float32)[:, None], (*case.batch, case.s, keys, case.s))
    shown, _ = call(case, "xla", arrays | {"value": identity}, case.traced, dropout_rng=KEY)
    keep = (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (1 - case.static["dropout_rate"])

    run = jax.jit(lambda a, c: gradients(case, implementation, a, c, case.traced, dropout_rng=KEY))
    answer, grads = run(arrays, cotangents)
    arguments = {k: v for k, v in case.static.items() if k not in ("dropout_rate", "broadcast_dropout")}
    expected, expected_grads = reference.attention(
        **arrays, **arguments, **case.traced, keep=keep, cotangents=cotangents
    )
    for got, want in zip((*answer, *grads), (*expected, *expected_grads), strict=True):
        assert_close(got, want, terms(case) / (1 - case.static["dropout_rate"]))


@pytest.mark.core
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float64(implementation):
    with jax.enable_x64(True):
        case = CASES["all arguments at once"]
        arrays, cotangents = case.arrays(dtype=np.float64), case.cotangents(dtype=np.float64)
        answer, grads = jax.jit(lambda a, c: gradients(case, implementation, a, c, case.traced))(arrays, cotangents)
        expected, expected_grads = reference.attention(**arrays, **case.traced, **case.static, cotangents=cotangents)
        for got, want in zip((*answer, *grads), (*expected, *expected_grads), strict=True):
            assert got.dtype == jnp.float64
            assert_close(got, want, terms(case))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropout_in_float64(implementation):
    """What is kept is divided by 1 - rate as exactly as float64 can."""
    with jax.enable_x64(True):
        x = np.ones((1, 1, 40, 1))
        got = jax.jit(
            lambda x: dot_product_attention(x, x, x, dropout_rate=0.3, dropout_rng=KEY, implementation=implementation)
        )(x)
        np.testing.assert_allclose(got[got != 0], 1 / 0.7, rtol=1e-15)


@pytest.fixture
def narrow_products(monkeypatch):
    """As on accelerators: the operands of matrix products keep their 16 bits."""
    monkeypatch.setattr(schedule, "product_dtype", lambda call, tiles: call.operands.query.dtype)


@pytest.mark.usefixtures("narrow_products")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", with_core(MULTIPLIED, "all arguments at once"))
def test_narrow_products(name, implementation):
    """Weights, and the gradients of scores, are rounded to bfloat16 before they are multiplied, once each."""
    case = CASES[name]
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in case.arrays().items()}
    cotangents = case.cotangents(dtype=jnp.bfloat16)[0], case.cotangents()[1]
    answer, grads = jax.jit(lambda a, c, t: gradients(case, implementation, a, c, t))(arrays, cotangents, case.traced)
    exact, exact_cotangents = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, cotangents))
    expected, expected_grads = reference.attention(**exact, **case.traced, **case.static, cotangents=exact_cotangents)
    for got, want in zip((*answer, *grads), (*expected, *expected_grads), strict=True):
        assert_close(np.asarray(got, np.float64), want, 4, eps=float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.core
@pytest.mark.usefixtures("narrow_products")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_narrow_products_are_what_xla_gets(implementation):
    """All of them take bfloat16, and give float32."""
    x = jnp.zeros((1, 70, 2, 8), jnp.bfloat16)

    def attend(*arrays):
        return dot_product_attention(*arrays, is_causal=True, implementation=implementation)

    def both(*arrays):
        output, pull = jax.vjp(attend, *arrays)
        return output, pull(output)

    # The gradient of "xla" is jax's own, which multiplies float32 by what is float32 already.
    for f, count in ((attend, 2), (both, 7))[: 2 if implementation == "blockwise" else 1]:
        products = re.findall(r"stablehlo.dot_general.*: (.*)", jax.jit(f).lower(x, x, x).as_text())
        assert len(products) >= count
        assert all(types.count("bf16") == 2 and types.count("f32") == 1 for types in products)


LOW_PRECISION = pairwise(IMPLEMENTATIONS, ("bfloat16", "float16"), ("narrow", "float32"))


@pytest.mark.parametrize(
    ("implementation", "dtype", "operands"),
    with_core_tuples(LOW_PRECISION, *(case for case in LOW_PRECISION if case[2] == "narrow")),
)
def test_low_precision_by_the_rule_of_flash_attention(implementation, dtype, operands, request):
    """At most twice the error of the naive computation in the same dtype, plus one rounding of the result."""
    if operands == "narrow":
        request.getfixturevalue("narrow_products")
    case = Case(k=2, t=67, s=67, is_causal=True)
    arrays = {name: jnp.asarray(x, dtype) for name, x in case.arrays().items()}
    d_output, d_lse = jnp.asarray(case.cotangents()[0], dtype), np.zeros(case.output_shapes[1], np.float32)

    def naive(arrays):
        query, key, value = (arrays[name] for name in case.shapes)
        key, value = (jnp.repeat(x, 3, axis=-2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.asarray(np.sqrt(query.shape[-1]), dtype)
        scores = jnp.where(jnp.tril(jnp.ones((67, 67), bool)), scores, jnp.asarray(-jnp.inf, dtype))
        output = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value)
        return jnp.sum(output * d_output), output

    with jax.numpy_rank_promotion("allow"):
        naive_grads, naive_output = jax.grad(naive, has_aux=True)(arrays)
    (output, lse), grads = jax.jit(lambda a, c: gradients(case, implementation, a, c, {}))(arrays, (d_output, d_lse))
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    (want, _), want_grads = reference.attention(**exact, is_causal=True, cotangents=(np.float64(d_output), d_lse))
    assert lse.dtype == jnp.float32
    ours, simple = (output, *grads), (naive_output, *(naive_grads[name] for name in case.shapes))
    for got, naive_got, truth in zip(ours, simple, (want, *want_grads), strict=True):
        assert got.dtype == dtype
        error, naive_error = (np.abs(np.float64(x) - truth).max() for x in (got, naive_got))
        assert error <= 2 * naive_error + float(jnp.finfo(dtype).eps) * np.abs(truth).max()
