"""vmap, export, checkpoint and linear_transpose with many arguments, empty axes, and
gradients in float16.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, refused, with_gradients
from jax import export
from kernels import kernels_of_two_blocks
from marks import pairwise, with_core

from flax_mha import dot_product_attention, explain_implementation
from flax_mha._src import plan as schedule
from flax_mha.cache import KVCache, cached_attention
from flax_mha.masks import FunctionMask, LengthMask

B = 3
T = 40
N = 4
K = 2
H = 8
rng = np.random.default_rng(0)
ARRAYS = [rng.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K)]
TABLE = jnp.asarray(rng.standard_normal(T), jnp.float32)
BOTH = pytest.mark.parametrize("implementation", ["xla", "blockwise"])
pytestmark = pytest.mark.usefixtures("small_tiles")


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


# Arguments that are mapped together.
MAPPED = {
    "scores": {
        "bias": normal(B, N, T, T),
        "mask": rng.random((B, 1, T, T)) < 0.7,
        "scale": np.array([0.1, 0.2, 0.3], np.float32),
        "sinks": normal(B, N),
    },
    "positions": {
        "query_offset": np.array([0, 7, 19], np.int32),
        "key_value_offset": np.array([3, 0, 11], np.int32),
        "query_seq_lengths": np.array([40, 11, 29], np.int32),
    },
    "tokens": {
        "key_value_seq_lengths": np.array([40, 11, 0], np.int32),
        "query_segment_ids": np.sort(rng.integers(0, 3, (B, T))).astype(np.int32),
    },
}


@pytest.mark.parametrize("name", with_core(MAPPED, "positions"))
@BOTH
def test_vmap_over_arguments_equals_a_loop_over_them(name, implementation):
    """Also together with query, key and value."""

    @jax.jit
    def call(arguments, *arrays):
        return dot_product_attention(
            *arrays,
            **arguments,
            is_causal=name == "positions",
            implementation=implementation,
        )

    arguments = MAPPED[name]
    shared = [x[0] for x in ARRAYS]
    alone = np.asarray(jax.vmap(call, (0, None, None, None))(arguments, *shared))
    together = np.asarray(jax.vmap(call)(arguments, *ARRAYS))
    for i in range(B):
        entry = {name: x[i] for name, x in arguments.items()}
        np.testing.assert_allclose(alone[i], call(entry, *shared), rtol=0, atol=2e-6)
        np.testing.assert_allclose(
            together[i], call(entry, *(x[i] for x in ARRAYS)), rtol=0, atol=2e-6
        )


@BOTH
def test_vmap_over_keys_of_dropout_masks_and_captured_arrays(implementation):
    """Also of gradients with `jax.checkpoint`."""
    attend = functools.partial(
        dot_product_attention, *(x[:1] for x in ARRAYS), implementation=implementation
    )
    keys = jax.random.split(jax.random.key(0), 3)
    lengths = jnp.array([3, 20, 40])
    tables = jnp.outer(jnp.arange(1.0, 4), TABLE)

    def call(key, mask, table):
        mod = lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]  # noqa: E731
        return attend(dropout_rng=key, dropout_rate=0.5, mask=mask, score_mod=mod)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=2, has_aux=True)
    def run(key, mask, table):
        output = jax.checkpoint(call)(key, mask, table)
        return jnp.sin(output).sum(), output

    got = jax.vmap(run)(keys, LengthMask(lengths), tables)
    for i in range(3):
        want = run(keys[i], LengthMask(lengths[i]), tables[i])
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=2e-6),
            got,
            want,
        )


EXPORTED = {
    "plain": {},
    "causal window, soft cap": {
        "is_causal": True,
        "local_window_size": (9, 0),
        "logits_soft_cap": 3.0,
    },
    "functions": {
        "score_mod": lambda score, b, h, q_idx, kv_idx: (
            score - 0.1 * (b * jnp.abs(q_idx - kv_idx)).astype(score.dtype)
        ),
        "mask": FunctionMask(
            lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 != h % 3
        ),
    },
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
}


@pytest.mark.parametrize("name", with_core(EXPORTED, "plain"))
def test_export_with_symbolic_sizes(name):
    """One program for every batch size and length, without naming an implementation."""
    batch, queries, keys = export.symbolic_shape("batch, queries, keys")

    def call(*arrays, implementation=None):
        names = ("key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
        arguments = EXPORTED[name] | dict(zip(names, arrays[3:], strict=True))
        assert (
            explain_implementation(
                *arrays[:3], implementation=implementation, **arguments
            ).chosen
            == "xla"
        )
        return dot_product_attention(
            *arrays[:3], implementation=implementation, **arguments
        )

    def shapes(b, t, s):
        floats, ints = (
            functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
            for dtype in (jnp.float32, jnp.int32)
        )
        return (
            floats((b, t, N, H)),
            *[floats((b, s, K, H))] * 2,
            *map(ints, ((b,), (b, t), (b, s))),
        )

    exported = export.export(jax.jit(call))(*shapes(batch, queries, keys))
    for b, t, s in ((3, 40, 40), (1, 1, 7)):
        arrays = [normal(*x.shape) for x in shapes(b, t, s)[:3]]
        key_ids = np.broadcast_to(np.arange(s, dtype=np.int32) // 9, (b, s))
        arrays += [np.full(b, s - 1, np.int32), np.zeros((b, t), np.int32), key_ids]
        got = exported.call(*arrays)
        want = call(*arrays, implementation="xla")
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6)


@pytest.mark.core
def test_blockwise_refuses_symbolic_sizes():
    batch, length = export.symbolic_shape("batch, length")
    x = jax.ShapeDtypeStruct((batch, length, N, H), jnp.float32)
    attend = functools.partial(dot_product_attention, implementation="blockwise")
    with pytest.raises(
        NotImplementedError,
        match="it needs static shapes, but some dimensions are symbolic",
    ):
        export.export(jax.jit(attend))(x, x, x)


@pytest.mark.parametrize(
    ("empty", "name", "implementation"),
    pairwise(("B", "T", "S", "Hv"), ("nothing", "all"), ("xla", "blockwise")),
)
def test_empty_axes(empty, name, implementation):
    b, t, s, hv = (
        0 if name == empty else size
        for name, size in {"B": B, "T": T, "S": T, "Hv": H}.items()
    )
    arrays = [
        np.ones(shape, np.float32)
        for shape in ((b, t, N, H), (b, s, K, H), (b, s, K, hv))
    ]
    arguments = {}
    if name == "all":
        table = jnp.ones(())
        arguments = {
            "bias": np.ones((N, t, s), np.float32),
            "is_causal": True,
            "query_segment_ids": np.zeros(t, np.int32),
            "key_value_segment_ids": np.zeros(s, np.int32),
            "score_mod": lambda score, b, h, q_idx, kv_idx: score * table,
            "dropout_rate": 0.5,
            "dropout_rng": jax.random.key(0),
            "sinks": np.zeros(N, np.float32),
            "mask": FunctionMask(lambda b, h, q_idx, kv_idx: q_idx != kv_idx),
        }

    run = jax.jit(with_gradients(implementation, return_residual=True, **arguments))
    output, lse, *gradients = jax.device_get(run(*arrays))
    assert output.shape == (b, t, N, hv)
    assert np.isfinite(output).all()
    assert (
        empty != "S"
        or ((output == 0) & (lse == arguments.get("sinks", -np.inf))[..., None]).all()
    )
    assert all(
        np.isfinite(x).all() and x.shape == y.shape
        for x, y in zip(gradients, arrays, strict=True)
    )
    assert empty != "S" or not gradients[0].any()


@BOTH
def test_loops_over_groups_of_heads_change_nothing(implementation, monkeypatch):
    """On a TPU, groups of batch entries or heads may share keys and lengths."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((3, 20, n, 8), np.float32) for n in (4, 2, 2)]
    arrays.append(np.ones((1, 4, 1, 20), np.float32))

    def answers():
        more = {
            "key_value_seq_lengths": jnp.array([20, 7, 0]),
            "sinks": jnp.zeros((3, 4)),
        }
        return jax.jit(with_gradients(implementation, **more))(*arrays)

    want = answers()
    for together in (1, 2, 6):
        monkeypatch.setattr(
            schedule, "_loops", lambda call, scores, together=together: (None, together)
        )
        # Sums of 20 terms, in another order.
        close(answers(), want, 20 * np.finfo(np.float32).eps)


@BOTH
@pytest.mark.parametrize("size", [(1e-3, 100, 1e3), (1, 1, 1e4)])
def test_gradients_of_float16_overflow_only_where_the_result_does(
    implementation, size, monkeypatch
):
    """As on an accelerator, with gradients of scores beyond the range of float16."""
    compiled_for(monkeypatch, "gpu")
    rng, (of_keys, of_values, of_cotangents) = np.random.default_rng(0), size
    arrays = [
        rng.standard_normal((1, 256, 2, 16)) * x
        for x in (of_keys, of_keys, of_values, of_cotangents)
    ]
    *arrays, cotangent = (jnp.asarray(x, jnp.float16) for x in arrays)

    def gradients(*arrays):
        more = {
            "is_causal": True,
            "local_window_size": 4,
            "implementation": implementation,
        }
        attend = functools.partial(dot_product_attention, **more)
        return jax.vjp(attend, *arrays)[1](cotangent.astype(arrays[0].dtype))

    exact = jax.jit(gradients)(*(x.astype(jnp.float32) for x in arrays))
    close(jax.jit(gradients)(*arrays), exact, 4e-3)


def test_export_of_decoding_with_symbolic_sizes():
    batch, tokens, slots = export.symbolic_shape(
        "batch, tokens, slots", constraints=("tokens <= slots",)
    )

    def shapes(batch, tokens, slots):
        of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        cache = KVCache(
            *(of((batch, slots, 1, 8)) for _ in range(2)),
            jax.ShapeDtypeStruct((batch,), jnp.int32),
        )
        return (
            of((batch, tokens, 2, 8)),
            *(of((batch, tokens, 1, 8)) for _ in range(2)),
            cache,
        )

    exported = export.export(jax.jit(cached_attention))(*shapes(batch, tokens, slots))
    for sizes in ((2, 5, 30), (3, 1, 9)):
        *new, cache = jax.tree.map(
            lambda x: np.arange(math.prod(x.shape)).reshape(x.shape), shapes(*sizes)
        )
        query, key, value, keys, values = (
            jnp.asarray(np.sin(x), jnp.bfloat16) for x in (*new, *cache.arrays[:2])
        )
        cache = KVCache(keys, -values, jnp.asarray(cache.index + 1, jnp.int32))
        (got, after), (want, wanted) = (
            f(query, key, value, cache)
            for f in (exported.call, jax.jit(cached_attention))
        )
        np.testing.assert_allclose(
            got.astype(np.float32), want.astype(np.float32), rtol=0, atol=2.0**-7
        )
        assert (after.key == wanted.key).all()
        assert (after.index == wanted.index).all()


@pytest.mark.core
@BOTH
def test_a_policy_saves_attention_by_name(implementation):
    """There are as many products ("blockwise": forward passes) as without
    `jax.checkpoint`.
    """
    x = jax.ShapeDtypeStruct((40, 1, 4), jnp.float32)
    primitives = ("dot_general", "function")
    saved, without, anew = kernels_of_two_blocks(
        primitives, x, is_causal=True, implementation=implementation
    )
    assert 0 < saved == without < anew


KEYS = jnp.array([5, 9])
LINEAR = {
    "plain": (None, {}),
    "causal, dense": ("xla", {"is_causal": True}),
    "causal": ("blockwise", {"is_causal": True}),
    "lengths": (
        "blockwise",
        {"key_value_seq_lengths": KEYS, "query_seq_lengths": jnp.array([7, 3])},
    ),
    "window, soft cap, sinks": (
        "xla",
        {"local_window_size": 2, "logits_soft_cap": 3.0, "sinks": jnp.ones(4)},
    ),
    "dropout": (
        "blockwise",
        {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3), "is_causal": True},
    ),
    "mask": ("xla", {"mask": jnp.arange(9) % 2 == 0, "bias": jnp.ones((7, 9))}),
    "score_mod": (
        "xla",
        {"score_mod": lambda score, b, *_: score * KEYS[b].astype(score.dtype)},
    ),
}


@pytest.mark.parametrize("name", with_core(LINEAR, "causal, dense"))
def test_linear_transpose_by_values(name):
    """Attention is linear in the values, so the transpose is the gradient, also under
    `jit`.
    """
    implementation, arguments = LINEAR[name]
    rng = np.random.default_rng(0)
    shapes = (2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 3), (2, 7, 4, 3)
    query, key, value, cotangent = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes
    )

    def attend(value, query=query, key=key):
        return dot_product_attention(
            query, key, value, implementation=implementation, **arguments
        )

    (want,) = jax.vjp(attend, value)[1](cotangent)
    assert jnp.abs(want).max() > 0.1
    (got,) = jax.linear_transpose(attend, value)(cotangent)
    np.testing.assert_allclose(got, want, atol=1e-6)

    @jax.jit
    def transposed(query, key, cotangent):
        like = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.linear_transpose(lambda value: attend(value, query, key), like)(
            cotangent
        )[0]

    np.testing.assert_allclose(transposed(query, key, cotangent), want, atol=2e-6)
    if not name.startswith("causal"):
        return
    # The transpose is differentiable.
    d_query = jax.grad(
        lambda query: jnp.vdot(transposed(query, key, cotangent), value)
    )(query)
    want = jax.grad(lambda query: jnp.vdot(attend(value, query), cotangent))(query)
    np.testing.assert_allclose(d_query, want, atol=2e-5)


@pytest.mark.core
def test_other_linear_transposes():
    """With the residual, and of calls that are not linear, or not known to be."""
    x = jnp.ones((1, 3, 2, 4))
    (got,) = jax.linear_transpose(
        lambda value: dot_product_attention(x, x, value, return_residual=True)[0], x
    )(x)
    np.testing.assert_allclose(got, x, atol=1e-6)
    attend = functools.partial(dot_product_attention, key=x, implementation="blockwise")
    for function in (
        lambda value: attend(value, value=value),
        jax.jit(lambda value: attend(x, value=value)),
    ):
        message = "only as a function of value, .* use jax.vjp"
        refused(
            message, jax.linear_transpose(function, x), x, error=NotImplementedError
        )
