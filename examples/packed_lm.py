"""Trains a language model on documents packed into rows; documents do not attend to
each other.

    pip install -e .
    python examples/packed_lm.py

Rows full of whole documents waste less computation than one padded document per row.
`segment_ids` keep documents apart in the attention, `positions` restart in each of
them, and the loss leaves out what does not continue a document.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_mha import MultiHeadAttention
from flax_mha.rope import RoPE

VOCABULARY_SIZE = 16


class Packed(NamedTuple):
    """Rows of documents one after the other."""

    tokens: Int[Array, "B T"]
    # 1, 2, ... count the documents of a row; 0 is padding.
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # counts from 0 in each document


def pack(documents: Sequence[Int[np.ndarray, " L"]], rows: int, length: int) -> Packed:
    """Puts each document into the first row with room for it; leaves out those that fit
    nowhere.
    """
    tokens, segment_ids, positions = np.zeros((3, rows, length), np.int32)
    filled = [0] * rows
    counts = [0] * rows
    for document in documents:
        row = next(
            (row for row in range(rows) if filled[row] + len(document) <= length), None
        )
        if row is None:
            continue
        place = slice(filled[row], filled[row] + len(document))
        counts[row] += 1
        tokens[row, place] = document
        segment_ids[row, place] = counts[row]
        positions[row, place] = np.arange(len(document))
        filled[row] = place.stop
    return Packed(*map(jnp.asarray, (tokens, segment_ids, positions)))


def make_batches(rows: int = 8, length: int = 64) -> Iterator[Packed]:
    """Documents of 5 to 30 tokens that count in steps, such as 3, 5, 7, ...: the step
    has to be found in each anew.
    """
    rng = np.random.default_rng(0)
    while True:
        drawn = rng.integers(
            [0, 1, 5], [VOCABULARY_SIZE, VOCABULARY_SIZE, 31], (4 * rows, 3)
        )
        yield pack(
            [
                (start + step * np.arange(size)) % VOCABULARY_SIZE
                for start, step, size in drawn
            ],
            rows,
            length,
        )


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, features: int, num_heads: int, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            num_heads, features, rope=RoPE(), decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(features, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(features, 4 * features, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * features, features, rngs=rngs),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        normed = self.attention_norm(x)
        x = x + self.attention(
            normed, is_causal=True, segment_ids=segment_ids, positions=positions
        )
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nnx.Module):
    """A causal transformer over packed documents."""

    def __init__(
        self,
        features: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        *,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(VOCABULARY_SIZE, features, rngs=rngs)
        self.blocks = nnx.List(
            [Block(features, num_heads, rngs=rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, VOCABULARY_SIZE, rngs=rngs)

    def __call__(self, batch: Packed) -> Float[Array, "B T V"]:
        """Logits of the token that follows each token."""
        x = self.embed(batch.tokens)
        for block in self.blocks:
            x = block(x, batch.segment_ids, batch.positions)
        return self.head(self.norm(x))


@nnx.jit
def train_step(
    model: LanguageModel, optimizer: nnx.Optimizer, batch: Packed
) -> Float[Array, ""]:
    """Updates the model with one batch, and returns the loss before the update."""
    targets = batch.tokens[:, 1:]
    target_ids = batch.segment_ids[:, 1:]
    same_document = (target_ids == batch.segment_ids[:, :-1]) & (target_ids > 0)

    def loss_fn(model: LanguageModel) -> Float[Array, ""]:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch)[:, :-1], targets
        )
        return losses.mean(where=same_document)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(steps: int = 200) -> tuple[LanguageModel, list[float]]:
    """Trains a model, and returns it with the loss of each step, in nats per token."""
    model = LanguageModel(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    losses = []
    for step, batch in zip(range(steps), make_batches(), strict=False):
        losses.append(float(train_step(model, optimizer, batch)))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return model, losses


if __name__ == "__main__":
    train()
