"""Compares rotary positions of several coordinates with Transformers: whole layers of
text models, and the rotations of vision encoders.

    python tests/hf_positions.py    # needs Transformers and PyTorch
"""

import importlib
import os
import sys
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from hf_families import LENGTH, TOLERANCE, D, K, N, check_part

from flax_mha.rope import RoPE, apply_rope

# Two layers, since some differ from the first.
TEXT: dict[str, Any] = {
    "hidden_size": D,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# Class: additional entries in the config of a tiny model, and its rotary parameters.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLTextModel": ({}, {"mrope_section": [2, 3, 3]}),
    "Qwen2_5_VLTextModel": (SLIDING, {"mrope_section": [2, 3, 3]}),
    "Qwen3VLTextModel": (
        {"head_dim": 24},
        {"mrope_section": [4, 4, 4], "mrope_interleaved": True},
    ),
    "Qwen3VLMoeTextModel": (
        EXPERTS | {"head_dim": 24},
        {"mrope_section": [6, 3, 3], "mrope_interleaved": True},
    ),
    "Glm4vTextModel": ({}, {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}),
}
# Module of Transformers: the beginning of its classes' names.
VISION = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "pixtral": "Pixtral",
    "llama4": "Llama4",
}


def coordinates() -> torch.Tensor:
    """Text, an image of two rows, text: [3, 1, length], as in Transformers."""
    image = [(4, 4 + row, 4 + column) for row in range(2) for column in range(3)]
    tokens = [(i, i, i) for i in range(4)] + image + [(i, i, i) for i in range(7, 10)]
    return torch.tensor(tokens).T[:, None]


def compare_text(name: str) -> float:
    """Returns the largest difference of a text model's layers, whole and decoded."""
    changes, rope = MODELS[name]
    kind = getattr(transformers.models, name, None) or getattr(transformers, name)
    rope = {"rope_type": "default", "rope_theta": 100.0} | rope
    torch.manual_seed(0)
    model = kind(kind.config_class(**TEXT | changes | {"rope_parameters": rope})).eval()
    # Its own initial values are so small that rotations would hardly show.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            drawn = torch.randn_like(parameter)
            parameter.data.copy_(drawn * parameter.shape[-1] ** -0.5)
    positions = jnp.asarray(np.moveaxis(coordinates().numpy(), 0, -1))
    inputs = {"inputs_embeds": torch.randn(1, LENGTH, D), "position_ids": coordinates()}
    config = model.config
    result = check_part(
        config.model_type, model, config.to_dict(), "", positions, **inputs
    )
    return result.difference


def compare_vision(name: str) -> float:
    """Returns the largest difference of the rotation of a vision encoder."""
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{VISION[name]}VisionConfig")()
    rope = RoPE.from_config(config.to_dict())
    rotary = getattr(modeling, f"{VISION[name]}VisionRotaryEmbedding")(config)
    size = 2 * len(rope.coordinates(4 * rope.sections[0]))
    if name == "llama4":
        side = config.image_size // config.patch_size
        places = [(x + 1, y + 1) for y in range(side) for x in range(side)]
        # The class token, which does not turn, comes last.
        places.append((0, 0))
        x = torch.randn(1, len(places), 2, size)
        expected = modeling.vision_apply_rotary_emb(x, x, rotary(x))[0]
    else:
        places = [(row, column) for row in range(3) for column in range(9)]
        x = torch.randn(1, len(places), 2, size)
        cos, sin = rotary(x, torch.tensor(places))
        if name == "pixtral":
            rotate = modeling.apply_rotary_pos_emb
            expected, _ = rotate(x, x, cos, sin, unsqueeze_dim=-2)
        else:
            expected, _ = modeling.apply_rotary_pos_emb_vision(x, x, cos, sin)
    expected = expected.numpy()
    result = apply_rope(jnp.asarray(x.numpy()), jnp.asarray(places), rope)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


def main() -> int:
    differences = {name: compare_text(name) for name in MODELS}
    differences |= {f"{name}, vision": compare_vision(name) for name in VISION}
    for name, difference in differences.items():
        print(f"{name:24} {difference:.1e}")
    return any(difference > TOLERANCE for difference in differences.values())


if __name__ == "__main__":
    sys.exit(main())
