"""A transformer of sets with masks: https://github.com/smsharma/eqnn-jax."""

from typing import Any

import jax
import jax.numpy as jnp
from compare import Model, Port, of_linen, run


def build(module: Any) -> Model:
    """Makes a tiny model of the repository."""
    model = module.Transformer(d_model=16, d_mlp=32, n_layers=2, n_heads=2, task="node")
    points = jax.random.normal(jax.random.key(1), (3, 10, 3))
    is_real = jnp.arange(10) < jnp.array([[10], [6], [3]])
    variables, apply = of_linen(model, points, is_real)
    # Padded points attend to nothing: Flax returns the mean of all values for them, and
    # flax_mha returns zeros.
    return Model(variables, lambda variables: apply(variables) * is_real[..., None])


if __name__ == "__main__":
    run(Port("", "models.transformer", build))
