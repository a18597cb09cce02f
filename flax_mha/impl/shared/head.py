"""The operands of one head, and the one place where the math of one head is mapped over all of them.

In that layout every array of a call is [B..., K or 1, G or 1, the part of one head]. B are the batch axes, K the key
and value heads, G = N / K the query heads that share one of them. An axis of length 1 is shared by all.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from flax_mha.call.operands import Call, HeadIds, Operands, Options, OutputAndLse
from flax_mha.core.tile import Offsets, Tile
from flax_mha.core.tracing import being_traced
from flax_mha.impl.shared import nonfinite
from flax_mha.impl.shared.nonfinite import Guard, NonfiniteFlags
from flax_mha.impl.shared.scores import ScoreInputs, ScoreRule
from flax_mha.masks import Mask

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Head:
    """The operands of one head, or with leading axes [B..., K, G] those of all heads.

    Attributes:
      query: [T, H], scaled, or to be scaled by `rule.scale`; finite if anything may be masked, like keys and values.
      key: [S, H].
      value: [S, Hv].
      inputs: Bias, sink and captured arrays: what else gets gradients.
      rule: How products of queries and keys become scores.
      nonfinite: Which queries and keys were not finite; None if nothing can be masked, or if these are NaN.
    """

    query: Float[Array, "... T H"]
    key: Float[Array, "... S H"]
    value: Float[Array, "... S Hv"]
    inputs: ScoreInputs
    rule: ScoreRule
    nonfinite: NonfiniteFlags | None

    @property
    def whole(self) -> Tile:
        shape = (self.query.shape[0], self.key.shape[0])
        return Tile(0, 0, shape, self.rule.offsets.values, ring=self.rule.ring)


def heads_of(
    operands: Operands, options: Options, guard: Guard, dtype: DTypeLike, stored: DTypeLike | None = None
) -> Head:
    """Converts the operands of a call to the layout of one head.

    Args:
      operands: Of the call.
      options: Of the call.
      guard: What becomes of NaN and infinity where scores may be masked; see `nonfinite.Guard`.
      dtype: Of query, key and value in the matrix products.
      stored: Of query, key and value as they are returned, if they are rounded to `dtype` later.
    """
    inputs, rule = scores_of(operands, options)
    scale = options.scale if operands.scale is None else operands.scale
    return head_of(operands.query, operands.key, operands.value, scale, inputs, rule, guard, dtype, stored)


def head_of(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    scale: Float[Array, ""] | float,
    inputs: ScoreInputs,
    rule: ScoreRule,
    guard: Guard,
    dtype: DTypeLike,
    stored: DTypeLike | None = None,
) -> Head:
    """As `heads_of`, where `inputs` and `rule` have the layout of one head already."""
    groups, wide = (key.shape[-2], query.shape[-2] // key.shape[-2]), rule.dtype
    stored = dtype if stored is None else stored
    query, key, value = query.astype(wide), key.astype(stored), value.astype(stored)
    scale = scale if isinstance(scale, float) else scale.astype(wide)
    flags, is_known = None, isinstance(scale, float)
    if guard == "nan" and not is_known:  # NaN would reach the gradient of the scale
        guard = "flags"
    if not rule.masks_scores(inputs):
        guard = "unchanged"
    elif guard == "nan":
        query, key, value = nonfinite.mark_by_nan(query, scale, key, value)  # type: ignore[arg-type]  # a number
    elif guard != "unchanged":
        of_queries = nonfinite.flag_rows(query * scale, guard == "flags and scales")
        query = nonfinite.zero_rows(query, of_queries)
        key, value, of_keys = nonfinite.zero_keys(key, value, guard == "flags and scales")
        flags = NonfiniteFlags(
            vectors_by_head(of_queries, groups), vectors_by_head(of_keys, (groups[0], 1)).astype(wide)
        )
    if isinstance(scale, float) and dtype != wide:  # a scaled query would have to be rounded
        rule = dataclasses.replace(rule, scale=scale)
    elif guard == "unchanged" and rule.masks_scores(inputs) and not is_known:  # nor must it reach that gradient there
        is_finite = lax.is_finite(query)
        query = jnp.where(is_finite, jnp.where(is_finite, query, jnp.zeros_like(query)) * scale, jnp.nan)
    else:
        query = query * scale
    queries = split_heads(query.astype(stored), groups)
    keys, values = (split_heads(x, (groups[0], 1)) for x in (key, value))
    return Head(queries, keys, values, inputs, rule, flags)


def scores_of(operands: Operands, options: Options) -> tuple[ScoreInputs, ScoreRule]:
    """Converts what makes scores of products to the layout of one head: inputs, which get gradients, and the rule."""
    num_heads, num_kv_heads = operands.query.shape[-2], operands.key.shape[-2]
    groups, rank = (num_kv_heads, num_heads // num_kv_heads), operands.query.ndim - 3
    own = functools.partial(by_head, batch_rank=rank, groups=groups)
    mask = operands.mask
    inputs = ScoreInputs(
        bias=None if operands.bias is None else own(operands.bias, "B N T S"),
        sink=None if operands.sinks is None else own(operands.sinks, "B N").astype(options.dtype),
        captured=[own(x, "") for x in operands.captured],
    )
    numbers = zip(head_ids(operands, options), ("B", "N", "B N words"), strict=True)
    batch, head, seed = (None if x is None else own(x, axes) for x, axes in numbers)
    rule = ScoreRule(
        mask=mask.map_arrays(own) if mask is not None and jax.tree.leaves(mask) else mask,
        offsets=jax.tree.map(lambda x: own(x, "B"), operands.offsets),
        dropout_seed=seed,
        batch=batch,
        head=head,
        constants=[own(x, "") for x in operands.constants],
        dtype=options.dtype,
        soft_cap=options.soft_cap,
        score_mod=options.score_mod,
        dropout_rate=options.dropout_rate,
        precision=options.precision,
        ring=operands.key.shape[-3] if options.ring else None,
        returns_max=options.return_max_score,
    )
    return inputs, rule


def head_ids(operands: Operands, options: Options) -> HeadIds:
    """The numbers of batch entries and heads, and the random words of each, from which dropout follows."""
    if operands.head_ids is not None:
        return operands.head_ids
    batch, num_heads = operands.query.shape[:-3], operands.query.shape[-2]
    entry = head = seed = None
    if options.score_mod is not None:
        entry = jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(batch)
        head = jnp.arange(num_heads, dtype=jnp.int32)
    if operands.dropout_rng is not None:
        own = (1,) * (len(batch) + 1) if options.broadcast_dropout else (*batch, num_heads)
        seed = jax.random.bits(operands.dropout_rng, (*own, 2), jnp.uint32)
    return HeadIds(entry, head, seed)


def by_head(x: AnyArray, axes: str, batch_rank: int, groups: tuple[int, int]) -> AnyArray:
    """An array with the axes [B..., N or 1, part], of which any may be missing, in the layout of one head.

    Args:
      x: The array.
      axes: Names of its axes, as in the field metadata of masks (`masks/base.py`), for example "B N T S".
      batch_rank: Number of batch axes of the call.
      groups: K and G.
    """
    names = axes.split()
    batch = batch_rank if "B" in names else 0
    head = groups if "N" in names and x.shape[batch] != 1 else (1, 1)
    part = x.shape[batch + ("N" in names) :]
    return x.reshape(*(x.shape[:batch] if batch else (1,) * batch_rank), *head, *part)


def mask_by_head(mask: Mask, batch_rank: int, groups: tuple[int, int]) -> Mask:
    return mask.map_arrays(functools.partial(by_head, batch_rank=batch_rank, groups=groups))


def split_heads(x: Float[Array, "*B L N F"], groups: tuple[int, int]) -> Float[Array, "*B K G L F"]:
    """Queries, keys or values; keys and values have groups (K, 1)."""
    x = jnp.moveaxis(x, -2, -3)
    return x.reshape(*x.shape[:-3], *groups, *x.shape[-2:])


def vectors_by_head(x: Float[Array, "*B L N"], groups: tuple[int, int]) -> Float[Array, "*B K G L"]:
    """One number for each query, or for each key."""
    rank = x.ndim - 2
    x = lax.transpose(x, (*range(rank), rank + 1, rank))
    return lax.reshape(x, (*x.shape[:rank], *groups, x.shape[-1]))


def to_caller(
    results: tuple[Float[Array, "*B K G T Hv"], Float[Array, "*B K G T"], Float[Array, "*B K G T"] | None],
    dtype: DTypeLike,
) -> OutputAndLse:
    """Output, in this dtype, log-sum-exp and, if there are any, largest scores in the caller's layout."""
    output, lse, largest = results
    output, lse = join_heads(output).astype(dtype), join_heads(lse[..., None])[..., 0]
    return (output, lse) if largest is None else (output, lse, join_heads(largest[..., None])[..., 0])


def from_caller(
    output: Float[Array, "*B T N Hv"], lse: Float[Array, "*B T N"], groups: tuple[int, int]
) -> tuple[Float[Array, "*B K G T Hv"], Float[Array, "*B K G T"]]:
    """The inverse of `to_caller`, in the dtype of the log-sum-exp."""
    return split_heads(output.astype(lse.dtype), groups), vectors_by_head(lse, groups)


def join_heads(x: Float[Array, "*B K G L F"]) -> Float[Array, "*B L N F"]:
    """Back to the caller's layout."""
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return jnp.moveaxis(x, -3, -2)


def map_heads(
    one_head: Callable[[Any], Any], operands: Any, axes: int, sequential: int = 0, together: int | None = None
) -> Any:
    """`one_head(operands)` for every batch entry and head: the first `axes` axes of every array.

    Each of these axes has its full size or 1; one of size 1 is shared, never repeated, and its gradient is the sum
    over those that shared it. The first `sequential` axes run one after another (`lax.map`), the others together
    (`vmap`).

    Args:
      one_head: A function of a pytree of arrays.
      operands: Pytree of arrays [axes..., what one head takes...].
      axes: How many leading axes to map over.
      sequential: How many of these to loop over.
      together: Of the others, how many heads at most run together, in a loop over groups of them; None: all.
    """
    leaves, tree = jax.tree.flatten(operands)
    own = [[leaf.shape[axis] != 1 for leaf in leaves] for axis in range(axes)]  # which arrays have entries of their own
    sizes = [next((leaf.shape[axis] for leaf in leaves if leaf.shape[axis] != 1), 1) for axis in range(axes)]
    mapped = [_squeezed(x, tuple(axis for axis in range(axes) if x.shape[axis] == 1)) for x in leaves]

    def run(leaves: list) -> Any:
        return one_head(jax.tree.unflatten(tree, leaves))

    for axis in reversed(range(axes)):
        if not any(own[axis]):
            continue
        inner = math.prod(sizes[axis + 1 :])
        group = 1 if axis < sequential else sizes[axis] if together is None else together // max(inner, 1)
        group = _largest_divisor(sizes[axis], group) if group < sizes[axis] else group
        if axis >= sequential and group >= sizes[axis]:
            run = jax.vmap(run, ([0 if mine else None for mine in own[axis]],))
        else:
            run = functools.partial(_looped, run, own[axis], group)
    unit = tuple(axis for axis in range(axes) if not any(own[axis]))
    return jax.tree.map(lambda x: lax.expand_dims(x, unit), run(mapped))


def _looped(run: Callable[[list], Any], own: list[bool], group: int, leaves: list) -> Any:
    """`run(leaves)` for every entry of the first axis of the arrays that have one, `group` of them at a time."""

    def entry(mapped: list) -> Any:
        following = iter(mapped)
        return run([next(following) if mine else leaf for leaf, mine in zip(leaves, own, strict=True)])

    mapped = [leaf for leaf, mine in zip(leaves, own, strict=True) if mine]
    return lax.map(entry, mapped, batch_size=None if group == 1 else group)


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, max(most, 1)), 0, -1) if number % n == 0)


def one_of(operands: Any, place: tuple[int, ...]) -> Any:
    """Takes the operands of the head at `place`."""
    return jax.tree.map(lambda x: x[tuple(0 if n == 1 else i for i, n in zip(place, x.shape, strict=False))], operands)


def _squeezed(x: Array | np.ndarray, axes: tuple[int, ...]) -> Array | np.ndarray:
    """`x` without these axes, of length 1."""
    return np.squeeze(x, axes) if isinstance(x, np.ndarray) else lax.squeeze(x, axes)


def numbers_as_arrays(call: Call) -> Call:
    """Converts the scale and nonzero offsets to arrays, so that new values of them do not cause recompilation.

    While an outer `jit` is tracing, they stay Python numbers: that program is compiled anyway, and constants make it
    faster. Offsets of 0 always stay numbers, so that the tiles to visit can be computed at trace time.
    """
    if being_traced():
        return call
    operands, options = call
    offsets = Offsets.of(
        *(jnp.asarray(x, jnp.int32) if isinstance(x, int) and x else x for x in operands.offsets.values)
    )
    scale = operands.scale
    if scale is None:
        scale = jnp.asarray(options.scale, options.dtype)
    rank = operands.query.ndim - 3
    offsets = jax.tree.map(lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape), offsets)
    return Call(
        operands._replace(offsets=offsets, scale=scale),
        options._replace(scale=1.0),
    )
