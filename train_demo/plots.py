"""The two pictures of a run: its losses, and what its attention heads look at."""

import io
import warnings
from pathlib import Path

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
from train_demo.data import encode
from train_demo.model import Transformer
from train_demo.run_folder import Config, write_atomically

VISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


def draw(out: Path, model: Transformer, config: Config) -> None:
    """Writes `loss.png` and `attention.png` into a run's folder."""
    _write(out / "loss.png", loss_figure(metrics.read(out)))
    _write(out / "attention.png", attention_figure(attention_weights(model, config), config.sentence))


def loss_figure(measured: list[metrics.Metric]) -> Figure:
    """Draws the training loss, its running mean, and the validation loss over the steps."""
    steps, losses = np.array([(m["step"], m["loss"]) for m in measured if "loss" in m]).reshape(-1, 2).T
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each batch")
    axes.plot(steps, _running_mean(losses), color="tab:blue", label="training, running mean")
    checks = np.array([(m["step"], m["val_loss"]) for m in measured if "val_loss" in m]).reshape(-1, 2)
    ending = f": {checks[-1, 1]:.3f} at step {checks[-1, 0]:.0f}" if len(checks) else ""
    axes.plot(*checks.T, "o-", color="tab:orange", markersize=4, label=f"validation{ending}")
    axes.set(title="How well the next character is predicted", xlabel="step", ylabel="loss (nats per character)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def attention_weights(model: Transformer, config: Config) -> np.ndarray:
    """Runs the model on the run's sentence and returns what each head attends to, `[layers, heads, T, T]`."""
    characters = jnp.asarray(encode(config.sentence, config.vocabulary))[None]
    structure, params = nnx.split(model)

    @jax.jit
    def sown(params: nnx.State, characters: Int[Array, "1 T"]) -> nnx.State:
        return nnx.capture(nnx.merge(structure, params), nnx.Intermediate)(characters, sow_weights=True)[1]

    blocks = nnx.to_pure_dict(sown(params, characters))["blocks"]
    weights = [blocks[layer]["attention"]["attention_weights"][0][0] for layer in sorted(blocks)]
    return np.stack(weights).astype(np.float32)


def attention_figure(weights: np.ndarray, sentence: str) -> Figure:
    """Draws a grid of layers by heads: the row's character looks at the columns' characters.

    Args:
        weights: `[layers, heads, T, T]`, each row adding up to 1.
        sentence: the T characters.
    """
    layers, heads, *_ = weights.shape
    figure = Figure(figsize=(4.4 * heads + 1, 4.4 * layers + 1), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    hidden = np.triu(np.ones(weights.shape[-2:], bool), k=1)
    for (layer, head), axes in np.ndenumerate(grid):
        # The square root spreads the many small weights over the scale.
        shown = axes.imshow(np.ma.array(weights[layer, head], mask=hidden), cmap="magma_r", norm=PowerNorm(0.5, 0, 1))
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=13)
        _name_axes(axes, sentence.translate(VISIBLE))
    figure.suptitle(f"What each head looks at in “{sentence.translate(VISIBLE)}”", fontsize=18, parse_math=False)
    figure.supxlabel("character looked at", fontsize=15)
    figure.supylabel("character that looks (it predicts the one after it)", fontsize=15)
    figure.colorbar(shown, ax=grid, shrink=0.6, pad=0.01).set_label(
        "attention weight (each row adds up to 1)", fontsize=15
    )
    return figure


def _name_axes(axes: Axes, characters: str) -> None:
    places = range(len(characters))
    axes.set_xticks(places, list(characters), fontsize=8, family="monospace", parse_math=False)
    axes.set_yticks(places, list(characters), fontsize=8, family="monospace", parse_math=False)
    axes.tick_params(length=0, pad=1)
    axes.set_facecolor("0.93")


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Averages each value with its neighbours, a hundredth of all on either side."""
    reach, places = len(values) // 100, np.arange(len(values))
    starts, ends = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def _write(path: Path, figure: Figure) -> None:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Matplotlib's font lacks some scripts; it draws a box then, which is all that can be done.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())
