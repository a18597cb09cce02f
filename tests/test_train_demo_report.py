"""The demo's report: one page that asks for nothing else, whatever its texts hold, and also of a run without much."""

import json
import re
from html.parser import HTMLParser

import pytest

from train_demo import files, metrics, report, run_folder, training
from train_demo.settings import Settings
from train_demo.vocabulary import Vocabulary

HOSTILE = "</pre><script>alert(1)</script><!-- &amp; \u2028 \u202e \x1b[31m \0 \ud800 ]]> 😀"
SETTINGS = Settings(context_length=8, batch_size=2, layers=1, heads=2, features=8, steps=9)
pytestmark = pytest.mark.core


class Page(HTMLParser):
    """What a browser finds: the elements, everything that it would load, the text."""

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


def shown(out, run=None):
    report.write(out, run or config())
    page = Page((out / report.FILE).read_text())
    assert "script" not in page.elements
    assert page.loads == ["data:image/png;base64,cGljdHVyZQ=="] * 2
    return page.text


def test_no_text_is_html_and_nothing_is_loaded(out):
    lines = [{"step": 3, "prompt": HOSTILE, "text": HOSTILE * 2}]
    (out / metrics.SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = shown(out, config(data=f"/x/{HOSTILE[:9]}<b>.txt"))
    assert text.count("<script>alert(1)</script>") == 3
    assert "\\x1b[31m" in text  # as on a terminal
    assert "<b>.txt" in text
    page = (out / report.FILE).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_what_the_report_says_is_what_the_run_measured(out):
    lines = []
    for step in range(1, 201):
        lines.append({"step": step, "loss": 5 - step / 100, "seconds": 3 + step / 10})
        if step % 50 == 0:
            lines.append(
                {"step": step, "val_loss": 4 - step / 100, "max_score": 150 - step / 2, "seconds": 3 + step / 10}
            )
    (out / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    used = {"device": "1 x cpu", "memory_of_process": 512 * 2**20, "tokens_per_second": 1600}
    (out / metrics.RESOURCES).write_text(json.dumps(used))
    shown(out)
    page = (out / report.FILE).read_text()
    facts = dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", page))
    assert facts["validation loss"] == "2.0000"
    assert "2.885 bits: the right one gets 13.5%" in page  # 2 / ln 2, and exp(-2)
    assert "4 characters has a loss of 1.386" in page  # ln 4
    assert "try next" not in facts  # the run goes on
    assert facts["largest attention score"] == "50.0"
    assert facts["training loss"] == "3.4950"  # of the steps 101 to 200
    assert (facts["training"], facts["first step"]) == ("23.0 s", "3.1 s")
    assert (facts["memory of process"], facts["characters per second"]) == ("512 MiB", "1,600")
    assert facts["--features"] == "8"


@pytest.mark.parametrize(("last", "advice"), [(2.0, "--steps 18 with --resume"), (4.0, "more text or --dropout-rate")])
def test_a_finished_run_says_what_to_try_next(out, last, advice):
    losses = {5: 3.0, SETTINGS.steps: last}
    lines = [json.dumps({"step": step, "val_loss": loss, "seconds": 1.0}) for step, loss in losses.items()]
    (out / metrics.METRICS).write_text("\n".join(lines))
    *_, (name, value, meaning) = metrics.facts(out, config())
    assert f"{name} {value} {meaning}".startswith(f"try next {advice}")


@pytest.mark.parametrize("lines", [[], [{"step": 1, "val_loss": 3.0, "seconds": 1.0}], [{"step": 1, "loss": 3.0}]])
def test_a_run_without_much(out, lines):
    (out / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / metrics.RESOURCES).write_text("[1")
    assert "Guessing among 4 characters" in shown(out)


def test_a_full_disk_leaves_the_old_report(out, monkeypatch):
    (out / report.FILE).write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space.*{report.FILE}"):
        report.write(out, config())
    assert (out / report.FILE).read_text() == "old"
    assert not list(out.glob("*.tmp"))


@pytest.mark.parametrize("text", ["\n\t x", "\x1b[31m\u202e", "漢字" * 99, "a" * 99, "\ud800"])
def test_a_sample_takes_one_line_of_a_terminal(text):
    line = training.one_line("a" + text)
    assert line.isprintable()
    assert len(line) <= training.WIDTH


def test_every_sentence_has_a_prompt():
    for sentence in (" ab", "ab c", " "):
        prompt = run_folder.Config(SETTINGS, None, "", Vocabulary(" abc"), sentence).prompt
        assert prompt
        assert prompt in sentence
