"""`FunctionMask`, a mask given by a Python function of positions, and checks that its
lookups are within arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from flax_mha._src.core.fields import static, with_axes
from flax_mha._src.core.tile import Grid, Offsets, Scalar, Tile
from flax_mha._src.core.tracing import T, is_key, readable
from flax_mha._src.core.user_function import Trace, TracedFunction, trace
from flax_mha._src.core.validation import INT32_MAX, Shape
from flax_mha._src.masks.base import Mask, Occupancy, Window
from flax_mha._src.masks.visible import Visible


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionMask(Mask):
    """Lets queries attend to keys for which `mask_mod(b, h, q_idx, kv_idx)` is True, as
    in PyTorch's FlexAttention.

    The arguments of `mask_mod` are int32 scalars: the index of the batch entry
    (flattened if there are several batch axes), the index of the head, the position of
    the query (including `query_offset`) and the position of the key (including
    `key_value_offset`). `mask_mod` may capture arrays and numbers; their values are
    read at every call of the attention. Inside your own `jit`, they are read while
    tracing.

    To find the tiles that can be skipped, `mask_mod` is evaluated at all positions:
    once, if the captured arrays are known while tracing and the offsets are numbers,
    otherwise in every call.

    Two function masks are equal if their functions compute the same from equal captured
    values, so creating the mask again does not make `jax.jit` retrace. Lookups in
    captured arrays are checked; see `dot_product_attention`.

    Example:
      >>> from flax_mha import CausalMask, FunctionMask
      >>> def every_third(b, h, q_idx, kv_idx):
      ...     return (q_idx - kv_idx) % 3 == 0
      >>> print(CausalMask() & FunctionMask(every_third))
      █·······
      ·█······
      ··█·····
      █··█····
      ·█··█···
      ··█··█··
      █··█··█·
      ·█··█··█
    """

    mask_mod: Callable[[Array, Array, Array, Array], Array]

    def canonical(self, shape: Shape) -> Mask:
        function, _, captured = trace("mask_mod", self.mask_mod)
        batch, head = shape.indices(function.uses("b"), function.uses("h"))
        return TracedMask(captured, batch, head, function)

    def tree_flatten(self) -> tuple[tuple, "_Comparable"]:
        """Returns no arrays: `jax.jit` treats captured values as constants, as in any
        function that it traces.
        """
        return (), _Comparable.of(self.mask_mod)

    @classmethod
    def tree_unflatten(cls, comparable: "_Comparable", _: tuple) -> "FunctionMask":
        return cls(comparable.mask_mod)


@dataclasses.dataclass(frozen=True)
class _Comparable:
    """A `mask_mod` that `jax.jit` can compare: two are equal if their traces and
    captured values are equal.
    """

    mask_mod: Callable[[Array, Array, Array, Array], Array] = dataclasses.field(
        compare=False
    )
    # Never read; keeps alive the objects whose `id` is in `key`.
    traced: Trace | None = dataclasses.field(compare=False, repr=False)
    key: tuple = dataclasses.field(repr=False)

    @classmethod
    def of(
        cls, mask_mod: Callable[[Array, Array, Array, Array], Array]
    ) -> "_Comparable":
        """Traces `mask_mod`; if it cannot be traced, it is compared by identity."""
        try:
            traced = trace("mask_mod", mask_mod)
        except ValueError:  # raised again when attention uses the mask
            return cls(mask_mod, None, (mask_mod,))
        key = (traced.function, *map(_key, traced.constants))
        return cls(mask_mod, traced, key)

    def __reduce__(self) -> tuple:
        """Copies and pickles only the function, and traces it again: a jaxpr can be
        neither copied nor pickled.
        """
        return _Comparable.of, (self.mask_mod,)


def _key(array: Array) -> tuple:
    """Returns what `_Comparable` compares of a captured array: its values or, if it is
    traced, its identity.
    """
    if isinstance(array, jax.core.Tracer):
        return (id(array),)
    data = jax.random.key_data(array) if is_key(array) else array
    values = np.asarray(data)
    return str(array.dtype), values.shape, values.tobytes()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TracedMask(Mask):
    """What `FunctionMask.canonical` returns: the traced function, and the arrays and
    indices to call it with.
    """

    captured: list[Array] = with_axes("")
    # Indices of batch entries and of heads; None means 0.
    batch: Int[Array, "..."] | np.ndarray | None = with_axes("B")
    head: Int[Array, "..."] | np.ndarray | None = with_axes("N")
    function: TracedFunction = static()
    # Occupancy of squares with `cell` rows and columns, if the function was evaluated
    # before the call.
    known: Occupancy | None = with_axes("B N rows columns", default=None)
    # The same as static bytes and a shape, if the function captures nothing and is the
    # same for all heads.
    known_bytes: tuple[bytes, bytes, tuple[int, int]] | None = static(default=None)
    cell: int = static(default=0)

    def tile(self, tile: Tile) -> Bool[Array, "#t #s"]:
        batch = 0 if self.batch is None else self.batch
        head = 0 if self.head is None else self.head
        batch = jnp.asarray(batch, jnp.int32)
        head = jnp.asarray(head, jnp.int32)
        one = functools.partial(self.function, self.captured, batch, head)
        return tile.map_positions(one)

    def occupancy(self, grid: Grid) -> Occupancy:
        """Uses the result that `store_occupancy` stored; without one, evaluates one row
        of tiles at a time.
        """
        known = self.known
        if self.known_bytes is not None:
            *both, shape = self.known_bytes
            known = Occupancy(*(np.frombuffer(x, bool).reshape(shape) for x in both))
        if known is not None:
            return _coarser(known, self.cell, grid)
        rows, columns = grid.counts
        height, width = grid.tile_shape

        def row(i: Int[Array, ""]) -> tuple[Array, Array]:
            whole = Tile(
                row=i * height,
                column=0,
                shape=(height, columns * width),
                offsets=grid.offsets,
                lengths=grid.lengths,
            )
            visible = self.tile(whole).reshape(height, columns, width)
            return visible.any((0, 2)), visible.all((0, 2))

        # One row at a time: all of them would take T x S bytes.
        some, full = lax.map(row, jnp.arange(rows, dtype=jnp.int32))
        return Occupancy(some, full)


def functions_of(mask: Any) -> list[TracedMask]:
    """Lists the `TracedMask`s, which call users' functions, in a pytree of masks that
    `Mask.canonical` returned.
    """
    parts = jax.tree.leaves(mask, is_leaf=_calls_function)
    return [part for part in parts if _calls_function(part)]


def check_lookups(
    shape: Shape,
    score_mod: TracedFunction | None,
    visible: Visible | None,
    offsets: Offsets,
    lengths: tuple[int, int],
) -> None:
    """Raises a ValueError if a user's function does not fit the call, or looks up an
    entry outside a captured array.

    `visible` holds all masks of the call, and `lengths` are T and S. `q_idx` and
    `kv_idx` are checked only at visible positions, and only if `lookups` returns the
    window in which keys are visible.
    """
    last_entry = _last_index(math.prod(shape.batch))
    last_head = _last_index(shape.num_heads)
    for function, window in lookups(visible, score_mod):
        query = None
        key = None
        if window is not None:
            query, key = _last_visible(offsets, lengths, window)
        function.check({"b": last_entry, "h": last_head, "q_idx": query, "kv_idx": key})


def _last_index(size: int) -> int | None:
    """Returns the last index of an axis; None if there is none, or for a symbol."""
    return size - 1 if isinstance(size, int) and size else None


def lookups(
    visible: Visible | None, score_mod: TracedFunction | None
) -> list[tuple[TracedFunction, Window | None]]:
    """Pairs each user function, those in masks and then `score_mod`, with the window in
    which to check its lookups.

    The window (left, right) is that of all causal masks and windows together. It is
    None if there is another mask, because that may hide lookups beyond an array; masks
    made of this function do not count.
    """
    if visible is None:
        visible = Visible()
    functions = [part.function for part in functions_of(visible)]
    if score_mod is not None:
        functions.append(score_mod)
    found: list[tuple[TracedFunction, Window | None]] = []
    for function in functions:
        window = None
        if not _other_masks(visible, function):
            window = (visible.left, visible.right)
        found.append((function, window))
    return found


def _other_masks(visible: Visible, function: TracedFunction) -> bool:
    """Returns whether there may be masks other than windows and those made of
    `function`.
    """
    for mask in visible.others:
        if function not in [part.function for part in functions_of(mask)]:
            return True
    # Other masks have leaves: arrays, or other functions.
    leaves = jax.tree.leaves(visible, is_leaf=_calls_function)
    return any(not _calls_function(x) or x.function != function for x in leaves)


def _last_visible(
    offsets: Offsets, lengths: tuple[int, int], window: Window
) -> tuple[int | None, int | None]:
    """Returns the position of the last query with a key in its window (left, right),
    and of the last key in a window.

    With one offset for each sequence, these are the largest in the batch. A position is
    None if offsets or lengths that determine it are not known while tracing, or if no
    query has a key in its window.
    """
    query_offset, key_offset = offsets.values
    queries = _span(query_offset, lengths[0])
    keys = _span(key_offset, lengths[1])
    if window == (None, None):
        # Every query and every key is in a window.
        last_query = None if queries is None else int(queries[1].max())
        last_key = None if keys is None else int(keys[1].max())
        return last_query, last_key
    if queries is None or keys is None:
        return None, None
    # All distances, if not limited.
    left, right = (2 * INT32_MAX + 1 if side is None else side for side in window)
    # Query i attends to key j if i - left <= j <= i + right.
    first_queries = np.maximum(queries[0], keys[0] - right)
    last_queries = np.minimum(queries[1], keys[1] + left)
    last_keys = np.minimum(keys[1], queries[1] + right)
    seen = first_queries <= last_queries
    if left + right < 0 or not seen.any():
        return None, None
    last_query = np.where(seen, last_queries, -INT32_MAX).max()
    last_key = np.where(seen, last_keys, -INT32_MAX).max()
    return int(last_query), int(last_key)


def _span(offset: int | Array, length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the first and last position of sequences that begin at `offset`; None if
    they are unknown or empty.
    """
    if not isinstance(length, int) or not length:
        return None
    if not isinstance(offset, int) and not readable(offset):
        return None
    first = np.asarray(offset, np.int64)
    return first, first + length - 1


def _calls_function(part: Any) -> bool:
    return isinstance(part, TracedMask)


def store_occupancy(
    mask: T, lengths: tuple[int, int], offsets: tuple[int, int], cell: int
) -> T:
    """Evaluates the user's functions in a mask before the call is computed, to find the
    tiles that it can skip.

    Returns the mask. Each `TracedMask` in it stores the occupancy of squares of `cell`
    x `cell` scores, if it has no callback and its arrays are concrete. `lengths` are T
    and S, `offsets` the positions of the first query and key.
    """
    rows = max(1, -(-lengths[0] // cell))
    columns = max(1, -(-lengths[1] // cell))
    grid = Grid((rows, columns), (cell, cell), offsets, lengths)

    def with_known(mask: Any) -> Any:
        if not isinstance(mask, TracedMask):
            return mask
        # Already evaluated by `_static_mask`.
        if mask.batch is None or mask.head is None:
            return mask
        # A callback must run in every call.
        calls_python = mask.function.calls_python
        if calls_python or not all(map(readable, (*mask.captured, mask.batch))):
            return mask
        batch, head = np.broadcast_arrays(mask.batch[..., None], mask.head)
        if not mask.captured and batch.size == 1:
            return _static_mask(mask.function, grid)
        heads = dataclasses.replace(mask, batch=batch.ravel(), head=head.ravel())
        some, full = _evaluated(heads, grid)
        shape = (*batch.shape, rows, columns)
        known = Occupancy(some.reshape(shape), full.reshape(shape))
        return dataclasses.replace(mask, known=known, cell=cell)

    return jax.tree.map(with_known, mask, is_leaf=_calls_function)


def _coarser(known: Occupancy, cell: int, grid: Grid) -> Occupancy:
    """Computes the occupancy of the tiles of `grid` from `known`, that of squares of
    `cell` x `cell` scores.
    """
    some: Any = known.any_visible
    full: Any = known.all_visible
    for axis in (0, 1):
        # The first and the last square of each tile along the axis.
        first, last = (x.ravel() // cell for x in grid.bounds(axis))
        first = np.minimum(first, some.shape[axis] - 1)
        last = np.minimum(last, some.shape[axis] - 1)
        # All squares between them, [tiles, most squares]; the last one is repeated.
        steps = np.arange((last - first).max() + 1)
        places = np.minimum(first[:, None] + steps, last[:, None])
        before = (slice(None),) * axis
        some = some[(*before, places)].any(axis + 1)
        full = full[(*before, places)].all(axis + 1)
    return Occupancy(some, full)


@functools.lru_cache(maxsize=64)
def _static_mask(function: TracedFunction, grid: Grid) -> TracedMask:
    """Makes the mask of a function that captures no arrays, with its occupancy for
    `grid` as static `known_bytes`.
    """
    head = np.zeros(1, np.int32)
    some, full = _evaluated(TracedMask([], head, head, function), grid)
    known = (some.tobytes(), full.tobytes(), grid.counts)
    return TracedMask(
        captured=[],
        batch=None,
        head=None,
        function=function,
        known_bytes=known,
        cell=grid.tile_shape[0],
    )


def _evaluated(heads: TracedMask, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Calls `_occupancies` immediately, even while JAX traces the caller, and returns
    the results as NumPy arrays.
    """
    query_offset, key_offset = grid.offsets
    grid = grid._replace(offsets=(0, 0))
    with jax.ensure_compile_time_eval():
        offsets = (
            jnp.asarray(query_offset, jnp.int32),
            jnp.asarray(key_offset, jnp.int32),
        )
        some, full = _occupancies(heads, offsets, grid)
        return np.asarray(some), np.asarray(full)


@functools.partial(jax.jit, static_argnames="grid")
def _occupancies(
    heads: TracedMask, offsets: tuple[Scalar, Scalar], grid: Grid
) -> Occupancy:
    """Computes a mask's occupancy of `grid` for several heads, one at a time: [heads,
    rows, columns].

    `heads` is the mask; its fields `batch` and `head` list the heads' indices.
    `offsets` replace `grid.offsets`: as arrays, new ones need no new compilation.
    """

    def one(head: tuple[Array, Array]) -> Occupancy:
        mask = dataclasses.replace(heads, batch=head[0], head=head[1])
        return mask.occupancy(grid._replace(offsets=offsets))

    indices = (jnp.asarray(heads.batch), jnp.asarray(heads.head))
    return lax.map(one, indices)
