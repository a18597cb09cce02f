"""From a call to the inputs of its kernels: the layout of one head, functions cut in two, lengths padded."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from flax_mha.call.operands import Operands, Options
from flax_mha.core.tile import Offsets
from flax_mha.impl.pallas.cut import Cut, cut
from flax_mha.impl.pallas.held import Rules
from flax_mha.impl.pallas.operands import LANES, Inputs
from flax_mha.impl.pallas.steps import Occupied
from flax_mha.impl.pallas.tile import TileMask, TileScores
from flax_mha.impl.shared import nonfinite
from flax_mha.impl.shared.head import heads_of, map_heads
from flax_mha.impl.shared.nonfinite import NonfiniteFlags
from flax_mha.impl.shared.scores import ScoreInputs, ScoreRule
from flax_mha.impl.shared.tiling import InsideMask, Tiling, padded_mask
from flax_mha.masks import Mask
from flax_mha.masks.base import CallsFunction


class Prepared(NamedTuple):
    """What kernels take, with the axes [B..., K, G] in front.

    Attributes:
      rules: What is static.
      inputs: The arrays.
      occupied: Which tiles are visible.
      dtype: To which query, key and value are rounded for the matrix products.
    """

    rules: Rules
    inputs: Inputs
    occupied: Occupied
    dtype: jnp.dtype


def prepared(operands: Operands, options: Options, tiling: Tiling, dtype: jnp.dtype) -> Prepared:
    """Of a call, whose matrix products have operands of this dtype."""
    held = operands.query.dtype
    head = heads_of(operands, options, "flags", dtype, held)
    query, params, scores = head.query, head.inputs, head.rule
    axes = query.ndim - 2
    occupied = _occupied(scores, tiling, axes)
    mask = None if scores.mask is None else scores.mask.map_functions(functools.partial(_tile_mask, axes))
    if tiling.inside is not None:
        mask = InsideMask(*tiling.lengths) if mask is None else mask & InsideMask(*tiling.lengths)
    parts, values = _score_mod(options, params, scores, axes)
    seed = scores.dropout_seed
    inputs = Inputs(
        query=query,
        key=head.key,
        value=head.value,
        bias=params.bias,
        sink=params.sink,
        values=values,
        mask=mask,
        offsets=scores.offsets,
        seed=None if seed is None else (seed[..., 0], seed[..., 1]),
        **_marks(head.nonfinite, tiling),
    )
    inputs = inputs.map_arrays(axes, functools.partial(_padded, tiling, axes))
    # Mosaic multiplies single features instead of contracting them, which it cannot do with bfloat16 lying along rows.
    sizes = {query.shape[-1], head.value.shape[-1]}
    rules = Rules(
        scores=_rules_of(scores),
        part=None if parts is None else parts.tile,
        learned=(False,) * len(values),
        tiling=tiling,
        has_mask=mask is not None,
        has_bias=params.bias is not None,
        dtype=held,
        upright=1 in sizes or all(size % LANES == 0 for size in sizes),
    )
    return Prepared(rules, inputs, occupied, dtype)


def _rules_of(scores: ScoreRule) -> TileScores:
    """The static part."""
    fields: dict[str, Any] = {field.name: getattr(scores, field.name) for field in dataclasses.fields(scores)}
    arrays = dict.fromkeys(("mask", "dropout_seed", "batch", "head"))
    return TileScores(**fields | arrays | {"offsets": Offsets(), "constants": []})


def _score_mod(options: Options, params: ScoreInputs, scores: ScoreRule, axes: int) -> tuple[Cut | None, list[Array]]:
    if options.score_mod is None or scores.batch is None or scores.head is None:
        return None, []
    learned, constants = iter(params.captured), iter(scores.constants)
    captured = [next(learned if is_learned else constants) for is_learned in options.captured_trainable]
    parts = cut(options.score_mod, len(captured), options.captured_trainable)
    uses = options.score_mod.uses(1), options.score_mod.uses(2)
    return parts, _outer_values(parts, captured, scores.batch, scores.head, uses, axes)


def _outer_values(
    parts: Cut, captured: Sequence[Array], batch: Any, head: Any, uses: tuple[bool, bool], axes: int
) -> list[Array]:
    """The values of the outer part, once for all heads that share them."""
    one = jnp.zeros((1,) * axes, jnp.int32)
    numbers = [jnp.asarray(x) if used else one for x, used in zip((batch, head), uses, strict=True)]
    return map_heads(lambda x: parts.outer(*x), (list(captured), *numbers), axes)


def _tile_mask(axes: int, calls: CallsFunction) -> Mask:
    """The mask of a user's function, of which only the part for tiles is left to compute."""
    parts = cut(calls.function, len(calls.captured))
    uses = calls.function.uses(0), calls.function.uses(1)
    values = _outer_values(parts, calls.captured, calls.batch, calls.head, uses, axes)
    count = len(parts.tile.numbers)
    return TileMask(tuple(values[:count]), tuple(values[count:]), parts.tile)


def _occupied(scores: ScoreRule, tiling: Tiling, axes: int) -> Occupied:
    """Which tiles are visible: in NumPy where that is known while tracing."""
    everything = np.ones((tiling.rows, tiling.cells), bool)

    def one_head(places: tuple) -> tuple[Any, Any]:
        mask, offsets = places
        mask = padded_mask(mask, tiling)
        if mask is None:
            return everything, everything
        some, full = mask.occupancy(tiling.grid(offsets.values))
        return some & everything, full & everything

    if scores.mask is not None and jax.tree.leaves((scores.mask, scores.offsets)):
        return Occupied(*map_heads(one_head, (scores.mask, scores.offsets), axes))
    with jax.ensure_compile_time_eval():
        some, full = one_head((scores.mask, scores.offsets))
    lead = (1,) * axes
    return Occupied(np.asarray(some).reshape(*lead, *some.shape), np.asarray(full).reshape(*lead, *full.shape))


def _marks(magnitudes: NonfiniteFlags | None, tiling: Tiling) -> dict[str, Array | None]:
    """Infinity where a key or a query is not finite, else 0, also for whole columns of tiles."""
    if magnitudes is None:
        return dict.fromkeys(("key_marks", "tile_marks", "query_marks"))
    query, key = (nonfinite.poison(x) for x in magnitudes)
    wide = lengthened(key, -1, tiling.shape[1])
    tiles = wide.reshape(*key.shape[:-1], tiling.cells, tiling.cell_width).max(-1)
    return {"key_marks": key, "tile_marks": tiles, "query_marks": query}


def _padded(tiling: Tiling, axes: int, x: Array, names: str) -> Array:
    """An array with whole tiles of queries and keys; "T|1" and "S|1" may have one entry for all."""
    for axis, name in enumerate(names.split(), axes):
        if name[0] in "TS" and not (name.endswith("|1") and x.shape[axis] == 1):
            x = lengthened(x, axis, tiling.shape["TS".index(name[0])])
    return x


def lengthened(x: Array, axis: int, length: int, filling: float = 0) -> Array:
    """With more entries at the end of an axis."""
    more = length - x.shape[axis]
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (0, more, 0)
    return lax.pad(x, jnp.asarray(filling, x.dtype), widths) if more else x
