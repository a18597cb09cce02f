"""One call, compiled: all arrays take the layout of one head, are mapped over, and go back."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from flax_mha._impl import blockwise, dense, heads, tiling
from flax_mha._impl.scores import Learned, Scores, accumulation_dtype
from flax_mha._program import Program
from flax_mha._tiles import array_by_head
from flax_mha.masks import Mask


class Operands(NamedTuple):
    """The arrays of a call, checked, in the caller's layout; None where there is none."""

    query: Float[Array, "*B T N H"]
    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    bias: Array | None
    sinks: Array | None
    mask: Mask | None
    captured: list[Array]
    query_offset: Array | None
    scale: Array | None
    dropout_rng: Array | None


class Options(NamedTuple):
    """What is known of a call while tracing; without a `layout` of tiles it is dense."""

    static_offset: int
    scale: float
    soft_cap: float | None
    program: Program | None
    program_learns: tuple[bool, ...]
    dropout_rate: float
    broadcast_dropout: bool
    precision: lax.PrecisionLike
    layout: tiling.Layout | None
    sequential: bool


@functools.partial(jax.jit, static_argnames="options")
def attend(operands: Operands, options: Options) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Output and log-sum-exp of all heads."""
    query, key, value = operands.query, operands.key, operands.value
    groups = (key.shape[-2], query.shape[-2] // key.shape[-2])
    axes = query.ndim - 1
    # Matrix products too: on a CPU, XLA's bfloat16 ones are slower than float32.
    dtype = accumulation_dtype(query.dtype)
    scaled = query.astype(dtype) if operands.scale is None else query.astype(dtype) * operands.scale.astype(dtype)
    key, value, poison = _without_poison(key.astype(dtype), value.astype(dtype), operands, options)
    scores = _scores(operands, options, groups, poison)
    learned = Learned(
        bias=None if operands.bias is None else array_by_head(operands.bias, groups),
        sink=None if operands.sinks is None else _vector_by_head(operands.sinks, groups).astype(dtype),
        captured=_shared(operands.captured, options.program_learns, True, axes),
    )
    arrays = (_grouped(scaled, groups), _grouped(key, (groups[0], 1)), _grouped(value, (groups[0], 1)), learned, scores)
    if options.layout is None:
        output, lse = heads.over_heads(lambda head: dense.attend(*head), arrays, axes)
    else:
        plan = _plan(scores, options.layout, axes)
        one_head = functools.partial(blockwise.attend, layout=options.layout)
        sequential = axes if options.sequential else 0
        output, lse = heads.over_heads(lambda head: one_head(*head), (*arrays, plan), axes, sequential)
    return _ungrouped(output).astype(query.dtype), _ungrouped(lse[..., None])[..., 0]


def _without_poison(
    key: Float[Array, "*B S K H"], value: Float[Array, "*B S K Hv"], operands: Operands, options: Options
) -> tuple[Array, Array, Float[Array, "*B K 1 S"] | None]:
    """Where something may be hidden: keys and values, zero where not finite, and where that was; see `Scores`."""
    if operands.mask is None and operands.bias is None and options.program is None:
        return key, value, None
    finite = jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1)
    key, value = (jnp.where(finite[..., None], x, jnp.zeros_like(x)) for x in (key, value))
    poison = jnp.where(finite, np.float32(0), np.float32(np.nan))
    return key, value, _grouped(poison[..., None], (key.shape[-2], 1))[..., 0]


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
        scale=options.scale,
        soft_cap=options.soft_cap,
        program=options.program,
        program_learns=options.program_learns,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
    )


def _plan(scores: Scores, layout: tiling.Layout, axes: int) -> tiling.Plan:
    """What tiles to visit, once for all heads that share it, and without any tracing where it is static."""
    if not jax.tree.leaves((scores.mask, scores.query_offset)):
        plan = tiling.plan(layout, scores.mask, scores.static_offset)
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
