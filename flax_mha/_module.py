"""What both modules share: checks of their arguments, and one step of decoding."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_mha import _check
from flax_mha._choose import Explanation, check_name
from flax_mha.kv_cache import KVCache
from flax_mha.masks import Mask

PerSequence = Int[Array, "*B"]
P = ParamSpec("P")
M = TypeVar("M")


def check_options(
    num_heads: int,
    num_kv_heads: int | None,
    qkv_features: int,
    dropout_rate: float,
    implementation: str | None,
    local_window_size: Any,
    logits_soft_cap: float | None,
    sinks: bool,
    scale: float | None,
    normalize_qk: bool | str,
    qk_norm_epsilon: float | None,
) -> None:
    """What the constructors of both modules accept.

    Raises:
      ValueError: If an argument is none of that.
    """
    _heads(num_heads, num_heads if num_kv_heads is None else num_kv_heads, qkv_features)
    _check.dropout_rate(dropout_rate)
    check_name(implementation)
    _check.window(local_window_size)
    _check.soft_cap(logits_soft_cap)
    _check.flag("sinks", sinks)
    _check.scale(scale, _check.Shape((), 1, 1, 1, 1, 1, 1))
    if normalize_qk not in (False, True, "layer_norm", "rms_norm"):
        raise ValueError(f'normalize_qk must be False, True, "layer_norm" or "rms_norm", but got {normalize_qk!r}.')
    if qk_norm_epsilon is not None:
        _norm_epsilon(qk_norm_epsilon, normalize_qk)


def _heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    """Heads that divide the features, and key/value heads that divide the heads."""
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("qkv_features", qkv_features)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool):
            raise ValueError(f"{name} must be an int, but got {number!r}.")
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, but got {num_heads} and {num_kv_heads}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads}).")
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension ({qkv_features}) must be divisible by 'num_heads' heads ({num_heads}); choose "
            "qkv_features to be a multiple of num_heads."
        )


def _norm_epsilon(epsilon: float, normalize_qk: bool | str) -> None:
    number = isinstance(epsilon, int | float | np.number) and not isinstance(epsilon, bool)
    if not number or not 0 < epsilon < float("inf"):
        raise ValueError(f"qk_norm_epsilon must be a finite number > 0, but got {epsilon!r}.")
    if not normalize_qk:
        raise ValueError(
            f'qk_norm_epsilon must be None without normalize_qk, but got {epsilon!r}; pass normalize_qk="rms_norm".'
        )


def check_rngs(rngs: Any, *kinds: type) -> None:
    """One of these kinds of random streams, or None."""
    if rngs is not None and not isinstance(rngs, kinds):
        names = " or ".join(f"nnx.{kind.__name__}" for kind in kinds)
        raise ValueError(f"rngs must be {names}, but got {type(rngs).__name__}; a key becomes nnx.Rngs(key).")


def given_or_same(inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
    """Keys, by default the queries, and values, by default the keys."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "`inputs_k` cannot be None if `inputs_v` is not None. To have both be the same value, pass it as "
            "`inputs_k` and leave `inputs_v` None."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def check_inputs(inputs_q: Array, inputs_k: Array, inputs_v: Array) -> None:
    """Inputs [batch..., length, features] that fit each other."""
    shapes = f"inputs_q {inputs_q.shape}, inputs_k {inputs_k.shape}, inputs_v {inputs_v.shape}"
    if not inputs_q.ndim == inputs_k.ndim == inputs_v.ndim >= 2:
        raise ValueError(f"inputs must have same rank, 2 or more ([batch..., length, features]), but got {shapes}.")
    if not inputs_q.shape[:-2] == inputs_k.shape[:-2] == inputs_v.shape[:-2]:
        raise ValueError(f"inputs' batch dims must match, but got {shapes}.")
    if inputs_k.shape[-2] != inputs_v.shape[-2]:
        raise ValueError(f"inputs' key and value lengths must match, but got {shapes}.")


def sequence_arguments(
    segment_ids: Array | tuple[Array, Array] | None,
    lengths: PerSequence | tuple[PerSequence | None, PerSequence | None] | None,
    self_attention: bool,
    decode: bool,
) -> dict[str, Array | None]:
    """Segment ids and lengths as arguments of the attention: one of each for queries and for keys."""
    for name, given, reason in (
        ("segment_ids", segment_ids, "a cache holds one document"),
        ("lengths", lengths, "the cache knows how many tokens it holds"),
    ):
        if decode and given is not None:
            raise ValueError(f"{name} must be None while decoding, but got an array; {reason}.")
    if lengths is not None and not isinstance(lengths, tuple) and not self_attention:
        raise ValueError(
            "lengths must be a pair (of queries, of keys) where keys are not the queries, but got one array; use "
            "(None, lengths) for the keys alone."
        )
    for name, given in (("segment_ids", segment_ids), ("lengths", lengths)):
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"{name} must be one array or a pair (of queries, of keys), but got {len(given)} arrays.")
    query_ids, key_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    query_lengths, key_lengths = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    return {
        "query_segment_ids": query_ids,
        "key_value_segment_ids": key_ids,
        "query_seq_lengths": query_lengths,
        "key_value_seq_lengths": key_lengths,
    }


def without_none(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are given; without the others, any function with Flax's signature will do."""
    return {name: value for name, value in arguments.items() if value is not None}


def explaining(
    call: Callable[Concatenate[M, P], Array], explained: Callable[..., Explanation]
) -> Callable[Concatenate[M, P], Explanation]:
    """The method `explain` of a module: `explained`, with the signature of its `call`."""

    @functools.wraps(call, assigned=("__annotations__",))
    def explain(self: M, *arguments: P.args, **keywords: P.kwargs) -> Explanation:
        """Which implementation computes a call with these arguments, and why the others cannot.

        The arguments are those of the call. Nothing is computed, and the module stays as it is.

        Raises:
          ValueError, NotImplementedError: As the call; ValueError also if `attention_fn` is not
            `flax_mha.attention_fn`.
        """
        return explained(self, *arguments, **keywords)

    return explain


class DecodingStep(NamedTuple):
    """What one token's attention over the cache takes.

    Attributes:
      cache: With the token in it.
      mask: What the token sees of the whole cache.
      query_offset: Its position, where the mask, a window or a `score_mod` asks for it; else None.
      has_room: Whether it found room in the cache.
    """

    cache: KVCache
    mask: Array | Mask
    query_offset: Int[Array, ""] | None
    has_room: Bool[Array, ""] | bool

    def checked(self, output: Float[Array, "..."]) -> Float[Array, "..."]:
        """The output, NaN where the token found no room: nothing is lost silently."""
        return output if self.has_room is True else jnp.where(self.has_room, output, jnp.full_like(output, jnp.nan))


def decoding_step(
    cache: KVCache, key: Array, value: Array, mask: Array | Mask | None, local_window_size: Any, score_mod: Any
) -> DecodingStep:
    """Puts one token's key and value into the cache. Its query is the newest token: all of the cache is its past."""
    by_position = isinstance(mask, Mask) or local_window_size is not None or score_mod is not None
    return DecodingStep(
        cache.append(key, value), cache.masked(mask), cache.index if by_position else None, cache.has_room
    )
