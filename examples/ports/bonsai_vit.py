"""The ViT of JAX's model collection: https://github.com/jax-ml/bonsai."""

from typing import Any

import jax
from compare import Model, Port, of_nnx, run
from flax import nnx


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    config = module.ModelConfig(
        image_size=(16, 16),
        patch_size=(4, 4),
        num_channels=3,
        hidden_dim=16,
        attn_dropout_prob=0.0,
        dropout_prob=0.0,
        num_heads=2,
        mlp_dim=32,
        eps=1e-12,
        num_layers=2,
        num_labels=7,
    )
    model = module.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(1), (3, 16, 16, 3))
    return of_nnx(model, images, rngs=None)


if __name__ == "__main__":
    run(Port("", "bonsai.models.vit.modeling", build))
