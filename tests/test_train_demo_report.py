"""The demo's report: one page that asks for nothing else, whatever its texts hold, and also of a run without much."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from train_demo import data, files, metrics, report, run_folder, samples, usage
from train_demo.settings import Settings
from train_demo.vocabulary import Bytes, Characters

HOSTILE = "</script><script>alert(1)</script><!-- &amp; \u2028 \u202e \x1b[31m \0 \ud800 ]]> 😀"
SETTINGS = Settings(context_length=8, batch_size=2, layers=1, heads=2, features=8, steps=9)


class Scripts(HTMLParser):
    """The scripts of a page as a browser finds them, and everything that it would load."""

    def __init__(self, page):
        super().__init__()
        self.scripts, self.loads, self.inside, self.title = [], [], None, ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside = tag
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, content):
        if self.inside == "script":
            self.scripts[-1] += content
        if self.inside == "title":
            self.title += content


def config(vocabulary=None, data=None):
    vocabulary = vocabulary or Characters(" abc")
    return run_folder.Config(SETTINGS, data, "0" * 64, vocabulary, "ab c")


def weights(tokens):
    drawn = np.random.default_rng(0).random((1, 2, tokens, tokens)) * np.tri(tokens)
    return drawn / drawn.sum(-1, keepdims=True)


def shown(out, run=None, tokens=4):
    report.write(out, weights(tokens), run or config())
    page = Scripts((out / report.FILE).read_text())
    assert len(page.scripts) == 2
    assert page.loads == []
    return page, json.loads(page.scripts[0])


def test_texts_cannot_end_the_script_that_holds_them(tmp_path):
    lines = [{"step": 3, "prompt": HOSTILE, "text": HOSTILE * 2}]
    (tmp_path / samples.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, found = shown(tmp_path, config(data=f"/x/{HOSTILE[:9]}<b>.txt"))
    assert found["samples"][0]["text"].count("</script><script>alert(1)</script>") == 2
    assert "\\x1b[31m" in found["samples"][0]["prompt"]  # as on a terminal
    assert found["title"] == page.title
    assert "<b>.txt" in page.title


def test_the_page_asks_for_nothing_else(tmp_path):
    shown(tmp_path)
    page = (tmp_path / report.FILE).read_text()
    assert "default-src 'none'" in page
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import|import\(|fetch\(|XMLHttpRequest", page)


def test_what_the_report_says_is_what_the_run_measured(tmp_path):
    lines = []
    for step in range(1, 2001):
        lines.append({"step": step, "loss": 5 - step / 1000 + (step % 2) / 10, "seconds": 3 + step / 100})
        if step % 500 == 0:
            lines.append({"step": step, "val_loss": 4 - step / 1000, "seconds": 3 + step / 100})
    (tmp_path / metrics.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    used = {"device": "cpu", "devices": 1, "memory_of_process": 512 * 2**20, "tokens_per_second": 1600}
    usage.write(tmp_path, used)
    _, found = shown(tmp_path)
    assert found["validation"] == {
        "step": [500, 1000, 1500, 2000],
        "seconds": [8.0, 13.0, 18.0, 23.0],
        "loss": [3.5, 3.0, 2.5, 2.0],
    }
    training = found["training"]
    assert {len(values) for values in training.values()} == {report.POINTS}
    assert training["step"][-1] == 2000
    assert min(training["low"]) == pytest.approx(3.0, abs=0.002)
    assert all(low <= high for low, high in zip(training["low"], training["high"], strict=True))
    facts = {label: value for label, value, _ in found["facts"]}
    assert facts["training"] == "23.0 s"
    assert facts["memory"] == "512 MiB"
    assert facts["characters per second"] == "1,600"
    assert ["2.0000", "validation loss, nats per character"] in found["tiles"]
    assert {name: value for name, value, _ in found["settings"]}["--features"] == "8"


def test_the_attention_is_a_byte_for_each_weight(tmp_path):
    _, found = shown(tmp_path)
    attention = found["attention"]
    assert attention["tokens"] == ["a", "b", "␣", "c"]
    got = np.frombuffer(base64.b64decode(attention["weights"]), np.uint8).reshape(1, 2, 4, 4) / 255
    np.testing.assert_allclose(got, weights(4), atol=0.5 / 255 + 1e-9)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 1, "loss": 3.0}, {"step": 1, "val_loss": 3.0}],
        [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "seconds": 1.0}],
        [{"step": 1, "val_loss": 3.0, "seconds": 1.0}],
        [{"step": 1, "loss": 3.0, "seconds": 0.0}, {"step": 2, "loss": 3.0, "seconds": 0.0}],
    ],
)
def test_a_run_without_much(tmp_path, lines):
    (tmp_path / metrics.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / usage.FILE).write_text("[1")
    _, found = shown(tmp_path, config(Bytes()))
    assert len(found["training"]["mean"]) == sum("loss" in line for line in lines)
    assert found["unit"] == "byte"


def test_a_full_disk_leaves_the_old_report(tmp_path, monkeypatch):
    (tmp_path / report.FILE).write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space.*{report.FILE}"):
        report.write(tmp_path, weights(4), config())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(report.FILE, "old")]


# The samples


def test_samples_that_a_killed_run_wrote_too_early_are_dropped(tmp_path):
    lines = [json.dumps({"step": step, "prompt": "a", "text": f"b{step}"}) for step in (2, 4, 6)]
    (tmp_path / samples.FILE).write_text("\n".join([*lines[:2], '{"step": 3}', "[", lines[2], '{"step": 8, "pro']))
    assert [sample.step for sample in samples.read(tmp_path)] == [2, 4, 6]
    samples.drop_after(tmp_path, 4)
    assert (tmp_path / samples.FILE).read_text() == "".join(line + "\n" for line in lines[:2])


def test_a_sample_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(samples.os, "fsync", full)
    with pytest.raises(samples.UserError, match=r"samples\.jsonl \(No space left on device\).*resume"):
        samples._append(tmp_path, samples.Sample(1, "a", "b"))


@pytest.mark.parametrize("text", ["\n\t x", "\x1b[31m\u202e", "漢字" * 99, "a" * 99, "\ud800"])
def test_a_sample_takes_one_line_of_a_terminal(text):
    line = samples.Sample(1, "a", text).line
    assert line.isprintable()
    assert samples.set_cell_size(line, 66).rstrip() == line


def test_the_default_folder_of_data_has_a_prompt():
    for sentence in (" ab", "ab c", " "):
        text = run_folder.Config(SETTINGS, None, "", Characters(" abc"), sentence)
        assert samples.prompt_of(text) in sentence
        assert len(text.vocabulary.encode(samples.prompt_of(text)))
    assert data.Part(np.zeros(3, np.uint8), np.zeros(0, int)).stretch(1, 9).tolist() == [0, 0]


def test_the_template_is_named_once():
    assert Path(report.TEMPLATE).read_text().count("DATA") == 1
