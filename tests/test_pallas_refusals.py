"""Calls that the Pallas kernels refuse before compilation, and programs for a TPU of calls that they compute."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import compiled_for, forget_programs
from jax import lax
from kernels import abstract, assert_refused, call, explained, lowered
from marks import with_core

from flax_mha import dot_product_attention, masks, recipes

B, T, N, H = 2, 256, 2, 32


abstract = functools.partial(abstract, k=N)


@pytest.fixture(autouse=True, scope="module")
def tpu():
    with pytest.MonkeyPatch.context() as patch:
        compiled_for(patch, "tpu")
        forget_programs()
        yield
    forget_programs()


VECTOR, LARGE = jnp.ones((4, 3)), jnp.ones((N, 3000))
REFUSED = {
    "float16": (abstract(dtype=jnp.float16), {}, "float32 and bfloat16, but the inputs are float16"),
    "head size": (abstract(h=264), {}, "head sizes must be at most 256"),
    "precision": (abstract(), {"precision": "highest"}, "not Precision.HIGHEST|not highest"),
    "no keys": (abstract(s=0), {}, "an axis has length 0"),
    "tiles": (
        abstract(2**14, 2**14, batch=(256,)),
        {"key_value_seq_lengths": jnp.ones(256, jnp.int32)},
        "tile table does not fit: .* room for [0-9]+ words, but 32 x 32 tiles for 512 heads take ",
    ),
    "tiles of heads that share a bias": (
        abstract(8192, 8192, batch=(512,)),
        {"bias": jnp.ones((1, 1))},
        "tile table does not fit: .* 16 x 16 tiles for 1024 heads",
    ),
    "a mask's primitive": (
        abstract(),
        {"mask": ~masks.FunctionMask(lambda b, h, q, k: lax.population_count(q) > 3)},
        "mask_mod must not apply population_count",
    ),
    "a mask's large table": (
        abstract(),
        {"mask": masks.FunctionMask(lambda b, h, q, k: jnp.ones((64, 64), bool)[q // 4, k // 4])},
        r"4096 entries \(shape \(64, 64\)\)",
    ),
}
# Functions of the score, the head and the positions.
SCORE_MODS = {
    "vectors": (lambda s, h, q, k: s + jnp.sum(VECTOR[q % 4]), "score_mod must not look up vectors by position"),
    "vectors made": (lambda s, h, q, k: s + jnp.sum(jnp.stack([s, s])), "must not apply (stack|concatenate)"),
    "control flow": (
        lambda s, h, q, k: lax.cond(q > k, lambda: s, lambda: -s),
        "score_mod must not apply cond .*control flow",
    ),
    "a custom derivative": (lambda s, h, q, k: jax.nn.relu(s), "must not apply custom_jvp_call"),
    "a primitive": (lambda s, h, q, k: s + lax.lgamma(s), "must not apply lgamma"),
    "a remainder of floats": (lambda s, h, q, k: lax.rem(s, s * 2), "must not apply rem"),
    "a dtype": (
        lambda s, h, q, k: s.astype(jnp.bfloat16).astype(s.dtype),
        "must use float32, int32, bool .* convert_element_type has bfloat16",
    ),
    "a large table": (
        lambda s, h, q, k: s + LARGE[h, q],
        r"tables with at most 2048 entries, but one has 3000 entries \(shape \(2, 3000\)\)",
    ),
}
REFUSED |= {
    name: (abstract(), {"score_mod": lambda s, b, h, q, k, f=f: f(s, h, q, k)}, reason)
    for name, (f, reason) in SCORE_MODS.items()
}


@pytest.mark.core
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    arrays, arguments, reason = REFUSED[name]
    [refusal] = assert_refused("pallas", arrays, arguments, reason)
    assert re.search(reason, refusal)
    assert explained(arrays, **arguments).chosen != "pallas"  # it has never been timed


def of_most_primitives(score, b, h, q, k):
    """The test fails at a primitive without a rule in Mosaic, or whose rule needs a device."""
    x, distance = jnp.abs(score) + 1.5, q - k
    floats = jnp.log1p(x) + jnp.tanh(x) + x**1.5 + jnp.sign(score) + jnp.sin(x) + jnp.round(x) + lax.logistic(x)
    integers = distance // 3 + distance % 5 + jnp.abs(distance) + (distance >> 1) + jnp.sign(distance)
    return score + floats + integers.astype(jnp.float32)


LOWERED = {
    "plain": call(abstract()),
    "bias of every head": call(abstract(), bias=jnp.ones((N, T, T), jnp.bfloat16), is_causal=True),
    "all primitives": call(abstract(dtype=jnp.float32), score_mod=of_most_primitives),
    "table": (abstract(), recipes.t5_bias(jnp.ones((32, N)))),
    "highest precision": call(abstract(dtype=jnp.float32), precision="highest"),
    "block-sparse, dropout": (
        abstract(300, 300, h=80),
        recipes.block_sparse(jnp.ones((N, 10, 10), bool), 32) | {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
    ),
}


@pytest.mark.parametrize("name", with_core(LOWERED, "plain", "all primitives"))
def test_a_tpu_gets_the_kernels(name):
    arrays, arguments = LOWERED[name]
    text = lowered(arrays, implementation="pallas", **arguments)
    assert text.count("tpu_custom_call") == 3
    for phase in ("forward", "dq", "dkv"):
        assert f"flax_mha_{phase}" in text


@pytest.mark.parametrize(("h", "part"), [(64, f"64x{T}"), (80, f"80x{T}"), (128, f"{T}x128"), (1, f"{T}x1")])
def test_no_row_of_memory_is_padded(h, part):
    """Rows have 128 numbers. With fewer features, tokens lie along them, as in XLA's layout of the arrays."""
    text = lowered(abstract(h=h), implementation="pallas", is_causal=True)
    kernels = [line.rpartition(" : ")[2] for line in text.splitlines() if "tpu_custom_call" in line]
    arrays = re.findall(rf"tensor<{B}x{N}x1x(\d+x\d+)xbf16>", "".join(kernels))
    assert arrays == [part] * (4 + 5 + 6)


def test_the_gradient_of_a_bias_has_its_own_shape():
    """For a bias that heads and batch entries share, no T x S array for each of them is built."""
    query, key, value = abstract()
    bias = jax.ShapeDtypeStruct((T, T), jnp.float32)

    def both(query, key, value, bias):
        attend = functools.partial(dot_product_attention, implementation="pallas")
        return jax.vjp(attend, query, key, value, bias)[1](query)

    text = str(jax.make_jaxpr(both)(query, key, value, bias))
    assert "flax_mha_dbias" in text
    assert f"{B},{N},{T},{T}]" not in text.replace(" ", "")
    assert f"[{B * N},{T},{T}]" not in text.replace(" ", "")
