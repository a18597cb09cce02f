"""Rotary position embeddings: `RoPE` describes the angles, and `apply_rope` rotates
queries and keys.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from flax_mha._src.core.validation import (
    INT32_MAX,
    INT32_MIN,
    check_bool,
    extremes,
    integers,
    is_int,
)
from flax_mha._src.rope.scaling import Scaling, check_number

SectionLayout = Literal["contiguous", "interleaved", "axial", "axial_strided"]


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Describes a rotary position embedding: the rotated features of a head and their
    frequencies. Hashable.

    The first R = fraction * H features of a head form R/2 pairs. At position p, pair i
    is rotated by the angle p * f[i], where f[i] = base^(-2i / R) radians per position,
    unless `scaling` changes it.

    Attributes:
      base: The base of the frequencies ("theta"), above 0.
      fraction: The rotated part of a head, in (0, 1]; the remaining features do not
        change.
      interleaved: True if pair i is the features 2i and 2i + 1 (GPT-J, GLM, Cohere,
        Meta's Llama files), False if it is i and i + R/2 (the Hugging Face files of
        Llama, Qwen, Gemma, Phi, GPT-NeoX). The wrong choice gives wrong outputs without
        an error.
      scaling: How to change the frequencies for sequences longer than in pretraining:
        None, `Linear`, `NTK`, `Llama3`, `YaRN` or `LongRoPE`; or `Proportional`, which
        leaves slow pairs unrotated.
      sections: For positions with D coordinates, such as frame, row and column: the
        number of pairs that each coordinate rotates, R/2 in total (`mrope_section` of
        Qwen2-VL). Positions then have a last axis of length D. None: each position is
        one number.
      section_layout: Which pairs each coordinate rotates, and with which frequencies.
        "contiguous" (Qwen2-VL, Qwen2.5-VL, GLM-4V): one section after another; pair i
        has f[i]. "interleaved" (Qwen3-VL): pairs alternate between the coordinates
        until a coordinate has all its pairs, and the rest go to the first; pair i has
        f[i]. "axial" (the vision encoders of Qwen-VL and Llama 4): one section after
        another; in a section of n pairs, pair j has base^(-j / n). "axial_strided"
        (Pixtral): one section after another; pair j of section d has f[d + D j].

    Raises:
      ValueError: If a field is out of range. Methods that depend on the length of the
        current sequence, such as dynamic NTK, are not supported: keys that were cached
        earlier would have been rotated with other frequencies.

    Example:
      >>> from flax_mha.rope import Linear, Llama3, Proportional, RoPE, YaRN
      >>> llama_3 = RoPE(base=500_000.0)
      >>> scaling = Llama3(8.0, 1.0, 4.0, original_max_position=8192)
      >>> llama_3_1 = RoPE(base=500_000.0, scaling=scaling)
      >>> qwen_3 = RoPE(base=1_000_000.0)
      >>> gemma_3_local = RoPE(base=10_000.0)
      >>> gemma_3_1b_global = RoPE(base=1_000_000.0)
      >>> gemma_3_4b_global = RoPE(base=1_000_000.0, scaling=Linear(8.0))
      >>> gemma_4_global = RoPE(base=1_000_000.0, scaling=Proportional(0.25))
      >>> phi_2 = RoPE(fraction=0.4)
      >>> gpt_neox = RoPE(fraction=0.25)
      >>> gpt_j = RoPE(fraction=64 / 256, interleaved=True)  # rotary_dim / head size
      >>> glm_4 = RoPE(fraction=0.5, interleaved=True)
      >>> scaling = YaRN(32.0, original_max_position=4096, truncate=False)
      >>> gpt_oss = RoPE(base=150_000.0, scaling=scaling)
      >>> qwen_2_vl = RoPE(base=1_000_000.0, sections=(16, 24, 24))
      >>> qwen_3_vl = RoPE(
      ...     base=5_000_000.0, sections=(24, 20, 20), section_layout="interleaved"
      ... )
      >>> qwen_2_vl_vision = RoPE(sections=(20, 20), section_layout="axial")  # H = 80

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None
    sections: tuple[int, ...] | None = None
    section_layout: SectionLayout = "contiguous"

    def __post_init__(self) -> None:
        check_number("base", self.base, above=0.0)
        check_number("fraction", self.fraction, above=0.0)
        if self.fraction > 1:
            raise ValueError(
                f"fraction must be in (0, 1], but got {self.fraction!r}; to rotate n "
                "features of each head, pass n / head size."
            )
        check_bool("interleaved", self.interleaved)
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise ValueError(
                "scaling must be None, Linear, NTK, Llama3, YaRN, LongRoPE or "
                f"Proportional, but got {self.scaling!r}; for a Hugging Face dict, use "
                "RoPE.from_config."
            )
        sections = _check_sections(self.sections, self.section_layout)
        object.__setattr__(self, "sections", sections)

    def rotated_size(self, head_size: int) -> int:
        """Returns R, the number of rotated features; raises a ValueError unless R is an
        even integer >= 2.
        """
        size = self.fraction * head_size
        rotated = round(size)
        # n / head size is not exact, nor is its product.
        is_integer = abs(size - rotated) <= 1e-6 * head_size
        if not is_integer or rotated < 2 or rotated % 2:
            even = max(2 * round(size / 2 - 0.25), 2)
            if even <= head_size:
                fix = f"for example, use fraction={even} / {head_size}"
            else:
                fix = "use larger heads"
            raise ValueError(
                "fraction * head size must be an even integer >= 2, because features "
                f"are rotated in pairs, but got {self.fraction!r} * {head_size} = "
                f"{size:g}; {fix}."
            )
        return rotated

    def frequencies(self, head_size: int) -> np.ndarray:
        """Returns the frequency of each pair in radians per position: a NumPy array,
        float64 `[R / 2]`.
        """
        scaling = self.scaling or Scaling()
        of_size = functools.partial(scaling.frequencies, float(self.base))
        size = self.rotated_size(head_size)
        sections = self.sections or ()
        layout = self.section_layout
        if layout == "axial":
            # Each section has all frequencies, from the fastest on.
            return np.concatenate([of_size(2 * pairs) for pairs in sections])
        found = of_size(size)
        if layout == "axial_strided":
            # Every D-th frequency for each of the D coordinates.
            return found.reshape(-1, len(sections)).T.ravel()
        return found

    def coordinates(self, head_size: int) -> np.ndarray:
        """Returns, as integers [R / 2], which coordinate of a position (a row, say)
        sets the angle of each pair.

        Without `sections`, all are 0. Raises a ValueError if `sections` do not fit the
        number of pairs.
        """
        pairs = self.rotated_size(head_size) // 2
        sections = self.sections or (pairs,)
        if sum(sections) != pairs:
            raise ValueError(
                f"sections must add up to the number of rotated pairs, {pairs} for "
                f"{2 * pairs} rotated features, but got {sections}, which sum to "
                f"{sum(sections)}."
            )
        if self.section_layout != "interleaved":
            return np.repeat(np.arange(len(sections)), sections)
        # Pairs take turns; a coordinate whose section is full leaves its turns to the
        # first.
        turn, coordinate = divmod(np.arange(pairs), len(sections))
        found = np.where(turn < np.asarray(sections)[coordinate], coordinate, 0)
        if tuple(np.bincount(found, minlength=len(sections))) != sections:
            raise ValueError(
                f"sections must interleave the coordinates across {pairs} pairs and "
                f"give any leftover pairs to the first coordinate, but got {sections}."
            )
        return found

    @property
    def attention_factor(self) -> float:
        """The factor by which cos and sin are multiplied, 1 except with YaRN and
        LongRoPE.
        """
        scaling = self.scaling or Scaling()
        return scaling.cos_sin_factor

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        layer_type: str | None = None,
        max_length: int | None = None,
    ) -> "RoPE":
        """Returns the `RoPE` of a Hugging Face model, from `config.json` or
        `config.to_dict()` (Transformers 4 and 5).

        It reads `rope_theta` (`rotary_emb_base`), `partial_rotary_factor`
        (`rotary_pct`, or `rotary_dim` with the head size), `rope_scaling` and
        `rope_parameters`; for missing keys, the defaults of `model_type` apply.
        `model_type` also determines `interleaved`, which is False for unknown types.
        The result says neither which layers use RoPE (see `convert.describe`), nor by
        what to multiply the softmax scale (DeepSeek's mscale).

        `mrope_section` and `mrope_interleaved` become `sections`, whose coordinates are
        frame, row and column. For the rows and columns of patches, pass the
        `vision_config` of a Qwen model (Qwen2-VL to Qwen 3.5), GLM-4V or Pixtral. With
        the `vision_config` of Llama 4, the coordinates are columns and rows counted
        from 1, with (0, 0) for the class token.

        Args:
          config: The dict, which may contain the `text_config` of a multimodal model.
          layer_type: "full_attention" or "sliding_attention", for models in which they
            differ: Gemma 3 rotates its sliding (local) layers with
            `rope_local_base_freq` and without scaling.
          max_length: The length of the longest sequence, prompt plus generated tokens;
            only needed for LongRoPE. Above `original_max_position_embeddings`, the long
            factors are used. Transformers switches when a sequence grows past that
            length, although cached keys keep their old rotation; here the choice is
            made once.

        Raises:
          ValueError: If `config` is not a dict, has an unknown `rope_type` or an
            unknown key for rotary embeddings, lacks a required key, or has frequencies
            that depend on the current length (`"dynamic"`).

        Example:
          >>> from flax_mha.rope import RoPE
          >>> qwen_3 = {"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": None}
          >>> RoPE.from_config(qwen_3) == RoPE(base=1e6)
          True
          >>> gemma_3 = {"model_type": "gemma3_text", "rope_theta": 1e6}
          >>> gemma_3["rope_local_base_freq"] = 1e4
          >>> RoPE.from_config(gemma_3, layer_type="sliding_attention").base
          10000.0
        """
        # These import this file.
        from flax_mha._src.convert.read_config import read_config
        from flax_mha._src.convert.rope import rope_arguments

        return cls(**rope_arguments(read_config(config), layer_type, max_length))


def apply_rope(
    x: Float[Array, "*B T N H"],
    positions: Int[Array, "*B T"]
    | Int[Array, " T"]
    | Int[Array, "*B T D"]
    | Int[Array, "T D"],
    rope: RoPE,
) -> Float[Array, "*B T N H"]:
    """Rotates pairs of features of queries or keys by angles that grow with the
    position; values are not rotated.

    With c = a * cos(p * f[i]) and s = a * sin(p * f[i]), where a is the attention
    factor (1 for most models), pair (u, v) becomes (u c - v s, v c + u s). Scores then
    depend only on the difference between two positions.

    Angles and rotations are computed in float32 (float64 for float64 inputs) and
    rounded once to the dtype of `x`. The error of a float32 angle p * f[i] is up to
    `1.2e-7 * abs(p f[i])` radians, as in PyTorch: 0.016 at position 131,072.

    Args:
      x: Queries or keys, floating point.
      positions: Integer positions of each token, or the same positions for every row of
        the batch; may be negative or traced. With `rope.sections`, the last axis holds
        the D coordinates of a token; in Transformers that axis is first.
      rope: The rotary embedding.

    Raises:
      ValueError: If a shape or dtype does not fit, or if the head size does not fit
        `rope`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax_mha.rope import RoPE, apply_rope
      >>> x = jnp.asarray([1.0, 0.0]).reshape(1, 1, 2)
      >>> cos, sin = apply_rope(x, jnp.asarray([1]), RoPE()).ravel()
      >>> print(f"{cos:.4f} {sin:.4f}")
      0.5403 0.8415
    """
    x, positions = _check(x, positions, rope)
    head_size = x.shape[-1]
    size = rope.rotated_size(head_size)
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    if not rope.sections:
        positions = positions[..., None]

    # The frequencies of pairs for each coordinate, [D, R / 2]; 0 if another coordinate
    # rotates the pair.
    coordinates = np.arange(positions.shape[-1])[:, None]
    rotates = coordinates == rope.coordinates(head_size)
    frequencies = np.where(rotates, rope.frequencies(head_size), 0).astype(dtype)

    # p * f[i], summed over coordinates: indexing by pair would be a gather.
    angles = 0
    for i, row in enumerate(frequencies):
        coordinate = positions[..., i]
        missing = (1,) * (x.ndim - 2 - coordinate.ndim)
        coordinate = coordinate.reshape((*missing, *coordinate.shape, 1, 1))
        row = row.reshape((1,) * (x.ndim - 1) + (-1,))
        angles += coordinate.astype(dtype) * row

    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos = cos * rope.attention_factor
        sin = sin * rope.attention_factor

    # (u, v) becomes (u c - v s, v c + u s).
    if rope.interleaved:
        pairs = (size // 2, 2)
        axis = -1
    else:
        pairs = (2, size // 2)
        axis = -2
    x_pairs = x[..., :size].astype(dtype).reshape(*x.shape[:-1], *pairs)
    u, v = jnp.unstack(x_pairs, axis=axis)
    rotated = jnp.stack([u * cos - v * sin, v * cos + u * sin], axis=axis)
    rotated = rotated.reshape(*x.shape[:-1], size).astype(x.dtype)
    if size == head_size:
        return rotated
    return jnp.concatenate([rotated, x[..., size:]], axis=-1)


def _check(x: Any, positions: Any, rope: object) -> tuple[Array, Array]:
    """Raises a ValueError unless the arguments of `apply_rope` fit; returns `x` and
    `positions` as JAX arrays.
    """
    if not isinstance(rope, RoPE):
        raise ValueError(
            f"rope must be a RoPE, but got {rope!r}; use RoPE() or "
            "RoPE.from_config(config)."
        )
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise ValueError(f"x must be an array, but got {type(x).__name__}.") from None
    positions = integers("positions", positions)
    smallest, largest = extremes(positions)
    if not INT32_MIN <= smallest <= largest <= INT32_MAX:
        raise ValueError(
            f"positions must be in the int32 range, but got {smallest} to {largest}."
        )
    if x.ndim < 3:
        raise ValueError(
            "x must have rank 3 or more ([batch..., length, heads, head size]), but "
            f"got {x.shape}."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x must have a floating point dtype, but got {x.dtype}; use .astype."
        )
    if not isinstance(x.shape[-1], int):
        raise ValueError(
            f"x must have a static head size, but got symbolic size {x.shape[-1]}."
        )
    axes: tuple[int, ...] = ()
    name = ""
    fix = "use jnp.broadcast_to for other batch axes"
    if rope.sections:
        axes = (len(rope.sections),)
        name = ", coordinates"
        fix = f"repeat the position of a text token {axes[0]} times"
    of_batch = x.shape[:-2] + axes
    of_sequence = x.shape[-3:-2] + axes
    if positions.shape not in (of_batch, of_sequence):
        raise ValueError(
            f"positions must be [batch..., length{name}] or [length{name}], that is "
            f"{of_batch} or {of_sequence} for x of shape {x.shape}, but got "
            f"{positions.shape}; {fix}."
        )
    return x, jnp.asarray(positions)


def _check_sections(sections: object, layout: object) -> tuple[int, ...] | None:
    """Checks `RoPE.sections` and `RoPE.section_layout`; returns the sections as a tuple
    of integers, or None.

    They say how many rotated pairs each coordinate of a position gets.
    """
    if layout not in get_args(SectionLayout):
        raise ValueError(
            f"section_layout must be one of {', '.join(get_args(SectionLayout))}, but "
            f"got {layout!r}."
        )
    if sections is None:
        if layout != "contiguous":
            raise ValueError(
                f"sections must be given for section_layout {layout!r}, but got None; "
                "pass the number of pairs per coordinate."
            )
        return None
    found: tuple[Any, ...] = ()
    if isinstance(sections, Iterable):
        found = tuple(sections)
    if not found or not all(is_int(pairs) and pairs > 0 for pairs in found):
        raise ValueError(
            "sections must be None or positive integers (the number of rotated pairs "
            f"per coordinate), such as (16, 24, 24), but got {sections!r}."
        )
    if layout == "axial_strided" and len({*found}) > 1:
        raise ValueError(
            "sections must all be equal for section_layout 'axial_strided', but got "
            f"{found}."
        )
    return tuple(map(int, found))
