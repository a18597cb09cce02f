"""Each call evaluates `score_mod` and `mask_mod` afresh, and compiles again only if
they compute something else.
"""

import functools
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import nothing_is_compiled, refused
from marks import with_core

from flax_mha import dot_product_attention
from flax_mha.masks import FunctionMask

T = 24
N = 2
rng = np.random.default_rng(0)
ARRAYS = [np.float32(rng.standard_normal((1, T, N, 8))) for _ in range(3)]
FIRST = jnp.linspace(-1, 1, T)
SECOND = jnp.linspace(2, -2, T)
BOTH = pytest.mark.parametrize("implementation", ["xla", "blockwise"])
CORE_OF_BOTH = pytest.mark.parametrize(
    "implementation", with_core(["xla", "blockwise"], "blockwise")
)
pytestmark = pytest.mark.usefixtures("small_tiles")


def attend(score_mod, implementation="xla", **arguments):
    return dot_product_attention(
        *ARRAYS, score_mod=score_mod, implementation=implementation, **arguments
    )


def added(table, implementation="xla"):
    """The expected output of a score_mod that adds table[kv_idx], by a bias."""
    return dot_product_attention(
        *ARRAYS, jnp.asarray(table)[None, None, :], implementation=implementation
    )


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def loss_of(score_mod, implementation="xla"):
    """A loss as a function of the query."""
    more = {"score_mod": score_mod, "implementation": implementation}
    return lambda query: jnp.sin(
        dot_product_attention(query, *ARRAYS[1:], **more)
    ).sum()


# Functions that make a score_mod which adds table[kv_idx].
def jitted_helper(table):
    helper = jax.jit(lambda score, kv_idx: score + table[kv_idx])
    return lambda score, b, h, q_idx, kv_idx: helper(score, kv_idx)


def custom_jvp(table):
    helper = jax.custom_jvp(lambda score, kv_idx: score + table[kv_idx])
    helper.defjvp(
        lambda primals, tangents: (helper(*primals), tangents[0] * table[primals[1]])
    )
    return lambda score, b, h, q_idx, kv_idx: helper(score, kv_idx)


def custom_vjp(table):
    helper = jax.custom_vjp(lambda score, kv_idx: score + table[kv_idx])
    helper.defvjp(
        lambda score, kv_idx: (helper(score, kv_idx), kv_idx),
        lambda kv_idx, cotangent: (cotangent * table[kv_idx], None),
    )
    return lambda score, b, h, q_idx, kv_idx: helper(score, kv_idx)


class OnHost:
    """A callback whose `repr` does not show its array."""

    def __init__(self, table):
        self.table = np.asarray(table)

    def __repr__(self):
        return "OnHost"

    def __call__(self, kv_idx):
        return self.table[kv_idx]


def callback(table):
    on_host = OnHost(table)
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda score, b, h, q_idx, kv_idx: (
        score + jax.pure_callback(on_host, result, kv_idx, vmap_method="broadcast_all")
    )


def helpers_of_several_modules(table):
    def helper(table):
        names = {"TABLE": table}
        exec("def look_up(index): return TABLE[index]", names)
        return names["look_up"]

    one = helper(2 * table)
    other = helper(-table)
    return lambda score, b, h, q_idx, kv_idx: score + one(kv_idx) + other(kv_idx)


class Model:
    """A score_mod as a method, and as an object."""

    def __init__(self, table):
        self.table = table

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.table[kv_idx]

    __call__ = score_mod


CAPTURING = {
    "closure": lambda table: lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
    "default": lambda table: (
        lambda score, b, h, q_idx, kv_idx, table=table: score + table[kv_idx]
    ),
    "method": lambda table: Model(table).score_mod,
    "object": Model,
    "partial": lambda table: functools.partial(
        lambda s, b, h, q, k, *, table: s + table[k], table=table
    ),
}
ADDING = {
    x.__name__: x
    for x in (
        jitted_helper,
        custom_jvp,
        custom_vjp,
        callback,
        helpers_of_several_modules,
    )
}


@pytest.mark.parametrize("name", with_core([*ADDING, *CAPTURING], *[*ADDING][:4]))
def test_functions_that_differ_only_in_a_captured_array_differ(name):
    make = (ADDING | CAPTURING)[name]
    # The third call must not return what the second one computed.
    for table in (FIRST, SECOND, FIRST):
        close(attend(make(table)), added(table))


# Functions that make a score_mod whose derivative is multiplied by factor[0].
def jvp_rule(factor):
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor[0]))
    return lambda score, *_: scaled(score)


def vjp_rule(factor):
    scaled = jax.custom_vjp(lambda x: x)
    scaled.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * factor[0],))
    return lambda score, *_: scaled(score)


def rule_of_a_rule(factor):
    outer = jax.custom_jvp(jnp.cos)
    inner = jvp_rule(factor)
    outer.defjvp(
        lambda primals, tangents: (
            outer(primals[0]),
            -tangents[0] * jnp.sin(inner(primals[0])),
        )
    )
    return lambda score, *_: outer(score)


@BOTH
@pytest.mark.parametrize(
    ("make", "same"),
    [*itertools.product((jvp_rule, vjp_rule, rule_of_a_rule), (False, True))],
)
def test_the_current_rule_of_a_custom_derivative_counts(make, same, implementation):
    """If the same function's closure changes, neither its jaxpr nor its identity shows
    the change.
    """
    query = ARRAYS[0]
    numbers = [1.0]
    kept = make(numbers)

    def derivative(number):
        numbers[0] = number
        gradient = jax.grad(loss_of(kept if same else make([number]), implementation))
        if make is rule_of_a_rule:
            return jax.jvp(gradient, (query,), (query,))[1]
        return gradient(query)

    first = derivative(1.0)
    other = derivative(3.0)
    # Of a rule of a rule, only second derivatives change.
    if make is rule_of_a_rule:
        assert jnp.abs(other - first).max() > 1e-3
    else:
        close(other, 3 * first)
    close(derivative(1.0), first)


@BOTH
def test_a_custom_vjp_has_gradients_but_no_forward_mode(implementation):
    """Refused in a line that names the function, traced or not."""
    loss = loss_of(custom_vjp(FIRST), implementation)
    for change in (lambda f: f, jax.jit):
        with pytest.raises(
            NotImplementedError,
            match=r"^score_mod .* must support forward mode.*custom_jvp",
        ) as error:
            change(lambda x: jax.jvp(loss, (x,), (x,)))(ARRAYS[0])
        assert "\n" not in str(error.value)
    assert jnp.isfinite(jax.jit(jax.grad(loss))(ARRAYS[0])).all()


@CORE_OF_BOTH
def test_current_values_of_closures_count(implementation):
    """The same function objects, with rebound numbers, changed lists and NumPy arrays,
    and a rebound array.
    """
    number = 0.5
    numbers = [1.0]
    array = np.full(T, 0.25, np.float32)
    table = FIRST
    count = 20

    @jax.jit
    def looked_up(kv_idx):
        return number * table[kv_idx]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (numbers[0] + jnp.asarray(array)[kv_idx]) * looked_up(kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return kv_idx < count

    def check():
        bias = (numbers[0] + array) * number * table
        bias = jnp.where(np.arange(T) < count, bias, -jnp.inf)
        got = attend(score_mod, implementation, mask=FunctionMask(mask_mod))
        close(got, added(bias, implementation))

    # Each of them changes alone.
    check()
    number = -3.0
    check()
    numbers[0] = 4.0
    check()
    array[:] = np.arange(T)
    check()
    table = SECOND
    check()
    count = 9
    check()


@CORE_OF_BOTH
def test_arrays_captured_by_a_jitted_helper_get_gradients(implementation):
    def loss(table):
        return jnp.sum(jnp.sin(attend(jitted_helper(table), implementation)))

    def wanted_loss(table):
        return jnp.sum(jnp.sin(added(table)))

    close(jax.grad(loss)(FIRST), jax.grad(wanted_loss)(FIRST))


@pytest.mark.core
@pytest.mark.parametrize("convert", [np.asarray, list], ids=["NumPy", "list"])
def test_lists_and_numpy_arrays_are_refused_with_the_fix(convert):
    message = (
        r"score_mod\(.* raised Tracer(Array|Integer)Conv.* indexed by positions: "
        r"use jnp.asarray\(\.\.\.\)"
    )
    refused(message, attend, Model(convert(np.asarray(FIRST))))


@BOTH
def test_a_key_of_jax_random_may_be_captured(implementation):
    key = jax.random.key(3)

    def noise(q_idx, kv_idx):
        of_query = jax.random.fold_in(key, q_idx)
        return jax.random.normal(jax.random.fold_in(of_query, kv_idx))

    positions = jnp.meshgrid(jnp.arange(T), jnp.arange(T), indexing="ij")
    bias = jax.vmap(jax.vmap(noise))(*positions)[None]
    mask = FunctionMask(lambda b, h, q_idx, kv_idx: noise(q_idx, kv_idx) > 0)
    got = attend(
        lambda score, b, h, q_idx, kv_idx: score + noise(q_idx, kv_idx),
        implementation,
        mask=mask,
    )
    close(got, dot_product_attention(*ARRAYS, bias, bias > 0))


@BOTH
def test_every_call_runs_the_callback_of_a_mask_mod(implementation):
    on_host = OnHost(np.ones(T, bool))
    result = jax.ShapeDtypeStruct((), bool)

    def mask_mod(b, h, q_idx, kv_idx):
        return jax.pure_callback(on_host, result, kv_idx, vmap_method="broadcast_all")

    for count in (T, 7):
        on_host.table[:] = np.arange(T) < count
        got = attend(None, implementation, mask=FunctionMask(mask_mod))
        close(got, dot_product_attention(*ARRAYS, mask=on_host.table[None, None, None]))


def test_a_new_mask_is_an_equal_argument_of_jit_until_a_captured_value_changes():
    # 64 bits, of which JAX keeps old values.
    traces = 0
    window = 3
    table = np.arange(T)

    @jax.jit
    def call(mask):
        nonlocal traces
        traces += 1
        return attend(None, mask=mask)

    def check(count):
        def near(b, h, q, k):
            return (abs(q - k) < window) & (jnp.asarray(table)[k] < 15)

        # A new object and a new function in each call.
        mask = FunctionMask(near)
        distance = abs(np.arange(T)[:, None] - np.arange(T))
        as_array = (distance < window) & (table < 15)
        close(call(mask), dot_product_attention(*ARRAYS, mask=as_array))
        assert traces == count
        return mask

    check(1)
    before = check(1)
    assert before == check(1)
    assert hash(before) == hash(check(1))
    window = 5
    assert before == check(2)  # the comparison traces both now
    table[:] = table[::-1].copy()
    check(3)


@CORE_OF_BOTH
def test_equal_functions_and_other_arrays_compile_nothing(implementation):
    def call(slope, offset, scale):
        slope = jnp.float32(slope)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * slope + 0.25 * (q_idx - kv_idx).astype(score.dtype)

        return attend(
            score_mod,
            implementation,
            mask=FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 1),
            query_offset=offset,
            scale=scale,
            query_segment_ids=np.arange(T)[None] // offset,
        )

    call(0.5, 7, 0.1)
    with nothing_is_compiled():
        for slope, offset, scale in (
            (0.7, 7, 0.1),
            (0.5, 8, 0.1),
            (0.5, 1001, 0.3),
            (-1.5, 3, 2),
        ):
            call(slope, offset, scale)


def test_a_hundred_lambdas_leak_nothing():
    def call(slope):
        slope = jnp.float32(slope)
        return attend(lambda score, b, h, q_idx, kv_idx: score * slope)

    call(0.5)
    gc.collect()
    objects = len(gc.get_objects())
    with nothing_is_compiled():
        for i in range(100):
            call(i / 100)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100


@pytest.mark.core
@pytest.mark.parametrize(
    "make",
    [
        lambda table: (
            (lambda s, b, h, q, k: s * 2**-3)
            if table is FIRST
            else (lambda s, b, h, q, k: s * 0.125)
        ),
        lambda table: lambda s, b, h, q, k: jax.nn.relu(s),
        lambda table: lambda s, b, h, q, k: jax.nn.softplus(s),
        lambda table: (
            lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x + table[i], s)
        ),
        lambda table: (
            lambda s, b, h, q, k: jax.lax.cond(
                q > k, lambda x: x * table[0], lambda x: x, s
            )
        ),
    ],
    ids=[
        "numbers",
        "library function",
        "rule that calls its function",
        "loop",
        "branches",
    ],
)
def test_the_same_code_compiles_once(make):
    attend(make(FIRST))
    with nothing_is_compiled():
        attend(make(SECOND))


@pytest.mark.core
@pytest.mark.parametrize(
    "make",
    [
        lambda number: lambda s, b, h, q, k: s * (1 + 2.0 ** (-8 * (number - 3))),
        lambda number: lambda s, b, h, q, k: jnp.where(q > number, s, 0.0),
        lambda number: lambda s, b, h, q, k: s + jnp.inf * (number - 3.5),
        lambda number: lambda s, b, h, q, k: jnp.abs(s) ** number,
    ],
    ids=["floats", "integers", "infinities", "exponents"],
)
def test_functions_with_different_numbers_differ(make):
    # Infinities of different signs may give NaN in one output.
    one = np.nan_to_num(attend(make(3)), nan=9.0)
    other = np.nan_to_num(attend(make(4)), nan=9.0)
    assert np.abs(one - other).max() > 1e-3


def test_a_function_whose_rule_raises_has_a_value_but_no_derivative():
    def refuse(*_):
        raise NotImplementedError("no gradient")

    doubled = jax.custom_vjp(lambda x: 2 * x)
    doubled.defvjp(lambda x: (2 * x, None), refuse)
    want = attend(lambda score, *_: 2 * score)
    close(attend(lambda score, *_: doubled(score)), want)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(loss_of(lambda score, *_: doubled(score)))(ARRAYS[0])


@BOTH
@pytest.mark.parametrize("transform", ["grad", "jacfwd", "grad of grad"])
def test_scores_masked_by_a_score_mod_have_safe_derivatives(transform, implementation):
    """Its logarithm has no value for later keys, which it masks."""
    slopes = jnp.array([0.5, 1.5])

    def derivative(of_distance):
        def loss(query, slopes):
            def score_mod(score, b, h, q_idx, kv_idx):
                distance = of_distance(q_idx - kv_idx).astype(score.dtype)
                changed = (score + jnp.log1p(distance)) * slopes[h]
                return jnp.where(q_idx >= kv_idx, changed, -jnp.inf)

            return loss_of(score_mod, implementation)(query)

        if transform == "jacfwd":
            first = jax.jacfwd(loss, (0, 1))
        else:
            first = jax.grad(loss, (0, 1))
        if transform != "grad of grad":
            return first(ARRAYS[0], slopes)
        return jax.grad(lambda *x: sum(jnp.sin(y).sum() for y in first(*x)), (0, 1))(
            ARRAYS[0], slopes
        )

    # Later keys have distances below 0, whose logarithm may be NaN.
    unsafe = derivative(lambda x: x)
    safe = derivative(lambda x: jnp.maximum(x, 0))
    for got, want in zip(unsafe, safe, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@BOTH
def test_each_head_gets_its_own_entry_of_an_array_by_batch_and_head(implementation):
    """If all lookups are array[b, h, ...]; the array may be larger than the call, or
    also used as a whole.
    """
    terms = jnp.asarray(rng.standard_normal((3, N, T)), jnp.float32)

    def loss(whole, terms):
        """With `whole`, also an entry of another batch entry."""

        def score_mod(score, b, h, q, k):
            score = score + terms[b, h, q] * terms[b, h, k]
            return score + terms[1, 0, 0] if whole else score

        return jnp.sin(attend(score_mod, implementation)).sum()

    def by_bias(terms):
        bias = terms[:1, :, :, None] * terms[:1, :, None, :]
        return jnp.sin(dot_product_attention(*ARRAYS, bias)).sum()

    for whole, given in ((False, terms[:1]), (False, terms), (True, terms)):
        close(jax.grad(functools.partial(loss, whole))(given), jax.grad(by_bias)(given))


def test_scores_have_32_bits_in_narrow_calls():
    dtypes = []
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in ARRAYS)
    dot_product_attention(
        *arrays, score_mod=lambda score, *_: dtypes.append(score.dtype) or score
    )
    assert {*dtypes} == {jnp.dtype(jnp.float32)}
