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

WRONG = ("2", "", [], [1], ["x"], {}, {"a": 1}, {1}, None, True, False)
WRONG += (-1, 0, 1, 1.5, -0.5, 10**400, math.nan, math.inf)
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
}
# Parameters of all kinds of scaling, where they are nested in a config.
SCALINGS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "alpha": 2.0},
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "yarn",
        "attention_factor": 1.5,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "short_mscale": 1.0,
        "factor": 2.0,
    },
    {"rope_type": "mrope", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "llama_4_scaling_beta": 0.1,
    },
]
# Of some scalings; "llama" for all others.
FAMILY_OF = {4: "phi3", 6: "qwen2_vl_text", 7: "ministral3"}
# Errors about the keys or layers that a config then has.
OTHERS = (
    "rope parameters of type",
    "layer must have type",
    "rope_type 'dynamic' is not supported",
)


def names_of(key):
    """The names that an error may use for a key: its own, and its aliases."""
    return {
        key,
        *(name for name, others in ALIASES.items() if key in others),
        *ALIASES.get(key, ()),
    }


def refusal(function, config, *arguments, **options):
    """The message of the ValueError, or an empty string; checks that a module could
    take the numbers of a result.
    """
    try:
        found = function(config, *arguments, **options)
    except ValueError as error:
        return str(error)
    if isinstance(found, dict):
        assert found.get("scale") is None or (
            isinstance(found["scale"], float | int) and 0 < found["scale"] < math.inf
        )
        for name in (
            "num_heads",
            "qkv_features",
            "num_kv_heads",
            "in_features",
            "out_features",
        ):
            assert isinstance(found.get(name, 1), int)
            assert found.get(name, 1) > 0
    return ""


def check_key(config, key, change):
    """Replaces one value by all wrong ones."""
    fine = {refusal(convert.describe, config, layer, max_length=64) for layer in (0, 3)}
    fine |= {refusal(RoPE.from_config, config, max_length=64)}
    fine.add(refusal(RoPE.from_config, config, "sliding_attention", 64))
    for value in WRONG:
        changed = change(value)
        messages = [
            refusal(convert.describe, changed, layer, max_length=64) for layer in (0, 3)
        ]
        messages += [
            refusal(RoPE.from_config, changed, kind, 64)
            for kind in (None, "sliding_attention")
        ]
        for message in messages:
            assert "\n" not in message
            named = (
                message in fine
                or message.startswith(OTHERS)
                or any(name in message for name in names_of(key))
            )
            assert named or not message, f"{key}={value!r}: {message}"


@pytest.mark.parametrize(
    "name", with_core(FAMILIES, "gemma3_text", "deepseek_v3", "qwen2", "llama4_text")
)
def test_wrong_values_in_a_config(name):
    config = SIZES | {"model_type": name}
    extra = {
        *COMMON,
        *SIZES,
        *LAYERS,
        *(alias for others in ALIASES.values() for alias in others),
    }
    # Keys that all families read are tried with few of them.
    keys = {*FAMILIES[name].keys} | (
        extra if name in ("gemma3_text", "deepseek_v3", "gpt2", "falcon") else set()
    )
    for key in sorted(keys):
        check_key(config, key, lambda value, key=key: config | {key: value})


@pytest.mark.core
@pytest.mark.parametrize("number", range(len(SCALINGS)))
def test_wrong_values_in_rope_parameters(number):
    parameters = SCALINGS[number]
    config = SIZES | {
        "model_type": FAMILY_OF.get(number, "llama"),
        "max_position_embeddings": 128,
    }
    for key in parameters:
        for nested in ("rope_scaling", "rope_parameters"):
            change = lambda value, key=key, nested=nested: (
                config | {nested: parameters | {key: value}}
            )  # noqa: E731
            check_key(config | {nested: parameters}, key, change)
