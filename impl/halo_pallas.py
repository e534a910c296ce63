"""The halo strategy with the Pallas kernels that read halo and local keys apart: nothing is joined in HBM.

Rows travel by the plan of exchange.py, as in halo.py; here every chunk's halo stays an operand of its own, and one call
writes into the other's result. Tested in tests/impl/test_pallas_halo.py and test_strategies.py.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from impl import exchange, heads
from impl.exchange import HaloPlan
from impl.kernels import pallas_halo
from impl.kernels.interface import LocalGradients, RowCotangents, accumulation_dtype
from impl.kernels.pallas_blocks import Band
from impl.kernels.pallas_fit import Blocks, RowSizes
from impl.kernels.pallas_halo import ChunkRows
from impl.kernels.pallas_halo_backward import band_backward
from impl.kernels.pallas_halo_forward import ForwardResult, band_forward
from impl.kernels.xla import sink_gradient
from impl.layer import Layer
from impl.local_attention import tensor_shard
from impl.strategy import Operands, Received, Strategy

Rows = TypeVar("Rows")


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    send = functools.partial(exchange.exchange, plan=plan_of(layer), axis_name=layer.context_axis)
    ids, config = operands.segment_ids, layer.kernel_config
    received = Received(send(operands.key), send(operands.value), () if ids is None else send(ids))
    chunks = _chunks(operands, received, layer)
    calls = _calls(chunks, layer)
    inner: list[ForwardResult | None] = [
        None if interior is None else band_forward(pallas_halo.band_operands(chunk, interior), interior, config)
        for chunk, (_, interior) in zip(chunks, calls, strict=True)
    ]
    # The interior's kernels run before anybody waits for the halo, which is on its way from the start.
    inner, arrived = lax.optimization_barrier((inner, received))
    results = []
    for chunk, (boundary, _), result in zip(_chunks(operands, arrived, layer), calls, inner, strict=True):
        whole = band_forward(pallas_halo.band_operands(chunk, boundary), boundary, config, result)
        results.append(pallas_halo.forward_rows(whole, chunk))
    out, lse = (joined(parts) for parts in zip(*results, strict=True))
    # Not `received`: what the backward prepares of it could otherwise be waited for before the interior runs.
    return out, lse, arrived


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    plan, config = plan_of(layer), layer.kernel_config
    chunks = _chunks(operands, received, layer)
    calls = _calls(chunks, layer)
    rows = [
        pallas_halo.band_cotangents(chunk_cotangents, boundary)
        for chunk_cotangents, (boundary, _) in zip(slots_of(cotangents, plan), calls, strict=True)
    ]
    final_dtype = accumulation_dtype(operands.key.dtype) if summed_later(layer) else operands.key.dtype
    # The boundary's kernels run first, so that the gradients of its halo travel home while the interior's run.
    results = [
        band_backward(pallas_halo.band_operands(chunk, boundary), chunk_rows, boundary, config, final_dtype)
        for chunk, (boundary, _), chunk_rows in zip(chunks, calls, rows, strict=True)
    ]
    halo = [pallas_halo.halo_gradients(result, chunk, config) for result, chunk in zip(results, chunks, strict=True)]
    own_share, arrived = _sent_home(halo, operands, received, layer)
    results = [
        result
        if interior is None
        else band_backward(
            pallas_halo.band_operands(chunk, interior), chunk_rows, interior, config, final_dtype, result
        )
        for chunk, (_, interior), chunk_rows, result in zip(chunks, calls, rows, results, strict=True)
    ]
    results, arrived = lax.optimization_barrier((results, arrived))
    own = [pallas_halo.own_key_gradients(result, chunk, config) for result, chunk in zip(results, chunks, strict=True)]
    dkey, dvalue = (
        whole_key_gradient(parts, exchange.add_arrived(share, home, plan), keys, layer)
        for *parts, keys, share, home in zip(*own, operands[1:3], own_share, arrived, strict=True)
    )
    queries = [pallas_halo.query_gradient(result, chunk) for result, chunk in zip(results, chunks, strict=True)]
    return LocalGradients(joined(queries), dkey, dvalue, sink_gradient_of(operands, cotangents))


STRATEGY = Strategy(_forward, _backward, adds_out=True)


def plan_of(layer: Layer) -> HaloPlan:
    return exchange.halo_plan(layer.layout, layer.context_parallelism, layer.seq_len, layer.kernel_config.window)


def _calls(chunks: Sequence[ChunkRows], layer: Layer) -> list[tuple[Band, Band | None]]:
    """(boundary, interior) of each chunk."""
    return [pallas_halo.bands(chunk, window_left(layer), blocks_of(chunk, layer)) for chunk in chunks]


def window_left(layer: Layer) -> int:
    """Rows that a query sees before its own, of those that there are."""
    left = layer.kernel_config.window[0]
    assert left is not None, "unsupported() declines unbounded windows"
    return min(left, layer.seq_len - 1)


def blocks_of(chunk: ChunkRows, layer: Layer) -> Blocks:
    """The blocks that suit a chunk and the mesh's TPUs."""
    rows, query_heads = chunk.query.shape[1:3]
    sizes = RowSizes.of(chunk.query, chunk.value, query_heads // chunk.key.shape[2], chunk.segment_ids is not None)
    blocks = Blocks.fitting(rows, window_left(layer), sizes, layer.kernel_config.vmem_bytes)
    assert blocks is not None, "dispatch.py declines what does not fit"
    return blocks


def _chunks(operands: Operands, received: Received, layer: Layer) -> list[ChunkRows]:
    """Each of a rank's chunks beside its halo."""
    plan, rank = plan_of(layer), lax.axis_index(layer.context_axis)
    ids = operands.segment_ids
    whole = (operands.query, *(_expanded(rows, layer) for rows in (operands.key, operands.value)))
    own = slots_of(whole, plan)
    halos = [_halos(own, rows, layer) for own, rows in zip(operands[1:3], received[:2], strict=True)]
    slots = range(len(plan.key_runs))
    return [
        ChunkRows(
            *own[slot],
            *(rows[slot] for rows in halos),
            first_position=exchange.chunk_positions(plan, slot, rank)[0],
            segment_ids=None if ids is None else slots_of(ids, plan)[slot],
            halo_segment_ids=None if ids is None else exchange.halos(ids, received.segment_ids, plan, rank)[slot],
            sinks=operands.sinks,
        )
        for slot in slots
    ]


def _halos(own: Array, received: Sequence[Array], layer: Layer) -> Sequence[Array]:
    """The halo of each chunk, with the kernel's kv heads; linear in both."""
    halos = exchange.halos(own, received, plan_of(layer), lax.axis_index(layer.context_axis))
    return [_expanded(rows, layer) for rows in halos]


def _sent_home(
    halo_gradients: Sequence[tuple[Array, Array]], operands: Operands, received: Received, layer: Layer
) -> tuple[list[Array], list[Sequence[Array]]]:
    """Of key and value: what halos owe the rank's own rows, and what other ranks owe them, arriving."""
    send_home = functools.partial(exchange.send_home, plan=plan_of(layer), axis_name=layer.context_axis)
    own_shares, arrived = [], []
    for index, (own, rows) in enumerate(((operands.key, received.key), (operands.value, received.value))):
        avals = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, accumulation_dtype(array.dtype)), (own, rows)
        )
        transpose = jax.linear_transpose(lambda own, rows: _halos(own, rows, layer), *avals)
        own_share, travelling = transpose([gradients[index] for gradients in halo_gradients])
        own_shares.append(own_share)
        arrived.append(send_home(travelling))
    return own_shares, arrived


def summed_later(layer: Layer) -> bool:
    """Whether something is added to gradients of keys that are complete: those of copied kv heads, and other ranks'."""
    replicated = layer.tensor_axis is not None and not layer.heads.kv_sharded
    return replicated or not layer.heads.aligned or layer.ulysses_axis is not None


def whole_key_gradient(
    parts: Sequence[pallas_halo.OwnKeyGradient], owed: Array, selected: Array, layer: Layer
) -> Array:
    """All chunks' gradients of their keys, and `owed` to them. Nothing is owed to rows before a chunk's tail, so that
    these, nearly all, are not touched again."""
    gradients = []
    for part, (share, own) in zip(parts, slots_of((owed, selected), plan_of(layer)), strict=True):
        first = share.shape[1] - part.tail.shape[1]
        tail = _collapsed(part.tail, own[:, first:], layer) + share[:, first:]
        if part.final is None:
            gradients.append(tail)
        else:
            final = _collapsed(part.final, own, layer)
            gradients.append(lax.dynamic_update_slice_in_dim(final, tail.astype(final.dtype), first, axis=1))
    return joined(gradients)


def sink_gradient_of(operands: Operands, cotangents: RowCotangents) -> Array | None:
    if operands.sinks is None:
        return None
    lse = jnp.where(jnp.isneginf(cotangents.lse), pallas_halo.NO_ROW_LSE, cotangents.lse)
    delta = cotangents.delta
    if cotangents.out is not None:
        delta = delta + jnp.sum(cotangents.dout.astype(lse.dtype) * cotangents.out.astype(lse.dtype), axis=-1)
    return sink_gradient(operands.sinks, lse, delta)


def _expanded(rows: Array, layer: Layer) -> Array:
    return heads.expand(rows, layer.heads, tensor_shard(layer))


def _collapsed(gradient: Array, selected: Array, layer: Layer) -> Array:
    """Sums the gradients of a kv head's copies."""
    if layer.heads.aligned:
        return gradient
    aval = jax.ShapeDtypeStruct(selected.shape, gradient.dtype)
    (collapsed,) = jax.linear_transpose(lambda rows: _expanded(rows, layer), aval)(gradient)
    return collapsed


def slots_of(rows: Rows, plan: HaloPlan) -> list[Rows]:
    """Arrays of a rank's rows, chunk by chunk."""
    count = len(plan.key_runs)
    parts = jax.tree.map(lambda array: jnp.split(array, count, axis=1), rows)
    return jax.tree.transpose(jax.tree.structure(rows), jax.tree.structure([0] * count), parts)


def joined(parts: Sequence[Array]) -> Array:
    """The chunks' rows in the rank's order."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
