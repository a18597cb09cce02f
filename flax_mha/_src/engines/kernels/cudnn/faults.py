"""Versions of cuDNN that are known to fail or to be wrong, from other projects' code
and reports.

Only what these sources say is in the table, and only for calls that `engine.py` can
make. It pads sequences to multiples of 128, with lengths, and stores the log-sum-exp in
packed [B, N, T], so these faults cannot occur:

- an error for T = S = 1 in the backward pass (SUPPORT)

- NaN gradients of queries if S % 128 == 64:
  https://github.com/pytorch/pytorch/issues/196678
- NaN gradients of keys and values for one query without padding (9.25.1, 9.26):
  https://github.com/NVIDIA/cudnn-frontend/issues/1072
- wrong gradients if the log-sum-exp is not packed (before 9.26):
  https://github.com/NVIDIA/cudnn-frontend/pull/304
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

Version = tuple[int, int, int]
Capability = tuple[int, int]  # CUDA compute capability: (9, 0) is Hopper

TRANSFORMER_ENGINE = (
    "https://github.com/NVIDIA/TransformerEngine/blob/"
    "d0067d0da6cb01811b8072a7d304f0e00344ce2b/"
    "transformer_engine/common/fused_attn/fused_attn.cpp"
)
SUPPORT = (
    "https://github.com/NVIDIA/cudnn-frontend/blob/"
    "3929da2ef4c1dba1bb8acb68727b9134f26f40c0/"
    "include/cudnn_frontend/node/scaled_dot_product_flash_attention.h"
)


class Facts(NamedTuple):
    """What decides whether a fault concerns a call."""

    queries: int  # before padding
    keys: int  # after padding
    has_window: bool
    # Whether cuDNN gets lengths, from the caller or because of padding.
    has_lengths: bool
    has_bias: bool
    query_elements: int  # after padding


class Fault(NamedTuple):
    """A fault of all versions from `first` until before `mended`, on GPUs from `oldest`
    until before `newer`.
    """

    first: Version
    concerns: Callable[[Facts], bool]
    what: str
    source: str
    mended: Version | None = None  # None: no version is known to be without the fault
    oldest: Capability = (8, 0)  # `engine.py` rejects older GPUs
    newer: Capability | None = None  # None: all newer GPUs

    def occurs(self, version: Version, capability: Capability, facts: Facts) -> bool:
        """Returns whether the fault occurs with this version, on this GPU, in this
        call.
        """
        if version < self.first or capability < self.oldest:
            return False
        if self.mended is not None and version >= self.mended:
            return False
        if self.newer is not None and capability >= self.newer:
            return False
        return self.concerns(facts)


FAULTS = (
    Fault(
        first=(9, 10, 0),
        mended=(9, 10, 2),
        concerns=lambda facts: True,
        what="has known bugs in attention with 16 bits",
        source=TRANSFORMER_ENGINE,
    ),
    Fault(
        first=(8, 9, 0),
        mended=(9, 10, 2),
        concerns=lambda facts: facts.has_window and facts.has_bias,
        what="does not support a window with a bias, or with a mask that becomes one",
        source=SUPPORT,
    ),
    Fault(
        first=(9, 0, 0),
        concerns=lambda facts: facts.query_elements > 2**31,
        what="may be wrong for queries of more than 2^31 elements, by one report",
        source="as in other kernels: https://github.com/PriorLabs/TabPFN/pull/1184",
    ),
    Fault(
        first=(9, 14, 0),
        mended=(9, 14, 1),
        concerns=lambda facts: (
            facts.has_window and facts.has_lengths and facts.keys > 1024
        ),
        what=(
            "can return NaN with a window and lengths (or padding) for more than 1024 "
            "keys"
        ),
        source="https://github.com/NVIDIA/TransformerEngine/pull/2344",
    ),
    Fault(
        first=(9, 0, 0),
        mended=(9, 18, 1),
        oldest=(12, 0),
        newer=(12, 1),
        concerns=lambda facts: True,
        what="does not support attention on GPUs of compute capability 12.0",
        source=TRANSFORMER_ENGINE,
    ),
    # The report compares versions 9.19 and 9.20. PyTorch rejects one query from 9.19
    # on, whatever the number of heads. `engine.py` pads one query to 128; no source
    # says whether that avoids the fault.
    Fault(
        first=(9, 19, 0),
        oldest=(10, 0),
        newer=(13, 0),
        concerns=lambda facts: facts.queries == 1,
        what="can return wrong results for one query on Blackwell GPUs",
        source=(
            "https://github.com/pytorch/pytorch/issues/193893, "
            "https://github.com/pytorch/pytorch/pull/194927"
        ),
    ),
)


def reasons_against_version(capability: Capability, facts: Facts) -> list[str]:
    """Lists the installed version's known faults that concern a call, with remedies; []
    if it is not known.
    """
    installed = version()
    if installed is None:
        return []
    reasons = []
    for fault in FAULTS:
        if fault.occurs(installed, capability, facts):
            remedy = 'implementation="blockwise"'
            if fault.mended is not None:
                remedy = f"cuDNN {_text(fault.mended)} or later, or {remedy}"
            reasons.append(
                f"cuDNN {_text(installed)} {fault.what} ({fault.source}): use {remedy}"
            )
    return reasons


@functools.cache
def version() -> Version | None:
    """Returns the version of the cuDNN that JAX uses, or None if that is not known, as
    without JAX's CUDA plugin.
    """
    for cuda in (13, 12):  # in the order in which JAX looks for its plugins
        try:
            versions = importlib.import_module(f"jax_cuda{cuda}_plugin._versions")
        except ImportError:
            continue
        try:
            number = int(versions.cudnn_get_version())
        # The library cannot be loaded, as on a machine without a driver.
        except Exception:
            return _version_of_package(f"nvidia-cudnn-cu{cuda}")
        return number // 10000, number // 100 % 100, number % 100
    return None


def _version_of_package(name: str) -> Version | None:
    try:
        major, minor, patch, *_ = map(int, importlib.metadata.version(name).split("."))
    # The package is not installed, or its version has another form.
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return major, minor, patch


def _text(version: Version) -> str:
    return ".".join(map(str, version))
