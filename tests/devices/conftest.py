"""These tests run in a process with eight devices, which `test_devices.py` starts; elsewhere they are not collected."""

import os

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]
