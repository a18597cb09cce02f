"""A run: what is trained, where it is computed and where it writes, and what follows from that."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
from flax import nnx
from rich.console import Console

from train_demo import mesh
from train_demo.data import Text
from train_demo.layout import Layout
from train_demo.model import Params, Transformer, blueprint, initial_params
from train_demo.run_folder import Config
from train_demo.update import State, make_optimizer


@dataclass(frozen=True)
class Run:
    """What a run is, where it is computed, and where it writes."""

    config: Config
    text: Text
    out: Path
    layout: Layout
    mesh: jax.sharding.Mesh | None  # None on one device
    console: Console
    write_samples: bool

    @cached_property
    def structure(self) -> nnx.GraphDef[Transformer]:
        """The model's, which parameters join to a model."""
        return self._blueprint[0]

    @cached_property
    def shapes(self) -> State:
        """The shapes of the state."""
        params = self._blueprint[1]
        return State(params, jax.eval_shape(make_optimizer(self.config.settings).init, params))

    @cached_property
    def shardings(self) -> State | None:
        """Where the arrays of the state lie; None on one device."""
        return None if self.mesh is None else mesh.shardings(self.mesh, self.shapes)

    @cached_property
    def alone(self) -> nnx.GraphDef[Transformer]:
        """The structure of the model on one device."""
        return blueprint(len(self.text.vocabulary), self.config.settings)[0]

    @cached_property
    def _blueprint(self) -> tuple[nnx.GraphDef[Transformer], Params]:
        return blueprint(len(self.text.vocabulary), self.config.settings, self.layout)

    def first_state(self) -> State:
        """The state before the first step."""

        def draw() -> State:
            params = initial_params(len(self.text.vocabulary), self.config.settings)
            return State(params, make_optimizer(self.config.settings).init(params))

        return jax.jit(draw, out_shardings=self.shardings)()
