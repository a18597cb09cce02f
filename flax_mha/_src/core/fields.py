"""Fields of dataclasses that are pytrees: static values, and arrays with named axes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
from jaxtyping import Array


def with_axes(axes: str, **options: Any) -> Any:
    """Makes a dataclass field of arrays with these axes, such as "B T"; `options` are
    those of `dataclasses.field`.

    Fields of public classes that have no default call `dataclasses.field` instead:
    type checkers would take these for optional.
    """
    return dataclasses.field(metadata={"axes": axes}, **options)


def static(**options: Any) -> Any:
    """Makes a dataclass field of a static value of a pytree; see `with_axes`."""
    return dataclasses.field(metadata={"static": True}, **options)


class WithAxes:
    """The base class of frozen dataclasses in which `with_axes` makes the fields of
    arrays.
    """

    def map_arrays(self, change: Callable[[Array, str], Any]) -> Self:
        """Returns a copy with each array replaced by `change(array, axes)`; `axes`
        names its axes, such as "B T".
        """
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, WithAxes):
                changed[field.name] = value.map_arrays(change)
            elif "axes" in field.metadata:
                axes = field.metadata["axes"]
                changed[field.name] = jax.tree.map(
                    lambda x, axes=axes: change(x, axes), value
                )
        if changed:
            return dataclasses.replace(self, **changed)  # type: ignore[type-var]
        return self
