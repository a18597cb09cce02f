"""Converts the weights of latent attention (DeepSeek), which have the same names in Flax."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flax_mha.convert.layouts import LATENT_KEYS
from flax_mha.convert.shapes import Arrays, find_sizes
from flax_mha.convert.state_dict import leaves_of, to_numpy

# Letters of the axes of each parameter in Flax: D input and O output features; N heads with E features in queries, V in
# values and F in `kv_b_proj`; C features of the latent, A with the rotary key; R of compressed queries.
AXES = {"q_proj/kernel": "DNE", "q_a_proj/kernel": "DR", "q_a_proj/bias": "R", "q_a_layernorm/scale": "R"}
AXES |= {"q_b_proj/kernel": "RNE", "kv_a_proj_with_mqa/kernel": "DA", "kv_a_proj_with_mqa/bias": "A"}
AXES |= {"kv_a_layernorm/scale": "C", "kv_b_proj/kernel": "CNF", "o_proj/kernel": "NVO", "o_proj/bias": "O"}
# The same for an indexer with I heads of X features.
INDEX = {"indexer/wq_b/kernel": "RIX", "indexer/wk/kernel": "DX", "indexer/weights_proj/kernel": "DI"}
INDEX |= {"indexer/k_norm/scale": "X", "indexer/k_norm/bias": "X"}
AXES |= INDEX | {"sinks": "N", "gate/kernel": "DNV"}
QUERIES = ({"q_proj/kernel"}, {"q_a_proj/kernel", "q_a_layernorm/scale", "q_b_proj/kernel"})


def key_of(path: str) -> str:
    """Returns the key in a state_dict, such as `q_proj.weight`, of the parameter with Flax's path `q_proj/kernel`."""
    *names, leaf = path.split("/")
    return ".".join([*names, "bias" if leaf == "bias" else "weight"]) if names else leaf


PATHS = {key_of(path): path for path in AXES}
# The keys of gates: with a number for each head (Ling 3), for each feature (HY 4), and stacked with queries (A.X K2).
HEAD_GATE, GATE, STACKED = "g_proj.weight", "gate_proj.weight", "q_gate_proj.weight"


def is_latent(keys: Collection[str]) -> bool:
    """Returns True if the keys of a state_dict include `LATENT_KEYS`, so that they belong to latent attention."""
    return {*LATENT_KEYS} <= {*keys}


def read_latent(entries: Mapping[str, Any], prefix: str, num_heads: int) -> Arrays:
    """Converts one attention's entries of a state_dict to arrays in Flax's shapes, by path; `prefix` is for errors."""
    entries = {key: value for key, value in entries.items() if not key.startswith("rotary_emb.")}
    heads_of_gate = 0 if HEAD_GATE in entries else num_heads
    if STACKED in entries:
        entries |= _unstack(to_numpy(prefix + STACKED, entries.pop(STACKED)), entries["o_proj.weight"], num_heads)
    entries = {"gate.weight" if key in (HEAD_GATE, GATE) else key: x for key, x in entries.items()}
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
    heads = {"gate/kernel": heads_of_gate} | dict.fromkeys(INDEX, index_heads)
    arrays = {path: _to_flax(path, x, heads.get(path, num_heads)) for path, x in arrays.items()}
    find_sizes(arrays, axes_of(arrays))
    return arrays


def _unstack(array: np.ndarray, out: Any, num_heads: int) -> Arrays:
    """Cuts the rows of each head, which are those of its queries and of its gate, as many as its values have."""
    array, size = np.atleast_2d(array), math.prod(np.shape(out)[-1:]) // num_heads
    if len(array) % num_heads or len(array) // num_heads <= size:
        raise ValueError(
            f"num_heads must split the {len(array)} features of {STACKED} into queries and gates of {size}, but got "
            f"{num_heads}; use num_heads from the model's config."
        )
    query, gate = np.split(array.reshape(num_heads, -1, array.shape[-1]), [-size], axis=1)
    return {f"{name}.weight": x.reshape(-1, x.shape[-1]) for name, x in (("q_b_proj", query), ("gate", gate))}


def axes_of(arrays: Arrays) -> dict[str, str]:
    """Returns the axes of each parameter, as in `AXES`, some of which depend on the module's options."""
    gate, query, norm = (arrays.get(path) for path in ("gate/kernel", "q_b_proj/kernel", "q_a_layernorm/scale"))
    is_doubled = query is not None and norm is not None and len(query) == 2 * len(norm)  # by `query_residual`
    of_gate = ("P" if is_doubled else "D") + ("N" if gate is not None and gate.ndim == 2 else "NV")
    return AXES | {"gate/kernel": of_gate} | ({"q_b_proj/kernel": "PNE"} if is_doubled else {})


def scaled(arrays: Arrays, is_scaled: bool, exponent: float) -> Arrays:
    """Multiplies the norms of latents by (features / rank)^exponent if `is_scaled` (LongCat-Flash)."""
    if not is_scaled:
        return arrays
    features = len(arrays["kv_a_proj_with_mqa/kernel"])
    for path in {"q_a_layernorm/scale", "kv_a_layernorm/scale"} & {*arrays}:
        wide = arrays[path].astype(np.promote_types(arrays[path].dtype, np.float32))
        arrays = arrays | {path: wide * wide.dtype.type((features / len(wide)) ** exponent)}
    return arrays


def _to_flax(path: str, array: np.ndarray, heads: int) -> np.ndarray:
    array = np.atleast_1d(array).T.copy()
    axis = _axis_of_heads(AXES[path])
    if not 0 <= axis < array.ndim or not heads:  # `find_sizes` refuses an array without the axis
        return array
    shape = (*array.shape[:axis], heads, array.shape[axis] // heads, *array.shape[axis + 1 :])
    if array.shape[axis] % heads:
        raise ValueError(
            f"num_heads must divide the {array.shape[axis]} features of {path}, but got {heads}; use num_heads from "
            "the model's config."
        )
    return array.reshape(shape)


def latent_to_torch(params: Mapping[str, Any], is_scaled: bool = False) -> Arrays:
    """Converts the parameters of latent attention to a state_dict, the inverse of `read_latent`."""
    leaves = leaves_of(params)
    missing = {PATHS[key] for key in LATENT_KEYS} - {*leaves}
    if missing or {*leaves} - {*AXES}:
        extra = sorted({*leaves} - {*AXES})
        raise ValueError(
            f"params must be the parameters of one attention layer; missing {sorted(missing)}, extra {extra}"
        )
    arrays = scaled({path: to_numpy(path, x) for path, x in leaves.items()}, is_scaled, -0.5)
    axes = axes_of(arrays)
    heads = find_sizes(arrays, axes)["N"]
    found = {key_of(path): _flatten_heads(axes[path], array).T.copy() for path, array in arrays.items()}
    if "gate.weight" not in found:
        return found
    gate = found.pop("gate.weight")
    if axes["gate/kernel"][0] == "D":
        return found | {HEAD_GATE if axes["gate/kernel"] == "DN" else GATE: gate}
    if axes["gate/kernel"][-1] == "N":
        raise ValueError('params must not have query_residual=True with gate=Gate("head"): no PyTorch layout holds it.')
    both = [x.reshape(heads, -1, x.shape[-1]) for x in (found.pop("q_b_proj.weight"), gate)]
    return found | {STACKED: np.concatenate(both, axis=1).reshape(-1, gate.shape[-1])}


def _axis_of_heads(axes: str) -> int:
    """Returns the index of the axis of heads, which PyTorch merges with the next axis; -1 if it merges none."""
    return max(axes.find("N") if axes[-1] != "N" else -1, axes.find("IX"))


def _flatten_heads(axes: str, array: np.ndarray) -> np.ndarray:
    axis = _axis_of_heads(axes)
    return array if axis < 0 else array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
