"""The table of cases: small calls that every attention function must compute, with prime lengths.

The tests run each case with every implementation, and `python -m flax_mha.conformance` with any other function.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

T, S, N, H = 37, 53, 6, 8


class Case:
    """The arrays and arguments of one call.

    Attributes:
      shapes: Shapes of the arrays with gradients: query, key, value and, if there are any, bias and sinks.
      output_shapes: Shapes of the output and the log-sum-exp.
      traced: Other arguments that are arrays.
      static: All other arguments.
    """

    def __init__(
        self,
        *,
        batch: tuple[int, ...] = (2,),
        t: int = T,
        s: int = S,
        n: int = N,
        k: int = N,
        h: int = H,
        hv: int = H,
        bias: tuple[int, ...] | None = None,
        sinks: tuple[int, ...] | None = None,
        traced: Mapping[str, NDArray] | None = None,
        **static: Any,
    ):
        self.batch, self.t, self.s, self.n = batch, t, s, n
        shapes = {"query": (*batch, t, n, h), "key": (*batch, s, k, h), "value": (*batch, s, k, hv)}
        self.shapes = shapes | {n: shape for n, shape in (("bias", bias), ("sinks", sinks)) if shape is not None}
        self.output_shapes = (*batch, t, n, hv), (*batch, t, n)
        self.traced, self.static = dict(traced or {}), static

    def arrays(self, seed: int = 0, dtype: DTypeLike = np.float32) -> dict[str, NDArray]:
        """Draws query, key, value and, if there are any, bias and sinks, by name, in the order of their gradients."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal(shape).astype(dtype) for name, shape in self.shapes.items()}

    def cotangents(self, seed: int = 1, dtype: DTypeLike = np.float32) -> tuple[NDArray, ...]:
        """Draws the cotangents of the output [B..., T, N, Hv] and of the log-sum-exp [B..., T, N]."""
        rng = np.random.default_rng(seed)
        return tuple(rng.standard_normal(shape).astype(dtype) for shape in self.output_shapes)


def _bool(*shape: int, seed: int = 2, share: float = 0.6) -> NDArray:
    return np.random.default_rng(seed).random(shape) < share


def _ids(*shape: int, seed: int = 3) -> NDArray:
    return np.sort(np.random.default_rng(seed).integers(0, 4, shape), -1).astype(np.int32)


def _int(*values: int) -> NDArray:
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
