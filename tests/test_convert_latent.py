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
}
CONFIG |= {
    "q_lora_rank": None,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": R,
    "v_head_dim": 5,
}
SHAPES = {
    "q_proj.weight": (N * 13, D),
    "kv_a_proj_with_mqa.weight": (C + R, D),
    "kv_a_layernorm.weight": (C,),
}
SHAPES |= {"kv_b_proj.weight": (N * 12, C), "o_proj.weight": (D, N * 5)}
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


@pytest.mark.core
def test_describe():
    given = {
        "in_features": D,
        "num_heads": N,
        "kv_lora_rank": C,
        "q_lora_rank": None,
        "use_bias": False,
    }
    assert (
        convert.describe(CONFIG).items()
        >= (given | {"rope": RoPE(interleaved=True)}).items()
    )
    of_kimi_k2 = {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "hidden_size": 7168,
        "rope_theta": 50_000.0,
    }
    of_kimi_k2["rope_scaling"] = {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    }
    of_kimi_k2["rope_scaling"] |= {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    sizes = {
        "num_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    rope = RoPE(
        50_000.0,
        interleaved=True,
        scaling=YaRN(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
    )
    assert convert.describe(of_kimi_k2).items() >= (sizes | {"rope": rope}).items()
    linear = CONFIG | {
        "model_type": "kimi_linear",
        "linear_attn_config": {"full_attn_layers": [4, 8]},
    }
    refused(
        "layer 4 of kimi_linear has type 'linear_attention'",
        convert.describe,
        linear,
        4,
    )


@pytest.mark.core
def test_round_trip():
    layers = {f"{PREFIX}{key}": x for key, x in weights().items()} | {
        PREFIX.replace("1", "0") + "x": np.ones(2)
    }
    module = convert.from_hf(CONFIG, layers, 1)
    params = convert.from_torch(layers, N, prefix=PREFIX)
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(module, nnx.Param)),
        params,
    )
    for given in (module, params):
        back = convert.to_torch(given, "hf_deepseek")
        assert {key: array.tobytes() for key, array in back.items()} == {
            k: x.tobytes() for k, x in weights().items()
        }


BIASES = {
    "o_proj__bias": np.ones(D, np.float32),
    "kv_a_proj_with_mqa__bias": np.ones(C + R, np.float32),
}
GATE = np.ones((N * 5, D), np.float32)
REFUSED = [
    (
        weights(q_proj__weight=None),
        {},
        "must contain q_proj, or q_a_proj, q_a_layernorm and q_b_proj, but got none",
    ),
    (
        weights(q_a_proj__weight=np.ones((3, D), np.float32)),
        {},
        "but got q_a_proj, q_proj",
    ),
    (
        weights(indexer__wk__weight=np.ones(3)),
        {},
        "weights of a latent .* layer, but also has indexer.wk.weight",
    ),
    (
        weights(kv_b_proj__weight=np.ones((N * 12, C + 1), np.float32)),
        {},
        r"kv_b_proj/kernel must have shape \(10, 4",
    ),
    (
        weights(kv_b_proj__weight=np.ones((N * 12, C), np.int8)),
        {},
        "kv_b_proj.weight must be floating point",
    ),
    (
        weights(),
        {"num_heads": 3},
        "num_heads must divide the 52 features of q_proj/kernel, but got 3",
    ),
    (
        weights(),
        {"v_head_dim": 6},
        r"kv_b_proj.kernel is \(10, 4, 13\) in the module but \(10, 4, 12\) in state_dict",
    ),
    (
        weights(),
        {"q_lora_rank": 8},
        "q_a_proj.kernel is .* in the module but missing in state_dict; .*q_lora_rank",
    ),
    (
        weights(),
        {"use_bias": True},
        "o_proj.bias is .* but missing in state_dict; create the .* use_bias=False",
    ),
    (
        weights(**BIASES),
        {},
        r"o_proj.bias is missing in the module but \(24,\) in .*; create the .* use_bias=True",
    ),
    (
        weights(sinks=np.ones(N, np.float32)),
        {},
        r"sinks is missing in the module but \(4,\) .*; .* sinks=True",
    ),
    (
        weights(),
        {"sinks": True},
        r"sinks is \(4,\) in the module but missing in state_dict; .* sinks=False",
    ),
    (
        weights(gate_proj__weight=GATE),
        {},
        r"gate.kernel is missing in the module .*; create the module with gate=True",
    ),
    (
        weights(g_proj__weight=GATE[:N]),
        {},
        r'gate.kernel is missing in the module .*; .* gate=Gate\("head"\)',
    ),
    (
        weights(g_proj__weight=GATE[:N], gate_proj__weight=GATE),
        {},
        "of one gate, but got g_proj.weight and gate_proj",
    ),
    (
        weights(),
        {"gate": True},
        "gate.kernel is .* but missing in state_dict; create the module with "
        "gate=False",
    ),
    (
        weights(),
        {"rope": None},
        "rope is None: these models use rope; pass check_options=False",
    ),
]


@pytest.mark.parametrize(("state_dict", "options", "message"), REFUSED)
def test_weights_that_do_not_fit(state_dict, options, message):
    module = make_module(**options)
    before = nnx.to_pure_dict(nnx.state(module))
    with pytest.raises(ValueError, match=message):  # some in several lines
        convert.load_torch(module, state_dict)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module)), before
    )


FLOAT8 = {
    key: x.astype(ml_dtypes.float8_e4m3fn) if x.ndim == 2 else x
    for key, x in weights().items()
}
QUANTIZED = {
    "FP8 with scales of blocks": FLOAT8
    | {"kv_b_proj.weight_scale_inv": np.ones((1, 1), np.float32)},
    "FP8 with scales of rows": FLOAT8
    | {"o_proj.weight_scale": np.ones((D, 1), np.float32)},
    "FP8 without scales": FLOAT8,
    "scales of weights that are no FP8": weights(
        kv_b_proj__weight_scale_inv=np.ones((1, 1), np.float32)
    ),
    "bitsandbytes": weights(q_proj__SCB=np.ones(3)),
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


def test_other_attentions():
    """Weights of one kind of attention do not load into the other."""
    other = flax_mha.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    refused(
        "module must be a MultiHeadLatentAttention for latent weights",
        convert.load_torch,
        other,
        weights(),
    )
    square = {f"{name}_proj.weight": np.ones((D, D), np.float32) for name in "qkvo"}
    with pytest.raises(
        ValueError, match="module must be a MultiHeadAttention for layout 'hf_llama'"
    ):
        convert.load_torch(make_module(num_heads=N), square)
    with pytest.raises(
        ValueError,
        match=r"qk_norm_offset must be None for latent attention, but got 1\.0",
    ):
        convert.load_torch(make_module(), weights(), qk_norm_offset=1.0)
    for params, layout in ((make_module(), "hf_llama"), (other, "hf_deepseek")):
        refused(
            "layout must be 'hf_deepseek' if and only if the attention is latent",
            convert.to_torch,
            params,
            layout,
        )
    with pytest.raises(
        ValueError, match=r"prefix must select one attention layer(.|\n)*self_attn"
    ):
        convert.load_torch(
            make_module(), {f"{PREFIX}{key}": x for key, x in weights().items()}
        )
    params = nnx.to_pure_dict(nnx.state(make_module(), nnx.Param)) | {
        "other": np.ones(3)
    }
    with pytest.raises(
        ValueError,
        match=r"the parameters of one attention layer; missing \[\], extra \['other'\]",
    ):
        convert.to_torch(params, "hf_deepseek")
