"""The tests in `devices/`, which need eight devices: in processes of their own, on a
CPU divided into eight.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import core

FOLDER = Path(__file__).parent / "devices"


@pytest.mark.parametrize("marked", [core("core"), "not core"])
def test_on_eight_devices(marked, pytestconfig):
    cases = pytestconfig.getoption("cases")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        str(FOLDER),
    ]
    command += [] if cases is None else [f"--cases={cases}"]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
