"""Compares the logits of examples/any_decoder.py with those of whole models of
Transformers.

A family is a tiny random model of four layers, saved and loaded again. Two prompts of
different lengths are read in one call, and continued by 8 tokens with a cache;
Transformers reads each of both sequences alone and at once. No logit may differ by more
than 1e-4 of the largest, or of 1. Each of the 8 tokens must be the one that
Transformers finds most probable after those before it: its own greedy continuation of
the prompt then has the same tokens.

It needs Transformers and PyTorch.

    python tests/hf_decoders.py                # all, and writes tests/hf_decoders.md
    python tests/hf_decoders.py llama gpt_oss  # these
"""

import copy
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
sys.path.append(str(Path(__file__).parent.parent / "examples"))

import any_decoder
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from hf_families import MODELS, OTHERS, config_class, model_type_of, shrink
from torch_rope import KIMI_SCALING

TABLE = Path(__file__).with_suffix(".md")
LENGTHS = (13, 7)
STEPS = 8
TOLERANCE = 1e-4
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
IN_GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
SHARED = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 99,
}
# Other values of the config, one model for each.
CHANGES: dict[str, list[dict[str, Any]]] = {
    "afmoe": [{"mup_enabled": True, "route_scale": 2.5}],
    "cohere": [{"logit_scale": 0.5, "use_qk_norm": True}],
    "deepseek_v2": [
        {"first_k_dense_replace": 1},
        IN_GROUPS | {"topk_method": "group_limited_greedy"},
    ],
    "deepseek_v32": [IN_GROUPS],
    "falcon": [{"new_decoder_architecture": True, "bias": True}],
    "gemma3_text": [{"final_logit_softcapping": 2.0}],
    "gemma4_text": [
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        SHARED,
    ],
    "glm4_moe": [IN_GROUPS | {"use_qk_norm": True}],
    "gpt_neox": [{}, {"use_parallel_residual": False}],
    "granite": [GRANITE],
    "granitemoe": [GRANITE],
    "granitemoeshared": [GRANITE],
    "hyperclovax": [GRANITE],
    "hunyuan_v1_moe": [{"moe_topk": [2] * 4, "num_experts": 4}],
    "kolibri1": [{}, {"norm_topk_prob": True}],
    "llama": [
        {},
        {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True},
    ],
    "llama4_text": [{}, {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 48}],
    "qwen3_moe": [{"norm_topk_prob": True, "mlp_only_layers": [1]}],
}
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 1792,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "attention_bias": False,
    "rope_theta": 50000.0,
    "rope_scaling": KIMI_SCALING | {"original_max_position_embeddings": 64},
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
# Models that Transformers runs by the class of another family: that family, and the
# config.json with small sizes.
PUBLISHED = {"kimi_k2": ("deepseek_v3", KIMI_K2)}


def tiny(name: str, changes: dict[str, Any]) -> Any:
    """Makes a random model, norms and biases too."""
    family, published = PUBLISHED.get(name, (name, {}))
    kind = getattr(transformers, MODELS[family])
    config = config_class(family)
    others = shrink(config().to_dict()) | OTHERS.get(config.model_type, {}) | changes
    torch.manual_seed(0)
    # The class of the config changes the dict.
    values = copy.deepcopy(published or others)
    model = kind(config(**values)).eval().float()
    for x in model.state_dict().values():
        if not x.is_floating_point():
            continue
        drawn = torch.randn_like(x)
        if x.ndim > 1:
            # Products with them keep the size of their inputs.
            x.copy_(drawn * x.shape[-1] ** -0.5)
        else:
            x.copy_(x + 0.3 * drawn)
    return model


def difference(name: str, changes: dict[str, Any]) -> float:
    """Returns the largest difference of logits, or infinity if a token differs.

    A config in `PUBLISHED` is read in place of the model's own.
    """
    model = tiny(name, changes)
    _, published = PUBLISHED.get(name, ("", {}))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if published:
            config = json.dumps(published | {"model_type": name})
            (Path(folder) / "config.json").write_text(config)
        decoder = any_decoder.Decoder(folder, max_length=max(LENGTHS) + STEPS)
    size = {"batch_size": 2, "max_length": max(LENGTHS) + STEPS, "per_row": True}
    decoder = nnx.view(decoder, decode=True, **size)
    run = nnx.jit(lambda decoder, tokens, lengths=None: decoder(tokens, lengths))
    tokens = np.random.default_rng(0).integers(3, 99, (2, max(LENGTHS)))
    lengths = jnp.array(LENGTHS)
    prefill = run(decoder, jnp.asarray(tokens), lengths)
    # The logits of the last token of each prompt, then of each continued token.
    steps = [prefill[jnp.arange(2), lengths - 1]]
    for _ in range(STEPS):
        steps.append(run(decoder, steps[-1].argmax(-1)[:, None])[:, 0])
    continued = np.stack(steps[:-1], axis=1).argmax(-1)
    differences = []
    for row, length in enumerate(LENGTHS):
        text = np.concatenate([tokens[row, :length], continued[row]])
        with torch.no_grad():
            expected = model(input_ids=torch.tensor(text)[None]).logits[0].numpy()
        of_steps = [step[row] for step in steps[1:]]
        result = np.concatenate([prefill[row, :length], of_steps])
        largest = max(1.0, np.abs(expected).max())
        differences.append(np.abs(result - expected).max() / largest)
        # Each token must be the most probable one after those before it.
        if (expected[length - 1 : -1].argmax(-1) != continued[row]).any():
            return float("inf")
    return float(max(differences))


def main() -> int:
    warnings.filterwarnings("ignore")
    known = {name.partition("+")[0] for name in any_decoder.FAMILIES}
    names = [
        name
        for name in MODELS
        if {name, f"{name}_text"} & known and model_type_of(name) in known
    ]
    results = {}
    refused = []
    for name in sys.argv[1:] or sorted([*names, *PUBLISHED]):
        models = CHANGES.get(name, [{}])
        try:
            results[name] = max(difference(name, changes) for changes in models)
        except ValueError as error:
            refused.append(name)
            print(name, error, flush=True)
        else:
            print(name, f"{results[name]:.1e}", flush=True)
    wrong = [name for name, result in results.items() if not result <= TOLERANCE]
    print("wrong:", *wrong or ["none"])
    if not (sys.argv[1:] or wrong):
        said = f"These {len(results)} families decode the same tokens as Transformers:"
        lines = [f"| `{name}` | {result:.0e} |" for name, result in results.items()]
        heading = [said, "", "| family | difference |", "|---|---|"]
        TABLE.write_text("\n".join([*heading, *lines, ""]))
    return bool(wrong or (sys.argv[1:] and refused))


if __name__ == "__main__":
    sys.exit(main())
