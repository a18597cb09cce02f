"""Decoding with `is_causal=False`: tokens of one call, as those of a prefix or an
image, attend to each other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import refused
from flax import nnx
from marks import core

import flax_mha
from flax_mha import CausalMask, LengthMask, LocalMask, linen, recipes
from flax_mha._src.cache.cached_attention import cached_attention
from flax_mha._src.cache.kv_cache import KVCache
from flax_mha.masks import ArrayMask, FunctionMask

BATCH = 2
LENGTH = 48
FEATURES = 24
HEADS = 4
WINDOW = 5
# From 70 on, the window makes a ring of 70.
SLOTS = 64
RING = 200
X = np.float32(np.random.default_rng(0).standard_normal((BATCH, LENGTH, FEATURES)))
# Text, an image of 7 tokens, text, an image of 12 tokens, text; the second sequence
# differs.
IDS = np.array(
    [
        [0] * 3 + [1] * 7 + [0] * 4 + [2] * 12 + [0] * 22,
        [1] * 10 + [0] * 4 + [2] * 6 + [3] * 6 + [0] * 22,
    ]
)
PREFIX = 10
ROW = np.arange(LENGTH)[:, None]
COLUMN = np.arange(LENGTH)
CAUSAL = COLUMN <= ROW
SAME_IMAGE = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] > 0)


class Pattern(NamedTuple):
    """A recipe, and its visible scores as a dense array [B, T, S]."""

    recipe: dict
    visible: np.ndarray


OF_PREFIX = np.broadcast_to(CAUSAL | (COLUMN < PREFIX), (BATCH, LENGTH, LENGTH))
PATTERNS = {
    "prefix": Pattern(recipes.prefix_lm(PREFIX), OF_PREFIX),
    "images": Pattern(recipes.image_spans(IDS[:, :30]), CAUSAL | SAME_IMAGE),
}
IMAGES = PATTERNS["images"]
# Ends of calls. No image and no prefix is cut.
CALLS = {
    "prompt": (LENGTH,),
    "prompt, steps": (26, 27, 28, 30),
    "two prompts": (14, 40),
    "short calls": (10, 11, 14, 26, 29),
}
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def make(**options):
    return flax_mha.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options
    )


def make_latent(**options):
    sizes = {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "q_lora_rank": 12,
    }
    rope = flax_mha.RoPE(interleaved=True)
    return flax_mha.MultiHeadLatentAttention(
        HEADS, FEATURES, rope=rope, rngs=nnx.Rngs(0), **sizes, **options
    )


INDEXER = flax_mha.Indexer(num_heads=2, head_dim=8, top_k=6)
MODULES = {
    "all heads": functools.partial(make, rope=flax_mha.RoPE(), sinks=True),
    "few key heads": functools.partial(make, num_kv_heads=2),
    "window": functools.partial(make, local_window_size=(WINDOW, None)),
    "shared values": functools.partial(make, share_kv=True, normalize_qk=True),
    "latent": make_latent,
    "latent, indexer": functools.partial(make_latent, indexer=INDEXER),
    "named": functools.partial(make, implementation="blockwise"),
}


def expected(module, visible):
    """The call over the whole sequence, with a dense mask."""
    run = functools.partial(module, decode=False, is_causal=False)
    return jax.jit(run)(X, mask=visible[:, None])


@functools.partial(nnx.jit, static_argnums=2)
def step(module, x, pattern):
    return module(x, decode=True, **PATTERNS[pattern].recipe)


def decoded(module, ends, pattern):
    outputs = []
    start = 0
    for end in ends:
        outputs.append(step(module, X[:, start:end], pattern))
        start = end
    return np.concatenate(outputs, axis=1)


CASES = [
    # module, pattern, calls, slots of the cache, per_row
    core("all heads", "prefix", "prompt", SLOTS, False),
    ("all heads", "images", "prompt, steps", SLOTS, True),
    ("few key heads", "images", "two prompts", SLOTS, True),
    ("few key heads", "prefix", "short calls", SLOTS, False),
    core("window", "images", "prompt, steps", RING, False),
    ("window", "images", "two prompts", RING, True),
    ("window", "prefix", "short calls", SLOTS, False),
    ("shared values", "images", "two prompts", SLOTS, False),
    ("latent", "prefix", "prompt, steps", SLOTS, False),
    ("latent", "images", "two prompts", SLOTS, True),
    ("latent, indexer", "images", "prompt, steps", SLOTS, False),
    ("latent, indexer", "images", "short calls", SLOTS, True),
    ("named", "images", "two prompts", SLOTS, True),
]


@pytest.mark.parametrize(("name", "pattern", "calls", "slots", "per_row"), CASES)
def test_any_split_equals_one_call_with_a_dense_mask(
    name, pattern, calls, slots, per_row
):
    module = MODULES[name]()
    visible = PATTERNS[pattern].visible
    if name == "window":
        visible = visible & (ROW - COLUMN <= WINDOW)
    module.init_cache((BATCH, slots, FEATURES), per_row=per_row)

    outputs = decoded(module, CALLS[calls], pattern)

    close(outputs, expected(module, visible)[:, : outputs.shape[1]])


@pytest.mark.parametrize("slots", [SLOTS, RING])
def test_sown_weights_show_the_whole_image(slots):
    module = MODULES["window"]()
    visible = IMAGES.visible & (ROW - COLUMN <= WINDOW)
    module.init_cache((BATCH, slots, FEATURES))

    run = nnx.capture(module, nnx.Intermediate)
    output, sown = run(X[:, :26], decode=True, sow_weights=True, **IMAGES.recipe)

    [weights] = sown["attention_weights"].get_value()
    # A ring's empty slots come first.
    new = slice(-26, None) if slots == RING else slice(26)
    np.testing.assert_array_equal(weights[:, 0, :, new] > 0, visible[:, :26, :26])
    close(output, expected(module, visible)[:, :26])


@pytest.mark.parametrize(
    "function", [core(flax_mha.attention_fn), nnx.dot_product_attention]
)
def test_arrays_narrow_what_is_written(function):
    """An array may show later tokens, too; slots that are not written stay hidden.
    Flax's function gets a mask.
    """
    module = make(attention_fn=function)
    visible = IMAGES.visible
    module.init_cache((BATCH, SLOTS, FEATURES))
    # The array shows all slots that are never written.
    slots = np.ones((BATCH, 1, LENGTH, SLOTS), bool)
    slots[..., :LENGTH] = visible[:, None]
    run = functools.partial(module, decode=True, is_causal=False)

    with jax.numpy_rank_promotion("allow"):  # Flax's own
        outputs = [
            run(X[:, :14], mask=slots[:, :, :14]),
            run(X[:, 14:40], mask=slots[:, :, 14:40]),
        ]

    close(np.concatenate(outputs, axis=1), expected(make(), visible)[:, :40])


def test_8_bits_differ_by_rounding_alone():
    module = MODULES["few key heads"]()
    visible = IMAGES.visible
    module.init_cache((BATCH, SLOTS, FEATURES), dtype=jnp.int8)

    outputs = decoded(module, CALLS["short calls"], "images")

    exact = expected(module, visible)[:, : outputs.shape[1]]
    np.testing.assert_allclose(outputs, exact, rtol=0, atol=0.02)


def test_linen_decodes_images_as_one_call():
    layer = linen.MultiHeadDotProductAttention(HEADS)
    params = layer.init(jax.random.key(0), X)["params"]
    visible = IMAGES.visible
    whole = layer.apply({"params": params}, X, mask=visible[:, None])
    decoding = layer.clone(decode=True, per_row=True)
    slots = jnp.zeros((BATCH, SLOTS, FEATURES))
    cache = decoding.init(jax.random.key(0), slots)["cache"]

    outputs = []
    start = 0
    for end in CALLS["two prompts"]:
        variables = {"params": params, "cache": cache}
        output, changed = decoding.apply(
            variables, X[:, start:end], mutable=["cache"], **IMAGES.recipe
        )
        cache = changed["cache"]
        start = end
        outputs.append(output)

    close(np.concatenate(outputs, axis=1), whole[:, :start])


def test_layers_that_share_keys_decode_images_as_one_call():
    first = make()
    later = make(reuse_kv=True)
    recipe, visible = IMAGES
    first.init_cache((BATCH, SLOTS, FEATURES))

    def both(x, **arguments):
        x, kv = first(x, return_kv=True, **arguments)
        return later(x, kv=kv, **arguments)

    prompt = both(X[:, :14], decode=True, **recipe)
    others = both(X[:, 14:40], decode=True, **recipe)

    whole = both(X, mask=visible[:, None])
    close(np.concatenate([prompt, others], axis=1), whole[:, :40])


@pytest.mark.parametrize("number", [pytest.param(3, marks=pytest.mark.core), 20, 40])
@pytest.mark.parametrize("window", [None, 8])
def test_slots_that_are_not_written_are_never_visible(number, window):
    """A mask that shows everything: outputs are those of attention among the tokens,
    whatever other slots hold.
    """
    query, key, value = jax.random.normal(jax.random.key(0), (3, BATCH, number, 2, 8))
    lengths = jnp.array([number, number - 2])
    cache = KVCache.create(BATCH, 100, 2, 8, window=window, per_row=True)
    nan = jnp.full_like(cache.key, jnp.nan)
    sides = {"local_window_size": None if window is None else (window, None)}
    everything = CausalMask() | ~CausalMask()

    dirty = KVCache(nan, nan, cache.index, cache.window)
    attend = jax.jit(
        functools.partial(cached_attention, is_causal=False, mask=everything, **sides)
    )
    output, _ = attend(query, key, value, dirty, lengths=lengths)

    among_tokens = flax_mha.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        **sides,
    )
    close(output, among_tokens)


def test_listed_keys_may_come_later():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
    cache = KVCache.create(1, 10, 2, 8)
    lists = jnp.array([[[3, 0], [2, -1], [9, 1], [0, 3]]])  # slot 9 is not written

    output, _ = cached_attention(
        query, key, value, cache, key_indices=lists, is_causal=False
    )

    visible = jnp.array([[1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]], bool)
    close(output, flax_mha.dot_product_attention(query, key, value, mask=visible))


@pytest.mark.core
def test_a_single_token_sees_no_difference():
    query, key, value = jax.random.normal(jax.random.key(0), (3, BATCH, 1, 2, 8))
    cache = KVCache.create(BATCH, 30, 2, 8, window=5).update(key, value)

    attend = functools.partial(
        cached_attention, query, key, value, cache, local_window_size=(5, 0)
    )
    causal, _ = attend(is_causal=None)
    output, _ = attend(is_causal=False)

    np.testing.assert_array_equal(output, causal)


SAME_IMAGE_MASK = FunctionMask(lambda b, h, q_idx, kv_idx: q_idx // 3 == kv_idx // 3)
OPENING = {
    "prefix": recipes.prefix_lm(3)["mask"],
    "window beside": LocalMask(5, None) & (CausalMask() | SAME_IMAGE_MASK),
    "nested": LengthMask(5)
    & (LocalMask(3, None) & (SAME_IMAGE_MASK | (CausalMask() & LocalMask(None, 2)))),
}
NOT_OPENING = {
    "window and first tokens": LocalMask(1, 0)
    | FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx < 2),
    "earlier tokens": SAME_IMAGE_MASK | CausalMask(-1),
    "causal in all": (CausalMask() & LocalMask(3, None))
    | (LocalMask(3, -1) & SAME_IMAGE_MASK),
    "causal beside": CausalMask() & (CausalMask() | SAME_IMAGE_MASK),
    "unknown": SAME_IMAGE_MASK | LengthMask(3),
    "array": ArrayMask(np.ones((4, 4), bool)),
}


@pytest.mark.core
@pytest.mark.parametrize("is_causal", [None, True])
@pytest.mark.parametrize("name", OPENING)
def test_a_mask_that_shows_later_tokens_needs_is_causal_false(name, is_causal):
    module = make()
    module.init_cache((BATCH, 4, FEATURES))

    run = functools.partial(module, X[:, :4], mask=OPENING[name], decode=True)
    message = "is_causal must be False if mask shows later tokens"
    refused(message, run, is_causal=is_causal)
    run(is_causal=False)


@pytest.mark.parametrize("name", NOT_OPENING)
def test_other_masks_narrow_a_causal_call(name):
    module = make()
    mask = NOT_OPENING[name]
    module.init_cache((BATCH, 4, FEATURES))

    output = module(X[:, :4], mask=mask, decode=True)

    close(output, module(X[:, :4], mask=mask, is_causal=True))


@pytest.mark.core
@pytest.mark.parametrize("decode", [False, True])
def test_the_call_overrides_is_causal_of_a_partial(decode):
    module = make(attention_fn=functools.partial(flax_mha.attention_fn, is_causal=True))
    module.init_cache((BATCH, LENGTH, FEATURES))
    mask = IMAGES.recipe["mask"]

    refused("is_causal must be False", lambda: module(X, mask=mask, decode=decode))
    output = module(X, mask=mask, is_causal=False, decode=decode)

    close(output, make()(X, mask=IMAGES.visible[:, None]))


def test_is_causal_must_be_known():
    cache = KVCache.create(1, 4, 2, 8)
    x = jnp.ones((1, 2, 2, 8))
    attend = jax.jit(functools.partial(cached_attention, x, x, x, cache))
    refused("is_causal must be a concrete True or False", attend, is_causal=False)


def test_same_masks_as_transformers():
    """Of Gemma 3, whose windows are narrower than an image, and of PaliGemma, with its
    mask for prompts.
    """
    reason = "Transformers 5 is not installed, the dense masks above count alone"
    pytest.importorskip("transformers", minversion="5.24", reason=reason)
    import torch
    from transformers import Gemma3TextConfig
    from transformers.masking_utils import create_causal_mask
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    config = Gemma3TextConfig(sliding_window=WINDOW + 1, attn_implementation="eager")
    given = {
        "config": config,
        "inputs_embeds": torch.zeros(BATCH, LENGTH, 8),
        "attention_mask": None,
        "cache": None,
        "position_ids": torch.arange(LENGTH)[None],
    }
    # Tokens of a block see each other; text has the id -1.
    of_images = torch.from_numpy(IDS - 1)
    masks = create_masks_for_vision_model(**given, block_sequence_ids=of_images)
    is_prefix = torch.arange(LENGTH) < PREFIX
    of_prefix = torch.where(is_prefix, 0, -1).expand(BATCH, -1)
    prefix_mask = create_causal_mask(**given, block_sequence_ids=of_prefix)

    def assert_equal(ours, theirs):
        # Theirs are added to the scores: 0 is visible.
        np.testing.assert_array_equal(shown(ours), theirs.numpy()[:, 0] == 0)

    images = recipes.image_spans(IDS)["mask"]
    assert_equal(images, masks["full_attention"])
    assert_equal(images & LocalMask(WINDOW, None), masks["sliding_attention"])
    assert_equal(recipes.prefix_lm(PREFIX)["mask"], prefix_mask)


def shown(mask):
    """Which keys each query attends to: the output if key j has a value of 1 at feature
    j.
    """
    zeros = jnp.zeros((BATCH, LENGTH, 1, 8))
    values = jnp.broadcast_to(jnp.eye(LENGTH)[:, None], (BATCH, LENGTH, 1, LENGTH))
    output = flax_mha.dot_product_attention(zeros, zeros, values, mask=mask)
    return np.asarray(output)[:, :, 0] > 0
