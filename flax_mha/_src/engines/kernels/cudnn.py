"""`implementation="cudnn"`: NVIDIA's fused attention, through
`jax.nn.dot_product_attention`.

The mask is passed as `is_causal`, a window and lengths, never as an array; in a bias,
-inf is replaced by a very negative number. The output of queries whose keys are all
masked is set to 0, and `guarded.around_kernel` keeps NaN and infinity in masked keys
out of the result.
"""

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.call.operands import Call, Result
from flax_mha._src.core.tracing import (
    EXAMPLES_OF_SHARDING,
    NEEDS_SHARDING,
    varying_alike,
)
from flax_mha._src.core.validation import warn_once
from flax_mha._src.engines.engine import (
    EMPTY,
    Engine,
    reason_against_platform,
    reasons_against_dtype,
)
from flax_mha._src.engines.kernels import cudnn_faults, guarded
from flax_mha._src.engines.kernels import mask as kernel_mask
from flax_mha._src.engines.kernels.mask import Arrays
from flax_mha._src.masks.visible import Visible
from flax_mha._src.plan import Plan

DTYPES = (jnp.float16, jnp.bfloat16)
DTYPES_OF_BIAS = (jnp.bfloat16,)
# Lengths are padded to a multiple of this: backward plans fail for odd lengths, and
# returned NaN for odd multiples of 64 (pytorch/pytorch#196678).
SIDE = 128

# Statuses of XLA that have causes outside of the kernel, such as full memory.
PASSING = re.compile("RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED")

# The most scores with a bias, 512 MiB: it is copied for every batch entry and head,
# because `jax.nn` supports no other bias under `jax.vmap`.
MAX_SCORES_OF_BIAS = 2**28

# The first visible key of each query, and one past its last.
Range = tuple[Int[Array, "B T"], Int[Array, "B T"]]
# Numbers of queries and keys that are used.
Lengths = tuple[Int[Array, " B"] | None, Int[Array, " B"] | None]
T = TypeVar("T")


class Device(NamedTuple):
    """A device, and its CUDA compute capability, which is None if it is not an NVIDIA
    GPU.
    """

    name: str
    capability: tuple[int, int] | None


H100 = Device("NVIDIA H100", (9, 0))


def device(platform: str) -> Device:
    if platform != "gpu":
        return Device(platform, None)
    first = jax.devices("gpu")[0]
    text = str(getattr(first, "compute_capability", ""))
    version = re.fullmatch(r"(\d+)\.(\d+)", text)
    if version is None:  # GPUs of other makers have none, or one of another form
        return Device(first.device_kind, None)
    return Device(first.device_kind, (int(version[1]), int(version[2])))


class Kernel(NamedTuple):
    """The static part of a call of cuDNN's attention, which decides whether cuDNN has
    an execution plan for it.

    It is a `guarded.Fused`: `guarded.around_kernel` keeps NaN in masked keys out of the
    result.
    """

    query: tuple[int, ...]  # shape of the padded queries [B, T, N, H]
    key: tuple[int, ...]  # shape of the padded keys [B, S, K, H]
    dtype: DTypeLike
    scale: float
    # Whether queries attend to no later key; cuDNN has no other limit on the right.
    is_causal: bool
    # (left, 0), where `jax.nn` requires the 0 to repeat `is_causal`; None for no limit
    # on the left.
    window: tuple[int, int] | None
    padded: bool  # whether lengths are given
    has_bias: bool = False

    def __call__(self, arrays: Arrays, lengths: Lengths, residual: bool) -> list[Array]:
        """Computes [output] or, with `residual`, [output, log-sum-exp]; the log-sum-exp
        has no gradient.

        `arrays` are padded, and their bias has the axes [B, N, t, s].
        """
        query_lengths, key_lengths = lengths
        results = jax.nn.dot_product_attention(
            arrays.query,
            arrays.key,
            arrays.value,
            arrays.bias,
            scale=self.scale,
            is_causal=self.is_causal,
            query_seq_lengths=query_lengths,
            key_value_seq_lengths=key_lengths,
            local_window_size=self.window,
            implementation="cudnn",
            return_residual=residual,  # type: ignore[call-overload]
        )
        if residual:
            return list(results)
        return [results]

    def run(
        self, arrays: Arrays, mask: Visible, differentiated: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        """Returns the output, and arrays to check: the output is correct if all of
        these arrays are finite.

        If `differentiated`, the gradients are then correct, too. Queries without
        visible keys get the output 0.
        """
        bias = arrays.bias
        all_see_keys = kernel_mask.every_row_sees_a_key(mask, arrays.lengths)
        visible = None
        if not all_see_keys:
            visible = kernel_mask.visible_range(mask, arrays)
        output, lse = _padded(self, arrays, visible, residual=True)

        # cuDNN's output is arbitrary if all keys of a query are masked.
        if bias is not None or not all_see_keys:
            masked = kernel_mask.masked_rows(mask, arrays)
            output = jnp.where(masked[..., None], jnp.zeros_like(output), output)
            lse = jnp.where(masked, jnp.zeros_like(lse), lse)

        # Without gradients, a query affects only its own output. Then check its
        # log-sum-exp, which is much smaller.
        checked = arrays.query if differentiated else lse
        if bias is None:
            return output, (checked, arrays.key, arrays.value)
        # -inf in a bias only masks.
        bias = jnp.where(bias == -jnp.inf, jnp.zeros_like(bias), bias)
        return output, (checked, arrays.key, arrays.value, bias)


def _kernel(call: Call, mask: Visible) -> Kernel:
    query = call.query
    batch = math.prod(call.batch)
    queries, keys = call.lengths
    rows = queries + -queries % SIDE
    columns = keys + -keys % SIDE
    is_causal = mask.right == 0
    if is_causal:
        # cuDNN's causal masks are square: cut keys after the last query, or pad missing
        # keys.
        columns = rows
    has_padding = rows > queries or columns > keys
    has_lengths = mask.query_lengths is not None or mask.key_lengths is not None
    window = None
    if mask.left is not None:
        window = (mask.left, 0)
    return Kernel(
        query=(batch, rows, *query.shape[-2:]),
        key=(batch, columns, *call.key.shape[-2:]),
        dtype=query.dtype,
        scale=call.scale,
        is_causal=is_causal,
        window=window,
        padded=has_padding or has_lengths,
        has_bias=call.bias is not None,
    )


def refusals(call: Call) -> list[str]:
    """Lists the reasons why cuDNN cannot compute a call; if it finds none, it also
    tries to compile the kernel.

    If the GPU is only assumed (`Target.assumed`), it lists why an H100 cannot compute
    the call; it compiles nothing.
    """
    mask = kernel_mask.kernel_mask(call)
    kernel = _kernel(call, mask)
    target = call.target
    if target.assumed and target.platform == "gpu":
        here = H100  # this machine may have no GPU to ask
    else:
        here = device(target.platform)

    # Arguments, then the device.
    reasons = kernel_mask.refusals(call, mask, ["bias"])
    reasons += _refusals_of_bias(call)
    if here.capability is None:
        reasons.append(reason_against_platform("cuda", "NVIDIA GPUs", here.name))
    elif here.capability < (8, 0):
        has = ".".join(map(str, here.capability))
        reasons.append(
            f"it requires compute capability 8.0, but {here.name} has {has}: use an "
            "A100 or a newer GPU"
        )
    else:
        facts = cudnn_faults.Facts(
            queries=call.lengths[0],
            keys=kernel.key[1],
            has_window=kernel.window is not None,
            has_lengths=kernel.padded,
        )
        reasons += cudnn_faults.reasons_against_version(here.capability, facts)

    # Dtype and sizes.
    reasons += reasons_against_dtype(DTYPES, call.query.dtype)
    head_size = call.query.shape[-1]
    value_size = call.value.shape[-1]
    largest = 128
    if here.capability is not None and here.capability >= (9, 0):
        largest = 256
    if head_size % 8 or head_size > largest:
        reasons.append(
            f"the head size must be a multiple of 8 up to {largest}, but is "
            f"{head_size}: change num_heads or qkv_features"
        )
    if value_size != head_size:
        reasons.append(
            f"the value head size must equal the key head size, {head_size}, but is "
            f"{value_size}: make both equal, for example by padding the smaller one "
            "with zeros"
        )
    if 0 in call.query.shape or 0 in call.key.shape:
        reasons.append(EMPTY)

    # The mask: a limit on the left needs one on the right, at the query itself.
    if mask.segments is not None:
        reasons.append(
            "jax.nn does not pass segment ids to it: make each document a batch row, "
            "and pass lengths"
        )
    ends_elsewhere = mask.right not in (None, 0)
    only_left = mask.left is not None and mask.right is None
    begins_later = mask.left is not None and mask.left < 0
    if ends_elsewhere or only_left or begins_later:
        reasons.append(
            "a causal mask or window must end at the query itself: pass is_causal=True "
            "or local_window_size=(left, 0), and equal offsets"
        )
    if reasons or target.assumed:
        return reasons
    try:
        return failure(kernel)
    except PassingError as error:
        reason, status = error.args
        # Without the reason, in which numbers of bytes differ.
        warn_once(
            f"cuDNN could not compile a kernel ({status}), so another implementation "
            "is used; programs that are compiled now keep it. To try again in a "
            "program that is already compiled, call jax.clear_caches()."
        )
        return [reason]


def _refusals_of_bias(call: Call) -> list[str]:
    bias = call.bias
    if bias is None:
        return []
    batch = call.batch
    reasons = []
    if bias.dtype not in DTYPES_OF_BIAS or bias.dtype != call.query.dtype:
        # It would round float32, and float16 has no finite number that masks like -inf.
        reasons.append(
            f"bias and query must be bfloat16, but are {bias.dtype} and "
            f"{call.query.dtype}: pass both as jnp.bfloat16"
        )
    if bias.shape[-2:] != call.lengths:
        reasons.append(
            f"the last two axes of bias must be {call.lengths}, but are "
            f"{bias.shape[-2:]}: use jnp.broadcast_to, or pass lengths if it only "
            "masks padding"
        )
    if bias.shape[:-3] not in (batch, (1,) * len(batch)):
        reasons.append(
            f"the batch axes of bias must be {batch} or all 1, but are "
            f"{bias.shape[:-3]}: use jnp.broadcast_to"
        )
    scores = math.prod((*batch, call.num_heads, *call.lengths))
    if scores > MAX_SCORES_OF_BIAS:
        reasons.append(
            "it copies bias for every batch entry and head, up to "
            f"{MAX_SCORES_OF_BIAS:,} elements, but this call needs {scores:,}: use "
            "smaller batches, or lengths and windows if it only masks"
        )
    if call.target.may_be_split:
        reasons.append(f"with a bias, {NEEDS_SHARDING}")
    return reasons


class PassingError(Exception):
    """The kernel did not compile, but may compile later. Holds the reason against the
    kernel, and XLA's status.
    """


# A PassingError is not cached, so the next call tries again.
@functools.lru_cache(maxsize=1024)
def failure(kernel: Kernel) -> list[str]:
    """Compiles the kernel, forward and backward; returns a list with cuDNN's error if
    that fails, else [].

    Raises:
      PassingError: If it fails for a reason that may be gone later.
    """
    batch, rows, num_heads, _ = kernel.query
    columns = kernel.key[1]
    query: Any = jax.ShapeDtypeStruct(kernel.query, kernel.dtype)
    key: Any = jax.ShapeDtypeStruct(kernel.key, kernel.dtype)
    lengths = None
    if kernel.padded:
        lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    bias: Any = None
    if kernel.has_bias:
        bias = jax.ShapeDtypeStruct((batch, num_heads, rows, columns), kernel.dtype)

    def both(arrays: Arrays, lengths: Array | None) -> tuple:
        def attend(arrays: Arrays) -> list[Array]:
            return kernel(arrays, (lengths, lengths), residual=False)

        output, pull = jax.vjp(attend, arrays)
        return output, pull(output)

    try:
        jax.jit(both).lower(Arrays(query, key, key, bias), lengths).compile()
    except Exception as error:  # any error means that the kernel cannot run
        what = str(error).strip().splitlines()[0]
        status = PASSING.search(str(error))
        if status:
            raise PassingError(
                f"cuDNN could not compile its kernel for this call ({what}): run it "
                "again when the device has free memory and responds",
                status[0],
            ) from error
        return [
            f"cuDNN has no execution plan for this call ({what}): use different "
            "shapes, or a different version of jax or cuDNN"
        ]
    return []


@dataclasses.dataclass(frozen=True)
class CuDNN(Engine):
    """The engine that calls cuDNN's fused attention. It returns no log-sum-exp, because
    cuDNN's has no gradient.
    """

    name = "cudnn"
    platform = "gpu"
    guard_first = False

    def supports(self, call: Call) -> list[str]:
        return super().supports(call) or refusals(call)

    def forward(self, plan: Plan, call: Call) -> Result:
        mask = kernel_mask.flat_mask(call)
        kernel = _kernel(call, mask)

        # A causal kernel takes no keys after its last query (`_kernel`).
        axes = len(call.batch)
        query, key, value = (kernel_mask.flat(x, axes) for x in call.inputs)
        columns = kernel.key[1]
        bias = None
        if call.bias is not None:
            bias = _flat_bias(call.bias, call)[..., :columns]
        arrays = Arrays(query, key[:, :columns], value[:, :columns], bias)

        if bias is None and not mask.hides_keys:
            [output] = _padded(kernel, arrays, None)
        elif call.target.may_be_split:
            # No `lax.cond`: devices might take different branches.
            warn_once(
                '"cudnn" masks this call on copies of its arrays: to mask without '
                f"copies, {NEEDS_SHARDING}{EXAMPLES_OF_SHARDING}"
            )
            output = guarded.on_guarded(kernel, arrays, mask)
        else:
            arrays, mask = varying_alike((arrays, mask))
            output = guarded.around_kernel(kernel, arrays, mask)
        return Result(output.reshape(call.query.shape), None)


def _flat_bias(bias: Array, call: Call) -> Float[Array, "B T N S"]:
    """Broadcasts a call's bias to all batch entries and heads, in the layout of
    `Arrays` (one batch axis).
    """
    bias = jnp.broadcast_to(bias, (*call.batch, call.num_heads, *call.lengths))
    return jnp.swapaxes(kernel_mask.flat(bias, len(call.batch)), 1, 2)


def _padded(
    kernel: Kernel, arrays: Arrays, visible: Range | None, residual: bool = False
) -> list[Array]:
    """Pads `arrays`, runs the kernel, and cuts the padding off. Returns [output] or,
    with `residual`, [output, log-sum-exp].

    `visible` holds each query's first visible key, and one past its last; None if every
    query has a visible key.
    """
    batch, queries = arrays.query.shape[:2]
    lengths: Lengths = (None, None)
    if kernel.padded:
        # Queries with a visible key come first, so cuDNN gets their number, at least 1,
        # as the query length.
        rows = jnp.full(batch, queries, jnp.int32)
        columns = jnp.full(batch, arrays.key.shape[1], jnp.int32)
        if visible is not None:
            first, end = visible
            rows = jnp.sum(first < end, axis=1, dtype=jnp.int32)
            columns = jnp.max(end, axis=1)
        lengths = (jnp.maximum(rows, 1), jnp.maximum(columns, 1))
    padded = Arrays(
        query=kernel_mask.pad_to(arrays.query, 1, kernel.query[1]),
        key=kernel_mask.pad_to(arrays.key, 1, kernel.key[1]),
        value=kernel_mask.pad_to(arrays.value, 1, kernel.key[1]),
    )
    if arrays.bias is not None:
        padded = padded._replace(bias=_finite_bias(kernel, arrays.bias))
    results = _run(kernel, residual, padded, lengths)
    return [x[:, :queries] for x in results]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    kernel: Kernel, residual: bool, arrays: Arrays, lengths: Lengths
) -> list[Array]:
    """Runs the kernel on padded arrays; returns [output] or, with `residual`, [output,
    log-sum-exp].

    Forward and backward, `jax.vmap` maps either all arrays or none: see `_vmap_alike`.
    """
    arrays, lengths = _vmap_alike((arrays, lengths))
    return kernel(arrays, lengths, residual)


def _forward(
    kernel: Kernel, residual: bool, arrays: Arrays, lengths: Lengths
) -> tuple[list[Array], Any]:
    arrays, lengths = _vmap_alike((arrays, lengths))

    return jax.vjp(lambda arrays: kernel(arrays, lengths, residual), arrays)


def _backward(
    kernel: Kernel, residual: bool, pull: Any, cotangents: list[Array]
) -> tuple[Arrays, None]:
    # `jax.vmap` may map only cotangents, as in `jax.jacrev`.
    pull, cotangents = _vmap_alike((pull, cotangents))
    [gradients] = pull(cotangents)
    return gradients, None


_run.defvjp(_forward, _backward)


def _vmap_alike(tree: T) -> T:
    """Makes all arrays depend on one another, with the same values, so that `jax.vmap`
    maps all of them or none.

    JAX's rules to `vmap` cuDNN's kernel require that (jax-ml/jax#34920, #36702). XLA
    removes the added operations.
    """
    firsts = [x.ravel()[0] for x in jax.tree.leaves(tree) if x.size]
    any_is_nan = functools.reduce(jnp.logical_or, (x != x for x in firsts))
    never = any_is_nan & False

    def depend(x: Array) -> Array:
        if x.size == 0:
            return x
        return jnp.where(never, jnp.zeros_like(x), x)

    return jax.tree.map(depend, tree)


def _finite_bias(
    kernel: Kernel, bias: Float[Array, "B T N S"]
) -> Float[Array, "B N t s"]:
    """Replaces -inf in a bias by a very negative number; converts it to the kernel's
    axes and padded lengths.
    """
    # Not the lowest number: with a negative score added, it would be -inf again.
    lowest = jnp.asarray(0.7 * float(jnp.finfo(bias.dtype).min), bias.dtype)
    bias = jnp.where(bias == -jnp.inf, lowest, bias)
    bias = jnp.swapaxes(bias, 1, 2)
    bias = kernel_mask.pad_to(bias, 2, kernel.query[1])
    return kernel_mask.pad_to(bias, 3, kernel.key[1])
