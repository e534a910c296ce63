"""Kinds E, O and Q: the answer is right, and more is sent than it takes, or by other collectives than claimed.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import crosses, is_sharded, reach
from conformance.problem import Problem
from impl import exchange, halo, ring


def _gathers(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    """The partitioner makes an all-gather of each permutation, and each rank takes what it was to receive."""
    received = []
    for permute in plan.permutes:
        first = permute.slot * plan.chunk + permute.start
        by_rank = lax.all_gather(lax.slice_in_dim(rows, first, first + permute.rows, axis=1), axis_name)
        source_of = np.full(plan.context_parallelism, -1)
        for source, destination in permute.pairs:
            source_of[destination] = source
        source = jnp.asarray(source_of)[lax.axis_index(axis_name)]
        taken = lax.dynamic_index_in_dim(by_rank, jnp.maximum(source, 0), keepdims=False)
        received.append(jnp.where(source < 0, jnp.zeros_like(taken), taken))
    return tuple(received)


def _sends_whole_chunks(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    received = []
    for permute in plan.permutes:
        chunk = lax.slice_in_dim(rows, permute.slot * plan.chunk, (permute.slot + 1) * plan.chunk, axis=1)
        arrived = lax.ppermute(chunk, axis_name, permute.pairs)
        received.append(lax.slice_in_dim(arrived, permute.start, permute.start + permute.rows, axis=1))
    return tuple(received)


def _whole_chunks_home(right: Any, gradients: Any, plan: Any, axis_name: str) -> Any:
    home = []
    for rows, permute in zip(gradients, plan.permutes, strict=True):
        padding = [(0, 0)] * rows.ndim
        padding[1] = (permute.start, plan.chunk - permute.start - permute.rows)
        pairs = [(destination, source) for source, destination in permute.pairs]
        arrived = lax.ppermute(jnp.pad(rows, padding), axis_name, pairs)
        home.append(lax.slice_in_dim(arrived, permute.start, permute.start + permute.rows, axis=1))
    return tuple(home)


def _fetched_again(right: Any, operands: Any, received: Any, cotangents: Any, layer: Any) -> Any:
    """The rows that arrived in the forward were not kept."""

    def send(rows: Any) -> Any:
        return exchange.exchange(rows, halo.plan_of(layer), layer.context_axis)

    again = received._replace(key=send(operands.key), value=send(operands.value))
    return right(operands, again, cotangents, layer)


def _two_sided(right: Any, layout: str, ranks: int, seq_len: int, window: Any) -> Any:
    """Rows after the chunk are fetched as well, although nobody sees them."""
    return right(layout, ranks, seq_len, (window[0], 1) if window[1] == 0 else window)


def _all_the_way_round(right: Any, layout: str, ranks: int, seq_len: int, window: Any) -> tuple[int, int]:
    return ranks - 1, 0


def _summed_beside(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    """A sum over everything that adds nothing: 0 times the mean of what all devices hold."""
    out = results["out"]
    total = jnp.sum(jnp.abs(out.astype(jnp.float32)))
    return {**results, "out": out + jnp.where(total < 0, total, 0).astype(out.dtype)}


def _seen_by_the_host(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    """The largest output is sent to the host each step, for a log."""
    out = results["out"]
    logged = jax.pure_callback(
        lambda largest: np.zeros((), np.float32), jax.ShapeDtypeStruct((), jnp.float32), jnp.max(lax.stop_gradient(out))
    )
    return {**results, "out": out + logged.astype(out.dtype)}


def _gathered_query(right: Any, operands: Any, layer: Any) -> Any:
    """The query is shuffled along an axis that no shuffle needs to leave: gathered, and cut again."""
    rows = operands.query.shape[1]
    everything = lax.all_gather(operands.query, layer.context_axis, axis=1, tiled=True)
    first = lax.axis_index(layer.context_axis) * rows
    return right(operands._replace(query=lax.dynamic_slice_in_dim(everything, first, rows, axis=1)), layer)


FAULTS = (
    Fault(
        name="halo_by_all_gather",
        kind="O",
        report="openxla/xla/pull/20808",
        sentence="The permutations of the halo are turned into all-gathers.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "exchange", _gathers),),
    ),
    Fault(
        name="halo_sends_whole_chunks",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="Whole chunks travel where the window reaches into some of their rows.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and any(b % problem.chunk_len for b in reach(problem)),
        replaced=(Replacement(exchange, "exchange", _sends_whole_chunks),),
    ),
    Fault(
        name="halo_gradients_go_home_in_whole_chunks",
        kind="E",
        report="NVIDIA-NeMo/Automodel/pull/3383",
        sentence="dkey and dvalue go back to their owners as whole chunks, most of them zeros.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: crosses(problem) and any(b % problem.chunk_len for b in reach(problem)),
        replaced=(Replacement(exchange, "send_home", _whole_chunks_home),),
    ),
    Fault(
        name="halo_fetched_again_in_the_backward",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="The halo is not kept, so keys and values travel a second time for the gradients.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(halo, "_backward", _fetched_again),),
    ),
    Fault(
        name="halo_from_both_sides",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="Rows after the chunk are fetched too, although a causal window sees none of them.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: is_sharded(problem) and problem.window[1] == 0,
        replaced=(Replacement(exchange, "halo_plan", _two_sided),),
    ),
    Fault(
        name="ring_goes_all_the_way_round",
        kind="Q",
        report="marin-community/marin/pull/9119",
        sentence="K and V pass every rank although the window ends after a few.",
        planted_in="ring",
        smallest="v=1 seq_len=16 sliding_window_size=3 context_parallelism=4",
        applies=lambda problem: problem.context_parallelism > 2 and max(reach(problem)) < problem.chunk_len,
        replaced=(Replacement(ring, "rotations", _all_the_way_round),),
    ),
    Fault(
        name="all_reduce_beside_the_halo",
        kind="O",
        report="jax-ml/jax/issues/20381",
        sentence="A sum over all devices is made whose result changes nothing.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: problem.num_devices > 1,
        returned=_summed_beside,
    ),
    Fault(
        name="query_gathered_and_cut_again",
        kind="Q",
        report="jax-ml/jax/issues/20381",
        sentence="Every rank gathers all queries and takes its own.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=is_sharded,
        replaced=(Replacement(halo, "_forward", _gathered_query),),
    ),
    Fault(
        name="host_called_in_every_step",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="A statistic of the output is sent to the host in every step.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=lambda problem: problem.axis_types == "auto",
        returned=_seen_by_the_host,
    ),
)
