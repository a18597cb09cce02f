"""`MultiHeadLatentAttention` caches one latent per token, and computes the same as with
keys of all heads.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, equations, in_parts, refused
from flax import nnx
from marks import core, pairwise, with_core, with_core_tuples

import flax_mha
from flax_mha import Gate
from flax_mha._src.cache.latent import Latent
from flax_mha.rope import RoPE, YaRN

B = 2
T = 83
D = 24
N = 3
C = 16
R = 6
SIZES = {
    "kv_lora_rank": C,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": R,
    "v_head_dim": 19,
}
ROPE = RoPE(interleaved=True, scaling=YaRN(4.0, 16, mscale=0.7, mscale_all_dim=1.3))
PIECES = (70, 1, 5, 1, 5, 1)  # a prompt, and calls of one and of several tokens
SCORES = {
    "sinks": True,
    "logits_soft_cap": 2.0,
    "rope": RoPE(fraction=1 / 3),
    "scale": 0.9,
}
OPTIONS = {
    "compressed queries": {"q_lora_rank": 7, "use_bias": True},
    "scores, dropout": SCORES | {"dropout_rate": 0.3},
    "ring": {"local_window_size": (7, 0), "q_lora_rank": 7, "gate": Gate("head")},
    "gate of queries": {
        "q_lora_rank": 7,
        "query_residual": True,
        "gate": Gate(activation="softplus"),
    },
    "blockwise": {"implementation": "blockwise", "rope": None},
}


INDEXER = {"q_lora_rank": 7, "indexer": flax_mha.Indexer(8, 12, 5)}


def by_distance(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx).astype(score.dtype)


THINNED = flax_mha.FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 5 != 3)
CALLS = {"scores, dropout": {"score_mod": by_distance}, "blockwise": {"mask": THINNED}}


def inputs(seed=0, shape=(B, T, D)):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def made(**options):
    options = SIZES | {"rope": ROPE, "decode": False} | options
    module = flax_mha.MultiHeadLatentAttention(N, D, rngs=nnx.Rngs(0), **options)
    if module.sinks is not None:
        module.sinks[...] = jnp.arange(N, dtype=jnp.float32)
    if "indexer" in options:  # a norm that shifts
        module.indexer.k_norm.bias[...] = jnp.cos(jnp.arange(12, dtype=jnp.float32))
    return module


# About 2^5 roundings of 2^-24, of sums of about 30 terms; the largest value is about 1.
assert_close = functools.partial(close, tolerance=2e-6, at_least=1.0)


def run(name, module, x, **arguments):
    arguments |= CALLS.get(name, {})
    if "dropout" in name:
        # With one key for all calls, only positions decide which weights are dropped.
        arguments |= {"deterministic": False, "rngs": nnx.Rngs(dropout=1)}
    return module(x, **arguments)


def jitted(sows=False, **arguments):
    """A call with these arguments, as one program; if it sows, with what is sown."""

    @nnx.jit
    def call(module, x):
        if sows:
            module = nnx.capture(module, nnx.Intermediate)
        return module(x, **arguments)

    return call


@pytest.mark.parametrize(
    "name", with_core(OPTIONS, "scores, dropout", "ring", "gate of queries")
)
def test_any_split_of_decoding_equals_one_call(name):
    module = made(**OPTIONS[name])
    x = inputs()
    whole = nnx.jit(lambda module, x: run(name, module, x, is_causal=True))(module, x)
    module.init_cache((B, 99, D))
    # A ring keeps its window, the new token and 64 spare slots.
    length = 7 + 1 + 64 if name == "ring" else 99
    assert module.cached_key.shape == (B, length, 1, C + R)
    step = nnx.jit(lambda module, x: run(name, module, x, decode=True))
    assert_close(in_parts(functools.partial(step, module), x, PIECES), whole)


@pytest.mark.core
def test_a_cache_has_the_bytes_of_its_latents():
    """512 + 64 numbers per token, whatever the heads; in 8 bits also a scale in float32
    of each of the two.
    """
    sizes = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 64,
        "v_head_dim": 4,
    }
    for dtype, per_token in (
        ("float32", 4 * 576),
        ("bfloat16", 2 * 576),
        ("int8", 576 + 8),
        ("float8_e4m3fn", 584),
    ):
        module = made(**sizes)
        module.init_cache((3, 7, D), dtype=dtype)
        cached = nnx.to_pure_dict(nnx.state(module, nnx.Cache))
        assert sum(x.nbytes for x in jax.tree.leaves(cached)) == 3 * 7 * per_token + 4


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("int8", 0.02), ("float8_e4m3fn", 0.1), ("bfloat16", 0.02)]
)
def test_caches_of_fewer_bits(dtype, tolerance):
    """Scores and values round to 1 / 254, 1 / 16 and 1 / 256 of the largest feature of
    a latent or a rotary key.
    """
    module = made()
    x = inputs()[:, :23]
    whole = jitted(is_causal=True)(module, x)
    module.init_cache((B, 31, D), dtype=dtype)
    step = functools.partial(jitted(decode=True), module)
    assert_close(in_parts(step, x, (11, *[1] * 12)), whole, tolerance=tolerance)


@pytest.mark.core
@pytest.mark.parametrize(
    "options", [{}, {"indexer": flax_mha.Indexer(8, 12, 3)}], ids=["latent", "indexer"]
)
def test_ragged_prompts_each_as_alone(options):
    """Padding, and slots without a token, hold NaN."""
    module = made(q_lora_rank=7, rope=RoPE(), **options)
    lengths = np.array([5, 2, 0, 9])
    x = np.asarray(inputs(1, (4, 12, D)))
    alone = np.asarray(jax.jit(jax.vmap(lambda x: module(x, is_causal=True)))(x))
    module.init_cache((4, 17, D), per_row=True)
    module.cached_key[...] = jnp.full_like(module.cached_key[...], jnp.nan)
    if options:
        index_key = module.cached_index_key
        index_key[...] = jnp.full_like(index_key[...], jnp.nan)
    step = nnx.jit(lambda module, x, lengths: module(x, lengths=lengths, decode=True))
    padding = np.arange(9)[None, :, None] >= lengths[:, None, None]
    prompts = np.where(padding, np.float32(np.nan), x[:, :9])

    output = np.asarray(step(module, prompts, jnp.asarray(lengths)))

    np.testing.assert_array_equal(module.cache_index[...], lengths)
    # Tokens that follow come after each sequence's own length.
    rows = np.arange(4)
    for i in range(3):
        following = step(module, x[rows, lengths + i][:, None], jnp.ones(4, jnp.int32))
        assert_close(following[:, 0], alone[rows, lengths + i])
    for row, length in enumerate(lengths):
        assert_close(output[row, :length], alone[row, :length])
        np.testing.assert_array_equal(output[row, length:], 0)


@pytest.mark.core
def test_masked_tokens_may_hold_nan():
    module = made()
    x = inputs()[:, :11]
    bad = jnp.asarray(x).at[:, 4].set(jnp.nan)
    mask = jnp.arange(11) != 4

    @jax.jit
    def of_the_others(x):
        def total(x):
            output = module(x, mask=mask[None, None, None])[:, mask]
            return output.sum(), output

        gradient, output = jax.grad(total, has_aux=True)(x)
        return output, gradient[:, mask]

    jax.tree.map(np.testing.assert_array_equal, of_the_others(bad), of_the_others(x))


@pytest.mark.core
def test_lengths_and_segments_equal_sequences_alone():
    module = made()
    x = inputs()[:, :11]
    lengths = jnp.array([7, 11])
    ids = jnp.repeat(jnp.array([0, 1]), jnp.array([4, 7]))[None]
    positions = jnp.concatenate([jnp.arange(4), jnp.arange(7)])

    @nnx.jit
    def together(module, x):
        # Padding may hold NaN.
        padded = module(jnp.asarray(x).at[0, 7:].set(jnp.nan), lengths=lengths)
        packed = module(x, segment_ids=jnp.tile(ids, (B, 1)), positions=positions)
        return padded[0, :7], packed

    @nnx.jit
    def alone(module, x):
        documents = [module(x[:, :4]), module(x[:, 4:])]
        return module(x[0, :7]), jnp.concatenate(documents, axis=1)

    for got, expected in zip(together(module, x), alone(module, x), strict=True):
        assert_close(got, expected)


def test_weights_and_largest_scores_are_sown_in_both_ways():
    """In one call, and while decoding."""
    module = made(rope=RoPE(), v_head_dim=SIZES["qk_nope_head_dim"] + R)
    x = inputs()[:, :11]
    sow = {"sow_weights": True, "sow_max_score": True}
    whole, sown = jitted(sows=True, is_causal=True, **sow)(module, x)
    module.init_cache((B, 11, D))
    jitted(decode=True)(module, x[:, :10])
    last, of_last = jitted(sows=True, decode=True, **sow)(module, x[:, 10:])
    weights = nnx.to_pure_dict(sown)["attention_weights"][0]
    of_last = nnx.to_pure_dict(of_last)
    assert_close(of_last["attention_weights"][0], weights[..., 10:, :])
    assert of_last["attention_max_score"][0].shape == (B, N)
    assert_close(last, whole[:, 10:])


def test_other_attention_functions_get_keys_and_values_of_heads():
    module = made(rope=RoPE(), v_head_dim=SIZES["qk_nope_head_dim"] + R)
    x = inputs()[:, :11]
    whole = jitted(is_causal=True)(module, x)
    module.init_cache((B, 11, D))

    module.attention_fn = nnx.dot_product_attention

    assert_close(jitted(is_causal=True)(module, x), whole)
    step = functools.partial(jitted(decode=True), module)
    assert_close(in_parts(step, x, (10, 1)), whole)


REFUSED = {
    "kv_lora_rank must be an int >= 1, but got 0": {"kv_lora_rank": 0},
    "q_lora_rank must be an int >= 1 or None, but got -1": {"q_lora_rank": -1},
    "fraction \\* head size must be an even integer": {"qk_rope_head_dim": 5},
    "norm_epsilon must be a finite number > 0, but got 0": {"norm_epsilon": 0},
    "sinks must be True or False": {"sinks": 1},
    "gate must be True, False or a flax_mha.Gate": {"gate": "row"},
    "q_lora_rank must be an int with query_residual": {"query_residual": True},
}


@pytest.mark.core
@pytest.mark.parametrize("message", REFUSED)
def test_constructors_that_are_refused(message):
    options = SIZES | {"rope": ROPE} | REFUSED[message]
    refused(message, made, **options)


@pytest.mark.core
def test_calls_that_are_refused():
    module = made()
    x = inputs()
    refused("cache not initialized", module, x, decode=True)
    refused(
        rf"input_shape must be \(batch..., length, {D}\)",
        module.init_cache,
        (B, 9, D + 1),
    )
    refused(f"got 7 but module expects {D}", module, x[..., :7])
    refused("positional", module, x, x, error=TypeError)
    module.init_cache((B, 9, D))
    refused("the cache is too short", module, x, decode=True)


class LoRA(nnx.Module):
    """A wrapper around a projection, which shows the wrapped kernel as its own. In
    test_lora.py, it does not.
    """

    def __init__(self, layer):
        self.layer = layer
        self.kernel = layer.kernel
        self.bias = layer.bias
        features = layer.out_features
        self.a = nnx.LoRAParam(0.3 * inputs(1, (*layer.in_features, 2)))
        self.b = nnx.LoRAParam(0.3 * inputs(2, (2, *features)))

    def __call__(self, x, out_sharding=None):
        # W x + B A x
        plain = self.layer(x, out_sharding=out_sharding)
        return plain + jnp.tensordot(x @ self.a[...], self.b[...], 1)


class Doubled(nnx.LinearGeneral):
    def __call__(self, x, out_sharding=None):
        return 2 * super().__call__(x, out_sharding=out_sharding)


def with_bias(layer):
    layer.bias = nnx.Param(inputs(3, layer.out_features))
    return layer


def with_product(layer):
    layer.dot_general = lambda *x, **options: 2 * jax.lax.dot_general(*x, **options)
    return layer


def as_subclass(layer):
    doubled = Doubled(
        layer.in_features, layer.out_features, use_bias=False, rngs=nnx.Rngs(0)
    )
    doubled.kernel = layer.kernel
    return doubled


REPLACED = {
    "LoRA": LoRA,
    "bias": with_bias,
    "subclass": as_subclass,
    "product": with_product,
}
VARIANTS = {
    "plain": {},
    "sinks, soft cap": {"sinks": True, "logits_soft_cap": 2.0},
    "ring": {"local_window_size": (7, 0)},
    "indexer": INDEXER,
    "blockwise": {"implementation": "blockwise"},
}


def expanded(module, x, is_causal=True):
    """Attention by its definition: the keys and values of all heads, by calls of the
    layers.
    """
    query = module.q_proj(x)
    both = module.kv_a_proj_with_mqa(x)
    heads = module.kv_b_proj(module.kv_a_layernorm(both[..., :C]))
    rotary = jnp.broadcast_to(both[..., None, C:], (*heads.shape[:-1], R))
    content = heads[..., : SIZES["qk_nope_head_dim"]]
    value = heads[..., SIZES["qk_nope_head_dim"] :]
    key = jnp.concatenate([content, rotary], -1)
    output = flax_mha.dot_product_attention(query, key, value, is_causal=is_causal)
    return module.o_proj(output)


@pytest.mark.core
@pytest.mark.parametrize("name", REPLACED)
def test_the_call_of_a_replaced_layer_counts(name):
    module = made(rope=None)
    x = inputs()
    plain = module(x, is_causal=True)
    module.kv_b_proj = REPLACED[name](module.kv_b_proj)

    output = module(x, is_causal=True)

    assert np.abs(output - plain).max() > 0.1
    assert_close(output, expanded(module, x), tolerance=4e-6)


@pytest.mark.parametrize(
    ("name", "variant"),
    with_core_tuples(
        [(name, "plain") for name in REPLACED]
        + [("bias", variant) for variant in list(VARIANTS)[1:]],
        ("LoRA", "plain"),
        ("bias", "sinks, soft cap"),
    ),
)
def test_decoding_calls_a_replaced_layer(name, variant):
    module = made(**VARIANTS[variant])
    x = inputs()
    module.kv_b_proj = REPLACED[name](module.kv_b_proj)
    whole = jitted(is_causal=True)(module, x)
    module.init_cache((B, 99, D))
    step = jitted(decode=True)
    got = in_parts(functools.partial(step, module), x, PIECES)
    assert_close(got, whole, tolerance=1e-5)


@pytest.mark.parametrize(
    "options",
    [core({}), {"indexer": flax_mha.Indexer(8, 12, 3)}],
    ids=["latent", "indexer"],
)
def test_a_replaced_layer_with_ragged_prompts_and_8_bits(options):
    """With lengths of each sequence, and over quantized latents."""
    options = {"q_lora_rank": 7} | options
    x = inputs()[:, :20]
    lengths = np.int32([20, 18])
    module = made(**options)
    module.kv_b_proj = with_bias(module.kv_b_proj)
    module.init_cache((B, 30, D), "int8", per_row=True)
    step = nnx.jit(
        lambda module, x, lengths=None: module(x, decode=True, lengths=lengths)
    )
    first = step(module, x, lengths)
    second = step(module, x[:, :1])
    for row, length in enumerate(lengths):
        module.init_cache((1, 30, D), "int8", per_row=True)
        alone = step(module, x[row : row + 1, :length])
        assert_close(first[row : row + 1, :length], alone)
        assert_close(second[row : row + 1], step(module, x[row : row + 1, :1]))


@pytest.mark.core
def test_a_plain_layer_is_still_absorbed():
    module = made()
    x = inputs()[:, :1]
    module.init_cache((B, 99, D))

    def has_keys_of_all_heads(module):
        graph, state = nnx.split(module)

        def step(state, x):
            return nnx.merge(graph, state)(x, decode=True)

        program = jax.make_jaxpr(step)(state, x)
        shapes = []
        for equation in equations(program.jaxpr):
            shapes += [variable.aval.shape for variable in equation.outvars]
        return any(shape[-3:-1] == (99, N) for shape in shapes)

    assert not has_keys_of_all_heads(module)
    module.kv_b_proj = LoRA(module.kv_b_proj)
    assert has_keys_of_all_heads(module)


@pytest.mark.parametrize(
    "dtype", with_core(["bfloat16", "float16", "float32"], "bfloat16")
)
def test_products_of_latents_are_added_in_float32(dtype):
    """The dtype of the result is the inputs'; so are those of gradients."""
    kernel = jnp.ones((C, N, 5 + 19), dtype)
    query = jnp.ones((B, T, N, 5 + R), dtype)

    def all_products(kernel, query):
        latent = Latent(size=C, key_size=5, layer=lambda x: x, kernel=kernel)
        absorbed = latent.absorb(query)
        return absorbed, latent.project(absorbed)

    jaxpr = jax.make_jaxpr(all_products)(kernel, query).jaxpr
    dots = [x for x in equations(jaxpr) if "dot" in x.primitive.name]
    assert [x.params["preferred_element_type"] for x in dots] == ["float32"] * 2
    outputs, pull = jax.vjp(all_products, kernel, query)
    for x in jax.tree.leaves((outputs, pull(outputs))):
        assert x.dtype == dtype


def product_of_heads(axes, x, kernel):
    """A product in float64, in the dtype of `x`."""
    product = np.einsum(axes, np.float64(x), np.float64(kernel))
    return jnp.asarray(product, jnp.float32).astype(x.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "mode"),
    with_core_tuples(
        itertools.product(
            [1, 8, 16, 32], ["bfloat16", "float16"], ["eager", "jit", "vmap"]
        ),
        (8, "bfloat16", "eager"),
        (32, "bfloat16", "jit"),
    ),
)
def test_products_of_latents_of_every_size(size, dtype, mode):
    """On a CPU, XLA has no product for some layouts of bfloat16."""
    for batch, length, heads, features in ((1, 1, 2, 8), (2, 1, 2, 8), (2, 3, 3, 5)):
        shape = (2, batch, length, heads)
        kernel = jnp.asarray(inputs(0, (size, heads, 2 * features)), dtype)
        query = jnp.asarray(inputs(1, (*shape, features)), dtype)
        average = jnp.asarray(inputs(2, (*shape, size)), dtype)
        absorb = Latent(size, features, layer=None, kernel=kernel).absorb
        project = Latent(size, features, layer=None, kernel=kernel).project
        if mode == "vmap":
            absorb = jax.jit(jax.vmap(absorb))
            project = jax.jit(jax.vmap(project))
        if mode == "jit":
            absorb = jax.jit(absorb)
            project = jax.jit(project)

        absorbed = absorb(query)
        values = project(average)

        key_kernel = kernel[..., :features]
        value_kernel = kernel[..., features:]
        expected = product_of_heads("...nf,cnf->...nc", query, key_kernel)
        assert_rounded(absorbed, expected)
        expected = product_of_heads("...nc,cnf->...nf", average, value_kernel)
        assert_rounded(values, expected)


def assert_rounded(x, expected):
    """Sums of float32 may round to the other neighbor."""
    assert x.dtype == expected.dtype
    one_rounding = float(jnp.finfo(x.dtype).eps)
    close(np.float32(x), np.float32(expected), tolerance=one_rounding, at_least=1.0)


@pytest.mark.parametrize(
    ("rank", "batch", "dtype", "is_jitted"),
    with_core_tuples(
        [
            *pairwise([4, 8, 32], [1, 2], ["bfloat16", "float16"], [False, True]),
            (8, 2, "bfloat16", False),
        ],
        (8, 2, "bfloat16", False),
    ),
)
@jax.numpy_dtype_promotion("standard")  # Flax's norms multiply float32 by 16 bits.
def test_small_latents_of_16_bits_decode(rank, batch, dtype, is_jitted):
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": 4, "rope": None}
    sizes |= {"qk_nope_head_dim": 8, "v_head_dim": 8}
    module = made(**sizes, dtype=dtype, param_dtype=dtype)
    exact = made(**sizes)
    params = nnx.state(module, nnx.Param)
    nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    x = inputs(shape=(batch, 6, D))
    whole = exact(x, is_causal=True)
    x = jnp.asarray(x, dtype)
    module.init_cache((batch, 9, D))
    step = functools.partial(module, decode=True)
    if is_jitted:
        step = functools.partial(jitted(decode=True), module)

    output = in_parts(step, x, (3, 1, 2))

    assert output.dtype == dtype
    close(np.float32(output), np.float32(whole), tolerance=0.03, at_least=1.0)
