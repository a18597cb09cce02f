"""Checks new keys and values, and writes them into a cache, in place if the cache is
donated.

On a CPU, entries are written as slices, not by a scatter. XLA's scatter on CPUs copies
the new entries and, up to jax 0.11, converts a whole bfloat16 cache to float32 and
back.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

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


class Kind(NamedTuple):
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
    expected = "dtype must be a floating point dtype of at least 16 bits, int8 or float8_e4m3fn"
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
    sizes = (*cached.shape[:-3], "T" if number is None else number, *cached.shape[-2:])
    given = (*new.shape[:-3], "T", *new.shape[-2:]) if number is None else new.shape
    if new.ndim != cached.ndim or given != sizes:
        raise ValueError(
            f"Autoregressive cache shape error, expected {name} shape "
            f"({', '.join(map(str, sizes))}) instead got {new.shape}."
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
    function: Callable[..., T],
    cached: Shaped[Array, "*B S K _"],
    *others: tuple[Array, str],
) -> T:
    """Calls `function` with all arrays; on a mesh with Explicit axes, each device calls
    it with its part of each array.

    `others` are pairs of an array and the names of its axes, such as "B T K H".
    """
    sharding = jax.typeof(cached).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return function(cached, *(x for x, _ in others))
    *batch, _, heads, _ = pad_spec(sharding.spec, cached.ndim)
    manual = frozenset(mesh_axes(sharding.mesh, AxisType.Explicit))
    split = Split(sharding.mesh, manual, tuple(batch), heads, heads)
    arrays, names = zip((cached, "B S K H"), *others, strict=True)
    return split.shard_map(function, arrays, names, split.spec(cached, "B S K H"))


def write_entries(
    kind: Kind,
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
    first, *rest = map(jnp.asarray, cached)
    index, added = (jnp.asarray(x).astype(jnp.int32) for x in (index, added))
    axes = "B" if index.ndim else ""
    others = [
        *((x, "B S K H") for x in rest),
        *((x, "B T K H") for x in new),
        (index, axes),
        (added, axes),
    ]
    return _by_device(functools.partial(_write_on_device, kind), first, *others)


def _write_on_device(kind: Kind, *given: Array) -> tuple[Array, ...]:
    *entries, index, added = varying_alike(given)
    # Else symbols, as in jax.export.
    is_known = all(isinstance(n, int) for x in given for n in x.shape)
    target = target_of(given)

    def write(cached: Array, new: Array) -> Array:
        if not new.size:
            return cached
        on_cpu = target.platform == "cpu" and (
            not target.may_be_split or _is_converted(cached)
        )
        return (_write_slices if is_known and on_cpu else _scatter)(
            kind, cached, new, index, added
        )

    number = len(entries) // 2
    return tuple(map(write, entries[:number], entries[number:]))


def _scatter(
    kind: Kind, cached: Array, new: Array, index: Array, added: Array
) -> Array:
    """Does `write_entries` for one array by a scatter: in place on accelerators, and
    XLA can split it over devices.
    """
    length = cached.shape[-3]
    number = new.shape[-3]
    index = index[..., None]
    added = added[..., None]
    steps = jnp.arange(number, dtype=jnp.int32).reshape(
        (1,) * (index.ndim - 1) + (number,)
    )
    places = index + steps
    in_use = steps < added
    if kind.ring:
        places = places % length
        in_use = in_use & (steps >= added - length)
    places = jnp.where(in_use, places, length)  # out of range: not written
    if places.ndim == 1:
        return cached.at[..., places, :, :].set(new, mode="drop")
    flat, fresh = (x.reshape(-1, *x.shape[-3:]) for x in (cached, new))
    rows = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    flat = flat.at[rows, places.reshape(-1, places.shape[-1])].set(fresh, mode="drop")
    return flat.reshape(cached.shape)


def entries_at(cached: Array, slots: Int[Array, "... n"], *new: Array) -> Array:
    """Returns the entries [B..., n, K, H] in `slots`, [n] or [B..., n], followed by the
    `new` ones along axis n.
    """

    def gather(cached: Array, slots: Array, *new: Array) -> Array:
        slots = jnp.broadcast_to(slots, (*cached.shape[:-3], slots.shape[-1]))[
            ..., None, None
        ]
        return jnp.concatenate(
            [jnp.take_along_axis(cached, slots, axis=-3), *new], axis=-3
        )

    axes = "B n" if slots.ndim > 1 else "n"
    return _by_device(gather, cached, (slots, axes), *((x, "B T K H") for x in new))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _write_slices(kind: Kind, *arrays: Array) -> Array:
    """Does the same as `_scatter` by writing slices, which is faster on CPUs; its JVP
    rule uses `_scatter`.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> Array:
        return _update_slices(kind, *arrays)

    @call.def_vmap
    def add_batch_axis(
        size: int, is_batched: list[bool], *arrays: Array
    ) -> tuple[Array, bool]:
        def here(*arrays: Array) -> Array:
            # Not `size`: a device may have only a part of the mapped axis.
            number = next(
                len(x) for x, batched in zip(arrays, is_batched, strict=True) if batched
            )
            cached, new, index, added = (
                x if batched else jnp.broadcast_to(x, (number, *x.shape))
                for x, batched in zip(arrays, is_batched, strict=True)
            )
            batch = cached.shape[:-3]
            ends = (
                jnp.broadcast_to(
                    x.reshape(x.shape + (1,) * (len(batch) - x.ndim)), batch
                )
                for x in (index, added)
            )
            if number:
                return _write_slices(kind, cached, new, *ends)
            return cached

        return by_mapped_axis(here, arrays, tuple(is_batched)), True

    return call(*arrays)


@_write_slices.defjvp
def _write_slices_jvp(
    kind: Kind, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    cached, new, *ends = primals
    _, tangent = jax.jvp(
        lambda *x: _scatter(kind, *x, *ends), (cached, new), tangents[:2]
    )
    return _write_slices(kind, *primals), tangent


@functools.partial(jax.jit, static_argnums=0)
def _update_slices(
    kind: Kind, cached: Array, new: Array, index: Array, added: Array
) -> Array:
    """Writes the new entries of all sequences as one slice if all use the same slots,
    else one by one.
    """
    # Not flattened: XLA would copy some caches into other layouts.
    batch = cached.shape[:-3]
    if _fills_one_slice(kind, new) and not index.ndim:
        return _write_sequence(
            kind, cached, new, (jnp.zeros_like(index),) * len(batch), index, added
        )
    index, added = (jnp.broadcast_to(x, batch).reshape(-1) for x in (index, added))
    new = _bits(new) if _is_converted(cached) else new

    def write(i: Int[Array, ""], cached: Array) -> Array:
        i = jnp.asarray(i, jnp.int32)
        place = tuple(x.astype(jnp.int32) for x in jnp.unravel_index(i, batch))
        entries = lax.dynamic_slice(
            new, _start(place, jnp.zeros_like(i)), (1,) * len(batch) + new.shape[-3:]
        )
        first, count = (
            lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (index, added)
        )
        return _write_sequence(kind, cached, entries, place, first, count)

    return lax.fori_loop(0, index.size, write, cached)


def _fills_one_slice(kind: Kind, new: Array) -> bool:
    """Returns whether one slice suffices for a sequence: its T slots are consecutive,
    and all or none are written.
    """
    return kind.all_or_none and (new.shape[-3] == 1 or not kind.ring)


def _write_sequence(
    kind: Kind,
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
    first = index % length if kind.ring else index
    if _fills_one_slice(kind, new):
        return _update_slice(cached, new, _start(place, first), added > 0)
    starts = [jnp.clip(first, 0, length - size), jnp.zeros_like(first)]
    # The end of a ring, then its start.
    for start in starts if kind.ring and size < length else starts[:1]:
        entry_of_slot = start + jnp.arange(size, dtype=jnp.int32) - index
        if kind.ring:  # the last added entry of each slot
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
        return lax.dynamic_update_slice(
            cached, jnp.where(in_use, entries, before), start
        )

    # XLA works on the bits in place only if a branch of a conditional does nothing
    # else.
    def read(cached: Array) -> Array:
        return lax.dynamic_slice(_bits(cached), start, entries.shape)

    # With a single head, XLA writes all slots again, unless the features are written in
    # three parts.
    in_parts = cached.shape[-2] == 1 and (entries.shape[-3] == 1 or in_use.ndim > 0)

    def write(cached: Array) -> Array:
        bits, (*first, feature) = _bits(cached), start
        for part in jnp.array_split(_bits(entries), 3 if in_parts else 1, axis=-1):
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
    return x.dtype == jnp.float8_e4m3fn or (
        x.dtype == jnp.bfloat16 and _CONVERTS_BFLOAT16
    )


def _bits(x: Array) -> Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if is_float:
        return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return x
