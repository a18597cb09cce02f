"""The demo's report: one page that loads nothing, whatever its texts contain, also for
a run that has just begun.
"""

import json
import re
from html.parser import HTMLParser

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
        self.elements, self.loads, self.text = set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "srcset", "data")
        ]

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
    (out / metrics.METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def shown(out, run=None):
    report.write(out, run or config())
    page = Page((out / report.FILE).read_text())
    assert "script" not in page.elements
    assert page.loads == ["data:image/png;base64,cGljdHVyZQ=="] * 2
    return page.text


def test_the_page_escapes_texts_and_loads_nothing(out):
    (out / metrics.SAMPLES).write_text(
        json.dumps({"step": 3, "prompt": HOSTILE, "text": HOSTILE * 2}) + "\n"
    )
    text = shown(out, config(data=f"/x/{HOSTILE[:9]}<b>.txt"))
    assert text.count("<script>alert(1)</script>") == 3
    assert "\\x1b[31m" in text  # as on a terminal
    assert "<b>.txt" in text
    page = (out / report.FILE).read_text()
    report.write(out, config(), "b c" * 99)
    assert "<pre><b>ab</b>" + "b c" * 99 + "</pre>" in (out / report.FILE).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_report_contains_the_measurements(out):
    lines = [
        {"step": i, "loss": 5 - i / 100, "seconds": 3 + i / 10} for i in range(1, 201)
    ]
    lines += [
        {"step": i, "val_loss": 4 - i / 100, "seconds": 23} for i in range(50, 201, 50)
    ]
    measured(out, *lines)
    shown(out)
    page = (out / report.FILE).read_text()
    facts = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page))
    assert facts["validation loss"] == "2.0000"
    # 2 / ln 2, exp(-2).
    assert (
        "(2.885 bits); geometric mean probability of the true next character: 13.5%"
        in page
    )
    assert "Random guessing among 4 characters has a loss of 1.386" in page  # ln 4
    assert facts["training loss"] == "3.4950"  # of the steps 101 to 200
    assert facts["training"] == "23.0 s"
    assert facts["characters per second"] == "160"  # 2 windows of 8 in 0.1 s
    assert facts["--features"] == "8"


@pytest.mark.parametrize(
    "lines",
    [[], [{"step": 1, "val_loss": 3.0, "seconds": 1.0}], [{"step": 1, "loss": 3.0}]],
)
def test_a_run_with_few_files(out, lines):
    measured(out, *lines)
    assert "Random guessing among 4 characters" in shown(out)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "No validation loss yet."),
        (
            [1.2],
            "Trained to 1.200 nats per character, better than random guessing (1.386).",
        ),
        ([1.3, 1.2], "and not overfitting: the validation loss was still falling."),
        (
            [1.3, 1.2, 1.205],
            "and not overfitting: the validation loss has leveled off.",
        ),
        ([1.3, 1.2, 1.3], "but overfitting: the validation loss was as low as 1.200."),
        (
            [1.5],
            "Trained to 1.500 nats per character, no better than random guessing "
            "(1.386).",
        ),
    ],
)
def test_the_verdict(out, losses, said):
    measured(
        out,
        *(
            {"step": step, "val_loss": loss, "seconds": 1.0}
            for step, loss in enumerate(losses, 1)
        ),
    )
    assert report.verdict(out, config()).endswith(said)
    assert shown(out).count(report.verdict(out, config())) == 1


def test_the_plot_shows_the_end_of_a_run():
    lines = [
        {"step": step, "seconds": step / 10, "loss": 1 + 40 / step}
        for step in range(1, 101)
    ]
    lines += [
        {"step": step, "seconds": step / 10, "val_loss": 1.1} for step in (50, 100)
    ]
    (axes,) = plots.loss_figure(lines).axes
    assert axes.get_ylim() == pytest.approx((1.1, 2.2))
    assert [line.get_label() for line in axes.lines][
        -1
    ] == "validation: 1.100 at step 100"


def test_every_sentence_has_a_prompt():
    for sentence, prompt in ((" ab", " ab"), ("ab c", "ab"), (" ", " ")):
        assert (
            run_folder.Config(SETTINGS, None, "", Vocabulary(" abc"), sentence).prompt
            == prompt
        )
