"""`Indexer`: chooses a few keys for each query of latent attention, as in DeepSeek
V3.2's sparse attention.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flax_mha._src.cache.cached_attention import NewTokens, Step
from flax_mha._src.cache.kv_cache import KVCache
from flax_mha._src.call.arguments import canonical, check_inputs
from flax_mha._src.call.call import Call
from flax_mha._src.call.slices import slice_call
from flax_mha._src.core import validation
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.tracing import varying_alike
from flax_mha._src.distributed.split import by_types, is_explicit, unsplit
from flax_mha._src.masks import Mask
from flax_mha._src.math.head import by_blocks, map_heads, scores_of
from flax_mha._src.math.scores import ScoreInputs, ScoreRule
from flax_mha._src.modules.attention_fn import Module, sow

# Index scores, and keys; -inf and -1 for none.
Choice = tuple[Float[Array, "*B T k"], Int[Array, "*B T k"]]
MAX_SCORES = 2**23  # index scores of heads that are in memory at a time
# Arguments of attention that mask keys; masked keys are never chosen.
HIDING: tuple[str, ...] = (
    "mask",
    "is_causal",
    "local_window_size",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
    "query_offset",
    "key_value_offset",
)


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek V3.2: each query attends to the `top_k` keys
    with the largest index scores.

    Separate, small heads j compute the index score of key s for query t:

        I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]) / sqrt(num_heads * head_dim)

    The queries q are projections of the compressed queries, and the weights w are
    projections of the input. All heads share the keys k, which are a LayerNorm of a
    projection of the input. The first `qk_rope_head_dim` features of queries and keys
    are rotated; with `rotary_last`, the last. Of keys with equal scores, the earlier
    one is chosen. Masked keys are never chosen; `bias` and `score_mod` do not affect
    the choice. Masks must be the same for all heads; a `FunctionMask` is called for
    head 0.

    Pass it to `MultiHeadLatentAttention(indexer=)`. The parameters are `wq_b`
    [q_lora_rank, num_heads, head_dim], `wk` [in, head_dim], `k_norm` and `weights_proj`
    [in, num_heads], under `indexer`.

    Args:
      num_heads: Number of index heads (`index_n_heads` in configs).
      head_dim: Features of each index head; at least `qk_rope_head_dim`.
      top_k: Number of keys that each query attends to (`index_topk`).
      interleaved: How the rotation pairs features: False in DeepSeek V3.2, True in GLM
        5.
      rotary_last: Rotate the last features of queries and keys instead of the first (HY
        4).
      norm_epsilon: Added to the variance in `k_norm`.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> attention = flax_mha.MultiHeadLatentAttention(
      ...     4,
      ...     64,
      ...     q_lora_rank=48,
      ...     kv_lora_rank=32,
      ...     qk_nope_head_dim=16,
      ...     qk_rope_head_dim=8,
      ...     v_head_dim=16,
      ...     indexer=flax_mha.Indexer(num_heads=8, head_dim=16, top_k=5),
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> attention(jnp.ones((2, 10, 64)), decode=False, is_causal=True).shape
      (2, 10, 64)

    Source: DeepSeek-AI, DeepSeek-V3.2-Exp, 2025, equation 1.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool = False
    rotary_last: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "top_k"):
            validation.int_at_least(name, getattr(self, name), 1)
        for name in ("interleaved", "rotary_last"):
            validation.check_bool(name, getattr(self, name))
        validation.epsilon("norm_epsilon", self.norm_epsilon)


class IndexParts(NamedTuple):
    """An indexer, its projections, and access to its cache, for one call."""

    indexer: Indexer
    # Projects inputs [B..., T, D] to index queries [B..., T, N, H], index keys
    # [B..., T, 1, H] and scaled weights of heads [B..., T, N].
    project: Callable[[Array], tuple[Array, Array, Array]]
    # Returns cached index keys and scales; nothing without a cache of them.
    cache: Callable[[], tuple[Array, ...]]
    write: Callable[[tuple[Array, ...]], None]  # sets them to new arrays

    def cached(self, key: Array, cache: KVCache | None) -> KVCache | None:
        """Returns the cache of index keys, to which `key` is not added yet; None if the
        attention has no `cache`.
        """
        if cache is None:
            return None
        arrays = self.cache()
        if not arrays:
            raise ValueError(
                "the cache must have index keys (cached_index_key) for the indexer; "
                "create a new cache."
            )
        index_key, *scale = arrays
        # A latent cache without values: its keys are the index keys.
        made = KVCache.of_arrays(
            cache.window,
            value_size=key.shape[-1],
            arrays=(index_key, cache.index, *scale),
        )
        made.check_fits(key, key[..., :0], key.shape[-3])
        return made

    def store(self, cache: KVCache) -> None:
        """Sets the module's cached index keys and scales to those of `cache`, in the
        order that `cached` reads.
        """
        arrays = (cache.key, cache.scale)
        self.write(tuple(x for x in arrays if x is not None))


def top_k_keys(
    indexer: Indexer,
    projected: tuple[Array, Array, Array],
    cache: KVCache | None,
    lengths: Any,
    arguments: Mapping[str, Any],
    sow_to: Module | None = None,
) -> tuple[Int[Array, "*B T k"] | None, KVCache | None]:
    """Returns the positions of the chosen keys, and the cache with the new index keys
    (None without a `cache`).

    `projected` are index queries, keys and weights; `lengths` and `arguments` are those
    of attention. If `arguments` has `key_indices`, they are returned. Otherwise, None
    is returned as positions if there are at most `top_k` keys: queries attend to all.
    `sow_to` is the module that sows index scores and positions; None sows none.
    """
    query, key, weights = projected
    no_value = key[..., :0]
    num_keys = key.shape[-3]
    if cache is not None:
        num_keys = cache.length
    if not isinstance(num_keys, int):
        raise ValueError(
            f"the number of keys must be static with an indexer, but got {num_keys}; "
            "export a fixed length."
        )

    # The cache gets the new keys, whoever chooses.
    tokens = None
    if cache is not None:
        # 8-bit keys are quantized by the cache.
        stored = key if cache.scale is not None else key.astype(cache.key.dtype)
        appended = cache.append(stored, no_value, lengths)
        tokens = NewTokens(key, no_value, cache, appended, lengths is not None)
        cache = appended.cache

    # There is nothing to choose if a user has chosen, or if all keys fit.
    given = arguments.get("key_indices")
    attends_to_all = num_keys <= indexer.top_k
    is_decided = attends_to_all or given is not None
    if is_decided and sow_to is None:
        return given, cache

    # Mask objects are the same for all heads, or called for head 0.
    mask = arguments.get("mask")
    if not isinstance(mask, Mask | None):
        shape = jnp.shape(mask)
        has_heads = len(shape) > 2 and shape[-3] > 1
        if has_heads:
            raise ValueError(
                "mask must be the same for all heads with an indexer, which chooses "
                f"keys for all of them, but got shape {shape}; pass a mask [batch..., "
                "1, queries, keys]."
            )
    precision = arguments.get("precision")
    one_head = query[..., :1, :]
    if tokens is None:
        hiding = {}
        for name, x in arguments.items():
            if name in HIDING and x is not None:
                hiding[name] = x
        call = canonical(one_head, key, no_value, precision=precision, **hiding)
        count = min(indexer.top_k, num_keys)
        scores, positions = _choose(call, query, weights, count)
    else:
        # A step of a single head whose keys are the index keys.
        one_head, _, _, sizes = check_inputs(one_head, key, no_value, any_dtypes=True)
        options: Any = {"precision": precision}
        for name in ("is_causal", "local_window_size"):
            options[name] = arguments.get(name)
        step = Step.of(one_head, sizes, tokens, None, mask, options)
        scores, positions = _choose_cached(step, query, weights, indexer.top_k)
    if sow_to is not None:
        sow(sow_to, "index_scores", scores)
        sow(sow_to, "key_indices", positions)
    if is_decided:
        return given, cache
    return positions, cache


def _choose_cached(step: Step, query: Array, weights: Array, top_k: int) -> Choice:
    """Chooses the `top_k` keys with the largest index scores for each query of a
    decoding step; in an empty cache, among a prompt's own keys.

    Returns scores and positions of the keys; -inf and -1 fill the places of missing
    keys.
    """
    cache = step.tokens.cache
    slots = cache.length
    if cache.window is not None:
        # A ring is read with the new tokens behind it.
        slots += step.shape.query_length
    count = min(top_k, slots)

    def compute(is_empty: bool) -> Choice:
        call = step.call(is_empty, False)
        num_keys = call.lengths[1]
        scores, indices = _choose(call, query, weights, min(count, num_keys))
        # Positions count from the start of the sequence, indices from the first key.
        first = call.offsets.values[1]
        if not isinstance(first, int):
            first = first[..., None, None]
        positions = jnp.where(indices < 0, -1, indices + first)
        # Both branches of `lax.cond` return `count` keys; the rest are none.
        missing = count - scores.shape[-1]
        padding = [(0, 0)] * (scores.ndim - 1) + [(0, missing)]
        scores = jnp.pad(scores, padding, constant_values=-jnp.inf)
        positions = jnp.pad(positions, padding, constant_values=-1)
        return varying_alike((scores, positions))

    return step.by_emptiness(compute)


def _choose(
    call: Call,
    query: Float[Array, "*B T N H"],
    weights: Float[Array, "*B T N"],
    count: int,
) -> Choice:
    """Chooses `count` keys for each query, one block of queries at a time; `call` holds
    the index keys and masks.
    """
    if is_explicit(query):
        return _on_mesh(call, query, weights, count)
    num_queries, num_keys = call.lengths
    num_heads = query.shape[-2]
    rank = query.ndim - 3

    # Few enough queries and batch entries at a time for the memory.
    height = num_queries
    together = None
    if call.has_known_sizes:
        scores_of_query = max(num_heads * num_keys, 1)
        height = min(num_queries, max(1, MAX_SCORES // scores_of_query))
        together = max(1, MAX_SCORES // (height * scores_of_query))

    def block(first: Int[Array, ""]) -> Choice:
        part = slice_call(call, (first, height), None, (first, 0))
        queries = lax.dynamic_slice_in_dim(query, first, height, rank)
        weights_of_queries = lax.dynamic_slice_in_dim(weights, first, height, rank)
        keys = part.key[..., 0, :]
        # `map_heads` also maps over axes of heads, of which there is one.
        arrays = (queries, weights_of_queries, keys)
        by_entry = [lax.expand_dims(x, (rank, rank + 1)) for x in arrays]
        entries = varying_alike((*by_entry, *scores_of(part)))
        choose_of_entry = functools.partial(_one_entry, count)
        chosen = map_heads(choose_of_entry, entries, rank + 2, max_heads=together)
        return jax.tree.map(lambda x: lax.squeeze(x, (rank, rank + 1)), chosen)

    return by_blocks(block, num_queries, height, rank)


def _one_entry(
    count: int, entry: tuple[Array, Array, Array, ScoreInputs, ScoreRule]
) -> Choice:
    """Chooses the keys of each query of one batch entry, given queries [t, N, H],
    weights [t, N] and keys [S, H].

    A visible key with NaN is always chosen, so that the output is NaN.
    """
    *arrays, inputs, rule = entry
    # Zeros are multiplied, so that a NaN reaches only the scores of its own key.
    query, weights, key = map(_without_non_finite, arrays)
    # I = sum_j w_j relu(q_j . k)
    contracted = ((2,), (1,))
    products = lax.dot_general(
        query,
        key,
        (contracted, ((), ())),
        precision=rule.precision,
        preferred_element_type=rule.dtype,
    )
    weights = weights.astype(rule.dtype)
    scores = jnp.einsum(
        "tns,tn->ts", jax.nn.relu(products), weights, precision=rule.precision
    )
    *_, given_key = arrays
    is_finite_key = jnp.isfinite(given_key).all(-1)
    scores = jnp.where(is_finite_key[None], scores, jnp.inf)
    # Masks come last: a masked key is never chosen, even if it holds NaN.
    lengths = (query.shape[0], key.shape[0])
    scores = rule.tile(scores, inputs, Tile(0, 0, lengths, rule.offsets.values))
    scores, indices = lax.top_k(scores, count)
    return scores, jnp.where(scores == -jnp.inf, -1, indices)


def _without_non_finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _on_mesh(call: Call, query: Array, weights: Array, count: int) -> Choice:
    """Chooses keys on a mesh with Explicit axes; each device chooses for the batch
    entries that it holds.
    """
    parts = by_types(call)

    def part(held: Call, query: Array, weights: Array) -> Choice:
        return _choose(unsplit(held), query, weights, count)

    specs = (
        call.map_arrays(parts.spec),
        parts.spec(query, "B T K H"),
        parts.spec(weights, "B T K"),
    )
    return parts.shard_map(part, (call, query, weights), specs, parts.output_spec)
