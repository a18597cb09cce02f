"""Wrong types and values under the keys that are read from a Hugging Face config: a
ValueError that names the key.
"""

import pytest
from cases import refused

from flax_mha import convert
from flax_mha._src.convert.families import FAMILIES
from flax_mha._src.convert.read_config import ALIASES, KINDS
from flax_mha.rope import RoPE

pytestmark = pytest.mark.core
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 8}


def family_with(key):
    """A family that reads the key; all read the keys that no family lists."""
    readers = [name for name, family in FAMILIES.items() if key in family.keys]
    described = [name for name in readers if not FAMILIES[name].refused]
    return [*described, "llama"][0]


@pytest.mark.parametrize("key", KINDS)
def test_a_value_of_the_wrong_type_raises_an_error_that_names_its_key(key):
    config = SIZES | {"model_type": family_with(key), key: object()}
    refused(f"^{key} must be .* but got <object", convert.describe, config)


# One number or text out of the range of each kind, under the name that a config has.
OUT_OF_RANGE = {
    "n_head": 0,
    "num_layers": -1,
    "kv_n_heads": True,
    "emb_dim": 2**31,
    "head_dim": 1.5,
    "local_attention": 1,
    "norm_eps": float("nan"),
    "rope_theta": 10**400,
    "attn_scale": -1.0,
    "clip_qkv": 1e31,
    "rotary_pct": 2.0,
    "mrope_section": [],
    "short_factor": [1.0, 0],
    "layer_types": [1],
    "attention_types": [["global"]],
    "gating": False,
    "no_rope_layers": [2],
    "use_bidirectional_attention": "some",
}


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_raises_an_error_that_names_its_key(key):
    main_names = [name for name, others in ALIASES.items() if key in others]
    name = family_with([*main_names, key][0])
    config = {"model_type": name, key: OUT_OF_RANGE[key]}
    refused(f"^{key} must be ", convert.describe, config)


@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("read", [convert.describe, RoPE.from_config])
def test_wrong_rope_parameters_raise_an_error_that_names_their_key(read, nested):
    config = SIZES | {"model_type": "llama"}
    linear = {"rope_type": "linear", "factor": "2"}
    message = "^factor must be a finite number > 0, but got '2'"
    refused(message, read, config | {nested: linear})
    refused(message, read, config | {nested: {"full_attention": linear}})
    refused(f"^{nested} must be a dict", read, config | {nested: [linear]})
