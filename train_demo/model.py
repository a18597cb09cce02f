"""A causal transformer over characters: embedding, blocks, head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Int

from train_demo import mesh
from train_demo.attention import make_attention, window_of
from train_demo.settings import Layout, Settings

DEFAULT = Layout()
Params = dict[Any, Any]
Structure = nnx.GraphDef["Transformer"]
# At first each block is the identity, and all characters are equally likely.
ZEROS = nnx.initializers.zeros_init()


class TokenShift(nnx.Module):
    """Adds earlier embeddings to each embedding: `x[t] + sum_i scale[i] * x[t - i]`.

    Each input of the first layer then holds several characters, so its attention need
    not find neighbors. While the model decodes, the last embeddings are cached.
    """

    def __init__(self, distance: int, features: int):
        self.scale = nnx.Param(jnp.zeros((distance, features)))
        self.last: nnx.Cache | None = nnx.data(None)

    def set_view(
        self, decode: bool | None = None, batch_size: int | None = None
    ) -> None:
        """Makes an empty cache for decoding, or drops it; `nnx.view` calls this."""
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
        """Adds to each embedding those before it in its document.

        Row b has `lengths[b]` characters, then padding.
        """
        scale = self.scale[...].astype(x.dtype)
        distance = len(scale)
        length = x.shape[1]
        before = jnp.zeros((len(x), *scale.shape), x.dtype)
        if self.last is not None:
            before = self.last[...].astype(x.dtype)
        x = jnp.concatenate([before, x], axis=1)
        if self.last is not None:
            if lengths is None:
                lengths = jnp.full(len(x), length)
            rows = lengths[:, None] + jnp.arange(distance)[None]
            last = jnp.take_along_axis(x, rows[..., None], axis=1)
            self.last[...] = last.astype(jnp.float32)
        total = x[:, distance:]
        for i in range(1, distance + 1):
            shifted = scale[i - 1][None, None] * x[:, distance - i :][:, :length]
            if segment_ids is not None:
                same = segment_ids == jnp.roll(segment_ids, i, axis=1)
                shifted = jnp.where(same[..., None], shifted, 0)
            total = total + shifted
        return total


class MLP(nnx.Module):
    """`narrow(relu(widen(x))^2)`.

    Squared ReLU learns as well as GELU and costs no exponential (arXiv 2109.08668).
    """

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        features = settings.features
        dtype = computed_in(settings)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        self.widen = linear(features, 4 * features)
        self.narrow = linear(4 * features, features, kernel_init=ZEROS)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.narrow(jnp.square(jax.nn.relu(self.widen(x))))


class Block(nnx.Module):
    """A pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, settings: Settings, layout: Layout, *, rngs: nnx.Rngs):
        dtype = computed_in(settings)
        norm = functools.partial(nnx.RMSNorm, settings.features, dtype=dtype, rngs=rngs)
        self.qkv_sharding: P | None = None
        if layout.context == 1:
            # Each device then computes the attention of its own heads.
            self.qkv_sharding = P(mesh.BATCH, None, "model", None)
        self.attention_norm = norm()
        self.attention = make_attention(settings, layout, dtype=dtype, rngs=rngs)
        self.network_norm = norm()
        self.mlp = MLP(settings, rngs=rngs)
        self.dropout = nnx.Dropout(settings.dropout_rate)

    def __call__(
        self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None, **options: Any
    ) -> Float[Array, "B T D"]:
        """Runs the block; `options` are those of the attention."""
        fixed = rngs is None
        if mesh.current() is not None:
            options["qkv_sharding"] = self.qkv_sharding
        heard = self.attention(
            self.attention_norm(x),
            is_causal=True,
            deterministic=fixed,
            rngs=rngs,
            **options,
        )
        x = x + self.dropout(heard, deterministic=fixed, rngs=rngs)
        learned = self.mlp(self.network_norm(x))
        return x + self.dropout(learned, deterministic=fixed, rngs=rngs)


class Transformer(nnx.Module):
    """Predicts, at each position, the character that follows.

    Positions are rotary, and texts may be longer than in training: each layer attends
    only to the last characters, unless its kind of attention has no window.

    Args:
      vocabulary_size: V, the distinct characters.
      settings: The kind of attention, layers, heads, features, dropout rate, and the
        context length.
      layout: How the model is computed; its `context` devices split the attention along
        the sequence.
      rngs: The stream `params` draws the weights.

    Attributes:
      reach: The number of last characters that a prediction depends on, through all
        layers; None means all characters.
    """

    def __init__(
        self,
        vocabulary_size: int,
        settings: Settings,
        layout: Layout,
        *,
        rngs: nnx.Rngs,
    ):
        features = settings.features
        dtype = computed_in(settings)
        self.embedding = nnx.Embed(
            vocabulary_size,
            features,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )
        self.shift = nnx.data(None)
        if settings.token_shift:
            self.shift = TokenShift(settings.token_shift, features)
        blocks = [Block(settings, layout, rngs=rngs) for _ in range(settings.layers)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            features,
            vocabulary_size,
            use_bias=False,
            dtype=dtype,
            kernel_init=ZEROS,
            rngs=rngs,
        )
        self.reach: int | None = None
        window = window_of(settings)
        if window is not None:
            self.reach = settings.layers * (window - 1) + 1 + settings.token_shift

    def __call__(
        self,
        characters: Int[Array, "B T"],
        *,
        lengths: Int[Array, " B"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        rngs: nnx.Rngs | None = None,
        remat: bool = False,
        **sow: bool,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the next character, float32.

        Args:
          characters: Numbers of the characters in the vocabulary.
          lengths: Number of characters of each row before its padding; None means all.
          segment_ids: Number of the document of each character; documents do not attend
            to each other. None means one document.
          rngs: Random streams with `dropout`; None means no dropout.
          remat: Recompute each block for its gradient instead of storing its
            intermediate results.
          sow: `sow_weights=True` or `sow_max_score=True` sows every block's
            `attention_weights` or `attention_max_score`, for `nnx.capture`.
        """
        x = mesh.gathered(self.embedding)(characters)
        if self.shift is not None:
            x = self.shift(x, lengths, segment_ids)
        options = {"lengths": lengths, "segment_ids": segment_ids, **sow}
        if remat:
            x = self._rematerialized(x, rngs, options)
        else:
            for block in self.blocks:
                x = mesh.gathered(block)(x, rngs=rngs, **options)
        return mesh.gathered(self.head)(self.norm(x)).astype(jnp.float32)

    def _rematerialized(
        self, x: Float[Array, "B T D"], rngs: nnx.Rngs | None, options: dict[str, Any]
    ) -> Float[Array, "B T D"]:
        """Runs the blocks, and stores only their inputs: gradients recompute them.

        They run in a loop, because otherwise XLA may recompute all blocks before it
        needs them.
        """
        split = [nnx.split(block) for block in self.blocks]
        structure, _ = split[0]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *[state for _, state in split])
        stream, draws = nnx.split(rngs)

        def step(carry: tuple[Array, Any], state: nnx.State) -> tuple[Any, None]:
            x, draws = carry
            rngs = nnx.merge(stream, draws)
            block = mesh.gathered(nnx.merge(structure, state))
            x = block(x, rngs=rngs, **options)
            return (x, nnx.state(rngs)), None

        step = jax.checkpoint(step, prevent_cse=False)
        (x, _), _ = jax.lax.scan(step, (x, draws), stacked)
        return x


def computed_in(settings: Settings) -> Any:
    """Returns the argument `dtype` of layers; None means that of the parameters."""
    name = chosen_dtype(settings)
    if name == "float32":
        return None
    return jnp.dtype(name)


def chosen_dtype(settings: Settings) -> str:
    """Returns the name of the dtype of layers; "auto" depends on the device."""
    if settings.dtype != "auto":
        return settings.dtype
    if jax.default_backend() == "cpu":
        return "float32"
    return "bfloat16"


@functools.lru_cache(maxsize=4)  # tracing a model takes a few tenths of a second
def blueprint(
    vocabulary_size: int, settings: Settings, layout: Layout = DEFAULT
) -> tuple[Structure, Params]:
    """Returns the model's structure, for `nnx.merge`, and its parameters' shapes."""

    def make() -> Transformer:
        rngs = nnx.Rngs(settings.seed)
        return Transformer(vocabulary_size, settings, layout, rngs=rngs)

    structure, shapes = nnx.split(nnx.eval_shape(make), nnx.Param)
    return structure, nnx.to_pure_dict(shapes)


def initial_params(vocabulary_size: int, settings: Settings) -> Params:
    """Draws the initial parameters, a nested dict, from the settings' seed."""
    rngs = nnx.Rngs(settings.seed)
    model = Transformer(vocabulary_size, settings, DEFAULT, rngs=rngs)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
