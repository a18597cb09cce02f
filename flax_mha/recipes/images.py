"""Recipes for images, whose tokens are pixels or patches, row by row."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from flax_mha._src.core.integers import int_at_least
from flax_mha._src.core.user_function import made_for
from flax_mha._src.core.validation import as_array
from flax_mha.masks import FunctionMask
from flax_mha.recipes.arguments import Arguments


def neighborhood(height: int, width: int, size: int) -> Arguments:
    """Lets image tokens attend to the `size` x `size` tokens around them. NATTEN; Hassani et al., arXiv:2204.07143.

    At borders the square is moved into the image, as in NATTEN, so that every token attends to size^2 tokens. A query
    attends to a key, in rows y and columns x, if

        0 <= y_key - clip(y_query - size // 2, 0, height - size) < size, and the same with x and width.

    Raises:
      ValueError: If `height`, `width` or `size` is not an integer of at least 1, or if the square does not fit into the
        image; in the attention, if there are more than `height` x `width` positions.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.neighborhood(height=2, width=4, size=2)["mask"])
      ██··██··
      ██··██··
      ·██··██·
      ··██··██
      ██··██··
      ██··██··
      ·██··██·
      ··██··██
    """
    height, width, size = (
        int_at_least(name, x, 1) for name, x in (("height", height), ("width", width), ("size", size))
    )
    if size > min(height, width):
        raise ValueError(f"size must not exceed the image size, {height} x {width}, but got {size}.")

    def is_near(q: Array, kv: Array, length: int) -> Array:
        first = jnp.clip(q - size // 2, 0, length - size)
        return (first <= kv) & (kv < first + size)

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return is_near(q_idx // width, kv_idx // width, height) & is_near(q_idx % width, kv_idx % width, width)

    return {"mask": FunctionMask(visible)}


def shifted_windows(
    table: Float[Array, "offsets N"], height: int, width: int, window: int, shift: int = 0
) -> Arguments:
    """Cuts an image into windows with a learned relative bias. Liu et al., Swin Transformer, arXiv:2103.14030.

    The image is cut into squares of `window` x `window` tokens, with the first cuts `shift` rows and columns from its
    corner; the blocks of Swin alternate between shifts of 0 and window // 2. A query attends to the keys in its own
    square, and the score of tokens in rows y and columns x becomes

        score + table[(y_query - y_key + window - 1) * (2 * window - 1) + x_query - x_key + window - 1, head].

    Swin computes the same result by rolling the image and masking tokens that became neighbors by the roll.

    Args:
      table: The `relative_position_bias_table` of the model; receives a gradient.
      height: Rows of the image, a multiple of `window`.
      width: Columns of the image, a multiple of `window`.
      window: Rows and columns of a square.
      shift: From 0 to window - 1.

    Raises:
      ValueError: If an argument is out of range; in the attention, if the table has another number of heads, or if
        there are more than `height` x `width` positions.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import recipes
      >>> print(recipes.shifted_windows(jnp.zeros((9, 8)), height=2, width=4, window=2, shift=1)["mask"])
      █·······
      ·██·····
      ·██·····
      ···█····
      ····█···
      ·····██·
      ·····██·
      ·······█
    """
    height, width, window = (
        int_at_least(name, x, 1) for name, x in (("height", height), ("width", width), ("window", window))
    )
    table, side = as_array("table", table, "an array [offsets, heads]"), 2 * window - 1
    if height % window or width % window:
        raise ValueError(f"height and width must be multiples of window, {window}, but got {height} and {width}.")
    if int_at_least("shift", shift, 0) >= window:
        raise ValueError(f"shift must be less than window, {window}, but got {shift}.")
    if table.ndim != 2 or table.shape[0] != side**2:
        raise ValueError(f"table must have shape [(2 * window - 1)^2, heads] = ({side**2}, N), but got {table.shape}.")

    def squares(index: Array) -> tuple[list[Array], list[Array]]:
        """Returns [row, column] of the square of each token `index`, and [row, column] of the token in its square."""
        moved = [x + window - shift for x in (index // width, index % width)]
        return [x // window for x in moved], [x % window for x in moved]

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        (q_row, q_column), (kv_row, kv_column) = squares(q_idx)[0], squares(kv_idx)[0]
        return (q_row == kv_row) & (q_column == kv_column)

    @made_for(h=table.shape[1])
    def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        down, right = (q - kv + window - 1 for q, kv in zip(squares(q_idx)[1], squares(kv_idx)[1], strict=True))
        return score + table[down * side + right, h].astype(score.dtype)

    return {"mask": FunctionMask(visible), "score_mod": score_mod}
