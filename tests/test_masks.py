"""Mask objects: in attention, their tiles, pictures of them, and comparisons."""

import contextlib
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from marks import with_core_tuples

from flax_mha import dot_product_attention, plot
from flax_mha._src.core.tile import Grid
from flax_mha.masks import (
    ArrayMask,
    CausalMask,
    FunctionMask,
    LengthMask,
    LocalMask,
    SegmentMask,
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


# mask, the same as an array that broadcasts to [B, N, T, S], query offset
MASKS = {
    "causal": (CausalMask(), column <= row, 0),
    "causal, later": (CausalMask(3), column <= row + 3, 0),
    "causal, offset": (CausalMask(), column <= row + 7, 7),
    "local": (LocalMask(5, 2), (column >= row - 5) & (column <= row + 2), 0),
    "local, one side": (LocalMask(None, 2), column <= row + 2, 0),
    "lengths": (
        LengthMask(LENGTHS[0], LENGTHS[1]),
        (column < each(LENGTHS[0])) & (row < each(LENGTHS[1])),
        0,
    ),
    "segments": (
        SegmentMask(IDS[:, :T], IDS),
        IDS[:, None, :T, None] == IDS[:, None, None, :],
        0,
    ),
    "array": (ArrayMask(ARRAY), ARRAY, 0),
    "array of keys": (ArrayMask(ARRAY[:1, :1, :1]), ARRAY[:1, :1, :1], 0),
    "function": (
        FunctionMask(lambda b, h, q, k: (q - k) % 5 == 0),
        (row - column) % 5 == 0,
        0,
    ),
    "function, offset": (
        FunctionMask(lambda b, h, q, k: (q - k) % 5 == 0),
        (row + 7 - column) % 5 == 0,
        7,
    ),
    "function of head": (
        FunctionMask(lambda b, h, q, k: jnp.asarray(TABLE)[h, q // 8, k // 8]),
        TABLE[:, row // 8, column // 8],
        0,
    ),
    "function of batch": (
        FunctionMask(lambda b, h, q, k: k < 20 * (b + 1)),
        column < each([20, 40]),
        0,
    ),
    "function, offset a sequence": (
        FunctionMask(lambda b, h, q, k: (k <= q) & (k >= q - 3)),
        (column <= row + each(OFFSETS)) & (column >= row + each(OFFSETS) - 3),
        OFFSETS,
    ),
    "and, or, not": (
        (CausalMask() & ~LocalMask(9, 9)) | FunctionMask(lambda b, h, q, k: k < 4),
        ((column <= row) & (abs(row - column) > 9)) | (column < 4),
        0,
    ),
    "not of and": (~(CausalMask() & ArrayMask(ARRAY)), ~((column <= row) & ARRAY), 0),
}
CORE = ("local", "function of head", "and, or, not")


def assert_occupancy(mask, array, offset=0):
    """Exactly the right tiles of 8 x 8 count as empty, and as full."""
    grid = Grid((T // 8, S // 8), (8, 8), (offset, 0))
    tiles = np.broadcast_to(array, (T, S)).reshape(T // 8, 8, S // 8, 8)
    some, full = (np.broadcast_to(x, grid.counts) for x in mask.occupancy(grid))
    np.testing.assert_array_equal(some, tiles.any((1, 3)))
    np.testing.assert_array_equal(full, tiles.all((1, 3)))


@pytest.mark.core
def test_windows_and_lengths_find_all_empty_and_full_tiles():
    """Wherever their edges are inside the tiles."""
    ahead = column - row
    for left, right in itertools.product((None, *range(9)), repeat=2):
        array = (
            (left is None or ahead - 5 >= -left)
            & (right is None or ahead - 5 <= right)
            & np.ones((T, S), bool)
        )
        assert_occupancy(LocalMask(left, right), array, 5)
    for number in range(-9, 10):
        assert_occupancy(CausalMask(number), ahead <= number)
        lengths = LengthMask(20 + number, query_lengths=30 - number)
        assert_occupancy(lengths, (column < 20 + number) & (row < 30 - number))


# Every mask in tiles, with arrays that are known while tracing or not; the most
# important masks with both.
BOTH = (*CORE, "lengths", "segments", "array")
ATTENDED = [
    (name, "blockwise", traced)
    for i, name in enumerate(MASKS)
    for traced in (False, True)
    if name in BOTH or traced == i % 2
]
ATTENDED += [(name, "xla", False) for name in CORE]
IN_CORE = [
    ("local", "blockwise", False),
    ("local", "blockwise", True),
    ("function of head", "blockwise", True),
]
IN_CORE += [
    ("and, or, not", implementation, False) for implementation in ("blockwise", "xla")
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("name", "implementation", "traced"), with_core_tuples(ATTENDED, *IN_CORE)
)
def test_a_mask_object_equals_an_array(name, implementation, traced):
    """Also if the arrays of the mask are arguments of the jitted function, and thus
    unknown while tracing.
    """
    mask, array, offset = MASKS[name]
    shapes = {"query": (B, T, N, 8), "key": (B, S, 2, 8), "value": (B, S, 2, 8)}
    inputs = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    cotangents = np.ones((B, T, N, 8), np.float32), np.zeros((B, T, N), np.float32)

    def outputs(inputs, mask=mask, offset=offset):
        more = {"mask": mask, "query_offset": offset, "implementation": implementation}
        output, pull = jax.vjp(
            lambda inputs: dot_product_attention(**inputs, **more), inputs
        )
        return output, pull(jnp.ones_like(output))[0]

    output, grads = (
        jax.jit(outputs)(inputs, mask, offset) if traced else jax.jit(outputs)(inputs)
    )
    (want, _), want_grads = reference.attention(
        **inputs, mask=array, cotangents=cotangents
    )
    for got, expected in zip(
        (output, *(grads[n] for n in inputs)), (want, *want_grads), strict=True
    ):
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=(T + S) * np.finfo(np.float32).eps * 4
        )


@pytest.mark.core
def test_pictures():
    """Batched, longer than the picture, of all heads, of functions: they show the first
    queries of the first head.
    """
    assert str(CausalMask() & LocalMask(2, 0)).splitlines()[:4] == [
        "█·······",
        "██······",
        "███·····",
        "·███····",
    ]
    assert (
        str(SegmentMask(np.array([0, 0, 1]), np.array([0, 1, 1, 1])))
        == "█···\n█···\n·███"
    )
    assert repr(CausalMask(2)) == "CausalMask(offset=2)"
    axes = plot.plot_mask(~CausalMask(), 5, 7)
    assert axes.get_title() == "visible: 57 % of 5 x 7"
    np.testing.assert_array_equal(axes.images[0].get_array(), ~np.tri(5, 7, dtype=bool))
    ids = np.arange(100)[None] // 3
    assert (
        str(SegmentMask(np.repeat(ids, 2, 0), np.repeat(ids, 2, 0))).splitlines()[0]
        == "███" + "·" * 29
    )
    assert len(str(ArrayMask(np.ones((2, 6, 100, 7), bool))).splitlines()) == 32
    assert str(LengthMask([3, 9])).splitlines() == ["███·····"] * 8
    assert (
        str(FunctionMask(lambda b, h, q, k: q == k) & ~LengthMask(3)).splitlines()[3]
        == "···█····"
    )
    assert (
        str(ArrayMask(np.ones((1, 1, 1, 5), bool)) & CausalMask()).splitlines()[0]
        == "█····"
    )
    assert (
        plot.plot_mask(SegmentMask(ids, ids), 5, 5).get_title()
        == "visible: 52 % of 5 x 5"
    )


def test_a_picture_for_a_terminal_without_these_characters():
    with contextlib.redirect_stdout(
        io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    ) as terminal:
        print(LocalMask(0, 0))
    terminal.seek(0)
    assert terminal.read().splitlines()[:2] == ["#.......", ".#......"]


@pytest.mark.core
def test_masks_compare_and_hash():
    """By their contents, which may be anything, and while tracing."""
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
    assert jax.jit(lambda x: LengthMask(x) == LengthMask(x))(jnp.array([3]))
    assert jax.jit(lambda x: LengthMask(x) != LengthMask(x + 1))(jnp.array([3]))
    with pytest.raises(AttributeError):
        CausalMask().offset = 1
