"""Temporary: folds mapped axes into the batch."""

import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def partitioned(function, inputs, outputs, may_be_split=False):
    @custom_vmap
    def run(*arrays):
        return function(*arrays)

    @run.def_vmap
    def fold(size, is_mapped, *arrays):
        batch = next(
            x.shape[int(m)]
            for x, m, a in zip(arrays, is_mapped, inputs)
            if a.startswith("B T")
        )

        def one(x, mapped, axes):
            rank = len(axes.split())
            if not mapped:
                if (
                    x.shape[0] == 1
                    and batch * size != 1
                    and x.ndim == 4
                    and axes == "B N T S"
                ):
                    return x
                x = jnp.broadcast_to(x[None], (size, *x.shape))
            if x.shape[1] != batch:
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            return x.reshape(-1, *x.shape[2:])

        folded = [one(*a) for a in zip(arrays, is_mapped, inputs)]
        results = run(*folded)
        results = [x.reshape(size, -1, *x.shape[1:]) for x in results]
        return results, [True] * len(results)

    return run
