"""Model FLOP/s utilization: the share of a device's arithmetic that the model itself makes use of."""

import math

import jax

from train_demo.settings import Settings

# Dense bfloat16 FLOP/s of one device, by what `device_kind` begins with; the longest beginning counts.
PEAKS = {
    "NVIDIA A100": 312e12,  # nvidia.com/en-us/data-center/a100
    "NVIDIA H100 PCIe": 756e12,  # nvidia.com/en-us/data-center/h100; half of what it says for sparse matrices
    "NVIDIA H100 80GB HBM3": 989e12,  # likewise
    "NVIDIA H200": 989e12,  # nvidia.com/en-us/data-center/h200, likewise
    "NVIDIA L4": 121e12,  # nvidia.com/en-us/data-center/l4, likewise
    "TPU v4": 275e12,  # cloud.google.com/tpu/docs/v4
    "TPU v5 lite": 197e12,  # cloud.google.com/tpu/docs/v5e
    "TPU v5": 459e12,  # cloud.google.com/tpu/docs/v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # cloud.google.com/tpu/docs/v6e
}


def flops_per_token(settings: Settings, parameters: int) -> float:
    """FLOPs that training needs for a token: 6 for each parameter, and those of the attention's scores.

    As in appendix B of PaLM (arXiv 2204.02311), which counts masked scores, too. The optimizer does not count.

    Args:
        settings: of the run.
        parameters: that multiply activations: all but the embedding.
    """
    return 6 * parameters + 12 * settings.layers * settings.features * settings.context_length


def peak(kind: str) -> float | None:
    """The bfloat16 FLOP/s of a device; None where it is not in the table.

    Example:
        >>> peak("NVIDIA H200 NVL"), peak("cpu")
        (989000000000000.0, None)
    """
    known = [name for name in PEAKS if kind.startswith(name)]
    return PEAKS[max(known, key=len)] if known else None


def report(settings: Settings, shapes: dict, devices: int, tokens_per_second: float) -> str | None:
    """A line for accelerators; None on a CPU.

    Args:
        settings: of the run.
        shapes: the model's parameters, or their shapes.
        devices: on how many it runs.
        tokens_per_second: of all of them together.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    top = peak(device.device_kind)
    if top is None:
        return f"model FLOP/s utilization: unknown, because the peak of {device.device_kind} is not in the table"
    without = {name: leaf for name, leaf in shapes.items() if name != "embedding" or "head" not in shapes}
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(without))
    share = tokens_per_second * flops_per_token(settings, parameters) / (top * devices)
    return f"model FLOP/s utilization: {share:.1%} of {devices} x {top / 1e12:.0f} TFLOP/s (bfloat16)"
