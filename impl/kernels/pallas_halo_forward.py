"""The forward Pallas TPU kernel of local attention with a window whose halo and local keys are separate operands.

Logits of a tile of queries are made while the tile before it is finished, from logits that are in VMEM: matmuls of the
one run beside exponentials of the other, and nothing is written where the other reads. The last tile of a block is
finished by the next grid step, which therefore writes the block's results. Geometry: pallas_blocks.py. Tested in
tests/impl/test_pallas_halo.py.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from impl.kernels import pallas_blocks as blocks
from impl.kernels import pallas_ring as ring_of
from impl.kernels.interface import KernelConfig
from impl.kernels.pallas_blocks import HIDDEN, LANES, LOG2_E, Band, Mask
from impl.kernels.pallas_fetch import Cargo, call_with_cargo
from impl.kernels.pallas_ring import HBM, KeyRing, before, now


class BandOperands(NamedTuple):
    """One rank's rows of a chunk, heads first. heads: pairs of batch row and kv head.

    lowest: row, on the axis where the chunk's first is 0 and its halo is negative, before which there are no keys.
    segment_ids: of halo and chunk, in tiles. halo_key and halo_value are None where the call's queries see no halo.
    """

    query: Float[Array, "heads group rows head_dim"]
    key: Float[Array, "heads rows head_dim"]
    value: Float[Array, "heads rows value_dim"]
    halo_key: Float[Array, "heads halo_rows head_dim"] | None
    halo_value: Float[Array, "heads halo_rows value_dim"] | None
    lowest: Int32[Array, " 1"]
    segment_ids: Int32[Array, "batch tiles 1 tile"] | None = None
    sinks: Float[Array, " num_query_heads"] | None = None


class ForwardResult(NamedTuple):
    """out in the inputs' dtype; lse is the natural logarithm, −inf where a row sees no key. arrived: of the cargo."""

    out: Float[Array, "heads group rows value_dim"]
    lse: Float[Array, "heads group rows"]
    arrived: tuple[Float[Array, "heads length dim"], ...] = ()


def band_forward(
    operands: BandOperands,
    band: Band,
    config: KernelConfig,
    into: ForwardResult | None = None,
    cargo: Cargo | None = None,
) -> ForwardResult:
    """Attention of the band's query blocks; other rows of the result are those of `into`, or undefined without it.

    cargo: rows that the kernel sends to another rank meanwhile.
    """
    head_dim = operands.query.shape[-1]
    value_dim = operands.value.shape[-1]
    ids = operands.segment_ids
    tiles, columns = band.tiles_per_block, len(band.columns)
    optional = _present(
        (operands.halo_key, HBM),
        (operands.halo_value, HBM),
        (ids, None if ids is None else ring_of.segment_ids_spec(ids.shape[1], band, now)),
        (operands.sinks, pl.BlockSpec(memory_space=pltpu.SMEM)),
        (None if into is None else into.out, HBM),
        (None if into is None else into.lse, HBM),
    )
    required = ((operands.query, ring_of.query_spec(band, head_dim, now)), (operands.key, HBM))
    inputs = [*required, (operands.value, HBM), *optional]
    with jax.enable_x64(False):
        (out, lse), arrived = call_with_cargo(
            cargo,
            functools.partial(_kernel, band=band, config=config, given=_Given.of(operands, into)),
            [operands.lowest, *(array for array, _ in inputs)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(band.steps + 1,),
                in_specs=[spec for _, spec in inputs],
                out_specs=[ring_of.query_spec(band, value_dim, before), ring_of.row_spec(band, before)],
                scratch_shapes=[
                    pltpu.VMEM((band.slots * band.block, head_dim), operands.key.dtype),
                    pltpu.VMEM((band.slots * band.block, value_dim), operands.value.dtype),
                    pltpu.VMEM((tiles, columns, band.stacked, band.tile), jnp.float32),
                    pltpu.VMEM((tiles, band.stacked, LANES), jnp.float32),
                    pltpu.VMEM((1, band.group, band.block, value_dim), operands.query.dtype),
                    pltpu.VMEM((1, band.group, band.block), jnp.float32),
                    pltpu.SemaphoreType.DMA((2, band.slots)),
                ],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((*operands.query.shape[:3], value_dim), operands.query.dtype),
                jax.ShapeDtypeStruct(operands.query.shape[:3], jnp.float32),
            ],
            input_output_aliases={} if into is None else {len(inputs) - 1: 0, len(inputs): 1},
            compiler_params=ring_of.compiler_params(config),
            cost_estimate=ring_of.cost(band, head_dim + value_dim, 1, operands.query.dtype),
            name="pallas_halo_forward",
            interpret=config.interpret,
        )
    return ForwardResult(out, lse, arrived)


class _Given(NamedTuple):
    """Which optional operands a kernel is given."""

    halo: bool
    segment_ids: bool
    sinks: bool
    into: bool

    @classmethod
    def of(cls, operands: BandOperands, into: ForwardResult | None) -> "_Given":
        halo, ids, sinks = operands.halo_key, operands.segment_ids, operands.sinks
        return cls(halo is not None, ids is not None, sinks is not None, into is not None)


class _Refs(NamedTuple):
    """finished: results of the step before, on their way out. held: of this step, for the next to write."""

    query: Any
    ring: KeyRing
    mask: Mask
    sinks: Any | None
    finished: ForwardResult
    held: ForwardResult
    logits: Any
    maximum: Any


def _kernel(lowest: Any, query: Any, key: Any, value: Any, *refs: Any, band: Band, config: KernelConfig, given: _Given):
    rest = iter(refs)
    halo = (next(rest), next(rest)) if given.halo else None
    ids = next(rest) if given.segment_ids else None
    sinks = next(rest) if given.sinks else None
    for _ in range(2 * given.into):
        next(rest)  # The results so far are in HBM already: the aliased outputs are all that is written.
    out, lse, key_buffer, value_buffer, logits, maximum, held_out, held_lse, semaphores = rest
    ring = KeyRing((key, value), halo, (key_buffer, value_buffer), semaphores)
    first_tile = band.blocks_before * band.tiles_per_block
    mask = Mask(lowest[0], ids, first_tile, config.padding_segment_id)
    step = pl.program_id(0)
    ring_of.fetch_keys(ring, band, step)
    results = (ForwardResult(out, lse), ForwardResult(held_out, held_lse))
    refs_of_step = _Refs(query, ring, mask, sinks, *results, logits, maximum)
    compute = functools.partial(_compute, refs_of_step, band, config, step)
    if given.segment_ids or not given.halo:
        # Without a halo the call begins so far into the chunk that no query sees beyond the sequence.
        compute(mask if given.segment_ids else None)
        return
    _, block = band.head_and_block(step)
    clipped = block * band.block - band.left < mask.lowest
    # Blocks that see nothing beyond the sequence's beginning run a program without that mask.
    pl.when(clipped)(functools.partial(compute, mask))
    pl.when(jnp.logical_not(clipped))(functools.partial(compute, None))


def _compute(refs: _Refs, band: Band, config: KernelConfig, step: Any, mask: Mask | None) -> None:
    last = band.tiles_per_block - 1
    rows = pl.ds(0, last * band.tile)
    if last > 0:
        refs.finished.out[0, :, rows, :] = refs.held.out[0, :, rows, :]
        refs.finished.lse[0, :, rows] = refs.held.lse[0, :, rows]
    attend = _attend(refs, band, jnp.maximum(step - 1, 0), last, refs.finished)
    for tile in range(band.tiles_per_block):
        logits = _logits(refs, band, config, step, tile, mask)
        if last > 0:
            ring_of.interleaved(attend, logits)
        else:
            # The only tile's logits have one place: they are read before they are written.
            ring_of.interleaved(attend)
            ring_of.interleaved(logits)
        attend = _attend(refs, band, step, tile, refs.held)


def _logits(refs: _Refs, band: Band, config: KernelConfig, step: Any, tile: int, mask: Mask | None) -> Iterator[None]:
    """Leaves base-2 logits of the step's queries, and their maximum by row, in VMEM."""
    head, block = band.head_and_block(step)
    rows = pl.ds(tile * band.tile, band.tile)
    query = refs.query[0, :, rows, :].reshape(band.stacked, -1)
    maximum = None
    for index, offsets in enumerate(band.columns):
        tiles = []
        for offset in offsets:
            key = refs.ring.buffers[0][band.ring_rows(head, block, tile + offset), :]
            tiles.append(blocks.matmul(query, key, (1, 1)))  # [stacked, tile]
            yield
        column = blocks.base2(blocks.joined(band, tiles, keys_axis=1), config)
        visible = blocks.visible_column(band, block, tile, offsets, mask, keys_axis=1)
        column = column if visible is None else jnp.where(visible, column, HIDDEN)
        refs.logits[tile, index] = column
        maximum = column if maximum is None else jnp.maximum(maximum, column)
    assert maximum is not None, "a query's own tile is always among the columns"
    row_maximum = jnp.max(maximum, axis=1, keepdims=True)
    if refs.sinks is not None:
        row_maximum = jnp.maximum(row_maximum, _sinks(refs, band, step)[:, :1])
    refs.maximum[tile] = jnp.broadcast_to(row_maximum, (band.stacked, LANES))
    yield


def _attend(refs: _Refs, band: Band, step: Any, tile: int, into: ForwardResult) -> Iterator[None]:
    """Softmax and output of the queries of `step`, whose logits are in VMEM."""
    head, block = band.head_and_block(step)
    maximum = refs.maximum[tile]
    by_column = blocks.widened(maximum, band.tile)
    total, parts, values = None, [], []
    for index, offsets in enumerate(band.columns):
        weights = jnp.exp2(refs.logits[tile, index] - by_column)  # [stacked, tile]
        total = weights if total is None else total + weights
        for offset, part in zip(offsets, blocks.split(band, weights, len(offsets), keys_axis=1), strict=True):
            value = refs.ring.buffers[1][band.ring_rows(head, block, tile + offset), :]
            parts.append(part.astype(value.dtype))
            values.append(value)
            yield
    assert total is not None, "a query's own tile is always among the columns"
    weights_of_all, values_of_all = jnp.concatenate(parts, axis=1), jnp.concatenate(values, axis=0)
    # Head by head: sums over tiles of keys then wait in half as many registers, and spill less.
    by_head = jnp.split(weights_of_all, band.group, axis=0)
    out = jnp.concatenate([blocks.matmul(weights, values_of_all, (1, 0)) for weights in by_head], axis=0)
    row_total = jnp.sum(total, axis=1, keepdims=True)
    if refs.sinks is not None:
        row_total = row_total + jnp.exp2(_sinks(refs, band, step)[:, :1] - maximum[:, :1])
    lse = (maximum + jnp.log2(row_total)) * (1 / LOG2_E)
    out = out * (1 / row_total)
    if refs.mask.segment_ids is not None:
        empty = maximum < HIDDEN / 2
        lse = jnp.where(empty, -jnp.inf, lse)
        out = jnp.where(empty[:, :1], 0, out)
    rows = pl.ds(tile * band.tile, band.tile)
    into.out[0, :, rows, :] = out.reshape(band.group, band.tile, -1).astype(into.out.dtype)
    as_row = lse.T  # [LANES, stacked]
    for member in range(band.group):
        into.lse[0, pl.ds(member, 1), rows] = as_row[:1, member * band.tile : (member + 1) * band.tile]
    yield


def _sinks(refs: _Refs, band: Band, step: Any) -> Float[Array, "stacked LANES"]:
    """Base-2 sinks of the group's query heads, one a stacked row."""
    head, _ = band.head_and_block(step)
    first = lax.rem(head, jnp.int32(band.num_kv_heads)) * band.group
    assert refs.sinks is not None, "only a layer with sinks asks for them"
    rows = [jnp.full((band.tile, LANES), refs.sinks[first + member] * LOG2_E) for member in range(band.group)]
    return jnp.concatenate(rows, axis=0)


def _present(*inputs: tuple[Any | None, Any]) -> list[tuple[Any, Any]]:
    return [(array, spec) for array, spec in inputs if array is not None]
