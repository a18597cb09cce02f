"""The engine "pallas": which calls it refuses, its tiles, the inputs of its kernels, and their first derivatives.

These kernels have never run on a TPU, so they are only used with `implementation="pallas"`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from flax_mha._src import guard
from flax_mha._src.call.operands import DEFAULT_PRECISION, Call, Result
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.user_function import TracedFunction
from flax_mha._src.engines.engine import Engine
from flax_mha._src.engines.kernels import tpu as tpu_kernels
from flax_mha._src.engines.pallas import kernels
from flax_mha._src.engines.pallas.inputs import Arrays, Inputs, KernelPlan, TileMask, TileRule
from flax_mha._src.engines.pallas.launch import MOST_WORDS, KernelCall
from flax_mha._src.engines.pallas.split_function import LANES, RefusedError, TileFunction, split
from flax_mha._src.math.head import Head, from_caller, heads_of, map_heads, to_caller
from flax_mha._src.math.scores import ScoreInputs, ScoreRule
from flax_mha._src.math.tiling import InsideMask, Tiling, occupancy, with_occupancy
from flax_mha._src.plan import Plan
from flax_mha.masks import Mask, Occupancy
from flax_mha.masks.function import TracedMask, functions_of, map_functions

HIGHEST = ("highest", "float32", lax.Precision.HIGHEST)
# Sides of tiles, and the most equations of users' functions with which such tiles fit in fast memory: there, the
# compiler holds about one tile for each equation and its derivative.
MOST_EQUATIONS = {512: 32, 256: 128, 128: math.inf}


@dataclasses.dataclass(frozen=True)
class Pallas(Engine):
    """The engine of this package's TPU kernels. With `interpret=True`, `pallas_call` runs them anywhere, but slowly."""

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
        return reasons + _reasons_against_tiles(call)

    def plan(self, call: Call) -> tuple[Plan, Call]:
        return Plan(call.operands.query.dtype, tiling=_tiling(call)), with_occupancy(call)

    def forward(self, plan: Plan, call: Call) -> Result:
        return self._attend(plan, call, None)

    def share(self, plan: Plan, call: Call, result: Result) -> Result:
        output, lse = from_caller(result, call.operands.groups)
        return self._attend(plan, call, (output.astype(call.operands.query.dtype), lse))

    def _attend(self, plan: Plan, call: Call, result: Arrays | None) -> Result:
        output, lse, *largest = attend(prepare(plan, call, self.interpret), result)
        return to_caller((output, lse, largest[0] if largest else None), call.operands.query.dtype)


def _tiling(call: Call) -> Tiling:
    lengths, count = call.operands.lengths, sum(len(function.jaxpr.eqns) for _, function, _ in _functions(call))
    largest = next(size for size, most in MOST_EQUATIONS.items() if count <= most)
    height, width = (tpu_kernels.tile_size(length, largest) for length in lengths)
    rows, columns = -(-lengths[0] // height), -(-lengths[1] // width)
    return Tiling(lengths, rows, height, width, 1, columns, width)


def _functions(call: Call) -> list[tuple[str, TracedFunction, int]]:
    """Lists the user's functions: ("score_mod" or "mask_mod", traced function, number of captured arrays) for each."""
    operands, score_mod = call.operands, call.options.score_mod
    functions = [] if score_mod is None else [("score_mod", score_mod, len(operands.captured + operands.constants))]
    return functions + [("mask_mod", part.function, len(part.captured)) for part in functions_of(operands.mask)]


def _reasons_against_tiles(call: Call) -> list[str]:
    """Returns [a reason] if a list of all tiles to visit (`list_steps`) would not fit in scalar memory, else []."""
    operands, tiling = call.operands, _tiling(call)
    heads = math.prod(operands.query.shape[:-3]) * operands.query.shape[-2]
    lists = [heads if jax.tree.leaves((operands.mask, operands.offsets)) else operands.groups[1]]
    if operands.bias is not None and heads:  # heads that share a gradient of the bias share a list
        lists.append(heads // math.prod(operands.bias.shape[:-2]))
    words = 2 * max(lists) * tiling.rows * tiling.cells
    if words <= MOST_WORDS:
        return []
    return [
        f"its tile table does not fit: scalar memory has room for {MOST_WORDS} words, but {tiling.rows} x "
        f"{tiling.cells} tiles for {max(lists)} heads take {words}: use smaller batches or shorter sequences"
    ]


def prepare(plan: Plan, call: Call, interpret: Any) -> KernelCall:
    """Makes the arguments of kernels from a call. `attend` rounds queries, keys, values. `interpret`: see `Pallas`."""
    dtype, tiling = call.operands.query.dtype, plan.tiling
    assert tiling is not None
    head = heads_of(call, plan.dtype, dtype)
    rule, rank = head.rule, head.query.ndim - 2

    def part_of(mask: TracedMask) -> Mask:
        return TileMask(*_split(mask.function, mask.captured, mask.batch, mask.head, rank))

    mask, function, values = map_functions(part_of, rule.mask), None, ()  # type: Any, Any, Arrays
    if tiling.inside is not None:
        mask = InsideMask(*tiling.lengths) if mask is None else mask & InsideMask(*tiling.lengths)
    if rule.score_mod is not None:
        captured = [*head.inputs.captured, *rule.constants]
        function, values = _split(rule.score_mod, captured, rule.batch, rule.head, rank)
    words = None if rule.dropout_seed is None else (rule.dropout_seed[..., 0], rule.dropout_seed[..., 1])
    of_tiles = {"mask": mask, "score_mod": function, "dropout_seed": words, "batch": None, "head": None}
    of_tiles |= {"constants": [], "on_gpu": True}  # dropout is elementwise, as on GPUs
    inputs, tile_rule = head.inputs._replace(captured=list(values)), TileRule(**vars(rule) | of_tiles)
    head = dataclasses.replace(head, query=head.finite_query, inputs=inputs, rule=tile_rule)
    # Mosaic makes a product over a single feature a multiplication, which fails for bfloat16 if features come first.
    sizes = {head.query.shape[-1], head.value.shape[-1]}
    features_last = 1 in sizes or all(size % LANES == 0 for size in sizes)
    kernel_plan = KernelPlan(tiling, features_last, plan.dtype, dtype, interpret)
    return KernelCall(kernel_plan, Inputs(head), _occupancy(rule, tiling, rank))


def _split(function: TracedFunction, captured: list, batch: Any, head: Any, rank: int) -> tuple[TileFunction, Arrays]:
    """Splits a user's function (`split_function.py`): returns the part for kernels, and the values of the outer part.

    All arrays begin with `rank` axes of batch and heads. `batch` and `head` are the indices b and h; None means 0.
    """
    tile = split(function, len(captured))
    one, ids = jnp.zeros((1,) * rank, jnp.int32), (("b", batch), ("h", head))
    used = (jnp.asarray(x) if x is not None and function.uses(name) else one for name, x in ids)
    return tile, tuple(map_heads(lambda x: tile.outer_values(*x), (captured, *used), rank))


def _occupancy(rule: ScoreRule, tiling: Tiling, rank: int) -> Occupancy:
    """Computes the occupancy of the tiles, [*heads, rows, columns], with `rank` axes of heads.

    Without a mask, or if mask and offsets hold no arrays, returns NumPy arrays, for `list_steps` at trace time.
    """

    def of_head(arrays: tuple[Mask | None, Offsets]) -> Occupancy:
        return occupancy(tiling, arrays[0], arrays[1].values)

    if rule.mask is not None and jax.tree.leaves((rule.mask, rule.offsets)):
        return map_heads(of_head, (rule.mask, rule.offsets), rank)
    with jax.ensure_compile_time_eval():
        known = of_head((rule.mask, rule.offsets))
    return Occupancy(*(np.asarray(x).reshape((1,) * rank + x.shape) for x in known))


def attend(call: KernelCall, result: Arrays | None) -> Arrays:
    """Returns output, log-sum-exp and, on request, largest scores. Given `result`, implements `Engine.share`."""
    plan = call.plan
    known = call.occupancy if isinstance(call.occupancy.any_visible, np.ndarray) else None

    def call_of(head: Head, occupancy: Occupancy | None) -> KernelCall:
        # Inside the `custom_vjp`, so that gradients are not rounded.
        query, key, value = (x.astype(plan.product_dtype) for x in (head.query, head.key, head.value))
        head = dataclasses.replace(head, query=query, key=key, value=value)
        return KernelCall(plan, Inputs(head), known or occupancy)  # type: ignore[arg-type]

    @jax.custom_vjp
    def run(head: Head, occupancy: Occupancy | None, result: Arrays | None) -> Arrays:
        return kernels.forward(call_of(head, occupancy)) if result is None else result

    def forward(*arguments: Any) -> tuple[Arrays, tuple]:
        # Which arrays' gradients are used; others are too costly. Residuals are arrays: () means yes, and None no.
        wanted = jax.tree.map(
            lambda x: () if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating) else None, arguments[0].inputs
        )
        *values, result = jax.tree.map(lambda x: x.value, arguments)
        results = run(*values, result)
        return results, (wanted, values, results)

    def backward(saved: tuple, cotangents: tuple) -> tuple:
        wanted, values, results = saved
        output, lse, *_ = (jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in cotangents)
        return _backward(call_of(*values), wanted, results, (output, lse)), None, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(call.inputs.head, None if known else call.occupancy, result)


def _backward(call: KernelCall, wanted: ScoreInputs, results: Arrays, cotangents: Arrays) -> Any:
    """Computes gradients from cotangents of output and log-sum-exp; not of a bias or values if None in `wanted`."""
    head, (d_output, d_lse) = call.inputs.head, cotangents
    query, output, lse, finite = guard.derivative_rows(head.query, results[:2], head.nonfinite is not None)  # type: ignore[arg-type]
    d_output = jnp.where(finite[..., None], d_output, jnp.zeros_like(d_output)).astype(lse.dtype)
    # FlashAttention-2, algorithm 2, line 4, and the cotangent of the log-sum-exp.
    delta = jnp.where(finite, jnp.sum(d_output * output, axis=-1) - d_lse, jnp.zeros_like(lse))
    head = dataclasses.replace(head, query=query, nonfinite=None)
    call = call._replace(inputs=Inputs(head, d_output.astype(query.dtype), lse, delta))
    d_query, *d_learned = kernels.query_gradients(call, tuple(x is not None for x in wanted.captured))
    d_key, d_value = kernels.key_value_gradients(call)
    d_bias = None if wanted.bias is None else kernels.bias_gradient(call)
    d_sink = None
    if head.inputs.sink is not None:
        share = jnp.exp(head.inputs.sink[..., None] - lse)  # 0 in rows without a gradient
        d_sink = _sum_to(-jnp.sum(share * delta, axis=-1), head.inputs.sink)
    following, pairs = iter(d_learned), zip(wanted.captured, head.inputs.captured, strict=True)
    d_values: Any = [None if is_wanted is None else _sum_to(next(following), x) for is_wanted, x in pairs]
    return Head(d_query, d_key, d_value, ScoreInputs(d_bias, d_sink, d_values), rule=None, nonfinite=None)  # type: ignore[arg-type]


def _sum_to(x: Array, like: Array) -> Array:
    """Sums `x`, the gradients of all heads, over the axes of length 1 in `like`, along which heads share entries."""
    axes = tuple(axis for axis, size in enumerate(like.shape) if size == 1 != x.shape[axis])
    return x.sum(axes).reshape(like.shape)
