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

SCORE_MODS = {
    "no score_mod": None,
    "slopes": lambda slopes: (
        lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k).astype(score.dtype)
    ),
    # Without a derivative, or any value, at masked places.
    "logarithm": lambda slopes: (
        lambda score, b, h, q, k: (
            score + slopes[h] * jnp.log1p((q - k).astype(score.dtype))
        )
    ),
    "root": lambda slopes: (
        lambda score, b, h, q, k: (
            score - jnp.sqrt(slopes[h] * (q - k).astype(score.dtype) + 1e-3)
        )
    ),
    "masks itself": lambda slopes: (
        lambda score, b, h, q, k: jnp.where(
            k < 33, jnp.exp(0.1 * score) * slopes[h], -jnp.inf
        )
    ),
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


def arrays(score_mod="no score_mod", arguments="plain"):
    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    drawn = {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    if SCORE_MODS[score_mod] is None:
        slopes = {}
    else:
        slopes = {"slopes": np.linspace(0.1, 0.4, N, dtype=np.float32)}
    return (
        drawn
        | slopes
        | {
            n: x
            for n, x in ARGUMENTS[arguments].items()
            if not isinstance(x, tuple | float)
        }
    )


@functools.lru_cache(maxsize=1)
def program(score_mod, arguments, implementation, causal, mask):
    """Jitted: outputs, and the gradients of a loss over those that are finite."""
    static = {
        name: x
        for name, x in ARGUMENTS[arguments].items()
        if isinstance(x, tuple | float)
    }
    if mask:
        static["mask"] = MASK

    def loss(given):
        given = dict(given)
        slopes = given.pop("slopes", None)
        mod = {} if slopes is None else {"score_mod": SCORE_MODS[score_mod](slopes)}
        more = {"is_causal": causal, "return_residual": True, "return_max_score": True}
        outputs = dot_product_attention(
            **given, **static, **mod, **more, implementation=implementation
        )
        return sum(
            jnp.where(jnp.isfinite(x), jnp.sin(x), 0).sum() for x in outputs
        ), outputs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(given, **which):
    (_, outputs), gradients = jax.device_get(program(**{"mask": True} | which)(given))
    return dict(zip(("output", "lse", "max_score"), outputs, strict=True)) | {
        f"d_{name}": x for name, x in gradients.items()
    }


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
def test_masked_values_change_nothing_and_visible_ones_count(
    score_mod, arguments, implementation
):
    """Outputs and gradients keep every bit. Visible values are tested unless the
    `score_mod` masks or has no value.
    """
    causal = score_mod in ("logarithm", "root")
    which = {
        "score_mod": score_mod,
        "arguments": arguments,
        "implementation": implementation,
        "causal": causal,
    }
    clean = arrays(which["score_mod"], which["arguments"])
    clean["query"][:, 30:] = 0
    clean["key"][:, 33:] = 0
    clean["value"][:, 33:] = 0
    want = run(clean, **which)
    assert all(np.isfinite(x).all() for name, x in want.items() if name != "lse")
    rows = ~MASK.any(-1)[:, 0]
    assert (want["output"][rows] == 0).all()
    assert (want["d_query"][rows] == 0).all()
    assert "d_sinks" in want or (want["lse"][rows] == -np.inf).all()
    assert all((want[name][:, 33:] == 0).all() for name in ("d_key", "d_value"))
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
    if score_mod in ("no score_mod", "slopes"):
        visible_values_count(**which)


@pytest.mark.parametrize("arguments", ["plain", "soft cap, sinks"])
@BOTH
def test_visible_values_count_without_a_mask(arguments, implementation):
    which = {
        "score_mod": "no score_mod",
        "arguments": arguments,
        "implementation": implementation,
        "causal": False,
    }
    visible_values_count(**which, mask=False)


def visible_values_count(*, mask=True, **which):
    """Rows that attend to NaN or infinity in any feature are NaN; other rows keep their
    outputs and gradients.
    """
    which |= {"mask": mask}
    clean = arrays(which["score_mod"], which["arguments"])
    want = run(clean, **which)
    visible = np.broadcast_to(MASK if mask else True, (B, N, T, S))
    if "local_window_size" in ARGUMENTS[which["arguments"]]:
        ahead = np.arange(S) - np.arange(T)[:, None]
        visible = visible & (ahead >= -40) & (ahead <= 30)
    for filling, name in itertools.product(
        (np.nan, np.inf), ("query", "key", "value", "bias")
    ):
        if name not in clean:
            continue
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
        got = run(spoilt, **which)
        if mask or np.isnan(filling):
            assert np.isnan(got["output"][rows]).any(-1).all()
        np.testing.assert_array_equal(got["output"][~rows], want["output"][~rows])
        np.testing.assert_array_equal(got["lse"][~rows], want["lse"][~rows])
        heads = rows.any(1)
        np.testing.assert_array_equal(
            got["max_score"][~heads], want["max_score"][~heads]
        )
        if mask:
            assert np.isnan(got["max_score"][heads]).all()
            unseen = ~rows.any(-1)
            np.testing.assert_array_equal(
                got["d_query"][unseen], want["d_query"][unseen]
            )
            assert all(
                np.isfinite(x).all()
                for gradient, x in got.items()
                if gradient.startswith("d_")
            )


@BOTH
def test_large_numbers_times_zero_add_nothing(implementation):
    query, key = np.zeros((2, 1, 2, 1, 4), np.float32)
    query[..., 0] = 1e17
    query[..., 2] = 1e-3
    key[..., 1] = 1e17
    key[0, 0, 0, 2] = 2e3
    value = np.eye(2, dtype=np.float32)[None, :, None]
    got = dot_product_attention(
        query,
        key,
        value,
        mask=np.ones((2, 2), bool),
        scale=1.0,
        implementation=implementation,
    )
    weight = 1 / (1 + np.exp(-2))
    np.testing.assert_allclose(got.ravel(), [weight, 1 - weight] * 2, rtol=1e-6)


@pytest.mark.core
@BOTH
def test_functions_never_get_positions_of_padding(implementation):
    asked = []

    def note(q_idx, kv_idx):
        asked.append((np.min(q_idx), np.max(q_idx), np.min(kv_idx), np.max(kv_idx)))
        return np.zeros(
            np.broadcast_shapes(np.shape(q_idx), np.shape(kv_idx)), np.float32
        )

    def score_mod(score, b, h, q_idx, kv_idx):
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return score + jax.pure_callback(
            note, result, q_idx, kv_idx, vmap_method="broadcast_all"
        )

    mask = FunctionMask(lambda *place: score_mod(jnp.float32(0), *place) == 0)
    given = arrays() | {"score_mod": score_mod, "mask": mask}
    given |= {
        "query_offset": 3,
        "key_value_offset": 5,
        "implementation": implementation,
    }
    dot_product_attention(**given).block_until_ready()
    lowest = np.min(asked, 0)
    highest = np.max(asked, 0)
    assert (lowest[0], highest[1], lowest[2], highest[3]) == (
        3,
        3 + T - 1,
        5,
        5 + S - 1,
    )


@BOTH
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "score_mod", [None, lambda score, b, h, q, k: jnp.where(score > 0, score, 0)]
)
def test_visible_infinity_gives_nan_even_if_all_its_products_are_minus_infinity(
    implementation, which, score_mod
):
    """And even if the `score_mod` hides it. Without jit, the scale is an array, which
    is computed differently.
    """
    arrays = [
        np.abs(np.random.default_rng(0).standard_normal((1, 70, 1, 8), np.float32))
        for _ in range(3)
    ]
    arrays[which][0, 40, 0, 5] = -np.inf
    more = {"score_mod": score_mod, "implementation": implementation}
    attend = functools.partial(dot_product_attention, is_causal=True, **more)
    sees = np.arange(70) == 40 if which == 0 else np.arange(70) >= 40
    for run in (attend, jax.jit(attend)):
        np.testing.assert_array_equal(np.isnan(run(*arrays)[0, :, 0, 0]), sees)


@BOTH
@pytest.mark.parametrize("place", ["query", "key", "query beside large values"])
def test_an_overflow_affects_only_the_gradients_of_its_row(place, implementation):
    """All inputs are finite; one row of causal scores is not, and the loss ignores it."""
    given = arrays()
    if "values" in place:
        # The sum of 31 such values is infinite.
        given["query"][0, 30] = 2e38
        given["value"][0, :31] = 2e37
    else:
        given["query"][0, 30] = 1e20
        given["key"][0, 30 if place == "key" else 0, :, 0] = 1e20

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
    want = jax.block_until_ready(run(*(x[:, :40] for x in (query, key, value))))
    for filling in (np.nan, np.inf):
        key[:, 40] = filling
        value[:, 45, 0, 3] = filling
        output, *grads = run(query, key, value)
        assert np.isnan(output[:, 40:]).all()
        assert all((x[:, 40:] == 0).all() for x in grads)
        for got, expected in zip((output, *grads), want, strict=True):
            # Another length is another order of sums.
            np.testing.assert_allclose(
                got[:, :40], expected, rtol=0, atol=2 * KEYS * np.finfo(np.float32).eps
            )


@BOTH
@pytest.mark.parametrize("size", [64, 3])
def test_masked_and_visible_nan_among_many_scores(size, implementation):
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
    attend = lambda *arrays: np.asarray(jitted(*arrays))  # noqa: E731
    want = attend(1e3 * query, key, value)
    assert np.isfinite(want).all()
    assert (want[:, 5] == 0).all()
    for filling in (np.nan, np.inf, -np.inf, 3e38):
        spoilt_key = key.copy()
        spoilt_value = value.copy()
        spoilt_key[:, hidden] = spoilt_value[:, hidden] = filling
        spoilt_key[:, hidden[0], :, 1:] = -1
        np.testing.assert_array_equal(
            attend(1e3 * query, spoilt_key, spoilt_value), want
        )
    sees = mask[:, 0, :, seen]
    for filling, which in itertools.product((np.nan, np.inf), (0, 1)):
        spoilt = [key.copy(), value.copy()]
        spoilt[which][:, seen, :, size - 1] = filling
        output = attend(1e3 * query, *spoilt)
        assert np.isnan(output[sees]).all()
        np.testing.assert_array_equal(output[~sees], want[~sees])
