"""Attention weights between PyTorch and Flax, exactly, by way of numpy; PyTorch is never imported.

`from_hf` makes a layer of a Hugging Face model, which computes what the model's does::

    config = json.load(open("config.json"))
    attention = convert.from_hf(config, state_dict, layer=3)

where `state_dict` is `model.state_dict()`, or what a safetensors file holds, without PyTorch::

    from safetensors.flax import load_file
    state_dict = load_file("model.safetensors")

It is made of `describe`, which turns the config into the arguments of the module, and `load_torch`, which loads
weights into a module. `from_torch` returns the parameters as numpy arrays, for `flax.linen` too, and `to_torch` turns
parameters back. `LAYOUTS` lists the names of weights that are known.
"""

from flax_mha.convert.config import describe as describe
from flax_mha.convert.layer import from_hf as from_hf
from flax_mha.convert.layouts import ALL as ALL
from flax_mha.convert.layouts import LAYOUTS as LAYOUTS
from flax_mha.convert.layouts import LayoutName as LayoutName
from flax_mha.convert.load import load_torch as load_torch
from flax_mha.convert.weights import from_torch as from_torch
from flax_mha.convert.weights import to_torch as to_torch
