"""Calls on a mesh that splits batch, heads or both, known in any of several ways, equal
those on one device.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, kernels_in, refused
from jax.sharding import AxisType
from marks import core
from meshes import context, floats, gradients, mesh_of, put

from flax_mha import dot_product_attention, explain_implementation
from flax_mha._src.core import validation
from flax_mha.cache import KVCache, cached_attention
from flax_mha.masks import CausalMask, FunctionMask

B = 4
N = 4
H = 8


class Split(NamedTuple):
    """The sizes of a mesh, and the axes that split batch and heads."""

    sizes: tuple[int, int]
    batch: str | None
    heads: str | None


BY_BATCH = Split((4, 1), "data", None)
BY_HEADS = Split((1, 4), None, "model")
BY_BOTH = Split((2, 4), "data", "model")
ONE_DEVICE = Split((1, 1), "data", "model")  # types name axes there, too


class Inputs(NamedTuple):
    """The sizes of a call, and what computes it."""

    length: int
    num_kv_heads: int
    implementation: str | None


DENSE = Inputs(40, N, None)
TILES_OF_ONE_KEY_HEAD = Inputs(96, 1, "blockwise")


def collectives(text):
    """The operations that move floats between devices, except sums of gradients."""
    moves = ("all-gather", "all-to-all", "collective-permute")
    return {
        name for name in moves if re.search(rf"= \(?f32\S* {name}(-start)?\(", text)
    }


def arrays(length, num_kv_heads):
    return {
        "query": floats(0, B, length, N, H),
        "key": floats(1, B, length, num_kv_heads, H),
        "value": floats(2, B, length, num_kv_heads, H),
        "lengths": jnp.asarray([length, 3, length // 2, 0], jnp.int32),
        "slopes": floats(3, N),
    }


def attend(x, sharding=None, implementation=None):
    """All arguments that depend on batch entry, head and position, and dropout."""

    def alibi(score, b, h, q_idx, kv_idx):
        distance = (kv_idx - q_idx).astype(jnp.float32)
        size = 0.01 * (b + 1).astype(jnp.float32)
        return score + x["slopes"][h] * distance * size

    return dot_product_attention(
        x["query"],
        x["key"],
        x["value"],
        mask=FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx % (h + 2) != b),
        is_causal=True,
        key_value_seq_lengths=x["lengths"],
        score_mod=alibi,
        dropout_rate=0.1,
        dropout_rng=jax.random.key(0),
        qkv_sharding=sharding,
        implementation=implementation,
    )


def with_gradients(x, sharding=None, implementation=None):
    trainable = {name: x[name] for name in ("query", "key", "value", "slopes")}
    return gradients(
        lambda given: attend(x | given, sharding, implementation), trainable
    )


@functools.cache
def on_one_device(length, num_kv_heads):
    return jax.device_get(jax.jit(with_gradients)(arrays(length, num_kv_heads)))


def placed(x, mesh, batch="data", heads="model"):
    """The arrays, split by these axes; a single key head is on all devices."""
    kv_heads = heads if x["key"].shape[2] > 1 else None
    return {
        "query": put(x["query"], mesh, batch, None, heads),
        "key": put(x["key"], mesh, batch, None, kv_heads),
        "value": put(x["value"], mesh, batch, None, kv_heads),
        "lengths": put(x["lengths"], mesh, batch),
        "slopes": put(x["slopes"], mesh),
    }


@pytest.mark.parametrize(
    ("inputs", "split", "kind"),
    [
        (DENSE, BY_BATCH, "auto"),
        core(DENSE, BY_HEADS, "explicit"),
        (DENSE, BY_BOTH, "argument"),
        (DENSE, BY_BOTH, "explicit, set_mesh"),
        (DENSE, ONE_DEVICE, "auto, set_mesh"),
        (DENSE, ONE_DEVICE, "explicit"),
        (TILES_OF_ONE_KEY_HEAD, BY_BATCH, "explicit"),
        (TILES_OF_ONE_KEY_HEAD, BY_HEADS, "argument"),
        core(TILES_OF_ONE_KEY_HEAD, BY_BOTH, "auto, set_mesh"),
    ],
)
def test_any_mesh_computes_the_same_without_moving_floats(
    inputs, split, kind, small_tiles
):
    length, num_kv_heads, implementation = inputs
    mesh = mesh_of(kind, split.sizes)
    x = placed(arrays(length, num_kv_heads), mesh, split.batch, split.heads)
    # The types of some meshes' axes say how arrays are split, others need an argument.
    sharding = None
    if kind == "argument":
        sharding = jax.NamedSharding(mesh, jax.P(split.batch, None, split.heads))
    run = functools.partial(
        with_gradients, sharding=sharding, implementation=implementation
    )

    with context(mesh, kind):
        program = jax.jit(run).lower(x).compile()
        got = program(x)

    close(got, on_one_device(length, num_kv_heads))
    assert not collectives(program.as_text())


def products_and_tangents(query, key, value):
    """A Hessian-vector product, a tangent and its gradient, over packed documents."""
    ids = jnp.arange(query.shape[1], dtype=jnp.int32)[None] // 40

    def loss(*arrays):
        output = dot_product_attention(
            *arrays, is_causal=True, query_segment_ids=ids, implementation="blockwise"
        )
        return jnp.sin(output).sum((1, 2, 3))

    def gradient(*arrays):
        return jax.grad(lambda *x: loss(*x).sum(), (0, 1, 2))(*arrays)

    def along(*arrays):
        _, tangent = jax.jvp(loss, arrays, tuple(map(jnp.cos, arrays)))
        return tangent.sum(), tangent

    arrays = (query, key, value)
    _, product = jax.jvp(gradient, arrays, tuple(map(jnp.cos, arrays)))
    return product, jax.grad(along, (0, 1, 2), has_aux=True)(*arrays)


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_derivatives_of_every_order_equal_those_on_one_device(kind, small_tiles):
    x = arrays(96, N)
    whole = [x["query"], x["key"], x["value"]]
    mesh = mesh_of(kind, (4, 1))
    split = [put(x, mesh, "data") for x in whole]
    # Inside shard_map each device has whole sequences, so nothing moves there either.
    run = products_and_tangents
    if kind == "shard_map":
        spec = jax.P("data")
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)

    program = jax.jit(run).lower(*split).compile()

    close(program(*split), jax.jit(products_and_tangents)(*whole))
    assert not collectives(program.as_text())


@pytest.mark.core
@pytest.mark.parametrize("split", [BY_BATCH, BY_HEADS, BY_BOTH])
def test_sharding_of_arrays_outside_jit_is_known(split):
    """Even if only some axes are split."""
    # Outside jit, arrays say how they are split, whichever type the axes have.
    mesh = mesh_of("auto", split.sizes)
    x = placed(arrays(40, N), mesh, split.batch, split.heads)

    output = attend(x)

    expected, _ = on_one_device(40, N)
    close(output, expected)
    assert output.sharding.is_equivalent_to(x["query"].sharding, 4)


@pytest.mark.parametrize("kind", ["auto", "explicit, set_mesh"])
def test_few_queries_of_many_keys_equal_one_device(kind):
    """One device reads these keys in place."""
    x = arrays(600, 2)
    x["query"] = x["query"][:, :3]
    mesh = mesh_of(kind, (2, 2))
    split = placed(x, mesh)

    with context(mesh, kind):
        got = jax.jit(attend)(split)

    close(got, jax.jit(attend)(x))


@pytest.mark.core
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            jax.P("rows"),
            r"use mesh axis names, but got 'rows'; the mesh has \('data', 'model'\)",
        ),
        (
            jax.P(None, "data"),
            "must be split the same way, over batch axes and heads, but got .* from "
            "qkv_sharding",
        ),
        (
            jax.P(None, None, None, "model"),
            "the head size .* cannot be split, but got .* from qkv_sharding",
        ),
        (
            jax.P(("data", "model")),
            "the size of batch axis 0 must be a multiple of 8, the number of devices",
        ),
        (
            jax.P(None, None, ("data", "model")),
            "the number of query heads must be a multiple of 8",
        ),
    ],
)
def test_sharding_that_does_not_fit_is_rejected(spec, message):
    with jax.set_mesh(mesh_of("auto")), pytest.raises(ValueError, match=message):
        attend(arrays(40, N), spec)


@pytest.mark.core
def test_key_heads_that_cannot_be_split_are_rejected():
    query = jnp.zeros((1, 8, 12, H))
    key = jnp.zeros((1, 8, 6, H))
    sharding = jax.NamedSharding(mesh_of("auto", (1, 4)), jax.P(None, None, "model"))
    refused(
        "the number of key heads must divide 4, the number of devices",
        dot_product_attention,
        query,
        key,
        key,
        qkv_sharding=sharding,
    )


@pytest.mark.core
def test_sharding_needs_a_mesh_only_if_it_splits():
    x = arrays(40, N)
    refused("no mesh is set; use", attend, x, jax.P("data"))
    expected, _ = on_one_device(40, N)
    close(attend(x, jax.P()), expected)


@pytest.mark.core
def test_split_sequences_are_rejected():
    x = put(jnp.zeros((4, 8, 4, H)), mesh_of("explicit"), None, "data")
    attend = jax.jit(dot_product_attention)
    refused("context_parallel to split sequences", attend, x, x, x)


FOR_TPU = jax.ShapeDtypeStruct((4, 256, N, 128), jnp.bfloat16)


def kernels_on_a_tpu(sharding, mesh):
    """The numbers of kernels of the forward pass, and with the gradient."""

    def loss(*arrays):
        output = dot_product_attention(*arrays, is_causal=True, qkv_sharding=sharding)
        return output.astype(jnp.float32).sum()

    # Exported for a TPU, so that none is needed here.
    split = jax.NamedSharding(mesh, jax.P("data", None, "model"))
    x = jax.ShapeDtypeStruct(FOR_TPU.shape, FOR_TPU.dtype, sharding=split)
    numbers = []
    for function in (loss, jax.grad(loss, (0, 1, 2))):
        exported = jax.export.export(jax.jit(function), platforms=["tpu"])(x, x, x)
        kernels = kernels_in(exported.mlir_module(), "@tpu_custom_call")
        numbers.append(len(kernels))
    return numbers


def test_kernels_run_in_every_part(monkeypatch):
    compiled_for(monkeypatch, "tpu")
    auto = mesh_of("auto")
    sharding = jax.NamedSharding(auto, jax.P("data", None, "model"))
    assert kernels_on_a_tpu(sharding, auto) == [1, 3]

    explicit = mesh_of("explicit")
    with jax.set_mesh(explicit):
        assert kernels_on_a_tpu(None, explicit) == [1, 3]


def test_no_kernel_runs_if_the_split_is_unknown(monkeypatch):
    compiled_for(monkeypatch, "tpu")
    validation.warn_once.cache_clear()

    # It warns once, for the forward pass.
    with pytest.warns(
        UserWarning, match='"splash" does not.*pass qkv_sharding'
    ) as warnings:
        assert kernels_on_a_tpu(None, mesh_of("auto")) == [0, 0]

    assert len(warnings) == 1


@pytest.mark.core
def test_explanation_names_the_sharding_that_kernels_need(monkeypatch):
    compiled_for(monkeypatch, "tpu")
    x = FOR_TPU
    mesh = mesh_of("auto")

    def explained(sharding):
        answers = []

        def call(x):
            answers.append(explain_implementation(x, x, x, qkv_sharding=sharding))

        jax.eval_shape(call, x)
        return answers[0]

    assert explained(jax.NamedSharding(mesh, jax.P("data"))).chosen == "splash"
    assert explained(jax.P()).chosen == "splash"
    unknown = explained(None)
    assert unknown.chosen == "xla"
    # No other reason: with a sharding, the kernel would run.
    (reason,) = unknown.refusals["splash"]
    assert reason.endswith("how its arrays are sharded: pass qkv_sharding")


def with_split_slopes(mesh):
    """Every device may need every entry of these slopes, which a score_mod captures."""
    x = arrays(40, N)
    split = placed(x, mesh)
    split["slopes"] = put(x["slopes"], mesh, "model")
    return split


def test_captured_arrays_that_are_split_are_gathered_or_rejected():
    split = with_split_slopes(mesh_of("explicit"))
    # Older versions of JAX do not look up entries of such arrays.
    if jax.__version_info__ < (0, 11):
        message = (
            r"capture jax\.reshard\(array, jax\.P\(\)\) instead of a sharded array"
        )
        refused(message, jax.jit(attend), split)
    else:
        close(jax.jit(with_gradients)(split), on_one_device(40, N))


def test_captured_arrays_can_be_gathered_as_the_error_says():
    mesh = mesh_of("explicit")
    split = with_split_slopes(mesh)

    @jax.jit
    def gathered(x):
        return with_gradients(x | {"slopes": jax.reshard(x["slopes"], jax.P())})

    with jax.set_mesh(mesh):
        close(gathered(split), on_one_device(40, N))


@pytest.mark.parametrize(
    "axes", [("data", None, None, "model"), (None, "data", None, "model")]
)
def test_vmap_over_an_axis_that_is_split(axes):
    x = floats(0, 2, B, 40, N, H)
    causal = jax.vmap(functools.partial(dot_product_attention, is_causal=True))
    split = put(x, mesh_of("explicit"), *axes)
    close(jax.jit(causal)(split, split, split), causal(x, x, x))


@pytest.mark.parametrize("shared", ["nothing", "keys"])
def test_vmap_of_few_queries_over_an_axis_that_is_split(shared):
    """They read keys in place, in blocks or all at once."""
    mesh = mesh_of("explicit")
    query = floats(0, 8, 2, 1, 4, H)
    key = floats(1, 8, 2, 600, 4, H)
    lengths = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) * 40
    # Shared keys are on all devices.
    of_query = put(query, mesh, "data")
    of_lengths = put(lengths, mesh, "data")
    if shared == "keys":
        key = key[0]
        of_key = key
        axes = (0, None, 0)
    else:
        of_key = put(key, mesh, "data")
        axes = (0, 0, 0)

    def call(query, key, lengths):
        return dot_product_attention(query, key, key, key_value_seq_lengths=lengths)

    run = jax.jit(jax.vmap(call, axes))
    close(run(of_query, of_key, of_lengths), run(query, key, lengths))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(jnp.float32, "auto"), (jnp.bfloat16, "explicit")]
)
def test_steps_of_mapped_sequences_in_shard_map(dtype, kind):
    """One call for each sequence, by `jax.vmap` inside of `jax.shard_map`; some caches
    are full, some empty.
    """
    query = floats(0, 8, 1, N, H, dtype=dtype)
    new = floats(1, 8, 1, 2, H, dtype=dtype)
    keys = floats(2, 8, 600, 2, H, dtype=dtype)
    values = floats(3, 8, 600, 2, H, dtype=dtype)
    index = jnp.arange(8, dtype=jnp.int32) * 85
    x = [query, new, keys, values, index]

    def step(query, new, key, value, index):
        output, cache = cached_attention(query, new, new, KVCache(key, value, index))
        return output, cache.key, cache.index

    def one_by_one(*x):
        batches_of_one = [x[:, None] for x in x]
        output, key, index = jax.vmap(step)(*batches_of_one)
        return output[:, 0], key[:, 0], index[:, 0]

    mesh = mesh_of(kind, (8, 1))
    split = [put(x, mesh, "data") for x in x]
    spec = jax.P("data")
    mapped = jax.shard_map(one_by_one, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)

    output, key, index = jax.jit(mapped)(*split)

    # What is written needs no rounding, so it has the same bits.
    expected, expected_key, expected_index = jax.jit(step)(*x)
    np.testing.assert_array_equal(key, expected_key)
    np.testing.assert_array_equal(index, expected_index)
    if dtype == jnp.float32:
        close(output, expected)
    else:  # a rounded weight, and a rounded output
        output = output.astype(jnp.float32)
        expected = expected.astype(jnp.float32)
        np.testing.assert_allclose(output, expected, rtol=0, atol=2**-7)


@pytest.mark.parametrize("is_empty", [False, True], ids=["after tokens", "empty"])
@pytest.mark.parametrize(
    ("number", "dtype", "per_row", "window", "by_head"),
    [
        (1, jnp.int8, True, None, False),
        (18, jnp.int8, False, None, True),
        (1, jnp.float8_e4m3fn, False, 5, False),
        (18, jnp.float32, False, 5, True),
    ],
)
def test_decoding_in_shard_map(number, dtype, per_row, window, by_head, is_empty):
    """Of parts of the batch, or of some query heads over one cache."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    cache = KVCache.create(8, 99, 1, 6, dtype, window=window, per_row=per_row)
    if by_head:
        of_query = jax.P(None, None, "x")
        of_key = jax.P()
        of_index = jax.P()
    else:
        of_query = jax.P("x")
        of_key = jax.P("x")
        of_index = jax.P("x") if per_row else jax.P()
    # The scales of a cache in 8 bits are split like its keys.
    specs = (of_key, of_key, of_index, of_key)[: len(cache.arrays)]
    of_cache = jax.tree.unflatten(jax.tree.structure(cache), specs)
    attend = functools.partial(cached_attention, local_window_size=window)
    on_mesh = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(of_query, of_key, of_key, of_cache),
        out_specs=(of_query, of_cache),
    )
    if not is_empty:
        old_key = floats(1, 8, 9, 1, 6)
        old_value = floats(2, 8, 9, 1, 6)
        cache = jax.jit(KVCache.update)(cache, old_key, old_value)
    query = floats(0, 8, number, 8, 6)
    key = floats(1, 8, number, 1, 6)
    value = floats(2, 8, number, 1, 6)

    got, after = jax.jit(on_mesh)(query, key, value, cache)

    expected, expected_after = jax.jit(attend)(query, key, value, cache)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after.arrays, expected_after.arrays)


@pytest.mark.parametrize("implementation", [None, "blockwise"])
def test_shard_map_with_default_arguments_equals_one_device(implementation):
    """Outputs and gradients. Captured arrays and a bias are the same on all devices, or
    split by heads.
    """
    operands = [floats(i, 4, 24, n, H) for i, n in enumerate((4, 2, 2))]
    table = jnp.linspace(-1, 1, 24)
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (4, 24)))
    learned = {
        "table": table,
        "bias": jnp.ones((1, 24, 24)),
        "sinks": table[:4],
        "slopes": jnp.arange(1.0, 5.0),
    }
    integers = {
        "key_value_seq_lengths": jnp.array([24, 11, 3, 0]),
        "query_segment_ids": jnp.asarray(ids, jnp.int32),
        "query_offset": jnp.array([0, 5, 9, 11]),
    }
    shown = jnp.array([3, 9, 17, 24])

    def loss(implementation, axes, operands, learned, integers, shown):
        table = learned["table"]

        def shows(b, h, i, j):
            return (table[j] <= 0.5) & (j < shown[h])

        def score_mod(score, b, h, i, j):
            distance = jnp.abs(i - j).astype(score.dtype)
            return score + table[i % 24] * table[j] - learned["slopes"][h] * distance

        output = dot_product_attention(
            *operands,
            bias=learned["bias"],
            mask=CausalMask() & FunctionMask(shows),
            sinks=learned["sinks"],
            score_mod=score_mod,
            is_causal=True,
            logits_soft_cap=3.0,
            implementation=implementation,
            **integers,
        )
        return jax.lax.psum(jnp.sin(output).sum(), axes), output

    def run(loss):
        graded = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        return jax.device_get(graded(operands, learned, integers, shown))

    # Captured arrays by head are split like the heads.
    of_heads = jax.P("model")
    of_arrays = jax.P("data", None, "model")
    of_learned = {
        "table": jax.P(),
        "bias": jax.P(),
        "sinks": of_heads,
        "slopes": of_heads,
    }
    split = jax.shard_map(
        functools.partial(loss, implementation, ("data", "model")),
        mesh=mesh_of("auto", (4, 2)),
        in_specs=(of_arrays, of_learned, jax.P("data"), of_heads),
        out_specs=(jax.P(), of_arrays),
    )

    got = run(split)

    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
    jax.tree.map(same, got, run(functools.partial(loss, "xla", ())))


@pytest.mark.parametrize("number", [1, 100])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_bfloat16_cache_whose_split_is_unknown_is_not_copied(per_row, number):
    def create():
        return KVCache.create(B, 4096, 2, H, jnp.bfloat16, per_row=per_row)

    # A copy would take all of the cache, whose keys have two bytes a number.
    cache = jax.eval_shape(create)
    new = jax.ShapeDtypeStruct((B, number, 2, H), jnp.bfloat16)
    program = jax.jit(KVCache.update, donate_argnums=0).lower(cache, new, new).compile()
    assert program.memory_analysis().temp_size_in_bytes <= cache.key.size * 2 / 8


def decode_in_8_bits(cache, prompt, token):
    """Each of them is (query, key, value), where latents have no value."""
    _, key, value = prompt
    cache = cache.update(key, value).keep([5, 7])
    return cached_attention(*token, cache)


def tokens(number, kv_heads, has_value):
    query = floats(0, 8, number, 4, H)
    key = floats(1, 8, number, kv_heads, H)
    value = floats(2, 8, number, kv_heads, H) if has_value else None
    return query, key, value


@pytest.mark.parametrize(
    ("kind", "kv_heads", "dtype", "value_size"),
    [
        ("auto", 1, jnp.int8, H - 2),
        ("explicit", 2, jnp.float8_e4m3fn, None),
        ("explicit", 4, jnp.int8, None),
    ],
    ids=["latents", "fewer heads than devices", "split heads"],
)
def test_a_cache_in_8_bits_equals_one_device(kind, kv_heads, dtype, value_size):
    """Split by batch and heads, like its scales; with fewer key heads than devices, on
    all of them.
    """
    mesh = mesh_of(kind)
    spec = jax.P("data", None, "model" if kv_heads == 4 else None, None)
    create = functools.partial(
        KVCache.create, 8, 30, kv_heads, H, dtype, value_size=value_size
    )
    prompt = tokens(18, kv_heads, has_value=value_size is None)
    token = tokens(1, kv_heads, has_value=value_size is None)

    def split(tokens):
        query, key, value = tokens
        if value is not None:
            value = put(value, mesh, *spec)
        return put(query, mesh, "data", None, "model"), put(key, mesh, *spec), value

    decode = jax.jit(decode_in_8_bits)
    with jax.set_mesh(mesh):
        got, after = decode(create(sharding=spec), split(prompt), split(token))

    expected, expected_after = decode(create(), prompt, token)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after.arrays, expected_after.arrays)
    if kind == "explicit":
        assert after.scale.sharding.spec == after.key.sharding.spec == spec


@pytest.mark.parametrize(
    ("rows", "batch"),
    [([3, 3, 0, 7], "data"), ([1, 0, 3], None)],
    ids=["even", "odd"],
)
@pytest.mark.parametrize(("kind", "per_row"), [("auto", False), ("explicit", True)])
def test_taken_sequences_are_split_if_their_number_can_be(kind, per_row, rows, batch):
    """As in a beam search."""
    key = floats(0, B, 3, N, H)
    # Two devices split the batch, so four rows can be split and three cannot.
    create = functools.partial(KVCache.create, B, 5, N, H, per_row=per_row)

    @jax.jit
    def beams(cache, rows):
        return cache.update(key, key).truncate(2).take(rows)

    rows = jnp.array(rows)
    with jax.set_mesh(mesh_of(kind)):
        cache = create(sharding=jax.P("data", None, "model", None))
        got = beams(cache, rows)

    expected = beams(create(), rows)
    jax.tree.map(np.testing.assert_array_equal, got.arrays, expected.arrays)
    if kind == "explicit":
        assert got.key.sharding.spec == jax.P(batch, None, "model", None)
