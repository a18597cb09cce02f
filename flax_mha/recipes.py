"""Twenty-one kinds of attention in plain Python: functions return arguments for
`dot_product_attention`.

You can also pass the masks and score functions to the call of a module. For `soft_cap`
and `attention_sinks`, modules take constructor arguments instead; see these recipes.
`combine` joins several recipes. `differential` takes the difference of two calls, so it
returns the output instead of arguments. `RelativeBias` is a module that holds the table
of `t5_bias`, for the argument `score_mod`.

For another kind of attention, copy a recipe and change a line; memory stays O(T + S).
The arguments of masks and score functions are named as in PyTorch's FlexAttention, so
its recipes can be ported line by line.

Example:
  >>> import jax
  >>> from flax_mha import dot_product_attention, recipes
  >>> query = key = value = jax.random.normal(jax.random.key(0), (1, 1000, 4, 16))
  >>> dot_product_attention(query, key, value, **recipes.alibi(num_heads=4)).shape
  (1, 1000, 4, 16)
"""

from flax_mha._src.recipes.masks import block_diffusion as block_diffusion
from flax_mha._src.recipes.masks import block_sparse as block_sparse
from flax_mha._src.recipes.masks import causal as causal
from flax_mha._src.recipes.masks import dilated as dilated
from flax_mha._src.recipes.masks import documents as documents
from flax_mha._src.recipes.masks import image_spans as image_spans
from flax_mha._src.recipes.masks import neighborhood as neighborhood
from flax_mha._src.recipes.masks import prefix_lm as prefix_lm
from flax_mha._src.recipes.masks import shared_prefix as shared_prefix
from flax_mha._src.recipes.masks import shifted_windows as shifted_windows
from flax_mha._src.recipes.masks import sliding_tiles as sliding_tiles
from flax_mha._src.recipes.masks import sliding_window as sliding_window
from flax_mha._src.recipes.masks import tree_causal as tree_causal
from flax_mha._src.recipes.scores import RelativeBias as RelativeBias
from flax_mha._src.recipes.scores import alibi as alibi
from flax_mha._src.recipes.scores import attention_sinks as attention_sinks
from flax_mha._src.recipes.scores import combine as combine
from flax_mha._src.recipes.scores import differential as differential
from flax_mha._src.recipes.scores import forgetting as forgetting
from flax_mha._src.recipes.scores import relative_terms as relative_terms
from flax_mha._src.recipes.scores import soft_cap as soft_cap
from flax_mha._src.recipes.scores import t5_bias as t5_bias
from flax_mha._src.recipes.selection import top_blocks as top_blocks

__all__ = [
    "RelativeBias",
    "alibi",
    "attention_sinks",
    "block_diffusion",
    "block_sparse",
    "causal",
    "combine",
    "differential",
    "dilated",
    "documents",
    "forgetting",
    "image_spans",
    "neighborhood",
    "prefix_lm",
    "relative_terms",
    "shared_prefix",
    "shifted_windows",
    "sliding_tiles",
    "sliding_window",
    "soft_cap",
    "t5_bias",
    "top_blocks",
    "tree_causal",
]
