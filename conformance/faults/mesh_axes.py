"""Kind N: the batch axis, and mesh axes other than the one that the sequence lies on.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import batch_rows, crosses, is_sharded
from conformance.faults.kernels import operands_of_mask
from conformance.problem import Problem
from impl import exchange, local_attention, ring, sharded
from impl import layout as layouts
from impl.kernels.interface import KernelOperands


def _has_batch(problem: Problem) -> bool:
    return batch_rows(problem) > 1


def _gradient_of_the_first_row(right: Any, *arguments: Any, **named: Any) -> Any:
    gradients = right(*arguments, **named)
    return gradients._replace(dkey=jnp.broadcast_to(gradients.dkey[:1], gradients.dkey.shape))


def _ids_of_the_first_row(operands: KernelOperands) -> KernelOperands:
    if operands.query_segment_ids is None or operands.key_segment_ids is None:
        return operands
    return operands._replace(
        query_segment_ids=operands.query_segment_ids[:1], key_segment_ids=operands.key_segment_ids[:1]
    )


def _key_ids_of_the_next_row(operands: KernelOperands) -> KernelOperands:
    """Offsets into the packed batch are one row off for the keys."""
    if operands.key_segment_ids is None:
        return operands
    return operands._replace(key_segment_ids=jnp.roll(operands.key_segment_ids, 1, axis=0))


def _never_rotates(right: Any, *arguments: Any) -> tuple[int, int]:
    return 0, 0


def _one_row_only(arrays: Arrays, problem: Problem) -> Arrays:
    raise ValueError(f"batch must be 1, got {problem.batch}")


def _over_the_data_axis(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    return right(rows, plan, "data")


def _device_for_rank(right: Any, layout: str, seq_len: int, ranks: int, rank: Any) -> Any:
    return right(layout, seq_len, ranks, ranks - 1 - rank)


def _without_the_ulysses_axis(right: Any, gradients: Any, operands: Any, layer: Any) -> Any:
    summed = right(gradients, operands, layer)
    if gradients.dsinks is None:
        return summed
    axes = tuple(axis for axis in (layer.data_axis, layer.context_axis) if axis is not None)
    return summed._replace(dsinks=lax.psum(gradients.dsinks, axes).astype(operands.sinks.dtype))


FAULTS = (
    Fault(
        name="dkey_of_the_first_batch_row_for_all",
        kind="N",
        report="fla-org/flash-linear-attention/pull/955",
        sentence="dkey is indexed without the batch row.",
        planted_in="halo",
        smallest="v=1 batch=2 seq_len=4 sliding_window_size=2",
        applies=_has_batch,
        replaced=(Replacement(local_attention, "backward", _gradient_of_the_first_row),),
    ),
    Fault(
        name="mask_of_the_first_batch_row_for_all",
        kind="N",
        report="apple/axlearn/pull/538",
        sentence="The mask has one batch row, which is broadcast to all.",
        planted_in="halo",
        smallest="v=1 batch=2 seq_len=4 sliding_window_size=2 documents=1+3/3+1",
        applies=lambda problem: _has_batch(problem) and problem.segments,
        replaced=(operands_of_mask(_ids_of_the_first_row),),
    ),
    Fault(
        name="packed_rows_one_off_in_the_batch",
        kind="N",
        report="marin-community/marin/pull/5749",
        sentence="With two packed batch rows the keys of one are masked by the ids of the other.",
        planted_in="all_gather",
        smallest="v=1 batch=2 seq_len=4 sliding_window_size=2 documents=1+3/3+1",
        applies=lambda problem: _has_batch(problem) and problem.segments,
        replaced=(operands_of_mask(_key_ids_of_the_next_row),),
    ),
    Fault(
        name="usp_never_rotates",
        kind="N",
        report="sgl-project/sglang/pull/33353",
        sentence="A ring degree beside ulysses is accepted, and K and V never rotate.",
        planted_in="usp",
        smallest="v=1 seq_len=8 sliding_window_size=3 ulysses_parallelism=2",
        applies=crosses,
        replaced=(Replacement(ring, "rotations", _never_rotates),),
    ),
    Fault(
        name="batch_of_one_required_without_window",
        kind="N",
        report="tenstorrent/tt-metal/pull/52073",
        sentence="A guard meant for sliding windows refuses batches without one.",
        planted_in="all_gather",
        smallest="v=1 batch=2 seq_len=4",
        applies=lambda problem: problem.batch > 1 and problem.window == (None, 0),
        given=_one_row_only,
    ),
    Fault(
        name="halo_sent_over_the_data_axis",
        kind="N",
        report=NOT_PUBLIC,
        sentence="The permutation names the data axis, which on a square mesh has as many ranks.",
        planted_in="halo",
        smallest="v=1 batch=2 seq_len=4 sliding_window_size=2 data_parallelism=2",
        applies=lambda problem: crosses(problem) and problem.data_parallelism == problem.context_parallelism,
        replaced=(Replacement(exchange, "exchange", _over_the_data_axis),),
    ),
    Fault(
        name="device_number_for_rank",
        kind="N",
        report=NOT_PUBLIC,
        sentence="The rank is counted from the device's number, which on a permuted mesh is another.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 device_order=reversed",
        applies=lambda problem: (
            problem.device_order == "reversed" and is_sharded(problem) and problem.window != (None, None)
        ),
        replaced=(Replacement(layouts, "rank_positions", _device_for_rank),),
    ),
    Fault(
        name="sink_gradient_not_summed_over_ulysses",
        kind="N",
        report=NOT_PUBLIC,
        sentence="The sum of the sink gradient leaves the second sequence axis out.",
        planted_in="usp",
        smallest="v=1 seq_len=8 sliding_window_size=3 ulysses_parallelism=2 sinks=true",
        applies=lambda problem: problem.sinks,
        replaced=(Replacement(sharded, "_summed_over_mesh", _without_the_ulysses_axis),),
    ),
)
