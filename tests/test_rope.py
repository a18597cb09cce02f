"""`apply_rope` against float64, and under transformations."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from marks import with_core

from flax_mha.rope import (
    NTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    RoPE,
    YaRN,
    apply_rope,
)

H = 16
FACTORS = [1.0, 1.1, 1.5, 2.0, 4.0, 8.0, 16.0, 16.5]
SCALINGS = {
    "none": None,
    "linear": Linear(4.0),
    "ntk": NTK(4.0),
    "llama3": Llama3(8.0, 1.0, 4.0, 256),
    "yarn": YaRN(4.0, 256),
    "yarn, mscale": YaRN(40.0, 256, mscale=1.0, mscale_all_dim=0.7),
    "longrope": LongRoPE(FACTORS, 1.2),
    "proportional": Proportional(0.45, 2.0),  # 3 of 8 pairs
}
ROPES = {
    **{name: RoPE(1000.0, scaling=scaling) for name, scaling in SCALINGS.items()},
    "interleaved": RoPE(1000.0, interleaved=True),
    "partial": RoPE(fraction=0.375),
    "partial, interleaved": RoPE(fraction=0.375, interleaved=True),
}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 3, H))
POSITIONS = np.array([[0, 1, 2, 3, 131_072], [7, -3, 100_003, 5, 5]], np.int32)


def rotated(x, angles, rope):
    """In float64: pairs are complex numbers, times e^(i angle); the other features stay
    unchanged.
    """
    size = 2 * angles.shape[-1]
    if rope.interleaved:
        axis = -1
        real = x[..., :size:2]
        imaginary = x[..., 1:size:2]
    else:
        axis = -2
        real, imaginary = np.split(x[..., :size], 2, axis=-1)
    turned = (real + 1j * imaginary) * np.exp(1j * angles[..., None, :])
    turned = turned * rope.attention_factor
    pairs = np.stack([turned.real, turned.imag], axis)
    pairs = pairs.reshape(*x.shape[:-1], size)
    return np.concatenate([pairs, x[..., size:]], axis=-1)


def tolerance(x, positions, rope, unit):
    """The rounding of an angle and of its frequency adds |angle| * 2 units; the rest is
    at most 32 units.
    """
    angles = np.abs(positions).max() * rope.frequencies(x.shape[-1]).max()
    return (2 * angles + 32) * unit * 2 * np.abs(x).max() * rope.attention_factor


@pytest.mark.parametrize(
    "name", with_core(ROPES, "llama3", "yarn", "partial, interleaved")
)
def test_float32_and_float64_equal_numpy(name):
    rope = ROPES[name]
    want = rotated(X, POSITIONS[..., None] * rope.frequencies(H), rope)
    x = jnp.asarray(X, jnp.float32)
    mapped = jax.vmap(lambda x, positions: apply_rope(x, positions, rope))
    near = tolerance(X, POSITIONS, rope, 2.0**-24)
    for got in (apply_rope(x, POSITIONS, rope), mapped(x, POSITIONS)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=near)

    apply = jax.jit(apply_rope, static_argnums=2)
    with jax.enable_x64(True):
        got = apply(jnp.asarray(X), POSITIONS.astype(np.int64), rope)
    assert got.dtype == jnp.float64
    near = tolerance(X, POSITIONS, rope, 2.0**-53)
    np.testing.assert_allclose(got, want, rtol=0, atol=near)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["yarn", "partial, interleaved"])
def test_half_precision_is_rounded_once(name, dtype):
    x = jnp.asarray(X, dtype)
    rope = ROPES[name]
    got = apply_rope(x, POSITIONS, rope)
    want = apply_rope(x.astype(jnp.float32), POSITIONS, rope).astype(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.core
def test_frequencies_by_hand():
    plain = RoPE(1000.0).frequencies(H)
    np.testing.assert_allclose(plain, [1000 ** (-i / 8) for i in range(8)], rtol=1e-15)
    assert plain.dtype == np.float64
    linear = ROPES["linear"].frequencies(H) / plain
    np.testing.assert_allclose(linear, np.full(8, 1 / 4), rtol=1e-15)
    longrope = ROPES["longrope"].frequencies(H) / plain
    np.testing.assert_allclose(longrope, 1 / np.array(FACTORS), rtol=1e-15)
    # The fastest pair keeps its frequency, and the slowest is divided by the factor.
    ntk = ROPES["ntk"].frequencies(H) / plain
    np.testing.assert_allclose(ntk[[0, -1]], [1, 1 / 4], rtol=1e-14)


@pytest.mark.parametrize(
    ("original_max_position", "kept"),
    [(64, [1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]), (6, [1, 0, 0, 0, 0, 0, 0, 0])],
)
def test_yarn_after_a_short_pretraining(original_max_position, kept):
    """Of each frequency this share is kept, and the rest is divided by 4."""
    rope = RoPE(1000.0, scaling=YaRN(4.0, original_max_position))
    ratio = rope.frequencies(H) / RoPE(1000.0).frequencies(H)
    np.testing.assert_allclose(ratio, np.array(kept) * 0.75 + 0.25, rtol=1e-14)


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        (YaRN(1.0, 256), 1.0),
        (YaRN(4.0, 256, attention_factor=1.3), 1.3),
        (YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.0), 0.1 * math.log(40) + 1),
    ],
)
def test_attention_factor(scaling, want):
    assert RoPE(scaling=scaling).attention_factor == pytest.approx(want, rel=1e-15)


class Sections(NamedTuple):
    """Of each pair the coordinate that turns it and, unless None, the pair of the plain
    embedding whose frequency it has.
    """

    rope: RoPE
    coordinates: list[int]
    frequencies: list[int] | None


# Each section begins again with the fastest pairs, or goes on with slower ones.
SECTIONS = {
    "contiguous": Sections(
        RoPE(100.0, sections=(2, 3, 3)), [0, 0, 1, 1, 1, 2, 2, 2], [*range(8)]
    ),
    "interleaved": Sections(
        RoPE(100.0, sections=(4, 2, 2), section_layout="interleaved"),
        [0, 1, 2, 0, 1, 2, 0, 0],
        [*range(8)],
    ),
    "axial": Sections(
        RoPE(100.0, sections=(4, 4), section_layout="axial"),
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 2, 4, 6, 0, 2, 4, 6],
    ),
    "axial of two sizes": Sections(
        RoPE(100.0, sections=(4, 2, 2), section_layout="axial"),
        [0, 0, 0, 0, 1, 1, 2, 2],
        None,
    ),
    "strided": Sections(
        RoPE(100.0, sections=(4, 4), section_layout="axial_strided"),
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 2, 4, 6, 1, 3, 5, 7],
    ),
}
CHANGES = {
    "": {},
    "partial, interleaved": {"fraction": 0.5, "interleaved": True},
    "yarn": {"scaling": YaRN(4.0, 64)},
    "linear": {"scaling": Linear(2.0)},
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in SECTIONS
        for change in CHANGES
        if change != "yarn" or name[0] != "a"
    ],
)
def test_each_coordinate_turns_its_pairs(name, change):
    """Also under vmap, and differentiated: the transpose rotates backward."""
    rope, of_pairs, of_frequencies = SECTIONS[name]
    rope = dataclasses.replace(rope, **CHANGES[change])
    # Of a head of twice the size, half of the features rotate.
    size = 2 * H if "fraction" in CHANGES[change] else H
    x = RNG.standard_normal((2, 5, 3, size))
    exact = jnp.asarray(x, jnp.float32)
    positions = RNG.integers(-50, 300, (2, 5, len(rope.sections)))

    assert rope.coordinates(size).tolist() == of_pairs
    frequencies = rope.frequencies(size)
    if of_frequencies is not None:
        plain = dataclasses.replace(rope, sections=None, section_layout="contiguous")
        want = plain.frequencies(size)[of_frequencies]
        np.testing.assert_allclose(frequencies, want, rtol=1e-14)

    apply = functools.partial(apply_rope, rope=rope)

    @jax.jit
    def run(x, positions):
        output, vjp = jax.vjp(lambda x: apply(x, positions), x)
        (back,) = vjp(output)
        return output, jax.vmap(apply)(x, positions), back

    output, mapped, back = run(exact, jnp.asarray(positions))
    want = rotated(x, positions[..., of_pairs] * frequencies, rope)
    np.testing.assert_allclose(output, want, rtol=0, atol=5e-4)
    np.testing.assert_allclose(mapped, want, rtol=0, atol=5e-4)
    # The transpose turns back, and multiplies by the factor again.
    factor = np.where(np.arange(size) < H, rope.attention_factor**2, 1)
    np.testing.assert_allclose(back, x * factor, rtol=0, atol=1e-5)
    # Positions without a batch axis are those of every sequence.
    of_all = apply(exact, positions[1])
    np.testing.assert_array_equal(of_all[1], apply(exact, positions)[1])


def test_positions_of_any_shape_and_integer_dtype():
    """A JAX array that `jax.jit` captures is known, but JAX arrays that are computed
    from it there are not.
    """
    apply = functools.partial(apply_rope, rope=RoPE())
    same = np.testing.assert_array_equal
    x = jnp.asarray(X, jnp.float32)
    want = apply(x, POSITIONS)
    for row in range(2):
        same(apply(x, POSITIONS[row])[row], want[row])
        same(apply(x[row], POSITIONS[row]), want[row])
    # Any number of batch axes.
    with_another_axis = apply(x[:, None], POSITIONS[:, None])
    same(with_another_axis[:, 0], want)

    positions = jnp.arange(5) + 100
    want = apply(x, positions)
    for dtype in (np.int8, np.int16, np.uint8, np.uint32):
        same(apply(x, np.asarray(positions, dtype)), want, str(dtype))
    got = jax.jit(lambda x: apply(x, positions))(x)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["yarn", "partial, interleaved"])
@pytest.mark.parametrize("shape", [(2, 0, 3, H), (0, 5, 3, H), (0, 3, H), (2, 5, 0, H)])
def test_empty_arrays_stay_empty(name, shape):
    # Without sequences, tokens or heads.
    x = np.zeros(shape, np.float32)
    positions = np.zeros(shape[:-2], np.int32)
    apply = jax.jit(functools.partial(apply_rope, rope=ROPES[name]))

    gradient = jax.grad(lambda x: apply(x, positions).sum())(x)

    assert apply(x, positions).shape == shape
    assert gradient.shape == shape


def test_symbolic_head_size_is_refused():
    (size,) = export.symbolic_shape("size")
    x = jax.ShapeDtypeStruct((5, 3, size), jnp.float32)
    positions = jax.ShapeDtypeStruct((5,), jnp.int32)
    run = export.export(jax.jit(lambda x, positions: apply_rope(x, positions, RoPE())))
    with pytest.raises(ValueError, match=r"x must have a static head size"):
        run(x, positions)


def test_equal_embeddings_have_equal_hashes():
    for rope in ROPES.values():
        scaling = rope.scaling and dataclasses.replace(rope.scaling)
        copy = dataclasses.replace(rope, scaling=scaling)
        assert {rope: 1}[copy] == 1


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter])
def test_factors_and_sections_may_be_any_sequence(kind):
    assert LongRoPE(kind(FACTORS), 1.2) == SCALINGS["longrope"]
    assert type(LongRoPE(kind(FACTORS)).factors) is tuple
    sections = RoPE(sections=kind([2, 3, 3]))
    assert {RoPE(sections=(2, 3, 3)): 1}[sections] == 1


def test_embeddings_with_other_numbers_differ():
    for rope in ROPES.values():
        assert RoPE(1000.0, 0.5, scaling=rope.scaling) != rope
    assert LongRoPE(FACTORS, 1.2) != LongRoPE(FACTORS[::-1], 1.2)
    assert RoPE(sections=(2, 3, 3)) != RoPE(sections=(3, 3, 2))
    assert Linear(2.0) != NTK(2.0)
