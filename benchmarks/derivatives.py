"""Measures time and memory of derivatives of every kind.

    python benchmarks/derivatives.py [--lengths 2048,8192] [--by blockwise,xla]
                                     [--seconds S | --rounds N] [--out
                                     benchmarks/results/NAME]

One causal head of size 64, float32. Derivatives are taken with respect to query, key
and value together, along given directions.

Columns:
  spread      distance between the quartiles, in % of the median
  x           milliseconds as a multiple of those of the forward pass
  MiB         temporaries (jax's programs say)
  compile     seconds to trace and compile
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

from flax_mha import dot_product_attention

HEAD_DIM = 64
COLUMNS = {
    "length": "T",
    "by": "by",
    "implementation": "derivative",
    "ms": "ms",
    "spread": "spread",
    "to_forward": "x",
    "temporaries_mib": "MiB",
    "compile_s": "compile",
    "note": "",
}
Arrays = tuple[jax.Array, jax.Array, jax.Array]  # query, key, value
Loss = Callable[[Arrays], jax.Array]


def forward(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    return loss(arrays)


def gradient(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    return jax.grad(loss)(arrays)


def tangent(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    return jax.jvp(loss, (arrays,), (along,))


def hessian_vector_product(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    return jax.jvp(jax.grad(loss), (arrays,), (along,))


def gradient_of_a_jvp(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    return jax.grad(lambda arrays: jax.jvp(loss, (arrays,), (along,))[1])(arrays)


def gradient_of_a_gradient(loss: Loss, arrays: Arrays, along: Arrays) -> Any:
    def slope(arrays: Arrays) -> jax.Array:
        gradients = jax.grad(loss)(arrays)
        products = jax.tree.map(jnp.vdot, gradients, along)
        return sum(products)

    return jax.grad(slope)(arrays)


FORWARD = "forward pass"
DERIVATIVES = {
    FORWARD: forward,
    "gradient": gradient,
    "`jax.jvp`": tangent,
    "Hessian-vector product (jvp-of-grad)": hessian_vector_product,
    "gradient of a jvp": gradient_of_a_jvp,
    "gradient of a gradient": gradient_of_a_gradient,
}


def peer(
    derivative: Callable[..., Any], length: int, implementation: str, memory: float
) -> measure.Ready:
    rng = np.random.default_rng(0)
    # The arrays, the directions, and the weights of the loss.
    shape = (7, 1, length, 1, HEAD_DIM)
    drawn = [jnp.asarray(x) for x in rng.standard_normal(shape, np.float32)]
    arrays = tuple(drawn[:3])
    along = tuple(drawn[3:6])

    def call(arrays: Arrays, along: Arrays, weights: jax.Array) -> Any:
        def loss(arrays: Arrays) -> jax.Array:
            output = dot_product_attention(
                *arrays, is_causal=True, implementation=implementation
            )
            return jnp.vdot(weights, output)

        return derivative(loss, arrays, along)

    return measure.compiled(call, arrays, along, drawn[6], memory=memory)


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--lengths", type=measure.numbers, default=[2048, 8192])
    parser.add_argument("--by", type=measure.names, default=["blockwise", "xla"])
    options = parser.parse_args()
    cells = list(itertools.product(options.lengths, options.by))
    with measure.Report("Derivatives, one causal head", COLUMNS, options) as report:
        for length, implementation in report.each(cells):
            peers = {}
            for name, derivative in DERIVATIVES.items():
                peers[name] = functools.partial(
                    peer, derivative, length, implementation, memory=options.memory
                )
            results = measure.compare(peers, options, report.say)
            measure.ratios(results, FORWARD, "to_forward")
            report.add({"length": length, "by": implementation}, results)


if __name__ == "__main__":
    main()
