"""The attention layers of many models: the same weights and config, here and in
PyTorch, give the same numbers.

Weights are random, under the names of the model's files. tests/torch_families.py has
the layers; if Transformers is installed, its own are compared, too.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_torch_convert
import torch
import torch_families as port
from flax import nnx
from marks import with_core

import flax_mha
from flax_mha import convert, recipes
from flax_mha._src.convert.state_dict import T5_TABLE

BATCH = 2
LENGTH = 13
PROMPT = 5
# Query heads, key heads, head size, features.
N = 4
K = 2
H = 8
D = 24
E = N * H  # features of models whose head size is features / heads
WINDOW = 4
TABLE = torch.from_numpy(
    np.random.default_rng(9).standard_normal((8, N)).astype(np.float32)
)
Shapes = dict[str, tuple[int, ...]]


def linears(names: str, features: int = E, kv: int = N, biased: str = "") -> Shapes:
    """The shapes of query, key, value and output; `biased` are those with a bias."""
    sizes = (
        (N * H, features),
        (kv * H, features),
        (kv * H, features),
        (features, N * H),
    )
    shapes: Shapes = {
        f"{name}.weight": shape
        for name, shape in zip(names.split(), sizes, strict=True)
    }
    return shapes | {
        f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased.split()
    }


def fused(
    name: str,
    out: str,
    rows: int,
    features: int,
    biased: bool,
    transposed: bool = False,
) -> Shapes:
    weights = {f"{name}.weight": (rows, features), f"{out}.weight": (features, N * H)}
    biases = {f"{name}.bias": (rows,), f"{out}.bias": (features,)} if biased else {}
    return {
        key: shape[::-1] if transposed else shape for key, shape in weights.items()
    } | biases


def kind_of(described):
    if "kv_lora_rank" in described:
        return flax_mha.MultiHeadLatentAttention
    return flax_mha.MultiHeadAttention


class Family(NamedTuple):
    """One kind of layer."""

    config: dict[str, Any]
    shapes: Shapes
    port: Callable[..., torch.Tensor]
    layout: convert.LayoutName
    prefix: str = "model.layers.1.self_attn."
    layer: int = 1
    decodes: bool = True
    call: Callable[[], dict[str, Any]] = dict  # other arguments of calls
    # Module and class of Transformers; its names of weights are these.
    transformers: str = ""

    def weights(self):
        """Random, with a size that makes scores and outputs about 1."""
        rng = np.random.default_rng(0)
        sizes = {
            key: shape[-1] ** -0.5 if len(shape) == 2 else 0.5
            for key, shape in self.shapes.items()
        }
        arrays = {
            key: rng.standard_normal(shape) * sizes[key]
            for key, shape in self.shapes.items()
        }
        return {
            key: torch.from_numpy(array.astype(np.float32))
            for key, array in arrays.items()
        }

    def state_dict(self):
        """With another layer."""
        others = {
            f"{self.prefix.replace('1', '0')}{key}": torch.zeros(3)
            for key in self.shapes
        }
        return others | {
            f"{self.prefix}{key}": value for key, value in self.weights().items()
        }

    def module(self, decode=False, **arguments):
        described = convert.describe(self.config, self.layer)
        module = kind_of(described)(
            **described | arguments, decode=decode, rngs=nnx.Rngs(0)
        )
        convert.load_torch(module, self.state_dict(), self.prefix)
        return module


LLAMA_NAMES = "q_proj k_proj v_proj o_proj"
OUT_NAMES = "q_proj k_proj v_proj out_proj"
QKV_NAMES = "q_proj k_proj v_proj"
GROUPED = {
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "hidden_size": D,
    "head_dim": H,
    "num_hidden_layers": 6,
}
SQUARE = {"num_attention_heads": N, "hidden_size": E, "num_hidden_layers": 2}
NORMS = {"q_norm.weight": (H,), "k_norm.weight": (H,)}
FULL = {"scalar": 5, "window": None}
LOCAL = {"scalar": 5, "window": WINDOW}
GEMMA_3 = GROUPED | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 5,
    "sliding_window": WINDOW,
    "more": NORMS,
}
GEMMA_3 |= {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
OSS_ROPE |= {"original_max_position_embeddings": 4096}
OSS = GROUPED | {
    "model_type": "gpt_oss",
    "sliding_window": WINDOW,
    "rope_theta": 150000.0,
    "rope_scaling": OSS_ROPE,
}
LLAMA_4 = GROUPED | {
    "model_type": "llama4_text",
    "attention_chunk_size": WINDOW,
    "floor_scale": 3,
    "attn_scale": 0.5,
}
LLAMA_4 |= {"rms_norm_eps": 1e-6}
MINISTRAL = {
    "rope_type": "yarn",
    "factor": 1.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 3,
}
MINISTRAL |= {"rope_theta": 1e6}
GEMMA_2 = GROUPED | {
    "model_type": "gemma2",
    "query_pre_attn_scalar": 5,
    "sliding_window": WINDOW,
    "rope_theta": 1e4,
}
OSS |= {"shapes": linears(LLAMA_NAMES, D, K, LLAMA_NAMES) | {"sinks": (N,)}}
LATENT = {
    "num_attention_heads": N,
    "hidden_size": D,
    "num_hidden_layers": 6,
    "kv_lora_rank": 10,
    "v_head_dim": 5,
}
LATENT |= {"qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "num_key_value_heads": N}
LATENT_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.7,
}
LATENT_ROPE |= {"mscale_all_dim": 1.3, "rope_theta": 1e4}


def split(kind, **config):
    """The fields of a family of this model type or, with a dot, of this class of
    Transformers.
    """
    transformers = kind if "." in kind else ""
    return {
        "config": {"model_type": kind.partition(".")[0]} | config,
        "transformers": transformers,
    }


def latent(kind, port, more=None, **config):
    """With `attention_bias`, only compressions and the output have biases."""
    config = LATENT | config
    rows = N * (7 + 6)
    rank = config["q_lora_rank"]
    biased = config.get("attention_bias")
    shapes = {"kv_a_proj_with_mqa.weight": (10 + 6, D), "kv_a_layernorm.weight": (10,)}
    shapes |= {"kv_b_proj.weight": (N * (7 + 5), 10), "o_proj.weight": (D, N * 5)}
    if rank:
        shapes |= {
            "q_a_proj.weight": (rank, D),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (rows, rank),
        }
    else:
        shapes |= {"q_proj.weight": (rows, D)}
    layers = [
        name
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
        if biased and f"{name}.weight" in shapes
    ]
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in layers}
    run = functools.partial(port, number=N, sizes=(10, 7, 6))
    return Family(
        shapes=shapes | (more or {}),
        port=run,
        layout="hf_deepseek",
        **split(kind, **config),
    )


def indexed(kind, run, more=None, without="-", **config):
    """With three of five to thirteen keys; `more` are shapes of other weights."""
    index = {"index_n_heads": 8, "index_head_dim": 9, "index_topk": 3, "q_lora_rank": 9}
    shapes = {
        "wq_b.weight": (8 * 9, 9),
        "wk.weight": (9, D),
        "weights_proj.weight": (8, D),
    }
    shapes |= {"k_norm.weight": (9,), "k_norm.bias": (9,)}
    family = latent(kind, run, **index | config)
    shapes = (
        family.shapes
        | {f"indexer.{key}": shape for key, shape in shapes.items()}
        | (more or {})
    )
    return family._replace(
        shapes={
            key: shape for key, shape in shapes.items() if not key.startswith(without)
        }
    )


def encoder(kind, names, biased, layout, prefix, decodes=False, **config):
    *projections, out = names.split()
    run = functools.partial(
        port.plain, number=N, names=" ".join(projections), out=out, is_causal=decodes
    )
    fields = split(kind, **SQUARE | config) | {"shapes": linears(names, biased=biased)}
    return Family(port=run, layout=layout, prefix=prefix, decodes=decodes, **fields)


def grouped(
    kind,
    run,
    run_options=None,
    more=None,
    shapes=None,
    layout="hf_llama",
    layer=1,
    **config,
):
    """Grouped heads with the names of Llama; `more` are shapes of other weights."""
    run = functools.partial(run, number=N, kv_number=K, **run_options or {})
    shapes = (shapes or linears(LLAMA_NAMES, D, K)) | (more or {})
    if kind == "llama4_text":
        prefix = f"model.layers.{layer}.self_attn."
    else:
        prefix = "model.layers.1.self_attn."
    return Family(
        shapes=shapes,
        port=run,
        layout=layout,
        layer=layer,
        prefix=prefix,
        **split(kind, **GROUPED | config),
    )


def one_matrix(
    kind,
    run,
    run_options,
    shapes,
    layout,
    prefix,
    base=None,
    call=dict,
    decodes=True,
    **config,
):
    """One matrix computes queries, keys and values."""
    run = functools.partial(run, number=N, **run_options)
    config = (base or SQUARE) | config
    family = Family(
        shapes=shapes, port=run, layout=layout, prefix=prefix, **split(kind, **config)
    )
    return family._replace(call=call, decodes=decodes)


GPT = {"n_embd": E, "n_head": N}
TIMM = "blocks.1.attn."
GPT_2 = GPT | {"n_layer": 2}
NEOX = fused("query_key_value", "dense", 3 * E, E, biased=True)
C_ATTN = fused("c_attn", "c_proj", 3 * E, E, biased=True, transposed=True)
OF_QUERIES = {"query_layernorm.weight": (H,), "key_layernorm.weight": (H,)}
BERT = "self.query self.key self.value output.dense"
DISTILBERT = "q_lin k_lin v_lin out_lin"
VIT = "attention.query attention.key attention.value output.dense"
IN_LAYER = "model.layers.1.self_attn."
IN_H = "transformer.h.1.attn."
COMPRESSED = {"q_lora_rank": 9, "attention_bias": True, "rope_scaling": LATENT_ROPE}
QWEN_2 = {
    "shapes": linears(LLAMA_NAMES, E, K, QKV_NAMES),
    "layout": "hf_qwen2",
    "rope_theta": 1e6,
    "hidden_size": E,
}
GATED = NORMS | {"q_proj.weight": (2 * N * H, D)}
GATE = NORMS | {"gate_proj.weight": (N * H, D)}
BITNET = {
    "more": {"attn_sub_norm.weight": (N * H,)},
    "rms_norm_eps": 1e-5,
    "hidden_size": E,
}
OF_HEADS = {"g_proj.weight": (N, D)}
MIMO = {
    "num_key_value_heads": 1,
    "v_head_dim": 5,
    "sliding_window": WINDOW,
    "partial_rotary_factor": 0.5,
}
MIMO |= {
    "more": {"v_proj.weight": (K * 5, D), "o_proj.weight": (D, N * 5), "sinks": (N,)},
    "sliding_window_size": None,
}
MIMO |= {
    "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}},
    "attention_value_scale": 0.5,
}
OF_ALL_HEADS = {"q_norm.weight": (N * H,), "k_norm.weight": (K * H,)}
OLMO_2 = {
    "shapes": linears(LLAMA_NAMES, E, K),
    "rope_theta": 5e5,
    "hidden_size": E,
    "rms_norm_eps": 1e-5,
}
PHI = linears(f"{QKV_NAMES} dense", biased=f"{QKV_NAMES} dense")
PHI_ROPE = {"partial_rotary_factor": 0.5}
PHI_3 = {
    "shapes": fused("qkv_proj", "o_proj", (N + 2 * K) * H, E, biased=False),
    "layout": "hf_phi3",
}
PHI_3 |= {"hidden_size": E, "rope_theta": 1e4, "sliding_window": WINDOW}
NEOX_ROPE = {"rotary_pct": 0.25, "rotary_emb_base": 10000}
FALCON, FALCON_1 = (
    fused("query_key_value", "dense", (N + 2 * k) * H, E, biased=False) for k in (K, 1)
)
FALCON_NEW = {"new_decoder_architecture": True, "num_kv_heads": K}
BLOOM = {"hidden_size": E, "n_head": N}
ALIBI = lambda: {"score_mod": recipes.alibi(N)["score_mod"]}
T5 = {"d_model": D, "d_kv": H, "num_heads": N}
T5_PREFIX = "decoder.block.1.layer.0.SelfAttention."
NORMS_OF_NEOX = {
    f"{x}_layernorm.{leaf}": (H,) for x in "qk" for leaf in ("weight", "bias")
}
MPT = {"d_model": E, "n_heads": N, "attn_config": {"clip_qkv": 0.7, "model_type": ""}}
WQKV, CODEGEN = (
    fused(name, "out_proj", 3 * E, E, biased=False) for name in ("Wqkv", "qkv_proj")
)
LFM_2 = {
    "shapes": linears(OUT_NAMES, D, K),
    "layout": "hf_lfm2",
    "norm_eps": 1e-5,
    "full_attn_idxs": [1],
}
LFM_2 |= {"more": {"q_layernorm.weight": (H,), "k_layernorm.weight": (H,)}}
TIMM_UNBIASED = fused("qkv", "proj", 3 * E, E, biased=False) | {"proj.bias": (E,)}
IN_VISION = "vision_model.encoder.layers.1.self_attn."
IN_DISTILBERT = "distilbert.transformer.layer.1.attention."
WHISPER = {"d_model": E, "encoder_attention_heads": N, "decoder_attention_heads": N}
IN_WHISPER = ("hf_whisper", "model.encoder.layers.1.self_attn.")
OUT = (OUT_NAMES, OUT_NAMES, "hf_clip")
IN_DINO = "dinov2.encoder.layer.1.attention."
VIT_5 = ("hf_llama", "vit.layers.1.attention.")
DINO_5 = ("hf_vit5_unbiased", "layers.1.attention.")
OF_EACH_HEAD = {"q_norm.weight": (N, H), "k_norm.weight": (K, H)}
MISTRAL = {"rope_theta": 1e4, "sliding_window": WINDOW}
QWEN_3_NEXT = {"more": GATED, "layout": "hf_qwen3_next", "full_attention_interval": 2}
PAIRINGS = (port.rotate_halves, port.rotate_every_two)
IN_NEOX = "gpt_neox.layers.1.attention."
IN_BLOOM = "h.1.self_attention."
IN_FALCON = ("hf_neox", "transformer.h.1.self_attention.")
GPT_2_BY = GPT_2 | {"scale_attn_by_inverse_layer_idx": True}
NANOGPT = fused("c_attn", "c_proj", 3 * E, E, biased=True)
T5_SHAPES = linears("q k v o", D)


V_32, GLM_5 = (
    functools.partial(port.deepseek_v3, index=(pairing, 3)) for pairing in PAIRINGS
)


def t5_bias():
    return {"score_mod": recipes.t5_bias(jnp.asarray(TABLE.numpy()))["score_mod"]}


FAMILIES = {
    "deepseek_v3": latent(
        "deepseek_v3.DeepseekV3Attention", port.deepseek_v3, **COMPRESSED
    ),
    "deepseek_v32": indexed("deepseek_v32", V_32, **COMPRESSED),
    "glm_moe_dsa": indexed("glm_moe_dsa", GLM_5, **COMPRESSED),
    "hy_v4": indexed(
        "hy_v4",
        port.hy_4,
        {"gate_proj.weight": (N * 5, D), "sinks": (N,)},
        rms_norm_eps=1e-2,
    ),
    "axk2": indexed(
        "axk2", port.axk_2, {"q_gate_proj.weight": (N * (7 + 6 + 5), 2 * 9)}, "q_b_proj"
    ),
    "minicpm3": latent("minicpm3.MiniCPM3Attention", port.minicpm_3, q_lora_rank=None),
    "longcat_flash": latent("longcat_flash", port.longcat, q_lora_rank=9),
    "bailing_hybrid": latent(
        "bailing_hybrid", port.bailing, OF_HEADS, layer_group_size=2, q_lora_rank=None
    ),
    "llama": grouped("llama.LlamaAttention", port.llama, {"base": 5e5}, rope_theta=5e5),
    "mistral": grouped(
        "mistral.MistralAttention",
        port.llama,
        {"base": 1e4, "window": WINDOW},
        **MISTRAL,
    ),
    "qwen2": grouped("qwen2.Qwen2Attention", port.llama, {"base": 1e6}, **QWEN_2),
    "qwen3": grouped(
        "qwen3.Qwen3Attention",
        port.qwen_3,
        {"epsilon": 1e-3},
        NORMS,
        rope_theta=1e6,
        rms_norm_eps=1e-3,
    ),
    "qwen3_next": grouped(
        "qwen3_next.Qwen3NextAttention", port.qwen_3_next, **QWEN_3_NEXT
    ),
    "afmoe": grouped(
        "afmoe.AfmoeAttention",
        port.afmoe,
        {"window": WINDOW},
        GATE,
        sliding_window=WINDOW,
    ),
    "bitnet": grouped(
        "bitnet.BitNetAttention",
        port.bitnet,
        shapes=linears(LLAMA_NAMES, E, K),
        **BITNET,
    ),
    "laguna": grouped("laguna", port.laguna, more=NORMS | OF_HEADS, layout="hf_laguna"),
    "mimo_v2_flash": grouped(
        "mimo_v2_flash", port.mimo, {"factor": 0.5, "size": 4, "window": WINDOW}, **MIMO
    ),
    "gemma": grouped("gemma.GemmaAttention", port.llama, {"base": 1e4}, rope_theta=1e4),
    "gemma2": grouped("gemma2.Gemma2Attention", port.gemma_2, FULL, **GEMMA_2),
    "gemma2 with a window": grouped(
        "gemma2.Gemma2Attention", port.gemma_2, LOCAL, layer=2, **GEMMA_2
    ),
    "gemma3": grouped("gemma3.Gemma3Attention", port.gemma_3, FULL, layer=5, **GEMMA_3),
    "gemma3 with a window": grouped(
        "gemma3.Gemma3Attention", port.gemma_3, LOCAL, **GEMMA_3
    ),
    "olmo2": grouped("olmo2.Olmo2Attention", port.olmo_2, more=OF_ALL_HEADS, **OLMO_2),
    "gpt_oss": grouped(
        "gpt_oss.GptOssAttention", port.gpt_oss, {"window": None}, **OSS
    ),
    "gpt_oss with a window": grouped(
        "gpt_oss.GptOssAttention", port.gpt_oss, {"window": WINDOW}, layer=2, **OSS
    ),
    "phi": one_matrix(
        "phi.PhiAttention",
        port.phi,
        {},
        PHI,
        "hf_phi",
        IN_LAYER,
        rope_theta=1e4,
        **PHI_ROPE,
    ),
    "phi3": grouped(
        "phi3.Phi3Attention", port.phi_3, {"size": H, "window": WINDOW}, **PHI_3
    ),
    "gptj": one_matrix(
        "gptj",
        port.gptj,
        {"size": 4},
        linears(OUT_NAMES),
        "hf_gptj",
        IN_H,
        GPT,
        rotary_dim=4,
    ),
    "gpt_neox": one_matrix(
        "gpt_neox.GPTNeoXAttention",
        port.gpt_neox,
        {},
        NEOX,
        "hf_neox",
        IN_NEOX,
        **NEOX_ROPE,
    ),
    "falcon": one_matrix(
        "falcon.FalconAttention",
        port.falcon,
        {"kv_number": K},
        FALCON,
        *IN_FALCON,
        **FALCON_NEW,
    ),
    "falcon, one key head": one_matrix(
        "falcon.FalconAttention", port.falcon, {"kv_number": 1}, FALCON_1, *IN_FALCON
    ),
    "bloom": one_matrix(
        "bloom.BloomAttention",
        port.bloom,
        {},
        NEOX,
        "hf_neox",
        IN_BLOOM,
        BLOOM,
        call=ALIBI,
    ),
    "gpt2": one_matrix(
        "gpt2.GPT2Attention", port.gpt_2, {}, C_ATTN, "hf_gpt2", IN_H, GPT_2
    ),
    "gpt2 by layer": one_matrix(
        "gpt2.GPT2Attention",
        port.gpt_2,
        {"layer": 1},
        C_ATTN,
        "hf_gpt2",
        IN_H,
        GPT_2_BY,
    ),
    "nanogpt": one_matrix("gpt2", port.nanogpt, {}, NANOGPT, "nanogpt", IN_H, GPT_2),
    "t5": one_matrix(
        "t5.T5Attention",
        port.t5,
        {"table": TABLE},
        T5_SHAPES,
        "hf_t5",
        T5_PREFIX,
        T5,
        call=t5_bias,
    ),
    "granite": grouped(
        "granite", port.llama, {"base": 1e4, "scale": 0.1}, attention_multiplier=0.1
    ),
    "falcon_h1": grouped(
        "falcon_h1",
        port.llama,
        {"base": 1e4, "scale": 0.5 * H**-0.5},
        key_multiplier=0.5,
    ),
    "smollm3 without rotary positions": grouped(
        "smollm3", port.llama, {"base": None}, no_rope_layers=[1, 0]
    ),
    "olmoe": grouped(
        "olmoe",
        port.olmoe,
        {"limit": 0.7},
        OF_ALL_HEADS,
        clip_qkv=0.7,
        **OLMO_2 | {"rope_theta": 1e4},
    ),
    "olmo": grouped("olmo", port.olmo, {"limit": 0.7}, clip_qkv=0.7),
    "llama4": grouped("llama4_text", port.llama_4, {"chunk": WINDOW}, **LLAMA_4),
    "llama4 without rotary positions": grouped(
        "llama4_text", port.llama_4, {"chunk": None}, layer=3, **LLAMA_4
    ),
    "ministral3": grouped("ministral3", port.ministral_3, rope_parameters=MINISTRAL),
    "hunyuan": grouped(
        "hunyuan_v1_dense", port.hunyuan, more=OF_QUERIES, layout="hf_hunyuan"
    ),
    "nanochat": grouped("nanochat", port.nanochat),
    "cohere with norms": grouped(
        "cohere", port.cohere, more=OF_EACH_HEAD, use_qk_norm=True
    ),
    "persimmon": one_matrix(
        "persimmon", port.persimmon, {}, NEOX | NORMS_OF_NEOX, "hf_neox", IN_LAYER
    ),
    "mpt": one_matrix(
        "mpt",
        port.mpt,
        {"limit": 0.7},
        WQKV,
        "hf_mpt",
        "transformer.blocks.1.attn.",
        MPT,
    ),
    "codegen": one_matrix(
        "codegen",
        port.codegen,
        {"size": 4},
        CODEGEN,
        "hf_codegen",
        IN_H,
        GPT,
        rotary_dim=4,
    ),
    "lfm2": grouped(
        "lfm2",
        port.qwen_3,
        {"epsilon": 1e-5, "out": "out_proj", "norm": "layernorm"},
        **LFM_2,
    ),
    "opt": encoder(
        "opt.OPTAttention", *OUT, "model.decoder.layers.1.self_attn.", decodes=True
    ),
    "bert": encoder(
        "bert.BertAttention", BERT, BERT, "hf_bert", "bert.encoder.layer.1.attention."
    ),
    "distilbert": encoder(
        "distilbert.DistilBertSelfAttention",
        DISTILBERT,
        DISTILBERT,
        "hf_distilbert",
        IN_DISTILBERT,
    ),
    "vit": encoder("vit", VIT, VIT, "hf_vit", "vit.encoder.layer.1.attention."),
    "dino without biases": encoder(
        "dinov2", VIT, "output.dense", "hf_vit_unbiased", IN_DINO, qkv_bias=False
    ),
    "vit of Transformers 5": encoder(
        "vit.ViTAttention", LLAMA_NAMES, LLAMA_NAMES, *VIT_5
    ),
    "dino of Transformers 5": encoder(
        "dinov2.Dinov2Attention", LLAMA_NAMES, "o_proj", *DINO_5, qkv_bias=False
    ),
    "timm": one_matrix(
        "vit",
        port.timm,
        {},
        fused("qkv", "proj", 3 * E, E, biased=True),
        "timm",
        TIMM,
        decodes=False,
    ),
    "timm without biases": one_matrix(
        "vit", port.timm, {}, TIMM_UNBIASED, "timm_unbiased", TIMM, decodes=False
    ),
    "clip": encoder(
        "clip.CLIPAttention", *OUT, IN_VISION, model_type="clip_vision_model"
    ),
    "siglip": encoder(
        "siglip.SiglipAttention", *OUT, IN_VISION, model_type="siglip_vision_model"
    ),
    "whisper": encoder(
        "whisper.WhisperAttention",
        OUT_NAMES,
        "q_proj v_proj out_proj",
        *IN_WHISPER,
        **WHISPER,
    ),
    "bart": encoder(
        "bart.BartAttention", *OUT, "encoder.layers.1.self_attn.", d_model=E
    ),
    "wav2vec2": encoder(
        "wav2vec2.Wav2Vec2Attention", *OUT, "wav2vec2.encoder.layers.1.attention."
    ),
}
CORE = "llama, deepseek_v3, qwen3_next, gemma2 with a window, gpt_oss, falcon, llama4, cohere with norms, bert"
# Every option in a cache once; the other families differ from these only in numbers and
# layouts.
ROUNDED = ("gemma3_text", "qwen3_next", "longcat_flash")
DECODED = "llama, deepseek_v3, deepseek_v32, minicpm3, qwen3, gemma2 with a window, gemma3, gpt_oss with a window, gptj, "
DECODED += "hy_v4, axk2, qwen3_next, bloom, t5, llama4, ministral3, hunyuan, "
DECODED += "persimmon, mimo_v2_flash"
FROM_HF = "llama, deepseek_v3, qwen3_next, mistral, bloom, t5, bert, gpt2, opt, whisper, llama4, mpt, nanochat"


def each(chosen, core=CORE):
    names = [name for name, family in FAMILIES.items() if chosen(name, family)]
    return pytest.mark.parametrize(
        "name", with_core(names, *(n for n in names if n in core.split(", ")))
    )


def test_every_layout_is_tried():
    others = {layout for layout, *_ in test_torch_convert.MODULES.values()}
    others |= {"hf_gpt_neo"}  # below, because `describe` does not know it
    # Only names; see test_convert.py.
    others |= {"hf_moshi", "hf_modernbert", "hf_ctrl"}
    assert {family.layout for family in FAMILIES.values()} >= {
        *convert.LAYOUTS
    } - others


@functools.cache
def module_of(name):
    """The module with its weights, which no test changes."""
    return FAMILIES[name].module()


@functools.cache
def inputs(features):
    """Inputs, and the gradient of the output."""
    return (
        np.random.default_rng(1)
        .standard_normal((2, BATCH, LENGTH, features))
        .astype(np.float32)
    )


def features(family):
    return convert.describe(family.config, family.layer)["in_features"]


@functools.cache
def by_torch(name):
    """The output, and the gradient of the input."""
    family = FAMILIES[name]
    x, slope = inputs(features(family))
    x = torch.from_numpy(x).requires_grad_()
    output = family.port(family.weights(), x)
    output.backward(torch.from_numpy(slope))
    return output.detach().numpy(), x.grad.numpy()


def assert_close(got, expected):
    """1e-5 of the largest value: float32 rounds to 6e-8, and sums have some 30 terms
    here.
    """
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max())
    )


@each(lambda name, family: True)
def test_outputs_and_gradients_of_inputs(name):
    family = FAMILIES[name]
    described = convert.describe(family.config, family.layer).items()
    options = tuple(
        (key, value) for key, value in described if key != "kernel_metadata"
    )
    params = nnx.to_pure_dict(nnx.state(module_of(name), nnx.Param))
    results = program(options, family.decodes, family.call)(
        params, *inputs(features(family))
    )
    for got, expected in zip(results, by_torch(name), strict=True):
        assert_close(got, expected)


@functools.cache
def program(options, is_causal, call):
    """A program that families with the same options share."""
    module = kind_of(dict(options))(**dict(options), decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    @jax.jit
    def run(params, x, slope):
        module = nnx.merge(graph, state, copy=True)
        nnx.update(module, params)
        output, vjp = jax.vjp(lambda x: module(x, is_causal=is_causal, **call()), x)
        return output, *vjp(slope)

    return run


@each(
    lambda name, family: name in DECODED.split(", "),
    "deepseek_v3, gemma2 with a window, llama4",
)
def test_prefill_and_eight_tokens(name):
    family = FAMILIES[name]
    x = inputs(features(family))[0]
    module = family.module(decode=True)
    module.init_cache(x.shape)
    run = nnx.jit(lambda module, x: module(x, **family.call()))
    steps = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))]
    assert_close(
        np.concatenate(
            [run(module, x[:, start:stop]) for start, stop in steps], axis=1
        ),
        by_torch(name)[0],
    )


@each(lambda name, family: name in FROM_HF.split(", "), "llama, t5, llama4")
def test_from_hf(name):
    """From a state dict with other layers, and other attentions of this layer."""
    family = FAMILIES[name]
    whole = {
        f"vision_model.layers.1.self_attn.{key}": torch.zeros(3)
        for key in linears(OUT_NAMES)
    }
    whole |= family.state_dict()
    whole |= (
        {f"decoder.block.0.layer.0.SelfAttention.{T5_TABLE}": TABLE}
        if name == "t5"
        else {}
    )
    module = convert.from_hf(family.config, whole, family.layer)
    assert_close(
        nnx.jit(lambda module, x: module(x))(module, inputs(features(family))[0]),
        by_torch(name)[0],
    )
    assert not [
        x for x in jax.tree.leaves(nnx.state(module)) if not isinstance(x, jax.Array)
    ]


@each(lambda name, family: True)
def test_round_trip_is_exact(name):
    """Also via the module. Norms of Gemma 3 and Qwen3-Next are 1 + weight, which
    float32 rounds to 2^-24.
    """
    family = FAMILIES[name]
    module = module_of(name)
    weights = family.weights()
    back = convert.to_torch(nnx.state(module, nnx.Param), family.layout)
    assert back.keys() == weights.keys()
    for key, weight in weights.items():
        rounded = family.config["model_type"] in ROUNDED
        tolerance = 2.0**-23 if rounded and "norm" in key else 0.0
        np.testing.assert_allclose(back[key], weight.numpy(), rtol=0, atol=tolerance)
    arrays = convert.from_torch(
        weights, N, getattr(module, "num_kv_heads", N), fill_biases=True
    )
    if name in ("llama4", "nanochat"):
        without_weights = {"query_ln", "key_ln"}
    else:
        without_weights = set()
    assert {*arrays} | without_weights == {
        *nnx.to_pure_dict(nnx.state(module, nnx.Param))
    }
    again = convert.to_torch(arrays, family.layout)
    assert {key: x.tobytes() for key, x in again.items()} == {
        key: x.numpy().tobytes() for key, x in weights.items()
    }


def test_a_layer_of_gpt_neo_is_not_scaled():
    weights = Family(
        {}, linears(OUT_NAMES, biased="out_proj"), port.plain, "hf_gpt_neo"
    ).weights()
    x = inputs(E)[0]
    unscaled = flax_mha.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scale must be 1\.0, but got None"):
        convert.load_torch(unscaled, weights)
    module = flax_mha.MultiHeadAttention(
        N, E, scale=1.0, decode=False, rngs=nnx.Rngs(0)
    )
    convert.load_torch(module, weights)
    expected = port.plain(
        weights,
        torch.from_numpy(x),
        N,
        QKV_NAMES,
        "out_proj",
        is_causal=True,
        scale=1.0,
    )
    assert_close(module(jnp.asarray(x), is_causal=True), expected.numpy())


def test_the_first_layer_of_t5_holds_the_bias_of_all_layers():
    weights = FAMILIES["t5"].weights()
    with pytest.raises(
        ValueError,
        match=r"got relative_attention_bias\.weight, .*recipes\.t5_bias\(table\)",
    ):
        convert.load_torch(
            module_of("t5"), weights | {"relative_attention_bias.weight": TABLE}
        )
    unscaled = flax_mha.MultiHeadAttention(
        N, D, N * H, use_bias=False, decode=False, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match=r"scale must be 1\.0, but got None"):
        convert.load_torch(unscaled, weights)


@each(lambda name, family: family.transformers, "")
def test_same_as_the_layer_of_transformers(name):
    pytest.importorskip(
        "transformers",
        minversion="5",
        reason="Transformers 5 is not installed, the ports count alone",
    )
    import torch_transformers

    family = FAMILIES[name]
    x = inputs(features(family))[0]
    arguments = (
        family.config,
        family.layer,
        family.transformers,
        family.weights(),
        torch.from_numpy(x),
    )
    expected = (
        torch_transformers.output(*arguments, family.decodes, TABLE).detach().numpy()
    )
    assert_close(
        module_of(name)(jnp.asarray(x), is_causal=family.decodes, **family.call()),
        expected,
    )
    assert_close(by_torch(name)[0], expected)
