"""Addresses of names in the documentation of JAX and Flax, for links that are made
without a network.
"""

import zlib
from pathlib import Path

JAX = "https://docs.jax.dev/en/latest/"
FLAX = "https://flax.readthedocs.io/en/stable/"
LINEN = "api_reference/flax.linen/layers.html#$"
NNX = "api_reference/flax.nnx/nn/attention.html#$"
JAX_NAMES = [
    "checkpoint",
    "eval_shape",
    "jit",
    "jvp",
    "make_mesh",
    "nn.dot_product_attention",
    "set_mesh",
    "shard_map",
]
JAX_NAMES += ["vmap"]
NAMES = {
    JAX: {f"jax.{name}": f"_autosummary/jax.{name}.html#$" for name in JAX_NAMES},
    FLAX: {
        "flax.nnx.MultiHeadAttention": NNX,
        "flax.nnx.dot_product_attention": NNX,
        "flax.linen.MultiHeadDotProductAttention": LINEN,
        "flax.linen.MultiHeadAttention": LINEN,
        "flax.linen.SelfAttention": LINEN,
        "flax.linen.dot_product_attention": LINEN,
    },
}


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes Sphinx's `objects.inv` for each project, and returns the mapping for
    `sphinx.ext.intersphinx`.
    """
    folder.mkdir(exist_ok=True)
    mapping = {}
    for project, (address, names) in zip(("jax", "flax"), NAMES.items(), strict=True):
        lines = "".join(
            f"{name} py:function 1 {place} -\n" for name, place in names.items()
        )
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        path = folder / f"{project}.inv"
        path.write_bytes(head.encode() + zlib.compress(lines.encode()))
        mapping[project] = (address, str(path))
    return mapping
