"""The all_gather strategy: every rank gathers all keys and values, and attends from its own queries.

Communication is `lax.all_gather` along the context axis; the backward gathers again rather than keep S rows a layer
alive, and sums the gradients by a reduce-scatter in float32. Tested in tests/impl/test_strategies.py.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from impl import layout as layouts
from impl import local_attention
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands, Received, Strategy
from impl.wide_sums import kept_wide


def all_gather(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays whose K and V are gathered on every rank; returns (out, lse)."""
    return sharded_attention(operands, Strategy(_forward, _backward), layer, mesh)


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    out, lse = local_attention.forward(_gathered(operands, layer), layer)
    return out, lse, Received()


def _backward(
    operands: Operands,
    received: Received,
    cotangents: RowCotangents,
    layer: Layer,
) -> LocalGradients:
    del received  # Nothing was kept: the rows are gathered again.
    gradients = local_attention.backward(_gathered(operands, layer), cotangents, layer)
    return gradients._replace(
        dkey=_home(operands.key, gradients.dkey, layer), dvalue=_home(operands.value, gradients.dvalue, layer)
    )


def _gathered(operands: Operands, layer: Layer) -> KernelOperands:
    rank = lax.axis_index(layer.context_axis)
    ids = operands.segment_ids
    return KernelOperands(
        operands.query,
        _gather(operands.key, layer),
        _gather(operands.value, layer),
        layouts.rank_positions(layer.layout, layer.seq_len, layer.context_parallelism, rank),
        jnp.arange(layer.seq_len, dtype=jnp.int32),
        ids,
        None if ids is None else _gather(ids, layer),
        operands.sinks,
    )


def _gather(rows: Array, layer: Layer) -> Array:
    """[batch, rows of this rank, …] → [batch, rows of all ranks, …] in position order: kernels can then skip blocks."""
    # The gathered axis stands first, so that its transpose is a reduce-scatter on TPU and not an all-reduce.
    by_rank = jnp.moveaxis(lax.all_gather(rows, layer.context_axis), 0, 1)  # [batch, rank, row, …]
    gathered = by_rank.reshape(rows.shape[0], layer.seq_len, *rows.shape[2:])
    return layouts.restore(gathered, axis=1, layout=layer.layout, context_parallelism=layer.context_parallelism)


def _home(rows: Array, gradient: Array, layer: Layer) -> Array:
    """The transpose of gathering: each rank receives the sum of all ranks' gradients of its own rows."""
    aval = jax.ShapeDtypeStruct(rows.shape, accumulation_dtype(rows.dtype))
    (home,) = jax.linear_transpose(lambda own: _gather(own, layer), aval)(gradient)
    return kept_wide(home, layer.context_axis)
