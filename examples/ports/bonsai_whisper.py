"""Whisper's encoder of JAX's model collection: https://github.com/jax-ml/bonsai."""

import dataclasses
from typing import Any

import jax
from compare import Model, Port, of_nnx, run
from flax import nnx


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    config = dataclasses.replace(
        module.ModelConfig.whisper_tiny(),
        d_model=16,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        encoder_layers=2,
        max_source_positions=20,
        num_mel_bins=8,
    )
    model = module.WhisperEncoder(config, rngs=nnx.Rngs(0))
    spectrograms = jax.random.normal(jax.random.key(1), (2, 40, 8))
    return of_nnx(model, spectrograms)


if __name__ == "__main__":
    run(Port("", "bonsai.models.whisper.modeling", build))
