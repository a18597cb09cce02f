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
    k, g = one_of(*groups)
    batch = one_of(*batches)
    t, s = one_of(*lengths)
    scores = (*batch, k * g, t, s)
    return {
        "sizes": (batch, t, s, k * g, k, one_of(3, 8), one_of(3, 8)),
        "static": {
            "is_causal": one_of(True, False),
            "local_window_size": one_of(None, None, *windows),
            "logits_soft_cap": one_of(None, None, 1.3),
            "scale": one_of(None, 0.2),
        },
        "rate": one_of(0.0, 0.0, 0.3),
        "bias": one_of(None, broadcast(*scores)),
        "mask": one_of(None, broadcast(*scores)),
        "sinks": one_of(None, None, broadcast(*batch, k * g)),
        "mask_object": one_of(None, None, "function", "combined"),
        "lengths": one_of(True, False),
        "ids": one_of(True, False),
        "offset": one_of(True, False),
        "key_offset": one_of(True, False),
        "score_mod": one_of(True, False),
    }


@st.composite
def structures(draw):
    def one_of(*options):
        return draw(st.sampled_from(options))

    def broadcast(*shape):
        sizes = [one_of(size, 1) for size in shape]
        # Leading axes may be missing.
        return tuple(sizes[draw(st.integers(0, len(shape))) :])

    return structure_of(
        one_of,
        broadcast,
        groups=((1, 1), (1, 3), (2, 1), (2, 2)),
        batches=((), (2,), (2, 1)),
        lengths=((1, 19), (21, 21), (37, 5), (19, 40)),
        windows=((3, 1), (None, 4), (7, None)),
    )


def data(structure, seed):
    """Arrays that get gradients, and arrays that do not."""
    rng = np.random.default_rng(seed)
    batch, t, s, n, k, h, hv = structure["sizes"]
    shapes = {
        "query": (*batch, t, n, h),
        "key": (*batch, s, k, h),
        "value": (*batch, s, k, hv),
    }
    for name in ("bias", "sinks"):
        if structure[name] is not None:
            shapes[name] = structure[name]
    learned = {}
    for name, shape in shapes.items():
        learned[name] = rng.standard_normal(shape).astype(np.float32)
    if "bias" in learned:
        # A bias of -inf masks.
        masked = rng.random(learned["bias"].shape) < 0.1
        learned["bias"] = np.where(masked, np.float32(-np.inf), learned["bias"])
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
    for name, x in fixed.items():
        if x.dtype != bool:
            fixed[name] = x.astype(np.int32)
    return learned, fixed


def ours(structure, implementation, learned, fixed, return_residual=True):
    learned = dict(learned)
    fixed = dict(fixed)
    slopes = learned.pop("slopes", None)
    marks = fixed.pop("marks", None)

    def marked(b, h, q, k):
        return jnp.asarray(marks)[k % len(marks)] | ((q + h) % 3 == 0)

    def alibi(score, b, h, q, k):
        return score - slopes[h] * jnp.abs(q - k).astype(score.dtype)

    if structure["mask_object"] == "function":
        fixed["mask"] = FunctionMask(marked)
    elif structure["mask_object"] == "combined":
        fixed["mask"] = ~(CausalMask(-4) & FunctionMask(marked)) | LocalMask(0, 0)
    if slopes is not None:
        fixed["score_mod"] = alibi
    return dot_product_attention(
        **learned,
        **fixed,
        **structure["static"],
        dropout_rate=structure["rate"],
        dropout_rng=KEY,
        implementation=implementation,
        return_residual=return_residual,
    )


def everything(structure, implementation, learned, fixed, cotangents):
    """The output; output and log-sum-exp; and gradients."""

    def loss(learned):
        output, lse = ours(structure, implementation, learned, fixed)
        finite_lse = jnp.where(jnp.isfinite(lse), lse, 0)
        total = jnp.sum(output * cotangents[0]) + jnp.sum(finite_lse * cotangents[1])
        return total, (output, lse)

    grads, answer = jax.grad(loss, has_aux=True)(learned)
    # Without the log-sum-exp, other programs may run.
    output = ours(structure, implementation, learned, fixed, return_residual=False)
    return output, answer, grads


def positions(structure, fixed):
    """Of queries and keys, broadcasting to [..., N, T, S]."""
    _, t, s, *_ = structure["sizes"]
    offset = np.asarray(fixed.get("query_offset", 0))
    key_offset = np.asarray(fixed.get("key_value_offset", 0))
    position = np.arange(t)[:, None] + offset[..., None, None, None]
    column = np.arange(s)[None, :] + key_offset[..., None, None, None]
    return position, column


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
    static = structure["static"]
    visible = reference.visible_scores(
        (*batch, n, t, s),
        **others,
        is_causal=static["is_causal"],
        local_window_size=static["local_window_size"],
    )
    filling = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32))
    clean = dict(learned)
    spoilt = dict(learned)
    if "bias" in learned:
        # A bias is masked where it is hidden in every score that it is added to.
        shape = learned["bias"].shape
        anywhere = visible.any(tuple(range(visible.ndim - len(shape))))
        ones = tuple(i for i, size in enumerate(shape) if size == 1)
        anywhere = anywhere.any(ones, keepdims=True)
        clean["bias"] = np.where(anywhere, learned["bias"], np.float32(0))
        spoilt["bias"] = np.where(anywhere, learned["bias"], filling)
        visible = visible & (learned["bias"] != -np.inf)
    # [..., N, T] and [..., K, S]: a key is unseen if all heads of its group mask it.
    sees = visible.any(-1)
    is_seen = visible.any(-2).reshape(*batch, k, n // k, s).any(-2)
    unseen_queries = np.moveaxis(~sees, -2, -1)[..., None]
    unseen_keys = np.moveaxis(~is_seen, -2, -1)[..., None]
    unseen = {"query": unseen_queries, "key": unseen_keys, "value": unseen_keys}
    for name, place in unseen.items():
        size = learned[name].shape[-1]
        feature = np.arange(size) == rng.integers(size)
        clean[name] = np.where(place, np.float32(0), learned[name])
        spoilt[name] = np.where(place & feature, filling, clean[name])
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
    answer, grads = reference.attention(
        **learned,
        **fixed,
        **structure["static"],
        keep=keep,
        cotangents=cotangents,
    )
    sizes = {}
    named = {}
    if slopes is not None:
        # The gradient of what is added comes first.
        d_added, *grads = grads
        d_slopes = -d_added * distance
        summed = (*range(d_slopes.ndim - 3), -2, -1)
        named["slopes"] = d_slopes.sum(summed)
        # Large numbers cancel: the error of a sum is relative to its terms.
        sizes["slopes"] = np.abs(d_slopes).sum(summed).max(initial=0)
    named |= zip(learned, grads, strict=True)
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
    rate = structure["rate"]
    by_xla = jax.jit(functools.partial(everything, structure, "xla"))
    by_tiles = jax.jit(functools.partial(everything, structure, "blockwise"))
    show = jax.jit(functools.partial(ours, structure, "xla"))
    for seed in range(first_seed, first_seed + draws):
        learned, fixed = data(structure, seed)
        rng = np.random.default_rng(seed + 1)
        clean = learned
        if seed % 2:
            clean, learned = with_fillings(structure, learned, fixed, rng)
        d_output = rng.standard_normal((*batch, t, n, hv)).astype(np.float32)
        d_lse = rng.standard_normal((*batch, t, n)).astype(np.float32)
        cotangents = [d_output, d_lse]
        keep = None
        if rate:
            # With the identity matrix as values, the output is the weights.
            identity = np.eye(s, dtype=np.float32)[:, None]
            identity = np.broadcast_to(identity, (*batch, s, k, s))
            shown, _ = show(clean | {"value": identity}, fixed)
            keep = (np.moveaxis(np.asarray(shown), -2, -3) != 0) / (1 - rate)

        results = [
            by_xla(learned, fixed, cotangents),
            by_tiles(learned, fixed, cotangents),
        ]
        if seed == first_seed:
            # Masks that are known while tracing.
            known = jax.tree.map(jnp.asarray, fixed)
            of_known = functools.partial(
                everything,
                structure,
                "blockwise",
                fixed=known,
                cotangents=cotangents,
            )
            results.append(jax.jit(of_known)(learned))

        answer, want_grads, sizes = exact(structure, clean, fixed, cotangents, keep)
        want_output, want_lse = answer
        tolerance = 4 * (t + s) * np.finfo(np.float32).eps / (1 - rate)
        for output, (same_output, lse), grads in results:
            close(output, want_output, tolerance, at_least=1.0)
            close(same_output, want_output, tolerance, at_least=1.0)
            close(lse, want_lse, tolerance, at_least=1.0)
            assert grads.keys() == want_grads.keys()
            for name, want in want_grads.items():
                size = max(1.0, sizes.get(name, 1.0))
                close({name: grads[name]}, {name: want}, tolerance, at_least=size)
