"""Checks of constructor arguments that the modules share, and the table of norms of queries and keys."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from flax_mha._src.call.arguments import check_dropout_rate, check_scale, check_soft_cap, check_window
from flax_mha._src.core import validation
from flax_mha._src.core.validation import int_at_least, is_finite, is_int, number_in
from flax_mha._src.modules.indexer import Indexer
from flax_mha._src.modules.output import ACTIVATIONS
from flax_mha._src.run import check_name
from flax_mha.rope import RoPE, YaRN

NormKind = Literal[
    "layer_norm",
    "layer_norm_bias",
    "layer_norm_each_head",
    "rms_norm",
    "rms_norm_all_heads",
    "rms_norm_after_rope",
    "rms_norm_each_head_after_rope",
    "rms_norm_no_scale",
]


class Norm(NamedTuple):
    """A norm of queries and keys [B..., T, N, H]; `NORMS` maps each name that `normalize_qk` accepts to its norm."""

    is_rms: bool = False  # RMSNorm, else LayerNorm
    axes: tuple[int, ...] = (-1,)  # axes of the mean and the variance
    scale_axes: tuple[int, ...] = (-1,)  # axes of the learned scale
    has_bias: bool = False
    after_rope: bool = False
    has_scale: bool = True


NORMS: dict[str, Norm] = {
    "layer_norm": Norm(),
    "layer_norm_bias": Norm(has_bias=True),
    "layer_norm_each_head": Norm(scale_axes=(-2, -1)),
    "rms_norm": Norm(is_rms=True),
    "rms_norm_all_heads": Norm(is_rms=True, axes=(-2, -1), scale_axes=(-2, -1)),
    "rms_norm_after_rope": Norm(is_rms=True, after_rope=True),
    "rms_norm_each_head_after_rope": Norm(is_rms=True, scale_axes=(-2, -1), after_rope=True),
    "rms_norm_no_scale": Norm(is_rms=True, has_scale=False),
}


LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def norm_of(normalize_qk: bool | str) -> Norm:
    """Returns the norm that a module's `normalize_qk` names; True means "layer_norm", and False is not allowed here."""
    return NORMS[normalize_qk if isinstance(normalize_qk, str) else "layer_norm"]


def check_options(options: Mapping[str, Any], qkv_features: int) -> None:
    """Raises a ValueError unless a module's constructor arguments are valid; `qkv_features`: N times the head size."""
    num_heads, num_kv_heads = options["num_heads"], options.get("num_kv_heads")
    _check_heads(num_heads, num_heads if num_kv_heads is None else num_kv_heads, qkv_features)
    check_dropout_rate(options["dropout_rate"])
    check_name(options["implementation"])
    check_window(options["local_window_size"])
    check_soft_cap(options["logits_soft_cap"])
    validation.flag("sinks", options["sinks"])
    for name in ("normalize_value", "share_kv", "reuse_kv"):
        validation.flag(name, options.get(name, False))
    for name, off in (("normalize_value", False), ("share_kv", False), ("value_scale", None)):
        if options.get("reuse_kv") and options[name]:
            raise ValueError(
                f"{name} must be {off} with reuse_kv=True, because values come from an earlier layer, but got "
                f"{options[name]}."
            )
    check_scale(options["scale"], validation.Shape((), 1, 1, 1, 1, 1, 1))
    normalize_qk, epsilon = options.get("normalize_qk", False), options.get("qk_norm_epsilon")
    if normalize_qk not in (False, True):
        _check_choice("normalize_qk", normalize_qk, NORMS, "False, True")
    has_norm = normalize_qk or options.get("normalize_value")
    _check_norm_epsilon("qk_norm_epsilon", epsilon, "normalize_qk", has_norm)
    _check_output_options(options)
    check_features(value_dim=options.get("value_dim"))
    if options.get("share_kv") and options.get("value_dim") is not None:
        raise ValueError(
            f"value_dim must be None with share_kv=True, whose values are keys, but got {options['value_dim']}."
        )
    head_axis, rope = options["head_axis"], options["rope"]
    if head_axis is not None and not isinstance(head_axis, str):
        raise ValueError(f"head_axis must be the name of a mesh axis or logical axis, but got {head_axis!r}.")
    if rope is not None:
        if not isinstance(rope, RoPE):
            raise ValueError(f"rope must be a flax_mha.rope.RoPE or None, but got {rope!r}.")
        rope.rotated_size(qkv_features // num_heads)


def _check_output_options(options: Mapping[str, Any]) -> None:
    validation.flag("exclusive", options.get("exclusive", False))
    gate, activation = options.get("gate", False), options.get("gate_activation", "sigmoid")
    if isinstance(gate, str):
        _check_choice("gate", gate, ("elementwise", "head"), "True or False")
    else:
        validation.flag("gate", gate)
    _check_choice("gate_activation", activation, ACTIVATIONS)
    if activation != "sigmoid" and not gate:
        raise ValueError(f'gate_activation must be "sigmoid" without gate, but got {activation!r}; pass gate=True.')
    out_norm = options.get("out_norm")
    if out_norm is not None:
        _check_choice("out_norm", out_norm, ("rms_norm",), "None")
    _check_norm_epsilon("out_norm_epsilon", options.get("out_norm_epsilon"), "out_norm", out_norm)


def _check_choice(name: str, given: Any, choices: Collection[str], others: str = "") -> None:
    if not isinstance(given, str) or given not in choices:
        names = "one of " * (len(choices) > 1) + ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {others and f'{others} or '}{names}, but got {given!r}.")


def check_latent(options: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the constructor arguments of a module with latent attention are valid."""
    for name in ("num_heads", *LATENT_SIZES, "q_lora_rank"):
        size, optional = options[name], name == "q_lora_rank"
        if (not is_int(size) or size < 1) and (size is not None or not optional):
            raise ValueError(f"{name} must be an int >= 1{' or None' * optional}, but got {size!r}.")
    validation.epsilon("norm_epsilon", options["norm_epsilon"])
    for name in ("query_residual", "normalize_rotary_key"):
        validation.flag(name, options[name])
    if options["query_residual"] and options["q_lora_rank"] is None:
        raise ValueError("q_lora_rank must be an int with query_residual=True, which is for compressed queries.")
    if (indexer := options["indexer"]) is not None:
        _check_indexer(indexer, options)
    check_options(options, options["num_heads"] * options["qk_rope_head_dim"])  # the features that `rope` is for


def _check_indexer(indexer: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(indexer, Indexer):
        raise ValueError(f"indexer must be a flax_mha.Indexer or None, but got {indexer!r}.")
    if options["q_lora_rank"] is None:
        raise ValueError("q_lora_rank must be an int with an indexer, whose queries use it, but got None.")
    if options["rope"] is not None and indexer.head_dim < options["qk_rope_head_dim"]:
        raise ValueError(
            f"head_dim of the indexer must be at least qk_rope_head_dim ({options['qk_rope_head_dim']}), but got "
            f"{indexer.head_dim}."
        )


def yarn_scale(module: Any) -> dict[str, float]:
    """Returns {"scale": scale} if the module's YaRN (`mscale_all_dim`) changes the scale of scores, else {}."""
    scaling = module.rope.scaling if isinstance(module.rope, RoPE) else None
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return {}
    factor = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    return {"scale": factor**2 / math.sqrt(module.qk_nope_head_dim + module.qk_rope_head_dim)}


def _check_heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
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


def check_positive(name: str, number: Any) -> float | None:
    """Returns a number as a float, and None as None; raises a ValueError unless a number is from 1e-30 to 1e30."""
    number = number_in(number)
    if number is not None and not (is_finite(number) and 1e-30 <= number <= 1e30):
        raise ValueError(f"{name} must be a concrete number from 1e-30 to 1e30, or None, but got {number!r}.")
    return None if number is None else float(number)


def check_features(**sizes: Any) -> None:
    """Raises a ValueError unless each keyword, such as `value_dim=64`, is an integer >= 1 or None."""
    for name, size in sizes.items():
        if size is not None:
            int_at_least(name, size, 1)


def check_has_features(**inputs: Any) -> None:
    """Raises a ValueError if an array, such as `inputs_q=x`, has a last axis of size 0; the error uses the keyword."""
    for name, x in inputs.items():
        if x is not None and x.ndim and x.shape[-1] < 1:
            raise ValueError(f"{name} must have at least one feature on its last axis, but got shape {x.shape}.")


def _check_norm_epsilon(name: str, epsilon: Any, norm_name: str, norm: Any) -> None:
    """Raises a ValueError if option `name` sets an invalid `epsilon`, or one that no `norm` uses; None is always valid.

    `norm_name` is the option that adds the norm.
    """
    if epsilon is None:
        return
    validation.epsilon(name, epsilon)
    if not norm:
        raise ValueError(f'{name} must be None without {norm_name}, but got {epsilon!r}; pass {norm_name}="rms_norm".')


def check_rngs(rngs: Any, *kinds: type) -> None:
    """Raises a ValueError unless a module's argument `rngs` is None or has one of the types `kinds`."""
    if rngs is not None and not isinstance(rngs, kinds):
        names = " or ".join(f"nnx.{kind.__name__}" for kind in kinds)
        raise ValueError(f"rngs must be {names}, but got {type(rngs).__name__}; pass a key as nnx.Rngs(key).")
