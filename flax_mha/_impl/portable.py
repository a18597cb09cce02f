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
# For masks with arrays besides: a tile may gather what lies apart, at the price of a kernel for every number of runs.
GATHERING = (Tiling(512, 512, runs=6),)

# Up to so many scores of a head at once, all heads run together on a CPU: in one kernel, or else. Up to so many, those
# of one batch entry, if there are not too many.
IN_ONE_KERNEL, TOGETHER, OF_AN_ENTRY, AT_MOST = 256 * 256, 128 * 128, 512 * 512, 8 * 512 * 512

# Of a mask that differs from head to head, so many are looked at when tiles are chosen.
EXAMPLES = 4


def attend_whole(call: Call) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp, through all scores at once."""
    scores = math.prod(call.operands.lengths)
    return _attend(call.operands, call.options, None, None, 0 if _one_kernel(call, scores) else _in_turn(call, scores))


def attend_in_tiles(call: Call) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp, tile by tile."""
    operands, options = call
    if operands.mask is not None and operands.query_offset is None:
        mask = operands.mask.known(operands.lengths, options.static_offset, tiling.CELL)
        operands = operands._replace(mask=mask)
    layout, plan = _tiles(operands, options)
    scores = layout.height * layout.width
    return _attend(operands, options, layout, plan, _in_turn(call, scores), _one_kernel(call, scores))


def _tiles(operands: Operands, options: Options) -> tuple[tiling.Layout, tiling.Plan | None]:
    """The fastest tiles; their plan, [B..., K | 1, G | 1], if it takes arrays that are known while tracing."""
    lengths, offset, axes = operands.lengths, options.static_offset, operands.query.ndim - 1
    arrays = jax.tree.leaves(operands.mask)
    known = not arrays or (all(map(readable, arrays)) and operands.query.size > 0 and _being_traced())
    if operands.query_offset is not None or not known:
        return tiling.layout(lengths, TILINGS[0]), None
    tilings, gathering = (TILINGS, GATHERING) if platform() == "cpu" else (TILINGS[:1], ())
    if not arrays:
        return tiling.static_cheapest(lengths, (operands.mask,), offset, tilings), None
    mask = jax.tree.map(np.asarray, operands.mask).by_head(operands.groups)
    places = np.broadcast_shapes(*(x.shape[:axes] for x in jax.tree.leaves(mask)))
    masks = [heads.one_of(mask, place) for place in np.ndindex(places)]
    examples = masks[:: max(1, -(-len(masks) // EXAMPLES))]
    layout = tiling.cheapest(lengths, examples, offset, (*tilings, *gathering))
    plan = tiling.plan(layout, masks, offset)
    return layout, jax.tree.map(lambda x: x.reshape(*places, *x.shape[1:]), plan)


def _being_traced() -> bool:
    """Whether what is computed here becomes a part of a program; else every call with other arrays would compile."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _one_kernel(call: Call, scores: int) -> bool:
    """Whether XLA's CPU makes one kernel of `dense.answer`, that writes no score to memory, and a fast one.

    Args:
      call: The call.
      scores: How many there are of one head or tile, many of which are computed together.
    """
    operands, options = call
    plain = options.program is None and operands.dropout_rng is None and not options.return_residual
    return plain and scores <= IN_ONE_KERNEL and platform() == "cpu" and not sharded()


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


@functools.partial(jax.jit, static_argnames=("options", "layout", "in_turn", "one_kernel"))
def _attend(
    operands: Operands,
    options: Options,
    layout: tiling.Layout | None,
    plan: tiling.Plan | None,
    in_turn: int | None,
    one_kernel: bool = False,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    query, key, value, groups = operands.query, operands.key, operands.value, operands.groups
    axes = query.ndim - 1
    # Matrix products too: on a CPU, XLA's bfloat16 ones are slower than float32.
    dtype = accumulation_dtype(query.dtype)
    scaled = query.astype(dtype) * (options.scale if operands.scale is None else operands.scale.astype(dtype))
    key, value, scores = key.astype(dtype), value.astype(dtype), _scores(operands, options, groups)
    learned = Learned(
        bias=None if operands.bias is None else array_by_head(operands.bias, groups),
        sink=None if operands.sinks is None else _vector_by_head(operands.sinks, groups).astype(dtype),
        captured=_shared(operands.captured, options.program_learns, True, axes),
    )
    if scores.hides(learned, scores.mask):
        key, value, bad = finite_keys(key, value)
        key = jnp.where(bad[..., None], jnp.full_like(key, jnp.nan), key)
    arrays = (_grouped(scaled, groups), _grouped(key, (groups[0], 1)), _grouped(value, (groups[0], 1)), learned, scores)
    if layout is None:
        output, lse = heads.over_heads(lambda head: dense.attend(*head), arrays, axes, in_turn or 0)
    else:
        plan = _plan(scores, layout, axes) if plan is None else plan
        if in_turn is not None and not plan.single:  # loops that end at different times do not run together
            in_turn = max([in_turn, *(axis + 1 for axis in range(axes) if plan.column.shape[axis] > 1)])
        one_head = functools.partial(blockwise.attend, layout=layout, rows_together=plan.single and one_kernel)
        output, lse = heads.over_heads(lambda head: one_head(*head), (*arrays, plan), axes, in_turn or 0)
    return _ungrouped(output).astype(query.dtype), _ungrouped(lse[..., None])[..., 0]


def _scores(operands: Operands, options: Options, groups: tuple[int, int]) -> Scores:
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
        plan = tiling.static_plan(layout, (scores.mask,), scores.static_offset)
        return jax.tree.map(lambda x: x[(None,) * (axes - 1)], plan)
    places = (scores.mask, scores.query_offset)
    return heads.over_heads(
        lambda p: tiling.plan_of_data(layout, p[0], scores.static_offset if p[1] is None else p[1]), places, axes
    )


def _shared(captured: list[Array], learns: tuple[bool, ...], which: bool, axes: int) -> list[Array]:
    """Those of the captured arrays that are learned, or that are not, with the axes of what all heads share."""
    return [x[(None,) * axes] for x, learned in zip(captured, learns, strict=True) if learned is which]


def _grouped(x: Float[Array, "*B L N F"], groups: tuple[int, int]) -> Float[Array, "*B K G L F"]:
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])


def _ungrouped(x: Float[Array, "*B K G L F"]) -> Float[Array, "*B L N F"]:
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)


def _vector_by_head(x: Float[Array, "*B N"], groups: tuple[int, int]) -> Float[Array, "*B K G"]:
    """[B..., N | 1] -> [B..., K | 1, G | 1]."""
    return x.reshape(*x.shape[:-1], *(groups if x.shape[-1] != 1 else (1, 1)))
