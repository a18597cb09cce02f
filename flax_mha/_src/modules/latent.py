"""What both modules of latent attention share: checks, the scale of scores, and the projection to latents."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha._src.core.integers import is_int
from flax_mha._src.modules.options import check_epsilon, check_options
from flax_mha.rope import RoPE, YaRN

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_latent(options: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the constructor arguments of a module of latent attention, by name, are valid."""
    for name in ("num_heads", *SIZES, "q_lora_rank"):
        size, optional = options[name], name == "q_lora_rank"
        if (not is_int(size) or size < 1) and (size is not None or not optional):
            raise ValueError(f"{name} must be an int >= 1{' or None' * optional}, but got {size!r}.")
    check_epsilon("norm_epsilon", options["norm_epsilon"])
    check_options(options, options["num_heads"] * options["qk_rope_head_dim"])  # the features that `rope` is for


def yarn_scale(module: Any) -> dict[str, float]:
    """Returns {"scale": scale} if `rope` has a `YaRN` with `mscale_all_dim`; see `scale` in the nnx module."""
    scaling = module.rope.scaling if isinstance(module.rope, RoPE) else None
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return {}
    factor = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    return {"scale": factor**2 / math.sqrt(module.qk_nope_head_dim + module.qk_rope_head_dim)}


def compression(
    project: Callable[[Array], Array], normalize: Callable[[Array], Array], size: int
) -> Callable[[Array], Array]:
    """Returns a function of inputs to the shared key: the latent, which has `size` features, then the rotary key."""

    def compress(x: Float[Array, "*B T D"]) -> Float[Array, "*B T 1 CR"]:
        both = project(x)
        latent = normalize(both[..., :size])
        return jnp.concatenate([latent, both[..., size:].astype(latent.dtype)], axis=-1)[..., None, :]

    return compress
