"""The conversion of weights, as far as it goes without PyTorch; test_torch_convert.py
has the rest.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from marks import with_core

from flax_mha import convert
from flax_mha._src.convert.layouts import ALL

HEADS = 3
HEAD_DIM = 5
FEATURES = HEADS * HEAD_DIM
DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


def make_params(
    sizes=(FEATURES,) * 4,
    biased=ALL,
    kv_heads=HEADS,
    dtype=np.float32,
    value_dim=HEAD_DIM,
    **has,
):
    """Makes random parameters; sizes are the inputs of query, key, value and the
    output.

    It `has` sinks, a gate, an out_norm or norms, if they are given.
    """
    rng = np.random.default_rng(0)
    gate = has.get("gate")
    norms = has.get("norms")
    params = {}
    for name, size in zip(ALL, sizes, strict=True):
        size_of_heads = value_dim if name in ("value", "out") else HEAD_DIM
        heads = (kv_heads if name in ("key", "value") else HEADS, size_of_heads)
        kernel, bias = (
            ((*heads, size), (size,)) if name == "out" else ((size, *heads), heads)
        )
        if name in biased:
            shapes = {"kernel": kernel, "bias": bias}
        else:
            shapes = {"kernel": kernel}
        params[name] = {
            leaf: rng.normal(size=shape).astype(dtype) for leaf, shape in shapes.items()
        }
    for name in ("query_ln", "key_ln") if norms else ():
        leaves = ("scale",) if norms is True else norms
        params[name] = {
            leaf: rng.normal(size=HEAD_DIM).astype(dtype) for leaf in leaves
        }
    if gate:
        params["gate"] = {
            leaf: rng.normal(size=x.shape).astype(dtype)
            for leaf, x in params["query"].items()
        }
    if gate == "head":
        params["gate"] = {"kernel": rng.normal(size=(sizes[0], HEADS)).astype(dtype)}
    if "out_norm" in has:
        params["out_norm"] = {
            "scale": rng.normal(size=(HEADS, value_dim)).astype(dtype)
        }
    if "sinks" in has:
        params["sinks"] = rng.normal(size=HEADS).astype(dtype)
    return params


def assert_same_bits(got, expected):
    """Compares trees: the same keys, shapes, dtypes and bits."""

    def bits(tree):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.tobytes()), tree)

    assert bits(got) == bits(expected)


UNBIASED = {"biased": ()}
BIASED_OUT = {"biased": ("out",)}
NO_OUT = {"biased": ALL[:3]}
GROUPED = {"kv_heads": 1, "biased": ()}
NORMS = {"norms": True}
NORMED = GROUPED | NORMS
NARROW = {"sizes": (7,) * 4, "kv_heads": 1}
SEPARATE = {"sizes": (FEATURES, 7, 11, FEATURES)}
LAYOUTS = {
    "torch": [{}, UNBIASED],
    "torch_separate": [SEPARATE, SEPARATE | UNBIASED],
    "d2l_mha": [{"sizes": (2, 7, 11, FEATURES)} | UNBIASED],
    "hf_llama": [
        NARROW | more
        for more in (
            {},
            UNBIASED,
            NO_OUT,
            UNBIASED | NORMS,
            {"sinks": True},
            {"gate": True},
        )
    ],
    "hf_laguna": [NARROW | {"gate": "head"}, NARROW | UNBIASED | {"gate": "head"}],
    "hf_qwen3_next": [NORMED | {"gate": True}, {"kv_heads": 1, "gate": True}],
    "hf_qwen2": [{"kv_heads": 1} | NO_OUT],
    "hf_phi": [{"kv_heads": 1}, {"norms": ("scale", "bias")}],
    "hf_neox": [{}, GROUPED],
    "hf_whisper": [{"biased": ("query", "value", "out")}],
    "nanogpt": [{}, UNBIASED],
    "timm": [{}, UNBIASED],
    "hf_t5": [{"sizes": (7,) * 4} | UNBIASED],
}
ALIKE = {
    "note_mha bert_self_attention masked_self_attention hf_bert hf_ctrl hf_distilbert hf_clip hf_gpt2 hf_vit": {},
    "hf_modernbert hf_gptj": UNBIASED,
    "hf_moshi hf_mpt hf_phi3": GROUPED,
    "hf_hunyuan hf_lfm2": NORMED,
    "hf_gpt_neo hf_vit_unbiased hf_vit5_unbiased timm_unbiased": BIASED_OUT,
}
LAYOUTS["hf_llama"] += [
    NARROW | {"value_dim": 2, "gate": "head"},
    NARROW | UNBIASED | {"value_dim": 7, "out_norm": 1},
]
LAYOUTS |= {name: [case] for names, case in ALIKE.items() for name in names.split()}
HOLDS = [(layout, case) for layout, cases in LAYOUTS.items() for case in cases]


@pytest.mark.core
def test_every_layout_has_a_case():
    others = {"hf_codegen"}  # see test_torch_families.py
    assert {layout for layout, _ in HOLDS} == {*convert.LAYOUTS} - others


@pytest.mark.parametrize("dtype", with_core(DTYPES, ml_dtypes.bfloat16))
@pytest.mark.parametrize(("layout", "case"), HOLDS)
def test_round_trip_is_exact(layout, case, dtype):
    params = make_params(**case, dtype=dtype)
    state_dict = convert.to_torch(params, layout)
    back = convert.from_torch(state_dict, HEADS, case.get("kv_heads"))
    assert_same_bits(back, params)
    assert_same_bits(convert.to_torch(back, layout), state_dict)
    for array in [*state_dict.values(), *jax.tree.leaves(back)]:
        assert type(array) is np.ndarray
        assert array.flags.c_contiguous
        assert array.flags.owndata
        assert array.flags.writeable


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [False, True])
def test_takes_the_parameters_of_flax(dtype, use_bias):
    sizes = {
        "num_heads": HEADS,
        "qkv_features": FEATURES,
        "use_bias": use_bias,
        "param_dtype": dtype,
    }
    module = nnx.MultiHeadAttention(
        in_features=FEATURES, decode=False, rngs=nnx.Rngs(0), **sizes
    )
    params = nnx.state(module, nnx.Param)
    state_dict = convert.to_torch(params)
    assert state_dict["in_proj_weight"].dtype == dtype
    assert_same_bits(convert.to_torch(module), state_dict)
    back = convert.from_torch(state_dict, HEADS)
    assert_same_bits(back, jax.tree.map(np.asarray, nnx.to_pure_dict(params)))
    nnx.update(module, back)

    inputs = jnp.ones((1, 2, FEATURES), dtype)
    variables = linen.MultiHeadDotProductAttention(**sizes).init(
        jax.random.key(0), inputs
    )
    back = convert.from_torch(convert.to_torch(variables["params"]), HEADS)
    assert_same_bits(back, jax.tree.map(np.asarray, variables["params"]))


def test_takes_jax_arrays():
    params = make_params(dtype=ml_dtypes.bfloat16)
    on_device = jax.tree.map(jnp.asarray, params)
    assert_same_bits(convert.to_torch(on_device), convert.to_torch(params))
    assert_same_bits(
        convert.from_torch(jax.tree.map(jnp.asarray, convert.to_torch(params)), HEADS),
        params,
    )


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("hf_bert", "output.LayerNorm.weight"),
        ("hf_bert", "output.LayerNorm.beta"),
        ("hf_llama", "rotary_emb.inv_freq"),
    ],
)
def test_other_entries_are_ignored(layout, extra):
    params = make_params()
    state_dict = convert.to_torch(params, layout) | {extra: np.ones(2)}
    assert_same_bits(convert.from_torch(state_dict, HEADS), params)


def changed(layout, **changes):
    """Makes a state_dict with some entries replaced, or taken out where None."""
    biased = () if layout == "d2l_mha" else ALL
    state_dict = convert.to_torch(make_params(biased=biased), layout)
    state_dict |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in state_dict.items() if value is not None}


THREE_TO_ONE = convert.to_torch(make_params(kv_heads=1), "hf_llama")
# State dicts, the error, and heads.
REFUSED_BY_FROM_TORCH = [
    ({}, r"keys of a supported layout, but got \[\]\."),
    (
        {"c_attn.weight": np.ones(2)},
        r"got \['c_attn\.weight'\]\.(.|\n)*\nLayouts: torch, .*, d2l_mha, ",
    ),
    (
        changed("note_mha", w_k__weight=None),
        r"The closest is note_mha: missing \['w_k\.weight'\], extra \[\]",
    ),
    (
        changed("torch", scale=np.ones(1)),
        r"The closest is torch: missing \[\], extra \['scale'\]",
    ),
    (
        changed("hf_llama", o_proj__weight=None, out_proj__weight=np.eye(15)),
        "hf_clip: .* extra .'o_proj.bias'",
    ),
    (
        changed("torch", bias_k=1, bias_v=1),
        "must not contain bias_k, bias_v, because .*add_bias_kv",
    ),
    (
        changed("torch", in_proj_bias=None),
        "requires biases on query, key, value, out or on none .got .*out",
    ),
    (
        changed("hf_bert", self__key__bias=None),
        "'hf_bert', but it requires biases .* .got query, value, out.",
    ),
    (
        changed("d2l_mha", W_o__bias=np.ones(FEATURES)),
        "it requires biases on none .got out",
    ),
    (
        changed("torch", in_proj_weight=np.ones((44, 15))),
        "44 features of in_proj_weight into .* got 3 and 3",
    ),
    (
        changed("torch", in_proj_weight=np.ones((45, 7))),
        "must be equal, but got query in 7, .* query out 15",
    ),
    (
        changed("note_mha", w_q__weight=np.ones(15)),
        r"query/kernel must have shape \(A, Q\) .* got \(15,\)",
    ),
    (
        changed("note_mha", w_q__weight=np.float32(1)),
        r"query/kernel must have shape \(A, Q\)",
    ),
    (
        changed("note_mha", w_q__bias=np.ones(14)),
        r"query/bias must have shape \(15\) .* got \(14,\)",
    ),
    (
        changed("hf_llama", v_proj__weight=np.ones((5, 15))),
        r"value/bias must have shape \(5\)",
    ),
    (
        changed("torch"),
        "split the 45 features of in_proj_weight into .* got 4 and 4",
        4,
    ),
    (changed("torch"), "positive .* got 0 and 0", 0),
    (changed("torch"), "positive .* got 3 and 0", 3, 0),
    (changed("torch"), "multiple of num_kv_heads", 3, 2),
    (changed("torch"), "into 15 query features .* but 3 and 1 give 27", 3, 1),
    (THREE_TO_ONE, "15 query and 5 key .* got 3 and 3"),
]


@pytest.mark.parametrize("row", REFUSED_BY_FROM_TORCH, ids=lambda row: row[1])
def test_from_torch_refuses(row):
    state_dict, message, *heads = row
    with pytest.raises(ValueError, match=message):
        convert.from_torch(state_dict, *heads or (HEADS,))


def with_leaf(path, value, **case):
    params = make_params(**case)
    name, leaf = path.split("/")
    params.setdefault(name, {})[leaf] = value
    return params


NORMED_QUERY = with_leaf("query_ln/scale", np.ones(5))
REFUSED_BY_TO_TORCH = [
    (
        make_params(),
        "keras",
        "layout must be one of torch, .*, hf_llama, .*, but got 'keras'",
    ),
    (
        make_params(kv_heads=1),
        "torch",
        "does not fit params: its .* key out 5, .*; layouts that fit: hf_llama",
    ),
    (
        make_params((15, 7, 7, 15)),
        "torch",
        "key in 7, .*; layouts that fit: torch_separate, hf_clip$",
    ),
    (
        make_params((15, 7, 7, 15), ()),
        "torch",
        "layouts that fit: torch_separate, d2l_mha, hf_gptj$",
    ),
    (
        make_params((15, 15, 15, 7)),
        "torch_separate",
        "out 7; layouts that fit: hf_llama$",
    ),
    (
        make_params((7, 7, 7, 7)),
        "note_mha",
        "query in 7, .* query out 15, .*: hf_llama, hf_hunyuan, hf_modernbert, ",
    ),
    (
        make_params(biased=()),
        "hf_codegen",
        "num_heads and num_kv_heads must be multiples of 4, but got 3 and 3",
    ),
    (
        make_params(),
        "d2l_mha",
        "it requires biases on none .got query, key, value, out",
    ),
    (
        make_params(biased=()),
        "note_mha",
        "it requires biases on query, key, value, out .got none",
    ),
    (
        make_params(biased=("out",)),
        "torch",
        "it requires .* .got out.; layouts that fit: hf_gpt_neo, hf_vit_unbiased",
    ),
    (
        with_leaf("query/bias", np.ones((3, 5))),
        "torch",
        "in_proj_bias must have the same dtype, .* float32, float64",
    ),
    (
        NORMED_QUERY,
        "torch",
        "no query_ln/scale; layouts that fit: hf_llama, hf_hunyuan, hf_phi, hf_neox$",
    ),
    (with_leaf("query/scale", np.ones(5)), "torch", r"extra \['query/scale'\]"),
    (
        {"params": make_params()},
        "torch",
        r"missing \['key/kernel', .*\], extra \['params'\]",
    ),
    (
        with_leaf("value/kernel", np.ones((15, 1, 15))),
        "torch",
        r"value/kernel must have shape \(V, 3, U\)",
    ),
    (
        with_leaf("out/kernel", np.ones((15, 15))),
        "torch",
        r"out/kernel must have shape \(3, 5, O\) .* got \(15, 15\)",
    ),
    (
        make_params(value_dim=2),
        "torch",
        "values must have the head size of its queries, but got query out 15, .* 6,",
    ),
    (make_params(), "hf_laguna", "it requires a gate; layouts that fit: torch, "),
    (
        None,
        "torch",
        "params must be a module, its nnx.State or a dict of its parameters, but got "
        "None",
    ),
    (
        make_params() | {"key": 3},
        "torch",
        "params\\['key'\\] must be a dict of arrays, but got 3",
    ),
    (
        with_leaf("query/kernel", None),
        "torch",
        "query/kernel must be a tensor or an array, but got .*None",
    ),
]


@pytest.mark.parametrize(("params", "layout", "message"), REFUSED_BY_TO_TORCH)
def test_to_torch_refuses(params, layout, message):
    with pytest.raises(ValueError, match=message):
        convert.to_torch(params, layout)
