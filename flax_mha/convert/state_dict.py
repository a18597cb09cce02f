"""Reads a `state_dict`: finds its attention, names its layout, and makes numpy arrays of its tensors."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from flax_mha.convert.layouts import KERNELS, LAYOUTS, LayoutName

# What keys of quantized weights end with: bitsandbytes, GPTQ and AWQ, compressed-tensors and FP8, PyTorch's own.
QUANTIZED: tuple[str, ...] = (
    "SCB",
    "absmax",
    "quant_map",
    "weight_format",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_packed",
)
QUANTIZED += ("weight_scale", "weight_scale_inv", "weight_zero_point", "_packed_params", "zero_point")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
T5_TABLE = "relative_attention_bias.weight"
SHOWN = 6  # keys or layers in an error


def attention_entries(state_dict: Any, prefix: str) -> tuple[str, dict[str, Any]]:
    """The prefix, with the dot that it ends with, and the entries whose keys start with it, without it.

    Raises:
      ValueError: If this is no state_dict, or if nothing starts with the prefix.
    """
    if not isinstance(state_dict, Mapping):
        fix = "pass module.state_dict()" if hasattr(state_dict, "state_dict") else "pass a dict of names to tensors"
        raise ValueError(f"state_dict must map names to tensors, but got a {type(state_dict).__name__}; {fix}.")
    if not isinstance(prefix, str):
        raise ValueError(f"prefix must be a str such as 'layers.0.self_attn.', but got {prefix!r}.")
    if wrong := [key for key in state_dict if not isinstance(key, str)]:
        raise ValueError(f"state_dict must have keys of type str, but got {wrong[0]!r}; pass module.state_dict().")
    if nested := [key for key, value in state_dict.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"state_dict must map names to tensors, but {nested[0]!r} is a dict; pass state_dict[{nested[0]!r}] if "
            "that is the one."
        )
    if prefix and not prefix.endswith("."):
        prefix += "."
    entries = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    if prefix and not entries:
        raise ValueError(f"prefix must start some keys, but no key starts with {prefix!r}.{_listed(state_dict)}")
    return prefix, entries


def recognized(entries: Mapping[str, Any], prefix: str = "") -> LayoutName:
    """The layout whose keys these are.

    Raises:
      ValueError: If none has these keys, with the attention layers that were found below.
    """
    if added := sorted({"bias_k", "bias_v"} & {*entries}):
        raise ValueError(f"state_dict must do without {', '.join(added)}: Flax has no add_bias_kv; train without it.")
    _check_quantized(entries)
    differences = {name: layout.difference(entries) for name, layout in LAYOUTS.items()}
    fits = [name for name, difference in differences.items() if difference == ([], [])]
    fits = [name for name in fits if _oriented(name, entries)] or fits
    biased = [name for name in fits if LAYOUTS[name].biases(entries) in LAYOUTS[name].biased]
    if fits:
        return (biased or fits)[0]
    if T5_TABLE in entries and differences["hf_t5"] == ([T5_TABLE], []):
        raise ValueError(
            f"state_dict must hold the attention alone, but got {T5_TABLE}, which T5 adds to the scores of every "
            "layer; take it out, and pass it to every call: score_mod=recipes.t5_bias(table)['score_mod'] or bias=."
        )
    if layers := attention_layers(entries):
        raise ValueError(f"prefix must lead to one attention layer, but got {prefix!r}.{_shown(layers, prefix)}")
    nearest = min(differences, key=lambda name: [len(names) for names in differences[name]])
    extra, missing = differences[nearest]
    near = len(extra) < len(entries) or not missing
    hint = f" Nearest is {nearest}: missing {_some(missing)}, extra {_some(extra)}." if near else ""
    adapters = " Merge adapters first (merge_and_unload)." if any("lora_" in key for key in entries) else ""
    raise ValueError(
        f"state_dict must have the keys of one layout, but got {_some(sorted(entries))}.{hint}{adapters}\n"
        f"Layouts: {', '.join(LAYOUTS)}; their keys stand in flax_mha.convert.LAYOUTS."
    )


def attention_layers(keys: Iterable[str]) -> list[str]:
    """The prefixes below which the keys of an attention stand, in the order of the keys."""
    keys = list(keys)
    known = {*keys}
    found: dict[str, None] = {}
    needed = [layout.difference(())[1] for layout in LAYOUTS.values()]
    for key in keys:
        for names in needed:
            prefix = key.removesuffix(names[0])
            if prefix != key and prefix.endswith(".") and known.issuperset(prefix + name for name in names):
                found[prefix] = None
    return [layer for layer in found if not any(layer != other and layer.startswith(other) for other in found)]


def to_numpy(name: str, value: Any) -> np.ndarray:
    """A tensor or array as numpy, bit for bit.

    Raises:
      ValueError: If it holds no values, or none that are floating point numbers.
    """
    if hasattr(value, "detach"):
        if getattr(value, "is_meta", False):
            raise ValueError(
                f"{name} must hold values, but got a tensor on the meta device; load the checkpoint first."
            )
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in FLOATS:
            try:
                value = _from_tensor(value, dtype)
            except (TypeError, RuntimeError) as error:  # sparse, or not yet initialized
                kind = f"{type(value).__name__} of layout {value.layout}"
                raise ValueError(f"{name} must be a dense tensor that holds values, but got a {kind}.") from error
    else:
        value = np.asarray(value.unbox() if hasattr(value, "unbox") else value)  # flax.linen boxes what it partitions
        dtype = str(value.dtype)
    if dtype == "object":
        raise ValueError(f"{name} must be a tensor or an array, but got {value!r}.")
    if dtype not in FLOATS:
        raise ValueError(
            f"{name} must be floating point, but got {dtype}; dequantize the model first, or load its original weights."
        )
    return value


def _from_tensor(tensor: Any, dtype: str) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype == "bfloat16":  # numpy lacks it: its bits pass as int16
        return tensor.contiguous().view(tensor.short().dtype).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _check_quantized(entries: Mapping[str, Any]) -> None:
    marks = [key for key in entries if key.endswith(QUANTIZED) or ".quant_state." in key]
    if marks and not attention_layers(entries):
        raise ValueError(
            f"state_dict must hold floating point weights, but got quantized ones ({_some(marks)}); dequantize the "
            "model first (model.dequantize() in Transformers), or load its original weights."
        )


def _oriented(name: LayoutName, entries: Mapping[str, Any]) -> bool:
    """Whether the first kernel has its stacked rows where this layout has them; they are the longer axis."""
    layout = LAYOUTS[name]
    key, paths = next((key, paths) for key, paths in layout.stacks.items() if paths[0] in KERNELS)
    shape = tuple(getattr(entries[key], "shape", ()))
    return len(paths) == 1 or len(shape) != 2 or shape[0] == shape[1] or (shape[1] > shape[0]) == layout.transposed


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"[{', '.join(repr(name) for name in names[:SHOWN])}{more}]"


def _listed(state_dict: Mapping[str, Any]) -> str:
    layers = attention_layers(state_dict)
    return _shown(layers) if layers else f" Its keys: {_some([*state_dict])}."


def _shown(layers: list[str], prefix: str = "") -> str:
    """The layers; of those that differ in their numbers alone the first, the last and how many there are."""
    alike: dict[str, list[str]] = {}
    for layer in layers:
        alike.setdefault(re.sub(r"\d+", "*", layer), []).append(prefix + layer)
    lines = [
        f"\n  {group[0]!r}" + (f", ... {group[-1]!r} ({len(group)} layers)" if len(group) > 1 else "")
        for group in alike.values()
    ]
    more = f"\n  and {len(lines) - SHOWN} more kinds" if len(lines) > SHOWN else ""
    return f" Attention layers found, as prefixes:{''.join(lines[:SHOWN])}{more}"
