"""What `flax_mha.rope` refuses, and how it reads Hugging Face configs; test_torch_rope.py has those of many models."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.rope import NTK, Linear, Llama3, LongRoPE, RoPE, YaRN, apply_rope

H = 16
FACTORS = [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 16.5]
XS, PS = jnp.zeros((2, 5, 3, H)), jnp.zeros((2, 5), jnp.int32)
REFUSED = {
    "positions of another length": (lambda: apply_rope(XS, PS[:, :4], RoPE()), r"positions must be .* got \(2, 4\)"),
    "positions of other rows": (lambda: apply_rope(XS, PS[:1], RoPE()), r"positions must be .* got \(1, 5\)"),
    "one position": (lambda: apply_rope(XS, 3, RoPE()), r"positions must be .* got \(\)"),
    "positions with heads": (lambda: apply_rope(XS, PS[..., None], RoPE()), r"positions must be .* got \(2, 5, 1\)"),
    "float positions": (
        lambda: apply_rope(XS, PS.astype(jnp.float32), RoPE()),
        "positions must have an integer dtype.*float32",
    ),
    "bool positions": (
        lambda: apply_rope(XS, PS.astype(bool), RoPE()),
        "positions must have an integer dtype, but got bool",
    ),
    "positions beyond 32 bits": (
        lambda: apply_rope(XS, np.arange(PS.shape[-1]) + 2**32, RoPE()),
        "positions must be in the int32 range, but got 4294967296 to",
    ),
    "a list of positions beyond 32 bits": (
        lambda: apply_rope(XS, [2**40] * PS.shape[-1], RoPE()),
        "positions must be in the int32 range",
    ),
    "no positions": (lambda: apply_rope(XS, "first", RoPE()), "positions must have an integer dtype, but got <U5"),
    "x of rank 2": (lambda: apply_rope(XS[0, 0], PS[0], RoPE()), "x must have rank 3 or more"),
    "x of integers": (lambda: apply_rope(XS.astype(jnp.int32), PS, RoPE()), "x must have a floating.* got int32"),
    "no x": (lambda: apply_rope("x", PS, RoPE()), "x must be an array, but got str"),
    "rope is no RoPE": (lambda: apply_rope(XS, PS, 1e4), r"rope must be a RoPE, but got 10000\.0"),
    "odd head size": (lambda: apply_rope(XS[..., :15], PS, RoPE()), r"even integer.* 1\.0 \* 15 = 15; .*=14 / 15"),
    "odd rotated size": (lambda: apply_rope(XS, PS, RoPE(fraction=3 / 16)), r"even integer.* = 3; .*fraction="),
    "no integer": (lambda: apply_rope(XS, PS, RoPE(fraction=0.4)), r"even integer.* 0\.4 \* 16 = 6\.4; .*=6 / 16"),
    "nothing rotated": (lambda: apply_rope(XS, PS, RoPE(fraction=0.01)), r"even integer.* = 0\.16; .*=2 / 16"),
    "one feature": (lambda: apply_rope(XS[..., :1], PS, RoPE()), r"even integer.* = 1; use larger heads"),
    "fraction 0": (lambda: RoPE(fraction=0), "fraction must be a finite number > 0, but got 0"),
    "fraction above 1": (lambda: RoPE(fraction=64), r"fraction must be in \(0, 1\], but got 64"),
    "fraction NaN": (lambda: RoPE(fraction=math.nan), "fraction must be .* got nan"),
    "base 0": (lambda: RoPE(0), "base must be a finite number > 0, but got 0"),
    "base is text": (lambda: RoPE("10000"), "base must be .* got '10000'"),
    "base is bool": (lambda: RoPE(True), "base must be .* got True"),
    "base is infinite": (lambda: RoPE(math.inf), "base must be .* got inf"),
    "interleaved is text": (lambda: RoPE(interleaved="yes"), "interleaved must be True or False, but got 'yes'"),
    "scaling is a dict": (lambda: RoPE(scaling={"factor": 2.0}), "scaling must be None, Linear.*from_config"),
    "scaling is a class": (lambda: RoPE(scaling=Linear), "scaling must be None, Linear"),
    "linear below 1": (lambda: Linear(0.5), r"Linear\(factor\) must be .* >= 1, but got 0\.5"),
    "NTK below 1": (lambda: NTK(0.5), r"NTK\(factor\) must be .* >= 1"),
    "NTK of one pair": (lambda: apply_rope(XS[..., :2], PS, RoPE(scaling=NTK(2.0))), "NTK needs at least 4 rotated"),
    "Llama 3 below 1": (lambda: Llama3(0.5, 1, 4, 8192), r"Llama3\(factor\) must be"),
    "Llama 3 low": (lambda: Llama3(8, 0, 4, 8192), r"Llama3\(low_freq_factor\) must be .* > 0"),
    "Llama 3 low and high": (lambda: Llama3(8, 4, 4, 8192), r"Llama3\(high_freq_factor\) must be .* > 4"),
    "Llama 3 length": (lambda: Llama3(8, 1, 4, None), r"Llama3\(original_max_position\) must be .* got None"),
    "YaRN below 1": (lambda: YaRN(0.5, 4096), r"YaRN\(factor\) must be"),
    "YaRN length": (lambda: YaRN(4, 0), r"YaRN\(original_max_position\) must be"),
    "YaRN betas": (lambda: YaRN(4, 4096, 1, 32), r"YaRN\(beta_fast\) must be .* >= 32, but got 1"),
    "YaRN attention": (lambda: YaRN(4, 4096, attention_factor=0), r"YaRN\(attention_factor\) must be"),
    "YaRN mscale": (lambda: YaRN(4, 4096, mscale=-1), r"YaRN\(mscale\) must be"),
    "YaRN truncate": (lambda: YaRN(4, 4096, truncate=0), r"YaRN\(truncate\) must be True or False"),
    "YaRN base": (lambda: RoPE(1.0, scaling=YaRN(4, 4096)).frequencies(H), "base must be greater than 1 with YaRN"),
    "LongRoPE count": (lambda: apply_rope(XS, PS, RoPE(scaling=LongRoPE(FACTORS[1:]))), "8 for 16 .* but got 7"),
    "LongRoPE factor": (lambda: LongRoPE([1.0, 0.0]), r"each factor in LongRoPE\(factors\) must be .* > 0, but got 0"),
    "LongRoPE number": (lambda: LongRoPE(None), r"LongRoPE\(factors\) must be"),
    "sections without their axis": (
        lambda: apply_rope(XS, PS, RoPE(sections=(2, 3, 3))),
        r"positions must be \[batch..., length, coordinates\] or .* that is \(2, 5, 3\) or \(5, 3\) .* got \(2, 5\)",
    ),
    "another number of coordinates": (
        lambda: apply_rope(XS, PS[..., None].repeat(2, -1), RoPE(sections=(2, 3, 3))),
        r"positions must be .* that is \(2, 5, 3\) or \(5, 3\) for x .* got \(2, 5, 2\); .* of a text token 3 times",
    ),
    "coordinates first, as in Transformers": (
        lambda: apply_rope(XS, jnp.zeros((3, 2, 5), jnp.int32), RoPE(sections=(2, 3, 3))),
        r"positions must be .* got \(3, 2, 5\)",
    ),
    "coordinates without sections": (lambda: apply_rope(XS, jnp.zeros((2, 5, 3), int), RoPE()), "positions must be"),
    "sections of another head": (
        lambda: RoPE(sections=(2, 3)).coordinates(H),
        r"8 for 16 .* \(2, 3\), which sum to 5",
    ),
    "sections of 0": (lambda: RoPE(sections=(8, 0)), r"sections must be None or positive .* got \(8, 0\)"),
    "sections of floats": (lambda: RoPE(sections=(4.0, 4.0)), "sections must be None or positive"),
    "no sections": (lambda: RoPE(sections=()), r"sections must be None or positive .* got \(\)"),
    "sections is a number": (lambda: RoPE(sections=8), "sections must be None or positive .* got 8"),
    "sections do not take turns": (
        lambda: RoPE(sections=(2, 3, 3), section_layout="interleaved").coordinates(H),
        r"sections must interleave the coordinates across 8 pairs and give any .* to the first .*, but got \(2, 3, 3\)",
    ),
    "strided sections differ": (
        lambda: RoPE(sections=(2, 6), section_layout="axial_strided"),
        "sections must all be equal",
    ),
    "section layout": (lambda: RoPE(sections=(4, 4), section_layout="rows"), "section_layout must be one of contig"),
    "section layout of none": (lambda: RoPE(section_layout="axial"), "sections must be given .* 'axial', but got None"),
    "LongRoPE attention": (lambda: LongRoPE(FACTORS, 0), r"LongRoPE\(attention_factor\) must be"),
}


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
NESTED = {
    "model_type": "gemma3_text",
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
LONG = {
    "model_type": "phimoe",
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": FACTORS,
        "long_factor": FACTORS[::-1],
        "short_mscale": 1.25,
        "long_mscale": 1.5,
        "original_max_position_embeddings": 4096,
    },
}
LOCAL, FULL = {"layer_type": "sliding_attention"}, {"layer_type": "full_attention"}
# name: (config, arguments, what is read)
CONFIGS = {
    "Transformers 5": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {},
        RoPE(5e5, 0.5),
    ),
    "Transformers 5, full attention": (NESTED, FULL, RoPE(1e6, scaling=Linear(8.0))),
    "Transformers 5, sliding attention": (NESTED, LOCAL, RoPE(1e4)),
    "Gemma 3 that says little": (
        {"text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}},
        FULL,
        RoPE(1e6, scaling=Linear(8.0)),
    ),
    "Gemma 3 that says little, local": (
        {"text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}},
        LOCAL,
        RoPE(1e4),
    ),
    "ModernBERT": (
        {"model_type": "modernbert", "global_rope_theta": 1.6e5, "local_rope_theta": 1e4},
        FULL,
        RoPE(1.6e5),
    ),
    "OLMo 3": ({"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN}, LOCAL, RoPE(5e5)),
    "OLMo 3, full": (
        {"model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN},
        FULL,
        RoPE(5e5, scaling=YaRN(40, 4096)),
    ),
    "one kind of layers": ({"model_type": "qwen3", "rope_theta": 1e6}, LOCAL, RoPE(1e6)),
    "Llama that says nothing": ({"model_type": "llama", "rope_scaling": None}, {}, RoPE()),
    "GPT-NeoX that says nothing": ({"model_type": "gpt_neox"}, {}, RoPE(fraction=0.25)),
    "GPT-J that says nothing": (
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16},
        {},
        RoPE(fraction=0.25, interleaved=True),
    ),
    "gpt-oss that says nothing": (
        {"model_type": "gpt_oss"},
        {},
        RoPE(150_000.0, scaling=YaRN(32.0, 4096, truncate=False)),
    ),
    "Falcon that says nothing": ({"model_type": "falcon"}, {}, RoPE()),
    "Cohere": ({"model_type": "cohere", "rope_theta": 8e6}, {}, RoPE(8e6, interleaved=True)),
    "GLM-4.5": ({"model_type": "glm4_moe", "rope_theta": 1e6}, {}, RoPE(1e6, 0.5)),
    "rotary_dim with head_dim": ({"rotary_dim": 64, "head_dim": 128, "rope_theta": 5e6}, {}, RoPE(5e6, 0.5)),
    "rounded down": (
        {"model_type": "moonshine", "hidden_size": 288, "decoder_num_attention_heads": 8},
        {},
        RoPE(fraction=32 / 36, interleaved=True),
    ),
    "DeepSeek 3": (
        {
            "model_type": "deepseek_v3",
            "rope_theta": 1e4,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {},
        RoPE(interleaved=True, scaling=YaRN(40, 4096, mscale=1.0, mscale_all_dim=1.0)),
    ),
    "Sarvam": (
        {"model_type": "sarvam_mla", "rope_scaling": {**YARN, "rope_type": "deepseek_yarn"}, "head_dim": 576},
        {},
        RoPE(interleaved=True, scaling=YaRN(40, 4096)),
    ),
    "rope_interleave": ({"model_type": "deepseek_v3", "rope_interleave": False}, {}, RoPE()),
    "YaRN by the ratio of lengths": (
        {"rope_theta": 1e4, "max_position_embeddings": 8192, "rope_scaling": {**YARN, "factor": None}},
        {},
        RoPE(scaling=YaRN(2.0, 4096)),
    ),
    "Llama 3 by max_position_embeddings": (
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 8192,
            "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
        {},
        RoPE(5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    ),
    "LongRoPE, short": (LONG, {"max_length": 4096}, RoPE(1e6, scaling=LongRoPE(FACTORS, 1.25))),
    "a NumPy fraction, rounded down": (
        {"rope_theta": 1e4, "partial_rotary_factor": np.float32(0.3), "head_dim": 16},
        {},
        RoPE(1e4, fraction=4 / 16),
    ),
    "a NumPy factor": (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": np.float32(2)}},
        {},
        RoPE(1e4, scaling=Linear(2.0)),
    ),
    "LongRoPE, a NumPy length": (LONG, {"max_length": np.int64(100)}, RoPE(1e6, scaling=LongRoPE(FACTORS, 1.25))),
    "LongRoPE, long": (LONG, {"max_length": 4097}, RoPE(1e6, scaling=LongRoPE(FACTORS[::-1], 1.5))),
}


@pytest.mark.core
@pytest.mark.parametrize("name", CONFIGS)
def test_from_config(name):
    config, arguments, want = CONFIGS[name]
    assert RoPE.from_config(config, **arguments) == want


def scaled(**scaling):
    return {"rope_theta": 1e4, "rope_scaling": scaling}


# name: (config, arguments, message)
REFUSED_CONFIGS = {
    "no dict": (None, {}, "config must be a dict, but got NoneType; use config.to_dict"),
    "dynamic": (scaled(type="dynamic", factor=2.0), {}, "rope_type 'dynamic' is not supported.*cached keys"),
    "mrope without sections": (scaled(rope_type="mrope"), {}, "rope_type must be one of default.*got 'mrope'"),
    "a type that is no text": (scaled(rope_type=3), {}, "rope_type must be a string, but got 3"),
    "unknown parameter": (scaled(rope_type="linear", factor=2.0, beta=3), {}, "must contain factor, but got beta"),
    "unknown parameter of the default": (scaled(attention=1), {}, "only the base, but got attention"),
    "sections interleaved, but none": (scaled(mrope_interleaved=True), {}, "but got mrope_interleaved"),
    "sections are text": (
        scaled(mrope_section="16"),
        {},
        "mrope_section must be a list of positive integers, but got '16'",
    ),
    "sections in another order": (
        scaled(mrope_section=[22, 22, 20]) | {"model_type": "ernie4_5_vl_moe_text"},
        {},
        "model_type 'ernie4_5_vl_moe_text' is not supported, because RoPE does not support the order",
    ),
    "another vision encoder": (
        {"model_type": "gemma4_vision", "patch_size": 16, "rope_theta": 100.0},
        {},
        "model_type must be one of qwen2_vl, .* with a patch_size, but got 'gemma4_vision'",
    ),
    "a vision encoder without sizes": ({"model_type": "pixtral", "patch_size": 16}, {}, "config must contain head_dim"),
    "a vision encoder with a scaling": (
        {"model_type": "pixtral", "patch_size": 16, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {},
        "rope_type must be default or axial for pixtral, but got 'linear'",
    ),
    "missing parameter": (scaled(rope_type="linear"), {}, "must contain factor, but got no factor"),
    "unknown key": ({"rope_theta": 1e4, "rope_ratio": 500}, {}, "known keys, but got rope_ratio"),
    "scaling is no dict": (
        {"rope_theta": 1e4, "rope_scaling": "linear"},
        {},
        "rope_scaling must be a dict, but got 'linear'",
    ),
    "no base": ({"model_type": "bert"}, {}, "config must contain rope_theta.* has model_type 'bert' and neither key"),
    "factor is text": (
        scaled(type="longrope", factor="2", short_factor=[1.0], long_factor=[1.0]),
        {},
        "factor must be",
    ),
    "original length is text": (
        scaled(rope_type="yarn", original_max_position_embeddings="4096") | {"max_position_embeddings": 8192},
        {},
        "original_max_position_embeddings must be a finite number > 0, but got '4096'",
    ),
    "type of a list": ({"model_type": ["llama"]}, {}, "model_type must be a string"),
    "text config is text": ({"text_config": "x"}, {}, "text_config must be a dict, but got 'x'"),
    "bad base": ({"rope_theta": "1e4"}, {}, "rope_theta must be a finite number > 0, but got '1e4'"),
    "bad factor": (scaled(rope_type="linear", factor=0.5), {}, r"Linear\(factor\) must be"),
    "bad fraction": (
        {"rope_theta": 1e4, "partial_rotary_factor": 2.0},
        {},
        r"partial_rotary_factor must be a number in \(0, 1\], but got 2.0",
    ),
    "no kind of layer": (NESTED, {}, "layer_type must be one of .* but got None"),
    "no kind of layer, Gemma 3": ({"model_type": "gemma3_text"}, {}, "layer_type must be one of .* but got None"),
    "unknown kind of layer": (NESTED, {"layer_type": "local"}, "layer_type must be None or one of .* got 'local'"),
    "missing kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        LOCAL,
        "rope_parameters must contain sliding_attention, but got full_attention",
    ),
    "rotary_dim alone": ({"rotary_dim": 64, "rope_theta": 1e4}, {}, "config must contain head_dim"),
    "no original length": (scaled(rope_type="yarn", factor=4.0), {}, "must contain original_max_position_embeddings"),
    "layers that do not rotate": (
        {"model_type": "cohere2", "rope_theta": 1e4},
        FULL,
        "layer_type must be sliding_attention, because cohere2 .* rope=None",
    ),
    "no factor": (
        scaled(rope_type="yarn", original_max_position_embeddings=4096),
        {},
        "must contain factor or max_position_embeddings",
    ),
    "fraction is text": (
        {"rope_theta": 1e4, "head_dim": 64, "rotary_pct": "0.5"},
        {},
        r"rotary_pct must be a number in \(0, 1\], but got '0.5'",
    ),
    "scaling's type of a list": (scaled(rope_type=["linear"], factor=2.0), {}, "rope_type must be a string"),
    "a number as key": ({"rope_theta": 1e4, "rope_scaling": {1: 2}}, {}, "but got 1"),
    "head size is text": ({"rope_theta": 1e4, "rotary_pct": 0.5, "head_dim": "64"}, {}, "head_dim must be a finite"),
    "heads of each layer": (
        {"rope_theta": 1e4, "rotary_pct": 0.5, "hidden_size": 64, "num_attention_heads": [8, 8]},
        {},
        "num_attention_heads must be a finite number",
    ),
    "rotary size is text": ({"rope_theta": 1e4, "head_dim": 64, "rotary_dim": "4"}, {}, "rotary_dim must be a finite"),
    "LongRoPE after one token": (
        LONG | {"original_max_position_embeddings": 1},
        {"max_length": 5},
        "original_max_position_embeddings must be greater than 1",
    ),
    "LongRoPE with a length below 1": (LONG, {"max_length": -5}, "max_length must be .* got -5"),
    "base beyond float64": ({"rope_theta": 10**400}, {}, "rope_theta must be a finite number > 0"),
    "LongRoPE with another length": (LONG, {"max_length": "4k"}, "max_length must be .* got '4k'"),
    "LongRoPE without a length": (
        LONG,
        {},
        "max_length must be the length of the longest sequence.*above 4096 tokens.*got None",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_refused_configs(case):
    config, arguments, message = REFUSED_CONFIGS[case]
    with pytest.raises(ValueError, match=message) as error:
        RoPE.from_config(config, **arguments)
    assert "\n" not in str(error.value)
