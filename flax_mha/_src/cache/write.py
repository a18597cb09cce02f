"""Checks new keys and values, and writes them into a cache, in place if the cache is
donated.

On a CPU, entries are written as slices, not by a scatter. XLA's scatter on CPUs copies
the new entries and, up to jax 0.11, converts a whole bfloat16 cache to float32 and
back.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from flax_mha._src.core.eight_bits import is_quantized
from flax_mha._src.core.tracing import (
    T,
    by_mapped_axis,
    target_of,
    varying_alike,
    varying_as,
)
from flax_mha._src.distributed.split import Split, mesh_axes, pad_spec

# Up to jax 0.11, XLA on a CPU converts a whole bfloat16 array to float32 and back in
# order to write a part of it. All versions convert float8 arrays, to float16.
_CONVERTS_BFLOAT16 = jax.__version_info__ < (0, 12)


class WriteOptions(NamedTuple):
    """Static options of `write_entries`: what happens at the end of the cache, and in
    sequences without room.
    """

    # Whether writing continues at the first slot after the last, and overwrites older
    # entries.
    ring: bool
    # Whether a sequence adds either all of its T new entries or, without room, none.
    all_or_none: bool


def check_dtype(dtype: DTypeLike) -> None:
    """Raises a ValueError unless a cache may have this dtype: 16-bit or wider floating
    point or complex, or 8-bit.
    """
    expected = (
        "dtype must be a floating point dtype of at least 16 bits, int8 or "
        "float8_e4m3fn"
    )
    fix = "pass jnp.bfloat16, or jnp.int8 for a quantized cache"
    try:
        known = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{expected}, but got {dtype!r}; {fix}.") from error
    if dtype is None:  # for NumPy, None is float64
        raise ValueError(f"{expected}, but got None; {fix}.")
    is_wide = jnp.issubdtype(known, jnp.inexact) and known.itemsize >= 2
    if not (is_wide or is_quantized(known)):
        raise ValueError(f"{expected}, but got {known}; {fix}.")


def check_entries(
    name: str, new: Array, cached: Array, number: int | None, any_dtype: bool
) -> None:
    """Raises a ValueError unless `new` keys or values fit the `cached` ones; calls them
    `name` in the error.

    `number` is the expected number of tokens; None accepts any. `any_dtype` accepts all
    dtypes, except complex ones for a real cache.
    """
    given: tuple[int | str, ...] = new.shape
    length: int | str | None = number
    if number is None:
        length = "T"
        given = (*new.shape[:-3], "T", *new.shape[-2:])
    sizes = (*cached.shape[:-3], length, *cached.shape[-2:])
    if new.ndim != cached.ndim or given != sizes:
        # The words of Flax's error.
        expected = ", ".join(map(str, sizes))
        raise ValueError(
            f"Autoregressive cache shape error, expected {name} shape ({expected}) "
            f"instead got {new.shape}."
        )
    if not any_dtype and new.dtype != cached.dtype:
        raise ValueError(
            f"{name} must have the cache's dtype, {cached.dtype}, but got {new.dtype}; "
            "use .astype."
        )
    if jnp.iscomplexobj(new) and not jnp.iscomplexobj(cached):
        raise ValueError(
            f"the cache's dtype, {cached.dtype}, cannot represent {new.dtype} values; "
            f"create the cache with dtype={new.dtype}."
        )


def _by_device(
    function: Callable[..., T], arguments: tuple[Any, ...], axes: tuple[str, ...]
) -> T:
    """Calls `function(*arguments)`; on a mesh with Explicit axes, each device calls it
    with its part of each array.

    `arguments` are pytrees. The first holds the entries of a cache, and is split like
    the result. `axes` names the axes of the arrays of each, such as "B T K H".
    """
    cached = jax.tree.leaves(arguments)[0]
    sharding = jax.typeof(cached).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(*arguments)
    *batch, _, heads, _ = pad_spec(sharding.spec, cached.ndim)
    manual = frozenset(mesh_axes(sharding.mesh, AxisType.Explicit))
    split = Split(sharding.mesh, manual, tuple(batch), heads, heads)
    specs = [
        jax.tree.map(lambda x, names=names: split.spec(x, names), argument)
        for argument, names in zip(arguments, axes, strict=True)
    ]
    out_spec = split.spec(cached, axes[0])
    return split.shard_map(function, arguments, tuple(specs), out_spec)


def write_entries(
    options: WriteOptions,
    cached: tuple[Shaped[Array, "*B S K _"], ...],
    new: tuple[Shaped[Array, "*B T K _"], ...],
    index: Int[Array, "..."],
    added: Int[Array, "..."],
) -> tuple[Shaped[Array, "*B S K _"], ...]:
    """Writes the first `added` entries of each sequence in `new` into the slots of
    `cached` from `index` on.

    Entries are keys, values or scales of tokens, in the cache's dtypes. `index` and
    `added` (from 0 to T) are [B...], or [] for all sequences. In a ring with S slots,
    slot `index` mod S is the first. If `added` is 0, `index` may be any number.
    """
    # A checkpoint may have been read as NumPy's arrays.
    cached = tuple(map(jnp.asarray, cached))
    index = jnp.asarray(index).astype(jnp.int32)
    added = jnp.asarray(added).astype(jnp.int32)
    axes = "B" if index.ndim else ""
    write = functools.partial(_write_on_device, options)
    arguments = (cached, new, index, added)
    return _by_device(write, arguments, ("B S K H", "B T K H", axes, axes))


def _write_on_device(options: WriteOptions, *given: Any) -> tuple[Array, ...]:
    cached, new, index, added = varying_alike(given)
    arrays = jax.tree.leaves(given)
    # Otherwise symbols, as in jax.export.
    has_known_sizes = all(isinstance(size, int) for x in arrays for size in x.shape)
    target = target_of(arrays)

    def write(cached: Array, new: Array) -> Array:
        if not new.size:
            return cached
        # XLA can split only the scatter over devices, but converting a whole cache
        # costs more.
        prefers_slices = not target.may_be_split or _is_converted(cached)
        if has_known_sizes and target.platform == "cpu" and prefers_slices:
            return _write_slices(options, cached, new, index, added)
        return _scatter(options, cached, new, index, added)

    return tuple(map(write, cached, new))


def _scatter(
    options: WriteOptions, cached: Array, new: Array, index: Array, added: Array
) -> Array:
    """Does `write_entries` for one array by a scatter: in place on accelerators, and
    XLA can split it over devices.
    """
    length = cached.shape[-3]
    number = new.shape[-3]
    index = index[..., None]
    added = added[..., None]
    steps = jnp.arange(number, dtype=jnp.int32)
    steps = steps.reshape((1,) * (index.ndim - 1) + (number,))
    places = index + steps
    in_use = steps < added
    if options.ring:
        places = places % length
        # Later entries overwrite those a whole ring before them.
        in_use = in_use & (steps >= added - length)
    places = jnp.where(in_use, places, length)  # out of range: not written
    if places.ndim == 1:
        return cached.at[..., places, :, :].set(new, mode="drop")
    # One batch axis.
    flat = cached.reshape(-1, *cached.shape[-3:])
    fresh = new.reshape(-1, *new.shape[-3:])
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    places = places.reshape(-1, places.shape[-1])
    flat = flat.at[rows, places].set(fresh, mode="drop")
    return flat.reshape(cached.shape)


def entries_at(cached: Array, slots: Int[Array, "... n"], *new: Array) -> Array:
    """Returns the entries [B..., n, K, H] in `slots`, [n] or [B..., n], followed by the
    `new` ones along axis n.
    """

    def gather(cached: Array, slots: Array, new: tuple[Array, ...]) -> Array:
        slots = jnp.broadcast_to(slots, (*cached.shape[:-3], slots.shape[-1]))
        slots = slots[..., None, None]
        taken = jnp.take_along_axis(cached, slots, axis=-3)
        return jnp.concatenate([taken, *new], axis=-3)

    axes = "B n" if slots.ndim > 1 else "n"
    return _by_device(gather, (cached, slots, new), ("B S K H", axes, "B T K H"))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write_slices(options: WriteOptions, *arrays: Array) -> Array:
    """Does the same as `_scatter` by writing slices, which is faster on CPUs; its JVP
    rule uses `_scatter`.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> Array:
        return _update_slices(options, *arrays)

    @call.def_vmap
    def add_batch_axis(
        size: int, is_batched: list[bool], *arrays: Array
    ) -> tuple[Array, bool]:
        def here(*arrays: Array) -> Array:
            # Not `size`: a device may have only a part of the mapped axis.
            number = len(arrays[is_batched.index(True)])
            mapped = []
            for x, batched in zip(arrays, is_batched, strict=True):
                if not batched:
                    x = jnp.broadcast_to(x, (number, *x.shape))
                mapped.append(x)
            cached, new, index, added = mapped
            if not number:
                return cached
            # The mapped axis becomes a batch axis, so each sequence needs its index.
            batch = cached.shape[:-3]
            index = _for_each_sequence(index, batch)
            added = _for_each_sequence(added, batch)
            return _write_slices(options, cached, new, index, added)

        return by_mapped_axis(here, arrays, tuple(is_batched)), True

    return call(*arrays)


def _for_each_sequence(x: Array, batch: tuple[int, ...]) -> Array:
    """Broadcasts x, with the first axes of `batch`, to [B...]."""
    others = (1,) * (len(batch) - x.ndim)
    return jnp.broadcast_to(x.reshape(x.shape + others), batch)


@_write_slices.defjvp
def _write_slices_jvp(
    options: WriteOptions, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    cached, new, *ends = primals

    def scatter(cached: Array, new: Array) -> Array:
        return _scatter(options, cached, new, *ends)

    _, tangent = jax.jvp(scatter, (cached, new), tangents[:2])
    return _write_slices(options, *primals), tangent


@functools.partial(jax.jit, static_argnums=0)
def _update_slices(
    options: WriteOptions, cached: Array, new: Array, index: Array, added: Array
) -> Array:
    """Writes the new entries of all sequences as one slice if all use the same slots,
    otherwise one by one.
    """
    # Not flattened: XLA would copy some caches into other layouts.
    batch = cached.shape[:-3]
    if _fills_one_slice(options, new) and not index.ndim:
        place = (jnp.zeros_like(index),) * len(batch)
        return _write_sequence(options, cached, new, place, index, added)
    index = jnp.broadcast_to(index, batch).reshape(-1)
    added = jnp.broadcast_to(added, batch).reshape(-1)
    if _is_converted(cached):
        new = _bits(new)

    def write(i: Int[Array, ""], cached: Array) -> Array:
        i = jnp.asarray(i, jnp.int32)
        place = tuple(x.astype(jnp.int32) for x in jnp.unravel_index(i, batch))
        start = _start(place, jnp.zeros_like(i))
        shape = (1,) * len(batch) + new.shape[-3:]
        entries = lax.dynamic_slice(new, start, shape)
        first = lax.dynamic_index_in_dim(index, i, keepdims=False)
        count = lax.dynamic_index_in_dim(added, i, keepdims=False)
        return _write_sequence(options, cached, entries, place, first, count)

    return lax.fori_loop(0, index.size, write, cached)


def _fills_one_slice(options: WriteOptions, new: Array) -> bool:
    """Returns whether one slice suffices for a sequence: its T slots are consecutive,
    and all or none are written.
    """
    return options.all_or_none and (new.shape[-3] == 1 or not options.ring)


def _write_sequence(
    options: WriteOptions,
    cached: Float[Array, "*B S K H"],
    new: Shaped[Array, "*b T K H"],
    place: tuple[Array, ...],
    index: Int[Array, ""],
    added: Int[Array, ""],
) -> Float[Array, "*B S K H"]:
    """Writes the first `added` new entries of one sequence into its slots from `index`
    on.

    `place` is the sequence's index along each batch axis. `new` holds the entries or
    their bits (`_bits`). To write one slice for all sequences, pass their new entries,
    and zeros as `place`.
    """
    length = cached.shape[-3]
    size = min(new.shape[-3], cached.shape[-3])
    first = index % length if options.ring else index
    if _fills_one_slice(options, new):
        return _update_slice(cached, new, _start(place, first), added > 0)
    starts = [jnp.clip(first, 0, length - size)]
    if options.ring and size < length:
        # What does not fit at the end of a ring goes to its start.
        starts.append(jnp.zeros_like(first))
    for start in starts:
        entry_of_slot = start + jnp.arange(size, dtype=jnp.int32) - index
        if options.ring:
            # Every `length`-th entry falls on the same slot: keep the last one added.
            entry_of_slot = added - 1 - (added - 1 - entry_of_slot) % length
        in_use = (entry_of_slot >= 0) & (entry_of_slot < added)
        in_use = in_use.reshape((1,) * (cached.ndim - 3) + (size, 1, 1))
        entries = new.at[..., entry_of_slot, :, :].get(mode="clip")
        cached = _update_slice(cached, entries, _start(place, start), in_use)
    return cached


def _start(place: tuple[Array, ...], slot: Int[Array, ""]) -> tuple[Array, ...]:
    """Returns where a slice of [B..., S, K, H] starts: at `place` along B..., `slot`
    along S, and 0 along K and H.
    """
    zero = jnp.zeros_like(slot)
    return varying_alike((*place, slot, zero, zero))


def _update_slice(
    cached: Float[Array, "*B S K H"],
    entries: Shaped[Array, "*b T K H"],
    start: tuple[Array, ...],
    in_use: Bool[Array, "..."],
) -> Float[Array, "*B S K H"]:
    """Writes entries, or their bits, into the slice at `start`, only where `in_use`:
    one bool, or one for each slot.
    """
    if not _is_converted(cached):
        before = lax.dynamic_slice(cached, start, entries.shape)
        entries = jnp.where(in_use, entries, before)
        return lax.dynamic_update_slice(cached, entries, start)

    # XLA works on the bits in place only if a branch of a conditional does nothing
    # else.
    def read(cached: Array) -> Array:
        return lax.dynamic_slice(_bits(cached), start, entries.shape)

    # With a single head, XLA writes all slots again, unless the features are written in
    # three parts.
    in_parts = cached.shape[-2] == 1 and (entries.shape[-3] == 1 or in_use.ndim > 0)

    def write(cached: Array) -> Array:
        bits = _bits(cached)
        *first, feature = start
        parts = jnp.array_split(_bits(entries), 3 if in_parts else 1, axis=-1)
        for part in parts:
            if part.size:
                bits = lax.dynamic_update_slice(bits, part, (*first, feature))
            feature += part.shape[-1]
        return lax.bitcast_convert_type(bits, cached.dtype)

    any_in_use = in_use.any()
    if in_use.ndim:
        nothing = varying_as(cached, jnp.zeros(entries.shape, _bits(entries).dtype))
        before = lax.cond(any_in_use, read, lambda cached: nothing, cached)
        entries = jnp.where(in_use, entries, before)
    return lax.cond(any_in_use, write, lambda cached: cached, cached)


def _is_converted(x: Array) -> bool:
    if x.dtype == jnp.bfloat16:
        return _CONVERTS_BFLOAT16
    return x.dtype == jnp.float8_e4m3fn


def _bits(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, dtype)
