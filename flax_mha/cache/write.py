"""Writes new keys and values into a cache, in place if the cache is donated, on every platform.

On a CPU slices are written: XLA's scatter makes a copy of the new entries there, and up to jax 0.11 converts all of a
bfloat16 cache to float32 and back.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float, Int, Shaped

from flax_mha.core.tracing import T, by_mapped_axis, target_of, varying_alike, varying_as
from flax_mha.distributed.split import Split, mesh_axes, pad_spec

# Up to jax 0.11, XLA's CPU converts all of a bfloat16 array to float32 and back to write a part of it. Of all versions
# it does so with float8, to float16.
_CONVERTS_BFLOAT16 = jax.__version_info__ < (0, 12)


class Kind(NamedTuple):
    """The static options of writing."""

    ring: bool  # after the last slot, writing goes on at the first; of more entries than slots, the last ones are kept
    all_or_none: bool  # each sequence adds all of its T new entries, or none because they find no room


def by_device(function: Callable[..., T], like: Array, axes: str, *others: tuple[Array, str]) -> T:
    """Calls `function(like, *others)`, on each device with its parts if the type of `like` says how it is split.

    What it returns is split as `like` [B..., length, K, size] is. Axes are named as in the field metadata of masks.
    """
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(like, *(x for x, _ in others))
    *batch, _, heads, _ = pad_spec(sharding.spec, like.ndim)
    manual = frozenset(mesh_axes(sharding.mesh, AxisType.Explicit))
    split = Split(sharding.mesh, manual, tuple(batch), heads, heads)
    arrays, names = zip((like, axes), *others, strict=True)
    mapped, resharded = split.shard_map(function, arrays, names, split.spec(like, axes))
    return mapped(*resharded)


def write_entries(
    kind: Kind,
    cached: tuple[Shaped[Array, "*B S K _"], ...],
    new: tuple[Shaped[Array, "*B T K _"], ...],
    index: Int[Array, "..."],
    added: Int[Array, "..."],
) -> tuple[Shaped[Array, "*B S K _"], ...]:
    """Writes the first `added` of new entries, in the same dtypes, into the slots of a cache from `index` on.

    Index and `added`, from 0 to T, are [B...], or [] for all sequences. In a ring, the index is a position. Where none
    is added nothing changes, whatever the index.
    """
    first, *rest = map(jnp.asarray, cached)  # a checkpoint may have been read as NumPy's arrays
    index, added = (jnp.asarray(x).astype(jnp.int32) for x in (index, added))
    axes = "B" if index.ndim else ""
    others = [*((x, "B S K H") for x in rest), *((x, "B T K H") for x in new), (index, axes), (added, axes)]
    return by_device(functools.partial(_write_on_device, kind), first, "B S K H", *others)


def _write_on_device(kind: Kind, *given: Array) -> tuple[Array, ...]:
    *entries, index, added = varying_alike(given)
    is_known = all(isinstance(n, int) for x in given for n in x.shape)  # else symbols, as in jax.export
    target = target_of(given)

    def write(cached: Array, new: Array) -> Array:
        if not new.size:
            return cached
        on_cpu = target.platform == "cpu" and (not target.may_be_split or _is_converted(cached))
        return (_write_slices if is_known and on_cpu else _scatter)(kind, cached, new, index, added)

    number = len(entries) // 2
    return tuple(map(write, entries[:number], entries[number:]))


def _scatter(kind: Kind, cached: Array, new: Array, index: Array, added: Array) -> Array:
    """Writes by a scatter, which accelerators and XLA's partitioner do well."""
    length, number = cached.shape[-3], new.shape[-3]
    index, added = index[..., None], added[..., None]
    steps = jnp.arange(number, dtype=jnp.int32).reshape((1,) * (index.ndim - 1) + (number,))
    places, in_use = index + steps, steps < added
    if kind.ring:
        places, in_use = places % length, in_use & (steps >= added - length)
    places = jnp.where(in_use, places, length)  # there, nothing is written
    if places.ndim == 1:
        return cached.at[..., places, :, :].set(new, mode="drop")
    flat, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (cached, new))
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flat = flat.at[rows, places.reshape(-1, places.shape[-1])].set(fresh, mode="drop")
    return flat.reshape(cached.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write_slices(kind: Kind, *arrays: Array) -> Array:
    """Writes by slices, with the gradient of the scatter. `jax.vmap` makes it a call with one more batch axis."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> Array:
        return _update_slices(kind, *arrays)

    @call.def_vmap
    def one_more_axis(size: int, is_batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        def here(*arrays: Array) -> Array:
            # A device has a part of the mapped axis only.
            number = next(len(x) for x, batched in zip(arrays, is_batched, strict=True) if batched)
            cached, new, index, added = (
                x if batched else jnp.broadcast_to(x, (number, *x.shape))
                for x, batched in zip(arrays, is_batched, strict=True)
            )
            batch = cached.shape[:-3]
            ends = (jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(batch) - x.ndim)), batch) for x in (index, added))
            return _write_slices(kind, cached, new, *ends) if number else cached

        return by_mapped_axis(here, arrays, tuple(is_batched)), True

    return call(*arrays)


@_write_slices.defjvp
def _write_slices_jvp(kind: Kind, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    cached, new, *ends = primals
    _, tangent = jax.jvp(lambda *x: _scatter(kind, *x, *ends), (cached, new), tangents[:2])
    return _write_slices(kind, *primals), tangent


@functools.partial(jax.jit, static_argnums=0)
def _update_slices(kind: Kind, cached: Array, new: Array, index: Array, added: Array) -> Array:
    """Writes all sequences at once if all write the same slots, else one after the other."""
    batch = cached.shape[:-3]  # its axes stay apart: if they became one, XLA would copy some caches into other layouts
    if _fills_one_slice(kind, new) and not index.ndim:
        return _write_sequence(kind, cached, new, (jnp.zeros_like(index),) * len(batch), index, added)
    index, added = (jnp.broadcast_to(x, batch).reshape(-1) for x in (index, added))
    new = _bits(new) if _is_converted(cached) else new

    def write(i: Int[Array, ""], cached: Array) -> Array:
        i = jnp.asarray(i, jnp.int32)
        place = tuple(x.astype(jnp.int32) for x in jnp.unravel_index(i, batch))
        own = lax.dynamic_slice(new, _start(place, jnp.zeros_like(i)), (1,) * len(batch) + new.shape[-3:])
        first, count = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (index, added))
        return _write_sequence(kind, cached, own, place, first, count)

    return lax.fori_loop(0, index.size, write, cached)


def _fills_one_slice(kind: Kind, new: Array) -> bool:
    """Returns True if the entries of a sequence, if any are added, fill consecutive slots."""
    return kind.all_or_none and (new.shape[-3] == 1 or not kind.ring)


def _write_sequence(
    kind: Kind,
    cached: Float[Array, "*B S K H"],
    new: Shaped[Array, "*b T K H"],
    place: tuple[Array, ...],
    index: Int[Array, ""],
    added: Int[Array, ""],
) -> Float[Array, "*B S K H"]:
    """Writes the first `added` new entries of one sequence, at `place` of the batch axes, or of all, from place 0 on.

    The new entries may be bits instead of floats (`_bits`).
    """
    length, size = cached.shape[-3], min(new.shape[-3], cached.shape[-3])
    first = index % length if kind.ring else index
    if _fills_one_slice(kind, new):
        return _update_slice(cached, new, _start(place, first), added > 0)
    starts = [jnp.clip(first, 0, length - size), jnp.zeros_like(first)]
    for start in starts if kind.ring and size < length else starts[:1]:  # the rest of a ring's goes to the first slots
        entry_of_slot = start + jnp.arange(size, dtype=jnp.int32) - index
        if kind.ring:  # the last one that belongs there
            entry_of_slot = added - 1 - (added - 1 - entry_of_slot) % length
        in_use = (entry_of_slot >= 0) & (entry_of_slot < added)
        in_use = in_use.reshape((1,) * (cached.ndim - 3) + (size, 1, 1))
        entries = new.at[..., entry_of_slot, :, :].get(mode="clip")
        cached = _update_slice(cached, entries, _start(place, start), in_use)
    return cached


def _start(place: tuple[Array, ...], slot: Int[Array, ""]) -> tuple[Array, ...]:
    """Returns the start of a slice of all heads, given its sequence and slot."""
    zero = jnp.zeros_like(slot)
    return varying_alike((*place, slot, zero, zero))


def _update_slice(
    cached: Float[Array, "*B S K H"],
    entries: Shaped[Array, "*b T K H"],
    start: tuple[Array, ...],
    in_use: Bool[Array, "..."],
) -> Float[Array, "*B S K H"]:
    """Writes the entries, or their bits, that are in use: one bool, or one for each slot."""
    if not _is_converted(cached):
        before = lax.dynamic_slice(cached, start, entries.shape)
        return lax.dynamic_update_slice(cached, jnp.where(in_use, entries, before), start)

    # The bits of a cache are read, and written, in place if nothing else is done in that branch of a conditional.
    def read(cached: Array) -> Array:
        return lax.dynamic_slice(_bits(cached), start, entries.shape)

    def write(cached: Array) -> Array:
        return lax.bitcast_convert_type(lax.dynamic_update_slice(_bits(cached), _bits(entries), start), cached.dtype)

    any_in_use = in_use.any()
    if in_use.ndim:
        nothing = varying_as(cached, jnp.zeros(entries.shape, _bits(entries).dtype))
        before = lax.cond(any_in_use, read, lambda cached: nothing, cached)
        entries = jnp.where(in_use, entries, before)
    return lax.cond(any_in_use, write, lambda cached: cached, cached)


def _is_converted(x: Array) -> bool:
    return x.dtype == jnp.float8_e4m3fn or (x.dtype == jnp.bfloat16 and _CONVERTS_BFLOAT16)


def _bits(x: Array) -> Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if is_float else x
