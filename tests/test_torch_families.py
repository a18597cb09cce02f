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
from marks import named, with_core

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
    query, key, value, out = names.split()
    shapes: Shapes = {
        f"{query}.weight": (N * H, features),
        f"{key}.weight": (kv * H, features),
        f"{value}.weight": (kv * H, features),
        f"{out}.weight": (features, N * H),
    }
    for name in biased.split():
        shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return shapes


def fused(
    name: str,
    out: str,
    rows: int,
    features: int,
    biased: bool,
    transposed: bool = False,
) -> Shapes:
    """The shapes of a layer with one matrix for queries, keys and values."""
    shapes: Shapes = {
        f"{name}.weight": (rows, features),
        f"{out}.weight": (features, N * H),
    }
    if transposed:
        shapes = {key: shape[::-1] for key, shape in shapes.items()}
    if biased:
        shapes |= {f"{name}.bias": (rows,), f"{out}.bias": (features,)}
    return shapes


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
        weights = {}
        for key, shape in self.shapes.items():
            size = shape[-1] ** -0.5 if len(shape) == 2 else 0.5
            array = rng.standard_normal(shape) * size
            weights[key] = torch.from_numpy(array.astype(np.float32))
        return weights

    def state_dict(self):
        """With another layer."""
        other = self.prefix.replace("1", "0")
        entries = {other + key: torch.zeros(3) for key in self.shapes}
        for key, weight in self.weights().items():
            entries[self.prefix + key] = weight
        return entries

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
LATENT = {
    "num_attention_heads": N,
    "num_key_value_heads": N,
    "hidden_size": D,
    "num_hidden_layers": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
}


def config_and_class(kind, **config):
    """The fields of a family of this model type or, with a dot, of this class of
    Transformers.
    """
    model_type, dot, _ = kind.partition(".")
    return {
        "config": {"model_type": model_type} | config,
        "transformers": kind if dot else "",
    }


def latent(kind, port, more=None, **config):
    """With `attention_bias`, only compressions and the output have biases."""
    config = LATENT | config
    rows = N * (7 + 6)
    rank = config["q_lora_rank"]
    shapes = {
        "kv_a_proj_with_mqa.weight": (10 + 6, D),
        "kv_a_layernorm.weight": (10,),
        "kv_b_proj.weight": (N * (7 + 5), 10),
        "o_proj.weight": (D, N * 5),
    }
    if rank:
        shapes["q_a_proj.weight"] = (rank, D)
        shapes["q_a_layernorm.weight"] = (rank,)
        shapes["q_b_proj.weight"] = (rows, rank)
    else:
        shapes["q_proj.weight"] = (rows, D)
    if config.get("attention_bias"):
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            if f"{name}.weight" in shapes:
                shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    return Family(
        shapes=shapes | (more or {}),
        port=functools.partial(port, number=N, sizes=(10, 7, 6)),
        layout="hf_deepseek",
        **config_and_class(kind, **config),
    )


def indexed(kind, run, more=None, without="-", **config):
    """With three of five to thirteen keys; `more` are shapes of other weights."""
    index = {"index_n_heads": 8, "index_head_dim": 9, "index_topk": 3, "q_lora_rank": 9}
    family = latent(kind, run, **index | config)
    shapes = family.shapes | {
        "indexer.wq_b.weight": (8 * 9, 9),
        "indexer.wk.weight": (9, D),
        "indexer.weights_proj.weight": (8, D),
        "indexer.k_norm.weight": (9,),
        "indexer.k_norm.bias": (9,),
    }
    shapes |= more or {}
    shapes = {key: x for key, x in shapes.items() if not key.startswith(without)}
    return family._replace(shapes=shapes)


def encoder(kind, names, biased, layout, prefix, decodes=False, **config):
    """Attention with heads of features / heads, a matrix for each projection."""
    *projections, out = names.split()
    run = functools.partial(
        port.plain, number=N, names=" ".join(projections), out=out, is_causal=decodes
    )
    return Family(
        shapes=linears(names, biased=biased),
        port=run,
        layout=layout,
        prefix=prefix,
        decodes=decodes,
        **config_and_class(kind, **SQUARE | config),
    )


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
    shapes = shapes or linears(LLAMA_NAMES, D, K)
    return Family(
        shapes=shapes | (more or {}),
        port=functools.partial(run, number=N, kv_number=K, **run_options or {}),
        layout=layout,
        layer=layer,
        **config_and_class(kind, **GROUPED | config),
    )


def one_matrix(
    kind,
    run,
    shapes,
    layout,
    prefix,
    run_options=None,
    base=SQUARE,
    call=dict,
    decodes=True,
    **config,
):
    """One matrix computes queries, keys and values."""
    return Family(
        shapes=shapes,
        port=functools.partial(run, number=N, **run_options or {}),
        layout=layout,
        prefix=prefix,
        call=call,
        decodes=decodes,
        **config_and_class(kind, **base | config),
    )


FAMILIES: dict[str, Family] = {}

# Latent attention, without and with an indexer.
LATENT_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "rope_theta": 1e4,
}
COMPRESSED = {"q_lora_rank": 9, "attention_bias": True, "rope_scaling": LATENT_ROPE}
OF_HEADS = {"g_proj.weight": (N, D)}
FAMILIES["deepseek_v3"] = latent(
    "deepseek_v3.DeepseekV3Attention", port.deepseek_v3, **COMPRESSED
)
FAMILIES["deepseek_v32"] = indexed(
    "deepseek_v32",
    functools.partial(port.deepseek_v3, index=(port.rotate_halves, 3)),
    **COMPRESSED,
)
FAMILIES["glm_moe_dsa"] = indexed(
    "glm_moe_dsa",
    functools.partial(port.deepseek_v3, index=(port.rotate_every_two, 3)),
    **COMPRESSED,
)
FAMILIES["hy_v4"] = indexed(
    "hy_v4",
    port.hy_4,
    more={"gate_proj.weight": (N * 5, D), "sinks": (N,)},
    rms_norm_eps=1e-2,
)
FAMILIES["axk2"] = indexed(
    "axk2",
    port.axk_2,
    more={"q_gate_proj.weight": (N * (7 + 6 + 5), 2 * 9)},
    without="q_b_proj",
)
FAMILIES["minicpm3"] = latent(
    "minicpm3.MiniCPM3Attention", port.minicpm_3, q_lora_rank=None
)
FAMILIES["longcat_flash"] = latent("longcat_flash", port.longcat, q_lora_rank=9)
FAMILIES["bailing_hybrid"] = latent(
    "bailing_hybrid",
    port.bailing,
    more=OF_HEADS,
    layer_group_size=2,
    q_lora_rank=None,
)

# Grouped heads.
NORMS = {"q_norm.weight": (H,), "k_norm.weight": (H,)}
NORMS_OF_ALL_HEADS = {"q_norm.weight": (N * H,), "k_norm.weight": (K * H,)}
FAMILIES["llama"] = grouped(
    "llama.LlamaAttention", port.llama, {"base": 5e5}, rope_theta=5e5
)
FAMILIES["mistral"] = grouped(
    "mistral.MistralAttention",
    port.llama,
    {"base": 1e4, "window": WINDOW},
    rope_theta=1e4,
    sliding_window=WINDOW,
)
FAMILIES["qwen2"] = grouped(
    "qwen2.Qwen2Attention",
    port.llama,
    {"base": 1e6},
    shapes=linears(LLAMA_NAMES, E, K, QKV_NAMES),
    layout="hf_qwen2",
    rope_theta=1e6,
    hidden_size=E,
)
FAMILIES["qwen3"] = grouped(
    "qwen3.Qwen3Attention",
    port.qwen_3,
    {"epsilon": 1e-3},
    more=NORMS,
    rope_theta=1e6,
    rms_norm_eps=1e-3,
)
FAMILIES["qwen3_next"] = grouped(
    "qwen3_next.Qwen3NextAttention",
    port.qwen_3_next,
    more=NORMS | {"q_proj.weight": (2 * N * H, D)},
    layout="hf_qwen3_next",
    full_attention_interval=2,
)
FAMILIES["afmoe"] = grouped(
    "afmoe.AfmoeAttention",
    port.afmoe,
    {"window": WINDOW},
    more=NORMS | {"gate_proj.weight": (N * H, D)},
    sliding_window=WINDOW,
)
FAMILIES["bitnet"] = grouped(
    "bitnet.BitNetAttention",
    port.bitnet,
    shapes=linears(LLAMA_NAMES, E, K),
    more={"attn_sub_norm.weight": (N * H,)},
    rms_norm_eps=1e-5,
    hidden_size=E,
)
FAMILIES["laguna"] = grouped(
    "laguna", port.laguna, more=NORMS | OF_HEADS, layout="hf_laguna"
)
FAMILIES["mimo_v2_flash"] = grouped(
    "mimo_v2_flash",
    port.mimo,
    {"factor": 0.5, "size": 4, "window": WINDOW},
    more={"v_proj.weight": (K * 5, D), "o_proj.weight": (D, N * 5), "sinks": (N,)},
    num_key_value_heads=1,
    v_head_dim=5,
    sliding_window=WINDOW,
    sliding_window_size=None,
    partial_rotary_factor=0.5,
    rope_parameters={"sliding_attention": {"rope_theta": 1e4}},
    attention_value_scale=0.5,
)
FAMILIES["gemma"] = grouped(
    "gemma.GemmaAttention", port.llama, {"base": 1e4}, rope_theta=1e4
)
# Layers of both types: with a window, and without.
GEMMA_2 = {
    "query_pre_attn_scalar": 5,
    "sliding_window": WINDOW,
    "rope_theta": 1e4,
}
FAMILIES["gemma2"] = grouped(
    "gemma2.Gemma2Attention", port.gemma_2, {"scalar": 5, "window": None}, **GEMMA_2
)
FAMILIES["gemma2 with a window"] = grouped(
    "gemma2.Gemma2Attention",
    port.gemma_2,
    {"scalar": 5, "window": WINDOW},
    layer=2,
    **GEMMA_2,
)
GEMMA_3 = {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 5,
    "sliding_window": WINDOW,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
FAMILIES["gemma3"] = grouped(
    "gemma3.Gemma3Attention",
    port.gemma_3,
    {"scalar": 5, "window": None},
    more=NORMS,
    layer=5,
    **GEMMA_3,
)
FAMILIES["gemma3 with a window"] = grouped(
    "gemma3.Gemma3Attention",
    port.gemma_3,
    {"scalar": 5, "window": WINDOW},
    more=NORMS,
    **GEMMA_3,
)
# Norms over all heads together.
OLMO_2 = {"shapes": linears(LLAMA_NAMES, E, K), "hidden_size": E, "rms_norm_eps": 1e-5}
FAMILIES["olmo2"] = grouped(
    "olmo2.Olmo2Attention",
    port.olmo_2,
    more=NORMS_OF_ALL_HEADS,
    rope_theta=5e5,
    **OLMO_2,
)
FAMILIES["olmoe"] = grouped(
    "olmoe",
    port.olmoe,
    {"limit": 0.7},
    more=NORMS_OF_ALL_HEADS,
    clip_qkv=0.7,
    rope_theta=1e4,
    **OLMO_2,
)
FAMILIES["olmo"] = grouped("olmo", port.olmo, {"limit": 0.7}, clip_qkv=0.7)
# Sinks, and biases everywhere.
OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
OSS = {
    "sliding_window": WINDOW,
    "rope_theta": 150000.0,
    "rope_scaling": OSS_ROPE,
    "shapes": linears(LLAMA_NAMES, D, K, LLAMA_NAMES) | {"sinks": (N,)},
}
FAMILIES["gpt_oss"] = grouped(
    "gpt_oss.GptOssAttention", port.gpt_oss, {"window": None}, **OSS
)
FAMILIES["gpt_oss with a window"] = grouped(
    "gpt_oss.GptOssAttention", port.gpt_oss, {"window": WINDOW}, layer=2, **OSS
)
FAMILIES["phi3"] = grouped(
    "phi3.Phi3Attention",
    port.phi_3,
    {"size": H, "window": WINDOW},
    shapes=fused("qkv_proj", "o_proj", (N + 2 * K) * H, E, biased=False),
    layout="hf_phi3",
    hidden_size=E,
    rope_theta=1e4,
    sliding_window=WINDOW,
)
# Scales, clips and layers without rotary positions.
FAMILIES["granite"] = grouped(
    "granite", port.llama, {"base": 1e4, "scale": 0.1}, attention_multiplier=0.1
)
FAMILIES["falcon_h1"] = grouped(
    "falcon_h1",
    port.llama,
    {"base": 1e4, "scale": 0.5 * H**-0.5},
    key_multiplier=0.5,
)
FAMILIES["smollm3 without rotary positions"] = grouped(
    "smollm3", port.llama, {"base": None}, no_rope_layers=[1, 0]
)
LLAMA_4 = {
    "attention_chunk_size": WINDOW,
    "floor_scale": 3,
    "attn_scale": 0.5,
    "rms_norm_eps": 1e-6,
}
FAMILIES["llama4"] = grouped("llama4_text", port.llama_4, {"chunk": WINDOW}, **LLAMA_4)
# Whether a layer of Llama 4 rotates follows from its number, which is in its prefix.
FAMILIES["llama4 without rotary positions"] = grouped(
    "llama4_text", port.llama_4, {"chunk": None}, layer=3, **LLAMA_4
)._replace(prefix="model.layers.3.self_attn.")
MINISTRAL = {
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 3,
    "rope_theta": 1e6,
}
FAMILIES["ministral3"] = grouped(
    "ministral3",
    port.ministral_3,
    rope_parameters=MINISTRAL | {"rope_type": "yarn", "factor": 1.0},
)
FAMILIES["ministral3 without scaling"] = grouped(
    "ministral3", port.ministral_3, rope_parameters=MINISTRAL | {"rope_type": "default"}
)
# Norms after the rotation, without weights, of each head.
FAMILIES["hunyuan"] = grouped(
    "hunyuan_v1_dense",
    port.hunyuan,
    more={"query_layernorm.weight": (H,), "key_layernorm.weight": (H,)},
    layout="hf_hunyuan",
)
FAMILIES["nanochat"] = grouped("nanochat", port.nanochat)
FAMILIES["cohere with norms"] = grouped(
    "cohere",
    port.cohere,
    more={"q_norm.weight": (N, H), "k_norm.weight": (K, H)},
    use_qk_norm=True,
)
FAMILIES["lfm2"] = grouped(
    "lfm2",
    port.qwen_3,
    {"epsilon": 1e-5, "out": "out_proj", "norm": "layernorm"},
    more={"q_layernorm.weight": (H,), "k_layernorm.weight": (H,)},
    shapes=linears(OUT_NAMES, D, K),
    layout="hf_lfm2",
    norm_eps=1e-5,
    full_attn_idxs=[1],
)

# As many key heads as query heads, or one matrix for queries, keys and values.
IN_LAYER = "model.layers.1.self_attn."
IN_H = "transformer.h.1.attn."
FAMILIES["phi"] = one_matrix(
    "phi.PhiAttention",
    port.phi,
    linears(f"{QKV_NAMES} dense", biased=f"{QKV_NAMES} dense"),
    layout="hf_phi",
    prefix=IN_LAYER,
    rope_theta=1e4,
    partial_rotary_factor=0.5,
)
GPT = {"n_embd": E, "n_head": N}
FAMILIES["gptj"] = one_matrix(
    "gptj",
    port.gptj,
    linears(OUT_NAMES),
    layout="hf_gptj",
    prefix=IN_H,
    run_options={"size": 4},
    base=GPT,
    rotary_dim=4,
)
FAMILIES["codegen"] = one_matrix(
    "codegen",
    port.codegen,
    fused("qkv_proj", "out_proj", 3 * E, E, biased=False),
    layout="hf_codegen",
    prefix=IN_H,
    run_options={"size": 4},
    base=GPT,
    rotary_dim=4,
)
QUERY_KEY_VALUE = fused("query_key_value", "dense", 3 * E, E, biased=True)
FAMILIES["gpt_neox"] = one_matrix(
    "gpt_neox.GPTNeoXAttention",
    port.gpt_neox,
    QUERY_KEY_VALUE,
    layout="hf_neox",
    prefix="gpt_neox.layers.1.attention.",
    rotary_pct=0.25,
    rotary_emb_base=10000,
)
NORMS_OF_PERSIMMON = {
    "q_layernorm.weight": (H,),
    "q_layernorm.bias": (H,),
    "k_layernorm.weight": (H,),
    "k_layernorm.bias": (H,),
}
FAMILIES["persimmon"] = one_matrix(
    "persimmon",
    port.persimmon,
    QUERY_KEY_VALUE | NORMS_OF_PERSIMMON,
    layout="hf_neox",
    prefix=IN_LAYER,
)
FAMILIES["falcon"] = one_matrix(
    "falcon.FalconAttention",
    port.falcon,
    fused("query_key_value", "dense", (N + 2 * K) * H, E, biased=False),
    layout="hf_neox",
    prefix="transformer.h.1.self_attention.",
    run_options={"kv_number": K},
    new_decoder_architecture=True,
    num_kv_heads=K,
)
FAMILIES["falcon, one key head"] = one_matrix(
    "falcon.FalconAttention",
    port.falcon,
    fused("query_key_value", "dense", (N + 2) * H, E, biased=False),
    layout="hf_neox",
    prefix="transformer.h.1.self_attention.",
    run_options={"kv_number": 1},
)


def alibi():
    return {"score_mod": recipes.alibi(N)["score_mod"]}


FAMILIES["bloom"] = one_matrix(
    "bloom.BloomAttention",
    port.bloom,
    QUERY_KEY_VALUE,
    layout="hf_neox",
    prefix="h.1.self_attention.",
    base={"hidden_size": E, "n_head": N},
    call=alibi,
)
# Matrices of GPT-2 are transposed, those of nanoGPT are not.
GPT_2 = GPT | {"n_layer": 2}
GPT_2_SHAPES = fused("c_attn", "c_proj", 3 * E, E, biased=True, transposed=True)
FAMILIES["gpt2"] = one_matrix(
    "gpt2.GPT2Attention",
    port.gpt_2,
    GPT_2_SHAPES,
    layout="hf_gpt2",
    prefix=IN_H,
    base=GPT_2,
)
FAMILIES["gpt2 by layer"] = one_matrix(
    "gpt2.GPT2Attention",
    port.gpt_2,
    GPT_2_SHAPES,
    layout="hf_gpt2",
    prefix=IN_H,
    run_options={"layer": 1},
    base=GPT_2,
    scale_attn_by_inverse_layer_idx=True,
)
FAMILIES["nanogpt"] = one_matrix(
    "gpt2",
    port.nanogpt,
    fused("c_attn", "c_proj", 3 * E, E, biased=True),
    layout="nanogpt",
    prefix=IN_H,
    base=GPT_2,
)


def t5_bias():
    return {"score_mod": recipes.t5_bias(jnp.asarray(TABLE.numpy()))["score_mod"]}


FAMILIES["t5"] = one_matrix(
    "t5.T5Attention",
    port.t5,
    linears("q k v o", D),
    layout="hf_t5",
    prefix="decoder.block.1.layer.0.SelfAttention.",
    run_options={"table": TABLE},
    base={"d_model": D, "d_kv": H, "num_heads": N},
    call=t5_bias,
)
FAMILIES["mpt"] = one_matrix(
    "mpt",
    port.mpt,
    fused("Wqkv", "out_proj", 3 * E, E, biased=False),
    layout="hf_mpt",
    prefix="transformer.blocks.1.attn.",
    run_options={"limit": 0.7},
    base={"d_model": E, "n_heads": N},
    attn_config={"clip_qkv": 0.7, "model_type": ""},
)

# Encoders, and OPT, which has their names.
VIT = "attention.query attention.key attention.value output.dense"
BERT = "self.query self.key self.value output.dense"
DISTILBERT = "q_lin k_lin v_lin out_lin"
CLIP = (OUT_NAMES, OUT_NAMES, "hf_clip")
IN_VISION = "vision_model.encoder.layers.1.self_attn."
FAMILIES["opt"] = encoder(
    "opt.OPTAttention", *CLIP, "model.decoder.layers.1.self_attn.", decodes=True
)
FAMILIES["bert"] = encoder(
    "bert.BertAttention",
    names=BERT,
    biased=BERT,
    layout="hf_bert",
    prefix="bert.encoder.layer.1.attention.",
)
FAMILIES["distilbert"] = encoder(
    "distilbert.DistilBertSelfAttention",
    names=DISTILBERT,
    biased=DISTILBERT,
    layout="hf_distilbert",
    prefix="distilbert.transformer.layer.1.attention.",
)
FAMILIES["vit"] = encoder(
    "vit",
    names=VIT,
    biased=VIT,
    layout="hf_vit",
    prefix="vit.encoder.layer.1.attention.",
)
FAMILIES["dino without biases"] = encoder(
    "dinov2",
    names=VIT,
    biased="output.dense",
    layout="hf_vit_unbiased",
    prefix="dinov2.encoder.layer.1.attention.",
    qkv_bias=False,
)
FAMILIES["vit of Transformers 5"] = encoder(
    "vit.ViTAttention",
    names=LLAMA_NAMES,
    biased=LLAMA_NAMES,
    layout="hf_llama",
    prefix="vit.layers.1.attention.",
)
FAMILIES["dino of Transformers 5"] = encoder(
    "dinov2.Dinov2Attention",
    names=LLAMA_NAMES,
    biased="o_proj",
    layout="hf_vit5_unbiased",
    prefix="layers.1.attention.",
    qkv_bias=False,
)
FAMILIES["timm"] = one_matrix(
    "vit",
    port.timm,
    fused("qkv", "proj", 3 * E, E, biased=True),
    layout="timm",
    prefix="blocks.1.attn.",
    decodes=False,
)
FAMILIES["timm without biases"] = one_matrix(
    "vit",
    port.timm,
    fused("qkv", "proj", 3 * E, E, biased=False) | {"proj.bias": (E,)},
    layout="timm_unbiased",
    prefix="blocks.1.attn.",
    decodes=False,
)
FAMILIES["clip"] = encoder(
    "clip.CLIPAttention", *CLIP, IN_VISION, model_type="clip_vision_model"
)
FAMILIES["siglip"] = encoder(
    "siglip.SiglipAttention", *CLIP, IN_VISION, model_type="siglip_vision_model"
)
FAMILIES["whisper"] = encoder(
    "whisper.WhisperAttention",
    names=OUT_NAMES,
    biased="q_proj v_proj out_proj",
    layout="hf_whisper",
    prefix="model.encoder.layers.1.self_attn.",
    d_model=E,
    encoder_attention_heads=N,
    decoder_attention_heads=N,
)
FAMILIES["bart"] = encoder(
    "bart.BartAttention", *CLIP, "encoder.layers.1.self_attn.", d_model=E
)
FAMILIES["wav2vec2"] = encoder(
    "wav2vec2.Wav2Vec2Attention", *CLIP, "wav2vec2.encoder.layers.1.attention."
)

CORE = named(
    "llama; deepseek_v3; qwen3_next; gemma2 with a window; gpt_oss; falcon; llama4; "
    "cohere with norms; bert"
)
# Every option in a cache once; the other families differ from these only in numbers and
# layouts.
DECODED = named(
    "llama; deepseek_v3; deepseek_v32; minicpm3; qwen3; gemma2 with a window; gemma3; "
    "gpt_oss with a window; gptj; hy_v4; axk2; qwen3_next; bloom; t5; llama4; "
    "ministral3; hunyuan; persimmon; mimo_v2_flash"
)
FROM_HF = named(
    "llama; deepseek_v3; qwen3_next; mistral; bloom; t5; bert; gpt2; opt; whisper; "
    "llama4; mpt; nanochat"
)
IN_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.transformers]


def each(names, core):
    return pytest.mark.parametrize("name", with_core(names, *core))


def test_every_layout_has_a_family():
    elsewhere = {layout for layout, *_ in test_torch_convert.MODULES.values()}
    elsewhere.add("hf_gpt_neo")  # below, because `describe` does not know it
    # Only names; see test_convert.py.
    elsewhere |= {"hf_moshi", "hf_modernbert", "hf_ctrl"}
    tested = {family.layout for family in FAMILIES.values()}
    assert tested >= {*convert.LAYOUTS} - elsewhere


@functools.cache
def module_of(name):
    """The module with its weights, which no test changes."""
    return FAMILIES[name].module()


@functools.cache
def inputs(features):
    """Inputs, and the gradient of the output."""
    shape = (2, BATCH, LENGTH, features)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


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
    atol = 1e-5 * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@functools.cache
def program(options, is_causal, call):
    """A program that families with the same options share."""
    options = dict(options)
    module = kind_of(options)(**options, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    @jax.jit
    def run(params, x, slope):
        module = nnx.merge(graph, state, copy=True)
        nnx.update(module, params)
        output, vjp = jax.vjp(lambda x: module(x, is_causal=is_causal, **call()), x)
        return output, *vjp(slope)

    return run


@each(FAMILIES, core=CORE)
def test_outputs_and_gradients_of_inputs_equal_the_port(name):
    family = FAMILIES[name]
    described = dict(convert.describe(family.config, family.layer))
    # Programs are cached by the options, of which this one has no hash.
    described.pop("kernel_metadata", None)
    run = program(tuple(described.items()), family.decodes, family.call)
    params = nnx.to_pure_dict(nnx.state(module_of(name), nnx.Param))

    output, gradient = run(params, *inputs(features(family)))

    want, want_gradient = by_torch(name)
    assert_close(output, want)
    assert_close(gradient, want_gradient)


@each(DECODED, core=["deepseek_v3", "gemma2 with a window", "llama4"])
def test_prefill_and_eight_tokens_equal_the_whole_sequence(name):
    family = FAMILIES[name]
    x, _ = inputs(features(family))
    module = family.module(decode=True)
    module.init_cache(x.shape)
    run = nnx.jit(lambda module, x: module(x, **family.call()))

    outputs = [run(module, x[:, :PROMPT])]
    for i in range(PROMPT, LENGTH):
        outputs.append(run(module, x[:, i : i + 1]))

    want, _ = by_torch(name)
    assert_close(np.concatenate(outputs, axis=1), want)


@each(FROM_HF, core=["llama", "t5", "llama4"])
def test_from_hf_finds_the_layer_among_others(name):
    """Among other layers, and other attentions of this layer."""
    family = FAMILIES[name]
    whole = {}
    for key in linears(OUT_NAMES):
        whole[f"vision_model.layers.1.self_attn.{key}"] = torch.zeros(3)
    whole |= family.state_dict()
    if name == "t5":
        whole[f"decoder.block.0.layer.0.SelfAttention.{T5_TABLE}"] = TABLE

    module = convert.from_hf(family.config, whole, family.layer)

    x, _ = inputs(features(family))
    want, _ = by_torch(name)
    assert_close(nnx.jit(lambda module, x: module(x))(module, x), want)
    for leaf in jax.tree.leaves(nnx.state(module)):
        assert isinstance(leaf, jax.Array)


@each(FAMILIES, core=CORE)
def test_round_trip_through_the_module_is_exact(name):
    """Norms of Gemma 3 and Qwen3-Next are 1 + weight, which float32 rounds to 2^-24."""
    family = FAMILIES[name]
    weights = family.weights()

    back = convert.to_torch(nnx.state(module_of(name), nnx.Param), family.layout)

    assert back.keys() == weights.keys()
    adds_one = family.config["model_type"] in (
        "gemma3_text",
        "qwen3_next",
        "longcat_flash",
    )
    for key, weight in weights.items():
        rounded = adds_one and "norm" in key
        atol = 2.0**-23 if rounded else 0.0
        np.testing.assert_allclose(back[key], weight.numpy(), rtol=0, atol=atol)


@each(FAMILIES, core=CORE)
def test_round_trip_through_arrays_is_exact(name):
    family = FAMILIES[name]
    module = module_of(name)
    weights = family.weights()
    kv_heads = getattr(module, "num_kv_heads", N)

    arrays = convert.from_torch(weights, N, kv_heads, fill_biases=True)
    again = convert.to_torch(arrays, family.layout)

    of_module = {*nnx.to_pure_dict(nnx.state(module, nnx.Param))}
    if name in ("llama4", "nanochat"):
        # Their norms have no weights, but the module's have scales of 1.
        of_module -= {"query_ln", "key_ln"}
    assert {*arrays} == of_module
    assert again.keys() == weights.keys()
    for key, weight in weights.items():
        assert again[key].tobytes() == weight.numpy().tobytes()


def test_layer_of_gpt_neo_is_not_scaled():
    shapes = linears(OUT_NAMES, biased="out_proj")
    weights = Family({}, shapes, port.plain, "hf_gpt_neo").weights()
    unscaled = flax_mha.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scale must be 1\.0, but got None"):
        convert.load_torch(unscaled, weights)

    module = flax_mha.MultiHeadAttention(
        N, E, scale=1.0, decode=False, rngs=nnx.Rngs(0)
    )
    convert.load_torch(module, weights)

    x, _ = inputs(E)
    expected = port.plain(
        weights,
        torch.from_numpy(x),
        N,
        names=QKV_NAMES,
        out="out_proj",
        is_causal=True,
        scale=1.0,
    )
    assert_close(module(jnp.asarray(x), is_causal=True), expected.numpy())


def test_table_in_the_first_layer_of_t5_needs_a_module_that_holds_it():
    weights = FAMILIES["t5"].weights()
    weights["relative_attention_bias.weight"] = TABLE
    message = r"create it with score_mod=recipes\.RelativeBias\("
    with pytest.raises(ValueError, match=message):
        convert.load_torch(module_of("t5"), weights)


@each(IN_TRANSFORMERS, core=[])
def test_outputs_equal_the_layer_of_transformers(name):
    pytest.importorskip(
        "transformers",
        minversion="5",
        reason="Transformers 5 is not installed, the ports count alone",
    )
    import torch_transformers

    family = FAMILIES[name]
    x, _ = inputs(features(family))
    expected = torch_transformers.output(
        family.config,
        family.layer,
        family.transformers,
        family.weights(),
        torch.from_numpy(x),
        family.decodes,
        TABLE,
    )
    expected = expected.detach().numpy()

    got = module_of(name)(jnp.asarray(x), is_causal=family.decodes, **family.call())

    assert_close(got, expected)
    want, _ = by_torch(name)
    assert_close(want, expected)
