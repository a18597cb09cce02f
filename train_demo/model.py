"""A causal transformer over characters: embeddings, blocks of attention and of a small network, a head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_mha import MultiHeadAttention
from flax_mha.rope import RoPE
from train_demo.settings import Settings

Params = dict[Any, Any]


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + network(norm(x))`: a pre-norm transformer block."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        features = settings.features
        self.attention_norm = nnx.RMSNorm(features, rngs=rngs)
        self.attention = MultiHeadAttention(
            settings.heads,
            features,
            dropout_rate=settings.dropout_rate,
            use_bias=False,
            normalize_qk=True,
            rope=RoPE(),
            # Windows of training are no longer than this. In longer texts the window slides, and the cache is a ring.
            local_window_size=(settings.context_length - 1, 0),
            decode=False,
            keep_rngs=False,
            rngs=rngs,
        )
        self.network_norm = nnx.RMSNorm(features, rngs=rngs)
        self.widen = nnx.Linear(features, 4 * features, use_bias=False, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(settings.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        lengths: Int[Array, " B"] | None,
        rngs: nnx.Rngs | None,
        sow_weights: bool,
    ) -> Float[Array, "B T D"]:
        """Adds to each position what it reads from the positions before it, then what it makes of that."""
        fixed = rngs is None
        heard = self.attention(
            self.attention_norm(x),
            is_causal=True,
            lengths=lengths,
            deterministic=fixed,
            rngs=rngs,
            sow_weights=sow_weights,
        )
        x = x + self.dropout(heard, deterministic=fixed, rngs=rngs)
        # Squared ReLU learns as well as GELU here and costs no exponential (Primer, arXiv 2109.08668).
        hidden = jnp.square(jax.nn.relu(self.widen(self.network_norm(x))))
        return x + self.dropout(self.narrow(hidden), deterministic=fixed, rngs=rngs)


class Transformer(nnx.Module):
    """Predicts, at each position, the character that follows.

    Positions are rotary, and each layer sees the last `context_length` of them: texts may be longer than in training.

    Args:
        vocabulary_size: V, the distinct characters.
        settings: layers, heads, features, dropout rate, and the context length.
        rngs: the stream `params` draws the weights.

    Attributes:
        reach: the number of last characters on which a prediction depends, through all layers together.
    """

    def __init__(self, vocabulary_size: int, settings: Settings, *, rngs: nnx.Rngs):
        features = settings.features
        self.embedding = nnx.Embed(vocabulary_size, features, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(features, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary_size, use_bias=False, rngs=rngs)
        self.reach = settings.layers * (settings.context_length - 1) + 1

    def __call__(
        self,
        characters: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        rngs: nnx.Rngs | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the next character.

        Args:
            characters: their numbers in the vocabulary.
            lengths: the characters of each row before its padding; None means all.
            rngs: the stream `dropout`; None means no dropout.
            sow_weights: sow every block's `attention_weights`, `[B, N, T, T]`, for `nnx.capture`.
        """
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x, lengths=lengths, rngs=rngs, sow_weights=sow_weights)
        return self.head(self.norm(x))


def blueprint(vocabulary_size: int, settings: Settings) -> tuple[nnx.GraphDef[Transformer], Params]:
    """Returns the model's structure and its parameters' shapes, without computing anything.

    Returns:
        The structure, which `nnx.merge` joins with parameters to a model, and a nested dict of `jax.ShapeDtypeStruct`.
    """
    structure, shapes = nnx.split(nnx.eval_shape(lambda: _transformer(vocabulary_size, settings)), nnx.Param)
    return structure, nnx.to_pure_dict(shapes)


def initial_params(vocabulary_size: int, settings: Settings) -> Params:
    """Draws the first parameters, a nested dict of arrays, from the settings' seed."""
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(_transformer(vocabulary_size, settings), nnx.Param)))()


def _transformer(vocabulary_size: int, settings: Settings) -> Transformer:
    return Transformer(vocabulary_size, settings, rngs=nnx.Rngs(settings.seed))
