"""Converts the weights of latent attention (DeepSeek), which have the same names in
Flax.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flax_mha._src.convert.layouts import LATENT_KEYS
from flax_mha._src.convert.shapes import Arrays, find_sizes
from flax_mha._src.convert.state_dict import to_numpy

# Letters of the axes of an indexer with I heads of X features; the others are as in
# `AXES`.
INDEX = {
    "indexer/wq_b/kernel": "RIX",
    "indexer/wk/kernel": "DX",
    "indexer/weights_proj/kernel": "DI",
    "indexer/k_norm/scale": "X",
    "indexer/k_norm/bias": "X",
}
# Letters of the axes of each parameter in Flax: D input and O output features; N heads
# with E features in queries, V in values and F in `kv_b_proj`; C features of the
# latent, A with the rotary key; R of compressed queries.
AXES = {
    "q_proj/kernel": "DNE",
    "q_a_proj/kernel": "DR",
    "q_a_proj/bias": "R",
    "q_a_layernorm/scale": "R",
    "q_b_proj/kernel": "RNE",
    "kv_a_proj_with_mqa/kernel": "DA",
    "kv_a_proj_with_mqa/bias": "A",
    "kv_a_layernorm/scale": "C",
    "kv_b_proj/kernel": "CNF",
    "o_proj/kernel": "NVO",
    "o_proj/bias": "O",
    "sinks": "N",
    "gate/kernel": "DNV",
    **INDEX,
}
QUERIES = (
    {"q_proj/kernel"},
    {"q_a_proj/kernel", "q_a_layernorm/scale", "q_b_proj/kernel"},
)
# The keys of gates: with a number for each head (Ling 3), for each feature (HY 4), and
# stacked with queries (A.X K2).
HEAD_GATE = "g_proj.weight"
GATE = "gate_proj.weight"
STACKED = "q_gate_proj.weight"


def key_of(path: str) -> str:
    """Returns the key in a state_dict, such as `q_proj.weight`, of the parameter with
    Flax's path `q_proj/kernel`.
    """
    *names, leaf = path.split("/")
    if not names:
        return leaf
    return ".".join([*names, "bias" if leaf == "bias" else "weight"])


PATHS = {key_of(path): path for path in AXES}


def is_latent(keys: Collection[str]) -> bool:
    """Returns True if the keys of a state_dict include `LATENT_KEYS`, so that they
    belong to latent attention.
    """
    return {*LATENT_KEYS} <= {*keys}


def read_latent(entries: Mapping[str, Any], prefix: str, num_heads: int) -> Arrays:
    """Converts one attention's entries of a state_dict to arrays in Flax's shapes, by
    path; `prefix` is for errors.
    """
    entries = {
        key: value
        for key, value in entries.items()
        if not key.startswith("rotary_emb.")
    }
    has_head_gate = HEAD_GATE in entries
    gates = [key for key in (HEAD_GATE, GATE, STACKED) if key in entries]
    if len(gates) > 1:
        raise ValueError(
            "state_dict must contain the weights of one gate, but got "
            f"{' and '.join(gates)}."
        )
    for key in (HEAD_GATE, GATE):
        if key in entries:
            entries["gate.weight"] = entries.pop(key)
    if STACKED in entries:
        stacked = to_numpy(prefix + STACKED, entries.pop(STACKED))
        entries |= _unstack(stacked, entries["o_proj.weight"], num_heads)
    _check_keys(entries)

    arrays: Arrays = {}
    for key, value in entries.items():
        path = PATHS[key]
        heads = num_heads
        if path in INDEX:
            heads = _index_heads(entries)
        elif path == "gate/kernel" and has_head_gate:
            heads = 0
        arrays[path] = _to_flax(path, to_numpy(prefix + key, value), heads)
    find_sizes(arrays, axes_of(arrays))
    return arrays


def _check_keys(entries: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the keys are those of one latent attention, with a
    complete indexer or none.
    """
    allowed = {*PATHS}
    index_keys = {key_of(path) for path in INDEX}
    if not index_keys <= {*entries}:
        allowed -= index_keys
    extra = sorted({*entries} - allowed)
    if extra:
        raise ValueError(
            "state_dict must contain only the weights of a latent attention layer, but "
            f"also has {', '.join(extra[:6])}."
        )
    queries = {
        PATHS[key] for key in entries if key.startswith("q_") and key.endswith("weight")
    }
    if queries not in QUERIES:
        names = sorted(path.split("/")[0] for path in queries)
        raise ValueError(
            "state_dict must contain q_proj, or q_a_proj, q_a_layernorm and q_b_proj, "
            f"but got {', '.join(names) or 'none'}."
        )


def _index_heads(entries: Mapping[str, Any]) -> int:
    shape = np.shape(entries["indexer.weights_proj.weight"])
    if shape:
        return shape[0]
    return 1


def _unstack(array: np.ndarray, out: Any, num_heads: int) -> Arrays:
    """Splits the weight `STACKED` into those of `q_b_proj` and `gate`.

    Each head's rows are first its queries', then its gate's, of which there are as many
    as features of its values. `out`, the weight of the output projection, gives that
    number.
    """
    array = np.atleast_2d(array)
    out_shape = np.shape(out)
    size = out_shape[-1] // num_heads if out_shape else 0
    rows, rest = divmod(len(array), num_heads)
    if rest or rows <= size:
        raise ValueError(
            f"num_heads must split the {len(array)} features of {STACKED} into queries "
            f"and gates of {size}, but got {num_heads}; use num_heads from the model's "
            "config."
        )
    features = array.shape[-1]
    query, gate = np.split(
        array.reshape(num_heads, rows, features), [rows - size], axis=1
    )
    return {
        "q_b_proj.weight": query.reshape(-1, features),
        "gate.weight": gate.reshape(-1, features),
    }


def axes_of(arrays: Arrays) -> dict[str, str]:
    """Returns the axes of each parameter, as in `AXES`, some of which depend on the
    module's options.
    """
    axes = dict(AXES)
    gate = arrays.get("gate/kernel")
    query = arrays.get("q_b_proj/kernel")
    norm = arrays.get("q_a_layernorm/scale")
    if gate is not None and gate.ndim == 2:
        axes["gate/kernel"] = "DN"
    if query is not None and norm is not None and len(query) == 2 * len(norm):
        # `query_residual` doubles the features that queries and gate are projected
        # from.
        axes["q_b_proj/kernel"] = "PNE"
        axes["gate/kernel"] = f"P{axes['gate/kernel'][1:]}"
    return axes


def scaled(arrays: Arrays, exponent: float) -> Arrays:
    """Multiplies the norms of latents by (features / rank)^exponent (LongCat-Flash)."""
    features = len(arrays["kv_a_proj_with_mqa/kernel"])
    result = dict(arrays)
    for path in ("q_a_layernorm/scale", "kv_a_layernorm/scale"):
        if path in arrays:
            scale = arrays[path].astype(
                np.promote_types(arrays[path].dtype, np.float32)
            )
            result[path] = scale * scale.dtype.type((features / len(scale)) ** exponent)
    return result


def _to_flax(path: str, array: np.ndarray, heads: int) -> np.ndarray:
    array = np.atleast_1d(array).T.copy()
    axis = _axis_of_heads(AXES[path])
    if not 0 <= axis < array.ndim or not heads:
        # `find_sizes` raises an error for an array without the axis.
        return array
    size, rest = divmod(array.shape[axis], heads)
    if rest:
        raise ValueError(
            f"num_heads must divide the {array.shape[axis]} features of {path}, but "
            f"got {heads}; use num_heads from the model's config."
        )
    return array.reshape(*array.shape[:axis], heads, size, *array.shape[axis + 1 :])


def latent_to_torch(arrays: Arrays, is_scaled: bool) -> Arrays:
    """Converts the parameters of latent attention, by path, to a state_dict, the
    inverse of `read_latent`.

    `is_scaled`: whether the norms' scales include LongCat-Flash's factors (`scaled`),
    which are then divided out.
    """
    if is_scaled:
        arrays = scaled(arrays, -0.5)
    axes = axes_of(arrays)
    num_heads = find_sizes(arrays, axes)["N"]
    found = {
        key_of(path): _flatten_heads(axes[path], array).T.copy()
        for path, array in arrays.items()
    }
    if "gate.weight" not in found:
        return found

    gate = found.pop("gate.weight")
    of_gate = axes["gate/kernel"]
    if of_gate == "DN":
        return found | {HEAD_GATE: gate}
    if of_gate == "DNV":
        return found | {GATE: gate}
    if of_gate == "PN":
        raise ValueError(
            'params must not have query_residual=True with gate=Gate("head"): no '
            "PyTorch layout holds it."
        )
    features = gate.shape[-1]
    query = found.pop("q_b_proj.weight").reshape(num_heads, -1, features)
    both = np.concatenate([query, gate.reshape(num_heads, -1, features)], axis=1)
    return found | {STACKED: both.reshape(-1, features)}


def _axis_of_heads(axes: str) -> int:
    """Returns the index of the axis of heads, which PyTorch merges with the next axis;
    -1 if it merges none.
    """
    if "IX" in axes:
        return axes.index("IX")
    if "N" in axes[:-1]:
        return axes.index("N")
    return -1


def _flatten_heads(axes: str, array: np.ndarray) -> np.ndarray:
    axis = _axis_of_heads(axes)
    if axis < 0:
        return array
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
