"""Trains a vision transformer to recognize the direction of stripes in noisy images.

    pip install -e .
    python examples/vit.py

The model cuts an image into patches. Each patch becomes a token, and all tokens attend
to each other, without a mask.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from flax_mha import MultiHeadAttention

IMAGE_SIZE = 32
PATCH_SIZE = 8
CLASSES = 4


def make_batch(
    key: Key[Array, ""], batch_size: int
) -> tuple[Float[Array, "B I I 1"], Int[Array, " B"]]:
    """Draws noisy images of stripes of random width; returns them with the directions
    of their stripes, one of four.
    """
    label_key, phase_key, width_key, noise_key = jax.random.split(key, 4)
    labels = jax.random.randint(label_key, (batch_size,), 0, CLASSES)
    angle = (jnp.pi * labels / CLASSES)[:, None, None]
    phase = jax.random.uniform(phase_key, (batch_size, 1, 1), maxval=2 * jnp.pi)
    # Radians per pixel.
    frequency = jax.random.uniform(
        width_key, (batch_size, 1, 1), minval=0.5, maxval=1.0
    )
    y, x = jnp.mgrid[:IMAGE_SIZE, :IMAGE_SIZE]
    # A wave that runs along the direction.
    distance = x * jnp.cos(angle) + y * jnp.sin(angle)
    stripes = jnp.sin(frequency * distance + phase)
    images = stripes + jax.random.normal(noise_key, stripes.shape)
    return images[..., None], labels


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, features: int, num_heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            num_heads, features, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(features, 4 * features, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * features, features, rngs=rngs),
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nnx.Module):
    """A vision transformer (Dosovitskiy et al., arXiv:2010.11929) that classifies the
    mean token.
    """

    def __init__(
        self,
        features: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        *,
        rngs: nnx.Rngs,
    ):
        patch = (PATCH_SIZE, PATCH_SIZE)
        num_patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
        # With strides as large as its kernel, a convolution projects each patch by
        # itself.
        self.embed = nnx.Conv(1, features, patch, strides=patch, rngs=rngs)
        drawn = jax.random.normal(rngs.params(), (1, num_patches, features))
        self.positions = nnx.Param(0.02 * drawn)
        blocks = [Block(features, num_heads, rngs=rngs) for _ in range(num_layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, CLASSES, rngs=rngs)

    def __call__(self, images: Float[Array, "B I I 1"]) -> Float[Array, "B classes"]:
        patches = self.embed(images)
        # From rows and columns of patches to a sequence.
        tokens = patches.reshape(len(images), -1, patches.shape[-1])
        x = tokens + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


@nnx.jit
def train_step(
    model: ViT, optimizer: nnx.Optimizer, key: Key[Array, ""]
) -> Float[Array, ""]:
    """Updates the model with one batch, and returns the loss before the update."""
    images, labels = make_batch(key, batch_size=32)

    def loss_fn(model: ViT) -> Float[Array, ""]:
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def accuracy(model: ViT, key: Key[Array, ""]) -> Float[Array, ""]:
    """Returns the share of 500 new images whose direction the model finds."""
    images, labels = make_batch(key, batch_size=500)
    return (model(images).argmax(-1) == labels).mean()


def train(steps: int = 100) -> tuple[ViT, list[float]]:
    """Trains a model, and returns it with the loss of each step, in nats per image."""
    model = ViT(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    # Shares its parameters with `model`, but drops weights of the attention.
    train_model = nnx.view(model, deterministic=False)
    losses = []
    for step in range(steps):
        loss = train_step(train_model, optimizer, jax.random.key(step))
        losses.append(float(loss))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return model, losses


if __name__ == "__main__":
    model, _ = train()
    eval_model = nnx.view(model, deterministic=True)
    # A key that no step of the training used.
    share = accuracy(eval_model, jax.random.key(10_000))
    print(f"accuracy on new images: {share:.1%}")
