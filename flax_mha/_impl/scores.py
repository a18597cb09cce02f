"""From products of query and key to scores, a tile of one head: what the portable implementations compute alike."""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from flax_mha._call import accumulation_dtype
from flax_mha._program import Program
from flax_mha._tiles import Scalar, Tile
from flax_mha.masks import Mask


class Learned(NamedTuple):
    """What a head adds to its scores and gets gradients for; None where there is none."""

    bias: Float[Array, "... T S"] | None
    sink: Float[Array, "..."] | None
    captured: list[Array]

    def cut(self, tile: Tile) -> "Learned":
        """The tile's part, in float32 at least, so that the tiles' gradients add up in it too."""
        bias = self.bias
        if bias is not None:
            bias = tile.cut(bias).astype(accumulation_dtype(bias.dtype))
        return self._replace(bias=bias)

    def zeros(self) -> "Learned":
        """Where gradients are summed up, in float32 at least."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), self)

    def add(self, tile: Tile, part: "Learned") -> "Learned":
        """A sum with the gradient of one tile's part added to it; the sink belongs to no tile."""
        bias = self.bias
        if bias is not None and part.bias is not None:
            bias = tile.add(bias, part.bias)
        captured = [x + y.astype(x.dtype) for x, y in zip(self.captured, part.captured, strict=True)]
        return Learned(bias, self.sink, captured)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """What one head makes of the product of a scaled query and a key: cap, `score_mod`, bias, mask; and later dropout.

    Its arrays, like those of the masks, have leading axes for batch and heads until `heads.over_heads` has mapped them.

    Attributes:
      mask: What is visible; None shows everything.
      query_offset: Position of the first query, where it is data; else None.
      dropout_seed: Two random words; None drops nothing.
      batch: Number of the batch entry, for `score_mod`.
      head: Number of the head, for `score_mod`.
      constants: What `score_mod` captured besides floats, which are `Learned`.
      static_offset: Position of the first query, where it is known while tracing.
      soft_cap: What the scaled scores never exceed; None caps nothing.
      program: The traced `score_mod`, or None.
      program_learns: Which of the arrays that it captured are learned, in order.
      dropout_rate: Share of the weights that are dropped.
      precision: Of the matrix products, as in `jax.lax.dot_general`.
    """

    mask: Mask | None
    query_offset: Int[Array, "..."] | None
    dropout_seed: UInt32[Array, "... 2"] | None
    batch: Int[Array, "..."] | None
    head: Int[Array, "..."] | None
    constants: list[Array]
    static_offset: int = dataclasses.field(metadata={"static": True})
    soft_cap: float | None = dataclasses.field(metadata={"static": True})
    program: Program | None = dataclasses.field(metadata={"static": True})
    program_learns: tuple[bool, ...] = dataclasses.field(metadata={"static": True})
    dropout_rate: float = dataclasses.field(metadata={"static": True})
    precision: lax.PrecisionLike = dataclasses.field(metadata={"static": True})

    @property
    def offset(self) -> Scalar:
        """Position of the first query."""
        return self.static_offset if self.query_offset is None else self.query_offset

    def tile(
        self,
        scores: Float[Array, "t s"],
        learned: Learned,
        tile: Tile,
        mask: Mask | None,
        poison: Float[Array, "1 s"] | None = None,
    ) -> Float[Array, "t s"]:
        """The scores of one tile, -inf where hidden, from its products.

        Args:
          scores: The products.
          learned: The tile's own part.
          tile: Which it is.
          mask: What is visible in it; None shows everything.
          poison: Added to the scores that are visible; then there is no gradient.
        """
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        visible = []
        # What a score_mod or a bias sends to -inf is hidden like by a mask, and like a mask it must let no NaN through.
        if self.program is not None:
            scores = self._modified(scores, learned.captured, tile)
            visible.append(scores != -jnp.inf)
        if mask is not None:
            visible.append(mask.tile(tile, self.offset))
        if learned.bias is not None:
            visible.append(learned.bias != -jnp.inf)
        if not visible:
            return scores
        seen = functools.reduce(operator.and_, visible)
        if learned.bias is not None:
            scores = scores + jnp.where(seen, learned.bias, jnp.zeros_like(learned.bias)).astype(scores.dtype)
        if poison is not None:
            scores = scores + poison
        if poison is None or self.program is not None:
            return jnp.where(seen, scores, -jnp.inf)
        # Of a minimum, unlike a choice, XLA's CPU makes one kernel with the products before and the softmax after it.
        return jnp.minimum(scores, jnp.where(seen, jnp.inf, -jnp.inf).astype(scores.dtype))

    def _modified(self, scores: Float[Array, "t s"], learned: list[Array], tile: Tile) -> Float[Array, "t s"]:
        queues = {True: iter(learned), False: iter(self.constants)}
        captured = [next(queues[learns]) for learns in self.program_learns]

        def one(score: Array, row: Array, column: Array) -> Array:
            return self.program(captured, score, self.batch, self.head, row, column)  # type: ignore[misc, arg-type]

        rows, columns = (tile.rows + self.offset)[:, 0], tile.columns[0]
        return jax.vmap(jax.vmap(one, (0, None, 0)), (0, 0, None))(scores, rows, columns)

    def keep(self, tile: Tile) -> Float[Array, "t s"] | None:
        """What dropout multiplies the weights of a tile with, a function of seed, row and column alone.

        Threefry makes two words of one counter; here they serve a row with an even number and the one below it.
        """
        if self.dropout_seed is None:
            return None
        (height, width), half = tile.shape, -(-tile.shape[0] // 2)
        pair = tile.row // 2 + lax.broadcasted_iota(jnp.int32, (half, width), 0)
        column = jnp.broadcast_to(tile.columns, (half, width))
        counters = jnp.concatenate([pair.ravel(), column.ravel()]).astype(jnp.uint32)
        words = jax.extend.random.threefry_2x32(self.dropout_seed, counters)
        words = jnp.moveaxis(words.reshape(2, half, width), 0, 1).reshape(2 * half, width)[:height]
        dropped = words < np.uint32(min(round(self.dropout_rate * 2**32), 2**32 - 1))
        return jnp.where(dropped, np.float32(0), np.float32(1 / (1 - self.dropout_rate)))

    def hides(self, learned: Learned, mask: Mask | None) -> bool:
        """Whether a score may be hidden; then a key is NaN where it or its value is not finite, and the value is 0.

        `usable` and `poison` say what becomes of such a key.
        """
        return mask is not None or learned.bias is not None or self.program is not None

    def dot(self, a: Float[Array, "m k"], b: Array, *, transpose_b: bool = False) -> Array:
        """The matrix product a @ b, or a @ b.T."""
        contract = ((1,), (1 if transpose_b else 0,))
        return lax.dot_general(a, b, (contract, ((), ())), precision=self.precision)


def usable(key: Float[Array, "s H"]) -> Float[Array, "s H"]:
    """The keys, 0 where they are NaN: what is hidden must reach nothing, but 0 * NaN is NaN."""
    return jnp.where(jnp.isnan(key), jnp.zeros_like(key), key)


def poison(key: Float[Array, "s H"]) -> Float[Array, "1 s"]:
    """Infinity for keys that are NaN, else 0: the softmax of a row that sees infinity is NaN."""
    return jnp.where(jnp.isnan(key[:, :1]), jnp.inf, 0.0).T
