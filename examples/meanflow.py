"""Draws circles from noise in one step with MeanFlow (Geng et al., arXiv:2505.13447).

    pip install -e .
    python examples/meanflow.py

A sample is 32 points around a circle of random place and size. The points must attend
to each other to agree on the circle. The loss contains a derivative of the model along
its inputs: `jax.jvp` through attention, inside a gradient.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from flax_mha import MultiHeadAttention

POINTS = 32
Points = Float[Array, "B P 2"]
Times = Float[Array, " B"]


def make_batch(key: Key[Array, ""], batch_size: int) -> Points:
    """Draws points around circles, at equal distances."""
    angle_key, center_key, radius_key = jax.random.split(key, 3)
    first = jax.random.uniform(angle_key, (batch_size, 1, 1), maxval=2 * jnp.pi)
    angle = first + jnp.linspace(0, 2 * jnp.pi, POINTS, endpoint=False)[:, None]
    center = jax.random.normal(center_key, (batch_size, 1, 2))
    radius = jax.random.uniform(radius_key, (batch_size, 1, 1), minval=0.5, maxval=1.5)
    directions = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
    return center + radius * directions


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, features: int, num_heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            num_heads, features, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        widen = nnx.Linear(features, 4 * features, rngs=rngs)
        narrow = nnx.Linear(4 * features, features, rngs=rngs)
        self.mlp = nnx.Sequential(widen, nnx.gelu, narrow)

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MeanVelocity(nnx.Module):
    """Predicts the mean velocity of points between two times, from their places at the
    later time.
    """

    def __init__(
        self,
        features: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        *,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Linear(2, features, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (POINTS, features)))
        self.embed_times = nnx.Linear(12, 3 * features, rngs=rngs)
        blocks = [Block(features, num_heads, rngs=rngs) for _ in range(num_layers)]
        self.blocks = nnx.List(blocks)
        # Before training, the velocity is 0.
        zeros = nnx.initializers.zeros_init()
        self.head = nnx.Linear(features, 2, kernel_init=zeros, rngs=rngs)

    def __call__(self, z: Points, start: Times, end: Times) -> Points:
        # Waves of three frequencies for the later time and for the time between both.
        times = jnp.stack([end, end - start], -1)
        angles = times[..., None] * jnp.asarray([1.0, 2.0, 4.0])
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        # The times shift and scale the features of all points alike.
        modulation = self.embed_times(waves.reshape(len(z), -1))
        shift, gain, head_gain = jnp.split(modulation[:, None], 3, axis=-1)
        x = self.embed(z) * (1 + gain) + self.positions[...] + shift
        for block in self.blocks:
            x = block(x)
        return self.head(x * (1 + head_gain))


def loss_fn(
    model: MeanVelocity, key: Key[Array, ""], batch_size: int = 64
) -> Float[Array, ""]:
    """Returns the weighted error of MeanFlow's identity,
    u = v - (end - start) du/d(end), along the path of the points.
    """
    data_key, noise_key, time_key, equal_key = jax.random.split(key, 4)
    x = make_batch(data_key, batch_size)
    noise = jax.random.normal(noise_key, (batch_size, POINTS, 2))
    times = jax.random.uniform(time_key, (2, batch_size))
    start, end = jnp.sort(times, axis=0)
    # In most samples both times are equal: there, u is the velocity itself.
    are_equal = jax.random.bernoulli(equal_key, 0.75, start.shape)
    start = jnp.where(are_equal, end, start)

    # Points move from the data (time 0) to the noise (1): z = (1 - t) x + t noise.
    velocity = noise - x
    along = end[:, None, None]
    z = (1 - along) * x + along * noise

    # The derivative along the path: z moves with v, and the end with time.
    tangents = (velocity, jnp.zeros_like(start), jnp.ones_like(end))
    u, derivative = jax.jvp(model, (z, start, end), tangents)
    target = velocity - (end - start)[:, None, None] * derivative
    # As in the paper, the target gets no gradient, and far targets weigh less.
    difference = u - jax.lax.stop_gradient(target)
    error = (difference**2).mean((1, 2))
    weight = 1 / jax.lax.stop_gradient(error + 1)
    return (weight * error).mean()


@nnx.jit
def train_step(
    model: MeanVelocity, optimizer: nnx.Optimizer, key: Key[Array, ""]
) -> Float[Array, ""]:
    """Updates the model with one batch, and returns the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_fn)(model, key)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def sample(model: MeanVelocity, key: Key[Array, ""]) -> Points:
    """Turns noise into 256 sets of points, in one step."""
    noise = jax.random.normal(key, (256, POINTS, 2))
    return noise - model(noise, jnp.zeros(256), jnp.ones(256))


def roundness_error(points: Points) -> Float[Array, ""]:
    """Returns the standard deviation of distances from the middle of a set of points,
    relative to their mean.
    """
    middle = points.mean(1, keepdims=True)
    distance = jnp.linalg.norm(points - middle, axis=-1)
    return (distance.std(1) / distance.mean(1)).mean()


def train(steps: int = 500) -> tuple[MeanVelocity, list[float]]:
    """Trains a model, and returns it with the loss of each step."""
    model = MeanVelocity(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    losses = []
    for step in range(steps):
        loss = train_step(model, optimizer, jax.random.key(step))
        losses.append(float(loss))
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return model, losses


if __name__ == "__main__":
    model, _ = train()
    key = jax.random.key(1)
    samples = sample(model, key)
    noise = jax.random.normal(key, samples.shape)
    print(f"roundness error of samples: {roundness_error(samples):.2f}")
    print(f"of noise: {roundness_error(noise):.2f}")
