"""Google's ViT: https://github.com/google-research/vision_transformer."""

import types
from typing import Any

import jax
from compare import Model, Port, of_linen, run


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    model = module.VisionTransformer(
        num_classes=0,  # the kernel of a head would begin with zeros
        patches=types.SimpleNamespace(size=(4, 4)),
        transformer={"num_layers": 2, "mlp_dim": 32, "num_heads": 2},
        hidden_size=16,
        representation_size=16,
    )
    images = jax.random.normal(jax.random.key(1), (3, 16, 16, 3))
    return of_linen(model, images, train=False)


if __name__ == "__main__":
    run(Port("", "vit_jax.models_vit", build))
