"""The attention layers of many models: the same weights and config, here and in PyTorch, give the same numbers.

Weights are random, under the names of the model's files. `describe` makes the module from the config, `load_torch`
loads it. tests/torch_families.py has the layers; where Transformers is installed, its own layers are asked, too.
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

BATCH, LENGTH, PROMPT = 2, 13, 5
N, K, H, D = 4, 2, 8, 24  # query heads, key heads, head size, features
E = N * H  # features of models whose head size is features / heads
WINDOW = 4
TABLE = torch.from_numpy(np.random.default_rng(9).standard_normal((8, N)).astype(np.float32))
Shapes = dict[str, tuple[int, ...]]


def linears(names: str, features: int = E, kv: int = N, biased: str = "") -> Shapes:
    """The shapes of query, key, value and output; `biased` are those with a bias."""
    sizes = ((N * H, features), (kv * H, features), (kv * H, features), (features, N * H))
    shapes: Shapes = {f"{name}.weight": shape for name, shape in zip(names.split(), sizes, strict=True)}
    return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased.split()}


def fused(name: str, out: str, rows: int, features: int, biased: bool, transposed: bool = False) -> Shapes:
    weights = {f"{name}.weight": (rows, features), f"{out}.weight": (features, N * H)}
    biases = {f"{name}.bias": (rows,), f"{out}.bias": (features,)} if biased else {}
    return {key: shape[::-1] if transposed else shape for key, shape in weights.items()} | biases


def kind_of(described):
    return flax_mha.MultiHeadLatentAttention if "kv_lora_rank" in described else flax_mha.MultiHeadAttention


class Family(NamedTuple):
    """One kind of layer."""

    config: dict[str, Any]
    shapes: Shapes
    port: Callable[..., torch.Tensor]
    layout: convert.LayoutName
    prefix: str = "model.layers.1.self_attn."
    layer: int = 1
    decodes: bool = True
    call: Callable[[], dict[str, Any]] = dict  # what calls take besides
    transformers: str = ""  # module and class of Transformers; its names of weights are these

    def weights(self):
        """Such that scores and outputs are about 1."""
        rng = np.random.default_rng(0)
        sizes = {key: shape[-1] ** -0.5 if len(shape) == 2 else 0.5 for key, shape in self.shapes.items()}
        arrays = {key: rng.standard_normal(shape) * sizes[key] for key, shape in self.shapes.items()}
        return {key: torch.from_numpy(array.astype(np.float32)) for key, array in arrays.items()}

    def module(self, decode=False, **arguments):
        described = convert.describe(self.config, self.layer)
        module = kind_of(described)(**described | arguments, decode=decode, rngs=nnx.Rngs(0))
        others = {f"{self.prefix.replace('1', '0')}{key}": torch.zeros(3) for key in self.shapes}
        whole = others | {f"{self.prefix}{key}": value for key, value in self.weights().items()}
        convert.load_torch(module, whole, self.prefix)
        return module


LLAMA_NAMES, OUT_NAMES = "q_proj k_proj v_proj o_proj", "q_proj k_proj v_proj out_proj"
QKV_NAMES = "q_proj k_proj v_proj"
GROUPED = {"num_attention_heads": N, "num_key_value_heads": K, "hidden_size": D, "head_dim": H, "num_hidden_layers": 6}
SQUARE = {"num_attention_heads": N, "hidden_size": E, "num_hidden_layers": 2}
GEMMA_3 = GROUPED | {
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 5,
    "sliding_window": WINDOW,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OSS_ROPE |= {"original_max_position_embeddings": 4096}
OSS = GROUPED | {"model_type": "gpt_oss", "sliding_window": WINDOW, "rope_theta": 150000.0, "rope_scaling": OSS_ROPE}
LLAMA_4 = GROUPED | {"model_type": "llama4_text", "attention_chunk_size": WINDOW, "floor_scale": 3, "attn_scale": 0.5}
LLAMA_4 |= {"rms_norm_eps": 1e-6}
MINISTRAL = {"rope_type": "yarn", "factor": 1.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 3}
GEMMA_2 = GROUPED | {"model_type": "gemma2", "query_pre_attn_scalar": 5, "sliding_window": WINDOW, "rope_theta": 1e4}
NORMS = {"q_norm.weight": (H,), "k_norm.weight": (H,)}
OSS_SHAPES = linears(LLAMA_NAMES, D, K, LLAMA_NAMES) | {"sinks": (N,)}


LATENT = {"num_attention_heads": N, "hidden_size": D, "num_hidden_layers": 6, "kv_lora_rank": 10, "v_head_dim": 5}
LATENT |= {"qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "num_key_value_heads": N}
LATENT_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 0.7}
LATENT_ROPE |= {"mscale_all_dim": 1.3, "rope_theta": 1e4}


def latent(model_type, port, transformers, **config):
    """With biases where there is compression, if there are any."""
    config, rows = LATENT | {"model_type": model_type} | config, N * (7 + 6)
    rank, biased = config["q_lora_rank"], config.get("attention_bias")
    shapes = {"kv_a_proj_with_mqa.weight": (10 + 6, D), "kv_a_layernorm.weight": (10,)}
    shapes |= {"kv_b_proj.weight": (N * (7 + 5), 10), "o_proj.weight": (D, N * 5)}
    if rank:
        shapes |= {"q_a_proj.weight": (rank, D), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (rows, rank)}
    else:
        shapes |= {"q_proj.weight": (rows, D)}
    layers = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if biased and f"{name}.weight" in shapes]
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in layers}
    run = functools.partial(port, number=N, sizes=(10, 7, 6))
    return Family(config, shapes, run, "hf_deepseek", transformers=transformers)


def encoder(model_type, names, biased, layout, prefix, transformers="", **config):
    *projections, out = names.split()
    run = functools.partial(port.plain, number=N, names=" ".join(projections), out=out)
    shapes = linears(names, biased=biased)
    config = SQUARE | {"model_type": model_type} | config
    return Family(config, shapes, run, layout, prefix, decodes=False, transformers=transformers)


FAMILIES = {
    "deepseek_v3": latent(
        "deepseek_v3",
        port.deepseek_v3,
        "deepseek_v3.DeepseekV3Attention",
        q_lora_rank=9,
        attention_bias=True,
        rope_scaling=LATENT_ROPE,
    ),
    "minicpm3": latent("minicpm3", port.minicpm_3, "minicpm3.MiniCPM3Attention", q_lora_rank=None),
    "llama": Family(
        GROUPED | {"model_type": "llama", "rope_theta": 500000.0},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=500000.0),
        "hf_llama",
        transformers="llama.LlamaAttention",
    ),
    "mistral": Family(
        GROUPED | {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": WINDOW},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=10000.0, window=WINDOW),
        "hf_llama",
        transformers="mistral.MistralAttention",
    ),
    "qwen2": Family(
        GROUPED | {"model_type": "qwen2", "rope_theta": 1e6, "hidden_size": E},
        linears(LLAMA_NAMES, E, K, QKV_NAMES),
        functools.partial(port.llama, number=N, kv_number=K, base=1e6),
        "hf_qwen2",
        transformers="qwen2.Qwen2Attention",
    ),
    "qwen3": Family(
        GROUPED | {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-3},
        linears(LLAMA_NAMES, D, K) | NORMS,
        functools.partial(port.qwen_3, number=N, kv_number=K, epsilon=1e-3),
        "hf_llama",
        transformers="qwen3.Qwen3Attention",
    ),
    "qwen3_next": Family(
        GROUPED | {"model_type": "qwen3_next", "full_attention_interval": 2},
        linears(LLAMA_NAMES, D, K) | NORMS | {"q_proj.weight": (2 * N * H, D)},
        functools.partial(port.qwen_3_next, number=N, kv_number=K),
        "hf_qwen3_next",
        transformers="qwen3_next.Qwen3NextAttention",
    ),
    "afmoe": Family(
        GROUPED | {"model_type": "afmoe", "sliding_window": WINDOW},
        linears(LLAMA_NAMES, D, K) | NORMS | {"gate_proj.weight": (N * H, D)},
        functools.partial(port.afmoe, number=N, kv_number=K, window=WINDOW),
        "hf_llama",
        transformers="afmoe.AfmoeAttention",
    ),
    "gemma": Family(
        GROUPED | {"model_type": "gemma", "rope_theta": 10000.0},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=10000.0),
        "hf_llama",
        transformers="gemma.GemmaAttention",
    ),
    "gemma2": Family(
        GEMMA_2,
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.gemma_2, number=N, kv_number=K, scalar=5, window=None),
        "hf_llama",
        transformers="gemma2.Gemma2Attention",
    ),
    "gemma2 with a window": Family(
        GEMMA_2,
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.gemma_2, number=N, kv_number=K, scalar=5, window=WINDOW),
        "hf_llama",
        layer=2,
        transformers="gemma2.Gemma2Attention",
    ),
    "gemma3": Family(
        GEMMA_3,
        linears(LLAMA_NAMES, D, K) | NORMS,
        functools.partial(port.gemma_3, number=N, kv_number=K, scalar=5, window=None),
        "hf_llama",
        layer=5,
        transformers="gemma3.Gemma3Attention",
    ),
    "gemma3 with a window": Family(
        GEMMA_3,
        linears(LLAMA_NAMES, D, K) | NORMS,
        functools.partial(port.gemma_3, number=N, kv_number=K, scalar=5, window=WINDOW),
        "hf_llama",
        transformers="gemma3.Gemma3Attention",
    ),
    "olmo2": Family(
        GROUPED | {"model_type": "olmo2", "rope_theta": 500000.0, "hidden_size": E, "rms_norm_eps": 1e-5},
        linears(LLAMA_NAMES, E, K) | {"q_norm.weight": (N * H,), "k_norm.weight": (K * H,)},
        functools.partial(port.olmo_2, number=N, kv_number=K),
        "hf_llama",
        transformers="olmo2.Olmo2Attention",
    ),
    "gpt_oss": Family(
        OSS,
        OSS_SHAPES,
        functools.partial(port.gpt_oss, number=N, kv_number=K, window=None),
        "hf_llama",
        transformers="gpt_oss.GptOssAttention",
    ),
    "gpt_oss with a window": Family(
        OSS,
        OSS_SHAPES,
        functools.partial(port.gpt_oss, number=N, kv_number=K, window=WINDOW),
        "hf_llama",
        layer=2,
        transformers="gpt_oss.GptOssAttention",
    ),
    "phi": Family(
        SQUARE | {"model_type": "phi", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        linears(f"{QKV_NAMES} dense", biased=f"{QKV_NAMES} dense"),
        functools.partial(port.phi, number=N),
        "hf_phi",
        transformers="phi.PhiAttention",
    ),
    "phi3": Family(
        GROUPED | {"model_type": "phi3", "hidden_size": E, "rope_theta": 10000.0, "sliding_window": WINDOW},
        fused("qkv_proj", "o_proj", (N + 2 * K) * H, E, biased=False),
        functools.partial(port.phi_3, number=N, kv_number=K, size=H, window=WINDOW),
        "hf_phi3",
        transformers="phi3.Phi3Attention",
    ),
    "gptj": Family(
        {"model_type": "gptj", "n_embd": E, "n_head": N, "rotary_dim": 4},
        linears(OUT_NAMES),
        functools.partial(port.gptj, number=N, size=4),
        "hf_gptj",
        "transformer.h.1.attn.",
    ),
    "gpt_neox": Family(
        SQUARE | {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000},
        fused("query_key_value", "dense", 3 * E, E, biased=True),
        functools.partial(port.gpt_neox, number=N),
        "hf_neox",
        "gpt_neox.layers.1.attention.",
        transformers="gpt_neox.GPTNeoXAttention",
    ),
    "falcon": Family(
        SQUARE | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": K},
        fused("query_key_value", "dense", (N + 2 * K) * H, E, biased=False),
        functools.partial(port.falcon, number=N, kv_number=K),
        "hf_neox",
        "transformer.h.1.self_attention.",
        transformers="falcon.FalconAttention",
    ),
    "falcon with one key head": Family(
        SQUARE | {"model_type": "falcon"},
        fused("query_key_value", "dense", (N + 2) * H, E, biased=False),
        functools.partial(port.falcon, number=N, kv_number=1),
        "hf_neox",
        "transformer.h.1.self_attention.",
        transformers="falcon.FalconAttention",
    ),
    "bloom": Family(
        {"model_type": "bloom", "hidden_size": E, "n_head": N},
        fused("query_key_value", "dense", 3 * E, E, biased=True),
        functools.partial(port.bloom, number=N),
        "hf_neox",
        "h.1.self_attention.",
        call=lambda: {"score_mod": recipes.alibi(N)["score_mod"]},
        transformers="bloom.BloomAttention",
    ),
    "gpt2": Family(
        {"model_type": "gpt2", "n_embd": E, "n_head": N, "n_layer": 2},
        fused("c_attn", "c_proj", 3 * E, E, biased=True, transposed=True),
        functools.partial(port.gpt_2, number=N),
        "hf_gpt2",
        "transformer.h.1.attn.",
        transformers="gpt2.GPT2Attention",
    ),
    "gpt2 scaled by layer": Family(
        {"model_type": "gpt2", "n_embd": E, "n_head": N, "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
        fused("c_attn", "c_proj", 3 * E, E, biased=True, transposed=True),
        functools.partial(port.gpt_2, number=N, layer=1),
        "hf_gpt2",
        "transformer.h.1.attn.",
        transformers="gpt2.GPT2Attention",
    ),
    "nanogpt": Family(
        {"model_type": "gpt2", "n_embd": E, "n_head": N, "n_layer": 2},
        fused("c_attn", "c_proj", 3 * E, E, biased=True),
        functools.partial(port.nanogpt, number=N),
        "nanogpt",
        "transformer.h.1.attn.",
    ),
    "t5": Family(
        {"model_type": "t5", "d_model": D, "d_kv": H, "num_heads": N},
        linears("q k v o", D),
        functools.partial(port.t5, number=N, table=TABLE),
        "hf_t5",
        "decoder.block.1.layer.0.SelfAttention.",
        call=lambda: {"score_mod": recipes.t5_bias(jnp.asarray(TABLE.numpy()))["score_mod"]},
        transformers="t5.T5Attention",
    ),
    "granite": Family(
        GROUPED | {"model_type": "granite", "attention_multiplier": 0.1},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=1e4, scale=0.1),
        "hf_llama",
    ),
    "falcon_h1": Family(
        GROUPED | {"model_type": "falcon_h1", "key_multiplier": 0.5},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=1e4, scale=0.5 * H**-0.5),
        "hf_llama",
    ),
    "smollm3, a layer without rotary positions": Family(
        GROUPED | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama, number=N, kv_number=K, base=None),
        "hf_llama",
    ),
    "olmo": Family(
        GROUPED | {"model_type": "olmo", "clip_qkv": 0.7},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.olmo, number=N, kv_number=K, limit=0.7),
        "hf_llama",
    ),
    "llama4": Family(
        LLAMA_4,
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama_4, number=N, kv_number=K, chunk=WINDOW),
        "hf_llama",
    ),
    "llama4, a layer without rotary positions": Family(
        LLAMA_4,
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.llama_4, number=N, kv_number=K, chunk=None),
        "hf_llama",
        "model.layers.3.self_attn.",
        layer=3,
    ),
    "ministral3": Family(
        GROUPED | {"model_type": "ministral3", "rope_parameters": MINISTRAL},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.ministral_3, number=N, kv_number=K),
        "hf_llama",
    ),
    "hunyuan": Family(
        GROUPED | {"model_type": "hunyuan_v1_dense"},
        linears(LLAMA_NAMES, D, K) | {"query_layernorm.weight": (H,), "key_layernorm.weight": (H,)},
        functools.partial(port.hunyuan, number=N, kv_number=K),
        "hf_hunyuan",
    ),
    "nanochat": Family(
        GROUPED | {"model_type": "nanochat"},
        linears(LLAMA_NAMES, D, K),
        functools.partial(port.nanochat, number=N, kv_number=K),
        "hf_llama",
    ),
    "cohere with norms": Family(
        GROUPED | {"model_type": "cohere", "use_qk_norm": True},
        linears(LLAMA_NAMES, D, K) | {"q_norm.weight": (N, H), "k_norm.weight": (K, H)},
        functools.partial(port.cohere, number=N, kv_number=K),
        "hf_llama",
    ),
    "persimmon": Family(
        SQUARE | {"model_type": "persimmon"},
        fused("query_key_value", "dense", 3 * E, E, biased=True)
        | {f"{x}_layernorm.{leaf}": (H,) for x in "qk" for leaf in ("weight", "bias")},
        functools.partial(port.persimmon, number=N),
        "hf_neox",
    ),
    "mpt": Family(
        {"model_type": "mpt", "d_model": E, "n_heads": N, "attn_config": {"clip_qkv": 0.7, "model_type": ""}},
        fused("Wqkv", "out_proj", 3 * E, E, biased=False),
        functools.partial(port.mpt, number=N, limit=0.7),
        "hf_mpt",
        "transformer.blocks.1.attn.",
    ),
    "codegen": Family(
        {"model_type": "codegen", "n_embd": E, "n_head": N, "rotary_dim": 4},
        fused("qkv_proj", "out_proj", 3 * E, E, biased=False),
        functools.partial(port.codegen, number=N, size=4),
        "hf_codegen",
        "transformer.h.1.attn.",
    ),
    "lfm2": Family(
        GROUPED | {"model_type": "lfm2", "norm_eps": 1e-5, "full_attn_idxs": [1]},
        linears(OUT_NAMES, D, K) | {"q_layernorm.weight": (H,), "k_layernorm.weight": (H,)},
        functools.partial(port.qwen_3, number=N, kv_number=K, epsilon=1e-5, out="out_proj", norm="layernorm"),
        "hf_lfm2",
    ),
    "opt": encoder(
        "opt", OUT_NAMES, OUT_NAMES, "hf_clip", "model.decoder.layers.1.self_attn.", "opt.OPTAttention"
    )._replace(
        port=functools.partial(port.plain, number=N, names=QKV_NAMES, out="out_proj", is_causal=True), decodes=True
    ),
    "bert": encoder(
        "bert",
        "self.query self.key self.value output.dense",
        "self.query self.key self.value output.dense",
        "hf_bert",
        "bert.encoder.layer.1.attention.",
        "bert.BertAttention",
    ),
    "distilbert": encoder(
        "distilbert",
        "q_lin k_lin v_lin out_lin",
        "q_lin k_lin v_lin out_lin",
        "hf_distilbert",
        "distilbert.transformer.layer.1.attention.",
        "distilbert.DistilBertSelfAttention",
    ),
    "vit": encoder(
        "vit",
        "attention.query attention.key attention.value output.dense",
        "attention.query attention.key attention.value output.dense",
        "hf_vit",
        "vit.encoder.layer.1.attention.",
    ),
    "dino without biases of queries, keys and values": encoder(
        "dinov2",
        "attention.query attention.key attention.value output.dense",
        "output.dense",
        "hf_vit_unbiased",
        "dinov2.encoder.layer.1.attention.",
        qkv_bias=False,
    ),
    "vit of Transformers 5": encoder(
        "vit", LLAMA_NAMES, LLAMA_NAMES, "hf_llama", "vit.layers.1.attention.", "vit.ViTAttention"
    ),
    "dino of Transformers 5 without biases": encoder(
        "dinov2",
        LLAMA_NAMES,
        "o_proj",
        "hf_vit5_unbiased",
        "layers.1.attention.",
        "dinov2.Dinov2Attention",
        qkv_bias=False,
    ),
    "timm": Family(
        SQUARE | {"model_type": "vit"},
        fused("qkv", "proj", 3 * E, E, biased=True),
        functools.partial(port.timm, number=N),
        "timm",
        "blocks.1.attn.",
        decodes=False,
    ),
    "timm without biases": Family(
        SQUARE | {"model_type": "vit"},
        fused("qkv", "proj", 3 * E, E, biased=False) | {"proj.bias": (E,)},
        functools.partial(port.timm, number=N),
        "timm_unbiased",
        "blocks.1.attn.",
        decodes=False,
    ),
    "clip": encoder(
        "clip_vision_model",
        OUT_NAMES,
        OUT_NAMES,
        "hf_clip",
        "vision_model.encoder.layers.1.self_attn.",
        "clip.CLIPAttention",
    ),
    "siglip": encoder(
        "siglip_vision_model",
        OUT_NAMES,
        OUT_NAMES,
        "hf_clip",
        "vision_model.encoder.layers.1.self_attn.",
        "siglip.SiglipAttention",
    ),
    "whisper": encoder(
        "whisper",
        OUT_NAMES,
        "q_proj v_proj out_proj",
        "hf_whisper",
        "model.encoder.layers.1.self_attn.",
        "whisper.WhisperAttention",
        d_model=E,
        encoder_attention_heads=N,
        decoder_attention_heads=N,
    ),
    "bart": encoder(
        "bart", OUT_NAMES, OUT_NAMES, "hf_clip", "encoder.layers.1.self_attn.", "bart.BartAttention", d_model=E
    ),
    "wav2vec2": encoder(
        "wav2vec2",
        OUT_NAMES,
        OUT_NAMES,
        "hf_clip",
        "wav2vec2.encoder.layers.1.attention.",
        "wav2vec2.Wav2Vec2Attention",
    ),
}
CORE = (
    "llama",
    "deepseek_v3",
    "qwen3_next",
    "gemma2 with a window",
    "gpt_oss",
    "falcon",
    "llama4",
    "cohere with norms",
)
# Every option in a cache once; the other families differ from these in numbers and layouts alone.
# Others have of what a cache has to do with no more than one of these.
DECODED = (
    "llama",
    "deepseek_v3",
    "minicpm3",
    "qwen3",
    "gemma2 with a window",
    "gemma3",
    "gpt_oss with a window",
    "gptj",
    "qwen3_next",
    "bloom",
    "t5",
    "llama4",
    "ministral3",
    "hunyuan",
    "persimmon",
)


FROM_HF = (
    "llama",
    "deepseek_v3",
    "qwen3_next",
    "mistral",
    "bloom",
    "t5",
    "bert",
    "gpt2",
    "opt",
    "whisper",
    "llama4",
    "mpt",
    "nanochat",
)


def each(chosen, core=CORE):
    names = [name for name, family in FAMILIES.items() if chosen(name, family)]
    return pytest.mark.parametrize("name", with_core(names, *(n for n in names if n in core)))


each_family = each(lambda name, family: True)


def test_every_layout_is_tried():
    """Here, in test_torch_convert.py, or, since `describe` does not know it, below."""
    others = {layout for layout, *_ in test_torch_convert.MODULES.values()} | {"hf_gpt_neo"}
    others |= {"hf_moshi", "hf_modernbert", "hf_ctrl"}  # names alone; see test_convert.py
    assert {family.layout for family in FAMILIES.values()} >= {*convert.LAYOUTS} - others


@functools.cache
def module_of(name):
    """The module with its weights, which no test changes."""
    return FAMILIES[name].module()


@functools.cache
def inputs(features):
    """Inputs, and the gradient of the output."""
    return np.random.default_rng(1).standard_normal((2, BATCH, LENGTH, features)).astype(np.float32)


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
    """1e-5 of the largest value: float32 rounds to 6e-8, and sums have some 30 terms here."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


@each_family
def test_outputs_and_gradients_of_inputs(name):
    family = FAMILIES[name]
    described = convert.describe(family.config, family.layer).items()
    options = tuple((key, value) for key, value in described if key != "kernel_metadata")
    params = nnx.to_pure_dict(nnx.state(module_of(name), nnx.Param))
    results = program(options, family.decodes, family.call)(params, *inputs(features(family)))
    for got, expected in zip(results, by_torch(name), strict=True):
        assert_close(got, expected)


@functools.cache
def program(options, is_causal, call):
    """One for all families with these options."""
    graph, state = nnx.split(kind_of(dict(options))(**dict(options), decode=False, rngs=nnx.Rngs(0)))

    @jax.jit
    def run(params, x, slope):
        module = nnx.merge(graph, state, copy=True)
        nnx.update(module, params)
        output, vjp = jax.vjp(lambda x: module(x, is_causal=is_causal, **call()), x)
        return output, *vjp(slope)

    return run


@each(lambda name, family: name in DECODED)
def test_prefill_and_eight_tokens(name):
    family = FAMILIES[name]
    x = inputs(features(family))[0]
    module = family.module(decode=True)
    module.init_cache(x.shape)
    run = nnx.jit(lambda module, x: module(x, **family.call()))
    steps = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))]
    assert_close(np.concatenate([run(module, x[:, start:stop]) for start, stop in steps], axis=1), by_torch(name)[0])


@each(lambda name, family: name in FROM_HF, ("llama", "t5", "llama4"))
def test_from_hf(name):
    """Calls need nothing else; other layers, and other attentions of this layer, are in the way."""
    family = FAMILIES[name]
    whole = {f"{family.prefix.replace('1', '0')}{key}": torch.zeros(3) for key in family.shapes}
    whole |= {f"vision_model.layers.1.self_attn.{key}": torch.zeros(3) for key in linears(OUT_NAMES)}
    whole |= {f"{family.prefix}{key}": value for key, value in family.weights().items()}
    whole |= {f"decoder.block.0.layer.0.SelfAttention.{convert.state_dict.T5_TABLE}": TABLE} if name == "t5" else {}
    module = convert.from_hf(family.config, whole, family.layer)
    assert_close(nnx.jit(lambda module, x: module(x))(module, inputs(features(family))[0]), by_torch(name)[0])
    assert not [x for x in jax.tree.leaves(nnx.state(module)) if not isinstance(x, jax.Array)]


@each_family
def test_round_trip_is_exact(name):
    """Also by way of the module. Norms of Gemma 3 and Qwen3-Next are 1 + weight, which float32 holds to 2^-24."""
    family, module = FAMILIES[name], module_of(name)
    weights = family.weights()
    back = convert.to_torch(nnx.state(module, nnx.Param), family.layout)
    assert back.keys() == weights.keys()
    for key, weight in weights.items():
        rounded = family.config["model_type"] in ("gemma3_text", "qwen3_next")
        tolerance = 2.0**-23 if rounded and "norm" in key else 0.0
        np.testing.assert_allclose(back[key], weight.numpy(), rtol=0, atol=tolerance)
    arrays = convert.from_torch(weights, N, getattr(module, "num_kv_heads", N), fill_biases=True)
    without_weights = {"query_ln", "key_ln"} if name in ("llama4", "nanochat") else set()
    assert {*arrays} | without_weights == {*nnx.to_pure_dict(nnx.state(module, nnx.Param))}
    again = convert.to_torch(arrays, family.layout)
    assert {key: array.tobytes() for key, array in again.items()} == {
        key: tensor.numpy().tobytes() for key, tensor in weights.items()
    }


def test_a_layer_of_gpt_neo_is_not_scaled():
    shapes = linears(OUT_NAMES, biased="out_proj")
    family = Family({}, shapes, port.plain, "hf_gpt_neo")
    module = flax_mha.MultiHeadAttention(N, E, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scale must be 1\.0, but got None"):
        convert.load_torch(module, family.weights())
    module = flax_mha.MultiHeadAttention(N, E, scale=1.0, decode=False, rngs=nnx.Rngs(0))
    convert.load_torch(module, family.weights())
    x = inputs(E)[0]
    q, k, v = port.projected(family.weights(), torch.from_numpy(x), N, N, QKV_NAMES)
    expected = port.linear(family.weights(), "out_proj", port.core(q, k, v, scale=1.0, visible=port.causal(LENGTH)))
    assert_close(module(jnp.asarray(x), is_causal=True), expected.numpy())


def test_the_first_layer_of_t5_holds_a_bias_for_all():
    family = FAMILIES["t5"]
    module = flax_mha.MultiHeadAttention(**convert.describe(family.config), decode=False, rngs=nnx.Rngs(0))
    weights = family.weights() | {"relative_attention_bias.weight": TABLE}
    with pytest.raises(ValueError, match=r"got relative_attention_bias\.weight, .*recipes\.t5_bias\(table\)"):
        convert.load_torch(module, weights)
    module = flax_mha.MultiHeadAttention(N, D, N * H, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scale must be 1\.0, but got None"):
        convert.load_torch(module, family.weights())


@each(lambda name, family: family.transformers, ())
def test_same_as_the_layer_of_transformers(name):
    pytest.importorskip("transformers", minversion="5", reason="Transformers 5 is not installed, the ports count alone")
    import torch_transformers

    family = FAMILIES[name]
    x = inputs(features(family))[0]
    arguments = (family.config, family.layer, family.transformers, family.weights(), torch.from_numpy(x))
    expected = torch_transformers.output(*arguments, family.decodes, TABLE).detach().numpy()
    assert_close(module_of(name)(jnp.asarray(x), is_causal=family.decodes, **family.call()), expected)
    assert_close(by_torch(name)[0], expected)
