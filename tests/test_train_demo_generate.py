"""The demo's sampler against Hugging Face's filters in NumPy, and its texts against a
pass without a cache.
"""

import jax
import numpy as np
import pytest
from cases import nothing_is_compiled
from flax import nnx

from train_demo import generate
from train_demo.data import Vocabulary
from train_demo.generate import Sampling, draw, filtered
from train_demo.model import blueprint
from train_demo.settings import Settings


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


LOGITS = np.random.default_rng(0).normal(size=97).astype(np.float32) * 3
TIES = np.float32([1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0, -1.0])
UNIFORM = np.zeros(8, np.float32)
HUGE = np.float32([3e38, -3e38, 2.9e38, 0, 3e38])
SMALL = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}


@pytest.mark.core
@pytest.mark.parametrize(
    ("logits", "options"),
    [
        (LOGITS, {}),
        *((LOGITS, {name: value}) for name, value in SMALL.items()),
        (LOGITS, SMALL),
        (LOGITS, SMALL | {"temperature": 5.0}),
        (LOGITS, SMALL | {"top_k": 1}),
        (LOGITS, SMALL | {"top_p": 1e-9}),
        (LOGITS, SMALL | {"min_p": 1.0}),
        (LOGITS, {"top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0}),
        (TIES, {"top_k": 2}),
        (TIES, {"top_k": 5}),
        (TIES, {"top_p": 0.3}),
        (TIES, {"top_k": 4, "top_p": 0.5}),
        (TIES, {"min_p": 1.0}),
        (UNIFORM, {"top_p": 0.5}),
        (UNIFORM, {"top_p": 0.5, "min_p": 1.0}),
        (UNIFORM, {"top_k": 3}),
        (HUGE, {"top_p": 0.5, "top_k": 2, "min_p": 0.5}),
        (HUGE, {"temperature": 1e30}),
        (LOGITS, {"temperature": 1e-30}),
        (LOGITS, {"temperature": 1e30, "top_k": 10, "min_p": 0.5}),
    ],
)
def test_the_filters_equal_hugging_face(logits, options):
    expected = hugging_face(logits, **options)
    got = np.asarray(
        jax.jit(filtered)(logits, Sampling(**{"temperature": 1.0} | options))
    )
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


@pytest.mark.parametrize("logits", [LOGITS, TIES, UNIFORM, HUGE])
def test_extreme_temperatures(logits):
    """Temperature 0 takes the first of the most probable tokens."""
    run = jax.jit(draw)
    keys = jax.random.split(jax.random.key(0), 3)
    for options in (
        {"temperature": 0.0},
        {"temperature": 1e-300},
        SMALL | {"temperature": 0.0},
    ):
        assert [int(run(key, logits, Sampling(**options))) for key in keys] == [
            np.argmax(logits)
        ] * 3, options
    for sampling in (Sampling(1e6), Sampling(1e-44, 3, 1e-300, 1e-300)):
        assert 0 <= int(run(keys[0], logits, sampling)) < len(logits), sampling


LETTERS = "abcdefghijk"
VOCABULARY = Vocabulary(LETTERS)
CONTEXT = 8
SETTINGS = Settings(seed=1, context_length=CONTEXT, layers=2, heads=2, features=16)
GREEDY = Sampling(temperature=0.0)
WILD = Sampling(temperature=2.0)


@pytest.fixture(scope="module")
def model():
    """Weights large enough that texts do not repeat one character."""
    structure, shapes = blueprint(len(VOCABULARY), SETTINGS)
    draws = np.random.default_rng(0)

    def weights(path, leaf):
        name = path[-1].key
        if name == "scale":
            return np.full(leaf.shape, 3, np.float32)
        scale = 3 if name == "embedding" else 3 * SETTINGS.features**-0.5
        return draws.normal(0, scale, leaf.shape).astype(np.float32)

    return nnx.merge(structure, jax.tree.map_with_path(weights, shapes))


def texts(model, prompts, *rest, **options):
    pieces = generate.generate(model, VOCABULARY, prompts, *rest, **options)
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


compiled_call = jax.jit(lambda model, numbers: model(numbers))


def logits_of(model, numbers):
    """The logits `[T, V]` of one text. The model is causal, so all are padded and share
    a program.
    """
    return compiled_call(model, np.pad(numbers, (0, 272 - len(numbers)))[None])[
        0, : len(numbers)
    ]


def numbers_of(text):
    return np.array([LETTERS.index(character) for character in text], np.int32)


@pytest.mark.parametrize(
    "prompt", ["a", "bcdefgab", "abcdefghijkabcdefghijkabc"[: 2 * CONTEXT - 1]]
)
def test_texts_beyond_the_context_equal_one_windowed_pass(model, prompt):
    (text,) = texts(model, [prompt], 90, GREEDY)
    whole = prompt + text
    expected = VOCABULARY.decode(
        np.argmax(logits_of(model, numbers_of(whole)), axis=-1)
    )
    assert text == expected[len(prompt) - 1 : -1]
    assert len(set(text)) > 3


def test_only_tokens_within_reach_matter(model):
    whole = numbers_of("abcdefghijk" * 5)
    reach = model.reach
    assert reach == 2 * (CONTEXT - 1) + 1 + SETTINGS.token_shift
    last = logits_of(model, whole)[-1]
    np.testing.assert_allclose(
        logits_of(model, whole[-reach:])[-1],
        last,
        rtol=0,
        atol=1e-5 * np.abs(last).max(),
    )
    assert np.abs(logits_of(model, whole[1 - reach :])[-1] - last).max() > 1e-4


def test_a_text_does_not_depend_on_its_neighbors(model):
    prompts = ["a", "abcdefghijk" * 3, "khc", "abcdefghijkab"]
    together = texts(model, prompts, 50, WILD, seed=3)
    assert together == [
        texts(model, [prompt], 50, WILD, seed=3)[0] for prompt in prompts
    ]
    assert len(set(together)) == len(together)
    assert texts(model, ["khc"], 50, WILD, seed=4) != together[2:3]


def test_one_compilation_for_prompts_of_similar_lengths(model):
    texts(model, ["ab", "abc"], 5)
    pairs = [("a", "b"), ("abcd", "a"), ("abcdefghijkabcd", "abcdefghijkabcde")]
    with nothing_is_compiled():
        for seed, (first, second) in enumerate(pairs):
            texts(
                model,
                [first, second],
                40 + seed,
                Sampling(0.1 + seed),
                seed=2**32 - 1 - seed,
            )


@pytest.mark.core
@pytest.mark.parametrize("number", [1, 31, 32, 33, 70])
def test_texts_have_the_requested_length(model, number):
    (text,) = texts(model, ["abc"], number)
    assert len(text) == number
    assert texts(model, ["abc"], 70)[0].startswith(text)
