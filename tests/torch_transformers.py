"""The attention layers of Transformers itself, version 5, for the families of
tests/test_torch_families.py.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_families import Weights, causal, t5_buckets
from transformers import AutoConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from flax_mha import convert


def output(
    config: dict[str, Any],
    layer: int,
    name: str,
    weights: Weights,
    x: Tensor,
    decodes: bool,
    table: Tensor,
):
    """What the layer `name`, as in `llama.LlamaAttention`, makes of x under these
    weights.
    """
    library, kind = name.split(".")
    library = importlib.import_module(
        f"transformers.models.{library}.modeling_{library}"
    )
    settings = AutoConfig.for_model(**config)
    settings._attn_implementation = "eager"
    attention = make(getattr(library, kind), settings, layer).eval()
    missing, unexpected = attention.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not [key for key in missing if "LayerNorm" not in key]
    windowed = convert.describe(config, layer).get("local_window_size") is not None
    # What the attention layers of the families take besides the inputs.
    unseen = ~causal(x.shape[1])
    causal_mask = torch.zeros(()).masked_fill(unseen, float("-inf"))[None, None]
    bias = table[t5_buckets(x.shape[1], len(table))].permute(2, 0, 1)[None]
    if kind == "T5Attention":  # the mask belongs to the bias, where one is given
        bias = bias + causal_mask
    available = {
        "attention_mask": None,
        "position_embeddings": rotary(library, settings, x, layer),
        "alibi": alibi(library, settings, x),
        "residual": torch.zeros_like(x),
        "mask": causal_mask,
        "position_bias": bias,
    }
    if decodes:
        available["attention_mask"] = mask(settings, x, layer, windowed)
    if kind == "BertAttention":  # without what follows the attention
        return attention.output.dense(attention.self(x)[0])
    return attention(x, **taken_by(attention.forward, available))[0]


def taken_by(function: Callable, available: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: x for name, x in available.items() if name in parameters}


def make(kind: type[nn.Module], settings: Any, layer: int) -> nn.Module:
    available = {
        "config": settings,
        "layer_idx": layer,
        "is_causal": True,
        "embed_dim": settings.hidden_size,
        "num_heads": settings.num_attention_heads,
    }
    return kind(**taken_by(kind.__init__, available))


def mask(settings: Any, x: Tensor, layer: int, windowed: bool) -> Tensor:
    """As the model makes it for its layers."""
    make_mask = create_causal_mask
    if windowed:
        make_mask = create_sliding_window_causal_mask
    # Its name depends on the version of Transformers.
    cache = taken_by(make_mask, {"cache": None, "past_key_values": None})
    return make_mask(
        config=settings,
        inputs_embeds=x,
        attention_mask=None,
        position_ids=torch.arange(x.shape[1])[None],
        **cache,
    )


def rotary(
    library: Any, settings: Any, x: Tensor, layer: int
) -> tuple[Tensor, Tensor] | None:
    names = [name for name in vars(library) if name.endswith("RotaryEmbedding")]
    if not names or not getattr(settings, "rope_parameters", None):
        return None
    embedding = getattr(library, names[0])(settings)
    positions = torch.arange(x.shape[1])[None]
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        return embedding(x, positions, settings.layer_types[layer])
    return embedding(x, positions)


def alibi(library: Any, settings: Any, x: Tensor) -> Tensor | None:
    if settings.model_type != "bloom":
        return None
    tokens = torch.ones(x.shape[:2])
    return library.build_alibi_tensor(tokens, settings.num_attention_heads, x.dtype)
