"""The Pallas kernels, which support every argument on TPUs: interpreted, against the dense computation."""

import functools

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import close, forget_programs, gradients, interpret
from jax.experimental.pallas import tpu as pltpu
from kernels import as_on_a_tpu, call, in_bfloat16_by_the_rule_of_flash_attention, normal
from marks import with_core

from flax_mha import dot_product_attention, masks, recipes
from flax_mha._src import run
from flax_mha._src.engines.pallas import launch
from flax_mha._src.engines.pallas.call import Pallas
from flax_mha.cached_attention import cached_attention
from flax_mha.conformance import reference
from flax_mha.kv_cache import KVCache

shapes = functools.partial(kernels.shapes, h=64)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """As on a TPU, in small tiles, but the kernels run as XLA programs."""
    for patch in as_on_a_tpu():
        interpret(patch, "pallas")
        yield


def ints(*numbers):
    return np.array(numbers, np.int32)


def masked_share(*shape, share=0.6):
    return np.random.default_rng(2).random(shape) < share


N, S = 4, 300
SQUARE = shapes(S, S, n=N, k=2, h=8)
IDS = np.sort(np.random.default_rng(1).integers(-2, 3, (2, 300)).astype(np.int32))
KEY = jax.random.key(3)
CASES = {
    "one of each": call(shapes(1, 1)),
    "one query, offset": call(shapes(1, 300, n=4, k=2, h=80, hv=32), is_causal=True, query_offset=200),
    "no batch, odd lengths": call(shapes(127, 333, batch=(), n=3, k=3, h=80), scale=-0.3),
    "causal window, soft cap": call(
        shapes(300, 333, n=4, k=2, h=128, hv=64), is_causal=True, local_window_size=(150, 0), logits_soft_cap=2.0
    ),
    "large heads, key offset, masked tiles": call(shapes(300, 127, h=256), is_causal=True, key_value_offset=140),
    "lengths, segments, sinks": call(
        shapes(300, 300, n=4, k=2),
        query_seq_lengths=ints(270, 300),
        key_value_seq_lengths=ints(140, 0),
        query_segment_ids=IDS,
    ),
    "offsets as data": call(shapes(127, 300), is_causal=True, query_offset=ints(20, -30), key_value_offset=ints(3)),
    "array mask and bias, per head": call(shapes(127, 333, n=4, k=2), mask=masked_share(2, 1, 127, 333)),
    "a function of one head's number": call(
        shapes(150, 150, batch=(1,), n=1, k=1), mask=masks.FunctionMask(lambda b, h, q, k: (q >= k) | (h > 0) | (b > 0))
    ),
    "bias of keys, mask of queries": call(
        shapes(127, 300, n=2, k=1), is_causal=True, query_offset=150, mask=masked_share(2, 1, 127, 1)
    ),
    "bias of queries, mask of keys": call(shapes(300, 127), mask=masked_share(2, 1, 1, 127)),
    "dropout": call(shapes(300, 127, n=4, k=2), dropout_rate=0.3, dropout_rng=KEY, query_offset=5, is_causal=True),
    "combined masks, a bias of one number": call(
        shapes(300, 300),
        mask=masks.LocalMask(100, -20) | ~masks.CausalMask() & masks.FunctionMask(lambda b, h, q, k: k % 3 == b),
    ),
    "block-sparse": (SQUARE, recipes.block_sparse(jnp.asarray(masked_share(N, 10, 10, share=0.3)), 32)),
    "captured ids": call(
        SQUARE, mask=masks.FunctionMask(lambda b, h, q, k: jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k])
    ),
    "two batch axes, everything": call(
        shapes(150, 140, batch=(2, 2), n=4, k=2, h=16, hv=24),
        is_causal=True,
        local_window_size=(130, 1),
        scale=jnp.float32(0.4),
        logits_soft_cap=2.0,
        query_offset=ints(8, 9),
        query_seq_lengths=np.array([[150, 30], [158, 1]], np.int32),
        key_value_seq_lengths=np.array([[140, 20], [130, 140]], np.int32),
        query_segment_ids=IDS[:1, None, :150],
        key_value_segment_ids=IDS[0, :140],
        mask=masked_share(1, 4, 150, 140, share=0.9),
        score_mod=recipes.alibi(4)["score_mod"],
        dropout_rate=0.2,
        dropout_rng=KEY,
    ),
}
# Shapes of arguments that get gradients.
LEARNED = {
    "lengths, segments, sinks": {"sinks": (4,)},
    "array mask and bias, per head": {"bias": (1, 4, 127, 333)},
    "bias of keys, mask of queries": {"bias": (2, 1, 300)},
    "bias of queries, mask of keys": {"bias": (2, 1, 300, 1)},
    "combined masks, a bias of one number": {"bias": ()},
    "two batch axes, everything": {"bias": (2, 1, 4, 1, 140), "sinks": (1, 2, 4)},
}

# Output, log-sum-exp, largest scores and the gradients of all arrays.
results = functools.partial(gradients, return_residual=True, return_max_score=True)


def assert_close(answers, expected):
    """Output, log-sum-exp and largest scores within 1e-5, gradients within 1e-5 of the largest entry."""
    for number, (got, want) in enumerate(zip(answers, expected, strict=True)):
        finite = np.where(np.isfinite(want), want, 0)
        largest = 1.0 if number < 3 else max(np.abs(finite).max(), 1e-3)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * largest)


def in_float64(arrays, **arguments):
    """As `results`, computed with the equation in NumPy."""
    run = functools.partial(reference.attention, *arrays, **arguments, return_max_score=True)
    cotangents = tuple(np.cos(x, where=np.isfinite(x), out=np.zeros(x.shape)) for x in run()[:2])
    answers, gradients = run(cotangents=cotangents)
    return *answers, *gradients


@pytest.mark.parametrize("name", with_core(CASES, "causal window, soft cap"))
def test_output_residual_and_gradients(name):
    """Against the equation in float64 or, with functions or dropout, against the dense computation."""
    sizes, arguments = CASES[name]
    arrays, learned_sizes = normal(*sizes), LEARNED.get(name, {})
    learned = dict(zip(learned_sizes, normal(*learned_sizes.values()), strict=True))
    if "dropout_rate" in arguments or isinstance(arguments.get("mask"), masks.Mask):
        expected = results("xla", arguments)(arrays, **learned)
    else:
        expected = in_float64(arrays, **arguments, **learned)
    assert_close(results("pallas", arguments)(arrays, **learned), expected)


TABLE = np.random.default_rng(5).standard_normal((32, N)).astype(np.float32)
CAPTURED = {
    "table of T5": (lambda table: recipes.t5_bias(table)["score_mod"], TABLE),
    "no derivative at masked places": (
        lambda x: lambda score, b, h, q, k: jnp.tanh(score) * x[h] + jnp.log1p(x[b] * (q - k)),
        np.float32([0.5, 0.1, 0.02, 0.3]),
    ),
}


@pytest.mark.parametrize("name", with_core(CAPTURED, "table of T5"))
def test_gradients_of_captured_arrays(name):
    """Beside dropout."""
    make, captured = CAPTURED[name]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, arrays, captured):
        def attend(arrays, captured):
            more = {"score_mod": make(captured), "implementation": implementation, "return_max_score": True}
            more |= {"is_causal": True, "dropout_rate": 0.3, "dropout_rng": KEY}
            return dot_product_attention(*arrays, return_residual=True, **more)

        results, pull = jax.vjp(attend, arrays, captured)
        return *results, *jax.tree.leaves(pull(jax.tree.map(jnp.cos, results)))

    with jax.numpy_dtype_promotion("standard"):
        got, want = (jax.device_get(run(name, normal(*SQUARE), captured)) for name in ("pallas", "xla"))
    assert np.abs(want[-1]).max() > 1e-2
    assert_close(got, want)


@pytest.mark.core
def test_not_finite():
    """Masked NaN, infinity and huge numbers change nothing; rows that attend to NaN or infinity are NaN."""
    arguments = {"is_causal": True, "key_value_seq_lengths": ints(290, 140), "query_seq_lengths": ints(300, 290)}
    arguments["query_segment_ids"] = np.array([[0] * 100 + [1] * 200])
    learned = {"sinks": np.float32([0.5, -0.5])}
    ours, dense = (functools.partial(results(name, arguments), **learned) for name in ("pallas", "xla"))
    query, key, value = arrays = normal(*shapes(S, S, n=2, k=2, h=8))
    key[0, 290:], value[0, 295], key[1, 150], value[1, 200] = 3e38, np.nan, np.inf, -np.inf
    query[1, 295] = np.nan
    expected = dense(arrays)
    assert all(np.isfinite(x).all() for x in expected)
    assert_close(ours(arrays), expected)
    key[0, 140, 0], value[1, 20, 1, 3], query[0, 7, 1] = np.nan, np.inf, np.inf
    expected = dense(arrays)
    assert np.isnan(expected[0][0, 140:, 0]).all()
    assert np.isnan(expected[0][1, 20:100, 1]).any(-1).all()
    assert np.isnan(expected[0][0, 7, 1]).all()
    assert np.isfinite(expected[0][0, :140, 0]).all()
    assert_close(ours(arrays), expected)


def test_a_row_that_overflows_leaves_all_gradients_finite():
    """All inputs are finite; one row of scores is not, and the loss ignores it."""
    ours = results("pallas", {"is_causal": True})
    for place in (0, 30):  # the first key, which all queries see, or the query's own
        query, key, _ = arrays = normal(*shapes(S, S, n=2, k=2, h=8))
        query[0, 30], key[0, place, :, 0] = 1e20, 1e20
        output, _, _, *slopes = ours(arrays)
        assert np.argwhere(np.isnan(output).any(-1)).tolist() == [[0, 30, 0], [0, 30, 1]]
        assert all(np.isfinite(x).all() for x in slopes)


def test_bfloat16_by_the_rule_of_flash_attention():
    sizes = shapes(S, S, batch=(1,))
    in_bfloat16_by_the_rule_of_flash_attention("pallas", sizes, np.tri(S, dtype=bool), is_causal=True)


def test_vmap_over_some_of_the_inputs():
    """Also over numbers of heads, and over lengths, which determine the tiles to visit."""
    query, key, value = normal(*shapes(130, 140, h=8))
    queries, lengths = np.stack([query, -query]), np.array([[130, 0], [7, 140]], np.int32)
    sinks, slopes = normal((2, 2), (2, 2))

    def mapped(implementation):
        def loss(query, key, sinks, slopes, length):
            more = {"key_value_seq_lengths": length, "sinks": sinks, "implementation": implementation}
            more["score_mod"] = lambda score, b, h, q_idx, kv_idx: score * slopes[h]
            return jnp.sum(jnp.cos(dot_product_attention(query, key, value, is_causal=True, **more)))

        gradients = jax.value_and_grad(loss, (0, 1, 2, 3))
        return jax.jit(jax.vmap(gradients, (0, None, 0, 0, 0)))

    (ours, our_gradients), (dense, dense_gradients) = (
        mapped(name)(queries, key, sinks, slopes, lengths) for name in ("pallas", "xla")
    )
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    close(our_gradients, dense_gradients)


def test_a_cache():
    arrays = *normal(*shapes(5, 5, h=8)), KVCache.create(2, 150, 1, 8, np.float32)
    attend = jax.jit(cached_attention, static_argnames="implementation")
    ours, dense = (attend(*arrays, implementation=name)[0] for name in ("pallas", "xla"))
    np.testing.assert_allclose(ours, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("order", "races"), [("arbitrary", False), ("parallel", True)])
def test_races(order, races, monkeypatch, capfd):
    """Two cores share the work: no race, but one if the steps of a sum were declared independent."""
    monkeypatch.setattr(launch, "ORDER_OF_STEPS", order)
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    monkeypatch.setitem(run.ENGINES, "pallas", Pallas())
    interpret(monkeypatch, "pallas", params)
    forget_programs()  # the cache of programs does not depend on `params`
    arguments = {"is_causal": True, "score_mod": lambda score, b, h, q, k: score * jnp.float32([0.5, 0.25])[h]}
    arrays, learned = normal(*shapes(256, 256, batch=(), n=1, k=1, h=8)), {"bias": normal((1, 1, 256))[0]}
    found = ""
    try:
        answers = results("pallas", arguments)(arrays, **learned)
    except Exception as error:  # newer jax raises
        found = str(error)
    found += "".join(capfd.readouterr())
    assert ("RACE" in found.upper()) == races, found[:500]
    if not races:
        assert_close(answers, results("xla", arguments)(arrays, **learned))
