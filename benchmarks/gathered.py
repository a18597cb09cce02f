"""Measures attention over a list of keys per query, compared with a plain gather and
with causal attention to all keys.

    python benchmarks/gathered.py [--lengths 1024,8192] [--keys 64] [--seconds S |
    --rounds N] [--out NAME]

One sequence, 8 heads of size 64, float32. Each query lists random keys of its past; -1
fills the lists of the first queries. `backward` is the value and the gradients of
query, key and value.

Rows:
  flax_mha key_indices  `dot_product_attention` with `key_indices`
  plain gather          gathers all listed keys and values together, then computes a
                        softmax
  flax_mha causal       `dot_product_attention` with `is_causal=True`: attends to more
                        keys, and gathers none

Columns:
  spread  distance between the quartiles, in % of the median
  x       milliseconds as a multiple of those with `key_indices`
  MiB     temporaries (jax's programs say)
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

from flax_mha import dot_product_attention

HEADS = 8
HEAD_DIM = 64
COLUMNS = {
    "length": "T",
    "keys": "keys",
    "pass": "pass",
    "implementation": "attention",
    "ms": "ms",
    "spread": "spread",
    "to_listed": "x",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "note": "",
}


def plain_gather(indices: jax.Array, *arrays: jax.Array) -> jax.Array:
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays)  # [B, N, T, H]
    lists = indices[:, None, :, :, None]  # [B, 1, T, k, 1]
    # [B, N, T, k, H]: a copy of each key for each query that lists it.
    keys = jnp.take_along_axis(key[:, :, None], lists, axis=3)
    values = jnp.take_along_axis(value[:, :, None], lists, axis=3)
    scores = jnp.einsum("bnth,bntkh->bntk", query, keys) / HEAD_DIM**0.5
    is_listed = indices[:, None] >= 0
    weights = jax.nn.softmax(jnp.where(is_listed, scores, -jnp.inf))
    return jnp.einsum("bntk,bntkh->btnh", weights, values)


def of_lists(indices: jax.Array, *arrays: jax.Array) -> jax.Array:
    return dot_product_attention(*arrays, key_indices=indices)


def of_all_keys(indices: jax.Array, *arrays: jax.Array) -> jax.Array:
    return dot_product_attention(*arrays, is_causal=True)


ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "flax_mha key_indices": of_lists,
    "plain gather": plain_gather,
    "flax_mha causal": of_all_keys,
}


def peer(
    attend: Callable[..., jax.Array],
    length: int,
    keys: int,
    direction: str,
    memory: float,
) -> measure.Ready:
    rng = np.random.default_rng(0)
    # Each query lists keys of its past, without repetition; -1 is no key.
    lists = np.full((1, length, keys), -1, np.int32)
    for t in range(length):
        count = min(t + 1, keys)
        lists[0, t, :count] = rng.choice(t + 1, count, replace=False)
    # Cotangent, query, key, value.
    shape = (4, 1, length, HEADS, HEAD_DIM)
    arrays = [jnp.asarray(x) for x in rng.standard_normal(shape, np.float32)]

    def call(indices: jax.Array, cotangent: jax.Array, *inputs: jax.Array) -> Any:
        listed = functools.partial(attend, indices)
        if direction == "forward":
            return listed(*inputs)
        return measure.value_and_pullback(listed)(cotangent, *inputs)

    return measure.compiled(call, jnp.asarray(lists), *arrays, memory=memory)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--lengths", type=measure.numbers, default=[1024, 2048, 4096, 8192]
    )
    parser.add_argument("--keys", type=measure.numbers, default=[64])
    options = parser.parse_args()
    passes = ("forward", "backward")
    cells = list(itertools.product(options.lengths, options.keys, passes))
    title = "Attention over a list of keys per query"
    with measure.Report(title, COLUMNS, options) as report:
        for length, keys, direction in report.each(cells):
            peers = {}
            for name, attend in ATTENTION.items():
                peers[name] = functools.partial(
                    peer, attend, length, keys, direction, memory=options.memory
                )
            results = measure.compare(peers, options, report.say)
            measure.ratios(results, "flax_mha key_indices", "to_listed")
            facts = {"length": length, "keys": keys, "pass": direction}
            report.add(facts, results)
    figure, panels = measure.grid(report.rows, "keys", "pass", ("tokens", "ms"))
    for axes, rows in panels:
        measure.lines(axes, rows, "length", "ms")
        axes.set_title(f"{rows[0]['pass']}, {rows[0]['keys']} keys per query")
    measure.save(figure, options.out)


if __name__ == "__main__":
    main()
