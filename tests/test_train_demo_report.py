"""The demo's report: one page that loads nothing, whatever its texts contain, also for a run that has just begun."""

import io
import json
import re
from html.parser import HTMLParser

import jax
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Task

from train_demo import metrics, plots, progress, report, run_folder, terminal, training
from train_demo.settings import Settings
from train_demo.vocabulary import Vocabulary

HOSTILE = "</pre><script>alert(1)</script><!-- &amp; \u2028 \u202e \x1b[31m \0 \ud800 ]]> 😀"
SETTINGS = Settings(context_length=8, batch_size=2, layers=1, heads=2, features=8, steps=9)
pytestmark = pytest.mark.core


class Page(HTMLParser):
    """The elements, the text, and all that a browser would load."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.loads, self.text = set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

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
    (out / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def shown(out, run=None):
    report.write(out, run or config())
    page = Page((out / report.FILE).read_text())
    assert "script" not in page.elements
    assert page.loads == ["data:image/png;base64,cGljdHVyZQ=="] * 2
    return page.text


def test_the_page_escapes_texts_and_loads_nothing(out):
    (out / metrics.SAMPLES).write_text(json.dumps({"step": 3, "prompt": HOSTILE, "text": HOSTILE * 2}) + "\n")
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
    lines = [{"step": i, "loss": 5 - i / 100, "seconds": 3 + i / 10} for i in range(1, 201)]
    lines += [{"step": i, "val_loss": 4 - i / 100, "max_score": 150 - i / 2, "seconds": 23} for i in range(50, 201, 50)]
    measured(out, *lines)
    used = {"device": "1 x cpu", "memory_of_process": 512 * 2**20, "tokens_per_second": 1600}
    (out / metrics.RESOURCES).write_text(json.dumps(used))
    shown(out)
    page = (out / report.FILE).read_text()
    facts = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page))
    assert facts["validation loss"] == "2.0000"
    assert "(2.885 bits); geometric mean probability of the true next character: 13.5%" in page  # 2 / ln 2, exp(-2)
    assert "Random guessing among 4 characters has a loss of 1.386" in page  # ln 4
    assert "try next" not in facts  # the run goes on
    assert facts["largest attention score"] == "50.0"
    assert facts["training loss"] == "3.4950"  # of the steps 101 to 200
    assert (facts["training"], facts["first step"]) == ("23.0 s", "3.1 s")
    assert (facts["memory of process"], facts["characters per second"]) == ("512 MiB", "1,600")
    assert facts["--features"] == "8"


@pytest.mark.parametrize(("last", "advice"), [(2.0, "--steps 18 with --resume"), (4.0, "more text or --dropout-rate")])
def test_the_report_of_a_finished_run_suggests_what_to_try_next(out, last, advice):
    measured(out, *({"step": i, "val_loss": x, "seconds": 1.0} for i, x in ((5, 3.0), (SETTINGS.steps, last))))
    *_, (name, value, meaning) = metrics.facts(out, config())
    assert f"{name} {value} {meaning}".startswith(f"try next {advice}")


@pytest.mark.parametrize("lines", [[], [{"step": 1, "val_loss": 3.0, "seconds": 1.0}], [{"step": 1, "loss": 3.0}]])
def test_a_run_with_few_files(out, lines):
    measured(out, *lines)
    (out / metrics.RESOURCES).write_text("[1")
    assert "Random guessing among 4 characters" in shown(out)


@pytest.mark.parametrize("text", ["\n\t x", "\x1b[31m\u202e", "漢字" * 99, "a" * 99, "\ud800"])
def test_a_sample_takes_one_line_of_a_terminal(text):
    line = terminal.excerpt("a" + text, 66)
    assert line.isprintable()
    assert cell_len(line) <= 66


@pytest.mark.parametrize("width", [8, 80])
def test_lines_break_only_between_words(width):
    text = "  The quick brown\tfox\n\njumps over 漢字漢字, the lazy dog. " * 9
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    lines = "".join(terminal.wrapped(pieces, width)).splitlines()
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(cell_len(line.expandtabs()) <= max(width, 9) for line in lines)  # the longest word has 9 columns
    assert "".join(terminal.wrapped(["as it\n   was"], width)) == "as it\n   was\n"


def test_words_are_printed_once_they_are_complete():
    pieces = iter(["two wo", "rds", " more"])
    assert next(terminal.wrapped(pieces, 80)) == "two"
    assert next(pieces) == "rds"


@pytest.mark.parametrize(("width", "speed"), [(60, False), (80, True), (120, True)])
def test_the_progress_bar_fits_one_line_and_shows_the_time_left(monkeypatch, width, speed):
    monkeypatch.setattr(Task, "time_remaining", 80.0)
    console = Console(width=width, force_terminal=True, file=io.StringIO())
    bar = progress.progress_bar(console)
    bar.add_task("loss 1.234", total=10**5, completed=5 * 10**4, speed="123,456 characters/s")
    with console.capture() as captured:
        console.print(bar.get_renderable())
    (line,) = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", captured.get()).splitlines()
    assert len(line.rstrip()) <= width
    assert all(words in line for words in ("loss 1.234", "50000/100000", "about 1:20 left"))
    assert ("123,456 characters/s" in line) == speed


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "No validation loss yet."),
        ([1.2], "Trained to 1.200 nats per character, better than random guessing (1.386)."),
        ([1.3, 1.2], "and not overfitting: the validation loss was still falling."),
        ([1.3, 1.2, 1.205], "and not overfitting: the validation loss has leveled off."),
        ([1.3, 1.2, 1.3], "but overfitting: the validation loss was as low as 1.200."),
        ([1.5], "Trained to 1.500 nats per character, no better than random guessing (1.386)."),
    ],
)
def test_the_verdict(out, losses, said):
    measured(out, *({"step": step, "val_loss": loss, "seconds": 1.0} for step, loss in enumerate(losses, 1)))
    assert metrics.verdict(out, config()).endswith(said)
    assert shown(out).count(metrics.verdict(out, config())) == 1


def test_the_plot_has_an_inset_of_the_last_steps():
    lines = [{"step": step, "seconds": step / 10, "loss": 1 + 4 / step} for step in range(1, 101)]
    lines += [{"step": step, "seconds": step / 10, "val_loss": 1.1} for step in (50, 100)]
    *_, ending = plots.loss_figure(lines).axes
    (low, high), (first, last) = ending.get_ylim(), ending.get_xlim()
    assert 0.9 < low < high < 1.2
    assert 45 < first < last < 110


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (["compile_requests_use_cache", "cache_hits"], "(cached)"),
        (["compile_requests_use_cache", "cache_misses"], " s"),
        (["compile_requests_use_cache", "cache_hits", "compile_requests_use_cache"], " s"),
        ([], " s"),
    ],
)
def test_a_program_is_cached_if_all_its_parts_are(events, said):
    with training.Compiling() as compiling:
        for event in events:
            jax.monitoring.record_event(f"/jax/compilation_cache/{event}")
    jax.monitoring.record_event("/jax/compilation_cache/compile_requests_use_cache")  # of another program
    assert str(compiling).startswith("compiled in 0.0 s")
    assert str(compiling).endswith(said)


def test_every_sentence_has_a_prompt():
    for sentence, prompt in ((" ab", " ab"), ("ab c", "ab"), (" ", " ")):
        assert run_folder.Config(SETTINGS, None, "", Vocabulary(" abc"), sentence).prompt == prompt
