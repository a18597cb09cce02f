"""The input arrays of kernels: how they are stored, how a step loads its tile, and the mask and score rule of tiles.

A *step* of a kernel computes one tile of one head. Arrays have leading axes of batch and heads, [*heads], and then the
axes of one head's part: "T" and "S" for queries and keys, "H" for features, "L" for the entries of a table. An array
with one number per head goes to scalar memory. All others have the *stored form* [*heads, rows, columns]. The memory of
a TPU has rows of 128 numbers: [T, 1] would take 128 times its size, so vectors are stored as [1, T]. And [T, 64] would
take twice its size; so if the number of features is no multiple of 128, features come first, [64, T], as in XLA.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src import guard
from flax_mha._src.core.tile import Tile
from flax_mha._src.engines.pallas.split_function import LANES, TileFunction
from flax_mha._src.math.head import Head
from flax_mha._src.math.scores import ScoreInputs, ScoreRule, times
from flax_mha._src.math.tiling import Tiling
from flax_mha.masks import Mask
from flax_mha.masks.base import axes_of, part_axes

Block = Any  # an array of all heads or, inside a kernel, its block for one step; None if absent
Arrays = tuple[Array, ...]
Sizes = tuple[int, ...]


class KernelTile(Tile):
    """A tile inside a kernel. Arrays there hold only the tile's part, so the `cut` methods return them unchanged."""

    def cut(self, x: Any) -> Array:
        return x

    cut_queries = cut_keys = cut


class TransposedTile(KernelTile):
    """A tile [s, t], for gradients of keys and values; its `rows` still index queries, and its `columns` keys."""

    @property
    def rows(self) -> Int[Array, "1 t"]:
        return self.row + lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)

    @property
    def columns(self) -> Int[Array, "s 1"]:
        return self.column + lax.broadcasted_iota(jnp.int32, (self.shape[0], 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TileMask(Mask):
    """A `mask_mod` in a kernel: `function` computes tiles from `values` of its outer part (`split_function.py`)."""

    function: TileFunction = dataclasses.field(metadata={"static": True})
    values: Arrays = dataclasses.field(metadata={"axes": "B N L"})

    def tile(self, tile: Tile) -> Bool[Array, "t s"]:
        positions = tile.query_positions, tile.key_positions
        values, _ = self.function.look_up(positions, self.values)
        return self.function(positions, values, tile.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileRule(ScoreRule):
    """The `ScoreRule` inside a kernel, which cannot call a user's `score_mod` for each score.

    XLA first computes the function's *values*, which depend only on batch entry, head and captured arrays. Then the
    field `score_mod`, a `TileFunction`, computes whole tiles from them. `constants` holds the values for the tile.
    """

    def zero_masked(self, products: Float[Array, "..."], visible: Bool[Array, "..."]) -> Float[Array, "..."]:
        return products  # `tile_vjp` removes what masked products would add to gradients

    def apply_score_mod(self, scores: Float[Array, "..."], inputs: ScoreInputs, tile: Tile) -> Float[Array, "..."]:
        function: Any = self.score_mod
        values = [x if y is None else y for x, y in zip(self.constants, inputs.captured, strict=True)]
        return function((scores, tile.query_positions, tile.key_positions), values, tile.shape)

    def tile_vjp(
        self, products: Float[Array, "..."], inputs: ScoreInputs, tile: Tile
    ) -> tuple[Float[Array, "..."], Callable[[Array], tuple[Array, ScoreInputs]]]:
        """Returns a tile's scores, and a function from their cotangents to the cotangents of `products` and `inputs`.

        Masked scores add 0, even if a derivative is NaN. Values in `inputs.captured` have the tile's shape.
        """
        scores, pull = jax.vjp(lambda x, p: self.tile(x, p, tile), products, inputs)
        if self.score_mod is None and self.soft_cap is None:
            return scores, pull  # gradients of masked scores are 0 already

        def pull_visible(d_scores: Array) -> tuple[Array, ScoreInputs]:
            d_products, d_inputs = pull(d_scores)
            d_products, captured = jax.tree.map(
                lambda x: jnp.where(scores != -jnp.inf, x, jnp.zeros_like(x)), (d_products, d_inputs.captured)
            )
            return d_products, d_inputs._replace(captured=captured)

        return scores, pull_visible


class Inputs(NamedTuple):
    """The input arrays of a kernel: of all heads or, inside the kernel, the blocks of one step.

    `head.rule` is a `TileRule`. `head.inputs.captured` holds the values of `score_mod`: numbers, then tables.
    """

    head: Head
    d_output: Block = None  # cotangent of the output
    lse: Block = None  # log-sum-exp; infinity in rows without gradient
    delta: Block = None  # subtracted from the gradients of the weights; see `_backward` in call.py

    def axis_names(self) -> list[str]:
        """Lists each array's axes in one head's part, such as "T H" ("" for a number), in `jax.tree.leaves` order."""
        head, rule, (bias, sink, values) = self.head, self.head.rule, self.head.inputs
        named: list[tuple[Any, str]] = [
            (head.query, "T H"),
            ((head.key, head.value), "S H"),
            (bias, "T|1 S|1"),
            (sink, ""),
            (values, "L"),
            *((axes, " ".join(part_axes(axes))) for axes in axes_of(rule.mask)),
            ((rule.offsets, rule.dropout_seed), ""),
            *zip(head.nonfinite or (), ("T", "S"), strict=False),
            (self.d_output, "T H"),
            ((self.lse, self.delta), "T"),
        ]
        return [axes for tree, axes in named for _ in jax.tree.leaves(tree)]

    def of_rows(self, transposed: bool) -> list[Block]:
        """Lists arrays along tile rows: query, and `d_output`, `lse`, `delta` if any; if `transposed`, key, value."""
        head = self.head
        rows = (head.key, head.value) if transposed else (head.query, self.d_output, self.lse, self.delta)
        return [x for x in rows if x is not None]


class KernelPlan(NamedTuple):
    """The static part of the arguments of kernels (`KernelCall`)."""

    tiling: Tiling  # the cut of the scores into tiles; arrays are padded to whole tiles
    features_last: bool  # whether features come last in memory
    product_dtype: jnp.dtype  # dtype to which query, key and value are rounded for the matrix products
    dtype: jnp.dtype  # dtype of the output, and of the gradients of queries, keys and values
    interpret: Any  # argument of `jax.experimental.pallas.pallas_call`
    learned: tuple[bool, ...] = ()  # for each value of `score_mod`, whether it gets a gradient; empty if none does

    def stored_axes(self, names: str, part: Sizes) -> str:
        """Returns the axes of one head's part of an array as it is stored, one letter each.

        `names` are its axes in the program, as in `Inputs.axis_names`, and `part` their sizes. "T H" becomes "TH" or,
        unless `features_last`, "HT". Axes "T|1" and "S|1" of length 1 are left out. One number per head becomes "".
        """
        pairs = zip(names.split(), part, strict=False)
        kept = "".join(name[0] for name, size in pairs if not (name.endswith("|1") and size == 1))
        return kept[::-1] if kept.endswith("H") and not self.features_last else kept

    def store(self, x: Array, axes: str, rank: int) -> Array:
        """Converts an array [*heads, ...], with `rank` axes of heads, to its stored form; `axes` are its `stored_axes`.

        Returns [*heads, rows, columns] of whole tiles; a vector is one row. One number per head becomes [1, heads].
        """
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

    def restore(self, x: Array, axes: str, shape: Sizes, rank: int) -> Array:
        """Inverts `store` for a kernel's result `x`: removes the padding, and returns an array of this `shape`."""
        x = jnp.swapaxes(x, -1, -2) if axes.startswith("H") else x
        return x[(..., *map(slice, shape[rank:]))].reshape(shape)

    def to_rows(self, block: Array) -> Array:
        """Converts a block of n vectors from its stored form to [n, features], or back: [features, n] is transposed."""
        return block if self.features_last else jnp.transpose(block.astype(jnp.float32)).astype(block.dtype)


def read_block(x: Array, axes: str, dtype: Any, transposed: bool) -> Array:
    """Converts a block from its stored form to the layout of a tile, which has queries along columns if `transposed`.

    `axes` are the `stored_axes`. A vector along the tile's rows becomes [n, 1]; along its columns, it stays [1, n].
    "TS" is transposed with the tile. `dtype` is from before `store`: if it is bool, so is the block, except a table.
    """
    x = x.astype(jnp.int32) if x.dtype == jnp.int8 else x
    if axes == ("S" if transposed else "T"):
        x = jnp.transpose(jnp.broadcast_to(x, (LANES, x.shape[1])))[:, :1]
    if axes == "TS" and transposed:
        x = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x).T
    return x != 0 if dtype == jnp.bool_ and axes != "L" else x


class LoadedTile(NamedTuple):
    """The tile of one step, in fast memory. It has m rows (queries or, if transposed, keys) and n columns."""

    plan: KernelPlan
    head: Head  # the blocks of the step
    rows: Sequence[Array]  # query and d_output or, in a transposed tile, key and value, with features last
    columns: Sequence[Array]  # key and value or, in a transposed tile, query and d_output, in stored form
    lse: Float[Array, "#m #n"]  # log-sum-exp of each query
    delta: Float[Array, "#m #n"]  # as in `Inputs`
    tile: KernelTile
    rule: TileRule
    params: ScoreInputs  # what `gradients` differentiates: the bias, and values of `score_mod` (others are None)
    entries: list[Array | None]  # for each value of `score_mod`, the indices looked up in a table; None for a number

    def over_features(self, rows: Float[Array, "m F"], columns: Array) -> Float[Array, "m n"]:
        """Computes the matrix product of an array in `self.rows` and one in `self.columns`, summed over features."""
        return self.rule.dot(rows, columns, transpose_b=self.plan.features_last)

    def over_columns(self, tile: Float[Array, "m n"], columns: Array) -> Float[Array, "m F"]:
        """Computes the matrix product of a tile, such as the weights, and an array in `self.columns`, summed over n."""
        return self.rule.dot(tile, columns, transpose_b=not self.plan.features_last)

    def products(self) -> Float[Array, "m n"]:
        products = self.over_features(self.rows[0], self.columns[0])
        return products if self.rule.scale == 1.0 else products * self.rule.scale

    def gradients(self) -> tuple[Float[Array, "m n"], Float[Array, "m n"], ScoreInputs]:
        """Computes the weights after dropout, and the cotangents (gradients of a loss) of `products()` and `params`."""
        s, pull = self.rule.tile_vjp(self.products(), self.params, self.tile)
        may_be_nan = self.params.bias is not None or self.rule.score_mod is not None
        weights, kept = guard.backward_weights(s, self.lse, may_be_nan), self.rule.dropout_multiplier(self.tile)
        d_weights = times(self.over_features(self.rows[1], self.columns[1]), kept)
        return times(weights, kept), *pull(weights * (d_weights - self.delta))


def load_tile(
    plan: KernelPlan, inputs: Inputs, rows: list[Array], place: tuple[Any, Any], transposed: bool, masked: bool
) -> LoadedTile:
    """Makes the tile of one step from its blocks, `inputs`; `place` is the tile's row and column, counted in tiles.

    `rows` holds the arrays `Inputs.of_rows` if the first of the tiles that share them has stored them, else nothing. If
    `transposed`, queries are along columns. If not `masked`, the tile is full, and its mask is left out.
    """
    tiling, head = plan.tiling, inputs.head
    shape, columns = (tiling.height, tiling.width), (head.key, head.value)
    make_tile: type[KernelTile] = KernelTile
    if transposed:
        make_tile, shape, columns = TransposedTile, shape[::-1], (head.query, inputs.d_output)
    first = place[0] * tiling.height, place[1] * tiling.width
    tile = make_tile(*first, shape, head.rule.offsets.values, tiling.inside)
    lse, delta = (repeat_lanes(x, shape[1]) for x in rows[2:]) if len(rows) == 4 else (inputs.lse, inputs.delta)
    rows = rows or [plan.to_rows(x) for x in inputs.of_rows(transposed)[:2]]
    bias = None if head.inputs.bias is None else jnp.atleast_2d(head.inputs.bias.astype(jnp.float32))
    function: Any = head.rule.score_mod
    values: Any = head.inputs.captured
    learned, entries = [], []  # type: list[Any], list[Array | None]
    if function is not None:
        values, entries = function.look_up((tile.query_positions, tile.key_positions), values)
        pairs = zip(values, plan.learned or [False] * len(values), strict=True)
        learned = [jnp.broadcast_to(x, shape) if is_learned else None for x, is_learned in pairs]
    rule: Any = dataclasses.replace(head.rule, mask=head.rule.mask if masked else None, constants=values)
    return LoadedTile(plan, head, rows, columns, lse, delta, tile, rule, ScoreInputs(bias, None, learned), entries)


def repeat_lanes(columns: Array, width: int) -> Array:
    """Widens or cuts an array [n, 128] of equal columns to [n, width]."""
    return jnp.concatenate([columns] * -(-width // LANES), axis=1)[:, :width]
