"""The table of Hugging Face's model families: for each `model_type`, its attention and
the defaults of its config.

Model types with the same attention share a `Family`. tests/hf_families.py compares the
decoders with the models of Transformers; tests/test_torch_families.py compares the
encoders with PyTorch ports.
"""

from typing import Any, Literal, NamedTuple

from flax_mha._src.convert import layer_rules
from flax_mha._src.convert.layer_rules import (
    FULL,
    SLIDING,
    Values,
    cycle,
    full,
    full_every,
    listed,
    sliding,
)
from flax_mha._src.modules.layers import Gate, Norm

NO_KEYS: Values = {}


class Family(NamedTuple):
    """Describes the attention of a Hugging Face model type: everything that its config
    does not say.

    `keys` maps the keys that its config may have, in addition to `COMMON` in
    read_config.py, to their defaults in Transformers. Keys that only other families
    have are not read. A family rotates queries and keys if its `keys` contain
    `rope_theta`.
    """

    keys: Values = NO_KEYS
    # Whether projections have biases; or config keys, any of which adds them.
    bias: str | bool = False
    # Of queries and keys; its epsilon is the `rms_norm_eps` of the config.
    norm: Norm | None = None
    # The config key that switches the norms on; empty if they are always on.
    norm_key: str = ""
    # What multiplies normalized queries and keys.
    norm_scale: Literal["weight", "1 + weight", "none"] = "weight"
    sinks: bool | str = False  # or the type of the layers that have them
    # A function of the input multiplies the attention's output.
    gate: Gate | None = None
    # The config key that switches the gate on or names its kind; empty if it is always
    # on.
    gate_key: str = ""
    # The heads of a token are normalized before the output projection.
    out_norm: bool = False
    # A fraction outside of rope parameters is only for rope_type "default" (MiMo-V2).
    unscaled_fraction: bool = False
    # Keys and values are projections of one latent vector per token.
    latent: bool = False
    query_residual: bool = False  # of the module of latent attention
    scaled_latents: bool = False  # latents are scaled to the size of the input
    attentions: int = 1  # in each layer, which then count as layers
    # The factor of query . key, if it does not depend on sizes.
    scale: float | None = None
    # Layers may use keys as values, or another layer's keys and values; values are
    # normalized, without a scale.
    shares_kv: bool = False
    borrows_kv: bool = False  # all layers use keys and values of another model
    alibi: bool = False
    # Scores get a learned bias of the distance: T5's, from a table in each layer or, if
    # only the first layer has one, from that.
    relative_bias: bool = False
    layer_type: layer_rules.LayerType = full
    rotates: layer_rules.Rotates = layer_rules.all_rotate
    # Or the config key of this boolean; None: causal only in decoders.
    causal: str | bool | None = True
    # Why `describe` refuses the family; `RoPE.from_config` still reads its keys.
    refused: str = ""


def like(family: Family, keys: Values, **fields: Any) -> Family:
    """Returns a copy of `family`.

    `keys` adds config keys, or replaces their defaults; `fields` replaces fields.
    """
    return family._replace(keys=family.keys | keys, **fields)


# Config keys, with their defaults in Transformers, that several families have.
ROPE: Values = {"rope_theta": 10_000.0}
MILLION: Values = {"rope_theta": 1e6}
HEADS_4: Values = {"num_key_value_heads": 4, "head_dim": 128}
HEADS_8: Values = {"num_key_value_heads": 8, "head_dim": 128}
HALF: Values = {"partial_rotary_factor": 0.5}
QUARTER: Values = {"partial_rotary_factor": 0.25}
COHERE_2: Values = {
    "rope_pairs": True,
    "sliding_window": 4096,
    "sliding_window_pattern": None,
}
MODERNBERT: Values = {
    "rope_theta": 160_000.0,
    "rope_local_base_freq": 10_000.0,
    "local_attention": 128,
    "sliding_window": None,
}
MINIMAX: Values = {
    "rope_theta": 5e6,
    "partial_rotary_factor": 1.0,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
ZAMBA: Values = {"attention_hidden_size": None, "use_shared_attention_adapter": False}
LATENTS: Values = {
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
# Rotary parameters.
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MINISTRAL = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "rope_theta": 1e6,
}
GEMMA_4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}

# Families that several model types share, or that other families extend.
RMS = Norm("rms")
RMS_OF_ALL_HEADS = Norm("rms", scale="heads", over="all_heads")
RMS_AFTER_ROPE = Norm("rms", after_rope=True)
NORM_OF_EACH_HEAD = Norm("layer", scale="heads")
GATE = Gate()
HEAD_GATE = Gate("head")
LLAMA = Family(keys=ROPE | {"attention_bias": False}, bias="attention_bias")
MISTRAL = Family(
    keys=ROPE | {"num_key_value_heads": 8, "sliding_window": None}, layer_type=sliding
)
QWEN_2 = like(
    LLAMA,
    {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
    bias=True,
    layer_type=layer_rules.upper_slide,
)
QWEN_3 = like(QWEN_2, {"head_dim": 128}, bias="attention_bias", norm=RMS)
QWEN_3_VL = like(
    LLAMA,
    {"rope_theta": 5e5, "mrope_section": (24, 20, 20), "mrope_interleaved": True},
    norm=RMS,
)
QWEN_3_NEXT = like(
    LLAMA,
    QUARTER | {"head_dim": 256, "num_key_value_heads": 2, "full_attention_interval": 4},
    norm=RMS,
    norm_scale="1 + weight",
    gate=GATE,
    layer_type=layer_rules.rest_linear,
)
PHI = like(
    LLAMA,
    HALF | {"qk_layernorm": False, "rms_norm_eps": 1e-5},
    bias=True,
    norm=Norm("layer", bias=True),
    norm_key="qk_layernorm",
)
PHI_3 = Family(
    keys=ROPE
    | {
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    layer_type=sliding,
)
OLMO_2 = like(LLAMA, {"rms_norm_eps": 1e-5}, norm=RMS_OF_ALL_HEADS)
EXAONE_4 = Family(
    keys=ROPE
    | {
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
    },
    norm=RMS,
    layer_type=full_every(4),
    rotates=layer_rules.sliding_or_all_rotate,
)
GRANITE = like(LLAMA, {"attention_multiplier": 1.0})
GRANITE_SWA = like(
    GRANITE,
    {"sliding_window": 128, "layer_rope_theta": None},
    sinks=True,
    layer_type=full_every(4, place=0),
    rotates=layer_rules.with_theta_rotate,
)
ERNIE = Family(
    keys={
        "rope_theta": 5e5,
        "rope_pairs": True,
        "use_bias": False,
        "num_key_value_heads": 4,
    },
    bias="use_bias",
)
GEMMA = like(
    LLAMA,
    {
        "head_dim": 256,
        "use_bidirectional_attention": False,
        "num_key_value_heads": 16,
    },
)
GEMMA_2 = like(
    GEMMA,
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "sliding_window": 4096,
    },
)
SHARING = like(
    GEMMA_2,
    MILLION | {"sliding_window": 512},
    norm=RMS,
    shares_kv=True,
    scale=1.0,
)
GEMMA_4 = like(
    SHARING,
    {
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 0,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "rope_parameters": GEMMA_4_ROPE,
        "attention_k_eq_v": False,
    },
    layer_type=layer_rules.last_full(full_every(6)),
)
ROTATED_WINDOWS = like(LLAMA, HEADS_4, norm=RMS, rotates=layer_rules.sliding_rotate)
UNSCALED = like(LLAMA, {}, norm=RMS_AFTER_ROPE, norm_scale="none")
BLT = Family(keys={"rope_theta": 5e5, "rope_pairs": True})
LATENT = like(LLAMA, LATENTS, latent=True)
DEEPSEEK_2 = like(LATENT, {"rope_pairs": True})
DEEPSEEK_3 = like(LATENT, {"rope_interleave": True})
BERT = Family(keys={"is_decoder": False}, bias=True, causal="is_decoder")
MORE = "needs more than the module's options"
ONLY_ROPE = "only its rotary positions are supported"

# By model types, separated by spaces.
ROWS: dict[str, Family] = {
    "llama arcee aria_text internlm3 iquestcoder": LLAMA,
    "exaone": like(LLAMA, {"rope_theta": 5e5, "num_key_value_heads": 8}),
    "jais2": like(LLAMA, {"attention_bias": True}),
    "emu3_text_model": like(LLAMA, MILLION | {"num_key_value_heads": 8}),
    "hyperclovax": like(LLAMA, {"attention_multiplier": None}),
    "granite granitemoe granitemoeshared": GRANITE,
    "granite_swa": like(GRANITE_SWA, {"num_key_value_heads": 4}),
    "granitemoe_swa": GRANITE_SWA,
    "seed_oss": like(
        LLAMA,
        HEADS_8 | {"attention_bias": True, "attention_out_bias": False},
        bias="attention_bias attention_out_bias",
    ),
    "nemotron": like(LLAMA, HALF),
    "solar_open": like(LLAMA, MILLION | HEADS_8 | {"partial_rotary_factor": 1.0}),
    "falcon_h1": like(LLAMA, {"key_multiplier": 1.0, "num_key_value_heads": 8}),
    "mllama_text_model": Family(
        keys={
            "rope_theta": 5e5,
            "num_key_value_heads": 8,
            "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
        },
        layer_type=layer_rules.cross_listed,
    ),
    "moshi": Family(keys=ROPE),
    "cwm": Family(
        keys=MILLION
        | HEADS_8
        | {"rope_parameters": LLAMA_3 | {"factor": 16.0}, "sliding_window": 8192},
        layer_type=full_every(4, place=0),
    ),
    "mistral": like(MISTRAL, {"sliding_window": 4096}),
    "ministral": like(MISTRAL, {"sliding_window": 4096}, layer_type=listed(sliding)),
    "ministral3": like(MISTRAL, {"rope_parameters": MINISTRAL, "head_dim": 128}),
    "mixtral": like(MISTRAL, MILLION),
    "phimoe": like(MISTRAL, MILLION | {"attention_bias": False}, bias="attention_bias"),
    "starcoder2": like(
        MISTRAL, {"num_key_value_heads": 2, "use_bias": True}, bias="use_bias"
    ),
    "minimax": like(
        MISTRAL,
        MILLION,
        layer_type=layer_rules.windowed(listed(cycle("", FULL, "linear_attention"))),
    ),
    "phi3": PHI_3,
    "phi4_multimodal": like(PHI_3, {"num_key_value_heads": 8}),
    "qwen2": QWEN_2,
    "qwen2_moe": like(
        QWEN_2,
        {"qkv_bias": True, "num_key_value_heads": 16},
        bias="qkv_bias",
        layer_type=layer_rules.lower_even_slide,
    ),
    "qwen3": QWEN_3,
    "qwen3_moe": like(
        QWEN_3, {"head_dim": None, "num_key_value_heads": 4}, layer_type=sliding
    ),
    "qwen2_vl_text qwen2_5_vl_text": like(
        QWEN_2,
        MILLION
        | {
            "max_window_layers": 80,
            "mrope_section": (16, 24, 24),
            "num_key_value_heads": 8,
        },
    ),
    "qwen3_vl_text": like(QWEN_3_VL, {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe_text": like(QWEN_3_VL, {"num_key_value_heads": 16}),
    "dots1": like(
        LLAMA,
        {"sliding_window": 4096, "max_window_layers": 62, "num_key_value_heads": 32},
        norm=RMS,
        layer_type=layer_rules.upper_slide,
    ),
    "apertus apertus1p5_text": like(
        LLAMA,
        {"rope_theta": 12e6, "rope_parameters": LLAMA_3, "rms_norm_eps": 1e-5},
        norm=RMS,
    ),
    "hy_v3": like(
        LLAMA, HEADS_8 | {"rope_theta": 11_158_840.0, "rms_norm_eps": 1e-5}, norm=RMS
    ),
    "mellum": like(
        LLAMA,
        HEADS_4
        | {"rope_theta": 5e5, "rope_local_base_freq": 1e4, "sliding_window": 1024},
        norm=RMS,
        layer_type=listed(full),
    ),
    "exaone4 exaone_moe": like(EXAONE_4, {"sliding_window_pattern": None}),
    "kolibri1": like(
        EXAONE_4,
        HEADS_4 | {"sliding_window": 513, "rms_norm_eps": 1e-6},
        layer_type=full_every(5),
    ),
    "flint": like(
        ROTATED_WINDOWS,
        {"sliding_window": 513},
        sinks=True,
        layer_type=layer_rules.flint,
    ),
    "lfm2 lfm2_moe": Family(
        keys=MILLION
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "full_attn_idxs": None},
        norm=RMS,
        layer_type=listed(layer_rules.indices("full_attn_idxs")),
    ),
    "nanochat": like(UNSCALED, {"rope_reversed": True}),
    "hunyuan_v1_dense hunyuan_v1_moe": like(
        LLAMA, {"rms_norm_eps": 1e-5}, norm=RMS_AFTER_ROPE
    ),
    "gemma": GEMMA,
    "gemma2 vaultgemma": like(
        GEMMA_2,
        {
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": None,
            "attn_logit_softcapping": 50.0,
        },
        layer_type=full_every(2),
    ),
    "gemma3_text": like(
        GEMMA_2,
        MILLION
        | {
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window_pattern": None,
        },
        norm=RMS,
        norm_scale="1 + weight",
        layer_type=full_every(6),
    ),
    "gemma3n_text": like(
        SHARING,
        {
            "rope_local_base_freq": 10_000.0,
            "hidden_size": 2048,
            "num_key_value_heads": 2,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 15,
        },
        layer_type=full_every(5),
    ),
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": like(
        GEMMA_4, {"sliding_window": 1024, "use_bidirectional_attention": "vision"}
    ),
    "gpt_oss": like(
        LLAMA,
        {
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        sinks=True,
        layer_type=full_every(2),
    ),
    "olmo": like(LLAMA, {"clip_qkv": None}),
    "olmoe": like(OLMO_2, {"clip_qkv": None}),
    "olmo2": OLMO_2,
    "flex_olmo": like(OLMO_2, {"rope_theta": 5e5, "rms_norm_eps": 1e-6}),
    "olmo3": like(
        OLMO_2,
        {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096},
        layer_type=full_every(4),
    ),
    "olmo_hybrid": like(
        OLMO_2,
        {"rms_norm_eps": 1e-6},
        layer_type=listed(cycle("", *["linear_attention"] * 3, FULL)),
        rotates=layer_rules.given_theta_rotates,
    ),
    "minimax_m2": Family(keys=MINIMAX | {"rotary_dim": None}, norm=RMS_OF_ALL_HEADS),
    "minimax_m3_vl_text": Family(
        keys=MINIMAX | {"num_key_value_heads": 4},
        norm=RMS,
        norm_scale="1 + weight",
        layer_type=listed(full),
    ),
    "glm4_moe": like(
        LLAMA,
        HALF | {"use_qk_norm": False, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        norm=RMS,
        norm_key="use_qk_norm",
    ),
    "sarvam_moe": like(
        LLAMA,
        {
            "rope_theta": 8e6,
            "partial_rotary_factor": 1.0,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "use_qk_norm": True,
            "use_qkv_bias": False,
        },
        bias="attention_bias use_qkv_bias",
        norm=RMS,
        norm_key="use_qk_norm",
    ),
    "glm glm4": like(
        LLAMA,
        HALF
        | {
            "rope_pairs": True,
            "attention_bias": True,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
    ),
    "glm4v_text": like(
        LLAMA,
        {
            "rope_pairs": True,
            "partial_rotary_factor": 1.0,
            "num_key_value_heads": 2,
            "mrope_section": (8, 12, 12),
        },
        bias=True,
    ),
    "helium": like(
        LLAMA,
        {
            "rope_pairs": True,
            "rope_theta": 100_000.0,
            "head_dim": 128,
            "num_key_value_heads": 20,
        },
    ),
    "ernie4_5": like(ERNIE, {"num_key_value_heads": 2, "head_dim": 128}),
    "ernie4_5_moe": ERNIE,
    "cohere": like(
        LLAMA,
        {
            "rope_pairs": True,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": False,
        },
        norm=NORM_OF_EACH_HEAD,
        norm_key="use_qk_norm",
    ),
    "cohere2": like(
        LLAMA,
        COHERE_2,
        layer_type=full_every(4),
        rotates=layer_rules.sliding_rotate,
    ),
    "cohere2_moe": like(
        LLAMA,
        COHERE_2
        | {
            "prefix_dense_sliding_window_pattern": 1,
            "mlp_layer_types": None,
            "first_k_dense_replace": 0,
            "head_dim": 128,
        },
        layer_type=layer_rules.cohere_moe,
        rotates=layer_rules.cohere_moe_rotates,
    ),
    "cohere_compass_text": like(
        LLAMA,
        COHERE_2 | {"rope_pairs": False},
        layer_type=listed(full),
        rotates=layer_rules.given_rotate,
    ),
    "smollm3": like(
        LLAMA,
        {
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        layer_type=layer_rules.unrotated_slide,
        rotates=layer_rules.listed_rotate,
    ),
    "llama4_text": like(
        UNSCALED,
        HEADS_8
        | {
            "rope_pairs": True,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
        },
        norm_key="use_qk_norm",
        layer_type=layer_rules.rotated_chunked,
        rotates=layer_rules.listed_rotate,
    ),
    "stablelm": Family(
        keys=ROPE
        | QUARTER
        | {"use_qkv_bias": False, "qk_layernorm": False, "num_key_value_heads": 32},
        bias="use_qkv_bias",
    ),
    "persimmon": like(PHI, {"qk_layernorm": True}),
    "phi": PHI,
    "gpt_neox": like(LLAMA, QUARTER | {"attention_bias": True}),
    "gpt_neox_japanese": Family(keys=ROPE | {"partial_rotary_factor": 1.0}),
    "gptj codegen": Family(keys=ROPE | {"rope_pairs": True, "rotary_dim": 64}),
    "dbrx": Family(keys=ROPE | {"clip_qkv": None, "num_key_value_heads": 1}),
    "falcon": Family(
        keys=ROPE
        | {
            "bias": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "num_kv_heads": None,
            "alibi": False,
            "n_embed": None,
        },
        bias="bias",
    ),
    "modernbert-decoder": like(
        LLAMA,
        MODERNBERT | {"sliding_window_pattern": None},
        layer_type=full_every(3, place=0),
    ),
    # With a gate.
    "qwen3_next qwen3_5_moe_text": QWEN_3_NEXT,
    "qwen3_5_text": like(QWEN_3_NEXT, {"num_key_value_heads": 4}),
    "afmoe": like(
        ROTATED_WINDOWS,
        {
            "num_key_value_heads": None,
            "sliding_window": 1024,
            "sliding_window_pattern": None,
            "rms_norm_eps": 1e-5,
        },
        gate=GATE,
        layer_type=full_every(4),
    ),
    "laguna": like(
        LLAMA,
        HEADS_8
        | {
            "sliding_window": 512,
            "gating": True,
            "num_attention_heads_per_layer": None,
            "partial_rotary_factor": 1.0,
            "rope_parameters": {
                FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        },
        norm=RMS,
        gate=Gate("head", "softplus"),
        gate_key="gating",
        layer_type=listed(full),
    ),
    "lfm3": like(
        LLAMA,
        HEADS_4
        | MILLION
        | {
            "sliding_window": 256,
            "use_attention_gate": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": GEMMA_4_ROPE | {FULL: GEMMA_4_ROPE[FULL] | HALF},
        },
        norm=RMS,
        gate=HEAD_GATE,
        gate_key="use_attention_gate",
        layer_type=layer_rules.lfm3,
    ),
    "hrm_text": like(LLAMA, {"head_dim": 128, "num_layers_per_stack": None}, gate=GATE),
    # With a norm before the output projection.
    "bitnet": like(
        LLAMA,
        {"rope_theta": 5e5, "num_key_value_heads": 5, "rms_norm_eps": 1e-5},
        out_norm=True,
    ),
    # With values of another head size.
    "mimo_v2_flash": like(
        LLAMA,
        {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 129,
            "sliding_window_size": None,
            "attention_value_scale": 0.707,
            "partial_rotary_factor": 0.334,
            "rope_parameters": {
                FULL: {"rope_theta": 5e6},
                SLIDING: {"rope_theta": 10_000.0},
            },
        },
        sinks=SLIDING,
        unscaled_fraction=True,
        layer_type=layer_rules.mimo,
    ),
    # With several transformers, or without keys of their own.
    "blt_global_transformer": BLT,
    "blt_local_encoder": like(BLT, {"sliding_window": None}, layer_type=sliding),
    "blt_local_decoder": like(
        BLT, {"sliding_window": ""}, layer_type=layer_rules.blt_decoder
    ),
    "blt_patcher": like(BLT, ROPE | {"sliding_window": 512}, layer_type=sliding),
    "gemma4_assistant gemma4_unified_assistant": like(GEMMA_4, {}, borrows_kv=True),
    # Latent attention.
    "deepseek_v3 kimi_k2 youtu youtu_llm axk1": DEEPSEEK_3,
    "sarvam_mla": like(DEEPSEEK_3, {"q_lora_rank": None}),
    "deepseek_v2": DEEPSEEK_2,
    "deepseek_v32": like(DEEPSEEK_3, INDEXER),
    "glm_moe_dsa": like(DEEPSEEK_3, GLM_5, layer_type=layer_rules.own_indexer),
    "axk2": like(
        DEEPSEEK_3,
        INDEXER
        | {
            "index_n_heads": 16,
            "kv_lora_rank": 128,
            "q_lora_rank": 384,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
        gate=GATE,
        query_residual=True,
    ),
    "hy_v4": like(
        LATENT,
        GLM_5
        | {
            "index_n_heads": 16,
            "indexer_rope_interleave": False,
            "indexer_rope_last": True,
            "q_lora_rank": 1536,
            "index_topk_freq": 4,
            "rms_norm_eps": 1e-5,
        },
        gate=GATE,
        sinks=True,
        layer_type=layer_rules.own_indexer,
    ),
    "glm4_moe_lite": like(
        DEEPSEEK_3, {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    ),
    "minicpm3": like(
        LATENT,
        {
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": None,
        },
    ),
    "mistral4": like(
        DEEPSEEK_3,
        {
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "rope_parameters": MINISTRAL
            | ROPE
            | {"factor": 128.0, "original_max_position_embeddings": 8192},
        },
    ),
    # Without rotary positions.
    "kimi_linear": Family(
        keys=LATENTS
        | {"attention_bias": False, "q_lora_rank": None, "linear_attn_config": None},
        bias="attention_bias",
        latent=True,
        layer_type=layer_rules.kimi_linear,
    ),
    "mpt": Family(
        keys={"alibi": True, "clip_qkv": None, "softmax_scale": None}, alibi=True
    ),
    "bloom": Family(keys={"n_embed": None}, bias=True, alibi=True),
    "gpt2 gpt-sw3": Family(
        keys={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        bias=True,
    ),
    "gpt_bigcode": Family(
        keys={"scale_attn_weights": True, "multi_query": True}, bias=True
    ),
    "gpt_neo": Family(
        keys={
            "sliding_window": 256,
            "attention_layers": None,
            "attention_types": [[["global", "local"], 12]],
        },
        bias=True,
        scale=1.0,
        layer_type=layer_rules.gpt_neo,
    ),
    "opt": Family(keys={"enable_bias": True}, bias="enable_bias"),
    "openai-gpt ctrl xglm biogpt git clip_text_model": Family(bias=True),
    "xlm": Family(keys={"causal": False}, bias=True, causal="causal"),
    "musicgen_decoder musicgen_melody_decoder": Family(),
    "jamba": Family(
        keys={"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
        layer_type=layer_rules.periodic,
    ),
    "nemotron_h": Family(
        keys=HEADS_8 | {"hybrid_override_pattern": None},
        layer_type=layer_rules.nemotron_h,
    ),
    "zamba": Family(
        keys=ZAMBA
        | {"attn_layer_period": 6, "attn_layer_offset": 4, "num_key_value_heads": 16},
        layer_type=layer_rules.zamba,
    ),
    # Hybrids with rotary positions.
    "bamba": like(
        LLAMA,
        HALF | {"num_key_value_heads": 8, "attn_layer_indices": ()},
        layer_type=layer_rules.indices("attn_layer_indices"),
    ),
    "granitemoehybrid": like(
        GRANITE,
        {"position_embedding_type": None},
        layer_type=layer_rules.no_attention,
        rotates=layer_rules.if_key("position_embedding_type", "rope"),
    ),
    "lara_mini": like(
        ROTATED_WINDOWS,
        {"sliding_window": 512},
        layer_type=listed(
            cycle("", "linear_attention", SLIDING, "linear_attention", FULL, SLIDING)
        ),
    ),
    "recurrent_gemma": like(
        LLAMA,
        HALF
        | {
            "sliding_window": 2048,
            "block_types": ("recurrent", "recurrent", "attention"),
        },
        bias=True,
        layer_type=layer_rules.windowed(cycle("block_types")),
    ),
    "zamba2": Family(
        keys=ZAMBA | ROPE | {"use_mem_rope": False},
        layer_type=layer_rules.refuse_unlisted,
        rotates=layer_rules.if_key("use_mem_rope"),
    ),
    # Encoders, and decoders that are made from them.
    "t5 mt5 umt5": Family(
        keys={"head_dim": 64, "relative_attention_max_distance": 128},
        scale=1.0,
        causal=None,
        relative_bias=True,
    ),
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert "
    "roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod": BERT,
    "roformer": like(BERT, ROPE | {"rope_pairs": True, "rotary_value": False}),
    "big_bird": like(
        BERT, {"use_bias": True, "attention_type": "block_sparse"}, bias="use_bias"
    ),
    "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr "
    "whisper": Family(bias=True, causal=None),
    "bigbird_pegasus": Family(keys={"use_bias": False}, bias="use_bias", causal=None),
    "vit dinov2 distilbert wav2vec2 clip siglip clip_vision_model siglip_text_model "
    "siglip_vision_model": Family(bias=True, causal=False),
    "longcat_flash": like(
        DEEPSEEK_2, {"rope_theta": 1e7}, scaled_latents=True, attentions=2
    ),
    "bailing_hybrid": like(
        DEEPSEEK_2,
        {"rope_theta": 6e6, "q_lora_rank": None, "full_attention_interval": 6},
        gate=HEAD_GATE,
        layer_type=layer_rules.rest_linear,
    ),
    # Families that the module cannot compute.
    "diffllama": Family(
        keys=ROPE,
        refused=f"it subtracts two softmaxes, which {MORE}; compute them with "
        "recipes.differential",
    ),
    "doge": Family(keys=ROPE, refused=f"its scores depend on the values, which {MORE}"),
    "qwen4_exp qwen4_exp_text": Family(
        keys=ROPE, refused=f"its indexer chooses blocks of keys, which {MORE}"
    ),
    "dory": Family(refused=f"its norms and gates have squared factors, which {MORE}"),
    "beam": Family(refused=f"its queries grow with their position, which {MORE}"),
    "dots3_note dots3_note_text": Family(
        keys={"rope_interleave": True},
        refused=f"its latents have a norm of the rotary key, which {MORE}",
    ),
    "deepseek_v4": Family(
        keys=ROPE | {"rope_interleave": True},
        refused="its queries also attend to weighted means of keys",
    ),
    "mamba mamba2 falcon_mamba rwkv xlstm": Family(
        refused="it is recurrent and has no softmax over keys"
    ),
    "xlnet": Family(
        refused="its scores have products of distance embeddings and shifted queries"
    ),
    "prophetnet": Family(
        refused="its layers compute several streams, with a bias that depends on "
        "queries"
    ),
    "inkling_text inkling2_text inkling2_loop_text": Family(
        refused="its keys and values pass through convolutions over tokens"
    ),
    "blt": Family(
        keys=ROPE,
        refused="it has four transformers; pass the config of one, such as "
        'config["global_config"]',
    ),
    "cpmant": Family(
        refused="its scores have learned biases by segment and distance, and it adds "
        "a prompt"
    ),
    "jetmoe": Family(
        keys=ROPE, refused="it routes queries and outputs through experts"
    ),
    "reformer": Family(refused="hashes determine which keys are visible"),
    "zaya": Family(
        keys=ROPE, refused="its queries, keys and values pass through convolutions"
    ),
    # Families whose configs are only read for rotary positions.
    "modernbert": Family(keys=MODERNBERT, refused=ONLY_ROPE),
    "moonshine": Family(
        keys=ROPE | {"rope_pairs": True, "partial_rotary_factor": 0.9},
        refused=ONLY_ROPE,
    ),
}
FAMILIES = {name: family for names, family in ROWS.items() for name in names.split()}
