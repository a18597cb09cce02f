"""What tests of the drop-ins for flax.nnx and flax.linen share: cases, inputs and
comparisons.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flax_mha
from flax_mha import Norm, masks

BATCH = 2
QUERIES = 7
KEYS = 11
HEADS = 3
FEATURES = 15


class Case(NamedTuple):
    """One use of a module: its options, its inputs, and the other arguments of the
    call.
    """

    options: dict = {}  # noqa: RUF012
    batch: tuple[int, ...] = (BATCH,)
    # Of the queries, the keys and the values, as far as they are given.
    features: tuple[int, ...] = (FEATURES,)
    arguments: dict = {}  # noqa: RUF012

    def inputs(self):
        lengths = (QUERIES, KEYS, KEYS)
        return [
            normal(i, *self.batch, lengths[i], size)
            for i, size in enumerate(self.features)
        ]


def normal(seed, *shape):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape).astype(np.float32))


def visible(*shape):
    """A mask that hides a third of the keys, but never the first: Flax returns mean(V)
    for a row without keys.
    """
    mask = np.random.default_rng(0).random(shape) > 1 / 3
    mask[..., 0] = True
    return mask


CROSS = (FEATURES, FEATURES)
CASES = {
    "self": Case(),
    "no batch": Case(batch=()),
    "two batch axes": Case(batch=(2, 3)),
    "keys and values": Case(features=(FEATURES,) * 3),
    "mask": Case(
        features=CROSS, arguments={"mask": visible(BATCH, HEADS, QUERIES, KEYS)}
    ),
    "padding": Case(features=CROSS, arguments={"mask": visible(BATCH, 1, 1, KEYS)}),
    "mask without batch": Case(
        batch=(), arguments={"mask": visible(HEADS, QUERIES, QUERIES)}
    ),
    "mask with two batch axes": Case(
        batch=(2, 3), arguments={"mask": visible(2, 3, 1, QUERIES, QUERIES)}
    ),
    "mask of numbers": Case(
        arguments={"mask": np.tri(QUERIES, dtype=np.float32)[None, None]}
    ),
    "without bias": Case({"use_bias": False}),
    "sizes": Case({"qkv_features": 21, "out_features": 13}, features=CROSS),
    "normalized": Case({"normalize_qk": True}),
}


@contextlib.contextmanager
def flax_rules():
    """JAX's own promotion, for what Flax computes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def raw(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return np.asarray(x)


def scaled(key, shape, dtype, out_sharding=None):
    """A quick initializer of kernels and biases: nothing is compiled for it."""
    # Linen only traces for shapes.
    seed = 0 if isinstance(key, jax.core.Tracer) else np.asarray(raw(key))
    weights = np.random.default_rng(seed).normal(size=shape) / np.sqrt(FEATURES)
    return weights.astype(dtype)


def assert_same(got, expected):
    """Trees with the same paths, shapes, dtypes and values to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(raw(one), raw(other))


def assert_close(got, expected):
    """Trees of float32 that differ by rounding: 1e-5 of the largest value is about 80
    units in its last place.

    A result here goes through four products and a softmax, with sums of at most 30
    terms in each.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def assert_grads_close(got, expected):
    """`assert_close`, except for the key bias: it shifts all scores of a row equally,
    so its gradient is rounding.

    (Unless keys are normalized afterwards.)
    """
    for grads in (got, expected):
        if "bias" in grads["key"] and "key_ln" not in grads:
            size = np.abs(grads["query"]["bias"]).max()
            np.testing.assert_allclose(grads["key"].pop("bias"), 0, atol=1e-5 * size)
    assert_close(got, expected)


def assert_no_worse(got, peer, reference):
    """FlashAttention's rule for 16 bits: at most twice the error of the plain
    computation, and one rounding.
    """
    assert (got.shape, got.dtype) == (peer.shape, peer.dtype)
    got = np.asarray(got, np.float32)
    reference = np.asarray(reference, np.float32)
    rounding = float(jnp.finfo(peer.dtype).eps) / 2 * np.abs(reference).max()
    allowed = 2 * np.abs(np.asarray(peer, np.float32) - reference).max() + rounding
    assert np.abs(got - reference).max() <= allowed


def recording(attention_fn=flax_mha.attention_fn):
    """The attention function, and the list of the keyword arguments of its calls."""
    calls = []

    @functools.wraps(attention_fn)
    def recorder(*arrays, **arguments):
        calls.append(arguments)
        return attention_fn(*arrays, **arguments)

    return recorder, calls


def by_distance(score, b, h, q_idx, kv_idx):
    """A score_mod that depends on both positions and on the head."""
    distance = (q_idx - kv_idx).astype(score.dtype)
    return score * 2 - distance * (h + 1).astype(score.dtype) / 8


def thinned(b, h, q_idx, kv_idx):
    """A mask_mod that depends on all four; it masks the only key of a causal query 0 in
    head 0.
    """
    return (q_idx + kv_idx + b) % (h + 2) != b


IDS = np.array([5, 5, 5, 5, 3, 3, 3])
SEGMENTS = {"mask": masks.SegmentMask(IDS, IDS)}
THINNED = {"mask": masks.FunctionMask(thinned)}
MODIFIED = {"score_mod": jax.tree_util.Partial(by_distance)}
# Options and call arguments of ours that Flax lacks, the same in both modules.
GROUPED = {"num_heads": 6, "num_kv_heads": 2, "qkv_features": 30}
EVERYTHING = Case(
    GROUPED
    | {
        "sinks": True,
        "logits_soft_cap": 0.5,
        "normalize_qk": Norm("rms"),
        "local_window_size": (3, 1),
    },
    arguments=MODIFIED | THINNED,
)
ADDED = {
    "logits_soft_cap": Case({"logits_soft_cap": 0.5}),
    "sinks": Case({"sinks": True}),
    "score_mod": Case(arguments=MODIFIED),
    "rms_norm": Case({"normalize_qk": Norm("rms")}),
    "window": Case({"local_window_size": (2, 1)}),
    "causal, segments": Case(
        arguments={
            "is_causal": True,
            "segment_ids": jnp.broadcast_to(IDS, (BATCH, QUERIES)),
        }
    ),
    "everything": EVERYTHING,
}
# Two at a time, since every case is compiled for each implementation; of what needs
# positions there is one in each.
DECODING_ADDED = {
    "sinks, score_mod": Case({"sinks": True}, arguments=MODIFIED),
    "logits_soft_cap, FunctionMask": Case({"logits_soft_cap": 0.5}, arguments=THINNED),
    "rms_norm, SegmentMask": Case({"normalize_qk": Norm("rms")}, arguments=SEGMENTS),
    "CausalMask, LocalMask": Case(
        arguments={"mask": masks.CausalMask(-1) & masks.LocalMask(2, 1)}
    ),
    "bias, window with mask": Case(
        {"local_window_size": 2},
        arguments={
            "mask": visible(BATCH, 1, 1, QUERIES),
            "bias": np.asarray(normal(7, HEADS, QUERIES, QUERIES)),
        },
    ),
    "two batch axes, window with key heads": Case(
        {"num_kv_heads": 1, "local_window_size": (3, None)}, batch=(2, 3)
    ),
    "everything": EVERYTHING,
}


def trained(params):
    """Changes vectors: sinks and the scales of norms start as zeros and ones, which
    would hide errors.
    """

    def change(w):
        return w + normal(4, *w.shape) if w.ndim == 1 else w

    return jax.tree.map(change, params)


def cut(arguments, t):
    """Arrays with a row for every query, and segments, are cut to query t."""

    def of_query(x):
        if isinstance(x, masks.SegmentMask):
            return masks.SegmentMask(x.query_ids[t : t + 1], x.key_value_ids)
        if isinstance(x, np.ndarray) and x.shape[-2] > 1:
            return x[..., t : t + 1, :]
        return x

    return {name: of_query(x) for name, x in arguments.items()}


def attention_arguments(run, ours, flax):
    """Our module and Flax's, made with some options, pass the same to their attention
    functions.
    """
    options = {
        "dropout_rate": 0.5,
        "broadcast_dropout": True,
        "dtype": jnp.float32,
        "precision": "highest",
    }
    calls = []
    for kind in (ours, flax):
        attention_fn, recorded = recording()
        run(kind, options | {"attention_fn": attention_fn})
        calls += recorded
    of_ours, of_flax = calls
    assert (of_ours.get("module") is None) == (of_flax.get("module") is None)
    for name, expected in of_flax.items():
        given = of_ours.get(name)
        if isinstance(expected, jax.Array | np.ndarray):
            np.testing.assert_array_equal(raw(given), raw(expected))
        elif name != "module":
            # What Flax switches off, ours may leave out.
            assert given == expected or (given is None and expected is False)
    return of_ours


class Refused(NamedTuple):
    """What both modules refuse when they are made or called."""

    message: str
    options: dict = {}  # noqa: RUF012
    inputs: tuple = ()
    arguments: dict = {}  # noqa: RUF012
    error: type[Exception] = ValueError


class RefusedCalls(list[Refused]):
    """A table of refused calls, with a statement for each."""

    def add(self, message, *inputs, options=None, error=ValueError, **arguments):
        self.append(Refused(message, options or {}, inputs, arguments, error))


REFUSED_OPTIONS = []


def refuses_option(message, **options):
    REFUSED_OPTIONS.append(Refused(message, options))


refuses_option("num_heads and num_kv_heads must be at least 1, but got 0", num_heads=0)
refuses_option("must be at least 1, but got 3 and 0", num_kv_heads=0)
refuses_option(
    r"Memory dimension \(15\) must be divisible by 'num_heads' heads \(4\)", num_heads=4
)
refuses_option(r"Memory dimension \(0\) must be divisible", qkv_features=0)
refuses_option(
    r"num_heads \(3\) must be divisible by num_kv_heads \(2\)", num_kv_heads=2
)
refuses_option(
    "local_window_size must be an int >= 0, .* but got -1", local_window_size=-1
)
refuses_option(r"logits_soft_cap must be .*got 0\.0", logits_soft_cap=0.0)
refuses_option("implementation must be \"xla\".*but got 'fast'", implementation="fast")
refuses_option("dropout_rate must be a concrete number in", dropout_rate=-0.1)
refuses_option(
    r"sinks must be True or False, but got array\(\[0",
    sinks=np.zeros(HEADS, np.float32),
)

X = jnp.ones((BATCH, QUERIES, FEATURES))
Y = jnp.ones((BATCH, KEYS, FEATURES))
REFUSED_CALLS = RefusedCalls()
refuses = REFUSED_CALLS.add

# Inputs that do not fit one another.
refuses(r"inputs must have the same rank.*\(2, 7, 15\).*\(11, 15\)", X, Y[0])
refuses("same rank, at least 2", X[0, 0])
refuses("batch dims must match", X, Y[:1])
refuses("key and value lengths must match", X, Y, Y[:, :7])
refuses("`inputs_k` cannot be None if `inputs_v` is not None", X, None, Y)

# Arguments that do not fit the inputs.
refuses(
    r"mask must broadcast.*\(2, 3, 7, 7\).*\(7, 11\)", X, mask=np.ones((7, 11), bool)
)
refuses("bias must broadcast", X, bias=np.ones((2, 7, 7), np.float32))
refuses(
    r"score_mod\(score, b, h, q_idx, kv_idx\) must", X, score_mod=lambda score: score
)
refuses(
    r"^segment_ids must have shape \[batch",
    X,
    segment_ids=jnp.ones((BATCH, KEYS), int),
)
refuses(
    "^segment_ids must be a pair", X, Y, segment_ids=jnp.ones((BATCH, QUERIES), int)
)

# What a CPU, or a decoding module, does not have.
refuses("cudnn", X, options={"implementation": "cudnn"}, error=NotImplementedError)
refuses(
    "segment_ids .*decod",
    X[:, :1],
    options={"decode": True},
    segment_ids=jnp.ones((BATCH, 1), int),
)
