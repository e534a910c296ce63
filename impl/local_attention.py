"""One call of a layer's local kernel on one rank, whichever kernel and head mapping the layer has.

Runs inside `jax.shard_map`, without collectives. Tested through the strategies, and in tests/impl/test_kernels.py.
"""

from dataclasses import replace
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from impl import heads
from impl.kernels import splash, xla
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer

KERNELS: dict[str, ModuleType] = {"xla": xla, "splash": splash}


def forward(
    operands: KernelOperands, layer: Layer, key_offset: int | None = None
) -> tuple[Float[Array, "batch rows num_query_heads value_dim"], Float[Array, "batch rows num_query_heads"]]:
    """out and lse in the accumulation dtype; operands' key and value hold the kv heads chosen by `heads.select`."""
    config = replace(layer.kernel_config, key_offset=key_offset)
    return KERNELS[layer.kernel].forward(_expanded(operands, layer), config)


def backward(
    operands: KernelOperands,
    cotangents: RowCotangents,
    layer: Layer,
    key_offset: int | None = None,
) -> LocalGradients:
    """Gradients in the accumulation dtype."""
    config = replace(layer.kernel_config, key_offset=key_offset)
    gradients = KERNELS[layer.kernel].backward(_expanded(operands, layer), cotangents, config)
    if layer.heads.aligned:
        return gradients
    return gradients._replace(
        dkey=_collapsed(gradients.dkey, operands.key, layer), dvalue=_collapsed(gradients.dvalue, operands.value, layer)
    )


def tensor_shard(layer: Layer) -> Int32[Array, ""]:
    """Index of this device's shard of query heads."""
    return jnp.int32(0) if layer.tensor_axis is None else lax.axis_index(layer.tensor_axis)


def _expanded(operands: KernelOperands, layer: Layer) -> KernelOperands:
    shard = tensor_shard(layer)
    return operands._replace(
        key=heads.expand(operands.key, layer.heads, shard), value=heads.expand(operands.value, layer.heads, shard)
    )


def _collapsed(gradient: Array, selected: Array, layer: Layer) -> Array:
    """Sums the gradients of a kv head's copies, in the accumulation dtype."""
    shard = tensor_shard(layer)
    aval = jax.ShapeDtypeStruct(selected.shape, accumulation_dtype(selected.dtype))
    (collapsed,) = jax.linear_transpose(lambda rows: heads.expand(rows, layer.heads, shard), aval)(gradient)
    return collapsed
