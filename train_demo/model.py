"""A causal transformer over characters: embeddings, blocks of attention and MLP, and a head."""

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
from train_demo.settings import Layout, Settings

Params = dict[Any, Any]
# At first each block is the identity, and all characters are equally likely.
ZEROS = nnx.initializers.zeros_init()


class TokenShift(nnx.Module):
    """Adds the `distance` embeddings before each embedding, scaled: `x[t] + sum_i scale[i] * x[t - i]`.

    The first layer then sees several characters at once, and its attention need not find neighbors. While the model
    decodes, the last embeddings are cached.
    """

    def __init__(self, distance: int, features: int):
        self.scale = nnx.Param(jnp.zeros((distance, features)))
        self.last: nnx.Cache | None = nnx.data(None)

    def set_view(self, decode: bool | None = None, batch_size: int | None = None) -> None:
        """Makes an empty cache of the last embeddings for decoding, or drops the cache; `nnx.view` calls this."""
        if decode is False:
            self.last = nnx.data(None)
        if decode and batch_size is not None:
            self.last = nnx.Cache(jnp.zeros((batch_size, *self.scale.shape)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Adds to each embedding those before it in its document; row b has `lengths[b]` characters, then padding."""
        distance, length = len(self.scale), x.shape[1]
        before = jnp.zeros((x.shape[0], *self.scale.shape)) if self.last is None else self.last[...]
        x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
        if self.last is not None:
            ends = jnp.full(len(x), length) if lengths is None else lengths
            rows = ends[:, None] + jnp.arange(distance)[None]
            self.last[...] = jnp.take_along_axis(x, rows[..., None], axis=1).astype(jnp.float32)
        scale = self.scale[...].astype(x.dtype)[:, None, None]
        shifted = [scale[i - 1] * x[:, distance - i : distance - i + length] for i in range(1, distance + 1)]
        if segment_ids is not None:
            same = [segment_ids == jnp.roll(segment_ids, i, axis=1) for i in range(1, distance + 1)]
            shifted = [jnp.where(where[..., None], each, 0) for where, each in zip(same, shifted, strict=True)]
        return functools.reduce(jnp.add, shifted, x[:, distance:])


class MLP(nnx.Module):
    """`narrow(relu(widen(x))^2)`: squared ReLU learns as well as GELU and costs no exponential (arXiv 2109.08668)."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        features = settings.features
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=computed_in(settings), rngs=rngs)
        self.widen = linear(features, 4 * features)
        self.narrow = linear(4 * features, features, kernel_init=ZEROS)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.narrow(jnp.square(jax.nn.relu(self.widen(x))))


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + network(norm(x))`: a pre-norm transformer block."""

    def __init__(self, settings: Settings, layout: Layout, *, rngs: nnx.Rngs):
        features, dtype = settings.features, computed_in(settings)
        over_devices = flax_mha.context_parallel("context", batch_axes=mesh.BATCH, head_axis="model")
        self.attention_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.attention = MultiHeadAttention(
            settings.heads,
            features,
            dtype=dtype,
            dropout_rate=settings.dropout_rate,
            use_bias=False,
            out_kernel_init=ZEROS,
            normalize_qk="rms_norm",
            rope=RoPE(),
            # As long as the windows of training; in longer texts it slides, and the cache is a ring.
            local_window_size=(settings.context_length - 1, 0),
            decode=False,
            keep_rngs=False,
            rngs=rngs,
            attention_fn=flax_mha.attention_fn if layout.context == 1 else over_devices,
        )
        # With this sharding each device computes the attention of its own heads, without communication.
        self.qkv_sharding = P(mesh.BATCH, None, "model", None) if layout.context == 1 else None
        self.network_norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = MLP(settings, rngs=rngs)
        self.dropout = nnx.Dropout(settings.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        lengths: Int[Array, " B"] | None,
        segment_ids: Int[Array, "B T"] | None,
        rngs: nnx.Rngs | None,
        sow_weights: bool,
        sow_max_score: bool,
    ) -> Float[Array, "B T D"]:
        fixed = rngs is None
        heard = self.attention(
            self.attention_norm(x),
            is_causal=True,
            lengths=lengths,
            segment_ids=segment_ids,
            deterministic=fixed,
            rngs=rngs,
            sow_weights=sow_weights,
            sow_max_score=sow_max_score,
            qkv_sharding=None if mesh.current() is None else self.qkv_sharding,
        )
        x = x + self.dropout(heard, deterministic=fixed, rngs=rngs)
        return x + self.dropout(self.mlp(self.network_norm(x)), deterministic=fixed, rngs=rngs)


class Transformer(nnx.Module):
    """Predicts, at each position, the character that follows.

    Positions are rotary, and each layer sees the last `context_length` of them: texts may be longer than in training.

    Args:
      vocabulary_size: V, the distinct characters.
      settings: Layers, heads, features, dropout rate, and the context length.
      layout: How the model is computed; its `context` devices split the attention along the sequence.
      rngs: The stream `params` draws the weights.

    Attributes:
      reach: The number of last characters that a prediction depends on, through all layers.
    """

    def __init__(self, vocabulary_size: int, settings: Settings, layout: Layout | None = None, *, rngs: nnx.Rngs):
        features, dtype = settings.features, computed_in(settings)
        draws = nnx.initializers.normal(1.0)
        self.embedding = nnx.Embed(vocabulary_size, features, dtype=dtype, embedding_init=draws, rngs=rngs)
        self.shift = TokenShift(settings.token_shift, features) if settings.token_shift else None
        self.blocks = nnx.List([Block(settings, layout or Layout(), rngs=rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, vocabulary_size, use_bias=False, dtype=dtype, kernel_init=ZEROS, rngs=rngs)
        self.reach = settings.layers * (settings.context_length - 1) + 1 + settings.token_shift

    def __call__(
        self,
        characters: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        sow_weights: bool = False,
        sow_max_score: bool = False,
        remat: bool = False,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the next character, float32.

        Args:
          characters: Numbers of the characters in the vocabulary.
          lengths: Number of characters of each row before its padding; None means all.
          segment_ids: Number of the document of each character; documents do not see each other. None means one
            document.
          rngs: Random streams with `dropout`; None means no dropout.
          sow_weights: Sow every block's `attention_weights`, `[B, N, T, T]`, for `nnx.capture`.
          sow_max_score: Sow every block's `attention_max_score`, `[B, N]`, for `nnx.capture`.
          remat: Recompute each block for its gradient instead of storing its intermediate results.
        """
        x = mesh.gathered(self.embedding)(characters)
        if self.shift is not None:
            x = self.shift(x, lengths, segment_ids)
        run = functools.partial(Block.__call__, lengths=lengths, segment_ids=segment_ids, sow_weights=sow_weights)
        run = functools.partial(run, sow_max_score=sow_max_score)
        if remat:
            x = _rematerialized(run, self.blocks, x, rngs)
        else:
            for block in self.blocks:
                x = run(mesh.gathered(block), x, rngs=rngs)
        return mesh.gathered(self.head)(self.norm(x)).astype(jnp.float32)


def _rematerialized(
    run: Callable[..., Array], blocks: Sequence[Block], x: Float[Array, "B T D"], rngs: nnx.Rngs | None
) -> Float[Array, "B T D"]:
    """Runs the blocks one after the other, and stores only their inputs; gradients recompute the blocks.

    They run in a loop, because otherwise XLA may recompute all blocks before it needs them.
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
    """Returns the argument `dtype` of layers: what they compute in, or None for float32, the parameters' dtype."""
    name = chosen_dtype(settings)
    return None if name == "float32" else jnp.dtype(name)


def chosen_dtype(settings: Settings) -> str:
    """Returns the name of the dtype that layers compute in; "auto" depends on the device."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def blueprint(
    vocabulary_size: int, settings: Settings, layout: Layout | None = None
) -> tuple[nnx.GraphDef[Transformer], Params]:
    """Returns the model's structure, for `nnx.merge`, and its parameters as a nested dict of `jax.ShapeDtypeStruct`."""
    _, structure, shapes = _drawing(vocabulary_size, settings, layout or Layout())
    return structure, shapes


def initial_params(vocabulary_size: int, settings: Settings, shardings: Params | None = None) -> Params:
    """Draws the initial parameters, a nested dict of arrays, from the settings' seed, with these shardings."""
    draw, *_ = _drawing(vocabulary_size, settings, Layout())
    return jax.jit(draw, out_shardings=shardings)()


@functools.lru_cache(maxsize=4)
def _drawing(
    vocabulary_size: int, settings: Settings, layout: Layout
) -> tuple[Callable[[], Params], nnx.GraphDef[Transformer], Params]:
    """Returns a function that draws the initial parameters, the model's structure, and the parameters' shapes.

    Cached, because tracing a model takes a few tenths of a second; `jax.jit(draw)` uses the same trace.
    """
    structures = []

    def draw() -> Params:
        model = Transformer(vocabulary_size, settings, layout, rngs=nnx.Rngs(settings.seed))
        structure, params = nnx.split(model, nnx.Param)
        structures.append(structure)
        return nnx.to_pure_dict(params)

    shapes = jax.eval_shape(draw)
    return draw, structures[0], shapes
