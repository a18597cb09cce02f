"""Keys that one call stores for later ones, in cross-attention while decoding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flax_mha.call.arguments import check_window
from flax_mha.core import validation
from flax_mha.core.integers import int32
from flax_mha.masks import Mask
from flax_mha.modules.core_attention import CoreAttention

PerSequence = Int[Array, "*B"]


def lengths_of(sequences: dict[str, Array | None], key: Float[Array, "*B S K H"]) -> PerSequence:
    """Counts the keys of each sequence that are none of the padding."""
    lengths = sequences["key_value_seq_lengths"]
    lengths = int32("lengths", key.shape[-3] if lengths is None else lengths)
    return jnp.broadcast_to(lengths if key.ndim > 3 else lengths.reshape(()), key.shape[:-3])


def check(module: Any, core: CoreAttention | None, mask: Array | Mask | None, score_mod: Any) -> None:
    """Refuses what depends on the positions of queries: the cache does not count the calls that use stored keys.

    Raises:
      ValueError: If there is such an argument, of the call, the module, or its attention function.
    """
    preset = {} if core is None else core.preset
    given = {
        "mask": isinstance(mask, Mask) or isinstance(preset.get("mask"), Mask),
        "score_mod": score_mod is not None or preset.get("score_mod") is not None,
        "local_window_size": any(
            check_window(window) is not None for window in (module.local_window_size, preset.get("local_window_size"))
        ),
    }
    for name, is_given in given.items():
        if is_given:
            got = "a mask object" if name == "mask" else "one"
            raise ValueError(
                f"{name} must not depend on positions where keys are stored, whose calls are not counted, but got "
                f"{got}; use a mask or bias array [..., queries, keys]."
            )


def mask_of(
    core: CoreAttention | None,
    sequences: dict[str, Array | None],
    mask: Array | None,
    lengths: PerSequence,
    key: Float[Array, "*B S K H"],
) -> Array | None:
    """Returns the mask of stored keys; their lengths go into it, or for our attention into `sequences`."""
    if core is not None and core.context is None:
        sequences["key_value_seq_lengths"] = lengths
        return mask
    places = jnp.arange(key.shape[-3], dtype=jnp.int32).reshape((1,) * lengths.ndim + (-1,))
    shown = (places < lengths[..., None])[..., None, None, :]
    return shown if mask is None else validation.mask_of_numbers(mask) & shown
