"""Exact multi-head attention for JAX and Flax: functions, modules for nnx and linen,
masks, RoPE and caches.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from flax_mha._src.attention import dot_product_attention as dot_product_attention
from flax_mha._src.attention import explain_implementation as explain_implementation
from flax_mha._src.cache.kv_cache import KVCache as KVCache
from flax_mha._src.explanation import Explanation as Explanation
from flax_mha._src.masks import CausalMask as CausalMask
from flax_mha._src.masks import FunctionMask as FunctionMask
from flax_mha._src.masks import LengthMask as LengthMask
from flax_mha._src.masks import LocalMask as LocalMask
from flax_mha._src.masks import Mask as Mask
from flax_mha._src.masks import SegmentMask as SegmentMask
from flax_mha._src.modules.attention_fn import attention_fn as attention_fn
from flax_mha._src.modules.context_parallel import context_parallel as context_parallel
from flax_mha._src.modules.context_parallel import from_zigzag as from_zigzag
from flax_mha._src.modules.context_parallel import to_zigzag as to_zigzag
from flax_mha._src.modules.context_parallel import zigzag_positions as zigzag_positions
from flax_mha._src.modules.indexer import Indexer as Indexer
from flax_mha._src.modules.layers import Gate as Gate
from flax_mha._src.modules.layers import Norm as Norm
from flax_mha._src.nnx.latent import (
    MultiHeadLatentAttention as MultiHeadLatentAttention,
)
from flax_mha._src.nnx.multi_head import MultiHeadAttention as MultiHeadAttention
from flax_mha._src.rope.rope import RoPE as RoPE

# Names that `from flax_mha import *` binds. No modules: names such as `nnx` and `linen`
# would replace Flax's.
__all__ = [
    "CausalMask",
    "Explanation",
    "FunctionMask",
    "Gate",
    "Indexer",
    "KVCache",
    "LengthMask",
    "LocalMask",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "Norm",
    "RoPE",
    "SegmentMask",
    "attention_fn",
    "combine",
    "context_parallel",
    "dot_product_attention",
    "explain_implementation",
    "from_zigzag",
    "to_zigzag",
    "zigzag_positions",
]

if TYPE_CHECKING:
    from flax_mha import cache as cache
    from flax_mha import convert as convert
    from flax_mha import linen as linen
    from flax_mha import masks as masks
    from flax_mha import nnx as nnx
    from flax_mha import plot as plot
    from flax_mha import recipes as recipes
    from flax_mha import rope as rope
    from flax_mha.recipes import combine as combine

    __version__: str

# Modules that are imported on first access, so that `import flax_mha` stays fast.
_ON_FIRST_USE = ("cache", "convert", "linen", "masks", "nnx", "plot", "recipes", "rope")


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return importlib.import_module(f"flax_mha.{name}")
        if name == "combine":
            return importlib.import_module("flax_mha.recipes").combine
        if name == "__version__":
            try:
                return importlib.metadata.version("flax-mha")
            # A checkout that is not installed.
            except importlib.metadata.PackageNotFoundError:
                return "unknown"
        raise AttributeError(f"module 'flax_mha' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_ON_FIRST_USE, "__version__"})
