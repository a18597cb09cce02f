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
LARGE_CALLS = ("causal", "causal, window of 128", "causal, dropout")
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
            if shape == BEYOND_BUDGET and call not in LARGE_CALLS:
                continue
            _, length, heads, _ = shape
            # Query, key, value, and what the call needs besides.
            shapes: list[tuple[tuple[int, ...], Any]] = [(shape, dtype)] * 3
            floats = 3
            if call == "bias":
                shapes.append(((1, heads, length, length), dtype))
                floats = 4
            if "dropout" in call:
                shapes.append(((), jax.random.key(0).dtype))
            what = call.removesuffix(", bfloat16")
            trips = _tiles_of_row(call, length)
            for way in ("forward", "gradient"):
                name = f"{shape} {jnp.dtype(dtype).name}, {what}, {way}"
                theirs = _of_flax(call)
                ours = functools.partial(_ours, call)
                yield {
                    "Flax": Program(name, theirs, shapes, floats, trips),
                    "flax_mha": Program(name, ours, shapes, floats, trips),
                }


def _is_causal(call: str) -> bool:
    return "causal" in call and "not" not in call


def _tiles_of_row(call: str, length: int) -> float:
    # A window that is open on both sides hides nothing.
    mask: Any = CausalMask() if _is_causal(call) else LocalMask(None, None)
    if "window" in call:
        mask = mask & LocalMask(*WINDOW)
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
    arguments: dict[str, Any] = {"is_causal": _is_causal(call)}
    if "ALiBi" in call:
        arguments |= recipes.alibi(query.shape[-2])
    if "window" in call:
        arguments["local_window_size"] = WINDOW
    if "dropout" in call:
        arguments |= {"dropout_rate": 0.1, "dropout_rng": more[0]}
    if call == "bias":
        arguments["bias"] = more[0]
    return attend(query, key, value, **arguments)


def explain_with(call: Callable, explain: Callable) -> Callable:
    """`call`, one of ours, explained instead."""
    return functools.partial(call, attend=explain)


def _of_flax(call: str) -> Callable:
    def attend(query: Any, key: Any, value: Any, *more: Any) -> Any:
        length, heads = query.shape[-3:-1]
        # Of Flax's two functions, only its own has dropout. It takes the causal mask as
        # an array.
        if "dropout" in call:
            mask = jnp.tril(jnp.ones((1, 1, length, length), bool))
            return nnx.dot_product_attention(
                query,
                key,
                value,
                mask=mask,
                dropout_rate=0.1,
                dropout_rng=more[0],
                broadcast_dropout=False,
                deterministic=False,
            )
        bias = more[0] if call == "bias" else None
        # The published slopes, for a number of heads that is a power of 2.
        if "ALiBi" in call:
            slopes = 2.0 ** (-8 / heads * jnp.arange(1, heads + 1))
            places = jnp.arange(length)
            distances = places - places[:, None]
            bias = slopes[:, None, None] * distances
            bias = bias[None].astype(query.dtype)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            is_causal=_is_causal(call),
            local_window_size=WINDOW if "window" in call else None,
        )

    return attend
