"""The options that the modules share, and checks of constructor arguments."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jaxtyping import Array

from flax_mha._src.call.arguments import (
    check_dropout_rate,
    check_scale,
    check_soft_cap,
    check_window,
)
from flax_mha._src.core import validation
from flax_mha._src.core.validation import int_at_least, is_int
from flax_mha._src.modules.attention_fn import AttentionFn
from flax_mha._src.modules.indexer import Indexer
from flax_mha._src.modules.layers import Gate, Norm
from flax_mha._src.rope import RoPE, YaRN
from flax_mha._src.run import check_name

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The options of a module that its calls read: checked, and without layers.

    The constructor makes this value to check the options before it makes parameters.
    Every call makes it again, because users may set attributes.
    """

    attention_fn: Callable[..., Array]
    dropout_rate: float
    implementation: str | None
    scale: float | Array | None
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    rope: RoPE | None
    head_axis: str | None
    reuse_kv: bool
    num_kv_heads: int
    # Features of a head of queries and keys; with latents, those that are rotated.
    head_dim: int
    value_dim: int  # features of a head of values
    norms_after_rope: bool  # whether norms of queries and keys follow their rotation
    gating: Gate | None  # how the gate changes the output

    @classmethod
    def of(cls, module: object, **resolved: Any) -> "AttentionOptions":
        """Reads and checks a module's options, its attributes of the same names.

        `resolved` holds the options whose attribute may be None, or that are none.

        Raises:
          ValueError: If an option is not valid.
        """
        given = dict(resolved)
        for field in dataclasses.fields(cls):
            if field.name not in resolved:
                given[field.name] = getattr(module, field.name)
        # Numbers may be arrays without axes.
        given["dropout_rate"] = check_dropout_rate(given["dropout_rate"])
        given["logits_soft_cap"] = check_soft_cap(given["logits_soft_cap"])
        options = cls(**given)
        check_name(options.implementation)
        check_window(options.local_window_size)
        # The sizes only set the default, which is not used here.
        check_scale(options.scale, validation.Shape((), 1, 1))
        validation.check_bool("reuse_kv", options.reuse_kv)
        head_axis = options.head_axis
        if head_axis is not None and not isinstance(head_axis, str):
            raise ValueError(
                "head_axis must be the name of a mesh axis or logical axis, but got "
                f"{head_axis!r}."
            )
        rope = options.rope
        if rope is None:
            return options
        if not isinstance(rope, RoPE):
            raise ValueError(
                f"rope must be a flax_mha.rope.RoPE or None, but got {rope!r}."
            )
        # Raises an error if it cannot rotate a head of this size.
        rope.rotated_size(options.head_dim)
        return options


def check_layers(
    *,
    sinks: bool,
    share_kv: bool,
    reuse_kv: bool,
    value_dim: int | None,
    value_norm: Norm | None,
    process_heads: Callable[..., Any] | None,
) -> None:
    """Raises a ValueError unless the options that set the layers of a module are valid
    and fit each other.
    """
    validation.check_bool("sinks", sinks)
    validation.check_bool("share_kv", share_kv)
    check_features(value_dim=value_dim)
    check_process_heads(process_heads)
    only_without_reuse = (
        ("value_norm", value_norm, None),
        ("share_kv", share_kv, False),
        ("process_heads", process_heads, None),
    )
    for name, given, off in only_without_reuse:
        if reuse_kv and given:
            raise ValueError(
                f"{name} must be {off} with reuse_kv=True, because keys and values "
                f"come from an earlier layer, but got {given}."
            )
    if share_kv and value_dim is not None:
        raise ValueError(
            "value_dim must be None with share_kv=True, whose values are keys, but got "
            f"{value_dim}."
        )


def check_process_heads(function: Callable[..., Any] | None) -> None:
    """Raises a ValueError unless `process_heads` is a function or None."""
    if function is not None and not callable(function):
        raise ValueError(
            "process_heads must be a function of (query, key, value) or None, but got "
            f"{function!r}."
        )


def check_latent(module: Any, indexer: Indexer | None) -> None:
    """Raises a ValueError unless the attributes and the indexer that only latent
    attention has are valid.
    """
    for name in ("num_heads", *LATENT_SIZES):
        int_at_least(name, getattr(module, name), 1)
    q_lora_rank = module.q_lora_rank
    is_size = is_int(q_lora_rank) and q_lora_rank >= 1
    if q_lora_rank is not None and not is_size:
        raise ValueError(
            f"q_lora_rank must be an int >= 1 or None, but got {q_lora_rank!r}."
        )
    validation.epsilon("norm_epsilon", module.norm_epsilon)
    validation.check_bool("query_residual", module.query_residual)
    if module.query_residual and q_lora_rank is None:
        raise ValueError(
            "q_lora_rank must be an int with query_residual=True, which is for "
            "compressed queries."
        )
    if indexer is None:
        return
    if not isinstance(indexer, Indexer):
        raise ValueError(
            f"indexer must be a flax_mha.Indexer or None, but got {indexer!r}."
        )
    if q_lora_rank is None:
        raise ValueError(
            "q_lora_rank must be an int with an indexer, whose queries use it, but got "
            "None."
        )
    rotary_size = module.qk_rope_head_dim
    if module.rope is not None and indexer.head_dim < rotary_size:
        raise ValueError(
            "head_dim of the indexer must be at least qk_rope_head_dim "
            f"({rotary_size}), but got {indexer.head_dim}."
        )


def scale_of(module: Any) -> float | Array | None:
    """Returns the scale of a module with latents: its attribute or, without one, that
    of its YaRN if `mscale_all_dim` changes it, otherwise None.
    """
    if module.scale is not None:
        return module.scale
    scaling = None
    if isinstance(module.rope, RoPE):
        scaling = module.rope.scaling
    if not isinstance(scaling, YaRN) or not scaling.mscale_all_dim:
        return None
    # scale = (0.1 mscale_all_dim ln(factor) + 1)^2 / sqrt(head size)
    factor = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
    head_size = module.qk_nope_head_dim + module.qk_rope_head_dim
    return factor**2 / math.sqrt(head_size)


def check_heads(
    num_heads: int, num_kv_heads: int | None, qkv_features: int
) -> tuple[int, int]:
    """Returns the number of key heads, which is `num_heads` for None, and the head
    size; raises a ValueError unless heads and features fit together.
    """
    if num_kv_heads is None:
        num_kv_heads = num_heads
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "qkv_features": qkv_features,
    }
    for name, number in sizes.items():
        if not is_int(number):
            raise ValueError(f"{name} must be an int, but got {number!r}.")
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(
            f"num_heads and num_kv_heads must be at least 1, but got {num_heads} and "
            f"{num_kv_heads}."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads ({num_heads}) must be divisible by num_kv_heads "
            f"({num_kv_heads})."
        )
    if qkv_features < 1 or qkv_features % num_heads:
        raise ValueError(
            f"Memory dimension ({qkv_features}) must be divisible by 'num_heads' heads "
            f"({num_heads}); choose qkv_features to be a multiple of num_heads."
        )
    return num_kv_heads, qkv_features // num_heads


def check_features(**sizes: object) -> None:
    """Raises a ValueError unless each keyword, such as `value_dim=64`, is an integer >=
    1 or None.
    """
    for name, size in sizes.items():
        if size is not None:
            int_at_least(name, size, 1)


def check_has_features(**inputs: Array | None) -> None:
    """Raises a ValueError if an array, such as `inputs_q=x`, has a last axis of size 0;
    the error uses the keyword.
    """
    for name, x in inputs.items():
        if x is not None and x.ndim and x.shape[-1] < 1:
            raise ValueError(
                f"{name} must have at least one feature on its last axis, but got "
                f"shape {x.shape}."
            )


def check_rngs(rngs: object, *kinds: type) -> None:
    """Raises a ValueError unless a module's argument `rngs` is None or has one of the
    types `kinds`.
    """
    if rngs is not None and not isinstance(rngs, kinds):
        names = " or ".join(f"nnx.{kind.__name__}" for kind in kinds)
        raise ValueError(
            f"rngs must be {names}, but got {type(rngs).__name__}; pass a key as "
            "nnx.Rngs(key)."
        )


def check_score_mod(score_mod: object, attention_fn: AttentionFn | None) -> None:
    """Raises a ValueError unless a module's `score_mod` is a function or None, and the
    only one: its `attention_fn` may preset another.
    """
    preset = None
    if attention_fn is not None:
        preset = attention_fn.preset.get("score_mod")
    if holds(is_of_nnx, preset):
        raise ValueError(
            "attention_fn must not preset a module with parameters as score_mod, "
            "because they would not be trained; pass score_mod to the constructor of "
            "flax_mha.MultiHeadAttention, or to the call."
        )
    if score_mod is None:
        return
    if not callable(score_mod):
        raise ValueError(
            "score_mod must be a function (score, b, h, q_idx, kv_idx) -> score or "
            f"None, but got {score_mod!r}."
        )
    if preset is not None:
        raise ValueError(
            "score_mod must be set by the constructor or by a functools.partial in "
            "attention_fn, but got both; remove one of them."
        )


def check_shows_parameters(**functions: object) -> None:
    """Raises a ValueError if a function, such as `score_mod=function`, hides parameters
    from the nnx module whose attribute it becomes.
    """
    for name, function in functions.items():
        # Flax finds the variables of a module that is itself the attribute.
        is_hidden = holds(is_of_nnx, function) and not isinstance(function, nnx.Module)
        if is_hidden or holds(_is_bound_linen, function):
            raise ValueError(
                f"{name} must be the nnx.Module itself, not its method, a "
                "functools.partial or a bound module of flax.linen, whose parameters "
                f"would not be trained, but got {type(function).__name__}; pass it in "
                "the call, give the module a __call__, or use nnx.bridge.ToNNX."
            )


def check_not_of_nnx(options: Mapping[str, Any]) -> None:
    """Raises a ValueError if an attribute or argument of a linen module, by name, is a
    module of nnx with parameters.
    """
    for name, option in options.items():
        if not holds(is_of_nnx, option):
            continue
        fix = "convert it with flax.nnx.bridge.to_linen"
        if name == "score_mod":
            fix = (
                "pass a function of a parameter of your linen module, such as "
                "recipes.t5_bias(table)['score_mod']"
            )
        raise ValueError(
            f"{name} must not be a module of flax.nnx in a module of flax.linen, which "
            f"would not train its parameters; {fix}."
        )


def holds(is_kind: Callable[[Any], bool], function: object) -> bool:
    """Returns whether `is_kind` is True for a function, or for what it is a method or
    `functools.partial` of.
    """
    if isinstance(function, functools.partial):
        parts = (function.func, *function.args, *function.keywords.values())
        return any(holds(is_kind, part) for part in parts)
    if isinstance(function, types.MethodType):
        return holds(is_kind, function.__self__)
    return is_kind(function)


def is_of_nnx(x: object) -> bool:
    """Returns whether x is a module of flax.nnx that has variables."""
    return isinstance(x, nnx.Module) and bool(jax.tree.leaves(nnx.state(x)))


def _is_bound_linen(x: object) -> bool:
    return isinstance(x, nn.Module) and x.scope is not None
