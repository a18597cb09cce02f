"""`load_torch` and `describe` as far as they go without PyTorch; test_torch_families.py
compares outputs.
"""

import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import refused
from flax import nnx

import flax_mha
from flax_mha import Gate, Norm, convert, linen
from flax_mha._src.convert.families import FAMILIES
from flax_mha._src.modules.attention_fn import ours
from flax_mha.rope import RoPE

# Query heads, key heads, head size, features.
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
    "rope_theta": 10000.0,
}
DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": N, "hidden_size": D}


def like_llama(model_type, **config):
    return LLAMA | {"model_type": model_type} | config


def state_dict(dtype=np.float32, norms=False, sinks=False, prefix="", **changes):
    """Of a layer of Llama; changed entries, without those that are None."""
    shapes = {
        "q_proj.weight": (N * H, D),
        "k_proj.weight": (K * H, D),
        "v_proj.weight": (K * H, D),
        "o_proj.weight": (D, N * H),
    }
    if norms:
        shapes |= {"q_norm.weight": (H,), "k_norm.weight": (H,)}
    if sinks:
        shapes["sinks"] = (N,)
    rng = np.random.default_rng(0)
    entries = {}
    for key, shape in shapes.items():
        entries[key] = rng.standard_normal(shape).astype(dtype)
    for name, value in changes.items():
        entries[name.replace("__", ".")] = value
    return {prefix + key: value for key, value in entries.items() if value is not None}


def make_module(**options):
    arguments = {"num_kv_heads": K, "use_bias": False, "rope": RoPE()} | options
    return flax_mha.MultiHeadAttention(
        N, D, N * H, decode=False, rngs=nnx.Rngs(0), **arguments
    )


def params_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def assert_equal_trees(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# State dicts that load_torch rejects --------------------------------------------------


class Rejected(NamedTuple):
    """A state dict, the module's options, and other arguments of `load_torch`."""

    entries: Any
    options: dict[str, Any]
    arguments: dict[str, Any]
    message: str


REJECTED = []


def reject(message, entries, options=None, **arguments):
    """Adds a case: `load_torch` rejects these entries with this message."""
    case = Rejected(entries, options or {}, arguments, message)
    REJECTED.append(pytest.param(case, id=message))


# What is no state dict of one layer.
reject(
    "state_dict must map names to tensors, but got a MultiHeadAttention", make_module()
)
reject("'model' is a dict; pass state_dict\\['model'\\]", {"model": {}, "step": 3})
reject("keys of type str, but got 0", {0: 1})

# Prefixes.
FIRST_LAYER = state_dict(prefix="model.layers.0.self_attn.")
SECOND_LAYER = state_dict(prefix="model.layers.1.self_attn.")
MODEL = FIRST_LAYER | SECOND_LAYER
MODEL["model.embed_tokens.weight"] = np.ones((3, D))
MODEL["model.layers.0.mlp.up_proj.weight"] = np.ones((3, D))
reject(
    "prefix must select one .* got ''.*\n  'model.layers.0.self_attn.', ... "
    "'model.layers.1.self_attn.' ",
    MODEL,
)
reject(
    "found, as prefixes:\n  'model.layers.1.self_attn.'$",
    MODEL,
    prefix="model.layers.1.",
)
reject(
    "no key starts with 'model.layers.7.'.*\n  'model", MODEL, prefix="model.layers.7."
)
reject("prefix must be a str .* got 3", MODEL, prefix=3)

# Names of no layout, quantized weights, dtypes.
reject(
    "The closest is hf_llama: missing \\['v_proj.weight'\\], extra \\[\\]",
    state_dict(v_proj__weight=None),
)
reject(
    "extra .*lora_A.*Merge adapters first",
    state_dict(q_proj__lora_A__weight=np.ones(1)),
)
reject(
    "some are quantized \\(\\['q_proj.SCB'\\]\\); dequantize",
    state_dict(q_proj__SCB=np.ones(3)),
)
BYTES = np.ones((N * H, D), np.uint8)
reject(
    "q_proj.weight must be floating point, but got float8_e4m3fn; dequantize",
    state_dict(q_proj__weight=BYTES.astype(ml_dtypes.float8_e4m3fn)),
)
reject(
    "query.kernel must have .* float32, but got complex64",
    state_dict(q_proj__weight=BYTES.astype(np.complex64)),
)
reject(
    "out.kernel must fit in float16",
    state_dict(o_proj__weight=1e6 * BYTES.T),
    options={"param_dtype": jnp.float16},
)

# Shapes and biases.
BIASED = state_dict(
    q_proj__bias=np.ones(N * H),
    k_proj__bias=np.ones(K * H),
    v_proj__bias=np.ones(K * H),
    o_proj__bias=np.ones(D),
)
reject(
    "\n  key.kernel must have shape \\(23, 2, 8\\), but got \\(24, 2, 8",
    state_dict(),
    options={"in_kv_features": 23},
)
reject(
    "\n  query.bias is missing from state_dict; .* use_bias=False\n",
    state_dict(),
    options={"use_bias": True},
)
reject(
    "\n  query.bias is missing from the module; create it with use_bias=True\n", BIASED
)
reject(
    "\n  value.kernel is missing from the module; .* share_kv=False$",
    state_dict(),
    options={"share_kv": True},
)
reject(
    "The closest is hf_llama: missing \\['k_proj.weight'\\]",
    state_dict(k_proj__weight=None, v_proj__weight=None),
    options={"share_kv": True},
)

# Norms of queries and keys.
RMS_NORM = {"normalize_qk": Norm("rms")}
NORMED = state_dict(norms=True)
reject(
    r'query_ln.scale is missing from the module; .*normalize_qk=Norm\("rms"\)', NORMED
)
reject("query_ln.scale is missing from state_dict", state_dict(), options=RMS_NORM)
reject(
    r'must be Norm\("rms"\): these norms do not subtract',
    NORMED,
    options={"normalize_qk": True},
    qk_norm_offset=0.0,
)
reject("qk_norm_offset .* 1.0 for Gemma 3", NORMED, options=RMS_NORM)
OVER_ALL_HEADS = r'Norm\("rms", scale="heads", over="all_heads"\)'
NORMED_OVER_ALL_HEADS = state_dict(
    q_norm__weight=np.ones(N * H), k_norm__weight=np.ones(K * H)
)
reject(
    r"scale must have shape .8,., but got .4, 8.; use normalize_qk="
    rf"{OVER_ALL_HEADS}",
    NORMED_OVER_ALL_HEADS,
    options=RMS_NORM,
)
reject(
    rf"normalize_qk must be {OVER_ALL_HEADS}: these norms span",
    NORMED_OVER_ALL_HEADS,
    options={
        "normalize_qk": Norm("rms", scale="heads", over="all_heads", after_rope=True)
    },
)

# Norms of outputs, gates, sinks.
reject(
    "out_norm.scale is missing from the module; create it with out_norm="
    rf"{OVER_ALL_HEADS}",
    state_dict(attn_sub_norm__weight=np.ones(N * H)),
)
reject(
    "out_norm.scale is missing from state_dict; .* out_norm=None",
    state_dict(),
    options={"out_norm": Norm("rms")},
)
GATED_QUERY = np.ones((2 * N * H, D))
reject(
    "gate.kernel .* the module; create it with gate=True$",
    state_dict(q_proj__weight=GATED_QUERY),
)
reject(
    "\n  gate.bias is missing .* module; create it with use_bias=True$",
    BIASED | {"q_proj.weight": GATED_QUERY, "q_proj.bias": GATED_QUERY[:, 0]},
    options={"gate": True},
)
reject(
    r'gate.kernel is missing from the module; create it with gate=Gate\("head"\)',
    state_dict(g_proj__weight=np.ones((N, D))),
)
reject(
    "gate.kernel is missing from state_dict; create the .* gate=False$",
    state_dict(),
    options={"gate": True},
)
reject(
    "42 features of q_proj.weight into query and gate heads of equal size, but "
    "got 4 and 2",
    state_dict(q_proj__weight=np.ones((42, D)), o_proj__weight=np.ones((D, 21))),
)
reject(
    "sinks is missing from the module; create it with sinks=True",
    state_dict(sinks=True),
)
reject(
    "sinks is missing from state_dict; create the module with sinks=False",
    state_dict(),
    options={"sinks": True},
)

# Options that weights only hint at.
reject(
    "rope is None: Llama.* use it; pass rope=RoPE.from_config.*convert.describe",
    state_dict(),
    options={"rope": None},
)
GEMMA_2_LAYER = state_dict(prefix="layers.3.self_attn.")
GEMMA_2_LAYER["layers.3.pre_feedforward_layernorm.weight"] = np.ones(D)
reject("logits_soft_cap is None: Gemma 2", GEMMA_2_LAYER, prefix="layers.3.self_attn.")


@pytest.mark.parametrize("case", REJECTED)
def test_load_torch_rejects_before_it_changes_the_module(case):
    module = make_module(**case.options)
    before = params_of(module)

    with pytest.raises(ValueError, match=f"(?s){case.message}") as error:
        convert.load_torch(module, case.entries, **case.arguments)

    lines = str(error.value).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 500
    assert_equal_trees(params_of(module), before)


@pytest.mark.core
def test_error_about_a_large_model_is_short():
    weight = np.ones((D, D))
    entries = {}
    for part in "abcdefghijkl":
        for i in range(100):
            prefix = f"{part}.{i}.attn."
            entries |= {prefix + key: weight for key in state_dict()}

    message = r"'a.0.attn.', ... 'a.99.attn.' \(100 layers\)"
    with pytest.raises(ValueError, match=message) as error:
        convert.from_torch(entries, N, K)

    assert len(str(error.value).splitlines()) <= 10
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["query", "value", "out", "key_ln"])
def test_load_torch_refuses_wrapped_layers(name):
    module = make_module(**RMS_NORM)
    setattr(module, name, nnx.Sequential(getattr(module, name)))
    message = f"{name} must have its own .*, but is Sequential; load .* before wrapping"
    refused(message, convert.load_torch, module, NORMED, qk_norm_offset=0.0)


def test_load_torch_refuses_other_kernels_and_wrapped_latent_layers():
    module = make_module()
    module.key.kernel = nnx.data(np.ones(module.key.kernel.shape, np.float32))
    message = "key must have its own kernel, an nnx.Variable, but is LinearGeneral; "
    refused(message, convert.load_torch, module, state_dict())

    for name in ("kv_b_proj", "q_proj"):
        latent = flax_mha.MultiHeadLatentAttention(
            N,
            D,
            kv_lora_rank=6,
            qk_nope_head_dim=H,
            qk_rope_head_dim=H,
            v_head_dim=H,
            decode=False,
            rngs=nnx.Rngs(0),
        )
        setattr(latent, name, nnx.Sequential(getattr(latent, name)))
        message = f"{name} must have its own .* before wrapping"
        refused(message, convert.load_torch, latent, {})


# What is loaded -----------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "entries"),
    [
        ({}, state_dict()),
        (RMS_NORM, NORMED),
        ({"sinks": True}, state_dict(sinks=True)),
        ({"rope": None}, state_dict()),
    ],
    ids=["plain", "norms", "sinks", "no rope"],
)
def test_loads_the_parameters_that_from_torch_makes(options, entries):
    module = make_module(**options)
    expected = convert.from_torch(entries, N, K)

    # Llama's names without rotary positions are an error unless checks are off.
    convert.load_torch(
        module, entries, qk_norm_offset=0.0, check_options="rope" not in options
    )

    got = params_of(module)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_equal_trees(got, expected)


def test_linen_takes_the_parameters_and_options_of_nnx():
    config = like_llama("gpt_oss", attention_bias=False)
    options = dict(convert.describe(config))
    # Linen's modules have neither argument.
    del options["in_features"]
    options.pop("kernel_metadata", None)
    layer = linen.MultiHeadDotProductAttention(**options)
    module = flax_mha.MultiHeadAttention(
        **options, in_features=D, decode=False, rngs=nnx.Rngs(0)
    )
    x = jnp.linspace(-1, 1, 5 * D).reshape(1, 5, D)
    entries = state_dict(sinks=True)

    params = convert.from_torch(entries, N, K)
    convert.load_torch(module, entries)

    fresh = layer.init(jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)
    np.testing.assert_array_equal(
        layer.apply({"params": params}, x, is_causal=True), module(x, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_and_shardings_of_the_module_stay(dtype):
    def kinds():
        state = nnx.state(module, nnx.Param)
        return jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), state)

    module = make_module(param_dtype=dtype)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "model", None))
    kernel = module.query.kernel
    kernel.set_value(jax.device_put(kernel.get_value(), sharding))
    before = kinds()
    entries = state_dict(ml_dtypes.bfloat16)

    convert.load_torch(module, entries)

    assert kinds() == before
    assert module.query.kernel.get_value().sharding == sharding
    of_first_head = entries["o_proj.weight"][:, :H].T
    np.testing.assert_array_equal(
        module.out.kernel.get_value()[0], of_first_head.astype(dtype)
    )


def test_abstract_module_is_loaded():
    module = nnx.eval_shape(make_module)
    convert.load_torch(module, state_dict())
    assert_equal_trees(params_of(module), convert.from_torch(state_dict(), N, K))


def test_module_is_loaded_inside_jit():
    module = make_module()

    @nnx.jit
    def load(module):
        convert.load_torch(module, state_dict())

    load(module)
    assert_equal_trees(params_of(module), convert.from_torch(state_dict(), N, K))


@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn."])
def test_number_of_heads_that_contradicts_a_buffer_is_rejected(prefix):
    """Weights do not show it: the same features split into other heads, and load."""
    weights = state_dict(
        prefix=prefix, rotary_emb__inv_freq=np.ones(H // 2, np.float32)
    )
    options = {"num_kv_heads": 2 * K, "use_bias": False, "rope": RoPE()}
    wrong = flax_mha.MultiHeadAttention(2 * N, D, N * H, **options, rngs=nnx.Rngs(0))

    message = r"num_heads is 8, and rope rotates 4 .* 4 features, .*inv_freq is for 8"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(wrong, weights, prefix.rstrip("."))

    convert.load_torch(wrong, weights, prefix.rstrip("."), check_options=False)
    convert.load_torch(make_module(), weights, prefix.rstrip("."))


def test_number_of_heads_that_contradicts_the_table_of_t5_is_rejected():
    layer = "decoder.block.1.layer.0.SelfAttention."
    table = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    weights = {f"{layer}{name}.weight": np.ones((D, D), np.float32) for name in "qkvo"}
    weights[table] = np.ones((32, 3), np.float32)
    options = {"use_bias": False, "scale": 1.0, "rngs": nnx.Rngs(0)}
    right = flax_mha.MultiHeadAttention(3, D, **options)
    wrong = flax_mha.MultiHeadAttention(4, D, **options)

    message = r"num_heads must be 3 to match decoder\.block\.0\..*, but got 4"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(wrong, weights, layer)

    convert.load_torch(right, weights, layer)


def test_other_modules_than_attention_are_rejected():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    message = "module must be an nnx.MultiHeadAttention, but got Linear"
    with pytest.raises(ValueError, match=message):
        convert.load_torch(linear, state_dict())


def test_attention_of_flax_is_loaded():
    module = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    ones = np.ones((18, 6), np.float32)
    entries = {
        "in_proj_weight": ones,
        "in_proj_bias": ones[:, 0],
        "out_proj.weight": ones[:6],
        "out_proj.bias": ones[:6, 0],
    }

    convert.load_torch(module, entries)

    assert float(module.query.kernel.get_value().sum()) == 36.0


# Gemma 4, which adds no 1, has the same keys as Gemma 3, so the weights do not say it.
GEMMA_3_LAYER = state_dict(norms=True, prefix="layers.0.self_attn.")
GEMMA_3_LAYER["layers.0.pre_feedforward_layernorm.weight"] = np.ones(D)


def assert_norms_are_one_plus_weight(module, offset):
    """Also converted back, with this `qk_norm_offset`."""
    weight = GEMMA_3_LAYER["layers.0.self_attn.q_norm.weight"]
    np.testing.assert_array_equal(module.query_ln.scale.get_value(), 1 + weight)
    params = nnx.state(module, nnx.Param)
    back = convert.to_torch(params, "hf_llama", qk_norm_offset=offset)
    np.testing.assert_allclose(back["q_norm.weight"], weight, rtol=0, atol=2.0**-23)


@pytest.mark.core
def test_described_gemma_norms_are_one_plus_weight():
    config = like_llama("gemma3_text", rope_local_base_freq=1e4)
    described = convert.describe(config)
    module = flax_mha.MultiHeadAttention(**described, decode=False, rngs=nnx.Rngs(0))

    convert.load_torch(module, GEMMA_3_LAYER, "layers.0.self_attn")

    assert_norms_are_one_plus_weight(module, offset=None)


@pytest.mark.core
def test_gemma_norms_need_the_offset_without_a_description():
    module = make_module(normalize_qk=Norm("rms"))
    with pytest.raises(ValueError, match="qk_norm_offset is None"):
        convert.load_torch(module, GEMMA_3_LAYER, "layers.0.self_attn")

    convert.load_torch(module, GEMMA_3_LAYER, "layers.0.self_attn", qk_norm_offset=1.0)

    assert_norms_are_one_plus_weight(module, offset=1.0)


@pytest.mark.core
def test_offsets_of_norms_are_added_in_float32():
    """In bfloat16, 1 + 2^-9 would be 1."""
    weight = np.full(H, 2.0**-9, ml_dtypes.bfloat16)
    entries = state_dict(ml_dtypes.bfloat16, norms=True, q_norm__weight=weight)

    params = convert.from_torch(entries, N, K, qk_norm_offset=1.0)

    expected = np.full(H, 1 + 2.0**-9, np.float32)
    np.testing.assert_array_equal(params["query_ln"]["scale"], expected)


# Configs ------------------------------------------------------------------------------


class Described(NamedTuple):
    config: dict[str, Any]
    layer: int
    options: dict[str, Any]


DESCRIBED = []


def expect(config, layer=0, **options):
    """Adds a case: `describe` returns these options, and maybe others."""
    DESCRIBED.append(Described(config, layer, options))


# test_hf_configs.py has the published configs.
NO_WINDOW = {"local_window_size": None}
WINDOW = {"local_window_size": (15, None)}

expect(LLAMA | {"attention_bias": True}, use_bias=True, rope=RoPE())
# Other families have these fields.
expect(LLAMA | {"partial_rotary_factor": 0.5, "clip_qkv": 1.0}, rope=RoPE())

QWEN_2 = like_llama(
    "qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=2
)
QWEN_2_FULL = QWEN_2 | {
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
}
expect(QWEN_2, layer=1, use_bias=True, **NO_WINDOW)
expect(QWEN_2, layer=2, **WINDOW)
expect(QWEN_2_FULL, layer=2, **NO_WINDOW)
GEMMA_2 = like_llama("gemma2", sliding_window=16)
GEMMA_3 = {"model_type": "gemma3_text", "hidden_size": 2560}
expect(GEMMA_2, logits_soft_cap=50.0, scale=1 / 16, sinks=False, **WINDOW)
expect(GEMMA_2 | {"attn_logit_softcapping": None}, logits_soft_cap=None)
expect(GEMMA_3 | {"attn_logit_softcapping": 50.0}, logits_soft_cap=None, **RMS_NORM)

expect(
    like_llama("modernbert-decoder", global_attn_every_n_layers=2), layer=2, **NO_WINDOW
)
expect(
    {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "scale_attn_weights": False},
    scale=1.0,
)

# Attention in some layers only.
expect(
    like_llama("zamba", attn_layer_period=3, attn_layer_offset=1),
    layer=4,
    in_features=48,
)
expect(
    like_llama("nemotron_h", attention_bias=True, layers_block_type=["attention"]),
    use_bias=False,
)

# Functions of heads, gates.
expect(like_llama("laguna", gating="per-element"), gate=Gate("feature", "softplus"))
expect(like_llama("lfm3", use_attention_gate=np.False_), layer=2, gate=False)


@pytest.mark.core
def test_the_table_in_the_documentation_fits_the_code():
    """tests/hf_families.py writes it."""
    root = Path(__file__).parent.parent
    table = (root / "tests/hf_families.md").read_text()
    rows = re.findall(r"^\| `.+` \| `(.+)` \| (.+) \|$", table, re.MULTILINE)
    for name, rest in rows:
        assert rest == FAMILIES[name].refused or float(rest.split()[-1]) < 5e-5

    # Rows that end with a number; BLT, too, whose four parts are described.
    described = sum(rest[-1].isdigit() for _, rest in rows)
    claim = rf"\b{described}\s+(decoder\s+families|families\s+of\s+decoders)"
    for page in ("CHANGELOG.md", "README.md"):
        assert re.search(claim, (root / page).read_text())


@pytest.mark.core
@pytest.mark.parametrize("case", DESCRIBED)
def test_describe_returns_options_of_a_module(case):
    got = convert.describe(case.config, case.layer)
    assert {key: got[key] for key in case.options} == case.options

    def make():
        return flax_mha.MultiHeadAttention(**got, rngs=nnx.Rngs(0))

    assert isinstance(nnx.eval_shape(make).out, nnx.Module)


def test_descriptions_can_be_compared_and_pickled():
    """Also those with functions of heads and gates."""
    for config, layer, _ in DESCRIBED:
        described = convert.describe(config, layer)
        assert described == convert.describe(config, layer)

        described.pop("attention_fn", None)
        assert pickle.loads(pickle.dumps(described)) == described


HEADS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
NAN_AND_INFINITY = [[[-9.0, 0.5, jnp.nan, jnp.inf]]]


@pytest.mark.core
@pytest.mark.parametrize("dtype", HEADS)
def test_clipped_heads_keep_dtypes_and_nan(dtype):
    x = jnp.array(NAN_AND_INFINITY, HEADS[dtype])

    query, key, value = convert.ClipHeads(np.float64(8))(x, -x, x)

    assert query.dtype == key.dtype == value.dtype == dtype
    expected = np.array([[[-8, 0.5, np.nan, 8]]])
    np.testing.assert_array_equal(np.float32(query), expected)
    np.testing.assert_array_equal(np.float32(key), -expected)
    np.testing.assert_array_equal(np.float32(value), expected)


@pytest.mark.core
@pytest.mark.parametrize("dtype", HEADS)
def test_scaled_values_keep_dtypes_and_nan(dtype):
    query = jnp.array(NAN_AND_INFINITY, HEADS[dtype])
    key = -query
    value = query + 0

    same_query, same_key, scaled = convert.ScaleValues(np.float64(0.25))(
        query, key, value
    )

    assert same_query is query
    assert same_key is key
    assert scaled.dtype == dtype
    expected = np.array([[[-2.25, 0.125, np.nan, np.inf]]])
    np.testing.assert_array_equal(np.float32(scaled), expected)


@pytest.mark.core
@pytest.mark.parametrize("number", [0, 1e31, "8"], ids=str)
def test_process_heads_need_a_positive_number(number):
    message = r"must be a finite number > 0, at most 1e\+30, but got"
    with pytest.raises(ValueError, match=f"limit {message}"):
        convert.ClipHeads(number)
    with pytest.raises(ValueError, match=f"factor {message}"):
        convert.ScaleValues(number)


WHISPER = {
    "model_type": "whisper",
    "d_model": D,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
}


def whisper_layer(part):
    """The weights of the self-attention of a layer, by their names in Whisper."""
    layer = f"model.{part}.layers.0.self_attn."
    entries = {}
    for name in ("q", "k", "v", "out"):
        entries[f"{layer}{name}_proj.weight"] = np.ones((D, D), np.float32)
    for name in ("q", "v", "out"):
        entries[f"{layer}{name}_proj.bias"] = np.ones(D, np.float32)
    return entries


class CountedConfig(dict):
    """A config that counts how often all of its values are read."""

    reads = 0

    def items(self):
        self.reads += 1
        return super().items()


@pytest.mark.core
@pytest.mark.parametrize(
    ("model_type", "weights"),
    [
        ("llama", FIRST_LAYER),
        ("gemma4_text", state_dict(norms=True, prefix="model.layers.0.self_attn.")),
    ],
    ids=["llama", "gemma4_text"],
)
def test_each_function_reads_a_config_once(model_type, weights):
    config = CountedConfig(like_llama(model_type))
    convert.from_hf(config, weights)
    assert config.reads == 1
    convert.describe(config)
    assert config.reads == 2
    RoPE.from_config(config, "sliding_attention")
    assert config.reads == 3


@pytest.mark.core
@pytest.mark.parametrize(("part", "heads"), [("encoder", 2), ("decoder", 4)])
def test_the_two_parts_of_a_model_have_their_own_number_of_heads(part, heads):
    both = whisper_layer("encoder") | whisper_layer("decoder")
    for weights, prefix in ((whisper_layer(part), ""), (both, f"model.{part}.")):
        module = convert.from_hf(WHISPER, weights, prefix=prefix)
        assert module.num_heads == heads
        is_causal = ours(module.attention_fn).preset.get("is_causal", False)
        assert is_causal == (part == "decoder")


# Configs that describe rejects --------------------------------------------------------


class RejectedConfig(NamedTuple):
    config: Any
    layer: Any
    message: str


REJECTED_CONFIGS = []


def reject_config(config, message, layer=0):
    """Adds a case: `describe` rejects this config with this message."""
    case = RejectedConfig(config, layer, message)
    REJECTED_CONFIGS.append(pytest.param(case, id=message))


reject_config(object(), "config must be a dict, but got object; use config.to_dict")
reject_config(
    {}, "model_type must be one of those in docs/model-features.md, but got None"
)
reject_config(
    DEEPSEEK | {"model_type": "longcat_flash", "num_layers": 1},
    "layer must be .* < num_hidden_layers .2., but",
    layer=2,
)
reject_config(
    DEEPSEEK | {"num_key_value_heads": 2},
    "num_key_value_heads in config must equal .* = 4, but got 2",
)
reject_config(
    DEEPSEEK | {"qk_head_dim": 24},
    r"equal qk_nope_head_dim \+ qk_rope_head_dim = 192, but got 24",
)
reject_config(
    DEEPSEEK | {"rope_scaling": {"llama_4_scaling_beta": 0.1}},
    "must not set llama_4_scaling_beta=0.1",
)
reject_config(
    like_llama("ministral3", max_position_embeddings=9)
    | {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
    "rope_parameters must contain original_max_position_embeddings if",
)
reject_config(
    like_llama("blt_local_decoder"),
    "must set sliding_window to the local_attention_window_len",
)
reject_config(
    like_llama("laguna", num_attention_heads_per_layer=[4]),
    "must be a list with an entry for layer 3",
    layer=3,
)
reject_config(
    like_llama("laguna", num_attention_heads_per_layer=[3]),
    "must contain multiples of num_key_value_heads .2., but",
)
reject_config(
    like_llama("hrm_text", num_layers_per_stack=2),
    "layer must be .* < num_layers_per_stack .2., but got 2",
    layer=2,
)
reject_config(
    {"model_type": "llama"}, "config must set num_attention_heads or .* but got None"
)
reject_config(
    LLAMA | {"num_hidden_layers": 2},
    "layer must be an integer >= 0 and < num_hidden_layers .2., but got 2",
    layer=2,
)
reject_config(LLAMA, "layer must be .* got 1.0", layer=1.0)
reject_config(
    {"model_type": "clip", "text_config": {}, "vision_config": {}},
    r'pass config\["text_config"\] or',
)
reject_config(WHISPER, "must be equal")
reject_config(like_llama("jamba"), "layer 0 of jamba has type 'no attention'")
reject_config(
    like_llama("zamba2"), "config must contain layer_types or layers_block_type"
)
reject_config(
    like_llama("big_bird"),
    "attention_type='block_sparse' in config is not supported: .* 'original_full'",
)
reject_config(
    like_llama("gpt_bigcode", multi_query=False), "multi_query=True, but got False"
)
reject_config(
    like_llama("mpt", attn_config={"alibi": False}), "alibi=True, but got False"
)
reject_config(like_llama("falcon", alibi=True), "alibi=True in config is not supported")


@pytest.mark.parametrize("case", REJECTED_CONFIGS)
def test_describe_rejects(case):
    with pytest.raises(ValueError, match=case.message):
        convert.describe(case.config, case.layer)


@pytest.mark.core
def test_families_that_need_more_than_the_options_are_rejected():
    """Before anything else that is wrong, as parts of a multimodal model, too."""
    text_config = like_llama("diffllama")
    message = "model_type 'diffllama' is not supported: .* recipes.differential"
    with pytest.raises(ValueError, match=message):
        convert.describe(text_config)
    del text_config["model_type"]
    multimodal = {"model_type": "diffllama", "text_config": text_config}
    with pytest.raises(ValueError, match=message):
        convert.from_hf(multimodal, {}, prefix="no such prefix")


def test_rope_of_dots3_is_interleaved():
    rope = RoPE.from_config(like_llama("dots3_note_text"))
    assert rope == RoPE(interleaved=True)


def test_rope_of_a_rejected_family_guesses_no_base():
    with pytest.raises(ValueError, match="config must contain rope_theta"):
        RoPE.from_config({"model_type": "dory"})
