"""Converts attention weights between PyTorch and Flax, bit for bit, as numpy arrays;
PyTorch is never imported.

`from_hf` creates an nnx module that computes the attention of one layer of a Hugging
Face model::

    config = json.load(open("config.json"))
    attention = convert.from_hf(config, state_dict, layer=3)

where `state_dict` is `model.state_dict()`, or the content of a safetensors file,
without PyTorch::

    from safetensors.flax import load_file
    state_dict = load_file("model.safetensors")

Its two steps are `describe`, which turns the config into module arguments, and
`load_torch`, which loads weights into a module. `from_torch` returns the parameters as
numpy arrays, also for `flax.linen`; `to_torch` is its inverse. `LAYOUTS` lists the
supported weight names.
"""

from flax_mha._src.convert.describe import describe as describe
from flax_mha._src.convert.from_hf import from_hf as from_hf
from flax_mha._src.convert.layouts import LAYOUTS as LAYOUTS
from flax_mha._src.convert.layouts import LayoutName as LayoutName
from flax_mha._src.convert.load import load_torch as load_torch
from flax_mha._src.convert.process_heads import ClipHeads as ClipHeads
from flax_mha._src.convert.process_heads import ScaleValues as ScaleValues
from flax_mha._src.convert.weights import from_torch as from_torch
from flax_mha._src.convert.weights import to_torch as to_torch

__all__ = [
    "LAYOUTS",
    "ClipHeads",
    "LayoutName",
    "ScaleValues",
    "describe",
    "from_hf",
    "from_torch",
    "load_torch",
    "to_torch",
]
