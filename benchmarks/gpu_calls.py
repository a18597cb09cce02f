"""Calls that Flax programs make on a GPU, and the implementation that computes each:
for `compiled.py --table masks` and `tests/test_gpu_calls.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha import CausalMask, FunctionMask, LengthMask, LocalMask

B, T, N, H = 2, 2048, 16, 64
BF16 = jnp.bfloat16
BOOL = jnp.bool_
INT = jnp.int32


class Call(NamedTuple):
    """A call of `dot_product_attention`.

    Attributes:
      chosen: The implementation that `implementation=None` means on an H100.
      before: The one that computed the call until only causal masks, windows to the
        left, lengths and whole biases were fused.
      arguments: Shapes and dtypes of arrays, and other values.
      learned: The names of those arrays that get gradients.
    """

    chosen: str
    before: str
    arguments: dict[str, Any]
    learned: tuple[str, ...] = ()
    query: tuple[int, ...] = (B, T, N, H)
    key: tuple[int, ...] = (B, T, N, H)
    value: tuple[int, ...] | None = None  # None: like the key
    dtype: Any = BF16

    @property
    def inputs(self) -> list[jax.ShapeDtypeStruct]:
        shapes = (self.query, self.key, self.value or self.key)
        return [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]

    @property
    def arrays(self) -> dict[str, Any]:
        return {k: x for k, x in self.arguments.items() if _is_array(x)}

    @property
    def static(self) -> dict[str, Any]:
        return {k: x for k, x in self.arguments.items() if not _is_array(x)}


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def array(*shape: int, dtype: Any = BOOL) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def segments(batch: int = B, length: int = T) -> dict[str, Any]:
    ids = array(batch, length, dtype=INT)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def of(length: int, batch: int = B, heads: int = N, size: int = H) -> dict[str, Any]:
    """The sizes of a call with other lengths."""
    shape = (batch, length, heads, size)
    return {"query": shape, "key": shape}


CAUSAL = {"is_causal": True}
PREFIX = CausalMask() | LengthMask(128)
STRIDED = FunctionMask(lambda b, h, q, k: (q - k) % 64 == 0)
CALLS = {
    # Fused before, too.
    "causal": Call("cudnn", "cudnn", CAUSAL),
    "ViT: no mask, 1024 patches": Call("cudnn", "cudnn", {}, **of(1024)),
    "Llama: causal, 4 key heads": Call("cudnn", "cudnn", CAUSAL, key=(B, T, 4, H)),
    "Mistral: causal, window of 1024": Call(
        "cudnn", "cudnn", CAUSAL | {"local_window_size": (1023, 0)}
    ),
    "lengths": Call("cudnn", "cudnn", {"key_value_seq_lengths": array(B, dtype=INT)}),
    "T5: relative bias [1, N, T, S]": Call(
        "cudnn", "cudnn", {"bias": array(1, N, T, T, dtype=BF16)}, ("bias",)
    ),
    "Gemma: causal, head size 256": Call("cudnn", "cudnn", CAUSAL, **of(T, size=256)),
    "causal, float16": Call("cudnn", "cudnn", CAUSAL, dtype=jnp.float16),
    # Fused now.
    "BERT: padding mask [B, 1, 1, S]": Call(
        "cudnn", "xla", {"mask": array(B, 1, 1, T)}
    ),
    "padding mask [B, 1, T, S] of make_attention_mask": Call(
        "cudnn", "xla", {"mask": array(B, 1, T, T)}
    ),
    "causal, padding mask [B, 1, 1, S]": Call(
        "cudnn", "xla", CAUSAL | {"mask": array(B, 1, 1, T)}
    ),
    "combine_masks(causal, padding) [B, 1, T, S]": Call(
        "cudnn", "xla", {"mask": array(B, 1, T, T)}
    ),
    "encoder-decoder: padding of 1024 keys": Call(
        "cudnn", "xla", {"mask": array(B, 1, 1, 1024)}, key=(B, 1024, N, H)
    ),
    "packed documents": Call("cudnn", "xla", segments()),
    "packed documents, causal": Call("cudnn", "xla", CAUSAL | segments()),
    "packed documents, causal, 16384 tokens": Call(
        "cudnn", "blockwise", CAUSAL | segments(1, 16384), **of(16384, 1)
    ),
    "prefix-LM": Call("cudnn", "xla", {"mask": PREFIX}),
    "Longformer: window of both sides": Call(
        "cudnn", "xla", {"local_window_size": (256, 256)}
    ),
    "strided mask_mod": Call("cudnn", "xla", {"mask": STRIDED}),
    "not the nearest keys": Call("cudnn", "xla", {"mask": ~LocalMask(8, 8)}),
    "gpt-oss: sinks, causal, window of 128": Call(
        "cudnn",
        "xla",
        CAUSAL | {"local_window_size": (127, 0), "sinks": array(N, dtype=BF16)},
        ("sinks",),
        key=(B, T, 2, H),
    ),
    "sinks, padding mask": Call(
        "cudnn",
        "xla",
        {"mask": array(B, 1, 1, T), "sinks": array(N, dtype=BF16)},
        ("sinks",),
    ),
    "causal, log-sum-exp": Call("cudnn", "xla", CAUSAL | {"return_residual": True}),
    "T5: relative bias and padding mask": Call(
        "cudnn",
        "xla",
        {"bias": array(1, N, T, T, dtype=BF16), "mask": array(B, 1, 1, T)},
        ("bias",),
    ),
    "ALiBi as a bias of heads [1, N, 1, S], causal": Call(
        "cudnn", "xla", CAUSAL | {"bias": array(1, N, 1, T, dtype=BF16)}
    ),
    "additive padding [B, 1, 1, S]": Call(
        "cudnn", "xla", {"bias": array(B, 1, 1, T, dtype=BF16)}
    ),
    "prompt in pieces: causal, an offset for each": Call(
        "cudnn", "xla", CAUSAL | {"query_offset": array(B, dtype=INT)}
    ),
    # Plain JAX: short, or not supported.
    "BERT at 512 tokens: padding mask": Call(
        "xla", "xla", {"mask": array(16, 1, 1, 512)}, **of(512, 16, 12)
    ),
    "Swin: windows of 49 tokens, relative bias": Call(
        "xla",
        "xla",
        {"bias": array(1, 4, 49, 49, dtype=BF16), "mask": array(256, 1, 49, 49)},
        ("bias",),
        **of(49, 256, 4, 32),
    ),
    "BERT training: dropout of weights": Call(
        "xla",
        "xla",
        {
            "mask": array(B, 1, 1, T),
            "dropout_rate": 0.1,
            "dropout_rng": array(dtype=jax.random.key(0).dtype),
        },
    ),
    "Gemma 2: soft cap": Call("xla", "xla", CAUSAL | {"logits_soft_cap": 50.0}),
    "causal, float32": Call("xla", "xla", CAUSAL, dtype=jnp.float32),
    "padding mask, float16": Call(
        "xla", "xla", {"mask": array(B, 1, 1, T)}, dtype=jnp.float16
    ),
    "bias in float32": Call(
        "xla", "xla", {"bias": array(1, N, T, T, dtype=jnp.float32)}
    ),
    "DeepSeek: value size 128, key size 192": Call(
        "xla",
        "xla",
        CAUSAL,
        query=(B, T, N, 192),
        key=(B, T, N, 192),
        value=(B, T, N, 128),
    ),
    "one query": Call("xla", "xla", {"mask": array(B, 1, 1, T)}, query=(B, 1, N, H)),
}
