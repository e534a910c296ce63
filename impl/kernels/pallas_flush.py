"""Gradients of keys on their way out of the Pallas halo backward: a ring of float32 blocks in VMEM, emptied into HBM.

Gradients of halo rows and of the chunk's own go to separate arrays. Used by pallas_halo_backward.py; tested in
tests/impl/test_pallas_halo.py.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from impl.kernels.pallas_blocks import Band


class GradientRing(NamedTuple):
    """References to gradients of keys and values, in this order: where they go in HBM, and the ring of blocks in VMEM.

    local: [heads, rows, dim]. halo: [heads, blocks_before · block, dim], or None. buffers: [slots · block, dim]
    float32; a block has the slot of the keys' ring. resumed: `local` holds gradients by earlier queries to add to.
    """

    local: tuple[Any, Any]
    halo: tuple[Any, Any] | None
    buffers: tuple[Any, Any]
    semaphores: Any
    resumed: bool


def open_gradients(ring: GradientRing, band: Band, step: Int32[Array, ""]) -> None:
    """Makes room for the gradients of the keys that grid step `step` is the first to see.

    The chunk's own rows are written before they are added to; what precedes a head's first query block starts at zero,
    or at what an earlier call has left.
    """
    head, block = band.head_and_block(step)
    _vacate(ring, band, head, block)

    @pl.when(block == band.first_block)
    def _before() -> None:
        @pl.loop(0, band.blocks_before)
        def _each(index: Any) -> None:
            earlier = block - band.blocks_before + index
            _vacate(ring, band, head, earlier)
            rows = _slot_rows(band, head, earlier)
            if not ring.resumed:
                for buffer in ring.buffers:
                    buffer[rows, :] = jnp.zeros((band.block, buffer.shape[1]), jnp.float32)
                return
            source = pl.ds(pl.multiple_of(earlier * band.block, band.block), band.block)
            slot = band.slot(head, earlier)
            for kind, (array, buffer) in enumerate(zip(ring.local, ring.buffers, strict=True)):
                copy = pltpu.make_async_copy(array.at[head, source], buffer.at[rows], ring.semaphores.at[kind, slot])
                copy.start()
                copy.wait()


def flush_gradients(ring: GradientRing, band: Band, step: Int32[Array, ""]) -> None:
    """Sends home the gradients that no later query adds to: the band's last block, and all of it at a head's end."""
    head, block = band.head_and_block(step)
    is_last = block == band.first_block + band.blocks - 1

    @pl.loop(block - band.blocks_before, jnp.where(is_last, block, block - band.blocks_before) + 1)
    def _each(done: Any) -> None:
        if ring.halo is None:
            _start(ring, band, head, done, done, ring.local)
            return
        halo = ring.halo
        in_halo = done < 0
        pl.when(in_halo)(lambda: _start(ring, band, head, done, done + band.blocks_before, halo))
        pl.when(jnp.logical_not(in_halo))(lambda: _start(ring, band, head, done, done, ring.local))

    @pl.when(step == band.steps - 1)
    def _finish() -> None:
        total = band.heads * (band.blocks_before + band.blocks)

        @pl.loop(max(0, total - band.slots), total)
        def _each(number: Any) -> None:
            _wait(ring, band, lax.rem(number, jnp.int32(band.slots)))


def _vacate(ring: GradientRing, band: Band, head: Any, block: Any) -> None:
    """Waits until the gradients that had the block's slot before have left it."""

    @pl.when(band.sequence_number(head, block) >= band.slots)
    def _occupied() -> None:
        _wait(ring, band, band.slot(head, block))


def _start(ring: GradientRing, band: Band, head: Any, block: Any, target: Any, arrays: tuple[Any, Any]) -> None:
    """Key block `block` on its way to block `target` of the arrays."""
    slot = band.slot(head, block)
    into = pl.ds(pl.multiple_of(target * band.block, band.block), band.block)
    for kind, (array, buffer) in enumerate(zip(arrays, ring.buffers, strict=True)):
        rows = buffer.at[_slot_rows(band, head, block)]
        pltpu.make_async_copy(rows, array.at[head, into], ring.semaphores.at[kind, slot]).start()


def _wait(ring: GradientRing, band: Band, slot: Any) -> None:
    for kind, (array, buffer) in enumerate(zip(ring.local, ring.buffers, strict=True)):
        # Only the size of a copy that is waited for matters, not where it goes.
        rows = pl.ds(0, band.block)
        pltpu.make_async_copy(buffer.at[rows], array.at[0, rows], ring.semaphores.at[kind, slot]).wait()


def _slot_rows(band: Band, head: Any, block: Any) -> Any:
    return pl.ds(pl.multiple_of(band.slot(head, block) * band.block, band.block), band.block)
