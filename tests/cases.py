"""Helpers that many tests of attention share; the table of cases is in
`reference_cases.py`.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.extend.core import ClosedJaxpr, Jaxpr
from reference_cases import CASES as CASES
from reference_cases import Case, N, S, T

from flax_mha import dot_product_attention
from flax_mha._src import run
from flax_mha._src.core import tracing

# On first use it would import a patched platform.
from flax_mha._src.engines import in_place as in_place

DROPOUT_CASES = {
    "dropout": Case(dropout_rate=0.3),
    "dropout, broadcast": Case(k=2, dropout_rate=0.3, broadcast_dropout=True),
    "dropout, odd lengths": Case(t=1, s=1, dropout_rate=0.5),
    "dropout, everything": Case(
        k=2,
        hv=5,
        bias=(N, 1, S),
        is_causal=True,
        query_offset=9,
        local_window_size=(30, 0),
        dropout_rate=0.2,
        traced={"key_value_seq_lengths": np.array([40, 53], np.int32)},
    ),
}


def inputs(seed=0, batch=2, t=T, s=S, n=N, k=2, h=8):
    rng = np.random.default_rng(seed)
    shapes = ((batch, t, n, h), (batch, s, k, h), (batch, s, k, h))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def with_gradients(implementation=None, **arguments):
    """Returns a function that computes attention's results, and the gradients of all
    arrays that are passed to it.

    It takes query, key, value (and bias) by position, and other arrays by name. The
    loss is over the finite results.
    """

    def run(*arrays, **learned):
        def attend(arrays, learned):
            return dot_product_attention(
                *arrays, **learned, implementation=implementation, **arguments
            )

        answers, pull = jax.vjp(attend, arrays, learned)
        cotangents = jax.tree.map(
            lambda x: jnp.where(jnp.isfinite(x), jnp.cos(x), jnp.zeros_like(x)), answers
        )
        return *jax.tree.leaves(answers), *jax.tree.leaves(pull(cotangents))

    return run


def gradients(implementation, arguments, **more):
    """Returns `with_gradients`, jitted: NumPy arrays in the dict `arguments` are
    traced, all the rest is static.
    """
    data = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    static = more | {name: x for name, x in arguments.items() if name not in data}
    run = jax.jit(
        lambda arrays, learned, data: with_gradients(implementation, **static, **data)(
            *arrays, **learned
        )
    )
    return lambda arrays, **learned: jax.device_get(run(arrays, learned, data))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _dense_gradients(arrays, mask, scale, soft_cap):
    attend = functools.partial(
        dot_product_attention,
        mask=mask,
        scale=scale,
        logits_soft_cap=soft_cap,
        implementation="xla",
    )
    output, pull = jax.vjp(attend, *arrays)
    is_finite = jnp.isfinite(output)
    return output, *pull(jnp.where(is_finite, jnp.cos(output), jnp.zeros_like(output)))


def dense_gradients(arrays, scale=None, logits_soft_cap=None, **masking):
    """Computes output and gradients by "xla", with the mask as an array: calls with
    equal shapes compile only once.
    """
    *batch, t, n, _ = arrays[0].shape
    s = arrays[1].shape[-3]
    mask = reference.visible_scores((*batch, n, t, s), **masking)
    return jax.device_get(_dense_gradients(arrays, mask, scale, logits_soft_cap))


def naive_attention(
    query, key, value, visible=True, logits_soft_cap=None, added=0.0, sinks=-np.inf
):
    """Computes attention by its textbook equation, with scores and weights in the dtype
    of the arrays.
    """
    dtype = query.dtype
    groups = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, groups, -2) for x in (key, value))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        root = jnp.asarray(np.sqrt(query.shape[-1]), dtype)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / root
        if logits_soft_cap is not None:
            scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
        scores = jnp.where(visible, scores + jnp.asarray(added, dtype), -jnp.inf)
        # A sink is one more score of each row, whose weight is left out.
        sinks = jnp.asarray(sinks, dtype).reshape(-1, 1, 1)
        sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", jnp.nan_to_num(weights), value)


def close(got, want, tolerance=1e-5, at_least=0.0):
    """Asserts that trees agree up to `tolerance` times the largest finite value of each
    wanted array, or `at_least`.
    """
    leaves = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, one), other in leaves:
        largest = np.abs(np.where(np.isfinite(other), other, 0)).max(initial=at_least)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            one, other, rtol=0, atol=tolerance * largest, err_msg=name
        )


def by_the_rule_of_flash_attention(answers, naive, truth):
    """Asserts errors of at most twice those of the naive computation in the same dtype,
    plus one rounding error.
    """
    for got, simple, want in zip(answers, naive, truth, strict=True):
        assert got.dtype == simple.dtype
        want = np.float64(want)
        error = np.abs(np.float64(got) - want).max()
        naive_error = np.abs(np.float64(simple) - want).max()
        rounding = float(jnp.finfo(got.dtype).eps) * np.abs(want).max()
        assert error <= 2 * naive_error + rounding


# The end of an error message, which says what to change.
REMEDY = re.compile(
    r": (if it only masks, )?(change|compute|export|leave|look up|make|multiply|pass"
    r"|run|set|use) [^:]+$",
    re.DOTALL,
)


def interpret(patch, name, how=True):
    """Lets an implementation run its TPU kernels here, with `interpret=how`. `patch` is
    a pytest.MonkeyPatch.
    """
    patch.setitem(
        run.ENGINES, name, dataclasses.replace(run.ENGINES[name], interpret=how)
    )


def compiled_for(patch, platform):
    """Makes traced calls choose an implementation as on `platform` ("gpu", "tpu").
    `patch` is a pytest.MonkeyPatch.
    """
    patch.setattr(tracing, "platform", lambda: platform)


@contextlib.contextmanager
def nothing_is_compiled():
    """Asserts that JAX compiles nothing inside the `with` statement."""
    compiled = []

    def note(event, seconds, fun_name="", **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == []


def forget_programs():
    """Clears the caches of flax_mha's jitted functions, which may depend on a test's
    patches; keeps all others.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "flax_mha":
            for x in list(vars(module).values()):
                clear = getattr(x, "clear_cache", None)
                if clear is not None and not isinstance(x, type):
                    clear()


def equations(jaxpr):
    """Yields the equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            if not isinstance(parameter, tuple | list):
                parameter = (parameter,)
            for inner in parameter:
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from equations(getattr(inner, "jaxpr", inner))


def kernels_in(text, pattern):
    """Lists the kernels, matches of `pattern`, that a lowered program runs on finite
    inputs: those not in a branch.
    """
    of_functions = r"func\.func \w+ @([\w.$]+)(.*?)(?=func\.func|\Z)"
    bodies = dict(re.findall(of_functions, text, re.DOTALL))

    def names_in(body):
        body = _without_branches(body)
        names = re.findall(pattern, body)
        for callee in re.findall(r"\bcall @([\w.$]+)\(", body):
            names += names_in(bodies[callee])
        return names

    return names_in(bodies["main"])


def _without_branches(body):
    """Removes the branches of `lax.cond` from a function's text; those of
    `lax.platform_dependent` stay.
    """
    before, case, after = body.partition('"stablehlo.case"')
    if not case:
        return before
    # lax.cond converts its predicate, lax.platform_dependent does not.
    if f"{after[1 : after.index(')')]} = stablehlo.convert" not in before:
        return before + case + _without_branches(after)
    after = after[after.index("({") + 1 :]
    depth = 0
    end = 0
    while after[end] != ")" or depth:
        depth += {"{": 1, "}": -1}.get(after[end], 0)
        end += 1
    return before + _without_branches(after[end:])


def in_parts(step, x, sizes):
    """Calls `step` on consecutive parts of x with `sizes` tokens; returns the outputs,
    joined to one array.
    """
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return np.concatenate([step(x[:, i:j]) for i, j in ends], axis=1)


def linen_step(layer, variables):
    """Returns a jitted call of a linen module; each call stores the new cache in the
    dict `variables`.
    """
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))

    def step(*inputs, **arguments):
        output, changed = apply(variables, *inputs, **arguments)
        variables.update(changed)
        return output

    return step


def refused(message, call, *arguments, error=ValueError, **keywords):
    """Asserts that a call raises `error` with a message of one line; below a dashed
    line, Flax may add the module.
    """
    with pytest.raises(error, match=message) as raised:
        call(*arguments, **keywords)
    assert "\n" not in str(raised.value).partition("\n---")[0]
