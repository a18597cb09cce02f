"""The table of cases: small calls, with prime lengths, that every attention function
must compute.

The tests run each case with every implementation, and `python benchmarks/conformance`
with any other function.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

T = 37
S = 53
N = 6
H = 8


class Case:
    """The arrays and arguments of one call.

    Attributes:
      shapes: Shapes of the arrays with gradients: query, key, value and, if there are
        any, bias and sinks.
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
        self.batch = batch
        self.t = t
        self.s = s
        self.n = n
        shapes = {
            "query": (*batch, t, n, h),
            "key": (*batch, s, k, h),
            "value": (*batch, s, k, hv),
        }
        # Random arrays are drawn in this order.
        if bias is not None:
            shapes["bias"] = bias
        if sinks is not None:
            shapes["sinks"] = sinks
        self.shapes: dict[str, tuple[int, ...]] = shapes
        self.output_shapes = (*batch, t, n, hv), (*batch, t, n)
        self.traced = dict(traced or {})
        self.static = static

    def arrays(
        self, seed: int = 0, dtype: DTypeLike = np.float32
    ) -> dict[str, NDArray]:
        """Draws random arrays by name: query, key, value and, if the case has them,
        bias and sinks, in this order.
        """
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape).astype(dtype)
            for name, shape in self.shapes.items()
        }

    def cotangents(
        self, seed: int = 1, dtype: DTypeLike = np.float32
    ) -> tuple[NDArray, ...]:
        """Draws random cotangents of the output [B..., T, N, Hv] and of the log-sum-exp
        [B..., T, N].
        """
        rng = np.random.default_rng(seed)
        of_output, of_lse = self.output_shapes
        output = rng.standard_normal(of_output)
        lse = rng.standard_normal(of_lse)
        return output.astype(dtype), lse.astype(dtype)


def _bool(*shape: int, seed: int = 2, share: float = 0.6) -> NDArray:
    rng = np.random.default_rng(seed)
    return rng.random(shape) < share


def _ids(*shape: int, seed: int = 3) -> NDArray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, shape)
    return np.sort(ids, -1).astype(np.int32)


def _int(*values: int) -> NDArray:
    return np.array(values, np.int32)


def _lists(*shape: int, seed: int = 4) -> NDArray:
    """Draws lists of keys, some of which are repeated or -1."""
    rng = np.random.default_rng(seed)
    return rng.integers(-1, S, shape, np.int32)


CASES = {
    "no mask or bias": Case(),
    "no batch axis": Case(batch=()),
    "two batch axes": Case(batch=(2, 3), t=5, s=7),
    "6 query heads, 2 key heads": Case(k=2),
    "6 query heads, 1 key head": Case(k=1),
    "values of size 5, keys of size 8": Case(k=3, hv=5),
    # Causality, and windows of keys around each query.
    "one causal query at offset 20": Case(t=1, is_causal=True, query_offset=20),
    "one key": Case(s=1),
    "scale 0.3": Case(scale=0.3),
    "causal": Case(is_causal=True),
    "causal, 53 queries and 37 keys": Case(t=S, s=T, is_causal=True),
    "causal, query offset 11": Case(is_causal=True, query_offset=11),
    "causal, query offset -5": Case(is_causal=True, query_offset=-5),
    "causal, a query offset per sequence": Case(
        is_causal=True, traced={"query_offset": _int(3, 40)}
    ),
    "window of 7 to the left, 3 to the right": Case(local_window_size=(7, 3)),
    "window of 4 on both sides": Case(local_window_size=4),
    "window of 2 to the right, open on the left": Case(local_window_size=(None, 2)),
    "window that leaves queries without keys": Case(t=S, s=T, local_window_size=(2, 0)),
    "causal, window of 9, query offset 16": Case(
        local_window_size=(9, 5), is_causal=True, query_offset=16
    ),
    # Parts of sequences: lengths, and segments that attend only to themselves.
    "a sequence of length 0": Case(
        traced={"query_seq_lengths": _int(37, 20), "key_value_seq_lengths": _int(31, 0)}
    ),
    "causal, key lengths 53 and 17": Case(
        is_causal=True, traced={"key_value_seq_lengths": _int(53, 17)}
    ),
    "segment ids": Case(
        traced={"query_segment_ids": _ids(2, T), "key_value_segment_ids": _ids(2, S)}
    ),
    "causal, one array of segment ids": Case(
        s=T, is_causal=True, traced={"query_segment_ids": _ids(2, T)}
    ),
    "unsorted segment ids, shared by the batch": Case(
        k=2,
        traced={
            "query_segment_ids": _ids(T)[::-1].copy(),
            "key_value_segment_ids": _ids(1, S),
        },
    ),
    # Masks and biases of every shape that broadcasts to the scores.
    "mask per sequence and head": Case(k=2, traced={"mask": _bool(2, N, T, S)}),
    "mask of padded keys": Case(traced={"mask": _bool(2, 1, 1, S)}),
    "whole heads masked": Case(traced={"mask": _bool(N, 1, 1)}),
    "whole queries masked": Case(traced={"mask": _bool(T, 1)}),
    "everything masked": Case(traced={"mask": np.zeros((1, 1, 1, 1), bool)}),
    "bias per sequence and head": Case(k=3, bias=(2, N, T, S)),
    "bias shared by the batch": Case(bias=(N, T, S)),
    "bias per head and key": Case(k=2, bias=(N, 1, S)),
    "bias per sequence and query": Case(bias=(2, 1, T, 1)),
    "scalar bias": Case(bias=()),
    "bias with two batch axes": Case(batch=(2, 3), t=5, s=7, bias=(3, 1, 5, 7)),
    # What changes the scores, or the denominator of the softmax.
    "soft cap": Case(k=2, logits_soft_cap=1.5),
    "soft cap, then bias and mask": Case(
        logits_soft_cap=0.7, bias=(N, 1, S), traced={"mask": _bool(2, 1, T, S)}
    ),
    "a sink per head": Case(k=3, sinks=(N,)),
    "a sink per sequence, queries without keys": Case(
        sinks=(2, 1), local_window_size=(1, 0), t=S, s=T
    ),
    "all arguments at once": Case(
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
# Every fifth key, from a first key that differs between the queries.
_every_fifth = _lists(2, T, 1) + 5 * np.arange(9, dtype=np.int32)
# No engine except "xla" computes these, so the tests do not run them with every
# implementation.
LISTS = {
    "9 keys per query": Case(traced={"key_indices": _every_fifth % S}),
    "60 keys per query, some repeated or -1": Case(
        traced={"key_indices": _lists(2, T, 60)}
    ),
    "causal, 9 keys per query and key head": Case(
        k=3, is_causal=True, traced={"key_indices": _lists(2, T, 3, 9)}
    ),
    "only -1 as keys": Case(traced={"key_indices": np.full((2, T, 9), -1, np.int32)}),
}
