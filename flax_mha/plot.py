"""A picture of a mask."""

from flax_mha._src.plot import plot_mask as plot_mask

__all__ = ["plot_mask"]
