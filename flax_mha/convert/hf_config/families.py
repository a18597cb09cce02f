"""The table of Hugging Face's model families: for each `model_type`, its attention and the defaults of its config.

Model types with the same attention share a `Family`. tests/hf_families.py compares every one with the models of
Transformers.
"""

from typing import Any, Literal, NamedTuple

from flax_mha.convert.hf_config import layers
from flax_mha.convert.hf_config.layers import (
    FULL,
    LayerType,
    Rotates,
    Values,
    cycle,
    first_of,
    full,
    last_of,
    listed,
    sliding,
)


class Family(NamedTuple):
    """Describes the attention of a Hugging Face model type: everything that its config does not say.

    `keys` maps the keys that its config may have, in addition to `COMMON` in config.py, to their defaults in
    Transformers. Keys that only other families have are not read. A family rotates queries and keys if its `keys`
    contain `rope_theta`.
    """

    keys: Values
    bias: str | bool = False  # whether projections have biases; or config keys, any of which adds them
    norm: str | Literal[False] = False  # the `normalize_qk` of the module
    norm_key: str = ""  # the config key that switches the norms on; empty if they are always on
    norm_scale: Literal["weight", "1 + weight", "none"] = "weight"  # what multiplies normalized queries and keys
    sinks: bool = False
    gate: bool = False  # a sigmoid of the input multiplies the attention's output
    latent: bool = False  # keys and values are projections of one latent vector per token
    scale: float | None = None  # the factor of query . key, if it does not depend on sizes
    value_norm: bool = False  # values are normalized, and layers may share keys and values
    alibi: bool = False
    layer_type: LayerType = full
    rotates: Rotates = layers.all_rotate
    causal: str | bool | None = True  # or the config key of this boolean; None: causal only in decoders
    refused: str = ""  # why `describe` refuses the family; `RoPE.from_config` still reads its keys


def like(family: Family, keys: Values, **fields: Any) -> Family:
    """Returns a copy of a family with these keys added or their defaults replaced, and with these fields replaced."""
    return family._replace(keys=family.keys | keys, **fields)


def alike(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


# Config keys and defaults that several families share, or that are too long for one row.
ROPE: Values = {"rope_theta": 10_000.0}
MILLION: Values = {"rope_theta": 1e6}
BIAS: Values = ROPE | {"attention_bias": False}
PAIRS: Values = BIAS | {"rope_pairs": True}
INTERLEAVE: Values = BIAS | {"rope_interleave": True}
HALF: Values = BIAS | {"partial_rotary_factor": 0.5}
QUARTER: Values = ROPE | {"partial_rotary_factor": 0.25}
WHOLE: Values = ROPE | {"sliding_window": None, "partial_rotary_factor": 1.0}
COHERE: Values = PAIRS | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
COHERE_2: Values = PAIRS | {"sliding_window": 4096, "sliding_window_pattern": 4}
COHERE_MOE: Values = COHERE_2 | {"prefix_dense_sliding_window_pattern": 1, "mlp_layer_types": None}
COHERE_MOE |= {"first_k_dense_replace": 0}
ERNIE: Values = PAIRS | {"rope_theta": 500_000.0, "use_bias": False}
FALCON: Values = ROPE | {"bias": False, "new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None}
FALCON |= {"alibi": False}
QWEN: Values = BIAS | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
DOTS: Values = BIAS | {"sliding_window": 4096, "max_window_layers": 62}
EXAONE: Values = ROPE | {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
GEMMA: Values = BIAS | {"head_dim": 256, "use_bidirectional_attention": False}
GEMMA_2: Values = GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304}
GEMMA_2 |= {"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2}
GEMMA_3: Values = GEMMA_2 | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6}
GEMMA_3N: Values = GEMMA_3 | {"hidden_size": 2048, "num_key_value_heads": 2, "sliding_window": 512}
GEMMA_3N |= {"num_hidden_layers": 35, "num_kv_shared_layers": 15}
GEMMA_3N = {key: x for key, x in GEMMA_3N.items() if key not in ("query_pre_attn_scalar", "sliding_window_pattern")}
GEMMA_4_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
GEMMA_4_ROPE |= {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
GEMMA_4: Values = {key: x for key, x in GEMMA_3N.items() if key != "rope_local_base_freq"}
GEMMA_4 |= {"hidden_size": 2304, "num_key_value_heads": 4, "num_hidden_layers": 30, "num_kv_shared_layers": 0}
GEMMA_4 |= {"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None}
GEMMA_4 |= {"rope_parameters": GEMMA_4_ROPE, "attention_k_eq_v": False}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 4096}
GPT_OSS: Values = BIAS | {"attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
GPT_OSS |= {"rope_theta": 150_000.0, "rope_parameters": YARN}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
APERTUS: Values = BIAS | {"rope_theta": 12e6, "rope_parameters": LLAMA_3, "rms_norm_eps": 1e-5}
CWM: Values = MILLION | {"rope_parameters": LLAMA_3 | {"factor": 16.0}, "sliding_window": 8192, "head_dim": 128}
LLAMA_4: Values = COHERE | {"head_dim": 128, "num_key_value_heads": 8, "use_qk_norm": True, "attn_scale": 0.1}
LLAMA_4 |= {"no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192}
LLAMA_4 |= {"attn_temperature_tuning": True}
MINISTRAL = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0}
MINISTRAL |= {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MODERNBERT: Values = BIAS | {"rope_theta": 160_000.0, "rope_local_base_freq": 10_000.0, "local_attention": 128}
MODERNBERT |= {"sliding_window": None}
SEED: Values = {"attention_bias": True, "attention_out_bias": False, "num_key_value_heads": 8, "head_dim": 128}
MELLUM: Values = {"rope_theta": 5e5, "rope_local_base_freq": 1e4, "sliding_window": 1024}
MELLUM |= {"num_key_value_heads": 4, "head_dim": 128}
SMOLLM: Values = BIAS | {"rope_theta": 2e6, "num_key_value_heads": 4, "use_sliding_window": False}
SMOLLM |= {"sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4}
LFM: Values = MILLION | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "full_attn_idxs": None}
CROSS: Values = {"rope_theta": 500_000.0, "num_key_value_heads": 8}
CROSS |= {"cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38)}
GLM: Values = HALF | {"rope_pairs": True, "attention_bias": True, "num_key_value_heads": 2, "head_dim": 128}
GLM_4V: Values = PAIRS | {"partial_rotary_factor": 1.0, "num_key_value_heads": 2, "mrope_section": (8, 12, 12)}
MINIMAX: Values = {"rope_theta": 5e6, "partial_rotary_factor": 1.0, "head_dim": 128, "num_key_value_heads": 8}
NEMOTRON_H: Values = {"num_key_value_heads": 8, "head_dim": 128, "hybrid_override_pattern": None}
GPT_NEO: Values = {"sliding_window": 256, "attention_layers": None}
GPT_NEO |= {"attention_types": [[["global", "local"], 12]]}
AFMOE: Values = BIAS | {"head_dim": 128, "sliding_window": 1024, "global_attn_every_n_layers": 4}
QWEN_NEXT: Values = BIAS | QUARTER | {"head_dim": 256, "num_key_value_heads": 2, "full_attention_interval": 4}
LATENTS: Values = BIAS | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENTS |= {"v_head_dim": 128}
INDEXER: Values = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": False}
GLM_5: Values = INDEXER | {"index_n_heads": 32, "indexer_rope_interleave": True, "q_lora_rank": 2048, "v_head_dim": 256}
GLM_5 |= {"qk_nope_head_dim": 192, "indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 1}
GLM_5 |= {"index_skip_topk_offset": 2}
MINICPM: Values = LATENTS | {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
MINICPM |= {"v_head_dim": None}
MISTRAL_4 = MINISTRAL | {"factor": 128.0, "original_max_position_embeddings": 8192}
KIMI_LINEAR: Values = {key: x for key, x in LATENTS.items() if key != "rope_theta"}
KIMI_LINEAR |= {"q_lora_rank": None, "linear_attn_config": None}
SARVAM: Values = BIAS | {"rope_theta": 8e6, "partial_rotary_factor": 1.0, "num_key_value_heads": 4, "head_dim": 64}
SARVAM |= {"use_qk_norm": True, "use_qkv_bias": False}
LARA_MINI = ("linear_attention", layers.SLIDING, "linear_attention", FULL, layers.SLIDING)
ZAMBA: Values = {"attention_hidden_size": None, "use_shared_attention_adapter": False}

# Families that several model types share, or that other families extend.
RMS: Any = "rms_norm"
LLAMA = Family(BIAS, "attention_bias")
BERT = Family({"is_decoder": False}, True, causal="is_decoder")
BART = Family({}, True, causal=None)
ENCODER = Family({}, True, causal=False)
MISTRAL = Family(ROPE | {"num_key_value_heads": 8, "sliding_window": None}, layer_type=sliding)
QWEN_2 = Family(QWEN, True, layer_type=listed(layers.upper_slide))
QWEN_3 = like(QWEN_2, {"head_dim": 128}, bias="attention_bias", norm=RMS)
QWEN_3_VL = like(LLAMA, {"rope_theta": 5e5, "mrope_section": (24, 20, 20), "mrope_interleaved": True}, norm=RMS)
OLMO_2 = like(LLAMA, {"rms_norm_eps": 1e-5}, norm="rms_norm_all_heads")
EXAONE_4 = Family(EXAONE, norm=RMS, layer_type=last_of(4), rotates=layers.sliding_or_all_rotate)
SWA: Values = {"attention_multiplier": 1.0, "sliding_window": 128, "layer_rope_theta": None}
GRANITE_SWA = like(LLAMA, SWA, sinks=True, layer_type=first_of(4), rotates=layers.with_theta_rotate)
LATENT = Family(LATENTS | {"rope_interleave": True}, "attention_bias", latent=True)
INDEXED = Family(INTERLEAVE, refused="its indexer or its attention differs from DeepSeek V3.2's")
GEMMA_4_TEXT = Family(
    GEMMA_4, "attention_bias", RMS, value_norm=True, scale=1.0, layer_type=layers.last_full(last_of(6, ""))
)
QWEN_3_NEXT = Family(
    QWEN_NEXT, "attention_bias", RMS, norm_scale="1 + weight", gate=True, layer_type=listed(layers.rest_linear)
)
GATED = Family(BIAS, refused="its output gate is not a sigmoid for each feature")
ASSISTANT = "its layers attend to the keys and values of another model"
RELATIVE = Family({}, refused="its scores depend on products of queries and distance embeddings")

FAMILIES: dict[str, Family] = {
    **alike("llama arcee aria_text internlm3 iquestcoder", LLAMA),
    "exaone": like(LLAMA, {"rope_theta": 500_000.0, "num_key_value_heads": 8}),
    "jais2": like(LLAMA, {"attention_bias": True}),
    "emu3_text_model": like(LLAMA, MILLION | {"num_key_value_heads": 8}),
    "hyperclovax": like(LLAMA, {"attention_multiplier": None}),
    **alike("granite granitemoe granitemoeshared", like(LLAMA, {"attention_multiplier": 1.0})),
    "granite_swa": like(GRANITE_SWA, {"num_key_value_heads": 4}),
    "granitemoe_swa": GRANITE_SWA,
    "seed_oss": like(LLAMA, SEED, bias="attention_bias attention_out_bias"),
    "nemotron": like(LLAMA, HALF),
    "solar_open": like(LLAMA, MILLION | {"partial_rotary_factor": 1.0, "num_key_value_heads": 8, "head_dim": 128}),
    "falcon_h1": like(LLAMA, {"key_multiplier": 1.0, "num_key_value_heads": 8}),
    "mllama_text_model": Family(CROSS, layer_type=layers.cross_listed),
    "moshi": Family(ROPE),
    "cwm": Family(CWM | {"num_key_value_heads": 8}, layer_type=first_of(4)),
    "mistral": like(MISTRAL, {"sliding_window": 4096}),
    "ministral": like(MISTRAL, {"sliding_window": 4096}, layer_type=listed(sliding)),
    "ministral3": like(MISTRAL, MILLION | {"rope_parameters": MINISTRAL, "head_dim": 128}),
    "mixtral": like(MISTRAL, MILLION),
    "phimoe": like(MISTRAL, MILLION | {"attention_bias": False}, bias="attention_bias"),
    "starcoder2": like(MISTRAL, {"num_key_value_heads": 2, "use_bias": True}, bias="use_bias"),
    "minimax": like(MISTRAL, MILLION, layer_type=layers.windowed(listed(cycle("", FULL, "linear_attention")))),
    "phi3": Family(WHOLE, layer_type=sliding),
    "phi4_multimodal": Family(WHOLE | {"num_key_value_heads": 8}, layer_type=sliding),
    "qwen2": QWEN_2,
    "qwen2_moe": like(QWEN_2, {"qkv_bias": True}, bias="qkv_bias", layer_type=listed(layers.lower_even_slide)),
    "qwen3": QWEN_3,
    "qwen3_moe": like(QWEN_3, {"head_dim": None, "num_key_value_heads": 4}, layer_type=sliding),
    **alike("qwen2_vl_text qwen2_5_vl_text", like(QWEN_2, {"max_window_layers": 80, "mrope_section": (16, 24, 24)})),
    "qwen3_vl_text": like(QWEN_3_VL, {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe_text": like(QWEN_3_VL, {"num_key_value_heads": 16, "head_dim": None}),
    "dots1": Family(DOTS, "attention_bias", RMS, layer_type=listed(layers.upper_slide)),
    **alike("apertus apertus1p5_text", Family(APERTUS, "attention_bias", RMS)),
    "hy_v3": like(
        LLAMA, {"rope_theta": 11_158_840.0, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}, norm=RMS
    ),
    "mellum": like(LLAMA, MELLUM, norm=RMS, layer_type=listed(full)),
    **alike("exaone4 exaone_moe", EXAONE_4),
    "kolibri1": like(
        EXAONE_4,
        {"sliding_window": 513, "rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 4},
        layer_type=last_of(5, ""),
    ),
    "flint": like(
        LLAMA,
        {"sliding_window": 513, "head_dim": 128, "num_key_value_heads": 4},
        norm=RMS,
        sinks=True,
        layer_type=listed(layers.flint),
        rotates=layers.sliding_rotate,
    ),
    **alike("lfm2 lfm2_moe", Family(LFM, norm=RMS, layer_type=listed(layers.indices("full_attn_idxs", full)))),
    "nanochat": Family(BIAS | {"rope_reversed": True}, "attention_bias", "rms_norm_after_rope", norm_scale="none"),
    **alike("hunyuan_v1_dense hunyuan_v1_moe", like(LLAMA, {"rms_norm_eps": 1e-5}, norm="rms_norm_after_rope")),
    "gemma": Family(GEMMA, "attention_bias"),
    **alike(
        "gemma2 vaultgemma", Family(GEMMA_2 | {"attn_logit_softcapping": 50.0}, "attention_bias", layer_type=last_of(2))
    ),
    "gemma3_text": Family(GEMMA_3, "attention_bias", RMS, norm_scale="1 + weight", layer_type=last_of(6)),
    "gemma3n_text": Family(GEMMA_3N, "attention_bias", RMS, value_norm=True, scale=1.0, layer_type=last_of(5, "")),
    "gemma4_text": GEMMA_4_TEXT,
    "gemma4_unified_text": like(GEMMA_4_TEXT, {"sliding_window": 1024, "use_bidirectional_attention": "vision"}),
    "gpt_oss": Family(GPT_OSS, "attention_bias", sinks=True, layer_type=last_of(2)),
    "olmo": like(LLAMA, {"clip_qkv": None}),
    "olmoe": like(OLMO_2, {"clip_qkv": None}),
    "olmo2": OLMO_2,
    "flex_olmo": like(OLMO_2, {"rope_theta": 5e5, "rms_norm_eps": 1e-6}),
    "olmo3": like(
        OLMO_2, {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096}, layer_type=last_of(4)
    ),
    "olmo_hybrid": like(
        OLMO_2,
        {"rms_norm_eps": 1e-6},
        layer_type=listed(cycle("", *["linear_attention"] * 3, FULL)),
        rotates=layers.given_theta_rotates,
    ),
    "minimax_m2": Family(MINIMAX | {"rotary_dim": None}, norm="rms_norm_all_heads"),
    "minimax_m3_vl_text": Family(
        MINIMAX | {"num_key_value_heads": 4}, norm=RMS, norm_scale="1 + weight", layer_type=listed(full)
    ),
    "glm4_moe": Family(
        HALF | {"use_qk_norm": False, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        "attention_bias",
        RMS,
        "use_qk_norm",
    ),
    "sarvam_moe": Family(SARVAM, "attention_bias use_qkv_bias", RMS, "use_qk_norm"),
    **alike("glm glm4", Family(GLM, "attention_bias")),
    "glm4v_text": Family(GLM_4V, True),
    "helium": Family(PAIRS | {"rope_theta": 100_000.0, "head_dim": 128}, "attention_bias"),
    "ernie4_5": Family(ERNIE | {"num_key_value_heads": 2, "head_dim": 128}, "use_bias"),
    "ernie4_5_moe": Family(ERNIE | {"num_key_value_heads": 4}, "use_bias"),
    "cohere": Family(COHERE | {"use_qk_norm": False}, "attention_bias", "layer_norm_each_head", "use_qk_norm"),
    "cohere2": Family(COHERE_2, "attention_bias", layer_type=last_of(4), rotates=layers.sliding_rotate),
    "cohere2_moe": Family(
        COHERE_MOE, "attention_bias", layer_type=listed(layers.cohere_moe), rotates=layers.cohere_moe_rotates
    ),
    "cohere_compass_text": Family(
        COHERE_2 | {"rope_pairs": False}, "attention_bias", layer_type=listed(full), rotates=layers.given_rotate
    ),
    "smollm3": Family(
        SMOLLM, "attention_bias", layer_type=listed(layers.unrotated_slide), rotates=layers.listed_rotate
    ),
    "llama4_text": Family(
        LLAMA_4,
        "attention_bias",
        "rms_norm_after_rope",
        "use_qk_norm",
        "none",
        layer_type=listed(layers.rotated_chunked),
        rotates=layers.listed_rotate,
    ),
    "stablelm": Family(QUARTER | {"use_qkv_bias": False, "qk_layernorm": False}, "use_qkv_bias"),
    "persimmon": Family(HALF | {"qk_layernorm": True, "rms_norm_eps": 1e-5}, True, "layer_norm_bias", "qk_layernorm"),
    "phi": Family(HALF | {"qk_layernorm": False, "rms_norm_eps": 1e-5}, True, "layer_norm_bias", "qk_layernorm"),
    "gpt_neox": Family(QUARTER | {"attention_bias": True}, "attention_bias"),
    "gpt_neox_japanese": Family(ROPE | {"partial_rotary_factor": 1.0}),
    **alike("gptj codegen", Family(PAIRS | {"rotary_dim": 64})),
    "dbrx": Family(ROPE | {"clip_qkv": None, "num_key_value_heads": 1}),
    "falcon": Family(FALCON, "bias"),
    "modernbert-decoder": Family(MODERNBERT, "attention_bias", layer_type=first_of(3, "global_attn_every_n_layers")),
    # With a gate.
    **alike("qwen3_next qwen3_5_moe_text", QWEN_3_NEXT),
    "qwen3_5_text": like(QWEN_3_NEXT, {"num_key_value_heads": 4}),
    "afmoe": Family(
        AFMOE | {"rms_norm_eps": 1e-5},
        "attention_bias",
        RMS,
        gate=True,
        layer_type=last_of(4, "global_attn_every_n_layers"),
        rotates=layers.sliding_rotate,
    ),
    # Latent attention.
    **alike("deepseek_v3 kimi_k2 youtu axk1", LATENT),
    "sarvam_mla": like(LATENT, {"q_lora_rank": None}),
    "deepseek_v2": Family(LATENTS | {"rope_pairs": True}, "attention_bias", latent=True),
    "deepseek_v32": like(LATENT, INDEXER),
    "glm_moe_dsa": like(LATENT, GLM_5, layer_type=layers.own_indexer),
    "glm4_moe_lite": like(LATENT, {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "minicpm3": Family(MINICPM, "attention_bias", latent=True),
    "mistral4": like(
        LATENT, {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "rope_parameters": MISTRAL_4}
    ),
    "kimi_linear": Family(KIMI_LINEAR, "attention_bias", latent=True, layer_type=listed(layers.kimi_linear)),
    # Without rotary positions.
    "mpt": Family({"alibi": True, "clip_qkv": None, "softmax_scale": None}, alibi=True),
    "bloom": Family({}, True, alibi=True),
    **alike("gpt2 gpt-sw3", Family({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}, True)),
    "gpt_bigcode": Family({"scale_attn_weights": True, "multi_query": True}, True),
    "gpt_neo": Family(GPT_NEO, True, scale=1.0, layer_type=layers.gpt_neo),
    "opt": Family({"enable_bias": True}, "enable_bias"),
    **alike("openai-gpt ctrl xglm biogpt git", Family({}, True)),
    "xlm": Family({"causal": False}, True, causal="causal"),
    **alike("musicgen_decoder musicgen_melody_decoder", Family({})),
    "jamba": Family(
        {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4}, layer_type=layers.periodic
    ),
    "nemotron_h": Family(NEMOTRON_H, layer_type=listed(cycle("hybrid_override_pattern", "-", "-", FULL, "-"))),
    "zamba": Family(ZAMBA, layer_type=listed(layers.refuse_unlisted)),
    # Hybrids with rotary positions.
    "bamba": like(
        LLAMA,
        HALF | {"num_key_value_heads": 8, "attn_layer_indices": ()},
        layer_type=layers.indices("attn_layer_indices", layers.no_attention),
    ),
    "granitemoehybrid": like(
        LLAMA,
        {"attention_multiplier": 1.0, "position_embedding_type": None},
        layer_type=listed(layers.no_attention),
        rotates=layers.if_key("position_embedding_type", "rope"),
    ),
    "lara_mini": like(
        LLAMA,
        {"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 512},
        norm=RMS,
        layer_type=listed(cycle("", *LARA_MINI)),
        rotates=layers.sliding_rotate,
    ),
    "recurrent_gemma": Family(
        HALF | {"sliding_window": 2048, "block_types": ("recurrent", "recurrent", "attention")},
        True,
        layer_type=layers.windowed(cycle("block_types")),
    ),
    "zamba2": Family(
        ZAMBA | ROPE | {"use_mem_rope": False},
        layer_type=listed(layers.refuse_unlisted),
        rotates=layers.if_key("use_mem_rope"),
    ),
    # Encoders, and decoders that are made from them.
    "t5": Family({"head_dim": 64}, scale=1.0, causal=None),
    **alike("bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta", BERT),
    **alike("roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod", BERT),
    "roformer": like(BERT, ROPE | {"rope_pairs": True, "rotary_value": False}),
    "big_bird": like(BERT, {"use_bias": True, "attention_type": "block_sparse"}, bias="use_bias"),
    **alike("bart blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper", BART),
    "bigbird_pegasus": Family({"use_bias": False}, "use_bias", causal=None),
    **alike("vit dinov2 distilbert wav2vec2 clip siglip clip_vision_model", ENCODER),
    **alike("siglip_text_model siglip_vision_model", ENCODER),
    "clip_text_model": Family({}, True),
    # Families that the module cannot compute.
    "longcat_flash": Family(
        INTERLEAVE | {"rope_theta": 1e7}, refused="it scales its latents, and has two in each layer"
    ),
    **alike("axk2 deepseek_v4 dots3_note_text hy_v4 qwen4_exp_text", INDEXED),
    **alike("beam laguna lfm3 bailing_hybrid", GATED),
    "hrm_text": Family(BIAS, refused="its layers form two stacks, which run several times"),
    **alike("gemma4_assistant gemma4_unified_assistant", like(GEMMA_4_TEXT, {}, refused=ASSISTANT)),
    **alike("mamba mamba2 falcon_mamba rwkv xlstm", Family({}, refused="it is recurrent and has no softmax over keys")),
    **alike("xlnet prophetnet inkling_text inkling2_text inkling2_loop_text", RELATIVE),
    **alike(
        "bitnet dory",
        Family({"rope_theta": 5e5}, refused="it has a norm between the attention and the output projection"),
    ),
    "blt": Family(ROPE, refused="it has several transformers, each with its own config"),
    "cpmant": Family({}, refused="it adds learned biases by segment and distance to its scores"),
    "diffllama": Family(ROPE, refused="its heads subtract one softmax from another"),
    "doge": Family(ROPE, refused="its values determine which keys are visible"),
    "jetmoe": Family(ROPE, refused="it routes queries and outputs through experts"),
    "mimo_v2_flash": Family(ROPE, refused="its keys and values have different head sizes"),
    "reformer": Family({}, refused="hashes determine which keys are visible"),
    "zaya": Family(ROPE, refused="its queries, keys and values pass through convolutions"),
    # Families whose configs are only read for rotary positions.
    "modernbert": Family(MODERNBERT, refused="only its rotary positions are supported"),
    "moonshine": Family(PAIRS | {"partial_rotary_factor": 0.9}, refused="only its rotary positions are supported"),
}
