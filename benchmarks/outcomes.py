"""A pytest plugin that writes the outcome of each test as it ends, as a line of JSON,
and continues from such a file: tests that it holds do not run again.

    PYTHONPATH=benchmarks pytest -p outcomes --outcomes FILE

The exit code is 1 if any test of the file has failed.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The name of each test -> its line. A line that a kill has cut is skipped."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                outcome = json.loads(line)
            except ValueError:
                continue
            name = outcome["test"]
            # A test that passed may still fail while it is torn down.
            if found.get(name, {}).get("outcome") != "failed":
                found[name] = outcome
    return found


class Recorder:
    """Writes the outcomes; pytest-xdist tells this process those of its workers."""

    def __init__(self, path: Path):
        self._path = path
        # Read once: all workers, also those that replace a crashed one, must choose the
        # same tests.
        self.recorded = sorted(read(path))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["recorded"] = self.recorded

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = {"test": report.nodeid, "outcome": report.outcome}
        outcome["seconds"] = round(report.duration, 3)
        if report.failed:
            outcome["error"] = report.longreprtext[-2000:]
        with self._path.open("a") as file:
            # A kill may have cut the last line, so each begins with a line break.
            file.write(f"\n{json.dumps(outcome)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        over = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if session.exitstatus in over and self.recorded:
            outcomes = [test["outcome"] for test in read(self._path).values()]
            session.exitstatus = int("failed" in outcomes)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        recorder = Recorder(config.getoption("outcomes").absolute())
        config.pluginmanager.register(recorder, "recorder")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if hasattr(config, "workerinput"):
        recorded = set(config.workerinput["recorded"])
    else:
        recorded = set(config.pluginmanager.get_plugin("recorder").recorded)
    items[:] = [item for item in items if item.nodeid not in recorded]
