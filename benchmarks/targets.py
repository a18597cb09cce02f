"""Accelerators that need not be present: devices for compiling ahead of time, and our
choices for these devices.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies

from flax_mha._src.core import tracing
from flax_mha._src.engines.kernels.cudnn import engine as cudnn

# What XLA has to know of an NVIDIA H200, as a text proto (GpuTargetConfigProto).
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 device_memory_size: 151397597184
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
"""


class Target(NamedTuple):
    """What is compiled for."""

    platform: str
    devices: list[Any]


def target_of(name: str) -> Target:
    """The devices of that name, which need not exist."""
    if name.startswith("h200"):
        count = int(name.removeprefix("h200").removeprefix("x") or 1)
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology=f"1x{count}x1"
        )
        return Target("gpu", topology.devices)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return Target("tpu", topology.devices)


@contextlib.contextmanager
def compiling_for(target: Target, count: int = 1) -> Iterator[None]:
    """Has our choice of implementation, and jax's checks of cuDNN, take `count` of
    these devices for those here.
    """
    # Every module of ours that has imported the function that names the platform.
    names = [name for name in sys.modules if name.startswith("flax_mha.")]
    asked = []
    for name in names:
        module = sys.modules[name]
        if getattr(module, "platform", None) is tracing.platform:
            asked.append(module)
    # jax asks the driver for cuDNN's version and the device's capability.
    theirs = "jax._src.cudnn.fused_attention_stablehlo"
    with contextlib.ExitStack() as stack:
        patches: list[Any] = [mock.patch("jax.device_count", return_value=count)]
        for module in asked:
            here = mock.patch.object(module, "platform", return_value=target.platform)
            patches.append(here)
        if target.platform == "gpu":
            device = cudnn.Device("NVIDIA H200", (9, 0))
            patches += [
                mock.patch.object(cudnn, "device", return_value=device),
                mock.patch.object(cudnn, "failure", return_value=[]),
                mock.patch(f"{theirs}.check_cudnn_version", return_value=91000),
                mock.patch(f"{theirs}.check_compute_capability", return_value=True),
            ]
        for patch in patches:
            stack.enter_context(patch)
        yield


def mesh_of(devices: list[Any]) -> jax.sharding.Mesh:
    """Of two axes, as square as may be."""
    rows = int(len(devices) ** 0.5)
    while len(devices) % rows:
        rows -= 1
    return jax.sharding.Mesh(np.reshape(devices, (rows, -1)), ("data", "model"))
