"""The kinds of attention that a run can choose from, made of `flax_mha`'s modules."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

import flax_mha
from flax_mha import recipes
from flax_mha.rope import RoPE
from train_demo import mesh
from train_demo.settings import Layout, Settings

WINDOWS = 4  # of "window", in a context
BLOCKS = 8  # of "blocks", in a context
CHOSEN = 3  # of these, which each character attends to, its own included


def make_attention(
    settings: Settings, layout: Layout, *, dtype: Any, rngs: nnx.Rngs
) -> nnx.Module:
    """Makes the attention layer of a block.

    Args:
      settings: Its `attention` is the kind; all kinds have the same heads and features.
      layout: Its `context` devices split the attention along the sequence.
      dtype: The compute dtype; None means that of the parameters.
      rngs: The stream `params` draws the weights.
    """
    kind = settings.attention
    head_size = settings.features // settings.heads
    options: dict[str, Any] = {
        "dtype": dtype,
        "dropout_rate": settings.dropout_rate,
        "use_bias": False,
        # At first each block is the identity.
        "out_kernel_init": nnx.initializers.zeros_init(),
        "rope": RoPE(),
        "attention_fn": _attention_fn(settings, layout),
        "decode": False,
        "keep_rngs": False,
        "rngs": rngs,
    }
    window = window_of(settings)
    if window is not None:
        # In longer texts than those of training it slides, and the cache is a ring.
        options["local_window_size"] = (window - 1, 0)
    if kind == "latent":
        return flax_mha.MultiHeadLatentAttention(
            settings.heads,
            settings.features,
            kv_lora_rank=2 * head_size,
            qk_nope_head_dim=head_size,
            qk_rope_head_dim=head_size // 2,
            v_head_dim=head_size,
            **options,
        )
    return flax_mha.MultiHeadAttention(
        settings.heads,
        settings.features,
        num_kv_heads=settings.kv_heads,
        normalize_qk=flax_mha.Norm("rms"),
        gate=kind == "gated",
        sinks=kind == "sinks",
        **options,
    )


def window_of(settings: Settings) -> int | None:
    """Returns how many characters a character attends to in a layer; None means all."""
    if settings.attention == "blocks":
        return None
    if settings.attention == "window":
        return max(1, settings.context_length // WINDOWS)
    return settings.context_length


def _attention_fn(settings: Settings, layout: Layout) -> Any:
    """Returns the function that computes the attention of projected heads."""
    if settings.attention == "blocks":
        block = max(1, settings.context_length // BLOCKS)
        return functools.partial(attend_to_blocks, block=block, count=CHOSEN)
    if layout.context > 1:
        return flax_mha.context_parallel(
            "context", batch_axes=mesh.BATCH, head_axis="model"
        )
    return flax_mha.attention_fn


def attend_to_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    block: int,
    count: int,
    mask: Bool[Array, "B 1 T S"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Computes mixture of block attention, with the signature of an `attention_fn`.

    Args:
      query: Rotated queries.
      key: Rotated keys; while decoding, all in the cache.
      value: Values of the keys.
      block: Number of keys in a block.
      count: Number of blocks that each query attends to, its own included.
      mask: The cached keys that each query may attend to; None unless the model
        decodes.
      options: Other arguments of `flax_mha.attention_fn`.
    """
    offset: int | Array = 0
    if mask is not None:
        # The first query attends to the keys before it, and to its own.
        seen = mask[:, 0, 0].sum(axis=-1, dtype=jnp.int32)
        offset = jnp.maximum(seen - 1, 0)
    blocks = recipes.top_blocks(query, key, block, count, query_offset=offset)
    return flax_mha.attention_fn(
        query, key, value, mask=mask, key_indices=blocks["key_indices"], **options
    )
