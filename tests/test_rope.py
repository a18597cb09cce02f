"""`apply_rope` against float64, and under transformations."""

import dataclasses
import math

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
        pairs = [x[..., :size:2], x[..., 1:size:2]]
    else:
        pairs = np.split(x[..., :size], 2, axis=-1)
    turned = (
        (pairs[0] + 1j * pairs[1])
        * np.exp(1j * angles[..., None, :])
        * rope.attention_factor
    )
    turned = np.stack(
        [turned.real, turned.imag], axis=-1 if rope.interleaved else -2
    ).reshape(*x.shape[:-1], size)
    return np.concatenate([turned, x[..., size:]], axis=-1)


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
    mapped = jax.vmap(lambda x, positions: apply_rope(x, positions, rope))(x, POSITIONS)
    for got in (apply_rope(x, POSITIONS, rope), mapped):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(
            got, want, rtol=0, atol=tolerance(X, POSITIONS, rope, 2.0**-24)
        )
    with jax.enable_x64(True):
        got = jax.jit(apply_rope, static_argnums=2)(
            jnp.asarray(X), POSITIONS.astype(np.int64), rope
        )
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(
        got, want, rtol=0, atol=tolerance(X, POSITIONS, rope, 2.0**-53)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["yarn", "partial, interleaved"])
def test_half_precision_is_rounded_once(name, dtype):
    x = jnp.asarray(X, dtype)
    rope = ROPES[name]
    got = apply_rope(x, POSITIONS, rope)
    want = apply_rope(x.astype(jnp.float32), POSITIONS, rope)
    assert got.dtype == dtype
    np.testing.assert_array_equal(
        got.astype(jnp.float32), want.astype(dtype).astype(jnp.float32)
    )


@pytest.mark.core
def test_frequencies_by_hand():
    plain = RoPE(1000.0).frequencies(H)
    np.testing.assert_allclose(plain, [1000 ** (-i / 8) for i in range(8)], rtol=1e-15)
    assert plain.dtype == np.float64
    linear, ntk, longrope = (
        ROPES[name].frequencies(H) / plain for name in ("linear", "ntk", "longrope")
    )
    np.testing.assert_allclose(linear, np.full(8, 1 / 4), rtol=1e-15)
    np.testing.assert_allclose(longrope, 1 / np.array(FACTORS), rtol=1e-15)
    np.testing.assert_allclose(ntk[[0, -1]], [1, 1 / 4], rtol=1e-14)


@pytest.mark.parametrize(
    ("original_max_position", "kept"),
    [(64, [1, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]), (6, [1, 0, 0, 0, 0, 0, 0, 0])],
)
def test_yarn_after_a_short_pretraining(original_max_position, kept):
    ratio = RoPE(1000.0, scaling=YaRN(4.0, original_max_position)).frequencies(
        H
    ) / RoPE(1000.0).frequencies(H)
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


SECTIONS = {
    "contiguous": (RoPE(100.0, sections=(2, 3, 3)), [0, 0, 1, 1, 1, 2, 2, 2], range(8)),
    "interleaved": (
        RoPE(100.0, sections=(4, 2, 2), section_layout="interleaved"),
        [0, 1, 2, 0, 1, 2, 0, 0],
        range(8),
    ),
    "axial": (
        RoPE(100.0, sections=(4, 4), section_layout="axial"),
        [0] * 4 + [1] * 4,
        [0, 2, 4, 6] * 2,
    ),
    "axial of two sizes": (
        RoPE(100.0, sections=(4, 2, 2), section_layout="axial"),
        [0] * 4 + [1, 1, 2, 2],
        None,
    ),
    "strided": (
        RoPE(100.0, sections=(4, 4), section_layout="axial_strided"),
        [0] * 4 + [1] * 4,
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
    x = RNG.standard_normal((2, 5, 3, 2 * H if "fraction" in CHANGES[change] else H))
    rope = dataclasses.replace(rope, **CHANGES[change])
    assert rope.coordinates(x.shape[-1]).tolist() == of_pairs
    plain = dataclasses.replace(rope, sections=None, section_layout="contiguous")
    if of_frequencies is not None:
        want = plain.frequencies(x.shape[-1])[[*of_frequencies]]
        np.testing.assert_allclose(rope.frequencies(x.shape[-1]), want, rtol=1e-14)
    positions = RNG.integers(-50, 300, (2, 5, len(rope.sections)))
    want = rotated(x, positions[..., of_pairs] * rope.frequencies(x.shape[-1]), rope)

    @jax.jit
    def run(x, positions):
        output, vjp = jax.vjp(lambda x: apply_rope(x, positions, rope), x)
        return (
            output,
            jax.vmap(lambda x, p: apply_rope(x, p, rope))(x, positions),
            vjp(output)[0],
        )

    output, mapped, back = run(jnp.asarray(x, jnp.float32), jnp.asarray(positions))
    for got in (output, mapped):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-4)
    # The transpose turns back.
    size = np.where(np.arange(x.shape[-1]) < H, rope.attention_factor**2, 1)
    np.testing.assert_allclose(back, x * size, rtol=0, atol=1e-5)
    of_all = apply_rope(jnp.asarray(x, jnp.float32), positions[1], rope)
    np.testing.assert_array_equal(
        of_all[1], apply_rope(jnp.asarray(x, jnp.float32), positions, rope)[1]
    )


def test_positions_of_any_shape_and_integer_dtype():
    """A JAX array that `jax.jit` captures is known, but JAX arrays that are computed
    from it there are not.
    """
    x = jnp.asarray(X, jnp.float32)
    same = np.testing.assert_array_equal
    for row in range(2):
        want = apply_rope(x, POSITIONS, RoPE())[row]
        same(apply_rope(x, POSITIONS[row], RoPE())[row], want)
        same(apply_rope(x[row], POSITIONS[row], RoPE()), want)
    same(
        apply_rope(x[:, None], POSITIONS[:, None], RoPE())[:, 0],
        apply_rope(x, POSITIONS, RoPE()),
    )
    positions = jnp.arange(5) + 100
    want = apply_rope(x, positions, RoPE())
    for dtype in (np.int8, np.int16, np.uint8, np.uint32):
        same(apply_rope(x, np.asarray(positions, dtype), RoPE()), want, str(dtype))
    np.testing.assert_allclose(
        jax.jit(lambda x: apply_rope(x, positions, RoPE()))(x), want, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["yarn", "partial, interleaved"])
def test_empty(name):
    @jax.jit
    def run(arrays, positions):
        outputs = [
            apply_rope(x, p, ROPES[name])
            for x, p in zip(arrays, positions, strict=True)
        ]
        return outputs, jax.grad(
            lambda x: apply_rope(x, positions[0], ROPES[name]).sum()
        )(arrays[0])

    arrays = [
        np.zeros(shape, np.float32)
        for shape in ((2, 0, 3, H), (0, 5, 3, H), (0, 3, H), (2, 5, 0, H))
    ]
    outputs, gradient = run(arrays, [np.zeros(x.shape[:-2], np.int32) for x in arrays])
    assert [x.shape for x in outputs] == [x.shape for x in arrays]
    assert gradient.shape == arrays[0].shape


def test_symbolic_head_size_is_refused():
    (size,) = export.symbolic_shape("size")
    shapes = (
        jax.ShapeDtypeStruct((5, 3, size), jnp.float32),
        jax.ShapeDtypeStruct((5,), jnp.int32),
    )
    with pytest.raises(ValueError, match=r"x must have a static head size"):
        export.export(jax.jit(lambda x, p: apply_rope(x, p, RoPE())))(*shapes)


def test_embeddings_are_values():
    """Equality and hashes depend on the numbers, whatever the type of their sequence."""
    for rope in ROPES.values():
        copy = dataclasses.replace(
            rope, scaling=rope.scaling and dataclasses.replace(rope.scaling)
        )
        assert {rope: 1}[copy] == 1
        assert RoPE(1000.0, 0.5, scaling=rope.scaling) != rope
    for kind in (list, tuple, np.array, iter):
        assert LongRoPE(kind(FACTORS), 1.2) == SCALINGS["longrope"]
        assert type(LongRoPE(kind(FACTORS)).factors) is tuple
        assert {RoPE(sections=(2, 3, 3)): 1}[RoPE(sections=kind([2, 3, 3]))] == 1
    assert LongRoPE(FACTORS, 1.2) != LongRoPE(FACTORS[::-1], 1.2)
    assert RoPE(sections=(2, 3, 3)) != RoPE(sections=(3, 3, 2))
    assert Linear(2.0) != NTK(2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RoPE().base = 1.0
