"""Recipes that are masks; `shifted_windows` also adds a bias."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from flax_mha._src.core.tracing import readable
from flax_mha._src.core.validation import (
    as_array,
    extremes,
    ids_int32,
    int32,
    int_at_least,
    is_int,
)
from flax_mha._src.masks import CausalMask, FunctionMask, LocalMask, SegmentMask

F = TypeVar("F", bound=Callable)


def made_for(**sizes: int) -> Callable[[F], F]:
    """Decorates a `mask_mod` or `score_mod` that fits only certain sizes:
    `@made_for(h=8, kv_idx=1024)`.

    Attention then raises a ValueError for another number of heads (`h`) or batch
    entries (`b`), and for more positions of queries (`q_idx`) or keys (`kv_idx`); see
    `TracedFunction.check`.
    """

    def mark(function: Any) -> Any:
        function.made_for = sizes
        return function

    return mark


def causal() -> dict[str, Any]:
    """Lets each token attend to itself and the tokens before it."""
    return {"mask": CausalMask()}


def sliding_window(width: int) -> dict[str, Any]:
    """Lets each token attend to itself and `width` tokens before it. Beltagy et al.,
    Longformer, arXiv:2004.05150.

    For decoding, pass `local_window_size=(width, 0)` to the constructor of the module
    instead; its cache is then a ring buffer.
    """
    return {"mask": LocalMask(width, 0)}


def prefix_lm(length: int | Int[Array, ""]) -> dict[str, Any]:
    """Lets the first `length` tokens attend to each other; causal after them. Raffel et
    al., T5, arXiv:1910.10683.

    While decoding, the first call must contain the whole prefix.
    """
    length = length if is_int(length) else int32("length", length)
    prefix = FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < length)
    return {"mask": CausalMask() | prefix, "is_causal": False}


def image_spans(ids: Int[Array, "*B S"]) -> dict[str, Any]:
    """Lets the tokens of each image attend to each other; causal otherwise. Gemma Team,
    Gemma 3, arXiv:2503.19786.

    Query i attends to key j if j <= i, or if both are tokens of the same image: ids[i]
    = ids[j] > 0. While decoding, the tokens of an image must be in one call, and every
    call takes the same ids.

    Args:
      ids: 0 for text, otherwise a number for each image, [S] or [B, S]. Positions after
        the last id are text.

    Raises:
      ValueError: If `ids` are not integers; in the attention, if the batch does not
        have B sequences.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import recipes
      >>> print(recipes.image_spans(jnp.array([0, 1, 1, 0, 2, 2, 2]))["mask"])
      █·······
      ███·····
      ███·····
      ████····
      ███████·
      ███████·
      ███████·
      ████████
    """
    ids = ids_int32("ids", ids)
    if ids.ndim not in (1, 2) or not ids.size:
        raise ValueError(
            f"ids must have shape [S] or [B, S], not empty, but got {ids.shape}."
        )
    images = jnp.asarray(ids)
    differ_by_sequence = images.ndim == 2
    sizes = {"b": images.shape[0]} if differ_by_sequence else {}
    last = images.shape[-1] - 1

    def image_at(b: Array, position: Array) -> Array:
        index = jnp.clip(position, 0, last)
        image = images[b, index] if differ_by_sequence else images[index]
        return jnp.where(position <= last, image, 0)

    @made_for(**sizes)
    def same_image(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        image = image_at(b, q_idx)
        return (image > 0) & (image == image_at(b, kv_idx))

    return {"mask": CausalMask() | FunctionMask(same_image), "is_causal": False}


def documents(ids: Int[Array, "*B S"]) -> dict[str, Any]:
    """Lets each token attend to itself and earlier tokens with the same id, for
    documents packed into one sequence.
    """
    return {"mask": CausalMask() & SegmentMask(ids, ids)}


def dilated(step: int) -> dict[str, Any]:
    """Lets tokens attend to their own and every `step`-th earlier position. Sparse
    Transformers, arXiv:1904.10509.
    """
    step = int_at_least("step", step, 1)
    return {
        "mask": CausalMask()
        & FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0)
    }


def block_sparse(table: Bool[Array, "N rows columns"], block: int) -> dict[str, Any]:
    """Computes only blocks of `block` x `block` scores with True in `table`. Zaheer et
    al., BigBird, arXiv:2007.14062.

    For each head, the table must have a row for each block of queries and a column for
    each block of keys. The mask is not causal; combine it with `causal()` if necessary.

    Raises:
      ValueError: If the table is not boolean with three axes, or if `block` is not an
        integer of at least 1; in the attention, if the table has another number of
        heads, or too few rows or columns.
    """
    table = as_array("table", table, "a boolean array")
    block = int_at_least("block", block, 1)
    if table.dtype != bool or table.ndim != 3:
        raise ValueError(
            f"table must be bool [heads, rows, columns], but got {table.dtype} "
            f"{table.shape}."
        )

    heads, rows, columns = table.shape

    @made_for(h=heads, q_idx=rows * block, kv_idx=columns * block)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return table[h, q_idx // block, kv_idx // block]

    return {"mask": FunctionMask(visible)}


def shared_prefix(ids: Int[Array, "*B S"]) -> dict[str, Any]:
    """Lets several continuations share one prompt; each attends to the prompt and
    itself. arXiv:2410.20305.

    Causal: query i attends to key j <= i if ids[j] is 0 (the prompt) or ids[j] =
    ids[i]. The prompt is computed only once, for example for the chosen and the
    rejected answer in preference learning, or for all samples in GRPO. For modules with
    rotary positions, also pass `positions` in which every continuation starts where the
    prompt ends.

    Args:
      ids: 0 for tokens of the prompt, another number for each continuation.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import recipes
      >>> print(recipes.shared_prefix(jnp.array([0, 0, 0, 1, 1, 2, 2, 2]))["mask"])
      █·······
      ██······
      ███·····
      ████····
      █████···
      ███··█··
      ███··██·
      ███··███
    """
    ids = ids_int32("ids", ids)
    return {"mask": CausalMask() & (SegmentMask(ids, ids) | SegmentMask(ids * 0, ids))}


def block_diffusion(length: int, block: int) -> dict[str, Any]:
    """Lets noised blocks attend to earlier clean blocks (block diffusion). BD3-LM,
    arXiv:2503.09573, 3.3; Fast-dLLM v2.

    For training. The sequence is the noised text followed by the clean text, with
    `length` tokens each. If i' is the index of token i in its text, and blocks have
    `block` tokens, query i attends to key j if

        both are noised or both are clean, and i' // block = j' // block, or
        j is clean, and i' // block > j' // block.

    For modules with rotary positions, also pass `positions`: the positions in the text,
    twice.

    Raises:
      ValueError: If `length` or `block` is not an integer of at least 1; in the
        attention, if there are more than 2 x `length` positions.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.block_diffusion(length=4, block=2)["mask"])
      ██······
      ██······
      ··████··
      ··████··
      ····██··
      ····██··
      ····████
      ····████
    """
    length = int_at_least("length", length, 1)
    block = int_at_least("block", block, 1)

    @made_for(q_idx=2 * length, kv_idx=2 * length)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        q_block, kv_block = (x % length // block for x in (q_idx, kv_idx))
        same_block = (q_block == kv_block) & ((q_idx < length) == (kv_idx < length))
        return same_block | ((kv_idx >= length) & (kv_block < q_block))

    return {"mask": FunctionMask(visible)}


def tree_causal(
    parents: Int[Array, "*B T"], index: Int[Array, "*B"] | int = 0
) -> dict[str, Any]:
    """Lets drafted tokens in a tree attend to their own branch and the text before.
    SpecInfer, arXiv:2305.09781.

    For speculative decoding: one call over a cache verifies all branches, and
    `KVCache.keep` keeps one of them. For modules with rotary positions, also pass
    `positions`: `index` plus the depth of each token.

    Args:
      parents: For each token of the tree, the index of its parent, which must be
        smaller than its own index; -1 for tokens that directly follow the text. [T], or
        [B, T] if each sequence has its own tree.
      index: Number of tokens before the tree: [] or [B].

    Raises:
      ValueError: If a parent does not come before its token, unless `parents` is
        traced. The attention raises it if the batch does not have B sequences, or if
        there are queries after the tree, unless `index` is traced.
    """
    parents = int32("parents", parents)
    index = int32("index", index)
    batches = {x.shape[0] for x, rank in ((parents, 2), (index, 1)) if x.ndim == rank}
    if (
        parents.ndim not in (1, 2)
        or index.ndim > 1
        or not parents.size
        or len(batches) > 1
    ):
        raise ValueError(
            "parents must have shape [T] or [B, T], and index [] or [B], but got "
            f"{parents.shape} and {index.shape}."
        )
    each = np.arange(parents.shape[-1], dtype=np.int32)
    if readable(parents) and not np.all((parents >= -1) & (parents < each)):
        raise ValueError(
            "parents must precede their tokens or be -1, but got "
            f"{np.asarray(parents).tolist()}."
        )
    sizes = {"b": max(batches)} if batches else {}
    if readable(index):
        sizes["q_idx"] = extremes(index)[1] + each.size

    def move_up(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, node = carry
        above = jnp.take_along_axis(jnp.asarray(parents), jnp.maximum(node, 0), axis=-1)
        return seen | jax.nn.one_hot(node, each.size, dtype=bool), jnp.where(
            node < 0, -1, above
        )

    start = (
        jnp.zeros((*parents.shape, each.size), bool),
        jnp.broadcast_to(each, parents.shape),
    )
    seen, _ = jax.lax.fori_loop(0, each.size, move_up, start)

    @made_for(**sizes)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        first = jnp.asarray(index) if index.ndim == 0 else jnp.asarray(index)[b]
        q, kv = (jnp.clip(x - first, 0, each.size - 1) for x in (q_idx, kv_idx))
        return (kv_idx < first) | (seen[q, kv] if parents.ndim == 1 else seen[b, q, kv])

    return {"mask": CausalMask() & FunctionMask(visible)}


def neighborhood(height: int, width: int, size: int) -> dict[str, Any]:
    """Lets image tokens attend to the `size` x `size` tokens around them. NATTEN;
    Hassani et al., arXiv:2204.07143.

    At borders the square is moved into the image, as in NATTEN, so that every token
    attends to size^2 tokens. A query attends to a key, in rows y and columns x, if

        0 <= y_key - clip(y_query - size // 2, 0, height - size) < size, and the same
        with x and width.

    Raises:
      ValueError: If `height`, `width` or `size` is not an integer of at least 1, or if
        the square does not fit into the image; in the attention, if there are more than
        `height` x `width` positions.

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
        int_at_least(name, x, 1)
        for name, x in (("height", height), ("width", width), ("size", size))
    )
    if size > min(height, width):
        raise ValueError(
            f"size must not exceed the image size, {height} x {width}, but got {size}."
        )

    def is_near(q: Array, kv: Array, length: int) -> Array:
        first = jnp.clip(q - size // 2, 0, length - size)
        return (first <= kv) & (kv < first + size)

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return is_near(q_idx // width, kv_idx // width, height) & is_near(
            q_idx % width, kv_idx % width, width
        )

    return {"mask": FunctionMask(visible)}


def _three(name: str, value: object) -> tuple[int, int, int]:
    """Returns `value` as (frames, rows, columns); raises a ValueError unless it holds
    three positive integers.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(
            f"{name} must be three ints (frames, rows, columns), but got {value!r}."
        )
    frames, rows, columns = (
        int_at_least(f"{name}[{i}]", x, 1) for i, x in enumerate(value)
    )
    return frames, rows, columns


def sliding_tiles(
    video: tuple[int, int, int],
    tile: tuple[int, int, int],
    window: tuple[int, int, int],
    text: int = 0,
) -> dict[str, Any]:
    """Lets video tokens attend to the tiles around their tile. Zhang et al., Sliding
    Tile Attention, arXiv:2502.04507.

    Sizes are (frames, rows, columns). Order the sequence tile by tile, and by frame,
    row and column within a tile: then tiles outside the window are blocks of scores
    that are never computed. At borders the window is moved into the video, so that
    every token attends to window[0] * window[1] * window[2] tiles.

    Args:
      video: Tokens of the video, multiples of `tile`.
      tile: Tokens of a tile.
      window: Tiles that each token attends to along each axis, from 1 to video / tile.
        For an even number below that, the authors' code uses one more.
      text: Number of text tokens after the video, as in HunyuanVideo; all tokens attend
        to them, and they to all.

    Raises:
      ValueError: If an argument is out of range; in the attention, if there are
        positions after the video and text.

    Example:
      >>> from flax_mha import recipes
      >>> print(recipes.sliding_tiles(video=(1, 2, 4), tile=(1, 2, 1), window=(1, 1, 3))["mask"])
      ██████··
      ██████··
      ██████··
      ██████··
      ··██████
      ··██████
      ··██████
      ··██████
    """
    video, tile, window = (
        _three(name, x)
        for name, x in (("video", video), ("tile", tile), ("window", window))
    )
    text = int_at_least("text", text, 0)
    tokens = math.prod(video)
    tiles = [x // y for x, y in zip(video, tile, strict=True)]
    if any(x % y for x, y in zip(video, tile, strict=True)):
        raise ValueError(
            f"video must be a multiple of tile, {tile}, along each axis, but got "
            f"{video}."
        )
    if any(x > y for x, y in zip(window, tiles, strict=True)):
        raise ValueError(
            f"window must be at most video / tile = {tuple(tiles)} along each axis, "
            f"but got {window}."
        )

    def tile_of(index: Array) -> tuple[Array, Array, Array]:
        number = index // math.prod(tile)
        return (
            number // (tiles[1] * tiles[2]),
            number // tiles[2] % tiles[1],
            number % tiles[2],
        )

    @made_for(q_idx=tokens + text, kv_idx=tokens + text)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        near: Any = True
        for q, kv, count, size in zip(
            tile_of(q_idx), tile_of(kv_idx), tiles, window, strict=True
        ):
            first = jnp.clip(q - size // 2, 0, count - size)
            near &= (first <= kv) & (kv < first + size)
        if text:
            return near | (q_idx >= tokens) | (kv_idx >= tokens)
        return near

    return {"mask": FunctionMask(visible)}


def shifted_windows(
    table: Float[Array, "offsets N"],
    height: int,
    width: int,
    window: int,
    shift: int = 0,
) -> dict[str, Any]:
    """Lets image tokens attend to their window, with a relative bias. Liu et al., Swin
    Transformer, arXiv:2103.14030.

    The image is cut into squares of `window` x `window` tokens; the first cuts are
    `shift` rows and columns from its corner. The layers of Swin alternate between
    shifts of 0 and window // 2. A query attends to the keys in its own square, and the
    score of tokens in rows y and columns x becomes

        score + table[(y_query - y_key + window - 1) * (2 * window - 1) + x_query -
        x_key + window - 1, head].

    Swin computes the same by rolling the image, and masking tokens that are neighbors
    only because of the roll.

    Args:
      table: The learned `relative_position_bias_table` of the model; receives a
        gradient.
      height: Rows of the image, a multiple of `window`.
      width: Columns of the image, a multiple of `window`.
      window: Rows and columns of a square.
      shift: From 0 to window - 1.

    Raises:
      ValueError: If an argument is out of range; in the attention, if the table has
        another number of heads, or if there are more than `height` x `width` positions.

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
        int_at_least(name, x, 1)
        for name, x in (("height", height), ("width", width), ("window", window))
    )
    table = as_array("table", table, "an array [offsets, heads]")
    side = 2 * window - 1
    if height % window or width % window:
        raise ValueError(
            f"height and width must be multiples of window, {window}, but got {height} "
            f"and {width}."
        )
    if int_at_least("shift", shift, 0) >= window:
        raise ValueError(f"shift must be less than window, {window}, but got {shift}.")
    if table.ndim != 2 or table.shape[0] != side**2:
        raise ValueError(
            f"table must have shape [(2 * window - 1)^2, heads] = ({side**2}, N), but "
            f"got {table.shape}."
        )

    def squares(index: Array) -> tuple[list[Array], list[Array]]:
        """Returns the [row, column] of the square that contains token `index`, and of
        the token within this square.
        """
        moved = [x + window - shift for x in (index // width, index % width)]
        return [x // window for x in moved], [x % window for x in moved]

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        (q_row, q_column), (kv_row, kv_column) = squares(q_idx)[0], squares(kv_idx)[0]
        return (q_row == kv_row) & (q_column == kv_column)

    @made_for(h=table.shape[1])
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        down, right = (
            q - kv + window - 1
            for q, kv in zip(squares(q_idx)[1], squares(kv_idx)[1], strict=True)
        )
        return score + table[down * side + right, h].astype(score.dtype)

    return {"mask": FunctionMask(visible), "score_mod": score_mod}
