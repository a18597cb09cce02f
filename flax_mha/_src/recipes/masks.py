"""Recipes that are masks; `shifted_windows` also adds a bias.

A recipe can be copied: only its checks need private functions. They are paragraphs that
begin with `# Check` and decorators `@made_for`, which a copy can leave out. The gallery
links to each recipe.
"""

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
)
from flax_mha._src.masks import CausalMask, FunctionMask, LocalMask, SegmentMask

F = TypeVar("F", bound=Callable)


def made_for(**sizes: int) -> Callable[[F], F]:
    """Decorates a `mask_mod` or `score_mod` that fits only certain sizes:
    `@made_for(h=8, kv_idx=1024)`.

    Attention then raises a ValueError for a different number of heads (`h`) or batch
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


def prefix_lm(length: int | Int[Array, "*B"]) -> dict[str, Any]:
    """Lets the first `length` tokens attend to each other; causal after them. Raffel et
    al., T5, arXiv:1910.10683.

    While decoding, the first call must contain the whole prefix.

    Args:
      length: An int, or int [B] with a length for each sequence. A different length
        does not compile the attention again.

    Raises:
      ValueError: If `length` is not an integer or integers [B]; in the attention, if
        the batch does not have B sequences.
    """
    # Check the argument.
    length = int32("length", length)
    if length.ndim > 1:
        raise ValueError(
            f"length must be an int or have shape [B], but got {length.shape}."
        )
    sizes = {}
    if length.ndim:
        sizes["b"] = length.shape[0]

    # An array, because a different number would compile again. Inside `jit`, a known
    # length stays known, so that tiles can be skipped without evaluating the mask in
    # each run.
    with jax.ensure_compile_time_eval():
        lengths = jnp.asarray(length)

    @made_for(**sizes)
    def in_prefix(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        if lengths.ndim:
            return kv_idx < lengths[b]
        return kv_idx < lengths

    # The causal default of decoding would hide the rest of the prefix.
    return {"mask": CausalMask() | FunctionMask(in_prefix), "is_causal": False}


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
    # Check the argument.
    ids = ids_int32("ids", ids)
    if ids.ndim not in (1, 2) or not ids.size:
        raise ValueError(
            f"ids must have shape [S] or [B, S], not empty, but got {ids.shape}."
        )
    sizes = {}
    if ids.ndim == 2:
        sizes["b"] = ids.shape[0]

    images = jnp.asarray(ids)
    last = images.shape[-1] - 1

    def image_at(b: Array, position: Array) -> Array:
        index = jnp.clip(position, 0, last)
        image = images[index] if images.ndim == 1 else images[b, index]
        # While decoding, tokens after the last id are generated text.
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
    # Check the argument.
    step = int_at_least("step", step, 1)

    def at_a_step(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return (q_idx - kv_idx) % step == 0

    return {"mask": CausalMask() & FunctionMask(at_a_step)}


def block_sparse(table: Bool[Array, "N rows columns"], block: int) -> dict[str, Any]:
    """Computes only blocks of `block` x `block` scores with True in `table`. Zaheer et
    al., BigBird, arXiv:2007.14062.

    For each head, the table must have a row for each block of queries and a column for
    each block of keys. The mask is not causal; combine it with `causal()` if necessary.

    Raises:
      ValueError: If the table is not boolean with three axes, or if `block` is not an
        integer of at least 1; in the attention, if the table has a different number
        of heads, or too few rows or columns.
    """
    # Check the arguments.
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
      ids: 0 for tokens of the prompt, a different number for each continuation.

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
    # Check the argument.
    ids = ids_int32("ids", ids)

    same_part = SegmentMask(ids, ids)
    # All queries have the prompt's id, 0.
    prompt = SegmentMask(ids * 0, ids)
    return {"mask": CausalMask() & (same_part | prompt)}


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
    # Check the arguments.
    length = int_at_least("length", length, 1)
    block = int_at_least("block", block, 1)

    @made_for(q_idx=2 * length, kv_idx=2 * length)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        # The clean text has the same blocks as the noised text before it.
        q_block = q_idx % length // block
        kv_block = kv_idx % length // block
        same_place = q_block == kv_block
        same_text = (q_idx < length) == (kv_idx < length)
        same_block = same_place & same_text
        is_clean = kv_idx >= length
        return same_block | (is_clean & (kv_block < q_block))

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
    # Check the arguments.
    parents = int32("parents", parents)
    index = int32("index", index)
    sizes = {}
    if parents.ndim == 2:
        sizes["b"] = parents.shape[0]
    if index.ndim == 1:
        sizes.setdefault("b", index.shape[0])
    fits = parents.ndim in (1, 2) and parents.size and index.ndim <= 1
    if not fits or (index.ndim == 1 and index.shape[0] != sizes["b"]):
        raise ValueError(
            "parents must have shape [T] or [B, T], and index [] or [B], but got "
            f"{parents.shape} and {index.shape}."
        )
    if readable(parents):
        each = np.arange(parents.shape[-1], dtype=np.int32)
        precede = (parents >= -1) & (parents < each)
        if not np.all(precede):
            raise ValueError(
                "parents must precede their tokens or be -1, but got "
                f"{np.asarray(parents).tolist()}."
            )
    if readable(index):
        sizes["q_idx"] = extremes(index)[1] + parents.shape[-1]

    shape = np.shape(parents)
    each = np.arange(shape[-1], dtype=np.int32)

    # Walk from all tokens to their roots: seen[i, j] is True if j is i or above i.
    def move_up(_: object, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, node = carry
        above = jnp.take_along_axis(jnp.asarray(parents), jnp.maximum(node, 0), axis=-1)
        seen = seen | jax.nn.one_hot(node, each.size, dtype=bool)
        return seen, jnp.where(node < 0, -1, above)

    nothing_seen = jnp.zeros((*shape, each.size), bool)
    start = (nothing_seen, jnp.broadcast_to(each, shape))
    seen, _ = jax.lax.fori_loop(0, each.size, move_up, start)

    @made_for(**sizes)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        first = jnp.asarray(index)
        if first.ndim:
            first = first[b]
        q = jnp.clip(q_idx - first, 0, each.size - 1)
        kv = jnp.clip(kv_idx - first, 0, each.size - 1)
        before_tree = kv_idx < first
        in_branch = seen[q, kv] if seen.ndim == 2 else seen[b, q, kv]
        return before_tree | in_branch

    return {"mask": CausalMask() & FunctionMask(visible)}


def neighborhood(height: int, width: int, size: int) -> dict[str, Any]:
    """Lets image tokens attend to the `size` x `size` tokens around them. NATTEN;
    Hassani et al., arXiv:2204.07143.

    At the borders, the square is shifted inward, as in NATTEN, so that every token
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
    # Check the arguments.
    height = int_at_least("height", height, 1)
    width = int_at_least("width", width, 1)
    size = int_at_least("size", size, 1)
    if size > min(height, width):
        raise ValueError(
            f"size must not exceed the image size, {height} x {width}, but got {size}."
        )

    def is_near(q: Array, kv: Array, length: int) -> Array:
        # Near a border, the square is moved into the image.
        first = jnp.clip(q - size // 2, 0, length - size)
        return (first <= kv) & (kv < first + size)

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        near_row = is_near(q_idx // width, kv_idx // width, height)
        near_column = is_near(q_idx % width, kv_idx % width, width)
        return near_row & near_column

    return {"mask": FunctionMask(visible)}


def _three(name: str, value: object) -> tuple[int, int, int]:
    """Returns `value` as (frames, rows, columns); raises a ValueError unless it holds
    three positive integers.
    """
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(
            f"{name} must be three ints (frames, rows, columns), but got {value!r}."
        )
    sizes = [int_at_least(f"{name}[{i}]", size, 1) for i, size in enumerate(value)]
    frames, rows, columns = sizes
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
    that are never computed. At the borders, the window is shifted inward, so that
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
      >>> video, tile, window = (1, 2, 4), (1, 2, 1), (1, 1, 3)
      >>> print(recipes.sliding_tiles(video, tile, window)["mask"])
      ██████··
      ██████··
      ██████··
      ██████··
      ··██████
      ··██████
      ··██████
      ··██████
    """
    # Check the arguments.
    video = _three("video", video)
    tile = _three("tile", tile)
    window = _three("window", window)
    text = int_at_least("text", text, 0)
    if np.any(np.mod(video, tile)):
        raise ValueError(
            f"video must be a multiple of tile, {tile}, along each axis, but got "
            f"{video}."
        )

    tokens = math.prod(video)
    frames, rows, columns = video
    tiles = (frames // tile[0], rows // tile[1], columns // tile[2])

    # Check that the window is not larger than the video.
    if np.any(np.greater(window, tiles)):
        raise ValueError(
            f"window must be at most video / tile = {tiles} along each axis, "
            f"but got {window}."
        )

    def tile_of(index: Array) -> tuple[Array, Array, Array]:
        number = index // math.prod(tile)
        frame = number // (tiles[1] * tiles[2])
        row = number // tiles[2] % tiles[1]
        return frame, row, number % tiles[2]

    @made_for(q_idx=tokens + text, kv_idx=tokens + text)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        near: Any = True
        q_tile = tile_of(q_idx)
        kv_tile = tile_of(kv_idx)
        for axis, size in enumerate(window):
            # Near a border, the window is moved into the video.
            last_start = tiles[axis] - size
            first = jnp.clip(q_tile[axis] - size // 2, 0, last_start)
            near &= (first <= kv_tile[axis]) & (kv_tile[axis] < first + size)
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
        a different number of heads, or if there are more than `height` x `width`
        positions.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha import recipes
      >>> table = jnp.zeros((9, 8))
      >>> print(recipes.shifted_windows(table, 2, 4, window=2, shift=1)["mask"])
      █·······
      ·██·····
      ·██·····
      ···█····
      ····█···
      ·····██·
      ·····██·
      ·······█
    """
    # Check the arguments.
    height = int_at_least("height", height, 1)
    width = int_at_least("width", width, 1)
    window = int_at_least("window", window, 1)
    table = as_array("table", table, "an array [offsets, heads]")
    if height % window or width % window:
        raise ValueError(
            f"height and width must be multiples of window, {window}, but got {height} "
            f"and {width}."
        )
    if int_at_least("shift", shift, 0) >= window:
        raise ValueError(f"shift must be less than window, {window}, but got {shift}.")
    offsets = (2 * window - 1) ** 2
    if table.ndim != 2 or table.shape[0] != offsets:
        raise ValueError(
            f"table must have shape [(2 * window - 1)^2, heads] = ({offsets}, N), but "
            f"got {table.shape}."
        )

    def place(index: Array) -> tuple[Array, Array]:
        # Row and column, counted from the corner of a square outside the image, so that
        # all are positive.
        row = index // width + window - shift
        column = index % width + window - shift
        return row, column

    @made_for(q_idx=height * width, kv_idx=height * width)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        q_row, q_column = place(q_idx)
        kv_row, kv_column = place(kv_idx)
        same_rows = q_row // window == kv_row // window
        same_columns = q_column // window == kv_column // window
        return same_rows & same_columns

    @made_for(h=table.shape[1])
    def score_mod(
        score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array
    ) -> Array:
        q_row, q_column = place(q_idx)
        kv_row, kv_column = place(kv_idx)
        # Within a square, both differences are from 0 to 2 * window - 2.
        down = q_row % window - kv_row % window + window - 1
        right = q_column % window - kv_column % window + window - 1
        offset = down * (2 * window - 1) + right
        return score + table[offset, h].astype(score.dtype)

    return {"mask": FunctionMask(visible), "score_mod": score_mod}
