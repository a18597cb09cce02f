"""`plot_mask`, which draws a mask; needs matplotlib."""

from typing import TYPE_CHECKING

from flax_mha._src.masks import Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_mask(
    mask: Mask, queries: int, keys: int, axes: "Axes | None" = None
) -> "Axes":
    """Draws a mask for the first head of the first batch entry: a row per query, a
    column per key.

    Args:
      mask: A mask object.
      queries: Number of queries T.
      keys: Number of keys S.
      axes: The axes to draw in; None creates a new figure.

    Returns:
      The axes; `axes.figure.savefig("mask.png")` writes the picture.

    Raises:
      ModuleNotFoundError: If matplotlib is not installed.

    Example:
      >>> from flax_mha import masks, plot
      >>> plot.plot_mask(masks.CausalMask() & masks.LocalMask(2, 0), 8, 8).get_title()
      'visible: 33 % of 8 x 8'
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot_mask requires matplotlib; run pip install matplotlib"
        ) from error
    seen = mask.picture(queries, keys)
    if axes is None:
        axes = Figure(figsize=(5, 5), layout="constrained").subplots()
    axes.imshow(
        seen, cmap="Greys", vmin=0, vmax=1.6, interpolation="nearest", aspect="equal"
    )
    axes.set(
        xlabel="key",
        ylabel="query",
        title=f"visible: {100 * seen.mean():.0f} % of {queries} x {keys}",
    )
    return axes
