"""Kinds E and O, backward: gradients that do not go home, go home twice, or to the wrong place.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always, crosses, hops, is_sharded
from conformance.faults.kernels import rank
from conformance.problem import Problem
from impl import all_gather, exchange, local_attention, ring, sharded
from impl import layout as layouts


def _added_twice(right: Any, own: Any, arrived: Any, plan: Any) -> Any:
    return right(right(own, arrived, plan), arrived, plan)


def _never_sent_home(right: Any, own: Any, arrived: Any, plan: Any) -> Any:
    return own


def _one_row_off(right: Any, own: Any, arrived: Any, plan: Any) -> Any:
    return right(own, [jnp.roll(rows, 1, axis=1) for rows in arrived], plan)


def _only_from_the_nearest(right: Any, own: Any, arrived: Any, plan: Any) -> Any:
    """Gradients of rows that travelled several hops are dropped."""
    nearest = [
        rows if all(abs(destination - source) <= 1 for source, destination in permute.pairs) else 0 * rows
        for rows, permute in zip(arrived, plan.permutes, strict=True)
    ]
    return right(own, nearest, plan)


def _not_from_the_last_rank(right: Any, gradients: Any, plan: Any, axis_name: str) -> Any:
    is_last = lax.axis_index(axis_name) == plan.context_parallelism - 1
    return right([jnp.where(is_last, 0, rows) for rows in gradients], plan, axis_name)


def _no_way_back(right: Any, rows: Any, gradient: Any, layer: Any) -> Any:
    """What a gather without a transpose leaves: each rank's own part of its own gradient."""
    ordered = layouts.reorder(gradient, axis=1, layout=layer.layout, context_parallelism=layer.context_parallelism)
    return lax.dynamic_slice_in_dim(ordered, rank() * rows.shape[1], rows.shape[1], axis=1)


def _averaged(right: Any, rows: Any, gradient: Any, layer: Any) -> Any:
    return right(rows, gradient, layer) / layer.context_parallelism


def _last_head_not_arrived(right: Any, rows: Any, gradient: Any, layer: Any) -> Any:
    """The last kv head is read before the other ranks' parts are there."""
    own = _no_way_back(right, rows, gradient, layer)
    return jnp.concatenate([right(rows, gradient, layer)[:, :, :-1], own[:, :, -1:]], axis=2)


def _summed_over_data_alone(right: Any, gradients: Any, operands: Any, layer: Any) -> Any:
    summed = right(gradients, operands, layer)
    if gradients.dsinks is None or layer.data_axis is None:
        return summed
    return summed._replace(dsinks=lax.psum(gradients.dsinks, layer.data_axis).astype(operands.sinks.dtype))


def _lse_of_the_step(right: Any, operands: Any, keys: Any, cotangents: Any, layer: Any, distance: Any) -> Any:
    """Probabilities of a step are normalised over its own keys, not over all of the row's."""
    _, lse = ring._attend(operands, keys, layer, distance)
    return right(operands, keys, cotangents._replace(lse=lse), layer, distance)


def _nothing_from_the_last_step(
    right: Any, operands: Any, keys: Any, cotangents: Any, layer: Any, distance: Any
) -> Any:
    gradients = right(operands, keys, cotangents, layer, distance)
    if not isinstance(distance, int) or distance == 0:
        return gradients
    return gradients._replace(dquery=0 * gradients.dquery)


def _other_number_of_gradients(right: Any, *arguments: Any) -> Any:
    raise TypeError("the backward of the exchange returned 1 gradient, expected 3")


def _without_delta(right: Any, result: Any, cotangents: Any) -> Any:
    rows = right(result, cotangents)
    return rows._replace(delta=jnp.zeros_like(rows.delta))


def _without_lse_cotangent(right: Any, result: Any, cotangents: Any) -> Any:
    return right(result, (cotangents[0], jnp.zeros_like(cotangents[1])))


def _key_unscaled(gradients: Arrays, cotangents: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    return {**gradients, "key": gradients["key"] / scale}


def _value_transposed(gradients: Arrays, cotangents: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    return {**gradients, "value": gradients["value"][..., ::-1]}


def _nothing_for_query(gradients: Arrays, cotangents: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    return {**gradients, "query": jnp.zeros_like(gradients["query"])}


def _unused_lse_stops_all(gradients: Arrays, cotangents: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    """A cotangent of lse that is zero is taken for a result that nobody used, and so for no gradient at all."""
    if "lse" not in cotangents:
        return gradients
    used = jnp.any(cotangents["lse"] != 0)
    return {name: jnp.where(used, array, jnp.zeros_like(array)) for name, array in gradients.items()}


FAULTS = (
    Fault(
        name="halo_gradient_added_twice",
        kind="E",
        report=NOT_PUBLIC,
        sentence="Gradients of halo rows are added to the owner's both where they arrive and where they are summed.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "add_arrived", _added_twice),),
    ),
    Fault(
        name="halo_gradient_never_sent_home",
        kind="E",
        report=NOT_PUBLIC,
        sentence="Gradients of halo rows stay where they were computed.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "add_arrived", _never_sent_home),),
    ),
    Fault(
        name="halo_gradient_one_row_off",
        kind="E",
        report=NOT_PUBLIC,
        sentence="Gradients of halo rows are added one row further than the rows were taken from.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem),
        replaced=(Replacement(exchange, "add_arrived", _one_row_off),),
    ),
    Fault(
        name="halo_gradient_of_far_hops_lost",
        kind="E",
        report=NOT_PUBLIC,
        sentence="Only the gradients of rows from a neighbouring rank go home.",
        planted_in="halo",
        smallest="v=1 seq_len=6 sliding_window_size=4 context_parallelism=3",
        applies=lambda problem: hops(problem) > 1 and problem.context_parallelism > 2,
        replaced=(Replacement(exchange, "add_arrived", _only_from_the_nearest),),
    ),
    Fault(
        name="last_rank_sends_no_gradient_home",
        kind="E",
        report=NOT_PUBLIC,
        sentence="The last rank takes no part in the backward exchange.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "send_home", _not_from_the_last_rank),),
    ),
    Fault(
        name="gather_without_gradient",
        kind="E",
        report="modelscope/ms-swift/pull/9516",
        sentence="K and V are gathered by something that cannot be differentiated: other ranks' gradients are lost.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=crosses,
        replaced=(Replacement(all_gather, "_home", _no_way_back),),
    ),
    Fault(
        name="key_gradients_averaged_over_ranks",
        kind="E",
        report="ByteDance-Seed/VeOmni/pull/1120",
        sentence="The sum over the context axis is a mean: gradients are too small by the number of ranks.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=is_sharded,
        replaced=(Replacement(all_gather, "_home", _averaged),),
    ),
    Fault(
        name="sink_gradient_not_summed_over_ranks",
        kind="E",
        report="ByteDance-Seed/VeOmni/pull/1115",
        sentence="The group that sums parameter gradients leaves the context axis out.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=lambda problem: problem.sinks and is_sharded(problem),
        replaced=(Replacement(sharded, "_summed_over_mesh", _summed_over_data_alone),),
    ),
    Fault(
        name="last_kv_head_read_before_its_gradient_arrived",
        kind="P",
        report="cornstarch-org/Cornstarch/pull/77",
        sentence="dkey and dvalue of the last head group are read before the reduce-scatter has landed.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 num_kv_heads=2 sliding_window_size=2",
        applies=lambda problem: crosses(problem),
        replaced=(Replacement(all_gather, "_home", _last_head_not_arrived),),
    ),
    Fault(
        name="ring_backward_uses_partial_lse",
        kind="E",
        report="tenstorrent/tt-metal/pull/53216",
        sentence="The backward of a ring's step uses the step's own log-sum-exp in place of the row's.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=crosses,
        replaced=(Replacement(ring, "_attend_backward", _lse_of_the_step),),
    ),
    Fault(
        name="ring_backward_forgets_the_last_step",
        kind="E",
        report="NVIDIA/TransformerEngine/issues/1557",
        sentence="dquery lacks what the last step of the ring adds.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=crosses,
        replaced=(Replacement(ring, "_attend_backward", _nothing_from_the_last_step),),
    ),
    Fault(
        name="no_backward_on_one_rank",
        kind="E",
        report="distdl/distdl/issues/35",
        sentence="The branch for a single partition returns the wrong number of gradients.",
        planted_in="ring",
        smallest="v=1 seq_len=2 sliding_window_size=2 context_parallelism=1",
        applies=lambda problem: not is_sharded(problem),
        replaced=(Replacement(local_attention, "backward", _other_number_of_gradients),),
    ),
    Fault(
        name="softmax_backward_without_delta",
        kind="O",
        report=NOT_PUBLIC,
        sentence="The term that a softmax's gradient subtracts, the sum of dout·out, is left out.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.seq_len > 1,
        replaced=(Replacement(sharded, "_row_cotangents", _without_delta),),
    ),
    Fault(
        name="lse_cotangent_ignored",
        kind="O",
        report="jax-ml/jax/pull/34211",
        sentence="The backward takes the cotangent of lse for an unused one, always.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        replaced=(Replacement(sharded, "_row_cotangents", _without_lse_cotangent),),
    ),
    Fault(
        name="unused_lse_stops_every_gradient",
        kind="O",
        report="jax-ml/jax/pull/34211",
        sentence="A zero cotangent of lse, which is what an unused result gets, makes every gradient zero.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        gradients=_unused_lse_stops_all,
    ),
    Fault(
        name="dkey_without_scale",
        kind="O",
        report=NOT_PUBLIC,
        sentence="dkey alone lacks the factor of the logits' scale.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.scale != 1,
        gradients=_key_unscaled,
    ),
    Fault(
        name="dvalue_features_reversed",
        kind="O",
        report="flatironinstitute/jax-finufft/issues/226",
        sentence="The forward is exact, the cotangent of one operand comes back in another order of its axis.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.value_dim > 1,
        gradients=_value_transposed,
    ),
    Fault(
        name="dquery_always_zero",
        kind="O",
        report=NOT_PUBLIC,
        sentence="The query gets no gradient.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.seq_len > 1,
        gradients=_nothing_for_query,
    ),
)
