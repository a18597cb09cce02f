"""Measures decoding, both prompts and steps over a cache, compared with Flax,
recomputation and PyTorch.

    python benchmarks/decode.py [--what attention,step,prompt] [--caches 4096]
    [--batches 8] [--kv-heads 8,2,1]
                                [--dtypes float32] [--seconds S | --rounds N] [--out
                                benchmarks/results/NAME]

8 query heads of size 64, so 512 features. What is measured:
  attention   one token over a cache that holds so many: cached_attention with the cache
              donated, and with PyTorch an index_copy_ into the cache and
              scaled_dot_product_attention over the part that is filled
  step        the whole module, one token: ours donated; Flax's as it comes (nnx.jit)
              and donated; and without a cache, by computing all tokens again
  prompt      a prompt into an empty cache, beside the same call without a cache

Columns:
  position    tokens in the cache before the call; for a prompt, its length
  spread      distance between the quartiles, in % of the median
  GB/s        bytes of the cache that hold tokens, per second; `copy` copies as many
              bytes of another array, and its rate counts the bytes read
  x copy      the rate as a share of that of the copy
  Flax / x    how many times faster than Flax as it comes
  x torch     milliseconds as a multiple of PyTorch's
  x no cache  milliseconds as a multiple of the same call without a cache
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from flax import nnx

import flax_mha
from flax_mha.cache import KVCache, cached_attention

HEADS = 8
SIZE = 64
FEATURES = HEADS * SIZE
COLUMNS = {
    "what": "what",
    "batch": "batch",
    "cache": "cache",
    "position": "position",
    "kv_heads": "K",
    "dtype": "dtype",
    "implementation": "implementation",
    "ms": "ms",
    "spread": "spread",
    "temporaries_mib": "MiB",
    "gb_per_s": "GB/s",
    "of_copy": "x copy",
    "flax_over": "Flax / x",
    "to_torch": "x torch",
    "to_no_cache": "x no cache",
    "note": "",
}
OURS = "flax_mha"
FLAX = "Flax as it comes"
TORCH = "torch"
COPY = "copy"
FLAX_DONATED = "Flax donated"
RECOMPUTED = "flax_mha, no cache, all tokens again"
NO_CACHE = "flax_mha without a cache"


class Cell(NamedTuple):
    """What all peers have to compute."""

    what: str
    batch: int
    cache: int
    position: int
    kv_heads: int
    dtype: str

    @property
    def cached_bytes(self) -> int:
        """Of keys and values of the tokens in the cache."""
        itemsize = jnp.dtype(self.dtype).itemsize
        a_token = 2 * self.kv_heads * SIZE * itemsize
        return self.batch * self.position * a_token

    def normal(self, *shape: int) -> jax.Array:
        drawn = np.random.default_rng(0).standard_normal(shape, np.float32)
        return jnp.asarray(drawn, self.dtype)

    def filled(self) -> KVCache:
        """A cache that holds random tokens."""
        shape = (self.batch, self.cache, self.kv_heads, SIZE)
        index = jnp.asarray(self.position, jnp.int32)
        # Two arrays: one cannot be donated twice.
        return KVCache(self.normal(*shape), self.normal(*shape), index)


class Donating:
    """A compiled `f(cache, *inputs) -> (output, cache)` whose cache is donated and
    handed from call to call.
    """

    def __init__(self, f: Callable, cache: Any, *inputs: Any, memory: float):
        donating = jax.jit(f, donate_argnums=0)
        self.call, self.costs = measure.program(donating, cache, *inputs, memory=memory)
        self.cache = cache
        self.inputs = inputs

    def __call__(self) -> Any:
        output, self.cache = self.call(self.cache, *self.inputs)
        return output

    def ready(self) -> measure.Ready:
        return measure.Ready(self, jax.block_until_ready, **self.costs)


def attention_by_ours(cell: Cell, memory: float) -> measure.Ready:
    query = cell.normal(cell.batch, 1, HEADS, SIZE)
    new = cell.normal(cell.batch, 1, cell.kv_heads, SIZE)

    def step(
        cache: KVCache, query: jax.Array, new: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        output, after = cached_attention(query, new, new, cache)
        # Every call is at the same position, so that all turns do the same work.
        return output, KVCache(after.key, after.value, cache.index)

    return Donating(step, cell.filled(), query, new, memory=memory).ready()


def attention_by_torch(cell: Cell) -> measure.Ready:
    torch, device = measure.torch_here()
    like = {"device": device, "dtype": getattr(torch, cell.dtype)}
    key = torch.randn(cell.batch, cell.kv_heads, cell.cache, SIZE, **like)
    value = torch.randn_like(key)
    query = torch.randn(cell.batch, HEADS, 1, SIZE, **like)
    new = torch.randn(cell.batch, cell.kv_heads, 1, SIZE, **like)
    place = torch.tensor([min(cell.position, cell.cache - 1)], device=device)
    end = min(cell.position + 1, cell.cache)
    # Older versions of torch lack the argument.
    grouped = {"enable_gqa": True} if cell.kv_heads != HEADS else {}

    def call() -> object:
        with torch.no_grad():
            key.index_copy_(2, place, new)
            value.index_copy_(2, place, new)
            return torch.nn.functional.scaled_dot_product_attention(
                query, key[:, :, :end], value[:, :, :end], **grouped
            )

    return measure.Ready(call, measure.torch_wait)


def copy(cell: Cell, memory: float) -> measure.Ready:
    array = cell.normal(cell.cached_bytes // jnp.dtype(cell.dtype).itemsize)

    def step(target: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Into the memory of the target. An unchanged source would not be copied.
        return source[:1], source + jnp.asarray(1, source.dtype)

    return Donating(step, array + 1, array, memory=memory).ready()


def module(cls: type, cell: Cell, **options: Any) -> Any:
    dtype = jnp.dtype(cell.dtype)
    given = {
        "num_kv_heads": cell.kv_heads,
        "dtype": dtype,
        "param_dtype": dtype,
        "rngs": nnx.Rngs(0),
    }
    layer = cls(HEADS, FEATURES, **(given | options))
    if options["decode"]:
        layer.init_cache((cell.batch, cell.cache, FEATURES), dtype)
        layer.cache_index[...] = jnp.asarray(cell.position, jnp.int32)
    return layer


def donating_module(cls: type, cell: Cell, tokens: int, memory: float) -> measure.Ready:
    """A call of a module that decodes so many tokens, with its cache donated."""
    layer = module(cls, cell, decode=True)
    graph, cache, rest = nnx.split(layer, nnx.Cache, ...)
    x = cell.normal(cell.batch, tokens, FEATURES)

    def step(
        cache: nnx.State, rest: nnx.State, x: jax.Array
    ) -> tuple[jax.Array, nnx.State]:
        layer = nnx.merge(graph, cache, rest)
        before = layer.cache_index[...]
        output = layer(x)
        layer.cache_index[...] = before  # every call is at the same position
        return output, nnx.state(layer, nnx.Cache)

    return Donating(step, cache, rest, x, memory=memory).ready()


def step_of_flax(cell: Cell) -> measure.Ready:
    layer = module(nnx.MultiHeadAttention, cell, decode=True)
    x = cell.normal(cell.batch, 1, FEATURES)
    step = nnx.jit(lambda layer, x: layer(x))

    # Before each turn, outside of its time: a call moves the position.
    def before() -> None:
        layer.cache_index[...] = jnp.asarray(cell.position, jnp.int32)

    return measure.Ready(lambda: step(layer, x), jax.block_until_ready, before)


def without_cache(cell: Cell, length: int, memory: float) -> measure.Ready:
    layer = module(flax_mha.MultiHeadAttention, cell, decode=False)
    graph, state = nnx.split(layer)
    x = cell.normal(cell.batch, length, FEATURES)

    def call(state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, is_causal=True)

    return measure.compiled(call, state, x, memory=memory)


def prompt_of_ours(cell: Cell, memory: float) -> measure.Ready:
    empty = cell._replace(position=0)
    return donating_module(
        flax_mha.MultiHeadAttention, empty, tokens=cell.position, memory=memory
    )


def peers_of(cell: Cell, memory: float) -> measure.Peers:
    if cell.what == "attention":
        return {
            OURS: functools.partial(attention_by_ours, cell, memory),
            TORCH: functools.partial(attention_by_torch, cell),
            COPY: functools.partial(copy, cell, memory),
        }
    if cell.what == "step":
        return {
            OURS: functools.partial(
                donating_module, flax_mha.MultiHeadAttention, cell, 1, memory
            ),
            FLAX: functools.partial(step_of_flax, cell),
            FLAX_DONATED: functools.partial(
                donating_module, nnx.MultiHeadAttention, cell, 1, memory
            ),
            RECOMPUTED: functools.partial(
                without_cache, cell, cell.position + 1, memory
            ),
        }
    return {
        OURS: functools.partial(prompt_of_ours, cell, memory),
        NO_CACHE: functools.partial(without_cache, cell, cell.position, memory),
    }


def cells_of(options: Any) -> list[Cell]:
    """Every combination; positions are 256, half and nearly all of the cache, and 1024
    for prompts.
    """
    cells = []
    for what in options.what:
        for cache in options.caches:
            if what == "prompt":
                positions = [min(length, cache) for length in (128, 1024, 4096)]
            else:
                positions = sorted({min(256, cache - 1), cache // 2, cache - 1})
            others = itertools.product(
                positions, options.batches, options.kv_heads, options.dtypes
            )
            for position, batch, heads, dtype in others:
                cells.append(Cell(what, batch, cache, position, heads, dtype))
    # In small caches, positions coincide.
    return list(dict.fromkeys(cells))


def plot(rows: list[measure.Row], options: Any) -> None:
    """Milliseconds of a step against the position."""
    figure, panels = measure.grid(
        rows, "what", "kv_heads", ("tokens in the cache", "milliseconds")
    )
    for axes, own in panels:
        # One line for each peer: of the largest cache, the first batch and dtype.
        largest = max(row["cache"] for row in own)
        shown = [row for row in own if row["cache"] == largest]
        shown = [row for row in shown if row["batch"] == own[0]["batch"]]
        shown = [row for row in shown if row["dtype"] == shown[0]["dtype"]]
        measure.lines(axes, shown, "position", "ms")
    figure.suptitle(f"Decoding over a cache ({measure.about()['device']})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--what", type=measure.names, default=["attention", "step", "prompt"]
    )
    parser.add_argument("--caches", type=measure.numbers, default=[128, 4096, 32768])
    parser.add_argument("--batches", type=measure.numbers, default=[1, 8])
    parser.add_argument("--kv-heads", type=measure.numbers, default=[8, 2, 1])
    parser.add_argument("--dtypes", type=measure.names, default=["float32", "bfloat16"])
    options = parser.parse_args()
    with measure.Report("Decoding, 8 heads of size 64", COLUMNS, options) as report:
        for cell in report.each(cells_of(options)):
            results = measure.compare(
                peers_of(cell, options.memory), options, report.say
            )
            timed = [result for result in results.values() if "ms" in result]
            # Attention alone is bound by reading the cache: compare with a copy.
            if cell.what == "attention":
                copied = results[COPY].get("ms")
                for result in timed:
                    result["gb_per_s"] = cell.cached_bytes / 1e6 / result["ms"]
                    if copied:
                        result["of_copy"] = copied / result["ms"]
            theirs = results.get(FLAX, {}).get("ms")
            if theirs:
                for result in timed:
                    result["flax_over"] = theirs / result["ms"]
            measure.ratios(results, TORCH, "to_torch")
            measure.ratios(results, NO_CACHE, "to_no_cache")
            report.add(cell._asdict(), results)
    plot(report.rows, options)


if __name__ == "__main__":
    main()
