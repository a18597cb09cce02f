"""Errors of `flax_mha.rope`, and how it reads Hugging Face configs; test_torch_rope.py
has those of many models.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused

from flax_mha.rope import NTK, Linear, Llama3, LongRoPE, RoPE, YaRN, apply_rope

H = 16
pytestmark = pytest.mark.core
FACTORS = [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 16.5]
THREE, INTERLEAVED = (
    RoPE(sections=(2, 3, 3), section_layout=layout)
    for layout in ("contiguous", "interleaved")
)
XS = jnp.zeros((2, 5, 3, H))
PS = jnp.zeros((2, 5), jnp.int32)
REFUSED = [
    (lambda: apply_rope(XS, PS[:, :4], RoPE()), r"positions must be .* got \(2, 4\)"),
    (lambda: apply_rope(XS, 3, RoPE()), r"positions must be .* got \(\)"),
    (
        lambda: apply_rope(XS, PS[..., None], RoPE()),
        r"positions must be .* got \(2, 5, 1\)",
    ),
    (
        lambda: apply_rope(XS, PS.astype(bool), RoPE()),
        "positions must have an integer dtype, but got bool",
    ),
    (
        lambda: apply_rope(XS, np.arange(5) + 2**32, RoPE()),
        "positions must be in the int32 range, but got 4294967296",
    ),
    (
        lambda: apply_rope(XS, "first", RoPE()),
        "positions must have an integer dtype, but got <U5",
    ),
    (lambda: apply_rope(XS[0, 0], PS[0], RoPE()), "x must have rank 3 or more"),
    (
        lambda: apply_rope(XS.astype(jnp.int32), PS, RoPE()),
        "x must have a floating.* got int32",
    ),
    (lambda: apply_rope("x", PS, RoPE()), "x must be an array, but got str"),
    (lambda: apply_rope(XS, PS, 1e4), r"rope must be a RoPE, but got 10000\.0"),
    (
        lambda: apply_rope(XS[..., :15], PS, RoPE()),
        r"even integer.* 1\.0 \* 15 = 15; .*=14 / 15",
    ),
    (
        lambda: apply_rope(XS, PS, RoPE(fraction=3 / 16)),
        r"even integer.* = 3; .*fraction=",
    ),
    (
        lambda: apply_rope(XS, PS, RoPE(fraction=0.4)),
        r"even integer.* 0\.4 \* 16 = 6\.4; .*=6 / 16",
    ),
    (
        lambda: apply_rope(XS, PS, RoPE(fraction=0.01)),
        r"even integer.* = 0\.16; .*=2 / 16",
    ),
    (
        lambda: apply_rope(XS[..., :1], PS, RoPE()),
        r"even integer.* = 1; use larger heads",
    ),
    (lambda: RoPE(fraction=0), "fraction must be a finite number > 0, but got 0"),
    (lambda: RoPE(fraction=64), r"fraction must be in \(0, 1\], but got 64"),
    (lambda: RoPE("10000"), "base must be a finite number > 0, but got '10000'"),
    (lambda: RoPE(True), "base must be .* got True"),
    (lambda: RoPE(math.inf), "base must be .* got inf"),
    (
        lambda: RoPE(interleaved="yes"),
        "interleaved must be True or False, but got 'yes'",
    ),
    (
        lambda: RoPE(scaling={"factor": 2.0}),
        "scaling must be None, Linear.*from_config",
    ),
    (lambda: Linear(0.5), r"Linear\(factor\) must be .* >= 1, but got 0\.5"),
    (lambda: NTK(0.5), r"NTK\(factor\) must be .* >= 1"),
    (
        lambda: apply_rope(XS[..., :2], PS, RoPE(scaling=NTK(2.0))),
        "NTK needs at least 4 rotated",
    ),
    (lambda: Llama3(0.5, 1, 4, 8192), r"Llama3\(factor\) must be"),
    (lambda: Llama3(8, 0, 4, 8192), r"Llama3\(low_freq_factor\) must be .* > 0"),
    (lambda: Llama3(8, 4, 3.9, 8192), r"Llama3\(high_freq_factor\) must be .* >= 4"),
    (
        lambda: Llama3(8, 1, 4, None),
        r"Llama3\(original_max_position\) must be .* got None",
    ),
    (lambda: YaRN(0.5, 4096), r"YaRN\(factor\) must be"),
    (lambda: YaRN(4, 0), r"YaRN\(original_max_position\) must be"),
    (lambda: YaRN(4, 4096, 1, 32), r"YaRN\(beta_fast\) must be .* >= 32, but got 1"),
    (lambda: YaRN(4, 4096, attention_factor=0), r"YaRN\(attention_factor\) must be"),
    (lambda: YaRN(4, 4096, mscale=-1), r"YaRN\(mscale\) must be"),
    (lambda: YaRN(4, 4096, truncate=0), r"YaRN\(truncate\) must be True or False"),
    (
        lambda: RoPE(1.0, scaling=YaRN(4, 4096)).frequencies(H),
        "base must be greater than 1 with YaRN",
    ),
    (
        lambda: apply_rope(XS, PS, RoPE(scaling=LongRoPE(FACTORS[1:]))),
        "8 for 16 .* but got 7",
    ),
    (
        lambda: LongRoPE([1.0, 0.0]),
        r"each factor in LongRoPE\(factors\) must be .* > 0, but got 0",
    ),
    (lambda: LongRoPE(None), r"LongRoPE\(factors\) must be"),
    (
        lambda: apply_rope(XS, PS, THREE),
        r"\[batch..., length, coordinates\] or .* \(2, 5, 3\) .* got \(2, 5\)",
    ),
    (
        lambda: apply_rope(XS, PS[..., None].repeat(2, -1), THREE),
        r"got \(2, 5, 2\); .* of a text token 3 times",
    ),
    (
        lambda: apply_rope(XS, jnp.zeros((3, 2, 5), jnp.int32), THREE),
        r"positions must be .* got \(3, 2, 5\)",
    ),
    (
        lambda: RoPE(sections=(2, 3)).coordinates(H),
        r"8 for 16 .* \(2, 3\), which sum to 5",
    ),
    (
        lambda: RoPE(sections=(8, 0)),
        r"sections must be None or positive .* got \(8, 0\)",
    ),
    (lambda: RoPE(sections=()), r"sections must be None or positive .* got \(\)"),
    (lambda: RoPE(sections=8), "sections must be None or positive .* got 8"),
    (
        lambda: INTERLEAVED.coordinates(H),
        r"sections must interleave the coordinates across 8 pairs.* got \(2, 3, 3\)",
    ),
    (
        lambda: RoPE(sections=(2, 6), section_layout="axial_strided"),
        "sections must all be equal",
    ),
    (
        lambda: RoPE(sections=(4, 4), section_layout="rows"),
        "section_layout must be one of contig",
    ),
    (
        lambda: RoPE(section_layout="axial"),
        "sections must be given .* 'axial', but got None",
    ),
    (lambda: LongRoPE(FACTORS, 0), r"LongRoPE\(attention_factor\) must be"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused_in_one_line(call, message):
    refused(message, call)


YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
OF_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
}
OF_LAYERS |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
NESTED = {"model_type": "gemma3_text", "rope_parameters": OF_LAYERS}
LONG_SCALING = {
    "rope_type": "longrope",
    "short_factor": FACTORS,
    "long_factor": FACTORS[::-1],
    "short_mscale": 1.25,
}
LONG_SCALING |= {"long_mscale": 1.5, "original_max_position_embeddings": 4096}
LONG = {
    "model_type": "phimoe",
    "max_position_embeddings": 131072,
    "rope_scaling": LONG_SCALING,
}
LOCAL = {"layer_type": "sliding_attention"}
FULL = {"layer_type": "full_attention"}
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def model(model_type, **config):
    return {"model_type": model_type, **config}


def scaled(**scaling):
    return {"rope_theta": 1e4, "rope_scaling": scaling}


# config, the embedding and, for some, arguments; of published configs:
# test_hf_configs.py
CONFIGS = [
    (
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.5,
            }
        },
        RoPE(5e5, 0.5),
    ),
    (NESTED, RoPE(1e6, scaling=Linear(8.0)), FULL),
    (NESTED, RoPE(1e4), LOCAL),
    (
        model("modernbert", global_rope_theta=1.6e5, local_rope_theta=1e4),
        RoPE(1.6e5),
        FULL,
    ),
    (model("qwen3", rope_theta=1e6), RoPE(1e6), LOCAL),
    (model("gpt_neox"), RoPE(fraction=0.25)),
    (model("gptj", n_embd=4096, n_head=16), RoPE(fraction=0.25, interleaved=True)),
    (model("gpt_oss"), RoPE(150_000.0, scaling=YaRN(32.0, 4096, truncate=False))),
    (model("falcon"), RoPE()),
    (model("glm4_moe", rope_theta=1e6), RoPE(1e6, 0.5)),
    (
        model("moonshine", hidden_size=288, decoder_num_attention_heads=8),
        RoPE(fraction=32 / 36, interleaved=True),
    ),
    (model("deepseek_v3", rope_interleave=False), RoPE()),
    (
        scaled(**YARN | {"factor": None}) | {"max_position_embeddings": 8192},
        RoPE(scaling=YaRN(2.0, 4096)),
    ),
    (
        scaled(**LLAMA3) | {"max_position_embeddings": 8192},
        RoPE(scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    ),
    (
        {"rope_theta": 1e4, "partial_rotary_factor": np.float32(0.3), "head_dim": 16},
        RoPE(1e4, fraction=4 / 16),
    ),
    (scaled(type="linear", factor=np.float32(2)), RoPE(1e4, scaling=Linear(2.0))),
    (LONG, RoPE(1e6, scaling=LongRoPE(FACTORS, 1.25)), {"max_length": np.int64(4096)}),
    (LONG, RoPE(1e6, scaling=LongRoPE(FACTORS[::-1], 1.5)), {"max_length": 4097}),
]


@pytest.mark.parametrize("case", CONFIGS)
def test_from_config(case):
    config, want, arguments = (*case, {})[:3]
    assert RoPE.from_config(config, **arguments) == want


PARTIAL = {"rope_theta": 1e4, "head_dim": 64}
HEADS = {"hidden_size": 64, "num_attention_heads": [8, 8]}
TEXT_YARN = scaled(rope_type="yarn", original_max_position_embeddings="4096") | {
    "max_position_embeddings": 8192
}
# config, message and, for some, arguments
REFUSED_CONFIGS = [
    (
        scaled(type="longrope", factor="2", short_factor=[1.0], long_factor=[1.0]),
        "factor must be",
    ),
    (
        TEXT_YARN,
        "original_max_position_embeddings must be a finite number > 0, but got '4096'",
    ),
    (
        PARTIAL | {"rotary_pct": "0.5"},
        r"rotary_pct must be a number in \(0, 1\], but got '0.5'",
    ),
    (scaled(rope_type=["linear"], factor=2.0), "rope_type must be a string"),
    (
        {"rope_theta": 1e4, "rotary_pct": 0.5, "head_dim": "64"},
        "head_dim must be a finite",
    ),
    (
        {"rope_theta": 1e4, "rotary_pct": 0.5, **HEADS},
        "num_attention_heads must be a finite number",
    ),
    (PARTIAL | {"rotary_dim": "4"}, "rotary_dim must be a finite"),
    (LONG, "max_length must be .* got '4k'", {"max_length": "4k"}),
    (None, "config must be a dict, but got NoneType; use config.to_dict"),
    (
        scaled(type="dynamic", factor=2.0),
        "rope_type 'dynamic' is not supported.*cached keys",
    ),
    (scaled(rope_type="mrope"), "rope_type must be one of default.*got 'mrope'"),
    (scaled(rope_type=3), "rope_type must be a string, but got 3"),
    (
        scaled(rope_type="linear", factor=2.0, beta=3),
        "must contain factor, but got beta",
    ),
    (scaled(attention=1), "only the base, but got attention"),
    (scaled(mrope_interleaved=True), "but got mrope_interleaved"),
    (
        scaled(mrope_section="16"),
        "mrope_section must be a list of positive integers, but got '16'",
    ),
    (
        scaled(mrope_section=[22, 22, 20]) | model("ernie4_5_vl_moe_text"),
        "'ernie4_5_vl_moe_text' is not supported",
    ),
    (
        model("gemma4_vision", patch_size=16, rope_theta=1e4),
        "must be one of qwen2_vl, .* with a patch_size",
    ),
    (model("pixtral", patch_size=16), "config must contain head_dim"),
    (
        model("pixtral", patch_size=16) | scaled(rope_type="linear", factor=2.0),
        "rope_type must be default or axial",
    ),
    (scaled(rope_type="linear"), "must contain factor, but got no factor"),
    ({"rope_theta": 1e4, "rope_ratio": 500}, "known keys, but got rope_ratio"),
    (
        {"rope_theta": 1e4, "rope_scaling": "linear"},
        "rope_scaling must be a dict, but got 'linear'",
    ),
    (
        model("bert"),
        "config must contain rope_theta.* has model_type 'bert' and neither key",
    ),
    (model(["llama"]), "model_type must be a string"),
    ({"text_config": "x"}, "text_config must be a dict, but got 'x'"),
    ({"rope_theta": "1e4"}, "rope_theta must be a finite number > 0, but got '1e4'"),
    (scaled(rope_type="linear", factor=0.5), r"Linear\(factor\) must be"),
    (
        PARTIAL | {"partial_rotary_factor": 2.0},
        r"partial_rotary_factor must be a number in \(0, 1\], but got 2.0",
    ),
    (NESTED, "layer_type must be one of .* but got None"),
    (model("gemma3_text"), "layer_type must be one of .* but got None"),
    (
        NESTED,
        "layer_type must be None or one of .* got 'local'",
        {"layer_type": "local"},
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "must contain sliding_attention, but got fu",
        LOCAL,
    ),
    ({"rotary_dim": 64, "rope_theta": 1e4}, "config must contain head_dim"),
    (
        scaled(rope_type="yarn", factor=4.0),
        "must contain original_max_position_embeddings",
    ),
    (
        model("cohere2", rope_theta=1e4),
        "but got full_attention; cohere2 .* rope=None",
        FULL,
    ),
    (
        scaled(rope_type="yarn", original_max_position_embeddings=4096),
        "must contain factor or max_position_embeddings",
    ),
    ({"rope_theta": 1e4, "rope_scaling": {1: 2}}, "but got 1"),
    (
        LONG | {"original_max_position_embeddings": 1},
        "embeddings must be greater than 1",
        {"max_length": 5},
    ),
    (LONG, "max_length must be .* got -5", {"max_length": -5}),
    ({"rope_theta": 10**400}, "rope_theta must be a finite number > 0"),
    (
        LONG,
        "max_length must be the length of the longest sequence.*above 4096 "
        "tokens.*got None",
    ),
]


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_refused_configs(case):
    config, message, arguments = (*case, {})[:3]
    refused(message, RoPE.from_config, config, **arguments)
