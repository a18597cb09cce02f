"""The calls that `lowered.py` lowers, in groups; only public names, so that older and
newer revisions can be compared.

Each call is a function without arguments that returns a `Program`. It runs in the
revision, so whatever the revision lacks raises there, and concerns this call alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import flax_mha
from flax_mha import cache as caches
from flax_mha import dot_product_attention, linen, masks, recipes
from flax_mha.rope import Llama3, RoPE

Shapes = Any  # a tree of jax.ShapeDtypeStruct

B = 2
T = 96
N = 4
K = 2
H = 16
D = N * H
ROOM = 256  # tokens in a cache
INT = jnp.int32


class Program(NamedTuple):
    """A function, the shapes of its arguments, and the mesh that is set meanwhile."""

    function: Callable[..., Any]
    arguments: tuple[Shapes, ...]
    mesh: jax.sharding.Mesh | None = None


Call = Callable[[], Program]


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def key_of_random() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key, 0)


def heads(
    queries: int = T, keys: int = T, dtype: Any = jnp.float32, k: int = K, h: int = H
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key and value."""
    key = shape(B, keys, k, h, dtype=dtype)
    return shape(B, queries, N, h, dtype=dtype), key, key


def gradient(call: Call) -> Call:
    """Output and gradients of all arguments of floating point."""

    def make() -> Program:
        program = call()
        return program._replace(function=with_gradients(program.function))

    return make


def with_gradients(function: Callable) -> Callable:
    def both(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

        def of_floats(floats: list) -> Any:
            rest = iter(floats)
            all_leaves = list(leaves)
            for i, floating in enumerate(is_float):
                if floating:
                    all_leaves[i] = next(rest)
            return function(*jax.tree.unflatten(structure, all_leaves))

        pairs = zip(leaves, is_float, strict=True)
        output, pull = jax.vjp(of_floats, [x for x, floating in pairs if floating])
        return output, pull(output)

    return both


def second_derivative(call: Call) -> Call:
    """Forward over reverse, of the first argument."""

    def make() -> Program:
        program = call()
        once = with_gradients(program.function)

        def twice(first: Any, *others: Any) -> Any:
            return jax.jvp(lambda first: once(first, *others), (first,), (first,))

        return program._replace(function=twice)

    return make


def mapped(call: Call) -> Call:
    """By `jax.vmap`, over three times the arrays."""

    def stacked(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return shape(3, *x.shape, dtype=x.dtype)

    def make() -> Program:
        function, arguments, _ = call()
        return Program(jax.vmap(function), tuple(jax.tree.map(stacked, arguments)))

    return make


def rematerialized(call: Call) -> Call:
    policy = jax.checkpoint_policies.save_only_these_names(
        "attention_output", "attention_lse"
    )

    def make() -> Program:
        program = call()
        function = jax.checkpoint(program.function, policy=policy)
        return program._replace(function=function)

    return make


# dot_product_attention: functions of further arrays that return its arguments, and the
# shapes of these arrays.


def with_bias(bias: Any) -> dict[str, Any]:
    return {"bias": bias, "is_causal": True}


def with_array_mask(mask: Any) -> dict[str, Any]:
    return {"mask": mask}


def with_segments(ids: Any) -> dict[str, Any]:
    return {"query_segment_ids": ids, "is_causal": True}


def with_segment_mask(ids: Any) -> dict[str, Any]:
    return {"mask": flax_mha.SegmentMask(ids, ids) & flax_mha.LocalMask(20, 3)}


def with_lengths(of_queries: Any, of_keys: Any) -> dict[str, Any]:
    return {"query_seq_lengths": of_queries, "key_value_seq_lengths": of_keys}


def with_sinks(sinks: Any) -> dict[str, Any]:
    return {"sinks": sinks, "is_causal": True, "local_window_size": (30, 0)}


def with_slopes(slopes: Any) -> dict[str, Any]:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx).astype(score.dtype)

    return {"score_mod": score_mod, "is_causal": True}


def with_mask_mod(limits: Any) -> dict[str, Any]:
    mask = masks.FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < limits[b])
    return {"mask": mask & masks.CausalMask()}


def with_dropout(rng: Any) -> dict[str, Any]:
    return {"dropout_rate": 0.1, "dropout_rng": rng, "is_causal": True}


def with_offsets(offset: Any) -> dict[str, Any]:
    return {"query_offset": offset, "key_value_offset": 5, "is_causal": True}


def with_scale(scale: Any) -> dict[str, Any]:
    return {"scale": scale, "logits_soft_cap": 20.0}


def with_key_indices(indices: Any) -> dict[str, Any]:
    return {"key_indices": indices, "is_causal": True}


def with_t5_bias(table: Any) -> dict[str, Any]:
    return recipes.t5_bias(table)


def fixed(**arguments: Any) -> Callable[[], dict[str, Any]]:
    return lambda: arguments


IDS = shape(B, T, dtype=INT)
LENGTHS = shape(B, dtype=INT)
CAUSAL = (fixed(is_causal=True), ())
WINDOW = (fixed(is_causal=True, local_window_size=(20, 0)), ())
BIAS = (with_bias, (shape(N, T, T),))
SEGMENTS = (with_segments, (IDS,))
OF_LENGTHS = (with_lengths, (LENGTHS, LENGTHS))
SINKS = (with_sinks, (shape(N),))
SCORE_MOD = (with_slopes, (shape(N),))
MASK_MOD = (with_mask_mod, (LENGTHS,))
DROPOUT = (with_dropout, (key_of_random(),))
# Computed by "xla" and by "blockwise", each with its gradient.
ARGUMENTS = {
    "no mask": (fixed(), ()),
    "causal": CAUSAL,
    "window": WINDOW,
    "either mask": (
        fixed(mask=masks.CausalMask(30) | ~masks.LocalMask(50, 50)),
        (),
    ),
    "bias": BIAS,
    "array mask": (with_array_mask, (shape(B, 1, T, T, dtype=bool),)),
    "segments": SEGMENTS,
    "segment mask, window": (with_segment_mask, (IDS,)),
    "lengths": OF_LENGTHS,
    "sinks, window": SINKS,
    "score_mod": SCORE_MOD,
    "mask_mod": MASK_MOD,
    "dropout": DROPOUT,
    "offsets": (with_offsets, (LENGTHS,)),
    "scale, soft cap": (with_scale, (shape(),)),
    "residual, largest score": (
        fixed(is_causal=True, return_residual=True, return_max_score=True),
        (),
    ),
    "T5's bias": (with_t5_bias, (shape(32, N),)),
}


def attention(
    arguments: tuple[Callable[..., dict[str, Any]], tuple],
    arrays: tuple[jax.ShapeDtypeStruct, ...] | None = None,
    **more: Any,
) -> Program:
    make, shapes = arguments

    def attend(query: Any, key: Any, value: Any, *others: Any) -> Any:
        return dot_product_attention(query, key, value, **make(*others), **more)

    arrays = heads() if arrays is None else arrays
    return Program(attend, (*arrays, *shapes))


def functions() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for engine in ("xla", "blockwise"):
        attend = partial(attention, implementation=engine)
        causal = partial(attend, CAUSAL)
        scored = partial(attend, SCORE_MOD)
        half = partial(causal, heads(dtype=jnp.bfloat16))
        for name, arguments in ARGUMENTS.items():
            calls[f"{engine}: {name}, gradient"] = gradient(partial(attend, arguments))
        calls |= {
            f"{engine}: causal": causal,
            f"{engine}: causal, bfloat16, gradient": gradient(half),
            f"{engine}: causal, second derivative": second_derivative(causal),
            f"{engine}: score_mod, second derivative": second_derivative(scored),
            f"{engine}: causal, vmap, gradient": gradient(mapped(causal)),
            f"{engine}: causal, remat, gradient": gradient(rematerialized(causal)),
        }
    indices = (with_key_indices, (shape(B, T, 8, dtype=INT),))
    long = heads(2048, 2048)
    half_lengths = partial(attention, OF_LENGTHS, heads(dtype=jnp.float16))
    return calls | {
        "chosen: causal, 2048 tokens, gradient": gradient(
            partial(attention, CAUSAL, long)
        ),
        "chosen: sinks, window, 2048 tokens": partial(attention, SINKS, long),
        "chosen: one query": partial(attention, CAUSAL, heads(1)),
        "chosen: lengths, float16": half_lengths,
        "chosen: key_indices, gradient": gradient(partial(attention, indices)),
    }


# Modules.


def nnx_call(
    create: Callable[[nnx.Rngs], Any], x: Any, *more: Any, call: Any = None
) -> Program:
    """A call of the layer that `create` makes, as a function of its state and arrays.

    `call(layer, *arrays)`; None calls it causally.
    """
    layer = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
    structure, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params: Any, rest: Any, x: Any, *more: Any) -> Any:
        layer = nnx.merge(structure, params, rest)
        if call is None:
            return layer(x, is_causal=True)
        return call(layer, x, *more)

    return Program(run, (params, rest, x, *more))


def multi_head(rngs: nnx.Rngs, num_heads: int = N, **options: Any) -> Any:
    options = {"decode": False} | options
    return flax_mha.MultiHeadAttention(num_heads, D, rngs=rngs, **options)


def latent(rngs: nnx.Rngs, indexed: bool = False, **options: Any) -> Any:
    if indexed:
        options["indexer"] = flax_mha.Indexer(num_heads=4, head_dim=16, top_k=8)
    return flax_mha.MultiHeadLatentAttention(
        N,
        D,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope=RoPE(interleaved=True),
        rngs=rngs,
        **{"decode": False} | options,
    )


def linen_call(layer: Any, x: Any, cached: bool = False, **arguments: Any) -> Program:
    """A call of a linen layer, as a function of its variables and arrays."""
    variables = jax.eval_shape(layer.init, key_of_random(), x)
    mutable = ["cache"] if cached else False

    def run(variables: Any, x: Any) -> Any:
        return layer.apply(variables, x, mutable=mutable, **arguments)

    return Program(run, (variables, x))


TOKENS = shape(B, T, D)
# Options of `MultiHeadAttention`.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "RoPE, grouped, RMSNorm, sinks": {
        "rope": RoPE(base=500_000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
        "num_kv_heads": K,
        "normalize_qk": flax_mha.Norm("rms"),
        "sinks": True,
        "local_window_size": (30, 0),
    },
    "gate, norms, value head size": {
        "gate": flax_mha.Gate("head"),
        "value_norm": flax_mha.Norm("rms", scale=None),
        "out_norm": flax_mha.Norm("rms", scale="heads", over="all_heads"),
        "value_dim": 24,
        "use_bias": False,
    },
    "dropout, soft cap, bfloat16": {
        "dropout_rate": 0.1,
        "deterministic": False,
        "logits_soft_cap": 30.0,
        "dtype": jnp.bfloat16,
    },
    "shared keys and values": {"share_kv": True, "scale": 0.1},
    "ALiBi, preset": {
        "attention_fn": partial(flax_mha.attention_fn, **recipes.alibi(num_heads=N))
    },
}


def packed(layer: Any, x: Any, ids: Any, lengths: Any) -> Any:
    return layer(x, is_causal=True, segment_ids=ids, lengths=lengths)


def crossing(layer: Any, x: Any, context: Any, mask: Any) -> Any:
    return layer(x, context, mask=mask)


def sown(layer: Any, x: Any) -> Any:
    output = layer(x, is_causal=True, sow_weights=True, sow_max_score=True)
    return output, nnx.state(layer, nnx.Intermediate)


def modules() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, options in OPTIONS.items():
        call = partial(nnx_call, partial(multi_head, **options), TOKENS)
        calls[f"nnx: {name}, gradient"] = gradient(call)
    keys = shape(B, 40, D)
    mask = shape(B, 1, T, 40, dtype=bool)
    sparse = partial(latent, indexed=True)
    whole = linen.MultiHeadDotProductAttention(num_heads=N)
    grouped = linen.MultiHeadDotProductAttention(
        num_heads=N, num_kv_heads=K, rope=RoPE(), normalize_qk=True, sinks=True
    )
    itself = linen.SelfAttention(num_heads=N)
    return calls | {
        "nnx: segments, lengths, gradient": gradient(
            partial(nnx_call, multi_head, TOKENS, IDS, LENGTHS, call=packed)
        ),
        "nnx: cross-attention, array mask": partial(
            nnx_call, multi_head, TOKENS, keys, mask, call=crossing
        ),
        "nnx: sown weights and largest scores": partial(
            nnx_call, multi_head, TOKENS, call=sown
        ),
        "nnx: latent, gradient": gradient(partial(nnx_call, latent, TOKENS)),
        "nnx: latent, indexer, gradient": gradient(partial(nnx_call, sparse, TOKENS)),
        "linen: plain, gradient": gradient(partial(linen_call, whole, TOKENS)),
        "linen: RoPE, grouped, norm, sinks, gradient": gradient(
            partial(linen_call, grouped, TOKENS, is_causal=True)
        ),
        "linen: self-attention, 8 queries": partial(linen_call, itself, shape(B, 8, D)),
    }


# Decoding.


def decoding(
    make: Callable[..., Any], tokens: int, dtype: Any = None, per_row: bool = False
) -> Program:
    """A call of an nnx layer that decodes `tokens` new tokens."""

    def create(rngs: nnx.Rngs) -> Any:
        layer = make(rngs, decode=True)
        layer.init_cache((B, ROOM, D), dtype, per_row=per_row)
        return layer

    def call(layer: Any, x: Any, lengths: Any = None) -> Any:
        return layer(x, lengths=lengths), nnx.state(layer, nnx.Cache)

    more = (LENGTHS,) if per_row else ()
    return nnx_call(create, shape(B, tokens, D), *more, call=call)


def over_cache(
    arguments: tuple[Callable[..., dict[str, Any]], tuple],
    tokens: int = 1,
    **options: Any,
) -> Program:
    """A call of `cached_attention`; `options` are those of the cache."""
    make, shapes = arguments

    def call(cache: Any, query: Any, key: Any, value: Any, *others: Any) -> Any:
        return caches.cached_attention(query, key, value, cache, **make(*others))

    arrays = heads(tokens, tokens)
    return Program(call, (empty_cache(**options), *arrays, *shapes))


def empty_cache(**options: Any) -> Shapes:
    return jax.eval_shape(partial(caches.KVCache.create, B, ROOM, K, H, **options))


def scored_with_sinks(slopes: Any, sinks: Any) -> dict[str, Any]:
    return {"score_mod": with_slopes(slopes)["score_mod"], "sinks": sinks}


def with_limits(limits: Any) -> dict[str, Any]:
    return {"mask": masks.FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < limits[b])}


def with_chosen_keys(indices: Any) -> dict[str, Any]:
    return {"key_indices": indices}


def moved_cache() -> Program:
    def move(cache: Any, rows: Any, slots: Any) -> Any:
        return cache.take(rows).keep(slots).truncate(7)

    cache = empty_cache(per_row=True)
    return Program(move, (cache, LENGTHS, shape(B, 3, dtype=INT)))


def decoded() -> dict[str, Call]:
    grouped = partial(multi_head, num_kv_heads=K, rope=RoPE())
    half = partial(grouped, dtype=jnp.bfloat16)
    window = partial(grouped, local_window_size=(60, 0))
    sparse = partial(latent, indexed=True)
    layer = linen.MultiHeadDotProductAttention(
        num_heads=N, num_kv_heads=K, decode=True, rope=RoPE()
    )
    calls: dict[str, Call] = {}
    for way, tokens in {"prompt": 64, "a token": 1, "4 tokens": 4}.items():
        calls |= {
            f"decode: {way}": partial(decoding, grouped, tokens),
            f"decode: {way}, int8": partial(decoding, grouped, tokens, jnp.int8),
            f"decode: {way}, window": partial(decoding, window, tokens),
            f"decode: {way}, latent": partial(decoding, latent, tokens),
        }
    ring = fixed(local_window_size=(30, 0), logits_soft_cap=20.0)
    capped = (scored_with_sinks, (shape(N), shape(N)))
    chosen = (with_chosen_keys, (shape(B, 1, 8, dtype=INT),))
    return calls | {
        "decode: prompt, lengths": partial(decoding, grouped, 64, per_row=True),
        "decode: a token, lengths": partial(decoding, grouped, 1, per_row=True),
        "decode: a token, float8": partial(decoding, grouped, 1, jnp.float8_e4m3fn),
        "decode: a token, bfloat16": partial(decoding, half, 1),
        "decode: a token, latent, int8": partial(decoding, latent, 1, jnp.int8),
        "decode: a token, indexer": partial(decoding, sparse, 1),
        "decode: prompt, indexer": partial(decoding, sparse, 64),
        "decode: a token, linen": partial(
            linen_call, layer, shape(B, 1, D), cached=True
        ),
        "cached_attention: plain": partial(over_cache, (fixed(), ())),
        "cached_attention: int8, score_mod, sinks": partial(
            over_cache, capped, dtype=jnp.int8
        ),
        "cached_attention: ring, soft cap": partial(over_cache, (ring, ()), window=30),
        "cached_attention: mask_mod, per row": partial(
            over_cache, (with_limits, (LENGTHS,)), per_row=True
        ),
        "cached_attention: key_indices": partial(over_cache, chosen),
        "cached_attention: blockwise": partial(
            over_cache, (fixed(implementation="blockwise"), ())
        ),
        "cached_attention: 8 tokens that attend to each other": partial(
            over_cache, (fixed(is_causal=False), ()), tokens=8
        ),
        "KVCache: take, keep, truncate": moved_cache,
    }


# Meshes of eight devices.


def mesh_of(
    rows: int, columns: int, second: str = "model", explicit: bool = False
) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((rows, columns), ("data", second), axis_types=(kind, kind))


def placed(mesh: jax.sharding.Mesh, spec: jax.P, arrays: tuple) -> list:
    """Shapes of arrays that are split by `spec`."""
    sharding = jax.NamedSharding(mesh, spec)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]


BY_BOTH = jax.P("data", None, "model")


def split_attention(
    arguments: tuple[Callable[..., dict[str, Any]], tuple],
    explicit: bool = False,
    told: bool = False,
    **more: Any,
) -> Program:
    """Attention split by batch and heads; if `told`, by `qkv_sharding`."""
    mesh = mesh_of(2, 4, explicit=explicit)
    if told:
        more["qkv_sharding"] = BY_BOTH
    arrays = placed(mesh, BY_BOTH, heads(k=N))
    return attention(arguments, tuple(arrays), **more)._replace(mesh=mesh)


def parallel(
    strategy: Any,
    arguments: tuple[Callable[..., dict[str, Any]], tuple],
    layout: Any = "contiguous",
    devices: int = 4,
) -> Program:
    """`context_parallel` over `devices`, the batch over the others."""
    mesh = mesh_of(8 // devices, devices, "context")
    batch_axes = "data" if devices < 8 else None
    attend = flax_mha.context_parallel(
        "context", strategy=strategy, layout=layout, batch_axes=batch_axes
    )
    make, shapes = arguments

    def run(query: Any, key: Any, value: Any, *others: Any) -> Any:
        return attend(query, key, value, **make(*others))

    arrays = placed(mesh, jax.P(batch_axes, "context"), heads(k=N))
    return Program(run, (*arrays, *shapes), mesh)


def with_ids(ids: Any) -> dict[str, Any]:
    return {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True}


def tensor_parallel(call: Call) -> Program:
    """A call of modules whose heads are split."""
    mesh = mesh_of(1, 8)
    with jax.set_mesh(mesh):
        return call()._replace(mesh=mesh)


def meshes() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for strategy in ("ring", "ulysses", "allgather"):
        call = partial(parallel, strategy, CAUSAL)
        calls[f"mesh: {strategy}, gradient"] = gradient(call)
    told = partial(split_attention, told=True)
    explicit = partial(split_attention, CAUSAL, explicit=True)
    layer = partial(multi_head, num_heads=8, head_axis="model")
    ring = partial(parallel, "ring")
    return calls | {
        "mesh: batch and heads, gradient": gradient(
            partial(told, CAUSAL, implementation="blockwise")
        ),
        "mesh: batch and heads, dropout": partial(told, DROPOUT),
        "mesh: batch and heads, score_mod": partial(told, SCORE_MOD),
        "mesh: explicit axes, gradient": gradient(explicit),
        "mesh: unknown split, gradient": gradient(partial(split_attention, CAUSAL)),
        "mesh: ring, second derivative": second_derivative(partial(ring, CAUSAL)),
        "mesh: ring, zigzag, segments, gradient": gradient(
            partial(ring, (with_ids, (IDS,)), "zigzag")
        ),
        "mesh: ring, sinks, window, gradient": gradient(partial(ring, SINKS)),
        "mesh: ring of 8, dropout": partial(ring, DROPOUT, devices=8),
        "mesh: head_axis, gradient": partial(
            tensor_parallel, gradient(partial(nnx_call, layer, TOKENS))
        ),
        "mesh: head_axis, a token": partial(
            tensor_parallel, partial(decoding, layer, 1)
        ),
    }


# Accelerators.


def accelerated() -> dict[str, Call]:
    """Calls in bfloat16, which fused kernels support, and others."""
    arrays = heads(256, 256, jnp.bfloat16, h=64)
    attend = partial(attention, arrays=arrays)
    layer = partial(multi_head, num_kv_heads=K, rope=RoPE(), dtype=jnp.bfloat16)
    bias = shape(B, N, 256, 256, dtype=jnp.bfloat16)
    table = {
        "causal": CAUSAL,
        "window": WINDOW,
        "lengths": OF_LENGTHS,
        "segments": (with_segments, (shape(B, 256, dtype=INT),)),
        "sinks, window": SINKS,
        "bias": (with_bias, (bias,)),
        "score_mod": SCORE_MOD,
    }
    calls: dict[str, Call] = {}
    for name, arguments in table.items():
        calls[f"{name}, gradient"] = gradient(partial(attend, arguments))
    return calls | {
        "causal, second derivative": second_derivative(partial(attend, CAUSAL)),
        "causal, float32": partial(attention, CAUSAL),
        "dropout": partial(attend, DROPOUT),
        "a module, gradient": gradient(partial(nnx_call, layer, TOKENS)),
        "decode: prompt": partial(decoding, layer, 64),
        "decode: a token": partial(decoding, layer, 1),
        "decode: a token, int8": partial(decoding, layer, 1, jnp.int8),
    }


def calls_of(group: str) -> dict[str, Call]:
    """The calls of a group, by name."""
    if group == "cpu":
        return functions() | modules() | decoded()
    if group == "mesh":
        return meshes()
    return {f"{group}: {name}": call for name, call in accelerated().items()}
