"""PyTorch ports of the rotary embeddings of many models, each from its definition: x is
[batch, length, heads, size].

Frequencies are computed in float64 and rounded once; angles are float32 position times
float32 frequency, rotated in float32, as the models do. (Some compute the frequencies
in float32 too, which moves an angle by as much again.)
"""

import functools
import math

import torch
from torch import Tensor


def default_frequencies(base: float, size: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[batch, length, 1, size / 2], the same for all heads."""
    return (positions.float()[:, :, None] * frequencies.float())[:, :, None]


def rotate_halves(x: Tensor, angle: Tensor, factor: float = 1.0) -> Tensor:
    """As Llama: x cos + (the halves swapped, the second negated) sin, with both halves
    at the same angles.
    """
    angle = torch.cat([angle, angle], dim=-1)
    cos = angle.cos() * factor
    sin = angle.sin() * factor
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def rotate_every_two(x: Tensor, angle: Tensor) -> Tensor:
    """As GPT-J: neighbours are a pair."""
    angle = angle.repeat_interleave(2, dim=-1)
    swapped = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return x * angle.cos() + swapped * angle.sin()


def partially(rotate, x: Tensor, angle: Tensor) -> Tensor:
    size = 2 * angle.shape[-1]
    return torch.cat([rotate(x[..., :size], angle), x[..., size:]], dim=-1)


def llama_3_1(x: Tensor, positions: Tensor) -> Tensor:
    factor = 8.0
    low = 1.0
    high = 4.0
    length = 8192
    scaled = []
    # Short waves are kept, long ones are divided, and those between are in between.
    for frequency in default_frequencies(500_000.0, x.shape[-1]).tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            scaled.append(frequency)
        elif wavelength > length / low:
            scaled.append(frequency / factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    frequencies = torch.tensor(scaled, dtype=torch.float64)
    return rotate_halves(x, angles(positions, frequencies))


def plain(
    base: float, rotate=rotate_halves, fraction: float = 1.0, divisor: float = 1.0
):
    """A port that turns a part of each head, by angles that are divided."""

    def port(x: Tensor, positions: Tensor) -> Tensor:
        frequencies = default_frequencies(base, int(fraction * x.shape[-1])) / divisor
        return partially(rotate, x, angles(positions, frequencies))

    return port


gemma_3_local = plain(10_000.0)
gemma_3_global = plain(1_000_000.0, divisor=8.0)
phi_2 = plain(10_000.0, fraction=0.4)
gpt_j = plain(10_000.0, rotate_every_two, fraction=0.25)
glm_4 = plain(10_000.0, rotate_every_two, fraction=0.5)


def gemma_4_global(x: Tensor, positions: Tensor, fraction: float = 0.25) -> Tensor:
    """The whole head has pairs, of which the first quarter rotates."""
    pairs = x.shape[-1] // 2
    index = torch.arange(pairs, dtype=torch.float64)
    frequencies = 1_000_000.0 ** (-index / pairs)
    frequencies[int(fraction * pairs) :] = 0
    return rotate_halves(x, angles(positions, frequencies))


def yarn_frequencies(
    base: float,
    size: int,
    factor: float,
    length: int,
    truncate: bool,
    fast: float = 32.0,
) -> Tensor:
    """Between the pairs that turn `fast` times and once in `length`, by index, they go
    from kept to divided.
    """

    def pair_that_turns(times: float) -> float:
        # base^(-2 i / size) length = 2 pi times
        return size / 2 * math.log(length / (2 * math.pi * times)) / math.log(base)

    low = pair_that_turns(fast)
    high = pair_that_turns(1.0)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    index = torch.arange(size // 2, dtype=torch.float64)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    frequencies = default_frequencies(base, size)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def qwen_3_yarn(x: Tensor, positions: Tensor) -> Tensor:
    """Its 32,768 positions made 131,072, as its model card says."""
    size = x.shape[-1]
    frequencies = yarn_frequencies(1_000_000.0, size, 4.0, 32_768, truncate=True)
    angle = angles(positions, frequencies)
    return rotate_halves(x, angle, 0.1 * math.log(4.0) + 1)


KIMI_SCALING = {
    "type": "yarn",
    "factor": 32.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def kimi_k2(x: Tensor, positions: Tensor) -> Tensor:
    """Its 4,096 positions made 131,072: with equal turns, a pair is kept or divided;
    both of its mscales are 1.
    """
    frequencies = yarn_frequencies(50_000.0, x.shape[-1], 32.0, 4096, True, fast=1.0)
    return rotate_every_two(x, angles(positions, frequencies))


def gpt_oss(x: Tensor, positions: Tensor) -> Tensor:
    """YaRN without rounding; cos and sin grow by 0.1 ln(32) + 1."""
    size = x.shape[-1]
    frequencies = yarn_frequencies(150_000.0, size, 32.0, 4096, truncate=False)
    angle = angles(positions, frequencies)
    concentration = 0.1 * math.log(32.0) + 1
    cos = angle.cos() * concentration
    sin = angle.sin() * concentration
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


SHORT_FACTORS = [1.0 + 0.02 * i for i in range(48)]
LONG_FACTORS = [1.05 + 0.03 * i**2 for i in range(48)]


def phi_3(x: Tensor, positions: Tensor, factors: list[float]) -> Tensor:
    """LongRoPE: 4,096 positions became 131,072."""
    divisors = torch.tensor(factors, dtype=torch.float64)
    frequencies = default_frequencies(10_000.0, x.shape[-1]) / divisors
    # sqrt(1 + ln(131072 / 4096) / ln(4096))
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    return rotate_halves(x, angles(positions, frequencies), factor)


phi_3_short = functools.partial(phi_3, factors=SHORT_FACTORS)
phi_3_long = functools.partial(phi_3, factors=LONG_FACTORS)


def angles_of_coordinates(positions: Tensor, frequencies: Tensor) -> list[Tensor]:
    """Of each coordinate [batch, length, 1, pairs], from positions [batch, length,
    coordinates].
    """
    return [angles(coordinate, frequencies) for coordinate in positions.unbind(-1)]


def sections_in_a_row(
    positions: Tensor, frequencies: Tensor, sections: list[int]
) -> Tensor:
    """Each coordinate rotates the pairs of its section, at their frequencies."""
    parts = [
        angle.split(sections, dim=-1)
        for angle in angles_of_coordinates(positions, frequencies)
    ]
    return torch.cat([parts[i][i] for i in range(len(sections))], dim=-1)


def qwen_2_vl(x: Tensor, positions: Tensor) -> Tensor:
    """Frame, row and column."""
    frequencies = default_frequencies(1_000_000.0, x.shape[-1])
    return rotate_halves(x, sections_in_a_row(positions, frequencies, [16, 24, 24]))


def qwen_2_vl_yarn(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = yarn_frequencies(1_000_000.0, x.shape[-1], 4.0, 32_768, truncate=True)
    angle = sections_in_a_row(positions, frequencies, [16, 24, 24])
    return rotate_halves(x, angle, 0.1 * math.log(4.0) + 1)


def qwen_3_vl(x: Tensor, positions: Tensor) -> Tensor:
    """Of pairs 1 to 59, every third is turned by the row, and those after them by the
    column.
    """
    frequencies = default_frequencies(5_000_000.0, x.shape[-1])
    frame, row, column = angles_of_coordinates(positions, frequencies)
    frame[..., 1:60:3] = row[..., 1:60:3]
    frame[..., 2:60:3] = column[..., 2:60:3]
    return rotate_halves(x, frame)


qwen_3_omni = qwen_3_vl


def glm_4v(x: Tensor, positions: Tensor) -> Tensor:
    """Neighbours are a pair, in the first half of a head."""
    frequencies = default_frequencies(10_000.0, x.shape[-1] // 2)
    angle = sections_in_a_row(positions, frequencies, [8, 12, 12])
    return partially(rotate_every_two, x, angle)


def qwen_2_vl_vision(x: Tensor, positions: Tensor) -> Tensor:
    """Rows and columns of patches: both have all frequencies of half a head."""
    frequencies = default_frequencies(10_000.0, x.shape[-1] // 2)
    row, column = angles_of_coordinates(positions, frequencies)
    return rotate_halves(x, torch.cat([row, column], dim=-1))


def llama_4_vision(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = default_frequencies(10_000.0, x.shape[-1] // 2)
    column, row = angles_of_coordinates(positions, frequencies)
    return rotate_every_two(x, torch.cat([column, row], dim=-1))


def pixtral(x: Tensor, positions: Tensor) -> Tensor:
    """Rows have every second frequency of a head, and columns the others."""
    frequencies = default_frequencies(10_000.0, x.shape[-1])
    row, column = angles_of_coordinates(positions, frequencies)
    return rotate_halves(x, torch.cat([row[..., ::2], column[..., 1::2]], dim=-1))
