"""Attention weights between PyTorch and Flax, exactly, by way of numpy; PyTorch is never imported.

`describe` turns a Hugging Face config into the arguments of the module, `load_torch` loads a layer's weights::

    config = json.load(open("config.json"))
    attention = flax_mha.MultiHeadAttention(**convert.describe(config, layer=3), decode=False, rngs=nnx.Rngs(0))
    convert.load_torch(attention, state_dict, prefix="model.layers.3.self_attn.")

where `state_dict` is `model.state_dict()`, or what a safetensors file holds, without PyTorch::

    from safetensors.flax import load_file
    state_dict = load_file("model.safetensors")

`from_torch` returns the parameters as numpy arrays, for `flax.linen` too, and `to_torch` turns parameters back.
`LAYOUTS` lists the names of weights that are known.
"""

from flax_mha.convert.config import describe as describe
from flax_mha.convert.layer import from_hf as from_hf
from flax_mha.convert.layouts import ALL as ALL
from flax_mha.convert.layouts import LAYOUTS as LAYOUTS
from flax_mha.convert.layouts import LayoutName as LayoutName
from flax_mha.convert.load import load_torch as load_torch
from flax_mha.convert.weights import from_torch as from_torch
from flax_mha.convert.weights import to_torch as to_torch
