"""`context_parallel`: attention over a sequence that is split over the devices of a
mesh axis.

Each device holds a part of the tokens. All other layers of a transformer compute each
token by itself, so they need no change; see `docs/devices.md`.
"""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array

from flax_mha._src.call.call import Axes, Context, Layout, Strategy
from flax_mha._src.core.validation import is_int
from flax_mha._src.distributed.split import chunk_order, reorder_chunks
from flax_mha._src.modules.attention_fn import AttentionFn


def context_parallel(
    axis: str,
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    batch_axes: Axes = None,
    head_axis: Axes = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Array]:
    """Makes an `attention_fn` for modules whose sequences are split over the devices of
    a mesh axis.

    The function takes the arguments of `flax_mha.attention_fn`, with the shapes of
    whole sequences, and returns the same result: masks, windows, lengths, `score_mod`
    and dropout refer to positions in the whole sequence.

    Args:
      axis: The mesh axis that splits queries, keys and values along their lengths T and
        S. Its size N must divide both.
      strategy: What the devices exchange. "ring": keys and values move from device to
        device while each device computes attention over them. Memory per device depends
        only on T / N. Uses "blockwise" attention. "ulysses": an all-to-all before and
        after gives each device all positions of one N-th of its heads. Works with any
        implementation, including fused kernels. Each device must hold a multiple of N
        key heads. "allgather": each device gathers all keys and values for its queries.
        Good for short sequences or few key heads.
      layout: Which tokens a device holds. "contiguous": T / N consecutive tokens.
        "zigzag": two chunks of T / (2 N) tokens, on device r the r-th from the front
        and the r-th from the back, which balances the work under a causal mask. With
        "zigzag", all arrays along T and S must be in this order: see `to_zigzag`, and
        `zigzag_positions` for rotary embeddings.
      batch_axes: The mesh axes that split the first batch axis. None uses the query's
        sharding, if its type contains it (on a mesh with Explicit axes) or the query is
        not traced; otherwise the batch is not split.
      head_axis: The mesh axis that splits the heads. None means the module's
        `head_axis`, or the query's sharding.
      mesh: The mesh. None means the mesh set by `jax.set_mesh`, or the query's mesh.

    Returns:
      A function with the signature of `flax_mha.attention_fn`; equal arguments make
      equal functions.

    Raises:
      ValueError: If an argument is invalid. When the function is called: if the mesh
        has no such axis, if lengths or heads cannot be split, or if the call needs all
        tokens on one device (decoding, sown weights, Flax's einsums).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import flax_mha
      >>> auto = jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(auto,))
      >>> attention_fn = flax_mha.context_parallel("context", mesh=mesh)
      >>> x = jnp.ones((2, 8, 4, 16))
      >>> attention_fn(x, x, x, is_causal=True).shape
      (2, 8, 4, 16)

    References:
      Liu et al., Ring Attention, arXiv:2310.01889; Jacobs et al., DeepSpeed Ulysses,
      arXiv:2309.14509.
    """
    _check_known("strategy", strategy, get_args(Strategy))
    _check_known("layout", layout, get_args(Layout))
    if not isinstance(axis, str):
        raise ValueError(
            f"axis must be the name of a single mesh axis, but got {axis!r}."
        )
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None, but got {mesh!r}.")
    context = Context(
        axis=axis,
        strategy=strategy,
        layout=layout,
        batch_axes=_names("batch_axes", batch_axes),
        head_axis=_names("head_axis", head_axis),
        mesh=mesh,
    )
    return AttentionFn(context)


def _check_known(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(
            f"{name} must be {' or '.join(map(repr, known))}, but got {given!r}."
        )


def _names(name: str, axes: object) -> Axes:
    """Checks the mesh axes that were passed as argument `name`; returns one name, a
    tuple of several, or None.
    """
    if isinstance(axes, tuple | list):
        names = tuple(axes)
    elif axes is None:
        names = ()
    else:
        names = (axes,)
    if not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"{name} must be the name of a mesh axis, a tuple of names or None, but "
            f"got {axes!r}."
        )
    if len(names) == 1:
        return names[0] or None
    return names or None


def zigzag_positions(length: int, devices: int) -> np.ndarray:
    """Returns the position of each token in "zigzag" order: int32 [length].

    Token i in zigzag order is token `zigzag_positions(...)[i]` of the original
    sequence. If tokens are in zigzag order, pass this array as `positions` to modules
    with rotary embeddings.

    Args:
      length: Number of tokens.
      devices: Size of the mesh axis.

    Raises:
      ValueError: If `length` is not a multiple of 2 * `devices`.

    Example:
      >>> zigzag_positions(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    positions = np.arange(length, dtype=np.int32)
    return np.asarray(to_zigzag(positions, devices, axis=0))


def to_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """Reorders `x` along its sequence axis, `axis`, for `context_parallel(...,
    layout="zigzag")`.

    `devices` is the size of the mesh axis that splits the sequence.

    Raises:
      ValueError: If the axis cannot be cut into 2 * `devices` chunks.

    Example:
      >>> import numpy as np
      >>> to_zigzag(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), devices=4)
      array([[0, 7, 1, 6, 2, 5, 3, 4]])
      >>> from_zigzag(np.array([[0, 7, 1, 6, 2, 5, 3, 4]]), devices=4)
      array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    return _with_chunks(x, chunk_order("zigzag", devices), axis)


def from_zigzag(x: ArrayLike, devices: int, axis: int = 1) -> Array:
    """Restores the original order of an array that `to_zigzag` has reordered, given the
    same `devices` and `axis`.

    Raises:
      ValueError: As in `to_zigzag`.
    """
    inverse = np.argsort(chunk_order("zigzag", devices))
    return _with_chunks(x, inverse, axis)


def _with_chunks(x: ArrayLike, order: np.ndarray, axis: int) -> Any:
    array: Any = x
    if not hasattr(x, "shape"):
        array = np.asarray(x)
    # Negative axes count from the last, as in NumPy.
    if not is_int(axis) or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"axis must be an axis of x, but got {axis!r} for shape {array.shape}."
        )
    length = array.shape[axis]
    if length % len(order):
        raise ValueError(
            f"the length of axis {axis} must be a multiple of {len(order)} (two chunks "
            f"per device), but got {length}; pad x."
        )
    return reorder_chunks(array, order, axis)
