"""Few queries read many keys in place: outputs, log-sum-exps and derivatives equal
those of the dense path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from marks import core, with_core

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha._src.core import tracing
from flax_mha.masks import FunctionMask

N = 4
K = 2
H = 6
HV = 5
S = 149
rng = np.random.default_rng(0)
BATCH = (2,)
INDEX = jnp.array([3, 140], jnp.int32)
SLOPES = jnp.asarray(rng.standard_normal(N), jnp.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three blocks of keys, and several of queries; the last ones overlap those
    before.
    """
    monkeypatch.setattr(schedule, "MIN_KEYS_IN_PLACE", 100)
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 3)
    monkeypatch.setattr(schedule, "MAX_WIDTH_IN_PLACE", 64)


def arrays(t, batch=BATCH, seed=1):
    rng = np.random.default_rng(seed)
    shapes = ((t, N, H), (S, K, H), (S, K, HV))
    return [np.float32(rng.standard_normal((*batch, *shape))) for shape in shapes]


def sloped(slopes):
    """A score_mod that depends on everything that it may depend on."""

    def score_mod(score, b, h, q, k):
        distance = (q - k).astype(score.dtype)
        return score + slopes[h] * distance / 64 + b.astype(score.dtype)

    return score_mod


CASES = {}
CASES["plain"] = {}
CASES["causal"] = {"is_causal": True, "query_offset": INDEX}
CASES["window"] = {
    "is_causal": True,
    "query_offset": INDEX,
    "local_window_size": 20,
}
CASES["lengths"] = {
    "key_value_seq_lengths": INDEX,
    "query_seq_lengths": jnp.array([2, 5]),
}
CASES["nothing visible"] = {"key_value_seq_lengths": 0}
CASES["logits"] = {
    "logits_soft_cap": 2.0,
    "sinks": SLOPES,
    "scale": jnp.float32(0.9),
}
CASES["large scores"] = {
    "bias": jnp.full((N, 1, S), -1e9).at[2:, :, 70:].set(0),
    "sinks": jnp.full(N, -1e9),
}
CASES["score_mod"] = {
    "score_mod": sloped(SLOPES),
    "mask": FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 1),
}
CASES["bias and mask"] = {
    "bias": jnp.asarray(rng.standard_normal((N, 1, S)), jnp.float32),
    "mask": jnp.asarray(rng.random((*BATCH, 1, 5, S)) < 0.5),
}
CASES["dropout"] = {
    "dropout_rate": 0.3,
    "dropout_rng": jax.random.key(1),
    "query_offset": INDEX,
}


def both_ways(call):
    """The results of `call` with keys read in place, and with the dense path."""
    in_place = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "blocks_in_place", lambda call: None)
        return in_place, call()


attend = functools.partial(
    dot_product_attention,
    implementation="xla",
    return_residual=True,
    return_max_score=True,
)
assert_same = functools.partial(close, at_least=1.0)


def with_bad_numbers(name):
    """Inputs of a case, also with NaN and infinities anywhere."""
    query, key, value = map(jnp.asarray, arrays(5))
    given = {"clean": (query, key, value)}
    given["NaN in a key"] = (query, key.at[0, 70, 1, 2].set(jnp.nan), value)
    given["infinity in a key"] = (query, key.at[0, 70, 1, 2].set(jnp.inf), value)
    # Products of infinity have one sign, so their sum is no NaN.
    positive = jnp.abs(query).at[0, 4, 2].set(-jnp.inf)
    given["products of one sign"] = (positive, jnp.abs(key), value)
    bad_queries = query.at[0, 4, 2, 1].set(jnp.nan).at[1, 0].set(jnp.inf)
    given["queries"] = (bad_queries, key, value)
    # Without a mask, an infinite value is one only in its feature.
    if name not in ("plain", "logits", "dropout"):
        infinite = value.at[1, 10, 0, 0].set(jnp.inf).at[0, 100, 1].set(-jnp.inf)
        given["values"] = (query, key, infinite)
    # These keys are masked.
    if name in ("causal", "window", "lengths", "nothing visible"):
        large_key = key.at[:, 148].set(3e38)
        bad_value = value.at[:, 147].set(-3e38).at[:, 146].set(jnp.nan)
        given["hidden"] = (query, large_key, bad_value)
    return given


def rows_not_finite(x):
    """A row that is not finite is so in one feature or in all."""
    is_finite = np.isfinite(x) | (x == -np.inf)
    return ~is_finite.all(tuple(range(3, x.ndim)))


def check_outputs(name):
    given = with_bad_numbers(name)
    run = functools.partial(attend, **CASES[name])

    def answers():
        program = jax.jit(lambda query, key, value: run(query, key, value))
        return jax.device_get({filling: program(*x) for filling, x in given.items()})

    in_place, dense = both_ways(answers)

    for filling in given:
        for got, expected in zip(in_place[filling], dense[filling], strict=True):
            is_bad = rows_not_finite(expected)
            np.testing.assert_array_equal(rows_not_finite(got), is_bad, err_msg=filling)
            assert_same(got[~is_bad], expected[~is_bad])
            if filling in ("clean", "hidden"):
                assert not is_bad.any()


@pytest.mark.parametrize("name", with_core(CASES, "window", "bias and mask"))
def test_outputs_in_several_blocks_equal_the_dense_path(name):
    check_outputs(name)


@pytest.mark.parametrize(
    "name",
    with_core(
        ["window", "lengths", "nothing visible", "logits", "bias and mask"],
        "lengths",
        "logits",
    ),
)
def test_outputs_in_one_block_equal_the_dense_path(name, monkeypatch):
    """If more than half of the keys are visible."""
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 128)
    check_outputs(name)


LEARNED = ("bias", "sinks", "scale")


def derivatives(name):
    """A function that computes first derivatives of everything that has some, forward
    and reverse; and its arguments.
    """
    learned = {n: x for n, x in CASES[name].items() if n in LEARNED}
    static = {n: x for n, x in CASES[name].items() if n not in LEARNED}

    def loss(query, key, value, learned, slopes):
        arguments = static | learned
        if "score_mod" in static:
            arguments["score_mod"] = sloped(slopes)
        output, lse, _ = attend(query, key, value, **arguments)
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        return jnp.sin(output).sum() + jnp.cos(lse).sum()

    def run(x):
        tangents = jax.tree.map(jnp.cos, x)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(*x)
        _, forward = jax.jvp(loss, x, tangents)
        return value, gradients, forward

    def run_second(x):
        tangents = jax.tree.map(jnp.cos, x)

        def forward(query):
            return jax.jvp(loss, (query, *x[1:]), tangents)[1]

        return run(x), jax.grad(forward)(x[0])

    return run, run_second, (*arrays(5), learned, SLOPES)


@pytest.mark.parametrize(
    "name", ["window", core("score_mod"), "bias and mask", "dropout"]
)
def test_derivatives_equal_the_dense_path(name):
    run, _, x = derivatives(name)
    # A new function each time, so that both are traced.
    got, expected = both_ways(lambda: jax.jit(lambda x: run(x))(x))
    assert_same(got, expected)


def test_second_derivatives_equal_the_dense_path():
    _, run_second, x = derivatives("logits")
    got, expected = both_ways(lambda: jax.jit(lambda x: run_second(x))(x))
    assert_same(got, expected)


@pytest.fixture
def cpu_multiplies_bfloat16(monkeypatch):
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})


@pytest.mark.usefixtures("cpu_multiplies_bfloat16")
@pytest.mark.parametrize(
    ("scale", "return_residual", "offset", "dtype"),
    [
        (0.25, False, S, "bfloat16"),
        (0.3, False, 10, "bfloat16"),
        # With the residual, products stay in float32.
        (0.3, True, S, "float32"),
    ],
)
def test_products_in_bfloat16_are_as_exact_as_rounded_weights(
    scale, return_residual, offset, dtype, monkeypatch
):
    """In blocks and in one."""
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 128)
    chosen = []
    original = schedule.plan_xla

    def noted(call):
        chosen.append(original(call))
        return chosen[-1]

    monkeypatch.setattr(schedule, "plan_xla", noted)
    rounded = [x.astype(jnp.bfloat16) for x in arrays(1)]
    exact = [x.astype(jnp.float32) for x in rounded]
    call = functools.partial(
        dot_product_attention,
        scale=scale,
        is_causal=True,
        query_offset=offset,
        return_residual=return_residual,
    )

    got = jax.jit(functools.partial(call, implementation="xla"))(*rounded)

    assert chosen[-1].in_place is not None
    assert chosen[-1].dtype == dtype
    got = jax.tree.map(lambda x: x.astype(jnp.float32), got)
    assert_same(got, call(*exact, implementation="blockwise"), 2**-8)


@pytest.mark.parametrize("shared", ["nothing", "query", "keys", "lengths"])
def test_a_mapped_call_still_has_branches(shared):
    """`jax.vmap` adds a batch axis; it does not compute both branches of a choice."""
    lengths = jnp.array([[140, 3], [149, 149], [1, 90]], jnp.int32)
    names = ("query", "keys", "keys", "lengths")
    x = []
    axes = []
    for name, array in zip(names, (*arrays(1, (3, 2)), lengths), strict=True):
        x.append(array[0] if name == shared else array)
        axes.append(None if name == shared else 0)

    def call(query, key, value, lengths):
        return attend(query, key, value, key_value_seq_lengths=lengths)

    def entry(index):
        """The inputs with mapped ones indexed."""
        pairs = zip(x, axes, strict=True)
        return [array if axis is None else array[index] for array, axis in pairs]

    mapped = jax.jit(jax.vmap(call, axes))
    alone = [call(*entry(i)) for i in range(3)]
    assert_same(mapped(*x), jax.tree.map(lambda *x: jnp.stack(x), *alone))
    has_branches = "stablehlo.case" in mapped.lower(*x).as_text()
    assert has_branches == (shared != "keys")
    shapes = [x.shape for x in mapped(*entry(slice(0)))]
    assert shapes == [(0, 2, 1, N, HV), (0, 2, 1, N), (0, 2, N)]


@pytest.mark.core
@pytest.mark.usefixtures("cpu_multiplies_bfloat16")
def test_products_of_bfloat16_are_not_rounded():
    """Scores of 256 and 257 would be equal in bfloat16."""
    query = jnp.full((1, 1, 2, 16), 16, jnp.bfloat16)
    key = jnp.zeros((1, S, 1, 16), jnp.bfloat16)
    key = key.at[:, :2].set(1).at[:, 1, :, 0].set(1.0625)
    value = jnp.zeros_like(key).at[:, 1].set(1)
    call = functools.partial(
        dot_product_attention,
        scale=1.0,
        is_causal=True,
        query_offset=S,
        implementation="xla",
    )

    got = np.asarray(jax.jit(call)(query, key, value), np.float32)

    np.testing.assert_allclose(got, 1 / (1 + np.exp(-1)), rtol=2**-8)
