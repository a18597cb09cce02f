"""Configs and weights of latent attention, as far as they go without PyTorch: what
fits, and why the rest does not.
"""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from cases import refused
from flax import nnx

import flax_mha
from flax_mha import convert
from flax_mha.rope import RoPE, YaRN

N = 4
D = 24
C = 10
R = 6
CONFIG = {
    "model_type": "deepseek_v3",
    "num_attention_heads": N,
    "hidden_size": D,
    "kv_lora_rank": C,
    "q_lora_rank": None,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": R,
    "v_head_dim": 5,
}
SHAPES = {
    "q_proj.weight": (N * 13, D),
    "kv_a_proj_with_mqa.weight": (C + R, D),
    "kv_a_layernorm.weight": (C,),
    "kv_b_proj.weight": (N * 12, C),
    "o_proj.weight": (D, N * 5),
}
PREFIX = "model.layers.1.self_attn."


def weights(**changes):
    """Changed entries, without those that are None."""
    rng = np.random.default_rng(0)
    entries = {
        key: rng.standard_normal(shape).astype(np.float32)
        for key, shape in SHAPES.items()
    }
    entries |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in entries.items() if value is not None}


def make_module(**options):
    arguments = convert.describe(CONFIG) | {"kernel_metadata": {}} | options
    return flax_mha.MultiHeadLatentAttention(**arguments, rngs=nnx.Rngs(0))


def assert_described(config, **expected):
    assert convert.describe(config).items() >= expected.items()


@pytest.mark.core
def test_describe_returns_the_published_sizes_of_kimi_k2():
    scaling = {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "hidden_size": 7168,
        "rope_theta": 50_000.0,
        "rope_scaling": scaling,
    }
    yarn = YaRN(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0)
    # Defaults of the model, which its config leaves out.
    assert_described(
        config,
        num_heads=64,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=RoPE(50_000.0, interleaved=True, scaling=yarn),
    )


@pytest.mark.core
def test_a_latent_layer_always_rotates_qk_rope_head_dim_features():
    ling = CONFIG | {"model_type": "bailing_hybrid", "num_hidden_layers": 6}
    expected = convert.describe(ling, 5)
    parameters = {"partial_rotary_factor": 0.5, "rope_theta": 6e6}
    assert convert.describe(ling | {"rope_parameters": parameters}, 5) == expected


def test_the_config_of_glm_5_decides_how_its_indexer_rotates():
    glm = CONFIG | {"model_type": "glm_moe_dsa", "q_lora_rank": 8}
    assert convert.describe(glm)["indexer"].interleaved
    halves = glm | {"indexer_rope_interleave": False}
    assert not convert.describe(halves)["indexer"].interleaved


@pytest.mark.core
def test_weights_are_the_same_after_a_round_trip():
    layers = {f"{PREFIX}{key}": x for key, x in weights().items()}
    of_another_layer = PREFIX.replace("1", "0")
    # Weights of other layers do not count.
    layers[f"{of_another_layer}x"] = np.ones(2)

    module = convert.from_hf(CONFIG, layers, 1)
    params = convert.from_torch(layers, N, prefix=PREFIX)

    of_module = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, of_module, params)
    expected = {key: x.tobytes() for key, x in weights().items()}
    for given in (module, params):
        back = convert.to_torch(given, "hf_deepseek")
        assert {key: x.tobytes() for key, x in back.items()} == expected


# Weights that do not fit --------------------------------------------------------------

# A gate for each feature of a value, and one for each head.
GATE = np.ones((N * 5, D), np.float32)
GATE_OF_HEADS = np.ones((N, D), np.float32)


def does_not_fit(message, state_dict, **options):
    """The error, in one or several lines, leaves the module as it was."""
    module = make_module(**options)
    before = nnx.to_pure_dict(nnx.state(module))
    with pytest.raises(ValueError, match=message):
        convert.load_torch(module, state_dict)
    after = nnx.to_pure_dict(nnx.state(module))
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_weights_must_be_those_of_one_latent_layer():
    message = (
        "must contain q_proj, or q_a_proj, q_a_layernorm and q_b_proj, but got none"
    )
    does_not_fit(message, weights(q_proj__weight=None))
    both = weights(q_a_proj__weight=np.ones((3, D), np.float32))
    does_not_fit("but got q_a_proj, q_proj", both)
    message = "weights of a latent .* layer, but also has indexer.wk.weight"
    does_not_fit(message, weights(indexer__wk__weight=np.ones(3)))


def test_weights_must_have_fitting_shapes_and_dtypes():
    another_rank = np.ones((N * 12, C + 1), np.float32)
    message = r"kv_b_proj/kernel must have shape \(10, 4"
    does_not_fit(message, weights(kv_b_proj__weight=another_rank))
    int8 = np.ones((N * 12, C), np.int8)
    message = "kv_b_proj.weight must be floating point"
    does_not_fit(message, weights(kv_b_proj__weight=int8))
    message = "num_heads must divide the 52 features of q_proj/kernel, but got 3"
    does_not_fit(message, weights(), num_heads=3)
    message = r"kv_b_proj.kernel must have shape \(10, 4, 13\), but got \(10, 4, 12\)"
    does_not_fit(message, weights(), v_head_dim=6)


def test_options_of_the_module_must_be_those_of_the_weights():
    """test_convert_load.py has options that other modules have, too."""
    message = "q_a_proj.kernel is missing from state_dict; .* q_lora_rank=None"
    does_not_fit(message, weights(), q_lora_rank=8)
    message = "o_proj.bias is missing from state_dict; create the .* use_bias=False"
    does_not_fit(message, weights(), use_bias=True)
    message = "rope is None: models with latents use it; pass check_options=False"
    does_not_fit(message, weights(), rope=None)


def test_the_gate_must_be_of_one_kind_and_in_the_module():
    message = "gate.kernel is missing from the module; create it with gate=True"
    does_not_fit(message, weights(gate_proj__weight=GATE))
    message = r'gate.kernel is missing from the module; .* gate=Gate\("head"\)'
    does_not_fit(message, weights(g_proj__weight=GATE_OF_HEADS))
    # Checkpoints name either kind of gate differently.
    two = weights(g_proj__weight=GATE_OF_HEADS, gate_proj__weight=GATE)
    does_not_fit("of one gate, but got g_proj.weight and gate_proj", two)


# Numbers without their scales are not the weights.
FLOAT8 = {
    key: x.astype(ml_dtypes.float8_e4m3fn) if x.ndim == 2 else x
    for key, x in weights().items()
}
SCALE_OF_A_BLOCK = np.ones((1, 1), np.float32)
QUANTIZED = {
    "FP8 with scales of blocks": FLOAT8
    | {"kv_b_proj.weight_scale_inv": SCALE_OF_A_BLOCK},
    "FP8 without scales": FLOAT8,
    "packed": {
        key.replace(".weight", ".weight_packed"): x for key, x in weights().items()
    },
}


@pytest.mark.core
@pytest.mark.parametrize("state_dict", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_weights_must_be_dequantized_first(state_dict):
    layers = {f"{PREFIX}{key}": x for key, x in state_dict.items()}
    for load in (
        functools.partial(convert.load_torch, make_module(), state_dict),
        functools.partial(convert.load_torch, make_module(), layers, PREFIX),
        functools.partial(convert.from_torch, layers, N, prefix=PREFIX),
        functools.partial(convert.from_hf, CONFIG, layers, 1),
    ):
        with pytest.raises(
            ValueError,
            match=r"must (contain|be) floating point.*dequantize the model first",
        ):
            load()


@pytest.mark.parametrize("name", weights())
def test_weights_without_axes_are_refused(name):
    state_dict = weights() | {name: np.ones((), np.float32)}
    refused("must", convert.load_torch, make_module(), state_dict)


OTHER = flax_mha.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))


def test_weights_load_only_into_their_kind_of_attention():
    message = "module must be a MultiHeadLatentAttention for layout 'hf_deepseek'"
    refused(message, convert.load_torch, OTHER, weights())
    square = {f"{name}_proj.weight": np.ones((D, D), np.float32) for name in "qkvo"}
    message = "module must be a MultiHeadAttention for layout 'hf_llama'"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(make_module(num_heads=N), square)


def test_latent_attention_has_no_norm_with_an_offset():
    message = r"qk_norm_offset must be None for latent attention, but got 1\.0"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(make_module(), weights(), qk_norm_offset=1.0)


def test_only_latent_attention_has_the_layout_of_deepseek():
    message = "layout must be 'hf_deepseek' if and only if the attention is latent"
    refused(message, convert.to_torch, make_module(), "hf_llama")
    refused(message, convert.to_torch, OTHER, "hf_deepseek")


def test_a_prefix_must_select_one_layer():
    layers = {f"{PREFIX}{key}": x for key, x in weights().items()}
    message = r"prefix must select one attention layer(.|\n)*self_attn"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(make_module(), layers)


def test_parameters_must_be_those_of_one_layer():
    params = nnx.to_pure_dict(nnx.state(make_module(), nnx.Param))
    params["other"] = np.ones(3)
    message = r"the parameters of one attention layer; missing \[\], extra \['other'\]"
    with pytest.raises(ValueError, match=message):
        convert.to_torch(params, "hf_deepseek")
