"""The backward Pallas TPU kernel of local attention with a window: dquery, dkey and dvalue in one pass over the band.

What a grid step computes is in pallas_halo_gradients.py. Gradients of keys gather in float32 in VMEM, in a ring beside
that of the keys, and leave when the band has passed (pallas_flush.py). Geometry: pallas_blocks.py.
Tested in tests/impl/test_pallas_halo.py.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from impl.kernels import pallas_ring as ring_of
from impl.kernels.interface import KernelConfig
from impl.kernels.pallas_blocks import Band, Mask
from impl.kernels.pallas_fetch import Cargo, call_with_cargo
from impl.kernels.pallas_flush import GradientRing, Targets, flush_gradients, open_gradients
from impl.kernels.pallas_halo_forward import BandOperands
from impl.kernels.pallas_halo_gradients import StepRefs, compute_gradients
from impl.kernels.pallas_ring import HBM, KeyRing, now


class BandCotangents(NamedTuple):
    """What the backward knows of each query row: interface.RowCotangents, heads first.

    Rows without a visible key, and rows that only fill a block, have a very large lse: their probabilities are zero.
    """

    dout: Float[Array, "heads group rows value_dim"]
    lse: Float[Array, "heads group rows"]
    delta: Float[Array, "heads group rows"]
    out: Float[Array, "heads group rows value_dim"] | None = None


class BackwardResult(NamedTuple):
    """dquery in the inputs' dtype, complete. dkey and dvalue are complete, scaled and rounded in the band's final
    blocks, undefined elsewhere; the tail's and the halo's, to which others add, are in float32 and not yet scaled.

    None where a call has no such blocks. arrived: of the cargo.
    """

    dquery: Float[Array, "heads group rows head_dim"]
    dkey: Float[Array, "heads rows head_dim"] | None
    dvalue: Float[Array, "heads rows value_dim"] | None
    dtail_key: Float[Array, "heads tail_rows head_dim"]
    dtail_value: Float[Array, "heads tail_rows value_dim"]
    dhalo_key: Float[Array, "heads halo_rows head_dim"] | None
    dhalo_value: Float[Array, "heads halo_rows value_dim"] | None
    arrived: tuple[Float[Array, "heads length dim"], ...] = ()


def band_backward(
    operands: BandOperands,
    cotangents: BandCotangents,
    band: Band,
    config: KernelConfig,
    final_dtype: jnp.dtype,
    into: BackwardResult | None = None,
    cargo: Cargo | None = None,
) -> BackwardResult:
    """Gradients by the band's query blocks: dquery beside that of `into`, those of keys added to its tail.

    cargo: rows that the kernel sends to another rank meanwhile.
    """
    head_dim, value_dim = operands.query.shape[-1], operands.value.shape[-1]
    inputs = _inputs(operands, cotangents, band, into)
    outputs = _outputs(operands, band, final_dtype)
    present = [shape for shape in outputs if shape is not None]
    staged = [(head_dim, final_dtype), (value_dim, final_dtype)] if band.final_blocks else []
    given = _Given(
        operands.halo_key is not None,
        operands.segment_ids is not None,
        cotangents.out is not None,
        into is not None,
        band.final_blocks > 0,
    )
    with jax.enable_x64(False):
        results, arrived = call_with_cargo(
            cargo,
            functools.partial(_kernel, band=band, config=config, given=given),
            [operands.lowest, *(array for array, _ in inputs)],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(band.steps,),
                in_specs=[spec for _, spec in inputs],
                out_specs=[ring_of.query_spec(band, head_dim, now), *[HBM] * (len(present) - 1)],
                scratch_shapes=[
                    pltpu.VMEM((band.slots * band.block, head_dim), operands.key.dtype),
                    pltpu.VMEM((band.slots * band.block, value_dim), operands.value.dtype),
                    pltpu.SemaphoreType.DMA((2, band.slots)),
                    pltpu.VMEM((band.slots * band.block, head_dim), jnp.float32),
                    pltpu.VMEM((band.slots * band.block, value_dim), jnp.float32),
                    pltpu.SemaphoreType.DMA((2, band.slots)),
                    pltpu.SemaphoreType.DMA((2,)),
                    *(pltpu.VMEM((band.block, dim), dtype) for dim, dtype in staged),
                ],
            ),
            out_shape=present,
            input_output_aliases={} if into is None else {len(inputs) - 2: 0},
            compiler_params=ring_of.compiler_params(config),
            cost_estimate=ring_of.cost(band, 3 * head_dim + 2 * value_dim, 1, operands.query.dtype),
            name="pallas_halo_backward",
            interpret=config.interpret,
        )
    computed = iter(results)
    return BackwardResult._make([*(None if shape is None else next(computed) for shape in outputs), arrived])


def _inputs(
    operands: BandOperands, cotangents: BandCotangents, band: Band, into: BackwardResult | None
) -> list[tuple[Array, pl.BlockSpec]]:
    """What `_kernel` reads, in its order; dquery so far, which is written into, is the third from the end."""
    head_dim, value_dim = operands.query.shape[-1], operands.value.shape[-1]
    ids = operands.segment_ids
    earlier = () if into is None else (into.dquery, into.dtail_key, into.dtail_value)
    inputs = [
        (operands.query, ring_of.query_spec(band, head_dim, now)),
        (operands.key, HBM),
        (operands.value, HBM),
        (cotangents.dout, ring_of.query_spec(band, value_dim, now)),
        (cotangents.lse, ring_of.row_spec(band, now)),
        (cotangents.delta, ring_of.row_spec(band, now)),
        (operands.halo_key, HBM),
        (operands.halo_value, HBM),
        (ids, None if ids is None else ring_of.segment_ids_spec(ids.shape[1], band, now)),
        (cotangents.out, ring_of.query_spec(band, value_dim, now)),
        *((array, HBM) for array in earlier),
    ]
    return [(array, spec) for array, spec in inputs if array is not None and spec is not None]


def _outputs(operands: BandOperands, band: Band, final_dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct | None]:
    """The shapes of the results, in the order of BackwardResult."""

    def of_keys(key: Array | None, rows: int | None, dtype: Any) -> Any:
        if key is None or rows == 0:
            return None
        heads, own_rows, dim = key.shape
        return jax.ShapeDtypeStruct((heads, own_rows if rows is None else rows, dim), dtype)

    tail = band.tail_blocks * band.block
    whole = None if band.final_blocks else 0
    return [
        jax.ShapeDtypeStruct(operands.query.shape, operands.query.dtype),
        of_keys(operands.key, whole, final_dtype),
        of_keys(operands.value, whole, final_dtype),
        of_keys(operands.key, tail, jnp.float32),
        of_keys(operands.value, tail, jnp.float32),
        of_keys(operands.halo_key, None, jnp.float32),
        of_keys(operands.halo_value, None, jnp.float32),
    ]


class _Given(NamedTuple):
    """Which optional operands and results a kernel has."""

    halo: bool
    segment_ids: bool
    out: bool
    into: bool
    final: bool


def _kernel(lowest: Any, *refs: Any, band: Band, config: KernelConfig, given: _Given) -> None:
    rest = iter(refs)
    query, key, value, dout, lse, delta = (next(rest) for _ in range(6))
    halo = _pair(rest, given.halo)
    ids = next(rest) if given.segment_ids else None
    out = next(rest) if given.out else None
    if given.into:
        next(rest)  # dquery so far is in HBM already: what is aliased to it is all that is written.
    earlier = _pair(rest, given.into)
    dquery = next(rest)
    final, tail = _pair(rest, given.final), (next(rest), next(rest))
    targets = Targets(final, tail, _pair(rest, given.halo))
    key_buffer, value_buffer, semaphores, *gradient_buffers, gradient_semaphores, staging_semaphores = (
        next(rest) for _ in range(7)
    )
    ring = KeyRing((key, value), halo, (key_buffer, value_buffer), semaphores)
    gradients = GradientRing(
        targets,
        earlier,
        (gradient_buffers[0], gradient_buffers[1]),
        gradient_semaphores,
        tuple(rest),
        staging_semaphores,
        config.scale,
    )
    mask = Mask(lowest[0], ids, band.blocks_before * band.tiles_per_block, config.padding_segment_id)
    step = pl.program_id(0)
    ring_of.fetch_keys(ring, band, step)
    open_gradients(gradients, band, step)
    refs_of_step = StepRefs(query, dout, out, lse, delta, ring, gradients, mask, dquery)
    compute = functools.partial(compute_gradients, refs_of_step, band, config, step)
    if given.segment_ids or not given.halo:
        # Without a halo the call begins so far into the chunk that no query sees beyond the sequence.
        compute(mask if given.segment_ids else None)
    else:
        _, block = band.head_and_block(step)
        clipped = block * band.block - band.left < mask.lowest
        # Blocks that see nothing beyond the sequence's beginning run a program without that mask.
        pl.when(clipped)(functools.partial(compute, mask))
        pl.when(jnp.logical_not(clipped))(functools.partial(compute, None))
    flush_gradients(gradients, band, step)


def _pair(refs: Iterator[Any], present: bool) -> tuple[Any, Any] | None:
    return (next(refs), next(refs)) if present else None
