"""Reads a `state_dict`: finds attention layers, recognizes their layout, and turns
tensors into numpy arrays.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from flax_mha._src.convert.families import Family
from flax_mha._src.convert.layouts import (
    KEY_VALUE,
    LATENT_KEYS,
    LAYOUTS,
    Layout,
    LayoutName,
)

# Ends of the keys of quantized weights: bitsandbytes, GPTQ and AWQ, compressed-tensors
# and FP8, PyTorch.
QUANTIZED: tuple[str, ...] = (
    "SCB",
    "absmax",
    "quant_map",
    "weight_format",
    "qweight",
    "qzeros",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "_packed_params",
    "zero_point",
)
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
T5_TABLE = "relative_attention_bias.weight"
# Attentions that are not the self-attention of a text model's layers.
OTHERS = re.compile(r"vision|visual|image|audio|cross|encoder_attn|EncDecAttention|mtp")
SHOWN = 6  # keys or layers in an error


def attention_entries(state_dict: object, prefix: str) -> tuple[str, dict[str, Any]]:
    """Returns the prefix, ending in a dot, and the entries of the keys that start with
    it, without the prefix.
    """
    if not isinstance(state_dict, Mapping):
        fix = "pass a dict of names to tensors"
        if hasattr(state_dict, "state_dict"):
            fix = "pass module.state_dict()"
        raise ValueError(
            "state_dict must map names to tensors, but got a "
            f"{type(state_dict).__name__}; {fix}."
        )
    if not isinstance(prefix, str):
        raise ValueError(
            f"prefix must be a str such as 'layers.0.self_attn.', but got {prefix!r}."
        )
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ValueError(
                f"state_dict must have keys of type str, but got {key!r}; pass "
                "module.state_dict()."
            )
        if isinstance(value, Mapping):
            raise ValueError(
                f"state_dict must map names to tensors, but {key!r} is a dict; pass "
                f"state_dict[{key!r}] if it contains the tensors."
            )
    prefix = with_dot(prefix)
    entries = {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }
    if prefix and not entries:
        found = f" Its keys: {_list_names([*state_dict])}."
        layers = attention_layers(state_dict)
        if layers:
            found = _list_layers(layers)
        raise ValueError(
            "prefix must match the start of at least one key, but no key starts with "
            f"{prefix!r}.{found}"
        )
    return prefix, entries


def with_dot(prefix: str) -> str:
    """Returns a prefix of keys that ends in a dot, if it is not empty."""
    if prefix and not prefix.endswith("."):
        return f"{prefix}."
    return prefix


def recognize(
    entries: Mapping[str, Any], prefix: str = "", shared: Collection[str] = ()
) -> LayoutName:
    """Returns the name of the layout with these keys; if none fits, raises a ValueError
    that lists the layers found.

    `shared` are projections that the keys may lack, because the layer uses those of
    another layer.
    """
    added = sorted({"bias_k", "bias_v"} & {*entries})
    if added:
        raise ValueError(
            f"state_dict must not contain {', '.join(added)}, because Flax has no "
            "add_bias_kv; retrain with add_bias_kv=False."
        )
    layers = attention_layers(entries, shared)
    if not layers:
        check_not_quantized(entries)
    differences = {
        name: layout.difference(entries, shared) for name, layout in LAYOUTS.items()
    }
    fits = [name for name, difference in differences.items() if difference == ([], [])]
    if fits:
        return max(fits, key=lambda name: _fit(LAYOUTS[name], entries))
    if layers:
        raise ValueError(
            "prefix must select one attention layer, but got "
            f"{prefix!r}.{_list_layers(layers, prefix)}"
        )
    hint = ""
    nearest = min(
        differences, key=lambda name: [len(names) for names in differences[name]]
    )
    extra, missing = differences[nearest]
    if len(extra) < len(entries) or not missing:
        hint = (
            f" The closest is {nearest}: missing {_list_names(missing)}, extra "
            f"{_list_names(extra)}."
        )
    if any("lora_" in key for key in entries):
        hint += " Merge adapters first (merge_and_unload)."
    raise ValueError(
        "state_dict must have exactly the keys of a supported layout, but got "
        f"{_list_names(sorted(entries))}.{hint}\nLayouts: {', '.join(LAYOUTS)}; for "
        "their keys, see flax_mha.convert.LAYOUTS."
    )


def check_not_quantized(entries: Mapping[str, Any]) -> None:
    """Raises a ValueError if a key shows that the weights of one attention are
    quantized.
    """
    quantized = [
        key for key in entries if key.endswith(QUANTIZED) or ".quant_state." in key
    ]
    if quantized:
        raise ValueError(
            "state_dict must contain floating point weights, but some are quantized "
            f"({_list_names(quantized)}); dequantize the model first "
            "(model.dequantize() in Transformers), or load the original weights."
        )


def _fit(layout: Layout, entries: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Ranks layouts that have the same keys: returns whether orientation, gate and
    biases fit `layout`.
    """
    key = layout.key_of("query/kernel")
    shape = tuple(getattr(entries[key], "shape", ()))
    out_shape = tuple(getattr(entries[layout.key_of("out/kernel")], "shape", ()))
    # Query and gate stacked are twice the features that `out` reads.
    is_doubled = len(shape) == len(out_shape) == 2 and shape[0] == 2 * out_shape[1]
    stacks_gate = "gate/kernel" in layout.stacks[key]
    # Stacked queries, keys and values have more outputs than inputs.
    is_turned = True
    if layout.is_stacked and len(shape) == 2 and shape[0] != shape[1]:
        is_turned = (shape[1] > shape[0]) == layout.transposed
    return is_turned, is_doubled == stacks_gate, layout.biases(entries) in layout.biased


def attention_layers(keys: Iterable[str], shared: Collection[str] = ()) -> list[str]:
    """Returns the prefixes of all attention layers among these keys, in the order of
    the keys; see `recognize`.
    """
    keys = list(keys)
    known = {*keys}
    # A dict keeps the order.
    found: dict[str, None] = {}
    needed = [
        *(layout.difference((), shared)[1] for layout in LAYOUTS.values()),
        [*LATENT_KEYS],
    ]
    first = tuple({names[0] for names in needed})
    for key in keys:
        if not key.endswith(first):
            continue
        for names in needed:
            prefix = key.removesuffix(names[0])
            if (
                prefix != key
                and prefix.endswith(".")
                and known.issuperset(prefix + name for name in names)
            ):
                found[prefix] = None

    def is_inner(layer: str) -> bool:
        return any(layer != other and layer.startswith(other) for other in found)

    return [layer for layer in found if not is_inner(layer)]


def layer_prefix(state_dict: object, layer: int, prefix: str, family: Family) -> str:
    """Returns the prefix of the self-attention of a layer, or the given prefix if no
    key names that layer.

    If layers of the family have several attentions, each counts as a layer.
    """
    prefix, entries = attention_entries(state_dict, prefix)
    numbers = [layer]
    if family.attentions > 1:
        numbers = [*divmod(layer, family.attentions)]
    shared: Collection[str] = ()
    if family.shares_kv:
        shared = KEY_VALUE
    found = []
    for name in attention_layers(entries, shared):
        # The first numbers in a name count layers and attentions.
        of_name = re.findall(r"(?:^|\.)(\d+)(?=\.)", name)[: len(numbers)]
        if of_name == [str(number) for number in numbers] and not OTHERS.search(name):
            found.append(name)
    found = [name for name in found if "decoder." in name] or found
    if len(found) > 1:
        raise ValueError(
            f"prefix must select one attention in layer {layer}, but got "
            f"{prefix!r}.{_list_layers(found, prefix)}"
        )
    return prefix + "".join(found)


def table_key(state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """Returns the key of the T5 table that the layer at `prefix` uses, or None."""
    prefix = with_dot(prefix)
    of_first = re.sub(r"(^|\.)block\.\d+\.", r"\1block.0.", prefix)
    for key in (prefix + T5_TABLE, of_first + T5_TABLE):
        if key in state_dict:
            return key
    return None


def leaves_of(params: object, path: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by path, such as `query/kernel`."""
    if not isinstance(params, Mapping):
        return {path: params}
    leaves: dict[str, Any] = {}
    for name, part in params.items():
        leaves |= leaves_of(part, f"{path}/{name}".lstrip("/"))
    return leaves


def to_numpy(name: str, value: Any) -> np.ndarray:
    """Returns a tensor or array as numpy, bit for bit; raises a ValueError unless it
    holds floating point numbers.
    """
    if hasattr(value, "detach"):
        if getattr(value, "is_meta", False):
            raise ValueError(
                f"{name} has no values, because it is on the meta device; load the "
                "checkpoint first."
            )
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in FLOATS:
            value = _read_tensor(name, value, dtype)
    else:
        if hasattr(value, "unbox"):
            # flax.linen boxes what it partitions.
            value = value.unbox()
        value = np.asarray(value)
        dtype = str(value.dtype)
    if dtype == "object":
        raise ValueError(f"{name} must be a tensor or an array, but got {value!r}.")
    if dtype not in FLOATS:
        raise ValueError(
            f"{name} must be floating point, but got {dtype}; dequantize the model "
            "first, or load the original weights."
        )
    return value


def _read_tensor(name: str, tensor: Any, dtype: str) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        if dtype == "bfloat16":
            # PyTorch cannot turn it into numpy: pass its bits as int16.
            return (
                tensor.contiguous()
                .view(tensor.short().dtype)
                .numpy()
                .view(ml_dtypes.bfloat16)
            )
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        # It is sparse, or not yet initialized.
        kind = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise ValueError(
            f"{name} must be a dense tensor with values, but got a {kind}."
        ) from error


def _list_names(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:SHOWN])
    if len(names) > SHOWN:
        listed += f" and {len(names) - SHOWN} more"
    return f"[{listed}]"


def _list_layers(layers: list[str], prefix: str = "") -> str:
    """Lists prefixes of layers for an error; prefixes that differ only in numbers share
    a line.
    """
    alike: dict[str, list[str]] = {}
    for layer in layers:
        alike.setdefault(re.sub(r"\d+", "*", layer), []).append(prefix + layer)
    lines = []
    for group in alike.values():
        line = f"\n  {group[0]!r}"
        if len(group) > 1:
            line += f", ... {group[-1]!r} ({len(group)} layers)"
        lines.append(line)
    listed = "".join(lines[:SHOWN])
    if len(lines) > SHOWN:
        listed += f"\n  and {len(lines) - SHOWN} more kinds"
    return f" Attention layers found, as prefixes:{listed}"
