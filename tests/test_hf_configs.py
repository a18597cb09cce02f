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
def test_published_config_is_described_as_expected(name):
    assert hf_configs.summary(CONFIGS[name]) == EXPECTED[name]


@pytest.mark.core
def test_each_family_has_a_published_config():
    # The last is refused, see below.
    shown = re.findall(r"kernel_metadata=(\S+)", "\n".join(EXPECTED.values()))
    covered = [FAMILIES[name] for name in (*shown, "big_bird")]
    for name, family in FAMILIES.items():
        assert family.refused or family in covered, name


@pytest.mark.core
def test_published_config_is_refused_only_for_random_attention():
    refused = [name for name, text in EXPECTED.items() if "ValueError" in text]
    assert refused == ["big_bird"]
    # The error says what to set.
    config = CONFIGS["big_bird"] | {"attention_type": "original_full"}
    assert convert.describe(config)["use_bias"]


@pytest.mark.core
def test_equal_factors_of_llama_4_scout_divide_slow_frequencies():
    """Frequencies below one turn in the original length are divided, as Transformers
    does.
    """
    rope = convert.describe(CONFIGS["llama4"])["rope"]
    assert rope.scaling == Llama3(16.0, 1.0, 1.0, 8192)
    unscaled = RoPE(rope.base).frequencies(128)
    is_slow = 8192 * unscaled < 2 * np.pi
    assert 0 < is_slow.sum() < 64
    want = np.where(is_slow, unscaled / 16, unscaled)
    np.testing.assert_allclose(rope.frequencies(128), want, rtol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("nested", ["rope_scaling", "rope_parameters"])
def test_keys_of_yarn_that_transformers_ignores_must_change_nothing(nested):
    def describe(**more):
        return convert.describe(LLAMA | {"rope_theta": 1e4, nested: YARN | more})

    rope = describe(finetuned=True, attn_factor=1.0)["rope"]
    assert rope.scaling == YaRN(4.0, 4096)
    message = r"attn_factor, but got 2\.0; remove it .* Transformers .* ignores it"
    with pytest.raises(ValueError, match=message):
        describe(attn_factor=2.0)
    message = "but got slope; remove what Transformers ignores"
    with pytest.raises(ValueError, match=message):
        describe(slope=2.0)


def with_positions(model_type, kind):
    return LLAMA | {
        "model_type": model_type,
        "position_embedding_type": kind,
        "layer_types": ["full_attention"],
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("bert", "absolute"),
        ("cohere2", "rope_gptj"),
        ("cohere", "rope_gptj"),
        ("llama", "rope"),
        ("modernbert-decoder", "sans_pos"),
        ("granitemoehybrid", "nope"),
    ],
)
def test_position_embedding_type_of_a_family_is_accepted(model_type, kind):
    convert.describe(with_positions(model_type, kind))


IGNORED = "Transformers ignores it for model_type"


@pytest.mark.core
@pytest.mark.parametrize(
    ("model_type", "kind", "message"),
    [
        ("bert", "relative_key_query", "it adds relative positions"),
        ("bert", "alibi", f"'alibi' in config is not supported: {IGNORED} 'bert'"),
    ],
)
def test_other_position_embedding_types_raise_errors(model_type, kind, message):
    with pytest.raises(ValueError, match=message):
        convert.describe(with_positions(model_type, kind))


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
def test_window_of_zero_raises_an_error(model_type):
    # In Transformers, queries then attend to nothing.
    config = LLAMA | {
        "model_type": model_type,
        "num_key_value_heads": 4,
        "max_window_layers": 0,
    }
    window = {"sliding_window": 0, "use_sliding_window": True}
    message = "sliding_window must be .* but got 0; set it to null for a model without"
    with pytest.raises(ValueError, match=message):
        convert.describe(config | window, 1)
    described = convert.describe(config | {"sliding_window": None}, 1)
    assert described["local_window_size"] is None


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
def test_absent_key_has_the_default_of_its_family(name, key, argument, is_right):
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
    "gemma": 16,
    "helium": 20,
    "stablelm": 32,
}


@pytest.mark.parametrize("model_type", DEFAULT_KV_HEADS)
def test_absent_number_of_key_heads_has_the_default_of_its_family(model_type):
    config = {"model_type": model_type, "hidden_size": 2560, "num_attention_heads": 320}
    assert convert.describe(config)["num_kv_heads"] == DEFAULT_KV_HEADS[model_type]
    # Null is not absent: as many as heads.
    described = convert.describe(config | {"num_key_value_heads": None})
    assert described["num_kv_heads"] == 320


@pytest.mark.core
def test_default_base_of_ministral_3_belongs_to_its_default_scaling():
    config = LLAMA | {"model_type": "ministral3", "num_attention_heads": 8}
    assert convert.describe(config)["rope"].base == 1e6
    linear = config | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert convert.describe(linear)["rope"].base == 1e4


@pytest.mark.core
@pytest.mark.parametrize(
    ("key", "layers"),
    [
        ("hybrid_override_pattern", "M-M*"),
        ("layers_block_type", ["linear_attention", "mlp", "moe", "full_attention"]),
    ],
)
def test_nemotron_h_has_as_many_layers_as_it_lists(key, layers):
    config = {**CONFIGS["nemotron_h"]}
    del config["num_hidden_layers"]
    del config["hybrid_override_pattern"]
    config[key] = layers
    assert convert.describe(config, 3)["num_kv_heads"] == 2
    message = "layer must be an integer >= 0 and < 4, the length of .*, but got 6"
    with pytest.raises(ValueError, match=message):
        convert.describe(config, 6)
