"""How new keys and values are written into a cache: in place where the cache is donated, on every platform.

On a CPU slices are written: XLA's scatter copies there what it writes, and up to jax 0.11 converts all of a bfloat16
cache to float32 and back.
"""

import functools
from typing import NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from flax_mha._mesh import by_device
from flax_mha._platform import Target, by_mapped_axis, target_of, varying_alike, varying_as

# Up to jax 0.11, XLA's CPU converts all of a bfloat16 array to float32 and back to write a part of it.
_CONVERTS_BFLOAT16 = jax.__version_info__ < (0, 12)


class Kind(NamedTuple):
    """What is known of new entries while tracing.

    Attributes:
      ring: Whether the first slot comes after the last; of more entries than slots the last ones stay.
      all_or_none: Whether each sequence adds all of them, or none because they find no room.
    """

    ring: bool
    all_or_none: bool


def written(
    kind: Kind,
    cached: Float[Array, "*B S K H"],
    new: Float[Array, "*B T K H"],
    index: Int[Array, "..."],
    added: Int[Array, "..."],
) -> Float[Array, "*B S K H"]:
    """A cache with the first `added` of the new entries in the slots from `index` on.

    Args:
      kind: What is known of them.
      cached: Keys or values of a cache.
      new: New ones, in the same dtype.
      index: int32 [B...], or [] for all.
      added: Likewise, from 0 to T. Where it is 0 nothing changes, whatever the index.
    """
    cached, index, added = map(jnp.asarray, (cached, index, added))  # a checkpoint may have been read as NumPy's arrays
    if not new.size:
        return cached
    axes = "B" if index.ndim else ""
    write = functools.partial(_written_here, kind)
    return by_device(write, cached, "B S K H", (new, "B T K H"), (index, axes), (added, axes))


def _written_here(kind: Kind, *arrays: Array) -> Array:
    arrays = varying_alike(arrays)
    is_known = all(isinstance(n, int) for x in arrays for n in x.shape)  # else symbols, as in jax.export
    on_one_cpu = target_of(arrays) == Target("cpu", may_be_split=False)
    return (_sliced if is_known and on_one_cpu else _scattered)(kind, *arrays)


def _scattered(kind: Kind, cached: Array, new: Array, index: Array, added: Array) -> Array:
    """By a scatter, which accelerators and the compiler's partitioner do well."""
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
def _sliced(kind: Kind, *arrays: Array) -> Array:
    """By slices, with the gradient of the scatter. `jax.vmap` makes a call with one more batch axis of it."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> Array:
        return _in_slices(kind, *arrays)

    @call.def_vmap
    def one_more_axis(size: int, is_batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        def here(*arrays: Array) -> Array:
            number = next(len(x) for x, batched in zip(arrays, is_batched, strict=True) if batched)
            cached, new, index, added = (
                x if batched else jnp.broadcast_to(x, (number, *x.shape))
                for x, batched in zip(arrays, is_batched, strict=True)
            )
            batch = cached.shape[:-3]
            each = (jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(batch) - x.ndim)), batch) for x in (index, added))
            return _sliced(kind, cached, new, *each) if number else cached

        return by_mapped_axis(here, arrays, tuple(is_batched)), True

    return call(*arrays)


@_sliced.defjvp
def _sliced_jvp(kind: Kind, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    cached, new, *places = primals
    _, tangent = jax.jvp(lambda *x: _scattered(kind, *x, *places), (cached, new), tangents[:2])
    return _sliced(kind, *primals), tangent


@functools.partial(jax.jit, static_argnums=0)
def _in_slices(kind: Kind, cached: Array, new: Array, index: Array, added: Array) -> Array:
    """All sequences at once if all of them write the same slots, else one after the other."""
    flat, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (cached, new))
    if _is_one_slice(kind, fresh) and not index.ndim:
        return _with(kind, flat, fresh, jnp.zeros_like(index), index, added).reshape(cached.shape)
    index, added = (jnp.broadcast_to(x, cached.shape[:-3]).reshape(-1) for x in (index, added))

    def write(i: Int[Array, ""], flat: Array) -> Array:
        row, new = i.astype(jnp.int32), lax.dynamic_slice_in_dim(fresh, i, 1)
        return _with(kind, flat, new, row, *(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (index, added)))

    return lax.fori_loop(0, flat.shape[0], write, flat).reshape(cached.shape)


def _is_one_slice(kind: Kind, new: Array) -> bool:
    """Whether all new entries of a sequence, or none, go into slots that follow one another."""
    return kind.all_or_none and (new.shape[1] == 1 or not kind.ring)


def _with(
    kind: Kind,
    cached: Float[Array, "B S K H"],
    new: Float[Array, "b T K H"],
    row: Int[Array, ""],
    index: Int[Array, ""],
    added: Int[Array, ""],
) -> Float[Array, "B S K H"]:
    """The cache with the new entries of the sequences from `row` on."""
    length, size = cached.shape[1], min(new.shape[1], cached.shape[1])
    first, nothing = index % length if kind.ring else index, jnp.zeros_like(index)
    if _is_one_slice(kind, new):
        return _replaced(cached, new, (row, first, nothing, nothing), added > 0)
    starts = [jnp.clip(first, 0, length - size), nothing]
    for start in starts if kind.ring and size < length else starts[:1]:  # in a ring, they may go on at its first slot
        steps = start + jnp.arange(size, dtype=jnp.int32) - index  # which entry belongs in each slot
        if kind.ring:  # the last one that does
            steps = added - 1 - (added - 1 - steps) % length
        in_use = (steps >= 0) & (steps < added)
        entries = new.at[:, steps].get(mode="clip")
        cached = _replaced(cached, entries, (row, start, nothing, nothing), in_use[:, None, None])
    return cached


def _replaced(
    cached: Float[Array, "B S K H"],
    entries: Float[Array, "b T K H"],
    place: tuple[Array, ...],
    in_use: Bool[Array, "..."],
) -> Float[Array, "B S K H"]:
    """The cache with those of these entries at this place that are in use."""
    place = varying_alike(place)
    if not (cached.dtype == jnp.bfloat16 and _CONVERTS_BFLOAT16):
        before = lax.dynamic_slice(cached, place, entries.shape)
        return lax.dynamic_update_slice(cached, jnp.where(in_use, entries, before), place)

    # In branches of their own, operations on the bits read and write in place.
    def read(cached: Array) -> Array:
        return lax.dynamic_slice(_bits(cached), place, entries.shape)

    def write(cached: Array) -> Array:
        return _floats(lax.dynamic_update_slice(_bits(cached), _bits(entries), place))

    any_in_use = in_use.any()
    if in_use.ndim:
        nothing = varying_as(cached, jnp.zeros(entries.shape, jnp.uint16))
        before = lax.cond(any_in_use, read, lambda cached: nothing, cached)
        entries = jnp.where(in_use, entries, _floats(before))
    return lax.cond(any_in_use, write, lambda cached: cached, cached)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
