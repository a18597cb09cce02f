"""Wrong types and values under every key that is read from a Hugging Face config: a
ValueError that names the key.
"""

import math

import pytest
from marks import with_core

from flax_mha import convert
from flax_mha._src.convert.families import FAMILIES
from flax_mha._src.convert.read_config import ALIASES, COMMON, LAYERS
from flax_mha.rope import RoPE

# One of each kind; an empty list is none of strings and none of numbers.
WRONG = ("2", [], ["x"], {"a": 1}, None, True, False)
WRONG += (-1, 0, 1, 1.5, 10**400, math.nan)
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
}
# Parameters of all kinds of scaling, where they are nested in a config, and a family
# that reads them.
SCALINGS = {
    "linear": ("llama", {"rope_type": "linear", "factor": 2.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "alpha": 2.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "yarn, attention_factor": (
        "phi3",
        {
            "rope_type": "yarn",
            "attention_factor": 1.5,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
    "longrope": (
        "llama",
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "short_mscale": 1.0,
            "factor": 2.0,
        },
    ),
    "mrope": (
        "qwen2_vl_text",
        {"rope_type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
    "default": (
        "ministral3",
        {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
        },
    ),
}
INTEGERS = (
    "num_heads",
    "qkv_features",
    "num_kv_heads",
    "in_features",
    "out_features",
)
# Errors about the keys or layers that a config then has.
OTHERS = (
    "rope parameters of type",
    "layer must have type",
    "rope_type 'dynamic' is not supported",
)


def names_of(key):
    """The names that an error may use for a key: its own, and its aliases."""
    names = {key, *ALIASES.get(key, ())}
    for name, others in ALIASES.items():
        if key in others:
            names.add(name)
    return names


def refusal(function, config, *arguments, **options):
    """The message of the ValueError, or an empty string; checks that a module could
    take the numbers of a result.
    """
    try:
        found = function(config, *arguments, **options)
    except ValueError as error:
        return str(error)
    if isinstance(found, dict):
        scale = found.get("scale")
        if scale is not None:
            assert isinstance(scale, float | int)
            assert 0 < scale < math.inf
        for name in INTEGERS:
            assert isinstance(found.get(name, 1), int)
            assert found.get(name, 1) > 0
    return ""


def refusals(config):
    """The messages of all functions that read a config, of two kinds of layers."""
    return [
        refusal(convert.describe, config, 0, max_length=64),
        refusal(convert.describe, config, 3, max_length=64),
        refusal(RoPE.from_config, config, None, 64),
        refusal(RoPE.from_config, config, "sliding_attention", 64),
    ]


def check_key(config, key, change):
    """Replaces one value by all wrong ones."""
    fine = refusals(config)
    names = names_of(key)
    for value in WRONG:
        for message in refusals(change(value)):
            assert "\n" not in message
            is_other = message in fine or message.startswith(OTHERS)
            is_named = any(name in message for name in names)
            assert is_other or is_named or not message, f"{key}={value!r}: {message}"


@pytest.mark.parametrize(
    "name", with_core(FAMILIES, "gemma3_text", "deepseek_v3", "qwen2", "llama4_text")
)
def test_wrong_values_in_a_config_raise_errors_that_name_their_key(name):
    config = SIZES | {"model_type": name}
    keys = {*FAMILIES[name].keys}
    # Keys that all families read are tried with few of them.
    if name in ("gemma3_text", "deepseek_v3", "gpt2", "falcon"):
        keys.update(COMMON, SIZES, LAYERS, *ALIASES.values())
    for key in sorted(keys):
        check_key(config, key, lambda value, key=key: config | {key: value})


@pytest.mark.core
@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", SCALINGS)
def test_wrong_rope_parameters_raise_errors_that_name_their_key(name, nested):
    family, parameters = SCALINGS[name]
    config = SIZES | {"model_type": family, "max_position_embeddings": 128}

    for key in parameters:

        def change(value, key=key):
            return config | {nested: parameters | {key: value}}

        check_key(config | {nested: parameters}, key, change)
