"""The attention layers of Transformers itself, version 5, for the families of
tests/test_torch_families.py.
"""

import importlib
import inspect
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
    available = {
        "attention_mask": mask(settings, x, layer, windowed) if decodes else None,
        "position_embeddings": rotary(library, settings, x, layer),
        "alibi": alibi(library, settings, x),
        "residual": torch.zeros_like(x),
        "mask": torch.zeros(()).masked_fill(~causal(x.shape[1]), float("-inf"))[
            None, None
        ],
        "position_bias": table[t5_buckets(x.shape[1], len(table))].permute(2, 0, 1)[
            None
        ],
    }
    if kind == "BertAttention":  # without what follows the attention
        return attention.output.dense(attention.self(x)[0])
    if kind == "T5Attention":  # the mask belongs to the bias, where one is given
        available["position_bias"] = available["position_bias"] + available["mask"]
    parameters = inspect.signature(attention.forward).parameters
    return attention(
        x, **{key: value for key, value in available.items() if key in parameters}
    )[0]


def make(kind: type[nn.Module], settings: Any, layer: int) -> nn.Module:
    available = {"config": settings, "layer_idx": layer, "is_causal": True}
    available |= {
        "embed_dim": settings.hidden_size,
        "num_heads": settings.num_attention_heads,
    }
    parameters = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in available.items() if key in parameters})


def mask(settings: Any, x: Tensor, layer: int, windowed: bool) -> Tensor:
    """As the model makes it for its layers; of Bloom as numbers, which it makes itself."""
    make_mask = create_sliding_window_causal_mask if windowed else create_causal_mask
    positions = torch.arange(x.shape[1])[None]
    cache = {
        name: None
        for name in ("cache", "past_key_values")
        if name in inspect.signature(make_mask).parameters
    }
    return make_mask(
        config=settings,
        inputs_embeds=x,
        attention_mask=None,
        position_ids=positions,
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
    return library.build_alibi_tensor(
        torch.ones(x.shape[:2]), settings.num_attention_heads, x.dtype
    )
