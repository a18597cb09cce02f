"""`from_torch` and `to_torch`: convert attention weights from PyTorch to Flax's
parameters and back, in numpy.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from flax import nnx, traverse_util

from flax_mha._src.convert import shapes
from flax_mha._src.convert.families import FAMILIES, NORM_OF_EACH_HEAD, Family
from flax_mha._src.convert.latent_weights import (
    AXES,
    PATHS,
    is_latent,
    latent_to_torch,
    read_latent,
)
from flax_mha._src.convert.layouts import (
    KERNELS,
    LATENT,
    LATENT_KEYS,
    LAYOUTS,
    MODEL_TYPE,
    NORMS,
    OTHER_AXES,
    TABLE,
    TORCH_AXES,
    LayoutName,
)
from flax_mha._src.convert.shapes import Arrays
from flax_mha._src.convert.state_dict import (
    T5_TABLE,
    attention_entries,
    check_not_quantized,
    leaves_of,
    recognize,
    to_numpy,
)
from flax_mha._src.core.validation import is_int


def from_torch(
    state_dict: Mapping[str, Any],
    num_heads: int,
    num_kv_heads: int | None = None,
    prefix: str = "",
    *,
    qk_norm_offset: float = 0.0,
    fill_biases: bool = False,
) -> dict[str, Any]:
    """Converts the `state_dict` of a PyTorch attention to Flax parameters, for
    `flax.linen` or `nnx.update`.

    Kernels are `weight.T`, cut into heads. Rotary positions, windows, soft caps and
    scales are not in the weights, but in a config (see `describe`). LongCat-Flash
    stores the norms of its latents without a factor that it multiplies them by: take
    the parameters of the module that `from_hf` returns.

    Args:
      state_dict: PyTorch tensors on any device, or numpy or JAX arrays: of one
        attention or a whole model.
      num_heads: Number of query heads N, from the model's config: most weights also fit
        a wrong number.
      num_kv_heads: Number of key and value heads K, a divisor of `num_heads`; None
        means N.
      prefix: The start of the attention's keys in `state_dict`, such as
        `"model.layers.0.self_attn."`. The rest of the keys determines the layout.
      qk_norm_offset: The number that the model adds to the weights of its query and key
        norms: 1.0 for Gemma 3, which stores w and multiplies by 1 + w, and 0.0 for
        other models. The keys do not show it.
      fill_biases: If some projections have a bias (Qwen 2, Whisper), add zero biases to
        the others, as required by modules with `use_bias`.

    Returns:
      A dict of dicts. `query`, `key` and `value` have a `kernel` (in, heads, head size)
      and a `bias` (heads, head size); `out` has a `kernel` (heads, head size, out) and
      a `bias` (out,); `query_ln` and `key_ln` have a `scale` (head size,), or (heads,
      head size) if a norm spans all heads (OLMo 2); `sinks` is an array (heads,);
      `gate` is like `query`, or has a `kernel` (in, heads); `out_norm` has a `scale`
      (heads, head size). Biases, norms, sinks and gate are included if `state_dict` has
      them. Arrays are new and keep their dtypes, except norms with an offset, which
      become at least float32, as in the models.

    Raises:
      ValueError: If the keys fit no layout (the message lists the attention layers
        found, if any), if there is a `bias_k` or `bias_v`, if shapes and heads
        disagree, or if weights are quantized or hold no values.

    Example:
      >>> import numpy as np
      >>> from flax_mha import convert
      >>> square = np.arange(36.0).reshape(6, 6)
      >>> weights = {f"W_{name}.weight": square for name in "qkvo"}
      >>> params = convert.from_torch(weights, num_heads=2)
      >>> {name: param["kernel"].shape for name, param in params.items()}
      {'query': (6, 2, 3), 'key': (6, 2, 3), 'value': (6, 2, 3), 'out': (2, 3, 6)}
      >>> bool((convert.to_torch(params, "d2l_mha")["W_k.weight"] == square).all())
      True
    """
    if num_kv_heads is None:
        num_kv_heads = num_heads
    layout, arrays = read(state_dict, num_heads, num_kv_heads, prefix, qk_norm_offset)
    # Modules of linen would ignore a parameter that they do not have.
    if TABLE in arrays:
        raise ValueError(
            f"state_dict must not contain {T5_TABLE}, which T5 adds to the scores in "
            "every layer; use load_torch, or remove it and pass it to every call, as "
            "score_mod=recipes.t5_bias(table)['score_mod']."
        )
    if fill_biases and layout != LATENT:
        arrays = shapes.fill_with_zeros(arrays)
    return traverse_util.unflatten_dict(arrays, sep="/")


def to_torch(
    params: Any, layout: LayoutName = "torch", *, qk_norm_offset: float | None = None
) -> Arrays:
    """Converts Flax attention parameters to the `state_dict` of a PyTorch module, the
    inverse of `from_torch`.

    To load it, call `module.load_state_dict({key: torch.from_numpy(array) for key,
    array in to_torch(params, layout).items()})`, for `hf_bert` with `strict=False`.
    PyTorch does not accept bfloat16 from numpy: pass `array.astype("float32")`, which
    is exact.

    Args:
      params: An nnx module, its `nnx.state(module, nnx.Param)`, or nested dicts as
        returned by `from_torch` or used by linen modules; leaves are numpy or JAX
        arrays.
      layout: A `LayoutName`. Biases of projections that have none in this layout must
        be zeros, and are left out.
      qk_norm_offset: The number that was added to the weights of the norms. None means
        the offset of the model if `params` come from an nnx module created with
        `describe`, otherwise 0.0. With 1.0, the returned weights are rounded, because
        1 + w was stored in float32: small weights by up to 2^-24.

    Returns:
      New arrays in C order with unchanged dtypes.

    Raises:
      ValueError: If there is no such layout, or if `params` are not the parameters of
        an attention that fits it.
    """
    names = (*LAYOUTS, LATENT)
    if not isinstance(layout, str) or layout not in names:
        raise ValueError(
            f"layout must be one of {', '.join(names)}, but got {layout!r}"
        )
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    is_latent_module = isinstance(params, Mapping) and "kv_b_proj" in params
    if is_latent_module != (layout == LATENT):
        raise ValueError(
            f"layout must be {LATENT!r} if and only if the attention is latent, but "
            f"got {layout!r}"
        )
    if layout == LATENT:
        family = family_of(params["kv_b_proj"]["kernel"])
        arrays = _flatten(params, AXES, [PATHS[key] for key in LATENT_KEYS])
        return latent_to_torch(arrays, family.scaled_latents)

    given = _flatten(params, (*TORCH_AXES, *OTHER_AXES), KERNELS)
    two_axes = {path for path, array in given.items() if array.ndim == 2}
    has_head_gate = "gate/kernel" in two_axes
    sizes = shapes.find_sizes(given, shapes.flax_axes(has_head_gate, two_axes))
    sizes["A"] = sizes["N"] * sizes["H"]
    sizes["B"] = sizes["K"] * sizes["H"]
    sizes["C"] = sizes["N"] * sizes["U"]
    sizes["W"] = sizes["K"] * sizes["U"]
    family = family_of(params["query"]["kernel"])
    if family.norm_scale == "none":
        given = {path: array for path, array in given.items() if path not in NORMS}
    arrays = shapes.drop_zeros(LAYOUTS[layout], given)
    reason = shapes.misfit(LAYOUTS[layout], arrays, sizes)
    if reason:
        fit = [
            name
            for name, other in LAYOUTS.items()
            if not shapes.misfit(other, shapes.drop_zeros(other, given), sizes)
        ]
        raise ValueError(
            f"layout {layout!r} does not fit params: {reason}; layouts that fit: "
            f"{', '.join(fit) or 'none'}"
        )

    offset = norm_offset(family) if qk_norm_offset is None else qk_norm_offset
    axes = shapes.torch_axes(has_head_gate)
    merged = {"out_norm/scale"}
    if family.norm != NORM_OF_EACH_HEAD:
        merged |= {path for path in arrays if "_ln/" in path}
    converted: Arrays = {}
    for path, array in arrays.items():
        if path in axes:
            # PyTorch merges heads and their features, and has outputs first.
            array = array.reshape([sizes[letter] for letter in reversed(axes[path])]).T
        # In PyTorch, norms over all heads have one axis.
        elif path in merged:
            array = array.ravel()
        if offset and path in NORMS:
            array = array - array.dtype.type(offset)
        converted[path] = array
    result: Arrays = {}
    for key, paths in LAYOUTS[layout].stacks.items():
        if paths[0] in converted:
            result[key] = shapes.join(LAYOUTS[layout], paths, converted, sizes)
    return result


def family_of(kernel: object) -> Family:
    """Returns the model family that `describe` wrote into a kernel's metadata; an empty
    one if there is none.
    """
    metadata: Mapping[str, Any] = {}
    if hasattr(kernel, "get_metadata"):  # an nnx.Variable
        metadata = kernel.get_metadata()
    return FAMILIES.get(metadata.get(MODEL_TYPE, ""), Family())


def norm_offset(family: Family) -> float:
    """Returns the `qk_norm_offset` of a family; see `from_torch`."""
    return 1.0 if family.norm_scale == "1 + weight" else 0.0


def read(
    state_dict: object,
    num_heads: int,
    num_kv_heads: int,
    prefix: str,
    qk_norm_offset: float,
    shared: Collection[str] = (),
) -> tuple[LayoutName, Arrays]:
    """Returns the layout of an attention in a state_dict, and its arrays in Flax's
    shapes, by paths like `out/bias`.

    `shared` are projections that the layer may lack; see `recognize`.
    """
    numbers = (num_heads, num_kv_heads)
    are_positive = all(is_int(number) and number > 0 for number in numbers)
    if not are_positive or num_heads % num_kv_heads:
        raise ValueError(
            "num_heads must be a positive multiple of num_kv_heads, but got "
            f"{num_heads!r} and {num_kv_heads!r}."
        )
    prefix, entries = attention_entries(state_dict, prefix)
    if is_latent(entries):
        check_not_quantized(entries)
        return LATENT, read_latent(entries, prefix, num_heads)
    name = recognize(entries, prefix, shared)
    layout = LAYOUTS[name]

    # The arrays of each projection, in PyTorch's shapes.
    arrays: Arrays = {}
    for key, paths in layout.stacks.items():
        if key in entries:
            array = np.atleast_1d(to_numpy(prefix + key, entries[key]))
            parts = shapes.cut(layout, key, array, num_heads, num_kv_heads)
            arrays |= zip(paths, parts, strict=True)
    num_queries = len(arrays["query/kernel"])
    out = arrays["out/kernel"]
    if layout.is_stacked and out.ndim == 2 and num_queries != out.shape[1]:
        raise ValueError(
            "num_heads and num_kv_heads must split the stacked weights into "
            f"{out.shape[1]} query features (the input size of the output projection), "
            f"but {num_heads} and {num_kv_heads} give {num_queries}; use the values "
            "from the model's config."
        )
    # A gate of each head has as many features as there are heads.
    gate_features = len(arrays.get("gate/kernel", ()))
    has_head_gate = gate_features == num_heads != out.shape[-1]
    axes = shapes.torch_axes(has_head_gate)
    weights = {path: arrays[path] for path in axes if path in arrays}
    found = shapes.find_sizes(weights, axes)
    # What the layer lacks has the sizes of the layer that it shares it with.
    sizes = {
        "S": found["Q"],
        "V": found["Q"],
        "B": found["A"] * num_kv_heads // num_heads,
        "W": found["C"] * num_kv_heads // num_heads,
    } | found
    reason = shapes.misfit(layout, arrays, sizes)
    if reason:
        raise ValueError(
            f"state_dict has the keys of layout {name!r}, but {reason}; check that it "
            "is complete and unmodified."
        )

    sizes |= shapes.head_sizes(sizes, num_heads, num_kv_heads)
    sizes["R"] = len(arrays.get(TABLE, ()))
    # The norms may have a weight for each feature of all heads.
    norm_size = np.size(arrays.get(NORMS[0], ()))
    spans_all_heads = norm_size == sizes["A"] != sizes["H"]
    axes = shapes.flax_axes(has_head_gate, NORMS if spans_all_heads else ())
    converted: Arrays = {}
    for path, array in arrays.items():
        converted[path] = _to_flax(path, array, axes[path], sizes)
    if qk_norm_offset:
        for path in {*NORMS} & {*converted}:
            dtype = np.promote_types(converted[path].dtype, np.float32)
            converted[path] = converted[path].astype(dtype) + dtype.type(qk_norm_offset)
    return name, converted


def _to_flax(
    path: str, array: np.ndarray, axes: str, sizes: Mapping[str, int]
) -> np.ndarray:
    """Returns a copy of a PyTorch array in Flax's shape: `axes` has a letter for each
    axis, and `sizes` its length.
    """
    shape = tuple(sizes[letter] for letter in axes)
    if path not in OTHER_AXES:
        return array.T.reshape(shape).copy()
    if array.shape not in (shape, (np.prod(shape),)):
        raise ValueError(
            f"{path} must have shape ({np.prod(shape)},) for {sizes['N']} and "
            f"{sizes['K']} heads, but got {array.shape}."
        )
    return array.reshape(shape).copy()


def _flatten(params: object, known: Collection[str], needed: Collection[str]) -> Arrays:
    """Returns the arrays of one attention's parameters, by path; raises a ValueError
    unless it has all `needed` paths and only `known` ones.
    """
    if not isinstance(params, Mapping):
        raise ValueError(
            "params must be a module, its nnx.State or a dict of its parameters, but "
            f"got {params!r:.80}"
        )
    leaves = leaves_of(params)
    layers = {path.split("/")[0] for path in known}
    for name in leaves:
        if name in layers and name not in known:
            raise ValueError(
                f"params[{name!r}] must be a dict of arrays, but got "
                f"{params[name]!r:.80}"
            )
    extra: set[str] = set()
    for path in leaves:
        if path not in known:
            layer = path.split("/")[0]
            # Of a layer that no attention has, only its name is listed.
            extra.add(path if layer in layers else layer)
    missing = sorted({*needed} - {*leaves})
    if extra or missing:
        raise ValueError(
            f"params must be the parameters of one attention layer; missing {missing}, "
            f"extra {sorted(extra)}"
        )
    return {path: to_numpy(path, leaves[path]) for path in known if path in leaves}
