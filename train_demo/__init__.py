"""A small transformer that learns to write, trained with `flax_mha.MultiHeadAttention`.

Example:
    ```python
    import train_demo

    run = train_demo.train(data="my-texts", out="runs/mine", steps=500)
    print(run.val_loss, run.sample("Once upon"))
    ```
"""

import time

STARTED = time.perf_counter()  # of the process, as far as anything here can know

# A type checker sees these names; a program imports them when it asks for them, because `python -m train_demo` imports
# this file before it can heed Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from train_demo.api import Run, load, train
    from train_demo.errors import UserError
    from train_demo.layout import Layout

__all__ = ["Layout", "Run", "UserError", "load", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'train_demo' has no attribute {name!r}: it has {', '.join(__all__)}")
    from train_demo import api, errors, layout

    return {"Layout": layout.Layout, "UserError": errors.UserError}.get(name) or getattr(api, name)
