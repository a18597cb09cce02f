"""Measures how much time each part of a small training step takes.

    python benchmarks/step.py [--layers 4] [--heads 4] [--features 128] [--batch-size
    12] [--context-length 64]
                              [--seconds S | --rounds N] [--out benchmarks/results/NAME]

One update of the demo's transformer on the demo's text: draws the batch, then forward,
backward, clipping and AdamW. The sizes are those of nanoGPT on a CPU, in float32
without dropout. Every update is given the state that the one before it returned, so
that donation is real. What jax runs differs from the whole update in one thing each:

  Flax's attention        flax.nnx.dot_product_attention as attention_fn
  blockwise attention     implementation="blockwise"
  fused qkv               one matrix product for query, key and value; the three
                          kernels are concatenated in the step
  no attention core       query + key + value instead: what all but the core costs
  no qk-norm              without the LayerNorm of each head's query and key
  no optimizer            loss and gradients; the batch is drawn, too
  forward only            the loss; the batch is drawn, too
  no donation             the new state in new arrays
  PyTorch                 eager; a model of the same size with fused qkv, learned
                          positions and LayerNorms, as nanoGPT has it,
                          scaled_dot_product_attention, and a fused AdamW whose
                          learning rate is constant

Columns:
  spread      distance between the quartiles, in % of the median
  of whole    milliseconds as a share of the whole update's
  x torch     milliseconds as a multiple of PyTorch's whole update
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from flax import nnx

import flax_mha
from train_demo import data
from train_demo.model import Block, Params, Transformer, blueprint, initial_params
from train_demo.settings import Settings
from train_demo.update import State, make_optimizer, make_update

COLUMNS = {
    "implementation": "one training step",
    "ms": "ms",
    "spread": "spread",
    "of_whole": "of whole",
    "to_torch": "x torch",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "note": "",
}
SIZES = ("layers", "heads", "features", "batch_size", "context_length")
WHOLE = "the whole update"
TORCH = "PyTorch, the whole update"


class Cell(NamedTuple):
    """What all peers have to compute."""

    settings: Settings
    characters: np.ndarray  # int32 [S], the training part
    vocabulary_size: int

    @property
    def tokens(self) -> int:
        """Of one update."""
        return self.settings.batch_size * self.settings.context_length

    @property
    def parameters(self) -> int:
        """How many numbers the whole model learns."""
        _, params = blueprint(self.vocabulary_size, self.settings)
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def __str__(self) -> str:
        """The sizes."""
        sizes = self.settings
        return (
            f"{sizes.layers} layers, {sizes.heads} heads, {sizes.features} features, "
            f"batch of {sizes.batch_size} x {sizes.context_length} tokens"
        )


def read(settings: Settings) -> Cell:
    """The demo's text, as the demo reads it."""
    text = data.load(None, settings.context_length)
    return Cell(settings, text.training, len(text.vocabulary))


class FusedAttention(nnx.Module):
    """The demo's attention, of the same parameters, with one matrix product for query,
    key and value.
    """

    def __init__(self, attention: nnx.MultiHeadAttention):
        for name in ("query", "key", "value", "query_ln", "key_ln", "out"):
            setattr(self, name, getattr(attention, name))

    def __call__(self, x: jax.Array, *, is_causal: bool, **_: Any) -> jax.Array:
        layers = (self.query, self.key, self.value)
        kernel = jnp.concatenate([layer.kernel[...] for layer in layers], axis=1)
        qkv = jnp.einsum("btd,dnh->btnh", x, kernel)
        query, key, value = jnp.split(qkv, 3, axis=2)
        output = flax_mha.dot_product_attention(
            self.query_ln(query), self.key_ln(key), value, is_causal=is_causal
        )
        return self.out(output)


def by_flax(block: Block) -> None:
    block.attention.attention_fn = nnx.dot_product_attention
    # Which no window of the training is longer than.
    block.attention.local_window_size = None


def blockwise(block: Block) -> None:
    block.attention.implementation = "blockwise"


def fused(block: Block) -> None:
    block.attention = FusedAttention(block.attention)


def without_core(block: Block) -> None:
    block.attention.attention_fn = lambda query, key, value, **_: query + key + value


def without_norm(block: Block) -> None:
    block.attention.query_ln = nnx.data(None)
    block.attention.key_ln = nnx.data(None)


def model(
    cell: Cell, change: Callable[[Block], None] | None = None
) -> tuple[nnx.GraphDef[Transformer], Params]:
    """Structure and first parameters of the demo's transformer after `change` of every
    block.
    """
    structure, _ = blueprint(cell.vocabulary_size, cell.settings)
    params = initial_params(cell.vocabulary_size, cell.settings)
    transformer = nnx.merge(structure, params)
    if change is not None:
        for block in transformer.blocks:
            change(block)
    structure, params = nnx.split(transformer, nnx.Param)
    return structure, nnx.to_pure_dict(params)


def training(
    cell: Cell,
    memory: float,
    change: Callable[[Block], None] | None = None,
    donate: bool = True,
) -> measure.Ready:
    """One update after the other."""
    structure, params = model(cell, change)
    donated = (0,) if donate else ()
    update = jax.jit(make_update(structure, cell.settings), donate_argnums=donated)
    state = State(params, make_optimizer(cell.settings).init(params))
    characters = jnp.asarray(cell.characters)
    program, costs = measure.program(update, state, 1, characters, memory=memory)
    steps = itertools.count(1)

    # Each update gets the state that the last one returned: the one before is donated.
    def call() -> jax.Array:
        nonlocal state
        state, loss = program(state, next(steps), characters)
        return loss

    return measure.Ready(call, jax.block_until_ready, **costs)


def loss_alone(cell: Cell, memory: float, gradients: bool) -> measure.Ready:
    """What an update computes first, always of the same batch."""
    structure, params = model(cell)
    settings = cell.settings

    def loss(params: Params, step: jax.Array, characters: jax.Array) -> jax.Array:
        # Drawn as in the demo's update.
        key = jax.random.fold_in(jax.random.key(settings.seed), step)
        last = len(characters) - settings.context_length
        starts = jax.random.randint(key, (settings.batch_size, 1), 0, last)
        windows = characters[starts + jnp.arange(settings.context_length + 1)]
        logits = nnx.merge(structure, params)(windows[:, :-1])
        targets = windows[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean()

    f = jax.value_and_grad(loss) if gradients else loss
    return measure.compiled(f, params, 1, jnp.asarray(cell.characters), memory=memory)


def torch_twin(cell: Cell) -> Any:
    """The same model as a torch.nn.Module, on the CPU."""
    import torch
    from torch import nn
    from torch.nn import functional

    settings = cell.settings
    features = settings.features
    heads = settings.heads
    head_dim = settings.features // settings.heads
    linear = functools.partial(nn.Linear, bias=False)
    norm = functools.partial(nn.RMSNorm, features, eps=1e-6)

    class TorchBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = norm()
            self.network_norm = norm()
            # Fused, as in nanoGPT.
            self.qkv = linear(features, 3 * features)
            self.out = linear(features, features)
            self.query_ln = nn.LayerNorm(head_dim, eps=1e-6, bias=False)
            self.key_ln = nn.LayerNorm(head_dim, eps=1e-6, bias=False)
            self.widen = linear(features, 4 * features)
            self.narrow = linear(4 * features, features)

        def forward(self, x):
            qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, heads, head_dim))
            query, key, value = qkv.unbind(2)  # [B, T, N, H]
            # PyTorch's attention takes [B, N, T, H].
            query = self.query_ln(query).transpose(1, 2)
            key = self.key_ln(key).transpose(1, 2)
            value = value.transpose(1, 2)
            heard = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )
            x = x + self.out(heard.transpose(1, 2).flatten(2))
            hidden = functional.relu(self.widen(self.network_norm(x))).square()
            return x + self.narrow(hidden)

    class TorchTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(cell.vocabulary_size, features)
            self.position = nn.Embedding(settings.context_length, features)
            self.blocks = nn.Sequential(*(TorchBlock() for _ in range(settings.layers)))
            self.norm = norm()
            self.head = linear(features, cell.vocabulary_size)

        def forward(self, windows):
            x = self.embedding(windows[:, :-1]) + self.position.weight
            logits = self.head(self.norm(self.blocks(x)))
            targets = windows[:, 1:]
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(settings.seed)
    return TorchTransformer()


def by_torch(cell: Cell) -> measure.Ready:
    torch, device = measure.torch_here()
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # as jax's default on a GPU
    settings = cell.settings
    twin = torch_twin(cell).to(device)
    parameters = list(twin.parameters())
    count = sum(array.numel() for array in parameters)
    # Learned positions and LayerNorms have a few numbers more. Models of very different
    # sizes would not do the same work.
    if not 1 <= count / cell.parameters < 1.02:
        raise ValueError(f"{count:,} parameters, not about {cell.parameters:,}")
    matrices = [array for array in parameters if array.ndim > 1]
    vectors = [array for array in parameters if array.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, settings.learning_rate, betas=(0.9, 0.99), fused=True
    )
    characters = torch.from_numpy(cell.characters).long().to(device)
    offsets = torch.arange(settings.context_length + 1, device=device)
    last = len(characters) - settings.context_length

    def call() -> object:
        starts = torch.randint(last, (settings.batch_size, 1), device=device)
        windows = characters[starts + offsets]
        optimizer.zero_grad(set_to_none=True)
        loss = twin(windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    return measure.Ready(call, measure.torch_wait)


def peers(cell: Cell, memory: float) -> measure.Peers:
    def changed(change: Callable[[Block], None]) -> Callable[[], measure.Ready]:
        return functools.partial(training, cell, memory, change)

    return {
        WHOLE: functools.partial(training, cell, memory),
        "with Flax's attention": changed(by_flax),
        "with blockwise attention": changed(blockwise),
        "with fused qkv": changed(fused),
        "no attention core": changed(without_core),
        "no qk-norm": changed(without_norm),
        "no optimizer": functools.partial(loss_alone, cell, memory, gradients=True),
        "forward only": functools.partial(loss_alone, cell, memory, gradients=False),
        "no donation": functools.partial(training, cell, memory, donate=False),
        TORCH: functools.partial(by_torch, cell),
    }


def plot(rows: list[measure.Row], cell: Cell, options) -> None:
    """Milliseconds of every peer."""
    rows = [row | {"panel": "", "model": str(cell)} for row in rows]
    figure, panels = measure.grid(rows, "panel", "panel", ("ms; lower is better", ""))
    for axes, own in panels:
        measure.bars(axes, own, "implementation", "ms", "model")
    figure.suptitle(f"One training step ({measure.about()['device']})")
    measure.save(figure, options.out)


def main() -> None:
    parser = measure.arguments(__doc__)
    standard = Settings(layers=4)
    for name in SIZES:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(standard, name))
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in SIZES}
    cell = read(Settings(**sizes))
    with measure.Report(f"One training step: {cell}", COLUMNS, options) as report:
        for _ in report.each([str(cell)]):
            results = measure.compare(peers(cell, options.memory), options, report.say)
            measure.ratios(results, WHOLE, "of_whole")
            measure.ratios(results, TORCH, "to_torch")
            for result in (results[WHOLE], results[TORCH]):
                if "ms" in result:
                    result["tokens_per_s"] = 1000 * cell.tokens / result["ms"]
            report.add(sizes | {"parameters": cell.parameters}, results)
    report.console.print(f"{cell.parameters:,} parameters")
    for row in report.rows:
        if "tokens_per_s" in row:
            report.console.print(
                f"{row['tokens_per_s']:,.0f} tokens/s: {row['implementation']}"
            )
    plot(report.rows, cell, options)


if __name__ == "__main__":
    main()
