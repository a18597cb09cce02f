"""cuDNN's fused attention for every mask, with dense computations in place of its two
custom calls (`cudnn_calls.py`): output, log-sum-exp and all gradients beside "xla".
"""

import functools
from unittest import mock

import cudnn_calls
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import compiled_for, forget_programs
from jax import lax
from kernels import call, close
from marks import with_core

from flax_mha import dot_product_attention, masks
from flax_mha._src.core import validation
from flax_mha._src.engines.kernels.cudnn import call as calls
from flax_mha._src.engines.kernels.cudnn import engine, trials

B, T, N, K, H = 2, 40, 4, 2, 8
RNG = np.random.default_rng(1)
LOWEST = float(np.finfo(np.float32).min)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    yield from kernels.as_on_a_gpu(monkeypatch)


@pytest.fixture
def stand_ins(monkeypatch):
    kernels.compute_for_cudnn(monkeypatch)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def qkv(t=T, s=T, *, batch=(B,), k=K):
    return normal(*batch, t, N, H), normal(*batch, s, k, H), normal(*batch, s, k, H)


def random_mask(*shape, visible=0.5):
    return RNG.random(shape) < visible


def with_number(x, place, number):
    x = x.copy()
    x[place] = number
    return x


def nan_in_key(i, s=T):
    query, key, value = qkv(s=s)
    place = (slice(None), i)
    return query, with_number(key, place, np.nan), with_number(value, place, np.nan)


def lengths(keys, queries=None):
    arguments = {"key_value_seq_lengths": np.int32(keys)}
    if queries is not None:
        arguments["query_seq_lengths"] = np.int32(queries)
    return arguments


def segments(ids):
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


CAUSAL = {"is_causal": True}
OUTPUT_ALONE = {"return_residual": False}
DOCUMENTS = np.stack(
    [np.repeat(np.int32([0, 1, 2, 3]), [7, 13, 11, 9]), np.repeat([5, 1], [25, 15])]
).astype(np.int32)
ALTERNATING = np.tile(np.int32([0, 1]), T // 2)
NO_KEYS = random_mask(B, 1, 1, T)
NO_KEYS[0] = False
ALL_BUT_3 = np.arange(T) != 3
EVERY_THIRD = masks.FunctionMask(lambda b, h, q, k: (q - k) % 3 != 1)
BY_HEAD = masks.FunctionMask(lambda b, h, q, k: (q - k) % 3 != h % 2)
PREFIX = masks.CausalMask() | masks.LengthMask(np.int32([13, 0]))
SINKS = normal(N)

# Arrays and arguments. Biases and sinks get gradients, unless they are in `FIXED`.
CASES = {
    "plain": call(qkv()),
    "causal": call(qkv(), **CAUSAL),
    "grouped heads, odd lengths": call(qkv(131, 131, k=1), **CAUSAL),
    "causal, one query": call(qkv(1, 40), **CAUSAL),
    "lengths, fewer queries": call(qkv(24, 57), **lengths([57, 20])),
    "lengths of 0": call(qkv(24, 57), **lengths([0, 20], [24, 5])),
    "sinks": call(qkv(), sinks=SINKS),
    "sinks, causal": call(qkv(), sinks=SINKS, **CAUSAL),
    "sinks of entries, masked rows": call(
        qkv(), sinks=normal(B, N), **lengths([0, 20])
    ),
    "sinks of -inf, masked rows": call(
        qkv(), sinks=np.float32([-np.inf, 0, 1, 2]), **lengths([0, 20])
    ),
    "padding": call(qkv(), mask=random_mask(B, 1, 1, T)),
    "padding, an entry without keys": call(qkv(), mask=NO_KEYS),
    "padding, sinks": call(qkv(), mask=NO_KEYS, sinks=SINKS),
    "padding, NaN in a hidden key": call(nan_in_key(3), mask=ALL_BUT_3[None]),
    "padding, NaN in a visible key": call(nan_in_key(4), mask=ALL_BUT_3[None]),
    "mask": call(qkv(), mask=random_mask(B, 1, T, T)),
    "mask of heads, masked rows": call(
        qkv(), mask=random_mask(B, N, T, T, visible=0.04)
    ),
    "mask, causal": call(qkv(), mask=random_mask(T, T), **CAUSAL),
    "mask, lengths": call(qkv(), mask=random_mask(1, 1, T, T), **lengths([7, 40])),
    "mask, NaN in a key hidden from some": call(
        nan_in_key(3), mask=ALL_BUT_3[None] | (np.arange(T)[:, None] > 20)
    ),
    "mask, two batch axes": call(
        qkv(20, 20, batch=(2, 3)), mask=random_mask(1, 3, 1, 1, 20)
    ),
    "mask, no batch axis": call(qkv(20, 20, batch=()), mask=random_mask(20, 20)),
    "function": call(qkv(), mask=EVERY_THIRD),
    "function of heads": call(qkv(), mask=BY_HEAD),
    "causal or near": call(qkv(), mask=masks.CausalMask() | masks.LocalMask(3, 3)),
    "not near": call(qkv(), mask=~masks.LocalMask(3, 3)),
    "prefix": call(qkv(), mask=PREFIX),
    "bias": call(qkv(), bias=normal(1, N, T, T), **CAUSAL),
    "bias of entries": call(qkv(), bias=normal(B, 1, T, T), **CAUSAL),
    "bias of keys": call(qkv(), bias=normal(B, 1, 1, T)),
    "bias of heads, lengths": call(qkv(), bias=normal(N, T, T), **lengths([20, 40])),
    "bias that masks, mask": call(
        qkv(),
        bias=np.where(random_mask(B, 1, 1, T), -np.inf, normal(B, 1, 1, T)),
        mask=random_mask(B, 1, T, T),
    ),
    "bias of finfo.min, mask": call(
        qkv(),
        bias=np.where(random_mask(B, 1, T, T), LOWEST, 0).astype(np.float32),
        mask=random_mask(B, 1, T, T),
    ),
    "bias, NaN that is hidden": call(
        qkv(), bias=with_number(normal(1, N, T, T), (..., 5, 7), np.nan), **CAUSAL
    ),
    "bias, NaN that is visible": call(
        qkv(), bias=with_number(normal(1, N, T, T), (..., 9, 7), np.nan), **CAUSAL
    ),
    "bias, infinity that is visible": call(
        qkv(), bias=with_number(normal(1, N, T, T), (..., 9, 7), np.inf), **CAUSAL
    ),
    "bias, NaN that a mask hides": call(
        qkv(),
        bias=with_number(normal(1, N, T, T), (..., 9, 3), np.nan),
        mask=ALL_BUT_3[None],
    ),
    "offset": call(qkv(24, 40), query_offset=5, **CAUSAL),
    "negative offset": call(qkv(), key_value_offset=9, **CAUSAL),
    "offsets as arrays": call(
        qkv(24, 60),
        query_offset=np.int32([2, 50]),
        key_value_offset=np.int32([7, 0]),
        **CAUSAL,
    ),
    "offsets as arrays, lengths": call(
        qkv(24, 60), query_offset=np.int32([10, 30]), **CAUSAL, **lengths([12, 54])
    ),
    "aligned at the end, fewer keys": call(qkv(40, 24), mask=masks.CausalMask(-16)),
    "window": call(qkv(), local_window_size=(5, 0)),
    "window of both sides": call(qkv(150, 150), local_window_size=(9, 6)),
    "window of both sides, lengths": call(
        qkv(150, 90), local_window_size=(9, 6), **lengths([60, 90])
    ),
    "window to the right": call(qkv(), local_window_size=(0, None)),
    "window to the left": call(qkv(30, 40), local_window_size=(7, None)),
    "window before the query": call(qkv(), mask=masks.LocalMask(9, -3)),
    "documents": call(qkv(), **segments(DOCUMENTS)),
    "documents, causal": call(qkv(), **segments(DOCUMENTS), **CAUSAL),
    "documents, window, sinks": call(
        qkv(), sinks=SINKS, local_window_size=(4, 0), **segments(DOCUMENTS)
    ),
    "documents, padding": call(qkv(), mask=NO_KEYS, **segments(DOCUMENTS)),
    "ids that alternate": call(qkv(), **segments(ALTERNATING), **CAUSAL),
    "output, as many heads": call(qkv(k=N), **CAUSAL, **OUTPUT_ALONE),
    "output, two batch axes": call(qkv(20, 20, batch=(2, 3)), **OUTPUT_ALONE),
    "output, wide window": call(qkv(), local_window_size=(99, 99), **OUTPUT_ALONE),
    "output, NaN after the last query": call(
        nan_in_key(50, s=57), **CAUSAL, **OUTPUT_ALONE
    ),
    "output, NaN in a visible key": call(nan_in_key(30), **CAUSAL, **OUTPUT_ALONE),
    "output, NaN in a key hidden by lengths": call(
        nan_in_key(30), **lengths([40, 20], [40, 9]), **OUTPUT_ALONE
    ),
    "output, NaN in a key hidden by a window": call(
        nan_in_key(3), mask=masks.CausalMask() & masks.LocalMask(5, 2), **OUTPUT_ALONE
    ),
    "output, NaN in a key hidden by a bias": call(
        nan_in_key(3),
        bias=np.where(ALL_BUT_3, normal(1, 1, T, T), np.float32(-np.inf)),
        **OUTPUT_ALONE,
    ),
    "output, more queries, lengths": call(
        qkv(57, 24), **CAUSAL, **lengths([20, 3], [30, 57]), **OUTPUT_ALONE
    ),
    "output, more queries, window": call(
        qkv(57, 24), **CAUSAL, local_window_size=8, **OUTPUT_ALONE
    ),
    "output, equal offsets, lengths": call(
        qkv(),
        query_offset=30,
        key_value_offset=30,
        **CAUSAL,
        **lengths([60, 70], [50, 35]),
        **OUTPUT_ALONE,
    ),
}
FIXED = {"bias of keys"}


def answers(arrays, learned, data, static):
    """The results, and gradients for cotangents that are not constant."""

    def attend(arrays, learned):
        return dot_product_attention(*arrays, **learned, **data, **static)

    def cotangent(x):
        return jnp.where(jnp.isfinite(x), jnp.cos(3 * x), jnp.zeros_like(x))

    def run(arrays, learned):
        results, pull = jax.vjp(attend, arrays, learned)
        return results, pull(jax.tree.map(cotangent, results))

    return jax.jit(run)(arrays, learned)


def compared(name, implementation):
    arrays, arguments = CASES[name]
    learned, data = {}, {}
    static = {"implementation": implementation, "return_residual": True}
    for key, x in arguments.items():
        if key in ("bias", "sinks") and name not in FIXED:
            learned[key] = np.float32(x)
        elif isinstance(x, np.ndarray | masks.Mask):
            data[key] = x
        else:
            static[key] = x
    return answers(arrays, learned, data, static)


CORE = (
    "padding, an entry without keys",
    "padding, NaN in a hidden key",
    "sinks of entries, masked rows",
    "bias that masks, mask",
    "bias, NaN that is visible",
    "output, more queries, lengths",
    "offsets as arrays, lengths",
    "window of both sides, lengths",
    "documents, window, sinks",
)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", with_core(CASES, *CORE))
def test_results_and_gradients_are_those_of_plain_jax(name):
    close(compared(name, "cudnn"), compared(name, "xla"))


@pytest.mark.core
@pytest.mark.usefixtures("stand_ins")
def test_rows_whose_bias_is_very_low_or_high_are_exact():
    """Plain JAX rounds the scores of such rows, so their bias is 0 here."""
    bias = np.zeros((B, 1, T, T), np.float32)
    bias[:, :, 3] = LOWEST
    bias[:, :, 5, 1:] = -1e9
    bias[:, :, 7] = -1e9
    bias[:, :, 8] = 1e9
    shifted = bias.copy()
    shifted[:, :, [3, 7, 8]] = 0

    def found(implementation, bias, **more):
        static = {"implementation": implementation, "is_causal": True}
        return answers(CASES["plain"][0], {"bias": bias, **more}, {}, static)

    close(found("cudnn", bias), found("xla", shifted))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("low", [LOWEST, -1e9, -1e4])
def test_a_sink_takes_all_weight_of_a_row_whose_bias_is_very_low(low):
    bias = np.zeros((B, 1, T, T), np.float32)
    bias[:, :, 5] = low
    bias[:, :, 6] = -np.inf
    learned = {"bias": bias, "sinks": np.float32([-3, 0, 2, -np.inf])}

    def found(implementation):
        static = {"implementation": implementation, "return_residual": True}
        return answers(CASES["plain"][0], learned, {}, static)

    (output, lse), (_, got) = found("cudnn")
    (plain, _), (_, expected) = found("xla")

    np.testing.assert_array_equal(output[:, 5, :3], 0)
    sinks = np.tile(learned["sinks"], (B, 1))
    np.testing.assert_array_equal(lse[:, 5, :3], sinks[:, :3])
    np.testing.assert_array_equal(lse[:, 6], sinks)
    # The last head has no sink, and plain JAX rounds its scores in that row.
    close(output[:, :, :3], plain[:, :, :3])
    close(got["sinks"][:3], expected["sinks"][:3])


@pytest.mark.usefixtures("stand_ins")
def test_derivatives_of_log_sum_exp_and_sinks_of_every_order():
    arrays = qkv(16, 16)
    mask = random_mask(B, 1, 1, 16)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(implementation, arrays, sinks):
        def loss(arrays, sinks):
            output, lse = dot_product_attention(
                *arrays,
                mask=mask,
                sinks=sinks,
                implementation=implementation,
                return_residual=True,
            )
            return jnp.sin(output).sum() + jnp.sin(lse).sum()

        gradient = jax.grad(loss, (0, 1))
        tangents = jax.tree.map(jnp.cos, (arrays, sinks))
        return jax.jvp(loss, (arrays, sinks), tangents), jax.jvp(
            gradient, (arrays, sinks), tangents
        )

    close(derivatives("cudnn", arrays, SINKS), derivatives("xla", arrays, SINKS), 1e-4)


@pytest.mark.usefixtures("stand_ins")
def test_scan_remat_and_vmap():
    """Three layers in a loop, each recomputed, for two masks at a time."""
    x = normal(3, B, T, N, H)
    hidden = random_mask(2, B, 1, 1, T)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x, hidden):
        def loss(x, mask):
            def layer(query, key):
                output = dot_product_attention(
                    query, key, key, mask=mask, implementation=implementation
                )
                return query + output, None

            output, _ = lax.scan(jax.checkpoint(layer), x[0], x)
            return (output * output).sum()

        return jax.vmap(jax.value_and_grad(loss), (None, 0))(x, hidden)

    close(gradients("cudnn", x, hidden), gradients("xla", x, hidden))


# What masks, and the entries of the bias that cuDNN gets, padded.
ENTRIES = {
    "bias of keys": ({"bias": normal(B, 1, 1, T)}, (B, 1, 128, 128)),
    "bias of all": ({"bias": normal(1, 1, T, T)}, (1, 1, 128, 128)),
    "bias of heads": ({"bias": normal(1, N, T, T)}, (1, N, 128, 128)),
    "mask of keys": ({"mask": NO_KEYS}, (B, 1, 128, 128)),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_bias_without_gradient_is_not_copied(name, monkeypatch):
    arguments, shape = ENTRIES[name]
    shapes = set()

    def noted(kernel, operands, *given, run):
        shapes.add(operands.bias.shape)
        return run(kernel, operands, *given)

    for each in ("call_forward", "call_backward"):
        run = getattr(cudnn_calls, each)
        monkeypatch.setattr(calls, each, functools.partial(noted, run=run))

    def loss(query):
        return dot_product_attention(
            query, query, query, implementation="cudnn", **arguments
        ).sum()

    jax.eval_shape(jax.grad(loss), normal(B, T, N, H))

    assert shapes == {shape}


# The custom calls ---------------------------------------------------------------------


@pytest.mark.core
def test_the_custom_calls_are_those_of_jax():
    calls.differences_from_jax.cache_clear()
    assert calls.differences_from_jax() == []


@pytest.mark.core
def test_jax_makes_the_calls_if_its_own_differ(monkeypatch):
    """Without sinks and log-sum-exp."""

    def with_new_field(*arguments):
        return config(*arguments).replace('"seed"', '"new_field": 1, "seed"')

    config = calls._config
    monkeypatch.setattr(calls, "_config", with_new_field)
    calls.differences_from_jax.cache_clear()
    arrays = kernels.abstract()
    attend = functools.partial(kernels.lowered, arrays, platform="cuda")

    text = attend(implementation="cudnn", **CAUSAL)
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert "new_field" not in text
    with pytest.raises(NotImplementedError, match="calls cuDNN in a new way"):
        attend(implementation="cudnn", sinks=jnp.zeros(2))
    calls.differences_from_jax.cache_clear()


# What is chosen -----------------------------------------------------------------------


def explained(length, **arguments):
    return kernels.explained(kernels.abstract(length, length, h=64), **arguments)


NEW = {
    "mask": lambda t: {"mask": np.ones((2, 1, 1, t), bool)},
    "residual": lambda t: {"return_residual": True},
    "sinks": lambda t: {"sinks": jnp.zeros(2)},
}


@pytest.mark.core
@pytest.mark.parametrize("kind", NEW)
def test_new_kinds_are_chosen_for_long_sequences_after_a_trial(kind, monkeypatch):
    tried = mock.Mock(return_value=None)
    monkeypatch.setattr(trials, "_tried", tried)
    assert explained(512, **NEW[kind](512)).chosen == "xla"
    tried.assert_not_called()
    short = explained(512, **NEW[kind](512), platform="cuda")
    assert "chosen from T x S = 1,048,576 on, but this call has 262,144" in str(
        short
    ).replace("\n             ", " ")

    assert explained(1024, **NEW[kind](1024)).chosen == "cudnn"
    [(called, *_), _] = tried.call_args
    assert called == kind

    validation.warn_once.cache_clear()
    monkeypatch.setattr(trials, "_tried", lambda *arguments: "all is NaN")
    with pytest.warns(UserWarning, match="trial .* failed .all is NaN."):
        explanation = explained(1024, **NEW[kind](1024))
    assert explanation.chosen == "xla"
    assert "all is NaN" in explanation.doubts["cudnn"][0]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", NEW)
def test_a_trial_compares_with_dense_attention(kind, monkeypatch):
    monkeypatch.undo()
    compiled_for(monkeypatch, "gpu")
    kernels.compute_for_cudnn(monkeypatch)

    def tried(head_size):
        forget_programs()
        return trials._tried(kind, jnp.dtype("bfloat16"), head_size, engine._attend)

    assert tried(16) is None
    for head_size, name in ((24, "call_forward"), (32, "call_backward")):

        def wrong(kernel, operands, *given, name=name):
            first, *others = getattr(cudnn_calls, name)(kernel, operands, *given)
            return [(1.2 * first.astype(jnp.float32)).astype(first.dtype), *others]

        with monkeypatch.context() as patch:
            patch.setattr(calls, name, wrong)
            assert "differs by 0." in tried(head_size)


def test_a_trial_that_raised_an_error_is_repeated(monkeypatch):
    """The device's memory may have been full."""
    monkeypatch.undo()
    validation.warn_once.cache_clear()
    trials._tried.cache_clear()

    def doubts():
        return trials.doubts("sinks", jnp.bfloat16, 8, (9, 0), attend=None)

    full = mock.Mock(side_effect=RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    monkeypatch.setattr(trials, "_answers", full)
    with pytest.warns(UserWarning, match="failed .RESOURCE_EXHAUSTED"):
        assert "RESOURCE_EXHAUSTED" in doubts()[0]
    monkeypatch.setattr(trials, "_answers", lambda *given: {"output": np.ones(3)})
    assert doubts() == []
    trials._tried.cache_clear()


def test_several_processes_choose_only_what_ran(monkeypatch):
    # Nothing runs in two processes that have a GPU each.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    explanation = explained(1024, **NEW["sinks"](1024))
    assert explanation.chosen == "xla"
    assert "several processes" in explanation.doubts["cudnn"][0]

    ran = trials.Ran("sinks", (9, 0), (9, 19, 0), "2026-11-28")
    monkeypatch.setattr(trials, "RAN", (ran,))
    monkeypatch.setattr(trials, "version", lambda: (9, 20, 0))
    assert explained(1024, **NEW["sinks"](1024)).chosen == "cudnn"
    monkeypatch.setattr(trials, "version", lambda: (9, 18, 0))
    assert explained(1024, **NEW["sinks"](1024)).chosen == "xla"
