"""The table of Hugging Face's model families: for each `model_type`, its attention and
the defaults of its config.

Model types with the same attention share a `Family`. tests/hf_families.py compares the
decoders with the models of Transformers; tests/test_torch_families.py compares the
encoders with PyTorch ports.
"""

from typing import Any, Literal, NamedTuple

from flax_mha._src.convert import defaults, layer_rules
from flax_mha._src.convert.layer_rules import (
    FULL,
    cycle,
    first_of,
    full,
    last_of,
    listed,
    sliding,
)
from flax_mha._src.modules.layers import Gate, Norm

NO_KEYS: layer_rules.Values = {}


class Family(NamedTuple):
    """Describes the attention of a Hugging Face model type: everything that its config
    does not say.

    `keys` maps the keys that its config may have, in addition to `COMMON` in
    read_config.py, to their defaults in Transformers. Keys that only other families
    have are not read. A family rotates queries and keys if its `keys` contain
    `rope_theta`.
    """

    keys: layer_rules.Values = NO_KEYS
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
    value_norm: bool = False  # values are normalized, without a scale
    shares_kv: bool = False  # layers may use keys as values, or another layer's keys
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


def like(family: Family, keys: layer_rules.Values, **fields: Any) -> Family:
    """Returns a copy of `family`.

    `keys` adds config keys, or replaces their defaults; `fields` replaces fields.
    """
    return family._replace(keys=family.keys | keys, **fields)


def alike(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


# Families that several model types share, or that other families extend.
RMS = Norm("rms")
RMS_OF_ALL_HEADS = Norm("rms", scale="heads", over="all_heads")
RMS_AFTER_ROPE = Norm("rms", after_rope=True)
NORM_OF_EACH_HEAD = Norm("layer", scale="heads")
GATE = Gate()
HEAD_GATE = Gate("head")
LLAMA = Family(keys=defaults.BIAS, bias="attention_bias")
BERT = Family(keys={"is_decoder": False}, bias=True, causal="is_decoder")
BART = Family(bias=True, causal=None)
ENCODER = Family(bias=True, causal=False)
MISTRAL = Family(
    keys=defaults.ROPE | {"num_key_value_heads": 8, "sliding_window": None},
    layer_type=sliding,
)
QWEN_2 = Family(keys=defaults.QWEN, bias=True, layer_type=layer_rules.upper_slide)
QWEN_3 = like(QWEN_2, {"head_dim": 128}, bias="attention_bias", norm=RMS)
QWEN_3_VL = like(
    LLAMA,
    {"rope_theta": 5e5, "mrope_section": (24, 20, 20), "mrope_interleaved": True},
    norm=RMS,
)
OLMO_2 = like(LLAMA, {"rms_norm_eps": 1e-5}, norm=RMS_OF_ALL_HEADS)
EXAONE_4 = Family(
    keys=defaults.EXAONE,
    norm=RMS,
    layer_type=last_of(4),
    rotates=layer_rules.sliding_or_all_rotate,
)
GRANITE = like(LLAMA, {"attention_multiplier": 1.0})
SWA: layer_rules.Values = {"sliding_window": 128, "layer_rope_theta": None}
GRANITE_SWA = like(
    GRANITE,
    SWA,
    sinks=True,
    layer_type=first_of(4),
    rotates=layer_rules.with_theta_rotate,
)
LATENT = Family(
    keys=defaults.LATENTS | {"rope_interleave": True},
    bias="attention_bias",
    latent=True,
)
DEEPSEEK_2 = Family(
    keys=defaults.LATENTS | {"rope_pairs": True}, bias="attention_bias", latent=True
)
GEMMA_3N = like(
    LLAMA,
    defaults.GEMMA_3N,
    norm=RMS,
    value_norm=True,
    shares_kv=True,
    scale=1.0,
    layer_type=last_of(5, ""),
)
GEMMA_4 = GEMMA_3N._replace(
    keys=defaults.GEMMA_4, layer_type=layer_rules.last_full(last_of(6, ""))
)
QWEN_3_NEXT = like(
    LLAMA,
    defaults.QWEN_NEXT,
    norm=RMS,
    norm_scale="1 + weight",
    gate=GATE,
    layer_type=layer_rules.rest_linear,
)
ROTATED_WINDOWS = like(
    LLAMA, defaults.HEADS_4, norm=RMS, rotates=layer_rules.sliding_rotate
)
UNSCALED = like(LLAMA, {}, norm=RMS_AFTER_ROPE, norm_scale="none")
PHI = Family(
    keys=defaults.PHI, bias=True, norm=Norm("layer", bias=True), norm_key="qk_layernorm"
)
BLT = Family(keys={"rope_theta": 5e5, "rope_pairs": True})
CONVOLVED = Family(
    keys={}, refused="its keys and values pass through convolutions over tokens"
)
MORE = "needs more than the module's options"
ONLY_ROPE = "only its rotary positions are supported"

FAMILIES: dict[str, Family] = {
    **alike("llama arcee aria_text internlm3 iquestcoder", LLAMA),
    "exaone": like(LLAMA, {"rope_theta": 500_000.0, "num_key_value_heads": 8}),
    "jais2": like(LLAMA, {"attention_bias": True}),
    "emu3_text_model": like(LLAMA, defaults.MILLION | {"num_key_value_heads": 8}),
    "hyperclovax": like(LLAMA, {"attention_multiplier": None}),
    **alike("granite granitemoe granitemoeshared", GRANITE),
    "granite_swa": like(GRANITE_SWA, {"num_key_value_heads": 4}),
    "granitemoe_swa": GRANITE_SWA,
    "seed_oss": like(LLAMA, defaults.SEED, bias="attention_bias attention_out_bias"),
    "nemotron": like(LLAMA, defaults.HALF),
    "solar_open": like(
        LLAMA, defaults.MILLION | defaults.HEADS_8 | {"partial_rotary_factor": 1.0}
    ),
    "falcon_h1": like(LLAMA, {"key_multiplier": 1.0, "num_key_value_heads": 8}),
    "mllama_text_model": Family(
        keys=defaults.CROSS, layer_type=layer_rules.cross_listed
    ),
    "moshi": Family(keys=defaults.ROPE),
    "cwm": Family(
        keys=defaults.CWM | {"num_key_value_heads": 8}, layer_type=first_of(4)
    ),
    "mistral": like(MISTRAL, {"sliding_window": 4096}),
    "ministral": like(MISTRAL, {"sliding_window": 4096}, layer_type=listed(sliding)),
    "ministral3": like(
        MISTRAL, {"rope_parameters": defaults.MINISTRAL, "head_dim": 128}
    ),
    "mixtral": like(MISTRAL, defaults.MILLION),
    "phimoe": like(
        MISTRAL, defaults.MILLION | {"attention_bias": False}, bias="attention_bias"
    ),
    "starcoder2": like(
        MISTRAL, {"num_key_value_heads": 2, "use_bias": True}, bias="use_bias"
    ),
    "minimax": like(
        MISTRAL,
        defaults.MILLION,
        layer_type=layer_rules.windowed(listed(cycle("", FULL, "linear_attention"))),
    ),
    "phi3": Family(keys=defaults.WHOLE, layer_type=sliding),
    "phi4_multimodal": Family(
        keys=defaults.WHOLE | {"num_key_value_heads": 8}, layer_type=sliding
    ),
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
    **alike("qwen2_vl_text qwen2_5_vl_text", like(QWEN_2, defaults.QWEN_2_VL)),
    "qwen3_vl_text": like(QWEN_3_VL, {"num_key_value_heads": 32, "head_dim": 128}),
    "qwen3_vl_moe_text": like(QWEN_3_VL, {"num_key_value_heads": 16, "head_dim": None}),
    "dots1": Family(
        keys=defaults.DOTS,
        bias="attention_bias",
        norm=RMS,
        layer_type=layer_rules.upper_slide,
    ),
    **alike(
        "apertus apertus1p5_text",
        Family(keys=defaults.APERTUS, bias="attention_bias", norm=RMS),
    ),
    "hy_v3": like(
        LLAMA,
        defaults.HEADS_8 | {"rope_theta": 11_158_840.0, "rms_norm_eps": 1e-5},
        norm=RMS,
    ),
    "mellum": like(LLAMA, defaults.MELLUM, norm=RMS, layer_type=listed(full)),
    **alike("exaone4 exaone_moe", EXAONE_4),
    "kolibri1": like(
        EXAONE_4,
        defaults.HEADS_4 | {"sliding_window": 513, "rms_norm_eps": 1e-6},
        layer_type=last_of(5, ""),
    ),
    "flint": like(
        ROTATED_WINDOWS,
        {"sliding_window": 513},
        sinks=True,
        layer_type=layer_rules.flint,
    ),
    **alike(
        "lfm2 lfm2_moe",
        Family(
            keys=defaults.LFM,
            norm=RMS,
            layer_type=listed(layer_rules.indices("full_attn_idxs")),
        ),
    ),
    "nanochat": like(UNSCALED, {"rope_reversed": True}),
    **alike(
        "hunyuan_v1_dense hunyuan_v1_moe",
        like(LLAMA, {"rms_norm_eps": 1e-5}, norm=RMS_AFTER_ROPE),
    ),
    "gemma": Family(keys=defaults.GEMMA, bias="attention_bias"),
    **alike(
        "gemma2 vaultgemma",
        like(
            LLAMA,
            defaults.GEMMA_2 | {"attn_logit_softcapping": 50.0},
            layer_type=last_of(2),
        ),
    ),
    "gemma3_text": Family(
        keys=defaults.GEMMA_3,
        bias="attention_bias",
        norm=RMS,
        norm_scale="1 + weight",
        layer_type=last_of(6),
    ),
    "gemma3n_text": GEMMA_3N,
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": like(
        GEMMA_4, {"sliding_window": 1024, "use_bidirectional_attention": "vision"}
    ),
    "gpt_oss": Family(
        keys=defaults.GPT_OSS, bias="attention_bias", sinks=True, layer_type=last_of(2)
    ),
    "olmo": like(LLAMA, {"clip_qkv": None}),
    "olmoe": like(OLMO_2, {"clip_qkv": None}),
    "olmo2": OLMO_2,
    "flex_olmo": like(OLMO_2, {"rope_theta": 5e5, "rms_norm_eps": 1e-6}),
    "olmo3": like(
        OLMO_2,
        {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096},
        layer_type=last_of(4),
    ),
    "olmo_hybrid": like(
        OLMO_2,
        {"rms_norm_eps": 1e-6},
        layer_type=listed(cycle("", *["linear_attention"] * 3, FULL)),
        rotates=layer_rules.given_theta_rotates,
    ),
    "minimax_m2": Family(
        keys=defaults.MINIMAX | {"rotary_dim": None}, norm=RMS_OF_ALL_HEADS
    ),
    "minimax_m3_vl_text": Family(
        keys=defaults.MINIMAX | {"num_key_value_heads": 4},
        norm=RMS,
        norm_scale="1 + weight",
        layer_type=listed(full),
    ),
    "glm4_moe": like(LLAMA, defaults.GLM_MOE, norm=RMS, norm_key="use_qk_norm"),
    "sarvam_moe": Family(
        keys=defaults.SARVAM,
        bias="attention_bias use_qkv_bias",
        norm=RMS,
        norm_key="use_qk_norm",
    ),
    **alike("glm glm4", Family(keys=defaults.GLM, bias="attention_bias")),
    "glm4v_text": Family(keys=defaults.GLM_4V, bias=True),
    "helium": Family(
        keys=defaults.PAIRS
        | {"rope_theta": 100_000.0, "head_dim": 128, "num_key_value_heads": 20},
        bias="attention_bias",
    ),
    "ernie4_5": Family(
        keys=defaults.ERNIE | {"num_key_value_heads": 2, "head_dim": 128},
        bias="use_bias",
    ),
    "ernie4_5_moe": Family(
        keys=defaults.ERNIE | {"num_key_value_heads": 4}, bias="use_bias"
    ),
    "cohere": Family(
        keys=defaults.COHERE | {"use_qk_norm": False},
        bias="attention_bias",
        norm=Norm("layer", scale="heads"),
        norm_key="use_qk_norm",
    ),
    "cohere2": Family(
        keys=defaults.COHERE_2,
        bias="attention_bias",
        layer_type=last_of(4),
        rotates=layer_rules.sliding_rotate,
    ),
    "cohere2_moe": like(
        LLAMA,
        defaults.COHERE_MOE,
        layer_type=layer_rules.cohere_moe,
        rotates=layer_rules.cohere_moe_rotates,
    ),
    "cohere_compass_text": like(
        LLAMA,
        defaults.COHERE_2 | {"rope_pairs": False},
        layer_type=listed(full),
        rotates=layer_rules.given_rotate,
    ),
    "smollm3": like(
        LLAMA,
        defaults.SMOLLM,
        layer_type=layer_rules.unrotated_slide,
        rotates=layer_rules.listed_rotate,
    ),
    "llama4_text": like(
        UNSCALED,
        defaults.LLAMA_4,
        norm_key="use_qk_norm",
        layer_type=layer_rules.rotated_chunked,
        rotates=layer_rules.listed_rotate,
    ),
    "stablelm": Family(keys=defaults.STABLELM, bias="use_qkv_bias"),
    "persimmon": like(PHI, {"qk_layernorm": True}),
    "phi": PHI,
    "gpt_neox": Family(
        keys=defaults.QUARTER | {"attention_bias": True}, bias="attention_bias"
    ),
    "gpt_neox_japanese": Family(keys=defaults.ROPE | {"partial_rotary_factor": 1.0}),
    **alike("gptj codegen", Family(keys=defaults.PAIRS | {"rotary_dim": 64})),
    "dbrx": Family(keys=defaults.ROPE | {"clip_qkv": None, "num_key_value_heads": 1}),
    "falcon": Family(keys=defaults.FALCON, bias="bias"),
    "modernbert-decoder": like(
        LLAMA, defaults.MODERNBERT, layer_type=first_of(3, "global_attn_every_n_layers")
    ),
    # With a gate.
    **alike("qwen3_next qwen3_5_moe_text", QWEN_3_NEXT),
    "qwen3_5_text": like(QWEN_3_NEXT, {"num_key_value_heads": 4}),
    "afmoe": like(
        ROTATED_WINDOWS,
        defaults.AFMOE,
        gate=GATE,
        layer_type=last_of(4, "global_attn_every_n_layers"),
    ),
    "laguna": like(
        LLAMA,
        defaults.LAGUNA,
        norm=RMS,
        gate=Gate("head", "softplus"),
        gate_key="gating",
        layer_type=listed(full),
    ),
    "lfm3": like(
        LLAMA,
        defaults.LFM_3,
        norm=RMS,
        gate=HEAD_GATE,
        gate_key="use_attention_gate",
        layer_type=layer_rules.lfm3,
    ),
    "hrm_text": Family(
        keys=defaults.BIAS | {"head_dim": 128, "num_layers_per_stack": None},
        bias="attention_bias",
        gate=GATE,
    ),
    # With a norm before the output projection.
    "bitnet": like(
        LLAMA,
        {"rope_theta": 5e5, "num_key_value_heads": 5, "rms_norm_eps": 1e-5},
        out_norm=True,
    ),
    # With values of another head size.
    "mimo_v2_flash": like(
        LLAMA,
        defaults.MIMO,
        sinks=layer_rules.SLIDING,
        unscaled_fraction=True,
        layer_type=layer_rules.mimo,
    ),
    # With several transformers, or without keys of their own.
    "blt_global_transformer": BLT,
    "blt_local_encoder": like(BLT, {"sliding_window": None}, layer_type=sliding),
    "blt_local_decoder": like(
        BLT, {"sliding_window": ""}, layer_type=layer_rules.blt_decoder
    ),
    "blt_patcher": like(
        BLT, {"rope_theta": 10_000.0, "sliding_window": 512}, layer_type=sliding
    ),
    **alike(
        "gemma4_assistant gemma4_unified_assistant", GEMMA_4._replace(borrows_kv=True)
    ),
    # Latent attention.
    **alike("deepseek_v3 kimi_k2 youtu youtu_llm axk1", LATENT),
    "sarvam_mla": like(LATENT, {"q_lora_rank": None}),
    "deepseek_v2": DEEPSEEK_2,
    "deepseek_v32": like(LATENT, defaults.INDEXER),
    "glm_moe_dsa": like(LATENT, defaults.GLM_5, layer_type=layer_rules.own_indexer),
    "axk2": like(LATENT, defaults.AXK_2, gate=GATE, query_residual=True),
    "hy_v4": Family(
        keys=defaults.HY_4,
        bias="attention_bias",
        latent=True,
        gate=GATE,
        sinks=True,
        layer_type=layer_rules.own_indexer,
    ),
    "glm4_moe_lite": like(
        LATENT, {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    ),
    "minicpm3": Family(keys=defaults.MINICPM, bias="attention_bias", latent=True),
    "mistral4": like(
        LATENT,
        {
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "rope_parameters": defaults.MISTRAL_4,
        },
    ),
    "kimi_linear": Family(
        keys=defaults.KIMI_LINEAR,
        bias="attention_bias",
        latent=True,
        layer_type=layer_rules.kimi_linear,
    ),
    # Without rotary positions.
    "mpt": Family(
        keys={"alibi": True, "clip_qkv": None, "softmax_scale": None}, alibi=True
    ),
    "bloom": Family(keys={"n_embed": None}, bias=True, alibi=True),
    **alike(
        "gpt2 gpt-sw3",
        Family(
            keys={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
            bias=True,
        ),
    ),
    "gpt_bigcode": Family(
        keys={"scale_attn_weights": True, "multi_query": True}, bias=True
    ),
    "gpt_neo": Family(
        keys=defaults.GPT_NEO, bias=True, scale=1.0, layer_type=layer_rules.gpt_neo
    ),
    "opt": Family(keys={"enable_bias": True}, bias="enable_bias"),
    **alike("openai-gpt ctrl xglm biogpt git", Family(bias=True)),
    "xlm": Family(keys={"causal": False}, bias=True, causal="causal"),
    **alike("musicgen_decoder musicgen_melody_decoder", Family()),
    "jamba": Family(
        keys={"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
        layer_type=layer_rules.periodic,
    ),
    "nemotron_h": Family(keys=defaults.NEMOTRON_H, layer_type=layer_rules.nemotron_h),
    "zamba": Family(keys=defaults.ZAMBA_1, layer_type=layer_rules.zamba),
    # Hybrids with rotary positions.
    "bamba": like(
        LLAMA,
        defaults.HALF | {"num_key_value_heads": 8, "attn_layer_indices": ()},
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
        layer_type=listed(cycle("", *defaults.LARA_MINI)),
    ),
    "recurrent_gemma": Family(
        keys=defaults.HALF
        | {
            "sliding_window": 2048,
            "block_types": ("recurrent", "recurrent", "attention"),
        },
        bias=True,
        layer_type=layer_rules.windowed(cycle("block_types")),
    ),
    "zamba2": Family(
        keys=defaults.ZAMBA | defaults.ROPE | {"use_mem_rope": False},
        layer_type=layer_rules.refuse_unlisted,
        rotates=layer_rules.if_key("use_mem_rope"),
    ),
    # Encoders, and decoders that are made from them.
    **alike(
        "t5 mt5 umt5",
        Family(
            keys={"head_dim": 64, "relative_attention_max_distance": 128},
            scale=1.0,
            causal=None,
            relative_bias=True,
        ),
    ),
    **alike(
        "bert bert-generation camembert data2vec-text electra ernie megatron-bert "
        "rembert roberta",
        BERT,
    ),
    **alike("roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod", BERT),
    "roformer": like(BERT, defaults.ROPE | {"rope_pairs": True, "rotary_value": False}),
    "big_bird": like(
        BERT, {"use_bias": True, "attention_type": "block_sparse"}, bias="use_bias"
    ),
    **alike(
        "bart blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr "
        "whisper",
        BART,
    ),
    "bigbird_pegasus": Family(keys={"use_bias": False}, bias="use_bias", causal=None),
    **alike("vit dinov2 distilbert wav2vec2 clip siglip clip_vision_model", ENCODER),
    **alike("siglip_text_model siglip_vision_model", ENCODER),
    "clip_text_model": Family(bias=True),
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
        keys=defaults.ROPE,
        refused=f"it subtracts two softmaxes, which {MORE}; compute them with "
        "recipes.differential",
    ),
    "doge": Family(
        keys=defaults.ROPE, refused=f"its scores depend on the values, which {MORE}"
    ),
    **alike(
        "qwen4_exp qwen4_exp_text",
        Family(
            keys=defaults.ROPE,
            refused=f"its indexer chooses blocks of keys, which {MORE}",
        ),
    ),
    "dory": Family(
        keys={}, refused=f"its norms and gates have squared factors, which {MORE}"
    ),
    "beam": Family(refused=f"its queries grow with their position, which {MORE}"),
    **alike(
        "dots3_note dots3_note_text",
        Family(
            keys={"rope_interleave": True},
            refused=f"its latents have a norm of the rotary key, which {MORE}",
        ),
    ),
    "deepseek_v4": Family(
        keys=defaults.INTERLEAVE,
        refused="its queries also attend to weighted means of keys",
    ),
    **alike(
        "mamba mamba2 falcon_mamba rwkv xlstm",
        Family(refused="it is recurrent and has no softmax over keys"),
    ),
    "xlnet": Family(
        keys={},
        refused="its scores have products of distance embeddings and shifted queries",
    ),
    "prophetnet": Family(
        keys={},
        refused="its layers compute several streams, with a bias that depends on "
        "queries",
    ),
    **alike("inkling_text inkling2_text inkling2_loop_text", CONVOLVED),
    "blt": Family(
        keys=defaults.ROPE,
        refused="it has four transformers; pass the config of one, such as "
        'config["global_config"]',
    ),
    "cpmant": Family(
        keys={},
        refused="its scores have learned biases by segment and distance, and it adds "
        "a prompt",
    ),
    "jetmoe": Family(
        keys=defaults.ROPE, refused="it routes queries and outputs through experts"
    ),
    "reformer": Family(refused="hashes determine which keys are visible"),
    "zaya": Family(
        keys=defaults.ROPE,
        refused="its queries, keys and values pass through convolutions",
    ),
    # Families whose configs are only read for rotary positions.
    "modernbert": Family(keys=defaults.MODERNBERT, refused=ONLY_ROPE),
    "moonshine": Family(
        keys=defaults.PAIRS | {"partial_rotary_factor": 0.9}, refused=ONLY_ROPE
    ),
}
