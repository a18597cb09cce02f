"""The house keeps its plan: imports point down only, the core needs jax and flax alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flax_mha"

# Each may import what stands in its own line, and nothing else of the package.
BELOW = {
    "__init__": {
        "adapter",
        "attention",
        "cached_attention",
        "context_parallel",
        "convert",
        "kv_cache",
        "linen",
        "masks",
        "nnx",
        "plot",
        "recipes",
        "rope",
    },
    "recipes": {"masks"},
    "rope": {"_integers", "_rope_config", "_rope_scaling"},
    "_rope_config": {"_rope_scaling"},
    "_rope_scaling": set(),
    "plot": {"masks"},
    "nnx": {"_call", "_explained", "_module", "_tensor_parallel", "adapter", "attention", "kv_cache", "masks", "rope"},
    "linen": {
        "_call",
        "_check",
        "_explained",
        "_module",
        "_tensor_parallel",
        "adapter",
        "attention",
        "kv_cache",
        "masks",
        "rope",
    },
    "_presets": {"adapter"},
    "_tensor_parallel": {"_call", "_platform"},
    "_module": {
        "_check",
        "_choose",
        "_explained",
        "_integers",
        "_presets",
        "_tensor_parallel",
        "adapter",
        "cached_attention",
        "context_parallel",
        "kv_cache",
        "masks",
        "rope",
    },
    "_explained": {
        "_call",
        "_check",
        "_choose",
        "_presets",
        "adapter",
        "attention",
        "cached_attention",
        "context_parallel",
        "kv_cache",
        "masks",
    },
    "cached_attention": {"_call", "_check", "_choose", "_impl.schedule", "_mesh", "_platform", "kv_cache", "masks"},
    "context_parallel": {"_call", "_check", "_context", "adapter", "masks"},
    "adapter": {"_call", "_check", "attention", "masks"},
    "attention": {"_call", "_choose", "masks"},
    "_choose": {
        "_call",
        "_context",
        "_impl.gather",
        "_impl.ring",
        "_impl.schedule",
        "_impl.xla",
        "_mesh",
        "_platform",
        "_platform_branch",
        "_split",
    },
    "_platform_branch": {"_call"},
    "_mesh": {"_call", "_platform", "_split"},
    "_split": {"_call", "_context", "_platform"},
    "_impl.ring": {"_call", "_context", "_impl.online_softmax", "_impl.parts", "_tiles"},
    "_impl.gather": {"_call", "_context", "_impl.parts"},
    "_impl.parts": {"_call", "_context", "_tiles"},
    "_impl.cudnn": {"_call", "_impl.kernel_mask", "_impl.nonfinite", "_impl.when_finite"},
    "_impl.splash": {"_call", "_impl.kernel_mask", "_impl.when_finite", "_platform"},
    "_impl.pallas.__init__": set(),
    "_impl.pallas.call": {
        "_call",
        "_impl.layout",
        "_impl.pallas.cut",
        "_impl.pallas.derivatives",
        "_impl.pallas.launch",
        "_impl.pallas.prepare",
        "_impl.pallas.steps",
        "_impl.tiling",
        "_platform",
        "masks",
        "masks.base",
    },
    "_impl.pallas.derivatives": {
        "_impl.pallas.backward",
        "_impl.pallas.forward",
        "_impl.pallas.launch",
        "_impl.pallas.operands",
        "_impl.pallas.prepare",
        "_impl.pallas.steps",
    },
    "_impl.pallas.prepare": {
        "_call",
        "_impl.head_operands",
        "_impl.heads",
        "_impl.nonfinite",
        "_impl.pallas.cut",
        "_impl.pallas.held",
        "_impl.pallas.operands",
        "_impl.pallas.steps",
        "_impl.pallas.tile",
        "_impl.scores",
        "_impl.tiling",
        "masks",
        "masks.base",
    },
    "_impl.pallas.backward": {
        "_impl.pallas.held",
        "_impl.pallas.launch",
        "_impl.pallas.operands",
        "_impl.pallas.steps",
    },
    "_impl.pallas.forward": {
        "_impl.pallas.held",
        "_impl.pallas.launch",
        "_impl.pallas.operands",
        "_impl.pallas.steps",
    },
    "_impl.pallas.held": {
        "_impl.pallas.launch",
        "_impl.pallas.operands",
        "_impl.pallas.tile",
        "_impl.pallas.tile_part",
        "_impl.scores",
        "_impl.tiling",
        "masks",
    },
    "_impl.pallas.launch": {
        "_impl.pallas.numbering",
        "_impl.pallas.operands",
        "_impl.pallas.steps",
        "_impl.tiling",
    },
    "_impl.pallas.tile": {"_impl.pallas.tile_part", "_impl.scores", "_impl.threefry", "_tiles", "masks"},
    "_impl.pallas.cut": {"_impl.pallas.tile_part", "_jaxprs", "_traced_function"},
    "_impl.pallas.tile_part": set(),
    "_impl.pallas.operands": {"_impl.pallas.numbering", "masks"},
    "_impl.pallas.steps": {"_impl.pallas.numbering"},
    "_impl.pallas.numbering": set(),
    "_impl.when_finite": {"_call", "_impl.kernel_mask", "_impl.xla", "_platform", "masks"},
    "_impl.kernel_mask": {"_call", "masks"},
    "_impl.xla": {
        "_call",
        "_impl.block_mask",
        "_impl.blockwise",
        "_impl.decode",
        "_impl.dense",
        "_impl.dense_gpu",
        "_impl.head_operands",
        "_impl.heads",
        "_impl.layout",
        "_impl.schedule",
        "_impl.scores",
        "_impl.tiling",
        "_platform",
    },
    "_impl.decode": {
        "_call",
        "_impl.heads",
        "_impl.layout",
        "_impl.nonfinite",
        "_impl.online_softmax",
        "_impl.products",
        "_impl.scores",
        "_platform",
        "_tiles",
        "masks",
    },
    "_impl.products": {"_impl.heads", "_impl.layout"},
    "_impl.head_operands": {"_call", "_impl.layout", "_impl.nonfinite", "_impl.scores"},
    "_impl.schedule": {
        "_call",
        "_impl.block_mask",
        "_impl.decode",
        "_impl.heads",
        "_impl.layout",
        "_impl.tiling",
        "_platform",
        "masks",
    },
    "_impl.blockwise": {
        "_call",
        "_impl.block_mask",
        "_impl.dense",
        "_impl.nonfinite",
        "_impl.online_softmax",
        "_impl.scores",
        "_impl.tiling",
        "_impl.visit",
        "_platform",
        "_tiles",
        "masks",
    },
    "_impl.visit": {"_impl.block_mask", "_impl.scores", "_impl.tiling", "_tiles", "masks"},
    "_impl.dense": {"_impl.nonfinite", "_impl.scores", "_tiles", "masks"},
    "_impl.dense_gpu": {"_call", "_impl.scores", "_tiles"},
    "_impl.block_mask": {"_impl.tiling", "_tiles", "masks"},
    "_impl.tiling": {"_tiles", "masks"},
    "_impl.scores": {"_call", "_impl.nonfinite", "_impl.threefry", "_platform", "_tiles", "_traced_function", "masks"},
    "_impl.layout": {"masks"},
    "_impl.heads": set(),
    "_impl.nonfinite": set(),
    "_impl.threefry": set(),
    "_impl.online_softmax": {"_impl.nonfinite"},
    "_impl.__init__": set(),
    "_call": {"_check", "_context", "_integers", "_lookups", "_platform", "_traced_function", "masks", "masks.base"},
    "_lookups": {"_jaxprs", "_traced_function"},
    "masks.__init__": {"masks.base", "masks.basic", "masks.function"},
    "masks.function": {"_check", "_jaxprs", "_platform", "_tiles", "_traced_function", "masks.base"},
    "masks.basic": {"_check", "_integers", "_tiles", "masks.base"},
    "masks.base": {"_check", "_platform", "_tiles", "_traced_function"},
    "_tiles": set(),
    "_traced_function": {"_captured", "_jaxprs", "_platform"},
    "_captured": set(),
    "_jaxprs": {"_platform"},
    "_check": {"_context", "_integers", "_platform"},
    "_context": {"_platform"},
    "_integers": {"_platform"},
    "_platform": set(),
    "kv_cache": {"_cache_write", "_call", "_check", "_integers", "_mesh", "_platform"},
    "_cache_write": {"_mesh", "_platform"},
    "convert.__init__": {"convert.hf_config", "convert.layouts", "convert.load", "convert.weights"},
    "convert.hf_config": {"convert.layouts", "rope"},
    "convert.load": {"convert.layouts", "convert.shapes", "convert.state_dict", "convert.weights"},
    "convert.weights": {"convert.layouts", "convert.shapes", "convert.state_dict"},
    "convert.state_dict": {"convert.layouts"},
    "convert.shapes": {"convert.layouts"},
    "convert.layouts": set(),
}


def imports(path):
    """Dotted names of all that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                path = ROOT / node.module.replace(".", "/") / alias.name
                is_module = path.with_suffix(".py").exists() or path.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


FILES = {
    str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path for path in sorted(PACKAGE.rglob("*.py"))
}


def test_every_file_has_its_line_in_the_plan():
    assert set(FILES) == set(BELOW)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down_only(name):
    inside = {n.removeprefix("flax_mha.") for n in imports(FILES[name]) if n.startswith("flax_mha")}
    assert inside <= BELOW[name]


@pytest.mark.parametrize("name", FILES)
def test_only_jax_and_flax_are_needed(name):
    allowed = {"matplotlib"} if name == "plot" else set()
    allowed |= {"flax", "flax_mha", "jax", "jaxtyping", "ml_dtypes", "numpy", *sys.stdlib_module_names}
    assert {n.split(".")[0] for n in imports(FILES[name])} <= allowed


@pytest.mark.parametrize("name", FILES)
def test_nothing_private_of_jax_or_flax(name):
    assert not [n for n in imports(FILES[name]) if re.search(r"^(jax|flax)\..*\b_", n)]


def test_the_demo_uses_the_public_names():
    for path in (ROOT / "train_demo").glob("*.py"):
        if path.name == "torch_model.py":  # the export's model; nothing imports it
            assert {n.split(".")[0] for n in imports(path)} == {"torch"}
        else:
            assert not [n for n in imports(path) if re.match(r"flax_mha\._|torch|train_demo\.torch_model", n)]


def test_importing_the_package_brings_no_peer_and_no_demo():
    code = "import flax_mha, sys; print(*sorted({'torch', 'matplotlib', 'train_demo'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_the_readme_names_every_file():
    text = (ROOT / "README.md").read_text()
    for path in [*FILES.values(), *(ROOT / "train_demo").glob("*.py")]:
        assert path.name in text
