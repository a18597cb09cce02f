"""What a kernel holds in one step: the tile, the blocks of its arrays, and what makes scores of them."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from flax_mha.impl.pallas.launch import Visit
from flax_mha.impl.pallas.operands import Inputs
from flax_mha.impl.pallas.tile import HeldTile, TileAcross, TileScores
from flax_mha.impl.pallas.tile_part import TilePart
from flax_mha.impl.shared import nonfinite
from flax_mha.impl.shared.scores import ScoreInputs
from flax_mha.impl.shared.tiling import Tiling
from flax_mha.masks import Mask


class Held(NamedTuple):
    """Of one step.

    What belongs to the rows of the tile has features along columns, what belongs to its columns is as it is stored.
    """

    inputs: Inputs
    tile: HeldTile
    scores: TileScores
    params: ScoreInputs
    mask: Mask | None
    upright: bool

    def products(self) -> Float[Array, "..."]:
        """Scaled products of queries and keys, with queries along rows or, in a `TileAcross`, along columns."""
        query, key = self.inputs.query, self.inputs.key
        products = self.over_features(*((key, query) if isinstance(self.tile, TileAcross) else (query, key)))
        return products if self.scores.scale == 1.0 else products * self.scores.scale

    def over_features(self, of_rows: Array, of_columns: Array) -> Float[Array, "..."]:
        """A tile: the products, summed over features, of what belongs to its rows and what belongs to its columns."""
        return self.scores.dot(of_rows, of_columns, transpose_b=self.upright)

    def over_columns(self, tile: Array, of_columns: Array) -> Float[Array, "..."]:
        """For each row of a tile the sum, weighted by it, of what belongs to its columns."""
        return self.scores.dot(tile, of_columns, transpose_b=not self.upright)

    def dropped(self, weights: Float[Array, "..."]) -> Float[Array, "..."]:
        """Weights, or gradients of them, after dropout."""
        kept = self.scores.dropout_multiplier(self.tile)
        return weights if kept is None else weights * kept

    def weights(self, s: Float[Array, "..."], lse: Float[Array, "..."]) -> Float[Array, "..."]:
        """The softmax, from scores and log-sum-exp; 0 in rows where that is infinite."""
        may_be_nan = self.params.bias is not None or self.scores.score_mod is not None
        return nonfinite.backward_weights(s, lse, may_be_nan)


class Rules(NamedTuple):
    """How products become scores: all that is static.

    Attributes:
      scores: The call's, without its arrays.
      part: The part of `score_mod` that is computed for whole tiles.
      learned: Which values of its outer part get gradients in this kernel.
      tiling: How scores are cut.
      has_mask: Whether anything is masked by a mask.
      has_bias: Whether there is a bias.
      dtype: Of the output, and of the gradients of queries, keys and values.
      upright: Whether features lie along columns in memory.
      differentiated: Whether derivatives are taken in this kernel.
    """

    scores: TileScores
    part: TilePart | None
    learned: tuple[bool, ...]
    tiling: Tiling
    has_mask: bool
    has_bias: bool
    dtype: jnp.dtype
    upright: bool
    differentiated: bool = True

    @property
    def masks_rows(self) -> bool:
        """Whether a row of a tile may see nothing."""
        return self.has_mask or self.has_bias or self.part is not None

    def turned(self, x: Array) -> Array:
        """From features along columns to how they lie in memory, or back."""
        return x if self.upright else jnp.transpose(x.astype(jnp.float32)).astype(x.dtype)

    def room_to_turn(self, length: int, *arrays: Array) -> list[Any]:
        """Scratch for what belongs to all tiles of a result, if it has to be turned."""
        return [] if self.upright else [pltpu.VMEM((length, x.shape[-1]), x.dtype) for x in arrays]

    def _rows_turned(self, inputs: Inputs, across: bool, turned: Sequence[Any]) -> Inputs:
        names = ("key", "value") if across else ("query", "d_output")
        found: dict[str, Any] = {}
        for name, reference in zip_longest(names, turned):
            x = getattr(inputs, name)
            found[name] = x if x is None else self.turned(x) if reference is None else reference[...]
        return inputs._replace(**found)

    def held(self, visit: Visit, masked: bool, across: bool = False, turned: Sequence[Any] = ()) -> Held:
        """The blocks of one step, whose tile must be masked or is visible throughout.

        Args:
          visit: The step.
          masked: Whether the tile must be masked.
          across: Whether queries lie along columns.
          turned: References to what belongs to the rows of the tile, if it was turned before.
        """
        inputs, tiling = self._rows_turned(visit.load(), across, turned), self.tiling
        lengths = tiling.inside
        kind: Any = TileAcross if across else HeldTile
        tile = kind(visit.row, visit.column, (tiling.height, tiling.width), inputs.offsets.values, lengths)
        fields = {name: getattr(self.scores, name) for name in self.scores.__dataclass_fields__}
        fields |= {"dropout_seed": inputs.seed, "part": self.part, "learned": self.learned, "entries": []}
        fields["differentiated"] = self.differentiated
        bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
        if bias is not None and bias.ndim == 0:
            bias = lax.broadcast(bias, (1, 1))
        params = ScoreInputs(bias, None, list(inputs.values))
        return Held(inputs, tile, TileScores(**fields), params, inputs.mask if masked else None, self.upright)
