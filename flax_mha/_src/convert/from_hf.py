"""`from_hf`: makes the attention of one layer of a Hugging Face model, from the model's
config and weights.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from flax_mha._src.attention import Implementation
from flax_mha._src.convert.describe import (
    attention_with,
    check_described,
    describe_layer,
)
from flax_mha._src.convert.load import load_torch
from flax_mha._src.convert.read_config import Config, of_part, read_config
from flax_mha._src.convert.state_dict import T5_TABLE, layer_prefix, table_key
from flax_mha._src.modules.attention_fn import attention_fn
from flax_mha._src.nnx.latent import MultiHeadLatentAttention
from flax_mha._src.nnx.multi_head import MultiHeadAttention
from flax_mha._src.recipes.scores import RelativeBias


def from_hf(
    config: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    layer: int = 0,
    prefix: str = "",
    *,
    max_length: int | None = None,
    dtype: Dtype | None = None,
    param_dtype: Dtype = jnp.float32,
    decode: bool = False,
    implementation: Implementation | None = None,
    head_axis: str | None = None,
) -> MultiHeadAttention | MultiHeadLatentAttention:
    """Creates an nnx module with the weights of one self-attention layer of a Hugging
    Face model.

    The module is `MultiHeadAttention(**describe(config, layer))`, or
    `MultiHeadLatentAttention` for models with latents such as DeepSeek, with weights
    loaded by `load_torch`. Its `attention_fn` sets the arguments that every call needs:
    `is_causal=True` in decoders. Layers of T5 have its table as the parameter
    `score_mod.table` of a `recipes.RelativeBias`, which is their `score_mod`. If you
    train several layers, let them share it, as in the model:
    `layer.score_mod = first_layer.score_mod`.

    Prompts of models with images need one more argument, in training and in decoding,
    because not all of their tokens are causal. PaliGemma: `**recipes.prefix_lm(n)`,
    where n counts the tokens of the image and of the prompt. Gemma 3 and 4:
    `**recipes.image_spans(ids)`, where ids number the images. Both override the preset
    `is_causal=True`.

    If you pass `mask` or `score_mod`, it replaces the layer's own (Llama 4's chunks,
    ALiBi, T5's bias). Pass `lengths` for padding. To add a mask, combine both:
    `mask=layer.attention_fn.keywords["mask"] & mask`.

    Args:
      config: The dict of a `config.json`, or `config.to_dict()`; see `describe`.
      state_dict: PyTorch tensors, or numpy or JAX arrays
        (`safetensors.flax.load_file`): of the whole model, of one of its parts, or only
        of this attention.
      layer: The index of the layer, from 0.
      prefix: The start of the keys in `state_dict` for a part of the model, such as
        `"model.language_model."`, `"encoder."` or `"model.L_module."`, or for the
        attention itself. If several parts fit, the decoder is used; image and audio
        encoders are never used without a prefix.
      max_length: The length of the longest sequence; see `describe`.
      dtype: Dtype of the computation; None infers it from inputs and parameters.
      param_dtype: Dtype of the parameters.
      decode: True makes calls decode; `init_cache` creates the cache.
      implementation: Name of the attention implementation; None lets the library
        choose.
      head_axis: Split the heads over this mesh axis; see `MultiHeadAttention`.

    Raises:
      ValueError: If `describe` refuses the config, if the layer has no attention, if
        several attentions in `state_dict` fit, or if weights do not fit the config.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax_mha import convert
      >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2}
      >>> shapes = {"c_attn.weight": (8, 24), "c_attn.bias": 24}
      >>> shapes |= {"c_proj.weight": (8, 8), "c_proj.bias": 8}
      >>> weights = {}
      >>> for name, shape in shapes.items():
      ...     weights[f"h.0.attn.{name}"] = jnp.ones(shape)
      ...     weights[f"h.1.attn.{name}"] = jnp.ones(shape)
      >>> attention = convert.from_hf(config, weights, layer=1)
      >>> attention(jnp.ones((1, 5, 8))).shape  # causal, as in the model
      (1, 5, 8)
    """
    read = read_config(config)
    check_described(read)
    family = read.family
    prefix = layer_prefix(state_dict, layer, prefix, family)
    is_decoder = "decoder" in prefix or (
        "encoder" not in prefix and bool(read.values.get("is_decoder"))
    )
    read = of_part(read, is_decoder)
    arguments = describe_layer(read, layer, max_length)
    is_causal = is_decoder if family.causal is None else family.causal
    if isinstance(is_causal, str):
        is_causal = read.values[is_causal]
    arguments["attention_fn"] = _attention_fn(read, arguments, is_causal)
    if family.relative_bias:
        key = table_key(state_dict, prefix)
        if key is None:
            raise ValueError(
                f"state_dict must contain the {T5_TABLE} of the first layer, which all "
                f"layers add to their scores, but has none for {prefix!r}; pass the "
                "weights of the whole model."
            )
        arguments["score_mod"] = RelativeBias(
            arguments["num_heads"],
            num_buckets=len(state_dict[key]),
            max_distance=read.values["relative_attention_max_distance"],
            bidirectional=not is_causal,
            param_dtype=param_dtype,
        )
    kind: Any = MultiHeadAttention
    if family.latent:
        kind = MultiHeadLatentAttention
    module = kind(
        **arguments,
        dtype=dtype,
        param_dtype=param_dtype,
        decode=decode,
        implementation=implementation,
        head_axis=head_axis,
        kernel_init=nnx.initializers.zeros_init(),
        rngs=nnx.Rngs(0),
    )
    load_torch(module, state_dict, prefix)
    return module


def _attention_fn(config: Config, arguments: Mapping[str, Any], is_causal: bool) -> Any:
    """Returns the `attention_fn` of a layer, a partial that sets what each call needs:
    causality, ALiBi, the temperature of Llama 4.
    """
    if not config.values.get("is_causal", True):
        raise ValueError(
            "config must not set is_causal=False; use describe for a layer that "
            "attends to all keys."
        )
    if not is_causal and arguments.get("local_window_size") is not None:
        raise ValueError(
            "config must use causal attention if it sets a window, because sliding "
            "windows must be one-sided."
        )
    presets: dict[str, Any] = {}
    if is_causal:
        presets["is_causal"] = True
    if "attention_fn" in arguments:
        presets |= arguments["attention_fn"].keywords
    if presets:
        return attention_with(**presets)
    return attention_fn
