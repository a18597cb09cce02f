"""`describe`: the attention of one layer of a Hugging Face model as arguments of `MultiHeadAttention`."""

from collections.abc import Mapping
from typing import Any

from flax_mha.convert.layouts import MODEL_TYPE
from flax_mha.core.integers import is_int
from flax_mha.hf_config.families import ALIASES, DESCRIBED, LAYER_TYPES, Family, Values, read
from flax_mha.rope import RoPE


def describe(config: Mapping[str, Any], layer: int = 0, *, max_length: int | None = None) -> dict[str, Any]:
    """Turns a Hugging Face config into the arguments of `MultiHeadAttention` for one layer, less `rngs` and `decode`.

    They are `num_heads`, `in_features`, `qkv_features`, `num_kv_heads`, `use_bias`, `rope`, `scale`,
    `local_window_size`, `logits_soft_cap`, `sinks`, `normalize_qk`, `qk_norm_epsilon`, and `kernel_metadata`, by which
    `load_torch` knows the model. `flax.linen` takes all but `in_features` and `kernel_metadata`.

    Some things belong to calls: decoders want `is_causal=True`, Bloom `recipes.alibi(num_heads)`, and every layer of T5
    the relative bias of its first, `score_mod=recipes.t5_bias(table)["score_mod"]` in the decoder.

    Args:
      config: The dict of a `config.json`, or `config.to_dict()`. Of a multimodal model its `text_config` counts; for
        CLIP and SigLIP, pass `config["text_config"]` or `config["vision_config"]`.
      layer: The layer, from 0: windows and rotary positions may differ.
      max_length: The longest sequence, prompt and generated tokens together; see `RoPE.from_config`, which needs it
        for LongRoPE only.

    Raises:
      ValueError: If `config` is no dict, of a model that is not known, lacks a size, or asks for what the module
        cannot compute.

    Example:
      >>> from flax_mha import convert
      >>> config = {"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 8, "sliding_window": 16}
      >>> arguments = convert.describe(config | {"rope_theta": 10000.0})
      >>> arguments["num_kv_heads"], arguments["local_window_size"], arguments["use_bias"]
      (8, (15, 0), False)
    """
    family, given = read(config)
    if family.bias is None:
        raise ValueError(f"model_type must be one of {', '.join(DESCRIBED)}, but got {given.get('model_type')!r}.")
    values = family.defaults | given
    _check_layer(layer, values)
    _check_supported(values)
    layer_type = _layer_type(family, values, layer)
    heads, features = _size(values, "num_attention_heads"), _size(values, "hidden_size")
    head_size = values.get("head_dim") or features // heads
    return {
        "num_heads": heads,
        "in_features": features,
        "qkv_features": heads * head_size,
        "num_kv_heads": _kv_heads(values, heads),
        "use_bias": bool(values.get(family.bias, False)) if isinstance(family.bias, str) else family.bias,
        "rope": RoPE.from_config(config, layer_type, max_length) if "rope_theta" in family.defaults else None,
        "scale": _scale(values, layer, head_size),
        "local_window_size": _window(values) if layer_type == "sliding_attention" else None,
        "logits_soft_cap": values.get("attn_logit_softcapping"),
        "sinks": family.sinks,
        "normalize_qk": family.norm,
        "qk_norm_epsilon": float(values.get("rms_norm_eps", 1e-6)) if family.norm else None,
        "kernel_metadata": {MODEL_TYPE: given["model_type"]},
    }


def _check_layer(layer: Any, values: Values) -> None:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
    layers = max((values[name] for name in names if name in values), default=None)
    if not is_int(layer) or layer < 0 or (layers is not None and layer >= layers):
        counted = "" if layers is None else f" below {layers}"
        raise ValueError(f"layer must be an integer of 0 or more{counted}, but got {layer!r}.")


def _check_supported(values: Values) -> None:
    reasons = {
        "use_bidirectional_attention": "windows look one way here",
        "qk_layernorm": "its norms have biases, and the module's have none",
        "clip_qkv": "it clips queries, keys and values",
    }
    if values["model_type"] == "falcon":
        reasons["alibi"] = "its scores get ALiBi before their scale"
    if values.get("position_embedding_type", "absolute") != "absolute":
        reasons["position_embedding_type"] = (
            "it adds relative positions to the scores; pass them as bias in every call, and 'absolute' here"
        )
    for key, reason in reasons.items():
        if values.get(key):
            raise ValueError(f"config must do without {key}={values[key]!r}: {reason}.")
    names = ("encoder_attention_heads", "decoder_attention_heads")
    if len({values[name] for name in names if name in values}) > 1:
        raise ValueError(
            f"{' and '.join(names)} must be equal, but differ; set both to those of the part that you want."
        )


def _size(values: Values, name: str) -> int:
    found = values.get(name)
    if not is_int(found) or found < 1:
        names = " or ".join((name, *ALIASES[name]))
        raise ValueError(f"config must hold {names} as a positive integer, but got {found!r}.")
    return found


def _kv_heads(values: Values, heads: int) -> int:
    if values["model_type"] == "falcon" and not values["new_decoder_architecture"]:
        return 1 if values["multi_query"] else heads
    if values["model_type"] == "falcon":
        return values.get("num_kv_heads", heads)
    number = values.get("num_key_value_heads")
    return heads if number is None else number


def _scale(values: Values, layer: int, head_size: int) -> float | None:
    """Returns the factor of query . key; None means 1 / sqrt(head size)."""
    if "query_pre_attn_scalar" in values:
        return values["query_pre_attn_scalar"] ** -0.5
    is_scaled, by_layer = values.get("scale_attn_weights", True), values.get("scale_attn_by_inverse_layer_idx", False)
    if is_scaled and not by_layer:
        return None
    return (head_size**-0.5 if is_scaled else 1.0) / (layer + 1 if by_layer else 1)


def _layer_type(family: Family, values: Values, layer: int) -> str:
    if family.sliding != "none" and layer < len(values.get("layer_types", ())):
        layer_type = values["layer_types"][layer]
        if layer_type not in LAYER_TYPES:
            raise ValueError(f"layer_types must be {' or '.join(LAYER_TYPES)}, but got {layer_type!r}.")
        return layer_type
    is_sliding = {
        "none": False,
        "all": True,
        "listed": (layer + 1) % values.get("sliding_window_pattern", 1) != 0,
        "last": values.get("use_sliding_window", False) and layer >= values.get("max_window_layers", 0),
    }[family.sliding]
    return "sliding_attention" if is_sliding and values.get("sliding_window") is not None else "full_attention"


def _window(values: Values) -> tuple[int, int] | None:
    """Returns the window: a token itself and those before it, `sliding_window` in all."""
    width = values.get("sliding_window")
    return None if width is None or not values.get("use_sliding_window", True) else (width - 1, 0)
