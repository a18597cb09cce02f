"""What the modules of latent attention of `flax.nnx` and `flax.linen` share: sizes, scale, and the compression."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha.core.integers import is_int, is_number
from flax_mha.modules.options import check_options
from flax_mha.rope import RoPE, YaRN

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_latent(module: Any, sinks: bool) -> None:
    """Checks sizes and options, which are attributes of the module; `rope` must fit the rotary features."""
    for name in ("num_heads", *SIZES, "q_lora_rank"):
        size = getattr(module, name)
        optional = name == "q_lora_rank"
        if (not is_int(size) or size < 1) and (size is not None or not optional):
            raise ValueError(f"{name} must be an int >= 1{' or None' * optional}, but got {size!r}.")
    epsilon = module.norm_epsilon
    if not is_number(epsilon) or not 0 < epsilon < float("inf"):
        raise ValueError(f"norm_epsilon must be a finite number > 0, but got {epsilon!r}.")
    heads, rotary = module.num_heads, module.qk_rope_head_dim
    check_options(module, heads, None, heads * rotary, module.dropout_rate, sinks, False, False, None)


def softmax_scale(module: Any) -> dict[str, float]:
    """Returns the argument `scale` of the attention, if it is not that of its head size.

    Where YaRN has a factor m(mscale_all_dim) > 1 for all features, DeepSeek multiplies query and key by it.
    """
    if module.scale is not None:
        return {"scale": module.scale}
    scaling = module.rope.scaling if isinstance(module.rope, RoPE) else None
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return {}
    factor = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    return {"scale": factor**2 / math.sqrt(module.qk_nope_head_dim + module.qk_rope_head_dim)}


def compression(
    project: Callable[[Array], Array], normalize: Callable[[Array], Array], size: int
) -> Callable[[Array], Array]:
    """Returns what makes the one key of a token: its latent, normalized, and the rotary part."""

    def compress(x: Float[Array, "*B T D"]) -> Float[Array, "*B T 1 CR"]:
        both = project(x)
        latent = normalize(both[..., :size])
        return jnp.concatenate([latent, both[..., size:].astype(latent.dtype)], axis=-1)[..., None, :]

    return compress
