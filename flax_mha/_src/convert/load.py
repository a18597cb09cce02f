"""`load_torch`: loads the weights of a PyTorch attention into an nnx module, and checks
that the two fit.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_mha._src.convert.latent_weights import AXES, scaled
from flax_mha._src.convert.layouts import (
    KEY_VALUE,
    LATENT,
    LAYOUTS,
    MODEL_TYPE,
    NORM_BIASES,
    NORMS,
    OTHER_AXES,
    TABLE,
    TORCH_AXES,
    LayoutName,
)
from flax_mha._src.convert.shapes import Arrays, fill_with_zeros
from flax_mha._src.convert.state_dict import attention_entries, table_key, to_numpy
from flax_mha._src.convert.weights import family_of, norm_offset, read
from flax_mha._src.nnx.latent import MultiHeadLatentAttention
from flax_mha._src.recipes.scores import RelativeBias

# What errors say to pass.
OVER_ALL_HEADS = 'Norm("rms", scale="heads", over="all_heads")'
# Problems that an error lists.
SHOWN = 8
# Layers of Gemma 2 and later have this key next to the attention; only Gemma 2 has no
# norm of queries.
GEMMA = "pre_feedforward_layernorm.weight"


def load_torch(
    module: nnx.MultiHeadAttention | MultiHeadLatentAttention,
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    qk_norm_offset: float | None = None,
    check_options: bool = True,
) -> None:
    """Loads the `state_dict` of a PyTorch attention into an nnx module; the module
    changes only if everything fits.

    Weights are rounded to the dtype of the module's parameters, and placed on the same
    devices. (For Gemma 3, whose norms multiply by 1 + weight, keep `param_dtype` at
    float32.) If only some projections have biases (Qwen 2, Whisper), the module's other
    biases become zeros.

    The table of T5 is loaded into the `recipes.RelativeBias` that the module has as
    `score_mod`. Layers without a table use that of the first layer in `state_dict`.

    The arguments of the module must also match the model: a Llama layer without rotary
    positions runs, but is wrong. `describe` returns the arguments of a config. For a
    module made without it, this function checks the arguments that the keys show:
    `rope`, `scale`, `normalize_qk`, `sinks`. Keys do not show

    - windows, the epsilon of norms, or which features rotary positions pair;
    - whether the model is RoFormer or BERT, or nanoGPT or a GPT-BigCode with
      `multi_query=False`, which stacks its weights in a different order;
    - the number of heads, unless the layer has norms of queries and keys, sinks, the
      buffer `rotary_emb.inv_freq` of older files, or T5's bias table. Without these, 12
      heads of 64 features load as 8 heads of 96, and give a different output.

    Args:
      module: `flax_mha.MultiHeadAttention`, or Flax's;
        `flax_mha.MultiHeadLatentAttention` for DeepSeek's weights.
      state_dict: PyTorch tensors on any device, or numpy or JAX arrays: of one
        attention or a whole model.
      prefix: The start of the attention's keys in `state_dict`, such as
        `"model.layers.0.self_attn."`.
      qk_norm_offset: The number that the model adds to the weights of its query and key
        norms: 1.0 for Gemma 3, 0.0 for other models. None means the offset of the model
        if the module was created with `describe`, and is an error for any other module
        with such norms.
      check_options: If False, load the weights even if the module lacks an argument
        that models with this layout need, such as `rope`.

    Raises:
      ValueError: If the keys fit no layout, if a shape, bias or dtype does not fit the
        module, if weights are quantized or hold no values, if the module lacks an
        argument, or if one of its layers is wrapped, as by LoRA.

    Example:
      >>> import numpy as np
      >>> from flax import nnx
      >>> import flax_mha
      >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2}
      >>> arguments = flax_mha.convert.describe(config)
      >>> attention = flax_mha.MultiHeadAttention(
      ...     **arguments, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> shapes = {"c_attn.weight": (8, 24), "c_attn.bias": 24}
      >>> shapes |= {"c_proj.weight": (8, 8), "c_proj.bias": 8}
      >>> layers = {}
      >>> for name, shape in shapes.items():
      ...     layers[f"h.0.attn.{name}"] = np.ones(shape, np.float32)
      >>> flax_mha.convert.load_torch(attention, layers, prefix="h.0.attn.")
    """
    paths = TORCH_AXES | OTHER_AXES
    kernel_path = "query/kernel"
    is_latent = isinstance(module, MultiHeadLatentAttention)
    if is_latent:
        paths = AXES
        kernel_path = "kv_b_proj/kernel"
        if qk_norm_offset is not None:
            raise ValueError(
                "qk_norm_offset must be None for latent attention, but got "
                f"{qk_norm_offset!r}."
            )
    elif not isinstance(module, nnx.MultiHeadAttention):
        raise ValueError(
            "module must be an nnx.MultiHeadAttention, but got "
            f"{type(module).__name__}; for flax.linen, use from_torch."
        )
    variables = _variables(module, paths)
    kernel = variables[kernel_path]
    family = family_of(kernel)
    offset = norm_offset(family) if qk_norm_offset is None else qk_norm_offset
    shared: list[str] = []
    if not is_latent:
        # The module takes these from another layer.
        shared = [name for name in KEY_VALUE if getattr(module, name) is None]
    num_kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    layout, arrays = read(
        state_dict, module.num_heads, num_kv_heads, prefix, offset, shared
    )
    if is_latent != (layout == LATENT):
        kind = "MultiHeadAttention"
        if layout == LATENT:
            kind = "MultiHeadLatentAttention"
        raise ValueError(
            f"module must be a {kind} for layout {layout!r}, but got a "
            f"{type(module).__name__}."
        )

    # Add what the model does not store, and leave out what the module takes from other
    # layers.
    score_mod = getattr(module, "score_mod", None)
    if layout != "hf_t5" or not isinstance(score_mod, RelativeBias):
        # A bias that the model does not have is the user's own.
        variables.pop(TABLE, None)
    elif TABLE not in arrays:
        key = table_key(state_dict, prefix)
        if key is not None:
            arrays[TABLE] = to_numpy(key, state_dict[key])
    if family.norm_scale == "none":
        for path in {*NORMS} & {*variables}:
            arrays[path] = np.ones(variables[path].shape, np.float32)
    if family.scaled_latents:
        arrays = scaled(arrays, 0.5)
    if "query/bias" in variables:
        arrays = fill_with_zeros(arrays)
    if "key" in shared:
        others = ("key/", "value/", "key_ln/")
        arrays = {
            path: array for path, array in arrays.items() if not path.startswith(others)
        }

    problems = _mismatches(variables, arrays)
    if not problems and check_options and not kernel.get_metadata().get(MODEL_TYPE):
        problems = _wrong_options(
            module, layout, arrays, state_dict, prefix, qk_norm_offset
        )
        if problems:
            problems.append(
                "convert.describe(config, layer) returns these arguments for the "
                "models that it supports"
            )
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:SHOWN])
        if len(problems) > SHOWN:
            lines += f"\n  and {len(problems) - SHOWN} more"
        raise ValueError(
            "module must match the layer in state_dict, which has layout "
            f"{layout!r}:{lines}"
        )
    # All are checked before the first is set.
    values = {
        path: _place(path, arrays[path], variable)
        for path, variable in variables.items()
    }
    for path, variable in variables.items():
        variable.set_value(values[path])


def _variables(module: Any, paths: Iterable[str]) -> dict[str, nnx.Variable]:
    """Returns the module's variables at these paths, such as `query/kernel`, by path;
    leaves out paths that the module lacks.

    Raises a ValueError if a wrapper, such as LoRA, or a quantized array replaces a
    layer or its variable.
    """
    found: dict[str, nnx.Variable] = {}
    for path in paths:
        *names, leaf = path.split("/")
        layer = module
        for name in names:
            layer = getattr(layer, name, None)
        if layer is None:
            continue
        variable = getattr(layer, leaf, None)
        is_as_made = True
        if leaf == "kernel":
            is_as_made = isinstance(variable, nnx.Variable)
        elif leaf == "scale":
            # The scale of a norm may be None.
            is_as_made = hasattr(layer, leaf)
        if not is_as_made:
            raise ValueError(
                f"{'.'.join(names)} must have its own {leaf}, an nnx.Variable, "
                f"but is {type(layer).__name__}; load the weights before wrapping or "
                "quantizing layers."
            )
        if variable is not None:
            found[path] = variable
    return found


def _mismatches(variables: Mapping[str, nnx.Variable], arrays: Arrays) -> list[str]:
    """Returns a message for each parameter that does not fit its array, or is missing
    in the module or `arrays`.
    """
    problems: list[str] = []
    for path in dict.fromkeys([*variables, *arrays]):
        name = path.replace("/", ".")
        option = _option(path, variables, arrays)
        if path not in arrays:
            problem = f"{name} is missing from state_dict"
            fix = "create the module with"
        elif path not in variables:
            problem = f"{name} is missing from the module"
            fix = "create it with"
        else:
            dtype = variables[path].dtype
            shape = variables[path].shape
            array = arrays[path]
            is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
            fix = "use"
            if shape != array.shape:
                problem = f"{name} must have shape {shape}, but got {array.shape}"
            elif np.iscomplexobj(array) and not is_complex:
                problem = f"{name} must have dtype {dtype}, but got {array.dtype}"
                option = ""
            else:
                continue
        if option:
            problem += f"; {fix} {option}"
        problems.append(problem)
    return problems


def _option(path: str, variables: Mapping[str, nnx.Variable], arrays: Arrays) -> str:
    """Returns the option with which a module has the parameter if, and only if,
    `arrays` do; an empty string if no option helps.
    """
    is_needed = path in arrays
    if path in NORMS or path in NORM_BIASES:
        if not is_needed:
            return "normalize_qk=False"
        if NORM_BIASES[0] in arrays:
            return 'normalize_qk=Norm("layer", bias=True)'
        if arrays[path].ndim > 1:
            return f"normalize_qk={OVER_ALL_HEADS}"
        return 'normalize_qk=Norm("rms")'
    if is_needed and path in variables:
        return ""
    if path.startswith("indexer/"):
        if is_needed:
            return "the indexer that convert.describe(config) returns"
        return "indexer=None"
    if path.startswith("value/") and "value/kernel" not in variables:
        return "share_kv=False"
    if path.startswith("out_norm/"):
        if is_needed:
            return f"out_norm={OVER_ALL_HEADS}"
        return "out_norm=None"
    if path.endswith("/bias"):
        # A module has all biases or none; if a model has some, the others are zeros.
        has_others = any(name.endswith("/bias") for name in arrays)
        if has_others and not is_needed:
            return ""
        return f"use_bias={is_needed}"
    if path.startswith("q_"):
        compressed = arrays.get("q_a_proj/kernel")
        rank = None if compressed is None else compressed.shape[-1]
        return f"q_lora_rank={rank}"
    if path == "gate/kernel":
        if is_needed and arrays[path].ndim == 2:
            return 'gate=Gate("head")'
        return f"gate={is_needed}"
    if path == "sinks":
        return f"sinks={is_needed}"
    if path == TABLE:
        if is_needed:
            return "score_mod=recipes.RelativeBias(num_heads, bidirectional=is_encoder)"
        return "score_mod=None"
    return ""


def _wrong_options(
    module: Any,
    name: LayoutName,
    arrays: Arrays,
    state_dict: Mapping[str, Any],
    prefix: str,
    qk_norm_offset: float | None,
) -> list[str]:
    """Returns a message for each option, such as `rope` or `num_heads`, that differs
    from what the weights show.
    """
    rest = "pass check_options=False if this layer has none"
    problems: list[str] = []
    # Flax's own modules lack these options.
    rope = getattr(module, "rope", None)
    scale = getattr(module, "scale", None)
    if name == LATENT:
        if rope is None:
            problems.append(f"rope is None: models with latents use it; {rest}")
        return problems

    # The heads.
    _, entries = attention_entries(state_dict, prefix)
    frequencies = entries.get("rotary_emb.inv_freq")
    if frequencies is not None and rope is not None:
        expected = 2 * math.prod(np.shape(frequencies))
        rotated = rope.rotated_size(module.head_dim)
        if rotated != expected:
            problems.append(
                f"num_heads is {module.num_heads}, and rope rotates {rotated} of each "
                f"head's {module.head_dim} features, but rotary_emb.inv_freq is for "
                f"{expected}"
            )
    table = table_key(state_dict, prefix) if name == "hf_t5" else None
    if table is not None:
        heads = np.shape(state_dict[table])[-1]  # [buckets, heads]
        if heads != module.num_heads:
            problems.append(
                f"num_heads must be {heads} to match {table}, but got "
                f"{module.num_heads}"
            )

    layout = LAYOUTS[name]
    if layout.rotary and rope is None:
        problems.append(
            f"rope is None: {layout.rotary} use it; pass "
            f"rope=RoPE.from_config(config), or {rest}"
        )
    if layout.scale is not None and scale != layout.scale:
        problems.append(
            f"scale must be {layout.scale}, but got {scale}: these models do not scale "
            "the scores"
        )

    has_norms = NORMS[0] in arrays
    beside = prefix.rstrip(".").rpartition(".")[0]
    if not has_norms:
        is_gemma_2 = f"{beside}.{GEMMA}" in state_dict
        if is_gemma_2 and getattr(module, "logits_soft_cap", None) is None:
            problems.append(
                f"logits_soft_cap is None: Gemma 2 caps its logits at 50.0; {rest}"
            )
        return problems
    if NORM_BIASES[0] in arrays:
        return problems
    spans_all_heads = arrays[NORMS[0]].ndim > 1
    if not isinstance(module.query_ln, nnx.RMSNorm):
        problems.append(
            'normalize_qk must be Norm("rms"): these norms do not subtract the mean'
        )
    elif spans_all_heads:
        is_right = module.query_ln.reduction_axes == (-2, -1)
        if not is_right or getattr(module, "norms_after_rope", False):
            problems.append(
                f"normalize_qk must be {OVER_ALL_HEADS}: these norms span all heads"
            )
    if qk_norm_offset is None and not spans_all_heads:
        problems.append(
            "qk_norm_offset is None: pass 1.0 for Gemma 3, which multiplies by 1 + "
            "weight, or 0.0 for Qwen 3"
        )
    return problems


def _place(path: str, array: np.ndarray, variable: nnx.Variable) -> Any:
    """Returns the array in the dtype and on the devices of the variable; raises a
    ValueError if numbers overflow.
    """
    with np.errstate(over="ignore"):
        cast = array.astype(variable.dtype)
    if not np.array_equal(np.isfinite(cast), np.isfinite(array)):
        largest = np.abs(array[np.isfinite(array)]).max()
        raise ValueError(
            f"{path.replace('/', '.')} must fit in {variable.dtype}, but contains "
            f"values up to {largest:.3g}; create the module with a different "
            "param_dtype."
        )
    value = variable.get_value()
    sharding = None
    if not isinstance(value, jax.core.Tracer):
        sharding = getattr(value, "sharding", None)
    if sharding is None:
        return jnp.asarray(cast)
    return jax.device_put(cast, sharding)
