"""Strictness for every test: shapes are checked at run time, and nothing promotes or broadcasts in silence."""

import os

# Most of the time goes into compiling, and half of that into machine code that runs once. Without LLVM's optimizations
# only rounding differs. Set XLA_FLAGS, if only to nothing, to have them; .ci/run does both.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest
from jaxtyping import install_import_hook

# Before the package is imported: the shapes in the signatures of these files become checks. (Not in those with pytrees,
# which jax also fills with placeholders.)
CHECKED = ("_impl.dense", "_impl.blockwise", "_impl.online_softmax", "_impl.heads", "_tiles")
install_import_hook([f"flax_mha.{name}" for name in CHECKED], "beartype.beartype")

from flax_mha._impl import portable, tiling  # noqa: E402
from flax_mha._impl.tiling import Tiling  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles each way in lengths of a few dozen, cut into cells and bands."""
    monkeypatch.setattr(portable, "TILINGS", (Tiling(16, 32), Tiling(32, 32, 2), Tiling(16, 16)))
    monkeypatch.setattr(portable, "GATHERING", (Tiling(16, 8, runs=4),))
    monkeypatch.setattr(tiling, "CELL", 8)
