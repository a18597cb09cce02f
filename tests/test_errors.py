"""Errors for bad input name the argument, the expected and the given value, before
anything is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from marks import Refusals

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
KEY_IDS = np.ones((B, S), int)


def call(**arguments):
    """Calls attention. Query, key and value may be shapes, or be left out."""
    dtypes = arguments.pop("dtypes", {})
    arguments = SHAPES | arguments
    for name in SHAPES:
        shape = arguments[name]
        if isinstance(shape, tuple):
            arguments[name] = jnp.ones(shape, dtypes.get(name, jnp.float32))
    return dot_product_attention(**arguments)


REFUSED = Refusals()


def refuses(message, **arguments):
    """Adds the case that `call(**arguments)` raises an error with this message."""
    REFUSED.add(message, call, **arguments)


# Anything but arrays and masks.
refuses(
    r"key must be an array \[batch..., length, heads, head size\], but got None",
    key=None,
)
refuses(
    r"key, value lengths|query heads must be a multiple "
    r".*5 and 7 in .*use jnp.swapaxes\(x, -3, -2\)",
    **SWAPPED,
)
refuses(
    "query_offset must have an integer dtype, but got",
    query_offset="first",
)
refuses('precision must be None, "default", "high".*got \'lol\'', precision="lol")
refuses(
    "mask must be a boolean array or a mask object .*, but got None",
    mask=ArrayMask(None),
)
refuses("requires integer arrays, but got None", mask=SegmentMask(None, None))
refuses(
    "mask must be a boolean array or a mask object .* but got object",
    mask=object(),
)
refuses("bias must be an array of floats, but got list", bias=[[1.0, 2.0], [3.0]])
refuses(
    "key_value_seq_lengths must be an integer array, but got",
    key_value_seq_lengths=[1, [2]],
)
refuses(
    "must not capture complex arrays, .*x.real and",
    score_mod=lambda score, b, h, q, k: score + COMPLEX[k].real,
)

# Shapes and dtypes of the inputs.
refuses(
    r"query, key and value must have the same rank, .*\(7, 3, 4\)",
    key=(S, K, H),
    value=(S, K, H),
)
refuses("query must have rank 3 or more", query=(T, H), key=(S, H), value=(S, H))
refuses(
    "query, key, value batch dims must match",
    key=(3, S, K, H),
    value=(3, S, K, H),
)
refuses("key, value lengths must match, but got 7 and 8", value=(B, 8, K, H))
refuses("query, key depths must match, but got 4 and 3", key=(B, S, K, 3))
refuses("key, value heads must match, but got 3 and 2", value=(B, S, 2, H))
refuses("both at least 1, but got 6 and 0", key=(B, S, 0, H), value=(B, S, 0, H))
refuses("query head size must be at least 1", query=(B, T, N, 0), key=(B, S, K, 0))
refuses(
    r"must have the same dtype, one of .*key bfloat16.*use \.astype",
    dtypes={"key": jnp.bfloat16},
)
refuses(
    "must have the same dtype, one of float16, bfloat16, .*int32",
    dtypes=dict.fromkeys(SHAPES, jnp.int32),
)

# Masks: the remedy depends on the shape, which shows what was meant.
refuses(
    r"mask must be bool .*float32; use mask.astype\(bool\)",
    mask=np.ones((T, S), np.float32),
)
refuses(
    r"mask must broadcast to .*\(2, 6, 5, 7\).*\(2, 6, 5, 6\)",
    mask=np.ones((B, N, T, 6), bool),
)
refuses(
    r"mask must be a boolean array or a mask object such as CausalMask\(\), .*call it",
    mask=CausalMask,
)
refuses(
    r"got shape \(2, 7\); use mask\[:, None, None, :\]",
    mask=np.ones((B, S), bool),
)
refuses(r"\(2, 5, 1\); use mask\[:, None, :, :\]", mask=np.ones((B, T, 1), bool))
refuses("mask must broadcast to", mask=np.ones((1, B, N, T, S), bool))

# Biases.
refuses(
    "bias must have one of the dtypes .*bool; pass a boolean array as mask=",
    bias=np.ones((T, S), bool),
)
refuses(
    r"bias must broadcast to .*got shape \(5, 6\)",
    bias=np.ones((T, 6), np.float32),
)

# Lengths and segments.
refuses(
    r"key_value_seq_lengths must broadcast to .*\(2,\)",
    key_value_seq_lengths=np.ones(3, int),
)
refuses(
    "query_seq_lengths must have an integer dtype, but got float",
    query_seq_lengths=np.ones(2),
)
refuses(
    "key_value_seq_lengths must be at least 0, but got -1",
    key_value_seq_lengths=np.array([3, -1]),
)
refuses(
    "key_value_lengths must be at least 0, but got -5",
    mask=LengthMask(np.array([1, -5])),
)
refuses(
    r"key_value_segment_ids must also be passed",
    query_segment_ids=np.ones((B, 6), int),
)
refuses(
    r"query_segment_ids must have shape \[batch..., 5\].*got \(2, 6\)",
    query_segment_ids=np.ones((B, 6), int),
    key_value_segment_ids=KEY_IDS,
)
refuses(
    "query_segment_ids must broadcast to",
    query_segment_ids=np.ones((3, T), int),
    key_value_segment_ids=KEY_IDS,
)
refuses(
    "query_segment_ids must have an integer dtype",
    query_segment_ids=np.ones((B, T)),
    key_value_segment_ids=KEY_IDS,
)
refuses(
    "query_segment_ids must also be passed",
    key_value_segment_ids=np.ones((B, S), int),
)

# Dropout.
refuses(
    r"dropout_rate must be a concrete number in \[0, 1\), .*got 1.0",
    dropout_rate=1.0,
    dropout_rng=RNG,
)
refuses(
    r"dropout_rng must be a key if dropout_rate > 0, but got None",
    dropout_rate=0.1,
)
refuses("dropout_rng must be a single key", dropout_rate=0.1, dropout_rng=0)
refuses(
    r"raw uint32 key of shape \(2,\), .* shape \(3,\)",
    dropout_rate=0.1,
    dropout_rng=np.zeros(3, np.uint32),
)
refuses(
    "dropout_rng must be a single key",
    dropout_rate=0.1,
    dropout_rng=jax.random.split(RNG),
)

# Numbers and flags, for which True is no 1.
refuses(
    r"local_window_size must be an int >= 0, .*got \(3, -1\)",
    local_window_size=(3, -1),
)
refuses("local_window_size must be", local_window_size=(3, 1, 2))
refuses("local_window_size must be .*got 1.5", local_window_size=1.5)
refuses("is_causal must be True or False, but got 1", is_causal=1)
refuses("return_residual must be True or False, but got 'yes'", return_residual="yes")
refuses("return_max_score must be True or False, but got 1", return_max_score=1)
refuses(
    "broadcast_dropout must be True or False, but got None",
    broadcast_dropout=None,
)
refuses("scale must be a finite number, but got nan", scale=float("nan"))
refuses(r"scale must be a scalar, but got an array of shape \(2,\)", scale=jnp.ones(2))
refuses("query_offset must have an integer dtype", query_offset=0.5)
refuses("query_offset must broadcast to", query_offset=np.zeros(3, int))
refuses("scale must fit in float32, but got 1e[+]39", scale=1e39)
refuses(
    "logits_soft_cap must be at most 1e[+]30, .*pass None to disable the cap",
    logits_soft_cap=1e39,
)
refuses(
    "logits_soft_cap must be a concrete finite number > 0, .*got 0.0",
    logits_soft_cap=0.0,
)
refuses(
    "logits_soft_cap must be a concrete finite number > 0, .*got '30'",
    logits_soft_cap="30",
)

# Sinks.
refuses(
    r"sinks must broadcast to .*\(2, 6\), but got shape \(3,\)",
    sinks=np.ones(K, np.float32),
)
refuses("sinks must have one of the dtypes .*int", sinks=np.ones(N, int))

# Functions of users: what they return, and what they raise.
refuses("score_mod must be a function of scalars, but got 3.0", score_mod=3.0)
refuses("mask_mod must be a function of scalars, but got 3", mask=FunctionMask(3))
refuses("dropout_rate .*got True", dropout_rate=True, dropout_rng=RNG)
refuses(
    r"score_mod\(score, b, h, q.*<lambda>.* float32\[1\]",
    score_mod=lambda score, b, h, q, k: score[None],
)
refuses(
    r"score_mod\(.*returned int32\[\]; convert the result with .astype",
    score_mod=lambda score, b, h, q, k: q,
)
refuses(
    r"score_mod\(.*float32\[\], int32\[\]",
    score_mod=lambda score, b, h, q, k: (score, q),
)
refuses(
    r"score_mod\(.*raised TypeError: .*takes 1 positional",
    score_mod=lambda score: score,
)
refuses(
    "TracerBoolConversionError.*; use jnp.where",
    score_mod=lambda score, b, h, q, k: score if q > k else -score,
)
refuses(
    r"mask_mod\(b, h, .*\) must return a bool .*returned int32\[\]",
    mask=FunctionMask(lambda b, h, q, k: q - k),
)
refuses(
    r"mask_mod\(.*returned bool\[3\]",
    mask=CausalMask() & ~FunctionMask(lambda b, h, q, k: jnp.ones(3, bool)),
)
refuses(
    'implementation must be "xla", "blockwise".*or None, but got \'flash\'',
    implementation="flash",
)


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_wrong_arguments_raise_errors_of_one_line(message, call):
    refused(message, call)


NO_MASKS = Refusals()
NO_MASKS.add(
    r"LocalMask\(left, right\) requires left \+ right >= 0, .*\(-3, 0\)",
    LocalMask,
    -3,
    0,
)
NO_MASKS.add(r"requires integers or None, but got \(1.5, 0\)", LocalMask, 1.5, 0)
NO_MASKS.add(
    r"CausalMask\(offset\) requires an integer.*query_offset", CausalMask, np.arange(3)
)
NO_MASKS.add(
    r"& must combine two masks, .* \(5, 7\); wrap it: .*ArrayMask\(arr",
    lambda: CausalMask() & np.ones((T, S), bool),
)
NO_MASKS.add(r"\| must combine two masks", lambda: np.ones((T, S), bool) | CausalMask())
NO_MASKS.add("& must combine two masks", lambda: jnp.ones((T, S), bool) & CausalMask())
NO_MASKS.add(
    r"the class LocalMask; call it: LocalMask\(\)", lambda: CausalMask() & LocalMask
)
NO_MASKS.add(
    "masks must be combined with &, | and ~", lambda: CausalMask() and LocalMask(1, 0)
)


@pytest.mark.parametrize(("message", "call"), NO_MASKS)
def test_mask_objects_refuse_what_they_cannot_hold_or_combine(message, call):
    refused(message, call)


FUNCTIONS = (dot_product_attention, attention_fn, explain_implementation)


@pytest.mark.parametrize("name", ["lengths", "segment_ids"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_name_their_own_arguments_if_given_those_of_modules(function, name):
    x = jnp.ones((B, T, N, H))
    siblings = {
        "lengths": "query_seq_lengths and key_value_seq",
        "segment_ids": "query_segment_ids and key_value_segm",
    }
    given = {name: np.ones(B, int)}
    message = rf"\(\) got an unexpected keyword argument '{name}'; .* use "
    message += siblings[name]
    refused(message, function, x, x, x, **given, error=TypeError)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_refuse_unknown_arguments(function):
    x = jnp.ones((B, T, N, H))
    message = "got an unexpected keyword argument 'length'$"
    refused(message, function, x, x, x, length=3, error=TypeError)


def test_traced_arrays_are_no_rates_of_dropout():
    attend = jax.jit(lambda rate: call(dropout_rate=rate, dropout_rng=RNG))
    refused("dropout_rate must be a concrete number in", attend, 0.1)
