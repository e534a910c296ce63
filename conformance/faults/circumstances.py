"""Kind S: right almost everywhere, and wrong in one path, one dtype, or one kind of mesh.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import crosses, cuts_left, is_sharded, with_window
from conformance.faults.kernels import rank, window_of_mask
from conformance.problem import Problem, Window
from impl import all_gather, sharded
from impl import layout as layouts


def _wider(window: Window) -> Window:
    left, right = window
    return (None if left is None else left + 1, right)


def _told_wider(problem: Problem) -> Problem:
    return with_window(problem, _wider(problem.window))


def _own_part_alone(right: Any, rows: Any, gradient: Any, layer: Any) -> Any:
    """What a reduce-scatter leaves that the partitioner has dropped."""
    ordered = layouts.reorder(gradient, axis=1, layout=layer.layout, context_parallelism=layer.context_parallelism)
    return lax.dynamic_slice_in_dim(ordered, rank() * rows.shape[1], rows.shape[1], axis=1)


def _lse_without_the_sink(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    if "lse" not in results:
        return results
    lse = results["lse"]
    return {**results, "lse": lse + jnp.log1p(-jnp.exp(jnp.minimum(arrays["sinks"] - lse, -1e-3)))}


def _half_out_beside_lse(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    if "lse" not in results:
        return results
    return {**results, "out": results["out"] / 2}


def _delta_of_the_first_head(right: Any, result: Any, cotangents: Any) -> Any:
    rows = right(result, cotangents)
    return rows._replace(delta=jnp.broadcast_to(rows.delta[..., :1], rows.delta.shape))


FAULTS = (
    Fault(
        name="primal_differs_from_the_vjps_forward",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The call without gradients sees one key too many; under differentiation all is right.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=cuts_left,
        replaced=(window_of_mask(_wider, ("primal",)),),
    ),
    Fault(
        name="vjps_forward_differs_from_the_primal",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The forward under differentiation sees one key too many; the call without gradients is right.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=cuts_left,
        replaced=(window_of_mask(_wider, ("forward",)),),
    ),
    Fault(
        name="explicit_axes_lose_the_reduce_scatter",
        kind="S",
        report=NOT_PUBLIC,
        sentence="On meshes with Explicit axes gradients of gathered rows are not summed over ranks.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 axis_types=explicit",
        applies=lambda problem: crosses(problem) and problem.axis_types != "auto",
        replaced=(Replacement(all_gather, "_home", _own_part_alone),),
    ),
    Fault(
        name="window_wide_under_explicit_axes",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The branch for Explicit axes passes the window's width where its left bound is meant.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3 axis_types=explicit",
        applies=lambda problem: cuts_left(problem) and problem.axis_types != "auto",
        told=_told_wider,
    ),
    Fault(
        name="window_wide_in_bfloat16",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The kernel for bfloat16 alone sees one key too many.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3 dtype=bfloat16",
        applies=lambda problem: cuts_left(problem) and problem.dtype == "bfloat16",
        told=_told_wider,
    ),
    Fault(
        name="lse_without_the_sink",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The log-sum-exp that is returned leaves the sink out.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=lambda problem: problem.sinks,
        returned=_lse_without_the_sink,
    ),
    Fault(
        name="out_beside_lse_not_normalised",
        kind="I",
        report=NOT_PUBLIC,
        sentence="The call that returns lse as well returns another out than the call that does not.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=is_sharded,
        returned=_half_out_beside_lse,
    ),
    Fault(
        name="delta_of_the_first_head_for_all",
        kind="O",
        report=NOT_PUBLIC,
        sentence="The row sums that the backward needs are those of the first head.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.num_query_heads > problem.tensor_parallelism and problem.seq_len > 1,
        replaced=(Replacement(sharded, "_row_cotangents", _delta_of_the_first_head),),
    ),
)
