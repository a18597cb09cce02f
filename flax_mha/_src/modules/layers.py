"""`Norm` and `Gate`: values that describe layers of a module, so that modules of both
APIs make the same ones.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flax_mha._src.core import validation


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of queries, keys, values, or of the attention's output, before `out`.

    Pass it to a module as `normalize_qk`, `value_norm` or `out_norm`. For features x
    with the mean m and the variance v, the norms are::

        "rms":    x / sqrt(m(x^2) + epsilon) * scale
        "layer":  (x - m) / sqrt(v + epsilon) * scale + bias

    Args:
      kind: "rms" (RMSNorm) or "layer" (LayerNorm).
      scale: The learned scale: "head_dim" has a scalar per feature of a head [H],
        which all heads share; "heads" has its own for each head [heads, H]; None means
        no scale.
      over: "head" normalizes each head of a token separately, "all_heads" all heads of
        a token together, which requires a `scale` of "heads" or None.
      bias: Add a learned bias [H]; only with `kind="layer"` and `scale="head_dim"`.
      epsilon: Added to the mean square or the variance.
      after_rope: Normalize after the rotation; only in `normalize_qk`.

    Raises:
      ValueError: If an argument has another value, or does not fit the others.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> norm = flax_mha.Norm("rms")
      >>> qwen = flax_mha.MultiHeadAttention(8, 64, normalize_qk=norm, rngs=nnx.Rngs(0))
      >>> qwen.query_ln.scale.shape
      (8,)
      >>> norm = flax_mha.Norm("rms", scale="heads", over="all_heads")
      >>> olmo = flax_mha.MultiHeadAttention(8, 64, normalize_qk=norm, rngs=nnx.Rngs(0))
      >>> olmo.query_ln.scale.shape
      (8, 8)

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467;
    Ba et al., Layer Normalization, arXiv:1607.06450.
    """

    kind: Literal["rms", "layer"] = "rms"
    scale: Literal["head_dim", "heads"] | None = "head_dim"
    over: Literal["head", "all_heads"] = "head"
    bias: bool = False
    epsilon: float = 1e-6
    after_rope: bool = False

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, ("rms", "layer"))
        check_choice("over", self.over, ("head", "all_heads"))
        if self.scale is not None:
            check_choice("scale", self.scale, ("head_dim", "heads"), "None")
        validation.check_bool("bias", self.bias)
        validation.check_bool("after_rope", self.after_rope)
        validation.epsilon("epsilon", self.epsilon)
        if self.over == "all_heads" and self.scale == "head_dim":
            raise ValueError(
                'scale must be "heads" or None with over="all_heads", but got '
                '"head_dim"; pass scale="heads".'
            )
        if self.bias and (self.kind != "layer" or self.scale != "head_dim"):
            raise ValueError(
                'bias must be False unless kind is "layer" and scale is "head_dim", '
                f"but got {self.kind!r} and {self.scale!r}; pass bias=False."
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the norms of nnx and linen, whose inputs are [B..., T,
        heads, H].
        """
        # Mean and variance are over the first axes, and the scale has the second.
        reduced: tuple[int, ...] = (-1,)
        scaled: tuple[int, ...] = (-1,)
        if self.over == "all_heads":
            reduced = (-2, -1)
        if self.scale == "heads":
            scaled = (-2, -1)
        return {
            "epsilon": float(self.epsilon),
            "use_scale": self.scale is not None,
            "reduction_axes": reduced,
            "feature_axes": scaled,
        }


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate of the attention's output: each head's output times f(another projection
    of the input), before `out`.

    Args:
      per: "feature" has a number for each feature of each head (Qwen3-Next): the
        projection `gate` has parameters with the shapes of `query`, or of `value` if
        `value_dim` differs. "head" has a number for each head (Laguna): the kernel of
        `gate` is [in, heads], its bias [heads].
      activation: The function f, "sigmoid" or "softplus" (Laguna), which is computed in
        float32 or higher.

    Raises:
      ValueError: If an argument has another value.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import flax_mha
      >>> gate = flax_mha.Gate("head")
      >>> layer = flax_mha.MultiHeadAttention(8, 64, gate=gate, rngs=nnx.Rngs(0))
      >>> layer.gate.kernel.shape
      (64, 8)

    Source: Qiu et al., Gated Attention for Large Language Models, arXiv:2505.06708.
    """

    per: Literal["feature", "head"] = "feature"
    activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("feature", "head"))
        check_choice("activation", self.activation, ACTIVATIONS)

    def shape(self, num_heads: int, value_size: int) -> tuple[int, ...]:
        """Returns the shape of a token's gate."""
        if self.per == "head":
            return (num_heads,)
        return (num_heads, value_size)

    def apply(
        self, x: Float[Array, "*B T N Hv"], projected: Float[Array, "..."]
    ) -> Float[Array, "*B T N Hv"]:
        """Returns x * f(projected)."""
        if self.per == "head":
            projected = projected[..., None]
        gate = ACTIVATIONS[self.activation](projected)
        # Outputs at padding are 0, and must stay 0 even if inputs there, and so the
        # gate, are NaN or infinite.
        gate = jnp.where((x == 0) & ~jnp.isfinite(gate), 0, gate)
        return x * gate.astype(x.dtype)


def _softplus(x: Array) -> Array:
    return jax.nn.softplus(x.astype(jnp.promote_types(x.dtype, jnp.float32)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "softplus": _softplus,
}


def norm_of(name: str, given: object) -> Norm | None:
    """Checks `given`, the value of a module's option `name`; returns its norm, or None.

    For `normalize_qk`, which is Flax's flag, True means a LayerNorm and False none.
    """
    is_of_qk = name == "normalize_qk"
    # Flax's flag; our own options are None by default.
    if is_of_qk and given is True:
        return Norm("layer")
    no_norm = False if is_of_qk else None
    if given is no_norm:
        return None
    if not isinstance(given, Norm):
        expected = "a flax_mha.Norm or None"
        if is_of_qk:
            expected = "True, False or a flax_mha.Norm"
        raise ValueError(f"{name} must be {expected}, but got {given!r}.")
    if given.after_rope and not is_of_qk:
        raise ValueError(
            f"{name} must have after_rope=False, because only normalize_qk rotates, "
            f"but got {given}."
        )
    return given


def gate_axes(gate: Gate | None) -> str:
    """Returns the key under which `tensor_parallel.parameter_names` holds the mesh axes
    of a gate's kernel.
    """
    if gate is not None and gate.per == "head":
        return "head_gate"
    return "query"


def gate_of(given: object) -> Gate | None:
    """Returns the gate that the option `gate` of a module sets, or None."""
    if isinstance(given, Gate):
        return given
    if not isinstance(given, bool | np.bool_):
        raise ValueError(
            f"gate must be True, False or a flax_mha.Gate, but got {given!r}."
        )
    if given:
        return Gate()
    return None


def check_choice(
    name: str, given: object, choices: Collection[str], others: str = ""
) -> None:
    """Raises a ValueError unless `given` is one of the strings `choices`; `others`
    names what else is allowed.
    """
    if isinstance(given, str) and given in choices:
        return
    names = " or ".join(f'"{choice}"' for choice in choices)
    raise ValueError(
        f"{name} must be {others and f'{others}, '}{names}, but got {given!r}."
    )
