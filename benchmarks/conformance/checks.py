"""The table of checks, `CHECKS`: each compares results of an attention function with
the float64 reference.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jaxtyping import Array
from reference_cases import CASES, LISTS, Case, H, N, S, T

Attention = Callable[..., Any]
Kind = Literal["computes", "refuses", "other convention", "wrong"]
# Conventions of other packages, each with the arguments by which the reference follows
# it.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "queries without visible keys return the mean of the values": {
        "masked_rows": "mean"
    },
    (
        "queries without visible keys return the mean of the values, and padded "
        "queries 0"
    ): {"masked_rows": "mean, padding zeros"},
    "queries without visible keys return NaN": {"masked_rows": "nan"},
    "the soft cap applies to the sum of score and bias": {"cap_bias": True},
}
# Tolerance, times the dtype's epsilon and the largest entry: sums of 53 terms, in any
# order.
MARGIN = 64


class Result(NamedTuple):
    """The result of one check of a function.

    Attributes:
      name: The name of the check.
      kind: "computes" if output and gradients are right; "refuses" if the function
        raised an error; "other convention" if they are right under one of
        `CONVENTIONS`; "wrong" otherwise.
      detail: The convention, the difference, or the first line of the error.
    """

    name: str
    kind: Kind
    detail: str = ""


class WrongAnswerError(Exception):
    """Raised if a function's result differs from the reference, or if it accepts a call
    that it must refuse.
    """


class OtherConventionError(Exception):
    """Raised if a function's result is right only under one of `CONVENTIONS`, not under
    this package's.
    """


def check(function: Attention, name: str) -> Result:
    """Runs the check with this name in `CHECKS` on a function, and returns the result;
    raises no error.

    The function gets query [B..., T, N, H], key [B..., S, K, H], value [B..., S, K,
    Hv], and by their names some of the other arguments of
    `flax_mha.dot_product_attention`.
    """
    # Accelerators round float32 operands; CPUs do not, and lack "highest" for float16.
    precision = None if jax.default_backend() == "cpu" else "highest"
    try:
        with jax.default_matmul_precision(precision):
            CHECKS[name](function)
    except OtherConventionError as other:
        return Result(name, "other convention", str(other))
    except WrongAnswerError as wrong:
        return Result(name, "wrong", str(wrong))
    except Exception as error:  # whatever another package raises is a refusal
        line = next(iter(str(error).splitlines()), "")
        # Abbreviates tracers.
        line = re.sub(r"JitTracer\((\S+)\)|<?Traced<(\S+)>\S*", r"\1\2", line)[:160]
        return Result(name, "refuses", f"{type(error).__name__}: {line}")
    return Result(name, "computes")


def _compare_by_conventions(compare: Callable[..., None]) -> None:
    """Calls `compare` under our convention, then under the others until one fits; else
    raises the closest error.
    """
    try:
        compare()
    except WrongAnswerError as error:
        closest = error
    else:
        return
    for convention, arguments in CONVENTIONS.items():
        try:
            compare(**arguments)
        except WrongAnswerError as error:
            # The output fits it.
            if "gradient" in str(error) and "gradient" not in str(closest):
                closest = error
        else:
            raise OtherConventionError(convention)
    raise closest


def _compare(what: str, got: Any, want: Any, dtype: Any = np.float32) -> None:
    got = np.asarray(got)
    want = np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise WrongAnswerError(f"{what}: shape {got.shape} instead of {want.shape}")
    if got.dtype != dtype:
        raise WrongAnswerError(
            f"{what}: dtype {got.dtype} instead of {np.dtype(dtype)}"
        )
    got = got.astype(np.float64)
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        count = np.isnan(got).sum() - np.isnan(want).sum()
        raise WrongAnswerError(
            f"{what}: {abs(count)} of {got.size} entries "
            f"{'are NaN' if count > 0 else 'hide a NaN'}"
        )
    same = (got == want) | np.isnan(want)  # also of infinities
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0, np.abs(got - want)).max(initial=0)
    largest = np.abs(want[np.isfinite(want)]).max(initial=1.0)
    tolerance = MARGIN * float(jnp.finfo(dtype).eps) * largest
    # Written so that a NaN fails.
    if not difference <= tolerance:
        raise WrongAnswerError(
            f"{what}: off by {difference:.2g} (largest entry: {largest:.2g})"
        )


def _call(function: Attention, arrays: Mapping[str, Any], **arguments: Any) -> Any:
    # A function may call its first three arguments as it likes.
    named = dict(arrays)
    query = named.pop("query")
    key = named.pop("key")
    value = named.pop("value")
    return function(query, key, value, **named, **arguments)


def _compare_gradients(
    got: Mapping[str, Any], want: list, dtype: Any = np.float32, nan_fits: bool = False
) -> None:
    names = [name for name in ("query", "key", "value", "bias", "sinks") if name in got]
    for name, expected in zip(names, want, strict=True):
        gradient = got[name]
        if nan_fits:
            gradient = np.where(np.isnan(gradient), expected, gradient).astype(dtype)
        _compare(f"gradient of {name}", gradient, expected, dtype)


def _compare_case(
    case: Case,
    arrays: Mapping[str, Any],
    cotangent: Any,
    out: Any,
    gradients: Mapping[str, Any],
    dtype: Any = np.float32,
) -> None:
    """Compares a function's output and gradients with those of the reference for
    `arrays` and `cotangent`.
    """

    def compare(**convention: Any) -> None:
        want, want_gradients = _reference(case, arrays, cotangent, **convention)
        _compare("output", out, want, dtype)
        # A row of NaN makes gradients NaN, even if its cotangent is 0.
        has_nan = bool(np.isnan(want).any())
        _compare_gradients(gradients, want_gradients, dtype, nan_fits=has_nan)

    _compare_by_conventions(compare)


def _output_and_gradients(
    function: Attention, case: Case, arrays: Mapping[str, Any], cotangent: Any
) -> tuple:
    def both(
        arrays: Mapping[str, Any], traced: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        def output(arrays: Mapping[str, Any]) -> Array:
            return _call(function, arrays, **traced, **case.static)

        out, pull = jax.vjp(output, arrays)
        [gradients] = pull(jnp.asarray(cotangent, out.dtype))
        return out, gradients

    given = {name: jnp.asarray(x) for name, x in arrays.items()}
    return jax.jit(both)(given, case.traced)


def _reference(
    case: Case, arrays: Mapping[str, Any], cotangent: Any, **convention: Any
) -> tuple[Any, list]:
    arguments = {**arrays, **case.traced, **case.static, **convention}
    # No gradient comes from the log-sum-exp.
    cotangents = (cotangent, np.zeros(case.output_shapes[1]))
    (output, _), gradients = reference.attention(**arguments, cotangents=cotangents)
    return output, gradients


def _check_case(case: Case, dtype: Any, function: Attention) -> None:
    """Compares a function's output and gradients with the reference's, for inputs that
    are rounded to this dtype.
    """

    def rounded(x: Any) -> np.ndarray:
        return np.asarray(jnp.asarray(x, dtype))

    # The reference gets the same rounded inputs, so only the computation differs.
    given = case.arrays(dtype=np.float64)
    arrays = {name: rounded(x) for name, x in given.items()}
    cotangent = rounded(case.cotangents()[0])
    out, gradients = _output_and_gradients(function, case, arrays, cotangent)
    exact = {name: x.astype(np.float64) for name, x in arrays.items()}
    _compare_case(case, exact, cotangent.astype(np.float64), out, gradients, dtype)


def _check_lse(case: Case, function: Attention) -> None:
    arrays: dict[str, Any] = case.arrays()
    cotangents = case.cotangents()

    def lse(arrays: Mapping[str, Any]) -> Array:
        return _call(function, arrays, **case.static, return_residual=True)[1]

    got, pull = jax.vjp(jax.jit(lse), arrays)
    zero = np.zeros(case.output_shapes[0])
    (_, want), gradients = reference.attention(
        **arrays, **case.static, cotangents=(zero, cotangents[1])
    )

    def compare(masked_rows: str = "zeros", **_: Any) -> None:
        # The mean of the values comes from equal scores that are very low.
        low = np.isneginf(want) & (got < -1e9) & (masked_rows == "mean")
        _compare("log-sum-exp", np.where(low, np.float32(-np.inf), got), want)
        [got_gradients] = pull(jnp.asarray(cotangents[1]))
        _compare_gradients(got_gradients, gradients)

    _compare_by_conventions(compare)


def _check_hidden(
    number: float, places: Mapping[str, tuple], function: Attention
) -> None:
    """Checks that masked entries never affect results: writes `number`, NaN or
    infinity, to `places` in arrays.
    """
    mask = np.ones((2, 1, T, S), bool)
    for name, (entry, place, *_) in places.items():
        if name == "query":
            mask[entry, 0, place] = False
        else:
            mask[entry, 0, :, place] = False
    case = Case(traced={"mask": mask})
    arrays = case.arrays()
    cotangent = case.cotangents()[0]
    damaged = {name: array.copy() for name, array in arrays.items()}
    for name, place in places.items():
        damaged[name][place] = number
    out, gradients = _output_and_gradients(function, case, damaged, cotangent)
    _compare_case(case, arrays, cotangent, out, gradients)


def _check_visible_nan(function: Attention) -> None:
    arrays: dict[str, Any] = Case(t=S).arrays()
    want, _ = reference.attention(**arrays, is_causal=True)
    # Queries before key 20 do not attend to it, and other heads have other keys.
    arrays["key"][0, 20, 3, 2] = np.nan
    want[0, 20:, 3] = np.nan
    _compare("output", jax.jit(_causal(function))(arrays), want)


def _causal(function: Attention) -> Callable[[Mapping[str, Any]], Any]:
    return lambda arrays: _call(function, arrays, is_causal=True)


def _check_large_scores(function: Attention) -> None:
    arrays: dict[str, Any] = Case(t=S).arrays()
    arrays["query"] *= 2.0**10  # exp(score) overflows unless the maximum is subtracted
    want, _ = reference.attention(**arrays, is_causal=True)
    out = jax.jit(_causal(function))(arrays)
    if not np.isfinite(out).all():
        raise WrongAnswerError("output: not finite")
    # float32 rounds scores in the thousands by about 1e-4.
    difference = np.abs(out - want).max()
    if difference > 0.01:
        raise WrongAnswerError(f"output: off by {difference:.2g}")


def _check_float64(function: Attention) -> None:
    with jax.enable_x64(True):
        _check_case(Case(is_causal=True, k=2), np.float64, function)


def _check_vmap(function: Attention) -> None:
    arrays: dict[str, Any] = Case(batch=(3, 2)).arrays()
    want, _ = reference.attention(**arrays, is_causal=True)
    _compare("output", jax.jit(jax.vmap(_causal(function)))(arrays), want)


def _slopes(
    exact: Callable[..., list], arrays: Mapping[str, Any], tangents: Mapping[str, Any]
) -> list:
    """Returns the derivative of each result of `exact(**arrays)` along tangents, by
    central differences in float64.
    """
    step = 1e-5

    def at(h: float) -> list:
        moved = {}
        for name, x in arrays.items():
            moved[name] = x.astype(np.float64) + h * tangents[name]
        return exact(**moved)

    # (f(x + h t) - f(x - h t)) / 2 h
    pairs = zip(at(step), at(-step), strict=True)
    return [(ahead - behind) / (2 * step) for ahead, behind in pairs]


def _check_jvp(function: Attention) -> None:
    arrays = Case().arrays()
    tangents = Case().arrays(seed=3)
    attend = _causal(function)
    forward = jax.jit(lambda a, t: jax.jvp(attend, (a,), (t,)))
    _, got = forward(arrays, tangents)
    exact = functools.partial(reference.attention, is_causal=True)
    want, _ = _slopes(exact, arrays, tangents)
    _compare("tangent", got, want)


def _check_hessian_product(function: Attention) -> None:
    case = Case(is_causal=True)
    arrays = case.arrays()
    tangents = case.arrays(seed=3)
    cotangent, _ = case.cotangents()
    attend = _causal(function)
    gradient = jax.grad(lambda arrays: jnp.vdot(attend(arrays), cotangent))
    # Forward over reverse, as in jax.hessian.
    product = jax.jit(lambda a, t: jax.jvp(gradient, (a,), (t,)))
    _, got = product(arrays, tangents)

    def exact(**moved: Any) -> list:
        _, gradients = _reference(case, moved, cotangent)
        return gradients

    _compare_gradients(got, _slopes(exact, arrays, tangents))


def _expect_error(
    shapes: Mapping[str, tuple[int, ...]],
    traced: Mapping[str, Any],
    function: Attention,
) -> None:
    arrays = Case().arrays()
    for name, shape in shapes.items():
        arrays[name] = np.ones(shape, np.float32)
    try:
        _call(function, arrays, **traced)
    except Exception:  # as it should
        return
    raise WrongAnswerError("no error")


# An additive mask, which has no place where True attends.
_FLOATS = np.where(np.arange(S) < S // 2, 0.0, -1e9).astype(np.float32)
_FLOATS = _FLOATS[None, None, None]
CHECKS: dict[str, Callable[[Attention], None]] = {
    **{
        name: functools.partial(_check_case, case, np.float32)
        for name, case in (CASES | LISTS).items()
    },
    "causal, log-sum-exp and its gradient": functools.partial(
        _check_lse, Case(is_causal=True)
    ),
    "log-sum-exp of queries without keys": functools.partial(
        _check_lse, Case(t=S, s=T, local_window_size=(2, 0))
    ),
    "NaN in a masked key": functools.partial(
        _check_hidden, np.nan, {"key": (0, 5, 2, 1)}
    ),
    "NaN in a masked value": functools.partial(
        _check_hidden, np.nan, {"value": (0, 5, 2, 1)}
    ),
    "infinity in masked keys and values": functools.partial(
        _check_hidden, np.inf, {"key": (0, 5, 2, 1), "value": (0, 5, 4, 0)}
    ),
    "NaN in a query whose keys are all masked": functools.partial(
        _check_hidden, np.nan, {"query": (0, 7, 2, 1)}
    ),
    "a visible NaN reaches only its rows": _check_visible_nan,
    "scores in the thousands": _check_large_scores,
    "bfloat16, causal": functools.partial(
        _check_case, Case(is_causal=True, k=2), jnp.bfloat16
    ),
    "float16, causal": functools.partial(
        _check_case, Case(is_causal=True, k=2), np.float16
    ),
    "float64, causal": _check_float64,
    "jax.vmap": _check_vmap,
    "forward mode (jax.jvp)": _check_jvp,
    "Hessian-vector product": _check_hessian_product,
    "rejects a float mask": functools.partial(_expect_error, {}, {"mask": _FLOATS}),
    "refuses 4 key heads for 6 query heads": functools.partial(
        _expect_error, {"key": (2, S, N - 2, H), "value": (2, S, N - 2, H)}, {}
    ),
    "refuses keys of another size than queries": functools.partial(
        _expect_error, {"key": (2, S, N, H + 1)}, {}
    ),
}
