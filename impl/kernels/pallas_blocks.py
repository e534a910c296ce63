"""Geometry of the Pallas halo kernels: blocks of queries, tiles of keys, and who sees whom.

A chunk's rows and the halo before it share one axis, on which row 0 is the chunk's first and halo rows are negative.
Used inside pallas_halo_forward.py and pallas_halo_backward.py; tested in tests/impl/test_pallas_halo.py.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int32

from impl.kernels.interface import KernelConfig

LANES = 128
LOG2_E = math.log2(math.e)
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The logit of a key that is not visible: finite, so that a row of nothing else stays free of NaN, and below that of
any visible one, which would lose to it: half of it is below every product that a model has."""


@dataclass(frozen=True)
class Band:
    """The static shape of one kernel call: which queries it has, and which keys these see.

    left: rows that a query sees before its own. block: rows that a grid step computes and a DMA fetches. tile: rows of
    the square tiles of logits; divides block. first_block, blocks: the query blocks of this call. heads: pairs of batch
    row and kv head. num_kv_heads, group: kv heads, and query heads that read each. final_blocks: key blocks of the
    chunk, from its first on, to whose gradients nothing is added after this call.
    """

    left: int
    block: int
    tile: int
    first_block: int
    blocks: int
    heads: int
    num_kv_heads: int
    group: int
    final_blocks: int = 0

    @property
    def steps(self) -> int:
        """Query blocks of all heads, one after the other."""
        return self.heads * self.blocks

    @property
    def blocks_before(self) -> int:
        """Key blocks that a query block sees besides its own."""
        return -(-self.left // self.block)

    @property
    def tail_blocks(self) -> int:
        """Key blocks of the chunk, up to this call's last, that are not final."""
        return self.first_block + self.blocks - self.final_blocks

    @property
    def tiles_before(self) -> int:
        """Tiles of keys that a tile of queries sees besides its own."""
        return -(-self.left // self.tile)

    @property
    def slots(self) -> int:
        """Blocks that the ring holds: keys of one step, values of the step before, and what arrives for the next.

        Of these three steps one or two may belong to another head, with a band of its own.
        """
        bands = 3 if self.blocks == 1 else 2
        return bands * (self.blocks_before + 1) + (3 - bands)

    @property
    def tiles_per_block(self) -> int:
        return self.block // self.tile

    @property
    def stacked(self) -> int:
        """Rows of a matmul: a tile of queries of every head of a group."""
        return self.group * self.tile

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The tiles of keys, as offsets from the queries' own, whose logits are held in one array.

        Where the window is a whole number of tiles, its two edges leave parts of the first and the last tile visible
        that fit together without a gap: one array holds both.
        """
        first = -self.tiles_before
        if first < 0 and (self.left + 1) % self.tile == 0:
            return ((0, first), *((offset,) for offset in range(first + 1, 0)))
        return tuple((offset,) for offset in range(first, 1))

    def head_and_block(self, step: Any) -> tuple[Any, Any]:
        """The head of a grid step, and its query block, counted from the chunk's first."""
        return lax.div(step, jnp.int32(self.blocks)), lax.rem(step, jnp.int32(self.blocks)) + self.first_block

    def sequence_number(self, head: Any, block: Any) -> Any:
        """Counts the key blocks in the order in which they are fetched; a block's slot is its number modulo `slots`."""
        return head * (self.blocks_before + self.blocks) + block - self.first_block + self.blocks_before

    def slot(self, head: Any, block: Any) -> Any:
        return lax.rem(self.sequence_number(head, block), jnp.int32(self.slots))

    def ring_rows(self, head: Any, block: Any, tile: int) -> Any:
        """Where the ring holds the tile of keys `tile`, counted from the first of query block `block`."""
        block_offset = tile // self.tiles_per_block
        start = pl.multiple_of(self.slot(head, block + block_offset) * self.block, self.block)
        return pl.ds(start + (tile - block_offset * self.tiles_per_block) * self.tile, self.tile)


class Mask(NamedTuple):
    """What hides keys beyond the window: rows before `lowest` on the common axis, and unequal segment ids.

    segment_ids: reference to [1, tiles, 1, tile] int32 of halo and chunk, or None; `first_tile` of them is the chunk's.
    """

    lowest: Any
    segment_ids: Any | None = None
    first_tile: int = 0
    padding_segment_id: int | None = None


def visible_column(
    band: Band, block: Any, tile: int, offsets: tuple[int, ...], mask: Mask | None, keys_axis: int
) -> Bool[Array, "..."] | None:
    """Which logits of query tile `tile` of `block` with the keys of a column are visible; None if all are.

    With keys on axis 1: [stacked, tile]; on axis 0: [tile, stacked]. Without `mask` only the window hides keys.
    """
    if len(offsets) == 1:
        return _visible_tile(band, block, tile, offsets[0], mask, keys_axis)
    if mask is None:
        return None
    own = on_own_tile(band, keys_axis)
    of_own, of_first = (_visible_tile(band, block, tile, offset, mask, keys_axis) for offset in offsets)
    assert of_own is not None, "a mask hides something of every tile"
    assert of_first is not None, "a mask hides something of every tile"
    return (own & of_own) | (jnp.logical_not(own) & of_first)


def _visible_tile(
    band: Band, block: Any, tile: int, offset: int, mask: Mask | None, keys_axis: int
) -> Bool[Array, "..."] | None:
    conditions = []
    key = offset * band.tile + _iota(band, keys_axis, keys_axis)
    query = _query_index(band, keys_axis)
    if offset * band.tile + band.tile - 1 > 0:
        conditions.append(key <= query)
    if offset * band.tile < band.tile - 1 - band.left:
        conditions.append(key >= query - band.left)
    if mask is not None:
        conditions.append(key >= mask.lowest - block * band.block - tile * band.tile)
        if mask.segment_ids is not None:
            queries = mask.first_tile + block * band.tiles_per_block + tile
            query_ids = _along(mask.segment_ids[0, queries], 1 - keys_axis, band.group)
            key_ids = _along(mask.segment_ids[0, queries + offset], keys_axis, 1)
            conditions.append(query_ids == key_ids)
            if mask.padding_segment_id is not None:
                conditions.append(query_ids != mask.padding_segment_id)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def on_own_tile(band: Band, keys_axis: int) -> Bool[Array, "..."]:
    """Which elements of a joined column belong to the queries' own tile; the others to the window's first."""
    return _iota(band, keys_axis, keys_axis) <= _query_index(band, keys_axis)


def joined(band: Band, tiles: list[Array], keys_axis: int) -> Array:
    """One column out of the tiles that it holds."""
    return tiles[0] if len(tiles) == 1 else jnp.where(on_own_tile(band, keys_axis), *tiles)


def split(band: Band, column: Array, tiles: int, keys_axis: int) -> list[Array]:
    """The tiles of a column, zero where the column belongs to another."""
    if tiles == 1:
        return [column]
    own, zero = on_own_tile(band, keys_axis), jnp.zeros_like(column)
    return [jnp.where(own, column, zero), jnp.where(own, zero, column)]


def base2(products: Array, config: KernelConfig) -> Array:
    """Logits times log2(e), of products of query and key: scaled, and soft-capped where the layer has a cap."""
    cap = config.attn_logits_soft_cap
    if cap is None:
        return products * (config.scale * LOG2_E)
    return jnp.tanh(products * (config.scale / cap)) * (cap * LOG2_E)


def matmul(one: Array, other: Array, contract: tuple[int, int]) -> Array:
    """Contracts axis `contract[0]` of one with `contract[1]` of the other, in float32."""
    precision = lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(one, other, dimensions, precision=precision, preferred_element_type=jnp.float32)


def as_column(row: Array) -> Array:
    """[1, rows] → [rows, LANES], every lane alike."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def widened(column: Array, width: int) -> Array:
    """[rows, LANES], every lane alike → [rows, width], without moving anything across lanes."""
    whole = -(-width // LANES)
    return column[:, :width] if whole == 1 else jnp.concatenate([column] * whole, axis=1)[:, :width]


def _iota(band: Band, keys_axis: int, axis: int) -> Int32[Array, "..."]:
    shape = (band.stacked, band.tile) if keys_axis == 1 else (band.tile, band.stacked)
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _query_index(band: Band, keys_axis: int) -> Int32[Array, "..."]:
    """Of stacked rows: the query's index within its tile."""
    stacked = _iota(band, keys_axis, 1 - keys_axis)
    return stacked if band.group == 1 else lax.rem(stacked, jnp.int32(band.tile))


def _along(ids: Int32[Array, "1 tile"], axis: int, copies: int) -> Int32[Array, "..."]:
    """Segment ids of a tile, `copies` times over: as a row (axis 1), or as a column."""
    if axis == 1:
        return ids if copies == 1 else jnp.concatenate([ids] * copies, axis=1)
    column = as_column(ids)[:, :1]
    return column if copies == 1 else jnp.concatenate([column] * copies, axis=0)
