"""These tests run in a process with eight devices, which `test_devices.py` starts;
elsewhere they are not collected.
"""

import os
import sys
from pathlib import Path

# The tables and helpers of the other tests.
sys.path.insert(0, str(Path(__file__).parent.parent))

collect_ignore_glob = (
    [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]
)
