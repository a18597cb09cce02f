"""These tests run in a process with eight devices, which `test_devices.py` starts;
elsewhere they are not collected.
"""

import os
import sys
from pathlib import Path

# The tables and helpers of the other tests.
sys.path.insert(0, str(Path(__file__).parent.parent))

if os.environ.get("JAX_NUM_CPU_DEVICES") == "8":
    collect_ignore_glob = []
else:
    collect_ignore_glob = ["test_*.py"]
