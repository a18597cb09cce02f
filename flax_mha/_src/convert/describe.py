"""`describe`: turns the attention of one layer in a Hugging Face config into arguments
of a module.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from flax_mha._src.convert.families import FAMILIES, Family
from flax_mha._src.convert.layer_rules import (
    CHUNKED,
    FULL,
    SLIDING,
    Values,
    entry,
    of_layer,
    reuses_keys,
)
from flax_mha._src.convert.layouts import MODEL_TYPE
from flax_mha._src.convert.process_heads import ClipHeads, ScaleValues
from flax_mha._src.convert.read_config import ALIASES, LAYERS, Config, read_config
from flax_mha._src.convert.rope import (
    ORIGINAL,
    head_size_of,
    rope_arguments,
    rotary_parameters,
)
from flax_mha._src.core.validation import is_int
from flax_mha._src.masks import FunctionMask
from flax_mha._src.modules.attention_fn import attention_fn
from flax_mha._src.modules.indexer import Indexer
from flax_mha._src.modules.layers import Gate, Norm
from flax_mha._src.modules.options import LATENT_SIZES
from flax_mha._src.recipes.scores import alibi
from flax_mha._src.rope import RoPE

# Config keys that `describe` refuses if they are set; the model type, empty for all;
# and the reason.
UNSUPPORTED = (
    ("use_bidirectional_attention", "", "sliding windows must be one-sided"),
    ("alibi", "falcon", "it adds ALiBi before scaling the scores"),
    ("qk_layernorm", "stablelm", "its norms have separate weights for each head"),
    ("rotary_value", "", "it rotates values"),
    ("use_shared_attention_adapter", "", "layers add adapters to shared weights"),
)


def describe(
    config: Mapping[str, Any], layer: int = 0, *, max_length: int | None = None
) -> dict[str, Any]:
    """Returns the `MultiHeadAttention` arguments for one layer of a Hugging Face model,
    except `rngs` and `decode`.

    The arguments are `num_heads`, `in_features`, `qkv_features`, `out_features`,
    `num_kv_heads`, `use_bias`, `rope`, `scale`, `local_window_size`, `logits_soft_cap`,
    `sinks`, `gate`, `normalize_qk`, and `kernel_metadata`, which `load_torch` uses to
    identify the model. Some models also need an `attention_fn` that changes scores by
    position (ALiBi, the temperature of Llama 4), `out_norm` (BitNet), `value_dim`
    (MiMo-V2), or `process_heads`: `ClipHeads` (OLMo) or `ScaleValues` (MiMo-V2). Gemma
    3n and 4 also need `value_norm`, `share_kv` and `reuse_kv`: a layer with
    `reuse_kv=True` takes the `kv` of the last layer that has `reuse_kv=False` and the
    same `local_window_size`. For Gemma 4's assistants, it is a layer of the target
    model, and `positions` is the position after the target's last token. Modules for
    `flax.linen` take all arguments except `in_features` and `kernel_metadata`. For
    latent attention (DeepSeek's `kv_lora_rank`), the arguments are for
    `MultiHeadLatentAttention`, which is only for `flax.nnx`.

    Two more arguments are needed, which `from_hf` sets: `is_causal=True` in calls of
    decoders, and in every layer of T5, `score_mod=recipes.RelativeBias(num_heads,
    bidirectional=is_encoder)` in the constructor (for `flax.linen`,
    `recipes.t5_bias(table)["score_mod"]` in calls).

    Args:
      config: The dict of a `config.json`, or `config.to_dict()`. For a multimodal
        model, its `text_config` is used; for CLIP and SigLIP, pass
        `config["text_config"]` or `config["vision_config"]`, and for BLT the config of
        one of its four transformers.
      layer: The index of the layer, from 0; windows and rotary positions may differ
        between layers. Layer i of LongCat-Flash has two attentions, 2 i and 2 i + 1.
      max_length: The length of the longest sequence, prompt plus generated tokens; only
        needed for LongRoPE, see `RoPE.from_config`.

    Raises:
      ValueError: If `config` is not a dict, if the model is unknown or not supported by
        the module, if a size is missing, or if the layer has no attention.

    Example:
      >>> from flax_mha import convert
      >>> config = {"model_type": "mistral", "hidden_size": 64, "sliding_window": 16}
      >>> config |= {"num_attention_heads": 8, "rope_theta": 10000.0}
      >>> arguments = convert.describe(config)
      >>> arguments["num_kv_heads"], arguments["local_window_size"]
      (8, (15, None))
      >>> arguments["use_bias"]
      False
    """
    return describe_layer(read_config(config), layer, max_length)


def describe_layer(
    config: Config, layer: int, max_length: int | None
) -> dict[str, Any]:
    """Does the work of `describe`, on a config that is already read (`Config`)."""
    family = config.family
    check_described(config)
    _check_layer(layer, config.values)
    _check_options(family, config.values)
    layer_type = _layer_type(family, config.values, layer)
    values = of_layer(config.values, layer, layer_type)

    rope = None
    if "rope_theta" in family.keys and family.rotates(values, layer, layer_type):
        # Layers of all other types rotate as those with full attention do.
        rope_type = SLIDING if layer_type == SLIDING else FULL
        rope = RoPE(**rope_arguments(config, rope_type, max_length))
        if values.get("layer_rope_theta"):
            base = entry(values, "layer_rope_theta", layer)
            rope = dataclasses.replace(rope, base=base)

    epsilon = float(values.get("rms_norm_eps", 1e-6))
    if family.latent:
        described = _latent_sizes(values) | _indexer(values, epsilon)
    else:
        described = _sizes(values)
    use_bias = family.bias
    if isinstance(use_bias, str):
        use_bias = any(values.get(key) for key in use_bias.split())
    described["use_bias"] = use_bias
    described["rope"] = rope
    described["kernel_metadata"] = {MODEL_TYPE: config.model_type}
    if family.latent:
        options = {
            "gate": _gate(family, values),
            "sinks": family.sinks,
            "query_residual": family.query_residual,
        }
        described |= {name: option for name, option in options.items() if option}
    else:
        head_size = described["qkv_features"] // described["num_heads"]
        described["scale"] = family.scale or _scale(values, layer, head_size)
        window = _window(values) if layer_type == SLIDING else None
        described["local_window_size"] = window
        described["logits_soft_cap"] = values.get("attn_logit_softcapping")
        described["sinks"] = family.sinks in (True, layer_type)
        described["gate"] = _gate(family, values)
        norm = family.norm
        is_on = values.get(family.norm_key, True)
        described["normalize_qk"] = False
        # Llama 4 normalizes what it rotates.
        if norm is not None and is_on and (rope is not None or not norm.after_rope):
            described["normalize_qk"] = dataclasses.replace(norm, epsilon=epsilon)
        if family.out_norm:
            described["out_norm"] = Norm(
                "rms", scale="heads", over="all_heads", epsilon=epsilon
            )
    if family.shares_kv:
        reuses = family.borrows_kv or reuses_keys(values, layer, family.layer_type)
        described["value_norm"] = None
        if not reuses:
            described["value_norm"] = Norm("rms", scale=None, epsilon=epsilon)
        is_shared = layer_type == FULL and bool(values.get("attention_k_eq_v"))
        described["share_kv"] = is_shared and not reuses
        described["reuse_kv"] = reuses

    # What the attention function adds to every call.
    presets: dict[str, Any] = {}
    score_mod = _score_mod(family, values, described["num_heads"], rope)
    if score_mod is not None:
        presets["score_mod"] = score_mod
    if layer_type == CHUNKED and values["attention_chunk_size"]:
        presets["mask"] = _chunk_mask(values["attention_chunk_size"])
    if presets:
        described["attention_fn"] = attention_with(**presets)

    if values.get("clip_qkv"):
        described["process_heads"] = ClipHeads(values["clip_qkv"])
    if values.get("attention_value_scale"):
        described["process_heads"] = ScaleValues(values["attention_value_scale"])
    if values.get("v_head_dim") and not family.latent:
        described["value_dim"] = values["v_head_dim"]
    return described


# Checks -------------------------------------------------------------------------------


def check_described(config: Config) -> None:
    """Raises a ValueError if the family is unknown or refused."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            "model_type must be one of those in docs/model-features.md, but got "
            f"{config.model_type!r}; if the module can compute this attention, pass "
            "its arguments explicitly."
        )
    if config.family.refused:
        raise ValueError(
            f"model_type {config.model_type!r} is not supported: "
            f"{config.family.refused}."
        )


def _check_layer(layer: Any, values: Values) -> None:
    fits = is_int(layer) and layer >= 0
    limit = ""
    numbers = {name: values[name] for name in LAYERS if values.get(name) is not None}
    if numbers:
        # An encoder and a decoder have their own numbers of layers.
        name = max(numbers, key=lambda name: numbers[name])
        fits = fits and layer < numbers[name]
        limit = f" and < {name} ({numbers[name]})"
    if not fits:
        raise ValueError(f"layer must be an integer >= 0{limit}, but got {layer!r}.")


def _check_options(family: Family, values: Values) -> None:
    """Raises a ValueError if the module does not support a value of the config."""
    model_type = values["model_type"]
    reasons = {
        key: reason for key, name, reason in UNSUPPORTED if name in ("", model_type)
    }
    reasons["position_embedding_type"] = _position_reason(family, values)
    if values.get("attention_type") == "block_sparse":
        reasons["attention_type"] = (
            "queries attend to randomly chosen blocks; set 'original_full'"
        )
    for key, reason in reasons.items():
        # With "vision", only tokens of images attend to later ones.
        if reason and values.get(key) and values[key] != "vision":
            raise ValueError(
                f"{key}={values[key]!r} in config is not supported: {reason}."
            )
    if model_type == "gpt_bigcode" and not values["multi_query"]:
        raise ValueError(
            "config must have multi_query=True, but got False, which stacks weights in "
            "a different order."
        )
    if family.alibi and not values.get("alibi", True):
        raise ValueError(
            "attn_config must have alibi=True, but got False; Transformers adds ALiBi "
            "regardless."
        )
    names = ("encoder_attention_heads", "decoder_attention_heads")
    numbers = {values[name] for name in names if name in values}
    if len(numbers) > 1:
        raise ValueError(
            f"{' and '.join(names)} must be equal, but they differ; set both to the "
            "value for the part (encoder or decoder) that you want."
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
        return (
            "it adds relative positions to the scores; set 'absolute', and pass the "
            "positions as bias in every call"
        )
    return (
        f"Transformers ignores it for model_type {values['model_type']!r}; remove it "
        "if the weights are for the positions that Transformers uses"
    )


def _layer_type(family: Family, values: Values, layer: int) -> str:
    """Returns the type of the layer, such as `FULL` or `SLIDING`; raises a ValueError
    if it has no self-attention.
    """
    layer_type = family.layer_type(values, layer)
    is_chunked = layer_type == CHUNKED and "attention_chunk_size" in values
    if layer_type not in (FULL, SLIDING) and not is_chunked:
        raise ValueError(
            f"layer must have type {FULL} or {SLIDING}, but layer {layer} of "
            f"{values['model_type']} has type {layer_type!r}."
        )
    return layer_type


# Sizes --------------------------------------------------------------------------------


def _size(values: Values, name: str) -> int:
    found = values.get(name)
    if not found:
        names = " or ".join((name, *ALIASES.get(name, ())))
        raise ValueError(
            f"config must set {names} to a positive integer, but got {found!r}."
        )
    return found


def _sizes(values: Values) -> dict[str, Any]:
    """Returns the arguments of the module that are sizes: `num_heads`, `num_kv_heads`
    and numbers of features.
    """
    heads = _size(values, "num_attention_heads")
    hidden = _size(values, "hidden_size")
    features = hidden
    if "attention_hidden_size" in values:
        # Zamba: the input of its attention includes the embeddings.
        features = values["attention_hidden_size"] or 2 * hidden
    # Both numbers that it could lack are there.
    head_size: Any = head_size_of(values | {"hidden_size": features})
    return {
        "num_heads": heads,
        "in_features": features,
        "qkv_features": heads * head_size,
        "out_features": hidden,
        "num_kv_heads": _kv_heads(values, heads),
    }


def _kv_heads(values: Values, heads: int) -> int:
    # Falcon and GPT-BigCode; only Falcon's new architecture has several key heads.
    is_new_falcon = values.get("new_decoder_architecture")
    if values.get("multi_query") and not is_new_falcon:
        return 1
    if "new_decoder_architecture" in values and not is_new_falcon:
        return heads
    name = "num_kv_heads" if "num_kv_heads" in values else "num_key_value_heads"
    number = values.get(name)
    if number is None:
        return heads
    if heads % number:
        raise ValueError(
            f"{name} must divide num_attention_heads ({heads}), but got {number}."
        )
    return number


def _latent_sizes(values: Values) -> dict[str, Any]:
    """Returns the arguments of `MultiHeadLatentAttention` that are sizes; raises a
    ValueError if one is wrong.
    """
    heads = _size(values, "num_attention_heads")
    hidden = _size(values, "hidden_size")
    if values.get("v_head_dim") is None:
        values = values | {"v_head_dim": hidden // heads}
    sizes = {name: _size(values, name) for name in LATENT_SIZES}
    size = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if values.get("num_key_value_heads") not in (None, heads):
        number = values["num_key_value_heads"]
        raise ValueError(
            f"num_key_value_heads in config must equal num_attention_heads = {heads}, "
            f"but got {number!r}."
        )
    if values.get("qk_head_dim") not in (None, size):
        raise ValueError(
            "qk_head_dim in config must equal qk_nope_head_dim + qk_rope_head_dim = "
            f"{size}, but got {values['qk_head_dim']!r}."
        )
    sizes["q_lora_rank"] = values["q_lora_rank"]
    return {"num_heads": heads, "in_features": hidden} | sizes


def _indexer(values: Values, epsilon: float) -> dict[str, Indexer]:
    """Returns the argument `indexer` of `MultiHeadLatentAttention`; {} if the model has
    no indexer.
    """
    if "index_n_heads" not in values:
        return {}
    if (
        values["q_lora_rank"] is None
        or values["index_head_dim"] < values["qk_rope_head_dim"]
    ):
        raise ValueError(
            "config must set q_lora_rank, and index_head_dim to at least "
            f"qk_rope_head_dim, but got {values['q_lora_rank']!r}, "
            f"{values['index_head_dim']} and {values['qk_rope_head_dim']}."
        )
    names = ("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave")
    indexer = Indexer(*(values[name] for name in names))
    if values.get("indexer_rope_last"):
        # HY 4 also has another epsilon.
        indexer = dataclasses.replace(indexer, rotary_last=True, norm_epsilon=epsilon)
    return {"indexer": indexer}


# Options ------------------------------------------------------------------------------


def _scale(values: Values, layer: int, head_size: int) -> float | None:
    """Returns the factor of the scores; None means 1 / sqrt(head size)."""
    for key in ("attention_multiplier", "softmax_scale"):
        if values.get(key) is not None:
            return values[key]
    if "query_pre_attn_scalar" in values:
        return values["query_pre_attn_scalar"] ** -0.5
    if "attention_hidden_size" in values:
        return (head_size / 2) ** -0.5
    factor = values.get("key_multiplier", 1.0)
    if values.get("scale_attn_by_inverse_layer_idx", False):
        factor = factor / (layer + 1)
    if not values.get("scale_attn_weights", True):
        return factor
    if factor == 1:
        return None
    return head_size**-0.5 * factor


def _window(values: Values) -> tuple[int, None] | None:
    """Returns `local_window_size` (left, None), or None; `sliding_window` in a config
    also counts the token itself.

    As in Transformers, the window limits the past only: `is_causal` hides later tokens,
    except those of the same image.
    """
    width = values.get("sliding_window")
    if width is None or not values.get("use_sliding_window", True):
        return None
    if width < 1:
        raise ValueError(
            f"sliding_window must be a positive integer, but got {width!r}; set it to "
            "null for a model without windows."
        )
    return width - 1, None


def _gate(family: Family, values: Values) -> bool | Gate:
    """Returns the argument `gate`: False if the config switches it off, True for the
    default.
    """
    kind = values.get(family.gate_key, True)
    if family.gate is None or not kind:
        return False
    gate = family.gate
    # Laguna says for what there is a gate.
    if isinstance(kind, str):
        per: Any = "head" if kind == "per-head" else "feature"
        gate = dataclasses.replace(gate, per=per)
    return True if gate == Gate() else gate


# Functions of positions ---------------------------------------------------------------


@functools.cache
def attention_with(**arguments: Any) -> Any:
    """Returns `attention_fn` with these arguments preset; equal arguments give one
    object, so `jit` reuses code.
    """
    return functools.partial(attention_fn, **arguments)


def _score_mod(
    family: Family, values: Values, num_heads: int, rope: RoPE | None
) -> Callable[..., Array] | None:
    """Returns a `score_mod` that depends on positions: ALiBi, or a temperature; None if
    the model has neither.
    """
    if family.alibi:
        return alibi(num_heads)["score_mod"]
    if values.get("attn_temperature_tuning") and rope is None:
        # Llama 4, in layers without RoPE.
        return _temperature(
            float(values["attn_scale"]), float(values["floor_scale"]), 1.0
        )
    parameters = rotary_parameters(values)
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return None
    # Ministral 3 and Mistral 4.
    if "llama_4_scaling_beta" not in family.keys.get("rope_parameters", {}):
        raise ValueError(
            f"config must not set llama_4_scaling_beta={beta!r}: this model type does "
            "not use it."
        )
    length = parameters.get(ORIGINAL)
    if length is None and rope is not None and rope.scaling is not None:
        # As in Transformers, scaled frequencies complete themselves by it.
        length = values.get("max_position_embeddings")
    if length is None:
        raise ValueError(
            f"rope_parameters must contain {ORIGINAL} if they contain "
            "llama_4_scaling_beta, but got None."
        )
    return _temperature(float(beta), float(length), 0.0)


@functools.cache
def _temperature(factor: float, length: float, first: float) -> Callable[..., Array]:
    """Returns a `score_mod`, Llama 4's temperature: score * (1 + factor log(1 +
    floor((q_idx + first) / length))).
    """

    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        count = jnp.floor((q_idx.astype(jnp.float32) + first) / length)
        return score * (1 + factor * jnp.log1p(count)).astype(score.dtype)

    return score_mod


@functools.cache
def _chunk_mask(size: int) -> FunctionMask:
    """Returns a mask that lets queries attend to the keys in their own chunk of `size`
    positions.
    """
    return FunctionMask(lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size)
