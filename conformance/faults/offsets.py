"""Kind D: positions of queries and keys are offset against each other, and halos that come from several chunks.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import crosses, cuts_left, hops, is_sharded, is_swapped, with_window
from conformance.faults.kernels import rank, sees
from conformance.problem import Problem
from impl import dispatch, exchange, ring
from impl import layout as layouts


def _natural_order_for_the_window(mask: Any, operands: Any, config: Any) -> Any:
    """Two masks from different position vectors: causal from positions, the left bound from indices of the layout."""
    rows = operands.query.shape[1]
    index = rank() * rows + jnp.arange(rows)
    left = config.window[0]
    return mask & (operands.key_positions[None, :] >= index[:, None] - left)


def _skips_by_index(right: Any, operands: Any, keys: Any, layer: Any, distance: Any) -> Any:
    """A step whose keys come from a higher rank is skipped, as if ranks lay in the order of positions."""
    owner = (rank() - distance) % layer.context_parallelism
    return [
        call._replace(key_positions=jnp.where(owner > rank(), -1, call.key_positions))
        for call in right(operands, keys, layer, distance)
    ]


def _one_chunk_of_halo(problem: Problem) -> Problem:
    """A window no longer than a chunk: what one neighbour can give."""
    left, right = problem.window
    chunk = problem.chunk_len
    shorter = (left if left is None else min(left, chunk), right if right is None else min(right, chunk))
    return with_window(problem, shorter)


def _second_hop_from_the_neighbour(right: Any, *arguments: Any) -> Any:
    """Rows of the second chunk before are taken from the first one before."""
    plan = right(*arguments)
    size = plan.context_parallelism

    def nearer(source: int, destination: int) -> tuple[int, int]:
        return (source + 1 if destination - source == 2 and source + 1 < size else source, destination)

    permutes = tuple(
        dataclasses.replace(permute, pairs=tuple(nearer(*pair) for pair in permute.pairs)) for permute in plan.permutes
    )
    return dataclasses.replace(plan, permutes=permutes)


def _reads_out_of_bounds(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    """Where the halo is longer than a chunk, what lies before the local rows is read: here, not a number."""
    received = right(rows, plan, axis_name)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        return received
    return tuple(
        jnp.where(rank() == 0, jnp.nan, array) if all(d - s > 1 for s, d in permute.pairs) else array
        for array, permute in zip(received, plan.permutes, strict=True)
    )


def _index_for_position(right: Any, layout: str, seq_len: int, ranks: int, which: Any) -> Any:
    return right("contiguous", seq_len, ranks, which)


def _halo_not_counted(right: Any, plan: Any, slot: int, which: Any) -> Any:
    """The first key of a run is taken to stand where the first query of the chunk does."""
    return right(plan, slot, which) + plan.key_runs[slot].rows_before


def _crashes_when_sharded(right: Any, operands: Any, mesh: Any, config: Any, *rest: Any) -> None:
    right(operands, mesh, config, *rest)
    if mesh.shape[config.context_axis] > 1 and config.window is not None and config.window[1]:
        raise TypeError("dynamic_slice: mask information of one shard, got a mesh with several")


def _positions_of_the_shard(right: Any, layout: str, seq_len: int, ranks: int, which: Any) -> Any:
    return right(layout, seq_len, ranks, 0 * which)


def _has_a_second_hop(problem: Problem) -> bool:
    return hops(problem) > 1 and problem.context_parallelism > 2 and problem.layout == "contiguous"


FAULTS = (
    Fault(
        name="window_in_natural_order",
        kind="D",
        report="AI-Hypercomputer/maxtext/pull/4298",
        sentence="Under load balancing the window is made from indices of the layout, the causal mask from positions.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and cuts_left(problem),
        replaced=(sees(_natural_order_for_the_window),),
    ),
    Fault(
        name="ring_skips_steps_by_index",
        kind="D",
        report="openxla/tokamax/pull/1217",
        sentence="Steps from higher ranks are skipped as future, which they are only in the contiguous layout.",
        planted_in="ring",
        smallest="v=1 seq_len=8 layout=dual_chunk_swap",
        applies=lambda problem: crosses(problem) and problem.layout != "contiguous",
        replaced=(Replacement(ring, "_kernel_calls", _skips_by_index),),
    ),
    Fault(
        name="halo_cut_at_one_chunk",
        kind="D",
        report="tenstorrent/tt-metal/pull/51438",
        sentence="The halo serves one predecessor; a window beyond it is cut, silently.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=4 context_parallelism=4",
        applies=lambda problem: hops(problem) > 1,
        told=_one_chunk_of_halo,
    ),
    Fault(
        name="second_hop_reads_first_neighbour",
        kind="D",
        report=NOT_PUBLIC,
        sentence="The rows of the second hop are fetched from the rank one hop away.",
        planted_in="halo",
        smallest="v=1 seq_len=6 sliding_window_size=4 context_parallelism=3",
        applies=_has_a_second_hop,
        replaced=(Replacement(exchange, "halo_plan", _second_hop_from_the_neighbour),),
    ),
    Fault(
        name="halo_longer_than_the_shard_reads_out_of_bounds",
        kind="D",
        report="fla-org/flash-linear-attention/pull/774",
        sentence="A rank that has fewer rows than the halo reads beyond them.",
        planted_in="halo",
        smallest="v=1 seq_len=6 sliding_window_size=4 context_parallelism=3",
        applies=_has_a_second_hop,
        replaced=(Replacement(exchange, "exchange", _reads_out_of_bounds),),
    ),
    Fault(
        name="row_index_for_position",
        kind="D",
        report="AI-Hypercomputer/maxtext/pull/4364",
        sentence="The mask takes the row's index in the layout for its position.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: is_swapped(problem) and problem.window != (None, None),
        replaced=(Replacement(layouts, "rank_positions", _index_for_position),),
    ),
    Fault(
        name="halo_rows_not_counted",
        kind="D",
        report="jax-ml/jax/issues/24491",
        sentence="With more keys than queries the kernel aligns their first rows, not their last.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and problem.window[0] != 0,
        replaced=(Replacement(exchange, "key_positions", _halo_not_counted),),
    ),
    Fault(
        name="every_shard_starts_at_position_zero",
        kind="D",
        report="AI-Hypercomputer/maxtext/pull/5001",
        sentence="Query positions of a shard are those of the first shard, beside keys of the whole sequence.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: is_sharded(problem) and problem.window != (None, None),
        replaced=(Replacement(layouts, "rank_positions", _positions_of_the_shard),),
    ),
    Fault(
        name="crashes_with_several_query_shards",
        kind="D",
        report="jax-ml/jax/pull/37179",
        sentence="A mask that is not plainly causal crashes under jit as soon as there is more than one query shard.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 window=1,1",
        applies=lambda problem: is_sharded(problem) and problem.window[1] not in (None, 0),
        replaced=(Replacement(dispatch, "check_call", _crashes_when_sharded),),
    ),
)
