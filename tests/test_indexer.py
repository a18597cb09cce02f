"""The indexer of latent attention chooses the same keys as a dense formula, in one call
and while decoding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import close, in_parts, refused
from flax import nnx
from marks import with_core
from test_key_indices import CACHES

import flax_mha
from flax_mha import Indexer
from flax_mha.rope import RoPE, apply_rope

B = 2
T = 37
D = 24
N = 3
R = 4
SIZES = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": R,
    "v_head_dim": 8,
    "rope": RoPE(interleaved=True),
}
TOP = 5


def inputs(seed=0, shape=(B, T, D)):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


INDEXER = Indexer(8, 12, TOP)


def made(indexer=INDEXER, **options):
    options = SIZES | {"decode": False, "indexer": indexer} | options
    module = flax_mha.MultiHeadLatentAttention(N, D, **options, rngs=nnx.Rngs(0))
    if indexer is not None:  # weights of both signs, and a norm that shifts
        module.indexer.k_norm.bias[...] = jnp.cos(
            jnp.arange(indexer.head_dim, dtype=jnp.float32)
        )
    return module


def dense_scores(module, x):
    """Equation 1 of the paper, all T x T scores at once."""
    layers = module.indexer

    def rotated(y):
        rotary = apply_rope(y[..., :R], jnp.arange(x.shape[1]), RoPE())
        return jnp.concatenate([rotary, y[..., R:]], axis=-1)

    query = rotated(layers.wq_b(module.q_a_layernorm(module.q_a_proj(x))))
    key = rotated(layers.k_norm(layers.wk(x))[:, :, None])[:, :, 0]
    size = np.float32(layers.config.num_heads * layers.config.head_dim)
    weights = layers.weights_proj(x) / np.sqrt(size)
    # I[t, s] = sum over heads of w[t, n] * relu(q[t, n] k[s])
    dots = jax.nn.relu(jnp.einsum("btnh,bsh->btns", query, key))
    return jnp.einsum("btns,btn->bts", dots, weights)


def chosen(module, x, visible):
    """A mask of the visible keys with the largest scores, the first of equal ones."""
    scores = np.where(visible, np.asarray(dense_scores(module, x), np.float64), -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")
    order = order[..., : module.indexer.config.top_k]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return (mask & visible)[:, None]


def without_indexer(module, **options):
    """A module with the same weights."""
    other = made(None, **options)
    state = nnx.state(module, nnx.Param)
    nnx.update(other, {key: x for key, x in state.items() if key != "indexer"})
    return other


def causal(window=T):
    ahead = np.arange(T)[:, None] - np.arange(T)
    return np.broadcast_to((ahead >= 0) & (ahead <= window), (B, T, T))


assert_close = functools.partial(close, at_least=1.0)


CAUSAL = nnx.jit(lambda module, x: module(x, is_causal=True))
MASKED = nnx.jit(lambda module, x, mask: module(x, mask=mask))
DECODE = nnx.jit(lambda module, x: module(x, decode=True))
LENGTHS = np.array([20, T])
IDS = np.repeat([0, 1], [11, T - 11])[None].repeat(B, 0)
THIRDS = (np.arange(T) % 3 != 1)[None, None, None]
SAME = (IDS[:, :, None] == IDS[:, None]) & causal()
CALLS = {
    "causal": ({}, {"is_causal": True}, causal()),
    "window": ({"local_window_size": (9, 0)}, {"is_causal": True}, causal(9)),
    "mask": ({}, {"mask": THIRDS}, np.broadcast_to(THIRDS[0], (B, T, T))),
    "mask object": (
        {},
        {"mask": flax_mha.FunctionMask(lambda b, h, q, k: (q - k) % 3 != 1)},
        None,
    ),
    "lengths": (
        {},
        {"lengths": LENGTHS},
        np.broadcast_to(np.arange(T) < LENGTHS[:, None, None], (B, T, T)),
    ),
    "segments": ({}, {"segment_ids": IDS, "is_causal": True}, SAME),
}


@pytest.mark.parametrize("name", with_core(CALLS, "lengths"))
def test_chosen_keys_equal_those_of_a_dense_formula(name, monkeypatch):
    """In blocks of queries, of which the last overlaps the one before, or together."""
    if name in ("causal", "mask object", "lengths"):
        monkeypatch.setattr("flax_mha._src.modules.indexer.MAX_SCORES", 8 * T * 7)
    options, arguments, visible = CALLS[name]
    if visible is None:
        visible = (np.arange(T)[:, None] - np.arange(T)) % 3 != 1
    module = made(**options)
    x = inputs()
    mask = chosen(module, x, np.broadcast_to(visible, (B, T, T)))
    expected = MASKED(without_indexer(module, **options), x, mask)
    got = nnx.jit(lambda module, x: module(x, **arguments))(module, x)
    if name == "lengths":
        # What padding returns is not compared.
        shown = (np.arange(T) < LENGTHS[:, None])[..., None]
        got = np.where(shown, got, 0)
        expected = np.where(shown, expected, 0)
    assert_close(got, expected)


@pytest.mark.parametrize("name", with_core(CACHES, "ring"))
def test_decoding_equals_one_call(name):
    """The prompt is longer than the ring."""
    options = dict(CACHES[name])
    window = options.pop("window", None)
    module = made(local_window_size=None if window is None else (window, 0))
    x = inputs(shape=(B, 90, D))
    whole = CAUSAL(module, x)
    module.init_cache((B, 100, D), **options)
    assert module.cached_index_key.shape == (B, 100 if window is None else 71, 1, 12)
    got = in_parts(functools.partial(DECODE, module), x, (79, 1, 1, 4, 1, 4))
    if "8 bits" in name:  # rounding changes some choices, not most
        assert np.mean(np.abs(got - whole).max(-1) < 0.1 * np.abs(whole).max()) > 0.7
    else:
        assert_close(got, whole)


@pytest.mark.core
def test_with_few_keys_nothing_is_chosen():
    """And a call that lists keys itself lists these."""
    module = made(Indexer(8, 12, T))
    x = inputs()
    dense = without_indexer(module)
    np.testing.assert_array_equal(module(x, is_causal=True), dense(x, is_causal=True))
    assert module.explain(x).variant != "keys gathered for each query"
    assert made().explain(x).variant == "keys gathered for each query"
    # Also while decoding.
    for other in (module, dense):
        other.init_cache((B, T, D))
    np.testing.assert_array_equal(module(x, decode=True), dense(x, decode=True))
    lists = np.random.default_rng(0).integers(-1, T, (B, T, 3))
    np.testing.assert_array_equal(
        made()(x, key_indices=lists), without_indexer(made())(x, key_indices=lists)
    )


def test_a_prompt_of_few_keys_in_a_long_cache():
    module = made(Indexer(8, 12, 30))
    x = inputs()
    whole = CAUSAL(module, x)
    module.init_cache((B, 100, D))
    assert_close(in_parts(functools.partial(DECODE, module), x, (25, 1, 11)), whole)


def loss_of_scores(module, x):
    """The sum of the sown scores; a real loss compares them with the weights."""
    _, sown = nnx.capture(module, nnx.Intermediate)(x, is_causal=True, sow_weights=True)
    scores, lists = (
        sown[name].get_value()[0] for name in ("index_scores", "key_indices")
    )
    return jnp.sum(jnp.where(lists >= 0, jnp.sin(scores), 0)), (scores, lists)


def assert_zeros(tree):
    for leaf in jax.tree.leaves(tree):
        assert not np.any(leaf)


@pytest.mark.core
def test_only_sown_scores_train_the_indexer():
    module = made()
    x = inputs()

    @nnx.jit
    @nnx.grad
    def of_output(module):
        return module(x, is_causal=True).var()

    assert_zeros(of_output(module)["indexer"])
    run = nnx.jit(nnx.grad(loss_of_scores, has_aux=True))
    gradients, _ = run(module, x)
    mask = chosen(module, x, causal())[:, 0]

    @nnx.jit
    @nnx.grad
    def of_dense_scores(module):
        return jnp.sum(jnp.where(mask, jnp.sin(dense_scores(module, x)), 0))

    got = nnx.to_pure_dict(gradients["indexer"])
    want = nnx.to_pure_dict(of_dense_scores(module)["indexer"])
    jax.tree.map(assert_close, got, want)
    # The indexer's inputs are detached.
    assert_zeros(gradients["q_a_proj"])
    assert_zeros(gradients["kv_b_proj"])


@pytest.mark.core
def test_sown_lists_and_scores_are_those_of_the_dense_formula():
    module = made()
    x = inputs()

    _, (scores, lists) = nnx.jit(loss_of_scores)(module, x)

    lists = np.asarray(lists)
    mask = chosen(module, x, causal())[:, 0]
    for b, t in np.ndindex(B, T):
        assert {*lists[b, t]} - {-1} == {*np.flatnonzero(mask[b, t])}
    wanted = np.asarray(dense_scores(module, x))
    wanted = np.take_along_axis(wanted, np.maximum(lists, 0), -1)
    assert_close(np.where(lists >= 0, scores, 0), np.where(lists >= 0, wanted, 0))


@pytest.mark.core
def test_nan_only_affects_queries_that_attend_to_it():
    module = made()
    x = np.array(inputs())
    x[0, 9] = np.nan
    got = np.asarray(CAUSAL(module, x))
    is_nan = np.zeros((B, T, D), bool)
    # Later queries score this key, and a NaN score may be the largest.
    is_nan[0, 9:] = True
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    mask = (np.arange(T) != 9)[None, None, None]
    clean = MASKED(module, inputs(), mask)
    got = MASKED(module, x, mask)
    np.testing.assert_array_equal(np.delete(got, 9, 1), np.delete(clean, 9, 1))


def test_memory_grows_linearly():
    """All scores of 8 index heads would take 8 * 4096 * 4096 * 4 bytes = 512 MiB."""
    module = made()
    graph, state = nnx.split(module)
    x = jax.ShapeDtypeStruct((1, 4096, D), jnp.float32)

    @jax.jit
    def call(state, x):
        return nnx.merge(graph, state)(x, is_causal=True)

    compiled = call.lower(state, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**27


REFUSED = {
    "indexer must be a flax_mha.Indexer or None": {"indexer": 5},
    "q_lora_rank must be an int with an indexer": {"q_lora_rank": None},
    "head_dim of the indexer must be at least qk_rope_head_dim": {
        "indexer": Indexer(8, 3, 5)
    },
}


@pytest.mark.core
@pytest.mark.parametrize("message", REFUSED)
def test_options_that_an_indexer_excludes_are_rejected(message):
    options = SIZES | {"indexer": INDEXER, "rngs": nnx.Rngs(0)} | REFUSED[message]
    refused(message, flax_mha.MultiHeadLatentAttention, N, D, **options)


@pytest.mark.core
def test_wrong_fields_of_an_indexer_are_rejected():
    refused("top_k must be an int >= 1", Indexer, 8, 12, 0)
    message = "epsilon must be in the range of float32, 1.2e-38 to 3.4e.38, but got"
    refused(message, Indexer, 8, 12, 5, norm_epsilon=2.0**140)
    refused(message, flax_mha.Norm, epsilon=2.0**-140)
    refused("interleaved must be True or False", Indexer, 8, 12, 5, 1)


@pytest.mark.core
def test_calls_that_an_indexer_cannot_compute_are_rejected():
    module = made()
    x = inputs()
    refused(
        "mask must be the same for all heads",
        module,
        x,
        mask=np.ones((B, N, T, T), bool),
    )
    refused(
        "With an indexer, attention_fn must be flax_mha.attention_fn",
        made(attention_fn=nnx.dot_product_attention),
        x,
    )
    module.init_cache((B, 50, D))
    # As if the cache came from a module without an indexer.
    module.cached_index_key = nnx.data(None)
    refused("the cache must have index keys", module, x, decode=True)
