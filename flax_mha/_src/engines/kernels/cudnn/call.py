"""cuDNN's fused attention as two operations, `forward` and `backward`: XLA's custom
calls, by `jax.ffi`.

`jax.nn.dot_product_attention` makes the same calls; `differences_from_jax` compares
them. But its log-sum-exp has no gradient, and its backward pass always gets the results
of its own forward pass. cuDNN's backward pass takes both as operands::

    P = exp(scale Q K^T + bias - lse)
    dS = P (dO V^T - rowsum(dO O))

So given those of a softmax over more than these keys, such as a sink, it returns these
keys' part of the gradients.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from flax_mha._src.core.tracing import by_itself
from flax_mha._src.engines.kernels.partitioned import partitioned


class Settings(NamedTuple):
    """The static part of a call of cuDNN."""

    scale: float
    # Whether queries attend to no later key; cuDNN has no other limit on the right.
    is_causal: bool = False
    # How many keys before itself a causal query attends to; None for all.
    left: int | None = None
    # Whether `backward` also computes the gradient of the bias.
    bias_gradient: bool = False
    # Whether the log-sum-exp gets a gradient (`attend.py`).
    lse_gradient: bool = False
    # Whether XLA's partitioner may split the arrays over devices.
    may_be_split: bool = False


class Operands(NamedTuple):
    """The arrays of a call of cuDNN, or their types. Keys past a sequence's length are
    hidden, and rows past it are not computed.
    """

    query: Float[Array, "B t N H"]
    key: Float[Array, "B s K H"]
    value: Float[Array, "B s K H"]
    bias: Float[Array, "#B #N t s"] | None = None
    query_lengths: Int[Array, " B"] | None = None
    key_lengths: Int[Array, " B"] | None = None


def described(*shape: int, dtype: DTypeLike) -> Any:
    """Describes an operand by shape and dtype, in place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


Rows = Float[Array, "B N t"]
AXES = ("B T N H", "B S K H", "B S K H", "#B #N T S", "B", "B")  # of `Operands`
AXES_OF_RESULTS = ("B T N H", "B N T")  # output and log-sum-exp


def forward(
    settings: Settings, operands: Operands
) -> tuple[Float[Array, "B t N H"], Rows]:
    """Computes output and log-sum-exp. A row whose keys are all hidden is arbitrary."""
    call = call_forward
    if differences_from_jax():
        call = _forward_of_jax
    output, lse = _over_batch(call, settings, (operands,), AXES_OF_RESULTS)
    return output, lse


def backward(
    settings: Settings, operands: Operands, output: Array, lse: Rows, d_output: Array
) -> Operands:
    """Computes the gradients of query, key, value and, with `bias_gradient`, bias."""
    call = call_backward
    if differences_from_jax():
        call = _backward_of_jax
    arguments = (operands, output, lse, d_output)
    axes = AXES[: 3 + settings.bias_gradient]
    return Operands(*_over_batch(call, settings, arguments, axes))


def _over_batch(
    call: Callable[..., list[Array]],
    settings: Settings,
    arguments: tuple,
    axes_of_results: Sequence[str],
) -> list[Array]:
    """Calls `call(settings, *arguments)`, so that `jax.vmap` makes the batch larger,
    and XLA's partitioner splits batch and heads.
    """
    operands, *given = arguments
    # The last one is that of the output's cotangent.
    names = (*AXES, *AXES_OF_RESULTS, AXES[0])
    pairs = zip(names, (*operands, *given), strict=False)
    axes = [axes for axes, x in pairs if x is not None]
    arrays, structure = jax.tree.flatten(arguments)

    def call_flat(*arrays: Array) -> list[Array]:
        return call(settings, *jax.tree.unflatten(structure, arrays))

    run = partitioned(call_flat, axes, axes_of_results, settings.may_be_split)
    return run(*arrays)


# The custom calls ---------------------------------------------------------------------


def call_forward(settings: Settings, operands: Operands) -> list[Array]:
    """Makes the custom call of the forward pass."""
    batch, rows, heads, _ = operands.query.shape
    lse = described(batch, heads, rows, dtype=jnp.float32)
    config = _config(settings, operands, PRODUCTS)
    return _call("Softmax", config, operands, operands, [operands.query], [lse])


def call_backward(
    settings: Settings, operands: Operands, output: Array, lse: Array, d_output: Array
) -> list[Array]:
    """Makes the custom call of the backward pass."""
    query, key, value, bias, *lengths = operands
    arrays = [query, key, value, lse, d_output, bias, output, *lengths]
    others = []
    if settings.bias_gradient:
        others.append(bias)
    config = _config(settings, operands, PRODUCTS_BACKWARD)
    return _call(
        "SoftmaxBackward", config, operands, arrays, [query, key, value], others
    )


def _call(
    name: str,
    config: str,
    operands: Operands,
    arrays: Sequence[Array | None],
    by_head: list[Array],
    others: list[Any],
) -> list[Array]:
    """Makes a custom call with those of `arrays` that are given. Its results are like
    `by_head`, arrays [B, L, N, H], then like `others`.
    """
    if operands.bias is not None:
        name = f"ScaleBias{name}"
    # Inside `jax.shard_map`, results vary over the same mesh axes.
    varying = jax.typeof(operands.query).manual_axis_type
    count = len(by_head)
    # cuDNN computes [B, N, L, H] in the memory order of [B, L, N, H].
    types = []
    for x in by_head:
        batch, length, heads, size = x.shape
        types.append(described(batch, heads, length, size, dtype=x.dtype))
    # The last result is cuDNN's workspace.
    types += [*others, described(0, dtype=jnp.uint8)]
    call = jax.ffi.ffi_call(
        f"__cudnn$fmha{name}",
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying)
            for x in types
        ],
        output_layouts=[(0, 2, 1, 3)] * count + [None] * (len(others) + 1),
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    *results, _ = call(*(x for x in arrays if x is not None))
    return [jnp.swapaxes(x, 1, 2) for x in results[:count]] + results[count:]


# Of each product: the axis of the left and of the right operand that it contracts, and
# the left one's axis of heads. Scores have the axes [B, N, T, S], and all others
# [B, T, N, H].
PRODUCTS = {
    "bmm1": (3, 3, 2),  # S = Q K^T
    "bmm2": (3, 1, 1),  # O = P V
}
PRODUCTS_BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, 1),  # dK = dS^T Q
    "bmm1_grad_gemm2": (3, 1, 1),  # dQ = dS K
    "bmm2_grad_gemm1": (2, 1, 1),  # dV = P^T dO
    "bmm2_grad_gemm2": (3, 3, 2),  # dP = dO V^T
}
ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}


def _config(
    settings: Settings, operands: Operands, products: dict[str, tuple[int, int, int]]
) -> str:
    """Describes a call as XLA expects it (`CudnnfMHABackendConfig`), in JSON."""
    batch, rows, heads, _ = operands.query.shape
    columns = operands.key.shape[1]
    mask = ["PADDING"] if operands.key_lengths is not None else []
    if settings.is_causal:
        mask.append("CAUSAL")
    # How many keys a query attends to, with its own; 0 for all.
    window = 0
    if settings.left is not None:
        window = settings.left + 1
    scores = {
        "element_type": ELEMENT_TYPES[operands.query.dtype.name],
        "dimensions": [str(x) for x in (batch, heads, rows, columns)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }
    attention: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": settings.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "_".join(mask) or "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, (left, right, heads_of_left) in products.items():
        attention[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(heads_of_left)],
            "rhs_batch_dimensions": ["0", "2"],
        }
    config = {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}
    return json.dumps(config)


# Beside JAX's own calls ---------------------------------------------------------------


@functools.cache
def differences_from_jax() -> list[str]:
    """Compares these custom calls with those of `jax.nn.dot_product_attention`. If they
    differ, JAX makes the calls, and the reason against sinks and log-sum-exp is
    returned as a list.
    """
    return by_itself(_differences)


def _differences() -> list[str]:
    query = described(2, 256, 4, 64, dtype=jnp.bfloat16)
    key = described(2, 256, 2, 64, dtype=jnp.bfloat16)
    bias = described(2, 4, 256, 256, dtype=jnp.bfloat16)
    lengths = described(2, dtype=jnp.int32)
    # JAX always computes the gradient of a bias.
    with_bias_gradient = Settings(0.5, bias_gradient=True)
    examples = (
        (Settings(0.5, is_causal=True, left=31), Operands(query, key, key)),
        (Settings(0.5), Operands(query, key, key, None, lengths, lengths)),
        (with_bias_gradient, Operands(query, key, key, bias)),
        (with_bias_gradient, Operands(query, key, key, bias, lengths, lengths)),
    )
    for settings, operands in examples:
        ours = _custom_calls(settings, operands, call_forward, call_backward)
        theirs = _custom_calls(settings, operands, _forward_of_jax, _backward_of_jax)
        # The backward pass of JAX also runs the forward pass.
        if len(ours) != 2 or ours != theirs[:1] + theirs[2:]:
            return [
                "sinks and return_residual are not supported, because jax "
                f"{jax.__version__} calls cuDNN in a new way: use an older jax, or a "
                "newer flax_mha"
            ]
    return []


def _custom_calls(
    settings: Settings, operands: Operands, forward: Callable, backward: Callable
) -> list[tuple]:
    """Lists name, configuration, and types with layouts, of the custom calls of both
    passes.
    """

    def both(operands: Operands) -> Any:
        output, lse = forward(settings, operands)
        d_output = jnp.cos(output)
        return output, backward(settings, operands, output, lse, d_output)

    program = jax.jit(both).trace(operands).lower(lowering_platforms=("cuda",))
    calls = []
    pattern = r'@(__cudnn\$\w+)\(.*?backend_config = "(.*?)", (.*)'
    for name, config, types in re.findall(pattern, program.as_text()):
        known = json.loads(config.replace("\\22", '"'))
        calls.append((name, known, re.sub(r"%\w+(#\d+)?", "%", types)))
    return calls


def _of_jax(settings: Settings, operands: Operands, *arrays: Any) -> Any:
    window = None
    if settings.left is not None:
        window = (settings.left, 0)
    return jax.nn.dot_product_attention(
        *arrays,
        scale=settings.scale,
        is_causal=settings.is_causal,
        query_seq_lengths=operands.query_lengths,
        key_value_seq_lengths=operands.key_lengths,
        local_window_size=window,
        implementation="cudnn",
        return_residual=True,
    )


def _forward_of_jax(settings: Settings, operands: Operands) -> list[Array]:
    output, lse = _of_jax(settings, operands, *operands[:4])
    return [output, jnp.swapaxes(lse, 1, 2).astype(jnp.float32)]


def _backward_of_jax(
    settings: Settings, operands: Operands, output: Array, lse: Array, d_output: Array
) -> list[Array]:
    """Runs the forward pass again. Log-sum-exp and output must be those of the
    operands.
    """
    attend = functools.partial(_of_jax, settings, operands)
    (_, residual), pull = jax.vjp(attend, *operands[:4])
    gradients = pull((d_output, jnp.zeros_like(residual)))
    return list(gradients[: 3 + settings.bias_gradient])
