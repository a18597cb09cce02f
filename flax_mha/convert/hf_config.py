"""`describe`: what a Hugging Face config says of one attention layer, as arguments of `MultiHeadAttention`.

Values that a config leaves out are the defaults of its `model_type`, as in Transformers' configuration classes.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flax_mha.convert.layouts import MODEL_TYPE
from flax_mha.core.integers import is_int
from flax_mha.rope import RoPE


class Model(NamedTuple):
    """How the configs of one `model_type` describe an attention."""

    defaults: dict[str, Any]  # what the config means where it says nothing
    bias: str | bool = True  # the key that says whether projections have biases, or the answer
    rotary: bool = False
    norm: Literal[False, "rms_norm", "rms_norm_all_heads"] = False  # of queries and keys
    sinks: bool = False
    sliding: Literal["none", "all", "listed", "last"] = "none"  # which layers have a window; "last": after some


LAYER_TYPES = ("full_attention", "sliding_attention")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
FEATURES = ("hidden_size", "d_model", "n_embd", "dim")
MEANS_NONE = ("sliding_window", "attn_logit_softcapping", "num_key_value_heads")  # if null, other than if it is absent
LLAMA = Model({}, "attention_bias", rotary=True)
ENCODER = Model({})
GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
GEMMA |= {"hidden_size": 2304, "sliding_window": 4096}
GEMMA_3 = Model(GEMMA | {"sliding_window_pattern": 6}, "attention_bias", True, norm="rms_norm", sliding="listed")
QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GPT_OSS: dict[str, Any] = {"attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}
GPT_OSS |= {"num_key_value_heads": 8, "rope_theta": 150_000.0}
GPT_OSS["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS["rope_scaling"] |= {"original_max_position_embeddings": 4096}
MODELS: dict[str, Model] = {
    "llama": LLAMA,
    "mistral": Model({"num_key_value_heads": 8, "sliding_window": 4096}, False, True, sliding="all"),
    "qwen2": Model(QWEN, True, True, sliding="last"),
    "qwen3": Model(QWEN | {"head_dim": 128}, "attention_bias", True, norm="rms_norm", sliding="last"),
    "gemma": Model({"head_dim": 256}, "attention_bias", True),
    "gemma2": Model(
        GEMMA | {"attn_logit_softcapping": 50.0, "sliding_window_pattern": 2}, "attention_bias", True, sliding="listed"
    ),
    "gemma3_text": GEMMA_3,
    "gpt_oss": Model(GPT_OSS, "attention_bias", True, sinks=True, sliding="listed"),
    "olmo2": Model({"rms_norm_eps": 1e-5}, "attention_bias", True, norm="rms_norm_all_heads"),
    "phi3": Model({}, False, True, sliding="all"),
    "phi": Model({}, True, True),
    "gpt_neox": Model({"attention_bias": True}, "attention_bias", True),
    "falcon": Model({"bias": False, "rope_theta": 10_000.0}, "bias", True),
    "bloom": ENCODER,
    "gpt2": ENCODER,
    "gptj": Model({}, False, True),
    "t5": Model({"d_kv": 64}, False),
    "vit": Model({"qkv_bias": True}),
    "dinov2": Model({"qkv_bias": True}),
    "opt": Model({"enable_bias": True}, "enable_bias"),
    **dict.fromkeys(["bert", "roberta", "distilbert", "bart", "whisper", "wav2vec2", "clip", "siglip"], ENCODER),
    **dict.fromkeys(["clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model"], ENCODER),
}


def describe(config: Mapping[str, Any], layer: int = 0, *, max_length: int | None = None) -> dict[str, Any]:
    """Turns a Hugging Face config into the arguments of `MultiHeadAttention` for one layer, less `rngs` and `decode`.

    They are `num_heads`, `in_features`, `qkv_features`, `num_kv_heads`, `use_bias`, `rope`, `scale`,
    `local_window_size`, `logits_soft_cap`, `sinks`, `normalize_qk`, `qk_norm_epsilon`, and `kernel_metadata`, by which
    `load_torch` knows the model. `flax.linen` takes all but `in_features` and `kernel_metadata`.

    Some things belong to calls: decoders want `is_causal=True`, Bloom `recipes.alibi(num_heads)`, and every layer of T5
    the relative bias of its first, `score_mod=recipes.t5_bias(table)["score_mod"]` in the decoder.

    Args:
        config: the dict of a `config.json`, or `config.to_dict()`. Of a multimodal model its `text_config` counts; for
            CLIP and SigLIP, pass `config["text_config"]` or `config["vision_config"]`.
        layer: which layer, from 0: windows and rotary positions may differ.
        max_length: the longest sequence, prompt and generated tokens together; see `RoPE.from_config`, which needs it
            for LongRoPE only.

    Raises:
        ValueError: if `config` is no dict, of a model that is not known, lacks a size, or asks for what the module
            cannot compute.

    Example:
        >>> from flax_mha import convert
        >>> config = {"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 8, "sliding_window": 16}
        >>> arguments = convert.describe(config | {"rope_theta": 10000.0})
        >>> arguments["num_kv_heads"], arguments["local_window_size"], arguments["use_bias"]
        (8, (15, 0), False)
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict, but got {type(config).__name__}; use config.to_dict().")
    config = _attention_config(config)
    model_type = config.get("model_type")
    if model_type not in MODELS:
        raise ValueError(f"model_type must be one of {', '.join(MODELS)}, but got {model_type!r}.")
    model = MODELS[model_type]
    given = {key: value for key, value in config.items() if value is not None or key in MEANS_NONE}
    values = model.defaults | given
    _check_layer(layer, values)
    _check_supported(model_type, values)
    layer_type = _layer_type(model, values, layer)
    heads, features = _size(values, HEADS), _size(values, FEATURES)
    head_size = values.get("head_dim") or values.get("d_kv") or features // heads
    return {
        "num_heads": heads,
        "in_features": features,
        "qkv_features": heads * head_size,
        "num_kv_heads": _kv_heads(model_type, values, heads),
        "use_bias": bool(values.get(model.bias, False)) if isinstance(model.bias, str) else model.bias,
        "rope": _rope(model, config, layer_type, max_length),
        "scale": _scale(model_type, values, layer, head_size),
        "local_window_size": _window(values, layer_type),
        "logits_soft_cap": values.get("attn_logit_softcapping"),
        "sinks": model.sinks,
        "normalize_qk": model.norm,
        "qk_norm_epsilon": float(values.get("rms_norm_eps", 1e-6)) if model.norm else None,
        "kernel_metadata": {MODEL_TYPE: model_type},
    }


def _rope(model: Model, config: Mapping[str, Any], layer_type: str, max_length: int | None) -> RoPE | None:
    if not model.rotary:
        return None
    given = {key: value for key, value in config.items() if value is not None}
    names = ("rope_theta",) if "rope_parameters" in given else ("rope_theta", "rope_scaling")
    defaults = {key: value for key, value in model.defaults.items() if key in names}
    return RoPE.from_config(defaults | given, layer_type, max_length)


def _attention_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the config that is about one stack of layers."""
    if "text_config" in config and "vision_config" in config and config.get("model_type") in ("clip", "siglip"):
        raise ValueError(
            'config must be that of one part, but got that of both; pass config["text_config"] or '
            'config["vision_config"].'
        )
    text = config.get("text_config") or config
    return {**text, "model_type": "gemma3_text"} if config.get("model_type") == "gemma3" else text


def _check_layer(layer: Any, values: Mapping[str, Any]) -> None:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
    layers = max((values[name] for name in names if name in values), default=None)
    if not is_int(layer) or layer < 0 or (layers is not None and layer >= layers):
        counted = "" if layers is None else f" below {layers}"
        raise ValueError(f"layer must be an integer of 0 or more{counted}, but got {layer!r}.")


def _check_supported(model_type: str, values: Mapping[str, Any]) -> None:
    """What the module computes otherwise, or not at all."""
    refused = {
        "use_bidirectional_attention": (bool(values.get("use_bidirectional_attention")), "windows look one way here"),
        "qk_layernorm": (bool(values.get("qk_layernorm")), "its norms have biases, and the module's have none"),
        "position_embedding_type": (
            values.get("position_embedding_type", "absolute") != "absolute",
            "it adds relative positions to the scores; pass them as bias in every call, and 'absolute' here",
        ),
        "alibi": (model_type == "falcon" and bool(values.get("alibi")), "its scores get ALiBi before their scale"),
        "clip_qkv": (bool(values.get("clip_qkv")), "it clips queries, keys and values"),
    }
    for key, (wrong, reason) in refused.items():
        if wrong:
            raise ValueError(f"config must do without {key}={values[key]!r}: {reason}.")
    if (
        len(
            {
                values[f"{part}_attention_heads"]
                for part in ("encoder", "decoder")
                if f"{part}_attention_heads" in values
            }
        )
        > 1
    ):
        raise ValueError(
            "encoder_attention_heads and decoder_attention_heads must be equal, but differ; set both to those of the "
            "part that you want."
        )


def _size(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((values[name] for name in names if name in values), None)
    if not is_int(found) or found < 1:
        raise ValueError(f"config must hold {' or '.join(names)} as a positive integer, but got {found!r}.")
    return found


def _kv_heads(model_type: str, values: Mapping[str, Any], heads: int) -> int:
    if model_type != "falcon":
        number = values.get("num_key_value_heads")
        return heads if number is None else number
    if values.get("new_decoder_architecture", False):
        return values.get("num_kv_heads", heads)
    return 1 if values.get("multi_query", True) else heads


def _scale(model_type: str, values: Mapping[str, Any], layer: int, head_size: int) -> float | None:
    """What multiplies query . key; None means 1 / sqrt(head size)."""
    if model_type == "t5":
        return 1.0
    if "query_pre_attn_scalar" in values:
        return values["query_pre_attn_scalar"] ** -0.5
    scale = head_size**-0.5 if values.get("scale_attn_weights", True) else 1.0
    if values.get("scale_attn_by_inverse_layer_idx", False):
        return scale / (layer + 1)
    return None if values.get("scale_attn_weights", True) else scale


def _layer_type(model: Model, values: Mapping[str, Any], layer: int) -> str:
    """Either "sliding_attention" or "full_attention"."""
    if model.sliding != "none" and layer < len(values.get("layer_types", ())):
        layer_type = values["layer_types"][layer]
        if layer_type not in LAYER_TYPES:
            raise ValueError(f"layer_types must be {' or '.join(LAYER_TYPES)}, but got {layer_type!r}.")
        return layer_type
    sliding = {
        "none": False,
        "all": True,
        "listed": (layer + 1) % values.get("sliding_window_pattern", 1) != 0,
        "last": values.get("use_sliding_window", False) and layer >= values.get("max_window_layers", 0),
    }[model.sliding]
    return "sliding_attention" if sliding and values.get("sliding_window") is not None else "full_attention"


def _window(values: Mapping[str, Any], layer_type: str) -> tuple[int, int] | None:
    """A window of w tokens is the token itself and w - 1 before it."""
    if layer_type != "sliding_attention":
        return None
    width = values.get("sliding_window")
    return None if width is None or not values.get("use_sliding_window", True) else (width - 1, 0)
