"""What runs everywhere and does everything: arrays to the layout of one head, mapped over all heads, and back."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flax_mha._call import Call, Operands, Options, accumulation_dtype, finite_keys, platform, sharded
from flax_mha._impl import blockwise, dense, heads, tiling
from flax_mha._impl.scores import Learned, Scores
from flax_mha._impl.tiling import Tiling
from flax_mha._tiles import array_by_head, readable

# Tiles to choose from: large enough for fast matrix products, small enough for the caches. The first serves masks that
# are not known while tracing, and accelerators.
TILINGS = (
    Tiling(512, 512),
    Tiling(1024, 512, 2),
    Tiling(2048, 512, 4),
    Tiling(256, 512),
    Tiling(128, 128),
)

# Up to so many scores of a head at once, all heads run together on a CPU; up to so many, those of one batch entry, if
# there are not too many.
TOGETHER, OF_AN_ENTRY, AT_MOST = 128 * 128, 512 * 512, 8 * 512 * 512

# From so many scores of all heads on, short sequences are computed in so many parts side by side on a CPU.
PARTS, SPLIT = 4, 512 * 1024

# Of a mask that differs from head to head, so many are looked at when tiles are chosen.
EXAMPLES = 4


def attend_whole(call: Call) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp, through all scores at once."""
    in_turn = _in_turn(call, math.prod(call.operands.lengths))
    return _attend(call.operands, call.options, None, in_turn, _side_by_side(call))


def attend_in_tiles(call: Call) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp, tile by tile."""
    operands, options = call
    if operands.mask is not None and operands.query_offset is None:
        mask = operands.mask.known(operands.lengths, options.static_offset, tiling.CELL)
        operands = operands._replace(mask=mask)
    layout = _layout(operands, options)
    return _attend(operands, options, layout, _in_turn(call, math.prod(layout.tile_shape)))


def _layout(operands: Operands, options: Options) -> tiling.Layout:
    """The fastest tiles, as far as the mask is known."""
    arrays, axes = jax.tree.leaves(operands.mask), operands.query.ndim - 1
    known = operands.query_offset is None and all(map(readable, arrays))
    if platform() != "cpu" or not known:
        return tiling.layout(operands.lengths, TILINGS[0])
    if operands.mask is None or not arrays:
        return tiling.static_cheapest(operands.lengths, (operands.mask,), options.static_offset, TILINGS, fine=True)
    mask = jax.tree.map(np.asarray, operands.mask).by_head(operands.groups)
    places = list(np.ndindex(np.broadcast_shapes(*(x.shape[:axes] for x in jax.tree.leaves(mask)))))
    examples = [heads.one_of(mask, place) for place in places[:: max(1, -(-len(places) // EXAMPLES))]]
    return tiling.cheapest(operands.lengths, examples, options.static_offset, TILINGS, fine=False)


def _in_turn(call: Call, scores: int) -> int | None:
    """How many of the axes [B..., K, G] run one after the other, if `scores` of a head are there at once.

    On a CPU so many that its caches hold them. None: never any.
    """
    if platform() != "cpu" or sharded():
        return None  # an accelerator runs all heads together, and a mesh shards them
    axes, num_heads = call.operands.query.ndim - 1, call.operands.query.shape[-2]
    if scores <= TOGETHER:
        return 0
    return axes - 2 if scores <= OF_AN_ENTRY and num_heads * scores <= AT_MOST else axes


def _side_by_side(call: Call) -> int:
    """In how many parts to compute what runs together, at most."""
    scores = call.operands.query.size // call.operands.query.shape[-1] * call.operands.key.shape[-3]
    return PARTS if platform() == "cpu" and not sharded() and scores >= SPLIT else 1


@functools.partial(jax.jit, static_argnames=("options", "layout", "in_turn", "side_by_side"))
def _attend(
    operands: Operands, options: Options, layout: tiling.Layout | None, in_turn: int | None, side_by_side: int = 1
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    query, key, value, groups = operands.query, operands.key, operands.value, operands.groups
    axes = query.ndim - 1
    # Matrix products too: on a CPU, XLA's bfloat16 ones are slower than float32.
    dtype = accumulation_dtype(query.dtype)
    scaled = query.astype(dtype) * (options.scale if operands.scale is None else operands.scale.astype(dtype))
    key, value, poison = key.astype(dtype), value.astype(dtype), None
    if any(x is not None for x in (operands.mask, operands.bias, options.program)):  # something may be hidden
        key, value, bad = finite_keys(key, value)
        poison = _grouped(jnp.where(bad, np.float32(np.inf), np.float32(0))[..., None], (groups[0], 1))[..., 0]
    scores = _scores(operands, options, groups, poison)
    learned = Learned(
        bias=None if operands.bias is None else array_by_head(operands.bias, groups),
        sink=None if operands.sinks is None else _vector_by_head(operands.sinks, groups).astype(dtype),
        captured=_shared(operands.captured, options.program_learns, True, axes),
    )
    arrays = (_grouped(scaled, groups), _grouped(key, (groups[0], 1)), _grouped(value, (groups[0], 1)), learned, scores)
    if layout is None:
        output, lse = heads.over_heads(lambda head: dense.attend(*head), arrays, axes, in_turn or 0, side_by_side)
    else:
        plan = _plan(scores, layout, axes)
        if in_turn is not None:  # loops that end at different times do not run together
            in_turn = max([in_turn, *(axis + 1 for axis in range(axes) if plan.column.shape[axis] > 1)])
        one_head = functools.partial(blockwise.attend, layout=layout)
        output, lse = heads.over_heads(lambda head: one_head(*head), (*arrays, plan), axes, in_turn or 0)
    return _ungrouped(output).astype(query.dtype), _ungrouped(lse[..., None])[..., 0]


def _scores(operands: Operands, options: Options, groups: tuple[int, int], poison: Array | None) -> Scores:
    batch, axes = operands.query.shape[:-3], operands.query.ndim - 1
    entry = head = seed = None
    if options.program is not None:
        entry = jnp.arange(np.prod(batch, dtype=int), dtype=jnp.int32).reshape(*batch, 1, 1)
        head = jnp.arange(groups[0] * groups[1], dtype=jnp.int32).reshape((1,) * len(batch) + groups)
    if operands.dropout_rng is not None:
        own = (1,) * axes if options.broadcast_dropout else (*batch, *groups)
        seed = jax.random.bits(operands.dropout_rng, (*own, 2), jnp.uint32)
    return Scores(
        mask=None if operands.mask is None else operands.mask.by_head(groups),
        poison=poison,
        query_offset=None if operands.query_offset is None else operands.query_offset[..., None, None],
        dropout_seed=seed,
        batch=entry,
        head=head,
        constants=_shared(operands.captured, options.program_learns, False, axes),
        static_offset=options.static_offset,
        soft_cap=options.soft_cap,
        program=options.program,
        program_learns=options.program_learns,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
    )


def _plan(scores: Scores, layout: tiling.Layout, axes: int) -> tiling.Plan:
    """What tiles to visit, once for all heads that share it, and without any tracing where it is static."""
    if not jax.tree.leaves((scores.mask, scores.query_offset)):
        plan = tiling.static_plan(layout, scores.mask, scores.static_offset)
        return jax.tree.map(lambda x: x[(None,) * axes], plan)
    places = (scores.mask, scores.query_offset)
    return heads.over_heads(
        lambda p: tiling.plan(layout, p[0], scores.static_offset if p[1] is None else p[1]), places, axes
    )


def _shared(captured: list[Array], learns: tuple[bool, ...], which: bool, axes: int) -> list[Array]:
    """Those of the captured arrays that are learned, or that are not, with the axes of what all heads share."""
    return [x[(None,) * axes] for x, learned in zip(captured, learns, strict=True) if learned is which]


def _grouped(x: Float[Array, "*B L N F"], groups: tuple[int, int]) -> Float[Array, "*B K G L F"]:
    return jnp.moveaxis(x.reshape(*x.shape[:-2], *groups, x.shape[-1]), -4, -2)


def _ungrouped(x: Float[Array, "*B K G L F"]) -> Float[Array, "*B L N F"]:
    x = jnp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _vector_by_head(x: Float[Array, "*B N"], groups: tuple[int, int]) -> Float[Array, "*B K G"]:
    """[B..., N | 1] -> [B..., K | 1, G | 1]."""
    return x.reshape(*x.shape[:-1], *(groups if x.shape[-1] != 1 else (1, 1)))
