"""Kind E, forward: rows of a halo that come from the wrong rank, or from beyond either end of the sequence.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import crosses, is_swapped, reach
from conformance.faults.kernels import sees
from conformance.problem import Problem
from impl import exchange


def _needs_a_halo_before(problem: Problem) -> bool:
    return crosses(problem) and problem.layout == "contiguous" and 0 < reach(problem)[0] <= problem.chunk_len


def _cyclic(right: Any, *arguments: Any) -> Any:
    """Pairs close to a circle: rank 0 receives the last rank's tail."""
    plan = right(*arguments)
    size = plan.context_parallelism
    permutes = tuple(
        dataclasses.replace(permute, pairs=tuple((rank, (rank + 1) % size) for rank in range(size)))
        if all(destination - source == 1 for source, destination in permute.pairs)
        else permute
        for permute in plan.permutes
    )
    return dataclasses.replace(plan, permutes=permutes)


def _positions_beyond_the_beginning(right: Any, plan: Any, slot: int, rank: Any) -> Any:
    """Rows before the sequence keep the positions that they would have, moved so that none is negative."""
    run = plan.key_runs[slot]
    offsets = jnp.arange(-run.rows_before, plan.chunk + run.rows_after, dtype=jnp.int32)
    return rank * plan.chunk + offsets + plan.seq_len


def _queries_moved_alike(right: Any, plan: Any, slot: int, rank: Any) -> Any:
    return right(plan, slot, rank) + plan.seq_len


_BEYOND = (
    Replacement(exchange, "key_positions", _positions_beyond_the_beginning),
    Replacement(exchange, "chunk_positions", _queries_moved_alike),
)


def _one_key_too_many_on_the_last_rank(mask: Any, operands: Any, config: Any) -> Any:
    distance = operands.query_positions[:, None] - operands.key_positions[None, :]
    is_last = lax.axis_index("context") == lax.axis_size("context") - 1
    extra = distance == config.window[0] + 1
    if operands.query_segment_ids is not None:
        extra = extra & (operands.query_segment_ids[:, :, None] == operands.key_segment_ids[:, None, :])
    return mask | (is_last & extra)


def _own_tail_in_place_of_what_arrives(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    """On the last rank the buffer still holds what the rank itself sent."""
    is_last = lax.axis_index(axis_name) == plan.context_parallelism - 1
    outgoing = [
        lax.slice_in_dim(rows, first, first + permute.rows, axis=1)
        for permute in plan.permutes
        for first in (permute.slot * plan.chunk + permute.start,)
    ]
    received = right(rows, plan, axis_name)
    return tuple(jnp.where(is_last, own, new) for own, new in zip(outgoing, received, strict=True))


def _odd_rank_left_out(right: Any, *arguments: Any) -> Any:
    """Ranks pair up, even with odd: of an odd number the last one has no partner and receives nothing."""
    plan = right(*arguments)
    last = plan.context_parallelism - 1
    permutes = tuple(
        dataclasses.replace(permute, pairs=tuple(pair for pair in permute.pairs if pair[1] != last) or permute.pairs)
        for permute in plan.permutes
    )
    return dataclasses.replace(plan, permutes=permutes)


def _head_in_place_of_tail(right: Any, *arguments: Any) -> Any:
    """Where a chunk's predecessor lies on the same rank, its first rows are read in place of its last."""
    plan = right(*arguments)

    def changed(source: Any, rows: int) -> Any:
        is_neighbour = source.permute is None and rows < plan.chunk
        return dataclasses.replace(source, start=0) if is_neighbour else source

    runs = tuple(
        dataclasses.replace(
            run,
            pieces=tuple(
                dataclasses.replace(piece, sources=tuple(changed(source, piece.rows) for source in piece.sources))
                for piece in run.pieces
            ),
        )
        for run in plan.key_runs
    )
    return dataclasses.replace(plan, key_runs=runs)


def _halo_of_another_slot(right: Any, *arguments: Any) -> Any:
    """What is sent lies in the other of the rank's two chunks."""
    plan = right(*arguments)
    permutes = tuple(dataclasses.replace(permute, slot=1 - permute.slot) for permute in plan.permutes)
    return dataclasses.replace(plan, permutes=permutes)


def _from_the_successor(right: Any, *arguments: Any) -> Any:
    """The halo is sent down instead of up: a rank receives its successor's tail."""
    plan = right(*arguments)
    permutes = tuple(
        dataclasses.replace(permute, pairs=tuple((destination, source) for source, destination in permute.pairs))
        for permute in plan.permutes
    )
    return dataclasses.replace(plan, permutes=permutes)


def _is_partial(problem: Problem) -> bool:
    """Some halo is no whole chunk."""
    return any(bound > 0 and bound % problem.chunk_len for bound in reach(problem))


FAULTS = (
    Fault(
        name="first_rank_reads_the_last_ranks_tail",
        kind="E",
        report="open-lm-engine/lm-engine/pull/453",
        sentence="The exchange is cyclic, and what reaches the first rank is neither cut off nor masked.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=_needs_a_halo_before,
        replaced=(Replacement(exchange, "halo_plan", _cyclic), *_BEYOND),
    ),
    Fault(
        name="zero_rows_before_the_sequence_attended",
        kind="E",
        report="open-lm-engine/lm-engine/pull/451",
        sentence="The first rank's halo is zeroed and not masked: zero keys take their share of every softmax.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=_needs_a_halo_before,
        replaced=_BEYOND,
    ),
    Fault(
        name="last_rank_sees_one_key_too_many",
        kind="E",
        report=NOT_PUBLIC,
        sentence="The window is one key too wide on the last rank, and right on all others.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: (
            crosses(problem) and problem.window[0] is not None and reach(problem)[0] < problem.seq_len - 1
        ),
        replaced=(sees(_one_key_too_many_on_the_last_rank),),
    ),
    Fault(
        name="last_rank_reads_its_own_tail",
        kind="E",
        report="helmholtz-analytics/heat/pull/1419",
        sentence="The last rank's send buffer is used again before its halo has arrived.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "exchange", _own_tail_in_place_of_what_arrives),),
    ),
    Fault(
        name="odd_number_of_ranks_leaves_one_out",
        kind="P",
        report="ByteDance-Seed/VeOmni/pull/1085",
        sentence="Send and receive are ordered by the parity of ranks: in an odd ring one rank never receives.",
        planted_in="halo",
        smallest="v=1 seq_len=6 sliding_window_size=2 context_parallelism=3",
        applies=lambda problem: crosses(problem) and problem.context_parallelism % 2 == 1,
        replaced=(Replacement(exchange, "halo_plan", _odd_rank_left_out),),
    ),
    Fault(
        name="wrong_rows_where_a_ranks_two_chunks_meet",
        kind="E",
        report=NOT_PUBLIC,
        sentence="On the rank whose two chunks are neighbours the high one reads the low one's first rows.",
        planted_in="halo",
        smallest="v=1 seq_len=12 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and max(reach(problem)) > 0 and _is_partial(problem),
        replaced=(Replacement(exchange, "halo_plan", _head_in_place_of_tail),),
    ),
    Fault(
        name="halo_sent_from_the_other_chunk",
        kind="E",
        report=NOT_PUBLIC,
        sentence="Under dual_chunk_swap a rank sends rows of its low chunk where the high one's are needed.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=2 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and crosses(problem),
        replaced=(Replacement(exchange, "halo_plan", _halo_of_another_slot),),
    ),
    Fault(
        name="halo_from_the_successor",
        kind="E",
        report=NOT_PUBLIC,
        sentence="The pairs of the permutation are (destination, source).",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "halo_plan", _from_the_successor),),
    ),
)
