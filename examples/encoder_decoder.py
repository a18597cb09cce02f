"""Trains an encoder and a decoder in `flax.linen` to sort numbers, with padding and
cross-attention.

    pip install -e .
    python examples/encoder_decoder.py

Sequences of different lengths are padded to one array. `lengths` says how many tokens
of each sequence are not padding, so that padding changes no result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jaxtyping import Array, Float, Int, Key

from flax_mha.linen import MultiHeadDotProductAttention

VOCABULARY_SIZE = 32
MAX_LENGTH = 12
# The token before the first number of a target and after its last; also the padding.
END = 0


class Batch(NamedTuple):
    """Sequences of numbers, and what the model should make of them."""

    source: Int[Array, "B S"]  # 4 to MAX_LENGTH different numbers
    target: Int[Array, "B T"]  # END, the numbers sorted, END
    lengths: Int[Array, " B"]  # how many numbers there are


def make_batch(key: Key[Array, ""], batch_size: int) -> Batch:
    """Draws a batch of random numbers."""
    length_key, source_key = jax.random.split(key)
    lengths = jax.random.randint(length_key, (batch_size,), 4, MAX_LENGTH + 1)
    numbers = jnp.tile(jnp.arange(1, VOCABULARY_SIZE), (batch_size, 1))
    numbers = jax.random.permutation(source_key, numbers, axis=1, independent=True)
    numbers = numbers[:, :MAX_LENGTH]
    is_number = jnp.arange(MAX_LENGTH) < lengths[:, None]
    source = jnp.where(is_number, numbers, END)
    # Padding that is larger than all numbers comes last.
    in_order = jnp.sort(jnp.where(is_number, numbers, VOCABULARY_SIZE), axis=1)
    target = jnp.where(is_number, in_order, END)
    target = jnp.pad(target, ((0, 0), (1, 1)), constant_values=END)
    return Batch(source, target, lengths)


class MLP(nn.Module):
    """Two layers, applied to each position alone."""

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        features = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * features)(x))
        return nn.Dense(features)(hidden)


class EncoderDecoder(nn.Module):
    """Computes logits for each next token of the target, given the tokens before it and
    the source.
    """

    features: int = 64
    num_heads: int = 4

    @nn.compact
    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B T V"]:
        embed = nn.Embed(VOCABULARY_SIZE, self.features)

        encoded = embed(source)
        attention = MultiHeadDotProductAttention(
            num_heads=self.num_heads, name="encoder_attention"
        )
        encoded += attention(nn.LayerNorm()(encoded), lengths=lengths)
        encoded += MLP()(nn.LayerNorm()(encoded))
        encoded = nn.LayerNorm()(encoded)

        x = embed(target)
        attention = MultiHeadDotProductAttention(
            num_heads=self.num_heads, name="decoder_attention"
        )
        x += attention(nn.LayerNorm()(x), is_causal=True)
        attention = MultiHeadDotProductAttention(
            num_heads=self.num_heads, name="cross_attention"
        )
        # The lengths of the queries (all count) and of the keys.
        x += attention(nn.LayerNorm()(x), encoded, lengths=(None, lengths))
        x += MLP()(nn.LayerNorm()(x))
        return nn.Dense(VOCABULARY_SIZE)(nn.LayerNorm()(x))


def is_target(lengths: Int[Array, " B"]) -> Array:
    """Returns which tokens the model should predict, [B, MAX_LENGTH + 1]: the numbers,
    and the END after them.
    """
    return jnp.arange(MAX_LENGTH + 1) <= lengths[:, None]


@jax.jit
def train_step(
    state: TrainState, key: Key[Array, ""]
) -> tuple[TrainState, Float[Array, ""]]:
    """Updates the model with one batch, and returns the loss before the update."""
    source, target, lengths = make_batch(key, batch_size=32)

    def loss_fn(params: dict) -> Float[Array, ""]:
        logits = state.apply_fn({"params": params}, source, target[:, :-1], lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:])
        return losses.mean(where=is_target(lengths))

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


@jax.jit
def share_sorted(state: TrainState, key: Key[Array, ""]) -> Float[Array, ""]:
    """Returns the share of 500 new sequences in which each token is the most probable
    one after those before it.
    """
    source, target, lengths = make_batch(key, batch_size=500)
    variables = {"params": state.params}
    logits = state.apply_fn(variables, source, target[:, :-1], lengths)
    is_right = logits.argmax(-1) == target[:, 1:]
    # Padding is not predicted.
    return (is_right | ~is_target(lengths)).all(axis=1).mean()


def train(steps: int = 200) -> tuple[TrainState, list[float]]:
    """Trains a model, and returns it with the loss of each step, in nats per token."""
    model = EncoderDecoder()
    key = jax.random.key(0)
    # Parameters do not depend on the size of the batch.
    variables = jax.jit(model.init)(key, *make_batch(key, batch_size=1))
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps))
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optimizer
    )
    losses = []
    for step in range(steps):
        state, loss = train_step(state, jax.random.key(step))
        losses.append(float(loss))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return state, losses


if __name__ == "__main__":
    state, _ = train()
    # A key that no step of the training used.
    share = share_sorted(state, jax.random.key(10_000))
    print(f"sorted without a mistake: {share:.1%} of new sequences")
