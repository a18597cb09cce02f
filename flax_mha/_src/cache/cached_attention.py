"""`cached_attention`: attention of new tokens over the tokens in a cache and
themselves.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.cache.kv_cache import Appended, KVCache
from flax_mha._src.cache.latent import Latent
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
from flax_mha._src.call.call import Call, Result, ScoreMod, Sharding
from flax_mha._src.core import validation
from flax_mha._src.core.products import products_are_replaced
from flax_mha._src.core.tile import Offsets
from flax_mha._src.core.tracing import T, readable, target_of, varying_alike
from flax_mha._src.core.validation import INT32_MAX, Shape, extremes
from flax_mha._src.masks import CausalMask, LengthMask, LocalMask, Mask, WrittenMask
from flax_mha._src.masks.base import visible_at
from flax_mha._src.masks.function import check_lookups, lookups
from flax_mha._src.masks.visible import Visible
from flax_mha._src.plan import MAX_QUERIES_IN_PLACE, reads_in_place
from flax_mha._src.run import Implementation, run

Run = Callable[[Call, Implementation | None], Result]

# Which keys a call attends to.
# "new tokens": only those of this step, a prompt in an empty cache.
# "in place": all, read from the cache itself.
# "copy": all, as floats in a new array; a ring in the order of positions.
Source = Literal["new tokens", "in place", "copy"]


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

    A prompt of more than 16 tokens that fills an empty cache runs like a call without
    one. All other calls read the cache in place, from the first to the last visible
    key; a small or mostly visible cache may be read whole. Several new tokens over a
    ring copy it.

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
      change. The output is also NaN for a sequence longer than an array that
      `score_mod` or `mask` indexes by position; its tokens are still cached. This is
      not checked if another mask may hide the missing positions.

    Raises:
      ValueError: If arguments do not fit together. If `cache.index` is known, also for
        a full cache or such a short array.
      NotImplementedError: If the named implementation cannot compute this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha.cache import cached_attention
      >>> from flax_mha.cache import KVCache
      >>> cache = KVCache.create(2, 100, num_kv_heads=1, head_size=16)
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
      >>> key = value = query[:, :, :1]
      >>> output, cache = cached_attention(query, key, value, cache)  # a prompt
      >>> query, key, value = query[:, :1], key[:, :1], value[:, :1]  # the next token
      >>> output, cache = cached_attention(query, key, value, cache)
      >>> output.shape, int(cache.index)
      ((2, 1, 4, 16), 6)
    """
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"cache must be a KVCache, but got {type(cache).__name__}; create one with "
            "KVCache.create."
        )
    key, value = cache.new_entries(key, value)
    appended = cache.append(key, value, lengths)
    tokens = NewTokens(key, value, cache, appended, is_padded=lengths is not None)
    result = over_cache(
        run,
        query,
        tokens,
        bias=bias,
        mask=mask,
        is_causal=is_causal,  # type: ignore[arg-type]  # None is the default
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        key_indices=key_indices,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        implementation=implementation,
        return_max_score=return_max_score,
        precision=precision,
        qkv_sharding=qkv_sharding,
    )
    if result.largest is None:
        return result.output, appended.cache
    return result.output, appended.cache, result.largest


class NewTokens(NamedTuple):
    """The tokens of one decoding step, with the cache before and after they are added.

    The caller has checked that `key` and `value` fit the cache.
    """

    key: Float[Array, "*B T K H"]
    value: Float[Array, "*B T K Hv"]
    cache: KVCache  # before
    appended: Appended  # after
    is_padded: bool  # whether there may be padding among the tokens
    # Computes keys and values of all heads; None unless key and cache hold latents.
    latent: Latent | None = None


def over_cache(
    run_or_explain: Run,
    query: Array,
    tokens: NewTokens,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    implementation: Implementation | None = None,
    platform: str | None = None,
    top_k: int = 0,
    **arguments: Unpack[CallArguments],
) -> Result:
    """Computes `cached_attention` with `run_or_explain(call, implementation)`, which
    computes a call or explains it.

    If the cache is empty, a prompt of more than 16 tokens attends only to itself, which
    is faster; see `Step.by_emptiness`. All other calls read the cache.

    With a latent, `query` is not absorbed yet (see `Latent`). A prompt in an empty
    cache expands latents to keys and values of all heads, which takes fewer products;
    other calls absorb `query`. If `latent.kernel` is None, nothing can be absorbed, and
    every call expands.

    `platform` names the platform to explain the call for; None means the current one.
    `top_k` is that of the indexer that chose `key_indices`, or 0 without one. An
    indexer chooses all visible keys if there are at most `top_k`, so a prompt of at
    most `top_k` tokens in an empty cache ignores `key_indices`.
    """
    # Check the inputs.
    cache = tokens.cache
    latent = tokens.latent
    unabsorbed = query
    always_expands = latent is not None and latent.kernel is None
    if latent is not None and arguments.get("scale") is None:
        # An absorbed query has more features.
        arguments["scale"] = query.shape[-1] ** -0.5
    key = tokens.key
    value = tokens.value
    if latent is not None and always_expands:
        # Every call expands the latents; these are the new ones.
        key, value = latent.expand(key)
    elif latent is not None:
        # The key remains a latent.
        query = latent.absorb(query)
    query, key, value, shape = check_inputs(query, key, value, any_dtypes=True)
    if shape.key_length != shape.query_length:
        raise ValueError(
            "query and key must have the same length (the number of new tokens), but "
            f"got {shape.query_length} and {shape.key_length}."
        )

    lists = arguments.get("key_indices")
    if lists is not None:
        # A sequence in a ring may have any length.
        most = cache.length if cache.window is None else INT32_MAX
        shape_of_lists = shape._replace(key_length=most)
        if always_expands:
            # The lists are those of the cache, which has one latent for all heads.
            shape_of_lists = shape_of_lists._replace(num_kv_heads=1)
        lists = validation.key_indices(lists, shape_of_lists)
    own_tokens = tokens._replace(latent=latent if always_expands else None)
    step = Step.of(query, shape, own_tokens, bias, mask, arguments, platform)
    step = step._replace(key_indices=lists, top_k=top_k)
    room = tokens.appended.room
    if step.scoring.score_mod is not None or isinstance(mask, Mask):
        room = step.room_in_arrays(room)

    # Attend to the new tokens only, or to all in the cache.
    def attend(is_empty: bool) -> Result:
        own_step = step
        if is_empty and always_expands:
            # The query was never absorbed: only keys and values change.
            expanded = tokens._replace(key=key, value=value, latent=None)
            own_step = step._replace(tokens=expanded)
        elif is_empty and latent is not None:
            # `step` has the absorbed query; this begins again with the unabsorbed one.
            own_key, own_value = latent.expand(key)
            own_query, own_key, own_value, own_shape = check_inputs(
                unabsorbed, own_key, own_value, any_dtypes=True
            )
            target = step.scoring.target
            own_step = step._replace(
                scoring=check_scoring(own_query, own_shape, arguments, target),
                shape=own_shape,
                tokens=own_tokens._replace(key=own_key, value=own_value),
            )
        in_place = implementation is None and not products_are_replaced()
        call = own_step.call(is_empty, in_place)
        output, _, largest = run_or_explain(call, implementation)
        if latent is None:
            # Values that are part of keys are cut out after attention in place.
            output = output[..., : cache.value_size]
        elif not is_empty and not always_expands:
            output = latent.project(output)
        result = Result(output, None, largest)
        # Inside `jax.shard_map`, both calls must return the same types.
        result, _ = varying_alike((result, tokens.appended.cache.arrays))
        return result

    result = step.by_emptiness(attend)
    return jax.tree.map(lambda x: nan_without(room, x, cache.batch), result)


def all_written(
    query: Array,
    tokens: NewTokens,
    takes_objects: bool,
    mask: Any = None,
    is_causal: bool | None = None,
    local_window_size: object = None,
    **arguments: Any,
) -> tuple[Array, Array, dict[str, Any]]:
    """Prepares a decoding step for an attention function that cannot read a cache:
    returns all keys and values, oldest first, and its arguments.

    The argument `mask` then hides all that a step hides. It is an object, with offsets,
    if the function `takes_objects`, or if the caller's mask is an object; otherwise a
    bool array.
    """
    cache = tokens.cache
    if cache.window is not None and "key_indices" in arguments:
        raise ValueError(
            "key_indices must be None over a ring cache if another function than "
            "flax_mha's computes attention, or if weights are sown, but got an array; "
            "use a cache without a window."
        )
    # What is visible does not depend on other sizes.
    *_, length, num_heads, _ = query.shape
    shape = Shape(cache.batch, length, length, num_heads)
    takes_objects = takes_objects or isinstance(mask, Mask)
    options: Any = {"is_causal": is_causal, "local_window_size": local_window_size}
    step = Step.of(query, shape, tokens, arguments.get("bias"), mask, options)
    # The function gets bias and array itself.
    step = step._replace(bias=None)
    if not takes_objects:
        step = step._replace(mask=None)
    call = step.call(is_empty=False, in_place=False)
    shape = shape._replace(key_length=call.lengths[1])
    query_offset, key_offset = call.offsets.values

    if takes_objects or "score_mod" in arguments:
        arguments["query_offset"] = _like_index(query_offset, cache)
        arguments["key_value_offset"] = _like_index(key_offset, cache)
    visible: Any = call.mask
    if not takes_objects:
        visible = visible_at(visible, shape, (query_offset, key_offset))
        if mask is not None:
            visible = visible & validation.mask(mask, shape)
    arguments["mask"] = visible
    return call.key, call.value, arguments


def _like_index(offset: int | Array, cache: KVCache) -> int | Array:
    """Returns an offset of a call, an int or with batch axes, as an int or an array
    shaped like the cache's index.
    """
    if isinstance(offset, int):
        return offset
    return offset.reshape(cache.index.shape)


class Step(NamedTuple):
    """The checked arguments of one call of `cached_attention`.

    A step attends to all written keys, up to the query itself if it is causal. Windows
    and masks narrow that. Without causality, only windows and masks hide written keys;
    queries also attend to later tokens of the call.
    """

    # The query and the options; keys, values and masks are added by `call`.
    scoring: Call
    shape: Shape  # of attention among the new tokens only
    # With a latent only if it expands the keys before attention: otherwise, the query
    # is absorbed.
    tokens: NewTokens
    bias: ArrayLike | None
    mask: ArrayLike | Mask | None
    is_causal: bool
    window: tuple[int | None, int | None] | None
    # Positions of the tokens that each query attends to.
    key_indices: Int[Array, "..."] | None = None
    top_k: int = 0  # a query with at most this many visible keys lists all of them

    @classmethod
    def of(
        cls,
        query: Array,
        shape: Shape,
        tokens: NewTokens,
        bias: ArrayLike | None,
        mask: ArrayLike | Mask | None,
        arguments: CallArguments,
        platform: str | None = None,
    ) -> "Step":
        """Checks the arguments of a step whose arrays are checked already."""
        target = target_of((query, tokens.appended.cache.key), platform)
        scoring = check_scoring(query, shape, arguments, target)
        local_window_size = arguments.get("local_window_size")
        window = check_window(local_window_size)
        ring = tokens.cache.window
        reach = None if window is None else window[0]
        if ring is not None and (reach is None or reach > ring):
            raise ValueError(
                f"local_window_size must extend at most {ring} positions to the left, "
                "because the ring cache overwrites older ones, but got "
                f"{local_window_size!r}; create the cache with the same window."
            )
        given: Any = (("bias", bias), ("mask", mask))
        for name, x in given:
            if not _differs_by_slot(x):
                continue
            if ring is not None and isinstance(x, Mask):
                raise ValueError(
                    f"{name} must not contain an array with one entry per key for a "
                    "ring cache, because slots are reused; use FunctionMask, which "
                    "depends on positions."
                )
            if ring is not None:
                raise ValueError(
                    f"{name} must have length 1 on the key axis, because a ring cache "
                    f"reuses its slots, but got shape {np.shape(x)}; to mask by "
                    "position, use FunctionMask or score_mod."
                )
            slots = tokens.cache.length
            if not isinstance(x, Mask) and np.shape(x)[-1] != slots:
                raise ValueError(
                    f"the last axis of {name} must have length {slots} (the number of "
                    f"cache slots) or 1, but got shape {np.shape(x)}; empty slots are "
                    "already masked."
                )
        is_causal = check_is_causal(arguments.get("is_causal"), mask)
        # No token comes after a single one, so the causal mask, with which rings are
        # read in place, hides nothing.
        is_single = isinstance(shape.query_length, int) and shape.query_length == 1
        return cls(
            scoring=scoring,
            shape=shape,
            tokens=tokens,
            bias=bias,
            mask=mask,
            is_causal=is_causal or is_single,
            window=window,
        )

    def masks(
        self,
        mask: ArrayLike | Mask | None,
        shape: Shape,
        ends: Int[Array, "..."] | None,
        is_ring: bool = False,
    ) -> list[Mask | None]:
        """Lists all masks of the step for the keys in `shape`; `mask` is the caller's,
        for these keys.

        `ends` are the positions after the last new token of each sequence; None if
        every key is a token, and none is padding. `is_ring`: whether the keys are slots
        of a ring. Slots never written have positions below 0, and are hidden.
        """
        masks: list[Mask | None] = []
        if self.is_causal:
            masks.append(CausalMask())
        if self.window is not None:
            masks.append(LocalMask(*self.window))
        masks.append(given_mask(mask, shape))
        key_ends = None
        query_ends = None
        # A causal mask hides all slots that are not written yet.
        if not self.is_causal:
            key_ends = ends
        if self.tokens.is_padded:
            query_ends = ends
        masks.append(LengthMask(key_ends, query_ends))
        if is_ring:
            masks.append(WrittenMask())
        return masks

    def room_in_arrays(
        self, room: Bool[Array, "..."] | bool
    ) -> Bool[Array, "..."] | bool:
        """Returns `room`, but False for sequences longer than an array that `score_mod`
        or a mask indexes by position.

        `room` says which sequences fit into the cache; the output of all others becomes
        NaN. JAX would clamp a position beyond the array and return a wrong entry. If
        lengths are not traced, raises a ValueError instead.
        """
        # Without `ends`, so that the mask of written keys is left out: lookups beyond
        # the written keys are what is checked here.
        cache = self.tokens.cache
        shape = self.shape._replace(key_length=cache.length)
        visible = Visible.of(self.masks(self.mask, shape, ends=None))
        score_mod = self.scoring.score_mod
        number = self.tokens.appended.tokens
        ends = jnp.where(number > 0, cache.index + number, 0)
        if readable(ends):
            # The last query, and all keys up to it.
            length = extremes(ends)[1]
            offsets = Offsets.of(length - 1, 0)
            check_lookups(self.shape, score_mod, visible, offsets, lengths=(1, length))
            return room
        # Without keys, this checks only b and h.
        offsets = Offsets.of(ends, 0)
        check_lookups(self.shape, score_mod, visible, offsets, lengths=(1, 0))
        # The longest sequence that each function allows.
        longest = []
        for function, window in lookups(visible, score_mod):
            # Without a window, another mask may hide what is beyond the arrays.
            if window is None:
                continue
            queries = function.size("q_idx")
            if queries is not None:
                longest.append(queries)
            keys = function.size("kv_idx")
            if keys is not None:
                # A window that ends before the query (right < 0) reads fewer keys.
                right = window[1] or 0
                longest.append(keys - min(right, 0))
        if longest:
            return room & (ends <= min(longest))
        return room

    def by_emptiness(self, compute: Callable[[bool], T]) -> T:
        """Returns `compute(True)` for a prompt in an empty cache, otherwise
        `compute(False)`.

        A prompt in an empty cache attends only to itself, which is faster. If the
        cache's index is traced, both are traced, `compute(True)` first, and `lax.cond`
        runs one of them.
        """
        number = self.shape.query_length
        cache = self.tokens.cache
        # `jax.export` may make them symbols.
        has_known_sizes = isinstance(number, int) and isinstance(cache.length, int)
        # A few queries read their keys in place, which is as fast.
        is_short = has_known_sizes and number <= MAX_QUERIES_IN_PLACE
        # Arrays with an entry per slot are cut to the prompt's slots, except inside a
        # mask object.
        by_slot = [x for x in (self.bias, self.mask) if _differs_by_slot(x)]
        fits = has_known_sizes and number <= cache.length
        can_be_cut = fits and not any(isinstance(x, Mask) for x in by_slot)
        if is_short or (by_slot and not can_be_cut):
            return compute(False)
        index = cache.index
        if readable(index):
            return compute(not np.any(np.asarray(index)))
        is_empty = jnp.all(index == 0)
        return lax.cond(is_empty, lambda: compute(True), lambda: compute(False))

    def call(self, is_empty: bool, in_place: bool) -> Call:
        """Makes a `Call` over only the new tokens if `is_empty`, otherwise over the
        cache with the new tokens.

        If `in_place`, the call reads the cache without a copy if possible.
        """
        # In a ring, each new token may have overwritten a key of the queries before it.
        is_ring = self.tokens.cache.window is not None
        is_overwritten = is_ring and self.shape.query_length != 1
        source: Source = "in place"
        if is_empty:
            source = "new tokens"
        elif not in_place or is_overwritten or self.tokens.latent is not None:
            source = "copy"
        call = self._call(source)
        # Only attention in place, and over gathered keys, can dequantize 8 bits itself;
        # all others need floats.
        has_floats = call.cache_scale is None
        is_gathered = call.key_indices is not None
        if has_floats or is_gathered or reads_in_place(call):
            return call
        return self._call("copy")

    def _call(self, source: Source) -> Call:
        rank = len(self.shape.batch)
        tokens = self.tokens
        cache = tokens.cache
        new = tokens.appended.cache
        number = tokens.appended.tokens
        dtype = self.scoring.query.dtype
        in_place = source == "in place"
        reads_ring = source != "new tokens" and cache.window is not None

        # The keys, and the positions of the first query and key; None means 0.
        bias = self.bias
        mask = self.mask
        index: Any = None
        key_offset = None
        ring = None
        scale = None
        if source == "new tokens":
            bias = _first_slots(bias, self.shape.query_length)
            mask = _first_slots(mask, self.shape.query_length)
            key = tokens.key
            value = tokens.value
        else:
            index = jnp.maximum(cache.index, 0)
            key = new.key
            value = new.value
        if in_place:
            scale = new.scale
            if reads_ring:
                ring = cache.length
                # The position of the newest key; see `Tile.ring`.
                key_offset = index + number - 1
        elif reads_ring:
            key, value, key_offset = in_order(cache, tokens.key, tokens.value)
        elif source == "copy":
            key, value = new.floats(dtype)
        if tokens.latent is not None:
            key, value = tokens.latent.expand(key)
        elif cache.value_size is not None and not value.shape[-1]:
            # Cutting the values out of the keys would copy a cache that is read in
            # place; the output is cut instead.
            value = key if in_place else key[..., : cache.value_size]
        if not in_place:
            key = key.astype(dtype)
            value = value.astype(dtype)
        shape = self.shape._replace(key_length=key.shape[-3])

        # What is visible. All keys of a prompt without padding are tokens of this call.
        ends = None
        if source != "new tokens":
            ends = _by_batch(index + number, rank)
        elif tokens.is_padded:
            ends = _by_batch(number, rank)
        masks = self.masks(mask, shape, ends, reads_ring)
        offsets = Offsets(_by_batch(index, rank), _by_batch(key_offset, rank))

        # The listed positions as indices of these keys; -1 for positions without a key.
        indices = None
        positions = self.key_indices
        # An indexer lists all keys of a short prompt.
        lists_all = source == "new tokens" and shape.key_length <= self.top_k
        if positions is not None and not lists_all:
            first = jnp.asarray(0 if key_offset is None else key_offset)
            first = _by_batch(first, rank)[..., None, None, None]
            if ring is not None:
                newest = first
                oldest = jnp.maximum(newest - ring + 1, 0)
                indices = positions % ring
            else:
                # Positions below 0 are empty slots of a ring.
                oldest = jnp.maximum(first, 0)
                newest = first + shape.key_length - 1
                indices = positions - first
            is_key = (positions >= oldest) & (positions <= newest)
            indices = jnp.where(is_key, indices, -1)

        return with_keys(
            self.scoring,
            shape,
            bias,
            masks,
            key=key,
            value=value,
            offsets=offsets,
            key_indices=indices,
            cached=in_place,
            cache_scale=scale,
            ring=ring,
            value_size=None if scale is None else cache.value_size,
        )


def nan_without(
    room: Bool[Array, "..."] | bool, x: Array, batch: tuple[int, ...]
) -> Array:
    """Returns `x` [B..., ...], but NaN for sequences whose `room` is False: their
    tokens did not fit into the cache.
    """
    if room is True:
        return x
    others = (None,) * (x.ndim - len(batch))
    return jnp.where(jnp.asarray(room)[(..., *others)], x, jnp.nan)


def _by_batch(x: Any, rank: int) -> Any:
    """Reshapes int32 x, [] or [B...], to `rank` axes (the number of batch axes), so
    that it broadcasts to [B...]; None remains None.
    """
    if x is None:
        return None
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
    keys = entries_at(old_keys, slots, key)
    values = entries_at(old_values, slots, value)
    return keys, values, first


def _differs_by_slot(x: ArrayLike | Mask | None) -> bool:
    """Returns True if a bias, a mask or an array in a mask object has an entry for each
    slot of the cache.
    """
    if x is None:
        return False
    if isinstance(x, Mask):
        return x.lengths[1] > 0
    try:
        last_axis = np.shape(x)[-1:]
    except ValueError:  # a ragged list, for which attention raises an error
        return False
    return last_axis not in ((), (1,))


def _first_slots(x: ArrayLike | Mask | None, number: int) -> Any:
    """Returns the first `number` slots, a prompt's, of a bias or mask [..., S]; [...,
    1] and mask objects unchanged.
    """
    if isinstance(x, Mask) or not _differs_by_slot(x):
        return x
    # An array of NumPy stays known while JAX traces the caller.
    if not isinstance(x, np.ndarray):
        x = jnp.asarray(x)
    return x[..., :number]
