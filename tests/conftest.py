"""Settings and options of all tests. Implicit promotion of dtypes or ranks is an error;
some shapes are checked.
"""

import gc
import importlib.util
import os
import platform
import random
from collections import defaultdict
from importlib.metadata import version

# Most of the time is spent on compiling code that runs once. Level 0 turns off LLVM's
# optimizations, which change only rounding. XLA's older CPU code generator takes a
# third of the time, and also changes only rounding; later versions lack it, and abort
# at unknown flags. AVX has no fused multiply-add, which would make results depend on
# XLA's fusions. Compiling parts of a program in parallel takes longer than it saves if
# other tests use the other cores. To test with the settings of users, set XLA_FLAGS='',
# as `.ci/run` does for the core tests.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_max_isa=AVX --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10.") and platform.machine() == "x86_64"
    else "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
)

# A GPU rounds products of float32 to TF32, with errors of 1e-3: not in cuBLAS then, and
# XLA uses no kernels of its own.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"

import jax
import pytest
from jaxtyping import install_import_hook

# Calls of these modules' functions check the shapes in their signatures, if this runs
# before the package is imported. (Modules with pytrees are left out: JAX also fills
# these with placeholders.)
CHECKED = ("math.softmax", "engines.blockwise", "core.tile")
install_import_hook([f"flax_mha._src.{name}" for name in CHECKED], "beartype.beartype")

from flax_mha._src import plan as schedule  # noqa: E402
from flax_mha._src.math import tiling  # noqa: E402
from flax_mha._src.math.tiling import TileShape  # noqa: E402

# Tests of the demo load this plugin. Register it before the collection of doctests
# imports it, or it is not rewritten.
pytest.register_assert_rewrite("demo_fixtures")
# These helper files need transformers. Without it, the tests that use them are skipped.
OF_TRANSFORMERS = [
    "torch_transformers.py",
    "hf_decoders.py",
    "hf_families.py",
    "hf_positions.py",
]
collect_ignore = [] if importlib.util.find_spec("transformers") else OF_TRANSFORMERS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Tracing makes many objects that stay alive. With Python's defaults, garbage collection
# takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)


# The slowest files run first, so that no process is still busy with one of them when
# the others are done.
LONGEST = (
    "test_devices.py",
    "test_fuzz.py",
    "test_train_demo.py",
    "test_train_demo_processes.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run all tests, not only the core tests"
    )
    parser.addoption(
        "--cases",
        type=int,
        help="maximum number of cases to run of each parametrized test; default: all",
    )


def runs_core_alone(config):
    """Whether this is plain `pytest`: without `--all`, a path or a node id."""
    return (
        not config.getoption("all")
        and config.args_source != pytest.Config.ArgsSource.ARGS
    )


def pytest_configure_node(node):
    """Tells workers of pytest-xdist, which cannot find it out: their arguments always
    contain paths.
    """
    node.workerinput["core_alone"] = runs_core_alone(node.config)


def pytest_itemcollected(item):
    """Marks the examples in docstrings as core tests."""
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("core")


def pytest_collection_modifyitems(config, items):
    """Keeps only core tests in plain `pytest`, and with `--cases=n` the same n random
    cases of a test in every run.
    """
    kept = items
    worker = getattr(config, "workerinput", None)
    if worker["core_alone"] if worker else runs_core_alone(config):
        kept = [item for item in kept if item.get_closest_marker("core")]
    if count := config.getoption("cases"):
        tests = defaultdict(list)
        for item in kept:
            tests[item.nodeid.split("[")[0]].append(item)
        drawn = {
            x
            for name, cases in tests.items()
            for x in random.Random(name).sample(cases, min(count, len(cases)))
        }
        kept = [item for item in kept if item in drawn]
    config.hook.pytest_deselected(
        items=[item for item in items if item not in set(kept)]
    )
    items[:] = sorted(kept, key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Excludes all objects that exist by now from garbage collection."""
    gc.freeze()


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes tiles so small that even a few dozen queries and keys need several, with
    several cells and bands.
    """
    monkeypatch.setattr(
        schedule,
        "TILE_SHAPES",
        (TileShape(16, 32), TileShape(32, 32, 2), TileShape(16, 16)),
    )
    monkeypatch.setattr(tiling, "CELL", 8)
