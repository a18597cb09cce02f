"""`cached_attention`: attention of new tokens over those in a cache and themselves."""

from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.write import by_device
from flax_mha.call.arguments import Arguments, check_inputs, check_scoring, check_window, with_keys
from flax_mha.call.operands import Call, Output, ScoreMod, Sharding
from flax_mha.core.tracing import readable, target_of, varying_alike
from flax_mha.distributed import dispatch
from flax_mha.impl.registry import Implementation
from flax_mha.impl.shared.schedule import MAX_QUERIES_IN_PLACE
from flax_mha.masks import ArrayMask, Mask, WrittenMask

Run = Callable[[Call, Implementation | None], Output]


def cached_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B T K H"],
    value: Float[Array, "*B T K Hv"],
    cache: KVCache,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    lengths: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    score_mod: ScoreMod | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    broadcast_dropout: bool = False,
    implementation: Implementation | None = None,
    precision: lax.PrecisionLike = None,
    qkv_sharding: Sharding | None = None,
) -> tuple[Float[Array, "*B T N Hv"], KVCache]:
    """Causal attention of T new tokens over the tokens in a cache and themselves; they are added to the cache.

    Token i of a sequence stands at position `cache.index + i`. Any split of a sequence into calls gives what
    `dot_product_attention(..., is_causal=True)` gives for the whole sequence.

    A prompt that meets an empty cache is computed as without a cache, by the fastest implementation. Otherwise keys and
    values are read where they are in the cache, only as far as a query sees.

    Args:
      query: Of the new tokens.
      key: Likewise; rotated, if there are rotary embeddings.
      value: Likewise.
      cache: The tokens before them.
      bias: Broadcasts to [B..., N, T, S], where S counts the slots of the cache; added to the scores.
      mask: bool, broadcasts to [B..., N, T, S]. Or a mask object, which speaks of positions; its arrays with an entry
        per key speak of slots.
      lengths: int [B...]: how many of the T tokens of each sequence are none of the padding, which stands at the end;
        None means all. The output of padding is 0. Needs a cache made with `per_row=True`.
      scale: As in `dot_product_attention`, like all that follow.
      local_window_size: (left, right). A ring needs one that reaches no further back than its own window.
      logits_soft_cap: c > 0 turns a scaled score s into c tanh(s / c); at most 1e30, None caps nothing.
      sinks: Broadcasts to [B..., N].
      score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, with positions.
      dropout_rate: Share of the weights to drop.
      dropout_rng: Key of `jax.random`.
      broadcast_dropout: Drop the same weights in every batch entry and head.
      implementation: Which one; None chooses. A named one gets keys and values as arrays, all that the cache can hold.
      precision: Of the matrix products.
      qkv_sharding: How a mesh splits the query, and the cache alike.

    Returns:
      The output, and the cache with the new tokens. Under `jit`, a sequence whose tokens find no room returns NaN, and
      its cache is left as it was.

    Raises:
      ValueError: If arguments do not fit together, or if there is no room and the index is known.
      NotImplementedError: If the named implementation cannot compute this.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha.cache.cached_attention import cached_attention
      >>> from flax_mha.cache.kv_cache import KVCache
      >>> cache = KVCache.create(2, 100, num_kv_heads=1, head_size=16)
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
      >>> key = value = query[:, :, :1]
      >>> output, cache = cached_attention(query, key, value, cache)  # a prompt of five tokens
      >>> output, cache = cached_attention(query[:, :1], key[:, :1], value[:, :1], cache)  # the next token
      >>> output.shape, int(cache.index)
      ((2, 1, 4, 16), 6)
    """
    return over_cache(
        dispatch.run,
        query,
        key,
        value,
        cache,
        bias,
        mask,
        lengths,
        implementation,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        score_mod=score_mod,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        qkv_sharding=qkv_sharding,
    )


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
    **arguments: Unpack[Arguments],
) -> tuple[Float[Array, "*B T N Hv"], KVCache]:
    """Computes `cached_attention` by a function that runs calls, or that explains them instead.

    If it is not known whether the cache is empty, the call of an empty one is run first, then the other.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a KVCache, but got {type(cache).__name__}; make one with KVCache.create.")
    query, key, value, shape = check_inputs(query, key, value, any_dtypes=True)
    number = query.shape[-3]
    if key.shape[-3] != number:
        raise ValueError(
            f"query and key must have one length, that of the new tokens, but got {number} and {key.shape[-3]}."
        )
    check_cache(cache, bias, mask, arguments.get("local_window_size"))
    appended = cache.append(key, value, lengths)
    new, tokens = appended.cache, appended.tokens
    arguments["is_causal"] = True
    scoring = check_scoring(query, shape, arguments, target_of((query, new.key, new.value)))
    ends = None if lengths is None else tokens  # of each sequence, counted from its first new token

    def attend(
        key: Array, value: Array, bias: Any, mask: Any, positions: Arguments, cached: bool = False, ring: bool = False
    ) -> Array:
        if not cached:
            key, value = key.astype(query.dtype), value.astype(query.dtype)
        keys = shape._replace(key_length=key.shape[-3])
        call = with_keys(scoring, key, value, keys, bias, mask, arguments | positions, cached, ring)
        return run(call, implementation)[0]

    def prompt() -> Array:
        """The output if the cache was empty: that of an ordinary call."""
        first_bias, first_mask = (_of_first_slots(x, number) for x in (bias, mask))
        return attend(key, value, first_bias, first_mask, {"query_seq_lengths": ends})

    def general() -> Array:
        """The output whatever the cache holds."""
        index = jnp.maximum(cache.index, 0)
        positions: Arguments = {"query_offset": index, "query_seq_lengths": None if ends is None else index + ends}
        in_place = implementation is None
        if cache.window is None:
            return attend(new.key, new.value, bias, mask, positions, cached=in_place)
        if in_place and number == 1:
            positions["key_value_offset"] = index + tokens - 1
            return attend(new.key, new.value, bias, mask, positions, cached=True, ring=True)
        keys, values, positions["key_value_offset"] = in_order(cache, key, value)
        shown = WrittenMask() if mask is None else _as_mask(mask) & WrittenMask()
        return attend(keys, values, bias, shown, positions)

    def alike(compute: Callable[[], Array]) -> Callable[[], Array]:
        """Inside `jax.shard_map`, both may vary over the same axes of a mesh."""
        return lambda: varying_alike((compute(), new.arrays))[0]

    is_known = isinstance(number, int) and isinstance(cache.length, int)  # else symbols, as in jax.export
    by_slot = not (is_known and number <= cache.length) and any(map(_differs_by_slot, (bias, mask)))
    few = is_known and number <= MAX_QUERIES_IN_PLACE
    if few or by_slot or (isinstance(mask, Mask) and mask.lengths[1]):
        output = general()
    else:
        output = _prompt_or_general(alike(prompt), alike(general), cache)
    return appended.checked(output), new


def in_order(cache: KVCache, key: Array, value: Array) -> tuple[Array, Array, Int[Array, "..."]]:
    """Keys and values of a ring and of the tokens that come after it by their positions, and the first position.

    Positions below 0 have nothing in them.
    """
    first = jnp.maximum(cache.index, 0) - cache.length
    slots = (first[..., None] + cache.counted(cache.length)) % cache.length
    axes = "B S" if cache.is_per_row else "S"

    def ordered(cached: Array, slots: Array, new: Array) -> Array:
        slots = jnp.broadcast_to(slots, cached.shape[:-2])[..., None, None]
        return jnp.concatenate([jnp.take_along_axis(cached, slots, axis=-3), new], axis=-3)

    keys, values = (
        by_device(ordered, cached, "B S K H", (slots, axes), (new, "B T K H"))
        for cached, new in ((cache.key, key), (cache.value, value))
    )
    return keys, values, first


def _prompt_or_general(prompt: Callable[[], Array], general: Callable[[], Array], cache: KVCache) -> Array:
    """What computes a prompt, if the cache is empty."""
    if not readable(cache.index):
        return lax.cond(jnp.all(cache.index == 0), prompt, general)
    return general() if np.any(np.asarray(cache.index)) else prompt()


def check_cache(cache: KVCache, bias: Any, mask: Any, local_window_size: Any) -> None:
    """A ring holds all that the window shows, and nothing is said of its slots; what is said of others is of all.

    Raises:
      ValueError: If that is not so.
    """
    window = check_window(local_window_size)
    if cache.window is None:
        for name, x in (("bias", bias), ("mask", mask)):
            if _differs_by_slot(x) and not isinstance(x, Mask) and np.shape(x)[-1] != cache.length:
                raise ValueError(
                    f"{name} must have an entry for each of the {cache.length} slots of the cache, or 1 for all, but "
                    f"got shape {np.shape(x)}; slots that hold no token are masked already."
                )
        return
    if window is None or window[0] is None or window[0] > cache.window:
        raise ValueError(
            f"local_window_size must reach back {cache.window} positions at most, because the cache is a ring that "
            f"forgets the ones before, but got {local_window_size!r}; make the cache with the same window."
        )
    for name, x in (("bias", bias), ("mask", mask)):
        if _differs_by_slot(x):
            raise ValueError(
                f"{name} must not differ by slot where the cache is a ring, which uses slots again, but got shape "
                f"{np.shape(x)}; use a mask object such as FunctionMask, or a score_mod, which speak of positions."
                if not isinstance(x, Mask)
                else f"{name} must hold no array with an entry per key where the cache is a ring, which uses slots "
                "again; use FunctionMask, which speaks of positions."
            )


def _differs_by_slot(x: Any) -> bool:
    """Whether a bias or mask has an entry for each slot."""
    if isinstance(x, Mask):
        return x.lengths[1] > 0
    try:
        return x is not None and np.shape(x)[-1:] not in ((), (1,))
    except ValueError:  # ragged lists, which are refused where arrays are made of them
        return False


def _of_first_slots(x: Any, number: int) -> Any:
    """What an array says of the first slots, in which the prompt stands."""
    if isinstance(x, Mask) or not _differs_by_slot(x):
        return x
    return (x if isinstance(x, np.ndarray) else jnp.asarray(x))[..., :number]


def _as_mask(mask: Any) -> Mask:
    return mask if isinstance(mask, Mask) else ArrayMask(mask)
