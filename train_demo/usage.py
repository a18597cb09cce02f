"""`usage.json`: what computed a run, and how much memory that took."""

import platform
import sys
from json import dumps
from pathlib import Path
from typing import Any

import jax

from train_demo.files import read_json, write_atomically

FILE = "usage.json"
Usage = dict[str, str | int]


def measure(mesh: jax.sharding.Mesh | None) -> Usage:
    """Describes this process and its devices; sizes are bytes, and the largest ones so far."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    found: Usage = {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    if memory := _memory_of_process():
        found["memory_of_process"] = memory
    local = next((device for device in devices if device.process_index == jax.process_index()), devices[0])
    if on_device := (local.memory_stats() or {}).get("peak_bytes_in_use"):
        found["memory_of_device"] = int(on_device)
    return found


def _memory_of_process() -> int:
    """0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write(out: Path, usage: Usage) -> None:
    """Writes it into a run's folder."""
    write_atomically(out / FILE, dumps(usage, indent=2).encode())


def read(out: Path) -> Usage:
    """Reads what a finished run noted; nothing where there is no such file, or it is damaged."""
    try:
        found: Any = read_json(out / FILE)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if type(value) in (str, int)}
