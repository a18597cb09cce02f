"""Versions of cuDNN with known faults: refused with a remedy; nothing is refused if the
version is not known.
"""

import importlib
import importlib.metadata
import types

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from cases import REMEDY
from kernels import abstract, explained
from marks import with_core

from flax_mha import dot_product_attention, explain_implementation
from flax_mha._src.engines.kernels import cudnn, cudnn_faults

AMPERE = cudnn.Device("NVIDIA A100", (8, 0))
HOPPER = cudnn.Device("NVIDIA H200", (9, 0))
BLACKWELL = cudnn.Device("NVIDIA B200", (10, 0))
GEFORCE = cudnn.Device("NVIDIA GeForce RTX 5090", (12, 0))

CAUSAL = {"is_causal": True}
WINDOW = {"is_causal": True, "local_window_size": 100}
PADDED = {"key_value_seq_lengths": np.int32([200, 256])}
LONG = abstract(1280, 1280, h=64)

# The device, the version, the arrays, other arguments, and what the reason says.
REFUSED = {
    "9.10.0": (HOPPER, (9, 10, 0), abstract(), CAUSAL, r"9\.10\.0.*9\.10\.2"),
    "9.10.1 on an A100": (AMPERE, (9, 10, 1), abstract(), {}, r"9\.10\.1.*9\.10\.2"),
    "9.14.0, a window and lengths": (
        HOPPER,
        (9, 14, 0),
        LONG,
        WINDOW | PADDED,
        r"9\.14\.0.*9\.14\.1",
    ),
    "9.14.0, a window and padding": (
        HOPPER,
        (9, 14, 0),
        abstract(1200, 1200, h=64),
        WINDOW,
        r"9\.14\.0.*9\.14\.1",
    ),
    "9.17 on a GeForce": (GEFORCE, (9, 17, 1), abstract(), CAUSAL, r"12\.0.*9\.18\.1"),
    "9.19 on a B200, one query": (
        BLACKWELL,
        (9, 19, 0),
        abstract(t=1),
        {},
        "one query",
    ),
    "9.30 on a B300, one query": (
        cudnn.Device("NVIDIA B300", (10, 3)),
        (9, 30, 0),
        abstract(t=1),
        {},
        "one query",
    ),
}
FINE = {
    "9.10.2": (HOPPER, (9, 10, 2), abstract(), CAUSAL),
    "9.9": (HOPPER, (9, 9, 0), abstract(), CAUSAL),
    "9.14.0, a window": (HOPPER, (9, 14, 0), LONG, WINDOW),
    "9.14.0, lengths": (HOPPER, (9, 14, 0), LONG, CAUSAL | PADDED),
    "9.14.0, a window and lengths, 1024 keys": (
        HOPPER,
        (9, 14, 0),
        abstract(1024, 1024, h=64),
        WINDOW | PADDED,
    ),
    "9.14.1, a window and lengths": (HOPPER, (9, 14, 1), LONG, WINDOW | PADDED),
    "9.18.1 on a GeForce": (GEFORCE, (9, 18, 1), abstract(), CAUSAL),
    "9.17 on a B200": (BLACKWELL, (9, 17, 0), abstract(), CAUSAL),
    "9.19 on a B200": (BLACKWELL, (9, 19, 0), abstract(), CAUSAL),
    "9.18 on a B200, one query": (BLACKWELL, (9, 18, 9), abstract(t=1), {}),
    "9.19 on an H200, one query": (HOPPER, (9, 19, 0), abstract(t=1), {}),
    "not known": (HOPPER, None, abstract(), CAUSAL),
}


@pytest.fixture
def gpu(monkeypatch):
    """A function that sets the GPU and the version of cuDNN."""
    kernels.as_if_cudnn_were_here(monkeypatch)
    kernels.cases.compiled_for(monkeypatch, "gpu")

    def use(device, version):
        monkeypatch.setattr(cudnn, "device", lambda platform: device)
        monkeypatch.setattr(cudnn_faults, "version", lambda: version)

    yield use
    kernels.cases.forget_programs()


@pytest.mark.parametrize(
    "name", with_core(REFUSED, "9.10.0", "9.14.0, a window and padding")
)
def test_a_version_with_a_fault_is_refused_with_a_remedy(name, gpu):
    device, version, arrays, arguments, reason = REFUSED[name]
    gpu(device, version)
    [refusal] = explained(arrays, **arguments).refusals["cudnn"]
    assert REMEDY.search(refusal)
    assert "https://" in refusal
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(
            lambda *x: dot_product_attention(*x, implementation="cudnn", **arguments),
            *arrays,
        )


@pytest.mark.parametrize("name", with_core(FINE, "9.10.2"))
def test_other_versions_and_calls_are_not_refused(name, gpu):
    device, version, arrays, arguments = FINE[name]
    gpu(device, version)
    assert explained(arrays, **arguments).refusals["cudnn"] == []


def test_all_faults_of_one_call_are_listed(gpu):
    """Next to the reasons that do not depend on the version."""
    gpu(GEFORCE, (9, 10, 1))
    reasons = explained(abstract(dtype=jnp.float32), is_causal=True).refusals["cudnn"]
    assert len(reasons) == 3
    assert all(map(REMEDY.search, reasons))


@pytest.mark.core
def test_an_explanation_for_cuda_knows_the_installed_version(monkeypatch):
    """On a machine without a GPU, for an H100."""
    x = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    assert (
        explain_implementation(x, x, x, is_causal=True, platform="cuda").refusals[
            "cudnn"
        ]
        == []
    )
    monkeypatch.setattr(cudnn_faults, "version", lambda: (9, 10, 1))
    [reason] = explain_implementation(
        x, x, x, is_causal=True, platform="cuda"
    ).refusals["cudnn"]
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
        cudnn_faults.version.cache_clear()
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
        cudnn_faults.version.cache_clear()

    def plugin(self, cuda, number=None):
        def cudnn_get_version():
            if number is None:
                raise RuntimeError("Unable to load cuDNN. Is it installed?")
            return number

        self.modules[f"jax_cuda{cuda}_plugin._versions"] = types.SimpleNamespace(
            cudnn_get_version=cudnn_get_version
        )

    def test_no_plugin(self):
        """PyTorch may have brought a cuDNN that JAX does not use."""
        self.packages["nvidia-cudnn-cu12"] = "9.10.1.4"
        assert cudnn_faults.version() is None

    @pytest.mark.parametrize(
        ("number", "version"),
        [(91002, (9, 10, 2)), (90800, (9, 8, 0)), (92501, (9, 25, 1))],
    )
    def test_plugin(self, number, version):
        self.plugin(12, number)
        assert cudnn_faults.version() == version

    def test_plugin_that_finds_no_library(self):
        self.plugin(13)
        self.packages.update(
            {"nvidia-cudnn-cu13": "9.14.0.64", "nvidia-cudnn-cu12": "9.10.1.4"}
        )
        assert cudnn_faults.version() == (9, 14, 0)

    @pytest.mark.parametrize("text", [None, "9", "9.x.1"])
    def test_plugin_that_finds_no_library_and_no_package(self, text):
        self.plugin(12)
        if text is not None:
            self.packages["nvidia-cudnn-cu12"] = text
        assert cudnn_faults.version() is None
