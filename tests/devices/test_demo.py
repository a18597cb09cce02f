"""The demo's training step on a mesh: the losses of one device, in less memory, as much as was planned."""

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from train_demo import checkpoint, memory_estimate, mesh
from train_demo.data import FIRST
from train_demo.model import blueprint, initial_params
from train_demo.settings import Layout, Settings
from train_demo.update import State, compiled, make_optimizer, make_update

STEPS, VOCABULARY = 20, 31
SETTINGS = Settings(
    steps=STEPS, batch_size=32, context_length=16, layers=1, heads=4, features=32, optimizer="adamw", learning_rate=4e-3
)
MUON = replace(SETTINGS, optimizer="muon", learning_rate=0.03)
# A loss is a mean of so many float32 numbers. Where these are alike, as before the first step, each addition may round
# in the same direction.
ROUNDING = SETTINGS.batch_size * SETTINGS.context_length * 2.0**-24
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 2000).astype(np.int32)
LAYOUTS = {
    "alone": Layout(data_parallel=1),
    "data": Layout(data_parallel=8),
    "fsdp": Layout(fsdp=8),
    "tensor": Layout(data_parallel=2, tensor=4),
    "accumulate": Layout(data_parallel=2, fsdp=4, accumulate=4, remat=True),
    "context": Layout(data_parallel=2, context=4),
}


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Seen(NamedTuple):
    losses: np.ndarray
    held: int  # bytes of parameters and optimizer state on a device
    hlo: str
    memory: int  # bytes on a device, as XLA says


def seen(name, settings=SETTINGS):
    return _seen(name, settings)  # one entry of the cache, whether the settings are named or not


@functools.cache
def _seen(name, settings):
    layout = LAYOUTS[name]
    over = mesh.make(layout.sizes(1 if name == "alone" else 8, settings))
    structure, shapes = blueprint(VOCABULARY, settings, layout)
    optimizer = make_optimizer(settings)
    with mesh.use(over):
        shardings = mesh.shardings(over, State(shapes, jax.eval_shape(optimizer.init, shapes)))
        params_at, optimizer_at = shardings or (None, None)
        params = initial_params(VOCABULARY, settings, params_at)
        state = State(params, jax.jit(optimizer.init, out_shardings=optimizer_at)(params))
        text = mesh.put(over, TEXT)
        update = compiled(make_update(structure, settings, layout), shardings)
        program = update.lower(state, np.int32(1), text).compile()
        held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
        losses = []
        for step in range(1, STEPS + 1):
            state, loss = program(state, np.int32(step), text)
            losses.append(float(loss))
    memory = program.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Seen(np.array(losses), held, program.as_text(), used - memory.alias_size_in_bytes)


def reduced(hlo):
    """The sizes of the arrays in each all-reduce, and whether it stands in a loop."""
    for line in hlo.splitlines():
        shapes, found, rest = line.partition(" all-reduce(")
        if found:
            sizes = re.findall(r"\w\[([\d,]*)\]", shapes)
            yield [int(np.prod([int(n) for n in size.split(",") if n])) for size in sizes], "/while/body" in rest


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, SETTINGS) for name in list(LAYOUTS)[1:]), *((name, MUON) for name in ("fsdp", "tensor"))],
)
def test_the_losses_of_one_device_at_every_step(name, settings):
    np.testing.assert_allclose(seen(name, settings).losses, seen("alone", settings).losses, rtol=ROUNDING)
    assert seen("alone", settings).losses[-1] < seen("alone", settings).losses[0] - 0.05  # it learns


def test_fsdp_holds_an_eighth_and_sends_no_activations():
    assert seen("fsdp").held <= seen("alone").held / 7
    largest_parameter = 4 * SETTINGS.features**2
    activations = SETTINGS.batch_size // 8 * SETTINGS.context_length * SETTINGS.features
    shapes = {size for sizes, _ in reduced(seen("fsdp").hlo) for size in sizes}
    assert largest_parameter in shapes
    assert max(shapes) == largest_parameter
    assert activations not in shapes


@functools.cache
def planned(name):
    number = 1 if name == "alone" else 8
    return memory_estimate.estimate(SETTINGS, LAYOUTS[name], VOCABULARY, len(TEXT), jax.devices()[:number])


@pytest.mark.parametrize("name", ["fsdp", "tensor", "accumulate"])
def test_the_plan_knows_the_memory(name):
    memory = planned(name)
    assert sum(memory.values()) == pytest.approx(seen(name).memory, rel=0.15)
    assert memory["state and text"] == seen(name).held + TEXT.nbytes + 4  # and the number of the step


def test_a_checkpoint_is_restored_onto_any_mesh(tmp_path):
    _, shapes = blueprint(VOCABULARY, SETTINGS)

    def shardings(layout):
        return mesh.shardings(mesh.make(layout.sizes(8, SETTINGS)), shapes)

    params = initial_params(VOCABULARY, SETTINGS, shardings(Layout(data_parallel=2, fsdp=4)))
    whole = mesh.fetch(mesh.make(Layout(data_parallel=2, fsdp=4).sizes(8, SETTINGS)), params)
    checkpoint.save(tmp_path, 1, {"params": whole})
    for layout in (Layout(fsdp=8), Layout(data_parallel=2, tensor=4), Layout(data_parallel=4, fsdp=2), None):
        like, at = shapes, None
        if layout is not None:
            at = shardings(layout)
            like = mesh.placed(mesh.make(layout.sizes(8, SETTINGS)), shapes)
        found = checkpoint.restore_newest(tmp_path, {"params": like}, pytest.fail)[1]["params"]
        for leaf, saved in zip(*map(jax.tree.leaves, (found, params)), strict=True):
            np.testing.assert_array_equal(leaf, saved, strict=True)
        assert at is None or all(
            leaf.sharding == there for leaf, there in zip(*map(jax.tree.leaves, (found, at)), strict=True)
        )


@functools.cache
def packed_losses(layout, devices):
    text = TEXT.copy()
    text[::7] |= FIRST
    over = mesh.make(layout.sizes(devices, SETTINGS))
    structure, _ = blueprint(VOCABULARY, SETTINGS, layout)
    with mesh.use(over):
        params = initial_params(VOCABULARY, SETTINGS)
        params = params if over is None else jax.device_put(params, mesh.shardings(over, params))
        state, found = State(params, make_optimizer(SETTINGS).init(params)), []
        update = compiled(make_update(structure, SETTINGS, layout=layout, packed=True))
        for step in range(1, 4):
            state, loss = update(state, step, mesh.put(over, text))
            found.append(float(loss))
    return found


@pytest.mark.parametrize("layout", [LAYOUTS["context"], LAYOUTS["accumulate"]], ids=["context", "accumulate"])
def test_packed_documents_have_the_losses_of_one_device(layout):
    """Each window holds parts of several documents."""
    np.testing.assert_allclose(packed_losses(layout, 8), packed_losses(LAYOUTS["alone"], 1), rtol=ROUNDING)
