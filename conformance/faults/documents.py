"""Kind G: segment ids that do not arrive, arrive late, shifted or of another shard.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import crosses, is_sharded
from conformance.faults.kernels import BACKWARD, operands_of_mask, rank, sees
from conformance.problem import Problem
from impl import all_gather, ring
from impl.kernels.interface import KernelOperands


def _has_ids(problem: Problem) -> bool:
    return problem.segments and problem.seq_len > 1


def _without_ids(arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "segment_ids"}


def _no_padding(problem: Problem) -> Problem:
    return problem.replace(segments=False, padding=None)


def _own_ids_for_all_keys(right: Any, operands: Any, layer: Any) -> Any:
    """The ids of the keys have the shard's length; they are repeated until they fit."""
    gathered = right(operands, layer)
    if operands.segment_ids is None:
        return gathered
    return gathered._replace(key_segment_ids=jnp.tile(operands.segment_ids, (1, layer.context_parallelism)))


def _cut_at_shard_borders(mask: Any, operands: KernelOperands, config: Any) -> Any:
    """A document that lies on two ranks is two documents: queries see only keys of their own rank's run."""
    if operands.query_segment_ids is None:
        return mask
    rows = operands.query.shape[1]
    same = operands.query_positions[:, None] // rows == operands.key_positions[None, :] // rows
    return mask & same[None]


def _shifted(operands: KernelOperands) -> KernelOperands:
    """Borders that were counted without padding lie one token early for the keys."""
    if operands.key_segment_ids is None:
        return operands
    return operands._replace(key_segment_ids=jnp.roll(operands.key_segment_ids, 1, axis=1))


def _coarse_borders(right: Any, operands: Any, layer: Any) -> Any:
    """Borders are divided by the number of ranks and multiplied again: they fall on multiples of it."""
    gathered = right(operands, layer)
    ids, size = gathered.key_segment_ids, layer.context_parallelism
    if ids is None:
        return gathered
    index = jnp.arange(layer.seq_len) // size * size
    return gathered._replace(key_segment_ids=ids[:, index])


def _no_ids(operands: KernelOperands) -> KernelOperands:
    return operands._replace(query_segment_ids=None, key_segment_ids=None)


def _steps_without_ids(right: Any, operands: Any, keys: Any, layer: Any, distance: Any) -> Any:
    calls = right(operands, keys, layer, distance)
    if isinstance(distance, int) and distance == 0:
        return calls
    return [call._replace(query_segment_ids=None, key_segment_ids=None) for call in calls]


def _ids_in_order(mask: Any, operands: KernelOperands, config: Any) -> Any:
    """Equal ids of two documents are one only if they are neighbours: ids are taken to be sorted, larger = later."""
    if operands.key_segment_ids is None:
        return mask
    return mask & (operands.key_segment_ids[:, None, :] >= operands.key_segment_ids[:, :1, None])


def _last_rank_has_other_ids(right: Any, operands: Any, layer: Any) -> Any:
    """The batch was broadcast to some ranks only: the last one holds an older batch's ids, here all zero."""
    gathered = right(operands, layer)
    if operands.segment_ids is None:
        return gathered
    is_last = rank() == layer.context_parallelism - 1
    return gathered._replace(
        query_segment_ids=jnp.where(is_last, 0, gathered.query_segment_ids),
        key_segment_ids=jnp.where(is_last, 0, gathered.key_segment_ids),
    )


def _own_ids_rolled(right: Any, operands: Any, layer: Any) -> Any:
    """A shift by one that stays inside the shard: each shard's first token gets the id of its last."""
    ids = operands.segment_ids
    return right(operands if ids is None else operands._replace(segment_ids=jnp.roll(ids, 1, axis=1)), layer)


def _local_positions_beside_ids(right: Any, operands: Any, layer: Any) -> Any:
    """Positions that the caller did not give are made inside the shard, and all shards' are those of the first."""
    gathered = right(operands, layer)
    if operands.segment_ids is None:
        return gathered
    rows = operands.query.shape[1]
    return gathered._replace(query_positions=jnp.arange(rows, dtype=jnp.int32))


FAULTS = (
    Fault(
        name="documents_see_each_other",
        kind="G",
        report="huggingface/trl/pull/6843",
        sentence="Under context parallelism only the causal mask is kept: packed documents see each other.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=_has_ids,
        given=_without_ids,
        told=_no_padding,
    ),
    Fault(
        name="positions_made_in_the_shard_beside_ids",
        kind="G",
        report="NVIDIA/TransformerEngine/pull/2349",
        sentence="Positions generated beside segment ids are not sharded like them.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=lambda problem: _has_ids(problem) and is_sharded(problem) and problem.window != (None, None),
        replaced=(Replacement(all_gather, "_gathered", _local_positions_beside_ids),),
    ),
    Fault(
        name="key_ids_of_the_own_shard",
        kind="G",
        report="AI-Hypercomputer/maxtext/pull/2011",
        sentence="The ids of gathered keys are the shard's own, repeated.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=2+2",
        applies=lambda problem: _has_ids(problem) and crosses(problem),
        replaced=(Replacement(all_gather, "_gathered", _own_ids_for_all_keys),),
    ),
    Fault(
        name="documents_cut_at_shard_borders",
        kind="G",
        report="PrimeIntellect-ai/prime-rl/pull/3003",
        sentence="A document that lies on two ranks is cut at their border.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=lambda problem: _has_ids(problem) and crosses(problem) and problem.layout == "contiguous",
        replaced=(sees(_cut_at_shard_borders),),
    ),
    Fault(
        name="key_ids_one_token_late",
        kind="G",
        report="NVIDIA/Megatron-LM/pull/4494",
        sentence="Borders counted without padding are used on the padded layout.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=_has_ids,
        replaced=(operands_of_mask(_shifted),),
    ),
    Fault(
        name="borders_rounded_to_the_number_of_ranks",
        kind="G",
        report="ISEEKYAN/Megatron-LM/pull/111",
        sentence="Borders are divided by the number of ranks as integers, so odd lengths are rounded.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=lambda problem: _has_ids(problem) and is_sharded(problem),
        replaced=(Replacement(all_gather, "_gathered", _coarse_borders),),
    ),
    Fault(
        name="backward_without_segment_ids",
        kind="G",
        report="pytorch/xla/issues/8334",
        sentence="Segment ids are passed to the forward, and not to the backward.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=_has_ids,
        replaced=(operands_of_mask(_no_ids, BACKWARD),),
    ),
    Fault(
        name="ids_rolled_inside_the_shard",
        kind="G",
        report="AI-Hypercomputer/maxtext/pull/4623",
        sentence="Ids are shifted by one inside each shard: its first token gets its last token's.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=_has_ids,
        replaced=(Replacement(all_gather, "_gathered", _own_ids_rolled),),
    ),
    Fault(
        name="ring_steps_without_ids",
        kind="G",
        report="NVIDIA-NeMo/Automodel/pull/2999",
        sentence="The ring's steps ignore the packing; only the rank's own keys are masked by it.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=2+2",
        applies=lambda problem: _has_ids(problem) and crosses(problem) and problem.padding is None,
        replaced=(Replacement(ring, "_kernel_calls", _steps_without_ids),),
    ),
    Fault(
        name="last_rank_has_another_batchs_ids",
        kind="P",
        report="sii-research/siiRL/pull/69",
        sentence="One rank of the context group holds other segment ids than the rest.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=3+1",
        applies=lambda problem: _has_ids(problem) and is_sharded(problem),
        replaced=(Replacement(all_gather, "_gathered", _last_rank_has_other_ids),),
    ),
    Fault(
        name="ids_taken_to_be_sorted",
        kind="G",
        report=NOT_PUBLIC,
        sentence="A document whose id is smaller than the first one's is not seen by anybody.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=2@3+2@1",
        applies=_has_ids,
        replaced=(sees(_ids_in_order),),
    ),
)
