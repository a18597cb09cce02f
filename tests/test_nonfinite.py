"""NaN, infinities and huge numbers at masked, padded or visible places: where they
appear in outputs and gradients.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import S as KEYS
from cases import compiled_for, forget_programs, inputs, with_gradients
from marks import with_core_tuples

from flax_mha import dot_product_attention
from flax_mha.masks import FunctionMask

B = 2
T = 37
S = 45
N = 4
K = 2
H = 8
FILLINGS = (np.nan, np.inf, -np.inf, 3e38, -3e38)
BOTH = pytest.mark.parametrize("implementation", ["xla", "blockwise"])
pytestmark = pytest.mark.usefixtures("small_tiles")
# Rows from 30 on and keys from 33 on are masked, and here and there a score.
MASK = np.ones((B, 1, T, S), bool)
MASK[:, :, 30:] = False
MASK[..., 33:] = False
MASK[0, :, 10, 20:30] = False
MASK[1, :, 25] = False


def slopes_of_heads(slopes):
    def score_mod(score, b, h, q, k):
        return score - slopes[h] * jnp.abs(q - k).astype(score.dtype)

    return score_mod


# Without a derivative, or any value, at masked places: a future key has q - k < 0.
def logarithm(slopes):
    def score_mod(score, b, h, q, k):
        return score + slopes[h] * jnp.log1p((q - k).astype(score.dtype))

    return score_mod


def root(slopes):
    def score_mod(score, b, h, q, k):
        return score - jnp.sqrt(slopes[h] * (q - k).astype(score.dtype) + 1e-3)

    return score_mod


def masks_itself(slopes):
    def score_mod(score, b, h, q, k):
        return jnp.where(k < 33, jnp.exp(0.1 * score) * slopes[h], -jnp.inf)

    return score_mod


SCORE_MODS = {
    "no score_mod": None,
    "slopes": slopes_of_heads,
    "logarithm": logarithm,
    "root": root,
    "masks itself": masks_itself,
}
CAP_SINKS = {"logits_soft_cap": 2.0, "sinks": np.ones(N, np.float32)}
BIAS_WINDOW = {
    "bias": np.zeros((B, N, T, S), np.float32),
    "local_window_size": (40, 30),
}
ARGUMENTS = {
    "plain": {},
    "soft cap, sinks": CAP_SINKS,
    "bias, window": BIAS_WINDOW,
    "all": BIAS_WINDOW | CAP_SINKS | {"scale": np.float32(1.5)},
}


def is_static(x):
    return isinstance(x, tuple | float)


def arrays(score_mod="no score_mod", arguments="plain"):
    rng = np.random.default_rng(0)
    drawn = {
        "query": rng.standard_normal((B, T, N, H), np.float32),
        "key": rng.standard_normal((B, S, K, H), np.float32),
        "value": rng.standard_normal((B, S, K, H), np.float32),
    }
    if SCORE_MODS[score_mod] is not None:
        drawn["slopes"] = np.linspace(0.1, 0.4, N, dtype=np.float32)
    for name, x in ARGUMENTS[arguments].items():
        if not is_static(x):
            drawn[name] = x
    return drawn


@functools.lru_cache(maxsize=1)
def program(score_mod, arguments, implementation, causal, mask):
    """Jitted: outputs, and the gradients of a loss over those that are finite."""
    static = {"is_causal": causal, "implementation": implementation}
    static |= {name: x for name, x in ARGUMENTS[arguments].items() if is_static(x)}
    if mask:
        static["mask"] = MASK

    def loss(given):
        given = dict(given)
        if "slopes" in given:
            given["score_mod"] = SCORE_MODS[score_mod](given.pop("slopes"))
        outputs = dot_product_attention(
            **given, **static, return_residual=True, return_max_score=True
        )
        total = 0
        for x in outputs:
            total += jnp.where(jnp.isfinite(x), jnp.sin(x), 0).sum()
        return total, outputs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(given, mask=True, **which):
    (_, outputs), gradients = jax.device_get(program(**which, mask=mask)(given))
    results = dict(zip(("output", "lse", "max_score"), outputs, strict=True))
    for name, x in gradients.items():
        results[f"d_{name}"] = x
    return results


MASKED = [
    ("no score_mod", "all"),
    ("slopes", "bias, window"),
    ("logarithm", "all"),
    ("masks itself", "plain"),
]


@pytest.mark.parametrize(
    ("score_mod", "arguments"),
    with_core_tuples(
        [("no score_mod", "plain"), ("root", "plain"), *MASKED], MASKED[0], MASKED[2]
    ),
)
@BOTH
def test_masked_values_change_no_bit_of_outputs_and_gradients(
    score_mod, arguments, implementation
):
    which = {
        "score_mod": score_mod,
        "arguments": arguments,
        "implementation": implementation,
        "causal": score_mod in ("logarithm", "root"),
    }
    clean = arrays(score_mod, arguments)
    clean["query"][:, 30:] = 0
    clean["key"][:, 33:] = 0
    clean["value"][:, 33:] = 0

    want = run(clean, **which)

    assert all(np.isfinite(x).all() for name, x in want.items() if name != "lse")
    # Rows without keys, and keys without rows.
    rows = ~MASK.any(-1)[:, 0]
    assert (want["output"][rows] == 0).all()
    assert (want["d_query"][rows] == 0).all()
    assert (want["d_key"][:, 33:] == 0).all()
    assert (want["d_value"][:, 33:] == 0).all()
    assert "d_sinks" in want or (want["lse"][rows] == -np.inf).all()
    for filling in FILLINGS:
        spoilt = {name: np.array(x) for name, x in clean.items()}
        spoilt["query"][:, 30:, :, 1] = filling
        spoilt["query"][1, 25] = filling
        spoilt["key"][:, 33:, :, 3] = filling
        spoilt["value"][:, 33:, 1, 2] = filling
        if "bias" in spoilt:
            spoilt["bias"] = np.where(MASK, spoilt["bias"], np.float32(filling))
        got = run(spoilt, **which)
        for name, x in want.items():
            np.testing.assert_array_equal(got[name], x, err_msg=f"{name}, {filling}")
    # Other functions mask, or have no value.
    if score_mod in ("no score_mod", "slopes"):
        assert_visible_values_count(**which)


@pytest.mark.parametrize("arguments", ["plain", "soft cap, sinks"])
@BOTH
def test_visible_values_count_without_a_mask(arguments, implementation):
    assert_visible_values_count(
        score_mod="no score_mod",
        arguments=arguments,
        implementation=implementation,
        causal=False,
        mask=False,
    )


def assert_visible_values_count(*, mask=True, **which):
    """Rows that attend to NaN or infinity in any feature are NaN; other rows keep their
    outputs and gradients.
    """
    clean = arrays(which["score_mod"], which["arguments"])
    want = run(clean, mask, **which)
    visible = np.broadcast_to(MASK if mask else True, (B, N, T, S))
    if "local_window_size" in ARGUMENTS[which["arguments"]]:
        ahead = np.arange(S) - np.arange(T)[:, None]
        visible = visible & (ahead >= -40) & (ahead <= 30)
    names = [name for name in ("query", "key", "value", "bias") if name in clean]
    for filling, name in itertools.product((np.nan, np.inf), names):
        spoilt = {name: np.array(x) for name, x in clean.items()}
        rows = np.zeros((B, T, N), bool)
        if name == "query":
            spoilt["query"][0, 7, 2, 5] = filling
            rows[0, 7, 2] = True
        elif name == "bias":
            spoilt["bias"][1, 3, 7, 4] = filling
            rows[1, 7, 3] = True
        else:
            spoilt[name][0, 5, 1, H - 1] = filling
            rows[0, :, 2:] = np.moveaxis(visible[0, 2:, :, 5], 0, 1)

        got = run(spoilt, mask, **which)

        # Without a mask, infinity may stay infinity.
        if mask or np.isnan(filling):
            assert np.isnan(got["output"][rows]).any(-1).all()
        for result in ("output", "lse"):
            np.testing.assert_array_equal(got[result][~rows], want[result][~rows])
        heads = rows.any(1)
        others = want["max_score"][~heads]
        np.testing.assert_array_equal(got["max_score"][~heads], others)
        if mask:
            assert np.isnan(got["max_score"][heads]).all()
            unseen = ~rows.any(-1)
            others = want["d_query"][unseen]
            np.testing.assert_array_equal(got["d_query"][unseen], others)
            for gradient, x in got.items():
                assert np.isfinite(x).all() or not gradient.startswith("d_")


@BOTH
def test_large_numbers_times_zero_add_nothing(implementation):
    # Their products with the zeros of the other vector are 0, not NaN.
    query, key = np.zeros((2, 1, 2, 1, 4), np.float32)
    query[..., 0] = 1e17
    query[..., 2] = 1e-3
    key[..., 1] = 1e17
    key[0, 0, 0, 2] = 2e3
    value = np.eye(2, dtype=np.float32)[None, :, None]
    more = {"mask": np.ones((2, 2), bool), "scale": 1.0}
    got = dot_product_attention(
        query, key, value, **more, implementation=implementation
    )
    weight = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(got.ravel(), [weight, 1 - weight] * 2, rtol=1e-6)


@pytest.mark.core
@BOTH
def test_functions_never_get_positions_of_padding(implementation):
    asked = []

    def note(q_idx, kv_idx):
        asked.append((np.min(q_idx), np.max(q_idx), np.min(kv_idx), np.max(kv_idx)))
        shape = np.broadcast_shapes(np.shape(q_idx), np.shape(kv_idx))
        return np.zeros(shape, np.float32)

    def score_mod(score, b, h, q_idx, kv_idx):
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return score + jax.pure_callback(
            note, result, q_idx, kv_idx, vmap_method="broadcast_all"
        )

    mask = FunctionMask(lambda *place: score_mod(jnp.float32(0), *place) == 0)
    output = dot_product_attention(
        **arrays(),
        score_mod=score_mod,
        mask=mask,
        query_offset=3,
        key_value_offset=5,
        implementation=implementation,
    )
    output.block_until_ready()

    first_query, _, first_key, _ = np.min(asked, 0)
    _, last_query, _, last_key = np.max(asked, 0)
    assert (first_query, last_query) == (3, 3 + T - 1)
    assert (first_key, last_key) == (5, 5 + S - 1)


def clipped(score, b, h, q, k):
    return jnp.where(score > 0, score, 0)


@BOTH
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("score_mod", [None, clipped])
def test_visible_infinity_gives_nan_even_if_all_its_products_are_minus_infinity(
    implementation, which, score_mod
):
    # And even if the `score_mod` hides it.
    drawn = np.random.default_rng(0).standard_normal((1, 70, 1, 8), np.float32)
    arrays = [np.abs(drawn) for _ in range(3)]
    arrays[which][0, 40, 0, 5] = -np.inf
    attends = np.arange(70) == 40 if which == 0 else np.arange(70) >= 40
    more = {"score_mod": score_mod, "implementation": implementation}
    attend = functools.partial(dot_product_attention, is_causal=True, **more)

    # Without jit, the scale is an array, which is computed differently.
    for run in (attend, jax.jit(attend)):
        is_nan = np.isnan(run(*arrays)[0, :, 0, 0])
        np.testing.assert_array_equal(is_nan, attends)


@BOTH
@pytest.mark.parametrize("place", ["query", "key", "query beside large values"])
def test_an_overflow_affects_only_the_gradients_of_its_row(place, implementation):
    # All inputs are finite; one row of causal scores is not, and the loss ignores it.
    given = arrays()
    if "values" in place:
        # The sum of 31 such values is infinite.
        given["query"][0, 30] = 2e38
        given["value"][0, :31] = 2e37
    else:
        given["query"][0, 30] = 1e20
        of_key = 30 if place == "key" else 0
        given["key"][0, of_key, :, 0] = 1e20

    @jax.jit
    @jax.grad
    def gradients(given):
        output = dot_product_attention(
            **given, is_causal=True, implementation=implementation
        )
        return output.at[0, 30].set(0).sum()

    for name, gradient in gradients(given).items():
        assert np.isfinite(gradient).all(), name


# Every argument that masks, the future, and many scores -------------------------------

HIDERS = {
    "mask": {"mask": np.broadcast_to(np.arange(KEYS) < 40, (1, 1, 1, KEYS))},
    "lengths": {"key_value_seq_lengths": np.array([40, 40], np.int32)},
    "segments": {
        "query_segment_ids": np.zeros((2, T), int),
        "key_value_segment_ids": np.arange(KEYS)[None] // 40,
    },
    "bias of -inf": {
        "bias": np.where(np.arange(KEYS) < 40, 0, -np.inf).astype(np.float32)
    },
    "causal": {"is_causal": True, "query_offset": 39 - (T - 1)},
    "window": {"local_window_size": (None, 39 - (T - 1))},
}
# Each skips tiles in its own way; the dense computation makes the same array of all.
HIDDEN = [
    *((hider, "blockwise") for hider in HIDERS),
    ("lengths", "xla"),
    ("bias of -inf", "xla"),
]


@pytest.mark.parametrize(
    ("hider", "implementation"),
    with_core_tuples(
        HIDDEN, ("lengths", "blockwise"), ("lengths", "xla"), ("window", "blockwise")
    ),
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_hidden_keys_and_values_change_nothing(
    hider, implementation, platform, monkeypatch, request
):
    compiled_for(monkeypatch, platform)
    request.addfinalizer(forget_programs)
    run = jax.jit(with_gradients(implementation, return_residual=True, **HIDERS[hider]))
    query, key, value = inputs()
    key[:, 40:] = 0
    value[:, 40:] = 0
    want = jax.block_until_ready(run(query, key, value))  # before the arrays change
    for filling in (np.nan, np.inf, -np.inf, 3e38):
        key[:, 40:] = filling
        value[:, 40:] = filling
        jax.tree.map(np.testing.assert_array_equal, run(query, key, value), want)


@pytest.mark.core
@BOTH
def test_future_keys_change_nothing_and_rows_that_attend_to_nan_are_nan(implementation):
    run = jax.jit(with_gradients(implementation, is_causal=True))
    query, key, value = inputs(t=KEYS)
    want = run(query[:, :40], key[:, :40], value[:, :40])
    want = jax.block_until_ready(want)  # before the arrays change
    for filling in (np.nan, np.inf):
        key[:, 40] = filling
        value[:, 45, 0, 3] = filling
        output, *grads = run(query, key, value)
        assert np.isnan(output[:, 40:]).all()
        assert all((x[:, 40:] == 0).all() for x in grads)
        # Another length is another order of sums.
        tolerance = 2 * KEYS * np.finfo(np.float32).eps
        for got, expected in zip((output, *grads), want, strict=True):
            np.testing.assert_allclose(got[:, :40], expected, rtol=0, atol=tolerance)


@BOTH
@pytest.mark.parametrize("size", [64, 3])
def test_only_visible_nan_changes_results_of_many_scores(size, implementation):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 128, 16, size), np.float32)
    mask = rng.random((2, 1, 128, 128)) < 0.5
    mask[:, :, 5] = False
    hidden = [3, 40, 127]
    seen = 50
    mask[..., hidden] = False
    jitted = jax.jit(
        functools.partial(
            dot_product_attention, mask=mask, implementation=implementation
        )
    )

    def attend(key, value):
        return np.asarray(jitted(1e3 * query, key, value))

    want = attend(key, value)

    assert np.isfinite(want).all()
    assert (want[:, 5] == 0).all()
    for filling in (np.nan, np.inf, -np.inf, 3e38):
        spoilt_key = key.copy()
        spoilt_value = value.copy()
        spoilt_key[:, hidden] = filling
        spoilt_value[:, hidden] = filling
        spoilt_key[:, hidden[0], :, 1:] = -1
        np.testing.assert_array_equal(attend(spoilt_key, spoilt_value), want)
    attends = mask[:, 0, :, seen]
    for filling, which in itertools.product((np.nan, np.inf), (0, 1)):
        spoilt = [key.copy(), value.copy()]
        spoilt[which][:, seen, :, size - 1] = filling
        output = attend(*spoilt)
        assert np.isnan(output[attends]).all()
        np.testing.assert_array_equal(output[~attends], want[~attends])
