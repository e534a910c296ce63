"""Kind B: None, 0, 1, S and negative numbers as bounds of the window mean something else than was meant.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import always, crosses, cuts_left, is_sharded, reach, rows_of_rank, with_window
from conformance.faults.kernels import distance_of, sees, window_of_mask
from conformance.problem import Problem, Window
from impl import config, dispatch, exchange


def _minus_one_is_a_bound(window: Window) -> Window:
    left, right = window
    return (-1 if left is None else left, right)


def _zero_is_a_width(window: Window) -> Window:
    left, right = window
    return (-1 if left == 0 else left, right)


def _zero_is_not_given(problem: Problem) -> Problem:
    left, right = problem.window
    return with_window(problem, (left, right or None))


def _everything_for_width_one(right: Any, layout: str, ranks: int, seq_len: int, window: Window) -> Any:
    """rows[-0:] is the whole chunk, not nothing."""
    chunk = seq_len // (ranks * (2 if layout == "dual_chunk_swap" else 1))
    return right(layout, ranks, seq_len, (chunk, 0) if window == (0, 0) else window)


def _negative_bound_is_unbounded(mask: Any, operands: Any, config: Any) -> Any:
    """The window relative to the keys of a ring's step starts at left - offset, which is negative for far steps."""
    left, _ = config.window
    offset = operands.query_positions[0] - operands.key_positions[0]
    ids, key_ids = operands.query_segment_ids, operands.key_segment_ids
    unbounded = (distance_of(operands) >= 0)[None]
    if ids is not None:
        unbounded = unbounded & (ids[:, :, None] == key_ids[:, None, :])
    return jnp.where(offset > left, unbounded, mask)


def _rerouted_when_long(problem: Problem) -> Problem:
    return with_window(problem, (None, problem.window[1]))


def _any_size(right: Any, configuration: Any) -> Window:
    size = configuration.sliding_window_size
    return right(configuration) if size is None or configuration.window is not None else (int(size) - 1, 0)


def _any_bound(right: Any, window: Window) -> Window:
    return window


def _as_it_was_given(right: Any, window: Window, seq_len: int) -> Window:
    return window


FAULTS = (
    Fault(
        name="unbounded_passed_as_minus_one",
        kind="B",
        report="NVIDIA/TransformerEngine/issues/3528",
        sentence="No left bound is passed as -1, which the kernel takes for a bound: every row is empty.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4",
        applies=lambda problem: problem.window[0] is None,
        replaced=(window_of_mask(_minus_one_is_a_bound),),
    ),
    Fault(
        name="width_one_fetches_whole_chunks",
        kind="B",
        report="fla-org/flash-linear-attention/pull/1211",
        sentence="A window of one key needs no halo, and the slice from minus zero sends the whole chunk.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=1",
        applies=lambda problem: is_sharded(problem) and problem.window == (0, 0),
        replaced=(Replacement(exchange, "halo_plan", _everything_for_width_one),),
    ),
    Fault(
        name="width_one_sees_nothing",
        kind="B",
        report="unslothai/unsloth/pull/8253",
        sentence="A left bound of 0 is read as a width of 0 and masks everything.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=1",
        applies=lambda problem: problem.window[0] == 0,
        replaced=(window_of_mask(_zero_is_a_width),),
    ),
    Fault(
        name="right_bound_of_zero_is_not_given",
        kind="B",
        report="Dao-AILab/flash-attention/issues/2574",
        sentence="`right or None` takes a right bound of 0 for none: queries see the whole future.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.window[1] == 0 and problem.ulysses_parallelism == 1 and problem.seq_len > 1,
        told=_zero_is_not_given,
    ),
    Fault(
        name="negative_relative_bound_is_unbounded",
        kind="B",
        report="proger/hippogriff/issues/7",
        sentence="The bound of a ring's step, relative to its keys, is negative there, and negative means unbounded.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: (
            (problem.layout == "contiguous" and crosses(problem) and reach(problem)[0] % rows_of_rank(problem) > 0)
            and cuts_left(problem)
        ),
        replaced=(sees(_negative_bound_is_unbounded),),
    ),
    Fault(
        name="window_of_all_keys_but_one_is_global",
        kind="B",
        report="Dao-AILab/flash-attention/issues/1133",
        sentence="The switch to the kernel without a window comes one width too early: W = S - 1 sees all S keys.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=3",
        applies=lambda problem: problem.window[0] == problem.seq_len - 2 and problem.ulysses_parallelism == 1,
        told=_rerouted_when_long,
    ),
    Fault(
        name="window_of_zero_accepted",
        kind="B",
        report="fla-org/flash-linear-attention/pull/824",
        sentence="Sizes below 1 and negative bounds are not refused; they mask every row.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        replaced=(
            Replacement(config, "_local_window", _any_size),
            Replacement(config, "_checked_window", _any_bound),
        ),
    ),
    Fault(
        name="everything_wraps_around",
        kind="B",
        report=NOT_PUBLIC,
        sentence="The bounds of a window that means everything, 2**31 - 1, are added to positions in int32.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 window=2147483647,2147483647",
        applies=always,
        replaced=(Replacement(dispatch, "_within", _as_it_was_given),),
    ),
)
