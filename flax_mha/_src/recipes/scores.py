"""Recipes that change scores; `differential`, which subtracts two softmaxes; and
`combine`, which joins recipes.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.attention import dot_product_attention
from flax_mha._src.call.arguments import Arguments, unexpected
from flax_mha._src.core.signature import ConstructorSignature
from flax_mha._src.core.tracing import readable
from flax_mha._src.core.user_function import COUNTED
from flax_mha._src.core.validation import (
    DTYPES,
    as_array,
    extremes,
    int32,
    int_at_least,
    is_int,
)
from flax_mha._src.masks import CausalMask, LocalMask, Mask
from flax_mha._src.recipes.masks import made_for


def alibi(num_heads: int) -> dict[str, Any]:
    """Lowers scores in proportion to the distance, with a slope for each head. Press et
    al., ALiBi, arXiv:2108.12409.

    Causal. The slopes are the same as in the authors' code and in Bloom. If the number
    of heads n is a power of two, they are 2^(-8/n), 2^(-16/n), up to 2^-8. Any other
    number of heads uses the slopes for the next smaller power of two, then every second
    slope for the next larger one.

    Raises:
      ValueError: If `num_heads` is not an integer of at least 1, or if the attention
        has a different number of heads.
    """
    # Check the argument.
    num_heads = int_at_least("num_heads", num_heads, 1)

    return {"mask": CausalMask(), "score_mod": alibi_scores(num_heads)}


# Cached, so that all layers of a model have the same function.
@functools.cache
def alibi_scores(num_heads: int) -> Callable[..., Array]:
    """Returns the `score_mod` of `alibi`."""
    # The power of two up to the number of heads; the other heads fill the gaps.
    below = 2 ** (num_heads.bit_length() - 1)
    exponents = 8 * np.arange(1, below + 1) / below
    others = 4 * np.arange(1, 2 * (num_heads - below), 2) / below
    exponents = np.concatenate([exponents, others])
    # Not traced, even if JAX traces the caller: the cache would keep a tracer.
    with jax.ensure_compile_time_eval():
        slopes = jnp.asarray(2.0**-exponents, jnp.float32)

    @made_for(h=num_heads)
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        slope = slopes[h].astype(score.dtype)
        distance = (q_idx - kv_idx).astype(score.dtype)
        return score - slope * distance

    score_mod.__qualname__ = "alibi.score_mod"  # in errors
    return score_mod


def t5_bias(
    table: Float[Array, "buckets N"],
    max_distance: int = 128,
    bidirectional: bool = False,
) -> dict[str, Any]:
    """Adds a learned bias per bucket of distances; `table` gets a gradient. Raffel et
    al., T5, arXiv:1910.10683, 2.1.

    Half of the buckets hold one distance each; the others hold ranges that grow
    logarithmically up to `max_distance`. The last one also holds all greater distances.
    The attention is causal unless `bidirectional` is True, as in encoders; the first
    half of the table is then for keys up to the query, the second for keys after it.
    For a module with the table as a parameter, see `RelativeBias`.

    Raises:
      ValueError: If `table` does not have two axes, has too few buckets, or has a
        different number of heads than the attention; or if `max_distance` is not
        greater than the number of buckets with one distance each.
    """
    # Check the table.
    table = as_array("table", table, "an array [buckets, heads]")
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least:
        raise ValueError(
            f"table must have shape [buckets, heads] with at least {least} buckets, "
            f"but got {table.shape}."
        )

    buckets = table.shape[0]
    if bidirectional:
        buckets = buckets // 2
    exact = buckets // 2

    # Check that some buckets are left for ranges.
    max_distance = int_at_least("max_distance", max_distance, exact + 1)

    @made_for(h=table.shape[1])
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        if bidirectional:
            distance = jnp.abs(q_idx - kv_idx)
        else:
            distance = jnp.maximum(q_idx - kv_idx, 0)
        # exact + log(distance / exact) / log(max_distance / exact) * (buckets - exact)
        times = jnp.maximum(distance, 1).astype(jnp.float32) / exact
        ratio = jnp.log(times) / jnp.log(max_distance / exact)
        large = exact + (ratio * (buckets - exact)).astype(jnp.int32)
        bucket = jnp.where(distance < exact, distance, jnp.minimum(large, buckets - 1))
        first: Any = 0
        if bidirectional:
            first = jnp.where(kv_idx > q_idx, buckets, 0)
        return score + table[bucket + first, h].astype(score.dtype)

    if bidirectional:
        return {"score_mod": score_mod}
    return {"mask": CausalMask(), "score_mod": score_mod}


class RelativeBias(nnx.Module):
    """The bias of `t5_bias` as a module with the table as a parameter, for the argument
    `score_mod` of a module or a call. Raffel et al., T5, arXiv:1910.10683, 2.1.

    T5 shares one table between all layers of its encoder, and another between those of
    its decoder: pass the same `RelativeBias` to the layers. Causality is not part of
    it: pass `is_causal=True` in decoders.

    The parameter is `table` [buckets, N]. It starts with zeros.

    Args:
      num_heads: Number of query heads N.
      num_buckets: Number of buckets of distances.
      max_distance: The last bucket holds all distances from here on.
      bidirectional: Queries also attend to keys after them, which get the second half
        of the buckets; for encoders.
      param_dtype: Dtype of the table.

    Raises:
      ValueError: If a number is too small; in the attention, if it has a different
        number of heads.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> bias = flax_mha.recipes.RelativeBias(num_heads=8)
      >>> attention = flax_mha.MultiHeadAttention(
      ...     8, 64, scale=1.0, score_mod=bias, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> attention(jnp.ones((2, 10, 64)), is_causal=True).shape
      (2, 10, 64)
      >>> nnx.state(attention, nnx.Param)["score_mod"]["table"].shape
      (32, 8)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ) -> None:
        int_at_least("num_heads", num_heads, 1)
        int_at_least("num_buckets", num_buckets, 4 if bidirectional else 2)
        table = jnp.zeros((num_buckets, num_heads), param_dtype)
        t5_bias(table, max_distance, bidirectional)  # checks max_distance
        self.table = nnx.Param(table)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    @property
    def made_for(self) -> dict[str, int]:
        """The sizes that calls must have; see `recipes.masks.made_for`."""
        return {"h": self.table.shape[-1]}

    def __call__(
        self, score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        """Returns the score plus the bias of the distance between query and key."""
        bias = t5_bias(self.table[...], self.max_distance, self.bidirectional)
        return bias["score_mod"](score, b, h, q_idx, kv_idx)


def soft_cap(cap: float = 50.0) -> dict[str, Any]:
    """Caps scores s to cap * tanh(s / cap); causal. Gemma 2, arXiv:2408.00118, section
    2.

    This recipe is for `dot_product_attention`. For a module, pass `logits_soft_cap=cap`
    to the constructor, and `causal()` to the call.
    """
    return {"mask": CausalMask(), "logits_soft_cap": cap}


def attention_sinks(sinks: Float[Array, " N"], width: int = 127) -> dict[str, Any]:
    """Adds a learned logit per head to the softmax's denominator. Queries also attend
    to at most `width` earlier tokens. gpt-oss, arXiv:2508.10925.

    This recipe is for `dot_product_attention`. For a module, pass `sinks=True` and
    `local_window_size=(width, 0)` to the constructor; the sinks are then a parameter of
    the module.
    """
    return {"mask": LocalMask(width, 0), "sinks": sinks}


def forgetting(log_gates: Float[Array, "*B S N"]) -> dict[str, Any]:
    """Lowers scores by the forget gates of tokens after the key. Lin et al., Forgetting
    Transformer, arXiv:2503.02130.

    With c the cumulative sum of `log_gates` over tokens, in float32 at least, the score
    of query i and key j becomes

        score + c[i] - c[j], for keys up to the query.

    For decoding with a cache, pass the gates of all tokens so far, padded with zeros to
    the length of the cache.

    Args:
      log_gates: Logarithm of the forget gate of each token and head, such as
        `jax.nn.log_sigmoid(gates(x))`; finite. Receives a gradient.

    Raises:
      ValueError: If `log_gates` has no axes for tokens and heads, or no floating-point
        dtype; in the attention, if the call has different numbers of batch entries
        or heads, or more tokens.
    """
    # Check the argument.
    log_gates = _floats("log_gates", log_gates, "[batch..., tokens, heads]")

    # One batch axis, as `b` counts; sums of 16 bits would lose small gates.
    gates = log_gates.reshape(-1, *log_gates.shape[-2:])
    gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
    sums = jnp.cumsum(jnp.swapaxes(gates, 1, 2), axis=2)

    # Check that the attention has these sizes.
    batch, heads, length = sums.shape

    @made_for(b=batch, h=heads, q_idx=length, kv_idx=length)
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        # c[i] - c[j], the sum over the tokens j + 1 to i.
        difference = sums[b, h, q_idx] - sums[b, h, kv_idx]
        return score + difference.astype(score.dtype)

    return {"mask": CausalMask(), "score_mod": score_mod}


def relative_terms(
    terms: Float[Array, "*B N T W"],
    query_offset: int | Int[Array, "*B"] = 0,
    *,
    clip: bool = False,
    bidirectional: bool = False,
) -> dict[str, Any]:
    """Adds a term that each query computes for each distance. Transformer-XL,
    arXiv:1901.02860; XLNet; Inkling.

    The score of query i and key j becomes score + terms[..., i, i - j], for keys up to
    the query. In these models the terms are products of queries and embeddings of
    distances. Scores are scaled before the terms are added: multiply the terms of
    Transformer-XL and XLNet by the scale. The T x S array of all terms is never built.

    Args:
      terms: For each query, its term for the distances 0 to W - 1; receives a gradient.
      query_offset: Position of the first query, for decoding with a cache; the same as
        in the attention.
      clip: What keys at larger distances get: False adds 0 (Inkling); True adds the
        term of the largest distance (`clamp_len` in Transformer-XL and XLNet). To mask
        these keys, combine with `sliding_window(W - 1)`.
      bidirectional: Queries also attend to keys after them (XLNet): term w is for the
        distance i - j = w - W // 2, and W must be odd.

    Raises:
      ValueError: If `terms` does not have three axes or more, or a floating-point
        dtype, or if W is even with `bidirectional`; in the attention, if the call has
        different numbers of batch entries or heads, or queries after those of `terms`.
        If positions are not known while tracing, these queries get NaN instead.
    """
    # Check the terms.
    terms = _floats("terms", terms, "[batch..., heads, queries, distances]", 3)
    width = terms.shape[-1]
    if not width or (bidirectional and width % 2 == 0):
        if bidirectional:
            kind = "an odd number of distances if bidirectional"
        else:
            kind = "at least 1 distance"
        raise ValueError(f"terms must have {kind}, but got shape {terms.shape}.")

    # One batch axis, as `b` counts.
    terms = terms.reshape(-1, *terms.shape[-3:])
    rows, width = terms.shape[-2:]
    # The place of distance 0 in the terms.
    zero = width // 2 if bidirectional else 0

    # Check the offset, and that the attention has these sizes.
    batch, heads = terms.shape[:2]
    query_offset = int32("query_offset", query_offset)
    if query_offset.size not in (1, batch):
        raise ValueError(
            f"query_offset must be one int, or one for each of {batch} batch entries, "
            f"but got {query_offset.size}."
        )
    sizes = {}
    if readable(query_offset):
        sizes["q_idx"] = extremes(query_offset)[1] + rows

    first = np.reshape(query_offset, -1)

    @made_for(b=batch, h=heads, **sizes)
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        row = q_idx - (first[0] if first.size == 1 else jnp.asarray(first)[b])
        place = q_idx - kv_idx + zero
        # JAX would take another entry if an index were out of range.
        row_within = jnp.clip(row, 0, rows - 1)
        place_within = jnp.clip(place, 0, width - 1)
        term = terms[b, h, row_within, place_within].astype(score.dtype)
        if not clip:
            term = jnp.where((place >= 0) & (place < width), term, 0.0)
        return score + jnp.where((row >= 0) & (row < rows), term, jnp.nan)

    if bidirectional:
        return {"score_mod": score_mod}
    return {"mask": CausalMask(), "score_mod": score_mod}


def _floats(name: str, value: object, axes: str, rank: int = 2) -> Array:
    """Returns argument `name` as an array; raises a ValueError unless it holds floats
    and has `rank` axes or more.
    """
    array = as_array(name, value, f"an array {axes}")
    if array.ndim < rank or array.dtype.name not in DTYPES:
        raise ValueError(
            f"{name} must be floats {axes}, but got {array.dtype} {array.shape}."
        )
    return array


def differential(
    query: Float[Array, "*B T 2*N H"],
    key: Float[Array, "*B S 2*K H"],
    value: Float[Array, "*B S K Hv"],
    vectors: Float[Array, "4 H"],
    layer: int | Int[Array, ""],
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    epsilon: float = 1e-5,
    **arguments: Any,
) -> Float[Array, "*B T N Hv"]:
    """Computes the difference of two softmaxes. Ye et al., Differential Transformer,
    arXiv:2410.05258; DiffLlama.

    Unlike other recipes, this function computes the attention, by two calls of
    `dot_product_attention`. The first half of the query and key heads is for the first
    softmax, the other half for the second. With the rows q1, k1, q2, k2 of `vectors`,
    for each head

        start = 0.8 - 0.6 * exp(-0.3 * layer)
        weight = exp(q1 . k1) - exp(q2 . k2) + start
        first = softmax(scale * query1 @ key1.T) @ value
        second = softmax(scale * query2 @ key2.T) @ value
        heads = first - weight * second
        out = (1 - start) * heads / sqrt(mean(heads^2) + epsilon).

    Multiply the result by the norm's learned scale [Hv], if the model has one. The
    authors' code interleaves the heads of the two softmaxes: pass
    `jnp.concatenate([x[..., 0::2, :], x[..., 1::2, :]], axis=-2)` for query and key.

    Args:
      query: Heads of the first softmax, then of the second; rotate them first.
      key: Heads in the same order. N must be a multiple of K.
      value: Shared by both softmaxes; in the models, Hv = 2 H.
      vectors: Learned vectors, initialized from a normal distribution with a standard
        deviation of 0.1.
      layer: Index of the layer, from 0; may be traced.
      bias: As in `dot_product_attention`, but for N heads, like all other arguments;
        both softmaxes use it.
      mask: For both softmaxes.
      epsilon: Added to the mean of squares.
      **arguments: Other arguments of `dot_product_attention`, except `return_residual`
        and `return_max_score`.

    Raises:
      ValueError: If `query` or `key` does not have twice the heads, if `vectors` does
        not have four rows of the head size, or as in `dot_product_attention`.
    """
    # Check the arguments.
    known = {"implementation", *Arguments.__optional_keys__}
    for name in sorted(arguments.keys() - known):
        raise unexpected("differential", name)
    query = _floats("query", query, "[batch..., queries, 2 heads, head size]", 3)
    key = _floats("key", key, "[batch..., keys, 2 key heads, head size]", 3)
    value = _floats("value", value, "[batch..., keys, key heads, value size]", 3)
    vectors = _floats("vectors", vectors, "[4, head size]")
    if query.shape[-2] % 2 or key.shape[-2] != 2 * value.shape[-2]:
        raise ValueError(
            "query must have an even number of heads, and key twice as many as value, "
            f"but got query {query.shape}, key {key.shape}, value {value.shape}."
        )
    if vectors.shape != (4, query.shape[-1]):
        raise ValueError(
            f"vectors must have shape [4, head size] = (4, {query.shape[-1]}), but got "
            f"{vectors.shape}."
        )
    layer = int_at_least("layer", layer, 0) if is_int(layer) else int32("layer", layer)

    # The softmaxes drop different weights.
    rng = arguments.pop("dropout_rng", None)
    rngs = (None, None) if rng is None else jax.random.split(rng)
    query1, query2 = jnp.split(query, 2, axis=-2)
    key1, key2 = jnp.split(key, 2, axis=-2)
    first = dot_product_attention(
        query1, key1, value, bias, mask, dropout_rng=rngs[0], **arguments
    )
    second = dot_product_attention(
        query2, key2, value, bias, mask, dropout_rng=rngs[1], **arguments
    )

    # The difference and its norm, in float32 at least.
    dtype = jnp.promote_types(first.dtype, jnp.float32)
    q1, k1, q2, k2 = vectors.astype(dtype)
    start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, dtype))
    weight = jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + start
    heads = first.astype(dtype) - weight * second.astype(dtype)
    mean_square = jnp.mean(heads**2, axis=-1, keepdims=True)
    output = (1 - start) * heads * jax.lax.rsqrt(mean_square + epsilon)
    return output.astype(first.dtype)


def combine(*recipes: dict[str, Any]) -> dict[str, Any]:
    """Combines several recipes, dicts of arguments, into one.

    A query attends to the keys that no mask hides. Score functions are applied in the
    order of the recipes, each to the previous result. A soft cap is applied before all
    score functions, whatever the order. Arguments that are None are ignored.

    Raises:
      ValueError: If an argument that cannot be combined, such as `logits_soft_cap`, is
        in two recipes, or if score functions are made for different numbers of heads or
        batch entries.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.combine(recipes.sliding_window(3), recipes.dilated(2))["mask"])
      █·······
      ·█······
      █·█·····
      ·█·█····
      ··█·█···
      ···█·█··
      ····█·█·
      ·····█·█
    """
    given: dict[str, list[Any]] = {}
    for recipe in recipes:
        if not isinstance(recipe, dict):
            raise ValueError(
                f'a recipe must be a dict of arguments, such as {{"mask": mask}}, but '
                f"got {recipe!r}."
            )
        for name, value in recipe.items():
            if value is not None:
                given.setdefault(name, []).append(value)
    combined = {}
    for name, values in given.items():
        if name == "mask":
            combined[name] = functools.reduce(operator.and_, values)
        elif len(values) == 1:
            combined[name] = values[0]
        elif name == "score_mod":
            sizes = _common_sizes(values)
            combined[name] = made_for(**sizes)(_in_order(values))
        else:
            raise ValueError(
                f"{name} must be set by only one recipe, but {len(values)} set it."
            )
    return combined


def _common_sizes(score_mods: list[Any]) -> dict[str, int]:
    """Returns the sizes for which all functions are made (see `made_for`); raises a
    ValueError if b or h differ.
    """
    common: dict[str, int] = {}
    for one in score_mods:
        sizes = getattr(one, "made_for", {})
        for name, size in sizes.items():
            # The shorter of two lengths limits both; numbers must be equal.
            is_number = name in ("b", "h")
            if is_number and common.get(name, size) != size:
                raise ValueError(
                    f"recipes must be created for the same number of {COUNTED[name]}, "
                    f"but got {common[name]} and {size}."
                )
            common[name] = min(common.get(name, size), size)
    return common


def _in_order(score_mods: list[Any]) -> Any:
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        for one in score_mods:
            score = one(score, b, h, q_idx, kv_idx)
        return score

    return score_mod
