"""Attention weights from PyTorch to Flax and back, bit for bit, by way of numpy; PyTorch is never imported.

PyTorch keeps a linear layer as `weight (out, in)`, Flax as `kernel (in, heads, head_dim)`. One table, `LAYOUTS`, says
how each PyTorch module names, stacks and sizes its weights, and drives both directions. Sources: the `state_dict` of
`torch.nn.MultiheadAttention` and of Hugging Face's `BertAttention` and `LlamaAttention`; `flax.nnx.MultiHeadAttention`.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

LayoutName = (
    Literal["torch", "torch_separate"]  # torch.nn.MultiheadAttention, the second with kdim or vdim
    | Literal["note_mha", "bert_self_attention", "d2l_mha", "masked_self_attention"]  # those of tests/torch_port.py
    | Literal["hf_bert", "hf_llama"]  # less what is no part of the attention: output.LayerNorm, rotary_emb.inv_freq
)
Arrays = dict[str, np.ndarray]
Params = dict[str, Arrays]
ALL = ("query", "key", "value", "out")
KERNELS = tuple(f"{name}/kernel" for name in ALL)
PATHS = (*KERNELS, *(f"{name}/bias" for name in ALL))
# N query heads and K key and value heads of H features; SIZES says the rest, where A = N * H and B = K * H.
FLAX_SHAPES = dict(zip(PATHS, ("QNH", "SKH", "VKH", "NHO", "NH", "KH", "KH", "O"), strict=True))
TORCH_SHAPES = dict(zip(PATHS, ("AQ", "BS", "BV", "OA", "A", "B", "B", "O"), strict=True))
SIZES = {"Q": "query in", "S": "key in", "V": "value in", "A": "query out", "B": "key out", "O": "out"}


class Layout(NamedTuple):
    """How one PyTorch module names, stacks and sizes its weights."""

    stacks: dict[str, list[str]]  # for each key of the state_dict the Flax paths that it stacks, row upon row
    equal: str  # the letters that are one and the same size
    biased: tuple[tuple[str, ...], ...]  # the choices of projections with a bias
    ignored: tuple[str, ...]  # what keys start with that are no part of the attention

    def difference(self, keys: Collection[str]) -> tuple[list[str], list[str]]:
        """Names the keys that are too many and the weights that are missing."""
        extra = {key for key in keys if not key.startswith(self.ignored)} - {*self.stacks}
        missing = {key for key, paths in self.stacks.items() if paths[0] in KERNELS} - {*keys}
        return sorted(extra), sorted(missing)


def _layout(keys: str, equal: str, *biased: tuple[str, ...], biases: str = "", ignored: str = "") -> Layout:
    """Makes a row of the table from the keys of query, key, value and out; `*` is `weight` or `bias`."""
    names = f"{keys.replace('*', 'weight')} {(biases or keys).replace('*', 'bias')}".split()
    stacks = {name: [path for path, other in zip(PATHS, names, strict=True) if other == name] for name in names}
    return Layout(stacks, equal, biased, tuple(ignored.split()))


PACKED = "in_proj_* in_proj_* in_proj_* out_proj.*"
SQUARE = "QSVABO"
LAYOUTS: dict[LayoutName, Layout] = {
    "torch": _layout(PACKED, SQUARE, ALL, ()),
    "torch_separate": _layout("q_proj_* k_proj_* v_proj_* out_proj.*", "QABO", ALL, (), biases=PACKED),
    "note_mha": _layout("w_q.* w_k.* w_v.* w_out.*", SQUARE, ALL),
    "bert_self_attention": _layout("query.* key.* value.* dense.*", SQUARE, ALL),
    "d2l_mha": _layout("W_q.* W_k.* W_v.* W_o.*", "ABO", ()),
    "masked_self_attention": _layout("q.* k.* v.* out_proj.*", SQUARE, ALL),
    "hf_bert": _layout("self.query.* self.key.* self.value.* output.dense.*", SQUARE, ALL, ignored="output.LayerNorm."),
    "hf_llama": _layout("q_proj.* k_proj.* v_proj.* o_proj.*", "QSVO", ALL, ALL[:3], (), ignored="rotary_emb."),
}


def from_torch(state_dict: Mapping[str, Any], num_heads: int, num_kv_heads: int | None = None) -> Params:
    """Turns the `state_dict` of a PyTorch attention into Flax's parameters: `kernel = weight.T`, cut into heads.

    Args:
        state_dict: PyTorch tensors on any device, or numpy or JAX arrays. Its keys tell the layout and start at the
            attention itself: strip a prefix such as `layers.0.self_attn.` before.
        num_heads: query heads.
        num_kv_heads: key and value heads, which divide `num_heads`; None means as many.

    Returns:
        `query|key|value`: `kernel` (in, heads, head_dim), `bias` (heads, head_dim); `out`: `kernel` (heads, head_dim,
        out), `bias` (out,). Biases are there if `state_dict` has them; arrays are new, dtypes kept.

    Raises:
        ValueError: if the keys fit no layout, if `bias_k` or `bias_v` is there, or if shapes and heads disagree.

    Example:
        >>> square = np.arange(36.0).reshape(6, 6)
        >>> params = from_torch({f"W_{name}.weight": square for name in "qkvo"}, num_heads=2)
        >>> {name: param["kernel"].shape for name, param in params.items()}
        {'query': (6, 2, 3), 'key': (6, 2, 3), 'value': (6, 2, 3), 'out': (2, 3, 6)}
        >>> bool((to_torch(params, "d2l_mha")["W_k.weight"] == square).all())
        True
    """
    layout = _recognise(state_dict.keys())
    linears: Arrays = {}
    for key, paths in LAYOUTS[layout].stacks.items():
        if key in state_dict:
            linears |= zip(paths, np.array_split(np.atleast_1d(_numpy(state_dict[key])), len(paths)), strict=True)
    sizes = _sizes(linears, TORCH_SHAPES)
    if reason := _misfit(LAYOUTS[layout], linears, sizes):
        raise ValueError(f"state_dict has the keys of layout {layout!r}, but {reason}: is it whole and unchanged?")
    sizes |= _split(sizes["A"], sizes["B"], num_heads, num_heads if num_kv_heads is None else num_kv_heads)
    params: Params = {name: {} for name in ALL}
    for path, array in linears.items():
        name, leaf = path.split("/")
        params[name][leaf] = array.T.reshape([sizes[c] for c in FLAX_SHAPES[path]]).copy()
    return params


def to_torch(params: Mapping[str, Any], layout: LayoutName = "torch") -> Arrays:
    """Turns Flax's attention parameters into the `state_dict` of a PyTorch module, the inverse of `from_torch`.

    `module.load_state_dict({key: torch.from_numpy(array) for key, array in to_torch(params, layout).items()})` loads
    it, for `hf_bert` with `strict=False`. PyTorch takes no bfloat16 from numpy: pass `array.astype("float32")`, exact.

    Args:
        params: what `from_torch` returns, `nnx.state(module, nnx.Param)` or the like; leaves are numpy or JAX arrays.
        layout: a `LayoutName`.

    Returns:
        New arrays in C order, dtypes kept.

    Raises:
        ValueError: if there is no such layout, if `params` is no attention's, or if the layout cannot hold it.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    arrays = _flatten(params)
    sizes = _sizes(arrays, FLAX_SHAPES)
    sizes |= {"A": sizes["N"] * sizes["H"], "B": sizes["K"] * sizes["H"]}
    if reason := _misfit(LAYOUTS[layout], arrays, sizes):
        fit = ", ".join(name for name, other in LAYOUTS.items() if not _misfit(other, arrays, sizes))
        raise ValueError(f"layout {layout!r} cannot hold params: {reason}; layouts that can: {fit or 'none'}")
    linears = {path: array.reshape([sizes[c] for c in TORCH_SHAPES[path][::-1]]).T for path, array in arrays.items()}
    stacks = {key: paths for key, paths in LAYOUTS[layout].stacks.items() if paths[0] in linears}
    return {key: np.concatenate([linears[path] for path in paths]).copy() for key, paths in stacks.items()}


def _numpy(value: Any) -> np.ndarray:
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"  # numpy lacks it: its bits pass as int16
    return tensor.view(tensor.short().dtype).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy()


def _recognise(keys: Collection[str]) -> LayoutName:
    if added := sorted({"bias_k", "bias_v"} & {*keys}):
        raise ValueError(f"state_dict must do without {', '.join(added)}: Flax has no add_bias_kv; train without it")
    differences = {name: layout.difference(keys) for name, layout in LAYOUTS.items()}
    nearest = min(differences, key=lambda name: [len(names) for names in differences[name]])
    extra, missing = differences[nearest]
    if not extra and not missing:
        return nearest
    hint = f" Nearest is {nearest}: missing {missing}, extra {extra}." if len(extra) < len(keys) else ""
    known = "".join(f"\n  {name}: {', '.join(layout.difference(())[1])}" for name, layout in LAYOUTS.items())
    got = f"got {sorted(keys)}.{hint} Strip a prefix such as 'layers.0.self_attn.'. Layouts, biases aside:{known}"
    raise ValueError(f"state_dict must have the keys of one layout, {got}")


def _misfit(layout: Layout, arrays: Arrays, sizes: Mapping[str, int]) -> str:
    """Says why the layout cannot hold the arrays; nothing if it can."""
    biased = tuple(name for name in ALL if f"{name}/bias" in arrays)
    if biased not in layout.biased:
        choices = " or on ".join(", ".join(choice) or "none" for choice in layout.biased)
        return f"biases must be on {choices}, got them on {', '.join(biased) or 'none'}"
    for key, paths in layout.stacks.items():
        if len(dtypes := {str(arrays[path].dtype) for path in paths if path in arrays}) > 1:
            return f"{key} must stack arrays of one dtype, got {', '.join(sorted(dtypes))}"
    if len({sizes[c] for c in layout.equal}) > 1:
        return f"its features must be one number, got {', '.join(f'{SIZES[c]} {sizes[c]}' for c in layout.equal)}"
    return ""


def _sizes(arrays: Arrays, shapes: Mapping[str, str]) -> dict[str, int]:
    """Finds the size of every letter, after a check that it has but one."""
    sizes: dict[str, int] = {}
    for path, array in arrays.items():
        letters = shapes[path]
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        fits = all(sizes.setdefault(letter, size) == size for letter, size in zip(letters, array.shape, strict=False))
        if array.ndim != len(letters) or not fits:
            raise ValueError(f"{path} must have shape ({expected}) to fit the others, got {array.shape}")
    return sizes


def _split(features: int, kv_features: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Finds the sizes that are heads, after a check that they divide the features."""
    wrong = heads <= 0 or kv_heads <= 0 or heads % kv_heads or features % heads
    if wrong or features // heads * kv_heads != kv_features:
        cut = f"cut {features} query and {kv_features} key features into heads of one size, got {heads} and {kv_heads}"
        raise ValueError(f"num_heads must be a positive multiple of num_kv_heads, and both must {cut}")
    return {"N": heads, "K": kv_heads, "H": features // heads}


def _flatten(params: Mapping[str, Any]) -> Arrays:
    """Lists the leaves by path, after a check that they are those of one attention."""
    leaves = {f"{name}/{leaf}": value for name in ALL if name in params for leaf, value in params[name].items()}
    extra, missing = sorted({*params, *leaves} - {*ALL, *PATHS}), sorted({*KERNELS} - {*leaves})
    if extra or missing:
        raise ValueError(f"params must be one attention's kernels and biases alone; missing {missing}, extra {extra}")
    return {path: _numpy(leaves[path]) for path in PATHS if path in leaves}
