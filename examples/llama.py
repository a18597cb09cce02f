"""Trains a Llama-style decoder from scratch on its own source code, and generates text
with a KV cache.

    pip install -e .
    python examples/llama.py

The model has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Training
computes all tokens of a text together. For generation, one call writes the prompts, of
any lengths, to the cache. Then each new token attends to what the cache holds.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from flax_mha import MultiHeadAttention
from flax_mha.rope import RoPE

# Each ASCII character is a token.
VOCABULARY_SIZE = 128
CONTEXT_LENGTH = 128


class Block(nnx.Module):
    """Attention and a gated network, each after a norm and around a residual
    connection.
    """

    def __init__(
        self, features: int, num_heads: int, num_kv_heads: int, *, rngs: nnx.Rngs
    ):
        self.attention_norm = nnx.RMSNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            num_heads,
            features,
            num_kv_heads=num_kv_heads,
            rope=RoPE(),
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(features, rngs=rngs)
        self.gate = nnx.Linear(features, 3 * features, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(features, 3 * features, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * features, features, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, is_causal=True, lengths=lengths)
        normed = self.mlp_norm(x)
        gated = nnx.silu(self.gate(normed)) * self.up(normed)
        return x + self.down(gated)


class Llama(nnx.Module):
    """A causal decoder: maps tokens to logits of the token that follows each of them.

    `lengths` are the numbers of tokens of texts that are padded on the right.
    """

    def __init__(
        self,
        features: int = 64,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        num_layers: int = 2,
        *,
        rngs: nnx.Rngs,
    ):
        self.embed = nnx.Embed(VOCABULARY_SIZE, features, rngs=rngs)
        blocks = []
        for _ in range(num_layers):
            blocks.append(Block(features, num_heads, num_kv_heads, rngs=rngs))
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, VOCABULARY_SIZE, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T V"]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(self.norm(x))


@nnx.jit(static_argnames="num_tokens")
def generate(
    model: Llama, prompts: Int[Array, "B T"], lengths: Int[Array, " B"], num_tokens: int
) -> Int[Array, "B L"]:
    """Continues each prompt, the first `lengths` tokens of its row, with the most
    probable tokens.
    """
    batch_size, longest = prompts.shape
    # The same weights, with a cache in which each row has a length of its own.
    model = nnx.view(
        model,
        decode=True,
        batch_size=batch_size,
        max_length=longest + num_tokens,
        per_row=True,
    )
    logits = model(prompts, lengths)
    # The first new token follows the last token of its own prompt.
    first = logits[jnp.arange(batch_size), lengths - 1].argmax(-1)
    # The loop changes only the cache. It gets the parameters from outside.
    graph, cache, *params = nnx.split(model, nnx.Cache, ...)

    def step(
        carry: tuple[nnx.State, Array], _: None
    ) -> tuple[tuple[nnx.State, Array], Array]:
        cache, token = carry
        model = nnx.merge(graph, cache, *params)
        following = model(token[:, None])[:, 0].argmax(-1)
        return (nnx.state(model, nnx.Cache), following), token

    _, tokens = jax.lax.scan(step, (cache, first), length=num_tokens)
    return tokens.T


@nnx.jit
def train_step(
    model: Llama, optimizer: nnx.Optimizer, text: Int[Array, " S"], key: Key[Array, ""]
) -> Float[Array, ""]:
    """Updates the model with windows from random places of the text, and returns the
    loss before the update.
    """
    starts = jax.random.randint(key, (8, 1), 0, len(text) - CONTEXT_LENGTH)
    windows = text[starts + jnp.arange(CONTEXT_LENGTH + 1)]

    def loss_fn(model: Llama) -> Float[Array, ""]:
        logits = model(windows[:, :-1])
        targets = windows[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def encode(text: str) -> Int[Array, " T"]:
    """Returns a token for each character."""
    tokens = np.frombuffer(text.encode("ascii"), np.uint8)
    return jnp.asarray(tokens, jnp.int32)


def encode_prompts(texts: list[str]) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Returns the tokens of each text, padded on the right, and their numbers."""
    lengths = [len(text) for text in texts]
    padded = [text.ljust(max(lengths), "\0") for text in texts]
    prompts = jnp.stack([encode(text) for text in padded])
    return prompts, jnp.array(lengths)


def decode(tokens: Int[Array, " T"]) -> str:
    """Returns the characters of tokens."""
    return bytes(tokens.tolist()).decode("ascii")


def train(steps: int = 400) -> tuple[Llama, list[float]]:
    """Trains a model on this file, and returns it with the loss of each step, in nats
    per character.
    """
    text = encode(Path(__file__).read_text())
    model = Llama(rngs=nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    losses = []
    for step in range(steps):
        loss = train_step(model, optimizer, text, jax.random.key(step))
        losses.append(float(loss))
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}")
    return model, losses


if __name__ == "__main__":
    model, _ = train()
    texts = ["def train_step(", "class Block("]
    prompts, lengths = encode_prompts(texts)
    # Positions beyond those of training would be new to the model.
    num_tokens = CONTEXT_LENGTH - prompts.shape[1]
    written = generate(model, prompts, lengths, num_tokens)
    for text, tokens in zip(texts, written, strict=True):
        print(text + decode(tokens), end="\n\n")
