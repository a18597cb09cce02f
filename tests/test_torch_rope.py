"""The rotary embeddings of many models, from their configs, against ports to PyTorch:
outputs and gradients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_rope
from marks import with_core

from flax_mha.rope import RoPE, apply_rope


class Model(NamedTuple):
    """A config, the head size, and other arguments of `from_config`."""

    config: dict[str, Any]
    size: int
    arguments: dict[str, Any]


# By the names of the ports.
MODELS = {}


def model(name, model_type, size, arguments=None, **config):
    """Adds a model with these fields in its config."""
    MODELS[name] = Model({"model_type": model_type} | config, size, arguments or {})


LLAMA_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
model("llama_3_1", "llama", 128, rope_theta=5e5, rope_scaling=LLAMA_SCALING)
QWEN_SCALING = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
model("qwen_3_yarn", "qwen3", 128, rope_theta=1000000, rope_scaling=QWEN_SCALING)
GEMMA_3 = {
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
SLIDING = {"layer_type": "sliding_attention"}
FULL = {"layer_type": "full_attention"}
model("gemma_3_local", "gemma3_text", 256, SLIDING, **GEMMA_3)
model("gemma_3_global", "gemma3_text", 256, FULL, **GEMMA_3)
model("gemma_4_global", "gemma4_text", 512, FULL)
model("phi_2", "phi", 80, rope_theta=10000.0, partial_rotary_factor=0.4)
model("gpt_j", "gptj", 256, rotary_dim=64, n_embd=4096, n_head=16)
model("glm_4", "glm4", 128, rope_theta=1e4, partial_rotary_factor=0.5, head_dim=128)
OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
model("gpt_oss", "gpt_oss", 64, rope_theta=150000, rope_scaling=OSS_SCALING)
KIMI_SCALING = torch_rope.KIMI_SCALING
model("kimi_k2", "kimi_k2", 64, rope_theta=5e4, rope_scaling=KIMI_SCALING)
PHI_3 = {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": torch_rope.SHORT_FACTORS,
        "long_factor": torch_rope.LONG_FACTORS,
    },
}
# The factors change after the original length.
model("phi_3_short", "phi3", 96, {"max_length": 4096}, **PHI_3)
model("phi_3_long", "phi3", 96, {"max_length": 4097}, **PHI_3)

# Positions with several coordinates.
QWEN_2_VL = {"type": "mrope", "mrope_section": [16, 24, 24]}
model("qwen_2_vl", "qwen2_vl", 128, rope_theta=1e6, rope_scaling=QWEN_2_VL)
model(
    "qwen_2_vl_yarn",
    "qwen2_5_vl_text",
    128,
    rope_theta=1e6,
    rope_scaling=QWEN_SCALING,
)
QWEN_3_VL = {
    "rope_type": "default",
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
model(
    "qwen_3_vl",
    "qwen3_vl",
    128,
    text_config={"rope_theta": 5e6, "rope_scaling": QWEN_3_VL},
    vision_config={"patch_size": 16},
)
OMNI = {"rope_theta": 5e6, "mrope_section": [24, 20, 20], "interleaved": True}
model("qwen_3_omni", "qwen3_omni_moe_text", 128, rope_parameters=OMNI)
GLM_4V = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
model("glm_4v", "glm4v", 128, rope_parameters=GLM_4V)
model(
    "qwen_2_vl_vision",
    "qwen2_vl",
    80,
    embed_dim=1280,
    hidden_size=8192,
    num_heads=16,
    patch_size=14,
)
model(
    "llama_4_vision",
    "llama4_vision_model",
    88,
    hidden_size=1408,
    num_attention_heads=16,
    patch_size=14,
)
model(
    "pixtral",
    "pixtral",
    64,
    hidden_size=1024,
    num_attention_heads=16,
    patch_size=16,
    rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
)

POSITIONS = np.array(
    [
        [0, 1, 2, 31, 4095, 4096, 8191],
        [131_072, 131_071, 100_003, 65_537, 32_768, 17, 0],
    ],
    np.int32,
)
COORDINATES = np.stack([POSITIONS, POSITIONS[:, ::-1], POSITIONS // 2 + 3], axis=-1)


@pytest.mark.parametrize(
    "name",
    with_core(
        MODELS, "llama_3_1", "gpt_j", "gpt_oss", "phi_3_long", "qwen_3_vl", "pixtral"
    ),
)
def test_outputs_and_gradients_equal_the_port(name):
    """Angles have the same bits on both sides. cos and sin are off by 2^-22 in each
    library at most (4 units in the last place), and two products and a sum add 2^-23:
    for |u|, |v| <= m, in all 2 * 2m * (2^-22 + 2^-23) < m * 2^-19.
    """
    config, size, arguments = MODELS[name]
    rope = RoPE.from_config(config, **arguments)
    positions = COORDINATES[..., : len(rope.sections)] if rope.sections else POSITIONS
    rng = np.random.default_rng(0)
    x, slope = np.float32(rng.standard_normal((2, *POSITIONS.shape, 3, size)))
    tensor = torch.from_numpy(x).requires_grad_()
    of_port = getattr(torch_rope, name)(tensor, torch.from_numpy(positions))
    of_port.backward(torch.from_numpy(slope))

    @jax.jit
    def run(x, slope, positions):
        output, pull = jax.vjp(lambda x: apply_rope(x, positions, rope), x)
        (gradient,) = pull(slope)
        return output, gradient

    output, gradient = run(x, slope, positions)
    outside_jit = apply_rope(jnp.asarray(x), positions, rope)

    tolerance = 2.0**-19 * rope.attention_factor
    want = of_port.detach().numpy()
    atol = tolerance * np.abs(x).max()
    np.testing.assert_allclose(output, want, rtol=0, atol=atol)
    atol = tolerance * np.abs(slope).max()
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=atol)
    np.testing.assert_allclose(outside_jit, output, rtol=0, atol=tolerance)
