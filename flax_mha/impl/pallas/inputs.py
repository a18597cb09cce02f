"""The arrays that kernels are given: how they are stored, and what a tile makes of them.

An array has leading axes for batch and heads, like all in the layout of one head (`head.py`), and then the part of
one head, whose axes are named: "T" and "S" for queries and keys, "H" for features, "L" for the entries of a table.
Numbers go to scalar memory. All else is stored as [*heads, rows, columns], because the memory of a TPU has rows of 128
numbers: an array [T, 1] would take 128 times its size. And [T, 64] would take twice its size, so where the number of
features is no multiple of 128, they come first: [64, T], as XLA itself lays out such arrays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from flax_mha.core.tile import Offsets
from flax_mha.impl.pallas.grid import LANES, Sizes
from flax_mha.impl.pallas.tile import KernelTile, TileRule, TransposedTile
from flax_mha.impl.shared import nonfinite
from flax_mha.impl.shared.scores import ScoreInputs
from flax_mha.impl.shared.tiling import Tiling
from flax_mha.masks import Mask
from flax_mha.masks.base import part_axes

Block = Any  # an array of all heads, inside a kernel the block of one step; None where there is none


class Inputs(NamedTuple):
    """The arrays that a kernel is given.

    Attributes:
      values: What the outer part of `score_mod` computed (`split_function.py`): numbers, then tables.
      mask: What is visible, if anything may be masked.
      offsets: Positions of the first query and the first key.
      seed: Two random words, for dropout.
      key_poison: 0, or infinity where a key or value is not finite.
      query_poison: 0, or infinity where a query is not finite.
      d_output: The gradient of the output.
      lse: Log-sum-exp; infinity in rows without gradient.
      delta: Subtracted from the gradients of the weights; see `nonfinite.backward_rows`.
    """

    query: Block
    key: Block
    value: Block
    bias: Block
    sink: Block
    values: tuple[Block, ...]
    mask: Mask | None
    offsets: Offsets
    seed: tuple[Block, Block] | None
    key_poison: Block
    query_poison: Block
    d_output: Block = None
    lse: Block = None
    delta: Block = None

    def axis_names(self) -> list[str]:
        """Lists the names of the axes of one head's part of each array, in the order of `jax.tree.leaves`."""
        names = {"query": "T H", "key": "S H", "value": "S H", "bias": "T|1 S|1", "values": "L", "key_poison": "S"}
        names |= {"query_poison": "T", "d_output": "T H", "lse": "T", "delta": "T"}
        lists = {field: [names.get(field, "")] * len(jax.tree.leaves(x)) for field, x in self._asdict().items()}
        if self.mask is not None:
            of_mask = jax.tree.leaves(self.mask.map_arrays(_axes))
            lists["mask"] = [" ".join(part_axes(axes)) for axes in of_mask]
        return [axes for axes_of_field in lists.values() for axes in axes_of_field]

    def of_rows(self, transposed: bool) -> list[Block]:
        """What belongs to rows of a tile, as far as it is given: of queries, or in a transposed tile of keys."""
        rows = (self.key, self.value) if transposed else (self.query, self.d_output, self.lse, self.delta)
        return [x for x in rows if x is not None]


def _axes(x: Any, axes: str) -> Any:
    return axes


class Plan(NamedTuple):
    """How the kernels of a call compute scores and store arrays: all that is static.

    Attributes:
      rule: How products become scores, without arrays.
      tiling: How scores are cut; arrays are padded to whole tiles.
      features_last: Whether features come last in memory.
      product_dtype: To which query, key and value are rounded for the matrix products.
      dtype: Of the output, and of the gradients of queries, keys and values.
      interpret: As `jax.experimental.pallas.pallas_call` takes it.
      learned: Which values of the outer part of `score_mod` get gradients.
    """

    rule: TileRule
    tiling: Tiling
    features_last: bool
    product_dtype: jnp.dtype
    dtype: jnp.dtype
    interpret: Any
    learned: tuple[bool, ...] = ()

    def stored_axes(self, names: str, part: Sizes) -> str:
        """The axes with which a part of these axes is stored: none of numbers, and no "T|1" and "S|1" of one entry."""
        pairs = zip(names.split(), part, strict=False)
        kept = "".join(name[0] for name, size in pairs if not (name.endswith("|1") and size == 1))
        return kept[::-1] if kept.endswith("H") and not self.features_last else kept

    def store(self, x: Array, axes: str, rank: int) -> Array:
        """An array with `rank` leading axes, as [*heads, rows, columns], or numbers [1, n]."""
        heads = x.shape[:rank]
        x = jnp.swapaxes(x, -1, -2) if axes.startswith("H") else x
        part = x.shape[rank:] if x.ndim - rank == len(axes) else tuple(n for n in x.shape[rank:] if n != 1)
        sizes = dict(zip("TS", self.tiling.shape, strict=True)) | {"L": -(-part[-1] // LANES) * LANES if part else 0}
        padding = [(0, sizes.get(name, n) - n, 0) for name, n in zip(axes, part, strict=True)]
        if x.dtype == jnp.bool_:
            x = x.astype(jnp.int8 if len(axes) == 2 else jnp.int32)
        elif jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.int32)
        x = lax.pad(x.reshape(*heads, *part), jnp.zeros((), x.dtype), [(0, 0, 0)] * rank + padding)
        return x.reshape(1, -1) if not axes else x if len(axes) == 2 else jnp.expand_dims(x, -2)

    def to_rows(self, block: Array) -> Array:
        """A block with features last, as matrix products take what belongs to rows of a tile, or back."""
        return block if self.features_last else jnp.transpose(block.astype(jnp.float32)).astype(block.dtype)


def read_block(x: Array, axes: str, dtype: Any, transposed: bool) -> Array:
    """What a block of an array of this dtype holds; in transposed tiles, queries lie along columns."""
    x = x.astype(jnp.int32) if x.dtype == jnp.int8 else x
    if axes == ("S" if transposed else "T"):
        x = jnp.transpose(jnp.broadcast_to(x, (LANES, x.shape[1])))[:, :1]
    if axes == "TS" and transposed:
        x = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x).T
    return x != 0 if dtype == jnp.bool_ and axes != "L" else x


class LoadedTile(NamedTuple):
    """The arrays of one step.

    Attributes:
      rows: Query and d_output, or in a transposed tile key and value, with features last.
      columns: Key and value, or in a transposed tile query and d_output, as they are stored.
      lse: Log-sum-exp, in a shape that broadcasts to the scores.
      delta: The same of what is subtracted from the gradients of the weights.
      params: What gets gradients besides products.
      entries: For each value of `score_mod` None, or the entry of its table that was looked up.
    """

    plan: Plan
    inputs: Inputs
    rows: Sequence[Array]
    columns: Sequence[Array]
    lse: Float[Array, "#m #n"]
    delta: Float[Array, "#m #n"]
    tile: KernelTile
    rule: TileRule
    params: ScoreInputs
    entries: list[Array | None]

    def over_features(self, rows: Float[Array, "m F"], columns: Array) -> Float[Array, "m n"]:
        """The products, summed over features, of what belongs to rows and what belongs to columns."""
        return self.rule.dot(rows, columns, transpose_b=self.plan.features_last)

    def over_columns(self, tile: Float[Array, "m n"], columns: Array) -> Float[Array, "m F"]:
        """For each row the sum, weighted by the tile, of what belongs to columns."""
        return self.rule.dot(tile, columns, transpose_b=not self.plan.features_last)

    def products(self) -> Float[Array, "m n"]:
        products = self.over_features(self.rows[0], self.columns[0])
        return products if self.rule.scale == 1.0 else products * self.rule.scale

    def gradients(self) -> tuple[Float[Array, "m n"], Float[Array, "m n"], ScoreInputs]:
        """The weights after dropout, and the gradients of the products before scaling and of `params`."""
        s, pull = self.rule.tile_vjp(self.products(), self.params, self.tile)
        may_be_nan = self.params.bias is not None or self.rule.score_mod is not None
        weights, kept = nonfinite.backward_weights(s, self.lse, may_be_nan), self.rule.dropout_multiplier(self.tile)
        d_weights = self.over_features(self.rows[1], self.columns[1])
        if kept is None:
            return weights, *pull(weights * (d_weights - self.delta))
        return weights * kept, *pull(weights * (d_weights * kept - self.delta))


def load_tile(
    plan: Plan, inputs: Inputs, rows: list[Array], place: tuple[Any, Any], transposed: bool, masked: bool
) -> LoadedTile:
    """The tile of one step.

    Args:
      plan: What is static.
      inputs: What the step is given.
      rows: What belongs to its rows, if that was kept.
      place: Its row and its column among the tiles.
      transposed: Whether queries lie along columns.
      masked: Whether it must be masked; else all of it is visible.
    """
    tiling = plan.tiling
    shape, columns = (tiling.height, tiling.width), (inputs.key, inputs.value)
    tile: Any = KernelTile
    if transposed:
        tile, shape, columns = TransposedTile, shape[::-1], (inputs.query, inputs.d_output)
    first = place[0] * tiling.height, place[1] * tiling.width
    tile = tile(*first, shape, inputs.offsets.values, tiling.inside)
    lse, delta = (repeat_lanes(x, shape[1]) for x in rows[2:]) if len(rows) == 4 else (inputs.lse, inputs.delta)
    rows = rows or [plan.to_rows(x) for x in inputs.of_rows(transposed)[:2]]
    bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
    if bias is not None and bias.ndim == 0:
        bias = lax.broadcast(bias, (1, 1))
    values: Any = inputs.values
    learned, entries = [], [None] * len(values)  # type: list[Any], Any
    if plan.rule.function is not None:
        values, entries = plan.rule.function.look_up((tile.query_positions, tile.key_positions), values)
        pairs = zip(values, plan.learned or [False] * len(values), strict=True)
        learned = [jnp.broadcast_to(x, shape) if is_learned else None for x, is_learned in pairs]
    mask = inputs.mask if masked else None
    rule = dataclasses.replace(plan.rule, mask=mask, dropout_seed=inputs.seed, values=values)  # type: ignore[arg-type]
    return LoadedTile(plan, inputs, rows, columns, lse, delta, tile, rule, ScoreInputs(bias, None, learned), entries)


def repeat_lanes(columns: Array, width: int) -> Array:
    """Columns [n, 128] that are all alike, so many of them; whole groups of 128 cost nothing."""
    wide = [columns] * -(-width // LANES)
    return (columns if len(wide) == 1 else jnp.concatenate(wide, axis=1))[:, :width]
