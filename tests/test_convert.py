"""The conversion of weights, as far as it goes without PyTorch; test_torch_convert.py
has the rest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
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
    norms=None,
    gate=None,
    has_out_norm=False,
    has_sinks=False,
):
    """Makes random parameters.

    `sizes` are the inputs of query, key, value and the output; `biased` are the layers
    with a bias; `norms` are the leaves of the norms of queries and keys; `gate` is
    None, "feature" or "head".
    """
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = {}
    for name, size in zip(ALL, sizes, strict=True):
        num_heads = kv_heads if name in ("key", "value") else HEADS
        head_dim = value_dim if name in ("value", "out") else HEAD_DIM
        kernel = (size, num_heads, head_dim)
        bias = (num_heads, head_dim)
        # The output's layer has the axes of heads first.
        if name == "out":
            kernel = (num_heads, head_dim, size)
            bias = (size,)
        params[name] = {"kernel": normal(*kernel)}
        if name in biased:
            params[name]["bias"] = normal(*bias)
    if norms:
        params["query_ln"] = {leaf: normal(HEAD_DIM) for leaf in norms}
        params["key_ln"] = {leaf: normal(HEAD_DIM) for leaf in norms}
    if gate == "feature":
        like = params["query"]
        params["gate"] = {leaf: normal(*x.shape) for leaf, x in like.items()}
    if gate == "head":
        params["gate"] = {"kernel": normal(sizes[0], HEADS)}
    if has_out_norm:
        params["out_norm"] = {"scale": normal(HEADS, value_dim)}
    if has_sinks:
        params["sinks"] = normal(HEADS)
    return params


def assert_same_bits(got, expected):
    """Compares trees: the same keys, shapes, dtypes and bits."""

    def bits(tree):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.tobytes()), tree)

    assert bits(got) == bits(expected)


class Case(NamedTuple):
    """Arguments of `make_params` whose parameters fit in a layout."""

    layout: str
    arguments: dict[str, Any]


CASES = []


def fits(*layouts, **arguments):
    """Adds a case for each of these layouts."""
    for layout in layouts:
        CASES.append(Case(layout, arguments))


NARROW = (7, 7, 7, 7)
WITHOUT_OUT = ("query", "key", "value")

# One size of heads and features, with all biases or none.
fits("torch", "nanogpt", "timm")
fits("torch", "nanogpt", "timm", biased=())
fits("torch_separate", sizes=(FEATURES, 7, 11, FEATURES))
fits("torch_separate", sizes=(FEATURES, 7, 11, FEATURES), biased=())
fits("d2l_mha", sizes=(2, 7, 11, FEATURES), biased=())
fits("note_mha", "bert_self_attention", "masked_self_attention")
fits("hf_bert", "hf_ctrl", "hf_distilbert", "hf_clip", "hf_gpt2", "hf_vit")

# Grouped heads, and every option that these layouts have.
fits("hf_llama", sizes=NARROW, kv_heads=1)
fits("hf_llama", sizes=NARROW, kv_heads=1, biased=())
fits("hf_llama", sizes=NARROW, kv_heads=1, biased=WITHOUT_OUT)
fits("hf_llama", sizes=NARROW, kv_heads=1, biased=(), norms=["scale"])
fits("hf_llama", sizes=NARROW, kv_heads=1, has_sinks=True)
fits("hf_llama", sizes=NARROW, kv_heads=1, gate="feature")
fits("hf_llama", sizes=NARROW, kv_heads=1, gate="head", value_dim=2)
fits("hf_llama", sizes=NARROW, kv_heads=1, biased=(), value_dim=7, has_out_norm=True)
fits("hf_laguna", sizes=NARROW, kv_heads=1, gate="head")
fits("hf_laguna", sizes=NARROW, kv_heads=1, gate="head", biased=())
fits("hf_qwen3_next", kv_heads=1, gate="feature")
fits("hf_qwen3_next", kv_heads=1, gate="feature", biased=(), norms=["scale"])

# The biases, groups and norms of other families.
fits("hf_qwen2", kv_heads=1, biased=WITHOUT_OUT)
fits("hf_phi", kv_heads=1)
fits("hf_phi", norms=["scale", "bias"])
fits("hf_neox")
fits("hf_neox", kv_heads=1, biased=())
fits("hf_whisper", biased=("query", "value", "out"))
fits("hf_t5", sizes=NARROW, biased=())
fits("hf_modernbert", "hf_gptj", biased=())
fits("hf_moshi", "hf_mpt", "hf_phi3", kv_heads=1, biased=())
fits("hf_hunyuan", "hf_lfm2", kv_heads=1, biased=(), norms=["scale"])
fits("hf_gpt_neo", "hf_vit_unbiased", biased=["out"])
fits("hf_vit5_unbiased", "timm_unbiased", biased=["out"])


@pytest.mark.core
def test_every_layout_has_a_case():
    elsewhere = {"hf_codegen"}  # test_torch_families.py
    assert {case.layout for case in CASES} == {*convert.LAYOUTS} - elsewhere


@pytest.mark.parametrize("dtype", with_core(DTYPES, ml_dtypes.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_round_trip_is_exact(case, dtype):
    params = make_params(**case.arguments, dtype=dtype)
    kv_heads = case.arguments.get("kv_heads")

    state_dict = convert.to_torch(params, case.layout)
    back = convert.from_torch(state_dict, HEADS, kv_heads)

    assert_same_bits(back, params)
    assert_same_bits(convert.to_torch(back, case.layout), state_dict)
    # Plain arrays of their own, which nobody else changes.
    for array in [*state_dict.values(), *jax.tree.leaves(back)]:
        assert type(array) is np.ndarray
        assert array.flags.c_contiguous
        assert array.flags.owndata
        assert array.flags.writeable


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_of_nnx_return_through_torch(dtype):
    module = nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=FEATURES,
        qkv_features=FEATURES,
        param_dtype=dtype,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    params = nnx.state(module, nnx.Param)

    state_dict = convert.to_torch(params)
    back = convert.from_torch(state_dict, HEADS)

    assert state_dict["in_proj_weight"].dtype == dtype
    assert_same_bits(convert.to_torch(module), state_dict)
    assert_same_bits(back, jax.tree.map(np.asarray, nnx.to_pure_dict(params)))
    nnx.update(module, back)


def test_takes_jax_arrays():
    params = make_params(dtype=ml_dtypes.bfloat16)
    state_dict = convert.to_torch(params)

    of_jax = jax.tree.map(jnp.asarray, params)
    assert_same_bits(convert.to_torch(of_jax), state_dict)

    state_dict = jax.tree.map(jnp.asarray, state_dict)
    assert_same_bits(convert.from_torch(state_dict, HEADS), params)


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ("hf_bert", "output.LayerNorm.weight"),
        ("hf_llama", "rotary_emb.inv_freq"),
    ],
)
def test_entries_of_other_layers_are_ignored(layout, extra):
    params = make_params()
    state_dict = convert.to_torch(params, layout)
    state_dict[extra] = np.ones(2)
    assert_same_bits(convert.from_torch(state_dict, HEADS), params)


def changed(layout, **changes):
    """Makes a state_dict with some entries replaced, or taken out if None."""
    # No layer of this layout has a bias.
    biased = () if layout == "d2l_mha" else ALL
    state_dict = convert.to_torch(make_params(biased=biased), layout)
    for name, value in changes.items():
        state_dict[name.replace("__", ".")] = value
    return {key: value for key, value in state_dict.items() if value is not None}


class RejectedStateDict(NamedTuple):
    state_dict: dict[str, Any]
    heads: int
    kv_heads: int | None
    message: str


REJECTED_STATE_DICTS = []


def reject_state_dict(state_dict, message, heads=HEADS, kv_heads=None):
    """Adds a case: `from_torch` rejects it with this message."""
    case = RejectedStateDict(state_dict, heads, kv_heads, message)
    REJECTED_STATE_DICTS.append(pytest.param(case, id=message))


# Heads do not show in the weights of PyTorch.
THREE_TO_ONE = convert.to_torch(make_params(kv_heads=1), "hf_llama")
reject_state_dict(
    {"c_attn.weight": np.ones(2)},
    r"got \['c_attn\.weight'\]\.(.|\n)*\nLayouts: torch, .*, d2l_mha, ",
)
reject_state_dict(
    changed("torch", scale=np.ones(1)),
    r"The closest is torch: missing \[\], extra \['scale'\]",
)
reject_state_dict(
    changed("torch", bias_k=1, bias_v=1),
    "must not contain bias_k, bias_v, because .*add_bias_kv",
)
reject_state_dict(
    changed("torch", in_proj_bias=None),
    "requires biases on query, key, value, out or on none .got .*out",
)
reject_state_dict(
    changed("torch", in_proj_weight=np.ones((45, 7))),
    "must be equal, but got query in 7, .* query out 15",
)
reject_state_dict(
    changed("note_mha", w_q__weight=np.ones(15)),
    r"query/kernel must have shape \(A, Q\) .* got \(15,\)",
)
reject_state_dict(
    changed("note_mha", w_q__bias=np.ones(14)),
    r"query/bias must have shape \(15\) .* got \(14,\)",
)
reject_state_dict(
    changed("torch"),
    "split the 45 features of in_proj_weight into .* got 4 and 4",
    heads=4,
)
reject_state_dict(changed("torch"), "positive .* got 0 and 0", heads=0)
reject_state_dict(changed("torch"), "multiple of num_kv_heads", heads=3, kv_heads=2)
reject_state_dict(
    changed("torch"),
    "into 15 query features .* but 3 and 1 give 27",
    heads=3,
    kv_heads=1,
)
reject_state_dict(THREE_TO_ONE, "15 query and 5 key .* got 3 and 3")


@pytest.mark.parametrize("case", REJECTED_STATE_DICTS)
def test_from_torch_rejects(case):
    with pytest.raises(ValueError, match=case.message):
        convert.from_torch(case.state_dict, case.heads, case.kv_heads)


def with_leaf(path, value):
    params = make_params()
    name, leaf = path.split("/")
    params.setdefault(name, {})[leaf] = value
    return params


class RejectedParams(NamedTuple):
    params: Any
    layout: str
    message: str


REJECTED_PARAMS = []


def reject_params(params, layout, message):
    """Adds a case: `to_torch` rejects them for this layout with this message."""
    case = RejectedParams(params, layout, message)
    REJECTED_PARAMS.append(pytest.param(case, id=message))


reject_params(
    make_params(),
    "keras",
    "layout must be one of torch, .*, hf_llama, .*, but got 'keras'",
)
reject_params(
    make_params(kv_heads=1),
    "torch",
    "does not fit params: its .* key out 5, .*; layouts that fit: hf_llama",
)
reject_params(
    make_params((15, 7, 7, 15)),
    "torch",
    "key in 7, .*; layouts that fit: torch_separate, hf_clip$",
)
reject_params(
    make_params(biased=()),
    "hf_codegen",
    "num_heads and num_kv_heads must be multiples of 4, but got 3 and 3",
)
reject_params(
    make_params(biased=()),
    "note_mha",
    "it requires biases on query, key, value, out .got none",
)
reject_params(
    with_leaf("query/bias", np.ones((3, 5))),
    "torch",
    "in_proj_bias must have the same dtype, .* float32, float64",
)
reject_params(
    with_leaf("query_ln/scale", np.ones(5)),
    "torch",
    "no query_ln/scale; layouts that fit: hf_llama, hf_hunyuan, hf_phi, hf_neox$",
)
reject_params(
    {"params": make_params()},
    "torch",
    r"missing \['key/kernel', .*\], extra \['params'\]",
)
reject_params(
    with_leaf("value/kernel", np.ones((15, 1, 15))),
    "torch",
    r"value/kernel must have shape \(V, 3, U\)",
)
reject_params(
    make_params(value_dim=2),
    "torch",
    "values must have the head size of its queries, but got query out 15, .* 6,",
)
reject_params(
    make_params(),
    "hf_laguna",
    "it requires a gate; layouts that fit: torch, ",
)
reject_params(
    None,
    "torch",
    "params must be a module, its nnx.State or a dict of its parameters, but got None",
)
reject_params(
    make_params() | {"key": 3},
    "torch",
    "params\\['key'\\] must be a dict of arrays, but got 3",
)
reject_params(
    with_leaf("query/kernel", None),
    "torch",
    "query/kernel must be a tensor or an array, but got .*None",
)


@pytest.mark.parametrize("case", REJECTED_PARAMS)
def test_to_torch_rejects(case):
    with pytest.raises(ValueError, match=case.message):
        convert.to_torch(case.params, case.layout)
