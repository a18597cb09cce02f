"""The demo's report: one page that loads nothing, whatever its texts contain, also for
a run that has just begun.
"""

import itertools
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from train_demo import metrics, plots, report, run_folder
from train_demo.data import Vocabulary
from train_demo.settings import Settings

HOSTILE = (
    "</pre><script>alert(1)</script><!-- &amp; \u2028 \u202e \x1b[31m \0 \ud800 ]]> 😀"
)
SETTINGS = Settings(
    context_length=8, batch_size=2, layers=1, heads=2, features=8, steps=9
)
pytestmark = pytest.mark.core


class Page(HTMLParser):
    """The elements, the text, and all that a browser would load."""

    def __init__(self, page):
        super().__init__()
        self.elements = set()
        self.loads = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data"):
                self.loads.append(value)

    def handle_data(self, content):
        self.text += content


@pytest.fixture
def out(tmp_path):
    for name in report.PICTURES:
        (tmp_path / name).write_bytes(b"picture")
    return tmp_path


def config(data=None):
    return run_folder.Config(SETTINGS, data, "0" * 64, Vocabulary(" abc"), "ab c")


def measured(out, *lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (out / metrics.METRICS).write_text(text)


def shown(out, run=None):
    report.write(out, run or config())
    page = Page((out / report.FILE).read_text())
    assert "script" not in page.elements
    # The two pictures are part of the page.
    assert page.loads == ["data:image/png;base64,cGljdHVyZQ=="] * 2
    return page.text


def test_page_escapes_texts_and_loads_nothing(out):
    sample = {"step": 3, "prompt": HOSTILE, "text": HOSTILE * 2}
    (out / metrics.SAMPLES).write_text(json.dumps(sample) + "\n")

    text = shown(out, config(data=f"/x/{HOSTILE[:9]}<b>.txt"))

    # In the prompt once, in the text twice.
    assert text.count("<script>alert(1)</script>") == 3
    assert "\\x1b[31m" in text  # as on a terminal
    assert "<b>.txt" in text
    page = (out / report.FILE).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_page_shows_a_given_text_after_its_prompt(out):
    report.write(out, config(), "b c" * 99)
    page = (out / report.FILE).read_text()
    assert "<pre><b>ab</b>" + "b c" * 99 + "</pre>" in page


def test_page_contains_the_measurements(out):
    lines = []
    for step in range(1, 201):
        seconds = 3 + step / 10
        lines.append({"step": step, "loss": 5 - step / 100, "seconds": seconds})
    for step in range(50, 201, 50):
        lines.append({"step": step, "val_loss": 4 - step / 100, "seconds": 23})
    measured(out, *lines)

    shown(out)

    page = (out / report.FILE).read_text()
    facts = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page))
    assert facts["validation loss"] == "2.0000"
    # 2 / ln 2, exp(-2).
    probability = "geometric mean probability of the true next character: 13.5%"
    assert f"(2.885 bits); {probability}" in page
    assert "Random guessing among 4 characters has a loss of 1.386" in page  # ln 4
    assert facts["training loss"] == "3.4950"  # of the steps 101 to 200
    assert facts["training"] == "23.0 s"
    assert facts["characters per second"] == "160"  # 2 windows of 8 in 0.1 s
    assert facts["--features"] == "8"


@pytest.mark.parametrize(
    "lines",
    [[], [{"step": 1, "val_loss": 3.0, "seconds": 1.0}], [{"step": 1, "loss": 3.0}]],
)
def test_page_of_a_run_that_has_just_begun_shows_what_there_is(out, lines):
    measured(out, *lines)
    assert "Random guessing among 4 characters" in shown(out)


VERDICTS = [
    ([], "No validation loss yet."),
    (
        [1.2],
        "Trained to 1.200 nats per character, better than random guessing (1.386).",
    ),
    ([1.3, 1.2], "(1.386). The validation loss was still falling."),
    # The loss of a text that repeats one character.
    ([0.0, 0.0], "(1.386). The validation loss has leveled off."),
    ([1.3, 1.2, 1.205], "(1.386). The validation loss has leveled off."),
    (
        [1.3, 1.2, 1.3],
        "(1.386), but overfitting: the validation loss was as low as 1.200.",
    ),
    (
        [1.5],
        "Trained to 1.500 nats per character, no better than random guessing (1.386).",
    ),
]


@pytest.mark.parametrize(("losses", "said"), VERDICTS)
def test_page_contains_the_verdict_once(out, losses, said):
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append({"step": step, "val_loss": loss, "seconds": 1.0})
    measured(out, *lines)

    verdict = report.verdict(out, config())

    assert verdict.endswith(said)
    assert shown(out).count(verdict) == 1


@pytest.mark.parametrize(
    ("training", "trend"),
    [
        (1.3, "still falling."),
        (1.11, "still falling."),
        (0.95, "still falling, but the training loss is 23% lower."),
    ],
)
def test_verdict_compares_the_losses_of_both_texts(out, training, trend):
    lines = []
    for step, loss in [(1, 1.3), (2, 1.23)]:
        lines.append({"step": step, "loss": training, "seconds": 1.0})
        lines.append({"step": step, "val_loss": loss, "seconds": 1.0})
    measured(out, *lines)

    verdict = report.verdict(out, config())

    assert verdict.endswith(f"The validation loss was {trend}")
    assert "overfitting" not in verdict


@pytest.mark.parametrize("number", [0, 1, 6, 15, 64])
def test_ticks_of_a_comparison_are_steps_that_were_measured(number):
    steps = [250 * (i + 1) for i in range(number)]
    lines = []
    for step in steps:
        lines.append({"step": step, "seconds": 1.0, "val_loss": 100 / step})

    (axes,) = plots.comparison_figure({"full": lines, "lost": []}).axes

    ticks = axes.get_xticks().tolist()
    assert set(ticks) <= set(steps)
    assert steps[-1:] == ticks[:1]
    assert min(number, 4) <= len(ticks) <= 8
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[-1] == "lost"


@pytest.mark.parametrize("length", [1, 13, 64])
def test_labels_of_attention_are_few_large_and_hold_the_sentence(length):
    # As long as the longest sentence, with a character that cannot be shown.
    sentence = ("Many words $x_ \n and\x1b[ marks, " * 3)[:length]
    run = run_folder.Config(SETTINGS, None, "", Vocabulary(" "), sentence)
    characters = plots.pieces(run)
    assert len(characters) == length
    weights = np.tri(length, dtype=np.float32)[None, None].repeat(4, axis=1)

    figure = plots.attention_figure(weights, characters)

    figure.canvas.draw()
    width = figure.get_size_inches()[0]
    for axes in figure.axes[:4]:
        for axis, along in ((axes.xaxis, "x"), (axes.yaxis, "y")):
            labels = axis.get_ticklabels()
            assert len(labels) <= 12
            assert "".join(x.get_text() for x in labels) == "".join(characters)
            # On the report, the picture is 1,100 pixels wide.
            assert labels[0].get_size() / 72 * 1100 / width > 10
            boxes = [label.get_window_extent() for label in labels]
            places = sorted(getattr(box, f"interval{along}").tolist() for box in boxes)
            for (_, end), (start, _) in itertools.pairwise(map(sorted, places)):
                assert end < start


def test_plot_leaves_out_the_high_losses_of_the_beginning():
    lines = []
    for step in range(1, 101):
        lines.append({"step": step, "seconds": step / 10, "loss": 1 + 40 / step})
    for step in (50, 100):
        lines.append({"step": step, "seconds": step / 10, "val_loss": 1.1})

    (axes,) = plots.loss_figure(lines).axes

    assert axes.get_ylim() == pytest.approx((1.1, 2.2))
    assert axes.lines[-1].get_label() == "validation: 1.100 at step 100"


@pytest.mark.parametrize(
    ("sentence", "prompt"), [(" ab", " ab"), ("ab c", "ab"), (" ", " ")]
)
def test_prompt_is_the_beginning_of_a_sentence(sentence, prompt):
    vocabulary = Vocabulary(" abc")
    run = run_folder.Config(SETTINGS, None, "", vocabulary, sentence)
    assert run.prompt == prompt
