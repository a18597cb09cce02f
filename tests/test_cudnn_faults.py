"""Versions of cuDNN with known faults: refused with a remedy; nothing is refused if the
version is not known.
"""

import functools
import importlib
import importlib.metadata
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import REMEDY
from kernels import abstract, explained
from marks import with_core

from flax_mha import dot_product_attention, explain_implementation
from flax_mha._src.engines.kernels.cudnn import engine as cudnn
from flax_mha._src.engines.kernels.cudnn import faults

AMPERE = cudnn.Device("NVIDIA A100", (8, 0))
HOPPER = cudnn.Device("NVIDIA H200", (9, 0))
BLACKWELL = cudnn.Device("NVIDIA B200", (10, 0))
GEFORCE = cudnn.Device("NVIDIA GeForce RTX 5090", (12, 0))

CAUSAL = {"is_causal": True}
WINDOW = {"is_causal": True, "local_window_size": 100}
PADDED = {"key_value_seq_lengths": np.int32([200, 256])}
LONG = abstract(1280, 1280, h=64)


class Case(NamedTuple):
    """A call on a device, with a version of cuDNN."""

    device: cudnn.Device
    version: tuple[int, int, int] | None
    arrays: Any
    arguments: dict[str, Any]


# Cases, and what the reason says.
FAULTY = {}
FAULTY["9.10.0"] = (
    Case(HOPPER, (9, 10, 0), abstract(), CAUSAL),
    r"9\.10\.0.*9\.10\.2",
)
FAULTY["9.10.1 on an A100"] = (
    Case(AMPERE, (9, 10, 1), abstract(), {}),
    r"9\.10\.1.*9\.10\.2",
)
# Only with more than 1024 keys; 1200 are padded to a multiple of the kernel's tile.
FAULTY["9.14.0, a window and lengths"] = (
    Case(HOPPER, (9, 14, 0), LONG, WINDOW | PADDED),
    r"9\.14\.0.*9\.14\.1",
)
FAULTY["9.14.0, a window and padding"] = (
    Case(HOPPER, (9, 14, 0), abstract(1200, 1200, h=64), WINDOW),
    r"9\.14\.0.*9\.14\.1",
)
FAULTY["9.17 on a GeForce"] = (
    Case(GEFORCE, (9, 17, 1), abstract(), CAUSAL),
    r"12\.0.*9\.18\.1",
)
FAULTY["9.19 on a B200, one query"] = (
    Case(BLACKWELL, (9, 19, 0), abstract(t=1), {}),
    "one query",
)
FAULTY["9.30 on a B300, one query"] = (
    Case(cudnn.Device("NVIDIA B300", (10, 3)), (9, 30, 0), abstract(t=1), {}),
    "one query",
)

MASK_AND_WINDOW = WINDOW | {"mask": np.ones((2, 1, 1, 256), bool)}
FAULTY["9.10 with a window and a mask"] = (
    Case(HOPPER, (9, 9, 0), abstract(), MASK_AND_WINDOW),
    r"9\.9\.0.*window with a bias.*9\.10\.2",
)
FAULTY["more than 2^31 elements"] = (
    Case(HOPPER, (9, 30, 0), abstract(2**18, 256, n=130, h=64), {}),
    r"more than 2\^31 elements",
)

FINE = {}
FINE["9.10.2 with a window and a mask"] = Case(
    HOPPER, (9, 10, 2), abstract(), MASK_AND_WINDOW
)
FINE["9.9 with a mask"] = Case(
    HOPPER, (9, 9, 0), abstract(), {"mask": np.ones((2, 1, 1, 256), bool)}
)
FINE["2^31 elements"] = Case(HOPPER, (9, 30, 0), abstract(2**18, 256, n=64, h=64), {})
FINE["9.10.2"] = Case(HOPPER, (9, 10, 2), abstract(), CAUSAL)
FINE["9.9"] = Case(HOPPER, (9, 9, 0), abstract(), CAUSAL)
FINE["9.14.0, a window"] = Case(HOPPER, (9, 14, 0), LONG, WINDOW)
FINE["9.14.0, lengths"] = Case(HOPPER, (9, 14, 0), LONG, CAUSAL | PADDED)
FINE["9.14.0, a window and lengths, 1024 keys"] = Case(
    HOPPER, (9, 14, 0), abstract(1024, 1024, h=64), WINDOW | PADDED
)
FINE["9.14.1, a window and lengths"] = Case(HOPPER, (9, 14, 1), LONG, WINDOW | PADDED)
FINE["9.18.1 on a GeForce"] = Case(GEFORCE, (9, 18, 1), abstract(), CAUSAL)
FINE["9.17 on a B200"] = Case(BLACKWELL, (9, 17, 0), abstract(), CAUSAL)
FINE["9.19 on a B200"] = Case(BLACKWELL, (9, 19, 0), abstract(), CAUSAL)
FINE["9.18 on a B200, one query"] = Case(BLACKWELL, (9, 18, 9), abstract(t=1), {})
FINE["9.19 on an H200, one query"] = Case(HOPPER, (9, 19, 0), abstract(t=1), {})
FINE["not known"] = Case(HOPPER, None, abstract(), CAUSAL)


@pytest.fixture
def gpu(monkeypatch):
    """A function that sets the GPU and the version of cuDNN."""
    kernels.as_if_cudnn_were_here(monkeypatch)
    kernels.cases.compiled_for(monkeypatch, "gpu")

    def use(device, version):
        monkeypatch.setattr(cudnn, "device", lambda platform: device)
        monkeypatch.setattr(faults, "version", lambda: version)

    yield use
    kernels.cases.forget_programs()


@pytest.mark.parametrize(
    "name", with_core(FAULTY, "9.10.0", "9.14.0, a window and padding")
)
def test_a_version_with_a_fault_is_refused_with_a_remedy(name, gpu):
    case, reason = FAULTY[name]
    gpu(case.device, case.version)

    [refusal] = explained(case.arrays, **case.arguments).refusals["cudnn"]

    assert REMEDY.search(refusal)
    assert "https://" in refusal
    attend = functools.partial(
        dot_product_attention, implementation="cudnn", **case.arguments
    )
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(attend, *case.arrays)


@pytest.mark.parametrize("name", with_core(FINE, "9.10.2"))
def test_other_versions_and_calls_are_not_refused(name, gpu):
    case = FINE[name]
    gpu(case.device, case.version)
    assert explained(case.arrays, **case.arguments).refusals["cudnn"] == []


@pytest.mark.parametrize(
    ("device", "largest"), [(AMPERE, 128), (HOPPER, 256), (BLACKWELL, 128)]
)
def test_the_largest_head_size_of_a_gpu(device, largest, gpu):
    """Of the backward pass."""
    gpu(device, (9, 30, 0))

    def refusals(size):
        return explained(abstract(h=size), is_causal=True).refusals["cudnn"]

    assert refusals(largest) == []
    [reason] = refusals(largest + 8)
    assert f"a multiple of 8 up to {largest}, but is {largest + 8}" in reason


def test_all_faults_of_one_call_are_listed(gpu):
    """Next to the reasons that do not depend on the version."""
    gpu(GEFORCE, (9, 10, 1))
    reasons = explained(abstract(dtype=jnp.float32), is_causal=True).refusals["cudnn"]
    assert len(reasons) == 3
    assert all(map(REMEDY.search, reasons))


@pytest.mark.core
def test_an_explanation_for_cuda_knows_the_installed_version(monkeypatch):
    """On a machine without a GPU, for an H100."""

    def reasons():
        x = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
        explained = explain_implementation(x, x, x, is_causal=True, platform="cuda")
        return explained.refusals["cudnn"]

    assert reasons() == []
    monkeypatch.setattr(faults, "version", lambda: (9, 10, 1))
    [reason] = reasons()
    assert "9.10.1" in reason


class TestVersion:
    """Where the version comes from: JAX's plugin asks the library, otherwise the
    package's version is read.
    """

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        """A function that sets what is installed: the plugins' modules, and the
        packages' versions.
        """
        faults.version.cache_clear()
        modules = {}
        packages = {}

        def import_module(name):
            if name not in modules:
                raise ImportError(name)
            return modules[name]

        def version(name):
            if name not in packages:
                raise importlib.metadata.PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(importlib, "import_module", import_module)
        monkeypatch.setattr(importlib.metadata, "version", version)
        self.modules = modules
        self.packages = packages
        yield
        faults.version.cache_clear()

    def plugin(self, cuda, number=None):
        def cudnn_get_version():
            if number is None:
                raise RuntimeError("Unable to load cuDNN. Is it installed?")
            return number

        self.modules[f"jax_cuda{cuda}_plugin._versions"] = types.SimpleNamespace(
            cudnn_get_version=cudnn_get_version
        )

    def test_without_a_plugin_the_version_is_not_known(self):
        """PyTorch may have brought a cuDNN that JAX does not use."""
        self.packages["nvidia-cudnn-cu12"] = "9.10.1.4"
        assert faults.version() is None

    @pytest.mark.parametrize(
        ("number", "version"),
        [(91002, (9, 10, 2)), (90800, (9, 8, 0)), (92501, (9, 25, 1))],
    )
    def test_plugin_knows_the_version(self, number, version):
        self.plugin(12, number)
        assert faults.version() == version

    def test_plugin_without_a_library_takes_the_version_of_the_package(self):
        self.plugin(13)
        # The package for CUDA 13 counts, as the plugin's does.
        self.packages["nvidia-cudnn-cu13"] = "9.14.0.64"
        self.packages["nvidia-cudnn-cu12"] = "9.10.1.4"
        assert faults.version() == (9, 14, 0)

    @pytest.mark.parametrize("text", [None, "9", "9.x.1"])
    def test_plugin_without_library_and_package_knows_no_version(self, text):
        self.plugin(12)
        if text is not None:
            self.packages["nvidia-cudnn-cu12"] = text
        assert faults.version() is None
