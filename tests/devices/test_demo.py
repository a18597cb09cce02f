"""The demo's training step on a mesh: the losses of one device, in less memory."""

import functools
import math
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train_demo import checkpoint, mesh
from train_demo.data import FIRST
from train_demo.model import blueprint
from train_demo.settings import Layout, Settings
from train_demo.update import compiled, first_state, make_update

pytest_plugins = ["demo_fixtures"]
pytestmark = pytest.mark.usefixtures("rules_of_users")
STEPS = 20
VOCABULARY = 31
SIZES = {
    "steps": STEPS,
    "batch_size": 32,
    "context_length": 16,
    "layers": 1,
    "heads": 4,
    "features": 32,
}
SETTINGS = Settings(optimizer="adamw", learning_rate=4e-3, **SIZES)
MUON = Settings(optimizer="muon", learning_rate=0.03, **SIZES)
# A loss is a mean of so many float32 numbers. If they are equal, as before the first
# step, each addition may round in the same direction.
ROUNDING = SETTINGS.batch_size * SETTINGS.context_length * 2.0**-24
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 2000).astype(np.int32)
PACKED = TEXT.copy()
PACKED[::7] |= FIRST  # each window holds parts of several documents
LAYOUTS = {
    "alone": Layout(data_parallel=1),
    "fsdp": Layout(fsdp=8),
    "accumulate": Layout(data_parallel=2, fsdp=4, accumulate=4, remat=True),
    "tensor": Layout(data_parallel=2, tensor=4),
    "context": Layout(data_parallel=2, context=4),
    "mixed": Layout(data_parallel=2, fsdp=2, tensor=2),
}


class Seen(NamedTuple):
    losses: np.ndarray
    held: int  # bytes of parameters and optimizer state on a device
    hlo: str


@functools.cache
def initial_state(settings):
    return jax.jit(lambda: first_state(VOCABULARY, settings))()


@functools.cache
def seen(name, settings, packed):
    layout = LAYOUTS[name]
    num_devices = 1 if name == "alone" else 8
    over = mesh.make(layout.sizes(num_devices, settings))
    structure, _ = blueprint(VOCABULARY, settings, layout)
    with mesh.use(over):
        shardings = mesh.shardings(over, initial_state(settings))
        state = jax.tree.map(jnp.copy, initial_state(settings))  # for it is donated
        state = jax.device_put(state, shardings)
        text = mesh.put(over, PACKED if packed else TEXT)
        update = compiled(
            make_update(structure, settings, layout, packed), over, shardings
        )
        program = update.lower(state, np.int32(1), text).compile()
        held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
        losses = []
        for step in range(1, STEPS + 1):
            state, loss = program(state, np.int32(step), text)
            losses.append(float(loss))
    return Seen(np.array(losses), held, program.as_text())


def reduced(hlo):
    """The sizes of all arrays in all-reduces."""
    for line in hlo.splitlines():
        shapes, found, _ = line.partition(" all-reduce(")
        if found:
            # A scalar has no sizes.
            for axes in re.findall(r"\w\[([\d,]*)\]", shapes):
                yield math.prod(int(n) for n in axes.split(",") if n)


@pytest.mark.parametrize(
    ("name", "settings", "packed"),
    [
        ("fsdp", SETTINGS, False),
        ("accumulate", SETTINGS, False),
        ("tensor", MUON, True),
        ("context", MUON, True),
    ],
)
def test_the_losses_of_one_device_at_every_step(name, settings, packed):
    one = seen("alone", settings, packed).losses
    np.testing.assert_allclose(seen(name, settings, packed).losses, one, rtol=ROUNDING)
    assert one[-1] < one[0] - 0.05  # it learns


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixed", "gqa"),
        ("mixed", "gated"),
        ("mixed", "sinks"),
        ("mixed", "latent"),
        ("mixed", "blocks"),
        ("context", "window"),
        ("context", "latent"),
    ],
)
def test_each_kind_of_attention_has_the_losses_of_one_device(name, kind):
    settings = replace(MUON, attention=kind)
    one = seen("alone", settings, True).losses
    np.testing.assert_allclose(seen(name, settings, True).losses, one, rtol=ROUNDING)


def test_fsdp_holds_an_eighth_and_sends_no_activations():
    split = seen("fsdp", SETTINGS, False)
    alone = seen("alone", SETTINGS, False)
    assert split.held <= alone.held / 7
    largest_parameter = 4 * SETTINGS.features**2
    activations = SETTINGS.batch_size // 8 * SETTINGS.context_length * SETTINGS.features
    sizes = {*reduced(split.hlo)}
    assert largest_parameter in sizes
    assert max(sizes) == largest_parameter
    assert activations not in sizes


def test_a_checkpoint_is_restored_onto_any_mesh(tmp_path):
    state = initial_state(SETTINGS)
    fsdp = mesh.make(LAYOUTS["fsdp"].sizes(8, SETTINGS))
    tensor = mesh.make(LAYOUTS["tensor"].sizes(8, SETTINGS))
    alone = mesh.make(LAYOUTS["alone"].sizes(1, SETTINGS))
    with checkpoint.manager(tmp_path) as checkpoints:
        split = jax.device_put(state, mesh.shardings(fsdp, state))
        checkpoint.save(checkpoints, 1, split)
        for over in (fsdp, tensor, alone):
            step, found = checkpoint.restore_newest(
                tmp_path, state, over=over, say=pytest.fail
            )
            assert step == 1
            jax.tree.map(np.testing.assert_array_equal, found, state)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, found)
            assert shardings == mesh.shardings(over, state)
