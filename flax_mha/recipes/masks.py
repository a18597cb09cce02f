"""Recipes that are masks over one text."""

from jaxtyping import Array, Bool, Int

from flax_mha._src.core.integers import int32, int_at_least, is_int
from flax_mha._src.core.user_function import made_for
from flax_mha._src.core.validation import as_array
from flax_mha.masks import CausalMask, FunctionMask, LocalMask, SegmentMask
from flax_mha.recipes.arguments import Arguments


def causal() -> Arguments:
    """Lets each token attend to itself and the tokens before it."""
    return {"mask": CausalMask()}


def sliding_window(width: int) -> Arguments:
    """Lets each token attend to itself and `width` tokens before it. Beltagy et al., Longformer, arXiv:2004.05150.

    For decoding, pass `local_window_size=(width, 0)` to the constructor of the module instead; its cache is then a ring
    buffer.
    """
    return {"mask": LocalMask(width, 0)}


def prefix_lm(length: int | Int[Array, ""]) -> Arguments:
    """Lets the first `length` tokens attend to each other; causal after them. Raffel et al., T5, arXiv:1910.10683."""
    length = length if is_int(length) else int32("length", length)
    return {"mask": CausalMask() | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < length)}


def documents(ids: Int[Array, "*B S"]) -> Arguments:
    """Packs several documents into one sequence: causal among tokens with the same id."""
    return {"mask": CausalMask() & SegmentMask(ids, ids)}


def dilated(step: int) -> Arguments:
    """Lets tokens attend to every `step`-th earlier token. Child et al., Sparse Transformers, arXiv:1904.10509."""
    step = int_at_least("step", step, 1)
    return {"mask": CausalMask() & FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % step == 0)}


def block_sparse(table: Bool[Array, "N rows columns"], block: int) -> Arguments:
    """Shows blocks of `block` x `block` scores if `table` is True. Zaheer et al., BigBird, arXiv:2007.14062.

    For each head, the table must have a row for each block of queries and a column for each block of keys.

    Raises:
      ValueError: If the table is not boolean with three axes, or if `block` is not an integer of at least 1; in the
        attention, if the table has another number of heads, or too few rows or columns.
    """
    table, block = as_array("table", table, "a boolean array"), int_at_least("block", block, 1)
    if table.dtype != bool or table.ndim != 3:
        raise ValueError(f"table must be bool [heads, rows, columns], but got {table.dtype} {table.shape}.")

    heads, rows, columns = table.shape

    @made_for(h=heads, q_idx=rows * block, kv_idx=columns * block)
    def visible(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        return table[h, q_idx // block, kv_idx // block]

    return {"mask": FunctionMask(visible)}
