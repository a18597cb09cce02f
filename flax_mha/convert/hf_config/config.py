"""`read_config`: the model family of a Hugging Face config, and the values that the family reads."""

from collections.abc import Mapping
from typing import Any

from flax_mha.convert.hf_config.families import FAMILIES, Family
from flax_mha.convert.hf_config.layers import Values
from flax_mha.convert.hf_config.types import KINDS, NESTED, ROTARY, check_types

# Other keys of the same meaning; of several in one config the first in this order counts.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "attention_heads", "encoder_attention_heads"),
    "num_key_value_heads": ("kv_n_heads",),
    "hidden_size": ("d_model", "n_embd", "dim", "emb_dim"),
    "head_dim": ("d_kv", "attention_head_dim"),
    "rope_theta": ("global_rope_theta", "rotary_emb_base"),
    "rope_local_base_freq": ("local_rope_theta",),
    "partial_rotary_factor": ("rotary_pct",),
    "sliding_window": ("attention_window_size", "window_size"),
    "layer_types": ("layers_block_type",),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps"),
}
ALIASES["num_attention_heads"] += ("decoder_attention_heads", "decoder_num_attention_heads")
COMMON = {"num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "rms_norm_eps"}
COMMON |= {"rope_theta", "rope_parameters", "rope_scaling", "layer_types", "position_embedding_type"}
# Keys whose null has a meaning; a null under any other key means that it is left out.
NULL_COUNTS = ("sliding_window", "attn_logit_softcapping", "num_key_value_heads", "local_attention", "q_lora_rank")
# The model types of text models, by those of the multimodal models whose `text_config` may lack one.
PARTS = {"emu3": "emu3_text_model", "gemma3": "gemma3_text", "llama4": "llama4_text", "mllama": "mllama_text_model"}
PARTS |= {name: f"{name}_text" for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")}
OPTIONAL = {key for family in FAMILIES.values() for key in family.keys} - COMMON  # read by some families alone
UNKNOWN = Family({}, refused="it is not known")


def read_config(config: Any) -> tuple[Family, Values]:
    """Returns the family of a config, `UNKNOWN` if `FAMILIES` lacks its model type, and the config's values by key.

    The value of an alias is also under its name in `ALIASES`. Nulls are left out, except those of `NULL_COUNTS`, and so
    are keys that only other families read, unless the family is refused: as in Transformers, a Llama has no window even
    if its config has a `sliding_window`. Raises a ValueError for a value that has not the type of its key.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict, but got {type(config).__name__}; use config.to_dict().")
    model_type = config.get("model_type")
    if model_type in ("clip", "siglip") and "text_config" in config and "vision_config" in config:
        raise ValueError(
            "config must describe one part of the model, but has text_config and vision_config; pass "
            'config["text_config"] or config["vision_config"].'
        )
    text = config.get("text_config") or (config.get("decoder") if "musicgen" in str(model_type) else None) or config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a dict, but got {text!r}.")
    values = {key: value for key, value in text.items() if value is not None or key in NULL_COUNTS}
    if isinstance(values.get("attn_config"), Mapping):  # MPT, DBRX
        values = dict(values["attn_config"]) | {key: x for key, x in values.items() if key not in OPTIONAL}
    if isinstance(model_type, str) and model_type in PARTS and "patch_size" not in text:  # a vision encoder
        values["model_type"] = PARTS[model_type]
    if not isinstance(values.get("model_type", ""), str):
        raise ValueError(f"model_type must be a string, but got {values['model_type']!r}.")
    names: dict[str, str] = {}
    for name, others in ALIASES.items():
        if found := [key for key in (name, *others) if key in values]:
            values[name], names[name] = values[found[0]], found[0]
    family = FAMILIES.get(values.get("model_type", ""), UNKNOWN)
    if family.refused:
        check_types(values, (*ROTARY, *NESTED), names)
        return family, values
    values = {key: value for key, value in values.items() if key not in OPTIONAL or key in family.keys}
    check_types(values, KINDS, names)
    return family, values
