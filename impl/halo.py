"""The halo strategy: every chunk receives only the keys that its window reaches, from the ranks that hold them.

Communication is `lax.ppermute` along the context axis by the plan in exchange.py; gradients of received rows travel the
same way back, in float32. Tested in tests/impl/test_strategies.py and test_halo.py.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from impl import exchange, local_attention
from impl.exchange import HaloPlan
from impl.kernels.interface import KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer
from impl.sharded import sharded_attention
from impl.strategy import Operands, Received, Strategy


def halo(operands: Operands, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    """Attention of global arrays whose K and V reach the queries by halo exchange; returns (out, lse).

    A rank receives the rows of its halo once, in the forward; in the backward only their gradients travel, back home.
    """
    return sharded_attention(operands, Strategy(_forward, _backward), layer, mesh)


def plan_of(layer: Layer) -> HaloPlan:
    """The exchange of a layer with a window."""
    return exchange.halo_plan(layer.layout, layer.context_parallelism, layer.seq_len, layer.kernel_config.window)


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    plan = plan_of(layer)
    send = functools.partial(exchange.exchange, plan=plan, axis_name=layer.context_axis)
    ids = operands.segment_ids
    received = Received(send(operands.key), send(operands.value), () if ids is None else send(ids))
    results = [
        local_attention.forward(chunk, layer, key_offset=-run.rows_before)
        for chunk, run in zip(_chunks(operands, received, layer, plan), plan.key_runs, strict=True)
    ]
    out, lse = (_joined(parts) for parts in zip(*results, strict=True))
    return out, lse, received


def _backward(
    operands: Operands,
    received: Received,
    cotangents: RowCotangents,
    layer: Layer,
) -> LocalGradients:
    plan = plan_of(layer)
    chunk_cotangents = zip(*(_split(array, plan) for array in cotangents), strict=True)
    chunks = _chunks(operands, received, layer, plan)
    gradients = [
        local_attention.backward(chunk, RowCotangents(*rows), layer, key_offset=-run.rows_before)
        for chunk, run, rows in zip(chunks, plan.key_runs, chunk_cotangents, strict=True)
    ]
    return LocalGradients(
        dquery=_joined([chunk.dquery for chunk in gradients]),
        dkey=_home(operands.key, tuple(chunk.dkey for chunk in gradients), layer, plan),
        dvalue=_home(operands.value, tuple(chunk.dvalue for chunk in gradients), layer, plan),
        dsinks=_total([chunk.dsinks for chunk in gradients]),
    )


def _chunks(operands: Operands, received: Received, layer: Layer, plan: HaloPlan) -> list[KernelOperands]:
    """One kernel call for each chunk of this rank: its queries, and the contiguous run of keys that they see."""
    rank = lax.axis_index(layer.context_axis)
    ids = operands.segment_ids
    keys = exchange.key_runs(operands.key, received.key, plan, rank)
    values = exchange.key_runs(operands.value, received.value, plan, rank)
    no_ids = (None,) * len(keys)
    key_ids = no_ids if ids is None else exchange.key_runs(ids, received.segment_ids, plan, rank)
    query_ids = no_ids if ids is None else _split(ids, plan)
    queries = _split(operands.query, plan)
    return [
        KernelOperands(
            queries[slot],
            keys[slot],
            values[slot],
            exchange.chunk_positions(plan, slot, rank),
            exchange.key_positions(plan, slot, rank),
            query_ids[slot],
            key_ids[slot],
            operands.sinks,
        )
        for slot in range(len(plan.key_runs))
    ]


def _home(rows: Array, run_gradients: tuple[Array, ...], layer: Layer, plan: HaloPlan) -> Array:
    """Sums the gradients of all copies of a row where the row lives, in the accumulation dtype."""
    rank = lax.axis_index(layer.context_axis)

    def assemble(own: Array) -> tuple[Array, ...]:
        return exchange.key_runs(own, exchange.exchange(own, plan, layer.context_axis), plan, rank)

    aval = jax.ShapeDtypeStruct(rows.shape, accumulation_dtype(rows.dtype))
    (gradient,) = jax.linear_transpose(assemble, aval)(run_gradients)
    return gradient


def _split(array: Array, plan: HaloPlan) -> list[Array]:
    return [
        lax.slice_in_dim(array, slot * plan.chunk, (slot + 1) * plan.chunk, axis=1)
        for slot in range(len(plan.key_runs))
    ]


def _joined(parts: Iterable[Array]) -> Array:
    parts = tuple(parts)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _total(parts: Sequence[Array | None]) -> Array | None:
    """The sum over a rank's chunks of their shares of dsinks; None where the layer has no sinks."""
    return functools.reduce(lambda total, part: None if total is None or part is None else total + part, parts)
