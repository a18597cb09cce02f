"""Compiled programs that a later run loads, without tracing anything: Python needs longer for that than to load them.

JAX's own cache of what it compiled can only be asked once a function has been traced and lowered.
"""

import hashlib
import os
import pickle
import platform
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import flax_mha
from train_demo.files import write_atomically

BUILT_ON = ("jax", "jaxlib", "flax", "optax", "numpy")


class Programs:
    """A folder of compiled programs for one device.

    Args:
        folder: where they lie; None keeps none.
        decisive: everything that decides what they compute, besides the code and JAX's configuration.
    """

    def __init__(self, folder: Path | None, *decisive: object):
        self._folder, self._decisive = folder, decisive

    def get(self, name: str, make: Callable[[], jax.stages.Wrapped]) -> Callable[..., Any]:
        """Returns a compiled function that is loaded, or else made, when it is called first.

        Args:
            name: of the program.
            make: makes the function, all of whose calls have arguments of the same shapes.
        """
        if self._folder is None:
            return make()
        key = hashlib.sha256(repr((name, self._decisive, self._around)).encode()).hexdigest()
        return _Program(self._folder / f"{name}-{key}.program", make)

    @cached_property
    def _around(self) -> tuple[object, ...]:
        return _surroundings()


class _Program:
    def __init__(self, path: Path, make: Callable[[], jax.stages.Wrapped]):
        self._path, self._make = path, make
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._loaded() or self._lowered(*args)
        return self._compiled(*args)

    def _loaded(self) -> jax.stages.Compiled | None:
        with suppress(Exception):  # whatever is wrong with a file, the program can be made anew
            content, arguments, results = pickle.loads(zlib.decompress(self._path.read_bytes()))  # zlib sees damage
            device = jax.devices()[0]
            return serialize_executable.deserialize_and_load(content, arguments, results, device.client, [device])
        return None

    def _lowered(self, *args: Any) -> jax.stages.Compiled:
        lowered = self._make().lower(*args)
        with _without_cache():
            compiled = lowered.compile()
        with suppress(Exception):  # some devices cannot, and a disk may be full
            content = pickle.dumps(serialize_executable.serialize(compiled))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, zlib.compress(content, 1))
        return compiled


@contextmanager
def _without_cache() -> Iterator[None]:
    """Has JAX compile anew: what it loads from its own cache cannot be saved again, as the machine code is missing."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it asks but once in a process whether it is enabled
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _surroundings() -> tuple[object, ...]:
    """What decides, besides its arguments, what JAX makes of a function of this package, and where that can run."""
    packages = [Path(file).parent for file in (flax_mha.__file__, __file__)]
    code = hashlib.sha256()
    for file in sorted(file for package in packages for file in package.rglob("*.py")):
        code.update(file.read_bytes())
    device = jax.devices()[0]
    versions = [platform.python_version(), device.client.platform_version, *map(version, BUILT_ON)]
    configuration = sorted(jax.config.values.items()), os.environ.get("XLA_FLAGS")
    return code.hexdigest(), versions, device.device_kind, _processor(), configuration


def _processor() -> object:
    """What the processor can execute; where the system does not say, the machine's name stands for it."""
    try:
        return re.findall(r"^(?:model name|flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:2]
    except OSError:
        return platform.machine(), platform.node()
