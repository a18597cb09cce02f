"""`cached_attention`: attention of new tokens over the tokens in a cache and
themselves.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.cache.kv_cache import KVCache
from flax_mha._src.cache.latent import Latent
from flax_mha._src.cache.shared import Appended
from flax_mha._src.cache.write import entries_at
from flax_mha._src.call.arguments import (
    CallArguments,
    CommonArguments,
    check_inputs,
    check_is_causal,
    check_scoring,
    check_window,
    given_mask,
    with_keys,
)
from flax_mha._src.call.operands import Call, Result, ScoreMod, Sharding
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import T, readable, target_of, varying_alike
from flax_mha._src.core.validation import LARGEST, Shape, extremes, key_indices
from flax_mha._src.masks import CausalMask, LengthMask, LocalMask, Mask, WrittenMask
from flax_mha._src.masks.function import check_lookups, with_windows
from flax_mha._src.plan import MAX_QUERIES_IN_PLACE, reads_in_place
from flax_mha._src.run import Implementation, run

Run = Callable[[Call, Implementation | None], Result]


@overload
def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    lengths: ArrayLike | None = ...,
    is_causal: bool | None = ...,
    implementation: Implementation | None = ...,
    return_max_score: Literal[False] = ...,
    **arguments: Unpack[CommonArguments],
) -> tuple[Array, KVCache]: ...
@overload
def cached_attention(
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    lengths: ArrayLike | None = ...,
    is_causal: bool | None = ...,
    implementation: Implementation | None = ...,
    return_max_score: Literal[True],
    **arguments: Unpack[CommonArguments],
) -> tuple[Array, KVCache, Array]: ...
def cached_attention(  # noqa: D417 - dot_product_attention describes the others
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"] | None,
    cache: KVCache,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    lengths: ArrayLike | None = None,
    is_causal: bool | None = None,
    scale: float | ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    score_mod: ScoreMod | None = None,
    key_indices: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    implementation: Implementation | None = None,
    return_max_score: bool = False,
    precision: lax.PrecisionLike = None,
    qkv_sharding: Sharding | None = None,
) -> tuple[Array, KVCache] | tuple[Array, KVCache, Array]:
    """Adds T new tokens to a cache, and computes their attention over all tokens in the
    cache, causal by default.

    Token i of the call has the position `cache.index + i` in its sequence. However a
    sequence is split into calls, the results equal `dot_product_attention(...,
    is_causal=True)` on the whole sequence. With `is_causal=False`, queries also attend
    to later tokens of the same call, as far as the mask allows; tokens that attend to
    each other must then be in the same call.

    A prompt of more than 16 tokens in an empty cache is computed as without a cache, by
    the fastest implementation. All other calls read the cache in place, only as far as
    the queries attend; several new tokens over a ring copy it.

    Args:
      query: Queries of the new tokens.
      key: Keys of the new tokens, already rotated if the model uses rotary embeddings.
      value: Values of the new tokens. Must be None if the cache has a `value_size`; the
        values are then the first features of the keys.
      cache: The keys and values of the previous tokens.
      bias: Added to the scores; broadcasts to [B..., N, T, S], where S is the number of
        cache slots.
      mask: bool, broadcasts to [B..., N, T, S]. Or a mask object, which uses positions;
        but if it holds an array with a key axis, this axis has an entry for each slot.
      lengths: int [B...]: number of new tokens of each sequence before the padding at
        its end; None means T. The output of padding is 0. Requires a cache created with
        `per_row=True`.
      is_causal: None or True hides later tokens of the same call. False leaves that to
        `mask`, which then decides which written tokens are visible; `local_window_size`
        narrows that. Required for masks that show later tokens, such as `CausalMask() |
        FunctionMask(...)`.
      scale: As in `dot_product_attention`, like all other arguments.
      local_window_size: (left, right). If the cache is a ring, `left` must be given and
        at most the cache's `window`.
      key_indices: int [B..., T, k], or [B..., T, K, k]: positions in the sequence of
        the tokens that each query attends to. -1 means no token. Positions after the
        query are masked, or those not yet written if `is_causal` is False.
      implementation: Name of the implementation; None lets the library choose. A named
        implementation gets the whole cache, as arrays of keys and values.
      qkv_sharding: How a mesh splits the query and the cache.

    Returns:
      The output [B..., T, N, Hv], the cache with the new tokens and, with
      `return_max_score`, the largest visible score of each head [B..., N]. Under `jit`,
      the output is NaN for a sequence whose cache has no room, and its cache does not
      change. The output is also NaN for a sequence that is longer than an array which
      `score_mod` or `mask` indexes by position, unless another mask may hide the
      missing positions; its tokens are cached.

    Raises:
      ValueError: If arguments do not fit together. If the cache's index is not traced,
        also if there is no room in the cache, or if such an array of `score_mod` or
        `mask` is too short.
      NotImplementedError: If the named implementation cannot compute this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha.cache import cached_attention
      >>> from flax_mha.cache import KVCache
      >>> cache = KVCache.create(2, 100, num_kv_heads=1, head_size=16)
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
      >>> key = value = query[:, :, :1]
      >>> output, cache = cached_attention(query, key, value, cache)  # a prompt of five tokens
      >>> output, cache = cached_attention(query[:, :1], key[:, :1], value[:, :1], cache)  # the next token
      >>> output.shape, int(cache.index)
      ((2, 1, 4, 16), 6)
    """
    arguments = dict(locals())
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"cache must be a KVCache, but got {type(cache).__name__}; create one with "
            "KVCache.create."
        )
    key, value = cache.new_entries(key, value)
    return over_cache(run, **arguments | {"key": key, "value": value})  # type: ignore[return-value]  # 2 or 3 results


def over_cache(
    run: Run,
    query: Array,
    key: Array,
    value: Array,
    cache: KVCache,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    lengths: ArrayLike | None = None,
    implementation: Implementation | None = None,
    latent: Latent | None = None,
    platform: str | None = None,
    top_k: int = 0,
    appended: Appended | None = None,
    **arguments: Unpack[CallArguments],
) -> tuple[Float[Array, "*B T N Hv"], KVCache, *tuple[Float[Array, "*B N"], ...]]:
    """Computes `cached_attention` with a function `run(call, implementation)`, which
    computes a call or explains it.

    If the cache is empty, a prompt of more than 16 tokens attends only to itself, which
    is faster; see `Step.by_emptiness`. All other calls read the cache. The caller has
    checked that `key` and `value` fit the cache.

    With `latent`, the key and the cache hold latents, and `query` is not absorbed yet
    (see `Latent`). A prompt in an empty cache expands latents to keys and values of all
    heads, which takes fewer products; other calls absorb `query`.

    `platform` names the platform to explain the call for; None means the current one.
    `appended` is the result of `cache.append`, if the caller has called it. `top_k` is
    that of the indexer that chose `key_indices`, or 0 without one. An indexer chooses
    all visible keys if there are at most `top_k`, so a prompt of at most `top_k` tokens
    in an empty cache ignores `key_indices`.
    """
    heads = query
    expands = latent is not None and latent.kernel is None
    if latent is not None and arguments.get("scale") is None:
        arguments["scale"] = query.shape[-1] ** -0.5
    if latent is not None and not expands:
        query = latent.absorb(query)
    if latent is not None and expands:
        query, *new_heads, shape = check_inputs(
            query, *latent.expand(key), any_dtypes=True
        )
    else:
        query, key, value, shape = check_inputs(query, key, value, any_dtypes=True)
    number = shape.query_length
    length = cache.length
    if (keys := shape.key_length) != number:
        raise ValueError(
            "query and key must have the same length (the number of new tokens), but "
            f"got {number} and {keys}."
        )
    window = check_cache(cache, bias, mask, arguments.get("local_window_size"))
    new, tokens, room = (
        cache.append(key, value, lengths) if appended is None else appended
    )
    scoring = check_scoring(
        query, shape, arguments, target_of((query, new.key, new.value), platform)
    )
    visibility = Visibility.of(
        arguments.get("is_causal"), window, mask, number, is_padded=lengths is not None
    )
    step = Step(scoring, shape, key, value, cache, new, tokens, bias, mask, visibility)
    if expands:
        step = step._replace(latent=latent)
    if (indices := arguments.get("key_indices")) is not None:
        most = length if cache.window is None else LARGEST
        shape_of_lists = shape._replace(key_length=most)
        if expands:
            shape_of_lists = shape_of_lists._replace(num_kv_heads=1)
        step = step._replace(
            key_indices=key_indices(indices, shape_of_lists), top_k=top_k
        )
    if scoring.options.score_mod is not None or isinstance(mask, Mask):
        room = step.check_lookups(room)

    def compute(is_empty: bool) -> list[Array]:
        made = step
        if is_empty and expands:
            made = step._replace(key=new_heads[0], value=new_heads[1], latent=None)
        elif is_empty and latent is not None:
            made = step.expand(latent, heads, arguments)
        in_place = implementation is None and not products_are_replaced()
        output, _, max_score = run(made.call(is_empty, in_place), implementation)
        if latent is None:
            output = output[..., : cache.value_size]
        elif not is_empty and not expands:
            output = latent.project(output)
        results = [output] if max_score is None else [output, max_score]
        # Inside `jax.shard_map`, both calls must return the same types.
        return varying_alike((results, new.arrays))[0]

    results = step.by_emptiness(compute)
    output, *max_score = (nan_without(room, x, cache.batch) for x in results)
    return output, new, *max_score


class Visibility(NamedTuple):
    """Which keys the new tokens of a call attend to: the rule of decoding, for every
    function that computes a step.

    A step attends to all written keys, up to the query itself if it is causal. Windows
    and masks narrow that. Without causality, only windows and masks hide written keys;
    queries also attend to later tokens of the call.
    """

    is_causal: bool
    window: tuple[int | None, int | None] | None
    is_padded: bool  # whether there may be padding among the new tokens

    @classmethod
    def of(
        cls,
        is_causal: Any,
        window: tuple[int | None, int | None] | None,
        mask: Any,
        number: int,
        is_padded: bool,
    ) -> "Visibility":
        """Checks `is_causal` against `mask`, for a call with `number` new tokens."""
        is_causal = check_is_causal(is_causal, mask)
        # No token comes after a single one, so the causal mask, with which rings are
        # read in place, hides nothing.
        is_single = isinstance(number, int) and number == 1
        return cls(is_causal or is_single, window, is_padded)

    def masks(
        self,
        mask: ArrayLike | Mask | None,
        shape: Shape,
        ends: Int[Array, "..."] | None,
        is_ring: bool = False,
    ) -> list[Mask | None]:
        """Lists all masks of a step for the keys in `shape`; `mask` is the caller's.

        `ends` are the positions after the last new token of each sequence; None if
        every key is a token, and none is padding. In a ring that `is_ring` sorted by
        position, slots without a token come first, at positions below 0.
        """
        masks: list[Mask | None] = [CausalMask() if self.is_causal else None]
        if self.window is not None:
            masks.append(LocalMask(*self.window))
        if mask is not None:
            masks.append(given_mask(mask, shape))
        # A causal mask hides all slots that are not written yet.
        key_ends = None if self.is_causal else ends
        query_ends = ends if self.is_padded else None
        if key_ends is not None or query_ends is not None:
            masks.append(LengthMask(key_ends, query_ends))
        if is_ring:
            masks.append(WrittenMask())
        return masks


class Step(NamedTuple):
    """The checked arguments of one call of `cached_attention`, with the cache before
    and after it adds the tokens.
    """

    # The query and the options; keys, values and masks are added by `call`.
    scoring: Call
    shape: Shape  # of attention among the new tokens only
    key: Array
    value: Array
    cache: KVCache
    new: KVCache
    # The number of new tokens without padding, shaped like the index.
    tokens: Int[Array, "..."]
    bias: ArrayLike | None
    mask: ArrayLike | Mask | None
    visibility: Visibility
    # Positions of the tokens that each query attends to.
    key_indices: Int[Array, "..."] | None = None
    top_k: int = 0  # a query with at most this many visible keys lists all of them
    # Expands the keys, which are latents, before attention; None: the query is
    # absorbed.
    latent: Latent | None = None

    def expand(self, latent: Latent, query: Array, arguments: CallArguments) -> "Step":
        """Returns this step with all heads' keys and values, computed from the new
        latents; `query` is not absorbed.
        """
        query, key, value, shape = check_inputs(
            query, *latent.expand(self.key), any_dtypes=True
        )
        scoring = check_scoring(query, shape, arguments, self.scoring.options.target)
        return self._replace(scoring=scoring, shape=shape, key=key, value=value)

    def check_lookups(
        self, room: Bool[Array, "..."] | bool
    ) -> Bool[Array, "..."] | bool:
        """Returns `room`, but False for sequences longer than an array that `score_mod`
        or a mask indexes by position.

        `room` says which sequences fit into the cache; the output of all others becomes
        NaN. JAX would clamp a position beyond the array and return a wrong entry. If
        lengths are not traced, raises a ValueError instead.
        """
        # Without the mask of written keys: `ends` below says the same, and does not
        # hide lookups from the checks.
        masks = self.visibility.masks(
            self.mask, self.shape._replace(key_length=self.cache.length), ends=None
        )
        score_mod = self.scoring.options.score_mod
        ends = jnp.where(self.tokens > 0, self.cache.index + self.tokens, 0)
        if readable(ends):
            last = extremes(ends)[1] - 1
            check_lookups(
                self.shape, score_mod, masks, Offsets.of(last, 0), (1, last + 1)
            )
            return room
        # Checks b and h.
        check_lookups(self.shape, score_mod, masks, Offsets.of(ends, 0), (1, 0))
        sizes = []
        for function, window in with_windows(masks, score_mod):
            for name, ahead in (
                ("q_idx", 0),
                ("kv_idx", 0 if window is None else min(window[1] or 0, 0)),
            ):
                size = None if window is None else function.size(name)
                sizes += [] if size is None else [size - ahead]
        if sizes:
            return room & (ends <= min(sizes))
        return room

    def by_emptiness(self, compute: Callable[[bool], T]) -> T:
        """Returns `compute(True)` for a prompt in an empty cache, which attends only to
        itself, else `compute(False)`.

        Prompts of at most 16 tokens, and mask objects with an array along the keys,
        also get `compute(False)`. If the cache's index is traced, both are traced,
        `compute(True)` first, and `lax.cond` runs one of them.
        """
        (number, length), mask, index = (
            (self.shape.query_length, self.cache.length),
            self.mask,
            self.cache.index,
        )
        # Else symbols, as in jax.export.
        are_known = isinstance(number, int) and isinstance(length, int)
        by_slot = not (are_known and number <= length) and any(
            map(_differs_by_slot, (self.bias, mask))
        )
        if (
            (are_known and number <= MAX_QUERIES_IN_PLACE)
            or by_slot
            or (isinstance(mask, Mask) and mask.lengths[1])
        ):
            return compute(False)
        if readable(index):
            return compute(not np.any(np.asarray(index)))
        return lax.cond(
            jnp.all(index == 0), lambda: compute(True), lambda: compute(False)
        )

    def call(self, is_empty: bool, in_place: bool) -> Call:
        """Makes a `Call` over only the new tokens if `is_empty`, else over the cache
        with the new tokens.

        If `in_place`, the call reads the cache without a copy, unless it is a ring and
        there are several queries.
        """
        cache = self.cache
        query = self.scoring.operands.query
        rank = len(self.shape.batch)
        is_ring = not is_empty and cache.window is not None
        in_place = in_place and self.latent is None
        by_one = is_ring and in_place and self.shape.query_length == 1
        in_place = in_place and not is_empty and (by_one or not is_ring)
        bias = self.bias
        mask = self.mask
        # Position of the first new token; None means 0.
        index: Any = None if is_empty else jnp.maximum(cache.index, 0)
        # Position of the first key; None means 0.
        first: Any = index + self.tokens - 1 if by_one else None
        if is_empty:
            key = self.key
            value = self.value
            bias, mask = (
                _of_first_slots(x, self.shape.query_length) for x in (bias, mask)
            )
        elif is_ring and not by_one:
            key, value, first = in_order(cache, self.key, self.value)
        else:
            key, value = (
                (self.new.key, self.new.value)
                if in_place
                else self.new.floats(query.dtype)
            )
        if self.latent is not None:
            key, value = self.latent.expand(key)
        elif cache.value_size is not None and not value.shape[-1]:
            # Cutting the values out of the keys would copy a cache that is read in
            # place; the output is cut instead.
            value = key if in_place else key[..., : cache.value_size]
        if not in_place:
            key = key.astype(query.dtype)
            value = value.astype(query.dtype)
        shape = self.shape._replace(key_length=key.shape[-3])
        ends = self.tokens if index is None else index + self.tokens
        if is_empty and not self.visibility.is_padded:
            ends = None  # all keys are tokens of this call
        masks = self.visibility.masks(
            mask, shape, None if ends is None else _by_batch(ends, rank), is_ring
        )
        query_offset, key_offset = (
            None if x is None else _by_batch(x, rank) for x in (index, first)
        )
        scale = self.new.scale if in_place else None
        value_size = None if scale is None else cache.value_size
        options = self.scoring.options._replace(
            cached=in_place, ring=by_one, value_size=value_size
        )
        scoring = self.scoring._replace(options=options)
        offsets = Offsets(query_offset, key_offset)
        lists_all = is_empty and shape.key_length <= self.top_k
        indices = None if lists_all else self._listed(first, shape.key_length, by_one)
        call = with_keys(
            scoring, key, value, shape, bias, masks, offsets, scale, indices
        )
        # Only attention in place, and over gathered keys, can dequantize 8 bits itself;
        # all others need floats.
        if scale is None or indices is not None or reads_in_place(call):
            return call
        return self.call(is_empty, False)

    def _listed(
        self, first: Any, number: int, by_slot: bool
    ) -> Int[Array, "..."] | None:
        """Converts the positions in `key_indices` to indices of a call's `number` keys;
        -1 for positions without a key.

        `first` is the position of the first key; None means 0. But if `by_slot`, the
        keys are the slots of a ring, and `first` is the position of the newest key.
        Returns None without `key_indices`.
        """
        positions = self.key_indices
        if positions is None:
            return None
        first = _by_batch(
            jnp.asarray(0 if first is None else first), len(self.shape.batch)
        )[..., None, None, None]
        if by_slot:
            oldest = jnp.maximum(first - number + 1, 0)
        else:
            oldest = jnp.maximum(first, 0)
        newest = first if by_slot else first + number - 1
        indices = positions % number if by_slot else positions - first
        return jnp.where((positions >= oldest) & (positions <= newest), indices, -1)


def nan_without(
    room: Bool[Array, "..."] | bool, x: Array, batch: tuple[int, ...]
) -> Array:
    """Returns `x` [B..., ...], but NaN for sequences whose `room` is False: their
    tokens did not fit into the cache.
    """
    if room is True:
        return x
    return jnp.where(
        jnp.asarray(room)[(..., *(None,) * (x.ndim - len(batch)))], x, jnp.nan
    )


def _by_batch(x: Int[Array, "..."], rank: int) -> Int[Array, "..."]:
    """Reshapes int32 x, [] or [B...], to `rank` axes (the number of batch axes), so
    that it broadcasts to [B...].
    """
    return jnp.asarray(x, jnp.int32).reshape((1,) * (rank - x.ndim) + x.shape)


def in_order(
    cache: KVCache, key: Array, value: Array
) -> tuple[Array, Array, Int[Array, "..."]]:
    """Returns the keys and the values of a ring, sorted by position, then the new ones:
    both [B..., S + T, K, _].

    Also returns the position of the first key, shaped like the cache's index. Positions
    below 0 are empty slots.
    """
    first = jnp.maximum(cache.index, 0) - cache.length
    slots = (first[..., None] + cache.counted(cache.length)) % cache.length
    old_keys, old_values = cache.floats(key.dtype)
    return entries_at(old_keys, slots, key), entries_at(old_values, slots, value), first


def check_cache(
    cache: KVCache, bias: Any, mask: Any, local_window_size: Any
) -> tuple[int | None, int | None] | None:
    """Raises a ValueError unless window, bias and mask fit the cache; returns the
    window, if any, as (left, right).
    """
    window = None if local_window_size is None else check_window(local_window_size)
    if cache.window is None:
        for name, x in (("bias", bias), ("mask", mask)):
            if (
                _differs_by_slot(x)
                and not isinstance(x, Mask)
                and np.shape(x)[-1] != cache.length
            ):
                raise ValueError(
                    f"the last axis of {name} must have length {cache.length} (the "
                    f"number of cache slots) or 1, but got shape {np.shape(x)}; empty "
                    "slots are already masked."
                )
        return window
    if window is None or window[0] is None or window[0] > cache.window:
        raise ValueError(
            f"local_window_size must extend at most {cache.window} positions to the "
            "left, because the ring cache overwrites older ones, but got "
            f"{local_window_size!r}; create the cache with the same window."
        )
    for name, x in (("bias", bias), ("mask", mask)):
        if _differs_by_slot(x):
            raise ValueError(
                f"{name} must not differ between slots of a ring cache, because slots "
                f"are reused, but got shape {np.shape(x)}; use a mask object such as "
                "FunctionMask, or a score_mod, to depend on positions."
                if not isinstance(x, Mask)
                else f"{name} must not contain an array with one entry per key for a ring cache, because slots are "
                "reused; use FunctionMask, which depends on positions."
            )
    return window


def _differs_by_slot(x: Any) -> bool:
    """Returns True if a bias, a mask or an array in a mask object has an entry for each
    slot of the cache.
    """
    if isinstance(x, Mask):
        return x.lengths[1] > 0
    try:
        return x is not None and np.shape(x)[-1:] not in ((), (1,))
    except ValueError:  # a ragged list, which is refused later
        return False


def _of_first_slots(x: Any, number: int) -> Any:
    """Returns the first `number` slots, a prompt's, of a bias or mask [..., S]; [...,
    1] and mask objects unchanged.
    """
    if isinstance(x, Mask) or not _differs_by_slot(x):
        return x
    return (x if isinstance(x, np.ndarray) else jnp.asarray(x))[..., :number]
