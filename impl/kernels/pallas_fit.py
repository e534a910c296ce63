"""Chooses the blocks of the Pallas halo kernels: the best by static schedule whose band fits into a core's VMEM.

Sizes are estimated, a little too large rather than too small (bench/tpu_vmem.py); that they hold is tested by compiling
for every generation. Used by pallas_halo.py and dispatch.py; tested in tests/impl/test_pallas_fit.py and
test_pallas_aot.py.
"""

from dataclasses import dataclass
from typing import Any

from impl.kernels.pallas_blocks import LANES, Band

BLOCKS = (1024, 512, 256, 128)
"""Best first, by libtpu's static schedule (bench/tpu_schedule.py): what a grid step waits for at its start, and does
besides its tiles, counts less in a longer one. The first is for windows of its length at least: its halo is as long."""
LONG_TILE = 256
"""The matrix unit's own size: shorter tiles leave part of it idle, longer ones compute more of what nobody sees."""
MOST_TILES = 20
"""Of logits that a grid step computes, each with code of its own. With more of them a shorter block is better: a
window of 4096 has 32 in a block of 512, whose forward takes 6482 bundles for 512 queries of a head (Mistral 7B, v6e),
and 16 in one of 256, whose forward takes 5326 (the backward 11196 and 11261), and compiles in a third of the time."""
SPILLED_TILES, SPILLED_WEIGHTS = 8, 1.75
"""Float32 tiles of logits that a program keeps in VMEM beside what it asks for: the backward's, at most (7.9 for v4);
the forward's for each tile of queries in a block, as a multiple of their weights (1.1 to 1.64 on v6e)."""
MIB = 2**20
VMEM_OF_KIND = {"TPU v4": 16 * MIB, "TPU v5 lite": 128 * MIB, "TPU v5": 64 * MIB, "TPU v6 lite": 128 * MIB}
"""Of a core, by its device's kind (jax's pallas tpu_info)."""
VMEM_OF_OTHERS = 64 * MIB
"""TPU7x's, under whatever name it comes."""
VMEM_SHARE, VMEM_MOST = 0.95, 100 * MIB
"""Of a core's VMEM, what a kernel may ask for: XLA keeps arrays of its own in the rest."""


@dataclass(frozen=True)
class RowSizes:
    """What decides how much VMEM a block of rows takes. dims: head_dim + value_dim, each in whole lanes.

    group: query heads of a kv head. itemsize: bytes of an input's element. segment_ids: whether the layer has them.
    """

    dims: int
    group: int
    itemsize: int
    segment_ids: bool

    @classmethod
    def of(cls, query: Any, value: Any, group: int, segment_ids: bool) -> "RowSizes":
        """Of arrays [..., head_dim] and [..., value_dim]."""
        dims = (query.shape[-1], value.shape[-1])
        return cls(sum(-(-dim // LANES) * LANES for dim in dims), group, query.dtype.itemsize, segment_ids)


@dataclass(frozen=True)
class Blocks:
    """Rows of a block and of a tile: see pallas_blocks.Band. Tests use small ones."""

    block: int
    tile: int

    @classmethod
    def fitting(cls, rows: int, window_left: int, sizes: RowSizes, vmem_bytes: int | None) -> "Blocks | None":
        """The best blocks for a chunk of `rows`; None where no blocks fit. vmem_bytes None: no limit."""
        for block in (size for size in BLOCKS if size <= max(window_left + 1, BLOCKS[1])):
            tile = LONG_TILE if min(window_left + 1, rows, block) >= LONG_TILE else LANES
            blocks = cls(min(block, -(-rows // tile) * tile), tile)
            band = blocks._band(window_left, sizes.group)
            if band.tiles_per_block > 1 and band.tiles_per_block * len(band.columns) > MOST_TILES:
                continue
            if vmem_bytes is None or blocks.vmem_bytes(rows, window_left, sizes) <= vmem_bytes:
                return blocks
        return None

    def vmem_bytes(self, rows: int, window_left: int, sizes: RowSizes) -> int:
        """What the larger of the two kernels takes."""
        band = self._band(window_left, sizes.group)
        ring_rows, tile = band.slots * self.block, band.stacked * self.tile * 4
        block_of_queries = 2 * sizes.group * self.block * sizes.dims * sizes.itemsize  # The next one is on its way.
        logits = band.tiles_per_block * len(band.columns) * tile
        maxima = band.tiles_per_block * band.stacked * LANES * 4
        held = sizes.group * self.block * (sizes.dims - LANES) * sizes.itemsize
        weights = (band.tiles_before + 1) * tile * sizes.itemsize // 4
        spilled = band.tiles_per_block * int(SPILLED_WEIGHTS * weights)
        forward = ring_rows * sizes.dims * sizes.itemsize + block_of_queries + logits + maxima + held + spilled
        rounded = self.block * sizes.dims * sizes.itemsize
        ring_and_gradients = ring_rows * sizes.dims * (sizes.itemsize + 4)
        backward = ring_and_gradients + 2 * block_of_queries + rounded + SPILLED_TILES * tile
        # Ids of all rows of a chunk and its halo, a tile of them in eight sublanes, and the next batch row's.
        ids = 2 * 8 * 4 * (rows + window_left) if sizes.segment_ids else 0
        return max(forward, backward) + ids

    def _band(self, window_left: int, group: int) -> Band:
        """Of a head, two blocks long."""
        return Band(window_left, self.block, self.tile, 0, 2, 1, 1, group)


def vmem_of(device: Any) -> int:
    """Bytes of VMEM that a kernel may ask for on one core of a TPU, a `jax.Device`."""
    return min(int(VMEM_SHARE * VMEM_OF_KIND.get(device.device_kind, VMEM_OF_OTHERS)), VMEM_MOST)
