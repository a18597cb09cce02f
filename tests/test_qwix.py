"""Modules quantized or given LoRA by qwix are as accurate as Flax's, and leave no trace
in modules that are not.
"""

import gc
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_parts, linen_step
from flax import nnx
from marks import with_core, with_core_tuples

import flax_mha
from flax_mha import linen
from flax_mha.rope import RoPE

qwix = pytest.importorskip("qwix")
# Of qwix: it uses methods of Flax that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCH = 2
LENGTH = 24
FEATURES = 64
HEADS = 4
SIZES = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 48,
}
# A larger error of Flax's module than ours is the most that is accepted: 10 % more, and
# the rounding of float32.
FACTOR = 1.1
ROUNDING = 1e-6
WEIGHTS = qwix.QuantizationRule(weight_qtype=jnp.int8)
ACTIVATIONS_TOO = qwix.QuantizationRule(weight_qtype=jnp.int8, act_qtype=jnp.int8)
LORA = qwix.LoraRule(
    rank=4, alpha=0.4, lora_b_initializer=jax.nn.initializers.normal(0.1)
)
PROVIDERS = {
    "PTQ": lambda: qwix.PtqProvider([WEIGHTS]),
    "PTQ of activations": lambda: qwix.PtqProvider([ACTIVATIONS_TOO]),
    "QAT": lambda: qwix.QtProvider([WEIGHTS]),
    "QAT of activations": lambda: qwix.QtProvider([ACTIVATIONS_TOO]),
    "LoRA": lambda: qwix.LoraProvider([LORA]),
}
QUANTIZED = [name for name in PROVIDERS if name != "LoRA"]
TRAINED = ["QAT", "QAT of activations"]


@pytest.fixture(autouse=True)
def standard_promotion():
    # Qwix multiplies scales by numbers of other dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def inputs(seed=0, length=LENGTH):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, FEATURES))


def multi_head(cls, **options):
    return cls(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options)


def latent(**options):
    options = {"rope": RoPE(interleaved=True), "decode": False} | SIZES | options
    return flax_mha.MultiHeadLatentAttention(
        HEADS, FEATURES, rngs=nnx.Rngs(0), **options
    )


def changed(module, name, x):
    """The module after qwix has changed it as `PROVIDERS[name]` does."""
    if name == "LoRA":
        return qwix.apply_lora_to_model(module, PROVIDERS[name](), x, rngs=nnx.Rngs(1))
    return qwix.quantize_model(module, PROVIDERS[name](), x)


def relative_error(got, expected):
    got = np.float64(jax.flatten_util.ravel_pytree(got)[0])
    expected = np.float64(jax.flatten_util.ravel_pytree(expected)[0])
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def gradients(module, x):
    def loss(module):
        return (module(x) ** 2).sum()

    return nnx.to_pure_dict(nnx.state(nnx.grad(loss)(module)))


def decoded(module, x, pieces=(20, 1, 1, 2)):
    """The outputs of calls with so many tokens each, a prompt longer than 16 and then
    steps.
    """
    outputs = []
    first = 0
    module.init_cache(x.shape)
    for piece in pieces:
        outputs.append(module(x[:, first : first + piece], decode=True))
        first += piece
    return jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize(
    ("name", "implementation"),
    with_core_tuples(
        itertools.product(QUANTIZED, [None, "blockwise"]), ("PTQ of activations", None)
    ),
)
def test_quantized_nnx_is_as_accurate_as_flax(name, implementation):
    x = inputs()
    ours = multi_head(flax_mha.MultiHeadAttention, implementation=implementation)
    theirs = multi_head(nnx.MultiHeadAttention)
    assert relative_error(ours(x), theirs(x)) < 2e-6

    quantized = changed(ours, name, x)
    of_flax = changed(theirs, name, x)

    most = FACTOR * relative_error(of_flax(x), theirs(x)) + ROUNDING
    assert 1e-3 < most < 0.05
    assert 1e-3 < relative_error(quantized(x), ours(x)) < most
    in_jit = nnx.jit(lambda module, x: module(x))(quantized, x)
    assert 1e-3 < relative_error(in_jit, ours(x)) < most


@pytest.mark.parametrize("implementation", [None, "blockwise"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_quantized_training_are_as_accurate_as_those_of_flax(
    name, implementation
):
    x = inputs()
    ours = multi_head(flax_mha.MultiHeadAttention, implementation=implementation)
    theirs = multi_head(nnx.MultiHeadAttention)

    of_flax = gradients(changed(theirs, name, x), x)
    of_ours = gradients(changed(ours, name, x), x)

    error_of_flax = relative_error(of_flax, gradients(theirs, x))
    error = relative_error(of_ours, gradients(ours, x))
    assert 1e-3 < error < FACTOR * error_of_flax + ROUNDING


@pytest.mark.core
def test_lora_adds_the_same_as_in_flax():
    x = inputs()
    ours = multi_head(flax_mha.MultiHeadAttention)
    theirs = multi_head(nnx.MultiHeadAttention)

    with_lora = changed(ours, "LoRA", x)
    of_flax = changed(theirs, "LoRA", x)

    assert relative_error(with_lora(x), ours(x)) > 0.01
    assert relative_error(with_lora(x), of_flax(x)) < 1e-5
    assert relative_error(gradients(with_lora, x), gradients(of_flax, x)) < 1e-5


@pytest.mark.parametrize("name", with_core(QUANTIZED, "PTQ of activations"))
def test_quantized_linen_is_as_accurate_as_flax(name):
    x = inputs()
    ours = linen.MultiHeadDotProductAttention(HEADS)
    theirs = nn.MultiHeadDotProductAttention(HEADS)
    variables = theirs.init(jax.random.key(0), x)

    errors = []
    for module in (ours, theirs):
        quantized = qwix.quantize_model(module, PROVIDERS[name]())
        given = variables
        if "PTQ" in name:
            shapes = jax.eval_shape(quantized.init, jax.random.key(0), x)["params"]
            given = {"params": qwix.quantize_params(variables["params"], shapes)}
        output = quantized.apply(given, x)
        errors.append(relative_error(output, module.apply(variables, x)))

    assert 1e-3 < errors[0] < FACTOR * errors[1] + ROUNDING


@pytest.mark.core
def test_lora_in_linen_adds_the_same_as_in_flax():
    x = inputs()
    outputs = []
    for module in (
        linen.MultiHeadDotProductAttention(HEADS),
        nn.MultiHeadDotProductAttention(HEADS),
    ):
        with_lora = qwix.apply_lora_to_model(module, PROVIDERS["LoRA"]())
        outputs.append(with_lora.init_with_output(jax.random.key(0), x)[0])
    assert relative_error(*outputs) < 1e-5


@pytest.mark.parametrize(
    ("name", "gate"),
    with_core_tuples(
        itertools.product(PROVIDERS, [False, True]), ("PTQ", False), ("LoRA", True)
    ),
)
def test_latent_attention_is_about_as_accurate_and_decodes_the_same(name, gate):
    x = inputs()
    module = latent(gate=gate)
    expected = module(x, is_causal=True)

    other = changed(module, name, x)

    whole = other(x, is_causal=True)
    least, most = (0.01, 1.0) if name == "LoRA" else (1e-3, 0.05)
    assert least < relative_error(whole, expected) < most
    assert relative_error(decoded(other, x), whole) < error_of_decoding(name)


def error_of_decoding(name):
    # Scales of activations differ from call to call.
    return 0.03 if "activations" in name else 1e-5


@pytest.mark.parametrize("name", with_core(PROVIDERS, "PTQ", "LoRA"))
def test_multi_head_attention_decodes_the_same(name):
    x = inputs()
    norm = flax_mha.Norm("rms")
    module = multi_head(flax_mha.MultiHeadAttention, num_kv_heads=2, normalize_qk=norm)
    other = changed(module, name, x)
    whole = other(x, is_causal=True)
    assert relative_error(whole, module(x, is_causal=True)) > 1e-3
    assert relative_error(decoded(other, x), whole) < error_of_decoding(name)


LINEN = ["MultiHeadAttention", "SelfAttention"]


def changed_linen(module, name):
    """The module after qwix has changed it as `PROVIDERS[name]` does."""
    if name == "LoRA":
        return qwix.apply_lora_to_model(module, PROVIDERS[name]())
    return qwix.quantize_model(module, PROVIDERS[name]())


@pytest.mark.parametrize(
    ("name", "cls"),
    with_core_tuples(
        itertools.product(PROVIDERS, LINEN),
        ("PTQ", "MultiHeadAttention"),
        ("LoRA", "SelfAttention"),
    ),
)
def test_linen_modules_decode_the_same(name, cls):
    x = inputs()
    module = getattr(linen, cls)(HEADS, num_kv_heads=2)
    plain = module.init(jax.random.key(0), x)["params"]
    other = changed_linen(module, name)
    params = plain
    if name == "LoRA":
        params = other.init(jax.random.key(0), x)["params"]
    if "PTQ" in name:
        shapes = jax.eval_shape(other.init, jax.random.key(0), x)["params"]
        params = qwix.quantize_params(plain, shapes)
    mask = flax_mha.CausalMask()
    whole = other.apply({"params": params}, x, mask=mask)
    decoder = changed_linen(module.clone(decode=True), name)
    cache = decoder.init(jax.random.key(0), x)["cache"]

    step = linen_step(decoder, {"params": params, "cache": cache})
    output = in_parts(step, x, (20, 1, 1, 2))

    expected = module.apply({"params": plain}, x, mask=mask)
    assert relative_error(whole, expected) > 1e-3
    assert relative_error(output, whole) < error_of_decoding(name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PROVIDERS)
def test_indexers_may_be_quantized_and_trained(name, is_causal):
    x = inputs()
    # An indexer that leaves out few keys: which it chooses may change with any
    # rounding.
    indexer = flax_mha.Indexer(num_heads=4, head_dim=16, top_k=LENGTH - 2)
    module = latent(indexer=indexer)
    other = changed(module, name, x)

    def call(module, x):
        return module(x, is_causal=is_causal)

    output = call(other, x)

    most = 1.0 if name == "LoRA" else 0.3
    assert relative_error(output, call(module, x)) < most
    assert relative_error(nnx.jit(call)(other, x), output) < 0.03
    if name in TRAINED:
        grads = nnx.grad(lambda module: (call(module, x) ** 2).sum())(other)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.state(grads)))


@pytest.mark.parametrize("implementation", [None, "blockwise"])
@pytest.mark.parametrize("first", ["plain", "quantized"])
def test_programs_of_quantized_and_plain_modules_are_not_confused(
    first, implementation
):
    # Shapes that no other test compiled.
    x = inputs(length=20 + 2 * (first == "plain") + (implementation is None))
    module = multi_head(flax_mha.MultiHeadAttention, implementation=implementation)
    exact = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))(x)
    of_flax = changed(multi_head(nnx.MultiHeadAttention), "QAT of activations", x)(x)

    if first == "plain":
        plain = module(x)
    quantized = changed(module, "QAT of activations", x)(x)
    if first == "quantized":
        plain = module(x)

    assert relative_error(plain, exact) < 2e-6
    # Not only the projections are quantized, also the products of queries, keys and
    # values.
    assert relative_error(quantized, exact) > 0.9 * relative_error(of_flax, exact)


def test_repeated_calls_keep_no_programs():
    x = inputs()
    plain = multi_head(flax_mha.MultiHeadAttention, implementation="blockwise")
    module = changed(plain, "QAT of activations", x)

    counts = []
    for _ in range(3):
        module(x)
        gc.collect()
        counts.append(len(gc.get_objects()))

    # A program that is kept is a thousand objects.
    assert counts[2] - counts[1] < 200
