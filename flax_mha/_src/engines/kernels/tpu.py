"""Tile sizes and refusals that all Pallas kernels on TPUs share."""

import jax
import jax.numpy as jnp

from flax_mha._src.call.operands import Call
from flax_mha._src.core.tracing import reasons_against_kernel
from flax_mha._src.engines.engine import EMPTY, reason_against_platform, reasons_against_dtype

# Rows and columns of a tile; lengths are padded to multiples of them.
TILES = (512, 256, 128)
# Twice this, in float32 with every kind of mask, does not compile for TPU v4, whose tiles must fit in 16 MiB.
LARGEST_HEAD = 256


def tile_size(length: int, largest: int | None = None) -> int:
    """Chooses the side of tiles along a sequence of this `length`: the largest of `TILES` that pads little.

    It pads to at most 9/8 of the length that the smallest tile pads to. `largest` is an upper limit; None sets none.
    """
    tiles = [tile for tile in TILES if largest is None or tile <= largest]
    padded = [length + -length % tile for tile in tiles]
    return next(tile for tile, total in zip(tiles, padded, strict=True) if 8 * total <= 9 * padded[-1])


def refusals(call: Call) -> list[str]:
    """Lists the reasons why a call cannot be computed by any kernel on TPUs; each kernel may have more."""
    (query, key, value), target, reasons = call.operands[:3], call.options.target, []
    if target.platform != "tpu":
        reasons.append(reason_against_platform("tpu", "TPUs", target.platform))
    reasons += reasons_against_dtype((jnp.float32, jnp.bfloat16), query.dtype)
    largest = max(query.shape[-1], value.shape[-1])
    if largest > LARGEST_HEAD:
        reasons.append(
            f"head sizes must be at most {LARGEST_HEAD}, but the largest is {largest}: change num_heads or qkv_features"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        reasons.append("its kernels do not compile with 64-bit types: set jax_enable_x64 to False")
    if 0 in (*query.shape, *key.shape, *value.shape):
        reasons.append(EMPTY)
    return reasons + reasons_against_kernel(target)
