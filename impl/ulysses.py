"""The ulysses strategy: heads are exchanged for rows: each rank attends over the whole sequence with some heads.

Communication is `lax.all_to_all` along the context axis (head_exchange.py). kv heads fewer than ranks are sent to each
rank that reads them. Tested in tests/impl/test_strategies.py.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from impl import layout as layouts
from impl import local_attention
from impl.head_exchange import with_head_exchange
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands, Received, Strategy


def ulysses(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays, each rank computing some heads over the whole sequence; returns (out, lse)."""
    return sharded_attention(operands, with_head_exchange(_WHOLE_SEQUENCE, over="context"), layer, mesh)


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    result = local_attention.forward(_in_position_order(operands, layer), layer, key_offset=0)
    out, lse = (_reordered(rows, layer) for rows in result)
    return out, lse, Received()


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    del received
    rows = jax.tree.map(lambda array: _restored(array, layer), cotangents)
    gradients = local_attention.backward(_in_position_order(operands, layer), rows, layer, key_offset=0)
    return gradients._replace(
        dquery=_reordered(gradients.dquery, layer),
        dkey=_reordered(gradients.dkey, layer),
        dvalue=_reordered(gradients.dvalue, layer),
    )


_WHOLE_SEQUENCE = Strategy(_forward, _backward)


def _in_position_order(operands: Operands, layer: Layer) -> KernelOperands:
    # In position order the mask is a plain band, which kernels know how to skip.
    positions = jnp.arange(layer.seq_len, dtype=jnp.int32)
    ids = None if operands.segment_ids is None else _restored(operands.segment_ids, layer)
    return KernelOperands(
        _restored(operands.query, layer),
        _restored(operands.key, layer),
        _restored(operands.value, layer),
        positions,
        positions,
        ids,
        ids,
        operands.sinks,
    )


def _restored(rows: Array, layer: Layer) -> Array:
    return layouts.restore(rows, axis=1, layout=layer.layout, context_parallelism=layer.context_parallelism)


def _reordered(rows: Array, layer: Layer) -> Array:
    return layouts.reorder(rows, axis=1, layout=layer.layout, context_parallelism=layer.context_parallelism)
