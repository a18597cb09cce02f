"""A causal transformer over characters: embeddings, blocks of attention and of a small network, a head."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

import flax_mha
from flax_mha import MultiHeadAttention
from flax_mha.rope import RoPE
from train_demo import mesh
from train_demo.layout import Layout
from train_demo.settings import Settings

Params = dict[Any, Any]


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + network(norm(x))`: a pre-norm transformer block."""

    def __init__(self, settings: Settings, layout: Layout, *, rngs: nnx.Rngs):
        features, dtype = settings.features, computed_in(settings)
        self.attention_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.attention = MultiHeadAttention(
            settings.heads,
            features,
            dtype=dtype,
            dropout_rate=settings.dropout_rate,
            use_bias=False,
            normalize_qk=True,
            rope=RoPE(),
            # Windows of training are no longer than this. In longer texts the window slides, and the cache is a ring.
            local_window_size=(settings.context_length - 1, 0),
            decode=False,
            keep_rngs=False,
            rngs=rngs,
            **_attention_over(layout),
        )
        # Told how the heads are split, each device computes the attention of its own as if it were alone.
        self.qkv_sharding = P(batch_axes(layout), None, "model", None) if layout.context == 1 else None
        self.network_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.widen = nnx.Linear(features, 4 * features, use_bias=False, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(4 * features, features, use_bias=False, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(settings.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        lengths: Int[Array, " B"] | None,
        segment_ids: Int[Array, "B T"] | None,
        rngs: nnx.Rngs | None,
        sow_weights: bool,
    ) -> Float[Array, "B T D"]:
        """Adds to each position what it reads from the positions before it, then what it makes of that."""
        fixed = rngs is None
        heard = self.attention(
            self.attention_norm(x),
            is_causal=True,
            lengths=lengths,
            segment_ids=segment_ids,
            deterministic=fixed,
            rngs=rngs,
            sow_weights=sow_weights,
            qkv_sharding=None if mesh.current() is None else self.qkv_sharding,
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
        layout: how it is computed, of which the attention over several devices' characters heeds something.
        rngs: the stream `params` draws the weights.

    Attributes:
        reach: the number of last characters on which a prediction depends, through all layers together.
    """

    def __init__(self, vocabulary_size: int, settings: Settings, layout: Layout | None = None, *, rngs: nnx.Rngs):
        features, dtype = settings.features, computed_in(settings)
        self.embedding = nnx.Embed(vocabulary_size, features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(settings, layout or Layout(), rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary_size, use_bias=False, dtype=dtype, rngs=rngs)
        self.reach = settings.layers * (settings.context_length - 1) + 1

    def __call__(
        self,
        characters: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        sow_weights: bool = False,
        remat: bool = False,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the next character, float32.

        Args:
            characters: their numbers in the vocabulary.
            lengths: the characters of each row before its padding; None means all.
            segment_ids: the document of each character, which sees no other one; None means a single one.
            rngs: the stream `dropout`; None means no dropout.
            sow_weights: sow every block's `attention_weights`, `[B, N, T, T]`, for `nnx.capture`.
            remat: for the gradient, compute each block again instead of keeping what it computed.
        """
        x = mesh.gathered(self.embedding)(characters)
        run = functools.partial(Block.__call__, lengths=lengths, segment_ids=segment_ids, sow_weights=sow_weights)
        if remat:
            x = _rematerialized(run, self.blocks, x, rngs)
        else:
            for block in self.blocks:
                x = run(mesh.gathered(block), x, rngs=rngs)
        return mesh.gathered(self.head)(self.norm(x)).astype(jnp.float32)


def _rematerialized(
    run: Callable[..., Array], blocks: Sequence[Block], x: Float[Array, "B T D"], rngs: nnx.Rngs | None
) -> Float[Array, "B T D"]:
    """Runs the blocks one after the other, and keeps only what goes in; they are computed again for their gradients.

    In a loop, because without one XLA may compute all of them again at once, when it needs only the last.
    """
    structures, states = zip(*map(nnx.split, blocks), strict=True)
    stream, draws = nnx.split(rngs)

    def step(carry: tuple[Array, Any], state: nnx.State) -> tuple[tuple[Array, Any], None]:
        x, draws = carry
        rngs = nnx.merge(stream, draws)
        x = run(mesh.gathered(nnx.merge(structures[0], state)), x, rngs=rngs)
        return (x, nnx.state(rngs)), None

    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
    (x, _), _ = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), (x, draws), stacked)
    return x


def computed_in(settings: Settings) -> Any:
    """The dtype that layers compute in; None, for float32, is that of the parameters."""
    return None if settings.dtype == "float32" else jnp.dtype(settings.dtype)


def blueprint(
    vocabulary_size: int, settings: Settings, layout: Layout | None = None
) -> tuple[nnx.GraphDef[Transformer], Params]:
    """Returns the model's structure and its parameters' shapes, without computing anything.

    Returns:
        The structure, which `nnx.merge` joins with parameters to a model, and a nested dict of `jax.ShapeDtypeStruct`.
    """
    structure, shapes = nnx.split(nnx.eval_shape(lambda: _transformer(vocabulary_size, settings, layout)), nnx.Param)
    return structure, nnx.to_pure_dict(shapes)


def initial_params(vocabulary_size: int, settings: Settings, shardings: Params | None = None) -> Params:
    """Draws the first parameters, a nested dict of arrays, from the settings' seed; they lie as `shardings` says."""

    def draw() -> Params:
        return nnx.to_pure_dict(nnx.state(_transformer(vocabulary_size, settings), nnx.Param))

    return jax.jit(draw, out_shardings=shardings)()


def _transformer(vocabulary_size: int, settings: Settings, layout: Layout | None = None) -> Transformer:
    return Transformer(vocabulary_size, settings, layout, rngs=nnx.Rngs(settings.seed))


def _attention_over(layout: Layout) -> dict[str, Any]:
    """What the attention has to be told where several devices share the characters of a window."""
    if layout.context == 1:
        return {}
    attention_fn = flax_mha.context_parallel("context", batch_axes=batch_axes(layout), head_axis="model")
    return {"attention_fn": attention_fn}


def batch_axes(layout: Layout) -> tuple[str, ...] | None:
    """The mesh axes that split the batch as a model sees it: while it accumulates, `jax.vmap` has them."""
    return mesh.BATCH if layout.accumulate == 1 else None
