"""Random combinations of every argument, all implementations against float64: outputs and gradients, no NaN.

Every other draw puts NaN, infinities and huge numbers where nothing is visible: they change nothing.

A drawn structure (which arguments, which sizes) is compiled once and met by many draws of the data (lengths, offsets,
ids, masks, biases, values). FUZZ_STRUCTURES in the environment draws another number of them: where it is more than
the few that every run does, others each time.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.conformance import reference
from flax_mha.masks import CausalMask, FunctionMask, LocalMask

USUAL_STRUCTURES = 6
STRUCTURES = int(os.environ.get("FUZZ_STRUCTURES", USUAL_STRUCTURES))
DRAWS = int(os.environ.get("FUZZ_DRAWS", "40"))
KEY = jax.random.key(11)


@st.composite
def structures(draw):
    """Sizes, static arguments, and which arrays there are with which axes."""
    flip = functools.partial(draw, st.booleans())
    k, g = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    batch = draw(st.sampled_from([(), (2,), (2, 1)]))
    t, s = draw(st.sampled_from([(1, 19), (21, 21), (37, 5), (19, 40)]))

    def broadcast(*shape):
        return tuple(n if flip() else 1 for n in shape)[draw(st.integers(0, len(shape))) :]

    scores = (*batch, k * g, t, s)
    return {
        "sizes": (batch, t, s, k * g, k, draw(st.sampled_from([3, 8])), draw(st.sampled_from([3, 8]))),
        "is_causal": flip(),
        "window": draw(st.sampled_from([None, None, (3, 1), (None, 4), (7, None)])),
        "soft_cap": draw(st.sampled_from([None, None, 1.3])),
        "scale": draw(st.sampled_from([None, 0.2])),
        "rate": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "bias": broadcast(*scores) if flip() else None,
        "mask": broadcast(*scores) if flip() else None,
        "sinks": broadcast(*batch, k * g) if draw(st.integers(0, 2)) == 0 else None,
        "lengths": flip(),
        "ids": flip(),
        "offset": flip(),
        "key_offset": flip(),
        "score_mod": flip(),
        "mask_object": draw(st.sampled_from([None, None, "function", "combined"])),
    }


def data(structure, seed):
    """Arrays that get gradients, and arrays that do not."""
    rng = np.random.default_rng(seed)
    batch, t, s, n, k, h, hv = structure["sizes"]
    shapes = {"query": (*batch, t, n, h), "key": (*batch, s, k, h), "value": (*batch, s, k, hv)}
    shapes |= {name: structure[name] for name in ("bias", "sinks") if structure[name] is not None}
    learned = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if structure["bias"] is not None:
        learned["bias"] = np.where(rng.random(learned["bias"].shape) < 0.1, -np.inf, learned["bias"]).astype(np.float32)
    if structure["score_mod"]:
        learned["slopes"] = rng.random(n).astype(np.float32)
    fixed = {}
    if structure["mask"] is not None and structure["mask_object"] is None:
        fixed["mask"] = rng.random(structure["mask"]) < rng.choice([0.2, 0.8, 1.0])
    if structure["lengths"]:
        fixed["query_seq_lengths"] = rng.integers(0, t + 1, batch)
        fixed["key_value_seq_lengths"] = rng.integers(0, s + 1, batch)
    if structure["ids"]:
        fixed["query_segment_ids"] = rng.integers(0, 3, (*batch, t))
        fixed["key_value_segment_ids"] = np.sort(rng.integers(0, 3, (*batch, s)), -1)
    if structure["offset"]:
        fixed["query_offset"] = rng.integers(-5, s + 5, batch)
    if structure["key_offset"]:
        fixed["key_value_offset"] = rng.integers(-7, 7, batch)
    if structure["mask_object"] is not None:
        fixed["marks"] = rng.random(s) < 0.5
    return learned, jax.tree.map(lambda x: x if x.dtype == bool else x.astype(np.int32), fixed)


def ours(structure, implementation, learned, fixed, return_residual=True):
    learned, fixed = dict(learned), dict(fixed)
    slopes, marks = learned.pop("slopes", None), fixed.pop("marks", None)
    if marks is not None:
        mask = FunctionMask(
            lambda b, h, q_idx, kv_idx: jnp.asarray(marks)[kv_idx % len(marks)] | ((q_idx + h) % 3 == 0)
        )
        fixed["mask"] = mask if structure["mask_object"] == "function" else ~(CausalMask(-4) & mask) | LocalMask(0, 0)
    if slopes is not None:
        fixed["score_mod"] = lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k).astype(score.dtype)
    return dot_product_attention(
        **learned,
        **fixed,
        is_causal=structure["is_causal"],
        local_window_size=structure["window"],
        logits_soft_cap=structure["soft_cap"],
        scale=structure["scale"],
        dropout_rate=structure["rate"],
        dropout_rng=KEY,
        implementation=implementation,
        return_residual=return_residual,
    )


def with_gradients(structure, implementation, learned, fixed, cotangents):
    def loss(learned):
        output, lse = ours(structure, implementation, learned, fixed)
        total = jnp.sum(output * cotangents[0]) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1])
        return total, (output, lse)

    grads, answer = jax.grad(loss, has_aux=True)(learned)
    return answer, grads


def everything(structure, implementation, learned, fixed, cotangents):
    """The output alone; output and log-sum-exp with gradients."""
    output = ours(structure, implementation, learned, fixed, return_residual=False)
    return output, with_gradients(structure, implementation, learned, fixed, cotangents)


def positions(structure, fixed):
    """Of queries and keys, broadcasting to [..., N, T, S]."""
    _, t, s, *_ = structure["sizes"]
    offsets = (np.asarray(fixed.get(name, 0))[..., None, None, None] for name in ("query_offset", "key_value_offset"))
    return np.arange(t)[:, None] + next(offsets), np.arange(s)[None, :] + next(offsets)


def masked_by_object(structure, fixed, marks):
    """What the mask object of `ours` says."""
    position, column = positions(structure, fixed)
    head = np.arange(structure["sizes"][3])[:, None, None]
    mask = marks[column % len(marks)] | ((position + head) % 3 == 0)
    if structure["mask_object"] == "function":
        return mask
    return ~((column <= position - 4) & mask) | (column == position)


def with_fillings(structure, learned, fixed, rng):
    """Arrays with zeros where nothing is visible, and the same with something worse in one feature of each."""
    batch, t, s, n, k, *_ = structure["sizes"]
    others = dict(fixed)
    marks = others.pop("marks", None)
    if marks is not None:
        others["mask"] = masked_by_object(structure, fixed, marks)
    visible = reference.visible_scores(
        (*batch, n, t, s), **others, is_causal=structure["is_causal"], local_window_size=structure["window"]
    )
    filling = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32))
    clean, spoilt = dict(learned), dict(learned)
    if "bias" in learned:
        shape = learned["bias"].shape
        anywhere = visible.any(tuple(range(visible.ndim - len(shape))))
        ones = tuple(i for i, size in enumerate(shape) if size == 1)
        anywhere = anywhere.any(ones, keepdims=True)
        clean["bias"] = np.where(anywhere, learned["bias"], np.float32(0))
        spoilt["bias"] = np.where(anywhere, learned["bias"], filling)
        visible = visible & (learned["bias"] != -np.inf)
    unseen_queries = np.moveaxis(~visible.any(-1), -2, -1)
    unseen_keys = np.moveaxis(~visible.any(-2).reshape(*batch, k, n // k, s).any(-2), -2, -1)
    for name, unseen in (("query", unseen_queries), ("key", unseen_keys), ("value", unseen_keys)):
        clean[name] = np.where(unseen[..., None], np.float32(0), learned[name])
        feature = np.arange(learned[name].shape[-1]) == rng.integers(learned[name].shape[-1])
        spoilt[name] = np.where(unseen[..., None] & feature, filling, clean[name])
    return clean, spoilt


def exact(structure, learned, fixed, cotangents, keep):
    learned, fixed = dict(learned), dict(fixed)
    slopes, marks = learned.pop("slopes", None), fixed.pop("marks", None)
    position, column = positions(structure, fixed)
    if marks is not None:
        fixed["mask"] = masked_by_object(structure, fixed, marks)
    distance = abs(position - column)
    if slopes is not None:
        fixed["added"] = -slopes[:, None, None] * distance
    answer, grads = reference.attention(
        **learned,
        **fixed,
        is_causal=structure["is_causal"],
        local_window_size=structure["window"],
        logits_soft_cap=structure["soft_cap"],
        scale=structure["scale"],
        keep=keep,
        cotangents=cotangents,
    )
    sizes = {}
    named = dict(zip((["slopes"] if slopes is not None else []) + list(learned), grads, strict=True))
    if slopes is not None:
        d_scores = -named["slopes"] * distance
        summed = (*range(d_scores.ndim - 3), -2, -1)
        # Here large numbers cancel: what is lost in a sum goes with the size of what is summed up.
        named["slopes"], sizes["slopes"] = d_scores.sum(summed), np.abs(d_scores).sum(summed).max(initial=0)
    return answer, named, sizes


GIVEN = given(structure=structures(), first_seed=st.integers(0, 2**31))
usual = functools.partial(settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.core
@usual(max_examples=3, derandomize=True)
@GIVEN
def test_few_combinations(structure, first_seed):
    check(structure, first_seed, draws=4)


@usual(max_examples=STRUCTURES, derandomize=STRUCTURES <= USUAL_STRUCTURES)
@GIVEN
def test_every_combination(structure, first_seed):
    check(structure, first_seed, DRAWS)


def check(structure, first_seed, draws):
    """Compares outputs and gradients of all implementations with float64, for so many draws of the data."""
    batch, t, s, n, k, _, hv = structure["sizes"]
    run = {name: jax.jit(functools.partial(everything, structure, name)) for name in ("xla", "blockwise")}
    show = jax.jit(functools.partial(ours, structure, "xla"))
    for seed in range(first_seed, first_seed + draws):
        learned, fixed = data(structure, seed)
        rng = np.random.default_rng(seed + 1)
        clean, learned = with_fillings(structure, learned, fixed, rng) if seed % 2 else (learned, learned)
        cotangents = [rng.standard_normal(shape).astype(np.float32) for shape in ((*batch, t, n, hv), (*batch, t, n))]
        keep = None
        if structure["rate"]:
            identity = np.broadcast_to(np.eye(s, dtype=np.float32)[:, None], (*batch, s, k, s))
            shown, _ = show(clean | {"value": identity}, fixed)
            keep = (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (1 - structure["rate"])
        want = exact(structure, clean, fixed, cotangents, keep)
        results = [run[name](learned, fixed, cotangents) for name in run]
        if seed == first_seed:  # masks that are known while tracing
            known = {"fixed": jax.tree.map(jnp.asarray, fixed), "cotangents": cotangents}
            results.append(jax.jit(functools.partial(everything, structure, "blockwise", **known))(learned))
        for output, answer_and_gradients in results:
            compare_all([output], want[0][:1], t + s, structure["rate"])
            compare(answer_and_gradients, want, t + s, structure["rate"])


def compare(got, want, terms, rate):
    answer, grads = got
    want_answer, want_grads, sizes = want
    assert len(grads) == len(want_grads)
    compare_all(answer, want_answer, terms, rate)
    for name, x in want_grads.items():
        compare_all([grads[name]], [x], terms, rate, sizes.get(name, 1.0))


def compare_all(got, want, terms, rate, size=1.0):
    for got_one, want_one in zip(got, want, strict=True):
        finite = np.isfinite(want_one)
        np.testing.assert_array_equal(np.where(finite, 0, got_one), np.where(finite, 0, want_one))
        tolerance = 4 * terms * np.finfo(np.float32).eps / (1 - rate)
        largest = max(1.0, size, np.abs(want_one, where=finite, out=np.zeros(np.shape(want_one))).max(initial=0))
        np.testing.assert_allclose(
            np.where(finite, got_one, 0), np.where(finite, want_one, 0), rtol=0, atol=tolerance * largest
        )
