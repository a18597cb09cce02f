"""Every recipe equals its dense formula, in the output and all gradients, also those of
captured arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cases import close, refused
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
    large = exact + (
        np.log(np.maximum(distance, 1) / exact) / np.log(40 / exact) * (buckets - exact)
    ).astype(int)
    return np.where(distance < exact, distance, np.minimum(large, buckets - 1))


def natten(length, size):
    """The visible keys along one axis, as in NATTEN's reference kernel."""
    place = np.arange(length)[:, None]
    left = size // 2
    right = size // 2 + size % 2 - 1
    start = np.maximum(place - left, 0) + (place + right >= length) * (
        length - right - place - 1
    )
    ahead = np.arange(length) - start
    return (ahead >= 0) & (ahead < size)


def swin(height, width, window, shift):
    """The mask and the index into the bias. Liu et al. roll the image, cut windows, and
    mask across the seam.
    """
    places = []
    regions = []
    for axis, length in enumerate((height, width)):
        rolled = (np.indices((height, width))[axis].ravel() - shift) % length
        places.append(rolled)
        regions.append(
            rolled // window * 3
            + (rolled >= length - window)
            + (rolled >= length - shift)
        )
    visible = np.logical_and.reduce([x[:, None] == x for x in regions])
    down, right = ((x % window)[:, None] - x % window + window - 1 for x in places)
    return visible[:S, :S], (down * (2 * window - 1) + right)[:S, :S]


SWIN_MASK, SWIN_OFFSETS = swin(8, 12, window=4, shift=1)
BUCKETS = {
    "T5 bias": t5_buckets(row - column),
    "T5 bias of an encoder": t5_buckets(abs(row - column), 6) + 6 * (column > row),
    "shifted windows": SWIN_OFFSETS,
}
OFFSETS = rng.standard_normal((49, N)).astype(np.float32)
CONTINUATIONS = np.stack(
    [np.repeat([0, 1, 2, 3], (30, 12, 15, 10)), np.repeat([0, 7, 5], (11, 40, 16))]
)
KEY_IDS = CONTINUATIONS[:, None, None, :]
QUERY_IDS = CONTINUATIONS[:, None, :, None]
# Block diffusion: 34 noised tokens, then clean ones, in blocks of 5; how many blocks
# the key is behind the query.
NOISED = np.arange(S) < 34
BEHIND = row % 34 // 5 - column % 34 // 5
PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 1, 0, 2, 3]])
TREES = np.stack([CAUSAL & (column < S - 7)] * B)
for tree, parents in zip(TREES, PARENTS + S - 7, strict=True):
    for i, parent in enumerate(parents, S - 7):
        tree[i] |= (column[0] == i) | (tree[parent] if parent >= S - 7 else False)

# Sliding tiles: the tile of each of 64 tokens of a video along its axes, four frames of
# 4 x 4 tokens; text follows.
tiles = np.array(
    [[t, h, w] for t in range(2) for h in range(2) for w in range(4) for _ in range(4)]
)
# Windows of (1, 2, 3) of (2, 2, 4) tiles.
starts = np.clip(tiles - [0, 1, 1], 0, [1, 0, 1])
NEAR = np.ones((S, S), bool)
NEAR[:64, :64] = (
    (tiles >= starts[:, None]) & (tiles < starts[:, None] + [1, 2, 3])
).all(-1)
GATES = np.log(1 / (1 + np.exp(-rng.standard_normal((B, S, N)) - 2))).astype(np.float32)
SUMS = np.moveaxis(np.cumsum(GATES, 1, np.float64), -1, 1)
TERMS = {
    name: rng.standard_normal((B, N, S, width)).astype(np.float32)
    for name, width in (
        ("relative terms", 20),
        ("relative terms, clipped", 20),
        ("relative terms, both sides", 41),
    )
}

# Images of 4 to 9 tokens between texts of as many; the last one ends before the ids of
# the recipe do.
SPANS = np.repeat(np.resize([0, 1, 0, 2, 0, 3], 12), np.resize([4, 7, 5, 9, 6], 12))[
    :S
] * np.ones((B, 1), int)
SPANS = np.where(np.arange(S) < 48, SPANS, 0)
SAME_SPAN = ((SPANS[:, :, None] == SPANS[:, None]) & (SPANS[:, None] > 0))[:, None]

# The recipe, and its mask as an array.
MASKS = {
    "causal": (recipes.causal, CAUSAL),
    "sliding window": (lambda: recipes.sliding_window(9), CAUSAL & (column >= row - 9)),
    "prefix-LM": (lambda: recipes.prefix_lm(20), CAUSAL | (column < 20)),
    "image spans": (lambda: recipes.image_spans(SPANS[:, :50]), CAUSAL | SAME_SPAN),
    "documents": (lambda: recipes.documents(jnp.asarray(IDS)), DOCUMENTS),
    "dilated": (lambda: recipes.dilated(3), CAUSAL & ((row - column) % 3 == 0)),
    "block-sparse": (
        lambda: recipes.block_sparse(jnp.asarray(BLOCKS), 8),
        BLOCKS[:, row // 8, column // 8],
    ),
    "shared prefix": (
        lambda: recipes.shared_prefix(jnp.asarray(CONTINUATIONS)),
        CAUSAL & ((KEY_IDS == 0) | (KEY_IDS == QUERY_IDS)),
    ),
    "block diffusion": (
        lambda: recipes.block_diffusion(34, 5),
        np.where(
            NOISED[:, None],
            np.where(NOISED, BEHIND == 0, BEHIND > 0),
            ~NOISED & (BEHIND >= 0),
        ),
    ),
    "neighborhood": (
        lambda: recipes.neighborhood(7, 10, 4),
        np.kron(natten(7, 4), natten(10, 4))[:S, :S],
    ),
    "sliding tiles": (
        lambda: recipes.sliding_tiles((4, 4, 4), (2, 2, 1), (1, 2, 3), text=3),
        NEAR,
    ),
    "tree": (
        lambda: recipes.tree_causal(jnp.asarray(PARENTS), [S - 7, S - 7]),
        TREES[:, None],
    ),
}


def looked_up(name, table):
    return np.moveaxis(table[BUCKETS[name]], -1, 0)


def terms_of(name):
    """For each score, the index of its term in the learned array, and whether it has
    one.
    """
    width = TERMS[name].shape[-1]
    distance = row - column + (width // 2 if name.endswith("both sides") else 0)
    has_one = ((distance >= 0) & (distance < width)) | name.endswith("clipped")
    batch, head = np.ogrid[:B, :N]
    return (
        batch[..., None, None],
        head[..., None, None],
        row,
        np.clip(distance, 0, width - 1),
    ), has_one


def relative(name, mask, **options):
    places, has_one = terms_of(name)
    added = np.where(has_one, TERMS[name][places], 0)
    return (
        lambda terms: recipes.relative_terms(terms, **options),
        TERMS[name],
        {"mask": mask, "added": added},
    )


def gradient_of_learned(name, d_added):
    """The gradient of the learned array, given that of the bias [B, N, S, S] that it
    adds to the scores.
    """
    if name == "forgetting":
        d_sums = d_added.sum(-1) - d_added.sum(-2)
        return np.moveaxis(np.cumsum(d_sums[..., ::-1], -1)[..., ::-1], 1, -1)
    gradient = np.zeros_like(RECIPES[name][1], np.float64)
    if name in BUCKETS:
        np.add.at(gradient, BUCKETS[name], np.moveaxis(d_added.sum(0), 0, -1))
    else:
        places, has_one = terms_of(name)
        np.add.at(gradient, places, d_added * has_one)
    return gradient


# A function from the learned array to the recipe, the learned array, and the arguments
# of the dense formula.
RECIPES = {
    name: (make, None, {"mask": mask}) for name, (make, mask) in MASKS.items()
} | {
    "ALiBi": (
        lambda: recipes.alibi(np.int64(N)),
        None,
        {"mask": CAUSAL, "added": SLOPES * (column - row)},
    ),
    "T5 bias": (
        lambda table: recipes.t5_bias(table, max_distance=40),
        TABLE,
        {"mask": CAUSAL, "added": looked_up("T5 bias", TABLE)},
    ),
    "T5 bias of an encoder": (
        lambda table: recipes.t5_bias(table, max_distance=40, bidirectional=True),
        TABLE,
        {
            "mask": np.ones_like(CAUSAL),
            "added": looked_up("T5 bias of an encoder", TABLE),
        },
    ),
    "soft cap": (
        lambda: recipes.soft_cap(1.5),
        None,
        {"mask": CAUSAL, "logits_soft_cap": 1.5},
    ),
    "attention sinks": (
        lambda sinks: recipes.attention_sinks(sinks, 9),
        SINKS,
        {"mask": CAUSAL & (column >= row - 9), "sinks": SINKS},
    ),
    "shifted windows": (
        lambda table: recipes.shifted_windows(table, 8, 12, window=4, shift=1),
        OFFSETS,
        {"mask": SWIN_MASK, "added": looked_up("shifted windows", OFFSETS)},
    ),
    "forgetting": (
        recipes.forgetting,
        GATES,
        {"mask": CAUSAL, "added": SUMS[..., None] - SUMS[..., None, :]},
    ),
    "relative terms": relative("relative terms", CAUSAL),
    "relative terms, clipped": relative("relative terms, clipped", CAUSAL, clip=True),
    "relative terms, both sides": relative(
        "relative terms, both sides", np.ones_like(CAUSAL), bidirectional=True
    ),
}


# Of each recipe with several options, one case is a core test.
SIBLINGS = ("T5 bias", "relative terms", "relative terms, both sides")
HEADS_OF = {"query": N, "key": K, "value": K}
INPUTS = {
    name: rng.standard_normal((B, S, heads, H)).astype(np.float32)
    for name, heads in HEADS_OF.items()
}
pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize(
    ("name", "implementation", "rate"),
    [
        *((name, "xla", 0.0) for name in RECIPES if name in SIBLINGS),
        *(
            pytest.param(name, "xla", 0.0, marks=pytest.mark.core)
            for name in RECIPES
            if name not in SIBLINGS
        ),
        *((name, "blockwise", (0.0, 0.25)[i % 2]) for i, name in enumerate(RECIPES)),
    ],
)
def test_equals_its_dense_formula(name, implementation, rate):
    """In tiles, every second recipe with dropout."""
    make, learned, formula = RECIPES[name]
    cotangent = rng.standard_normal((B, S, N, H)).astype(np.float32)
    drop = {"dropout_rate": rate, "dropout_rng": jax.random.key(0)}

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def run(inputs, learned):
        arguments = make() if learned is None else make(learned)
        output = dot_product_attention(
            **inputs, **arguments, **drop, implementation=implementation
        )
        return jnp.sum(output * cotangent), output

    (grads, d_learned), output = run(INPUTS, learned)
    keep = (dropped((B, S, N, S), **drop) != 0) / (1 - rate) if rate else None
    arrays = {n: np.float64(x) for n, x in INPUTS.items()}
    cotangents = np.float64(cotangent), np.zeros((B, S, N))
    (want, _), want_grads = reference.attention(
        **arrays, **formula, keep=keep, cotangents=cotangents
    )
    d_added = want_grads.pop(0) if "added" in formula else None
    if d_added is not None and learned is not None:
        want_grads.append(gradient_of_learned(name, d_added))
    close((output, [grads[name] for name in INPUTS], d_learned), (want, want_grads))


def test_recipes_combine():
    """Masks are combined with &, and score functions applied in order."""
    mods = [
        lambda score, *place: score * 2,
        lambda score, b, h, q, k: score + k.astype(score.dtype),
    ]
    parts = [
        {"score_mod": mods[0]},
        recipes.sliding_window(9),
        recipes.alibi(N),
        recipes.soft_cap(1.5),
    ]
    parts += [recipes.documents(jnp.asarray(IDS)), {"score_mod": mods[1]}]
    got = dot_product_attention(**INPUTS, **recipes.combine(*parts))
    mask = DOCUMENTS & (column >= row - 9)
    alibi = recipes.alibi(N)["score_mod"]
    score_mod = lambda score, *place: mods[1](
        alibi(mods[0](score, *place), *place), *place
    )  # noqa: E731
    want = dot_product_attention(
        **INPUTS, mask=mask, logits_soft_cap=1.5, score_mod=score_mod
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert recipes.combine() == {}
    assert recipes.combine({"score_mod": None, "mask": None}) == {}
    both = recipes.combine(
        {"score_mod": mods[0], "logits_soft_cap": None},
        {"score_mod": None, "logits_soft_cap": 3.0},
    )
    assert both == {"score_mod": mods[0], "logits_soft_cap": 3.0}


REFUSED = Refusals()
REFUSED.add(
    "logits_soft_cap must be set by only one",
    recipes.combine,
    recipes.soft_cap(3.0),
    recipes.soft_cap(5.0),
)
REFUSED.add(
    "number of heads, but got 4 and 6",
    recipes.combine,
    recipes.alibi(4),
    recipes.t5_bias(TABLE),
)
REFUSED.add(
    r'a recipe must be a dict .*, such as {"mask": mask}',
    recipes.combine,
    {},
    recipes.causal()["mask"],
)
REFUSED.add(
    r"parents must precede their tokens.* \[-1, 2, 0\]", recipes.tree_causal, [-1, 2, 0]
)
REFUSED.add("parents must precede their tokens or be -1", recipes.tree_causal, [-2])
REFUSED.add(
    r"parents must have shape \[T\] or .*, but got \(\) and ", recipes.tree_causal, 3
)
REFUSED.add(
    r"got \(2, 3\) and \(3,\)", recipes.tree_causal, np.full((2, 3), -1), [1, 2, 3]
)
REFUSED.add("parents must have an integer dtype", recipes.tree_causal, [0.0])
REFUSED.add("num_heads must be an int >= 1, but got 0", recipes.alibi, 0)
REFUSED.add(
    "length must have an integer dtype, but got float64", recipes.prefix_lm, 2.5
)
REFUSED.add("ids must have an integer dtype", recipes.image_spans, [0.5])
REFUSED.add(
    r"ids must have shape \[S\] or \[B, S\], not empty, but got \(\)",
    recipes.image_spans,
    1,
)
REFUSED.add("step must be an int >= 1, but got 0", recipes.dilated, 0)
REFUSED.add("block must be an int >= 1, but got 0", recipes.block_sparse, BLOCKS, 0)
REFUSED.add(
    r"table must be bool .*, but got bool \(9, 9\)", recipes.block_sparse, BLOCKS[0], 8
)
REFUSED.add(
    "table must be bool .*, but got float", recipes.block_sparse, BLOCKS * 1.0, 8
)
REFUSED.add(
    r"table must have shape .* at least 2 buckets, but got \(6,\)",
    recipes.t5_bias,
    TABLE[0],
)
REFUSED.add(
    r"with at least 4 buckets, .* \(3, 6\)",
    recipes.t5_bias,
    TABLE[:3],
    bidirectional=True,
)
REFUSED.add(
    "max_distance must be an int >= 7, but got 6",
    recipes.t5_bias,
    TABLE,
    max_distance=6,
)
REFUSED.add(r"block must be an int >= 1, but got 2\.0", recipes.block_diffusion, 8, 2.0)
REFUSED.add(
    "size must not exceed the image size, 3 x 9, but got 5",
    recipes.neighborhood,
    3,
    9,
    5,
)
REFUSED.add(
    "multiples of window, 4, but got 8 and 10",
    recipes.shifted_windows,
    OFFSETS,
    8,
    10,
    4,
)
REFUSED.add(
    "shift must be less than window, 4, but",
    recipes.shifted_windows,
    OFFSETS,
    8,
    8,
    4,
    4,
)
REFUSED.add(
    r"heads\] = \(49, N\), but got \(12, 6\)", recipes.shifted_windows, TABLE, 8, 8, 4
)
REFUSED.add(
    r"log_gates must be floats \[.*\], but got float32 \(6,\)",
    recipes.forgetting,
    SINKS,
)
REFUSED.add("log_gates must be floats .*, but got int", recipes.forgetting, IDS)
REFUSED.add(
    r"terms must be floats \[.*\], but got float32 \(12, 6\)",
    recipes.relative_terms,
    TABLE,
)
REFUSED.add(
    "terms must have at least 1 distance", recipes.relative_terms, np.zeros((2, 3, 0))
)
REFUSED.add(
    r"an odd number .*67, 4\)",
    recipes.relative_terms,
    GATES[..., :4],
    bidirectional=True,
)
REFUSED.add(
    "one for each of 1 batch entries, but got 2", recipes.relative_terms, GATES, [1, 2]
)
REFUSED.add(
    "query_offset must have an integer dtype", recipes.relative_terms, GATES, 0.5
)
REFUSED.add(
    r"video must be three ints .*\(4, 4\)",
    recipes.sliding_tiles,
    (4, 4),
    (1, 2, 2),
    (1, 1, 1),
)
REFUSED.add(
    r"tile\[1\] must be an int >= 1",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 0, 2),
    (1, 1, 1),
)
REFUSED.add(
    "multiple of tile, .* but got ",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 3, 2),
    (1, 1, 1),
)
REFUSED.add(
    r"window must be at most video / tile = \(4, 2, 2\) along each axis, but got \(1, 3, 1\)",
    recipes.sliding_tiles,
    (4, 4, 4),
    (1, 2, 2),
    (1, 3, 1),
)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call, message):
    refused(message, call)


STEPS = {
    "float32": {},
    "each sequence its own index": {"per_row": True},
    "ring": {"window": 9},
}


@pytest.mark.parametrize("name", ["forgetting", "relative terms"])
@pytest.mark.parametrize("kind", STEPS)
def test_decoding_equals_one_call(name, kind):
    """A step passes the terms of its queries and their position, or the gates of all
    tokens so far.
    """
    learned = jnp.asarray(RECIPES[name][1])
    window = STEPS[kind].get("window")
    cache = KVCache.create(
        B, S, num_kv_heads=K, head_size=H, dtype=jnp.float32, **STEPS[kind]
    )
    more = {} if window is None else {"local_window_size": (window, 0)}
    want = dot_product_attention(**INPUTS, **RECIPES[name][0](learned), **more)

    @jax.jit
    def step(cache, learned, **arrays):
        if name == "forgetting":
            return cached_attention(
                **arrays, cache=cache, **recipes.forgetting(learned), **more
            )
        return cached_attention(
            **arrays,
            cache=cache,
            **recipes.relative_terms(learned, cache.index),
            **more,
        )

    for first, end in ((0, 9), (9, 10), (10, 11), (11, 20)):
        if name == "forgetting":
            so_far = jnp.where(jnp.arange(S)[None, :, None] < end, learned, 0.0)
        else:
            so_far = None
        new = {n: x[:, first:end] for n, x in INPUTS.items()}
        output, cache = step(
            cache, learned[:, :, first:end] if so_far is None else so_far, **new
        )
        np.testing.assert_allclose(output, want[:, first:end], rtol=0, atol=1e-5)


def test_queries_outside_the_terms_are_nan():
    """If the position is not known while tracing; no other query changes."""
    terms = TERMS["relative terms"]
    attend = jax.jit(
        lambda offset: dot_product_attention(
            **INPUTS, **recipes.relative_terms(terms, offset)
        )
    )
    np.testing.assert_array_equal(np.isnan(attend(3)).any((0, 2, 3)), np.arange(S) < 3)
    np.testing.assert_array_equal(
        np.isnan(attend(-3)).any((0, 2, 3)), np.arange(S) >= S - 3
    )


LONG = 8192
HEADS = 4
# test_memory.py has windows, soft caps and sinks.
AT_8K = {
    "documents": lambda: recipes.documents(jnp.arange(LONG) // 1024),
    "ALiBi": lambda: recipes.alibi(HEADS),
    "T5 bias": lambda: recipes.t5_bias(jnp.ones((32, HEADS))),
    "block-sparse": lambda: recipes.block_sparse(
        jnp.asarray(rng.random((HEADS, 32, 32)) < 0.2), 512
    ),
    "block diffusion": lambda: recipes.block_diffusion(LONG // 2, 32),
    "shifted windows": lambda: recipes.shifted_windows(
        jnp.ones((225, HEADS)), 64, 128, window=8, shift=4
    ),
    "sliding tiles": lambda: recipes.sliding_tiles((8, 32, 32), (4, 8, 8), (1, 3, 3)),
    "forgetting": (recipes.forgetting, (1, LONG, HEADS)),
    "relative terms": (recipes.relative_terms, (1, HEADS, LONG, 128)),
    "tree": lambda: recipes.tree_causal(PARENTS[0], LONG - 7),
}


@pytest.mark.parametrize("name", AT_8K)
def test_memory_at_8k(name, monkeypatch):
    """A gradient takes at most 1/16 of the dense computation's temporaries, and no
    array has both lengths.
    """
    monkeypatch.undo()
    make, *learned = AT_8K[name] if isinstance(AT_8K[name], tuple) else (AT_8K[name],)
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in (*[(1, LONG, HEADS, 64)] * 3, *learned)
    ]

    def loss(query, key, value, *learned):
        return dot_product_attention(query, key, value, **make(*learned)).sum()

    lowered = jax.jit(jax.grad(loss, range(len(arrays)))).lower(*arrays)
    assert f"{LONG}x{LONG}" not in lowered.as_text()
    dense_bytes = HEADS * LONG**2 * 4 * 2  # scores, and the weights' cotangent
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= dense_bytes / 16
