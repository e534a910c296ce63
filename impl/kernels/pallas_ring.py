"""Keys on their way into a Pallas halo kernel: a ring of key blocks in VMEM, and the specs of what follows the grid.

Halo and local keys are separate arrays in HBM; each block is fetched once, while the block before it computes.
Tested in tests/impl/test_pallas_halo.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from impl.kernels.interface import KernelConfig
from impl.kernels.pallas_blocks import Band

HBM = pl.BlockSpec(memory_space=pl.ANY)


class KeyRing(NamedTuple):
    """References to keys and values, in this order: where they lie in HBM, and the ring of blocks in VMEM.

    local: [heads, rows, dim]. halo: [heads, blocks_before · block, dim], or None where the call's first block is so far
    in that it sees none. buffers: [slots · block, dim]. semaphores: [2, slots].
    """

    local: tuple[Any, Any]
    halo: tuple[Any, Any] | None
    buffers: tuple[Any, Any]
    semaphores: Any


def fetch_keys(ring: KeyRing, band: Band, step: Int32[Array, ""]) -> None:
    """Waits for the keys of grid step `step` and starts fetching those of the next; each block is fetched once a head.

    Steps beyond the last compute nothing that is kept, and fetch nothing.
    """

    @pl.when(step == 0)
    def _first() -> None:
        _start(ring, band, step)

    @pl.when(step < band.steps)
    def _arrived() -> None:
        _wait(ring, band, step)

    @pl.when(step + 1 < band.steps)
    def _next() -> None:
        _start(ring, band, step + 1)


def _start(ring: KeyRing, band: Band, step: Any) -> None:
    head, block = band.head_and_block(step)
    _for_the_blocks_before(ring, band, head, block, lambda copy: copy.start())
    for copy in _copies(ring, band, head, block, block, ring.local):
        copy.start()


def _wait(ring: KeyRing, band: Band, step: Any) -> None:
    head, block = band.head_and_block(step)
    _for_the_blocks_before(ring, band, head, block, lambda copy: copy.wait())
    for copy in _copies(ring, band, head, block, block, ring.local):
        copy.wait()


def _for_the_blocks_before(ring: KeyRing, band: Band, head: Any, block: Any, do: Any) -> None:
    """What precedes a head's first query block, out of the halo or the chunk itself."""
    source = ring.local if ring.halo is None else ring.halo
    first = band.first_block - band.blocks_before if ring.halo is None else 0

    # A loop, not straight-line code: it must cost the other steps no more than a branch.
    @pl.when(block == band.first_block)
    def _before() -> None:
        @pl.loop(0, band.blocks_before)
        def _each(index: Any) -> None:
            target = band.first_block - band.blocks_before + index
            for copy in _copies(ring, band, head, target, first + index, source):
                do(copy)


def _copies(ring: KeyRing, band: Band, head: Any, target: Any, block: Any, source: tuple[Any, Any]) -> list[Any]:
    """Block `block` of the source, on its way to the slot of key block `target`."""
    slot = band.slot(head, target)
    rows = pl.ds(pl.multiple_of(block * band.block, band.block), band.block)
    into = pl.ds(pl.multiple_of(slot * band.block, band.block), band.block)
    return [
        pltpu.make_async_copy(array.at[head, rows], buffer.at[into], ring.semaphores.at[index, slot])
        for index, (array, buffer) in enumerate(zip(source, ring.buffers, strict=True))
    ]


def now(band: Band, step: Any) -> tuple[Any, Any]:
    """(head, block) whose logits a grid step makes; the last step, which only finishes, repeats the one before."""
    return band.head_and_block(jnp.minimum(step, band.steps - 1))


def before(band: Band, step: Any) -> tuple[Any, Any]:
    """(head, block) whose result a grid step finishes; the first step's is made again by the second."""
    return band.head_and_block(jnp.maximum(step - 1, 0))


Where = Callable[[Band, Any], tuple[Any, Any]]


def query_spec(band: Band, dim: int, where: Where) -> pl.BlockSpec:
    """Of [heads, group, rows, dim]: a block of rows of every head of a group."""

    def index(step: Any, *_: Any) -> tuple[Any, ...]:
        head, block = where(band, step)
        return head, 0, block, 0

    return pl.BlockSpec((1, band.group, band.block, dim), index)


def row_spec(band: Band, where: Where) -> pl.BlockSpec:
    """Of [heads, group, rows], a number for each row: lse, delta."""

    def index(step: Any, *_: Any) -> tuple[Any, ...]:
        head, block = where(band, step)
        return head, 0, block

    return pl.BlockSpec((1, band.group, band.block), index)


def segment_ids_spec(tiles: int, band: Band, where: Where) -> pl.BlockSpec:
    """Of [batch, tiles, 1, tile]: all ids of a batch row."""

    def index(step: Any, *_: Any) -> tuple[Any, ...]:
        head, _ = where(band, step)
        return lax.div(head, jnp.int32(band.num_kv_heads)), 0, 0, 0

    return pl.BlockSpec((1, tiles, 1, band.tile), index)


def compiler_params(config: KernelConfig) -> pltpu.CompilerParams:
    """Steps run in order, since a block's keys stay for the next; every address is inside its array by construction."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_bytes, disable_bounds_checks=True
    )


def cost(band: Band, dims: int, matmul_pairs: int, dtype: jnp.dtype) -> pl.CostEstimate:
    """What a call does: `matmul_pairs` pairs of matmuls of every query with its window, contracting `dims` in all."""
    queries = band.steps * band.block * band.group
    visible = queries * (band.left + 1)
    return pl.CostEstimate(
        flops=2 * matmul_pairs * visible * dims,
        transcendentals=visible,
        bytes_accessed=2 * matmul_pairs * queries * dims * jnp.dtype(dtype).itemsize,
    )


def interleaved(*parts: Iterator[None]) -> None:
    """Runs generators in turns: the order in which a kernel's program issues the matmuls of all parts."""
    waiting = list(parts)
    while waiting:
        waiting = [part for part in waiting if next(part, _DONE) is not _DONE]


_DONE = object()
