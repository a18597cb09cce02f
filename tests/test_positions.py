"""Positions: offsets of queries and keys, the limits of int32, and calls on slices that
equal parts of a whole call.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import with_core_tuples

from flax_mha import dot_product_attention
from flax_mha.masks import CausalMask, FunctionMask, LengthMask, LocalMask

B = 2
T = 40
N = 4
K = 2
H = 8
rng = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    rng.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K)
)
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


def by_table(score, b, h, q_idx, kv_idx):
    return score + TABLE[q_idx] * TABLE[kv_idx] * (b + 1).astype(score.dtype)


BY_POSITION = {
    "window, lengths": {"local_window_size": (9, 3), **LENGTHS},
    "masks, functions": {
        "mask": ((CausalMask(2) & ~LocalMask(3, 1)) | LengthMask(np.array([5, 9])))
        & THINNED,
        "score_mod": by_table,
    },
    "dropout": {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)},
}
# First and last query, and where the keys are cut. Slices of one size share their
# programs.
SLICES = ((0, 16, 31), (8, 24, 31), (13, 29, 9), (31, 32, 20))


def attention(*arrays, **arguments):
    """Output and log-sum-exp, as NumPy arrays, whose operations compile nothing."""
    return jax.device_get(
        dot_product_attention(*arrays, return_residual=True, **arguments)
    )


@pytest.mark.parametrize(
    ("name", "implementation"),
    with_core_tuples(
        itertools.product(BY_POSITION, ("xla", "blockwise")),
        ("dropout", "xla"),
        ("masks, functions", "blockwise"),
    ),
)
def test_slices_of_queries_and_keys_merge_into_the_whole_call(name, implementation):
    """Using log-sum-exps, as in ring attention; offsets are numbers, arrays, or one for
    each batch entry.
    """
    arguments = BY_POSITION[name] | {"implementation": implementation}
    output, lse = attention(QUERY, KEY, VALUE, **arguments)
    for q_start, q_stop, middle in SLICES[: len(SLICES) if name == "dropout" else -1]:
        total = 0
        rows = slice(q_start, q_stop)
        for start, stop in ((0, middle), (middle, T)):
            offsets = {"query_offset": q_start, "key_value_offset": np.int32(start)}
            if name == "masks, functions" or (name == "dropout" and q_start % 2 == 1):
                offsets = {
                    argument: np.full(B, offset) for argument, offset in offsets.items()
                }
            keys = KEY[:, start:stop], VALUE[:, start:stop]
            part, part_lse = attention(QUERY[:, rows], *keys, **offsets, **arguments)
            share = np.exp(part_lse - np.where(lse == -np.inf, 0, lse)[:, rows])
            total = total + part * share[..., None]
        assert_close(total, output[:, rows])


@BOTH
@pytest.mark.parametrize("traced", [False, True])
def test_positions_at_the_limits_of_int32(traced, implementation):
    want = attend(is_causal=True, local_window_size=(9, 0))

    def at(offset):
        more = {
            "query_offset": offset,
            "key_value_offset": offset,
            "implementation": implementation,
        }
        return attend(is_causal=True, local_window_size=(9, 0), **more)

    for offset in (LARGEST - T + 1, -(2**31), 2**30):
        got = jax.jit(at)(jnp.int32(offset)) if traced else at(offset)
        assert_close(got, want)


@BOTH
def test_numbers_beyond_int32_equal_its_limits(implementation):
    everything = attend(implementation=implementation)
    for arguments in (
        {"local_window_size": LARGEST},
        {"local_window_size": 2**40},
        {"is_causal": True, "query_offset": LARGEST - T + 1},
        {"mask": CausalMask(2**35)},
        # A slice of longer sequences.
        {"key_value_seq_lengths": np.array([2**40, LARGEST]), "key_value_offset": 0},
    ):
        assert_close(attend(implementation=implementation, **arguments), everything)
    nothing = attend(mask=CausalMask(-(2**40)), implementation=implementation)
    assert (nothing == 0).all()


@BOTH
def test_lengths_and_ids_of_64_bits(implementation):
    ids = np.arange(T) // 16
    want = attend(query_segment_ids=ids, implementation=implementation)
    with jax.enable_x64(True):

        @jax.jit
        def call(ids, lengths, offset):
            more = {
                "query_offset": offset,
                "key_value_offset": offset,
                "implementation": implementation,
            }
            return attend(query_segment_ids=ids, key_value_seq_lengths=lengths, **more)

        got = call(
            jnp.asarray(ids, jnp.int64) * 2**32, jnp.array([2**40, 2**33]), jnp.int64(3)
        )
    assert_close(got, want)


IDS = {
    "query_segment_ids": np.full(T, 2**32 - 1, np.uint32),
    "key_value_segment_ids": np.full(T, -1),
}
REFUSED = [
    (
        {"query_offset": 2**31 - T + 1},
        "query_offset must keep positions within the int32 range",
    ),
    (
        {"key_value_offset": np.array([0, 2**31 - 3])},
        "key_value_offset must keep positions",
    ),
    (
        {"query_offset": 2**31 - 100, "key_value_offset": -1000},
        "must keep distances within .* positions 2147483548",
    ),
    (
        {"query_segment_ids": np.arange(T) * 2**32},
        r"query_segment_ids must be in the int32 .*ids, return_inverse=True",
    ),
    (IDS, "query_segment_ids must be in the int32 range"),
    ({"key_value_offset": 0.5}, "key_value_offset must have an integer dtype"),
]


@pytest.mark.core
@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(arguments, message):
    refused(message, attend, **arguments)


def test_variables_and_lists_of_traced_numbers_are_arrays():
    lengths = np.array([22, 37])
    offset = np.array([3, 5])
    want = attend(mask=LengthMask(lengths) & CausalMask(), query_offset=offset)

    @jax.jit
    def call(lengths, offset):
        mask = LengthMask([lengths[0], lengths[1]]) & CausalMask()
        return attend(mask=mask, query_offset=nnx.Variable(offset))

    assert_close(call(lengths, offset), want)
    numbers = {
        "key_value_seq_lengths": lengths,
        "query_offset": offset,
        "scale": jnp.float32(8**-0.5),
    }
    numbers |= {"sinks": jnp.full(N, -jnp.inf), "bias": jnp.zeros((T, T))}
    variables = {name: nnx.Variable(jnp.asarray(x)) for name, x in numbers.items()}
    assert_close(
        dot_product_attention(
            nnx.Variable(jnp.asarray(QUERY)), KEY, VALUE, is_causal=True, **variables
        ),
        want,
    )
