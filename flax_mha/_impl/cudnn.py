"""NVIDIA's fused attention (cuDNN), through `jax.nn.dot_product_attention`, where it gives our result.

The mask goes in as flags and lengths, never as an array. Around the kernel our semantics for masked values are kept:
rows whose keys are all masked return 0, and what masked keys hold reaches nothing.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha._call import Call, Operands, Options
from flax_mha._impl import kernel_mask, nonfinite
from flax_mha._impl.kernel_mask import KernelMask

DTYPES = (jnp.float16, jnp.bfloat16)
# To a multiple of this lengths are padded: backward plans fail for odd ones, and answered NaN for odd multiples of 64
# (pytorch/pytorch#196678).
SIDE = 128


class Device(NamedTuple):
    """What a kernel is to run on; `capability` is None where it is no NVIDIA GPU."""

    name: str
    capability: tuple[int, int] | None


def device(platform: str) -> Device:
    """The first device of a platform."""
    if platform != "gpu":
        return Device(platform, None)
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


def _kernel(call: Call, mask: KernelMask) -> Kernel:
    query, key = call.operands.query, call.operands.key
    (queries, keys), batch = call.operands.lengths, math.prod(query.shape[:-3])
    rows, columns = (length + -length % SIDE for length in (queries, keys))
    padded = (rows, columns) != (queries, keys) or mask.query_lengths is not None or mask.key_lengths is not None
    return Kernel(
        (batch, rows, *query.shape[-2:]),
        (batch, columns, *key.shape[-2:]),
        query.dtype,
        call.options.scale,
        mask.right == 0,
        None if mask.left is None else (mask.left, 0),
        padded,
    )


def refusals(call: Call) -> list[str]:
    """Why cuDNN cannot compute this call with our result; its plan is tried only if there is no other reason."""
    mask, here = kernel_mask.kernel_mask(call), device(call.options.target.platform)
    operands = call.operands
    head_size, value_size = operands.query.shape[-1], operands.value.shape[-1]
    reasons = kernel_mask.refusals(call, mask)
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
    if mask.segments is not None:
        reasons.append("jax.nn passes it no segments")
    if mask.right not in (None, 0) or (mask.left is not None and (mask.right is None or mask.left < 0)):
        reasons.append("a window must end at the query itself: is_causal=True, or (left, 0)")
    if mask.right == 0 and operands.lengths[0] != operands.lengths[1]:
        reasons.append("causal needs as many queries as keys")
    return reasons or failure(_kernel(call, mask))


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
def _attention(operands: Operands, options: Options) -> Float[Array, "*B T N Hv"]:
    call = Call(operands, options)
    mask, (queries, keys) = kernel_mask.kernel_mask(call), operands.lengths
    kernel, axes = _kernel(call, mask), operands.query.ndim - 3
    query, key, value = kernel_mask.vmapped_together(
        operands.query, operands.key, operands.value, *jax.tree.leaves(operands.mask)
    )[:3]
    query, key, value = (kernel_mask.flat(x, axes) for x in (query, key, value))
    batch = query.shape[0]
    first, end = kernel_mask.visible_range(mask.flat(operands.query.shape[:axes]), batch, (queries, keys))
    nonfinite_rows = jnp.zeros((), bool)
    if mask.masks_scores:
        key, value, of_keys = nonfinite.finite_keys(key, value)
        of_queries = nonfinite.magnitude_of(query * options.scale)
        query = nonfinite.finite(query, of_queries)
        sees_bad = kernel_mask.counted(of_keys == jnp.inf, first, end) > 0
        nonfinite_rows = kernel_mask.for_query_heads(sees_bad, query.shape[2]) | (of_queries == jnp.inf)
        query = jnp.where((first < end)[:, :, None, None], query, jnp.zeros_like(query))
    used_queries = used_keys = None
    if kernel.padded:
        # The rows that see a key come first, so their number is the query length that cuDNN gets; at least 1.
        rows = (
            jnp.sum(first < end, axis=1, dtype=jnp.int32) if mask.masks_scores else jnp.full(batch, queries, jnp.int32)
        )
        columns = jnp.max(end, axis=1) if mask.masks_scores else jnp.full(batch, keys, jnp.int32)
        used_queries, used_keys = jnp.maximum(rows, 1), jnp.maximum(columns, 1)
    query, key, value = (kernel_mask.pad_to(x, 1, SIDE) for x in (query, key, value))
    output = kernel(query, key, value, used_queries, used_keys)[:, :queries]
    if mask.masks_scores:
        output = kernel_mask.with_our_rows(output, end <= first, nonfinite_rows)
    return output.reshape(operands.query.shape)


def cudnn_attention(call: Call) -> tuple[Float[Array, "*B T N Hv"], None]:
    """The output of all heads; the log-sum-exp stays with cuDNN."""
    return _attention(*call), None
