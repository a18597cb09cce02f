"""`ScoreRule` turns products query . key into scores, for a tile: a rectangle of the T
x S scores of one head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from flax_mha._src.call.call import ScoreFields, accumulation_dtype
from flax_mha._src.core.tile import Tile
from flax_mha._src.math.derivatives import reverse_only

# Of Threefry (`_random_words`).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.int32(0x1BD11BDA)


class ScoreInputs(NamedTuple):
    """The arrays other than query and key that affect a head's weights and get
    gradients.
    """

    bias: Float[Array, "... T S"] | None
    sink: Float[Array, "..."] | None
    captured: list[Array]

    def cut(self, tile: Tile) -> "ScoreInputs":
        """Returns the inputs with the bias of one tile, in float32 or float64, in which
        gradients are then summed.
        """
        bias = self.bias
        if bias is not None:
            bias = tile.cut(bias).astype(accumulation_dtype(bias.dtype))
        return self._replace(bias=bias)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreRule(ScoreFields):
    """How a head turns products of queries and keys into scores: scale, soft cap,
    `score_mod`, bias, mask; and dropout.

    Its arrays, and the arrays of its mask, have leading axes for batch and heads until
    `map_heads` has mapped them. A mask of None masks nothing, as in tiles that are
    visible throughout.
    """

    @property
    def on_gpu(self) -> bool:
        """Whether dropout and softmax take the form that XLA's GPU compiler fuses."""
        return self.target.platform == "gpu"

    def products(
        self, query: Float[Array, "t H"], key: Float[Array, "s H"]
    ) -> Float[Array, "t s"]:
        products = self.dot(query, key, transpose_b=True)
        if self.scale == 1.0:
            return products
        return products * self.scale

    def dot(
        self, a: Float[Array, "m k"], b: Array, *, transpose_b: bool = False
    ) -> Array:
        """Computes a @ b, or a @ b.T, from operands in the narrower of their dtypes,
        summed in float32 at least.

        If `b` has three axes, each row of `a` is multiplied by its own matrix.
        """
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        contracted = b.ndim - 1 if transpose_b else b.ndim - 2
        batch: tuple = ((), ())
        if b.ndim == 3:
            batch = ((0,), (0,))
        return lax.dot_general(
            a.astype(narrow),
            b.astype(narrow),
            dimension_numbers=(((1,), (contracted,)), batch),
            precision=self.precision,
            preferred_element_type=self.dtype,
        )

    def weigh(
        self, weights: Float[Array, "t s"], value: Float[Array, "s Hv"], tile: Tile
    ) -> Float[Array, "t Hv"]:
        """Drops some of a tile's weights (dropout), and returns their product with the
        values.
        """
        # O = dropout(P) V
        dropout = self.dropout_multiplier(tile, weights.dtype)
        return self.dot(times(weights, dropout), value)

    def tile(
        self,
        products: Float[Array, "t s"],
        inputs: ScoreInputs,
        tile: Tile,
        poison: Float[Array, "#t #s"] | None = None,
        fused: bool = False,
    ) -> Float[Array, "t s"]:
        """Computes the scores of one tile, -inf where masked, from products of scaled
        queries and keys.

        With products X and the soft cap c::

            S = score_mod(c tanh(X / c)) + bias

        `inputs` are already cut to the tile (`ScoreInputs.cut`). `poison`, infinity or
        0, is added to visible scores (`guard.py`). With `fused`, XLA's CPU backend can
        fuse the mask with the matrix product before it and the softmax after it; then
        no masked product may be NaN, and nothing may be differentiated.
        """
        bias = inputs.bias
        visible = None
        if self.mask is not None:
            visible = self.mask.tile(tile)
        if bias is not None:
            visible = _both(visible, bias != -jnp.inf)
        fused = fused and self.score_mod is None

        # A product that overflows is no harm by itself, because masked scores are
        # replaced. But soft cap and `score_mod` have derivatives that may be NaN there.
        is_linear = self.soft_cap is None and self.score_mod is None
        if visible is not None and not fused and not is_linear:
            products = _zero_masked(products, visible)
        scores = self._cap(products)
        if self.score_mod is not None:
            scores = tile.map_positions(self._one_score(inputs.captured), scores)
            visible = _both(visible, scores != -jnp.inf)
        if bias is not None and visible is not None:
            scores = scores + _visible_bias(bias, visible, scores.dtype)
        if poison is not None:
            scores = scores + poison
        if visible is None:
            return scores
        if fused:
            # XLA's CPU fuses a minimum with the product before it, not a selection.
            limit = jnp.where(visible, jnp.inf, -jnp.inf)
            return jnp.minimum(scores, limit.astype(scores.dtype))
        return jnp.where(visible, scores, -jnp.inf)

    def differentiable_tile(
        self, products: Float[Array, "t s"], inputs: ScoreInputs, tile: Tile
    ) -> Float[Array, "t s"]:
        """Computes the scores of `tile`, but masked scores add 0 to gradients, even if
        `score_mod` would add NaN.
        """
        if self.score_mod is None or not products.size:
            return self.tile(products, inputs, tile)
        visible = self.tile(*lax.stop_gradient((products, inputs)), tile) != -jnp.inf
        return self._scores_where(visible, products, inputs, tile)

    def tile_vjp(
        self, products: Float[Array, "t s"], inputs: ScoreInputs, tile: Tile
    ) -> tuple[Float[Array, "t s"], Callable[[Array], tuple[Array, ScoreInputs]]]:
        """Returns a tile's scores, and a function from their cotangents to those of
        (`products`, `inputs`).
        """
        if self.score_mod is None:
            return jax.vjp(lambda x, p: self.tile(x, p, tile), products, inputs)
        scores = self.tile(products, inputs, tile)
        visible = scores != -jnp.inf

        def of_visible(products: Array, inputs: ScoreInputs) -> Array:
            return self._scores_where(visible, products, inputs, tile)

        _, pull = jax.vjp(of_visible, products, inputs)
        return scores, pull

    def _scores_where(
        self,
        visible: Bool[Array, "t s"],
        products: Float[Array, "t s"],
        inputs: ScoreInputs,
        tile: Tile,
    ) -> Float[Array, "t s"]:
        """Computes the scores of `tile` for differentiation, given which are `visible`;
        requires a `score_mod`.

        The derivative of a captured array is a sum over all scores. A masked score
        contributes 0 times the derivative of `score_mod`, which is NaN if the function
        has no derivative there, such as log1p(q_idx - kv_idx) for a key after the
        query. So a masked score gets the positions of a visible score, whose derivative
        is in the sum anyway.
        """
        if not inputs.captured:
            capped = self._cap(_zero_masked(products, visible))
            scores = tile.map_positions(self._one_score(inputs.captured), capped)
        else:
            # The first visible score. XLA's CPU is slow at an argmax over the whole
            # tile.
            row = jnp.argmax(visible.any(axis=1))
            column = jnp.argmax(visible[row])
            rows = jnp.where(
                visible, tile.query_positions, tile.query_positions[row, 0]
            )
            key_positions = jnp.broadcast_to(tile.key_positions, visible.shape)
            columns = jnp.where(visible, key_positions, key_positions[row, column])
            fixed = lax.stop_gradient(products[row, column])
            products = jnp.where(visible, products, fixed)
            # Without any visible score, no captured array gets a gradient.
            captured = []
            for x in inputs.captured:
                x = jnp.where(visible[row, column], x, lax.stop_gradient(x))
                captured.append(x)
            score_mod = jax.vmap(jax.vmap(self._one_score(captured)))
            scores = score_mod(self._cap(products), rows, columns)
        if inputs.bias is not None:
            scores = scores + _visible_bias(inputs.bias, visible, scores.dtype)
        return jnp.where(visible, scores, -jnp.inf)

    def _cap(self, products: Float[Array, "t s"]) -> Float[Array, "t s"]:
        if self.soft_cap is None:
            return products
        return self.soft_cap * jnp.tanh(products / self.soft_cap)

    def _one_score(
        self, captured: list[Array]
    ) -> Callable[[Array, Array, Array], Array]:
        """Returns `score_mod` as a function of (score, query position, key position)
        for this head's b and h.
        """
        error = self.forward_mode_error
        mod: Any = self.score_mod

        def marked(x: Array) -> Array:
            if error is None:
                return x
            return reverse_only(x, error)

        arrays = [*map(marked, captured), *self.constants]

        def one_score(score: Array, row: Array, column: Array) -> Array:
            return mod(
                arrays, marked(score), self.batch_index, self.head_index, row, column
            )

        return one_score

    @property
    def forward_mode_error(self) -> str | None:
        """The error message if `score_mod` cannot be differentiated in forward mode,
        else None.
        """
        mod: Any = self.score_mod
        if not self.has_custom_vjp:
            return None
        return (
            f"{mod.name} must support forward mode for jax.jvp, "
            "jax.linearize and jax.hessian, but it calls a function with a "
            "jax.custom_vjp; use a jax.custom_jvp instead."
        )

    def dropout_multiplier(
        self, tile: Tile, dtype: DTypeLike = jnp.float32
    ) -> Float[Array, "t s"] | None:
        """Computes the factors by which dropout multiplies the weights of a tile; None
        without dropout.

        The factors depend only on seed and positions. Threefry maps a counter, (query
        position // 2, key position), to two random words: the first for the query at
        the even position, the second for the query at the odd position.
        """
        if self.dropout_seed is None:
            return None
        # A GPU fuses one hash per score. Queries that list their own keys do not share
        # key positions, so they cannot share counters.
        if self.on_gpu or tile.indices is not None:
            words = self._words_by_query(tile)
        else:
            words = self._words_by_pairs(tile)
        # A uniform word is below rate * 2^32 with the probability `rate`.
        limit = min(round(self.dropout_rate * 2**32), 2**32 - 1)
        dropped = words < np.uint32(limit)
        zero = jnp.zeros((), dtype)
        kept = jnp.asarray(1 / (1 - self.dropout_rate), dtype)
        return jnp.where(dropped, zero, kept)

    def _words_by_query(self, tile: Tile) -> UInt32[Array, "t s"]:
        """Computes a tile's random words with one Threefry hash for each score.

        Each hash makes two words, for queries 2n and 2n + 1; only the score's own is
        used.
        """
        query_positions = tile.query_positions
        key_positions = tile.key_positions
        rows = jnp.broadcast_to(query_positions, tile.shape)
        columns = jnp.broadcast_to(key_positions, tile.shape)
        seed: Any = self.dropout_seed
        first, second = (lax.bitcast_convert_type(word, jnp.int32) for word in seed)
        pairs = lax.shift_right_arithmetic(rows, jnp.int32(1))
        even, odd = _random_words((first, second), (pairs, columns))
        word = jnp.where((rows & 1) == 1, odd, even)
        return lax.bitcast_convert_type(word, jnp.uint32)

    def _words_by_pairs(self, tile: Tile) -> UInt32[Array, "t s"]:
        """Computes a tile's random words from half as many Threefry counters: one
        serves two queries, 2n and 2n + 1.
        """
        height, width = tile.shape
        query_offset = tile.offsets[0]
        first = jnp.asarray(tile.row + query_offset, jnp.int32)
        # If the offset is a number, tiles begin at even rows. (`in_place.py` begins at
        # odd ones, but only over a cache, whose offsets are arrays.) So only an odd
        # offset can separate the two queries of a counter.
        is_even = isinstance(query_offset, int) and query_offset % 2 == 0
        pairs = -(-height // 2) if is_even else height // 2 + 1
        first_pair = lax.shift_right_arithmetic(first, jnp.int32(1))
        pair = first_pair + lax.broadcasted_iota(jnp.int32, (pairs, width), 0)
        column = jnp.broadcast_to(tile.key_positions, (pairs, width))
        counters = jnp.concatenate([pair.ravel(), column.ravel()]).astype(jnp.uint32)
        words = jax.extend.random.threefry_2x32(self.dropout_seed, counters)
        # [word of a counter, pair, key] -> [query, key]
        words = jnp.moveaxis(words.reshape(2, pairs, width), 0, 1)
        words = words.reshape(2 * pairs, width)
        if is_even:
            return words[:height]
        return lax.dynamic_slice_in_dim(words, first & 1, height, 0)


def times(
    weights: Float[Array, "t s"], dropout: Float[Array, "t s"] | None
) -> Float[Array, "t s"]:
    """Multiplies weights by `ScoreRule.dropout_multiplier`, or returns them unchanged
    without dropout.
    """
    if dropout is None:
        return weights
    return weights * dropout


def _zero_masked(
    products: Float[Array, "t s"], visible: Bool[Array, "#t #s"]
) -> Float[Array, "t s"]:
    """Replaces masked products by 0, because infinite products could make derivatives
    NaN.
    """
    return jnp.where(visible, products, jnp.zeros_like(products))


def _visible_bias(
    bias: Float[Array, "#t #s"], visible: Bool[Array, "#t #s"], dtype: DTypeLike
) -> Float[Array, "#t #s"]:
    """Replaces the bias of masked scores by 0: -inf would make their gradient NaN."""
    return jnp.where(visible, bias, jnp.zeros_like(bias)).astype(dtype)


def _both(
    a: Bool[Array, "#t #s"] | None, b: Bool[Array, "#t #s"]
) -> Bool[Array, "#t #s"]:
    if a is None:
        return b
    return a & b


def _random_words(
    seed: tuple[Int[Array, ""], Int[Array, ""]],
    counter: tuple[Int[Array, "..."], Int[Array, "..."]],
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Hashes each counter, a pair of 32-bit words, with the seed, another pair, to two
    random words: those of `jax.extend.random.threefry_2x32`.

    Threefry-2x32, the generator of `jax.random`, in elementwise operations, which XLA
    fuses. Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011,
    doi:10.1145/2063384.2063405.
    """
    keys = (*seed, seed[0] ^ seed[1] ^ PARITY)
    a = counter[0] + keys[0]
    b = counter[1] + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = a + b
            b = a ^ (
                (b << rotation) | lax.shift_right_logical(b, np.int32(32 - rotation))
            )
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + np.int32(group + 1)
    return a, b
