"""Strictness for every test: shapes are checked at run time, and nothing promotes or broadcasts in silence."""

import gc
import importlib.util
import os
import platform
import random
from collections import defaultdict
from importlib.metadata import version

# Most of the time goes into compiling, and most of that into machine code that runs once. Without LLVM's optimizations
# only rounding differs. So it does with XLA's older generator of CPU code, which takes a third of the time; later
# versions lack it, and end at flags that they do not know. AVX has no fused multiply-add: with one, bits would depend
# on what is fused into what. Splitting a program, to generate its parts side by side, takes longer than it saves where
# other tests use the other cores. Set XLA_FLAGS, if only to nothing, to have what users have; .ci/run does both.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    " --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10.") and platform.machine() == "x86_64"
    else "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest
from jaxtyping import install_import_hook

# Before the package is imported: the shapes in the signatures of these files become checks. (Not in those with pytrees,
# which jax also fills with placeholders.)
CHECKED = ("math.softmax", "engines.blockwise", "math.online_softmax", "core.tile")
install_import_hook([f"flax_mha._src.{name}" for name in CHECKED], "beartype.beartype")

from flax_mha._src import plan as schedule  # noqa: E402
from flax_mha._src.math import tiling  # noqa: E402
from flax_mha._src.math.tiling import TileShape  # noqa: E402

# Tests of the demo name it as a plugin; the search for examples in docstrings may have imported it before.
pytest.register_assert_rewrite("demo_fixtures")
# These hold no tests; the tests that use them are skipped.
OF_TRANSFORMERS = ["torch_transformers.py", "hf_decoders.py", "hf_families.py", "hf_positions.py"]
collect_ignore = [] if importlib.util.find_spec("transformers") else OF_TRANSFORMERS

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Tracing makes many objects that stay. Collecting garbage as often as Python does takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)


# The files that take longest come first, so that none of them begins when the other processes are done.
LONGEST = ("test_devices.py", "test_fuzz.py", "test_train_demo.py", "test_train_demo_processes.py")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every test, not only those marked as the core")
    parser.addoption("--cases", type=int, help="of each parametrized test, run at most so many cases; all by default")


def runs_core_alone(config):
    """Whether this is plain `pytest`: neither `--all` nor a path or a node id is given."""
    return not config.getoption("all") and config.args_source != pytest.Config.ArgsSource.ARGS


def pytest_configure_node(node):
    """Tells a worker, which gets the paths as arguments in any case."""
    node.workerinput["core_alone"] = runs_core_alone(node.config)


def pytest_itemcollected(item):
    """Every example of a docstring is core."""
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("core")


def pytest_collection_modifyitems(config, items):
    """Keeps only the core in plain `pytest`, and with `--cases` that many of each test, the same in every run."""
    kept = items
    worker = getattr(config, "workerinput", None)
    if worker["core_alone"] if worker else runs_core_alone(config):
        kept = [item for item in kept if item.get_closest_marker("core")]
    if count := config.getoption("cases"):
        tests = defaultdict(list)
        for item in kept:
            tests[item.nodeid.split("[")[0]].append(item)
        drawn = {x for name, cases in tests.items() for x in random.Random(name).sample(cases, min(count, len(cases)))}
        kept = [item for item in kept if item in drawn]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = sorted(kept, key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    """Imported objects are not garbage."""
    gc.freeze()


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles each way in lengths of a few dozen, cut into cells and bands."""
    monkeypatch.setattr(schedule, "TILE_SHAPES", (TileShape(16, 32), TileShape(32, 32, 2), TileShape(16, 16)))
    monkeypatch.setattr(tiling, "CELL", 8)
