"""Errors of `flax_mha.rope`, and how it reads Hugging Face configs; test_torch_rope.py
has those of many models.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused

from flax_mha.rope import NTK, Linear, Llama3, LongRoPE, RoPE, YaRN, apply_rope

H = 16
pytestmark = pytest.mark.core
# One for each of the 8 pairs of features.
FACTORS = [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 16.5]
XS = jnp.zeros((2, 5, 3, H))
PS = jnp.zeros((2, 5), jnp.int32)

# Errors of arguments ------------------------------------------------------------------


def rotation_refused(message, x=XS, positions=PS, rope=None):
    rope = RoPE() if rope is None else rope
    refused(message, apply_rope, x, positions, rope)


def test_positions_must_have_an_entry_for_each_token():
    rotation_refused(r"positions must be .* got \(2, 4\)", positions=PS[:, :4])


def test_positions_must_be_integers_of_32_bits():
    message = "positions must have an integer dtype, but got bool"
    rotation_refused(message, positions=PS.astype(bool))
    message = "positions must be in the int32 range, but got 4294967296"
    rotation_refused(message, positions=np.arange(5) + 2**32)


def test_x_must_be_an_array_of_floats_with_heads():
    rotation_refused("x must have rank 3 or more", XS[0, 0], PS[0])
    rotation_refused("x must have a floating.* got int32", XS.astype(jnp.int32))
    rotation_refused("x must be an array, but got str", "x")


def test_rope_must_be_a_rope():
    rotation_refused(r"rope must be a RoPE, but got 10000\.0", rope=1e4)


def test_the_number_of_rotated_features_must_be_even():
    rotation_refused(r"even integer.* 1\.0 \* 15 = 15; .*=14 / 15", XS[..., :15])
    rotation_refused(r"even integer.* = 1; use larger heads", XS[..., :1])
    no_integer = RoPE(fraction=0.4)
    rotation_refused(r"even integer.* 0\.4 \* 16 = 6\.4; .*=6 / 16", rope=no_integer)
    below_one = RoPE(fraction=0.01)
    rotation_refused(r"even integer.* = 0\.16; .*=2 / 16", rope=below_one)


def test_arguments_of_rope_must_have_their_types_and_ranges():
    refused("fraction must be a finite number > 0, but got 0", RoPE, fraction=0)
    refused("base must be a finite number > 0, but got '10000'", RoPE, "10000")
    message = "interleaved must be True or False, but got 'yes'"
    refused(message, RoPE, interleaved="yes")
    refused("scaling must be None, Linear.*from_config", RoPE, scaling={"factor": 2.0})


def test_numbers_of_scalings_must_be_in_range():
    refused(r"Linear\(factor\) must be .* >= 1, but got 0\.5", Linear, 0.5)
    refused(r"NTK\(factor\) must be .* >= 1", NTK, 0.5)
    refused(r"Llama3\(high_freq_factor\) must be .* >= 4", Llama3, 8, 4, 3.9, 8192)
    message = r"Llama3\(original_max_position\) must be .* got None"
    refused(message, Llama3, 8, 1, 4, None)
    refused(r"YaRN\(beta_fast\) must be .* >= 32, but got 1", YaRN, 4, 4096, 1, 32)
    refused(r"YaRN\(mscale\) must be", YaRN, 4, 4096, mscale=-1)
    refused(r"YaRN\(truncate\) must be True or False", YaRN, 4, 4096, truncate=0)
    message = r"each factor in LongRoPE\(factors\) must be .* > 0, but got 0"
    refused(message, LongRoPE, [1.0, 0.0])
    refused(r"LongRoPE\(factors\) must be", LongRoPE, None)


def test_a_scaling_must_fit_the_base_and_the_head():
    ntk = RoPE(scaling=NTK(2.0))
    rotation_refused("NTK needs at least 4 rotated", XS[..., :2], rope=ntk)
    seven_factors = RoPE(scaling=LongRoPE(FACTORS[1:]))
    rotation_refused("8 for 16 .* but got 7", rope=seven_factors)
    base_one = RoPE(1.0, scaling=YaRN(4, 4096))
    refused("base must be greater than 1 with YaRN", base_one.frequencies, H)


def test_sections_need_a_coordinate_each():
    three = RoPE(sections=(2, 3, 3))
    message = r"\[batch..., length, coordinates\] or .* \(2, 5, 3\) .* got \(2, 5\)"
    rotation_refused(message, rope=three)
    two_coordinates = PS[..., None].repeat(2, -1)
    message = r"got \(2, 5, 2\); .* of a text token 3 times"
    rotation_refused(message, positions=two_coordinates, rope=three)
    # As Transformers has them: coordinates come first.
    coordinates_first = jnp.zeros((3, 2, 5), jnp.int32)
    message = r"positions must be .* got \(3, 2, 5\)"
    rotation_refused(message, positions=coordinates_first, rope=three)


def test_sections_must_fit_the_head_and_their_layout():
    two = RoPE(sections=(2, 3))
    refused(r"8 for 16 .* \(2, 3\), which sum to 5", two.coordinates, H)
    message = r"sections must be None or positive .* got \(8, 0\)"
    refused(message, RoPE, sections=(8, 0))
    refused("sections must be None or positive .* got 8", RoPE, sections=8)
    # The first coordinate would need every third pair, which are three of eight.
    interleaved = RoPE(sections=(2, 3, 3), section_layout="interleaved")
    message = (
        r"sections must interleave the coordinates across 8 pairs.* got \(2, 3, 3\)"
    )
    refused(message, interleaved.coordinates, H)


def test_a_section_layout_must_be_known_and_have_fitting_sections():
    refused(
        "sections must all be equal",
        RoPE,
        sections=(2, 6),
        section_layout="axial_strided",
    )
    message = "section_layout must be one of contig"
    refused(message, RoPE, sections=(4, 4), section_layout="rows")
    message = "sections must be given .* 'axial', but got None"
    refused(message, RoPE, section_layout="axial")


# Configs ------------------------------------------------------------------------------


def model(model_type, **config):
    return {"model_type": model_type, **config}


def scaled(**scaling):
    return {"rope_theta": 1e4, "rope_scaling": scaling}


# Layers with a window rotate in another way than the others.
NESTED = model(
    "gemma3_text",
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
# The length of the sequence decides which factors apply.
LONG = model(
    "phimoe",
    max_position_embeddings=131072,
    rope_scaling={
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "short_mscale": 1.25,
        "long_mscale": 1.5,
        "original_max_position_embeddings": 4096,
    },
)
FULL = {"layer_type": "full_attention"}
LOCAL = {"layer_type": "sliding_attention"}

read = RoPE.from_config


def test_configs_with_rope_parameters():
    parameters = {
        "rope_type": "default",
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
    }
    assert read({"rope_parameters": parameters}) == RoPE(5e5, 0.5)


def test_configs_whose_kinds_of_layers_rotate_differently():
    assert read(NESTED, **FULL) == RoPE(1e6, scaling=Linear(8.0))
    assert read(NESTED, **LOCAL) == RoPE(1e4)
    modernbert = model("modernbert", global_rope_theta=1.6e5, local_rope_theta=1e4)
    assert read(modernbert, **FULL) == RoPE(1.6e5)
    assert read(model("qwen3", rope_theta=1e6), **LOCAL) == RoPE(1e6)


def test_defaults_of_models():
    assert read(model("gpt_neox")) == RoPE(fraction=0.25)
    quarter_in_pairs = RoPE(fraction=0.25, interleaved=True)
    assert read(model("gptj", n_embd=4096, n_head=16)) == quarter_in_pairs
    yarn = YaRN(32.0, 4096, truncate=False)
    assert read(model("gpt_oss")) == RoPE(150_000.0, scaling=yarn)
    assert read(model("falcon")) == RoPE()
    assert read(model("glm4_moe", rope_theta=1e6)) == RoPE(1e6, 0.5)
    # 90 % of 36 features, rounded down to an even number.
    moonshine = model("moonshine", hidden_size=288, decoder_num_attention_heads=8)
    assert read(moonshine) == RoPE(fraction=32 / 36, interleaved=True)
    assert read(model("deepseek_v3", rope_interleave=False)) == RoPE()


def test_scalings_complete_themselves_by_max_position_embeddings():
    longest = {"max_position_embeddings": 8192}
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
    no_factor = scaled(**yarn, factor=None)
    assert read(no_factor | longest) == RoPE(scaling=YaRN(2.0, 4096))
    no_length = scaled(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
    )
    llama_3 = Llama3(8.0, 1.0, 4.0, 8192)
    assert read(no_length | longest) == RoPE(scaling=llama_3)


def test_numbers_of_numpy():
    third = np.float32(0.3)
    partial = {"rope_theta": 1e4, "partial_rotary_factor": third, "head_dim": 16}
    assert read(partial) == RoPE(1e4, fraction=4 / 16)
    linear = scaled(type="linear", factor=np.float32(2))
    assert read(linear) == RoPE(1e4, scaling=Linear(2.0))


def test_the_length_chooses_the_factors_of_longrope():
    short = RoPE(1e6, scaling=LongRoPE(FACTORS, 1.25))
    assert read(LONG, max_length=np.int64(4096)) == short
    long = RoPE(1e6, scaling=LongRoPE(FACTORS[::-1], 1.5))
    assert read(LONG, max_length=4097) == long


NO_CHANGE = {
    "rope_interleaved": False,
    "rope_traditional": False,
    "rope_ratio": 1,
    "rope_type": "default",
    "rotary_percent": 1.0,
    "rope_dim": 16,
}


def test_foreign_keys_may_repeat_what_transformers_computes():
    llama = model("llama", head_dim=16)
    assert read(llama | NO_CHANGE) == read(llama)
    pairs = model("helium", head_dim=16)
    assert read(pairs | {"rope_interleaved": True}) == read(pairs)
    latent = model("youtu_llm", qk_rope_head_dim=16, head_dim=32)
    assert read(latent | {"rope_dim": 16}) == read(model("youtu"))
    pixtral = model("pixtral", patch_size=16, head_dim=32)
    assert read(pixtral | {"rope_ratio": 1}) == read(pixtral)


def test_sizes_of_heads_are_read_only_if_they_are_needed():
    sizes = {"hidden_size": 4, "num_attention_heads": 8}
    assert read({"rope_theta": 1e4} | sizes) == RoPE()


def test_laguna_reads_no_base_outside_of_rope_parameters():
    laguna = model("laguna", rope_theta=7e5)
    assert read(laguna, **FULL) == RoPE(5e5, 0.5)
    assert read(laguna, **LOCAL) == RoPE(1e4)


# Errors of configs --------------------------------------------------------------------


def config_refused(message, config, **arguments):
    refused(message, RoPE.from_config, config, **arguments)


def test_configs_must_be_dicts_of_known_models():
    message = "text_config must be a dict, but got 'x'"
    config_refused(message, {"text_config": "x"})
    config_refused("model_type must be a string", model(["llama"]))
    message = "known keys, but got rope_speed"
    config_refused(message, {"rope_theta": 1e4, "rope_speed": 500})
    message = "config must contain rope_theta.* has model_type 'bert' and neither key"
    config_refused(message, model("bert"))
    message = "config must contain head_dim"
    config_refused(message, {"rotary_dim": 64, "rope_theta": 1e4})


@pytest.mark.parametrize("key", NO_CHANGE)
def test_foreign_keys_must_not_change_the_rotation(key):
    expected = f"{key} must be {NO_CHANGE[key]!r} or left out"
    config_refused(expected, model("llama", head_dim=16) | {key: "linear"})
    scaled_twice = scaled(rope_type="linear", factor=2.0) | {"rope_type": "default"}
    config_refused("rope_type must be 'linear' or left out", scaled_twice)


def test_a_scaling_must_be_a_dict_of_a_known_type():
    config_refused("but got 1", {"rope_theta": 1e4, "rope_scaling": {1: 2}})
    list_of_types = scaled(rope_type=["linear"], factor=2.0)
    config_refused("rope_type must be a string", list_of_types)
    # Its frequencies change with the length, and with them the keys of earlier tokens.
    message = "rope_type 'dynamic' is not supported.*cached keys"
    config_refused(message, scaled(type="dynamic", factor=2.0))
    message = "rope_type must be one of default.*got 'mrope'"
    config_refused(message, scaled(rope_type="mrope"))


def test_a_scaling_must_have_the_keys_of_its_type():
    message = "must contain factor, but got no factor"
    config_refused(message, scaled(rope_type="linear"))
    unknown = scaled(rope_type="linear", factor=2.0, beta=3)
    config_refused("must contain factor, but got beta", unknown)
    config_refused("only the base, but got attention", scaled(attention=1))
    no_length = scaled(rope_type="yarn", factor=4.0)
    config_refused("must contain original_max_position_embeddings", no_length)
    no_factor = scaled(rope_type="yarn", original_max_position_embeddings=4096)
    message = "must contain factor or max_position_embeddings"
    config_refused(message, no_factor)


def test_longrope_needs_its_factor_and_the_length():
    config_refused("max_length must be .* got '4k'", LONG, max_length="4k")
    message = (
        "max_length must be the length of the longest sequence.*above 4096 "
        "tokens.*got None"
    )
    config_refused(message, LONG)
    length_one = LONG | {"original_max_position_embeddings": 1}
    config_refused("embeddings must be greater than 1", length_one, max_length=5)


def test_sections_of_configs_must_be_lists_of_supported_models():
    config_refused("but got mrope_interleaved", scaled(mrope_interleaved=True))
    ernie = scaled(mrope_section=[22, 22, 20]) | model("ernie4_5_vl_moe_text")
    config_refused("'ernie4_5_vl_moe_text' is not supported", ernie)


def test_vision_encoders_must_be_supported_and_have_a_head_size():
    gemma = model("gemma4_vision", patch_size=16, rope_theta=1e4)
    config_refused("must be one of qwen2_vl, .* with a patch_size", gemma)
    pixtral = model("pixtral", patch_size=16)
    config_refused("config must contain head_dim", pixtral)
    linear = scaled(rope_type="linear", factor=2.0)
    config_refused("rope_type must be default or axial", pixtral | linear)


def test_layer_type_must_be_one_of_the_config():
    config_refused("layer_type must be one of .* but got None", NESTED)
    config_refused("layer_type must be one of .* but got None", model("gemma3_text"))
    message = "layer_type must be None or one of .* got 'local'"
    config_refused(message, NESTED, layer_type="local")
    full = {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    config_refused("must contain sliding_attention, but got fu", full, **LOCAL)
    # Its layers without a window do not rotate.
    message = "but got full_attention; cohere2 .* rope=None"
    config_refused(message, model("cohere2", rope_theta=1e4), **FULL)
