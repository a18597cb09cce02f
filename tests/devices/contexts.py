"""Calls over sequences that are split over devices, and their comparison with one
device.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import reference
from cases import close
from jax.sharding import AxisType
from meshes import floats, put

import flax_mha
from flax_mha import CausalMask, FunctionMask, LengthMask, LocalMask
from flax_mha._src.modules.context_parallel import from_zigzag, to_zigzag

B = 2
N = 8
H = 8
T = 48
QKV = ("query", "key", "value")


def mesh_of(axis_type=AxisType.Auto, **sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        (axis_type,) * len(sizes),
        devices=jax.devices()[:count],
    )


def arrays(num_kv_heads, length=T, keys=None, dtype=jnp.float32):
    of_keys = (B, keys or length, num_kv_heads, H)
    return {
        "query": floats(0, B, length, N, H, dtype=dtype),
        "key": floats(1, *of_keys, dtype=dtype),
        "value": floats(2, *of_keys, dtype=dtype),
    }


def plain(x, order):
    return {"is_causal": True}


def everything(x, order):
    """All arguments that depend on batch entry, head or position, and all that have
    gradients.
    """

    def alibi(score, b, h, q_idx, kv_idx):
        distance = (kv_idx - q_idx).astype(score.dtype)
        size = 0.1 * (b + 1).astype(score.dtype)
        return score + x["slopes"][h] * distance * size

    ids = np.repeat([[0, 1, 1, 2], [0, 0, 1, 1]], T // 4, 1)
    segments = order(jnp.asarray(ids, jnp.int32), 1)
    return {
        "sinks": x["sinks"],
        "scale": x["scale"],
        "bias": order(order(x["bias"], 2), 3) + order(x["of_keys"], 3),
        "mask": FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx % (h + 2) != b),
        "score_mod": alibi,
        "is_causal": True,
        "local_window_size": (30, None),
        "query_segment_ids": segments,
        "key_value_segment_ids": segments,
        "key_value_seq_lengths": jnp.asarray([T, T - 7], jnp.int32),
        "dropout_rate": 0.2,
        "dropout_rng": jax.random.key(0),
    }


def windows(x, order):
    """Positions that do not begin at 0, a mask array, lengths and a window on both
    sides.
    """
    shown = jnp.asarray(np.random.default_rng(0).random((1, N, T, 2 * T)) < 0.8)
    of_lengths = LengthMask(jnp.asarray([9, 30], jnp.int32))
    of_positions = CausalMask(3) | LocalMask(2, 9) | of_lengths
    return {
        "mask": of_positions & flax_mha.masks.ArrayMask(order(order(shown, 2), 3)),
        "query_offset": jnp.asarray([40, 11], jnp.int32),
        "key_value_offset": 5,
        "query_seq_lengths": jnp.asarray([80, 30], jnp.int32),
        "local_window_size": (20, 20),
        "logits_soft_cap": 5.0,
    }


EXTRA = {
    "bias": floats(1, B, 1, T, T),
    "of_keys": floats(2, T)[None, None, None],
    "sinks": floats(3, N),
    "slopes": floats(4, N),
    "scale": jnp.float32(0.3),
}
# Arguments, and the arrays that get gradients.
CASES = {
    "plain": (plain, arrays(8)),
    "everything": (everything, arrays(4) | EXTRA),
    "windows": (windows, arrays(2, keys=2 * T)),
    "long": (plain, arrays(2, length=320)),
}


def in_order(layout, devices):
    """Puts arrays [..., positions, ...] into the order of a layout, and back."""
    if layout == "contiguous":
        return (lambda x, axis: x), (lambda x: x)
    return (lambda x, axis: to_zigzag(x, devices, axis)), (
        lambda x: from_zigzag(x, devices)
    )


def in_order_of(order, x):
    """The arrays with queries, keys and values in this order."""
    return x | {name: order(x[name], 1) for name in QKV}


def with_gradients(attention_fn, arguments, order=lambda x, axis: x):
    """A function of arrays; the cotangent depends on the position, so that gradients
    depend on the order, too.
    """

    def attend(x):
        return attention_fn(x["query"], x["key"], x["value"], **arguments(x, order))

    def run(x):
        output, pull = jax.vjp(attend, x)
        return output, pull(jnp.cos(output))[0]

    return run


@functools.cache
def on_one_device(case):
    arguments, x = CASES[case]
    attention_fn = functools.partial(flax_mha.attention_fn, implementation="xla")
    return jax.device_get(jax.jit(with_gradients(attention_fn, arguments))(x))


def compare(got, expected):
    output, gradients = got
    want, want_gradients = expected
    assert gradients.keys() == want_gradients.keys()
    close(output, want, 1e-6)
    close(gradients, want_gradients)


def errors(attention_fn, x):
    """The errors of a causal call's output and gradients, as parts of their largest
    values, and the largest lse.
    """
    shape = x["query"].shape
    # Known numbers of both signs.
    d_output = jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32))
    d_output = d_output.reshape(shape).astype(x["query"].dtype)

    @jax.jit
    def run(x):
        output, pull = jax.vjp(lambda x: attention_fn(**x, is_causal=True), x)
        return output, *(pull(d_output)[0][name] for name in QKV)

    (want, lse), gradients = reference.attention(
        *(np.float64(x[name]) for name in QKV),
        is_causal=True,
        cotangents=(np.float64(d_output), np.zeros(shape[:-1])),
    )
    found = []
    for got, truth in zip(run(x), (want, *gradients), strict=True):
        assert got.dtype == d_output.dtype
        error = np.abs(np.float64(got) - truth).max()
        found.append(error / np.abs(truth).max())
    return np.array(found), lse.max()


def compare_not_finite(one, other, x, sinks, lengths, window):
    """Masked rows are 0 with gradients 0, and NaN only affects the rows that attend to
    it.

    Returns the outputs for each of `sinks`.
    """
    more = {
        "key_value_seq_lengths": jnp.asarray(lengths, jnp.int32),
        "local_window_size": (window, window),
    }

    def run(attention_fn, x, sinks):
        def attend(x, sinks):
            return attention_fn(**x, sinks=sinks, **more)

        output, pull = jax.vjp(attend, x, sinks)
        # NaN in the output would spread by its cotangent.
        return output, pull(jnp.isfinite(output).astype(output.dtype))

    of_one = jax.jit(functools.partial(run, one))
    of_other = jax.jit(functools.partial(run, other))
    want = [of_one(x, each) for each in sinks]
    got = [of_other(x, each) for each in sinks]
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(same, got, want)
    return [output for output, _ in want]


def compare_derivatives(
    derivatives, attention_fn, case, layout, mesh, dtype=np.float64
):
    """Compares derivatives, by a function of `test_derivatives`, with those on one
    device.
    """
    order, back = in_order(layout, mesh.shape["context"])
    with jax.enable_x64(dtype == np.float64):
        got = _derivatives(derivatives, attention_fn, case, dtype, order, back)
        want = _derivatives_on_one_device(derivatives, case, dtype)
    close(got, want, {np.float64: 1e-9, np.float32: 1e-4}[dtype], at_least=1e-2)


@functools.cache
def _derivatives_on_one_device(derivatives, case, dtype):
    one = functools.partial(flax_mha.attention_fn, implementation="xla")
    return _derivatives(derivatives, one, case, dtype, *in_order("contiguous", 1))


def _derivatives(derivatives, attention_fn, case, dtype, order, back):
    arguments, x = CASES[case]

    def loss(x):
        output = attention_fn(x["query"], x["key"], x["value"], **arguments(x, order))
        return jnp.sin(output).sum(), (output,)

    exact = in_order_of(order, x)
    exact = {name: jnp.asarray(array, dtype) for name, array in exact.items()}
    tangents = {name: jnp.cos(2 * array) for name, array in exact.items()}
    results = jax.jit(derivatives(loss))(exact, tangents)

    # Arrays of EXTRA are passed in the order of one device.
    def in_place(name, x):
        if isinstance(x, dict):
            return {key: in_place(key, array) for key, array in x.items()}
        if x.ndim and name not in EXTRA:
            return back(x)
        return x

    return {name: in_place(name, x) for name, x in jax.device_get(results).items()}


def moved(text):
    """How many operations of a program move arrays between devices, except sums of
    gradients.
    """
    kinds = ("collective-permute", "all-gather", "all-to-all")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}


def placed(x, mesh, batch=None, heads=None):
    """Queries, keys and values, and the arrays that belong to them, split over the
    mesh.
    """
    of_sequences = jax.P(batch, "context", heads)
    # Arrays that are not named here are on all devices.
    specs = dict.fromkeys(("query", "key", "value"), of_sequences)
    specs |= {"bias": jax.P(batch, None, "context"), "sinks": jax.P(heads)}
    return {name: put(x[name], mesh, *specs.get(name, ())) for name in x}


def on_devices(attention_fn, case, layout, mesh):
    """The compiled program, and its results in the order of one device."""
    arguments, x = CASES[case]
    order, back = in_order(layout, mesh.shape["context"])
    x = placed(in_order_of(order, x), mesh)
    program = jax.jit(with_gradients(attention_fn, arguments, order)).lower(x).compile()
    output, gradients = jax.device_get(program(x))
    gradients |= {name: back(gradients[name]) for name in QKV}
    return program, (back(output), gradients)
