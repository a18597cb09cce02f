"""Checks of the constructor's arguments that both modules share."""

from typing import Any, Literal, NamedTuple

from flax_mha.call.arguments import check_dropout_rate, check_scale, check_soft_cap, check_window
from flax_mha.core import validation
from flax_mha.core.integers import is_int, is_number
from flax_mha.impl.registry import check_name
from flax_mha.rope import RoPE

NormKind = Literal[
    "layer_norm",
    "layer_norm_bias",
    "layer_norm_each_head",
    "rms_norm",
    "rms_norm_all_heads",
    "rms_norm_after_rope",
]


class Norm(NamedTuple):
    """A kind of norm of queries and keys [B..., T, N, H]."""

    is_rms: bool = False
    axes: tuple[int, ...] = (-1,)  # over which mean and variance are taken
    scale_axes: tuple[int, ...] = (-1,)
    has_bias: bool = False
    after_rope: bool = False


NORMS: dict[str, Norm] = {
    "layer_norm": Norm(),
    "layer_norm_bias": Norm(has_bias=True),
    "layer_norm_each_head": Norm(scale_axes=(-2, -1)),
    "rms_norm": Norm(is_rms=True),
    "rms_norm_all_heads": Norm(is_rms=True, axes=(-2, -1), scale_axes=(-2, -1)),
    "rms_norm_after_rope": Norm(is_rms=True, after_rope=True),
}


def norm_of(normalize_qk: bool | str) -> Norm:
    """Returns the norm of a `normalize_qk` that is not False."""
    return NORMS[normalize_qk if isinstance(normalize_qk, str) else "layer_norm"]


def check_options(
    module: Any,
    num_heads: int,
    num_kv_heads: int | None,
    qkv_features: int,
    dropout_rate: float,
    sinks: bool,
    gate: bool,
    normalize_qk: bool | str,
    qk_norm_epsilon: float | None,
) -> None:
    """Checks the options that both modules have, most of which are attributes of the module."""
    _heads(num_heads, num_heads if num_kv_heads is None else num_kv_heads, qkv_features)
    check_dropout_rate(dropout_rate)
    check_name(module.implementation)
    check_window(module.local_window_size)
    check_soft_cap(module.logits_soft_cap)
    validation.flag("sinks", sinks)
    validation.flag("gate", gate)
    check_scale(module.scale, validation.Shape((), 1, 1, 1, 1, 1, 1))
    if normalize_qk not in (False, True, *NORMS):
        names = '", "'.join(NORMS)
        raise ValueError(f'normalize_qk must be False, True or one of "{names}", but got {normalize_qk!r}.')
    if qk_norm_epsilon is not None:
        _norm_epsilon(qk_norm_epsilon, normalize_qk)
    if module.head_axis is not None and not isinstance(module.head_axis, str):
        raise ValueError(
            f"head_axis must be the name of a mesh axis or of a logical axis, but got {module.head_axis!r}."
        )
    if module.rope is not None:
        if not isinstance(module.rope, RoPE):
            raise ValueError(f"rope must be a flax_mha.rope.RoPE or None, but got {module.rope!r}.")
        module.rope.rotated_size(qkv_features // num_heads)


def _heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    """Checks that heads divide the features, and key/value heads the heads."""
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("qkv_features", qkv_features)):
        if not is_int(number):
            raise ValueError(f"{name} must be an int, but got {number!r}.")
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads must be at least 1, but got {num_heads} and {num_kv_heads}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads}).")
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension ({qkv_features}) must be divisible by 'num_heads' heads ({num_heads}); choose "
            "qkv_features to be a multiple of num_heads."
        )


def _norm_epsilon(epsilon: float, normalize_qk: bool | str) -> None:
    if not is_number(epsilon) or not 0 < epsilon < float("inf"):
        raise ValueError(f"qk_norm_epsilon must be a finite number > 0, but got {epsilon!r}.")
    if not normalize_qk:
        raise ValueError(
            f'qk_norm_epsilon must be None without normalize_qk, but got {epsilon!r}; pass normalize_qk="rms_norm".'
        )


def check_rngs(rngs: Any, *kinds: type) -> None:
    """Checks that these are random streams of one of these kinds, or None."""
    if rngs is not None and not isinstance(rngs, kinds):
        names = " or ".join(f"nnx.{kind.__name__}" for kind in kinds)
        raise ValueError(f"rngs must be {names}, but got {type(rngs).__name__}; a key becomes nnx.Rngs(key).")
