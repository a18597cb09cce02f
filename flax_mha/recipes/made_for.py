"""`made_for`: the sizes that the functions of a recipe are made for."""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)


def made_for(**sizes: int) -> Callable[[F], F]:
    """Declares the sizes that a `mask_mod` or a `score_mod` is made for, such as `@made_for(h=8, kv_idx=1024)`.

    `TracedFunction.check` refuses calls with other numbers of batch entries or heads, and with positions beyond these.
    """

    def mark(function: Any) -> Any:
        function.made_for = sizes
        return function

    return mark
