"""The demo's sampler against Hugging Face's filters in NumPy, and its texts against a
pass without a cache.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from cases import nothing_is_compiled
from flax import nnx

from train_demo import generate
from train_demo.data import Vocabulary
from train_demo.errors import UserError
from train_demo.generate import Sampling, draw, filtered
from train_demo.model import blueprint
from train_demo.settings import ATTENTIONS, Settings


def hugging_face(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Its LogitsWarpers, one after the other, in float64."""
    scores = np.asarray(logits, np.float64) / temperature
    if top_k is not None:
        scores[scores < np.sort(scores)[-min(top_k, len(scores))]] = -np.inf
    if top_p is not None:
        order = np.argsort(scores, kind="stable")
        remove = np.cumsum(softmax(scores)[order]) <= 1 - top_p
        remove[-1] = False
        scores[order[remove]] = -np.inf
    if min_p is not None:
        probabilities = softmax(scores)
        scores[probabilities < min_p * probabilities.max()] = -np.inf
    return scores


def softmax(scores):
    with np.errstate(under="ignore"):
        powers = np.exp(scores - scores.max())
    return powers / powers.sum()


# Ties at the limit of a filter, and numbers whose sums or powers overflow.
LOGITS = np.random.default_rng(0).normal(size=97).astype(np.float32) * 3
TIES = np.float32([1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0, -1.0])
UNIFORM = np.zeros(8, np.float32)
HUGE = np.float32([3e38, -3e38, 2.9e38, 0, 3e38])
SMALL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}


FILTERED = [
    (LOGITS, {}),
    (LOGITS, {"top_k": 20}),
    (LOGITS, {"top_p": 0.8}),
    (LOGITS, {"min_p": 0.1}),
    (LOGITS, SMALL),
    (LOGITS, SMALL | {"temperature": 5.0}),
    (LOGITS, SMALL | {"top_k": 1}),
    (LOGITS, SMALL | {"top_p": 1e-9}),
    (LOGITS, SMALL | {"min_p": 1.0}),
    (LOGITS, {"top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0}),
    (TIES, {"top_k": 2}),
    (TIES, {"top_p": 0.3}),
    (TIES, {"top_k": 4, "top_p": 0.5}),
    (TIES, {"min_p": 1.0}),
    (UNIFORM, {"top_p": 0.5}),
    (UNIFORM, {"top_k": 3}),
    (HUGE, {"top_p": 0.5, "top_k": 2, "min_p": 0.5}),
    (HUGE, {"temperature": 1e30}),
    (LOGITS, {"temperature": 1e-30}),
    (LOGITS, {"temperature": 1e30, "top_k": 10, "min_p": 0.5}),
]


@pytest.mark.core
@pytest.mark.parametrize(("logits", "options"), FILTERED)
def test_filters_keep_what_those_of_hugging_face_keep(logits, options):
    expected = hugging_face(logits, **options)
    sampling = Sampling(**{"temperature": 1.0} | options)

    got = np.asarray(jax.jit(filtered)(logits, sampling))

    kept = softmax(expected) > 0
    np.testing.assert_array_equal(softmax(got) > 0, kept)
    np.testing.assert_array_equal(np.isneginf(got)[kept], False)
    np.testing.assert_allclose(softmax(got), softmax(expected), rtol=0, atol=1e-6)


def test_draws_have_the_right_frequencies():
    sampling = Sampling(temperature=0.9, top_k=6, top_p=0.95, min_p=0.05)
    number = 20_000
    keys = jax.random.split(jax.random.key(0), number)
    drawn = jax.jit(jax.vmap(draw, (0, None, None)))(keys, LOGITS[:12], sampling)
    expected = softmax(hugging_face(LOGITS[:12], **sampling._asdict()))
    frequencies = np.bincount(drawn, minlength=12) / number
    assert (frequencies[expected == 0] == 0).all()
    # Four standard deviations.
    np.testing.assert_allclose(frequencies, expected, atol=4 * 0.5 / number**0.5)


EXTREME = pytest.mark.parametrize("logits", [LOGITS, TIES, UNIFORM, HUGE])


@EXTREME
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1e-300}, SMALL | {"temperature": 0.0}],
)
def test_temperature_zero_draws_the_first_of_the_most_probable_tokens(logits, options):
    run = jax.jit(draw)
    for key in jax.random.split(jax.random.key(0), 3):
        assert int(run(key, logits, Sampling(**options))) == np.argmax(logits)


@EXTREME
@pytest.mark.parametrize(
    "sampling", [Sampling(1e6), Sampling(1e-44, 3, 1e-300, 1e-300)]
)
def test_extreme_temperatures_draw_a_token(logits, sampling):
    token = int(jax.jit(draw)(jax.random.key(0), logits, sampling))
    assert 0 <= token < len(logits)


LETTERS = "abcdefghijk"
VOCABULARY = Vocabulary(LETTERS)
CONTEXT = 8
SETTINGS = Settings(seed=1, context_length=CONTEXT, layers=2, heads=2, features=16)
GREEDY = Sampling(temperature=0.0)
WILD = Sampling(temperature=2.0)


def drawn(settings):
    """A model with weights large enough that texts do not repeat one character."""
    structure, shapes = blueprint(len(VOCABULARY), settings)
    draws = np.random.default_rng(0)

    def weights(path, leaf):
        name = path[-1].key
        if name == "scale":
            return np.full(leaf.shape, 3, np.float32)
        if name == "sinks":
            return draws.normal(size=leaf.shape).astype(np.float32)
        scale = 3 if name == "embedding" else 3 * SETTINGS.features**-0.5
        return draws.normal(0, scale, leaf.shape).astype(np.float32)

    return nnx.merge(structure, jax.tree.map_with_path(weights, shapes))


@pytest.fixture(scope="module")
def model():
    return drawn(SETTINGS)


def texts(model, prompts, *rest, **options):
    pieces = generate.generate(model, VOCABULARY, prompts, *rest, **options)
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


compiled_call = jax.jit(lambda model, numbers: model(numbers))


def logits_of(model, numbers):
    """The logits `[T, V]` of one text. The model is causal, so all are padded and share
    a program.
    """
    padded = np.pad(numbers, (0, 272 - len(numbers)))
    return compiled_call(model, padded[None])[0, : len(numbers)]


def numbers_of(text):
    return np.array([LETTERS.index(character) for character in text], np.int32)


@pytest.mark.parametrize(
    "prompt", ["a", "bcdefgab", "abcdefghijkabcdefghijkabc"[: 2 * CONTEXT - 1]]
)
def test_texts_beyond_the_context_equal_one_windowed_pass(model, prompt):
    (text,) = texts(model, [prompt], 90, GREEDY)
    whole = prompt + text
    logits = logits_of(model, numbers_of(whole))
    expected = VOCABULARY.decode(np.argmax(logits, axis=-1))
    assert text == expected[len(prompt) - 1 : -1]
    # A model that repeats one character would pass with any window.
    assert len(set(text)) > 3


def test_prompts_are_a_list_with_texts(model):
    with pytest.raises(UserError, match="prompts is empty: pass at least one text"):
        texts(model, [], 5)
    with pytest.raises(UserError, match=r"a list of texts, got 'abc': pass \['abc'\]"):
        texts(model, "abc", 5)
    with pytest.raises(UserError, match="the prompt '' is empty"):
        texts(model, ["a", ""], 5)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_each_kind_of_attention_writes_what_one_pass_computes(kind):
    model = drawn(replace(SETTINGS, attention=kind))
    prompts = ["a", "bcdefgabkkjihc", "abcdefghijkabcdefghijkabc"]
    # Of different lengths, and beyond the context.
    for prompt, text in zip(prompts, texts(model, prompts, 40, GREEDY), strict=True):
        whole = prompt + text
        logits = logits_of(model, numbers_of(whole))
        expected = VOCABULARY.decode(np.argmax(logits, axis=-1))
        assert text == expected[len(prompt) - 1 : -1]
        assert len(set(text)) > 2


def test_a_window_shortens_the_reach():
    assert drawn(replace(SETTINGS, attention="window")).reach == 2 * (2 - 1) + 1 + 2
    assert drawn(replace(SETTINGS, attention="blocks")).reach is None


def test_only_tokens_within_reach_matter(model):
    whole = numbers_of("abcdefghijk" * 5)
    reach = model.reach
    assert reach == 2 * (CONTEXT - 1) + 1 + SETTINGS.token_shift
    last = logits_of(model, whole)[-1]

    within_reach = logits_of(model, whole[-reach:])[-1]
    tolerance = 1e-5 * np.abs(last).max()
    np.testing.assert_allclose(within_reach, last, rtol=0, atol=tolerance)

    # One token less makes a difference.
    too_few = logits_of(model, whole[1 - reach :])[-1]
    assert np.abs(too_few - last).max() > 1e-4


def test_text_does_not_depend_on_its_neighbors(model):
    prompts = ["a", "abcdefghijk" * 3, "khc", "abcdefghijkab"]
    together = texts(model, prompts, 50, WILD, seed=3)
    assert len(set(together)) == len(together)

    for prompt, text in zip(prompts, together, strict=True):
        assert texts(model, [prompt], 50, WILD, seed=3) == [text]
    assert texts(model, ["khc"], 50, WILD, seed=4) != together[2:3]


def test_prompts_of_similar_lengths_share_a_program(model):
    texts(model, ["ab", "abc"], 5)
    pairs = [["a", "b"], ["abcd", "a"], ["abcdefghijkabcd", "abcdefghijkabcde"]]
    with nothing_is_compiled():
        for i, prompts in enumerate(pairs):
            # Neither number of tokens, temperature nor seed is static.
            seed = 2**32 - 1 - i
            texts(model, prompts, 40 + i, Sampling(0.1 + i), seed=seed)


@pytest.mark.core
@pytest.mark.parametrize("number", [1, 31, 32, 33, 70])
def test_texts_have_the_requested_length(model, number):
    (text,) = texts(model, ["abc"], number)
    assert len(text) == number
    assert texts(model, ["abc"], 70)[0].startswith(text)
