"""One call of a layer's local kernel on one rank, whichever kernel and head mapping the layer has.

Runs inside `jax.shard_map`, without collectives. Tested through the strategies, and in tests/impl/test_kernels.py.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from impl import heads
from impl.kernels import splash, xla
from impl.kernels.interface import KernelConfig, KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer

KERNELS: dict[str, ModuleType] = {"xla": xla, "splash": splash}


class Launched(NamedTuple):
    """A kernel call that has been issued: `result` is raw, for `finished` or `finished_backward` to read."""

    result: Any
    operands: KernelOperands
    config: KernelConfig
    cotangents: RowCotangents | None = None
    selected: KernelOperands | None = None


def forward(
    operands: KernelOperands, layer: Layer, key_offset: int | None = None
) -> tuple[Float[Array, "batch rows num_query_heads value_dim"], Float[Array, "batch rows num_query_heads"]]:
    """out and lse in the accumulation dtype; operands' key and value hold the kv heads chosen by `heads.select`."""
    return finished(launched(operands, layer, key_offset), layer)


def launched(operands: KernelOperands, layer: Layer, key_offset: int | None = None) -> Launched:
    """The first half of `forward`: the kernel alone, so that a strategy can order it before or after a transfer."""
    config = replace(layer.kernel_config, key_offset=key_offset)
    expanded = _expanded(operands, layer)
    return Launched(KERNELS[layer.kernel].launch(expanded, config), expanded, config)


def finished(call: Launched, layer: Layer) -> tuple[Array, Array]:
    """The second half of `forward`."""
    return KERNELS[layer.kernel].finish(call.result, call.operands, call.config)


def backward(
    operands: KernelOperands, cotangents: RowCotangents, layer: Layer, key_offset: int | None = None
) -> LocalGradients:
    """Gradients in the accumulation dtype."""
    return finished_backward(launched_backward(operands, cotangents, layer, key_offset), layer)


def launched_backward(
    operands: KernelOperands, cotangents: RowCotangents, layer: Layer, key_offset: int | None = None
) -> Launched:
    """The first half of `backward`: the kernels alone."""
    config = replace(layer.kernel_config, key_offset=key_offset)
    expanded = _expanded(operands, layer)
    raw = KERNELS[layer.kernel].launch_backward(expanded, cotangents, config)
    return Launched(raw, expanded, config, cotangents, operands)


def finished_backward(call: Launched, layer: Layer) -> LocalGradients:
    """The second half of `backward`."""
    assert call.cotangents is not None, "only launched_backward makes such a call"
    assert call.selected is not None, "only launched_backward makes such a call"
    kernel = KERNELS[layer.kernel]
    gradients = kernel.finish_backward(call.result, call.operands, call.cotangents, call.config)
    if layer.heads.aligned:
        return gradients
    return gradients._replace(
        dkey=_collapsed(gradients.dkey, call.selected.key, layer),
        dvalue=_collapsed(gradients.dvalue, call.selected.value, layer),
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
