"""Measures a decoding step of latent attention, compared with a cache of full keys and
values for the same heads.

    python benchmarks/latent.py [--caches 4096] [--batches 8] [--dtypes float32]
    [--seconds S | --rounds N] [--out NAME]

The sizes are those of DeepSeek-V2-Lite: 2048 features, 16 heads, keys of 128 features
and 64 rotary ones, values of 128, a latent of 512. One token is decoded while the cache
holds all but one; caches are donated and written in place.

Rows:
  latent      MultiHeadLatentAttention, a cache of 576 numbers per token
  heads, 128  MultiHeadAttention, heads of 128 features: 4096 numbers per token
  heads, 160  the same with heads of 160 features: as many numbers, 5120, as DeepSeek's
              keys and values have

Columns:
  cache MiB  what the cache holds
  spread     distance between the quartiles, in % of the median
  x          milliseconds as a multiple of those of heads with 128 features
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from decode import Donating
from flax import nnx

import flax_mha
from flax_mha.rope import RoPE

FEATURES = 2048
HEADS = 16
SIZES = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
COLUMNS = {
    "batch": "batch",
    "cache": "cache",
    "dtype": "dtype",
    "implementation": "cached",
    "ms": "ms",
    "spread": "spread",
    "cache_mib": "cache MiB",
    "to_heads": "x",
    "note": "",
}
LATENT = "latent"
SMALL = "heads, 128"
LARGE = "heads, 160"


class Cell(NamedTuple):
    """What all peers have to compute."""

    batch: int
    cache: int
    dtype: str

    def module(self, name: str) -> Any:
        dtype = jnp.dtype(self.dtype)
        options = {
            "dtype": dtype,
            "param_dtype": dtype,
            "decode": True,
            "rngs": nnx.Rngs(0),
        }
        # DeepSeek rotates pairs of neighbours.
        if name == LATENT:
            rope = RoPE(interleaved=True)
            layer: Any = flax_mha.MultiHeadLatentAttention(
                HEADS, FEATURES, **SIZES, rope=rope, **options
            )
        else:
            features = HEADS * (128 if name == SMALL else 160)
            layer = flax_mha.MultiHeadAttention(
                HEADS, FEATURES, features, use_bias=False, rope=RoPE(), **options
            )
        layer.init_cache((self.batch, self.cache, FEATURES), dtype)
        layer.cache_index[...] = jnp.asarray(self.cache - 1, jnp.int32)
        return layer


def step(cell: Cell, name: str, memory: float) -> measure.Ready:
    graph, cache, rest = nnx.split(cell.module(name), nnx.Cache, ...)
    drawn = np.random.default_rng(0).standard_normal((cell.batch, 1, FEATURES))
    x = jnp.asarray(drawn, cell.dtype)

    def call(
        cache: nnx.State, rest: nnx.State, x: jax.Array
    ) -> tuple[jax.Array, nnx.State]:
        layer = nnx.merge(graph, cache, rest)
        before = layer.cache_index[...]
        output = layer(x)
        layer.cache_index[...] = before  # every call is at the same position
        return output, nnx.state(layer, nnx.Cache)

    return Donating(call, cache, rest, x, memory=memory).ready()


def cache_mib(cell: Cell, name: str) -> float:
    # Only shapes: nothing is allocated.
    shapes = nnx.eval_shape(lambda: cell.module(name))
    arrays = jax.tree.leaves(nnx.state(shapes, nnx.Cache))
    return sum(x.size * x.dtype.itemsize for x in arrays) / 2**20


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--caches", type=measure.numbers, default=[4096])
    parser.add_argument("--batches", type=measure.numbers, default=[1, 8])
    parser.add_argument("--dtypes", type=measure.names, default=["float32", "bfloat16"])
    options = parser.parse_args()
    sizes = itertools.product(options.batches, options.caches, options.dtypes)
    title = "Decoding with latent attention, 16 heads"
    with measure.Report(title, COLUMNS, options) as report:
        for cell in report.each([Cell(*size) for size in sizes]):
            peers = {}
            for name in (LATENT, SMALL, LARGE):
                peers[name] = functools.partial(step, cell, name, options.memory)
            results = measure.compare(peers, options, report.say)
            for name, result in results.items():
                result["cache_mib"] = cache_mib(cell, name)
            measure.ratios(results, SMALL, "to_heads")
            report.add(cell._asdict(), results)


if __name__ == "__main__":
    main()
