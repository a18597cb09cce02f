"""The engine of NVIDIA's fused attention.

cuDNN computes a causal mask, perhaps with a window to the left, and lengths. All other
masks become a bias: 0 for visible scores, `HIDDEN` for others. The output of queries
whose keys are all masked is set to 0, and `guarded.around_kernel` keeps NaN and
infinity in masked keys out of the result.
"""

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha._src.call.call import Call, Result
from flax_mha._src.core.tracing import by_itself
from flax_mha._src.core.validation import warn_once
from flax_mha._src.engines.engine import (
    EMPTY,
    Engine,
    reason_against_platform,
    reasons_against_dtype,
)
from flax_mha._src.engines.kernels import guarded
from flax_mha._src.engines.kernels import mask as kernel_mask
from flax_mha._src.engines.kernels.cudnn import call as calls
from flax_mha._src.engines.kernels.cudnn import faults, trials
from flax_mha._src.engines.kernels.cudnn.attend import attend
from flax_mha._src.engines.kernels.cudnn.call import Operands, Settings, described
from flax_mha._src.engines.kernels.mask import Arrays
from flax_mha._src.masks import ArrayMask
from flax_mha._src.masks.visible import Visible
from flax_mha._src.plan import Plan

DTYPES = (jnp.float16, jnp.bfloat16)
# float16 has no number that hides a score and can be added to any other.
DTYPES_OF_BIAS = (jnp.bfloat16,)
# Lengths are padded to a multiple of this: backward plans fail for odd lengths, and
# returned NaN for odd multiples of 64 (pytorch/pytorch#196678).
SIDE = 128
# Added to scores, this hides them: exp is 0, also if a visible score has `LOWEST`, the
# least bias. Both are finite when multiplied by log2(e), for -inf - -inf would be NaN.
HIDDEN = -(2.0**100)
LOWEST = -(2.0**99)
# A row whose largest bias is further from 0 is shifted by it.
FAR = 2.0**13
# The most numbers in a bias, 512 MiB.
MAX_BIAS = 2**28

# Kinds of calls that were not timed (`_kinds`) are chosen from this T x S on.
MIN_SCORES = 2**20

# Statuses of XLA that have causes outside of the kernel, such as full memory.
PASSING = re.compile("RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED")


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
    if version is None:  # on GPUs that are not NVIDIA's
        return Device(first.device_kind, None)
    return Device(first.device_kind, (int(version[1]), int(version[2])))


class Form(NamedTuple):
    """How a call becomes a call of cuDNN: what is known without its values."""

    fused: "Fused"
    # What cuDNN hides by itself, in rows and columns.
    own: Visible
    # Masks that become a bias, in positions; None if there are none.
    others: Visible | None

    @classmethod
    def of(cls, call: Call) -> "Form":
        limits = kernel_mask.kernel_mask(call)
        has_window = limits.left is not None or limits.right is not None
        begins_before = limits.left is None or limits.left >= 0
        ends_at_query = limits.right == 0 and call.offsets.are_known
        has_own_window = ends_at_query and begins_before
        own = dataclasses.replace(limits, segments=None, rest=None)
        if not has_own_window:
            own = dataclasses.replace(own, left=None, right=None)
        others = None
        if call.mask is not None:
            others = dataclasses.replace(
                call.mask, query_lengths=None, key_lengths=None
            )
            if has_own_window or not has_window:
                others = dataclasses.replace(others, left=None, right=None)
            if not others.hides_keys:
                others = None

        query, key, value = call.inputs
        batch = math.prod(call.batch)
        queries, keys = call.lengths
        rows = queries + -queries % SIDE
        columns = keys + -keys % SIDE
        if has_own_window:
            # cuDNN's causal masks are square: cut keys after the last query, or pad
            # missing keys.
            columns = rows
        lengths = None
        if jax.tree.leaves(own) or rows > queries or columns > keys:
            lengths = described(batch, dtype=jnp.int32)
        bias = None
        if call.bias is not None or others is not None:
            # The numbers of batch entries and of heads: 1, or all.
            by_batch = by_head = False
            if others is not None:
                by_batch, by_head = kernel_mask.depends_on(call, others)
            if call.bias is not None:
                *entries, heads, _, _ = call.bias.shape
                # Lengths may leave different numbers visible: see `largest_bias`.
                has_lengths = bool(jax.tree.leaves(own))
                by_batch = by_batch or has_lengths or math.prod(entries) > 1
                by_head = by_head or heads > 1
            bias = described(
                batch if by_batch else 1,
                call.num_heads if by_head else 1,
                rows,
                columns,
                dtype=query.dtype,
            )
        operands = Operands(
            described(batch, rows, *query.shape[-2:], dtype=query.dtype),
            described(batch, columns, *key.shape[-2:], dtype=query.dtype),
            described(batch, columns, *value.shape[-2:], dtype=query.dtype),
            bias,
            lengths,
            lengths,
        )
        settings = Settings(
            call.scale,
            is_causal=has_own_window,
            left=own.left,
            lse_gradient=call.return_residual,
            may_be_split=call.target.may_be_split,
        )
        return cls(Fused(settings, operands), own, others)


class Fused(NamedTuple):
    """cuDNN's kernel as a `guarded.Fused`."""

    settings: Settings
    operands: Operands  # shapes and dtypes, padded

    @property
    def scale(self) -> float:
        return self.settings.scale

    def with_bias_gradient(self) -> "Fused":
        """Returns the kernel if the bias gets a gradient: its bias has an entry for
        each batch entry and head.

        JAX's tests have cuDNN add up gradients of a bias over batch entries, but not
        over heads.
        """
        batch, _, heads, _ = self.operands.query.shape
        bias: Any = self.operands.bias
        if bias.shape[:2] != (1, heads):
            shape = (batch, heads, *bias.shape[2:])
            bias = described(*shape, dtype=bias.dtype)
        return Fused(
            self.settings._replace(bias_gradient=True),
            self.operands._replace(bias=bias),
        )

    def run(
        self, arrays: Arrays, mask: Visible, differentiated: guarded.Names
    ) -> tuple[guarded.Results, tuple[Array, ...]]:
        """Returns the output and, if it gets a gradient, the log-sum-exp. `mask.rest`
        is an `ArrayMask` or None.
        """
        settings, shapes = self
        if "bias" in differentiated:
            settings, shapes = self.with_bias_gradient()
        queries, keys = arrays.lengths

        # Rows without visible keys, [B, T, #N].
        masked = None
        bias = None
        shift = None
        if arrays.bias is not None:
            largest = kernel_mask.largest_bias(mask, arrays)
            masked = largest == -jnp.inf
            # cuDNN's backward pass recomputes weights from the log-sum-exp, which is
            # rounded: floats are 64 apart at -1e9, a usual bias of masked scores. So
            # rows with such a log-sum-exp are shifted.
            shift = jnp.maximum(largest, LOWEST).astype(jnp.float32)
            is_near = jnp.abs(shift) <= FAR
            shift = jnp.where(masked | is_near, jnp.zeros_like(shift), shift)
        elif not kernel_mask.every_row_sees_a_key(mask, (queries, keys)):
            masked = kernel_mask.masked_rows(mask, arrays)
        if shapes.bias is not None:
            bias = _merged_bias(arrays, mask, shift)
            bias = jnp.broadcast_to(bias, (*shapes.bias.shape[:2], queries, keys))

        # How many queries and keys cuDNN uses, at least 1.
        lengths: Any = (None, None)
        if shapes.key_lengths is not None and masked is not None:
            # Queries that see a key by window and lengths come before all others.
            first, end = kernel_mask.visible_range(mask, arrays)
            counts = (jnp.sum(first < end, 1, jnp.int32), jnp.max(end, axis=1))
            lengths = [jnp.maximum(x, 1) for x in counts]
        elif shapes.key_lengths is not None:
            # Of the padding. All keys, so that each gets a gradient.
            batch = shapes.query.shape[:1]
            lengths = [jnp.full(batch, x, jnp.int32) for x in (queries, keys)]
        rows, columns = shapes.query.shape[1], shapes.key.shape[1]
        operands = Operands(
            kernel_mask.pad_to(arrays.query, 1, rows),
            kernel_mask.pad_to(arrays.key, 1, columns),
            kernel_mask.pad_to(arrays.value, 1, columns),
            bias,
            *lengths,
        )
        if bias is not None:
            padded = kernel_mask.pad_to(bias, 2, rows)
            padded = kernel_mask.pad_to(padded, 3, columns)
            operands = operands._replace(bias=padded)
        sinks = arrays.sinks
        if sinks is not None:
            sinks = sinks[..., None]
            if shift is not None:
                sinks = sinks - _by_row(shift, rows, 0)
            if masked is None:
                masked = jnp.zeros((1, queries, 1), bool)
        if masked is not None:
            masked = _by_row(masked, rows, True)
        output, lse = attend(settings, operands, sinks, masked)
        output = output[:, :queries]
        lse = jnp.swapaxes(lse[:, :, :queries], 1, 2)
        if shift is not None:
            lse = lse + shift
        if shift is not None and arrays.sinks is not None:
            # Where a sink is so much larger, its distance to the shift was rounded.
            sink = arrays.sinks[:, None]
            is_larger = (shift < 0) & (sink - shift > FAR)
            lse = jnp.where(is_larger, sink, lse)

        # Without gradients, a query affects only its own output. Then check its
        # log-sum-exp, which is much smaller.
        decisive = [arrays.query, arrays.key, arrays.value]
        if not differentiated:
            decisive[0] = _only_masking(lse)
        if bias is not None:
            decisive.append(bias)
        if arrays.sinks is not None:
            decisive.append(_only_masking(arrays.sinks))
        results: guarded.Results = (output,)
        if settings.lse_gradient:
            results = (output, lse)
        return results, tuple(decisive)


def _by_row(x: Array, rows: int, padding: Any) -> Array:
    """Converts [B, T, N] to [B, N, t], with `padding` in padded rows."""
    widths = ((0, 0), (0, 0), (0, rows - x.shape[1]))
    return jnp.pad(jnp.swapaxes(x, 1, 2), widths, constant_values=padding)


def _only_masking(x: Array) -> Array:
    """Replaces -inf, which is no error in a log-sum-exp or a sink, by 0."""
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def _merged_bias(
    arrays: Arrays, mask: Visible, shift: Any
) -> Float[Array, "#B #N T|1 S|1"]:
    """Computes the bias that also masks: at least `LOWEST` for visible scores,
    otherwise `HIDDEN`. Subtracts `shift` [B, T, #N] from each row.
    """
    dtype = arrays.query.dtype
    hidden = jnp.asarray(HIDDEN, dtype)
    visible: Any = None
    if isinstance(mask.rest, ArrayMask):
        visible = mask.rest.visible
    if arrays.bias is None:
        return jnp.where(visible, jnp.zeros((), dtype), hidden)
    bias = arrays.bias
    # A bias that is raised keeps its gradient.
    lowest = jnp.asarray(LOWEST, dtype) + (bias - jax.lax.stop_gradient(bias))
    bias = jnp.where(bias < LOWEST, lowest, bias)
    shift = jnp.swapaxes(shift, 1, 2)[..., None]
    bias = bias - shift.astype(dtype)
    bias = jnp.where(arrays.bias == -jnp.inf, hidden, bias)
    if visible is None:
        return bias
    return jnp.where(visible, bias, hidden)


def _here(call: Call) -> Device:
    """Returns the device that a call runs on."""
    if call.target.assumed and call.target.platform == "gpu":
        return H100  # this machine may have no GPU to ask
    return device(call.target.platform)


class PassingError(Exception):
    """The kernel did not compile, but may compile later. Holds the reason against the
    kernel, and XLA's status.
    """


# A PassingError is not cached, so the next call tries again.
@functools.lru_cache(maxsize=1024)
def failure(fused: Fused) -> list[str]:
    """Compiles the kernel, forward and backward; returns a list with cuDNN's error if
    that fails, otherwise [].

    Raises:
      PassingError: If it fails for a reason that may be gone later.
    """
    # Arrays are on one device here.
    fused = fused._replace(settings=fused.settings._replace(may_be_split=False))

    differentiated = fused
    if fused.operands.bias is not None:
        differentiated = fused.with_bias_gradient()

    def both_passes(operands: Operands) -> Any:
        settings = differentiated.settings
        output, lse = calls.forward(settings, operands)
        return calls.backward(settings, operands, output, lse, output)

    def compile_passes() -> None:
        # Without a gradient, the bias may be smaller.
        if differentiated.operands != fused.operands:
            forward = functools.partial(calls.forward, fused.settings)
            jax.jit(forward).lower(fused.operands).compile()
        jax.jit(both_passes).lower(differentiated.operands).compile()

    try:
        by_itself(compile_passes)
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


def _kinds(call: Call, others: Visible | None) -> dict[trials.Kind, str]:
    """Returns the kinds of a call that `trials.py` tries, with words for them."""
    kinds: dict[trials.Kind, str] = {}
    if others is not None:
        kinds["mask"] = "a mask as a bias"
    elif call.bias is not None:
        *batch, _, rows, columns = call.bias.shape
        is_whole = tuple(batch) in (call.batch, (1,) * len(batch))
        if not is_whole or (rows, columns) != call.lengths:
            kinds["mask"] = "a bias that is broadcast"
    if call.return_residual:
        kinds["residual"] = "return_residual"
    if call.sinks is not None:
        kinds["sinks"] = "sinks"
    return kinds


def _attend(call: Call) -> Result:
    engine = CuDNN()
    plan, call = engine.plan(call)
    return engine.forward(plan, call)


@dataclasses.dataclass(frozen=True)
class CuDNN(Engine):
    """The engine that calls cuDNN's fused attention."""

    name = "cudnn"
    platform = "gpu"
    guard_first = False

    def supports(self, call: Call) -> list[str]:
        """Lists the reasons why cuDNN cannot compute a call; if there are none, it also
        tries to compile the kernel.

        If the GPU is only assumed (`Target.assumed`), it lists why an H100 cannot
        compute the call; it compiles nothing.
        """
        reasons = super().supports(call)
        if reasons:
            return reasons
        fused, own, others = Form.of(call)
        shapes = fused.operands
        here = _here(call)

        # Arguments, then the device.
        supported = [
            "bias",
            "sinks",
            "query_offset",
            "key_value_offset",
            "return_residual",
        ]
        reasons = kernel_mask.reasons_against(call, own, supported)
        dtype = call.query.dtype
        if call.bias is not None:
            if call.bias.dtype not in DTYPES_OF_BIAS or call.bias.dtype != dtype:
                # It would round float32.
                reasons.append(
                    f"bias and query must be bfloat16, but are {call.bias.dtype} and "
                    f"{dtype}: pass both as jnp.bfloat16"
                )
        elif others is not None and dtype not in DTYPES_OF_BIAS:
            reasons.append(
                "its mask becomes a bias, for which the inputs must be bfloat16, but "
                f"are {dtype}: use bfloat16, or only lengths, is_causal=True and "
                "local_window_size=(left, 0) with equal offsets"
            )
        if shapes.bias is not None and math.prod(shapes.bias.shape) > MAX_BIAS:
            reasons.append(
                "its bias, or the one that its mask becomes, would have "
                f"{math.prod(shapes.bias.shape):,} numbers, more than {MAX_BIAS:,}: "
                "use smaller batches, or lengths and windows if it only masks"
            )
        if here.capability is None:
            reasons.append(reason_against_platform("cuda", "NVIDIA GPUs", here.name))
        elif here.capability < (8, 0):
            has = ".".join(map(str, here.capability))
            reasons.append(
                f"it requires compute capability 8.0, but {here.name} has {has}: use "
                "an A100 or a newer GPU"
            )
        else:
            facts = faults.Facts(
                queries=call.lengths[0],
                keys=shapes.key.shape[1],
                has_window=own.left is not None,
                has_lengths=shapes.key_lengths is not None,
                has_bias=shapes.bias is not None,
                query_elements=math.prod(shapes.query.shape),
            )
            reasons += faults.reasons_against_version(here.capability, facts)

        # Dtype and sizes.
        reasons += reasons_against_dtype(DTYPES, dtype)
        head_size = call.query.shape[-1]
        value_size = call.value.shape[-1]
        # The backward pass on Hopper, and on other GPUs (`faults.SUPPORT`).
        largest = 128
        if here.capability is not None and here.capability[0] == 9:
            largest = 256
        if head_size % 8 or head_size > largest:
            reasons.append(
                f"the head size must be a multiple of 8 up to {largest}, but is "
                f"{head_size}: change num_heads or qkv_features"
            )
        if value_size != head_size:
            reasons.append(
                f"the value head size must equal the key head size, {head_size}, but "
                f"is {value_size}: make both equal, for example by padding the smaller "
                "one with zeros"
            )
        if 0 in call.query.shape or 0 in call.key.shape:
            reasons.append(EMPTY)
        if call.cached:
            reasons.append(
                "it does not read a cache in place: to attend to a copy of the cache, "
                'pass implementation="cudnn"'
            )
        if reasons or call.target.assumed:
            return reasons
        try:
            reasons = failure(fused)
        except PassingError as error:
            reason, status = error.args
            # Without the reason, in which numbers of bytes differ.
            warn_once(
                f"cuDNN could not compile a kernel ({status}), so another "
                "implementation is used; programs that are compiled now keep it. To "
                "try again in a program that is already compiled, call "
                "jax.clear_caches()."
            )
            return [reason]
        if not reasons and (call.sinks is not None or call.return_residual):
            return calls.differences_from_jax()
        return reasons

    def doubts(self, call: Call) -> list[str]:
        """Lists reasons against a call of the kinds in `trials.py`, which may not have
        run on such a GPU: it is short, or its trial failed or is not possible.
        """
        kinds = _kinds(call, Form.of(call).others)
        if not kinds:
            return []
        scores = math.prod(call.lengths)
        if scores < MIN_SCORES:
            return [
                f"with {' and '.join(kinds.values())}, it is chosen from T x S = "
                f"{MIN_SCORES:,} on, but this call has {scores:,}: pass "
                'implementation="cudnn"'
            ]
        if call.target.assumed:
            return []
        size = call.query.shape[-1]
        capability = _here(call).capability
        reasons = []
        for kind in kinds:
            reasons += trials.doubts(kind, call.query.dtype, size, capability, _attend)
        return reasons

    def variant(self, call: Call) -> str | None:
        fused, _, others = Form.of(call)
        bias: Any = fused.operands.bias
        words = []
        if others is not None:
            size = math.prod(bias.shape) * bias.dtype.itemsize
            words.append(f"with the mask as a bias of {size / 2**20:,.3g} MiB")
        if call.target.assumed and _kinds(call, others):
            words.append("if its trial on the device succeeds")
        return ", ".join(words) or None

    def forward(self, plan: Plan, call: Call) -> Result:
        fused, own, others = Form.of(call)
        mask = kernel_mask.flattened(call, own)
        axes = len(call.batch)
        query, key, value = (kernel_mask.flat(x, axes) for x in call.inputs)
        # A causal kernel gets no keys after its last query.
        columns = fused.operands.key.shape[1]
        arrays = Arrays(query, key[:, :columns], value[:, :columns])
        if others is not None:
            visible = kernel_mask.as_array(call, others)[..., :columns]
            mask = dataclasses.replace(mask, rest=ArrayMask(visible))
        if call.bias is not None:
            bias = call.bias
            # If all entries share it, the batch axis has length 1.
            if math.prod(bias.shape[:axes]) > 1:
                bias = jnp.broadcast_to(bias, (*call.batch, *bias.shape[axes:]))
            bias = kernel_mask.flat(bias, axes)[..., :columns]
            arrays = arrays._replace(bias=bias)
        arrays = arrays._replace(sinks=kernel_mask.flat_sinks(call))
        output, *rows = guarded.compute(fused, arrays, mask)
        output = output.reshape(call.query.shape)
        if rows:
            return Result(output, rows[0].reshape(output.shape[:-1]))
        return Result(output, None)
