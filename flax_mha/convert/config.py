"""`describe`: turns the attention of one layer in a Hugging Face config into arguments of `MultiHeadAttention`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha._src.core.validation import is_int
from flax_mha._src.modules.attention_fn import attention_fn
from flax_mha._src.modules.layers import Gate, Norm
from flax_mha.convert.hf_config.config import ALIASES, LAYERS, read_config
from flax_mha.convert.hf_config.families import FAMILIES, Family
from flax_mha.convert.hf_config.layers import CHUNKED, FULL, SLIDING, Values, entry, of_layer, reuses_keys
from flax_mha.convert.latent import indexer_of, latent_options, latent_sizes
from flax_mha.convert.layouts import MODEL_TYPE
from flax_mha.convert.process_heads import ClipHeads, ScaleValues
from flax_mha.masks import FunctionMask
from flax_mha.recipes import alibi
from flax_mha.rope import RoPE

UNSUPPORTED = (  # config keys that `describe` refuses if they are set; the model type, empty for all; and the reason
    ("use_bidirectional_attention", "", "sliding windows must be one-sided"),
    ("alibi", "falcon", "it adds ALiBi before scaling the scores"),
    ("qk_layernorm", "stablelm", "its norms have separate weights for each head"),
    ("rotary_value", "", "it rotates values"),
    ("use_shared_attention_adapter", "", "layers add adapters to shared weights"),
)


def describe(config: Mapping[str, Any], layer: int = 0, *, max_length: int | None = None) -> dict[str, Any]:
    """Returns the `MultiHeadAttention` arguments for one layer of a Hugging Face model, except `rngs` and `decode`.

    The arguments are `num_heads`, `in_features`, `qkv_features`, `out_features`, `num_kv_heads`, `use_bias`, `rope`,
    `scale`, `local_window_size`, `logits_soft_cap`, `sinks`, `gate`, `normalize_qk`, and `kernel_metadata`, which
    `load_torch` uses to identify the model. Some models also need an `attention_fn` that changes scores by position
    (ALiBi, the temperature of Llama 4), `out_norm` (BitNet), `value_dim` (MiMo-V2), or `process_heads`: `ClipHeads`
    (OLMo) or `ScaleValues` (MiMo-V2). Gemma 3n and 4 also need `value_norm`, `share_kv` and `reuse_kv`: a layer with
    `reuse_kv=True` takes the `kv` of the last layer that has `reuse_kv=False` and the same `local_window_size`. For
    Gemma 4's assistants, it is a layer of the target model, and `positions` is the position after the target's last
    token. Modules for `flax.linen` take all arguments except `in_features` and `kernel_metadata`. For latent attention
    (DeepSeek's `kv_lora_rank`), the arguments are for `MultiHeadLatentAttention`, which is only for `flax.nnx`.

    Calls need two more arguments, which `from_hf` sets: `is_causal=True` in decoders, and in every layer of T5,
    for the bias table of the first layer, `score_mod=recipes.t5_bias(table)["score_mod"]`.

    Args:
      config: The dict of a `config.json`, or `config.to_dict()`. For a multimodal model, its `text_config` is used; for
        CLIP and SigLIP, pass `config["text_config"]` or `config["vision_config"]`, and for BLT the config of one of its
        four transformers.
      layer: The index of the layer, from 0; windows and rotary positions may differ between layers. Layer i of
        LongCat-Flash has two attentions, 2 i and 2 i + 1.
      max_length: The length of the longest sequence, prompt plus generated tokens; only needed for LongRoPE, see
        `RoPE.from_config`.

    Raises:
      ValueError: If `config` is not a dict, if the model is unknown or not supported by the module, if a size is
        missing, or if the layer has no attention.

    Example:
      >>> from flax_mha import convert
      >>> config = {"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 8, "sliding_window": 16}
      >>> arguments = convert.describe(config | {"rope_theta": 10000.0})
      >>> arguments["num_kv_heads"], arguments["local_window_size"], arguments["use_bias"]
      (8, (15, None), False)
    """
    family, values = _read(config, layer)
    kind = _layer_type(family, values, layer)
    values, rope = of_layer(values, layer, kind), None
    if "rope_theta" in family.keys and family.rotates(values, layer, kind):
        rope = RoPE.from_config(config, SLIDING if kind == SLIDING else FULL, max_length)
        if values.get("layer_rope_theta"):
            rope = dataclasses.replace(rope, base=entry(values, "layer_rope_theta", layer))
    described = latent_sizes(values) | indexer_of(values) if family.latent else _sizes(values)
    use_bias = family.bias if isinstance(family.bias, bool) else any(values.get(key) for key in family.bias.split())
    described |= {"use_bias": use_bias, "rope": rope}
    described["kernel_metadata"] = {MODEL_TYPE: values["model_type"]}
    if family.latent:
        described |= latent_options(family)
    else:
        described |= {
            "scale": family.scale or _scale(values, layer, described["qkv_features"] // described["num_heads"]),
            "local_window_size": _window(values) if kind == SLIDING else None,
            "logits_soft_cap": values.get("attn_logit_softcapping"),
            "sinks": family.sinks in (True, kind),
        }
        described |= {"gate": _gate(family, values)} | _norms(family, values, described)
    if family.value_norm:
        reuses = family.borrows_kv or reuses_keys(values, layer, family.layer_type)
        shares = kind == FULL and not reuses and bool(values.get("attention_k_eq_v"))
        norm = None if reuses else Norm("rms", scale=None, epsilon=_epsilon(values))
        described |= {"value_norm": norm, "share_kv": shares, "reuse_kv": reuses}
    if changes := _position_arguments(family, values, described["num_heads"], rope is not None, kind == CHUNKED):
        described["attention_fn"] = attention_with(**changes)
    if values.get("clip_qkv"):
        described["process_heads"] = ClipHeads(values["clip_qkv"])
    if values.get("attention_value_scale"):
        described["process_heads"] = ScaleValues(values["attention_value_scale"])
    if values.get("v_head_dim") and not family.latent:
        described["value_dim"] = values["v_head_dim"]
    return described


def _norms(family: Family, values: Values, described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that describe norms of queries, keys and the attention's output."""
    epsilon = _epsilon(values)
    norm = family.norm if values.get(family.norm_key, True) else None
    if norm is not None and norm.after_rope and described["rope"] is None:
        norm = None
    found: dict[str, Any] = {"normalize_qk": False}
    if norm is not None:
        found["normalize_qk"] = dataclasses.replace(norm, epsilon=epsilon)
    if family.out_norm:
        found["out_norm"] = Norm("rms", scale="heads", over="all_heads", epsilon=epsilon)
    return found


def _epsilon(values: Values) -> float:
    return float(values.get("rms_norm_eps", 1e-6))


def _gate(family: Family, values: Values) -> bool | Gate:
    """Returns the argument `gate`: False if the config switches it off, True for the default."""
    kind = values.get(family.gate_key, True)
    if family.gate is None or not kind:
        return False
    gate = family.gate
    if isinstance(kind, str):  # Laguna names it
        gate = dataclasses.replace(gate, per="head" if kind == "per-head" else "feature")
    return True if gate == Gate() else gate


@functools.cache
def attention_with(**arguments: Any) -> Any:
    """Returns `attention_fn` with these arguments preset; equal arguments give one object, so `jit` reuses code."""
    return functools.partial(attention_fn, **arguments)


def _read(config: Any, layer: Any) -> tuple[Family, Values]:
    """Returns the family and the values, with defaults, of a config; raises a ValueError if it is not supported."""
    family, given = read_config(config)
    model_type = given.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be in convert.hf_config.families.FAMILIES, but got {model_type!r}; if the module can "
            "compute this attention, pass its arguments explicitly."
        )
    if family.refused:
        raise ValueError(f"model_type {model_type!r} is not supported: {family.refused}.")
    values = family.keys | _unfolded(family, given)
    if "local_attention" in values and values["sliding_window"] is None:  # ModernBERT counts both sides
        values["sliding_window"] = (values["local_attention"] or 0) // 2
    _check_layer(layer, values)
    _check_supported(family, values)
    return family, values


def _unfolded(family: Family, given: Values) -> Values:
    """Returns the values of a config whose layers or windows are counted in another way than those of other models."""
    if family.attentions > 1 and "num_layers" in given:
        return given | {"num_hidden_layers": family.attentions * given["num_layers"]}
    if "num_layers_per_stack" in given:
        return {key: value for key, value in given.items() if key != "num_hidden_layers"}
    if given.get("sliding_window_size"):  # without the token itself
        return given | {"sliding_window": given["sliding_window_size"] + 1}
    return given


def _check_layer(layer: Any, values: Values) -> None:
    found = {name: values[name] for name in LAYERS if values.get(name) is not None}
    largest = max(found, key=lambda name: found[name], default="")
    if not is_int(layer) or layer < 0 or (found and layer >= found[largest]):
        counted = f" and < {largest} ({found[largest]})" if found else ""
        raise ValueError(f"layer must be an integer >= 0{counted}, but got {layer!r}.")


def _check_supported(family: Family, values: Values) -> None:
    reasons = {key: reason for key, name, reason in UNSUPPORTED if name in ("", values["model_type"])}
    if reason := _position_reason(family, values):
        reasons["position_embedding_type"] = reason
    if values.get("attention_type") == "block_sparse":
        reasons["attention_type"] = "queries attend to randomly chosen blocks; set 'original_full'"
    for key, reason in reasons.items():
        if values.get(key) and values[key] != "vision":  # "vision": only tokens of images attend to later ones
            raise ValueError(f"{key}={values[key]!r} in config is not supported: {reason}.")
    if values["model_type"] == "gpt_bigcode" and not values["multi_query"]:
        raise ValueError("config must have multi_query=True, but got False, which stacks weights in a different order.")
    if not values.get("alibi", True) and family.alibi:
        raise ValueError("attn_config must have alibi=True, but got False; Transformers adds ALiBi regardless.")
    names = ("encoder_attention_heads", "decoder_attention_heads")
    if len({values[name] for name in names if name in values}) > 1:
        raise ValueError(
            f"{' and '.join(names)} must be equal, but they differ; set both to the value for the part (encoder or "
            "decoder) that you want."
        )


def _position_reason(family: Family, values: Values) -> str:
    """Returns why a `position_embedding_type` is not supported; empty if it is."""
    kind = values.get("position_embedding_type", "absolute")
    # Embeddings that are added to the input do not change the attention.
    supported: set[str | None] = {"absolute", "nope"}
    if "rope_theta" in family.keys:
        supported = {"absolute", "rope", "sans_pos"}
    if family.keys.get("rope_pairs"):
        supported.add("rope_gptj")
    if "position_embedding_type" in family.keys:
        supported |= {None, "nope"}
    if kind in supported:
        return ""
    if str(kind).startswith("relative"):
        return "it adds relative positions to the scores; set 'absolute', and pass the positions as bias in every call"
    return (
        f"Transformers ignores it for model_type {values['model_type']!r}; remove it if the weights are for the "
        "positions that Transformers uses"
    )


def _layer_type(family: Family, values: Values, layer: int) -> str:
    """Returns the type of the layer, such as `FULL` or `SLIDING`; raises a ValueError if it has no self-attention."""
    kind = family.layer_type(values, layer)
    if kind not in (FULL, SLIDING) and (kind != CHUNKED or "attention_chunk_size" not in values):
        raise ValueError(
            f"layer must have type {FULL} or {SLIDING}, but layer {layer} of {values['model_type']} has type {kind!r}."
        )
    return kind


def _size(values: Values, name: str) -> int:
    found = values.get(name)
    if found is None:
        names = " or ".join((name, *ALIASES[name]))
        raise ValueError(f"config must set {names} to a positive integer, but got None.")
    return found


def _sizes(values: Values) -> dict[str, Any]:
    """Returns the arguments of the module that are sizes: `num_heads`, `num_kv_heads` and numbers of features."""
    heads, hidden = _size(values, "num_attention_heads"), _size(values, "hidden_size")
    features = hidden
    if "attention_hidden_size" in values:  # Zamba: the input of its attention includes the embeddings
        features = values["attention_hidden_size"] or 2 * hidden
    head_size = values.get("head_dim") or features // heads
    if head_size < 1:
        raise ValueError(
            f"hidden_size must be at least num_attention_heads ({heads}) if head_dim is not given, but got {hidden}."
        )
    return {
        "num_heads": heads,
        "in_features": features,
        "qkv_features": heads * head_size,
        "out_features": hidden,
        "num_kv_heads": _kv_heads(values, heads),
    }


def _kv_heads(values: Values, heads: int) -> int:
    if values.get("multi_query") and not values.get("new_decoder_architecture"):  # Falcon and GPT-BigCode
        return 1
    name = "num_kv_heads" if "num_kv_heads" in values else "num_key_value_heads"
    number, is_old_falcon = values.get(name), not values.get("new_decoder_architecture", True)
    if number is None or is_old_falcon:
        return heads
    if heads % number:
        raise ValueError(f"{name} must divide num_attention_heads ({heads}), but got {number}.")
    return number


def _scale(values: Values, layer: int, head_size: int) -> float | None:
    """Returns the factor that scores are multiplied by; None means 1 / sqrt(head size)."""
    for key in ("attention_multiplier", "softmax_scale"):
        if values.get(key) is not None:
            return values[key]
    if "query_pre_attn_scalar" in values:
        return values["query_pre_attn_scalar"] ** -0.5
    if "attention_hidden_size" in values:
        return (head_size / 2) ** -0.5
    is_scaled, by_layer = values.get("scale_attn_weights", True), values.get("scale_attn_by_inverse_layer_idx", False)
    factor = values.get("key_multiplier", 1.0) / (layer + 1 if by_layer else 1)
    return None if is_scaled and factor == 1 else (head_size**-0.5 if is_scaled else 1.0) * factor


def _window(values: Values) -> tuple[int, None] | None:
    """Returns `local_window_size` (left, None), or None; `sliding_window` in a config also counts the token itself.

    As in Transformers, the window limits the past only: `is_causal` hides later tokens, except those of the same image.
    """
    width = values.get("sliding_window")
    if width is None or not values.get("use_sliding_window", True):
        return None
    if width < 1:
        raise ValueError(
            f"sliding_window must be a positive integer, but got {width!r}; set it to null for a model without windows."
        )
    return width - 1, None


def _position_arguments(
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
    """Returns a `score_mod`, Llama 4's temperature: score * (1 + factor log(1 + floor((q_idx + first) / length)))."""

    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        count = jnp.floor((q_idx.astype(jnp.float32) + first) / length)
        return score * (1 + factor * jnp.log1p(count)).astype(score.dtype)

    return score_mod


@functools.cache
def _chunk_mask(size: int) -> FunctionMask:
    """Returns a mask that lets queries attend to the keys in their own chunk of `size` positions."""
    return FunctionMask(lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)
