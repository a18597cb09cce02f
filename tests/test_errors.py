"""Errors for bad input name the argument, the expected and the given value, before
anything is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused

from flax_mha import attention_fn, dot_product_attention, explain_implementation
from flax_mha.masks import (
    ArrayMask,
    CausalMask,
    FunctionMask,
    LengthMask,
    LocalMask,
    SegmentMask,
)

pytestmark = pytest.mark.core
B = 2
T = 5
S = 7
N = 6
K = 3
H = 4
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
RNG = jax.random.key(0)
SWAPPED = {"query": (B, N, T, H), "key": (B, K, S, H), "value": (B, K, S, H)}
COMPLEX = jnp.ones(S, jnp.complex64)


def call(**arguments):
    dtypes = arguments.pop("dtypes", {})
    given = {name: arguments.pop(name, shape) for name, shape in SHAPES.items()}
    arrays = {
        n: jnp.ones(x, dtypes.get(n, jnp.float32)) if isinstance(x, tuple) else x
        for n, x in given.items()
    }
    return dot_product_attention(**arrays, **arguments)


def ids(shape, dtype=int):
    return {
        "query_segment_ids": np.ones(shape, dtype),
        "key_value_segment_ids": np.ones((B, S), int),
    }


REFUSED = [
    (
        {"key": None},
        r"key must be an array \[batch..., length, heads, head size\], but got None",
    ),
    ({"value": len}, "value must be an array .*built-in function len"),
    (
        SWAPPED,
        r"key, value lengths|query heads must be a multiple .*5 and 7 in .*use jnp.swapaxes\(x, -3, -2\)",
    ),
    (
        {"query_offset": None},
        "query_offset must be an integer or an array of integers, but got None",
    ),
    ({"precision": "lol"}, 'precision must be None, "default", "high".*got \'lol\''),
    (
        {"mask": ArrayMask(None)},
        "mask must be a boolean array or a mask object .*, but got None",
    ),
    ({"mask": SegmentMask(None, None)}, "requires integer arrays, but got None"),
    (
        {"mask": object()},
        "mask must be a boolean array or a mask object .* but got object",
    ),
    ({"bias": {"a": 1}}, "bias must be an array of floats, but got dict"),
    ({"bias": [[1.0, 2.0], [3.0]]}, "bias must be an array of floats, but got list"),
    (
        {"key_value_seq_lengths": [1, [2]]},
        "key_value_seq_lengths must be an integer array, but got",
    ),
    (
        {"score_mod": lambda score, b, h, q, k: score + COMPLEX[k].real},
        "must not capture complex arrays, .*x.real and",
    ),
    (
        {"key": (S, K, H), "value": (S, K, H)},
        r"query, key, value must have same rank, .*\(7, 3, 4\)",
    ),
    (
        {"query": (T, H), "key": (S, H), "value": (S, H)},
        "query must have rank 3 or more",
    ),
    (
        {"key": (3, S, K, H), "value": (3, S, K, H)},
        "query, key, value batch dims must match",
    ),
    ({"value": (B, 8, K, H)}, "key, value lengths must match, but got 7 and 8"),
    ({"key": (B, S, K, 3)}, "query, key depths must match, but got 4 and 3"),
    ({"value": (B, S, 2, H)}, "key, value heads must match, but got 3 and 2"),
    (
        {"key": (B, S, 4, H), "value": (B, S, 4, H)},
        "query heads must be a multiple of key/value heads.*6 and 4",
    ),
    ({"key": (B, S, 0, H), "value": (B, S, 0, H)}, "both at least 1, but got 6 and 0"),
    (
        {"query": (B, T, N, 0), "key": (B, S, K, 0)},
        "query head size must be at least 1",
    ),
    (
        {"dtypes": {"key": jnp.bfloat16}},
        r"must have the same dtype, one of .*key bfloat16.*use \.astype",
    ),
    (
        {"dtypes": dict.fromkeys(SHAPES, jnp.int32)},
        "must have the same dtype, one of float16, bfloat16, .*int32",
    ),
    ({"dtypes": dict.fromkeys(SHAPES, jnp.complex64)}, "complex64"),
    (
        {"mask": np.ones((T, S), np.float32)},
        r"mask must be bool .*float32; use mask.astype\(bool\)",
    ),
    (
        {"mask": np.ones((B, N, T, 6), bool)},
        r"mask must broadcast to .*\(2, 6, 5, 7\).*\(2, 6, 5, 6\)",
    ),
    (
        {"mask": np.ones((B, K, T, S), bool)},
        r"mask must broadcast to .*got shape \(2, 3, 5, 7\)",
    ),
    (
        {"mask": CausalMask},
        r"mask must be a boolean array or a mask object such as CausalMask\(\), .*call it",
    ),
    (
        {"mask": lambda b, h, q, k: q >= k},
        "mask must be a boolean array or a mask object .*lambda",
    ),
    (
        {"mask": np.ones((B, S), bool)},
        r"got shape \(2, 7\); use mask\[:, None, None, :\]",
    ),
    (
        {"mask": np.ones((B, T, S), bool)},
        r"got shape \(2, 5, 7\); use mask\[:, None, :, :\]",
    ),
    (
        {"mask": np.ones((B, 1, S), bool)},
        r"shape \(2, 1, 7\); use mask\[:, None, :, :\]",
    ),
    ({"mask": np.ones((B, T, 1), bool)}, r"\(2, 5, 1\); use mask\[:, None, :, :\]"),
    (
        {"mask": np.where(np.ones((T, S)), 0, -1e9)},
        "mask must be bool .*pass it as bias=",
    ),
    ({"mask": np.ones((1, B, N, T, S), bool)}, "mask must broadcast to"),
    (
        {"bias": np.ones((T, S), bool)},
        "bias must have one of the dtypes .*bool; pass a boolean array as mask=",
    ),
    ({"bias": np.ones((T, S), int)}, "bias must have one of the dtypes .*int"),
    (
        {"bias": np.ones((T, 6), np.float32)},
        r"bias must broadcast to .*got shape \(5, 6\)",
    ),
    (
        {"key_value_seq_lengths": np.ones(3, int)},
        r"key_value_seq_lengths must broadcast to .*\(2,\)",
    ),
    (
        {"query_seq_lengths": np.ones(2)},
        "query_seq_lengths must have an integer dtype, but got float",
    ),
    (
        {"key_value_seq_lengths": np.array([3, -1])},
        "key_value_seq_lengths must be at least 0, but got -1",
    ),
    (
        {"query_seq_lengths": jnp.array(-2)},
        "query_seq_lengths must be at least 0, but got -2",
    ),
    (
        {"mask": LengthMask(np.array([1, -5]))},
        "key_value_lengths must be at least 0, but got -5",
    ),
    (
        {"query_segment_ids": np.ones((B, 6), int)},
        r"key_value_segment_ids must also be passed",
    ),
    (ids((B, 6)), r"query_segment_ids must have shape \[batch..., 5\].*got \(2, 6\)"),
    (ids((3, T)), "query_segment_ids must broadcast to"),
    (ids((B, T), float), "query_segment_ids must have an integer dtype"),
    (
        {"key_value_segment_ids": np.ones((B, S), int)},
        "query_segment_ids must also be passed",
    ),
    (
        {"dropout_rate": 1.0, "dropout_rng": RNG},
        r"dropout_rate must be a concrete number in \[0, 1\), .*got 1.0",
    ),
    (
        {"dropout_rate": 0.1},
        r"dropout_rng must be a key if dropout_rate > 0, but got None",
    ),
    ({"dropout_rate": 0.1, "dropout_rng": 0}, "dropout_rng must be a single key"),
    (
        {"dropout_rate": 0.1, "dropout_rng": np.zeros(3, np.uint32)},
        r"raw uint32 key of shape \(2,\), .* shape \(3,\)",
    ),
    (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.split(RNG)},
        "dropout_rng must be a single key",
    ),
    (
        {"local_window_size": (3, -1)},
        r"local_window_size must be an int >= 0, .*got \(3, -1\)",
    ),
    ({"local_window_size": (3, 1, 2)}, "local_window_size must be"),
    ({"local_window_size": 1.5}, "local_window_size must be .*got 1.5"),
    ({"is_causal": 1}, "is_causal must be True or False, but got 1"),
    (
        {"return_residual": "yes"},
        "return_residual must be True or False, but got 'yes'",
    ),
    ({"return_max_score": 1}, "return_max_score must be True or False, but got 1"),
    (
        {"broadcast_dropout": None},
        "broadcast_dropout must be True or False, but got None",
    ),
    ({"scale": float("nan")}, "scale must be a finite number, but got nan"),
    (
        {"scale": jnp.ones(2)},
        r"scale must be a scalar, but got an array of shape \(2,\)",
    ),
    ({"scale": "1"}, "scale must be a finite number, but got '1'"),
    ({"query_offset": 0.5}, "query_offset must have an integer dtype"),
    ({"query_offset": np.zeros(3, int)}, "query_offset must broadcast to"),
    ({"scale": 1e39}, "scale must fit in float32, but got 1e[+]39"),
    ({"scale": np.complex64(1)}, "scale must be a finite number"),
    ({"scale": np.array(True)}, "scale must be a finite number"),
    (
        {"logits_soft_cap": 1e39},
        "logits_soft_cap must be at most 1e[+]30, .*pass None to disable the cap",
    ),
    (
        {"logits_soft_cap": np.complex64(1)},
        "logits_soft_cap must be a concrete finite number > 0",
    ),
    (
        {"logits_soft_cap": 0.0},
        "logits_soft_cap must be a concrete finite number > 0, .*got 0.0",
    ),
    (
        {"logits_soft_cap": float("nan")},
        "logits_soft_cap must be a concrete finite number > 0, .*got nan",
    ),
    (
        {"logits_soft_cap": "30"},
        "logits_soft_cap must be a concrete finite number > 0, .*got '30'",
    ),
    (
        {"sinks": np.ones(K, np.float32)},
        r"sinks must broadcast to .*\(2, 6\), but got shape \(3,\)",
    ),
    ({"sinks": np.ones(N, int)}, "sinks must have one of the dtypes .*int"),
    ({"score_mod": 3.0}, "score_mod must be a function of scalars, but got 3.0"),
    ({"mask": FunctionMask(3)}, "mask_mod must be a function of scalars, but got 3"),
    ({"dropout_rate": True, "dropout_rng": RNG}, "dropout_rate .*got True"),
    ({"scale": True}, "scale must be a finite number, but got True"),
    (
        {"score_mod": lambda score, b, h, q, k: score[None]},
        r"score_mod\(score, b, h, q.*<lambda>.* float32\[1\]",
    ),
    (
        {"score_mod": lambda score, b, h, q, k: q},
        r"score_mod\(.*returned int32\[\]; use .astype",
    ),
    (
        {"score_mod": lambda score, b, h, q, k: (score, q)},
        r"score_mod\(.*float32\[\], int32\[\]",
    ),
    (
        {"score_mod": lambda score: score},
        r"score_mod\(.*raised TypeError: .*takes 1 positional",
    ),
    (
        {"score_mod": lambda score, b, h, q, k: 1 / 0},
        r"score_mod\(.*raised ZeroDivisionError",
    ),
    (
        {"score_mod": lambda score, b, h, q, k: score if q > k else -score},
        "TracerBoolConversionError.*; use jnp.where",
    ),
    (
        {"mask": FunctionMask(lambda b, h, q, k: q - k)},
        r"mask_mod\(b, h, .*\) must return a bool .*returned int32\[\]",
    ),
    (
        {"mask": CausalMask() & ~FunctionMask(lambda b, h, q, k: jnp.ones(3, bool))},
        r"mask_mod\(.*returned bool\[3\]",
    ),
    ({"mask": LengthMask(np.ones(3, int))}, "key_value_lengths must broadcast to"),
    (
        {"mask": SegmentMask(np.ones(6, int), np.ones(S, int))},
        "query_segment_ids must have shape",
    ),
    ({"mask": ArrayMask(np.ones((T, 6), bool))}, "mask must broadcast to"),
    (
        {"implementation": "flash"},
        'implementation must be "xla", "blockwise".*or None, but got \'flash\'',
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(arguments, message):
    refused(message, call, **arguments)


NO_MASKS = [
    (
        lambda: LocalMask(-3, 0),
        r"LocalMask\(left, right\) requires left \+ right >= 0, .*\(-3, 0\)",
    ),
    (lambda: LocalMask(1.5, 0), r"requires integers or None, but got \(1.5, 0\)"),
    (
        lambda: CausalMask(np.arange(3)),
        r"CausalMask\(offset\) requires an integer.*query_offset",
    ),
    (
        lambda: CausalMask() & np.ones((T, S), bool),
        r"& must combine two masks, .* \(5, 7\); wrap it: .*ArrayMask\(arr",
    ),
    (lambda: np.ones((T, S), bool) | CausalMask(), r"\| must combine two masks"),
    (lambda: jnp.ones((T, S), bool) & CausalMask(), "& must combine two masks"),
    (lambda: CausalMask() & LocalMask, r"the class LocalMask; call it: LocalMask\(\)"),
    (
        lambda: CausalMask() and LocalMask(1, 0),
        "masks must be combined with &, | and ~",
    ),
]


@pytest.mark.parametrize(("make", "message"), NO_MASKS)
def test_masks_are_refused(make, message):
    refused(message, make)


def test_an_error_comes_before_any_compute():
    """It is raised while tracing, without any value."""
    with pytest.raises(ValueError, match="depths must match"):
        jax.eval_shape(
            dot_product_attention,
            *(jax.ShapeDtypeStruct((1, 2, 1, n), jnp.float32) for n in (3, 4, 4)),
        )


@pytest.mark.parametrize("name", ["lengths", "segment_ids"])
@pytest.mark.parametrize(
    "function", [dot_product_attention, attention_fn, explain_implementation]
)
def test_arguments_of_modules_are_refused_with_the_names_of_functions(function, name):
    x = jnp.ones((B, T, N, H))
    siblings = {
        "lengths": "query_seq_lengths and key_value_seq",
        "segment_ids": "query_segment_ids and key_value_segm",
    }
    with pytest.raises(
        TypeError,
        match=rf"\(\) got an unexpected keyword argument '{name}'; .* use {siblings[name]}",
    ):
        function(x, x, x, **{name: np.ones(B, int)})
    refused(
        r"got an unexpected keyword argument 'length'$",
        function,
        x,
        x,
        x,
        length=3,
        error=TypeError,
    )


def test_a_rate_in_an_array_counts_if_it_is_known():
    want = call(dropout_rate=0.25, dropout_rng=RNG)
    for rate in (np.array(0.25), jnp.linspace(0, 0.5, 3)[1]):
        np.testing.assert_array_equal(call(dropout_rate=rate, dropout_rng=RNG), want)
    with pytest.raises(ValueError, match="dropout_rate must be a concrete number in"):
        jax.jit(lambda rate: call(dropout_rate=rate, dropout_rng=RNG))(0.1)
