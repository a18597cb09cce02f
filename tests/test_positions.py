"""Positions: offsets of queries and keys, the limits of int32, and calls on slices that
equal parts of a whole call.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import Refusals, with_core_tuples

from flax_mha import dot_product_attention
from flax_mha.masks import CausalMask, FunctionMask, LengthMask, LocalMask

B = 2
T = 40
N = 4
K = 2
H = 8
rng = np.random.default_rng(0)
QUERY = rng.standard_normal((B, T, N, H)).astype(np.float32)
KEY = rng.standard_normal((B, T, K, H)).astype(np.float32)
VALUE = rng.standard_normal((B, T, K, H)).astype(np.float32)
TABLE = jnp.asarray(rng.standard_normal(T), jnp.float32)
BOTH = pytest.mark.parametrize("implementation", ["xla", "blockwise"])
LARGEST = 2**31 - 1
attend = functools.partial(dot_product_attention, QUERY, KEY, VALUE)


assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)

pytestmark = pytest.mark.usefixtures("small_tiles")

LENGTHS = {
    "query_seq_lengths": np.array([33, 40]),
    "key_value_seq_lengths": np.array([22, 37]),
}
THINNED = FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx * 3 + kv_idx + h) % 4 != 1)
COMBINED = (CausalMask(2) & ~LocalMask(3, 1)) | LengthMask(np.array([5, 9]))


def by_table(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx] * TABLE[kv_idx] * (b + 1).astype(score.dtype)


BY_POSITION = {
    "window, lengths": {"local_window_size": (9, 3), **LENGTHS},
    "masks, functions": {"mask": COMBINED & THINNED, "score_mod": by_table},
    "dropout": {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)},
}


class Part(NamedTuple):
    """Queries of a slice, and where the keys are cut."""

    first: int
    end: int
    middle: int


# Slices of one size share their programs.
SLICES = [Part(0, 16, middle=31), Part(8, 24, middle=31), Part(13, 29, middle=9)]
SINGLE = Part(31, 32, middle=20)


def attention(*arrays, **arguments):
    """Output and log-sum-exp, as NumPy arrays, whose operations compile nothing."""
    results = dot_product_attention(*arrays, return_residual=True, **arguments)
    return jax.device_get(results)


@pytest.mark.parametrize(
    ("name", "implementation"),
    with_core_tuples(
        itertools.product(BY_POSITION, ("xla", "blockwise")),
        ("dropout", "xla"),
        ("masks, functions", "blockwise"),
    ),
)
def test_slices_of_queries_and_keys_merge_into_the_whole_call(name, implementation):
    arguments = BY_POSITION[name] | {"implementation": implementation}
    output, lse = attention(QUERY, KEY, VALUE, **arguments)
    parts = [*SLICES, SINGLE] if name == "dropout" else SLICES
    for first, end, middle in parts:
        # Offsets are numbers, arrays, or one for each batch entry.
        per_entry = name == "masks, functions" or (name == "dropout" and first % 2)
        total = 0
        rows = slice(first, end)
        finite_lse = np.where(lse == -np.inf, 0, lse)[:, rows]
        for start, stop in ((0, middle), (middle, T)):
            offsets = {"query_offset": first, "key_value_offset": np.int32(start)}
            if per_entry:
                offsets = {key: np.full(B, offset) for key, offset in offsets.items()}
            keys = KEY[:, start:stop], VALUE[:, start:stop]
            part, part_lse = attention(QUERY[:, rows], *keys, **offsets, **arguments)
            # As in ring attention: exp(lse of the part - lse) of the whole softmax.
            total = total + part * np.exp(part_lse - finite_lse)[..., None]
        assert_close(total, output[:, rows])


@BOTH
@pytest.mark.parametrize("traced", [False, True])
def test_offsets_at_the_limits_of_int32_change_nothing(traced, implementation):
    causal = {"is_causal": True, "local_window_size": (9, 0)}
    want = attend(**causal)

    def at(offset):
        offsets = {"query_offset": offset, "key_value_offset": offset}
        return attend(**causal, **offsets, implementation=implementation)

    run = jax.jit(at) if traced else at
    for offset in (LARGEST - T + 1, -(2**31), 2**30):
        assert_close(run(jnp.int32(offset) if traced else offset), want)


@BOTH
@pytest.mark.parametrize(
    "arguments",
    [
        {"local_window_size": LARGEST},
        {"local_window_size": 2**40},
        {"is_causal": True, "query_offset": LARGEST - T + 1},
        {"mask": CausalMask(2**35)},
        # A slice of longer sequences.
        {"key_value_seq_lengths": np.array([2**40, LARGEST]), "key_value_offset": 0},
    ],
)
def test_numbers_beyond_int32_equal_its_largest(arguments, implementation):
    everything = attend(implementation=implementation)
    got = attend(implementation=implementation, **arguments)
    assert_close(got, everything)


@BOTH
def test_numbers_beyond_int32_equal_its_smallest(implementation):
    nothing = attend(mask=CausalMask(-(2**40)), implementation=implementation)
    assert (nothing == 0).all()


@BOTH
def test_lengths_and_ids_may_have_64_bits(implementation):
    ids = np.arange(T) // 16
    want = attend(query_segment_ids=ids, implementation=implementation)

    @jax.jit
    def call(ids, lengths, offset):
        return attend(
            query_segment_ids=ids,
            key_value_seq_lengths=lengths,
            query_offset=offset,
            key_value_offset=offset,
            implementation=implementation,
        )

    with jax.enable_x64(True):
        long_ids = jnp.asarray(ids, jnp.int64) * 2**32
        got = call(long_ids, jnp.array([2**40, 2**33]), jnp.int64(3))
    assert_close(got, want)


REFUSED = Refusals()
refuses = REFUSED.add
refuses(
    "query_offset must keep positions within the int32 range",
    attend,
    query_offset=2**31 - T + 1,
)
refuses(
    "key_value_offset must keep positions",
    attend,
    key_value_offset=np.array([0, 2**31 - 3]),
)
refuses(
    "must keep distances within .* positions 2147483548",
    attend,
    query_offset=2**31 - 100,
    key_value_offset=-1000,
)
refuses(
    r"query_segment_ids must be in the int32 .*ids, return_inverse=True",
    attend,
    query_segment_ids=np.arange(T) * 2**32,
)
# In int32, these ids would be equal.
refuses(
    "query_segment_ids must be in the int32 range",
    attend,
    query_segment_ids=np.full(T, 2**32 - 1, np.uint32),
    key_value_segment_ids=np.full(T, -1),
)


@pytest.mark.core
@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_positions_beyond_int32_raise_errors(message, call):
    refused(message, call)


LENGTHS_OF_KEYS = np.array([22, 37])
OFFSETS = np.array([3, 5])


def by_lengths_and_offsets():
    mask = LengthMask(LENGTHS_OF_KEYS) & CausalMask()
    return attend(mask=mask, query_offset=OFFSETS)


def test_lists_of_traced_numbers_are_arrays():
    @jax.jit
    def call(lengths, offset):
        mask = LengthMask([lengths[0], lengths[1]]) & CausalMask()
        return attend(mask=mask, query_offset=nnx.Variable(offset))

    assert_close(call(LENGTHS_OF_KEYS, OFFSETS), by_lengths_and_offsets())


def test_variables_of_nnx_are_arrays():
    arrays = {
        "query": QUERY,
        "key_value_seq_lengths": LENGTHS_OF_KEYS,
        "query_offset": OFFSETS,
        "scale": jnp.float32(8**-0.5),
        "sinks": jnp.full(N, -jnp.inf),
        "bias": jnp.zeros((T, T)),
    }
    variables = {name: nnx.Variable(jnp.asarray(x)) for name, x in arrays.items()}
    got = dot_product_attention(key=KEY, value=VALUE, is_causal=True, **variables)
    assert_close(got, by_lengths_and_offsets())
