"""How a sequence is split over the devices of a mesh axis, as a value, and in which order its tokens then stand."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from flax_mha.core.integers import is_int
from flax_mha.core.sharding import of_every_axis

Axes = str | tuple[str, ...] | None
Strategy = Literal["ring", "ulysses", "allgather"]
Layout = Literal["contiguous", "zigzag"]


class Context(NamedTuple):
    """The arguments of `context_parallel`."""

    axis: str
    strategy: Strategy
    layout: Layout
    batch_axes: Axes
    head_axis: Axes
    mesh: Mesh | AbstractMesh | None

    @property
    def chunks(self) -> int:
        """How many chunks of the sequence a device holds, each of adjacent positions."""
        return 2 if self.layout == "zigzag" else 1

    def with_sharding(self, sharding: Any, rank: int) -> "Context":
        """With what a sharding of the query says besides, of batch, heads and mesh.

        Raises:
          ValueError: If the two contradict each other.
        """
        if sharding is None or rank < 3:  # such a query is refused later
            return self
        spec: PartitionSpec = getattr(sharding, "spec", sharding)
        *batch, length, heads, size = of_every_axis(spec, rank)
        said = self._replace(
            batch_axes=(batch[0] if batch else None) or self.batch_axes,
            head_axis=heads or self.head_axis,
            mesh=getattr(sharding, "mesh", None) or self.mesh,
        )
        agrees = all(new == old for new, old in zip(said, self, strict=True) if old is not None)
        if not agrees or size or any(batch[1:]) or length not in (None, self.axis):
            raise ValueError(
                f"qkv_sharding and context_parallel must agree on the mesh axes of the first batch axis, the sequence "
                f"and the heads, but got {spec} and {tuple(self)}; say it once."
            )
        return said


def belongs_to_keys(axes: str) -> bool:
    """Whether an array with these axes (named as in `masks/base.py`) is split over devices as the keys are.

    One with an axis for the queries besides is split over those, and holds all keys.
    """
    names = axes.split()
    return "S" in names and not {"T", "T|1"} & set(names)


def chunk_order(layout: Layout, parts: int) -> np.ndarray:
    """The numbers of the chunks of the sequence in the order in which the devices hold them.

    Raises:
      ValueError: If `parts` is no number of devices.
    """
    if not is_int(parts) or parts < 1:
        raise ValueError(f"devices must be an int >= 1, but got {parts!r}.")
    devices = np.arange(parts, dtype=np.int32)
    if layout == "contiguous":
        return devices
    return np.stack([chunk_of(devices, number, parts) for number in range(2)], 1).ravel()


def chunk_of(device: Any, number: Any, parts: int) -> Any:
    """Which chunk of the whole sequence is this one, 0 or 1, of a device; contiguous sequences have 0 alone."""
    return device + number * (2 * parts - 1 - 2 * device)


def chunks_in_order(x: Any, order: np.ndarray, axis: int) -> Any:
    """An array, of NumPy or JAX, cut into as many chunks as `order` has entries, of which `order[i]` comes i-th."""
    library = np if isinstance(x, np.ndarray) else jnp
    chunks = library.split(x, len(order), axis)
    return library.concatenate([chunks[i] for i in order], axis)
