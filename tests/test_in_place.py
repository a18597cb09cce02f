"""Few queries read many keys in place: outputs, log-sum-exps and derivatives equal
those of the dense path.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close
from marks import core, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha._src.core import tracing
from flax_mha.masks import FunctionMask

N = 4
K = 2
H = 6
HV = 5
S = 149
rng = np.random.default_rng(0)
BATCH = (2,)
INDEX = jnp.array([3, 140], jnp.int32)
SLOPES = jnp.asarray(rng.standard_normal(N), jnp.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Three blocks of keys, and several of queries; the last ones overlap those before."""
    monkeypatch.setattr(schedule, "MIN_KEYS_IN_PLACE", 100)
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 3)
    monkeypatch.setattr(schedule, "MAX_WIDTH_IN_PLACE", 64)


def arrays(t, batch=BATCH, seed=1):
    rng = np.random.default_rng(seed)
    shapes = ((t, N, H), (S, K, H), (S, K, HV))
    return [np.float32(rng.standard_normal((*batch, *shape))) for shape in shapes]


def sloped(slopes):
    return lambda score, b, h, q, k: (
        score + slopes[h] * (q - k).astype(score.dtype) / 64 + b.astype(score.dtype)
    )


CASES = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": INDEX},
    "window": {"is_causal": True, "query_offset": INDEX, "local_window_size": 20},
    "lengths": {"key_value_seq_lengths": INDEX, "query_seq_lengths": jnp.array([2, 5])},
    "nothing visible": {"key_value_seq_lengths": 0},
    "logits": {"logits_soft_cap": 2.0, "sinks": SLOPES, "scale": jnp.float32(0.9)},
    "score_mod": {
        "score_mod": sloped(SLOPES),
        "mask": FunctionMask(lambda b, h, q, k: (q + k + h) % 3 != 1),
    },
    "bias and mask": {
        "bias": jnp.asarray(rng.standard_normal((N, 1, S)), jnp.float32),
        "mask": jnp.asarray(rng.random((*BATCH, 1, 5, S)) < 0.5),
    },
    "dropout": {
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(1),
        "query_offset": INDEX,
    },
}


def both_ways(call):
    """The results of `call` with keys read in place, and with the dense path."""
    in_place = call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "blocks_in_place", lambda call: None)
        return in_place, call()


def attend(query, key, value, **arguments):
    more = {"return_residual": True, "return_max_score": True}
    return dot_product_attention(
        query, key, value, implementation="xla", **more, **arguments
    )


assert_same = functools.partial(close, at_least=1.0)
ONE_BLOCK = ("window", "lengths", "nothing visible", "logits", "bias and mask")


OUTPUTS = with_core_tuples(
    [*((name, False) for name in CASES), *((name, True) for name in ONE_BLOCK)],
    *(
        (name, name in ("lengths", "logits"))
        for name in ("window", "lengths", "logits", "bias and mask")
    ),
)


@pytest.mark.parametrize(("name", "one_block"), OUTPUTS)
def test_outputs(name, one_block, monkeypatch):
    """Also with NaN and infinities anywhere in keys, values and queries, and large
    numbers in masked places.
    """
    if one_block:  # if more than half of the keys are visible
        monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 128)
    query, key, value = map(jnp.asarray, arrays(5))
    given = {
        "clean": (query, key, value),
        "NaN in a key": (query, key.at[0, 70, 1, 2].set(jnp.nan), value),
        "infinity in a key": (query, key.at[0, 70, 1, 2].set(jnp.inf), value),
        "products of one sign": (
            jnp.abs(query).at[0, 4, 2].set(-jnp.inf),
            jnp.abs(key),
            value,
        ),
        "queries": (
            query.at[0, 4, 2, 1].set(jnp.nan).at[1, 0].set(jnp.inf),
            key,
            value,
        ),
    }
    # Without a mask, an infinite value is one only in its feature.
    if name not in ("plain", "logits", "dropout"):
        given["values"] = (
            query,
            key,
            value.at[1, 10, 0, 0].set(jnp.inf).at[0, 100, 1].set(-jnp.inf),
        )
    if name in ("causal", "window", "lengths", "nothing visible"):
        given["hidden"] = (
            query,
            key.at[:, 148].set(3e38),
            value.at[:, 147].set(-3e38).at[:, 146].set(jnp.nan),
        )

    def program():
        call = jax.jit(lambda *x: attend(*x, **CASES[name]))
        return jax.device_get({filling: call(*x) for filling, x in given.items()})

    in_place, dense = both_ways(program)
    for filling in given:
        for got, expected in zip(in_place[filling], dense[filling], strict=True):
            # A row that is not finite is so in one feature or in all.
            axes = tuple(range(3, got.ndim))
            seen = ~(np.isfinite(expected) | (expected == -np.inf)).all(axes)
            np.testing.assert_array_equal(
                ~(np.isfinite(got) | (got == -np.inf)).all(axes), seen, err_msg=filling
            )
            assert_same(got[~seen], expected[~seen])
            if filling in ("clean", "hidden"):
                assert not seen.any()


@functools.cache
def derivatives(name, second):
    """First derivatives of everything that has some, forward and reverse, and one
    second derivative.
    """
    static = {
        n: x for n, x in CASES[name].items() if n not in ("bias", "sinks", "scale")
    }
    learned = {n: x for n, x in CASES[name].items() if n in ("bias", "sinks", "scale")}

    def loss(query, key, value, learned, slopes):
        mod = {"score_mod": sloped(slopes)} if "score_mod" in static else {}
        output, lse, _ = attend(query, key, value, **learned, **(static | mod))
        return jnp.sin(output).sum() + jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)).sum()

    def run(x):
        tangents = jax.tree.map(jnp.cos, x)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))(*x)
        _, forward = jax.jvp(loss, x, tangents)
        if second:
            along = jax.grad(lambda t: jax.jvp(loss, (t, *x[1:]), tangents)[1])(x[0])
        else:
            along = 0.0
        return value, gradients, forward, along

    return run, (*arrays(5), learned, SLOPES)


@pytest.mark.parametrize(
    "name", ["window", "logits", core("score_mod"), "bias and mask", "dropout"]
)
def test_derivatives(name):
    run, x = derivatives(name, second=name == "logits")
    got, expected = both_ways(lambda: jax.jit(lambda x: run(x))(x))
    assert_same(got, expected)


def test_products_in_bfloat16(monkeypatch):
    """If the CPU multiplies bfloat16, in blocks and in one: as exact as weights rounded
    to bfloat16.
    """
    monkeypatch.setattr(schedule, "MAX_HEIGHT_IN_PLACE", 128)
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    chosen = []
    original = schedule.blocks_in_place
    monkeypatch.setattr(
        schedule,
        "blocks_in_place",
        lambda call: chosen.append(original(call)) or chosen[-1],
    )
    query, key, value = (x.astype(jnp.bfloat16) for x in arrays(1))
    exact = [x.astype(jnp.float32) for x in (query, key, value)]
    for scale, residual, offset in ((0.25, False, S), (0.3, False, 10), (0.3, True, S)):
        more = {"scale": scale, "return_residual": residual, "query_offset": offset}
        call = functools.partial(dot_product_attention, is_causal=True, **more)
        got = jax.jit(functools.partial(call, implementation="xla"))(query, key, value)
        assert chosen[-1].dtype == ("float32" if residual else "bfloat16")
        want = call(*exact, implementation="blockwise")
        assert_same(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, 2**-8)


@pytest.mark.parametrize("shared", ["nothing", "query", "keys", "lengths"])
def test_a_mapped_call_still_has_branches(shared):
    """`jax.vmap` adds a batch axis; it does not compute both branches of each choice."""
    lengths = jnp.array([[140, 3], [149, 149], [1, 90]], jnp.int32)
    given = arrays(1, (3, 2))
    axes = [
        None if name == shared else 0 for name in ("query", "keys", "keys", "lengths")
    ]
    x = [
        value if axis == 0 else value[0]
        for value, axis in zip((*given, lengths), axes, strict=True)
    ]

    def call(query, key, value, lengths):
        return attend(query, key, value, key_value_seq_lengths=lengths)

    every = jax.jit(jax.vmap(call, axes))
    entries = [
        [
            value if axis is None else value[i]
            for value, axis in zip(x, axes, strict=True)
        ]
        for i in range(3)
    ]
    assert_same(
        every(*x),
        jax.tree.map(lambda *x: jnp.stack(x), *(call(*entry) for entry in entries)),
    )
    assert ("stablehlo.case" in every.lower(*x).as_text()) == (shared != "keys")
    none = [
        value[:0] if axis == 0 else value for value, axis in zip(x, axes, strict=True)
    ]
    assert [x.shape for x in every(*none)] == [
        (0, 2, 1, N, HV),
        (0, 2, 1, N),
        (0, 2, N),
    ]


@pytest.mark.core
def test_products_of_bfloat16_are_not_rounded(monkeypatch):
    """Scores of 256 and 257 would be equal in bfloat16."""
    monkeypatch.setattr(tracing, "cpu_features", lambda: {"avx512_bf16"})
    query = jnp.full((1, 1, 2, 16), 16, jnp.bfloat16)
    key = (
        jnp.zeros((1, S, 1, 16), jnp.bfloat16)
        .at[:, :2]
        .set(1)
        .at[:, 1, :, 0]
        .set(1.0625)
    )
    value = jnp.zeros_like(key).at[:, 1].set(1)
    call = functools.partial(
        dot_product_attention,
        scale=1.0,
        is_causal=True,
        query_offset=S,
        implementation="xla",
    )
    got = jax.jit(call)(query, key, value)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), 1 / (1 + np.exp(-1)), rtol=2**-8
    )
