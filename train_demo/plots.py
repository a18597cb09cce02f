"""Draws the pictures of a run: its losses, and the attention of its heads."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from train_demo import metrics
from train_demo.errors import printable
from train_demo.model import Transformer
from train_demo.report import PICTURES
from train_demo.run_folder import Config, write_atomically

LABELS = 12  # along an axis of the attention
STEPS = 8  # that are named in a comparison
UNKNOWN = "�"  # a character that cannot be shown
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}


def draw(out: Path, model: Transformer, config: Config) -> None:
    """Writes `loss.png` and `attention.png` into a run's folder."""
    weights = attention_weights(model, config)
    figures = [
        loss_figure(metrics.read(out)),
        attention_figure(weights, pieces(config)),
    ]
    for name, figure in zip(PICTURES, figures, strict=True):
        save(figure, out / name)


def save(figure: Figure, path: Path, dpi: int = 110) -> None:
    """Writes a figure as a PNG file."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Matplotlib draws boxes for characters that its font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(picture, format="png", dpi=dpi)
    write_atomically(path, picture.getvalue())


def loss_figure(measured: list[dict[str, Any]]) -> Figure:
    """Draws the training loss, its running mean and the validation loss over steps."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots()
    steps, losses = _points(measured, "loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, label="training, each batch")
    width = 1 + len(losses) // 50
    if len(losses):
        means = np.convolve(losses, np.full(width, 1 / width), "valid")
        middles = steps[width // 2 :][: len(means)]
        axes.plot(middles, means, color="tab:blue", label="training, running mean")
    steps, losses = _points(measured, "val_loss")
    label = "validation"
    if len(losses):
        label = f"validation: {losses[-1]:.3f} at step {steps[-1]:.0f}"
    axes.plot(steps, losses, "o-", color="tab:orange", label=label)
    if len(losses):
        # The high losses of the first steps are cut off, so that the end is readable.
        axes.set_ylim(axes.dataLim.y0, 2 * losses.min())
    axes.set(xlabel="step", ylabel="loss (nats per character)")
    axes.set_title("How well the model predicts the next character")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def comparison_figure(measured: Mapping[str, list[dict[str, Any]]]) -> Figure:
    """Draws the validation losses of several runs over steps."""
    # Small, with large letters: this picture is also read on phones.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    all_steps: set[float] = set()
    for name, lines in measured.items():
        steps, losses = _points(lines, "val_loss")
        label = name
        if len(losses):
            label = f"{name}: {losses[-1]:.3f}"
        axes.plot(steps, losses, "o-", label=label)
        all_steps.update(steps.tolist())
    # Ticks at steps with a measured loss, the last one among them.
    backwards = sorted(all_steps, reverse=True)
    axes.set_xticks(backwards[:: 1 + len(backwards) // STEPS])
    axes.set(xlabel="step", ylabel="validation loss (nats per character)")
    axes.set_title("One model with several kinds of attention")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _points(measured: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(metric["step"], metric[name]) for metric in measured if name in metric]
    steps, losses = np.array(found).reshape(-1, 2).T
    return steps, losses


def pieces(config: Config) -> list[str]:
    """Returns the characters of the run's sentence, all of them made visible."""
    shown = []
    for character in config.sentence:
        piece = VISIBLE.get(character, character)
        if printable(piece) != piece:
            piece = UNKNOWN  # an escape would be wider than its cell
        shown.append(piece)
    return shown


def attention_weights(model: Transformer, config: Config) -> np.ndarray:
    """Returns the attention weights in `config.sentence`, `[layers, heads, T, T]`."""
    characters = jnp.asarray(config.vocabulary.encode(config.sentence))[None]
    structure, params = nnx.split(model)

    @jax.jit
    def sown(params: nnx.State, characters: Int[Array, "1 T"]) -> nnx.State:
        capture = nnx.capture(nnx.merge(structure, params), nnx.Intermediate)
        _, intermediates = capture(characters, sow_weights=True)
        return intermediates

    blocks = nnx.to_pure_dict(sown(params, characters))["blocks"]
    weights = []
    for layer in sorted(blocks):
        (of_batch,) = blocks[layer]["attention"]["attention_weights"]
        weights.append(of_batch[0])
    return np.stack(weights).astype(np.float32)


def attention_figure(weights: np.ndarray, characters: Sequence[str]) -> Figure:
    """Draws the weights of each layer and head.

    The character of a row attends to the characters of columns.
    """
    layers, heads, *_ = weights.shape
    size = (4.4 * heads + 1, 4.4 * layers + 2)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    hidden = np.triu(np.ones(weights.shape[-2:], bool), k=1)
    # Each label is a piece of the sentence, so that all of it can be read.
    length = -(-len(characters) // LABELS)
    starts = range(0, len(characters), length)
    parts = [characters[start : start + length] for start in starts]
    labels = ["".join(part) for part in parts]
    middles = [
        start + (len(part) - 1) / 2 for start, part in zip(starts, parts, strict=True)
    ]
    borders = [start - 0.5 for start in starts[1:]]
    font = {"fontsize": 14, "family": "monospace", "parse_math": False}
    rotation = 0
    if length > 1:
        rotation = 90
    for (layer, head), axes in np.ndenumerate(grid):
        visible = np.ma.array(weights[layer, head], mask=hidden)
        # On a square root scale, because most weights are small.
        shown = axes.imshow(visible, cmap="magma_r", norm=PowerNorm(0.5, 0, 1))
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=13)
        axes.set_xticks(middles, labels, rotation=rotation, **font)
        axes.set_yticks(middles, labels, **font)
        # Lines between the pieces.
        axes.set_xticks(borders, minor=True)
        axes.set_yticks(borders, minor=True)
        axes.grid(which="minor", color="0.75", linewidth=0.5)
        axes.tick_params(which="both", length=0, pad=2)
        axes.set_facecolor("0.93")
    sentence = "".join(characters)
    title = f"What each head attends to in\n“{sentence}”"
    figure.suptitle(title, fontsize=18, parse_math=False)
    legend = "character attended to\n(␣ is a space, ↵ the end of a line, ⇥ a tab)"
    figure.supxlabel(legend, fontsize=15)
    figure.supylabel("attending character (it predicts the next one)", fontsize=15)
    bar = figure.colorbar(shown, ax=grid, shrink=0.6, pad=0.01)
    bar.set_label("attention weight (each row sums to 1)", fontsize=14)
    bar.ax.tick_params(labelsize=14)
    return figure
