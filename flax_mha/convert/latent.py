"""Converts latent attention (DeepSeek): the weights, which have the same names in Flax, and the sizes in a config."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flax_mha._src.core.validation import is_int
from flax_mha._src.modules.indexer import Indexer
from flax_mha._src.modules.options import LATENT_SIZES
from flax_mha.convert.hf_config.layers import Values
from flax_mha.convert.layouts import LATENT_KEYS
from flax_mha.convert.shapes import Arrays, find_sizes
from flax_mha.convert.state_dict import to_numpy

# Letters of the axes of each parameter in Flax: D input and O output features; N heads with E features in queries, V in
# values and F in `kv_b_proj`; C features of the latent, A with the rotary key; R of compressed queries.
AXES = {"q_proj/kernel": "DNE", "q_a_proj/kernel": "DR", "q_a_proj/bias": "R", "q_a_layernorm/scale": "R"}
AXES |= {"q_b_proj/kernel": "RNE", "kv_a_proj_with_mqa/kernel": "DA", "kv_a_proj_with_mqa/bias": "A"}
AXES |= {"kv_a_layernorm/scale": "C", "kv_b_proj/kernel": "CNF", "o_proj/kernel": "NVO", "o_proj/bias": "O"}
# The same for an indexer with I heads of X features.
INDEX = {"indexer/wq_b/kernel": "RIX", "indexer/wk/kernel": "DX", "indexer/weights_proj/kernel": "DI"}
INDEX |= {"indexer/k_norm/scale": "X", "indexer/k_norm/bias": "X"}
AXES |= INDEX
QUERIES = ({"q_proj/kernel"}, {"q_a_proj/kernel", "q_a_layernorm/scale", "q_b_proj/kernel"})


def key_of(path: str) -> str:
    """Returns the key in a state_dict, such as `q_proj.weight`, of the parameter with Flax's path `q_proj/kernel`."""
    *names, leaf = path.split("/")
    return ".".join([*names, "bias" if leaf == "bias" else "weight"])


PATHS = {key_of(path): path for path in AXES}


def is_latent(keys: Collection[str]) -> bool:
    """Returns True if the keys of a state_dict include `LATENT_KEYS`, so that they belong to latent attention."""
    return {*LATENT_KEYS} <= {*keys}


def read_latent(entries: Mapping[str, Any], prefix: str, num_heads: int) -> Arrays:
    """Converts one attention's entries of a state_dict to arrays in Flax's shapes, by path; `prefix` is for errors."""
    entries = {key: value for key, value in entries.items() if not key.startswith("rotary_emb.")}
    index_keys = {*map(key_of, INDEX)}
    if extra := sorted({*entries} - ({*PATHS} if index_keys <= {*entries} else {*PATHS} - index_keys)):
        raise ValueError(
            "state_dict must contain only the weights of a latent attention layer, but also has "
            f"{', '.join(extra[:6])}."
        )
    queries = {PATHS[key] for key in entries if key.startswith("q_") and key.endswith("weight")}
    if queries not in QUERIES:
        raise ValueError(
            "state_dict must contain q_proj, or q_a_proj, q_a_layernorm and q_b_proj, but got "
            f"{', '.join(sorted(path.split('/')[0] for path in queries)) or 'none'}."
        )
    arrays = {PATHS[key]: to_numpy(prefix + key, x) for key, x in entries.items()}
    index_heads = len(np.atleast_1d(arrays.get("indexer/weights_proj/kernel", 0)))
    arrays = {path: _to_flax(path, x, index_heads if path in INDEX else num_heads) for path, x in arrays.items()}
    find_sizes(arrays, AXES)
    return arrays


def _to_flax(path: str, array: np.ndarray, heads: int) -> np.ndarray:
    array = np.atleast_1d(array).T.copy()
    axis = _axis_of_heads(AXES[path])
    if axis < 0:
        return array
    shape = (*array.shape[:axis], heads, array.shape[axis] // heads, *array.shape[axis + 1 :])
    if array.shape[axis] % heads:
        raise ValueError(
            f"num_heads must divide the {array.shape[axis]} features of {path}, but got {heads}; use num_heads from "
            "the model's config."
        )
    return array.reshape(shape)


def latent_to_torch(params: Mapping[str, Any]) -> Arrays:
    """Converts the parameters of latent attention to a state_dict, the inverse of `read_latent`."""
    layers = {name: params[name] for name in params if name != "indexer"}
    layers |= {f"indexer/{name}": x for name, x in params.get("indexer", {}).items()}
    leaves = {f"{name}/{leaf}": x for name, layer in layers.items() for leaf, x in _items(layer)}
    missing = {PATHS[key] for key in LATENT_KEYS} - {*leaves}
    if missing or {*leaves} - {*AXES}:
        extra = sorted({*leaves} - {*AXES})
        raise ValueError(
            f"params must be the parameters of one attention layer; missing {sorted(missing)}, extra {extra}"
        )
    arrays = {path: to_numpy(path, x) for path, x in leaves.items()}
    find_sizes(arrays, AXES)
    return {key_of(path): _flatten_heads(AXES[path], array).T.copy() for path, array in arrays.items()}


def _items(x: Any) -> Any:
    return x.items() if isinstance(x, Mapping) else [("", x)]


def _axis_of_heads(axes: str) -> int:
    """Returns the index of the axis of heads, which PyTorch merges with the next axis; -1 if there is none."""
    return max(axes.find("N"), axes.find("IX"))


def _flatten_heads(axes: str, array: np.ndarray) -> np.ndarray:
    axis = _axis_of_heads(axes)
    return array if axis < 0 else array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def latent_sizes(values: Values) -> dict[str, Any]:
    """Reads the size arguments of `MultiHeadLatentAttention` from a config; raises a ValueError if one is wrong."""
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if values.get("v_head_dim") is None and is_int(hidden) and is_int(heads) and heads:
        values = values | {"v_head_dim": hidden // heads}
    names = ("num_attention_heads", "hidden_size", *LATENT_SIZES, "q_lora_rank")
    for name in names:
        size, optional = values.get(name), name == "q_lora_rank"
        if (not is_int(size) or size < 1) and (size is not None or not optional):
            expected = f"a positive integer{' or null' * optional}"
            raise ValueError(f"{name} in config must be {expected}, but got {size!r}.")
    _check_consistent(values)
    return dict(zip(("num_heads", "in_features", *names[2:]), (values[name] for name in names), strict=True))


def indexer_of(values: Values) -> dict[str, Indexer]:
    """Reads the argument `indexer` of `MultiHeadLatentAttention` from a config; returns {} if it has no indexer."""
    if "index_n_heads" not in values:
        return {}
    if values["q_lora_rank"] is None or values["index_head_dim"] < values["qk_rope_head_dim"]:
        raise ValueError(
            "config must set q_lora_rank, and index_head_dim to at least qk_rope_head_dim, but got "
            f"{values['q_lora_rank']!r}, {values['index_head_dim']} and {values['qk_rope_head_dim']}."
        )
    names = ("index_n_heads", "index_head_dim", "index_topk", "indexer_rope_interleave")
    return {"indexer": Indexer(*(values[name] for name in names))}


def _check_consistent(values: Values) -> None:
    rotary, size = values["qk_rope_head_dim"], values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    for name, expected, reason in (
        ("num_key_value_heads", values["num_attention_heads"], "num_attention_heads"),
        ("qk_head_dim", size, "qk_nope_head_dim + qk_rope_head_dim"),
    ):
        if values.get(name) not in (None, expected):
            raise ValueError(f"{name} in config must equal {reason} = {expected}, but got {values[name]!r}.")
    parameters: Values = values.get("rope_scaling") or values.get("rope_parameters") or {}
    fraction = parameters.get("partial_rotary_factor") or 1.0
    if not any(round(fraction * of) == rotary for of in (rotary, size)):
        raise ValueError(
            f"partial_rotary_factor must match {rotary} rotary features out of {size}, but got {fraction!r}."
        )
