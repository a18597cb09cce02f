"""Random combinations of every argument, all implementations against float64: outputs
and gradients, no NaN.

Every other draw puts NaN, infinities and huge numbers in masked places: they change
nothing.

A drawn structure (arguments and sizes) is compiled once for many draws of the data
(lengths, offsets, ids, masks, biases, values). FUZZ_STRUCTURES in the environment sets
the number of structures: if it is more than the default, they differ in each run.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.masks import CausalMask, FunctionMask, LocalMask

USUAL_STRUCTURES = 6
STRUCTURES = int(os.environ.get("FUZZ_STRUCTURES", USUAL_STRUCTURES))
DRAWS = int(os.environ.get("FUZZ_DRAWS", "40"))
KEY = jax.random.key(11)


def structure_of(one_of, broadcast, groups, batches, lengths, windows):
    """Sizes, static arguments, and the axes of the arrays: `one_of` draws one of its
    arguments.

    `broadcast` draws a shape that broadcasts to its arguments.
    """
    (k, g), batch, (t, s) = one_of(*groups), one_of(*batches), one_of(*lengths)
    scores = (*batch, k * g, t, s)
    structure = {
        "sizes": (batch, t, s, k * g, k, one_of(3, 8), one_of(3, 8)),
        "static": {
            "is_causal": one_of(True, False),
            "local_window_size": one_of(None, None, *windows),
        }
        | {"logits_soft_cap": one_of(None, None, 1.3), "scale": one_of(None, 0.2)},
        "rate": one_of(0.0, 0.0, 0.3),
        "bias": one_of(None, broadcast(*scores)),
        "mask": one_of(None, broadcast(*scores)),
        "sinks": one_of(None, None, broadcast(*batch, k * g)),
        "mask_object": one_of(None, None, "function", "combined"),
    }
    return structure | {
        name: one_of(True, False)
        for name in ("lengths", "ids", "offset", "key_offset", "score_mod")
    }


@st.composite
def structures(draw):
    def one_of(*options):
        return draw(st.sampled_from(options))

    def broadcast(*shape):
        return tuple(one_of(size, 1) for size in shape)[
            draw(st.integers(0, len(shape))) :
        ]

    groups = ((1, 1), (1, 3), (2, 1), (2, 2))
    lengths = ((1, 19), (21, 21), (37, 5), (19, 40))
    batches = ((), (2,), (2, 1))
    windows = ((3, 1), (None, 4), (7, None))
    return structure_of(one_of, broadcast, groups, batches, lengths, windows)


def data(structure, seed):
    """Arrays that get gradients, and arrays that do not."""
    rng = np.random.default_rng(seed)
    batch, t, s, n, k, h, hv = structure["sizes"]
    shapes = {
        "query": (*batch, t, n, h),
        "key": (*batch, s, k, h),
        "value": (*batch, s, k, hv),
    }
    shapes |= {
        name: structure[name]
        for name in ("bias", "sinks")
        if structure[name] is not None
    }
    learned = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if structure["bias"] is not None:
        learned["bias"] = np.where(
            rng.random(learned["bias"].shape) < 0.1, -np.inf, learned["bias"]
        ).astype(np.float32)
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
    return learned, jax.tree.map(
        lambda x: x if x.dtype == bool else x.astype(np.int32), fixed
    )


def ours(structure, implementation, learned, fixed, return_residual=True):
    learned = dict(learned)
    fixed = dict(fixed)
    slopes = learned.pop("slopes", None)
    marks = fixed.pop("marks", None)
    if marks is not None:
        mask = FunctionMask(
            lambda b, h, q, k: jnp.asarray(marks)[k % len(marks)] | ((q + h) % 3 == 0)
        )
        fixed["mask"] = (
            mask
            if structure["mask_object"] == "function"
            else ~(CausalMask(-4) & mask) | LocalMask(0, 0)
        )
    if slopes is not None:
        fixed["score_mod"] = lambda score, b, h, q, k: (
            score - slopes[h] * jnp.abs(q - k).astype(score.dtype)
        )
    more = {"implementation": implementation, "return_residual": return_residual}
    drop = {"dropout_rate": structure["rate"], "dropout_rng": KEY}
    return dot_product_attention(
        **learned, **fixed, **structure["static"], **drop, **more
    )


def everything(structure, implementation, learned, fixed, cotangents):
    """The output; output and log-sum-exp; and gradients."""

    def loss(learned):
        output, lse = ours(structure, implementation, learned, fixed)
        total = jnp.sum(output * cotangents[0]) + jnp.sum(
            jnp.where(jnp.isfinite(lse), lse, 0) * cotangents[1]
        )
        return total, (output, lse)

    grads, answer = jax.grad(loss, has_aux=True)(learned)
    return (
        ours(structure, implementation, learned, fixed, return_residual=False),
        answer,
        grads,
    )


def positions(structure, fixed):
    """Of queries and keys, broadcasting to [..., N, T, S]."""
    _, t, s, *_ = structure["sizes"]
    offsets = (
        np.asarray(fixed.get(name, 0))[..., None, None, None]
        for name in ("query_offset", "key_value_offset")
    )
    return np.arange(t)[:, None] + next(offsets), np.arange(s)[None, :] + next(offsets)


def masked_by_object(structure, fixed, marks):
    """The mask object of `ours` as an array."""
    position, column = positions(structure, fixed)
    head = np.arange(structure["sizes"][3])[:, None, None]
    mask = marks[column % len(marks)] | ((position + head) % 3 == 0)
    if structure["mask_object"] == "function":
        return mask
    return ~((column <= position - 4) & mask) | (column == position)


def with_fillings(structure, learned, fixed, rng):
    """Arrays with zeros in masked places, and with something worse in one feature of
    each.
    """
    batch, t, s, n, k, *_ = structure["sizes"]
    others = dict(fixed)
    marks = others.pop("marks", None)
    if marks is not None:
        others["mask"] = masked_by_object(structure, fixed, marks)
    masking = {
        name: structure["static"][name] for name in ("is_causal", "local_window_size")
    }
    visible = reference.visible_scores((*batch, n, t, s), **others, **masking)
    filling = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32))
    clean = dict(learned)
    spoilt = dict(learned)
    if "bias" in learned:
        shape = learned["bias"].shape
        anywhere = visible.any(tuple(range(visible.ndim - len(shape))))
        ones = tuple(i for i, size in enumerate(shape) if size == 1)
        anywhere = anywhere.any(ones, keepdims=True)
        clean["bias"] = np.where(anywhere, learned["bias"], np.float32(0))
        spoilt["bias"] = np.where(anywhere, learned["bias"], filling)
        visible = visible & (learned["bias"] != -np.inf)
    unseen_queries = np.moveaxis(~visible.any(-1), -2, -1)
    unseen_keys = np.moveaxis(
        ~visible.any(-2).reshape(*batch, k, n // k, s).any(-2), -2, -1
    )
    for name, unseen in (
        ("query", unseen_queries),
        ("key", unseen_keys),
        ("value", unseen_keys),
    ):
        clean[name] = np.where(unseen[..., None], np.float32(0), learned[name])
        feature = np.arange(learned[name].shape[-1]) == rng.integers(
            learned[name].shape[-1]
        )
        spoilt[name] = np.where(unseen[..., None] & feature, filling, clean[name])
    return clean, spoilt


def exact(structure, learned, fixed, cotangents, keep):
    learned = dict(learned)
    fixed = dict(fixed)
    slopes = learned.pop("slopes", None)
    marks = fixed.pop("marks", None)
    position, column = positions(structure, fixed)
    if marks is not None:
        fixed["mask"] = masked_by_object(structure, fixed, marks)
    distance = abs(position - column)
    if slopes is not None:
        fixed["added"] = -slopes[:, None, None] * distance
    more = {"keep": keep, "cotangents": cotangents}
    answer, grads = reference.attention(
        **learned, **fixed, **structure["static"], **more
    )
    sizes = {}
    named = dict(
        zip(
            (["slopes"] if slopes is not None else []) + list(learned),
            grads,
            strict=True,
        )
    )
    if slopes is not None:
        d_scores = -named["slopes"] * distance
        summed = (*range(d_scores.ndim - 3), -2, -1)
        # Large numbers cancel: the error of a sum is relative to its terms.
        named["slopes"], sizes["slopes"] = (
            d_scores.sum(summed),
            np.abs(d_scores).sum(summed).max(initial=0),
        )
    return answer, named, sizes


GIVEN = given(structure=structures(), first_seed=st.integers(0, 2**31))
usual = functools.partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    """Compares outputs and gradients of all implementations with float64, for so many
    draws of the data.
    """
    batch, t, s, n, k, _, hv = structure["sizes"]
    run = {
        name: jax.jit(functools.partial(everything, structure, name))
        for name in ("xla", "blockwise")
    }
    show = jax.jit(functools.partial(ours, structure, "xla"))
    for seed in range(first_seed, first_seed + draws):
        learned, fixed = data(structure, seed)
        rng = np.random.default_rng(seed + 1)
        clean, learned = (
            with_fillings(structure, learned, fixed, rng)
            if seed % 2
            else (learned, learned)
        )
        cotangents = [
            rng.standard_normal(shape).astype(np.float32)
            for shape in ((*batch, t, n, hv), (*batch, t, n))
        ]
        keep = None
        if structure["rate"]:
            identity = np.broadcast_to(
                np.eye(s, dtype=np.float32)[:, None], (*batch, s, k, s)
            )
            shown, _ = show(clean | {"value": identity}, fixed)
            keep = (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (
                1 - structure["rate"]
            )
        want = exact(structure, clean, fixed, cotangents, keep)
        results = [run[name](learned, fixed, cotangents) for name in run]
        if seed == first_seed:  # masks that are known while tracing
            known = {
                "fixed": jax.tree.map(jnp.asarray, fixed),
                "cotangents": cotangents,
            }
            results.append(
                jax.jit(functools.partial(everything, structure, "blockwise", **known))(
                    learned
                )
            )
        (want_output, want_lse), want_grads, sizes = want
        tolerance = 4 * (t + s) * np.finfo(np.float32).eps / (1 - structure["rate"])
        for output, answer, grads in results:
            close(
                [output, *answer],
                [want_output, want_output, want_lse],
                tolerance,
                at_least=1.0,
            )
            assert len(grads) == len(want_grads)
            for name, x in want_grads.items():
                close(
                    {name: grads[name]},
                    {name: x},
                    tolerance,
                    at_least=max(1.0, sizes.get(name, 1.0)),
                )
