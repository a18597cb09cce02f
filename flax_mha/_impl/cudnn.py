"""NVIDIA's fused attention (cuDNN), through `jax.nn.dot_product_attention`, where it gives our result.

What is hidden goes in as flags and lengths, never as an array. Around the kernel our meanings are kept: a query that
sees nothing answers 0, and what hidden keys hold reaches nothing.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._call import Call, Operands, Options, finite_keys, platform, sharded
from flax_mha._impl import fused
from flax_mha._impl.fused import Visible

DTYPES = (jnp.float16, jnp.bfloat16)
# To a multiple of this lengths are padded: backward plans fail for odd ones, and answered NaN for odd multiples of 64
# (pytorch/pytorch#196678).
SIDE = 128


class Device(NamedTuple):
    """What a kernel is to run on; `capability` is None where it is no NVIDIA GPU."""

    name: str
    capability: tuple[int, int] | None


def device() -> Device:
    """The first device of the default backend."""
    if platform() != "gpu":
        return Device(platform(), None)
    first = jax.devices("gpu")[0]
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(first, "compute_capability", "")))
    return Device(first.device_kind, (int(version[1]), int(version[2])) if version else None)


class Kernel(NamedTuple):
    """All that a cuDNN plan depends on."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: DTypeLike
    scale: float
    is_causal: bool
    window: tuple[int, int] | None
    padded: bool

    def __call__(
        self, query: Array, key: Array, value: Array, query_lengths: Array | None, key_lengths: Array | None
    ) -> Array:
        """The fused attention itself."""
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            scale=self.scale,
            is_causal=self.is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=self.window,
            implementation="cudnn",
        )


def _kernel(call: Call, words: Visible) -> Kernel:
    query, key = call.operands.query, call.operands.key
    (queries, keys), batch = call.operands.lengths, math.prod(query.shape[:-3])
    rows, columns = (length + -length % SIDE for length in (queries, keys))
    padded = (rows, columns) != (queries, keys) or words.query_lengths is not None or words.key_lengths is not None
    return Kernel(
        (batch, rows, *query.shape[-2:]),
        (batch, columns, *key.shape[-2:]),
        query.dtype,
        call.options.scale,
        words.right == 0,
        None if words.left is None else (words.left, 0),
        padded,
    )


def refusals(call: Call) -> list[str]:
    """Why cuDNN cannot compute this call with our result; the plan is tried only if there is no other reason."""
    words, here = fused.visible(call), device()
    operands = call.operands
    head_size, value_size = operands.query.shape[-1], operands.value.shape[-1]
    reasons = fused.refusals(call, words)
    if here.capability is None:
        reasons.append(f"it runs on NVIDIA GPUs, and this runs on {here.name}")
    elif here.capability < (8, 0):
        reasons.append(f"it needs compute capability 8.0, and {here.name} has {'.'.join(map(str, here.capability))}")
    if operands.query.dtype not in DTYPES:
        reasons.append(f"it computes float16 and bfloat16, and this is {operands.query.dtype}")
    largest = 256 if here.capability is not None and here.capability >= (9, 0) else 128
    if head_size % 8 or head_size > largest:
        reasons.append(f"the head size must be a multiple of 8 up to {largest}, and is {head_size}")
    if value_size != head_size:
        reasons.append(f"the value head size must be that of the keys, {head_size}, and is {value_size}")
    if 0 in operands.query.shape or 0 in operands.key.shape:
        reasons.append("an axis is empty")
    if words.segments is not None:
        reasons.append("jax.nn passes it no segments")
    if words.right not in (None, 0) or (words.left is not None and (words.right is None or words.left < 0)):
        reasons.append("a window must end at the query itself: is_causal=True, or (left, 0)")
    if words.right == 0 and operands.lengths[0] != operands.lengths[1]:
        reasons.append("causal needs as many queries as keys")
    if sharded():
        reasons.append("under a mesh it needs query, key and value sharded alike, which is not known here")
    return reasons or failure(_kernel(call, words))


@functools.lru_cache(maxsize=1024)
def failure(kernel: Kernel) -> list[str]:
    """What cuDNN says when it has no plan for this, forward and backward; some plans fail only when compiled."""
    query = jax.ShapeDtypeStruct(kernel.query, kernel.dtype)
    key = jax.ShapeDtypeStruct(kernel.key, kernel.dtype)
    lengths = jax.ShapeDtypeStruct(kernel.query[:1], jnp.int32) if kernel.padded else None

    def both(query: Array, key: Array, value: Array, lengths: Array | None) -> tuple:
        output, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, lengths, lengths), query, key, value)
        return output, pull(output)

    try:
        jax.jit(both).lower(query, key, key, lengths).compile()
    except Exception as error:  # whatever it is, it is the reason
        return [f"cuDNN has no plan for it: {str(error).strip().splitlines()[0]}"]
    return []


@functools.partial(jax.jit, static_argnames="options")
def _attend(operands: Operands, options: Options) -> Float[Array, "*B T N Hv"]:
    call = Call(operands, options)
    words, (queries, keys) = fused.visible(call), operands.lengths
    kernel, axes = _kernel(call, words), operands.query.ndim - 3
    query, key, value = (fused.flat(x, axes) for x in fused.together(operands.query, operands.key, operands.value))
    batch = query.shape[0]
    if words.hides:
        key, value, bad = finite_keys(key, value)
        first, end = fused.seen_range(words.flat(operands.query.shape[:axes]), batch, (queries, keys))
        query = jnp.where((first < end)[:, :, None, None], query, jnp.zeros_like(query))
    seen_queries = seen_keys = None
    if kernel.padded:
        # Queries that see something come first; of those that see nothing cuDNN is told the least that it can be.
        rows = jnp.sum(first < end, axis=1, dtype=jnp.int32) if words.hides else jnp.full(batch, queries, jnp.int32)
        columns = jnp.max(end, axis=1) if words.hides else jnp.full(batch, keys, jnp.int32)
        seen_queries, seen_keys = jnp.maximum(rows, 1), jnp.maximum(columns, 1)
    query, key, value = (fused.pad_to(x, 1, SIDE) for x in (query, key, value))
    output = kernel(query, key, value, seen_queries, seen_keys)[:, :queries]
    if words.hides:
        output = fused.answers(output, end <= first, fused.counted(bad, first, end) > 0)
    return output.reshape(operands.query.shape)


def attend(call: Call) -> tuple[Float[Array, "*B T N Hv"], None]:
    """The output of all heads; the log-sum-exp stays with cuDNN."""
    return _attend(*call), None
