"""`load_torch` and `describe` as far as they go without PyTorch; test_torch_families.py
compares outputs.
"""

import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import Gate, Norm, convert, linen
from flax_mha._src.convert.families import FAMILIES
from flax_mha._src.modules.attention_fn import core_of
from flax_mha.rope import RoPE, YaRN

N = 4
K = 2
H = 8
D = 24
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "hidden_size": D,
    "head_dim": H,
}
LLAMA |= {"rope_theta": 10000.0}
DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": N, "hidden_size": D}


def state_dict(dtype=np.float32, norms=False, sinks=False, prefix="", **changes):
    """Of a layer of Llama; changed entries, without those that are None."""
    rng = np.random.default_rng(0)
    shapes = {
        "q_proj.weight": (N * H, D),
        "k_proj.weight": (K * H, D),
        "v_proj.weight": (K * H, D),
    }
    shapes |= {"o_proj.weight": (D, N * H)}
    shapes |= {"q_norm.weight": (H,), "k_norm.weight": (H,)} if norms else {}
    shapes |= {"sinks": (N,)} if sinks else {}
    entries = {
        key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()
    }
    entries |= {key.replace("__", "."): value for key, value in changes.items()}
    return {prefix + key: value for key, value in entries.items() if value is not None}


def make_module(**options):
    arguments = {"num_kv_heads": K, "use_bias": False, "rope": RoPE()} | options
    return flax_mha.MultiHeadAttention(
        N, D, N * H, decode=False, rngs=nnx.Rngs(0), **arguments
    )


def params_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


MODELS = state_dict(prefix="model.layers.0.self_attn.") | state_dict(
    prefix="model.layers.1.self_attn."
)
MODELS |= {
    "model.embed_tokens.weight": np.ones((3, D)),
    "model.layers.0.mlp.up_proj.weight": np.ones((3, D)),
}
BIASES = {
    f"{name}_proj__bias": np.ones(size)
    for name, size in zip("qkvo", (N * H, K * H, K * H, D), strict=True)
}
BYTES = np.ones((N * H, D), np.uint8)
FLOAT8 = np.ones((N * H, D), ml_dtypes.float8_e4m3fn)
NORMED = state_dict(norms=True)
OF_ALL_HEADS = state_dict(q_norm__weight=np.ones(N * H), k_norm__weight=np.ones(K * H))
GEMMA_2_LAYER = state_dict(prefix="layers.3.self_attn.") | {
    "layers.3.pre_feedforward_layernorm.weight": np.ones(D)
}
RMS_NORM = {"normalize_qk": Norm("rms")}
NO_OFFSET = {"qk_norm_offset": 0.0}
OVER_ALL_HEADS = r'Norm\("rms", scale="heads", over="all_heads"\)'
OF_EACH_HEAD = Norm("rms", scale="heads")
AFTER_ROPE = Norm("rms", scale="heads", over="all_heads", after_rope=True)
OUT_NORMED = state_dict(attn_sub_norm__weight=np.ones(N * H))
HEAD_GATED = state_dict(g_proj__weight=np.ones((N, D)))
GATED = state_dict(q_proj__weight=np.ones((42, D)), o_proj__weight=np.ones((D, 21)))
GATED_BIASES = state_dict(
    q_proj__weight=np.ones((2 * N * H, D)),
    **BIASES | {"q_proj__bias": np.ones(2 * N * H)},
)
# Message, entries, and, if there are any, options of the module and arguments of
# `load_torch`.
WRONG = [
    (
        "state_dict must map names to tensors, but got a MultiHeadAttention",
        make_module(),
    ),
    ("'model' is a dict; pass state_dict\\['model'\\]", {"model": {}, "step": 3}),
    ("keys of type str, but got 0", {0: 1}),
    (
        "prefix must select one .* got ''.*\n  'model.layers.0.self_attn.', ... "
        "'model.layers.1.self_attn.' ",
        MODELS,
    ),
    (
        "found, as prefixes:\n  'model.layers.1.self_attn.'$",
        MODELS,
        {},
        {"prefix": "model.layers.1."},
    ),
    (
        "no key starts with 'model.layers.7.'.*\n  'model",
        MODELS,
        {},
        {"prefix": "model.layers.7."},
    ),
    ("prefix must be a str .* got 3", MODELS, {}, {"prefix": 3}),
    (
        "The closest is hf_llama: missing \\['v_proj.weight'\\], extra \\[\\]",
        state_dict(v_proj__weight=None),
    ),
    (
        "extra .*lora_A.*Merge adapters first",
        state_dict(q_proj__lora_A__weight=np.ones(1)),
    ),
    (
        "some are quantized \\(\\['q_proj.SCB'\\]\\); dequantize",
        state_dict(q_proj__SCB=np.ones(3)),
    ),
    (
        "some are quantized .*qweight",
        {"q_proj.qweight": 1, "q_proj.qzeros": 1, "o_proj.qweight": 2},
    ),
    (
        "q_proj.weight must be floating point, but got float8_e4m3fn; dequantize",
        state_dict(q_proj__weight=FLOAT8),
    ),
    (
        "a.0.q_proj.weight .* got uint8",
        state_dict(prefix="a.0.", q_proj__weight=BYTES),
        {},
        {"prefix": "a.0"},
    ),
    ("q_proj.weight must be", state_dict(q_proj__weight="weights")),
    (
        "\n  key.kernel must have shape \\(23, 2, 8\\), but got \\(24, 2, 8",
        state_dict(),
        {"in_kv_features": 23},
    ),
    (
        "\n  query.bias is missing from state_dict; .* use_bias=False\n",
        state_dict(),
        {"use_bias": True},
    ),
    (
        "\n  query.bias is missing from the module; create it with use_bias=True\n",
        state_dict(**BIASES),
    ),
    (
        "\n  value.bias is missing from the module; .* share_kv=False\n",
        state_dict(**BIASES),
        {"share_kv": True},
    ),
    (
        "\n  value.kernel is missing from the module; .* share_kv=False$",
        state_dict(),
        {"share_kv": True},
    ),
    (
        "\n  gate.bias is missing .* module; create it with use_bias=True$",
        GATED_BIASES,
        {"gate": True},
    ),
    (
        r'query_ln.scale is missing from the module; .*normalize_qk=Norm\("rms"\)',
        NORMED,
    ),
    ("query_ln.scale is missing from state_dict", state_dict(), RMS_NORM),
    (
        r'must be Norm\("rms"\): these norms do not subtract',
        NORMED,
        {"normalize_qk": True},
        NO_OFFSET,
    ),
    ("qk_norm_offset .* 1.0 for Gemma 3", NORMED, RMS_NORM),
    (
        rf"scale must have shape .8,., but got .4, 8.; use normalize_qk={OVER_ALL_HEADS}",
        OF_ALL_HEADS,
        RMS_NORM,
    ),
    (
        rf"normalize_qk must be {OVER_ALL_HEADS}: these norms span",
        OF_ALL_HEADS,
        {"normalize_qk": OF_EACH_HEAD},
    ),
    (
        rf"normalize_qk must be {OVER_ALL_HEADS}: these norms span",
        OF_ALL_HEADS,
        {"normalize_qk": AFTER_ROPE},
    ),
    (
        rf"out_norm.scale is missing from the module; create it with out_norm={OVER_ALL_HEADS}",
        OUT_NORMED,
    ),
    (
        r'gate.kernel is missing from the module; create it with gate=Gate\("head"\)',
        HEAD_GATED,
    ),
    (
        "key_ln.scale is missing from state_dict",
        state_dict(norms=True, k_norm__weight=None),
        RMS_NORM,
        NO_OFFSET,
    ),
    (
        "sinks is missing from the module; create it with sinks=True",
        state_dict(sinks=True),
    ),
    (
        "sinks is missing from state_dict; create the module with sinks=False",
        state_dict(),
        {"sinks": True},
    ),
    (
        "gate.kernel .* the module; create it with gate=True$",
        state_dict(q_proj__weight=np.ones((2 * N * H, D))),
    ),
    (
        "out_norm.scale is missing from state_dict; .* out_norm=None",
        state_dict(),
        {"out_norm": Norm("rms")},
    ),
    (
        "gate.kernel is missing from state_dict; create the .* gate=False$",
        state_dict(),
        {"gate": True},
    ),
    (
        "42 features of q_proj.weight into query and gate heads of equal size, but "
        "got 4 and 2",
        GATED,
    ),
    (
        "rope is None: Llama.* use it; pass rope=RoPE.from_config.*convert.describe",
        state_dict(),
        {"rope": None},
    ),
    (
        "logits_soft_cap is None: Gemma 2",
        GEMMA_2_LAYER,
        {},
        {"prefix": "layers.3.self_attn."},
    ),
    (
        "query.kernel must have .* float32, but got complex64",
        state_dict(q_proj__weight=BYTES.astype(np.complex64)),
    ),
    (
        "out.kernel must fit in float16",
        state_dict(o_proj__weight=1e6 * BYTES.T),
        {"param_dtype": jnp.float16},
    ),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[0])
def test_refuses_before_anything_changes(row):
    message, entries, options, arguments = (*row, {}, {})[:4]
    module = make_module(**options)
    before = params_of(module)
    with pytest.raises(ValueError, match=f"(?s){message}") as error:
        convert.load_torch(module, entries, **arguments)
    assert len(str(error.value).splitlines()) <= 10
    assert max(map(len, str(error.value).splitlines())) <= 500
    jax.tree.map(np.testing.assert_array_equal, params_of(module), before)


@pytest.mark.core
def test_an_error_about_a_large_model_is_short():
    names = [
        f"{part}.{i}.attn.{key}"
        for part in "abcdefghijkl"
        for i in range(100)
        for key in state_dict()
    ]
    with pytest.raises(
        ValueError, match=r"'a.0.attn.', ... 'a.99.attn.' \(100 layers\)"
    ) as error:
        convert.from_torch(dict.fromkeys(names, np.ones((D, D))), N, K)
    assert len(str(error.value).splitlines()) <= 10
    assert len(str(error.value)) < 1000


@pytest.mark.core
@pytest.mark.parametrize(
    "options", [{}, RMS_NORM, {"sinks": True}, {"rope": None}], ids=str
)
def test_loads_the_parameters_that_from_torch_makes(options):
    entries = state_dict(norms="normalize_qk" in options, sinks="sinks" in options)
    module = make_module(**options)
    convert.load_torch(
        module, entries, qk_norm_offset=0.0, check_options="rope" not in options
    )
    expected = convert.from_torch(entries, N, K)
    got = params_of(module)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_linen_takes_the_same_parameters_and_options():
    described = convert.describe(
        LLAMA | {"model_type": "gpt_oss", "attention_bias": False}
    )
    options = {
        key: value
        for key, value in described.items()
        if key not in ("in_features", "kernel_metadata")
    }
    entries = state_dict(sinks=True)
    layer = linen.MultiHeadDotProductAttention(**options)
    x = jnp.linspace(-1, 1, 5 * D).reshape(1, 5, D)
    params = convert.from_torch(entries, N, K)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, layer.init(jax.random.key(0), x)["params"]
    )
    module = flax_mha.MultiHeadAttention(
        **options, in_features=D, decode=False, rngs=nnx.Rngs(0)
    )
    convert.load_torch(module, entries)
    np.testing.assert_array_equal(
        layer.apply({"params": params}, x, is_causal=True), module(x, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_and_shardings_of_the_module_stay(dtype):
    module = make_module(param_dtype=dtype)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "model", None))
    module.query.kernel.set_value(
        jax.device_put(module.query.kernel.get_value(), sharding)
    )
    kinds = jax.tree.map(
        lambda leaf: (leaf.dtype, leaf.sharding), nnx.state(module, nnx.Param)
    )
    entries = state_dict(ml_dtypes.bfloat16)
    convert.load_torch(module, entries)
    assert (
        jax.tree.map(
            lambda leaf: (leaf.dtype, leaf.sharding), nnx.state(module, nnx.Param)
        )
        == kinds
    )
    assert module.query.kernel.get_value().sharding == sharding
    np.testing.assert_array_equal(
        module.out.kernel.get_value()[0],
        entries["o_proj.weight"][:, :H].T.astype(dtype),
    )


def test_abstract_modules():
    """Only shapes, and inside jit."""
    module = nnx.eval_shape(make_module)
    convert.load_torch(module, state_dict())
    other = make_module()

    @nnx.jit
    def load(module):
        convert.load_torch(module, state_dict())

    load(other)
    expected = convert.from_torch(state_dict(), N, K)
    for got in (module, other):
        jax.tree.map(np.testing.assert_array_equal, params_of(got), expected)


@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn"])
def test_another_number_of_heads_is_refused_if_a_buffer_shows_it(prefix):
    """Weights do not show it: the same features split into other heads, and load."""
    weights = state_dict(
        prefix=prefix and f"{prefix}.", rotary_emb__inv_freq=np.ones(H // 2, np.float32)
    )
    options = {"num_kv_heads": 2 * K, "use_bias": False, "rope": RoPE()}
    wrong = flax_mha.MultiHeadAttention(2 * N, D, N * H, **options, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match=r"num_heads is 8, and rope rotates 4 .* 4 features, .*inv_freq is for 8",
    ):
        convert.load_torch(wrong, weights, prefix)
    convert.load_torch(wrong, weights, prefix, check_options=False)
    convert.load_torch(make_module(), weights, prefix)
    partial = make_module(rope=RoPE(fraction=0.5))
    with pytest.raises(
        ValueError,
        match=r"rope rotates 4 of each head's 8 features, but rotary_emb.inv_freq is for 8",
    ):
        convert.load_torch(partial, weights, prefix)


def test_another_number_of_heads_is_refused_if_the_table_of_t5_shows_it():
    layer = "decoder.block.1.layer.0.SelfAttention."
    weights = {f"{layer}{name}.weight": np.ones((D, D), np.float32) for name in "qkvo"}
    weights["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (
        np.ones((32, 3), np.float32)
    )
    options = {"use_bias": False, "scale": 1.0, "rngs": nnx.Rngs(0)}
    right, wrong = (flax_mha.MultiHeadAttention(n, D, **options) for n in (3, 4))
    with pytest.raises(
        ValueError,
        match=r"num_heads must be 3 to match decoder\.block\.0\..*, but got 4",
    ):
        convert.load_torch(wrong, weights, layer)
    convert.load_torch(right, weights, layer)


def test_only_modules_of_flax_are_loaded():
    with pytest.raises(
        ValueError, match=r"module must be an nnx.MultiHeadAttention, but got Linear"
    ):
        convert.load_torch(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), state_dict())
    module = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    ones = np.ones((18, 6), np.float32)
    entries = {"in_proj_weight": ones, "in_proj_bias": ones[:, 0]}
    convert.load_torch(
        module, entries | {"out_proj.weight": ones[:6], "out_proj.bias": ones[:6, 0]}
    )
    assert float(module.query.kernel.get_value().sum()) == 36.0


@pytest.mark.core
def test_gemma_norms_are_one_plus_weight():
    """Known from `describe`, or from the argument; Gemma 4, which adds no 1, has the
    same keys.
    """
    entries = state_dict(norms=True, prefix="layers.0.self_attn.")
    beside = entries | {"layers.0.pre_feedforward_layernorm.weight": np.ones(D)}
    described = convert.describe(
        LLAMA | {"model_type": "gemma3_text", "rope_local_base_freq": 1e4}
    )
    module = flax_mha.MultiHeadAttention(**described, decode=False, rngs=nnx.Rngs(0))
    other = make_module(normalize_qk=Norm("rms"))
    with pytest.raises(ValueError, match="qk_norm_offset is None"):
        convert.load_torch(other, beside, "layers.0.self_attn")
    convert.load_torch(module, beside, "layers.0.self_attn")
    convert.load_torch(other, beside, "layers.0.self_attn", qk_norm_offset=1.0)
    weight = entries["layers.0.self_attn.q_norm.weight"]
    for loaded, offset in ((module, None), (other, 1.0)):
        np.testing.assert_array_equal(loaded.query_ln.scale.get_value(), 1 + weight)
        back = convert.to_torch(
            nnx.state(loaded, nnx.Param), "hf_llama", qk_norm_offset=offset
        )
        np.testing.assert_allclose(back["q_norm.weight"], weight, rtol=0, atol=2.0**-23)


@pytest.mark.core
def test_offsets_of_norms_are_added_in_float32():
    """In bfloat16, 1 + 2^-9 would be 1."""
    entries = state_dict(
        ml_dtypes.bfloat16,
        norms=True,
        q_norm__weight=np.full(H, 2.0**-9, ml_dtypes.bfloat16),
    )
    params = convert.from_torch(entries, N, K, qk_norm_offset=1.0)
    np.testing.assert_array_equal(
        params["query_ln"]["scale"], np.full(H, 1 + 2.0**-9, np.float32)
    )


# Configs ------------------------------------------------------------------------------

T5 = {"model_type": "t5", "d_model": 512, "d_kv": 64, "num_heads": 6}
QWEN_2 = LLAMA | {
    "model_type": "qwen2",
    "sliding_window": 16,
    "use_sliding_window": True,
    "max_window_layers": 2,
}
OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 128,
    "num_attention_heads": 8,
    "rope_scaling": None,
}
OSS_ROPE = RoPE(
    150_000.0, scaling=YaRN(32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
)
GEMMA_3 = {"model_type": "gemma3_text", "hidden_size": 2560}
ZAMBA = {
    "model_type": "zamba",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GROUPED = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def like_llama(model_type, **config):
    return LLAMA | {"model_type": model_type} | config


GEMMA_2 = like_llama("gemma2", sliding_window=16)
FULL = ["full_attention"] * 3
NO_WINDOW = {"local_window_size": None}
WINDOW = {"local_window_size": (15, None)}
LAST_128 = {"local_window_size": (127, None)}
QUARTER = {"rope": RoPE(fraction=0.25)}
# Config, what is expected of it, and a layer that is not the first; test_hf_configs.py
# has the published configs.
DESCRIBED = [
    (
        LLAMA,
        {
            "num_heads": 4,
            "in_features": 24,
            "qkv_features": 32,
            "num_kv_heads": 2,
            "use_bias": False,
        },
    ),
    (LLAMA | {"attention_bias": True}, {"use_bias": True, "rope": RoPE()}),
    (
        LLAMA | {"num_key_value_heads": None, "head_dim": None},
        {"num_kv_heads": 4, "qkv_features": 24},
    ),
    (QWEN_2, NO_WINDOW | {"use_bias": True}, 1),
    (QWEN_2, WINDOW, 2),
    (
        QWEN_2
        | {"use_sliding_window": False, "sliding_window": None, "layer_types": FULL},
        NO_WINDOW,
        2,
    ),
    (GROUPED | {"model_type": "qwen3"}, RMS_NORM | {"qkv_features": 512}),
    (like_llama("seed_oss", head_dim=None), {"qkv_features": 24}),
    (GEMMA_2, WINDOW | {"logits_soft_cap": 50.0, "scale": 1 / 16, "sinks": False}),
    (OSS, {"rope": OSS_ROPE}),
    (GEMMA_2 | {"attn_logit_softcapping": None}, {"logits_soft_cap": None}),
    (
        like_llama("mistral", num_key_value_heads=None),
        {"num_kv_heads": LLAMA["num_attention_heads"]},
    ),
    (
        GROUPED | {"model_type": "qwen3_next"},
        RMS_NORM | QUARTER | {"gate": True, "qkv_features": 1024},
        3,
    ),
    (like_llama("gpt_oss"), LAST_128 | {"sinks": True, "use_bias": True}),
    (LLAMA | {"partial_rotary_factor": 0.5, "clip_qkv": 1.0}, {"rope": RoPE()}),
    (like_llama("olmo", attention_bias=True), {"use_bias": True}),
    (GEMMA_3 | {"attn_logit_softcapping": 50.0}, RMS_NORM | {"logits_soft_cap": None}),
    (like_llama("smollm3"), {"rope": RoPE(1e4)}, 2),
    (like_llama("smollm3"), {"rope": None}, 3),
    (
        like_llama("cohere2"),
        {"rope": RoPE(interleaved=True), "local_window_size": (4095, None)},
        2,
    ),
    (like_llama("cohere2"), NO_WINDOW | {"rope": None}, 3),
    (like_llama("exaone4", sliding_window=None), {"rope": RoPE()}, 3),
    (
        like_llama("granite_swa", layer_rope_theta=[0, 5.0]),
        LAST_128 | {"rope": RoPE(5), "scale": 1, "sinks": True},
        1,
    ),
    (ZAMBA, {"in_features": 16}, 2),
    (ZAMBA | {"attn_layer_period": 3, "attn_layer_offset": 1}, {"in_features": 16}, 4),
    (like_llama("jamba"), {"rope": None}, 4),
    (
        like_llama("nemotron_h", attention_bias=True, layers_block_type=["attention"]),
        {"use_bias": False},
    ),
    (
        {"model_type": "kolibri1", "hidden_size": 64, "num_attention_heads": 8},
        {"num_kv_heads": 4},
    ),
    (
        {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "scale_attn_weights": False},
        {"scale": 1.0},
    ),
    (
        like_llama("mimo_v2_flash"),
        {"process_heads": convert.ScaleValues(0.707), "value_dim": 128},
    ),
    (like_llama("laguna", gating="per-element"), {"gate": Gate("feature", "softplus")}),
    (like_llama("lfm3"), {"gate": Gate("head")}, 2),
    (like_llama("lfm3", use_attention_gate=False), {"gate": False}, 2),
    (like_llama("lfm3", use_attention_gate=np.False_), {"gate": False}, 2),
]


@pytest.mark.core
def test_the_table_in_the_documentation_fits_the_code():
    """tests/hf_families.py writes it."""
    root = Path(__file__).parent.parent
    rows = re.findall(
        r"^\| `.+` \| `(.+)` \| (.+) \|$",
        (root / "tests/hf_families.md").read_text(),
        re.MULTILINE,
    )
    for name, rest in rows:
        assert rest == FAMILIES[name].refused or float(rest.split()[-1]) < 5e-5
    # BLT, too, whose four parts are described.
    described = sum(rest[-1].isdigit() for _, rest in rows)
    for page in ("CHANGELOG.md", "README.md"):
        assert re.search(
            rf"\b{described} (decoder families|families of decoders)",
            (root / page).read_text(),
        )


@pytest.mark.core
@pytest.mark.parametrize("row", DESCRIBED)
def test_describe(row):
    config, expected, layer = (*row, 0)[:3]
    got = convert.describe(config, layer)
    assert {key: got[key] for key in expected} == expected
    assert isinstance(
        nnx.eval_shape(
            lambda: flax_mha.MultiHeadAttention(**got, rngs=nnx.Rngs(0))
        ).out,
        nnx.Module,
    )


def test_descriptions_are_compared_and_pickled():
    """Also those with functions of heads and gates; the same config describes the same
    layer.
    """
    for config, _, *layer in DESCRIBED:
        described = convert.describe(config, *layer)
        assert described == convert.describe(config, *layer)
        again = pickle.loads(
            pickle.dumps(
                {name: x for name, x in described.items() if name != "attention_fn"}
            )
        )
        assert again.items() <= described.items()


HEADS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@pytest.mark.core
@pytest.mark.parametrize("dtype", HEADS)
def test_process_heads_keep_dtypes_and_nan(dtype):
    query, key, value = (
        jnp.array([[[-9.0, 0.5, jnp.nan, jnp.inf]]], HEADS[dtype]) * sign
        for sign in (1, -1, 1)
    )
    for limit in (8, 8.0, np.float64(8)):
        clipped = convert.ClipHeads(limit)(query, key, value)
        for got, sign in zip(clipped, (1, -1, 1), strict=True):
            assert got.dtype == dtype
            np.testing.assert_array_equal(
                np.float32(got[0, 0]), np.array([-8, 0.5, np.nan, 8]) * sign
            )
    same_query, same_key, scaled = convert.ScaleValues(np.float64(0.25))(
        query, key, value
    )
    assert same_query is query
    assert same_key is key
    assert scaled.dtype == dtype
    np.testing.assert_array_equal(
        np.float32(scaled[0, 0]), np.array([-2.25, 0.125, np.nan, np.inf])
    )


@pytest.mark.core
@pytest.mark.parametrize(
    "number",
    [0, -1.0, np.nan, np.inf, 1e31, 10**400, True, None, "8", [8.0], 1j],
    ids=str,
)
def test_process_heads_need_a_positive_number(number):
    with pytest.raises(
        ValueError, match=r"limit must be a finite number > 0, at most 1e\+30, but got"
    ):
        convert.ClipHeads(number)
    with pytest.raises(
        ValueError, match=r"factor must be a finite number > 0, at most 1e\+30, but got"
    ):
        convert.ScaleValues(number)


class CountedConfig(dict):
    """A config that counts how often all of its values are read."""

    reads = 0

    def items(self):
        self.reads += 1
        return super().items()


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["llama", "gemma4_text", "whisper"])
def test_a_config_is_read_once(model_type):
    weights = state_dict(
        norms=model_type == "gemma4_text", prefix="model.layers.0.self_attn."
    )
    if model_type == "whisper":
        weights = whisper_layer("encoder")
    config = CountedConfig(
        WHISPER if model_type == "whisper" else like_llama(model_type)
    )
    convert.from_hf(config, weights)
    assert config.reads == 1
    if model_type != "whisper":  # whose two parts differ
        convert.describe(config)
        assert config.reads == 2
        RoPE.from_config(config, "sliding_attention")
        assert config.reads == 3


def whisper_layer(part):
    """The weights of the self-attention of a layer, by their names in Whisper."""
    layer = f"model.{part}.layers.0.self_attn."
    shapes = {f"{name}_proj.weight": (D, D) for name in ("q", "k", "v", "out")}
    shapes |= {f"{name}_proj.bias": (D,) for name in ("q", "v", "out")}
    return {layer + key: np.ones(shape, np.float32) for key, shape in shapes.items()}


@pytest.mark.core
@pytest.mark.parametrize(("part", "heads"), [("encoder", 2), ("decoder", 4)])
def test_the_two_parts_of_a_model_have_their_own_number_of_heads(part, heads):
    both = whisper_layer("encoder") | whisper_layer("decoder")
    for weights, prefix in ((whisper_layer(part), ""), (both, f"model.{part}.")):
        module = convert.from_hf(WHISPER, weights, prefix=prefix)
        assert module.num_heads == heads
        is_causal = core_of(module.attention_fn).preset.get("is_causal", False)
        assert is_causal == (part == "decoder")


WHISPER = {
    "model_type": "whisper",
    "d_model": D,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
}
REFUSED = [
    (object(), "config must be a dict, but got object; use config.to_dict"),
    ({}, "model_type must be one of those in docs/families.md, but got None"),
    (
        DEEPSEEK | {"model_type": "longcat_flash", "num_layers": 1},
        "layer must be .* < num_hidden_layers .2., but",
        2,
    ),
    (
        DEEPSEEK | {"num_key_value_heads": 2},
        "num_key_value_heads in config must equal .* = 4, but got 2",
    ),
    (
        DEEPSEEK | {"qk_head_dim": 24},
        r"equal qk_nope_head_dim \+ qk_rope_head_dim = 192, but got 24",
    ),
    (DEEPSEEK | {"kv_lora_rank": 0}, "kv_lora_rank must be an integer >= 1, but got 0"),
    (
        DEEPSEEK | {"rope_scaling": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor .* 64 .* of 192",
    ),
    (
        DEEPSEEK | {"rope_scaling": {"llama_4_scaling_beta": 0.1}},
        "must not set llama_4_scaling_beta=0.1",
    ),
    (like_llama("qwen3_next"), "layer 0 of qwen3_next has type 'linear_attention'"),
    (
        {"model_type": "jetmoe"},
        "model_type 'jetmoe' is not supported: it routes queries and outputs through "
        "experts",
    ),
    ({"model_type": "blt"}, 'pass the config of one, such as config."global_config".'),
    (
        like_llama("blt_local_decoder"),
        "must set sliding_window to the local_attention_window_len",
    ),
    (
        like_llama("laguna", gating=False),
        "gating must be True, 'per-head' or 'per-element', but got False",
    ),
    (
        like_llama("laguna", num_attention_heads_per_layer=[4]),
        "must be a list with an entry for layer 3",
        3,
    ),
    (
        like_llama("laguna", num_attention_heads_per_layer=[3]),
        "must contain multiples of num_key_value_heads .2., but",
    ),
    (
        like_llama("mimo_v2_flash", v_head_dim=-1),
        "v_head_dim must be an integer >= 1, but got -1",
    ),
    (
        like_llama("mimo_v2_flash", attention_value_scale=np.nan),
        "attention_value_scale must be .*, but got nan",
    ),
    (
        like_llama("lfm3", use_attention_gate="head"),
        "use_attention_gate must be True or False, but got 'head'",
    ),
    (
        like_llama("hrm_text", num_layers_per_stack=2),
        "layer must be .* < num_layers_per_stack .2., but got 2",
        2,
    ),
    ({"model_type": "llama"}, "config must set num_attention_heads or .* but got None"),
    (
        LLAMA | {"num_hidden_layers": 2},
        "layer must be an integer >= 0 and < num_hidden_layers .2., but got 2",
        2,
    ),
    (LLAMA, "layer must be .* got -1", -1),
    (LLAMA, "layer must be .* got 1.0", 1.0),
    (
        {"model_type": "clip", "text_config": {}, "vision_config": {}},
        r'pass config\["text_config"\] or',
    ),
    (
        GEMMA_2 | {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True in config is not supported",
    ),
    (
        GEMMA_2 | {"layer_types": ["chunked_attention"]},
        "but layer 0 of gemma2 has type 'chunked_",
    ),
    (
        T5 | {"model_type": "bert", "position_embedding_type": "relative_key"},
        "'relative_key'.* as bias",
    ),
    (WHISPER, "must be equal"),
    (
        like_llama("smollm3", no_rope_layers=[1]),
        "no_rope_layers must be a list with .* layer 1",
        1,
    ),
    (like_llama("jamba"), "layer 0 of jamba has type 'no attention'"),
    (like_llama("zamba"), "layer 0 of zamba has type 'linear_attention'"),
    (like_llama("zamba2"), "config must contain layer_types or layers_block_type"),
    (
        like_llama("stablelm", qk_layernorm=True),
        "norms have separate weights for each head",
    ),
    (
        like_llama("olmo", clip_qkv=0),
        r"clip_qkv must be a number in \(0, 1e\+30\], but got 0",
    ),
    (
        like_llama("dbrx", attn_config={"clip_qkv": 1e31}),
        r"clip_qkv must be a number in \(0, 1e\+30\], but got 1e\+31",
    ),
    (
        like_llama("mimo_v2_flash", attention_value_scale=1e31),
        "attention_value_scale must be a number in",
    ),
    (
        like_llama("big_bird"),
        "attention_type='block_sparse' in config is not supported: .* 'original_full'",
    ),
    (like_llama("gpt_bigcode", multi_query=False), "multi_query=True, but got False"),
    (like_llama("mpt", attn_config={"alibi": False}), "alibi=True, but got False"),
    (like_llama("falcon", alibi=True), "alibi=True in config is not supported"),
]


# Families whose attention needs more than the options of the module, and what the error
# says of it.
NEED_MORE = {
    "diffllama": "it subtracts two softmaxes, .*; compute them with recipes.differential",
    "doge": "its scores depend on the values",
    "dory": "its norms and gates have squared factors",
    "beam": "its queries grow with their position",
    "qwen4_exp": "its indexer chooses blocks of keys",
    "dots3_note": "its latents have a norm of the rotary key",
}


@pytest.mark.core
@pytest.mark.parametrize("model_type", NEED_MORE)
def test_families_that_need_more_than_the_options_are_refused(model_type):
    config = like_llama(model_type)
    reason = f"(?=.*needs more than the module's options){NEED_MORE[model_type]}"
    message = rf"model_type '{model_type}' is not supported: {reason}"
    with pytest.raises(ValueError, match=message):
        convert.describe(config)
    with pytest.raises(ValueError, match=message):
        convert.from_hf(config, state_dict(prefix="model.layers.0.self_attn."))
    # Parts of a multimodal model, and before anything else that is wrong.
    text_config = {key: value for key, value in config.items() if key != "model_type"}
    with pytest.raises(ValueError, match=message):
        convert.from_hf(
            {"model_type": model_type, "text_config": text_config},
            {},
            prefix="no such prefix",
        )


def test_rope_of_a_family_that_is_refused():
    """The pairs of dots3 are interleaved, and no base is guessed."""
    assert RoPE.from_config(like_llama("dots3_note_text")) == RoPE(interleaved=True)
    for model_type in ("dory", "beam", "dots3_note"):
        with pytest.raises(ValueError, match="config must contain rope_theta"):
            RoPE.from_config({"model_type": model_type})


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[1])
def test_describe_refuses(row):
    config, message, layer = (*row, 0)[:3]
    with pytest.raises(ValueError, match=message):
        convert.describe(config, layer)
