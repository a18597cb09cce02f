"""Flax's tagger of words: https://github.com/google/flax, `examples/nlp_seq`."""

from typing import Any

import jax
from compare import Model, Port, of_linen, run


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    config = module.TransformerConfig(
        vocab_size=50,
        output_vocab_size=7,
        emb_dim=16,
        num_heads=2,
        num_layers=2,
        qkv_dim=16,
        mlp_dim=32,
        max_len=16,
    )
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 1, 50)
    return of_linen(module.Transformer(config), inputs=tokens, train=False)


if __name__ == "__main__":
    run(Port("examples/nlp_seq", "models", build))
