"""Gradients of keys on their way out of the Pallas halo backward: a ring of float32 blocks in VMEM, emptied into HBM.

Gradients of halo rows and of the chunk's last rows, to which others still add, leave as they are; those that are final
are scaled and rounded on the way. Used by pallas_halo_backward.py; tested in tests/impl/test_pallas_halo.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from impl.kernels.pallas_blocks import Band


class Targets(NamedTuple):
    """References in HBM, each to gradients of keys and of values: where blocks go, by who still adds to them.

    final: [heads, rows, dim], blocks before `band.final_blocks`. tail: [heads, tail_blocks · block, dim], those after
    them. halo: [heads, blocks_before · block, dim]. final and halo are None where no block goes there.
    """

    final: tuple[Any, Any] | None
    tail: tuple[Any, Any]
    halo: tuple[Any, Any] | None


class GradientRing(NamedTuple):
    """Gradients of keys and values, in this order, while queries add to them.

    earlier: in HBM, the tail of an earlier call, to whose gradients this one adds; or None. buffers: [slots · block,
    dim] float32; a block has the slot of the keys' ring. staging: [block, dim] in the dtype of final gradients, with
    semaphores [2] of its own. scale: of final dkey.
    """

    targets: Targets
    earlier: tuple[Any, Any] | None
    buffers: tuple[Any, Any]
    semaphores: Any
    staging: tuple[Any, Any]
    staging_semaphores: Any
    scale: float


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
            before = block - band.blocks_before + index
            _vacate(ring, band, head, before)
            rows = _slot_rows(band, head, before)
            if ring.earlier is None:
                for buffer in ring.buffers:
                    buffer[rows, :] = jnp.zeros((band.block, buffer.shape[1]), jnp.float32)
                return
            slot = band.slot(head, before)
            for kind, (array, buffer) in enumerate(zip(ring.earlier, ring.buffers, strict=True)):
                source = array.at[head, _block_rows(band, before)]
                copy = pltpu.make_async_copy(source, buffer.at[rows], ring.semaphores.at[kind, slot])
                copy.start()
                copy.wait()


def flush_gradients(ring: GradientRing, band: Band, step: Int32[Array, ""]) -> None:
    """Sends home the gradients that no later query of this call adds to: the band's last block, and all of it at a
    head's end."""
    head, block = band.head_and_block(step)
    is_last = block == band.first_block + band.blocks - 1

    @pl.loop(block - band.blocks_before, jnp.where(is_last, block, block - band.blocks_before) + 1)
    def _each(done: Any) -> None:
        halo, tail = ring.targets.halo, ring.targets.tail
        if halo is not None:
            pl.when(done < 0)(lambda: _start(ring, band, head, done, done + band.blocks_before, halo))
        if ring.targets.final is not None:
            pl.when(_is_final(band, done))(lambda: _round(ring, band, head, done))
        pl.when(done >= band.final_blocks)(lambda: _start(ring, band, head, done, done - band.final_blocks, tail))

    @pl.when(step == band.steps - 1)
    def _finish() -> None:
        total = band.heads * _blocks_of_a_head(band)

        @pl.loop(max(0, total - band.slots), total)
        def _each(number: Any) -> None:
            _wait_for_occupant(ring, band, number)

        if ring.targets.final is not None:
            _each_staged(ring, band, 0, 0, lambda copy: copy.wait())


def _blocks_of_a_head(band: Band) -> int:
    return band.blocks_before + band.blocks


def _is_final(band: Band, block: Any) -> Any:
    return jnp.logical_and(block >= 0, block < band.final_blocks)


def _vacate(ring: GradientRing, band: Band, head: Any, block: Any) -> None:
    """Waits until the gradients that had the block's slot before have left it."""
    number = band.sequence_number(head, block)
    pl.when(number >= band.slots)(lambda: _wait_for_occupant(ring, band, number - band.slots))


def _wait_for_occupant(ring: GradientRing, band: Band, number: Any) -> None:
    """Waits for the block with this sequence number to leave its slot. Final ones have left it for the staging."""
    block = lax.rem(number, jnp.int32(_blocks_of_a_head(band))) + band.first_block - band.blocks_before

    @pl.when(jnp.logical_not(_is_final(band, block)))
    def _travelling() -> None:
        slot = lax.rem(number, jnp.int32(band.slots))
        for kind, (array, buffer) in enumerate(zip(ring.targets.tail, ring.buffers, strict=True)):
            # Only the size of a copy that is waited for matters, not where it goes.
            rows = pl.ds(0, band.block)
            pltpu.make_async_copy(buffer.at[rows], array.at[0, rows], ring.semaphores.at[kind, slot]).wait()


def _start(ring: GradientRing, band: Band, head: Any, block: Any, target: Any, arrays: tuple[Any, Any]) -> None:
    """Key block `block` on its way to block `target` of the arrays."""
    slot = band.slot(head, block)
    for kind, (array, buffer) in enumerate(zip(arrays, ring.buffers, strict=True)):
        rows = buffer.at[_slot_rows(band, head, block)]
        into = array.at[head, _block_rows(band, target)]
        pltpu.make_async_copy(rows, into, ring.semaphores.at[kind, slot]).start()


def _round(ring: GradientRing, band: Band, head: Any, block: Any) -> None:
    """Final gradients of key block `block`: scaled and rounded into the staging, and on their way from there."""
    is_first = jnp.logical_and(head == 0, block == max(0, band.first_block - band.blocks_before))
    pl.when(jnp.logical_not(is_first))(lambda: _each_staged(ring, band, head, block, lambda copy: copy.wait()))
    rows = _slot_rows(band, head, block)
    for buffer, staging, scale in zip(ring.buffers, ring.staging, (ring.scale, 1), strict=True):
        staging[...] = (buffer[rows, :] * scale).astype(staging.dtype)
    _each_staged(ring, band, head, block, lambda copy: copy.start())


def _each_staged(ring: GradientRing, band: Band, head: Any, block: Any, do: Callable[[Any], None]) -> None:
    assert ring.targets.final is not None, "only final gradients are staged"
    for kind, (array, staging) in enumerate(zip(ring.targets.final, ring.staging, strict=True)):
        into = array.at[head, _block_rows(band, block)]
        do(pltpu.make_async_copy(staging, into, ring.staging_semaphores.at[kind]))


def _slot_rows(band: Band, head: Any, block: Any) -> Any:
    return _block_rows(band, band.slot(head, block))


def _block_rows(band: Band, block: Any) -> Any:
    return pl.ds(pl.multiple_of(block * band.block, band.block), band.block)
