"""Mask objects: in attention, their tiles, pictures of them, and comparisons."""

import contextlib
import copy
import io
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from marks import with_core_tuples

from flax_mha import dot_product_attention, plot
from flax_mha._src.core.tile import Grid
from flax_mha._src.core.validation import Shape
from flax_mha._src.masks.base import shows_future
from flax_mha._src.masks.visible import Visible, merged
from flax_mha.masks import (
    ArrayMask,
    CausalMask,
    FunctionMask,
    LengthMask,
    LocalMask,
    Mask,
    SegmentMask,
    WrittenMask,
)

B = 2
N = 6
T = 48
S = 64
row = np.arange(T)[:, None]
column = np.arange(S)[None, :]
rng = np.random.default_rng(0)
IDS = np.sort(rng.integers(0, 3, (B, S)), -1)
ARRAY = rng.random((B, N, T, S)) < 0.5
OFFSETS = np.array([0, 30], np.int32)
LENGTHS = np.array([[40, 0], [48, 20]])
TABLE = rng.random((N, 6, 8)) < 0.3


def each(numbers):
    """One number for each sequence, against [B, N, T, S]."""
    return np.array(numbers)[:, None, None, None]


class MaskCase(NamedTuple):
    """A mask object, and the same mask as an array that broadcasts to [B, N, T, S]."""

    mask: Mask
    array: np.ndarray
    query_offset: int | np.ndarray = 0


def every_fifth(b, h, q, k):
    return (q - k) % 5 == 0


def of_tiles(b, h, q, k):
    return jnp.asarray(TABLE)[h, q // 8, k // 8]


FIRST_KEYS = FunctionMask(lambda b, h, q, k: k < 4)
SHORT = FunctionMask(lambda b, h, q, k: k < 20 * (b + 1))
NEAR = FunctionMask(lambda b, h, q, k: (k <= q) & (k >= q - 3))
position = row + each(OFFSETS)

MASKS = {
    "causal": MaskCase(CausalMask(), column <= row),
    "causal, later": MaskCase(CausalMask(3), column <= row + 3),
    "causal, offset": MaskCase(CausalMask(), column <= row + 7, query_offset=7),
    "local": MaskCase(LocalMask(5, 2), (column >= row - 5) & (column <= row + 2)),
    "local, one side": MaskCase(LocalMask(None, 2), column <= row + 2),
    "lengths": MaskCase(
        LengthMask(LENGTHS[0], LENGTHS[1]),
        (column < each(LENGTHS[0])) & (row < each(LENGTHS[1])),
    ),
    "segments": MaskCase(
        SegmentMask(IDS[:, :T], IDS), IDS[:, None, :T, None] == IDS[:, None, None, :]
    ),
    "array": MaskCase(ArrayMask(ARRAY), ARRAY),
    "array of keys": MaskCase(ArrayMask(ARRAY[:1, :1, :1]), ARRAY[:1, :1, :1]),
    "function": MaskCase(FunctionMask(every_fifth), (row - column) % 5 == 0),
    "function, offset": MaskCase(
        FunctionMask(every_fifth), (row + 7 - column) % 5 == 0, query_offset=7
    ),
    "function of head": MaskCase(
        FunctionMask(of_tiles), TABLE[:, row // 8, column // 8]
    ),
    "function of batch": MaskCase(SHORT, column < each([20, 40])),
    "function, offset a sequence": MaskCase(
        NEAR, (column <= position) & (column >= position - 3), query_offset=OFFSETS
    ),
    "and, or, not": MaskCase(
        (CausalMask() & ~LocalMask(9, 9)) | FIRST_KEYS,
        ((column <= row) & (abs(row - column) > 9)) | (column < 4),
    ),
    "not of and": MaskCase(
        ~(CausalMask() & ArrayMask(ARRAY)), ~((column <= row) & ARRAY)
    ),
}
CORE = ("local", "function of head", "and, or, not")


# Empty tiles are skipped, and full ones need no mask: a wrong one would be an error, or
# lost time.
def assert_occupancy(mask, array, offset=0):
    """Exactly the right tiles of 8 x 8 count as empty, and as full."""
    grid = Grid((T // 8, S // 8), (8, 8), (offset, 0))
    tiles = np.broadcast_to(array, (T, S)).reshape(T // 8, 8, S // 8, 8)
    some, full = (np.broadcast_to(x, grid.counts) for x in mask.occupancy(grid))
    np.testing.assert_array_equal(some, tiles.any((1, 3)))
    np.testing.assert_array_equal(full, tiles.all((1, 3)))


@pytest.mark.core
@pytest.mark.parametrize("left", [None, *range(9)])
def test_windows_find_all_empty_and_full_tiles(left):
    ahead = column - row - 5
    # Edges at every place inside the tiles.
    for right in (None, *range(9)):
        array = np.ones((T, S), bool)
        if left is not None:
            array &= ahead >= -left
        if right is not None:
            array &= ahead <= right
        assert_occupancy(LocalMask(left, right), array, 5)


def test_windows_take_unsigned_integers():
    window = LocalMask(np.uint8(3), np.uint8(1))
    assert window == LocalMask(3, 1)
    assert LocalMask(np.uint8(9), -2) == LocalMask(9, -2)
    assert str(window) == str(LocalMask(3, 1))
    assert Visible.of([window, LocalMask(300, None)]) == Visible(left=3, right=1)
    assert Visible.of([CausalMask(np.uint8(2))]).right == 2


@pytest.mark.core
def test_causal_masks_and_lengths_find_all_empty_and_full_tiles():
    for number in range(-9, 10):
        assert_occupancy(CausalMask(number), column - row <= number)
        lengths = LengthMask(20 + number, query_lengths=30 - number)
        assert_occupancy(lengths, (column < 20 + number) & (row < 30 - number))


# Every mask in tiles, with arrays that are known while tracing or not; the most
# important masks with both.
BOTH = (*CORE, "lengths", "segments", "array")
ATTENDED = []
for i, name in enumerate(MASKS):
    for traced in (False, True):
        if name in BOTH or traced == i % 2:
            ATTENDED.append((name, "blockwise", traced))
for name in CORE:
    ATTENDED.append((name, "xla", False))
IN_CORE = [
    ("local", "blockwise", False),
    ("local", "blockwise", True),
    ("function of head", "blockwise", True),
    ("and, or, not", "blockwise", False),
    ("and, or, not", "xla", False),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("name", "implementation", "traced"), with_core_tuples(ATTENDED, *IN_CORE)
)
def test_mask_object_equals_the_mask_as_an_array(name, implementation, traced):
    mask, array, offset = MASKS[name]
    shapes = {"query": (B, T, N, 8), "key": (B, S, 2, 8), "value": (B, S, 2, 8)}
    inputs = {}
    for argument, shape in shapes.items():
        inputs[argument] = rng.standard_normal(shape).astype(np.float32)
    cotangents = np.ones((B, T, N, 8), np.float32), np.zeros((B, T, N), np.float32)

    @jax.jit
    def run(inputs, mask=mask, offset=offset):
        def attend(inputs):
            return dot_product_attention(
                **inputs, mask=mask, query_offset=offset, implementation=implementation
            )

        output, pull = jax.vjp(attend, inputs)
        return output, pull(jnp.ones_like(output))[0]

    # As arguments of the jitted function, the mask's arrays are unknown while tracing.
    given = (mask, offset) if traced else ()
    output, grads = run(inputs, *given)

    (want, _), want_grads = reference.attention(
        **inputs, mask=array, cotangents=cotangents
    )
    tolerance = (T + S) * np.finfo(np.float32).eps * 4
    np.testing.assert_allclose(output, want, rtol=0, atol=tolerance)
    for argument, expected in zip(inputs, want_grads, strict=True):
        np.testing.assert_allclose(grads[argument], expected, rtol=0, atol=tolerance)


def lines_of(mask):
    return str(mask).splitlines()


@pytest.mark.core
def test_text_of_a_mask_shows_its_first_queries_and_keys():
    window = CausalMask() & LocalMask(2, 0)
    assert lines_of(window)[:4] == ["█·······", "██······", "███·····", "·███····"]
    segments = SegmentMask(np.array([0, 0, 1]), np.array([0, 1, 1, 1]))
    assert lines_of(segments) == ["█···", "█···", "·███"]
    assert repr(CausalMask(2)) == "CausalMask(offset=2)"


@pytest.mark.core
def test_text_of_a_batched_mask_shows_its_first_sequence_and_head():
    ids = np.repeat(np.arange(100)[None] // 3, 2, axis=0)
    long = SegmentMask(ids, ids)
    assert lines_of(long)[0] == "███" + "·" * 29
    of_heads = ArrayMask(np.ones((2, 6, 100, 7), bool))
    assert len(lines_of(of_heads)) == 32
    assert lines_of(LengthMask([3, 9])) == ["███·····"] * 8
    function = FunctionMask(lambda b, h, q, k: q == k) & ~LengthMask(3)
    assert lines_of(function)[3] == "···█····"
    of_keys = ArrayMask(np.ones((1, 1, 1, 5), bool)) & CausalMask()
    assert lines_of(of_keys)[0] == "█····"


@pytest.mark.core
def test_plot_shows_the_mask_and_how_much_is_visible():
    axes = plot.plot_mask(~CausalMask(), 5, 7)
    assert axes.get_title() == "visible: 57 % of 5 x 7"
    np.testing.assert_array_equal(axes.images[0].get_array(), ~np.tri(5, 7, dtype=bool))

    ids = np.arange(100)[None] // 3
    axes = plot.plot_mask(SegmentMask(ids, ids), 5, 5)
    assert axes.get_title() == "visible: 52 % of 5 x 5"


def test_text_for_a_terminal_without_block_characters_is_ascii():
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(terminal):
        print(LocalMask(0, 0))

    terminal.seek(0)
    assert terminal.read().splitlines()[:2] == ["#.......", ".#......"]


@pytest.mark.core
def test_masks_are_equal_if_their_contents_are():
    same = [
        lambda: CausalMask(2) & LocalMask(1, 0),
        lambda: SegmentMask(IDS, IDS.copy()),
        lambda: LengthMask(jnp.array([3, 4])) | ~ArrayMask(ARRAY.copy()),
        lambda: FunctionMask(len),
    ]
    for i, make in enumerate(same):
        assert make() == make()
        assert hash(make()) == hash(make())
        assert all(make() != other() for other in same[:i])
        assert make() != 3
        assert make() in {make(): None}
    assert SegmentMask(IDS, IDS) != SegmentMask(IDS, IDS + 1)
    assert LengthMask(jnp.array([3, 4])) != LengthMask(jnp.array([3, 5]))


@pytest.mark.core
def test_traced_masks_are_equal_if_they_hold_the_same_arrays():
    lengths = jnp.array([3])
    assert jax.jit(lambda x: LengthMask(x) == LengthMask(x))(lengths)
    assert jax.jit(lambda x: LengthMask(x) != LengthMask(x + 1))(lengths)


# Without parts that are computed once, it would be computed 2^12 times.
def nested(mask, times=12):
    """A mask that holds `mask` and two others again and again."""
    first = LocalMask(9, None)
    for _ in range(times):
        mask = (mask | first) & (SHORT | mask)
    return mask


@pytest.mark.core
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_a_part_of_a_mask_is_computed_once(implementation):
    """Twelve levels make a program that is not much longer than that of two."""
    query, key = (rng.standard_normal((B, n, N, 8)).astype(np.float32) for n in (T, S))

    @jax.jit
    def attend(mask):
        return dot_product_attention(
            query, key, key, mask=mask, implementation=implementation
        )

    inner = FunctionMask(every_fifth) & ArrayMask(ARRAY)
    deep = nested(inner)
    assert len(jax.tree.leaves(deep)) == 1
    short, long = (attend.lower(x).as_text() for x in (nested(inner, 2), deep))
    assert len(long) < 2 * len(short)
    visible = ((row - column) % 5 == 0) & ARRAY
    visible = visible | ((column >= row - 9) & (column < each([20, 40])))
    want = dot_product_attention(query, key, key, mask=visible)
    np.testing.assert_allclose(attend(deep), want, rtol=0, atol=1e-5)


def test_nested_masks_are_compared_copied_drawn_and_asked_fast():
    first = nested(ArrayMask(ARRAY[0, 0]), 40)
    second = nested(ArrayMask(ARRAY[0, 0].copy()), 40)
    assert first == second
    assert hash(first) == hash(second)
    assert first != nested(ArrayMask(~ARRAY[0, 0]), 40)
    assert jax.tree.map(jnp.asarray, first) == first
    assert copy.deepcopy(first) == first
    assert str(first) == str(nested(ArrayMask(ARRAY[0, 0]), 1))
    assert first.lengths == (T, S)
    assert not shows_future(first)
    assert len(Visible.of([first]).others) == 2


def test_parts_are_equal_by_their_contents_however_they_are_shared():
    causal = CausalMask()
    shared = (causal | FIRST_KEYS) & ~causal
    apart = (CausalMask() | FIRST_KEYS) & ~CausalMask()
    assert shared == apart
    assert hash(shared) == hash(apart)
    assert shared != (CausalMask() | FIRST_KEYS) & ~CausalMask(1)


SHAPE = Shape(
    batch=(B,),
    query_length=T,
    key_length=S,
    num_heads=N,
    num_kv_heads=N,
    head_size=8,
    value_size=8,
)
SEGMENTS = SegmentMask(IDS[:, :T], IDS)
SHARED = ArrayMask(ARRAY) | FIRST_KEYS
TOGETHER = {
    "one window": [CausalMask()],
    "windows": [CausalMask(2), None, LocalMask(9, 30), LocalMask(None, 1)],
    "an empty window": [CausalMask(-9), LocalMask(2, None)],
    "lengths": [LengthMask(LENGTHS[0]), LengthMask(np.array(30), LENGTHS[1])],
    "segments twice": [SEGMENTS, CausalMask() & SegmentMask(IDS[:, :T] // 2, IDS)],
    "what is shared": [SHARED & CausalMask(), (SHARED | SEGMENTS) & ~SHARED, SHARED],
    "all kinds": [
        LocalMask(20, 9) & LengthMask(50),
        SEGMENTS,
        ~(CausalMask() & SHORT),
        FunctionMask(every_fifth) | CausalMask(-3),
    ],
}


@pytest.mark.core
@pytest.mark.parametrize("name", TOGETHER)
def test_the_masks_of_a_call_show_the_same_together(name):
    tree = merged(TOGETHER[name]).canonical(SHAPE)
    visible = Visible.of([tree])
    assert visible == Visible.of([tree, tree])
    assert visible == Visible.of([visible, None])
    axes = jax.tree.leaves(visible.map_arrays(lambda _, axes: axes))
    assert [len(x.split()) for x in axes] == [x.ndim for x in jax.tree.leaves(visible)]

    leaves, structure = jax.tree.flatten(visible)
    for same in (visible, jax.tree.unflatten(structure, leaves)):
        np.testing.assert_array_equal(same.picture(T, S), tree.picture(T, S))
    first, other = (x.map_arrays(first_of) for x in (visible, tree))
    grid = Grid((T // 8, S // 8), (8, 8))
    for ours, theirs in zip(first.occupancy(grid), other.occupancy(grid), strict=True):
        np.testing.assert_array_equal(*np.broadcast_arrays(ours, theirs))


def first_of(x, axes):
    """The first sequence and head of a mask's array."""
    rank = len([name for name in axes.split() if name not in "BN"])
    return x.reshape(-1, *x.shape[x.ndim - rank :])[0] if axes else x


def test_visible_holds_the_tightest_limits_and_the_rest():
    masks = [
        *(CausalMask(2), LocalMask(9, 5), LocalMask(4, None)),
        *(LengthMask(np.array([3, 50])), LengthMask(np.array([40]), np.array([7]))),
        *(SEGMENTS, ~SHARED & SegmentMask(IDS[:, :T], IDS), WrittenMask()),
    ]

    @jax.jit
    def limits():
        # Arrays that are known while tracing stay known.
        visible = Visible.of(masks)
        assert np.asarray(visible.key_lengths).tolist() == [3, 40]
        assert np.asarray(visible.query_lengths).tolist() == [7]
        return visible

    visible = limits()
    assert (visible.left, visible.right) == (4, 2)
    assert visible.segments == SEGMENTS
    assert visible.others == [~SHARED, SEGMENTS, WrittenMask()]


def test_masks_that_hide_nothing_are_none():
    assert Visible.of([None, LocalMask(None, None), LengthMask(None)]) is None


@pytest.mark.core
def test_masks_are_immutable():
    with pytest.raises(AttributeError):
        CausalMask().offset = 1
