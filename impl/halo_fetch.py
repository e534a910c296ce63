"""The halo strategy with Pallas kernels that fetch the halo themselves: an interior's call carries it, by remote DMA.

No collective stands in the program but that of segment ids. `refusal` says for which layers that cannot be, or would
hide nothing: asked for "remote_copy" they raise; for "remote_copy_or_permute" they run halo_pallas.py, with `ppermute`.
Tested in tests/impl/test_halo_fetch.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from impl import exchange, halo_pallas
from impl.exchange import HaloPlan, Source
from impl.kernels import pallas_halo
from impl.kernels.interface import LocalGradients, RowCotangents, accumulation_dtype
from impl.kernels.pallas_blocks import LANES, Band
from impl.kernels.pallas_fetch import ROW_MULTIPLE, Cargo, Route
from impl.kernels.pallas_fit import Blocks
from impl.kernels.pallas_halo import ChunkRows
from impl.kernels.pallas_halo_backward import BackwardResult, band_backward
from impl.kernels.pallas_halo_forward import BandOperands, ForwardResult, band_forward
from impl.layer import Layer
from impl.strategy import Operands, Received, Strategy

FORWARD_IDS, BACKWARD_IDS = (11, 13), (12, 14)
"""Collective ids of the barriers: one for each direction of each of a rank's chunks. Other kernels of a program must
have other ones."""
_INTERPRETED_TILES = 4


class Transfer(NamedTuple):
    """How each of a rank's chunks is computed, and which rows travel to it: the last `sent` of the chunk before it, of
    which the last `halo_rows` are read. Blocks are those of the boundary's halo."""

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
    """None where nothing travels, or it travels by `ppermute`. `ValueError` where it was to go by remote copy only."""
    plan = halo_pallas.plan_of(layer)
    if not plan.permutes:
        return None
    reason = refusal(operands, layer)
    if reason is not None:
        if layer.halo_transfer == "remote_copy":
            raise ValueError(
                f"halo_transfer 'remote_copy' cannot run this layer: {reason}; 'remote_copy_or_permute' sends its halo "
                "by ppermute"
            )
        return None
    boundary, interior = _bands(operands, layer)
    assert interior is not None, "refusal() refuses layers without"
    # A halo of a single hop is one piece, and of the same length for every chunk.
    rows = plan.key_runs[0].rows_before
    return Transfer(plan, boundary, interior, rows, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)


def refusal(operands: Operands, layer: Layer) -> str | None:
    """Why the halo of a layer, given a rank's shards of its arrays, cannot travel inside its kernels, or None."""
    chunk, left = halo_pallas.plan_of(layer).chunk, halo_pallas.window_left(layer)
    dims = (operands.key.shape[-1], operands.value.shape[-1])
    if not layer.heads.aligned:
        return "kv heads are copied for a tensor shard, and every copy would travel"
    if layer.ulysses_axis is not None:
        return f"the sequence lies on the axis {layer.ulysses_axis!r} too"
    if chunk % ROW_MULTIPLE:
        return f"a copy of tiled rows moves {ROW_MULTIPLE} at a time, got chunks of {chunk} rows"
    if not layer.kernel_config.interpret and any(dim % LANES for dim in dims):
        return f"a copy of tiled rows moves whole lanes, got head_dim and value_dim {dims}, no multiples of {LANES}"
    if _bands(operands, layer)[1] is None:
        # So it is with several hops: every query sees something of the halo then.
        return (
            "it hides behind queries that see nothing of the halo, at least half of a chunk, "
            f"got chunks of {chunk} rows and queries that see {left} rows before their own"
        )
    return None


def _forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
    transfer = transfer_of(operands, layer)
    if transfer is None:
        return halo_pallas.STRATEGY.forward(operands, layer)
    ids, config, batch = operands.segment_ids, layer.kernel_config, operands.query.shape[0]
    travelling = () if ids is None else exchange.exchange(ids, transfer.plan, layer.context_axis)
    chunks = _chunks(operands, Received(segment_ids=travelling), transfer.plan, layer)
    own = [pallas_halo.band_operands(chunk, transfer.interior) for chunk in chunks]
    inner = [
        band_forward(rows, transfer.interior, config, cargo=_rows_of_halo(own, slot, operands, transfer, layer))
        for slot, rows in enumerate(own)
    ]
    # Kept as the kernels read them: heads first, in whole blocks.
    keys, values = zip(*(result.arrived for result in inner), strict=True)
    key, value = (tuple(rows.reshape(batch, -1, *rows.shape[1:]) for rows in halos) for halos in (keys, values))
    received = Received(key, value, travelling)
    results = []
    for slot, (chunk, result) in enumerate(zip(chunks, inner, strict=True)):
        boundary = _boundary_operands(chunk, received, slot, transfer)
        whole = band_forward(boundary, transfer.boundary, config, ForwardResult(result.out, result.lse))
        results.append(pallas_halo.forward_rows(whole, chunk))
    out, lse = (halo_pallas.joined(parts) for parts in zip(*results, strict=True))
    return out, lse, received


def _backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
    transfer = transfer_of(operands, layer)
    if transfer is None:
        return halo_pallas.STRATEGY.backward(operands, received, cotangents, layer)
    config, plan = layer.kernel_config, transfer.plan
    chunks = _chunks(operands, received, plan, layer)
    rows = [
        pallas_halo.band_cotangents(chunk_rows, transfer.boundary)
        for chunk_rows in halo_pallas.slots_of(cotangents, plan)
    ]
    final_dtype = accumulation_dtype(operands.key.dtype)
    final_dtype = final_dtype if halo_pallas.summed_later(layer) else operands.key.dtype
    # The boundaries' kernels run first, so that the gradients of their halos travel home while the interiors' run.
    outer = [
        band_backward(
            _boundary_operands(chunk, received, slot, transfer), chunk_rows, transfer.boundary, config, final_dtype
        )
        for slot, (chunk, chunk_rows) in enumerate(zip(chunks, rows, strict=True))
    ]
    results = [
        band_backward(
            pallas_halo.band_operands(chunk, transfer.interior),
            chunk_rows,
            transfer.interior,
            config,
            final_dtype,
            result,
            _gradients_of_halo(result, slot, operands, transfer, layer),
        )
        for slot, (chunk, chunk_rows, result) in enumerate(zip(chunks, rows, outer, strict=True))
    ]
    own = [pallas_halo.own_key_gradients(result, chunk, config) for result, chunk in zip(results, chunks, strict=True)]
    halos = [pallas_halo.halo_gradients(result, chunk, config) for result, chunk in zip(outer, chunks, strict=True)]
    home = _arrived_home(results, chunks, transfer, layer)
    dkey, dvalue = (
        halo_pallas.whole_key_gradient(
            parts, exchange.add_arrived(_own_share(of_halos, keys, plan, layer), arrived, plan), keys, layer
        )
        for *parts, of_halos, arrived, keys in zip(*own, zip(*halos, strict=True), home, operands[1:3], strict=True)
    )
    queries = [pallas_halo.query_gradient(result, chunk) for result, chunk in zip(results, chunks, strict=True)]
    dsinks = halo_pallas.sink_gradient_of(operands, cotangents)
    return LocalGradients(halo_pallas.joined(queries), dkey, dvalue, dsinks)


STRATEGY = Strategy(_forward, _backward, adds_out=True)


def _bands(operands: Operands, layer: Layer) -> tuple[Band, Band | None]:
    """(boundary, interior) of every chunk of a rank: they are all alike."""
    plan, ids = halo_pallas.plan_of(layer), operands.segment_ids
    query, key, value = halo_pallas.slots_of(operands[:3], plan)[0]
    ids = None if ids is None else halo_pallas.slots_of(ids, plan)[0]
    shapes = ChunkRows(query, key, value, key, value, jnp.int32(0), ids)
    return pallas_halo.bands(shapes, halo_pallas.window_left(layer), _blocks(shapes, layer))


def _blocks(chunk: ChunkRows, layer: Layer) -> Blocks:
    """Interpreted, speed is no matter: blocks are small, so that short chunks have an interior too."""
    if not layer.kernel_config.interpret:
        return halo_pallas.blocks_of(chunk, layer)
    visible = halo_pallas.window_left(layer) + 1
    tile = -(-visible // (ROW_MULTIPLE * _INTERPRETED_TILES)) * ROW_MULTIPLE
    return Blocks(tile, tile)


def _rows_of_halo(
    own: Sequence[BandOperands], slot: int, operands: Operands, transfer: Transfer, layer: Layer
) -> Cargo:
    """The halo of the chunk in a slot: the last rows of the chunk that its sender holds in the same slot."""
    rows = [_without_filling(operands, chunk.key, chunk.value) for chunk in own]
    instead = _source_of_own(transfer.plan, slot)
    return Cargo(
        rows[slot],
        first=transfer.plan.chunk - transfer.sent,
        sent=transfer.sent,
        length=transfer.halo_length,
        filled=True,
        route=_route(transfer.plan, slot, layer),
        instead=None if instead is None else rows[instead.slot],
    )


def _gradients_of_halo(
    result: BackwardResult, slot: int, operands: Operands, transfer: Transfer, layer: Layer
) -> Cargo:
    assert result.dhalo_key is not None, "a boundary sees the halo"
    assert result.dhalo_value is not None, "a boundary sees the halo"
    return Cargo(
        _without_filling(operands, result.dhalo_key, result.dhalo_value),
        first=transfer.halo_length - transfer.sent,
        sent=transfer.sent,
        length=transfer.sent,
        filled=False,
        route=_route(transfer.plan, slot, layer, home=True),
    )


def _without_filling(operands: Operands, key: Array, value: Array) -> tuple[Array, Array]:
    """Rows without the zeros that fill lanes, which only interpreted kernels may have here: they must not travel."""
    return key[..., : operands.key.shape[3]], value[..., : operands.value.shape[3]]


def _route(plan: HaloPlan, slot: int, layer: Layer, *, home: bool = False) -> Route:
    pairs = plan.permutes[_permute_of(plan, slot)].pairs
    if home:
        pairs = tuple((receiver, sender) for sender, receiver in pairs)
    return Route(pairs, layer.context_axis, layer.context_parallelism, (BACKWARD_IDS if home else FORWARD_IDS)[slot])


def _permute_of(plan: HaloPlan, slot: int) -> int:
    """Which permute of the plan brings the halo of the chunk in a slot. It comes from the same slot of other ranks."""
    (permute,) = {one.permute for one in plan.key_runs[slot].pieces[0].sources if one.permute is not None}
    assert plan.permutes[permute].slot == slot, "neighbouring chunks of different ranks lie in the same slot"
    return permute


def _source_of_own(plan: HaloPlan, slot: int) -> Source | None:
    """Where some ranks hold the chunk before that in a slot themselves: the last rank, of the dual-chunk-swap."""
    return next((source for source in plan.key_runs[slot].pieces[0].sources if source.permute is None), None)


def _chunks(operands: Operands, received: Received, plan: HaloPlan, layer: Layer) -> list[ChunkRows]:
    """A rank's chunks. Of their halos only the number of rows is read: what has arrived goes to the boundary's call."""
    rank, ids = lax.axis_index(layer.context_axis), operands.segment_ids
    halo_ids = None if ids is None else exchange.halos(ids, received.segment_ids, plan, rank)
    chunk_ids = None if ids is None else halo_pallas.slots_of(ids, plan)
    return [
        ChunkRows(
            query,
            key,
            value,
            key[:, : run.rows_before],
            value[:, : run.rows_before],
            exchange.chunk_positions(plan, slot, rank)[0],
            None if chunk_ids is None else chunk_ids[slot],
            None if halo_ids is None else halo_ids[slot],
            operands.sinks,
        )
        for slot, ((query, key, value), run) in enumerate(
            zip(halo_pallas.slots_of(operands[:3], plan), plan.key_runs, strict=True)
        )
    ]


def _boundary_operands(chunk: ChunkRows, received: Received, slot: int, transfer: Transfer) -> BandOperands:
    halos = (received.key[slot], received.value[slot])
    key, value = (rows.reshape(-1, *rows.shape[2:]) for rows in map(pallas_halo.in_lanes, halos))
    return pallas_halo.band_operands(chunk, transfer.boundary)._replace(halo_key=key, halo_value=value)


def _own_share(halos: Sequence[Array], own: Array, plan: HaloPlan, layer: Layer) -> Array:
    """What a rank's halos owe to rows of its own, before anything comes home."""
    share = jnp.zeros(own.shape, halos[0].dtype)
    for slot, gradient in enumerate(halos):
        source = _source_of_own(plan, slot)
        if source is not None:
            first = source.slot * plan.chunk + source.start
            owed = jnp.where(_is_among(source.ranks, layer), gradient, 0)
            share = share.at[:, first : first + gradient.shape[1]].add(owed)
    return share


def _arrived_home(
    results: Sequence[BackwardResult], chunks: Sequence[ChunkRows], transfer: Transfer, layer: Layer
) -> tuple[list[Array], list[Array]]:
    """Gradients of keys and of values that this rank sent, permute by permute, rows first, zero where it sent none."""
    plan, first = transfer.plan, transfer.sent - transfer.halo_rows
    arrived: tuple[list[Array], list[Array]] = ([], [])
    slot_of = {_permute_of(plan, slot): slot for slot in range(len(chunks))}
    for index, permute in enumerate(plan.permutes):
        result, chunk = results[slot_of[index]], chunks[slot_of[index]]
        has_sent = _is_among([sender for sender, _ in permute.pairs], layer)
        kinds = zip(arrived, result.arrived, (chunk.key, chunk.value), (layer.kernel_config.scale, 1), strict=True)
        for gradients, rows, own, scale in kinds:
            home = pallas_halo.rows_first(rows, own.shape[0], first, transfer.halo_rows)[..., : own.shape[3]]
            gradients.append(jnp.where(has_sent, home, 0) * scale)
    return arrived


def _is_among(ranks: Sequence[int], layer: Layer) -> Bool[Array, ""]:
    return jnp.isin(lax.axis_index(layer.context_axis), jnp.asarray(ranks))
