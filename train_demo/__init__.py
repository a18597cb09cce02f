"""A small transformer that learns to write, trained with `flax_mha.MultiHeadAttention`.

The files tell one story: settings.py (what a user may choose), data.py (the text),
run_folder.py (where a run is kept), mesh.py, attention.py and model.py (the
transformer, on one device or many), update.py (a training step), checkpoint.py and
metrics.py (what is kept of it), training.py (the loop), generate.py, report.py,
plots.py and export.py (what a trained model is good for), compare.py (one model with
several kinds of attention), api.py and command_line.py (how to start all this).

Example:
  ```python
  import train_demo

  run = train_demo.train(data="my-texts", out="runs/mine", steps=500)
  print(run.val_loss, run.sample("Once upon"))
  ```
"""

# Only type checkers import these names here. A program imports them lazily, because
# `python -m train_demo` runs this file before it handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from train_demo.api import Run, load, train
    from train_demo.errors import UserError
    from train_demo.settings import Layout

__all__ = ["Layout", "Run", "UserError", "load", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        names = ", ".join(__all__)
        raise AttributeError(
            f"module 'train_demo' has no attribute {name!r}: it has {names}"
        )
    from train_demo import api

    return getattr(api, name)
