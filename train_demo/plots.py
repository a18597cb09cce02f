"""Draws the two pictures of a run: its losses, and the attention weights of its heads."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from train_demo import metrics
from train_demo.errors import printable
from train_demo.files import write_atomically
from train_demo.model import Transformer
from train_demo.run_folder import Config
from train_demo.vocabulary import visible

PICTURES = ("loss.png", "attention.png")


def draw(out: Path, model: Transformer, config: Config) -> None:
    """Writes `loss.png` and `attention.png` into a run's folder."""
    figures = loss_figure(metrics.read(out)), attention_figure(attention_weights(model, config), pieces(config))
    for name, figure in zip(PICTURES, figures, strict=True):
        picture = io.BytesIO()
        with warnings.catch_warnings():
            # Matplotlib draws boxes for characters that its font lacks.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(picture, format="png", dpi=110)
        write_atomically(out / name, picture.getvalue())


def loss_figure(measured: list[dict[str, Any]]) -> Figure:
    """Draws the training loss, its running mean and the validation loss: over steps, over seconds, and at the end."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle("How well the model predicts the next character")
    grid = figure.subplot_mosaic([["step", "seconds"], ["end", "end"]], height_ratios=(4, 5))
    for over in ("step", "seconds"):
        _draw_losses(grid[over], measured, over)
    grid["seconds"].sharey(grid["step"])
    grid["seconds"].set(xlabel="seconds of training, including compilation")
    last = max((metric["step"] for metric in measured), default=0)
    _draw_losses(grid["end"], measured, "step", last // 2, each_batch=False)
    grid["end"].set_title("The second half, enlarged")
    for axes in (grid["step"], grid["end"]):
        axes.set(xlabel="step", ylabel="loss (nats per character)")
        axes.legend()
    return figure


def _draw_losses(
    axes: Axes, measured: list[dict[str, Any]], over: str, first: int = 0, each_batch: bool = True
) -> None:
    """Draws the losses after step `first` over "step" or "seconds"."""
    places, losses = np.array([(m[over], m["loss"]) for m in measured if "loss" in m]).reshape(-1, 2).T
    if each_batch:
        axes.plot(places, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each batch")
    axes.plot(places[first:], running_mean(losses)[first:], color="tab:blue", label="training, running mean")
    checks = np.array([(m[over], m["val_loss"]) for m in measured if "val_loss" in m and m["step"] > first])
    checks = checks.reshape(-1, 2)
    ending = f": {checks[-1, 1]:.3f} at {over} {checks[-1, 0]:.0f}" if len(checks) else ""
    axes.plot(*checks.T, "o-", color="tab:orange", markersize=4, label=f"validation{ending}")
    axes.grid(alpha=0.3)
    if over == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def running_mean(values: np.ndarray) -> np.ndarray:
    """Averages each value with its neighbors, a hundredth of all values on either side."""
    reach, places = len(values) // 100, np.arange(len(values))
    starts, ends = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def pieces(config: Config) -> list[str]:
    """Returns the attention picture's labels: the characters of the run's sentence, all of them made visible."""
    return [printable(visible(character)) for character in config.sentence]


def attention_weights(model: Transformer, config: Config) -> np.ndarray:
    """Runs the model on `config.sentence` of T characters; returns its attention weights, `[layers, heads, T, T]`."""
    characters = jnp.asarray(config.vocabulary.encode(config.sentence))[None]
    structure, params = nnx.split(model)

    @jax.jit
    def sown(params: nnx.State, characters: Int[Array, "1 T"]) -> nnx.State:
        return nnx.capture(nnx.merge(structure, params), nnx.Intermediate)(characters, sow_weights=True)[1]

    blocks = nnx.to_pure_dict(sown(params, characters))["blocks"]
    weights = [blocks[layer]["attention"]["attention_weights"][0][0] for layer in sorted(blocks)]
    return np.stack(weights).astype(np.float32)


def attention_figure(weights: np.ndarray, characters: Sequence[str]) -> Figure:
    """Draws the weights of each layer and head; the character of a row attends to the characters of columns."""
    layers, heads, *_ = weights.shape
    figure = Figure(figsize=(4.4 * heads + 1, 4.4 * layers + 1), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    hidden = np.triu(np.ones(weights.shape[-2:], bool), k=1)
    places, rotation = range(len(characters)), 90 if max(map(len, characters)) > 2 else 0
    for (layer, head), axes in np.ndenumerate(grid):
        # On a square root scale, because most weights are small.
        shown = axes.imshow(np.ma.array(weights[layer, head], mask=hidden), cmap="magma_r", norm=PowerNorm(0.5, 0, 1))
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=13)
        axes.set_xticks(places, characters, fontsize=8, family="monospace", parse_math=False, rotation=rotation)
        axes.set_yticks(places, characters, fontsize=8, family="monospace", parse_math=False)
        axes.tick_params(length=0, pad=1)
        axes.set_facecolor("0.93")
    figure.suptitle(f"What each head attends to in “{''.join(characters)}”", fontsize=18, parse_math=False)
    figure.supxlabel("character attended to (␣ is a space, ↵ the end of a line, ⇥ a tab)", fontsize=15)
    figure.supylabel("attending character (it predicts the next one)", fontsize=15)
    figure.colorbar(shown, ax=grid, shrink=0.6, pad=0.01).set_label(
        "attention weight (each row sums to 1)", fontsize=15
    )
    return figure
