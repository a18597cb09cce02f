"""Compares every decoder family of Transformers with `convert.from_hf`, and writes the
table of the documentation.

A family is a tiny random model of four layers. What goes into the projection of its
queries and what comes out of its last projection is captured, and each layer is made
anew, from the model's config and weights: its output may differ by 5e-5 of the largest
value. Of one layer a cache is tried, too. It needs Transformers and PyTorch.

    # all families; writes tests/hf_families.md
    python tests/hf_families.py
    # these
    python tests/hf_families.py llama gemma2
    # with other values in the config
    python tests/hf_families.py --set '{"partial_rotary_factor": 0.5}' llama
"""

import argparse
import functools
import itertools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS,
)

from flax_mha import convert
from flax_mha._src.convert.families import FAMILIES
from flax_mha._src.convert.latent_weights import is_latent
from flax_mha._src.convert.layouts import KEY_VALUE, LAYOUTS
from flax_mha._src.convert.read_config import UNKNOWN
from flax_mha._src.convert.state_dict import (
    attention_entries,
    layer_prefix,
    recognize,
)

TABLE = Path(__file__).with_suffix(".md")
LAYERS = 4
LENGTH = 13
PROMPT = 5
TOKENS = torch.arange(LENGTH)[None] * 7 % 90 + 5
TOLERANCE = 5e-5
D = 64
N = 4
K = 2
H = 24
WINDOW = 5
SIZES = {
    D: "hidden_size d_model n_embd emb_dim embedding_size lru_width",
    N: """num_attention_heads n_head n_heads num_heads attention_heads
    encoder_attention_heads decoder_attention_heads num_encoder_attention_heads
    num_decoder_attention_heads num_hidden_layers n_layer n_layers num_layers
    encoder_layers decoder_layers num_encoder_layers num_decoder_layers num_experts
    num_local_experts n_routed_experts mamba_n_heads""",
    K: """num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token
    num_codebooks expand_ratio n_recurrent_layers""",
    H: "head_dim",
    WINDOW: "sliding_window attention_window_size window_size attention_chunk_size",
    8: "rotary_dim mamba_dt_rank qk_rope_head_dim",
    12: "qk_nope_head_dim",
    2 * WINDOW: "local_attention",
    20: "v_head_dim qk_head_dim",
    32: "kv_lora_rank mamba_d_head attention_head_dim",
    40: "q_lora_rank",
    16: """moe_intermediate_size shared_expert_intermediate_size
    shared_intermediate_size""",
    1: """n_input_layers n_output_layers mamba_n_groups n_group topk_group
    first_k_dense_replace""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size
    dff n_inner""",
    99: "vocab_size n_vocab",
    128: """max_position_embeddings n_positions n_ctx mamba_d_ssm
    attention_hidden_size""",
}
SMALL: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 3,
    "image_token_index": 3,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
for size, names in SIZES.items():
    SMALL |= dict.fromkeys(names.split(), size)
# What a config's class makes of its other values.
MADE_ANEW = """transformers_version architectures id2label label2id model_type
max_seq_len layer_types layers_block_type mlp_layer_types no_rope_layers
attention_layers layer_rope_theta per_layer_config activation_sparsity_pattern
num_layers_per_stack"""
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
OWN_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": None,
}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 3,
}
HEADS = {"num_key_value_heads": N, "head_dim": 8}
LATENT = HEADS | {"rope_parameters": SCALED | {"mscale": 0.7, "mscale_all_dim": 1.3}}
INDEXER = {"index_n_heads": 8, "index_head_dim": 12, "index_topk": 3}
GEMMA_4 = {
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
BLT = {
    "hidden_size": D,
    "hidden_size_global": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "vocab_size": 99,
    "sliding_window": WINDOW,
}
# Additional entries that tiny models need, or that use more of their features.
OTHERS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": HEADS | HYBRID | {"num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": dict.fromkeys(
        ("patcher_config", "encoder_config", "decoder_config", "global_config"), BLT
    )
    | {
        "encoder_hash_byte_group_vocab": 5,
        "local_attention_window_len": WINDOW,
        "use_cache": False,
    },
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": KINDS | {"rope_parameters": OWN_ROPE},
    "axk1": LATENT,
    "dbrx": {"attn_config": {"clip_qkv": 1.0, "kv_n_heads": K, "rope_theta": 500.0}},
    "deepseek_v2": LATENT | {"num_experts_per_tok": K},
    "deepseek_v3": LATENT | {"attention_bias": True},
    "deepseek_v32": LATENT | INDEXER,
    "axk2": LATENT | INDEXER,
    "hy_v4": HEADS | INDEXER | {"indexer_types": ["full", "full", "shared", "full"]},
    "dots1": {
        "max_window_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": 48} | KINDS,
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": GEMMA_4 | {"attention_k_eq_v": False},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT
    | INDEXER
    | {"indexer_types": ["full", "full", "shared", "full"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite_swa": {"layer_rope_theta": [1e4, 0, 1e3, 1e4]},
    "granitemoehybrid": HYBRID | {"position_embedding_type": "rope"},
    "helium": {"head_dim": D // N},
    "hunyuan_v1_dense": {"head_dim": H},
    "hunyuan_v1_moe": {"head_dim": H},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [N, 2 * N] * 2} | KINDS,
    "lara_mini": {
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ]
    },
    "kimi_linear": HEADS
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
    },
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["sliding_attention", "conv", "full_attention", "conv"]},
    "llama4_text": {"floor_scale": 3, "attn_scale": 0.5},
    "longcat_flash": LATENT,
    "mellum": KINDS,
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 4},
    "minicpm3": LATENT,
    "ministral": {"head_dim": H},
    "ministral3": {"rope_parameters": SCALED | {"llama_4_scaling_beta": 0.5}},
    "mllama_text_model": {"cross_attention_layers": [2]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": K},
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "full_attention",
            "mlp",
            "full_attention",
        ]
    },
    "olmo": {"clip_qkv": 1.0},
    "olmo_hybrid": HYBRID,
    "qwen2": SLIDING | {"max_window_layers": 2},
    "qwen2_moe": SLIDING | {"max_window_layers": 2},
    "qwen3": SLIDING | {"max_window_layers": 2},
    "qwen3_moe": SLIDING,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "sarvam_mla": LATENT,
    "smollm3": SLIDING,
    "xlm": {"causal": True},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": HEADS | {"q_lora_rank": None},
    "zamba": ZAMBA,
    "zamba2": ZAMBA
    | {"use_mem_rope": True, "mamba_headdim": 16, "hybrid_layer_ids": [1, 3]},
}
# Prefixes, and their parts of the config.
PARTS = {"hrm_text": {"model.L_module.": "", "model.H_module.": ""}}
PARTS["blt"] = {
    "model.patcher.": "patcher_config",
    "model.local_encoder.": "encoder_config",
    "model.local_decoder.": "decoder_config",
    "model.global_transformer.": "global_config",
}
ASSISTANTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
# Whose image encoder needs timm: its text model.
TEXT_ONLY = {"gemma3n": "gemma3n_text"}
# In the names of modules.
ATTENTIONS = ("attn", "attention", "self_att", "temporal_block", "mixer")


class Result(NamedTuple):
    """The layers of a family that were compared and their largest difference, or why it
    is refused.
    """

    model_type: str
    layers: list[int]
    difference: float = 0.0
    refused: str = ""


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Makes a config small, and leaves out what its class makes of other values."""
    small = {}
    for key, value in config.items():
        if key in MADE_ANEW.split():
            continue
        if isinstance(value, dict) and not key.startswith("rope_"):
            small[key] = shrink(value)
        elif value is None or isinstance(value, list):
            small[key] = value
        else:
            small[key] = SMALL.get(key, value)
    return small


def config_class(name: str) -> Any:
    """Returns the class of a family's config: its own, even if another family's model
    runs it, unless it has parts.
    """
    own = CONFIG_MAPPING[name]
    if own.sub_configs:
        return getattr(transformers, MODELS[name]).config_class
    return own


def tiny(name: str, changes: dict[str, Any]) -> Any:
    """Makes a random model whose scores are about 1."""
    kind = getattr(transformers, MODELS[name])
    config = config_class(name)
    torch.manual_seed(0)
    small = shrink(config().to_dict()) | OTHERS.get(config.model_type, {}) | changes
    if "text_config" in small:
        small["text_config"] |= OTHERS.get(model_type_of(name), {})
    model = kind(config(**small)).eval()
    for key, parameter in model.named_parameters():
        is_attention = any(part in key for part in ATTENTIONS)
        if not is_attention or "vision" in key:
            continue
        drawn = torch.randn_like(parameter)
        if parameter.ndim > 1:
            # Products with them keep the size of their inputs.
            drawn = drawn * parameter.shape[0] ** -0.5
        else:
            drawn = parameter + 0.3 * drawn
        parameter.data.copy_(drawn.data)
    return model


def projections(state_dict: dict[str, Tensor], prefix: str) -> list[str]:
    """Returns the names of the first layer that queries pass, and of the last layer of
    an attention.
    """
    _, entries = attention_entries(state_dict, prefix)
    if is_latent(entries):
        return ["q_a_proj" if "q_a_proj.weight" in entries else "q_proj", "o_proj"]
    layout = LAYOUTS[recognize(entries, shared=KEY_VALUE)]
    keys = [layout.key_of("query/kernel"), layout.key_of("out/kernel")]
    return [key.rpartition(".")[0] for key in keys]


def capture(
    model: nn.Module, prefixes: list[str], **arguments: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs a model, and returns what its layers project to queries and what they
    return, by prefix.
    """
    state_dict = model.state_dict()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hooks: list[Any] = []

    def keep_input(prefix: str, layer: Any, x: Any, y: Tensor) -> None:
        inputs[prefix] = x[0]

    def keep_output(prefix: str, layer: Any, x: Any, y: Tensor) -> None:
        outputs[prefix] = y

    for prefix in prefixes:
        first, last = projections(state_dict, prefix)
        first = model.get_submodule(prefix + first)
        hook = functools.partial(keep_input, prefix)
        hooks.append(first.register_forward_hook(hook))
        last = model.get_submodule(prefix + last)
        hook = functools.partial(keep_output, prefix)
        hooks.append(last.register_forward_hook(hook))
    with torch.no_grad():
        model(**arguments or {"input_ids": TOKENS})
    for hook in hooks:
        hook.remove()

    def as_sequence(x: Tensor) -> Tensor:
        return x.reshape(1, -1, x.shape[-1])

    return {p: (as_sequence(inputs[p]), as_sequence(outputs[p])) for p in prefixes}


def model_type_of(name: str) -> str:
    """Returns the model type that counts: of the text model, where a model has several
    parts.
    """
    config = config_class(name)
    if config.model_type in FAMILIES:
        return config.model_type
    text = config.sub_configs.get("text_config", config)
    model_type = getattr(text, "model_type", "")
    # A class that stands for any text model has no type.
    return model_type or config().to_dict()["text_config"]["model_type"]


def run(
    module: Any, x: jax.Array, source: Any, source_x: jax.Array, **arguments: Any
) -> jax.Array:
    """Calls a layer, with the keys and values of its source if it has none."""
    if source is module:
        return module(x, **arguments)
    return module(x, kv=source(source_x, return_kv=True, **arguments)[1], **arguments)


def check(name: str, changes: dict[str, Any]) -> Result:
    """Compares all layers of a family, or of all its parts, with ours."""
    model_type = model_type_of(name)
    results = []
    refused = FAMILIES.get(model_type, UNKNOWN).refused
    if name in ASSISTANTS:
        return check_assistant(name, ASSISTANTS[name])
    if refused and name not in PARTS:
        return Result(model_type, [], refused=refused)
    model = tiny(TEXT_ONLY.get(name, name), changes)
    for prefix, part in PARTS.get(name, {"": ""}).items():
        config = model.config.to_dict()
        if part == "decoder_config":
            config[part]["sliding_window"] = config["local_attention_window_len"]
        if part:
            config = config[part]
        results.append(check_part(model_type, model, config, prefix))
    return max(results, key=lambda result: result.difference)


def relative_difference(result: Any, expected: Any) -> float:
    """Returns the largest difference, as a part of the largest value or of 1."""
    largest = max(1.0, np.abs(expected).max())
    return float(np.abs(result - expected).max() / largest)


def check_part(
    model_type: str,
    model: nn.Module,
    config: dict[str, Any],
    part: str,
    positions: Any = None,
    **inputs: Any,
) -> Result:
    """Compares the layers whose names start with `part`, and the decoding of the last
    one.
    """
    state_dict = model.state_dict()
    refused = ""
    prefixes: dict[int, str] = {}
    for layer in range(LAYERS):
        try:
            convert.describe(config, layer)
        except ValueError as error:
            refused = str(error)
        else:
            family = FAMILIES[model_type]
            prefixes[layer] = layer_prefix(state_dict, layer, part, family)
    if not prefixes:
        return Result(model_type, [], refused=refused)

    def at(tokens: slice) -> dict[str, Any]:
        return {} if positions is None else {"positions": positions[:, tokens]}

    arrays = capture(model, list(prefixes.values()), **inputs)
    differences = []
    found = {}
    for layer, prefix in prefixes.items():
        captured, expected = arrays[prefix]
        x = jnp.asarray(captured.numpy())
        expected = expected.numpy()
        module = convert.from_hf(config, state_dict, layer, part)
        if module.reuse_kv:  # of the last layer of its type
            source, source_x = found[module.local_window_size]
        else:
            source = module
            source_x = x
            found[module.local_window_size] = source, source_x
        whole = run(module, x, source, source_x, **at(slice(None)))
        differences.append(relative_difference(whole, expected))
        if layer == max(prefixes):
            source.init_cache(x.shape)
            starts = [0, *range(PROMPT, x.shape[1])]
            outputs = []
            for i, j in itertools.pairwise([*starts, x.shape[1]]):
                output = run(
                    module,
                    x[:, i:j],
                    source,
                    source_x[:, i:j],
                    decode=True,
                    **at(slice(i, j)),
                )
                outputs.append(output)
            decoded = jnp.concatenate(outputs, axis=1)
            differences.append(relative_difference(decoded, expected))
    return Result(model_type, list(prefixes), max(differences))


def check_assistant(name: str, target_name: str) -> Result:
    """Compares the layers of a model that attends to the keys and values of a target, a
    query for each of its tokens.

    Transformers computes one query at a time, over all keys of full layers, and the
    last of sliding ones.
    """
    target = tiny(target_name, {"num_kv_shared_layers": 0})
    config = target.config.to_dict() | {
        "num_kv_shared_layers": LAYERS,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    kind = getattr(transformers, MODELS[name])
    model = kind(kind.config_class(text_config=config, backbone_hidden_size=D)).eval()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    config = model.config.to_dict()
    state_dict = model.state_dict()
    # The target's last layer of each type is the source of the assistant's layers.
    last = {target.config.layer_types[layer]: layer for layer in range(LAYERS)}
    family = FAMILIES[target_name]
    sources = {
        layer: layer_prefix(target.state_dict(), layer, "", family)
        for layer in last.values()
    }
    of_target = capture(target, list(sources.values()))
    queries = torch.randn(1, LENGTH, 2 * D)
    with torch.no_grad():
        shared = target(TOKENS, return_shared_kv_states=True).shared_kv_states
    prefixes = [layer_prefix(state_dict, i, "", family) for i in range(LAYERS)]
    steps = []
    for i in range(LENGTH):
        start = {"full_attention": 0, "sliding_attention": max(i + 1 - WINDOW, 0)}
        visible = {}
        for kind, (key, value) in shared.items():
            slots = slice(start[kind], i + 1)
            visible[kind] = (key[:, :, slots], value[:, :, slots])
        step = capture(
            model,
            prefixes,
            inputs_embeds=queries[:, i : i + 1],
            position_ids=torch.tensor([[i + 1]]),
            shared_kv_states=visible,
        )
        steps.append(step)
    differences = []
    for layer, prefix in enumerate(prefixes):
        x = np.concatenate([step[prefix][0].numpy() for step in steps], axis=1)
        expected = np.concatenate([step[prefix][1].numpy() for step in steps], axis=1)
        module = convert.from_hf(config, state_dict, layer)
        origin = last[target.config.layer_types[layer]]
        source = convert.from_hf(target.config.to_dict(), target.state_dict(), origin)
        source_x, _ = of_target[sources[origin]]
        _, kv = source(jnp.asarray(source_x.numpy()), return_kv=True)
        result = module(jnp.asarray(x), kv=kv, positions=jnp.arange(1, LENGTH + 1))
        differences.append(relative_difference(result, expected))
    return Result(model_type_of(name), list(range(LAYERS)), max(differences))


def table(results: dict[str, Result]) -> str:
    """Returns the tables of described and of refused families, as Markdown."""
    described = {name: result for name, result in results.items() if not result.refused}
    largest = max(result.difference for result in described.values())
    lines = [
        f"Of the {len(results)} families of Transformers {transformers.__version__} "
        f"that generate text, {len(described)} are described. Their layers differ "
        f"from the model's own by at most {largest:.0e} of the largest value, in "
        "float32.",
        "",
        "| family | its `model_type` | layers of a model of four | difference |",
        "|---|---|---|---|",
    ]
    for name, result in described.items():
        if len(result.layers) == LAYERS:
            layers = "all"
        else:
            layers = ", ".join(map(str, result.layers))
        lines.append(
            f"| `{name}` | `{result.model_type}` | {layers} | {result.difference:.0e} |"
        )
    lines += [
        "",
        "These are refused:",
        "",
        "| family | its `model_type` | why |",
        "|---|---|---|",
    ]
    for name, result in results.items():
        if result.refused:
            lines.append(f"| `{name}` | `{result.model_type}` | {result.refused} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument(
        "--set", type=json.loads, default={}, help="values of the config, as JSON"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    results = {}
    for name in arguments.families or sorted(MODELS):
        result = check(name, arguments.set)
        results[name] = result
        said = result.refused or f"{result.layers} {result.difference:.1e}"
        print(name, said, flush=True)
    wrong = [name for name, result in results.items() if result.difference > TOLERANCE]
    print("wrong:", *wrong or ["none"])
    if not (arguments.families or arguments.set or wrong):
        TABLE.write_text(table(results))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
