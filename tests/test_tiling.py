"""Plans of tiles: all that is visible is visited once, nothing else is without need."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import nothing_is_compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import with_core

from flax_mha import dot_product_attention
from flax_mha._src import plan as schedule
from flax_mha._src.core import tracing
from flax_mha._src.core.tile import Tile
from flax_mha._src.core.validation import Shape
from flax_mha._src.math import tiling
from flax_mha._src.math.tiling import TileShape
from flax_mha.masks import CausalMask, FunctionMask, LocalMask, SegmentMask
from flax_mha.masks.function import with_occupancy

T, S = 100, 140
MASKS = {
    "none": None,
    "causal": CausalMask(3),
    "narrow window": LocalMask(9, 0),
    "wide window": LocalMask(40, 30),
    "causal or far": CausalMask(-60) | LocalMask(0, 5),
    "function": FunctionMask(lambda b, h, q_idx, kv_idx: (q_idx // 20 == kv_idx // 28) | (kv_idx < 3)),
    "nothing": LocalMask(0, None) & LocalMask(None, -1),
}
TILINGS = [
    TileShape(16, 32),
    TileShape(32, 32, 2),
    TileShape(64, 32, 4),
    TileShape(16, 64),
    TileShape(48, 48),
    TileShape(512, 512),
    TileShape(16, 16),
    TileShape(32, 16, 2),
]


@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("largest", TILINGS)
@pytest.mark.parametrize("name", with_core(MASKS, "narrow window", "function"))
def test_all_that_is_visible_is_visited_once(name, largest, fine, monkeypatch):
    monkeypatch.setattr(tiling, "CELL", 8)
    mask = MASKS[name]
    if mask is not None:
        mask = with_occupancy(mask.canonical(Shape((1,), T, S, 1, 1, 1, 1)), (T, S), (5, 0), 8)
        assert not jax.tree.leaves(mask)
    layout = tiling.tiling_of((T, S), largest, fine)
    plan = jax.tree.map(lambda x: x[0], tiling.static_block_mask(layout, [mask], (5, 0)))
    visits, unmasked = np.zeros(layout.shape, int), np.zeros(layout.shape, bool)
    for i in range(layout.rows):
        for n in range(int(plan.num_tiles[i])):
            parts = plan.full_bands if n < plan.num_full[i] else plan.partial_bands
            (first, end), column = parts[int(plan.band[i, n])], plan.column[i, n]
            assert column % layout.cell_width == 0
            assert column + layout.width <= layout.shape[1]
            region = slice(i * layout.height + first, i * layout.height + end), slice(column, column + layout.width)
            visits[region] += 1
            unmasked[region] |= n < plan.num_full[i]
    seen = np.zeros(layout.shape, bool)
    seen[:T, :S] = True if mask is None else mask.tile(Tile(0, 0, (T, S), (5, 0)))
    assert visits.max() <= 1
    assert (visits[seen] == 1).all()
    assert seen[unmasked].all()
    assert bool(plan.full_bands) == (plan.num_full > 0).any()
    assert not plan.single or (plan.num_tiles == 1).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**24 - 1))
def test_tiles_cover_what_they_must_and_no_more_than_aligned_ones(width, count, bits):
    """The first cells of tiles for one row of up to 24 cells."""
    cells = width * count
    some = np.array([[bits >> c & 1 for c in range(cells)]], bool)
    starts = tiling._starts(some, width)
    used = starts[starts < cells]
    covered = (used[:, None] + np.arange(width)).ravel()
    assert len(np.unique(covered)) == len(covered)
    assert set(np.flatnonzero(some)) <= set(covered.tolist()) <= set(range(cells))
    assert len(used) <= some.reshape(count, width).any(1).sum()


def layout_of(length=2048, head_size=64, **arguments):
    """What blockwise takes on a CPU for this length and head size; `arguments` may hold traced arrays."""
    layouts = []

    def spy(call, plan_tiles=schedule.plan_tiles):
        planned = plan_tiles(call)
        layouts.append(planned[0].tiling)
        return planned

    x = jax.ShapeDtypeStruct((1, length, 2, head_size), jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "plan_tiles", spy)
        static = {name: a for name, a in arguments.items() if not isinstance(a, jax.ShapeDtypeStruct)}
        traced = {name: a for name, a in arguments.items() if name not in static}
        attend = functools.partial(dot_product_attention, implementation="blockwise", **static)
        jax.eval_shape(lambda x, traced: attend(x, x, x, **traced), x, traced)
    return layouts[0]


@pytest.mark.core
@pytest.mark.skipif(tracing.platform() != "cpu", reason="on an accelerator all tiles are alike")
def test_masks_choose_their_tiles():
    assert layout_of(257, 256, is_causal=True)[1:4] == (1, 257, 257)  # large heads: products that use all cores
    assert layout_of(600, 256)[1:4] == (1, 600, 600)  # and tiles of whole rows
    assert layout_of(512, 16, is_causal=True)[1:4] == (4, 128, 128)  # small ones: as few products as possible
    ids = jnp.repeat(jnp.arange(16, dtype=jnp.int32), 128)[None]
    assert layout_of()[2:4] == (2048, 512)
    assert layout_of(is_causal=True)[2:4] == (1024, 512)
    assert layout_of(query_segment_ids=ids, is_causal=True)[2:4] == (128, 128)  # known while tracing
    traced = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    assert layout_of(query_segment_ids=traced, is_causal=True)[2:4] == (512, 512)
    mod = FunctionMask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    assert layout_of(mask=mod) == layout_of(is_causal=True)
    table = jnp.arange(2048) // 128
    mod = FunctionMask(lambda b, h, q_idx, kv_idx: (table[q_idx] == table[kv_idx]) & (kv_idx <= q_idx))
    assert layout_of(mask=mod)[2:4] == (128, 128)


@pytest.mark.core
def test_a_row_of_a_window_is_one_tile():
    layout = tiling.tiling_of((2048, 2048), TileShape(256, 512), fine=True)
    ids = np.zeros(2048, np.int32)
    assert tiling.static_block_mask(layout, [LocalMask(255, 0)], (0, 0)).single
    assert tiling.static_block_mask(layout, [LocalMask(128, 128)], (0, 0)).single
    assert not tiling.static_block_mask(layout, [CausalMask()], (0, 0)).single
    assert not tiling.static_block_mask(layout, [LocalMask(255, 0), SegmentMask(ids, ids)], (0, 0)).single


def test_other_ids_compile_nothing_where_every_call_has_its_own():
    x = jnp.ones((1, 600, 1, 8))
    attend = functools.partial(dot_product_attention, x, x, x, implementation="blockwise")
    attend(query_segment_ids=jnp.zeros((1, 600), jnp.int32))
    ids = jnp.arange(600, dtype=jnp.int32)[None] // 100
    with nothing_is_compiled():
        attend(query_segment_ids=ids)
