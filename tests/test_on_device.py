"""`benchmarks/on_device.py` loses nothing, and runs nothing twice."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import on_device
import outcomes
import pytest

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "benchmarks/on_device.py"]


def contents(folder):
    return {path.name: path.read_text() for path in folder.glob("*.json*")}


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_small_run_that_is_killed_continues(tmp_path):
    """On a CPU; everything real but the sizes."""
    command = [*COMMAND, "--small", "--out", str(tmp_path)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    # The third part has begun.
    wait_for((tmp_path / "logs" / "module-128.txt").exists)
    first.kill()
    first.wait()
    before = contents(tmp_path / "parts")
    assert set(before) == {"versions.json", "demo.json"}

    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)

    assert "Nothing is missing." in done.stdout
    assert (tmp_path / "summary.txt").read_text() in done.stdout
    after = contents(tmp_path / "parts")
    assert after["demo.json"] == before["demo.json"]
    statuses = {name: json.loads(text)["status"] for name, text in after.items()}
    assert set(statuses.values()) == {"ok"}, done.stdout
    assert len(statuses) == 6
    trained = json.loads((tmp_path / "raw" / "demo.json").read_text())["summary"]
    assert trained["dtype"] == "bfloat16"
    assert trained["chosen attention"] in ("xla", "blockwise")
    rows = json.loads((tmp_path / "raw" / "module-128.json").read_text())["rows"]
    assert [row["implementation"].split(".")[0] for row in rows] == [
        "flax_mha",
        "flax",
        "torch",
    ]
    assert all(row["ms"] > 0 or "absent" in row for row in rows)


SAYS_WHAT_RAN = "import sys; open(sys.argv[1], 'a').write('x'); "
# What the parts of the next tests do, after they have noted that they run.
ENDS = "pass"
FAILS = "sys.exit('no such kernel')"
HANGS = "import time; time.sleep(60)"


class Harness:
    """Runs `on_device` with parts that need no JAX: name -> (limit, what it does)."""

    def __init__(self, folder, monkeypatch):
        self.out = folder / "out"
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.monkeypatch = monkeypatch
        # JAX, which the tests have imported, warns if anything forks.
        monkeypatch.setattr(on_device, "end_with_parent", None)

    def run(self, parts, *options):
        def made(folder, small):
            found = []
            for name, (limit, code) in parts.items():
                arguments = ["-c", SAYS_WHAT_RAN + code, str(self.notes / name)]
                found.append(on_device.Part(name, limit, arguments))
            return found

        self.monkeypatch.setattr(on_device, "parts", made)
        return on_device.main(["--out", str(self.out), *options])

    def runs(self, name):
        file = self.notes / name
        return len(file.read_text()) if file.exists() else 0

    def status(self, name):
        record = json.loads((self.out / "parts" / f"{name}.json").read_text())
        return record["status"]


@pytest.fixture
def harness(tmp_path, monkeypatch):
    return Harness(tmp_path, monkeypatch)


@pytest.mark.core
def test_parts_that_fail_are_kept_and_not_repeated(harness, capsys):
    parts = {
        "versions": (60, ENDS),
        "broken": (60, FAILS),
        "slow": (1, HANGS),
        "good": (60, ENDS),
    }
    assert harness.run(parts) == 0
    printed = capsys.readouterr().out
    assert "| no such kernel" in printed
    assert "Nothing is missing." in printed
    statuses = {name: harness.status(name) for name in parts}
    assert statuses == {
        "versions": "ok",
        "broken": "failed",
        "slow": "time limit",
        "good": "ok",
    }

    harness.run(parts)
    assert {name: harness.runs(name) for name in parts} == {
        "versions": 2,  # in every run
        "broken": 1,
        "slow": 1,
        "good": 1,
    }

    harness.run(parts | {"broken": (60, ENDS), "slow": (60, ENDS)}, "--retry")
    assert (harness.runs("broken"), harness.runs("good")) == (2, 1)
    assert {harness.status(name) for name in parts} == {"ok"}


def test_a_part_that_the_minutes_cut_is_missing(harness, monkeypatch, capsys):
    monkeypatch.setattr(on_device, "SHORTEST", 0.5)
    parts = {"versions": (60, ENDS), "long": (600, HANGS), "last": (60, ENDS)}
    assert harness.run(parts, "--minutes", "0.05") == 0
    assert harness.status("long") == "unfinished"
    assert "Missing: long, last." in capsys.readouterr().out
    assert harness.runs("last") == 0
    harness.run(parts, "--list")
    printed = capsys.readouterr().out
    assert "long: unfinished" in printed
    assert "last: not run" in printed

    harness.run(parts | {"long": (600, ENDS)})
    assert "Nothing is missing." in capsys.readouterr().out
    assert (harness.runs("long"), harness.runs("last")) == (2, 1)


def test_nothing_runs_without_versions(harness, capsys):
    parts = {"versions": (60, "sys.exit('another device')"), "other": (60, ENDS)}
    assert harness.run(parts) == 2
    assert "another device" in capsys.readouterr().err
    assert harness.runs("other") == 0


def test_two_runs_do_not_share_a_folder(harness, capsys):
    harness.out.mkdir()
    with on_device.sole_writer(harness.out), pytest.raises(SystemExit, match="2"):
        harness.run({"versions": (60, ENDS)})
    assert "another run is writing" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end processes")
def test_a_part_ends_with_a_killed_run(tmp_path):
    pid = tmp_path / "pid"
    hangs = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
    script = f"""
import sys, on_device
def parts(folder, small):
    code = {hangs + "time.sleep(60)"!r}
    return [on_device.Part("versions", 60, ["-c", code])]
on_device.parts = parts
on_device.main(["--out", {str(tmp_path / "out")!r}])
"""
    places = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    run = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": places}
    )
    wait_for(lambda: pid.exists() and pid.read_text(), 60)
    child = int(pid.read_text())
    run.send_signal(signal.SIGKILL)
    run.wait()

    def has_ended():
        state = Path(f"/proc/{child}/stat")
        # A zombie has ended, although nobody has waited for it.
        return not state.exists() or state.read_text().rsplit(")")[-1].split()[0] == "Z"

    wait_for(has_ended, 30)


SOME_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_number(number):
    assert number != 2

@pytest.mark.skip
def test_skipped():
    pass
"""


def test_tests_with_an_outcome_do_not_run_again(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    file = tmp_path / "outcomes.jsonl"
    # A killed run: one test has passed, the line of another was cut.
    line = {"test": "test_some.py::test_number[0]", "outcome": "passed"}
    file.write_text(f'{json.dumps(line)}\n{{"test": "test_some.py::test_num')
    plugins = ["-p", "outcomes", "--outcomes", str(file), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n1"]
    here = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    for expected in ("1 failed, 2 passed, 1 skipped", "no tests ran|5 deselected"):
        done = subprocess.run(
            command, cwd=tmp_path, env=here, capture_output=True, text=True
        )
        assert done.returncode == 1, done.stderr
        assert re.search(expected, done.stdout)
    found = outcomes.read(file)
    assert len(found) == 5
    failed = found["test_some.py::test_number[2]"]
    assert failed["outcome"] == "failed"
    assert "assert 2 != 2" in failed["error"]
    # Each ran once: two lines were there before.
    assert len(file.read_text().splitlines()) == 2 + 4


@pytest.mark.core
def test_all_tests_that_a_cpu_skips_are_kernel_tests():
    skips = (
        r'skipif\(jax\.default_backend\(\) (?:!= "(?:gpu|tpu)"|== "cpu").*?def (\w+)'
    )
    found = []
    for file in (ROOT / "tests").rglob("test_*.py"):
        if file != Path(__file__):
            names = re.findall(skips, file.read_text(), re.DOTALL)
            found += [f"{file.relative_to(ROOT)}::{name}" for name in names]
    assert found == on_device.KERNEL_TESTS


@pytest.mark.parametrize(
    ("noise", "is_enough"), [(0.01, True), (0.5, False)], ids=["steady", "noisy"]
)
def test_turns_end_when_the_medians_vary_little(noise, is_enough):
    import measure  # slow, so not while plain `pytest` collects tests

    options = argparse.Namespace(seconds=60, rounds=None, spread=5.0)
    eighth = measure.FEWEST_TURNS // measure.EIGHTHS
    seconds = [1 + noise * (i % 2) for i in range(measure.EIGHTHS)]
    turns = {"peer": [each for each in seconds for _ in range(eighth)]}
    assert measure._enough(turns, 1.0, options) == is_enough
    assert measure._enough(turns, 61.0, options)
    few = {"peer": turns["peer"][:-1]}
    assert not measure._enough(few, 1.0, options)
    options.spread = None
    assert not measure._enough(turns, 1.0, options)


def test_a_benchmark_resumes_after_its_last_cell(tmp_path):
    import measure

    options = argparse.Namespace(out=tmp_path / "table", resume=True)
    cells = [("a", 1), ("a", 2), ("b", 1)]
    ran = []
    for stop in (2, 3):
        with measure.Report("Table", {"implementation": ""}, options) as report:
            for cell in report.each(cells):
                if len(ran) == stop:
                    break
                ran.append(cell)
                report.add({"x": cell[0]}, {"ours": {"ms": 1.0}})
    assert ran == cells
    assert [row["cell"] for row in report.rows] == ["a 1", "a 2", "b 1"]

    saved = json.loads(report.file.read_text())
    report.file.write_text(json.dumps(saved | {"device": "another"}))
    with pytest.raises(SystemExit, match="choose another --out"):
        measure.Report("Table", {}, options)
