"""The halo strategy with Pallas kernels that fetch the halo themselves: the interior's call carries it, by remote DMA.

No collective stands in the program but that of segment ids. Where that cannot be, it is halo_pallas.py that runs, with
`ppermute`: `transfer_of` says when. Tested in tests/impl/test_pallas_fetch.py.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from impl import exchange, halo_pallas
from impl.exchange import HaloPlan
from impl.kernels import pallas_halo
from impl.kernels.interface import LocalGradients, RowCotangents, accumulation_dtype
from impl.kernels.pallas_blocks import LANES, Band
from impl.kernels.pallas_fetch import ROW_MULTIPLE, Cargo, Route
from impl.kernels.pallas_fit import Blocks
from impl.kernels.pallas_halo import ChunkRows
from impl.kernels.pallas_halo_backward import band_backward
from impl.kernels.pallas_halo_forward import BandOperands, band_forward
from impl.layer import Layer
from impl.strategy import Operands, Received, Strategy

FORWARD_ID, BACKWARD_ID = 11, 12
"""Collective ids of the barriers: one for each direction. Other kernels of a program must have other ones."""
_INTERPRETED_TILES = 4


class Transfer(NamedTuple):
    """How a layer's one chunk a rank is computed, and which rows of it travel: the last `sent`, of which the last
    `halo_rows` are read. Blocks are those of the boundary's halo."""

    plan: HaloPlan
    boundary: Band
    interior: Band
    halo_rows: int
    sent: int

    @property
    def halo_length(self) -> int:
        """Rows of the halo in whole blocks."""
        return self.boundary.blocks_before * self.boundary.block


def transfer_of(operands: Operands, layer: Layer) -> Transfer | None:
    """None where rows travel by `ppermute`: with more than one hop or chunk, copied kv heads, an interior that is too
    short to hide anything, and what a remote copy of tiled rows cannot do (rows in eights, whole lanes)."""
    plan = exchange.halo_plan(layer.layout, layer.context_parallelism, layer.seq_len, layer.kernel_config.window)
    dims = (operands.key.shape[-1], operands.value.shape[-1])
    one_hop = len(plan.key_runs) == len(plan.permutes) == 1
    whole_lanes = layer.kernel_config.interpret or not any(dim % LANES for dim in dims)
    if not one_hop or plan.chunk % ROW_MULTIPLE or not whole_lanes:
        return None
    if not layer.heads.aligned or layer.ulysses_axis is not None:
        return None
    shapes = ChunkRows(*operands[:3], *operands[1:3], jnp.int32(0), operands.segment_ids)
    left = halo_pallas.window_left(layer)
    boundary, interior = pallas_halo.bands(shapes, left, _blocks(shapes, layer))
    if interior is None:
        return None
    (permute,) = plan.permutes
    return Transfer(plan, boundary, interior, permute.rows, -(-permute.rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    transfer = transfer_of(operands, layer)
    if transfer is None:
        return halo_pallas.STRATEGY.forward(operands, layer)
    ids, config = operands.segment_ids, layer.kernel_config
    travelling = () if ids is None else exchange.exchange(ids, transfer.plan, layer.context_axis)
    chunk = _chunk(operands, Received(segment_ids=travelling), transfer.plan, layer)
    own = pallas_halo.band_operands(chunk, transfer.interior)
    cargo = Cargo(
        (own.key, own.value),
        first=transfer.plan.chunk - transfer.sent,
        sent=transfer.sent,
        length=transfer.halo_length,
        filled=True,
        route=_route(transfer.plan, layer),
    )
    inner = band_forward(own, transfer.interior, config, cargo=cargo)
    batch = operands.query.shape[0]
    # Kept as the kernels read them: heads first, in whole blocks.
    key, value = ((rows.reshape(batch, -1, *rows.shape[1:]),) for rows in inner.arrived)
    received = Received(key, value, travelling)
    boundary = _boundary_operands(chunk, received, transfer)
    whole = band_forward(boundary, transfer.boundary, config, inner._replace(arrived=()))
    out, lse = pallas_halo.forward_rows(whole, chunk)
    return out, lse, received


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    transfer = transfer_of(operands, layer)
    if transfer is None:
        return halo_pallas.STRATEGY.backward(operands, received, cotangents, layer)
    config, plan = layer.kernel_config, transfer.plan
    chunk = _chunk(operands, received, plan, layer)
    rows = pallas_halo.band_cotangents(cotangents, transfer.boundary)
    # The boundary's kernel runs first, so that the gradients of its halo travel home while the interior's runs.
    final_dtype = accumulation_dtype(operands.key.dtype) if halo_pallas.summed_later(layer) else operands.key.dtype
    result = band_backward(_boundary_operands(chunk, received, transfer), rows, transfer.boundary, config, final_dtype)
    assert result.dhalo_key is not None, "a boundary sees the halo"
    assert result.dhalo_value is not None, "a boundary sees the halo"
    cargo = Cargo(
        (result.dhalo_key, result.dhalo_value),
        first=transfer.halo_length - transfer.sent,
        sent=transfer.sent,
        length=transfer.sent,
        filled=False,
        route=_route(plan, layer, home=True),
    )
    own = pallas_halo.band_operands(chunk, transfer.interior)
    result = band_backward(own, rows, transfer.interior, config, final_dtype, result, cargo)
    dkey, dvalue = (
        halo_pallas.whole_key_gradient([gradient], _owed(home, keys, plan), keys, layer)
        for gradient, home, keys in zip(
            pallas_halo.own_key_gradients(result, chunk, config),
            _arrived_home(result.arrived, chunk, transfer, layer),
            operands[1:3],
            strict=True,
        )
    )
    dquery = pallas_halo.query_gradient(result, chunk)
    return LocalGradients(dquery, dkey, dvalue, halo_pallas.sink_gradient_of(operands, cotangents))


STRATEGY = Strategy(_forward, _backward, adds_out=True)


def _route(plan: HaloPlan, layer: Layer, *, home: bool = False) -> Route:
    (permute,) = plan.permutes
    pairs = tuple((receiver, sender) for sender, receiver in permute.pairs) if home else permute.pairs
    return Route(pairs, layer.context_axis, layer.context_parallelism, BACKWARD_ID if home else FORWARD_ID)


def _blocks(chunk: ChunkRows, layer: Layer) -> Blocks:
    """Interpreted, speed is no matter: blocks are small, so that short chunks have an interior too."""
    if not layer.kernel_config.interpret:
        return halo_pallas.blocks_of(chunk, layer)
    visible = halo_pallas.window_left(layer) + 1
    tile = -(-visible // (ROW_MULTIPLE * _INTERPRETED_TILES)) * ROW_MULTIPLE
    return Blocks(tile, tile)


def _chunk(operands: Operands, received: Received, plan: HaloPlan, layer: Layer) -> ChunkRows:
    """The rank's chunk. Of its halo only the number of rows is read: what has arrived goes to the boundary's call."""
    rank, ids = lax.axis_index(layer.context_axis), operands.segment_ids
    (run,) = plan.key_runs
    halo_ids = None if ids is None else exchange.halos(ids, received.segment_ids, plan, rank)[0]
    return ChunkRows(
        operands.query,
        operands.key,
        operands.value,
        operands.key[:, : run.rows_before],
        operands.value[:, : run.rows_before],
        exchange.chunk_positions(plan, 0, rank)[0],
        ids,
        halo_ids,
        operands.sinks,
    )


def _boundary_operands(chunk: ChunkRows, received: Received, transfer: Transfer) -> BandOperands:
    key, value = (rows.reshape(-1, *rows.shape[2:]) for rows in (received.key[0], received.value[0]))
    return pallas_halo.band_operands(chunk, transfer.boundary)._replace(halo_key=key, halo_value=value)


def _owed(home: Array, keys: Array, plan: HaloPlan) -> Array:
    """What another rank owes to the rank's rows, those that it saw nothing of included."""
    return exchange.add_arrived(jnp.zeros(keys.shape, home.dtype), [home], plan)


def _arrived_home(
    arrived: tuple[Array, ...], chunk: ChunkRows, transfer: Transfer, layer: Layer
) -> tuple[Array, Array]:
    """Gradients (dkey, dvalue) of the rows that this rank sent, rows first, zero where it sent none."""
    (permute,) = transfer.plan.permutes
    has_sent = jnp.isin(lax.axis_index(layer.context_axis), jnp.asarray([sender for sender, _ in permute.pairs]))
    batch, first = chunk.query.shape[0], transfer.sent - transfer.halo_rows
    dkey, dvalue = (
        jnp.where(has_sent, pallas_halo.rows_first(rows, batch, first, transfer.halo_rows)[..., :dim], 0)
        for rows, dim in zip(arrived, (chunk.key.shape[3], chunk.value.shape[3]), strict=True)
    )
    return dkey * layer.kernel_config.scale, dvalue
