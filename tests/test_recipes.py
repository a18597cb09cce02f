"""Every recipe equals its dense formula, in the output and all gradients, also those of
captured arrays.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import close, nothing_is_compiled, refused
from marks import Refusals
from test_meanings import dropped

from flax_mha import dot_product_attention, recipes
from flax_mha.cache import KVCache, cached_attention

B = 2
N = 6
K = 2
H = 8
S = 67
row = np.arange(S)[:, None]
column = np.arange(S)[None, :]
CAUSAL = column <= row
rng = np.random.default_rng(0)
IDS = np.sort(rng.integers(0, 4, (B, S)), -1)
BLOCKS = rng.random((N, 9, 9)) < 0.4
TABLE = rng.standard_normal((12, N)).astype(np.float32)
SINKS = rng.standard_normal(N).astype(np.float32)
DOCUMENTS = CAUSAL & (IDS[:, None, :, None] == IDS[:, None, None, :])
# For six heads: the slopes for four, and every second one of the slopes for eight.
SLOPES = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])[:, None, None]


def t5_buckets(distance, buckets=12):
    """Raffel et al.: exact up to half of the buckets, then logarithmic up to the
    largest distance, 40 here.
    """
    exact = buckets // 2
    distance = np.maximum(distance, 0)
    # The part of the way from `exact` to 40, in logarithms.
    part = np.log(np.maximum(distance, 1) / exact) / np.log(40 / exact)
    large = exact + (part * (buckets - exact)).astype(int)
    large = np.minimum(large, buckets - 1)
    return np.where(distance < exact, distance, large)


def natten(length, size):
    """The visible keys along one axis, as in NATTEN's reference kernel."""
    place = np.arange(length)[:, None]
    left = size // 2
    right = size // 2 + size % 2 - 1
    start = np.maximum(place - left, 0)
    # At the end, the window is moved back until it fits.
    beyond = length - right - place - 1
    start = start + np.where(place + right >= length, beyond, 0)
    ahead = np.arange(length) - start
    return (ahead >= 0) & (ahead < size)


def swin(height, width, window, shift):
    """The mask and the index into the bias. Liu et al. roll the image, cut windows, and
    mask across the seam.
    """
    shape = (height, width)
    visible = np.ones((S, S), bool)
    offsets = []
    for place, length in zip(np.indices(shape), shape, strict=True):
        rolled = (place.ravel()[:S] - shift) % length
        # What the roll brings together does not belong together.
        seams = (rolled >= length - window) * 1 + (rolled >= length - shift)
        region = rolled // window * 3 + seams
        visible &= region[:, None] == region
        inside = rolled % window
        offsets.append(inside[:, None] - inside + window - 1)
    down, right = offsets
    return visible, down * (2 * window - 1) + right


SWIN_MASK, SWIN_OFFSETS = swin(8, 12, window=4, shift=1)
BUCKETS = {
    "T5 bias": t5_buckets(row - column),
    "T5 bias as a module": t5_buckets(row - column),
    "T5 bias of an encoder": t5_buckets(abs(row - column), 6) + 6 * (column > row),
    "shifted windows": SWIN_OFFSETS,
}
OFFSETS = rng.standard_normal((49, N)).astype(np.float32)
CONTINUATIONS = np.stack(
    [np.repeat([0, 1, 2, 3], (30, 12, 15, 10)), np.repeat([0, 7, 5], (11, 40, 16))]
)
KEY_IDS = CONTINUATIONS[:, None, None, :]
QUERY_IDS = CONTINUATIONS[:, None, :, None]

# Block diffusion: 34 noised tokens, then clean ones, in blocks of 5. A noised query
# attends to its noised block and to the clean ones before it.
NOISED = np.arange(S) < 34
BLOCKS_BEHIND = row % 34 // 5 - column % 34 // 5
OF_NOISED = np.where(NOISED, BLOCKS_BEHIND == 0, BLOCKS_BEHIND > 0)
OF_CLEAN = ~NOISED & (BLOCKS_BEHIND >= 0)

# A tree of drafts, one for each sequence, after S - 7 tokens: a draft attends to what
# its parent attends to, and to itself.
PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 1, 0, 2, 3]])
TREES = np.stack([CAUSAL & (column < S - 7)] * B)
for tree, parents in zip(TREES, PARENTS, strict=True):
    for draft, parent in enumerate(parents):
        if parent >= 0:
            tree[S - 7 + draft] |= tree[S - 7 + parent]
        tree[S - 7 + draft, S - 7 + draft] = True

# Sliding tiles: the tile of each of 64 tokens of a video along its axes, four frames of
# 4 x 4 tokens; text follows.
tiles = np.repeat(np.stack(np.indices((2, 2, 4)), axis=-1).reshape(-1, 3), 4, axis=0)
# Windows of (1, 2, 3) of (2, 2, 4) tiles.
starts = np.clip(tiles - [0, 1, 1], 0, [1, 0, 1])
ends = starts + np.array([1, 2, 3])
NEAR = np.ones((S, S), bool)
NEAR[:64, :64] = ((tiles >= starts[:, None]) & (tiles < ends[:, None])).all(-1)

GATES = np.log(1 / (1 + np.exp(-rng.standard_normal((B, S, N)) - 2))).astype(np.float32)
SUMS = np.moveaxis(np.cumsum(GATES, 1, np.float64), -1, 1)
WIDTHS = {
    "relative terms": 20,
    "relative terms, clipped": 20,
    "relative terms, both sides": 41,
}
TERMS = {}
for name, width in WIDTHS.items():
    TERMS[name] = rng.standard_normal((B, N, S, width)).astype(np.float32)

# Images of 4 to 9 tokens between texts of as many; the last one ends before the ids of
# the recipe do.
SPANS = np.repeat(np.resize([0, 1, 0, 2, 0, 3], 12), np.resize([4, 7, 5, 9, 6], 12))
SPANS = np.where(np.arange(S) < 48, SPANS[:S], 0) * np.ones((B, 1), int)
SAME_SPAN = ((SPANS[:, :, None] == SPANS[:, None]) & (SPANS[:, None] > 0))[:, None]


class Recipe(NamedTuple):
    """A recipe, and the arguments of its dense formula, `reference.attention`."""

    # From the learned array, if there is one, to the arguments of attention.
    make: Callable
    mask: np.ndarray
    learned: np.ndarray | None = None
    added: np.ndarray | None = None
    logits_soft_cap: float | None = None
    sinks: np.ndarray | None = None

    def arguments(self, learned):
        return self.make() if learned is None else self.make(learned)


def looked_up(name, table):
    return np.moveaxis(table[BUCKETS[name]], -1, 0)


def terms_of(name):
    """For each score, the index of its term in the learned array, and whether it has
    one.
    """
    width = WIDTHS[name]
    distance = row - column
    if name.endswith("both sides"):
        distance = distance + width // 2
    has_one = (distance >= 0) & (distance < width)
    if name.endswith("clipped"):
        has_one = np.ones_like(has_one)
    batch, head = np.ogrid[:B, :N]
    nearest = np.clip(distance, 0, width - 1)
    return (batch[..., None, None], head[..., None, None], row, nearest), has_one


def relative(name, mask, **options):
    places, has_one = terms_of(name)
    terms = TERMS[name]
    return Recipe(
        lambda terms: recipes.relative_terms(terms, **options),
        mask,
        learned=terms,
        added=np.where(has_one, terms[places], 0),
    )


def as_module(table):
    bias = recipes.RelativeBias(N, len(table), max_distance=40)
    bias.table[...] = table
    return {"mask": recipes.causal()["mask"], "score_mod": bias}


RECIPES = {
    "causal": Recipe(recipes.causal, CAUSAL),
    "sliding window": Recipe(
        lambda: recipes.sliding_window(9), CAUSAL & (column >= row - 9)
    ),
    "prefix-LM": Recipe(lambda: recipes.prefix_lm(20), CAUSAL | (column < 20)),
    "prefix-LM of each sequence": Recipe(
        lambda: recipes.prefix_lm([20, 0]),
        CAUSAL | (column < np.array([20, 0])[:, None, None, None]),
    ),
    "image spans": Recipe(
        lambda: recipes.image_spans(SPANS[:, :50]), CAUSAL | SAME_SPAN
    ),
    "documents": Recipe(lambda: recipes.documents(jnp.asarray(IDS)), DOCUMENTS),
    "dilated": Recipe(lambda: recipes.dilated(3), CAUSAL & ((row - column) % 3 == 0)),
    "block-sparse": Recipe(
        lambda: recipes.block_sparse(jnp.asarray(BLOCKS), 8),
        BLOCKS[:, row // 8, column // 8],
    ),
    "shared prefix": Recipe(
        lambda: recipes.shared_prefix(jnp.asarray(CONTINUATIONS)),
        CAUSAL & ((KEY_IDS == 0) | (KEY_IDS == QUERY_IDS)),
    ),
    "block diffusion": Recipe(
        lambda: recipes.block_diffusion(34, 5),
        np.where(NOISED[:, None], OF_NOISED, OF_CLEAN),
    ),
    "neighborhood": Recipe(
        lambda: recipes.neighborhood(7, 10, 4),
        np.kron(natten(7, 4), natten(10, 4))[:S, :S],
    ),
    "sliding tiles": Recipe(
        lambda: recipes.sliding_tiles((4, 4, 4), (2, 2, 1), (1, 2, 3), text=3), NEAR
    ),
    "tree": Recipe(
        lambda: recipes.tree_causal(jnp.asarray(PARENTS), [S - 7, S - 7]),
        TREES[:, None],
    ),
    "ALiBi": Recipe(
        lambda: recipes.alibi(np.int64(N)), CAUSAL, added=SLOPES * (column - row)
    ),
    "T5 bias": Recipe(
        lambda table: recipes.t5_bias(table, max_distance=40),
        CAUSAL,
        learned=TABLE,
        added=looked_up("T5 bias", TABLE),
    ),
    "T5 bias as a module": Recipe(
        as_module, CAUSAL, learned=TABLE, added=looked_up("T5 bias", TABLE)
    ),
    "T5 bias of an encoder": Recipe(
        lambda table: recipes.t5_bias(table, max_distance=40, bidirectional=True),
        np.ones_like(CAUSAL),
        learned=TABLE,
        added=looked_up("T5 bias of an encoder", TABLE),
    ),
    "soft cap": Recipe(lambda: recipes.soft_cap(1.5), CAUSAL, logits_soft_cap=1.5),
    "attention sinks": Recipe(
        lambda sinks: recipes.attention_sinks(sinks, 9),
        CAUSAL & (column >= row - 9),
        learned=SINKS,
        sinks=SINKS,
    ),
    "shifted windows": Recipe(
        lambda table: recipes.shifted_windows(table, 8, 12, window=4, shift=1),
        SWIN_MASK,
        learned=OFFSETS,
        added=looked_up("shifted windows", OFFSETS),
    ),
    "forgetting": Recipe(
        recipes.forgetting,
        CAUSAL,
        learned=GATES,
        added=SUMS[..., None] - SUMS[..., None, :],
    ),
    "relative terms": relative("relative terms", CAUSAL),
    "relative terms, clipped": relative("relative terms, clipped", CAUSAL, clip=True),
    "relative terms, both sides": relative(
        "relative terms, both sides", np.ones_like(CAUSAL), bidirectional=True
    ),
}


def gradient_of_learned(name, d_added):
    """The gradient of the learned array, given that of the bias [B, N, S, S] that it
    adds to the scores.
    """
    if name == "forgetting":
        # score[i, j] gets sum[i] - sum[j], where sum[i] holds the gates up to i.
        d_sums = d_added.sum(-1) - d_added.sum(-2)
        d_gates = np.cumsum(d_sums[..., ::-1], -1)[..., ::-1]
        return np.moveaxis(d_gates, 1, -1)
    gradient = np.zeros_like(RECIPES[name].learned, np.float64)
    if name in BUCKETS:
        np.add.at(gradient, BUCKETS[name], np.moveaxis(d_added.sum(0), 0, -1))
    else:
        places, has_one = terms_of(name)
        np.add.at(gradient, places, d_added * has_one)
    return gradient


INPUTS = {}
for name, heads in (("query", N), ("key", K), ("value", K)):
    INPUTS[name] = rng.standard_normal((B, S, heads, H)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("small_tiles")

# Of each recipe with several options, one case is a core test.
SIBLINGS = (
    "prefix-LM",
    "T5 bias",
    "T5 bias as a module",
    "relative terms",
    "relative terms, both sides",
)
EQUAL = []
for i, name in enumerate(RECIPES):
    marks = () if name in SIBLINGS else pytest.mark.core
    EQUAL.append(pytest.param(name, "xla", 0.0, marks=marks))
    # In tiles, every second recipe with dropout.
    rate = 0.25 if i % 2 else 0.0
    EQUAL.append(pytest.param(name, "blockwise", rate))


@pytest.mark.parametrize(("name", "implementation", "rate"), EQUAL)
def test_recipe_equals_its_dense_formula(name, implementation, rate):
    recipe = RECIPES[name]
    cotangent = rng.standard_normal((B, S, N, H)).astype(np.float32)
    drop = {"dropout_rate": rate, "dropout_rng": jax.random.key(0)}
    keep = None
    if rate:
        keep = (dropped((B, S, N, S), **drop) != 0) / (1 - rate)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def run(inputs, learned):
        options = recipe.arguments(learned) | drop
        output = dot_product_attention(
            **inputs, **options, implementation=implementation
        )
        return jnp.sum(output * cotangent), output

    (grads, d_learned), output = run(INPUTS, recipe.learned)

    (want, _), want_grads = reference.attention(
        **{name: np.float64(x) for name, x in INPUTS.items()},
        mask=recipe.mask,
        added=recipe.added,
        logits_soft_cap=recipe.logits_soft_cap,
        sinks=recipe.sinks,
        keep=keep,
        cotangents=(np.float64(cotangent), np.zeros((B, S, N))),
    )
    if recipe.added is not None:
        d_added = want_grads.pop(0)
        if recipe.learned is not None:
            want_grads.append(gradient_of_learned(name, d_added))
    got_grads = [grads[name] for name in INPUTS]
    close((output, got_grads, d_learned), (want, want_grads))


@pytest.mark.parametrize("lengths", [(5, 21), ([5, 0], [60, 21])])
def test_another_prefix_compiles_nothing(lengths):
    first, second = lengths
    dot_product_attention(**INPUTS, **recipes.prefix_lm(first))
    with nothing_is_compiled():
        dot_product_attention(**INPUTS, **recipes.prefix_lm(second))


def test_a_prefix_may_be_traced_and_stays_known_if_it_is():
    want = dot_product_attention(**INPUTS, **recipes.prefix_lm(20))

    @jax.jit
    def attend(inputs, length):
        # Equal only if both lengths are known.
        assert recipes.prefix_lm(20)["mask"] == recipes.prefix_lm(20)["mask"]
        return dot_product_attention(**inputs, **recipes.prefix_lm(length))

    for length in (20, np.full(B, 20)):
        close(attend(INPUTS, length), want)


def doubled(score, *place):
    return score * 2


def plus_key(score, b, h, q, k):
    return score + k.astype(score.dtype)


def test_combined_recipes_intersect_masks_and_apply_score_functions_in_order():
    alibi = recipes.alibi(N)["score_mod"]

    def in_order(score, *place):
        score = doubled(score, *place)
        score = alibi(score, *place)
        return plus_key(score, *place)

    combined = recipes.combine(
        {"score_mod": doubled},
        recipes.sliding_window(9),
        recipes.alibi(N),
        recipes.soft_cap(1.5),
        recipes.documents(jnp.asarray(IDS)),
        {"score_mod": plus_key},
    )
    got = dot_product_attention(**INPUTS, **combined)

    want = dot_product_attention(
        **INPUTS,
        mask=DOCUMENTS & (column >= row - 9),
        logits_soft_cap=1.5,
        score_mod=in_order,
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_combine_leaves_out_what_is_none():
    assert recipes.combine() == {}
    assert recipes.combine({"score_mod": None, "mask": None}) == {}

    both = recipes.combine(
        {"score_mod": doubled, "logits_soft_cap": None},
        {"score_mod": None, "logits_soft_cap": 3.0},
    )
    assert both == {"score_mod": doubled, "logits_soft_cap": 3.0}


REFUSED = Refusals()
refuses = REFUSED.add
refuses(
    "logits_soft_cap must be set by only one",
    recipes.combine,
    recipes.soft_cap(3.0),
    recipes.soft_cap(5.0),
)
refuses(
    "number of heads, but got 4 and 6",
    recipes.combine,
    recipes.alibi(4),
    recipes.t5_bias(TABLE),
)
refuses(
    r'a recipe must be a dict .*, such as {"mask": mask}',
    recipes.combine,
    {},
    recipes.causal()["mask"],
)
refuses(
    r"parents must precede their tokens.* \[-1, 2, 0\]", recipes.tree_causal, [-1, 2, 0]
)
refuses("parents must precede their tokens or be -1", recipes.tree_causal, [-2])
refuses(r"got \(2, 3\) and \(3,\)", recipes.tree_causal, np.full((2, 3), -1), [1, 2, 3])
refuses("parents must have an integer dtype", recipes.tree_causal, [0.0])
refuses("num_heads must be an int >= 1, but got 0", recipes.alibi, 0)
refuses("length must have an integer dtype, but got float64", recipes.prefix_lm, 2.5)
refuses(
    r"length must be an int or have shape \[B\], but got \(2, 1\)",
    recipes.prefix_lm,
    [[1], [2]],
)
refuses(
    "was created for 3 batch entries, but the call has 2",
    lambda: dot_product_attention(**INPUTS, **recipes.prefix_lm([1, 2, 3])),
)
refuses("ids must have an integer dtype", recipes.image_spans, [0.5])
refuses(
    r"ids must have shape \[S\] or \[B, S\], not empty, but got \(\)",
    recipes.image_spans,
    1,
)
refuses("step must be an int >= 1, but got 0", recipes.dilated, 0)
refuses("block must be an int >= 1, but got 0", recipes.block_sparse, BLOCKS, 0)
refuses(
    r"table must be bool .*, but got bool \(9, 9\)", recipes.block_sparse, BLOCKS[0], 8
)
refuses(
    r"table must have shape .* at least 2 buckets, but got \(6,\)",
    recipes.t5_bias,
    TABLE[0],
)
refuses(
    r"with at least 4 buckets, .* \(3, 6\)",
    recipes.t5_bias,
    TABLE[:3],
    bidirectional=True,
)
refuses("num_heads must be an int >= 1, but got 0", recipes.RelativeBias, 0)
refuses(
    "num_buckets must be an int >= 4, but got 3",
    recipes.RelativeBias,
    N,
    3,
    bidirectional=True,
)
refuses(
    "max_distance must be an int >= 17, but got 16",
    recipes.RelativeBias,
    N,
    max_distance=16,
)
refuses(r"block must be an int >= 1, but got 2\.0", recipes.block_diffusion, 8, 2.0)
refuses(
    "size must not exceed the image size, 3 x 9, but got 5",
    recipes.neighborhood,
    3,
    9,
    5,
)
refuses(
    "multiples of window, 4, but got 8 and 10",
    recipes.shifted_windows,
    OFFSETS,
    8,
    10,
    4,
)
refuses(
    "shift must be less than window, 4, but",
    recipes.shifted_windows,
    OFFSETS,
    8,
    8,
    4,
    4,
)
refuses(
    r"heads\] = \(49, N\), but got \(12, 6\)", recipes.shifted_windows, TABLE, 8, 8, 4
)
refuses(
    r"log_gates must be floats \[.*\], but got float32 \(6,\)",
    recipes.forgetting,
    SINKS,
)
refuses(
    r"terms must be floats \[.*\], but got float32 \(12, 6\)",
    recipes.relative_terms,
    TABLE,
)
refuses(
    "terms must have at least 1 distance", recipes.relative_terms, np.zeros((2, 3, 0))
)
refuses(
    r"an odd number .*67, 4\)",
    recipes.relative_terms,
    GATES[..., :4],
    bidirectional=True,
)
refuses(
    "one for each of 1 batch entries, but got 2", recipes.relative_terms, GATES, [1, 2]
)
refuses("query_offset must have an integer dtype", recipes.relative_terms, GATES, 0.5)
refuses(
    r"video must be three ints .*\(4, 4\)",
    recipes.sliding_tiles,
    (4, 4),
    (1, 2, 2),
    (1, 1, 1),
)
refuses(
    r"tile\[1\] must be an int >= 1",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 0, 2),
    (1, 1, 1),
)
refuses(
    "multiple of tile, .* but got ",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 3, 2),
    (1, 1, 1),
)
refuses(
    r"window must be at most video / tile = \(4, 2, 2\) along each axis, "
    r"but got \(1, 3, 1\)",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 2, 2),
    (1, 3, 1),
)


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_wrong_arguments_of_recipes_raise_errors_of_one_line(message, call):
    refused(message, call)


CACHES = {
    "float32": {},
    "each sequence its own index": {"per_row": True},
    "ring": {"window": 9},
}


def assert_decoding_equals_one_call(kind, recipe, learned, new_of):
    """`new_of(first, end)` is what a step with these tokens gets of the learned array;
    `recipe` also gets the position of the step.
    """
    options = CACHES[kind]
    window = {}
    if "window" in options:
        window = {"local_window_size": (options["window"], 0)}
    want = dot_product_attention(**INPUTS, **recipe(learned, 0), **window)
    cache = KVCache.create(
        B, S, num_kv_heads=K, head_size=H, dtype=jnp.float32, **options
    )

    @jax.jit
    def step(cache, learned, arrays):
        arguments = recipe(learned, cache.index) | window
        return cached_attention(**arrays, cache=cache, **arguments)

    for first, end in ((0, 9), (9, 10), (10, 11), (11, 20)):
        arrays = {name: x[:, first:end] for name, x in INPUTS.items()}
        output, cache = step(cache, new_of(first, end), arrays)
        np.testing.assert_allclose(output, want[:, first:end], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
def test_decoding_with_the_gates_of_all_tokens_so_far_equals_one_call(kind):
    gates = jnp.asarray(GATES)

    def forgetting(gates, index):
        return recipes.forgetting(gates)

    def so_far(first, end):
        return jnp.where(jnp.arange(S)[None, :, None] < end, gates, 0.0)

    assert_decoding_equals_one_call(kind, forgetting, gates, so_far)


@pytest.mark.parametrize("kind", CACHES)
def test_decoding_with_the_terms_of_new_queries_equals_one_call(kind):
    terms = jnp.asarray(TERMS["relative terms"])

    def of_queries(first, end):
        return terms[:, :, first:end]

    assert_decoding_equals_one_call(kind, recipes.relative_terms, terms, of_queries)


def test_queries_outside_the_terms_are_nan_if_their_position_is_traced():
    terms = TERMS["relative terms"]

    @jax.jit
    def rows_with_nan(offset):
        relative_terms = recipes.relative_terms(terms, offset)
        output = dot_product_attention(**INPUTS, **relative_terms)
        return jnp.isnan(output).any((0, 2, 3))

    # No other query changes.
    np.testing.assert_array_equal(rows_with_nan(3), np.arange(S) < 3)
    np.testing.assert_array_equal(rows_with_nan(-3), np.arange(S) >= S - 3)


LONG = 8192
HEADS = 4
LONG_BLOCKS = rng.random((HEADS, 32, 32)) < 0.2
# test_memory.py has windows, soft caps and sinks.
AT_8K = {
    "documents": lambda: recipes.documents(jnp.arange(LONG) // 1024),
    "ALiBi": lambda: recipes.alibi(HEADS),
    "T5 bias": lambda: recipes.t5_bias(jnp.ones((32, HEADS))),
    "block-sparse": lambda: recipes.block_sparse(jnp.asarray(LONG_BLOCKS), 512),
    "block diffusion": lambda: recipes.block_diffusion(LONG // 2, 32),
    "shifted windows": lambda: recipes.shifted_windows(
        jnp.ones((225, HEADS)), 64, 128, window=8, shift=4
    ),
    "sliding tiles": lambda: recipes.sliding_tiles((8, 32, 32), (4, 8, 8), (1, 3, 3)),
    "tree": lambda: recipes.tree_causal(PARENTS[0], LONG - 7),
    "forgetting": recipes.forgetting,
    "relative terms": recipes.relative_terms,
}
LEARNED_SHAPES = {
    "forgetting": (1, LONG, HEADS),
    "relative terms": (1, HEADS, LONG, 128),
}


@pytest.mark.parametrize("name", AT_8K)
def test_gradients_at_8k_take_a_sixteenth_of_the_dense_memory(name, monkeypatch):
    monkeypatch.undo()
    shapes = [(1, LONG, HEADS, 64)] * 3
    if name in LEARNED_SHAPES:
        shapes.append(LEARNED_SHAPES[name])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def loss(query, key, value, *learned):
        arguments = AT_8K[name](*learned)
        return dot_product_attention(query, key, value, **arguments).sum()

    lowered = jax.jit(jax.grad(loss, range(len(arrays)))).lower(*arrays)

    assert f"{LONG}x{LONG}" not in lowered.as_text()
    dense_bytes = HEADS * LONG**2 * 4 * 2  # scores, and the weights' cotangent
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes <= dense_bytes / 16
