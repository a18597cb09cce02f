"""How models of Hugging Face change scores by their positions."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha.hf_config.families import Family
from flax_mha.hf_config.layers import Values
from flax_mha.masks import FunctionMask
from flax_mha.recipes import alibi


def scores_of(family: Family, values: Values, num_heads: int, rotates: bool, is_chunked: bool) -> dict[str, Any]:
    """Returns the arguments of the attention by which a layer's scores depend on their positions."""
    changes: dict[str, Any] = {}
    rotary = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if family.alibi:
        changes["score_mod"] = alibi(num_heads)["score_mod"]
    elif values.get("attn_temperature_tuning") and not rotates:  # of Llama 4
        changes["score_mod"] = _tempered(float(values["attn_scale"]), float(values["floor_scale"]), 1.0)
    elif beta := rotary.get("llama_4_scaling_beta"):  # of Ministral 3
        length = rotary.get("original_max_position_embeddings") or values["max_position_embeddings"]
        changes["score_mod"] = _tempered(float(beta), float(length), 0.0)
    if is_chunked and values["attention_chunk_size"]:
        changes["mask"] = _chunks(values["attention_chunk_size"])
    return changes


@functools.cache
def _tempered(factor: float, length: float, first: float) -> Any:
    """Scales the queries by 1 + factor log(1 + floor((position + first) / length))."""

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        count = jnp.floor((q_idx.astype(jnp.float32) + first) / length)
        return score * (1 + factor * jnp.log1p(count)).astype(score.dtype)

    return score_mod


@functools.cache
def _chunks(size: int) -> FunctionMask:
    """A query sees the keys of its chunk."""
    return FunctionMask(lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)
