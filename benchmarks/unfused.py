"""Calls that no fused GPU kernel supports, for `compiled.py --table unfused`: ours, and
Flax's equivalents.

Flax calls `jax.nn.dot_product_attention`, which computes all scores unless it is told
otherwise, and its own attention if there is dropout. ALiBi is a `score_mod` of ours,
and a bias of theirs that their program computes itself.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_mha import CausalMask, LocalMask, dot_product_attention, recipes
from flax_mha._src import plan as schedule
from flax_mha._src.math import tiling

BEYOND_BUDGET = (1, 8192, 16, 64)  # some calls only
SHAPES = (
    (8, 512, 8, 64),
    (8, 1024, 16, 64),
    (4, 2048, 16, 64),
    (1, 4096, 16, 64),
    BEYOND_BUDGET,
)
WINDOW = (127, 0)
CALLS = {
    "not causal": jnp.float32,
    "causal": jnp.float32,
    "bias": jnp.float32,
    "ALiBi, causal": jnp.float32,
    "causal, window of 128": jnp.float32,
    "causal, dropout": jnp.bfloat16,
    "ALiBi, causal, bfloat16": jnp.bfloat16,
}


class Program(NamedTuple):
    """What is compiled.

    Attributes:
      name: Shape, call and whether with gradient.
      function: Of the arrays.
      shapes: Shapes and dtypes of its arguments.
      floats: How many of these get gradients.
      trips: How many tiles of a row are visited on average: by one loop, or by two if
        some show all.
    """

    name: str
    function: Callable
    shapes: list[tuple[tuple[int, ...], Any]]
    floats: int
    trips: float


def programs() -> Iterator[dict[str, Program]]:
    """For each call, Flax's program and ours."""
    for shape in SHAPES:
        for call, dtype in CALLS.items():
            if shape == BEYOND_BUDGET and call not in (
                "causal",
                "causal, window of 128",
                "causal, dropout",
            ):
                continue
            _, length, heads, _ = shape
            shapes: list[tuple[tuple[int, ...], Any]] = [(shape, dtype)] * 3
            shapes += [((1, heads, length, length), dtype)] if call == "bias" else []
            shapes += [((), jax.random.key(0).dtype)] if "dropout" in call else []
            for way in ("forward", "gradient"):
                name = f"{shape} {jnp.dtype(dtype).name}, {call.removesuffix(', bfloat16')}, {way}"
                both = {
                    "Flax": _of_flax(call),
                    "flax_mha": functools.partial(_ours, call),
                }
                yield {
                    who: Program(
                        name,
                        f,
                        shapes,
                        4 if call == "bias" else 3,
                        _tiles_of_row(call, length),
                    )
                    for who, f in both.items()
                }


def _tiles_of_row(call: str, length: int) -> float:
    if "causal" in call and "not" not in call:
        mask = CausalMask()
    else:
        mask = LocalMask(None, None)
    mask = mask & LocalMask(*WINDOW) if "window" in call else mask
    grid = tiling.tiling_of((length, length), schedule.TILE_SHAPES[0])
    some = tiling.tiles_of(grid, mask, (0, 0))[-1]
    return float(some.mean())


def _ours(
    call: str,
    query: Any,
    key: Any,
    value: Any,
    *more: Any,
    attend: Callable = dot_product_attention,
) -> Any:
    arguments: dict[str, Any] = {"is_causal": "causal" in call and "not" not in call}
    if "ALiBi" in call:
        arguments |= recipes.alibi(query.shape[-2])
    if "window" in call:
        arguments["local_window_size"] = WINDOW
    if "dropout" in call:
        arguments |= {"dropout_rate": 0.1, "dropout_rng": more[0]}
    return attend(query, key, value, *(more if call == "bias" else ()), **arguments)


def explain_with(call: Callable, explain: Callable) -> Callable:
    """`call`, one of ours, explained instead."""
    return functools.partial(call, attend=explain)


def _of_flax(call: str) -> Callable:
    def attend(query: Any, key: Any, value: Any, *more: Any) -> Any:
        length, heads = query.shape[-3:-1]
        if "dropout" in call:
            mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
            return nnx.dot_product_attention(
                query, key, value, mask=mask, dropout_rate=0.1, dropout_rng=more[0], broadcast_dropout=False,
                deterministic=False,
            )  # fmt: skip
        bias = more[0] if call == "bias" else None
        if "ALiBi" in call:
            slopes = 2.0 ** (-8 / heads * jnp.arange(1, heads + 1))
            places = jnp.arange(length)
            bias = (slopes[:, None, None] * (places - places[:, None]))[None].astype(
                query.dtype
            )
        window = WINDOW if "window" in call else None
        causal = "causal" in call and "not" not in call
        return jax.nn.dot_product_attention(
            query, key, value, bias, is_causal=causal, local_window_size=window
        )

    return attend
