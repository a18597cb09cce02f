"""The arguments that both kinds of modules add to Flax's, and the errors of wrong
arguments.
"""

import functools
import inspect
import pydoc
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx

import flax_mha
from flax_mha import CausalMask, LocalMask, convert, linen, masks
from flax_mha._src.core import tracing
from flax_mha._src.modules.dot_general import dot_general

B = 2
T = 9
S = 13
D = 16
N = 4
K = 2
rng = np.random.default_rng(0)
X, Y = (np.float32(rng.standard_normal((B, n, D))) for n in (T, S))


def nnx_module(**options):
    return flax_mha.MultiHeadAttention(
        **{"num_heads": N, "in_features": D, "decode": False, "rngs": nnx.Rngs(0)}
        | options
    )


def linen_module(**options):
    return linen.MultiHeadDotProductAttention(**{"num_heads": N} | options)


def call(module, *inputs, **arguments):
    """The output of a module of either library; linen modules get new parameters."""
    if isinstance(module, nnx.Module):
        return module(*inputs, **arguments)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return module.init_with_output(keys, *inputs, **arguments)[0]


def partial(**preset):
    return functools.partial(flax_mha.attention_fn, **preset)


MAKES = pytest.mark.parametrize("make", [nnx_module, linen_module])
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)


@pytest.mark.core
@MAKES
def test_lengths_are_a_mask_of_padding(make):
    """And what padding holds affects nothing."""
    lengths = jnp.array([9, 4])
    module = make(use_bias=False)
    got = call(module, jnp.asarray(X).at[1, 4:].set(jnp.nan), lengths=lengths)
    inside = jnp.arange(T)[None] < lengths[:, None]
    assert_close(
        got, call(module, X, mask=(inside[:, None, :, None] & inside[:, None, None, :]))
    )


@pytest.mark.core
@MAKES
def test_explain(make):
    module = make(num_kv_heads=K, sinks=True)
    assert module.explain(X).chosen == "xla"
    explanation = module.explain(
        jnp.ones((1, 700, D)), is_causal=True, lengths=jnp.array([650])
    )
    assert explanation.chosen == "blockwise"
    assert any("sinks" in reason for reason in explanation.refusals["cudnn"])
    nested = functools.partial(
        partial(implementation="xla", is_causal=True), implementation="blockwise"
    )
    for options in ({"implementation": "blockwise"}, {"attention_fn": nested}):
        assert make(**options).explain(X).chosen == "blockwise"
    other = make(attention_fn=nnx.dot_product_attention)
    refused(
        r"only attention_fn=flax_mha\.attention_fn can be explained", other.explain, X
    )
    with pytest.raises(
        NotImplementedError, match='implementation="cudnn" does not support this call'
    ):
        make(implementation="cudnn").explain(X)


@pytest.mark.core
@MAKES
@pytest.mark.parametrize(
    ("preset", "options", "arguments"),
    [
        ({"scale": 0.3, "is_causal": True}, {"scale": 0.3}, {"is_causal": True}),
        ({"local_window_size": (2, 0)}, {"local_window_size": (2, 0)}, {}),
        ({"mask": CausalMask()}, {}, {"mask": CausalMask()}),
        (
            {"bias": X[:, None, :, :T], "logits_soft_cap": 1.0},
            {"logits_soft_cap": 1.0},
            {"bias": X[:, None, :, :T]},
        ),
        (
            {"key_value_seq_lengths": jnp.array([3, 5])},
            {},
            {"lengths": (None, jnp.array([3, 5]))},
        ),
    ],
    ids=lambda x: " ".join(x),
)
def test_a_partial_sets_arguments_that_the_module_does_not(
    make, preset, options, arguments
):
    kept = {name: x for name, x in options.items() if name not in preset}
    got = call(make(**kept, attention_fn=partial(**preset)), X)
    want = call(make(**options), X, **arguments)
    assert_close(got, want)
    assert jnp.abs(got - call(make(), X)).max() > 1e-6
    assert_close(call(make(**options, attention_fn=partial(**preset)), X), want)


FUNCTIONS_WITHOUT_MASK_OBJECTS = {
    "nnx": nnx.dot_product_attention,
    "linen": nn.dot_product_attention,
    "jax": jax.nn.dot_product_attention,
    "a partial": functools.partial(nnx.dot_product_attention, dropout_rate=0.0),
    "a partial of a partial": jax.tree_util.Partial(
        functools.partial(nnx.dot_product_attention, dropout_rate=0.0)
    ),
    "jit": jax.jit(nnx.dot_product_attention, static_argnames="deterministic"),
    "remat": jax.checkpoint(jax.jit(nn.dot_product_attention)),
}


@pytest.mark.core
@MAKES
@pytest.mark.parametrize(
    "function",
    FUNCTIONS_WITHOUT_MASK_OBJECTS.values(),
    ids=FUNCTIONS_WITHOUT_MASK_OBJECTS,
)
def test_functions_of_flax_and_jax_get_no_mask_objects(make, function):
    """Also while decoding, where the mask of visible keys would be added to the object."""
    error = r"mask must be an array for attention_fn=.*dot_product_attention.*, but got a CausalMask; pass an array, or"
    module = make(attention_fn=function)
    refused(error, call, module, X, mask=CausalMask())
    refused(
        "but got a And",
        call,
        module,
        X,
        mask=CausalMask() & masks.LengthMask(jnp.array([3, 4])),
    )
    decoding = make(attention_fn=function, decode=True)
    if isinstance(decoding, nnx.Module):
        decoding.init_cache((B, T, D))
        refused(error, decoding, X[:, :1], mask=CausalMask())
        return
    variables = make(decode=True).init(jax.random.key(0), X)
    refused(
        error, decoding.apply, variables, X[:, :1], mask=CausalMask(), mutable=["cache"]
    )


@MAKES
def test_a_mask_object_in_a_partial_of_a_function_of_flax(make):
    module = make(
        attention_fn=functools.partial(nnx.dot_product_attention, mask=CausalMask())
    )
    refused("mask must be an array for attention_fn", call, module, X)
    assert_close(call(module, X, mask=jnp.ones((T, T), bool)), call(make(), X))


def test_a_function_of_flax_gets_no_mask_objects_with_latents():
    sizes = {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    options = {
        "num_heads": 2,
        "in_features": D,
        "decode": False,
        "rngs": nnx.Rngs(0),
    } | sizes
    latent = flax_mha.MultiHeadLatentAttention(
        **options, attention_fn=nnx.dot_product_attention
    )
    refused("mask must be an array for attention_fn", latent, X, mask=CausalMask())


@MAKES
def test_functions_of_users_get_mask_objects(make):
    """Even if they copy the name and the module of Flax's function."""

    @functools.wraps(nnx.dot_product_attention)
    def attention(query, key, value, mask=None, **arguments):
        if isinstance(mask, flax_mha.masks.Mask):
            mask = mask.picture(query.shape[-3], key.shape[-3])
        return nnx.dot_product_attention(query, key, value, mask=mask)

    module = make(attention_fn=functools.partial(attention))
    assert_close(call(module, X, mask=CausalMask()), call(make(), X, is_causal=True))


@MAKES
def test_partials_on_a_mesh(make):
    """Around `context_parallel`, and with the sharding that a module with `head_axis`
    would set.
    """
    mesh = jax.make_mesh(
        (1, 1), ("context", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    split = functools.partial(flax_mha.context_parallel("context"), logits_soft_cap=1.0)
    heads = partial(logits_soft_cap=1.0, qkv_sharding=jax.P(None, None, "model"))
    want = call(make(logits_soft_cap=1.0), X)
    with jax.set_mesh(mesh):
        for options in (
            {"attention_fn": split},
            {"attention_fn": heads, "head_axis": "model"},
        ):
            module = make(**options)
            assert_close(call(module, X), want)
            assert module.explain(X).chosen in ("xla", "blockwise")
    decoding = nnx_module(attention_fn=split, decode=True)
    decoding.init_cache((B, T, D))
    refused("decode must be False with context_parallel", decoding, X)


@pytest.mark.core
def test_explain_of_decoding_depends_on_the_cache_and_leaves_it_alone():
    """A prompt may use any implementation while the cache is empty; later calls read
    keys in the cache.
    """
    module = nnx_module(decode=True, dropout_rate=0.5)
    module.init_cache((1, 900, D))
    prompt = jnp.ones((1, 700, D))

    def refuses(name):
        explanation = module.explain(prompt, deterministic=True)
        return any(name in reason for reason in explanation.refusals["cudnn"])

    assert not refuses("ArrayMask")
    assert not refuses("query_offset")
    assert module.explain(prompt, deterministic=False).chosen == "blockwise"
    assert not any(x.any() for x in jax.tree.leaves(nnx.state(module, nnx.Cache)))
    assert module.attention_fn is flax_mha.attention_fn
    module(jnp.ones((1, 20, D)), deterministic=True)
    assert refuses("query_offset")
    assert module.explain(prompt[:, :1], deterministic=False).chosen == "xla"
    layer = linen_module(decode=True)
    bound = layer.bind(layer.init(jax.random.key(0), jnp.ones((1, 900, D))))
    assert bound.explain(prompt).chosen == "blockwise"
    assert bound.explain(prompt[:, :1]).chosen == "xla"
    np.testing.assert_array_equal(bound.variables["cache"]["cache_index"], 0)
    storing = {"lengths": (None, jnp.array([7])), "store_keys": True}
    explanation = nnx_module(decode=True).explain(X[:1], X[:1], **storing)
    assert not any("mask" in reason for reason in explanation.refusals["cudnn"])


LATENT = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MODULES = {
    "nnx": functools.partial(nnx_module, qkv_features=N * 16),
    "nnx, latent": lambda **options: flax_mha.MultiHeadLatentAttention(
        N, D, rngs=nnx.Rngs(0), **LATENT | options
    ),
    "linen": functools.partial(linen_module, qkv_features=N * 16),
    "linen, self": functools.partial(linen.SelfAttention, N, qkv_features=N * 16),
}


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_explain_for_another_platform(name):
    x = jnp.ones((1, 1024, D))
    half, whole = (
        MODULES[name](decode=False, dtype=dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    for platform, chosen in (
        ("cuda", "cudnn"),
        ("tpu", "splash"),
        ("cpu", "blockwise"),
        (None, "blockwise"),
    ):
        with jax.numpy_dtype_promotion("standard"):  # norms of Flax
            assert half.explain(x, is_causal=True, platform=platform).chosen == chosen
    [reason] = whole.explain(x, is_causal=True, platform="cuda").refusals["cudnn"]
    assert reason.endswith(
        "pass dtype=jnp.bfloat16 to the module, or cast query, key and value"
    )
    with jax.numpy_dtype_promotion("standard"):
        refused("platform must be", half.explain, x, platform="rocm")


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("latent", [False, True])
def test_explain_of_a_prompt_and_a_step_for_another_platform(latent, dtype):
    module = MODULES["nnx, latent" if latent else "nnx"](
        decode=True, dtype=jnp.bfloat16
    )
    module.init_cache((1, 1024, D), dtype)
    for platform, chosen in (("cuda", "cudnn"), ("tpu", "splash")):
        with jax.numpy_dtype_promotion("standard"):
            assert (
                module.explain(jnp.ones((1, 1024, D)), platform=platform).chosen
                == chosen
            )
            step = module.explain(jnp.ones((1, 1, D)), platform=platform)
        assert (step.chosen, step.on_cpu) == ("xla", None)
        assert "this call runs on cpu" not in str(step)


def of_flax(query, key, value, mask=None, broadcast_dropout=True, dropout_rng=None, dropout_rate=0.0,
            deterministic=False, dtype=None, precision=None, module=None, is_causal=False):  # fmt: skip
    return query


def of_arrays(query, key, value, deterministic=True):
    return query


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "attention", "options", "arguments", "name"),
    [
        *(
            (make, of_flax, {"scale": 1.0}, {}, "scale")
            for make in (nnx_module, linen_module)
        ),
        *(
            (make, of_flax, {}, {"lengths": jnp.array([3, 4])}, "lengths")
            for make in (nnx_module, linen_module)
        ),
        (linen_module, of_arrays, {}, {"mask": CausalMask()}, "mask"),
        (
            linen_module,
            of_arrays,
            {"dropout_rate": 0.5},
            {"deterministic": False},
            "dropout",
        ),
    ],
)
def test_an_attention_function_without_an_argument_that_is_used_raises(
    make, attention, options, arguments, name
):
    assert call(make(attention_fn=attention), X).shape == X.shape
    with pytest.raises(TypeError, match=name):
        call(make(attention_fn=attention, **options), X, **arguments)


@MAKES
def test_a_wrapper_of_the_attention_function_is_called(make):
    """Also one by `functools.wraps`, which copies the attribute by which modules know
    our function.
    """

    @functools.wraps(flax_mha.attention_fn)
    def doubled(*arrays, **arguments):
        return 2 * flax_mha.attention_fn(*arrays, **arguments)

    got = call(make(use_bias=False, attention_fn=doubled), X, is_causal=True)
    assert_close(got, 2 * call(make(use_bias=False), X, is_causal=True))


@pytest.mark.core
def test_a_decoding_call_that_raises_leaves_the_cache():
    module = nnx_module(decode=True)
    layer = linen_module(decode=True)
    module.init_cache((B, T, D))
    bound = layer.bind(layer.init(jax.random.key(0), X), mutable=["cache"])
    for run in (module, bound):
        with pytest.raises((ValueError, TypeError), match=r"mask|broadcast"):
            run(X[:, :1], mask=jnp.ones((3, 1, 1, T), bool))
        one_index = (
            r"lengths must be None if all sequences share one index.*per_row=True"
        )
        refused(one_index, run, X[:, :1], lengths=jnp.array([1, 1]))
    assert module.cache_index[...] == 0
    assert (module.cached_key[...] == 0).all()
    assert bound.variables["cache"]["cache_index"] == 0


ARRAYS_OF_NUMBERS = {
    "jax": lambda x: jnp.linspace(0, x, 2)[1],
    "numpy": lambda x: np.array(x, np.float32),
    "variable": lambda x: nnx.Variable(jnp.float32(x)),
}


@pytest.mark.parametrize("kind", ARRAYS_OF_NUMBERS)
def test_options_may_be_0d_arrays(kind):
    """As in Flax, also under `jit`, where the arrays are constants."""
    numbers = {"dropout_rate": 0.25, "logits_soft_cap": 2.0}
    arrays = {name: ARRAYS_OF_NUMBERS[kind](x) for name, x in numbers.items()}
    query = X.reshape(B, T, N, -1)

    def of_module(name, **options):
        return call(MODULES[name](decode=False, **options), X, deterministic=False)

    functions = [
        functools.partial(of_module, name) for name in ("nnx", "nnx, latent", "linen")
    ]
    for function in (flax_mha.dot_product_attention, flax_mha.attention_fn):
        functions.append(
            functools.partial(
                function, query, query, query, dropout_rng=jax.random.key(1)
            )
        )
    for function in functions:
        want = function(**numbers)
        np.testing.assert_array_equal(function(**arrays), want)
        np.testing.assert_allclose(
            jax.jit(functools.partial(function, **arrays))(), want, atol=1e-6
        )


@pytest.mark.core
@MAKES
def test_module_and_call_override_a_partial(make):
    """Its keywords are defaults."""
    preset = {
        "scale": 0.3,
        "mask": CausalMask(),
        "score_mod": lambda score, b, h, q, k: 2 * score,
    }
    own = {"scale": 0.4}
    mask = LocalMask(3, 1)

    def unchanged(score, b, h, q_idx, kv_idx):
        return score

    output = call(
        make(**own, attention_fn=partial(**preset)), X, mask=mask, score_mod=unchanged
    )

    np.testing.assert_array_equal(output, call(make(**own), X, mask=mask))
    others = {"mask": preset["mask"], "score_mod": preset["score_mod"]}
    np.testing.assert_array_equal(
        call(make(attention_fn=partial(**preset)), X),
        call(make(scale=0.3), X, **others),
    )


# What is refused with Flax: `flax_cases.py`.
NUMBERS = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)
IDS = jnp.ones((B, T), int)
REFUSED = [
    ({"num_heads": 4.0}, {}, "num_heads must be an int, but got 4.0"),
    ({"gate": 1}, {}, "gate must be True, False or a flax_mha.Gate, but got 1"),
    ({"dropout_rate": np.zeros(1)}, {}, "dropout_rate must be a concrete number in"),
    ({"dropout_rate": np.array(None)}, {}, "dropout_rate must be a concrete number in"),
    ({"scale": "big"}, {}, "scale must be a finite number, but got 'big'"),
    (
        {},
        {"mask": NUMBERS},
        "mask must be bool, or contain only 0 and 1.*-1000000000.0; pass it as bias=",
    ),
    (
        {},
        {"mask": CausalMask},
        r"mask must be a boolean array or a mask object .*call it: CausalMask\(\)",
    ),
    (
        {},
        {"mask": jnp.ones((B, T), bool)},
        r"got shape \(2, 9\); use mask\[:, None, None, :\]",
    ),
    ({}, {"lengths": jnp.array([3, -1])}, "^lengths must be at least 0, but got -1"),
    ({}, {"lengths": jnp.array([3, 1, 2])}, "^lengths must broadcast to"),
    (
        {},
        {"lengths": jnp.array([3, 4]), "inputs_k": Y},
        r"lengths must be a pair \(queries, keys\).*\(None, lengths\)",
    ),
    (
        {},
        {"lengths": (jnp.ones(B, int),) * 3},
        "lengths must be one array or a pair .* but got 3 arrays",
    ),
    (
        {},
        {"segment_ids": (IDS,) * 3},
        "segment_ids must be one array or a pair .* but got 3 arrays",
    ),
    (
        {},
        {"segment_ids": jnp.ones((B, T))},
        "^segment_ids must have an integer dtype, but got float32",
    ),
    (
        {},
        {"segment_ids": (IDS, IDS[:, :4])},
        r"^segment_ids of keys must have shape \[batch..., 9\]",
    ),
]


@pytest.mark.core
def test_modules_need_features():
    latent = functools.partial(
        flax_mha.MultiHeadLatentAttention, N, rngs=nnx.Rngs(0), **LATENT
    )
    for size in (0, -1, "8"):
        message = f"must be an int >= 1, but got {size!r}"
        for name in ("in_features", "in_kv_features", "out_features"):
            refused(f"{name} {message}", nnx_module, **{name: size})
        refused(f"in_features {message}", latent, size)
        refused(f"out_features {message}", latent, D, out_features=size)
    for name in ("inputs_q", "inputs_k", "inputs_v"):
        inputs = {"inputs_q": X, "inputs_k": X, "inputs_v": X} | {name: X[..., :0]}
        message = f"{name} must have at least one feature.* got shape \\(2, 9, 0\\)"
        refused(message, call, linen_module(qkv_features=D), **inputs)


@pytest.mark.core
def test_remat_traces_keyword_arguments():
    """So `is_causal=True` is not a bool inside; a mask object stays the same."""
    module = nn.remat(linen.MultiHeadDotProductAttention)(N)
    fix = r"got a traced value; pass mask=flax_mha.CausalMask\(\) instead.* nn.remat"
    refused(
        "is_causal must be a concrete True or False, .*" + fix,
        call,
        module,
        X,
        is_causal=True,
    )
    want = call(linen_module(), X, is_causal=True)
    np.testing.assert_allclose(call(module, X, mask=CausalMask()), want, atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize(("options", "arguments", "message"), REFUSED)
@MAKES
def test_refused(options, arguments, message, make):
    refused(message, lambda: call(make(**options), X, **arguments))


@pytest.mark.core
@MAKES
def test_errors_of_misspelled_arguments_name_the_call_or_the_function(make):
    unexpected = r"\(\) got an unexpected keyword argument "
    refused(f"__call__{unexpected}'maks'", call, make(), X, maks=None, error=TypeError)
    refused(
        f"attention_fn{unexpected}'scal'",
        call,
        make(attention_fn=partial(scal=0.3)),
        X,
        error=TypeError,
    )


@pytest.mark.core
def test_a_key_of_jax_random_is_no_rngs():
    key = jax.random.key(0)
    module = nnx_module(dropout_rate=0.5, deterministic=False)
    refused(
        r"rngs must be nnx.Rngs, but got PRNGKeyArray; pass a key as nnx.Rngs\(key\)",
        nnx_module,
        rngs=key,
    )
    refused(
        r"rngs must be nnx.Rngs or nnx.RngStream, but got PRNGKeyArray",
        module,
        X,
        rngs=key,
    )


@pytest.mark.core
def test_names_of_the_package():
    """`dir` lists only public names, and a star import leaves Flax's modules alone."""
    assert flax_mha.recipes.causal()["mask"] == CausalMask()
    assert (flax_mha.linen, flax_mha.convert) == (linen, convert)
    assert (flax_mha.CausalMask, flax_mha.combine) == (
        masks.CausalMask,
        flax_mha.recipes.combine,
    )
    assert (flax_mha.RoPE, flax_mha.KVCache) == (
        flax_mha.rope.RoPE,
        flax_mha.cache.KVCache,
    )
    assert flax_mha.__version__.count(".") >= 2
    with pytest.raises(
        AttributeError, match="module 'flax_mha' has no attribute 'linnen'"
    ):
        flax_mha.linnen  # noqa: B018
    names = dir(flax_mha)
    modules = {name for name in names if inspect.ismodule(getattr(flax_mha, name))}
    assert modules == {
        "cache",
        "convert",
        "linen",
        "masks",
        "nnx",
        "plot",
        "recipes",
        "rope",
    }
    assert set(names) == {*flax_mha.__all__, *modules, "__version__"}
    names = {}
    exec("from flax import linen, nnx\nfrom flax_mha import *", names)
    assert (names.pop("nnx"), names.pop("linen")) == (nnx, nn)
    assert names.keys() - {"__builtins__"} == {
        name for name in dir(flax_mha) if callable(getattr(flax_mha, name))
    }


def parameters(function):
    """The parameters that `help` and editors show; none may be `*args` or `**kwargs`."""
    found = inspect.signature(function).parameters
    assert not [
        x for x in found.values() if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    ]
    return found


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_help_and_editors_show_the_signature_of_a_module(name):
    """An instance is shown with its call; `explain` has the signature of the call, and
    a platform.
    """
    layer = MODULES[name]()
    argument = "kv_lora_rank" if "latent" in name else "num_kv_heads"
    kind = type(layer)
    assert argument in parameters(kind)
    assert "self" not in parameters(kind)
    head = pydoc.render_doc(kind, renderer=pydoc.plaintext).partition("\n |  \n")[0]
    assert f"{argument}:" in head
    for function in (layer, layer.explain, kind.__call__, kind.explain):
        assert {"inputs_q", "score_mod"} <= parameters(function).keys()
    explained = dict(parameters(layer.explain))
    assert explained.pop("platform").default is None
    assert explained == parameters(kind.__call__.__get__(layer))
    assert "platform" in parameters(kind.explain)


@pytest.mark.core
def test_signatures_of_subclasses_and_functions():
    class Wider(flax_mha.MultiHeadAttention):
        def __init__(self, width: int, rngs: nnx.Rngs):
            super().__init__(2, width, decode=False, rngs=rngs)

    assert list(parameters(Wider)) == ["width", "rngs"]
    assert Wider(8, nnx.Rngs(0)).in_features == 8
    functions = (
        flax_mha.attention_fn,
        flax_mha.cache.cached_attention,
        flax_mha.context_parallel,
    )
    functions += (
        flax_mha.context_parallel("x"),
        flax_mha.dot_product_attention,
        flax_mha.explain_implementation,
    )
    for function in functions:
        assert len(parameters(function)) > 5
        assert "arguments" not in parameters(function)


CONSTRUCTORS = ((flax_mha, ""), (flax_mha, "Latent"), (linen, "DotProduct"))


@pytest.mark.core
@pytest.mark.parametrize(
    "kind", [getattr(x, f"MultiHead{name}Attention") for x, name in CONSTRUCTORS]
)
def test_every_argument_of_a_constructor_is_described(kind):
    """In the docstring of the class, or in a docstring to which it refers."""
    # Every linen module has these.
    undescribed = {"parent", "name"} if issubclass(kind, nn.Module) else set()
    texts = kind.__doc__ + flax_mha.MultiHeadAttention.__doc__
    described = re.findall(r"^(?:    )?  (\w+(?:, \w+)*): ", texts, re.M)
    assert (
        parameters(kind).keys()
        - {name for names in described for name in names.split(", ")}
        == undescribed
    )


def test_attention_fn_takes_every_argument_of_flax():
    ours = inspect.signature(flax_mha.attention_fn).parameters
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= set(ours)
    query = jnp.asarray(rng.standard_normal((B, T, N, 4)), jnp.float32)
    calls = []

    def counted(*arguments, **keywords):
        calls.append(1)
        return jax.lax.dot_general(*arguments, **keywords)

    got = flax_mha.attention_fn(query, query, query, einsum_dot_general=counted)
    assert len(calls) == 2
    np.testing.assert_allclose(
        got, flax_mha.attention_fn(query, query, query), rtol=0, atol=1e-5
    )


@pytest.mark.core
@pytest.mark.parametrize("tokens", [1, 3])
def test_projections_in_bfloat16(tokens, monkeypatch):
    """Where a CPU multiplies bfloat16, they are rounded float32 sums, also of a single
    row and of transposed arrays.

    A product into float32 is not rounded to bfloat16, and a vector is no row.
    """
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    x, kernel = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 31, tokens), (N, 31, 8))
    )
    expected = np.einsum(
        "bdt,ndh->bthn", np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    )
    kernel = jnp.transpose(kernel, (1, 2, 0))

    def project(x, **options):
        return dot_general(x.T, kernel, (((x.T.ndim - 1,), (0,)), ((), ())), **options)

    vector = project(x[0, :, 0])
    wide = project(x[0, :, 0], preferred_element_type=jnp.float32)
    rounded = {"rtol": 2**-8, "atol": 1e-5}
    for got in (
        jnp.stack([jax.jit(project)(own) for own in x]),
        jax.jit(jax.vmap(project))(x),
        vector[None, None],
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(got, np.float64), expected[: len(got), : got.shape[1]], **rounded
        )
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected[0, 0], rtol=0, atol=1e-5)
