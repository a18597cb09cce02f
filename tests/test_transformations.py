"""vmap, export and checkpoint with many arguments, empty axes, and
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
MAPPED = {}
MAPPED["scores"] = {
    "bias": normal(B, N, T, T),
    "mask": rng.random((B, 1, T, T)) < 0.7,
    "scale": np.array([0.1, 0.2, 0.3], np.float32),
    "sinks": normal(B, N),
}
MAPPED["positions"] = {
    "query_offset": np.array([0, 7, 19], np.int32),
    "key_value_offset": np.array([3, 0, 11], np.int32),
    "query_seq_lengths": np.array([40, 11, 29], np.int32),
}
MAPPED["tokens"] = {
    "key_value_seq_lengths": np.array([40, 11, 0], np.int32),
    "query_segment_ids": np.sort(rng.integers(0, 3, (B, T))).astype(np.int32),
}


@pytest.mark.parametrize("name", with_core(MAPPED, "positions"))
@BOTH
def test_vmap_over_arguments_equals_a_loop_over_them(name, implementation):
    """Also together with query, key and value."""

    @jax.jit
    def call(arguments, query, key, value):
        return dot_product_attention(
            query,
            key,
            value,
            **arguments,
            is_causal=name == "positions",
            implementation=implementation,
        )

    arguments = MAPPED[name]
    shared = [x[0] for x in ARRAYS]

    # Of the arguments only, and of all arrays.
    alone = jax.vmap(call, (0, None, None, None))(arguments, *shared)
    together = jax.vmap(call)(arguments, *ARRAYS)

    for i in range(B):
        entry = {name: x[i] for name, x in arguments.items()}
        arrays = [x[i] for x in ARRAYS]
        want = call(entry, *shared)
        np.testing.assert_allclose(alone[i], want, rtol=0, atol=2e-6)
        want = call(entry, *arrays)
        np.testing.assert_allclose(together[i], want, rtol=0, atol=2e-6)


@BOTH
def test_vmap_over_keys_of_dropout_masks_and_captured_arrays(implementation):
    """Also of gradients with `jax.checkpoint`."""
    query, key, value = (x[:1] for x in ARRAYS)
    dropout_keys = jax.random.split(jax.random.key(0), 3)
    lengths = jnp.array([3, 20, 40])
    tables = jnp.outer(jnp.arange(1.0, 4), TABLE)

    def call(dropout_key, mask, table):
        def add_table(score, b, h, q_idx, kv_idx):
            return score + table[kv_idx]

        return dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            score_mod=add_table,
            dropout_rng=dropout_key,
            dropout_rate=0.5,
            implementation=implementation,
        )

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=2, has_aux=True)
    def run(dropout_key, mask, table):
        output = jax.checkpoint(call)(dropout_key, mask, table)
        return jnp.sin(output).sum(), output

    (losses, outputs), slopes = jax.vmap(run)(dropout_keys, LengthMask(lengths), tables)

    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
    for i in range(3):
        (loss, output), slope = run(dropout_keys[i], LengthMask(lengths[i]), tables[i])
        same(losses[i], loss)
        same(outputs[i], output)
        same(slopes[i], slope)


def decaying(score, b, h, q_idx, kv_idx):
    distance = b * jnp.abs(q_idx - kv_idx)
    return score - 0.1 * distance.astype(score.dtype)


def of_thirds(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + b) % 3 != h % 3


EXPORTED = {}
EXPORTED["plain"] = {}
EXPORTED["causal window, soft cap"] = {
    "is_causal": True,
    "local_window_size": (9, 0),
    "logits_soft_cap": 3.0,
}
EXPORTED["functions"] = {"score_mod": decaying, "mask": FunctionMask(of_thirds)}
EXPORTED["dropout"] = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}


@pytest.mark.parametrize("name", with_core(EXPORTED, "plain"))
def test_export_with_symbolic_sizes(name):
    """One program for every batch size and length, without naming an implementation."""

    def call(query, key, value, lengths, query_ids, key_ids, implementation=None):
        arguments = EXPORTED[name] | {
            "key_value_seq_lengths": lengths,
            "query_segment_ids": query_ids,
            "key_value_segment_ids": key_ids,
            "implementation": implementation,
        }
        explained = explain_implementation(query, key, value, **arguments)
        assert explained.chosen == "xla"
        return dot_product_attention(query, key, value, **arguments)

    batch, queries, keys = export.symbolic_shape("batch, queries, keys")
    of_keys = jax.ShapeDtypeStruct((batch, keys, K, H), jnp.float32)
    exported = export.export(jax.jit(call))(
        jax.ShapeDtypeStruct((batch, queries, N, H), jnp.float32),
        of_keys,
        of_keys,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, queries), jnp.int32),
        jax.ShapeDtypeStruct((batch, keys), jnp.int32),
    )

    # One exported program for all of these.
    for b, t, s in ((3, 40, 40), (1, 1, 7)):
        arrays = [
            normal(b, t, N, H),
            normal(b, s, K, H),
            normal(b, s, K, H),
            np.full(b, s - 1, np.int32),
            np.zeros((b, t), np.int32),
            np.broadcast_to(np.arange(s, dtype=np.int32) // 9, (b, s)),
        ]
        want = call(*arrays, implementation="xla")
        np.testing.assert_allclose(exported.call(*arrays), want, rtol=0, atol=5e-6)


@pytest.mark.core
def test_blockwise_rejects_symbolic_sizes():
    batch, length = export.symbolic_shape("batch, length")
    x = jax.ShapeDtypeStruct((batch, length, N, H), jnp.float32)
    attend = functools.partial(dot_product_attention, implementation="blockwise")
    message = "it needs static shapes, but some dimensions are symbolic"
    with pytest.raises(NotImplementedError, match=message):
        export.export(jax.jit(attend))(x, x, x)


def all_arguments(t, s):
    """Arguments of every kind, for t queries and s keys."""
    factor = jnp.ones(())
    return {
        "bias": np.ones((N, t, s), np.float32),
        "is_causal": True,
        "query_segment_ids": np.zeros(t, np.int32),
        "key_value_segment_ids": np.zeros(s, np.int32),
        "score_mod": lambda score, b, h, q_idx, kv_idx: score * factor,
        "dropout_rate": 0.5,
        "dropout_rng": jax.random.key(0),
        "sinks": np.zeros(N, np.float32),
        "mask": FunctionMask(lambda b, h, q_idx, kv_idx: q_idx != kv_idx),
    }


@pytest.mark.parametrize(
    ("empty", "arguments", "implementation"),
    pairwise(("B", "T", "S", "Hv"), ("nothing", "all"), ("xla", "blockwise")),
)
def test_empty_axes_give_finite_results(empty, arguments, implementation):
    sizes = {"B": B, "T": T, "S": T, "Hv": H} | {empty: 0}
    b, t, s, hv = sizes.values()
    query = np.ones((b, t, N, H), np.float32)
    key = np.ones((b, s, K, H), np.float32)
    value = np.ones((b, s, K, hv), np.float32)
    given = all_arguments(t, s) if arguments == "all" else {}

    run = jax.jit(with_gradients(implementation, return_residual=True, **given))
    output, lse, *gradients = jax.device_get(run(query, key, value))

    assert output.shape == (b, t, N, hv)
    assert np.isfinite(output).all()
    for gradient, array in zip(gradients, (query, key, value), strict=True):
        assert gradient.shape == array.shape
        assert np.isfinite(gradient).all()
    if empty == "S":
        # As for rows whose keys are all masked.
        assert (output == 0).all()
        assert (lse == given.get("sinks", -np.inf)).all()
        assert not gradients[0].any()


@BOTH
@pytest.mark.parametrize("together", [1, 2, 6])
def test_loops_over_groups_of_heads_change_nothing(
    together, implementation, monkeypatch
):
    """On a TPU, groups of batch entries or heads may share keys and lengths."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((3, 20, 4, 8), np.float32)
    key = rng.standard_normal((3, 20, 2, 8), np.float32)
    value = rng.standard_normal((3, 20, 2, 8), np.float32)
    bias = np.ones((1, 4, 1, 20), np.float32)

    def answers():
        run = with_gradients(
            implementation,
            key_value_seq_lengths=jnp.array([20, 7, 0]),
            sinks=jnp.zeros((3, 4)),
        )
        return jax.jit(run)(query, key, value, bias)

    want = answers()
    monkeypatch.setattr(schedule, "_loops", lambda call, scores: (None, together))
    got = answers()

    # Sums of 20 terms, in another order.
    close(got, want, 20 * np.finfo(np.float32).eps)


@BOTH
@pytest.mark.parametrize(
    ("of_keys", "of_values", "of_cotangents"), [(1e-3, 100, 1e3), (1, 1, 1e4)]
)
def test_gradients_of_float16_overflow_only_where_the_result_does(
    implementation, of_keys, of_values, of_cotangents, monkeypatch
):
    """As on an accelerator, with gradients of scores beyond the range of float16."""
    compiled_for(monkeypatch, "gpu")
    rng = np.random.default_rng(0)

    def drawn(size):
        return jnp.asarray(rng.standard_normal((1, 256, 2, 16)) * size, jnp.float16)

    arrays = [drawn(of_keys), drawn(of_keys), drawn(of_values)]
    cotangent = drawn(of_cotangents)
    attend = functools.partial(
        dot_product_attention,
        is_causal=True,
        local_window_size=4,
        implementation=implementation,
    )

    @jax.jit
    def gradients(query, key, value, cotangent):
        _, pull = jax.vjp(attend, query, key, value)
        return pull(cotangent)

    # float32 has room for every number on the way.
    exact = [x.astype(jnp.float32) for x in (*arrays, cotangent)]
    close(gradients(*arrays, cotangent), gradients(*exact), 4e-3)


def test_export_of_decoding_with_symbolic_sizes():
    def shapes(batch, tokens, slots):
        of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        query = of((batch, tokens, 2, 8))
        new = of((batch, tokens, 1, 8))
        cached = of((batch, slots, 1, 8))
        index = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return query, new, new, KVCache(cached, cached, index)

    def values(shape):
        """Sines, in other words numbers that differ."""
        steps = np.arange(math.prod(shape)).reshape(shape)
        return jnp.asarray(np.sin(steps), jnp.bfloat16)

    decode = jax.jit(cached_attention)
    symbols = export.symbolic_shape(
        "batch, tokens, slots", constraints=("tokens <= slots",)
    )
    exported = export.export(decode)(*shapes(*symbols))

    for batch, tokens, slots in ((2, 5, 30), (3, 1, 9)):
        query = values((batch, tokens, 2, 8))
        new = values((batch, tokens, 1, 8))
        cached = values((batch, slots, 1, 8))
        index = jnp.arange(1, batch + 1, dtype=jnp.int32)
        cache = KVCache(cached, -cached, index)

        got, after = exported.call(query, new, new, cache)
        want, wanted_after = decode(query, new, new, cache)

        got = got.astype(np.float32)
        np.testing.assert_allclose(got, want.astype(np.float32), rtol=0, atol=2.0**-7)
        assert (after.key == wanted_after.key).all()
        assert (after.index == wanted_after.index).all()


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


@pytest.mark.core
def test_linear_transpose_is_rejected():
    x = jnp.ones((1, 3, 2, 4))
    message = "jax.linear_transpose does not support attention; use jax.vjp"

    def of_values(value):
        return dot_product_attention(x, x, value, implementation="blockwise")

    refused(message, jax.linear_transpose(of_values, x), x, error=NotImplementedError)
