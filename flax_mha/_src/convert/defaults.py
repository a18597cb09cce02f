"""Config keys with their defaults in Transformers, which are too long for their row in
the table of families.
"""

from flax_mha._src.convert.layer_rules import FULL, SLIDING, Values


def _without(values: Values, *keys: str) -> Values:
    return {key: value for key, value in values.items() if key not in keys}


ROPE: Values = {"rope_theta": 10_000.0}
MILLION: Values = {"rope_theta": 1e6}
HEADS_4: Values = {"num_key_value_heads": 4, "head_dim": 128}
HEADS_8: Values = {"num_key_value_heads": 8, "head_dim": 128}
BIAS: Values = ROPE | {"attention_bias": False}
PAIRS: Values = BIAS | {"rope_pairs": True}
INTERLEAVE: Values = BIAS | {"rope_interleave": True}
HALF: Values = BIAS | {"partial_rotary_factor": 0.5}
QUARTER: Values = ROPE | {"partial_rotary_factor": 0.25}
STABLELM: Values = QUARTER | {
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "num_key_value_heads": 32,
}
WHOLE: Values = ROPE | {
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 4096,
}
COHERE: Values = PAIRS | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
COHERE_2: Values = PAIRS | {"sliding_window": 4096, "sliding_window_pattern": 4}
COHERE_MOE: Values = COHERE_2 | {
    "prefix_dense_sliding_window_pattern": 1,
    "mlp_layer_types": None,
    "first_k_dense_replace": 0,
    "head_dim": 128,
}
ERNIE: Values = PAIRS | {"rope_theta": 500_000.0, "use_bias": False}
FALCON: Values = ROPE | {
    "bias": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "num_kv_heads": None,
    "alibi": False,
    "n_embed": None,
}
QWEN: Values = BIAS | {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
}
QWEN_2_VL: Values = MILLION | {
    "max_window_layers": 80,
    "mrope_section": (16, 24, 24),
    "num_key_value_heads": 8,
}
DOTS: Values = BIAS | {
    "sliding_window": 4096,
    "max_window_layers": 62,
    "num_key_value_heads": 32,
}
EXAONE: Values = ROPE | {
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS: Values = BIAS | {
    "attention_bias": True,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
    "rope_parameters": YARN,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
APERTUS: Values = BIAS | {
    "rope_theta": 12e6,
    "rope_parameters": LLAMA_3,
    "rms_norm_eps": 1e-5,
}
CWM: Values = MILLION | {
    "rope_parameters": LLAMA_3 | {"factor": 16.0},
    "sliding_window": 8192,
    "head_dim": 128,
}
LLAMA_4: Values = (
    COHERE
    | HEADS_8
    | {
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
    }
)
MINISTRAL = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "rope_theta": 1e6,
}
MODERNBERT: Values = BIAS | {
    "rope_theta": 160_000.0,
    "rope_local_base_freq": 10_000.0,
    "local_attention": 128,
    "sliding_window": None,
}
SEED: Values = HEADS_8 | {"attention_bias": True, "attention_out_bias": False}
MELLUM: Values = HEADS_4 | {
    "rope_theta": 5e5,
    "rope_local_base_freq": 1e4,
    "sliding_window": 1024,
}
SMOLLM: Values = BIAS | {
    "rope_theta": 2e6,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
LFM: Values = MILLION | {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "full_attn_idxs": None,
}
CROSS: Values = {
    "rope_theta": 500_000.0,
    "num_key_value_heads": 8,
    "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
}
GLM: Values = HALF | {
    "rope_pairs": True,
    "attention_bias": True,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
GLM_4V: Values = PAIRS | {
    "partial_rotary_factor": 1.0,
    "num_key_value_heads": 2,
    "mrope_section": (8, 12, 12),
}
MINIMAX: Values = {
    "rope_theta": 5e6,
    "partial_rotary_factor": 1.0,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
NEMOTRON_H: Values = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hybrid_override_pattern": None,
}
GPT_NEO: Values = {
    "sliding_window": 256,
    "attention_layers": None,
    "attention_types": [[["global", "local"], 12]],
}
AFMOE: Values = {
    "num_key_value_heads": None,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "rms_norm_eps": 1e-5,
}
PHI: Values = HALF | {"qk_layernorm": False, "rms_norm_eps": 1e-5}
GLM_MOE: Values = HALF | {
    "use_qk_norm": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
QWEN_NEXT: Values = (
    BIAS
    | QUARTER
    | {"head_dim": 256, "num_key_value_heads": 2, "full_attention_interval": 4}
)
LATENTS: Values = BIAS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
INDEXER: Values = {
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_rope_interleave": False,
}
GLM_5: Values = INDEXER | {
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "indexer_types": None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
AXK_2: Values = INDEXER | {
    "index_n_heads": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
HY_4: Values = (
    LATENTS
    | GLM_5
    | {
        "index_n_heads": 16,
        "indexer_rope_interleave": False,
        "indexer_rope_last": True,
        "q_lora_rank": 1536,
        "index_topk_freq": 4,
        "rms_norm_eps": 1e-5,
    }
)
MINICPM: Values = LATENTS | {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
}
MISTRAL_4 = MINISTRAL | {
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 1e4,
}
KIMI_LINEAR: Values = _without(LATENTS, "rope_theta") | {
    "q_lora_rank": None,
    "linear_attn_config": None,
}
SARVAM: Values = BIAS | {
    "rope_theta": 8e6,
    "partial_rotary_factor": 1.0,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "use_qk_norm": True,
    "use_qkv_bias": False,
}
LARA_MINI = ("linear_attention", SLIDING, "linear_attention", FULL, SLIDING)
ZAMBA: Values = {"attention_hidden_size": None, "use_shared_attention_adapter": False}
ZAMBA_1: Values = ZAMBA | {
    "attn_layer_period": 6,
    "attn_layer_offset": 4,
    "num_key_value_heads": 16,
}
GEMMA: Values = BIAS | {
    "head_dim": 256,
    "use_bidirectional_attention": False,
    "num_key_value_heads": 16,
}
GEMMA_2: Values = GEMMA | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 2304,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
GEMMA_3: Values = GEMMA_2 | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
GEMMA_3N: Values = _without(
    GEMMA_3, "query_pre_attn_scalar", "sliding_window_pattern"
) | {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 15,
}
GEMMA_4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
GEMMA_4: Values = _without(GEMMA_3N, "rope_local_base_freq") | {
    "hidden_size": 2304,
    "num_key_value_heads": 4,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 0,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "rope_parameters": GEMMA_4_ROPE,
    "attention_k_eq_v": False,
}
LAGUNA_ROPE = {
    FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
LAGUNA: Values = HEADS_8 | {
    "sliding_window": 512,
    "gating": True,
    "num_attention_heads_per_layer": None,
    "partial_rotary_factor": 1.0,
    "rope_parameters": LAGUNA_ROPE,
}
LFM_3: Values = (
    HEADS_4
    | MILLION
    | {
        "sliding_window": 256,
        "use_attention_gate": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": GEMMA_4_ROPE
        | {FULL: GEMMA_4_ROPE[FULL] | {"partial_rotary_factor": 0.5}},
    }
)
MIMO: Values = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "sliding_window_size": None,
    "attention_value_scale": 0.707,
    "partial_rotary_factor": 0.334,
    "rope_parameters": {FULL: {"rope_theta": 5e6}, SLIDING: {"rope_theta": 10_000.0}},
}
