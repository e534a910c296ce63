"""Kind A: the window's edge is inclusive where it should be exclusive, or the reverse.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import always, crosses, cuts_left, has_left, reach, with_window
from conformance.faults.kernels import distance_of, sees
from conformance.problem import Problem
from impl import ring
from impl.layer import Layer


def _wider(by: int) -> Any:
    def told(problem: Problem) -> Problem:
        left, right = problem.window
        return with_window(problem, (left if left is None else max(0, left + by), right))

    return told


def _without_itself(mask: Any, operands: Any, config: Any) -> Any:
    return mask & (distance_of(operands) != 0)


def _last_query_one_key_short(mask: Any, operands: Any, config: Any) -> Any:
    is_last = operands.query_positions == jnp.max(operands.key_positions)  # keys of all ranks are there
    return mask & ~(is_last[:, None] & (distance_of(operands) == config.window[0]))


def _wider_steps(right: Any, operands: Any, keys: Any, *rest: Any) -> Any:
    """`_attend` and `_attend_backward` of the ring, whose last two arguments are the layer and the distance."""
    *cotangents, layer, distance = rest
    is_own = isinstance(distance, int) and distance == 0
    return right(operands, keys, *cotangents, layer if is_own else _with_wider_mask(layer), distance)


def _with_wider_mask(layer: Layer) -> Layer:
    left, right = layer.kernel_config.window
    window = (None if left is None else left + 1, right)
    return dataclasses.replace(layer, kernel_config=dataclasses.replace(layer.kernel_config, window=window))


def _right_bound_one_more(problem: Problem) -> Problem:
    left, right = problem.window
    return with_window(problem, (left, None if right is None else right + 1))


def _first_query_of_a_chunk_one_key_short(mask: Any, operands: Any, config: Any) -> Any:
    left = config.window[0]
    is_first = operands.query_positions == operands.query_positions[0]
    return mask & ~(is_first[:, None] & (distance_of(operands) == left))


FAULTS = (
    Fault(
        name="window_one_key_wide",
        kind="A",
        report="AI-Hypercomputer/maxtext/pull/4289",
        sentence="The kernel's left bound counts keys before the query, the caller passes the number of visible keys.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=cuts_left,
        told=_wider(1),
    ),
    Fault(
        name="window_one_key_wide_on_ring_steps",
        kind="A",
        report="zml/zml/pull/763",
        sentence="Keys that came over the wire are seen one further than keys of the rank's own.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and cuts_left(problem),
        replaced=(Replacement(ring, "_attend", _wider_steps), Replacement(ring, "_attend_backward", _wider_steps)),
    ),
    Fault(
        name="window_one_key_narrow",
        kind="A",
        report="lightseekorg/tokenspeed/pull/578",
        sentence="The left bound is taken for a number of keys and is one too small.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: has_left(problem) and reach(problem)[0] > 0,
        told=_wider(-1),
    ),
    Fault(
        name="last_query_one_key_short",
        kind="A",
        report="lightseekorg/tokenspeed/pull/578",
        sentence="One code path, that of the last query, sees W - 1 keys; all others see W.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: cuts_left(problem) and reach(problem)[0] > 0,
        replaced=(sees(_last_query_one_key_short),),
    ),
    Fault(
        name="query_does_not_see_itself",
        kind="A",
        report="microsoft/onnxruntime/pull/25927",
        sentence="The window ends before the query instead of at it.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        replaced=(sees(_without_itself),),
    ),
    Fault(
        name="one_future_key_seen",
        kind="A",
        report=NOT_PUBLIC,
        sentence="The right bound is off by one: each query sees the key after its last.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: reach(problem)[1] < problem.seq_len - 1,
        told=_right_bound_one_more,
    ),
    Fault(
        name="first_query_of_a_call_one_key_short",
        kind="A",
        report=NOT_PUBLIC,
        sentence="The first query of each kernel call misses its oldest key, all others are right.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and cuts_left(problem),
        replaced=(sees(_first_query_of_a_chunk_one_key_short),),
    ),
)
