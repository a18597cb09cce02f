"""Strictness for every test: shapes are checked at run time, and nothing promotes or broadcasts in silence."""

import os

# Most of the time goes into compiling, and half of that into machine code that runs once. Without LLVM's optimizations
# only rounding differs. Set XLA_FLAGS, if only to nothing, to have them; .ci/run does both.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
from jaxtyping import install_import_hook

# Before the package is imported: the shapes in the signatures of these files become checks. (Not in those with pytrees,
# which jax also fills with placeholders.)
CHECKED = ("_impl.dense", "_impl.blockwise", "_impl.online_softmax", "_impl.heads", "_tiles")
install_import_hook([f"flax_mha.{name}" for name in CHECKED], "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
