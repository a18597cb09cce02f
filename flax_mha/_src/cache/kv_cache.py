"""`KVCache`: an immutable cache of the keys and values of all tokens so far."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.cache.write import (
    WriteOptions,
    check_dtype,
    check_entries,
    entries_at,
    write_entries,
)
from flax_mha._src.call.call import Sharding
from flax_mha._src.core import validation
from flax_mha._src.core.eight_bits import dequantize_cache, is_quantized, quantize_cache
from flax_mha._src.core.fields import static
from flax_mha._src.core.tracing import readable
from flax_mha._src.core.validation import (
    as_array,
    extremes,
    int32,
    int_at_least,
    is_int,
)
from flax_mha._src.distributed.split import place, take_entries

# Slots of a ring beyond the window and the query itself. `truncate` can take back one
# token more than this, because the next query is not in the ring yet.
SPARE = 64


def reset_index(index: Int[Array, "*B"], rows: ArrayLike) -> Int[Array, "*B"]:
    """Sets the index of a cache to 0 where `rows` is True; see `KVCache.reset`."""
    rows = as_array("rows", rows, "bool [B...], True for each sequence to empty")
    if index.ndim == 0:
        raise ValueError(
            "rows requires a cache with an index for each sequence, but this cache has "
            "one for all; create it with per_row=True."
        )
    if rows.dtype != jnp.bool_ or rows.shape != index.shape:
        raise ValueError(
            f"rows must be bool with shape {index.shape}, True for each sequence to "
            f"empty, but got {rows.dtype} with shape {rows.shape}."
        )
    return jnp.where(rows, 0, index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """An immutable cache of keys and values in Flax's layout.

    The token at position p is in slot p. With a `window`, the cache is a ring buffer of
    S slots: the token at position p is in slot p mod S, and overwrites a token that no
    later query attends to. A ring never overflows.

    Attributes:
      key: [B..., S, K, H].
      value: [B..., S, K, Hv]; Hv = 0 with a `value_size`.
      index: The number of tokens so far, int32: [] for all sequences, or [B...]
        (`per_row`). A negative number marks a sequence that `truncate`, `keep` or
        `take` could not make under `jit`; its outputs are NaN.
      window: How many positions before its own a query attends to; None if the cache is
        not a ring.
      value_size: If given, the values are the first `value_size` features of the keys,
        and are not stored separately.
      scale: Scales [B..., S, K, 2] of 8-bit keys and 8-bit values. With a `value_size`,
        the scales of the key features after the first `value_size`, and of the values.
        None if keys and values have more than 8 bits.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha.cache import KVCache
      >>> cache = KVCache.create(2, 100, num_kv_heads=4, head_size=16, per_row=True)
      >>> prompt = jnp.ones((2, 7, 4, 16))
      >>> cache = cache.update(prompt, prompt, lengths=jnp.array([7, 3]))
      >>> cache.index
      Array([7, 3], dtype=int32)
      >>> cache.truncate(2).take(jnp.array([0, 0, 0])).key.shape
      (3, 100, 4, 16)
    """

    key: Float[Array, "*B S K H"]
    value: Float[Array, "*B S K Hv"]
    index: Int[Array, "..."]
    window: int | None = static(default=None)
    value_size: int | None = static(default=None)
    scale: Float[Array, "*B S K 2"] | None = None

    @classmethod
    def create(
        cls,
        batch: int | Sequence[int],
        max_length: int,
        num_kv_heads: int,
        head_size: int,
        dtype: DTypeLike = jnp.float32,
        window: int | None = None,
        per_row: bool = False,
        sharding: Sharding | None = None,
        value_size: int | None = None,
        value_head_size: int | None = None,
    ) -> "KVCache":
        """Creates an empty cache.

        Args:
          batch: Size of the batch axis, or sizes of several batch axes.
          max_length: Number of tokens that the cache has room for.
          num_kv_heads: Number of key and value heads K.
          head_size: Head size H of keys, and of values unless `value_head_size` is set.
          dtype: Dtype of keys and values: floating point, or `int8` or `float8_e4m3fn`
            with float32 scales for each token and key head; see the attribute `scale`.
          window: The `left` of `local_window_size`; None means no limit. If
            `max_length` is at least window + 1 + 64, the cache is a ring of window + 1
            + 64 slots.
          per_row: True gives each sequence its own index, so that sequences may have
            different lengths.
          sharding: How a mesh splits the batch axes and heads of keys and values [B...,
            S, K, H].
          value_size: See the attribute; for multi-head latent attention. `update` then
            takes None as values.
          value_head_size: Head size Hv of values; None means `head_size`. Ignored with
            a `value_size`.

        Raises:
          ValueError: If an argument is out of range.
        """
        axes = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        for size in axes:
            int_at_least("batch", size, 0)
        int_at_least("max_length", max_length, 1)
        int_at_least("num_kv_heads", num_kv_heads, 1)
        int_at_least("head_size", head_size, 1)
        if value_head_size is None:
            value_head_size = head_size
        value_head_size = int_at_least("value_head_size", value_head_size, 1)
        check_dtype(dtype)
        validation.check_bool("per_row", per_row)
        if window is not None and (not is_int(window) or window < 0):
            raise ValueError(f"window must be an int >= 0 or None, but got {window!r}.")
        if value_size is not None and (
            not is_int(value_size) or not 1 <= value_size <= head_size
        ):
            raise ValueError(
                f"value_size must be an int from 1 to head_size ({head_size}), but got "
                f"{value_size!r}."
            )
        slots = max_length
        if window is not None:
            # `of_arrays` makes a ring if all of these slots fit.
            slots = min(max_length, window + 1 + SPARE)
        shape = (*axes, slots, num_kv_heads)
        arrays = [place(jnp.zeros((*shape, head_size), dtype), sharding)]
        if value_size is None:
            value = jnp.zeros((*shape, value_head_size), dtype)
            arrays.append(place(value, sharding))
        sequences = axes if per_row else ()
        index = jnp.zeros(sequences, jnp.int32)
        arrays.append(place(index, sharding, len(sequences)))
        if is_quantized(dtype):
            scale = jnp.zeros((*shape, 2), jnp.float32)
            arrays.append(place(scale, sharding))
        return cls.of_arrays(window, value_size, arrays)

    @classmethod
    def of_arrays(
        cls, window: int | None, value_size: int | None, arrays: Sequence[Array]
    ) -> "KVCache":
        """Makes a cache from arrays, ordered as in the property `arrays`; a ring if it
        has window + 1 + 64 slots.
        """
        key, *others = arrays
        if value_size is not None:
            # The values are part of the keys.
            others = [key[..., :0], *others]
        value, index, *scale = others
        if window is not None and key.shape[-3] != window + 1 + SPARE:
            # The cache is too short to overwrite anything.
            window = None
        return cls(key, value, index, window, value_size, *scale)

    def new_entries(
        self, key: ArrayLike, value: ArrayLike | None
    ) -> tuple[Array, Array]:
        """Checks keys and values of new tokens, and returns arrays; None as values
        becomes [B..., T, K, 0].
        """
        key = jnp.asarray(key)
        if value is not None and self.value_size is not None:
            raise ValueError(
                "value must be None if the values are part of the cached keys, but got "
                "an array."
            )
        value = jnp.asarray(value) if self.value_size is None else key[..., :0]
        self.check_fits(key, value)
        return key, value

    def check_fits(self, key: Array, value: Array, number: int | None = None) -> None:
        """Raises a ValueError unless new keys and values fit. With a `number` of
        tokens, dtypes may differ.
        """
        given = None if self.scale is None else self.scale.shape
        expected = (*self.key.shape[:-1], 2)
        has_8_bits = self.key.dtype.itemsize == 1
        if given != (expected if has_8_bits else None):
            raise ValueError(
                f"scale must have shape {expected} for 8-bit keys and values, and must "
                f"be None for other dtypes, but got {given} for {self.key.dtype}; use "
                "KVCache.create(..., dtype=...)."
            )
        any_dtype = number is not None or self.scale is not None
        check_entries("key", key, self.key, number, any_dtype)
        check_entries("value", value, self.value, number, any_dtype)
        if key.shape[-3] != value.shape[-3]:
            raise ValueError(
                f"key and value must have the same length, but got {key.shape[-3]} and "
                f"{value.shape[-3]}."
            )

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return self.key.shape[:-3]

    @property
    def length(self) -> int:
        """The number of slots S."""
        return self.key.shape[-3]

    @property
    def is_per_row(self) -> bool:
        """True if each sequence has its own index."""
        return self.index.ndim > 0

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the cache: key, value (except with a `value_size`), index, and
        scale (if there is one).
        """
        key, value, *scale = self._entries
        if self.value_size is None:
            return (key, value, self.index, *scale)
        return (key, self.index, *scale)

    @property
    def _entries(self) -> tuple[Array, ...]:
        """The arrays with an entry for each slot: key, value and, for 8 bits, scale,
        [B..., S, K, _].
        """
        if self.scale is None:
            return (self.key, self.value)
        return (self.key, self.value, self.scale)

    def _replace(self, entries: Sequence[Array], index: Array) -> "KVCache":
        # Only a cache with 8 bits has scales.
        changes: Any = dict(zip(("key", "value", "scale"), entries, strict=False))
        return dataclasses.replace(self, index=index, **changes)

    def floats(
        self, dtype: DTypeLike
    ) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K Hv"]]:
        """Returns the keys and values of all slots, dequantized if they have 8 bits, in
        this dtype.
        """
        if self.scale is None:
            return self.key.astype(dtype), self.value.astype(dtype)
        key, value = dequantize_cache(
            self.key, self.value, self.scale, self.value_size, dtype
        )
        return key, value[..., : self.value.shape[-1]]

    def _tokens(self, number: int, lengths: ArrayLike | None) -> Int[Array, "..."]:
        if lengths is None:
            return jnp.full(self.index.shape, number, jnp.int32)
        if not self.is_per_row and self.batch:
            raise ValueError(
                "lengths must be None if all sequences share one index, but got an "
                "array; create the cache with per_row=True."
            )
        lengths = int32("lengths", lengths)
        if lengths.shape not in ((), self.batch):
            raise ValueError(
                f"lengths must have shape [batch...] = {self.batch}, but got "
                f"{lengths.shape}."
            )
        least, most = extremes(lengths)
        if not 0 <= least <= most <= number:
            raise ValueError(
                f"lengths must be between 0 and {number} (the prompt length), but got "
                f"values from {least} to {most}."
            )
        return jnp.broadcast_to(lengths, self.index.shape)

    def has_room(
        self, number: int = 1, lengths: ArrayLike | None = None
    ) -> Bool[Array, "..."] | bool:
        """Returns whether `number` more tokens fit: True or, under `jit`, a bool array
        shaped like the index.

        `lengths` has the same meaning as in `update`.

        Raises:
          ValueError: If `update` would raise one; this includes a cache without room,
            unless its index is traced.
        """
        return self._fit(number, lengths)[0]

    def _fit(
        self, number: int, lengths: ArrayLike | None
    ) -> tuple[Bool[Array, "..."] | bool, Int[Array, "..."]]:
        """Returns the result of `has_room`, and how many of the new tokens are not
        padding, shaped like the index.
        """
        # Even if the index is traced: no index leaves enough room.
        is_limited = self.window is None and lengths is None
        if is_limited and isinstance(number, int) and number > self.length:
            raise ValueError(
                f"the cache is too short: got {number} new tokens for {self.length} "
                "slots; create a longer cache."
            )
        tokens = self._tokens(number, lengths)
        end = self.index + tokens
        fits = (self.index >= 0) & (tokens >= 0) & (tokens <= number)
        # A ring never overflows, but its index may.
        has_slots = end <= self.length if self.window is None else end >= 0
        fits = fits & has_slots
        if not readable(fits):
            return fits, tokens
        if np.all(fits):
            return True, tokens
        self._check_complete()
        if number == 1:
            raise ValueError(
                f"the cache is full: all {self.length} slots are in use; create a "
                "longer cache."
            )
        raise ValueError(
            "the cache is too short: the new tokens end at position "
            f"{np.max(end)}, but there are only {self.length} slots; create a longer "
            "cache."
        )

    def update(
        self,
        key: Float[Array, "*B T K H"],
        value: Float[Array, "*B T K Hv"] | None,
        lengths: ArrayLike | None = None,
    ) -> "KVCache":
        """Adds the keys and values of T tokens.

        Args:
          key: Keys in the dtype of the cache, or in any real dtype if the cache has 8
            bits.
          value: Values, to which the same applies. None if the cache has a
            `value_size`.
          lengths: int [B...]: number of tokens before the padding in each sequence;
            None means T. Requires `per_row`.

        Returns:
          A new cache. Under `jit`, a sequence without room for its tokens does not
          change.

        Raises:
          ValueError: If shapes, dtypes or lengths do not fit, or if there is no room
            and the index is not traced.
        """
        return self.append(*self.new_entries(key, value), lengths).cache

    def append(
        self, key: Array, value: Array, lengths: ArrayLike | None = None
    ) -> "Appended":
        """Implements `update`, without checks of the arrays."""
        room, tokens = self._fit(key.shape[-3], lengths)
        added = tokens
        if room is not True:
            added = jnp.where(room, tokens, 0)
        options = WriteOptions(
            ring=self.window is not None, all_or_none=lengths is None
        )
        entries: tuple[Array, ...] = (key, value)
        if self.scale is not None:
            entries = quantize_cache(key, value, self.value_size, self.key.dtype)
        written = write_entries(options, self._entries, entries, self.index, added)
        return Appended(self._replace(written, self.index + added), tokens, room)

    def truncate(self, index: ArrayLike) -> "KVCache":
        """Keeps the first `index` tokens and removes the others, for speculative
        decoding; returns a new cache.

        In a ring, a removed token may have replaced an earlier one, which is lost. Its
        slot then contains NaN until it is written again; `jax_debug_nans` may stop
        there.

        Args:
          index: int, or [B...] for a cache with an index for each sequence: how many
            tokens to keep.

        Raises:
          ValueError: If there are fewer tokens, or if a ring has overwritten tokens
            that the next query attends to. Under `jit`, such a sequence gets the index
            -1 instead, and its outputs are NaN.
        """
        new = self._for_each("index", index)
        # The least index that is possible.
        kept = jnp.zeros_like(self.index)
        if self.window is not None:
            # An empty cache lacks nothing.
            nothing_lost = (self.index <= self.length) | (new == 0)
            kept = jnp.where(nothing_lost, 0, self.index - self.length + self.window)
        fine = (new >= kept) & (new <= self.index) & (self.index >= 0)
        if readable(fine) and not np.all(fine):
            self._check_complete()
            least = str(np.max(kept))
            if np.max(kept):
                least += " (earlier tokens were overwritten)"
            raise ValueError(
                f"index must be between {least} and {np.min(self.index)} (the number "
                f"of tokens so far), but got values from {np.min(new)} to "
                f"{np.max(new)}."
            )
        changes: dict[str, Any] = {}
        if self.window is not None:
            # The removed tokens overwrote these slots: a query that needs the old
            # contents must get NaN, no stale keys.
            first_lost = jnp.maximum(new, self.length)
            positions = self.positions()
            if self.is_per_row:
                first_lost = first_lost[..., None]
            is_lost = (positions >= first_lost)[..., None, None]
            # 8-bit numbers cannot be NaN, but their scale can.
            name = "key"
            stored = self.key
            if self.scale is not None:
                name = "scale"
                stored = self.scale
            with jax.debug_nans(False):  # not an error
                nan = jnp.asarray(jnp.nan, stored.dtype)
                changes[name] = jnp.where(is_lost, nan, stored)
        changes["index"] = jnp.where(fine, new, jnp.int32(-1))
        return dataclasses.replace(self, **changes)

    def reset(self, rows: ArrayLike) -> "KVCache":
        """Empties some sequences, so that new ones can take their places; returns a new
        cache.

        The other sequences go on. Old keys stay in memory, but no query attends to
        them. A sequence whose index is negative can be used again.

        Args:
          rows: bool [B...]: True empties the sequence.

        Raises:
          ValueError: If the cache has one index for all sequences (see `per_row`), or
            if `rows` has another shape or dtype.
        """
        return dataclasses.replace(self, index=reset_index(self.index, rows))

    def take(self, rows: ArrayLike) -> "KVCache":
        """Makes a cache of the selected sequences, to reorder beams or to continue one
        prompt in several ways.

        Args:
          rows: int [B']: indices along the first batch axis, which may repeat.

        Raises:
          ValueError: If there is no batch axis, or if an index is out of range. Under
            `jit`, an index out of range gives a sequence of NaN.
        """
        rows = int32("rows", rows)
        if not self.batch or rows.ndim != 1:
            raise ValueError(
                "rows must have shape [B'] (indices along the first batch axis), but "
                f"got shape {rows.shape} for a cache with batch shape {self.batch}."
            )
        least, most = extremes(rows)
        if rows.size and readable(rows) and not 0 <= least <= most < self.batch[0]:
            raise ValueError(
                f"rows must be between 0 and {self.batch[0] - 1}, but got values from "
                f"{least} to {most}."
            )
        # Out of range, not counted from the end.
        rows = jnp.where(rows < 0, self.batch[0], rows)
        index = self.index
        if self.is_per_row:
            index = take_entries(index, rows, -1)
        # Sequences that do not exist become NaN. 8-bit numbers cannot be NaN, but their
        # scale can.
        entries = []
        for stored in self._entries:
            missing = 0 if is_quantized(stored.dtype) else math.nan
            entries.append(take_entries(stored, rows, missing))
        return self._replace(entries, index)

    def keep(
        self,
        slots: ArrayLike,
        lengths: ArrayLike | None = None,
        index: ArrayLike | None = None,
    ) -> "KVCache":
        """Moves one path of a drafted tree to consecutive slots, and removes the tree's
        other tokens.

        Args:
          slots: int [n], or [B..., n] for a cache with an index for each sequence: the
            slots of the path's tokens, from the root on; they ascend, because parents
            come first (see `recipes.tree_causal`).
          lengths: int, or [B...] for such a cache: use only this many of the slots,
            from the first; None means all.
          index: int, or [B...] for such a cache: the number of tokens before the tree,
            which are kept; None means the first of the slots.

        Raises:
          ValueError: If the cache is a ring, or if the slots do not ascend from `index`
            to the number of tokens so far. Under `jit`, such a sequence gets the index
            -1 instead, and its outputs are NaN.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax_mha.cache import KVCache
          >>> drafts = jnp.arange(7.0).reshape(1, 7, 1, 1)
          >>> cache = KVCache.create(1, 10, num_kv_heads=1, head_size=1)
          >>> cache = cache.update(drafts, drafts).keep([3, 4, 6])
          >>> cache.key[0, : cache.index, 0, 0].tolist()
          [0.0, 1.0, 2.0, 3.0, 4.0, 6.0]
        """
        if self.window is not None:
            raise ValueError(
                "keep does not support ring caches, because the window of "
                f"{self.window} positions would count every branch of a tree; create "
                "the cache without a window."
            )
        slots = int32("slots", slots)
        has_rank = slots.ndim == self.index.ndim + 1
        if not has_rank or slots.shape[:-1] != self.index.shape or not slots.shape[-1]:
            wanted = ", ".join(map(str, (*self.index.shape, "n")))
            raise ValueError(
                f"slots must have shape ({wanted}) with n >= 1, but got {slots.shape}."
            )
        number = slots.shape[-1]
        if lengths is None:
            lengths = number
        if index is None:
            index = slots[..., 0]
        lengths = self._for_each("lengths", lengths)
        start = self._for_each("index", index)
        # Slots after the first `lengths` may have any value.
        steps = self.counted(number)
        ascends = jnp.diff(slots, axis=-1, prepend=start[..., None] - 1) > 0
        is_token = ascends & (slots < self.index[..., None])
        fine = (is_token | (steps >= lengths[..., None])).all(-1)
        fine = fine & (start >= 0) & (start <= self.index)
        fine = fine & (lengths >= 0) & (lengths <= number)
        if readable(fine) and not np.all(fine):
            self._check_complete()
            raise ValueError(
                "slots must be in ascending order, at least index "
                f"({np.asarray(start).tolist()}) and less than the number of tokens so "
                f"far ({np.asarray(self.index).tolist()}), and lengths must be between "
                f"0 and {number}, but got slots {np.asarray(slots).tolist()} and "
                f"lengths {np.asarray(lengths).tolist()}."
            )
        # Only some of the slots are written, as `lengths` says.
        options = WriteOptions(ring=False, all_or_none=False)
        slots = jnp.clip(slots, 0, self.length - 1)
        moved = tuple(entries_at(stored, slots) for stored in self._entries)
        added = jnp.where(fine, lengths, 0)
        written = write_entries(options, self._entries, moved, start, added)
        new_index = jnp.where(fine, start + lengths, jnp.int32(-1))
        return self._replace(written, new_index)

    def _for_each(self, name: str, given: ArrayLike) -> Int[Array, "..."]:
        numbers = int32(name, given)
        if numbers.shape not in ((), self.index.shape):
            raise ValueError(
                f"{name} must have the same shape as the cache's index, "
                f"{self.index.shape}, but got {numbers.shape}."
            )
        return jnp.broadcast_to(numbers, self.index.shape)

    def _check_complete(self) -> None:
        if not np.any(np.asarray(self.index) < 0):
            return
        if self.window is None:
            raise ValueError(
                "the cache is invalid (a sequence's index is negative): an earlier "
                "truncate or keep under jit got an index or slot outside the cache."
            )
        raise ValueError(
            "the ring cache no longer contains every token that a query attends to (a "
            "sequence's index is negative): truncate removed more tokens than the ring "
            "has spare slots."
        )

    def positions(self) -> Int[Array, "*B S"]:
        """Returns the position of the token in each slot; -1 for an empty slot."""
        slots = self.counted(self.length)
        index = self.index[..., None]
        if self.window is not None:
            # The last position before `index` that is in the slot.
            slots = index - 1 - (index - 1 - slots) % self.length
        positions = jnp.where((slots >= 0) & (slots < index), slots, -1)
        return jnp.broadcast_to(positions, (*self.batch, self.length))

    def counted(self, number: int) -> Int[Array, "... n"]:
        """Returns [0, ..., `number` - 1] with leading axes of length 1, to broadcast
        with `index[..., None]`.
        """
        steps = jnp.arange(number, dtype=jnp.int32)
        return steps.reshape((1,) * self.index.ndim + (number,))


class Appended(NamedTuple):
    """The result of `KVCache.append`: new cache, number of tokens before the
    padding, and `KVCache.has_room`.
    """

    cache: KVCache
    tokens: Int[Array, "..."]
    room: Bool[Array, "..."] | bool
