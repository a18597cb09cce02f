"""Ways to change rotary frequencies, mostly for sequences longer than in pretraining,
computed in NumPy float64.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from flax_mha._src.core.validation import check_bool, is_finite


def check_number(
    name: str, value: Any, *, above: float | None = None, at_least: float | None = None
) -> None:
    """Raises a ValueError unless `value` is a finite number in the given range."""
    is_in_range = is_finite(value)
    bounds = ""
    if above is not None:
        is_in_range = is_in_range and value > above
        bounds += f" > {above:g}"
    if at_least is not None:
        is_in_range = is_in_range and value >= at_least
        bounds += f" >= {at_least:g}"
    if is_in_range:
        return
    raise ValueError(f"{name} must be a finite number{bounds}, but got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The base class of all scalings, which change the frequencies of `RoPE`; the base
    class itself leaves them unchanged.
    """

    def frequencies(self, base: float, size: int) -> np.ndarray:
        """Returns the frequencies of `size` rotated features, in radians per position:
        float64 `[size / 2]`.
        """
        return base ** (-np.arange(0, size, 2, dtype=np.float64) / size)

    @property
    def cos_sin_factor(self) -> float:
        """The factor by which cos and sin are multiplied."""
        return 1.0

    def _check(self, name: str, **bounds: float) -> None:
        """Raises a ValueError unless field `name` is a number within `bounds`, or None
        in a field with default None.
        """
        value = getattr(self, name)
        if value is not None or getattr(type(self), name, 0) is not None:
            check_number(f"{type(self).__name__}({name})", value, **bounds)


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: divides all frequencies by `factor`, at least 1. Chen et
    al., arXiv:2306.15595.
    """

    factor: float

    def __post_init__(self) -> None:
        self._check("factor", at_least=1.0)

    def frequencies(self, base: float, size: int) -> np.ndarray:
        return super().frequencies(base, size) / self.factor


@dataclasses.dataclass(frozen=True)
class Proportional(Scaling):
    """Rotates only the first floor(fraction * R / 2) of the R/2 pairs, which are the
    fastest (Gemma 4).

    Unlike a smaller `RoPE.fraction`, this keeps R: pairs remain i and i + R/2. Rotated
    ones have f[i] / factor.

    Attributes:
      fraction: The rotated part of the R/2 pairs, in (0, 1].
      factor: The divisor of the frequencies, at least 1.
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._check("fraction", above=0.0)
        self._check("factor", at_least=1.0)
        if self.fraction > 1:
            raise ValueError(
                f"Proportional(fraction) must be in (0, 1], but got {self.fraction!r}."
            )

    def frequencies(self, base: float, size: int) -> np.ndarray:
        rotates = np.arange(size // 2) < int(self.fraction * size // 2)
        return np.where(rotates, super().frequencies(base, size) / self.factor, 0.0)


@dataclasses.dataclass(frozen=True)
class Reversed(Scaling):
    """Negates the frequencies of `scaling`, to rotate in the opposite direction
    (nanochat).
    """

    scaling: Scaling = Scaling()

    def frequencies(self, base: float, size: int) -> np.ndarray:
        return -self.scaling.frequencies(base, size)

    @property
    def cos_sin_factor(self) -> float:
        return self.scaling.cos_sin_factor


@dataclasses.dataclass(frozen=True)
class NTK(Scaling):
    """NTK-aware interpolation: replaces `base` by base * factor^(R / (R - 2)), for R
    rotated features.

    The fastest pair keeps its frequency, and the slowest is slowed down by the full
    factor. Peng et al., arXiv:2309.00071, section 3.1. (The dynamic variant, whose
    factor grows with the sequence, is not supported.)

    Raises:
      ValueError: If `factor` is below 1, or, when applied, if only 2 features are
        rotated.
    """

    factor: float

    def __post_init__(self) -> None:
        self._check("factor", at_least=1.0)

    def frequencies(self, base: float, size: int) -> np.ndarray:
        if size < 4:
            raise ValueError(
                f"NTK needs at least 4 rotated features, but got {size}; use "
                "Linear(factor)."
            )
        return super().frequencies(base * self.factor ** (size / (size - 2)), size)


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Divides the frequencies of slow pairs by `factor`, keeps fast pairs, and
    interpolates between them (Llama 3.1).

    A pair of frequency f makes t = original_max_position * f / 2 pi turns in the
    original length. The pair is kept if t > high_freq_factor and slowed down if t <
    low_freq_factor. Grattafiori et al., arXiv:2407.21783.

    Attributes:
      factor: The ratio of the new length to the original length, at least 1.
      low_freq_factor: Below this number of turns, frequencies are divided by the
        factor; above 0.
      high_freq_factor: Above this number of turns, frequencies are kept; at least
        `low_freq_factor`. If both are equal, as in Llama 4 Scout, nothing is
        interpolated.
      original_max_position: The sequence length in pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        self._check("factor", at_least=1.0)
        self._check("low_freq_factor", above=0.0)
        self._check("high_freq_factor", at_least=self.low_freq_factor)
        self._check("original_max_position", at_least=1)

    def frequencies(self, base: float, size: int) -> np.ndarray:
        kept = super().frequencies(base, size)
        turns = self.original_max_position * kept / (2 * math.pi)
        if self.high_freq_factor == self.low_freq_factor:
            return np.where(turns < self.low_freq_factor, kept / self.factor, kept)
        # 0 at low_freq_factor turns, 1 at high_freq_factor turns.
        width = self.high_freq_factor - self.low_freq_factor
        share_kept = (turns - self.low_freq_factor) / width
        return _blend(kept, kept / self.factor, share_kept)


@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Scales frequencies like `Llama3`, but interpolates by pair index, and multiplies
    cos and sin by a factor.

    Source: Peng et al., arXiv:2309.00071.

    Attributes:
      factor: The ratio of the new length to the original length, at least 1.
      original_max_position: The sequence length in pretraining, in tokens.
      beta_fast: A pair that makes more turns than this in the original length is kept;
        at least `beta_slow`.
      beta_slow: A pair that makes fewer turns than this is slowed down by `factor`;
        above 0.
      attention_factor: The factor that multiplies cos and sin, above 0. None means
        m(mscale) / m(mscale_all_dim) if both are given and not 0 (DeepSeek), else m(1),
        where m(s) = 0.1 s ln(factor) + 1.
      mscale: See `attention_factor`.
      mscale_all_dim: See `attention_factor`.
      truncate: True rounds the indices of the first and last interpolated pair
        outwards; False for gpt-oss.

    Raises:
      ValueError: If a field is out of range, or, when applied, if the base is not above
        1.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        self._check("factor", at_least=1.0)
        self._check("original_max_position", at_least=1)
        self._check("beta_slow", above=0.0)
        self._check("beta_fast", at_least=self.beta_slow)
        self._check("attention_factor", above=0.0)
        self._check("mscale", at_least=0.0)
        self._check("mscale_all_dim", at_least=0.0)
        check_bool("YaRN(truncate)", self.truncate)

    def frequencies(self, base: float, size: int) -> np.ndarray:
        if base <= 1:
            raise ValueError(
                "base must be greater than 1 with YaRN, so that frequencies decrease "
                f"from pair to pair, but got {base:g}."
            )
        first = self._pair_with(self.beta_fast, base, size)
        last = self._pair_with(self.beta_slow, base, size)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, size - 1)
        # 0.001 as published: no division by 0.
        width = last - first or 0.001
        share_kept = 1 - (np.arange(size // 2) - first) / width
        kept = super().frequencies(base, size)
        return _blend(kept, kept / self.factor, share_kept)

    def _pair_with(self, turns: float, base: float, size: int) -> float:
        """Returns the index i, which may be a fraction, of the pair that makes this
        many turns in the original length L: L * base^(-2i / R) = 2 pi * turns.
        """
        ratio = self.original_max_position / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(base))

    @property
    def cos_sin_factor(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        # m(s) = 0.1 s ln(factor) + 1.
        log = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (log * self.mscale + 1) / (log * self.mscale_all_dim + 1)
        return log + 1


@dataclasses.dataclass(frozen=True)
class LongRoPE(Scaling):
    """Divides each frequency by its own factor: pair i has f[i] / factors[i] (Phi-3).
    Ding et al., arXiv:2402.13753.

    Models have one list of factors for short and one for long sequences. Choose by the
    longest sequence that you will use, or let `RoPE.from_config(config,
    max_length=...)` choose. Do not change factors later: cached keys keep theirs.

    Attributes:
      factors: One number above 0 for each rotated pair.
      attention_factor: The factor that multiplies cos and sin, above 0; sqrt(1 + ln(s)
        / ln(original_max_position)) for Phi-3, where s is the ratio of the new length
        to the original length.

    Raises:
      ValueError: If a field is out of range, or, when applied, if the number of factors
        does not fit the head size.
    """

    factors: Iterable[float]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.factors, Iterable):
            factors = tuple(self.factors)
        else:
            factors = (self.factors,)
        for factor in factors:
            check_number("each factor in LongRoPE(factors)", factor, above=0.0)
        self._check("attention_factor", above=0.0)
        object.__setattr__(self, "factors", tuple(map(float, factors)))

    def frequencies(self, base: float, size: int) -> np.ndarray:
        factors = np.asarray(self.factors)
        if len(factors) != size // 2:
            raise ValueError(
                "LongRoPE(factors) must contain one factor per rotated pair, "
                f"{size // 2} for {size} rotated features, but got {len(factors)}; "
                "check fraction and the head size."
            )
        return super().frequencies(base, size) / factors

    @property
    def cos_sin_factor(self) -> float:
        return float(self.attention_factor)


def _blend(kept: np.ndarray, slowed: np.ndarray, share_kept: np.ndarray) -> np.ndarray:
    share_kept = np.clip(share_kept, 0.0, 1.0)
    return kept * share_kept + slowed * (1 - share_kept)
