"""Kind F: the permutation of the layout, its inverse, and the positions that follow from it.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import is_sharded, is_striped, is_swapped, rows_of_rank
from conformance.faults.kernels import BACKWARD
from conformance.problem import Problem
from impl import layout as layouts
from impl import local_attention, ulysses


def _told_layout(layout: str) -> Any:
    return lambda problem: problem.replace(layout=layout)


def _is_masked(problem: Problem) -> bool:
    return problem.window != (None, None)


def _ascending_high_chunks(right: Any, layout: str, seq_len: int, ranks: int, rank: Any) -> Any:
    """Rank r holds chunks r and N + r, instead of r and 2N - 1 - r."""
    if layout != "dual_chunk_swap":
        return right(layout, seq_len, ranks, rank)
    chunk = seq_len // ranks // 2
    index = jnp.arange(chunk, dtype=jnp.int32)
    return jnp.concatenate([rank * chunk + index, (ranks + rank) * chunk + index])


def _high_chunk_first(right: Any, *arguments: Any) -> Any:
    positions = right(*arguments)
    return jnp.roll(positions, positions.shape[0] // 2) if arguments[0] == "dual_chunk_swap" else positions


def _local_stripes(right: Any, layout: str, seq_len: int, ranks: int, rank: Any) -> Any:
    return right(layout, seq_len, ranks, 0 * rank if layout == "striped" else rank)


def _one_bucket(right: Any, layout: str, seq_len: int, ranks: int, rank: Any) -> Any:
    """The second half of a rank's rows is numbered like the first."""
    positions = right(layout, seq_len, ranks, rank)
    if layout != "striped":
        return positions
    rows = positions.shape[0]
    return positions[jnp.arange(rows) % -(-rows // 2)]


def _as_they_are(right: Any, rows: Any, layer: Any) -> Any:
    return rows


def _lse_as_it_is(right: Any, rows: Any, layer: Any) -> Any:
    return rows if rows.ndim == 3 else right(rows, layer)


def _raises_for_odd_chunks(right: Any, operands: Any, cotangents: Any, layer: Any, *rest: Any, **named: Any) -> Any:
    raise ValueError("backward: sizes of the two halves do not match")


FAULTS = (
    Fault(
        name="contiguous_taken_for_dual_chunk_swap",
        kind="F",
        report="THUDM/slime/issues/1871",
        sentence="The data are cut contiguously, and attention puts them back as dual_chunk_swap.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: (
            problem.layout == "contiguous"
            and is_sharded(problem)
            and _is_masked(problem)
            and problem.seq_len % (2 * problem.context_parallelism) == 0
        ),
        told=_told_layout("dual_chunk_swap"),
    ),
    Fault(
        name="dual_chunk_swap_taken_for_contiguous",
        kind="F",
        report="NVIDIA/Megatron-LM/pull/5661",
        sentence="One of two batch formats is cut for load balancing, and attention believes that none is.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and _is_masked(problem),
        told=_told_layout("contiguous"),
    ),
    Fault(
        name="short_sequences_fall_back_to_contiguous",
        kind="F",
        report="pytorch/pytorch/issues/159706",
        sentence="Chunks of one token are not balanced, although the data were.",
        planted_in="ring",
        smallest="v=1 seq_len=4 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and _is_masked(problem) and problem.chunk_len == 1,
        told=_told_layout("contiguous"),
    ),
    Fault(
        name="no_backward_for_odd_chunks",
        kind="F",
        report="jzhang38/EasyContext/issues/47",
        sentence="The backward of dual_chunk_swap finds sizes that do not match where a chunk has an odd length.",
        planted_in="ring",
        smallest="v=1 seq_len=12 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and problem.chunk_len % 2 == 1,
        replaced=(Replacement(local_attention, "backward", _raises_for_odd_chunks),),
    ),
    Fault(
        name="high_chunks_in_ascending_order",
        kind="F",
        report=NOT_PUBLIC,
        sentence="Rank r is taken to hold chunks r and N + r.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and _is_masked(problem),
        replaced=(Replacement(layouts, "rank_positions", _ascending_high_chunks),),
    ),
    Fault(
        name="high_chunk_taken_for_the_first",
        kind="F",
        report=NOT_PUBLIC,
        sentence="A rank's two chunks are taken in the wrong order.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and _is_masked(problem),
        replaced=(Replacement(layouts, "rank_positions", _high_chunk_first),),
    ),
    Fault(
        name="striped_positions_of_the_first_rank",
        kind="F",
        report="sgl-project/sglang/pull/28463",
        sentence="Under a round-robin split one backend uses indices of the shard in place of positions.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=striped",
        applies=lambda problem: is_striped(problem) and _is_masked(problem),
        replaced=(Replacement(layouts, "rank_positions", _local_stripes),),
    ),
    Fault(
        name="striped_mask_of_one_bucket",
        kind="F",
        report="lucidrains/ring-attention-pytorch/issues/11",
        sentence="The striped mask lacks the offset of every bucket but the first.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=striped",
        applies=lambda problem: is_striped(problem) and _is_masked(problem) and rows_of_rank(problem) > 1,
        replaced=(Replacement(layouts, "rank_positions", _one_bucket),),
    ),
    Fault(
        name="gradients_left_in_position_order",
        kind="F",
        report=NOT_PUBLIC,
        sentence="Results go back into the layout's order, gradients do not.",
        planted_in="ulysses",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) or is_striped(problem),
        replaced=(Replacement(ulysses, "_reordered", _as_they_are, BACKWARD),),
    ),
    Fault(
        name="lse_left_in_position_order",
        kind="F",
        report=NOT_PUBLIC,
        sentence="out goes back into the layout's order, lse does not.",
        planted_in="ulysses",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) or is_striped(problem),
        replaced=(Replacement(ulysses, "_reordered", _lse_as_it_is),),
    ),
)
