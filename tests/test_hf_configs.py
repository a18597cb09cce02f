"""`convert.describe` reads the config files of Hugging Face models as they are
published, without Transformers.

hf_configs.py says what the files are, and compares them with Transformers.
"""

import re

import hf_configs
import numpy as np
import pytest
from marks import with_core

from flax_mha import convert
from flax_mha._src.convert.families import FAMILIES
from flax_mha.rope import Llama3, RoPE, YaRN

CONFIGS = hf_configs.load()
EXPECTED = hf_configs.expected()
CORE = (
    "bloom",
    "cohere2",
    "llama-yarn",
    "gemma3",
    "qwen2_vl",
    "phi3",
    "mimo_v2_flash",
    "kimi_linear",
    "zamba",
)
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", with_core(CONFIGS, *CORE))
def test_published_config(name):
    assert hf_configs.summary(CONFIGS[name]) == EXPECTED[name]


@pytest.mark.core
def test_each_family_has_a_published_config():
    shown = {
        name
        for text in EXPECTED.values()
        for name in re.findall(r"kernel_metadata=(\S+)", text)
    }
    # Which is refused, see below.
    covered = [FAMILIES[name] for name in (*shown, "big_bird")]
    missing = [
        name
        for name, family in FAMILIES.items()
        if not family.refused and family not in covered
    ]
    assert not missing


@pytest.mark.core
def test_published_config_is_refused_only_for_random_attention():
    """BigBird's blocks are chosen at random; the error says what to set."""
    refused = [name for name, text in EXPECTED.items() if "ValueError" in text]
    assert refused == ["big_bird"]
    described = convert.describe(
        CONFIGS["big_bird"] | {"attention_type": "original_full"}
    )
    assert described["use_bias"]


@pytest.mark.core
def test_equal_factors_of_llama_4_scout():
    """Frequencies below one turn in the original length are divided, as Transformers
    does.
    """
    rope = convert.describe(CONFIGS["llama4"])["rope"]
    assert rope.scaling == Llama3(16.0, 1.0, 1.0, 8192)
    unscaled = RoPE(rope.base).frequencies(128)
    is_slow = 8192 * unscaled < 2 * np.pi
    assert 0 < is_slow.sum() < 64
    np.testing.assert_allclose(
        rope.frequencies(128), np.where(is_slow, unscaled / 16, unscaled), rtol=1e-6
    )


@pytest.mark.core
@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
def test_keys_of_yarn_that_transformers_ignores(nested):
    config = LLAMA | {"rope_theta": 1e4}
    rope = convert.describe(
        config | {nested: YARN | {"finetuned": True, "attn_factor": 1.0}}
    )["rope"]
    assert rope.scaling == YaRN(4.0, 4096)
    with pytest.raises(
        ValueError,
        match=r"attn_factor, but got 2\.0; remove it .* Transformers .* ignores it",
    ):
        convert.describe(config | {nested: YARN | {"attn_factor": 2.0}})
    with pytest.raises(
        ValueError, match="but got slope; remove what Transformers ignores"
    ):
        convert.describe(config | {nested: YARN | {"slope": 2.0}})


POSITIONS = [
    ("bert", "absolute", ""),
    ("bert", "relative_key_query", "it adds relative positions"),
    (
        "bert",
        "alibi",
        "'alibi' in config is not supported: Transformers ignores it for model_type "
        "'bert'",
    ),
    ("cohere2", "rope_gptj", ""),
    ("cohere", "rope_gptj", ""),
    ("llama", "rope_gptj", "Transformers ignores it for model_type 'llama'"),
    ("llama", "rope", ""),
    ("modernbert-decoder", "sans_pos", ""),
    ("granitemoehybrid", "nope", ""),
    ("granitemoehybrid", "alibi", "Transformers ignores it"),
]


@pytest.mark.core
@pytest.mark.parametrize(("model_type", "kind", "message"), POSITIONS)
def test_position_embedding_type(model_type, kind, message):
    config = LLAMA | {
        "model_type": model_type,
        "position_embedding_type": kind,
        "layer_types": ["full_attention"],
    }
    if not message:
        convert.describe(config)
        return
    with pytest.raises(ValueError, match=message):
        convert.describe(config)


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["bloom", "falcon"])
def test_old_key_counts_before_hidden_size(model_type):
    config = {"model_type": model_type, "n_embed": 32, "num_attention_heads": 4}
    assert convert.describe(config)["in_features"] == 32
    assert convert.describe(config | {"hidden_size": 64})["in_features"] == 32
    assert convert.describe(LLAMA | {"n_embed": 32})["in_features"] == 64
    with pytest.raises(ValueError, match="n_embed must be an integer >= 1, but got 0"):
        convert.describe(config | {"n_embed": 0})


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "cwm", "qwen2"])
def test_window_of_zero(model_type):
    """In Transformers, queries then attend to nothing."""
    config = LLAMA | {
        "model_type": model_type,
        "num_key_value_heads": 4,
        "max_window_layers": 0,
    }
    with pytest.raises(
        ValueError,
        match=r"sliding_window must be .* but got 0; set it to null for a model without",
    ):
        convert.describe(config | {"sliding_window": 0, "use_sliding_window": True}, 1)
    assert (
        convert.describe(config | {"sliding_window": None}, 1)["local_window_size"]
        is None
    )


# Values of keys that a file lacks, with the argument that they determine.
ABSENT = [
    (
        "phi3",
        "original_max_position_embeddings",
        "rope",
        lambda rope: rope.scaling.factors[-1] > 4,
    ),
    ("qwen2_vl", "rope_theta", "rope", lambda rope: rope.base == 1e6),
    ("mistral4", "rope_parameters", "rope", lambda rope: rope.base == 1e4),
    ("cohere2_moe", "head_dim", "qkv_features", lambda features: features == 4 * 128),
]


@pytest.mark.parametrize(("name", "key", "argument", "is_right"), ABSENT)
def test_default_of_an_absent_key(name, key, argument, is_right):
    config = CONFIGS[name]
    config = {**config.get("text_config", config)}
    del config[key]
    assert is_right(convert.describe(config, max_length=8192)[argument])


DEFAULT_KV_HEADS = {
    "qwen2": 32,
    "qwen3": 32,
    "qwen2_moe": 16,
    "qwen2_vl_text": 8,
    "dots1": 32,
    "exaone4": 32,
}
DEFAULT_KV_HEADS |= {"gemma": 16, "helium": 20, "stablelm": 32}


@pytest.mark.parametrize("model_type", DEFAULT_KV_HEADS)
def test_default_number_of_key_heads(model_type):
    config = {"model_type": model_type, "hidden_size": 2560, "num_attention_heads": 320}
    assert convert.describe(config)["num_kv_heads"] == DEFAULT_KV_HEADS[model_type]
    assert (
        convert.describe(config | {"num_key_value_heads": None})["num_kv_heads"] == 320
    )


@pytest.mark.core
def test_default_base_of_ministral_3_belongs_to_its_default_scaling():
    config = LLAMA | {"model_type": "ministral3", "num_attention_heads": 8}
    assert convert.describe(config)["rope"].base == 1e6
    assert (
        convert.describe(config | {"rope_scaling": {"type": "linear", "factor": 2.0}})[
            "rope"
        ].base
        == 1e4
    )


@pytest.mark.core
@pytest.mark.parametrize("key", ["hybrid_override_pattern", "layers_block_type"])
def test_nemotron_h_has_as_many_layers_as_it_lists(key):
    config = {**CONFIGS["nemotron_h"]}
    del config["num_hidden_layers"]
    del config["hybrid_override_pattern"]
    config[key] = (
        "M-M*"
        if key == "hybrid_override_pattern"
        else ["linear_attention", "mlp", "moe", "full_attention"]
    )
    assert convert.describe(config, 3)["num_kv_heads"] == 2
    with pytest.raises(
        ValueError,
        match=r"layer must be an integer >= 0 and < 4, the length of .*, but got 6",
    ):
        convert.describe(config, 6)
