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

PHI_3 = {
    "model_type": "phi3",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
}
PHI_3 |= {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope"}}
PHI_3["rope_scaling"] |= {
    "short_factor": torch_rope.SHORT_FACTORS,
    "long_factor": torch_rope.LONG_FACTORS,
}
GEMMA_3 = {
    "model_type": "gemma3_text",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
GEMMA_3 |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
LLAMA_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA_SCALING |= {"original_max_position_embeddings": 8192}
OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
OSS_SCALING |= {"original_max_position_embeddings": 4096}
QWEN_SCALING = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
QWEN_2_VL = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN_3_VL = {
    "rope_type": "default",
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
QWEN_3_VL = {
    "text_config": {"rope_theta": 5e6, "rope_scaling": QWEN_3_VL},
    "vision_config": {"patch_size": 16},
}
OMNI = {"rope_theta": 5e6, "mrope_section": [24, 20, 20], "interleaved": True}
GLM_4V = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
QWEN_2_VISION = {
    "embed_dim": 1280,
    "hidden_size": 8192,
    "num_heads": 16,
    "patch_size": 14,
}
PIXTRAL = {"hidden_size": 1024, "num_attention_heads": 16, "patch_size": 16}
PIXTRAL |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
LLAMA_4_VISION = {"hidden_size": 1408, "num_attention_heads": 16, "patch_size": 14}


class Model(NamedTuple):
    """A config, the head size, and other arguments of `from_config`."""

    config: dict[str, Any]
    size: int
    arguments: dict[str, Any] = {}  # noqa: RUF012


def model(model_type, size, **config):
    return Model({"model_type": model_type} | config, size)


# By the names of the ports.
MODELS = {
    "llama_3_1": model("llama", 128, rope_theta=5e5, rope_scaling=LLAMA_SCALING),
    "qwen_3": model("qwen3", 128, rope_theta=1000000, rope_scaling=None),
    "qwen_3_yarn": model("qwen3", 128, rope_theta=1000000, rope_scaling=QWEN_SCALING),
    "gemma_3_local": Model(GEMMA_3, 256, {"layer_type": "sliding_attention"}),
    "gemma_3_global": Model(GEMMA_3, 256, {"layer_type": "full_attention"}),
    "gemma_4_global": Model(
        {"model_type": "gemma4_text"}, 512, {"layer_type": "full_attention"}
    ),
    "phi_2": model("phi", 80, rope_theta=10000.0, partial_rotary_factor=0.4),
    "gpt_neox": model("gpt_neox", 96, rotary_pct=0.25, rotary_emb_base=10000),
    "gpt_j": model("gptj", 256, rotary_dim=64, n_embd=4096, n_head=16),
    "glm_4": model(
        "glm4", 128, rope_theta=1e4, partial_rotary_factor=0.5, head_dim=128
    ),
    "gpt_oss": model("gpt_oss", 64, rope_theta=150000, rope_scaling=OSS_SCALING),
    "kimi_k2": model(
        "kimi_k2", 64, rope_theta=5e4, rope_scaling=torch_rope.KIMI_SCALING
    ),
    "phi_3_short": Model(PHI_3, 96, {"max_length": 4096}),
    "phi_3_long": Model(PHI_3, 96, {"max_length": 4097}),
    "qwen_2_vl": model("qwen2_vl", 128, rope_theta=1e6, rope_scaling=QWEN_2_VL),
    "qwen_2_vl_yarn": model(
        "qwen2_5_vl_text", 128, rope_theta=1e6, rope_scaling=QWEN_SCALING
    ),
    "qwen_3_vl": model("qwen3_vl", 128, **QWEN_3_VL),
    "qwen_3_omni": model("qwen3_omni_moe_text", 128, rope_parameters=OMNI),
    "glm_4v": model("glm4v", 128, rope_parameters=GLM_4V),
    "qwen_2_vl_vision": model("qwen2_vl", 80, **QWEN_2_VISION),
    "llama_4_vision": model("llama4_vision_model", 88, **LLAMA_4_VISION),
    "pixtral": model("pixtral", 64, **PIXTRAL),
}
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
def test_same_as_torch(name):
    """Angles have the same bits on both sides. cos and sin are off by 2^-22 in each library at most (4 units in the
    last place), and two products and a sum add 2^-23: for |u|, |v| <= m, in all 2 * 2m
    * (2^-22 + 2^-23) < m * 2^-19.
    """
    config, size, arguments = MODELS[name]
    rope = RoPE.from_config(config, **arguments)
    positions = COORDINATES[..., : len(rope.sections)] if rope.sections else POSITIONS
    x, slope = np.float32(
        np.random.default_rng(0).standard_normal((2, *POSITIONS.shape, 3, size))
    )
    tensor = torch.from_numpy(x).requires_grad_()
    output = getattr(torch_rope, name)(tensor, torch.from_numpy(positions))
    output.backward(torch.from_numpy(slope))
    want = output.detach().numpy()
    want_grad = tensor.grad.numpy()

    @jax.jit
    def both(x, slope, positions):
        output, vjp = jax.vjp(lambda x: apply_rope(x, positions, rope), x)
        return output, *vjp(slope)

    got, got_grad = both(x, slope, positions)
    tolerance = 2.0**-19 * rope.attention_factor
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(x).max())
    np.testing.assert_allclose(
        got_grad, want_grad, rtol=0, atol=tolerance * np.abs(slope).max()
    )
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), positions, rope), got, rtol=0, atol=tolerance
    )
