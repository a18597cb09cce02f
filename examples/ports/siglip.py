"""SigLIP of a robot's model: https://github.com/Physical-Intelligence/openpi."""

from typing import Any

import jax
from compare import Model, Port, of_linen, run


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    model = module.Module(
        num_classes=7,
        width=16,
        depth=2,
        mlp_dim=32,
        num_heads=2,
        patch_size=(8, 8),
        pool_type="gap",
        head_zeroinit=False,
    )
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    variables, apply = of_linen(model, images, train=False)
    return Model(variables, lambda variables: apply(variables)[0])


if __name__ == "__main__":
    run(Port("src", "openpi.models.siglip", build))
