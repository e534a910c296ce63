"""Local attention with a window by Pallas TPU kernels that read a chunk's halo and its own keys as separate operands.

Divides a chunk into calls, brings rows into the kernels' order (heads first, whole blocks) and their results back; what
the kernels decline is said by `unsupported`. Used by impl/halo_pallas.py; tested in tests/impl/test_pallas_halo.py.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from impl.kernels.interface import KernelConfig, RowCotangents
from impl.kernels.pallas_blocks import LANES, Band
from impl.kernels.pallas_fit import Blocks
from impl.kernels.pallas_halo_backward import BackwardResult, BandCotangents
from impl.kernels.pallas_halo_forward import BandOperands, ForwardResult

NO_ROW_LSE = 1e30
"""Stands for the lse of rows without keys in the backward: makes every probability of the row exactly zero."""


def unsupported(dtype: jnp.dtype, strategy: str, window: tuple[int | None, int | None]) -> str | None:
    """Why these kernels cannot run a layer, or None. Rows are padded to whole blocks and lanes; whether
    a band of them fits into VMEM is said by pallas_fit.py."""
    if strategy != "halo":
        return f"its keys come as a halo and the chunk's own, got strategy {strategy!r}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it accumulates in float32 and runs bfloat16 and float32, got {dtype.name} inputs"
    left, right = window
    if left is None or right != 0:
        return f"it needs a window that ends at the query and has a beginning, got window {window}"
    return None


class ChunkRows(NamedTuple):
    """One chunk of a rank: its rows, and the halo before them, whose last row is the position before the chunk's first.

    first_position: of the chunk. Ids are None where the layer has none.
    """

    query: Float[Array, "batch rows num_query_heads head_dim"]
    key: Float[Array, "batch rows num_kv_heads head_dim"]
    value: Float[Array, "batch rows num_kv_heads value_dim"]
    halo_key: Float[Array, "batch halo_rows num_kv_heads head_dim"]
    halo_value: Float[Array, "batch halo_rows num_kv_heads value_dim"]
    first_position: Int32[Array, ""]
    segment_ids: Int32[Array, "batch rows"] | None = None
    halo_segment_ids: Int32[Array, "batch halo_rows"] | None = None
    sinks: Float[Array, " num_query_heads"] | None = None


def bands(chunk: ChunkRows, window_left: int, blocks: Blocks) -> tuple[Band, Band | None]:
    """The calls of a chunk: (boundary, interior), whose queries see some or nothing of the halo. The interior is None
    where it would be less than half of the chunk: too short to hide a transfer behind; the boundary is then everything.
    """
    batch, rows, num_query_heads, _ = chunk.query.shape
    num_kv_heads = chunk.key.shape[2]
    whole = Band(
        left=window_left,
        block=blocks.block,
        tile=blocks.tile,
        first_block=0,
        blocks=-(-rows // blocks.block),
        heads=batch * num_kv_heads,
        num_kv_heads=num_kv_heads,
        group=num_query_heads // num_kv_heads,
    )
    # Later chunks see the last `window_left` rows, and add to their gradients.
    final = max(0, min((rows - window_left) // blocks.block, whole.blocks - 1))
    outer = whole.blocks_before
    if outer == 0 or 2 * outer > whole.blocks:
        return replace(whole, final_blocks=final), None
    interior = replace(whole, first_block=outer, blocks=whole.blocks - outer, final_blocks=final)
    return replace(whole, blocks=outer), interior


def band_operands(chunk: ChunkRows, band: Band) -> BandOperands:
    """The chunk's rows as the kernels want them; halo and own rows stay apart.

    An interior band's hold nothing of the halo: they must not depend on anything that travels.
    """
    rows, halo_rows = chunk.query.shape[1], chunk.halo_key.shape[1]
    after = -rows % band.block
    before = band.blocks_before * band.block
    halo = before > 0 and band.first_block == 0
    query = heads_first(in_lanes(chunk.query), 0, after)
    return BandOperands(
        query=query.reshape(band.heads, band.group, *query.shape[1:]),
        key=heads_first(in_lanes(chunk.key), 0, after),
        value=heads_first(in_lanes(chunk.value), 0, after),
        halo_key=heads_first(in_lanes(chunk.halo_key), before - halo_rows, 0) if halo else None,
        halo_value=heads_first(in_lanes(chunk.halo_value), before - halo_rows, 0) if halo else None,
        lowest=jnp.maximum(-halo_rows, -chunk.first_position).astype(jnp.int32)[None],
        segment_ids=_tiles_of_ids(chunk, band, halo),
        sinks=chunk.sinks,
    )


def band_cotangents(rows: RowCotangents, band: Band) -> BandCotangents:
    """Cotangents as the kernels want them."""
    after = -rows.lse.shape[1] % band.block

    def grouped(array: Array, fill: float = 0) -> Array:
        moved = heads_first(array, 0, after, fill)
        return moved.reshape(band.heads, band.group, *moved.shape[1:])

    return BandCotangents(
        dout=grouped(in_lanes(rows.dout)),
        lse=grouped(jnp.where(jnp.isneginf(rows.lse), NO_ROW_LSE, rows.lse), NO_ROW_LSE),
        delta=grouped(rows.delta),
        out=None if rows.out is None else grouped(in_lanes(rows.out)),
    )


def forward_rows(result: ForwardResult, chunk: ChunkRows) -> tuple[Array, Array]:
    """(out, lse), rows first, in float32; out has been rounded to the inputs' dtype."""
    batch, rows = chunk.query.shape[:2]
    out, lse = (rows_first(array.reshape(-1, *array.shape[2:]), batch, 0, rows) for array in (result.out, result.lse))
    return out[..., : chunk.value.shape[3]].astype(jnp.float32), lse


def query_gradient(result: BackwardResult, chunk: ChunkRows) -> Array:
    """dquery, rows first, in float32; the kernel has rounded it."""
    batch, rows, _, head_dim = chunk.query.shape
    dquery = rows_first(result.dquery.reshape(-1, *result.dquery.shape[2:]), batch, 0, rows)
    return dquery[..., :head_dim].astype(jnp.float32)


class OwnKeyGradient(NamedTuple):
    """Gradient of the chunk's own keys, or values, rows first. final: in the dtype asked for; undefined from the tail
    on, None where the tail is everything. tail: the last rows', to which other chunks add, in float32.
    """

    final: Float[Array, "batch rows num_kv_heads dim"] | None
    tail: Float[Array, "batch tail_rows num_kv_heads dim"]


def own_key_gradients(
    result: BackwardResult, chunk: ChunkRows, config: KernelConfig
) -> tuple[OwnKeyGradient, OwnKeyGradient]:
    """Of keys and of values."""
    batch, rows = chunk.key.shape[:2]
    gradients = []
    for final, tail, own, scale in (
        (result.dkey, result.dtail_key, chunk.key, config.scale),
        (result.dvalue, result.dtail_value, chunk.value, 1),
    ):
        dim = own.shape[3]
        tail_rows = rows if final is None else rows - (final.shape[1] - tail.shape[1])
        gradients.append(
            OwnKeyGradient(
                None if final is None else rows_first(final, batch, 0, rows)[..., :dim],
                rows_first(tail, batch, 0, tail_rows)[..., :dim] * scale,
            )
        )
    return gradients[0], gradients[1]


def halo_gradients(result: BackwardResult, chunk: ChunkRows, config: KernelConfig) -> tuple[Array, Array]:
    """(dkey, dvalue) of the halo's rows, rows first, in float32."""
    if result.dhalo_key is None or result.dhalo_value is None:
        return jnp.zeros(chunk.halo_key.shape, jnp.float32), jnp.zeros(chunk.halo_value.shape, jnp.float32)
    batch, rows = chunk.halo_key.shape[:2]
    first = result.dhalo_key.shape[1] - rows
    dkey, dvalue = (rows_first(gradient, batch, first, rows) for gradient in (result.dhalo_key, result.dhalo_value))
    return dkey[..., : chunk.halo_key.shape[3]] * config.scale, dvalue[..., : chunk.halo_value.shape[3]]


def _tiles_of_ids(chunk: ChunkRows, band: Band, halo: bool) -> Int32[Array, "batch tiles 1 tile"] | None:
    """Ids of halo and chunk in one array: four bytes a row, joined for the kernel's convenience."""
    if chunk.segment_ids is None or chunk.halo_segment_ids is None:
        return None
    batch, rows = chunk.segment_ids.shape
    after = -rows % band.block
    before = band.blocks_before * band.block
    if halo:
        ids = jnp.concatenate([chunk.halo_segment_ids, chunk.segment_ids], axis=1)
        before -= chunk.halo_segment_ids.shape[1]
    else:
        ids = chunk.segment_ids
    return jnp.pad(ids, ((0, 0), (before, after))).reshape(batch, -1, 1, band.tile)


def in_lanes(rows: Float[Array, "batch _ _ dim"]) -> Float[Array, "batch _ _ padded_dim"]:
    """Zeros up to whole lanes, since a kernel's own DMAs fetch whole lanes; in a TPU's memory they are there anyway."""
    missing = -rows.shape[3] % LANES
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else rows


def heads_first(
    rows: Float[Array, "batch rows heads ..."], before: int, after: int, fill: float = 0
) -> Float[Array, "batch_heads padded_rows ..."]:
    """Rows by pairs of batch row and head, with `fill` before and after them."""
    padding = [(0, 0)] * rows.ndim
    padding[2] = (before, after)
    moved = jnp.swapaxes(rows, 1, 2)
    padded = jnp.pad(moved, padding, constant_values=fill) if before or after else moved
    return padded.reshape(-1, *padded.shape[2:])


def rows_first(
    array: Float[Array, "batch_heads padded_rows ..."], batch: int, first: int, rows: int
) -> Float[Array, "batch rows heads ..."]:
    """The way back of `heads_first`."""
    kept = array[:, first : first + rows]
    return jnp.swapaxes(kept.reshape(batch, kept.shape[0] // batch, *kept.shape[1:]), 1, 2)
