"""Score functions and masks of Hugging Face models that change scores by their positions."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha.convert.hf_config.families import Family
from flax_mha.convert.hf_config.layers import Values
from flax_mha.masks import FunctionMask
from flax_mha.recipes import alibi


def position_arguments(
    family: Family, values: Values, num_heads: int, has_rope: bool, is_chunked: bool
) -> dict[str, Any]:
    """Returns `attention_fn` arguments that depend on positions: `score_mod` (ALiBi, temperature), `mask` (chunks)."""
    changes: dict[str, Any] = {}
    rotary = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if family.alibi:
        changes["score_mod"] = alibi(num_heads)["score_mod"]
    elif values.get("attn_temperature_tuning") and not has_rope:  # Llama 4
        changes["score_mod"] = _temperature(float(values["attn_scale"]), float(values["floor_scale"]), 1.0)
    elif beta := rotary.get("llama_4_scaling_beta"):  # Ministral 3
        if "llama_4_scaling_beta" not in family.keys.get("rope_parameters", {}):
            raise ValueError(f"config must not set llama_4_scaling_beta={beta!r}: this model type does not use it.")
        names = "original_max_position_embeddings", "max_position_embeddings"
        length = rotary.get(names[0]) or values.get(names[1])
        if length is None:
            raise ValueError(
                f"config must contain {' or '.join(names)} if it sets llama_4_scaling_beta, but has neither."
            )
        changes["score_mod"] = _temperature(float(beta), float(length), 0.0)
    if is_chunked and values["attention_chunk_size"]:
        changes["mask"] = _chunk_mask(values["attention_chunk_size"])
    return changes


@functools.cache
def _temperature(factor: float, length: float, first: float) -> Any:
    """Returns a `score_mod` that multiplies scores by 1 + factor log(1 + floor((query position + first) / length))."""

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        count = jnp.floor((q_idx.astype(jnp.float32) + first) / length)
        return score * (1 + factor * jnp.log1p(count)).astype(score.dtype)

    return score_mod


@functools.cache
def _chunk_mask(size: int) -> FunctionMask:
    """Returns a mask by which queries see the keys of their own chunk of `size` positions."""
    return FunctionMask(lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)
