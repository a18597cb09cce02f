"""The engine "pallas": which calls it refuses, its tiles, the inputs of its kernels, and their first derivatives.

One set of kernels supports nearly every argument, forward and backward. These kernels have never run on a TPU, so they
are only used with `implementation="pallas"`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from flax_mha._src import guard
from flax_mha._src.call.operands import DEFAULT_PRECISION, Call, Result
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.engines.engine import Engine
from flax_mha._src.engines.kernels import tpu as tpu_kernels
from flax_mha._src.engines.pallas import kernels
from flax_mha._src.engines.pallas.inputs import Inputs, KernelPlan, TileMask, TileRule
from flax_mha._src.engines.pallas.launch import MOST_WORDS, KernelCall
from flax_mha._src.engines.pallas.split_function import LANES, RefusedError, TileFunction, split
from flax_mha._src.math.head import from_caller, heads_of, map_heads, to_caller
from flax_mha._src.math.scores import ScoreRule
from flax_mha._src.math.tiling import InsideMask, Tiling, occupancy, with_occupancy
from flax_mha._src.plan import Plan
from flax_mha.masks import Mask, Occupancy
from flax_mha.masks.function import TracedMask, functions_of, map_functions

Arrays = tuple[Array, ...]
HIGHEST = ("highest", "float32", lax.Precision.HIGHEST)
# The compiler holds about one tile in fast memory for each equation of a user's function and its derivative. With more
# equations than this, tiles of 512 x 512 do not fit, and with four times as many, neither do those of 256 x 256.
MOST_EQUATIONS = 32


@dataclasses.dataclass(frozen=True)
class Pallas(Engine):
    """The engine of this package's TPU kernels. `interpret` is passed to `pallas_call`: True runs anywhere, slowly."""

    name = "pallas"
    platform = "tpu"
    shares = True
    interpret: Any = False

    def supports(self, call: Call) -> list[str]:
        (operands, options), reasons = call, tpu_kernels.refusals(call)
        for name, function, num_captured in _functions(call):
            try:
                split(function, num_captured)
            except RefusedError as refused:
                reasons.append(f"{name} {refused}")
        if options.ring:
            reasons.append("it cannot read a ring cache in place: create the cache without a window")
        precision = options.precision or jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        if precision not in DEFAULT_PRECISION and not (precision in HIGHEST and operands.query.dtype == jnp.float32):
            reasons.append(
                f"it supports only the default matmul precision (or the highest, for float32), not {precision}: leave "
                "precision out"
            )
        is_empty = 0 in (*operands.query.shape, *operands.key.shape, *operands.value.shape)
        return reasons if is_empty else reasons + _reasons_against_tiles(call)

    def plan(self, call: Call) -> tuple[Plan, Call]:
        return Plan(call.operands.query.dtype, tiling=_tiling(call)), with_occupancy(call)

    def forward(self, plan: Plan, call: Call) -> Result:
        return self._attend(plan, call, None)

    def share(self, plan: Plan, call: Call, result: Result) -> Result:
        output, lse = from_caller(result, call.operands.groups)
        return self._attend(plan, call, (output.astype(call.operands.query.dtype), lse))

    def _attend(self, plan: Plan, call: Call, known: tuple[Array, Array] | None) -> Result:
        output, lse, *largest = attend(prepare(plan, call, self.interpret), known)
        return to_caller((output, lse, largest[0] if largest else None), call.operands.query.dtype)


def _tiling(call: Call) -> Tiling:
    lengths, largest = call.operands.lengths, _largest_tile(call)
    height, width = (tpu_kernels.tile_size(length, largest) for length in lengths)
    rows, columns = -(-lengths[0] // height), -(-lengths[1] // width)
    return Tiling(lengths, rows, height, width, 1, columns, width)


def _largest_tile(call: Call) -> int:
    """Returns the largest side of a tile that fits in fast memory together with intermediates of user functions."""
    count = sum(len(function.jaxpr.eqns) for _, function, _ in _functions(call))
    return 512 if count <= MOST_EQUATIONS else 256 if count <= 4 * MOST_EQUATIONS else 128


def _functions(call: Call) -> list[tuple[str, TracedFunction, int]]:
    """Lists the user's functions: argument name, traced function, and number of captured arrays."""
    operands, score_mod = call.operands, call.options.score_mod
    functions = [] if score_mod is None else [("score_mod", score_mod, len(operands.captured + operands.constants))]
    return functions + [("mask_mod", part.function, len(part.captured)) for part in functions_of(operands.mask)]


def _reasons_against_tiles(call: Call) -> list[str]:
    """Returns [a reason] if the list of tiles to visit (`list_steps`) does not fit in scalar memory, else []."""
    operands, tiling = call.operands, _tiling(call)
    heads = math.prod(operands.query.shape[:-3]) * operands.query.shape[-2]
    lists = [heads if jax.tree.leaves((operands.mask, operands.offsets)) else operands.groups[1]]
    if operands.bias is not None:  # heads that share a gradient of the bias share a list
        lists.append(heads // math.prod(operands.bias.shape[:-2]))
    words = 2 * max(lists) * tiling.rows * tiling.cells
    if words <= MOST_WORDS:
        return []
    return [
        f"its tile table does not fit: scalar memory has room for {MOST_WORDS} words, but {tiling.rows} x "
        f"{tiling.cells} tiles for {max(lists)} heads take {words}: use smaller batches or shorter sequences"
    ]


def prepare(plan: Plan, call: Call, interpret: Any) -> KernelCall:
    """Converts a call to the arguments of kernels; these round query, key and value to `plan.dtype` for products."""
    (operands, options), tiling = call, plan.tiling
    assert tiling is not None
    head = heads_of(call, plan.dtype, operands.query.dtype)
    head = dataclasses.replace(head, query=head.finite_query)
    rule, rank = head.rule, head.query.ndim - 2
    mask = map_functions(functools.partial(_tile_mask, rank), rule.mask)
    if tiling.inside is not None:
        mask = InsideMask(*tiling.lengths) if mask is None else mask & InsideMask(*tiling.lengths)
    function: TileFunction | None = None
    values: tuple[Array, ...] = ()
    if options.score_mod is not None:
        captured = [*head.inputs.captured, *rule.constants]
        function, values = _split(options.score_mod, captured, rule.batch, rule.head, rank)
    seed, nonfinite = rule.dropout_seed, head.nonfinite
    inputs = Inputs(
        query=head.query,
        key=head.key,
        value=head.value,
        bias=head.inputs.bias,
        sink=head.inputs.sink,
        values=values,
        mask=mask,
        offsets=rule.offsets,
        seed=None if seed is None else (seed[..., 0], seed[..., 1]),
        key_poison=None if nonfinite is None else nonfinite.key,
        query_poison=None if nonfinite is None else nonfinite.query,
    )
    # Mosaic makes a product over a single feature a multiplication, which fails for bfloat16 if features come first.
    sizes = {head.query.shape[-1], head.value.shape[-1]}
    features_last = 1 in sizes or all(size % LANES == 0 for size in sizes)
    fields: dict[str, Any] = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    fields |= dict.fromkeys(("mask", "dropout_seed", "batch", "head")) | {"offsets": Offsets(), "constants": []}
    tile_rule = TileRule(**fields, function=function)
    of_kernels = KernelPlan(tile_rule, tiling, features_last, plan.dtype, operands.query.dtype, interpret)
    return KernelCall(of_kernels, inputs, _occupancy(rule, tiling, rank))


def _split(
    function: TracedFunction, captured: list[Array], batch: Any, head: Any, rank: int
) -> tuple[TileFunction, tuple[Array, ...]]:
    """Splits a user's function (`split_function.py`): returns the part that kernels compute, and values of the rest."""
    tile = split(function, len(captured))
    one, ids = jnp.zeros((1,) * rank, jnp.int32), (("b", batch), ("h", head))
    used = (jnp.asarray(x) if x is not None and function.uses(name) else one for name, x in ids)
    return tile, tuple(map_heads(lambda x: tile.outer_values(*x), (captured, *used), rank))


def _tile_mask(rank: int, mask: TracedMask) -> Mask:
    """Converts the mask of a `mask_mod`, whose arrays have `rank` axes of batch and heads, for use inside kernels."""
    tile, values = _split(mask.function, mask.captured, mask.batch, mask.head, rank)
    return TileMask(values, tile)


def _occupancy(rule: ScoreRule, tiling: Tiling, rank: int) -> Occupancy:
    """Computes which tiles [*heads, rows, columns] have some, or only, visible scores; in NumPy if masks allow it."""

    def of_head(arrays: tuple[Mask | None, Offsets]) -> Occupancy:
        return occupancy(tiling, arrays[0], arrays[1].values)

    if rule.mask is not None and jax.tree.leaves((rule.mask, rule.offsets)):
        return map_heads(of_head, (rule.mask, rule.offsets), rank)
    with jax.ensure_compile_time_eval():
        known = of_head((rule.mask, rule.offsets))
    return Occupancy(*(np.asarray(x).reshape((1,) * rank + x.shape) for x in known))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Whether the bias, and each of `Inputs.values`, needs a gradient, which is too costly to compute if unused."""

    bias: bool
    values: tuple[bool, ...]


def attend(call: KernelCall, known: Arrays | None) -> Arrays:
    """Computes output, log-sum-exp and perhaps largest scores; given `known` results, returns them (`Engine.share`)."""
    is_static = isinstance(call.occupancy.any_visible, np.ndarray)

    def call_of(inputs: Inputs, occupancy: Occupancy | None) -> KernelCall:
        return KernelCall(call.plan, inputs, call.occupancy if occupancy is None else occupancy)

    @jax.custom_vjp
    def run(inputs: Inputs, occupancy: Occupancy | None, known: Arrays | None) -> Arrays:
        return _forward(call_of(inputs, occupancy)) if known is None else known

    def forward(*arguments: Any) -> tuple[Arrays, tuple]:
        inputs, (*values, known) = arguments[0], jax.tree.map(lambda x: x.value, arguments)
        learned = tuple(x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating) for x in inputs.values)
        wanted = _Wanted(inputs.bias is not None and inputs.bias.perturbed, learned)
        results = run(*values, known)
        return results, (wanted, values, results)

    def backward(saved: tuple, cotangents: tuple) -> tuple:
        wanted, values, results = saved
        output, lse, *_ = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
        return _backward(call_of(*values), wanted, results, (output, lse)), None, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(call.inputs, None if is_static else call.occupancy, known)


def _round_operands(plan: KernelPlan, inputs: Inputs) -> Inputs:
    """Rounds query, key and value for matrix products. This runs inside the `custom_vjp`: gradients are not rounded."""
    query, key, value = (x.astype(plan.product_dtype) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


def _forward(call: KernelCall) -> Arrays:
    plan = call.plan._replace(rule=dataclasses.replace(call.plan.rule, differentiated=False))
    return kernels.forward(KernelCall(plan, _round_operands(plan, call.inputs), call.occupancy))


def _backward(call: KernelCall, wanted: _Wanted, results: Arrays, cotangents: Arrays) -> Inputs:
    """Computes gradients of all inputs from the results and their cotangents; None for inputs that have none."""
    inputs = _round_operands(call.plan, call.inputs)
    query, d_output, lse, delta = _backward_rows(
        inputs.query,
        (results[0], results[1]),
        (cotangents[0], cotangents[1]),
        keys_are_finite=inputs.key_poison is not None,
    )
    inputs = inputs._replace(query=query, d_output=d_output, lse=lse, delta=delta, key_poison=None, query_poison=None)
    call = call._replace(inputs=inputs)
    d_query, d_values = kernels.query_gradients(call, wanted.values)
    d_key, d_value = kernels.key_value_gradients(call)
    d_bias = kernels.bias_gradient(call) if wanted.bias else None
    d_sink = None
    if inputs.sink is not None:
        share = jnp.exp(inputs.sink[..., None] - lse)  # 0 in rows without a gradient
        d_sink = _sum_to(-jnp.sum(share * delta, axis=-1), inputs.sink)
    pairs = zip(d_values, inputs.values, strict=True)
    gradients: dict[str, Any] = dict.fromkeys(Inputs._fields)
    gradients |= {"query": d_query, "key": d_key, "value": d_value, "bias": d_bias, "sink": d_sink}
    return Inputs(**gradients | {"values": tuple(None if d is None else _sum_to(d, x) for d, x in pairs)})


def _backward_rows(
    query: Float[Array, "*L T H"],
    result: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]],
    cotangents: tuple[Float[Array, "*L T Hv"], Float[Array, "*L T"]],
    keys_are_finite: bool,
) -> tuple[Float[Array, "*L T H"], Float[Array, "*L T Hv"], Float[Array, "*L T"], Float[Array, "*L T"]]:
    """Prepares query, output cotangent, log-sum-exp and delta for the backward kernels.

    delta is the output times its cotangent, summed over features (FlashAttention-2, algorithm 2, line 4), minus the
    cotangent of the log-sum-exp. For rows without derivatives see `guard.derivative_rows`.
    """
    d_output, d_lse = cotangents
    query, output, lse, finite = guard.derivative_rows(query, result, keys_are_finite)
    d_output = jnp.where(finite[..., None], d_output, jnp.zeros_like(d_output)).astype(lse.dtype)
    delta = jnp.where(finite, jnp.sum(d_output * output, axis=-1) - d_lse, jnp.zeros_like(lse))
    return query, d_output.astype(query.dtype), lse, delta


def _sum_to(x: Array, like: Array) -> Array:
    """Sums a gradient `x` over each axis of length 1 in its array, `like`: all heads along this axis share an entry."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1 != x.shape[axis])
    return x.sum(axes, keepdims=True)
