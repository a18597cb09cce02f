"""Flax's language model lm1b: https://github.com/google/flax, `examples/lm1b`."""

from typing import Any

import jax
from compare import Model, Port, of_linen, run


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    config = module.TransformerConfig(
        vocab_size=50,
        output_vocab_size=50,
        emb_dim=16,
        num_heads=2,
        num_layers=2,
        qkv_dim=16,
        mlp_dim=32,
        max_len=16,
        deterministic=True,
    )
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 1, 50)
    return of_linen(module.TransformerLM(config), tokens)


if __name__ == "__main__":
    run(Port("examples/lm1b", "models", build))
