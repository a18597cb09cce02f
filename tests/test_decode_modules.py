"""Decoding with the modules of flax.nnx and flax.linen: any split of a sequence into
calls equals the whole forward.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from flax.nnx.nn import dtypes
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import core

import flax_mha
from flax_mha import Norm, linen
from flax_mha.masks import CausalMask, FunctionMask
from flax_mha.rope import RoPE

B = 2
D = 24
N = 4
K = 2
LENGTH = 97
WINDOW = 5
SLOTS = {"ring": 300, "slots": 67}  # from 70 on, the window makes a ring of 70
EVERYTHING = {
    "num_kv_heads": K,
    "rope": RoPE(),
    "local_window_size": (WINDOW, 1),
    "logits_soft_cap": 2.0,
}
EVERYTHING |= {"sinks": True, "normalize_qk": Norm("rms")}
X = np.float32(np.random.default_rng(0).standard_normal((B, LENGTH, D)))
SIZES = (1, 7, 40)
CALLS = ((0, 40), (40, 48))


assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def grown(params):
    """Changes vectors, which start as zeros or ones and would hide errors."""
    added = np.linspace(-0.5, 0.5, N)

    def grow(x):
        if x.ndim != 1:
            return x
        return x + jnp.asarray(np.resize(added, x.shape), x.dtype)

    return jax.tree.map(grow, params)


class Nnx:
    """An nnx module that decodes, one jitted program for each shape of its inputs."""

    def __init__(self, **options):
        self.module = flax_mha.MultiHeadAttention(
            N, D, decode=True, rngs=nnx.Rngs(0, dropout=1), **options
        )
        nnx.update(self.module, grown(nnx.state(self.module, nnx.Param)))

    def full(self, x, deterministic=None, **arguments):
        return nnx_full(self.module, x, arguments, deterministic)

    def start(self, slots, per_row):
        self.module.init_cache((B, slots, D), per_row=per_row)

    def set(self, **options):
        vars(self.module).update(options)

    def step(self, x, **arguments):
        return nnx_step(self.module, x, arguments)

    @property
    def index(self):
        return self.module.cache_index[...]


@functools.partial(nnx.jit, static_argnums=3)
def nnx_full(module, x, arguments, deterministic):
    return module(
        x, decode=False, is_causal=True, deterministic=deterministic, **arguments
    )


@nnx.jit
def nnx_step(module, x, arguments):
    return module(x, **arguments)


class Linen:
    """The same for linen; it keeps the variables."""

    def __init__(self, **options):
        self.options = {"num_heads": N, **options}
        layer = linen.MultiHeadDotProductAttention(**self.options)
        variables = layer.init(jax.random.key(0), X, deterministic=True)
        self.params = grown(variables["params"])

    def full(self, x, deterministic=None, **arguments):
        layer = linen.MultiHeadDotProductAttention(**self.options)
        return linen_full(layer, self.params, x, arguments, deterministic)

    def set(self, **options):
        self.layer = self.layer.clone(**options)

    def start(self, slots, per_row):
        self.layer = linen.MultiHeadDotProductAttention(
            **self.options, decode=True, per_row=per_row
        )
        init = functools.partial(self.layer.init, deterministic=True)
        shapes = jax.eval_shape(init, jax.random.key(0), jnp.zeros((B, slots, D)))
        self.cache = jax.tree.map(jnp.zeros_like, shapes["cache"])

    def step(self, x, **arguments):
        output, changed = linen_step(self.layer, self.params, self.cache, x, arguments)
        self.cache = changed["cache"]
        return output

    @property
    def index(self):
        return self.cache["cache_index"]


@functools.partial(jax.jit, static_argnums=(0, 4))
def linen_full(layer, params, x, arguments, deterministic):
    return layer.apply(
        {"params": params}, x, is_causal=True, deterministic=deterministic, **arguments
    )


@functools.partial(jax.jit, static_argnums=0)
def linen_step(layer, params, cache, x, arguments):
    return layer.apply(
        {"params": params, "cache": cache}, x, mutable=["cache"], **arguments
    )


APIS = pytest.mark.parametrize("api", [Nnx, Linen])


def decoded(
    module,
    positions=None,
    slots="slots",
    per_row=True,
    calls=CALLS,
    options=None,
    **arguments,
):
    """The outputs of consecutive calls in a new cache, with `options` set."""
    module.start(SLOTS[slots], per_row)
    module.set(**options or {})
    outputs = []
    for first, end in calls:
        if positions is not None:
            arguments["positions"] = positions[:, first:end]
        outputs.append(module.step(X[:, first:end], **arguments))
    return np.concatenate(outputs, 1)


@functools.cache
def made(api):
    """A module with everything, and its output of the whole sequence."""
    module = api(**EVERYTHING)
    return module, np.asarray(module.full(X))


@pytest.mark.parametrize(("api", "kind"), [(Nnx, "slots"), (Linen, "ring")])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_split_of_each_sequence_equals_the_whole_forward(api, kind, data):
    module, expected = made(api)
    module.start(SLOTS[kind], per_row=True)
    filled = np.zeros(B, int)
    for _ in range(data.draw(st.integers(1, 5))):
        size = data.draw(st.sampled_from(SIZES))
        lengths = [data.draw(st.integers(0, size)) for _ in range(B)]
        lengths = np.minimum(lengths, min(LENGTH, SLOTS[kind]) - filled)
        ends = filled + lengths
        # The padding is not finite.
        new = np.full((B, size, D), np.nan, np.float32)
        for row in range(B):
            new[row, : lengths[row]] = X[row, filled[row] : ends[row]]

        lengths = jnp.asarray(lengths, jnp.int32)
        output = np.asarray(module.step(jnp.asarray(new), lengths=lengths))

        for row in range(B):
            wanted = expected[row, filled[row] : ends[row]]
            assert_close(output[row, : lengths[row]], wanted)
        filled = ends
        np.testing.assert_array_equal(module.index, filled)


@pytest.mark.core
def test_positions_only_change_the_rotation():
    module, _ = made(Linen)
    drawn = np.random.default_rng(1).integers(0, 999, (B, 48))
    positions = jnp.asarray(drawn, jnp.int32)
    want = module.full(X[:, :48], positions=positions)
    assert_close(decoded(module, positions, per_row=False), want)


def of_text(positions):
    return np.repeat(np.arange(*positions)[:, None], 3, axis=1)


def test_positions_may_have_several_coordinates():
    module = Nnx(**EVERYTHING | {"rope": RoPE(sections=(1, 1, 1))})
    assert_close(module.full(X), made(Nnx)[1], atol=1e-6)  # only text
    # Tokens of an image share a frame, and later tokens have smaller positions than
    # their slots.
    height, width = np.divmod(np.arange(24), 6)
    image = 11 + np.stack([np.zeros(24, int), height, width], axis=-1)
    positions = np.concatenate([of_text((0, 11)), image, of_text((17, 30))])
    positions = jnp.asarray(np.stack([positions, positions[::-1]]), jnp.int32)

    expected = np.asarray(module.full(X[:, :48], positions=positions))

    assert np.abs(expected - made(Nnx)[1][:, :48]).max() > 1e-2
    assert_close(decoded(module, positions), expected)
    # The same for all sequences.
    of_all = module.full(X[:, :48], positions=positions[0])
    assert_close(of_all[0], expected[0], atol=1e-6)
    # A different number of coordinates.
    message = r"positions must be \[batch..., length, coordinates\] .* \(2, 48, 3\)"
    for wrong in (positions[..., :2], positions[..., 0]):
        with pytest.raises(ValueError, match=message):
            module.full(X[:, :48], positions=wrong)


FLAX = {Nnx: nnx.dot_product_attention, Linen: nn.dot_product_attention}


@pytest.mark.parametrize(("api", "window"), [(Nnx, WINDOW), (Linen, None)])
def test_attention_functions_of_flax_get_all_keys_and_a_mask(api, window):
    module = api(rope=RoPE(), local_window_size=window)
    expected = np.asarray(module.full(X))
    calls = ((0, 40), (40, 80), (80, 81), (81, 88))
    options = {"attention_fn": FLAX[api]}
    mask = np.ones((1, 1), bool)

    # The keys of a ring are in the order of their positions.
    with jax.numpy_rank_promotion("allow"):  # Flax's own
        got = decoded(module, slots="ring", calls=calls, options=options, mask=mask)

    assert_close(got, expected[:, :88])


@pytest.mark.parametrize("kind", SLOTS)
def test_sown_weights_and_scores_equal_those_of_the_whole_forward(kind):
    module = Linen(**EVERYTHING, dropout_rate=0.4)
    dropout = {"deterministic": False, "dropout_rng": jax.random.key(3)}
    sow = {"sow_weights": True, "sow_max_score": True}

    @functools.partial(jax.jit, static_argnums=0, static_argnames="is_causal")
    def apply(layer, x, variables, **arguments):
        output, changed = layer.apply(
            {"params": module.params, **variables},
            x,
            mutable=["cache", "intermediates"],
            **dropout,
            **sow,
            **arguments,
        )
        [weights] = changed["intermediates"]["attention_weights"]
        [max_score] = changed["intermediates"]["attention_max_score"]
        return output, max_score, weights, changed.get("cache")

    # A prompt and a token, and both in one call.
    module.start(SLOTS[kind], per_row=False)
    layer = module.layer
    start = {"cache": module.cache}
    output, of_prompt, _, cache = apply(layer, X[:, :47], start)
    last, of_last, weights, cache = apply(layer, X[:, 47:48], {"cache": cache})
    whole_layer = layer.clone(decode=False)
    _, largest, whole, _ = apply(whole_layer, X[:, :48], {}, is_causal=True)

    np.testing.assert_allclose(np.maximum(of_prompt, of_last), largest, rtol=1e-5)
    # Sowing does not change which weights are dropped.
    want = module.full(X[:, :48], **dropout)
    assert_close(np.concatenate([output, last], 1), want)
    # Of every slot; in a ring of the slots and then the new tokens, by position.
    slots = cache["cached_key"].shape[1]
    assert weights.shape == (B, N, 1, slots + (kind == "ring"))
    end = weights.shape[-1] if kind == "ring" else 48  # after the newest token
    assert_close(weights[..., end - 48 : end], whole[:, :, 47:], atol=1e-6)
    np.testing.assert_array_equal(weights[..., end:], 0)
    np.testing.assert_array_equal(weights[..., : end - 48], 0)


@APIS
def test_dropout_drops_the_same_weights_as_the_whole_forward(api):
    module = api(num_kv_heads=K, dropout_rate=0.4)

    def dropping(seed):
        key = jax.random.key(seed)
        if api is Linen:
            return {"dropout_rng": key}
        return {"rngs": nnx.Rngs(dropout=key)}

    expected = module.full(X[:, :48], deterministic=False, **dropping(3))
    other = module.full(X[:, :48], deterministic=False, **dropping(4))
    assert np.abs(other - expected).max() > 0.01

    # Dropout depends on key and position, so one key for all calls drops the same.
    module.start(SLOTS["slots"], per_row=True)
    module.set(deterministic=False)
    outputs = []
    for first, end in CALLS:
        outputs.append(module.step(X[:, first:end], **dropping(3)))
    assert_close(np.concatenate(outputs, 1), expected)


@pytest.mark.parametrize(
    ("api", "promote"), [(Nnx, {"promote_dtype": dtypes.promote_dtype}), (Linen, {})]
)
def test_arguments_of_a_partial_count_as_those_of_the_call(api, promote):
    # Keys are read in place, or `promote_dtype` makes the function be called.
    options = {"logits_soft_cap": 0.5, "local_window_size": (WINDOW, 0)}
    mask = FunctionMask(lambda b, h, q, k: q % 7 != k)
    attention_fn = functools.partial(
        flax_mha.attention_fn, is_causal=True, mask=mask, **options, **promote
    )

    # A prompt, and a token.
    calls = ((0, 9), (9, 10))
    got = decoded(api(attention_fn=attention_fn), calls=calls)
    want = decoded(api(**options), calls=calls, mask=mask)
    assert_close(got, want)


def tripled(arrays, dtype=None):
    """A `promote_dtype` that is seen in the output."""
    query, key, value = arrays
    return 3 * query, key, value


@pytest.mark.core
def test_promotion_of_a_partial_counts_while_decoding():
    attention_fn = functools.partial(flax_mha.attention_fn, promote_dtype=tripled)

    calls = ((0, 9), (9, 10))
    got = decoded(Nnx(attention_fn=attention_fn), calls=calls)
    want = decoded(Nnx(scale=3 / np.sqrt(D / N)), calls=calls)
    assert_close(got, want)


@pytest.mark.core
@APIS
@pytest.mark.parametrize("name", ["query_offset", "key_value_seq_lengths"])
def test_partial_that_sets_positions_is_refused(api, name):
    attention_fn = functools.partial(flax_mha.attention_fn, **{name: jnp.array([3, 4])})
    module = api(attention_fn=attention_fn)
    module.start(LENGTH, per_row=False)
    refused(f"attention_fn must not set {name} while decoding", module.step, X[:, :3])


@pytest.mark.core
def test_view_has_a_cache_with_an_index_per_sequence():
    module, expected = made(Nnx)
    sizes = {"batch_size": B, "max_length": SLOTS["slots"]}
    view = nnx.view(module.module, decode=True, per_row=True, **sizes)
    assert view.cache_index.shape == (B,)
    assert view.cache_index is not module.module.cache_index

    nnx_step(view, X[:, :40], {"lengths": jnp.array([40, 11])})
    new = jnp.stack([X[0, 40:41], X[1, 11:12]])
    output = nnx_step(view, new, {"lengths": jnp.array([1, 1])})

    assert_close(output, jnp.stack([expected[0, 40:41], expected[1, 11:12]]))
    np.testing.assert_array_equal(view.cache_index[...], [41, 12])


def test_steps_that_donate_the_cache_share_one_trace():
    # As in the documentation of decoding.
    module, expected = made(Nnx)
    module.start(SLOTS["ring"], per_row=True)
    graph, cache, rest = nnx.split(module.module, nnx.Cache, ...)
    traced = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, rest, x):
        traced.append(1)
        module = nnx.merge(graph, cache, rest)
        output = module(x)
        return output, nnx.state(module, nnx.Cache)

    cache = jax.tree.map(jnp.copy, cache)
    for t in range(20):
        given = jax.tree.leaves(cache)
        output, cache = step(cache, rest, X[:, t : t + 1])
        assert all(x.is_deleted() for x in given)
        assert_close(output, expected[:, t : t + 1])
    assert len(traced) == 1


# Cross-attention: keys, values and lengths of the encoder are stored once, by
# `store_keys=True`

TARGET = jax.random.normal(jax.random.key(0), (2, 7, 12))
ENCODED = jax.random.normal(jax.random.key(1), (2, 11, 10))
LENGTHS = jnp.array([11, 4])
SPLITS = (slice(0, 1), slice(1, 4), slice(4, 7))


def nnx_cross(**options):
    given = {
        "in_kv_features": 10,
        "num_kv_heads": 1,
        "decode": True,
        "rngs": nnx.Rngs(0),
    }
    return flax_mha.MultiHeadAttention(2, 12, **given | options)


class LinenCross:
    """A linen module for cross-attention with its variables, called like one of nnx."""

    def __init__(self, **options):
        given = {"num_heads": 2, "num_kv_heads": 1, "decode": True}
        self.module = linen.MultiHeadDotProductAttention(**given | options)
        stored = {"store_keys": True, "is_causal": False}
        if "rope" in options:
            stored["positions"] = (jnp.arange(1), jnp.arange(11))
        self.variables = self.module.init(
            jax.random.key(0), TARGET[:, :1], ENCODED, **stored
        )

    def __call__(self, *inputs, decode=True, **arguments):
        if not decode:
            module = self.module.clone(decode=False)
            return module.apply(self.variables, *inputs, **arguments)
        output, cache = self.module.apply(
            self.variables, *inputs, **arguments, mutable=["cache"]
        )
        self.variables = self.variables | cache
        return output


CROSS = pytest.mark.parametrize("make", [nnx_cross, LinenCross], ids=["nnx", "linen"])


def decode_cross(module, first, positions=None):
    """The outputs of a call that stores the keys, and of calls that use them."""
    outputs = []
    for number, part in enumerate(SPLITS):
        given = {}
        if positions is not None:
            given["positions"] = positions[part]
        if number == 0:
            given = {name: (x, jnp.arange(11)) for name, x in given.items()}
            given |= {"inputs_k": ENCODED, "store_keys": True, **first}
        outputs.append(module(TARGET[:, part], **given))
    return np.concatenate(outputs, 1)


@CROSS
@pytest.mark.parametrize("lengths", [None, core(np.array([11, 4], np.int64))])
def test_stored_keys_give_the_outputs_of_keys_that_are_passed(make, lengths):
    module = make()
    given = {} if lengths is None else {"lengths": (None, lengths)}
    want = module(TARGET, ENCODED, decode=False, **given)
    for _ in range(2):  # stored keys can be stored again
        assert_close(decode_cross(module, given), want, atol=1e-6)
    assert_close(module(TARGET), want, atol=1e-6)  # no call added any


@CROSS
def test_rotary_positions_of_stored_keys_and_of_queries(make):
    module = make(rope=RoPE())
    positions = jnp.arange(100, 107)
    want = module(TARGET, ENCODED, decode=False, positions=(positions, jnp.arange(11)))

    assert_close(decode_cross(module, {}, positions), want, atol=1e-6)
    message = r"positions must be a single array .* if rope is used with stored"
    refused(message, module, TARGET[:, :1])


def test_axial_positions_of_stored_keys_and_of_queries():
    module = nnx_cross(rope=RoPE(sections=(2, 1), section_layout="axial"))
    queries = jnp.stack(jnp.divmod(jnp.arange(7), 3), axis=-1)
    keys = jnp.stack(jnp.divmod(jnp.arange(11), 4), axis=-1)
    want = module(TARGET, ENCODED, decode=False, positions=(queries, keys))

    first = (queries[:2], keys)
    module(TARGET[:, :2], ENCODED, store_keys=True, positions=first)
    got = module(TARGET[:, 2:], positions=queries[2:])
    assert_close(got, want[:, 2:], atol=1e-6)

    # They cannot be counted.
    message = (
        r"positions must be \[..., T, coordinates\] if rope is axial, but got None"
    )
    with pytest.raises(ValueError, match=message):
        module(TARGET, ENCODED, decode=False)


@CROSS
def test_other_attention_functions_get_the_lengths_as_a_mask(make):
    api = Nnx if make is nnx_cross else Linen
    module = make(num_kv_heads=2, attention_fn=FLAX[api])
    shown = (jnp.arange(11)[None] < LENGTHS[:, None])[:, None, None]
    want = module(TARGET, ENCODED, decode=False, mask=shown)
    module(TARGET[:, :1], ENCODED, store_keys=True)
    if isinstance(module, LinenCross):
        module.variables["cache"]["cached_lengths"] = LENGTHS
    else:
        module.cached_lengths[...] = LENGTHS
    assert_close(module(TARGET), want, atol=1e-6)
    assert_close(module(TARGET, mask=jnp.ones((2, 1, 7, 11), bool)), want, atol=1e-6)


REFUSED = []


def refuses(message, *inputs, **arguments):
    REFUSED.append((message, inputs, arguments))


refuses(
    "inputs_k must be None if keys are already stored.*store_keys=True", TARGET, ENCODED
)
refuses("lengths must be None if keys are already stored", TARGET, lengths=LENGTHS)
refuses("store_keys=True requires inputs_k, but got None", TARGET, store_keys=True)
refuses(
    "store_keys=True requires decode=True",
    TARGET,
    ENCODED,
    store_keys=True,
    decode=False,
)
refuses("store_keys must be True or False", TARGET, ENCODED, store_keys=1)
refuses(
    "lengths must be at most",
    TARGET,
    ENCODED,
    store_keys=True,
    lengths=(None, np.array([2**40, 4])),
)


@pytest.mark.core
@CROSS
@pytest.mark.parametrize(("message", "inputs", "arguments"), REFUSED)
def test_wrong_calls_with_stored_keys_raise_errors(make, message, inputs, arguments):
    module = make()
    # The linen module stores keys when it is made.
    if make is nnx_cross:
        module(TARGET, ENCODED, store_keys=True)
    refused(message, module, *inputs, **arguments)


@CROSS
@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        ("a mask object", {}, {"mask": CausalMask()}),
        ("score_mod", {}, {"score_mod": lambda score, *_: score}),
        ("local_window_size", {"local_window_size": 2}, {}),
    ],
)
def test_arguments_that_depend_on_positions_are_refused(make, name, options, arguments):
    module = make(**options)
    module(TARGET[:, :1], ENCODED, store_keys=True, **arguments)
    # This call begins at an unknown position; counted from 0, it would be wrong.
    message = f"calls with stored keys do not track positions, so {name} cannot be used"
    refused(message, module, TARGET[:, 1:2], **arguments)


@CROSS
def test_is_causal_is_refused_with_stored_keys(make):
    module = make()
    message = (
        "calls with stored keys do not track positions, so is_causal cannot be used"
    )
    arguments = {"store_keys": True, "is_causal": True}
    refused(message, module, TARGET[:, :1], ENCODED, **arguments)
    module(TARGET[:, :1], ENCODED, store_keys=True, is_causal=False)
    refused(message, module, TARGET[:, 1:2], is_causal=True)

    # The call's own argument counts more than that of a partial.
    attention_fn = functools.partial(flax_mha.attention_fn, is_causal=True)
    causal = make(attention_fn=attention_fn)
    refused(message, causal, TARGET[:, :1], ENCODED, store_keys=True)
    causal(TARGET[:, :1], ENCODED, store_keys=True, is_causal=False)
    got = causal(TARGET[:, 1:2], is_causal=False)
    assert_close(got, module(TARGET[:, 1:2]), atol=1e-6)


def test_making_a_cache_forgets_the_stored_keys():
    module = nnx_cross(in_kv_features=12)
    module(TARGET, TARGET + 1, store_keys=True)
    module.init_cache(TARGET.shape)
    assert module.cached_lengths is None
    want = module(TARGET, decode=False, is_causal=True)
    assert_close(module(TARGET), want, atol=1e-6)


def test_steps_with_stored_keys_are_pure_under_jit():
    module = nnx_cross()
    module(TARGET[:, :1], ENCODED, store_keys=True)
    graph, cache, rest = nnx.split(module, nnx.Cache, ...)
    step = jax.jit(lambda cache, rest, x: nnx.merge(graph, cache, rest)(x))
    assert_close(step(cache, rest, TARGET), module(TARGET), atol=1e-6)


def test_stored_keys_without_a_batch_axis_have_one_length():
    module = nnx_cross()
    first = TARGET[0, :1]
    lengths = (None, np.array([4]))
    stored = module(first, ENCODED[0], lengths=lengths, store_keys=True)
    assert_close(module(first), stored, atol=1e-6)
    assert module.cached_lengths.shape == ()


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_process_heads_may_return_numpy_arrays_while_decoding(api):
    """Outside of `jit`, all of them; inside, those that it knows."""

    def clipped(*heads):
        return [jnp.clip(x, -0.3, 0.3) for x in heads]

    def clipped_by_numpy(*heads):
        return [np.clip(x, -0.3, 0.3) for x in map(np.asarray, heads)]

    x = X[:, :3]
    outputs = []
    for function in (clipped, clipped_by_numpy):
        if api == "nnx":
            module = flax_mha.MultiHeadAttention(
                N, D, decode=True, process_heads=function, rngs=nnx.Rngs(0)
            )
            module.init_cache((B, 8, D))
            outputs.append(module(x))
            continue
        layer = linen.MultiHeadDotProductAttention(N, decode=True)
        layer = layer.copy(process_heads=clipped)
        variables = layer.init(jax.random.key(0), X[:, :8])
        layer = layer.copy(process_heads=function)
        outputs.append(layer.apply(variables, x, mutable="cache")[0])
    assert_close(*outputs)

    def no_values(query, key, value):
        return query, key, np.zeros(value.shape, np.float32)

    module = flax_mha.MultiHeadAttention(
        N, D, use_bias=False, decode=True, process_heads=no_values, rngs=nnx.Rngs(0)
    )
    module.init_cache((B, 8, D))
    assert_close(nnx_step(module, x, {}), np.zeros_like(x))
