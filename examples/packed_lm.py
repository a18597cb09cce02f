"""Trains a language model on documents packed into rows; documents do not attend to
each other.

    pip install -e .
    python examples/packed_lm.py

Rows full of whole documents waste less computation than one padded document per row.
`segment_ids` keep documents apart in the attention, and `positions` restart in each of
them. The loss omits the tokens that do not continue a document.
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
        with_room = [
            row for row in range(rows) if filled[row] + len(document) <= length
        ]
        if not with_room:
            continue
        row = with_room[0]
        place = slice(filled[row], filled[row] + len(document))
        counts[row] += 1
        tokens[row, place] = document
        segment_ids[row, place] = counts[row]
        positions[row, place] = np.arange(len(document))
        filled[row] = place.stop
    return Packed(
        tokens=jnp.asarray(tokens),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
    )


def make_batches(rows: int = 8, length: int = 64) -> Iterator[Packed]:
    """Packs documents of 5 to 30 tokens that count in steps, such as 3, 5, 7, ...: the
    model has to find the step in each document.
    """
    rng = np.random.default_rng(0)
    # Of start, step and size.
    lowest = [0, 1, 5]
    above = [VOCABULARY_SIZE, VOCABULARY_SIZE, 31]
    while True:
        documents = []
        # More documents than fit, so that most rows are full.
        for start, step, size in rng.integers(lowest, above, (4 * rows, 3)):
            document = (start + step * np.arange(size)) % VOCABULARY_SIZE
            documents.append(document)
        yield pack(documents, rows, length)


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
        blocks = [Block(features, num_heads, rngs=rngs) for _ in range(num_layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, VOCABULARY_SIZE, rngs=rngs)

    def __call__(self, batch: Packed) -> Float[Array, "B T V"]:
        """Returns the logits of the token that follows each token."""
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
    # A document's last token is followed by the next document, or by padding.
    same_document = (target_ids == batch.segment_ids[:, :-1]) & (target_ids > 0)

    def loss_fn(model: LanguageModel) -> Float[Array, ""]:
        logits = model(batch)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
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
        loss = train_step(model, optimizer, batch)
        losses.append(float(loss))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return model, losses


if __name__ == "__main__":
    train()
