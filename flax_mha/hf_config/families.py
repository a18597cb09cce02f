"""The table of Hugging Face's model families: the attention of each `model_type`, and the defaults of its config."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Values = dict[str, Any]


class Family(NamedTuple):
    """The attention of one `model_type`.

    Attributes:
      defaults: The values of keys that a config leaves out, as in Transformers' configuration classes. Families whose
        layers rotate queries and keys have a `rope_theta`.
      bias: Whether projections have biases, or the key that tells. None if `describe` does not know the family.
      norm: The `normalize_qk` of the module.
      sinks: Whether heads have sinks.
      sliding: Which layers have a window: those of `layer_types`, or all but each `sliding_window_pattern`-th
        ("listed"), or those from `max_window_layers` on ("last").
    """

    defaults: Values
    bias: str | bool | None = None
    norm: Literal[False, "rms_norm", "rms_norm_all_heads"] = False
    sinks: bool = False
    sliding: Literal["none", "all", "listed", "last"] = "none"


LAYER_TYPES = ("full_attention", "sliding_attention")
ALIASES = {  # other keys of the same meaning; the first in a config counts
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_num_attention_heads"),
    "hidden_size": ("d_model", "n_embd", "dim"),
    "head_dim": ("d_kv",),
    "rope_theta": ("global_rope_theta", "rotary_emb_base"),
    "rope_local_base_freq": ("local_rope_theta",),
    "partial_rotary_factor": ("rotary_pct",),
}
NULL_COUNTS = ("sliding_window", "attn_logit_softcapping", "num_key_value_heads")  # null is not "left out" for these

ROPE: Values = {"rope_theta": 10_000.0}
PAIRS: Values = ROPE | {"rope_interleave": True}
GPT_J: Values = PAIRS | {"rotary_dim": 64}
HALF: Values = ROPE | {"partial_rotary_factor": 0.5}
QUARTER: Values = ROPE | {"partial_rotary_factor": 0.25}
COHERE: Values = PAIRS | {"rope_theta": 500_000.0}
FALCON: Values = ROPE | {"bias": False, "new_decoder_architecture": False, "multi_query": True}
QWEN: Values = ROPE | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GEMMA_2: Values = ROPE | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304}
GEMMA_2 |= {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
GEMMA_3: Values = GEMMA_2 | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS: Values = {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
GPT_OSS |= {"sliding_window_pattern": 2, "rope_theta": 150_000.0, "rope_parameters": YARN}

FAMILIES: dict[str, Family] = {
    "llama": Family(ROPE, "attention_bias"),
    "mistral": Family(ROPE | {"num_key_value_heads": 8, "sliding_window": 4096}, False, sliding="all"),
    "qwen2": Family(QWEN, True, sliding="last"),
    "qwen3": Family(QWEN | {"head_dim": 128}, "attention_bias", "rms_norm", sliding="last"),
    "gemma": Family(ROPE | {"head_dim": 256}, "attention_bias"),
    "gemma2": Family(GEMMA_2 | {"attn_logit_softcapping": 50.0}, "attention_bias", sliding="listed"),
    "gemma3_text": Family(GEMMA_3, "attention_bias", "rms_norm", sliding="listed"),
    "gpt_oss": Family(GPT_OSS, "attention_bias", sinks=True, sliding="listed"),
    "olmo2": Family(ROPE | {"rms_norm_eps": 1e-5}, "attention_bias", "rms_norm_all_heads"),
    "phi3": Family(ROPE, False, sliding="all"),
    "phi": Family(HALF, True),
    "gpt_neox": Family(QUARTER | {"attention_bias": True}, "attention_bias"),
    "falcon": Family(FALCON, "bias"),
    "bloom": Family({}, True),
    "gpt2": Family({}, True),
    "gptj": Family(GPT_J, False),
    "t5": Family({"head_dim": 64, "query_pre_attn_scalar": 1}, False),
    "opt": Family({"enable_bias": True}, "enable_bias"),
    **dict.fromkeys(("vit", "dinov2", "bert", "roberta", "distilbert", "bart", "whisper"), Family({}, True)),
    **dict.fromkeys(("wav2vec2", "clip", "siglip", "clip_text_model", "clip_vision_model"), Family({}, True)),
    **dict.fromkeys(("siglip_text_model", "siglip_vision_model"), Family({}, True)),
    # Of the others only rotary positions are known.
    **dict.fromkeys(("granite", "olmo", "qwen2_moe", "qwen3_moe", "starcoder2"), Family(ROPE)),
    **dict.fromkeys(("cohere2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu"), Family(PAIRS)),
    **dict.fromkeys(("bamba", "glm4_moe", "nemotron", "persimmon", "recurrent_gemma"), Family(HALF)),
    **dict.fromkeys(("cohere", "ernie4_5", "ernie4_5_moe", "llama4_text"), Family(COHERE)),
    **dict.fromkeys(("glm", "glm4"), Family(HALF | PAIRS)),
    **dict.fromkeys(("mixtral", "phimoe"), Family({"rope_theta": 1e6})),
    **dict.fromkeys(("qwen3_next", "stablelm"), Family(QUARTER)),
    "codegen": Family(GPT_J),
    "gemma3n_text": Family({"rope_theta": 1e6, "rope_local_base_freq": 10_000.0}),
    "helium": Family(PAIRS | {"rope_theta": 100_000.0}),
    "longcat_flash": Family(PAIRS | {"rope_theta": 1e7}),
    "modernbert": Family({"rope_theta": 160_000.0, "rope_local_base_freq": 10_000.0}),
    "moonshine": Family(PAIRS | {"partial_rotary_factor": 0.9}),
    "olmo3": Family({"rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0}),  # sliding layers have no scaling
    "smollm3": Family({"rope_theta": 2e6}),
}
DESCRIBED = tuple(name for name, family in FAMILIES.items() if family.bias is not None)


def read(config: Any) -> tuple[Family, Values]:
    """Returns the family of a config and what the config says, less nulls; `ALIASES` stand under both names."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict, but got {type(config).__name__}; use config.to_dict().")
    model_type = config.get("model_type")
    if model_type in ("clip", "siglip") and "text_config" in config and "vision_config" in config:
        raise ValueError(
            'config must be that of one part, but got that of both; pass config["text_config"] or '
            'config["vision_config"].'
        )
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a dict, but got {text!r}.")
    values = {key: value for key, value in text.items() if value is not None or key in NULL_COUNTS}
    if model_type == "gemma3":
        values["model_type"] = "gemma3_text"
    if not isinstance(values.get("model_type", ""), str):
        raise ValueError(f"model_type must be a string, but got {values['model_type']!r}.")
    for name, others in ALIASES.items():
        found = [values[key] for key in (name, *others) if key in values]
        values |= {name: found[0]} if found else {}
    return FAMILIES.get(values.get("model_type", ""), Family({})), values
