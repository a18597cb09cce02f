"""The table of cases: what every implementation must compute, small and with lengths that are prime.

A new feature adds lines here, and with them all the checks of test_attention.py.
"""

import contextlib
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import dot_product_attention
from flax_mha.core import tracing
from flax_mha.impl import registry

T, S, N, H = 37, 53, 6, 8
JITTED = type(jax.jit(len))


class Case:
    """Arrays and arguments of one call. `arrays` may get gradients; `traced` are arguments that are arrays too."""

    def __init__(self, *, batch=(2,), t=T, s=S, n=N, k=N, h=H, hv=H, bias=None, sinks=None, traced=None, **static):
        self.batch, self.t, self.s, self.n = batch, t, s, n
        shapes = {"query": (*batch, t, n, h), "key": (*batch, s, k, h), "value": (*batch, s, k, hv)}
        self.shapes = shapes | {n: shape for n, shape in (("bias", bias), ("sinks", sinks)) if shape is not None}
        self.output_shapes = (*batch, t, n, hv), (*batch, t, n)
        self.traced, self.static = traced or {}, static

    def arrays(self, seed=0, dtype=np.float32):
        """By name, in the order of the oracle's gradients: query, key, value and, if there are any, bias and sinks."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in self.shapes.items()}

    def cotangents(self, seed=1, dtype=np.float32):
        """For the output and the log-sum-exp."""
        rng = np.random.default_rng(seed)
        return tuple(rng.standard_normal(shape).astype(dtype) for shape in self.output_shapes)


def _bool(*shape, seed=2, share=0.6):
    return np.random.default_rng(seed).random(shape) < share


def _ids(*shape, seed=3):
    return np.sort(np.random.default_rng(seed).integers(0, 4, shape), -1).astype(np.int32)


def _int(*values):
    return np.array(values, np.int32)


CASES = {
    "plain": Case(),
    "no batch": Case(batch=()),
    "two batch axes": Case(batch=(2, 3), t=5, s=7),
    "grouped heads": Case(k=2),
    "one key head": Case(k=1),
    "value size": Case(k=3, hv=5),
    "one query": Case(t=1, is_causal=True, query_offset=20),
    "one key": Case(s=1),
    "scale": Case(scale=0.3),
    "causal": Case(is_causal=True),
    "causal, more queries": Case(t=S, s=T, is_causal=True),
    "causal, offset": Case(is_causal=True, query_offset=11),
    "causal, negative offset": Case(is_causal=True, query_offset=-5),
    "causal, offset a sequence": Case(is_causal=True, traced={"query_offset": _int(3, 40)}),
    "window": Case(local_window_size=(7, 3)),
    "window, one number": Case(local_window_size=4),
    "window, one side": Case(local_window_size=(None, 2)),
    "window, nobody in it": Case(t=S, s=T, local_window_size=(2, 0)),
    "window, causal, offset": Case(local_window_size=(9, 5), is_causal=True, query_offset=16),
    "lengths": Case(traced={"query_seq_lengths": _int(37, 20), "key_value_seq_lengths": _int(31, 0)}),
    "lengths of keys, causal": Case(is_causal=True, traced={"key_value_seq_lengths": _int(53, 17)}),
    "segments": Case(traced={"query_segment_ids": _ids(2, T), "key_value_segment_ids": _ids(2, S)}),
    "segments, one array": Case(s=T, is_causal=True, traced={"query_segment_ids": _ids(2, T)}),
    "segments, shared, unsorted": Case(
        k=2, traced={"query_segment_ids": _ids(T)[::-1].copy(), "key_value_segment_ids": _ids(1, S)}
    ),
    "mask": Case(k=2, traced={"mask": _bool(2, N, T, S)}),
    "mask of keys": Case(traced={"mask": _bool(2, 1, 1, S)}),
    "mask of heads": Case(traced={"mask": _bool(N, 1, 1)}),
    "mask of queries, low rank": Case(traced={"mask": _bool(T, 1)}),
    "mask, nothing visible": Case(traced={"mask": np.zeros((1, 1, 1, 1), bool)}),
    "bias": Case(k=3, bias=(2, N, T, S)),
    "bias, shared by the batch": Case(bias=(N, T, S)),
    "bias of keys": Case(k=2, bias=(N, 1, S)),
    "bias of queries": Case(bias=(2, 1, T, 1)),
    "bias, one number": Case(bias=()),
    "bias, two batch axes": Case(batch=(2, 3), t=5, s=7, bias=(3, 1, 5, 7)),
    "soft cap": Case(k=2, logits_soft_cap=1.5),
    "soft cap, bias, mask": Case(logits_soft_cap=0.7, bias=(N, 1, S), traced={"mask": _bool(2, 1, T, S)}),
    "sinks": Case(k=3, sinks=(N,)),
    "sinks, one number a sequence, nobody visible": Case(sinks=(2, 1), local_window_size=(1, 0), t=S, s=T),
    "everything": Case(
        batch=(2, 2),
        k=2,
        hv=5,
        bias=(2, 1, N, 1, S),
        is_causal=True,
        local_window_size=(30, 1),
        scale=0.4,
        logits_soft_cap=2.0,
        sinks=(1, 2, N),
        traced={
            "mask": _bool(1, N, T, S, share=0.9),
            "query_offset": _int(8, 9),
            "query_seq_lengths": np.array([[37, 30], [37, 1]], np.int32),
            "key_value_seq_lengths": np.array([[53, 20], [40, 53]], np.int32),
            "query_segment_ids": _ids(1, 2, T),
            "key_value_segment_ids": _ids(S),
        },
    ),
}
DROPOUT_CASES = {
    "dropout": Case(dropout_rate=0.3),
    "dropout, broadcast": Case(k=2, dropout_rate=0.3, broadcast_dropout=True),
    "dropout, odd lengths": Case(t=1, s=1, dropout_rate=0.5),
    "dropout, everything": Case(
        k=2,
        hv=5,
        bias=(N, 1, S),
        is_causal=True,
        query_offset=9,
        local_window_size=(30, 0),
        dropout_rate=0.2,
        traced={"key_value_seq_lengths": _int(40, 53)},
    ),
}


def inputs(seed=0, batch=2, t=T, s=S, n=N, k=2, h=8):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((batch, t, n, h), *[(batch, s, k, h)] * 2)]


def gradients_program(**arguments):
    """Jitted: every output and the gradients of a loss over those that are finite."""

    def loss(arrays):
        output, lse = dot_product_attention(*arrays, return_residual=True, **arguments)
        terms = (jnp.where(jnp.isfinite(x), jnp.sin(x), 0).sum() for x in (output, lse))
        return sum(terms), (output, lse)

    run = jax.jit(jax.grad(loss, has_aux=True))

    def numpy(arrays):
        gradients, answer = jax.device_get(run(arrays))
        return answer, gradients

    return numpy


def interpret(patch, name, how=True):
    """Runs the kernels of an implementation here, as XLA programs. `patch` is a pytest.MonkeyPatch."""
    real = registry.IMPLEMENTATIONS[name]
    hop = real.hop and functools.partial(real.hop, interpret=how)
    changed = dataclasses.replace(real, attention=functools.partial(real.attention, interpret=how), hop=hop)
    patch.setitem(registry.IMPLEMENTATIONS, name, changed)


def compiled_for(patch, platform):
    """As on a machine with this accelerator; arrays that exist are on a CPU. `patch` is a pytest.MonkeyPatch."""
    patch.setattr(tracing, "platform", lambda: platform)


@contextlib.contextmanager
def nothing_is_compiled():
    """Checks that all programs that are needed meanwhile have been compiled before."""
    compiled = []

    def note(event, seconds, fun_name="", **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []


def forget_programs():
    """Forgets what flax_mha has traced, for it may depend on what a test patches; `jax.clear_caches` forgets all."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flax_mha":
            for x in list(vars(module).values()):
                if isinstance(x, JITTED):
                    x.clear_cache()
