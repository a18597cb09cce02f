"""Calls on a mesh that splits batch, heads or both, known in any of several ways, equal
those on one device.
"""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, compiled_for, kernels_in, refused
from jax.sharding import AxisType
from marks import with_core_tuples
from meshes import context, floats, gradients, mesh_of, put

from flax_mha import dot_product_attention, explain_implementation
from flax_mha.cache import KVCache, cached_attention
from flax_mha.masks import CausalMask, FunctionMask

B = 4
N = 4
H = 8
SPLITS = {
    "batch": ((4, 1), ("data", None)),
    "heads": ((1, 4), (None, "model")),
    "both": ((2, 4), ("data", "model")),
}
ONE_DEVICE = {"one device": ((1, 1), ("data", "model"))}  # types name axes there, too
SIZES = {"dense": (40, N), "tiles, one key head": (96, 1)}


def collectives(text):
    """The operations that move floats between devices, except sums of gradients."""
    moves = ("all-gather", "all-to-all", "collective-permute")
    return {
        name for name in moves if re.search(rf"= \(?f32\S* {name}(-start)?\(", text)
    }


def arrays(length, num_kv_heads):
    query, key, value = (
        floats(i, B, length, n, H)
        for i, n in enumerate((N, num_kv_heads, num_kv_heads))
    )
    lengths = jnp.asarray([length, 3, length // 2, 0], jnp.int32)
    return {
        "query": query,
        "key": key,
        "value": value,
        "lengths": lengths,
        "slopes": floats(3, N),
    }


def attend(x, sharding=None, implementation=None):
    """All arguments that depend on batch entry, head and position, and dropout."""

    def alibi(score, b, h, q_idx, kv_idx):
        return score + x["slopes"][h] * (kv_idx - q_idx).astype(jnp.float32) * 0.01 * (
            b + 1
        ).astype(jnp.float32)

    mask = FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx % (h + 2) != b)
    more = {
        "is_causal": True,
        "key_value_seq_lengths": x["lengths"],
        "score_mod": alibi,
        "qkv_sharding": sharding,
    }
    more |= {
        "dropout_rate": 0.1,
        "dropout_rng": jax.random.key(0),
        "implementation": implementation,
    }
    return dot_product_attention(x["query"], x["key"], x["value"], mask=mask, **more)


def with_gradients(x, sharding=None, implementation=None):
    trainable = {name: x[name] for name in ("query", "key", "value", "slopes")}
    return gradients(
        lambda arrays: attend(x | arrays, sharding, implementation), trainable
    )


@functools.cache
def on_one_device(length, num_kv_heads):
    return jax.device_get(jax.jit(with_gradients)(arrays(length, num_kv_heads)))


def placed(x, mesh, axes, num_kv_heads):
    batch, heads = axes
    kv_heads = heads if num_kv_heads == N else None
    specs = {
        "query": (batch, None, heads),
        "key": (batch, None, kv_heads),
        "value": (batch, None, kv_heads),
    }
    specs |= {"lengths": (batch,), "slopes": ()}
    return {name: put(x[name], mesh, *specs[name]) for name in x}


DENSE = {
    "batch": ("auto",),
    "heads": ("explicit",),
    "both": ("argument", "explicit, set_mesh"),
}
DENSE |= {"one device": ("auto, set_mesh", "explicit")}
TILES = {"batch": "explicit", "heads": "argument", "both": "auto, set_mesh"}
EACH = [("dense", split, kind) for split, kinds in DENSE.items() for kind in kinds]
EACH += [("tiles, one key head", split, kind) for split, kind in TILES.items()]


@pytest.mark.parametrize(
    ("computed", "split", "kind"),
    with_core_tuples(
        EACH,
        ("dense", "heads", "explicit"),
        ("tiles, one key head", "both", "auto, set_mesh"),
    ),
)
def test_any_mesh(computed, split, kind, small_tiles):
    (length, num_kv_heads), (sizes, axes) = (
        SIZES[computed],
        (SPLITS | ONE_DEVICE)[split],
    )
    mesh = mesh_of(kind, sizes)
    if kind == "argument":
        sharding = jax.NamedSharding(mesh, jax.P(axes[0], None, axes[1]))
    else:
        sharding = None
    x = placed(arrays(length, num_kv_heads), mesh, axes, num_kv_heads)
    implementation = None if computed == "dense" else "blockwise"
    run = functools.partial(
        with_gradients, sharding=sharding, implementation=implementation
    )
    with context(mesh, kind):
        program = jax.jit(run).lower(x).compile()
        close(program(x), on_one_device(length, num_kv_heads))
    assert not collectives(program.as_text())


def products_and_tangents(query, key, value):
    """A Hessian-vector product, a tangent and its gradient, through tiles of documents."""
    ids = jnp.arange(query.shape[1], dtype=jnp.int32)[None] // 40

    def loss(*arrays):
        output = dot_product_attention(
            *arrays, is_causal=True, query_segment_ids=ids, implementation="blockwise"
        )
        return jnp.sin(output).sum((1, 2, 3))

    def along(*arrays):
        tangent = jax.jvp(loss, arrays, tuple(map(jnp.cos, arrays)))[1]
        return tangent.sum(), tangent

    arrays, gradient = (
        (query, key, value),
        jax.grad(lambda *arrays: loss(*arrays).sum(), (0, 1, 2)),
    )
    return jax.jvp(gradient, arrays, tuple(map(jnp.cos, arrays)))[1], jax.grad(
        along, (0, 1, 2), has_aux=True
    )(*arrays)


def test_derivatives_of_every_order(small_tiles):
    whole = [arrays(96, N)[name] for name in ("query", "key", "value")]
    expected = jax.device_get(jax.jit(products_and_tangents)(*whole))
    for kind in ("explicit", "shard_map"):
        mesh = mesh_of(kind, (4, 1))
        spec = jax.P("data")
        split = [put(x, mesh, "data") for x in whole]
        mapped = jax.shard_map(
            products_and_tangents, mesh=mesh, in_specs=spec, out_specs=spec
        )
        program = (
            jax.jit(mapped if kind == "shard_map" else products_and_tangents)
            .lower(*split)
            .compile()
        )
        close(program(*split), expected)
        assert not collectives(program.as_text())


@pytest.mark.core
def test_arrays_outside_jit():
    """Their sharding is known, even if only some axes are split."""
    for sizes, axes in SPLITS.values():
        split = placed(arrays(40, N), mesh_of("auto", sizes), axes, N)
        output = attend(split)
        close(output, on_one_device(40, N)[0])
        assert output.sharding.is_equivalent_to(split["query"].sharding, 4)


def test_few_queries_of_many_keys():
    """One device reads these keys in place."""
    x = arrays(600, 2)
    x |= {"query": x["query"][:, :3]}
    expected = jax.jit(attend)(x)
    for kind in ("auto", "explicit, set_mesh"):
        mesh = mesh_of(kind, (2, 2))
        split = placed(x, mesh, ("data", "model"), N)
        with context(mesh, kind):
            close(jax.jit(attend)(split), expected)


@pytest.mark.core
@pytest.mark.parametrize(
    ("spec", "words"),
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
def test_sharding_that_does_not_fit(spec, words):
    with jax.set_mesh(mesh_of("auto")), pytest.raises(ValueError, match=words):
        attend(arrays(40, N), spec)


@pytest.mark.core
def test_arrays_and_meshes_that_do_not_fit():
    query = jnp.zeros((1, 8, 12, H))
    key = jnp.zeros((1, 8, 6, H))
    sharding = jax.NamedSharding(mesh_of("auto", (1, 4)), jax.P(None, None, "model"))
    with pytest.raises(
        ValueError, match="the number of key heads must divide 4, the number of devices"
    ):
        dot_product_attention(query, key, key, qkv_sharding=sharding)
    x = arrays(40, N)
    refused("no mesh is set; use", attend, x, jax.P("data"))
    close(attend(x, jax.P()), on_one_device(40, N)[0])
    x = put(jnp.zeros((4, 8, 4, H)), mesh_of("explicit"), None, "data")
    refused(
        "context_parallel to split sequences", jax.jit(dot_product_attention), x, x, x
    )


def test_kernels_run_in_every_part(monkeypatch):
    """One for a TPU, three with the gradient, and none if the split of the arrays is
    unknown.
    """
    compiled_for(monkeypatch, "tpu")
    x = jax.ShapeDtypeStruct((4, 256, N, 128), jnp.bfloat16)
    auto = mesh_of("auto")
    explicit = mesh_of("explicit")
    spec = jax.P("data", None, "model")

    def kernels(sharding, mesh):
        """Of the forward pass, and with the gradient."""

        def loss(*arrays):
            return (
                dot_product_attention(*arrays, is_causal=True, qkv_sharding=sharding)
                .astype(jnp.float32)
                .sum()
            )

        types = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
            )
        ] * 3
        functions = map(jax.jit, (loss, jax.grad(loss, (0, 1, 2))))
        texts = [
            jax.export.export(function, platforms=["tpu"])(*types).mlir_module()
            for function in functions
        ]
        return [len(kernels_in(text, "@tpu_custom_call")) for text in texts]

    assert kernels(jax.NamedSharding(auto, spec), auto) == [1, 3]
    assert kernels(None, auto) == [0, 0]
    with jax.set_mesh(explicit):
        assert kernels(None, explicit) == [1, 3]


@pytest.mark.core
def test_explained(monkeypatch):
    compiled_for(monkeypatch, "tpu")
    x = jax.ShapeDtypeStruct((4, 256, N, 128), jnp.bfloat16)
    mesh = mesh_of("auto")

    def explained(sharding):
        answers = []
        jax.eval_shape(
            lambda x: answers.append(
                explain_implementation(x, x, x, qkv_sharding=sharding)
            ),
            x,
        )
        return answers[0]

    assert explained(jax.NamedSharding(mesh, jax.P("data"))).chosen == "splash"
    assert explained(jax.P()).chosen == "splash"
    unknown = explained(None)
    assert unknown.chosen == "xla"
    assert unknown.refusals["splash"][0].endswith(
        "how its arrays are sharded: pass qkv_sharding"
    )
    assert len(unknown.refusals["splash"]) == 1


def test_captured_arrays_that_are_split():
    """Every device may need every entry; the fix that the error names gives the right
    output and gradient.
    """
    x = arrays(40, N)
    mesh = mesh_of("explicit")
    split = placed(x, mesh, ("data", "model"), N) | {
        "slopes": put(x["slopes"], mesh, "model")
    }
    # Where jax does not look up entries of such arrays.
    if jax.__version_info__ < (0, 11):
        refused(
            r"capture jax\.reshard\(array, jax\.P\(\)\) instead of a sharded array",
            jax.jit(attend),
            split,
        )
    else:
        close(jax.jit(with_gradients)(split), on_one_device(40, N))
    with jax.set_mesh(mesh):
        gathered = jax.jit(
            lambda x: with_gradients(x | {"slopes": jax.reshard(x["slopes"], jax.P())})
        )
        close(gathered(split), on_one_device(40, N))


def test_vmap_over_an_axis_that_is_split():
    x = floats(0, 2, B, 40, N, H)
    mesh = mesh_of("explicit")
    causal = jax.vmap(functools.partial(dot_product_attention, is_causal=True))
    expected = causal(x, x, x)
    for axes in (("data", None, None, "model"), (None, "data", None, "model")):
        split = put(x, mesh, *axes)
        close(jax.jit(causal)(split, split, split), expected)


@pytest.mark.parametrize("shared", ["nothing", "keys"])
def test_vmap_of_few_queries_over_an_axis_that_is_split(shared):
    """They read keys in place, in blocks or all at once."""
    mesh = mesh_of("explicit")
    query = floats(0, 8, 2, 1, 4, H)
    key = floats(1, 8, 2, 600, 4, H)
    lengths = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) * 40
    axes = (0, None if shared == "keys" else 0, 0)
    x = (query, key[0] if shared == "keys" else key, lengths)

    def call(query, key, lengths):
        return dot_product_attention(query, key, key, key_value_seq_lengths=lengths)

    split = [
        put(x, mesh, "data") if axis == 0 else x
        for x, axis in zip(x, axes, strict=True)
    ]
    run = jax.jit(jax.vmap(call, axes))
    close(run(*split), run(*x))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(jnp.float32, "auto"), (jnp.bfloat16, "explicit")]
)
def test_steps_of_mapped_sequences_in_shard_map(dtype, kind):
    """One call for each sequence, by `jax.vmap` inside of `jax.shard_map`; some caches
    are full, some empty.
    """
    shapes = ((8, 1, N, H), (8, 1, 2, H), (8, 600, 2, H), (8, 600, 2, H))
    x = [floats(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)] + [
        jnp.arange(8, dtype=jnp.int32) * 85
    ]

    def step(query, new, key, value, index):
        output, cache = cached_attention(query, new, new, KVCache(key, value, index))
        return output, cache.key, cache.index

    def one_by_one(*x):
        output, key, index = jax.vmap(step)(*(x[:, None] for x in x))
        return output[:, 0], key[:, 0], index[:, 0]

    mesh = mesh_of(kind, (8, 1))
    split = [put(x, mesh, "data") for x in x]
    mapped = jax.shard_map(
        one_by_one, mesh=mesh, in_specs=(jax.P("data"),) * 5, out_specs=jax.P("data")
    )
    got = jax.jit(mapped)(*split)
    expected = jax.jit(step)(*x)
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_array_equal(got[2], expected[2])
    if dtype == jnp.float32:
        close(got[0], expected[0])
    else:  # a rounded weight, and a rounded output
        np.testing.assert_allclose(
            got[0].astype(jnp.float32),
            expected[0].astype(jnp.float32),
            rtol=0,
            atol=2**-7,
        )


@pytest.mark.parametrize(
    ("number", "dtype", "per_row", "window", "by_head"),
    [
        (1, jnp.int8, True, None, False),
        (18, jnp.int8, False, None, True),
        (1, jnp.float8_e4m3fn, False, 5, False),
        (18, jnp.float32, False, 5, True),
    ],
)
def test_decoding_in_shard_map(number, dtype, per_row, window, by_head):
    """Batch entries, or query heads over one cache; after other tokens, and in an empty
    cache.
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    new, old = (
        [floats(i, 8, t, n, 6) for i, n in enumerate((8, 1, 1))] for t in (number, 9)
    )
    empty = KVCache.create(8, 99, 1, 6, dtype, window=window, per_row=per_row)
    attend = functools.partial(cached_attention, local_window_size=window)
    of_query, of_key = (
        (jax.P(None, None, "x"), jax.P()) if by_head else (jax.P("x"),) * 2
    )
    of_index = jax.P("x") if per_row and not by_head else jax.P()
    of_cache = jax.tree.unflatten(
        jax.tree.structure(empty),
        (of_key, of_key, of_index, of_key)[: len(empty.arrays)],
    )
    specs = {
        "in_specs": (of_query, of_key, of_key, of_cache),
        "out_specs": (of_query, of_cache),
    }
    both = jax.jit(jax.shard_map(attend, mesh=mesh, **specs))
    alone = jax.jit(attend)
    for cache in (jax.jit(KVCache.update)(empty, *old[1:]), empty):
        (got, after), (expected, wanted) = both(*new, cache), alone(*new, cache)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, after.arrays, wanted.arrays)


def test_inside_shard_map_with_its_default_arguments():
    """Outputs and gradients. Captured arrays and a bias are the same on all devices, or
    split by heads.
    """
    mesh = mesh_of("auto", (4, 2))
    operands = [floats(i, 4, 24, n, H) for i, n in enumerate((4, 2, 2))]
    table = jnp.linspace(-1, 1, 24)
    reals = {
        "table": table,
        "bias": jnp.ones((1, 24, 24)),
        "sinks": table[:4],
        "slopes": jnp.arange(1.0, 5.0),
    }
    ids = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(0, 3, (4, 24))), jnp.int32
    )
    integers = {
        "key_value_seq_lengths": jnp.array([24, 11, 3, 0]),
        "query_segment_ids": ids,
    }
    integers |= {
        "query_offset": jnp.array([0, 5, 9, 11]),
        "shown": jnp.array([3, 9, 17, 24]),
    }
    of_arrays = jax.P("data", None, "model")
    of_heads = jax.P("model")
    of_floats = dict.fromkeys(reals, jax.P()) | {"sinks": of_heads, "slopes": of_heads}
    of_integers = dict.fromkeys(integers, jax.P("data")) | {"shown": of_heads}

    def loss(implementation, axes, operands, reals, integers):
        table = reals["table"]
        slopes = reals["slopes"]
        shown = integers["shown"]
        more = {name: x for name, x in integers.items() if name != "shown"} | {
            "sinks": reals["sinks"]
        }
        more |= {
            "implementation": implementation,
            "is_causal": True,
            "logits_soft_cap": 3.0,
        }
        mask = CausalMask() & FunctionMask(
            lambda b, h, i, j: (table[j] <= 0.5) & (j < shown[h])
        )

        def score_mod(score, b, h, i, j):
            return (
                score
                + table[i % 24] * table[j]
                - slopes[h] * jnp.abs(i - j).astype(score.dtype)
            )

        output = dot_product_attention(
            *operands, reals["bias"], mask, score_mod=score_mod, **more
        )
        return jax.lax.psum(jnp.sin(output).sum(), axes), output

    def run(loss):
        graded = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        return jax.device_get(graded(operands, reals, integers))

    expected = run(functools.partial(loss, "xla", ()))
    specs = {
        "in_specs": (of_arrays, of_floats, of_integers),
        "out_specs": (jax.P(), of_arrays),
    }
    for implementation in (None, "blockwise"):
        split = jax.shard_map(
            functools.partial(loss, implementation, ("data", "model")),
            mesh=mesh,
            **specs,
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5),
            run(split),
            expected,
        )


@pytest.mark.parametrize("number", [1, 100])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_bfloat16_cache_whose_split_is_unknown_is_not_copied(per_row, number):
    cache = jax.eval_shape(
        lambda: KVCache.create(B, 4096, 2, H, jnp.bfloat16, per_row=per_row)
    )
    new = jax.ShapeDtypeStruct((B, number, 2, H), jnp.bfloat16)
    program = jax.jit(KVCache.update, donate_argnums=0).lower(cache, new, new).compile()
    assert program.memory_analysis().temp_size_in_bytes <= cache.key.size * 2 / 8


@pytest.mark.parametrize(
    ("kind", "kv_heads", "dtype"),
    [
        ("auto", 1, jnp.int8),
        ("explicit", 2, jnp.float8_e4m3fn),
        ("explicit", 4, jnp.int8),
    ],
)
def test_a_cache_in_8_bits(kind, kv_heads, dtype):
    """Split by batch and heads, like its scales; with fewer key heads than devices, on
    all of them; latents too.
    """
    mesh = mesh_of(kind)
    spec = jax.P("data", None, "model" if kv_heads == 4 else None, None)
    value_size = H - 2 if kv_heads == 1 else None
    empty = functools.partial(
        KVCache.create, 8, 30, kv_heads, H, dtype, value_size=value_size
    )
    number = 2 if value_size else 3
    prompt, token = (
        [floats(i, 8, t, n, H) for i, n in enumerate((4, kv_heads, kv_heads)[:number])]
        for t in (18, 1)
    )

    def decode(cache, prompt, token):
        prompt, token = ([*x, None][:3] for x in (prompt, token))
        return cached_attention(*token, cache.update(*prompt[1:]).keep([5, 7]))

    expected, after = jax.jit(decode)(empty(), prompt, token)
    with jax.set_mesh(mesh):
        specs = jax.P("data", None, "model"), spec, spec
        split = [
            [put(x, mesh, *axes) for x, axes in zip(y, specs, strict=False)]
            for y in (prompt, token)
        ]
        got, cache = jax.jit(decode)(empty(sharding=spec), *split)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache.arrays, after.arrays)
    if kind == "explicit":
        assert cache.scale.sharding.spec == cache.key.sharding.spec == spec


@pytest.mark.parametrize(("kind", "per_row"), [("auto", False), ("explicit", True)])
def test_beams(kind, per_row):
    """Taken sequences are split as all were, if their number can be."""
    mesh = mesh_of(kind)
    spec = jax.P("data", None, "model", None)
    key = floats(0, B, 3, N, H)

    def beams(cache, rows):
        return cache.update(key, key).truncate(2).take(rows)

    for rows in (jnp.array([3, 3, 0, 7]), jnp.array([1, 0, 3])):
        expected = jax.jit(beams)(KVCache.create(B, 5, N, H, per_row=per_row), rows)
        with jax.set_mesh(mesh):
            got = jax.jit(beams)(
                KVCache.create(B, 5, N, H, per_row=per_row, sharding=spec), rows
            )
        jax.tree.map(np.testing.assert_array_equal, got.arrays, expected.arrays)
        if kind == "explicit":
            assert got.key.sharding.spec == jax.P(
                None if len(rows) % 2 else "data", None, "model", None
            )
