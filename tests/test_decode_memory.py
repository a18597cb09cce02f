"""A step of decoding copies no cache: XLA reports its temporaries exactly."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from marks import pairwise, with_core

import flax_mha
from flax_mha import linen
from flax_mha.cache import KVCache

B = 8
SLOTS = 4096
N = 8
H = 64
FEATURES = 8  # few, since XLA's CPU converts bfloat16 kernels to float32
WINDOW = 1000
# Partials of either kind, one in the other: an attention function of ours is recognized
# through them.
PARTIAL = jax.tree_util.Partial(
    functools.partial(flax_mha.attention_fn, implementation=None), scale=0.3
)


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Step(NamedTuple):
    """A step of decoding, or several in a scan, and its cache."""

    dtype: type = jnp.float32
    num_kv_heads: int = N
    per_row: bool = False
    window: int | None = None
    # The number of tokens, and of steps in a scan.
    number: int = 1
    steps: int | None = None
    stored: str | None = None  # the cache's dtype, if it is another one


def compiled(case):
    """XLA's memory analysis of a donated step of the nnx module, and its cache's
    bytes.
    """
    module = flax_mha.MultiHeadAttention(
        N,
        FEATURES,
        N * H,
        num_kv_heads=case.num_kv_heads,
        decode=True,
        rngs=nnx.Rngs(0),
        local_window_size=case.window,
        dtype=case.dtype,
        param_dtype=case.dtype,
        kernel_init=nnx.initializers.zeros_init(),
        attention_fn=PARTIAL,
    )
    create = functools.partial(
        KVCache.create, B, SLOTS, case.num_kv_heads, H, case.stored or case.dtype
    )
    # Shapes alone: the cache is never allocated.
    shapes = jax.eval_shape(lambda: create(case.window, case.per_row))
    variables = map(nnx.Cache, shapes.arrays)
    module.cached_key, module.cached_value, module.cache_index, *scale = variables
    module.cached_scale = scale[0] if scale else nnx.data(None)
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)

    def step(cache, rest, x):
        module = nnx.merge(graph, cache, rest)
        output = module(x)
        return nnx.state(module, nnx.Cache), output

    def several(cache, rest, x):
        def one(cache, _):
            return step(cache, rest, x)

        return jax.lax.scan(one, cache, None, length=case.steps)

    run = step if case.steps is None else several
    x = jax.ShapeDtypeStruct((B, case.number, FEATURES), case.dtype)
    return donated(run, cache, rest, x), nbytes(cache)


def donated(function, cache, *arguments):
    """XLA's memory analysis of a function that is given a cache."""
    lowered = jax.jit(function, donate_argnums=0).lower(cache, *arguments)
    return lowered.compile().memory_analysis()


DTYPES = (jnp.float32, jnp.bfloat16)
PLAIN = [
    Step(dtype, num_kv_heads, per_row, steps=steps)
    for dtype, num_kv_heads, per_row, steps in pairwise(
        DTYPES, (8, 2, 1), (False, True), (None, 5)
    )
]
RINGS = [Step(dtype, 2, per_row=True, window=WINDOW, steps=5) for dtype in DTYPES]
DRAFTS = [Step(dtype, 2, per_row=True, number=5) for dtype in DTYPES]
# In 8 bits: a step, some tokens, many after others; never is a whole cache dequantized.
IN_8_BITS = [
    Step(stored="int8"),
    Step(jnp.bfloat16, per_row=True, number=5, stored="float8_e4m3fn"),
    Step(number=40, stored="int8"),
    Step(per_row=True, stored="float8_e4m3fn"),
]
CASES = [*PLAIN, *RINGS, *DRAFTS, *IN_8_BITS]


def name(case):
    values = case._asdict().items()
    return " ".join(getattr(x, "__name__", f"{key}={x}") for key, x in values)


# With optimizations, XLA would convert a whole cache in this case, if it could.
@pytest.mark.parametrize("case", with_core(CASES, IN_8_BITS[1]), ids=name)
def test_a_step_copies_no_cache(case):
    analysis, size = compiled(case)
    # Queries, keys, values and outputs, in parts.
    of_new = case.number * B * N * H * 4
    # Three arrays of at most 256 K scores, or a block of keys and values of 2 MiB and
    # the scores of it.
    assert analysis.temp_size_in_bytes <= 3 * 2**20 + size / 100 + 6 * of_new
    assert analysis.alias_size_in_bytes >= size  # what is donated is written to


@pytest.mark.core
def test_a_step_of_a_linen_module_with_a_partial_copies_no_cache():
    outer = functools.partial(
        functools.partial(flax_mha.attention_fn, implementation=None), scale=0.3
    )
    layer = linen.MultiHeadDotProductAttention(
        N, qkv_features=N * H, num_kv_heads=2, attention_fn=outer, decode=True
    )
    x = jax.ShapeDtypeStruct((B, 1, FEATURES), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    slots = jax.ShapeDtypeStruct((B, SLOTS, FEATURES), jnp.float32)
    variables = jax.eval_shape(layer.init, key, slots)

    def step(cache, params, x):
        output, changed = layer.apply(
            {"params": params, "cache": cache}, x, mutable=["cache"]
        )
        return changed["cache"], output

    analysis = donated(step, variables["cache"], variables["params"], x)
    assert analysis.temp_size_in_bytes <= 2 * 2**20 + nbytes(variables["cache"]) / 100


@pytest.mark.parametrize(
    ("dtype", "kind", "mapped"),
    pairwise(
        (jnp.float32, jnp.bfloat16),
        ("one index", "an index each", "lengths", "ring"),
        (False, True),
    ),
)
def test_a_prompt_copies_no_cache(dtype, kind, mapped):
    """It is written into its slots, also by mapped calls; a part may be converted."""
    number = 100
    window = SLOTS if kind == "ring" else None
    per_row = kind in ("an index each", "lengths")
    outer = (2,) if mapped else ()
    cache = jax.eval_shape(
        lambda: KVCache.create(B, 2 * SLOTS, N, H, dtype, window, per_row)
    )
    cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*outer, *x.shape), x.dtype), cache
    )
    new = [jax.ShapeDtypeStruct((*outer, B, number, N, H), dtype)] * 2
    lengths = []
    if kind == "lengths":
        lengths = [jax.ShapeDtypeStruct((*outer, B), jnp.int32)]
    update = KVCache.update
    if mapped:
        update = jax.vmap(update)

    analysis = donated(update, cache, *new, *lengths)

    # Until JAX 0.12, the new tokens are converted if they are bfloat16; if XLA
    # optimizes, those of the sequence that is being written once more, to float32.
    may_convert = dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12)
    of_a_sequence = number * N * H * 4
    converted = nbytes(new) + of_a_sequence if may_convert else 0
    assert analysis.temp_size_in_bytes <= converted + 2**16
    # What is donated is written to.
    assert analysis.alias_size_in_bytes >= nbytes(cache)


@pytest.mark.parametrize(
    ("sizes", "dtype", "per_row", "mapped"),
    pairwise(
        [((2, 2), 1, 8), ((2, 1), 2, 8), ((2, 2), 3, 1)],
        (jnp.float32, jnp.bfloat16),
        (False, True),
        (0, 1, 2),
    ),
)
def test_several_batch_axes_copy_no_cache(sizes, dtype, per_row, mapped):
    """Also if some axes have length 1, for which the compiler prefers other layouts."""
    batch, heads, size = sizes
    shape = (*batch, *[2] * mapped)
    cache = jax.eval_shape(
        lambda: KVCache.create(shape, SLOTS, heads, size, dtype, per_row=True)
    )
    new = jax.ShapeDtypeStruct((*shape, 1, heads, size), dtype)
    if not per_row:
        # One index for each mapped call.
        index = jax.ShapeDtypeStruct(shape[:mapped], jnp.int32)
        cache = KVCache(cache.key, cache.value, index)
    update = KVCache.update
    for _ in range(mapped):
        update = jax.vmap(update)
    assert donated(update, cache, new, new).temp_size_in_bytes <= 2**14
