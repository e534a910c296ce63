"""Kind Q and the rematerialisation of kind O: the answer is right, and costs more than the window asks for.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always, crosses, cuts_left, is_sharded
from conformance.faults.kernels import BACKWARD, in_bfloat16
from conformance.problem import Problem
from impl import exchange, sharded
from impl import layout as layouts
from impl.kernels import query_blocks, xla


def _row_by_row(right: Any, array: Any, *, axis: int, layout: str, context_parallelism: int) -> Any:
    """A gather of rows that became a sequential loop."""
    if layout == "contiguous":
        return array
    positions = layouts.all_positions(layout, array.shape[axis], context_parallelism)
    rows = lax.map(lambda index: lax.dynamic_index_in_dim(array, index, axis, keepdims=False), jnp.argsort(positions))
    return jnp.moveaxis(rows, 0, axis)


def _every_key(right: Any, operands: Any, config: Any) -> int:
    return operands.key.shape[1]


def _from_a_table(right: Any, operands: Any, config: Any) -> Any:
    """The window is looked up in a table of all pairs of positions, built on the host for this trace."""
    mask = right(operands, config)
    seq_len = operands.key.shape[1]
    left, bound = config.window
    distance = np.arange(seq_len)[:, None] - np.arange(seq_len)[None, :]
    table = np.ones((seq_len, seq_len), bool)
    table &= (distance <= left) if left is not None else True
    table &= (distance >= -bound) if bound is not None else True
    return mask & jnp.asarray(table)[operands.query_positions][:, operands.key_positions][None]


def _unrolled(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    """One operation for every position of the sequence."""
    out = results["out"]
    for position in range(problem.seq_len):
        out = jnp.where(problem.seq_len == position, 0, 1).astype(out.dtype) * out
    return {**results, "out": out}


def _unnamed(right: Any, value: Any, name: str) -> Any:
    return value


def _halo_unnamed(right: Any, value: Any, name: str) -> Any:
    return value if name == "attention_halo" else right(value, name)


def _narrow_lse(right: Any, value: Any, name: str) -> Any:
    return right(in_bfloat16(value) if name == "attention_lse" else value, name)


def _message_by_message(right: Any, rows: Any, plan: Any, axis_name: str) -> Any:
    """As many bytes as ever, a row at a time."""
    received = []
    for permute in plan.permutes:
        first = permute.slot * plan.chunk + permute.start
        outgoing = jnp.moveaxis(lax.slice_in_dim(rows, first, first + permute.rows, axis=1), 1, 0)
        _, brought = lax.scan(
            lambda _, row, pairs=permute.pairs: (None, lax.ppermute(row, axis_name, pairs)), None, outgoing
        )
        received.append(jnp.moveaxis(brought, 0, 1))
    return tuple(received)


def _every_key_without_documents(right: Any, operands: Any, config: Any) -> int:
    return operands.key.shape[1] if operands.query_segment_ids is None else right(operands, config)


FAULTS = (
    Fault(
        name="reordering_is_a_loop",
        kind="Q",
        report="AI-Hypercomputer/maxtext/pull/4469",
        sentence="Bringing rows into position order is a sequential loop over them.",
        planted_in="ulysses",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap",
        applies=lambda problem: problem.layout != "contiguous" and is_sharded(problem),
        replaced=(Replacement(layouts, "restore", _row_by_row),),
    ),
    Fault(
        name="silent_fallback_to_dense",
        kind="Q",
        report="keras-team/keras/issues/21808",
        sentence="The kernel that skips blocks is not taken: every query meets every key that is there.",
        planted_in="halo",
        smallest="v=1 seq_len=1024 sliding_window_size=3",
        applies=cuts_left,
        replaced=(Replacement(query_blocks, "_keys_seen", _every_key),),
    ),
    Fault(
        name="zero_right_bound_skips_no_block",
        kind="Q",
        report="Dao-AILab/flash-attention/issues/2574",
        sentence="A right bound of 0 reads as not given where blocks are skipped, so none is.",
        planted_in="halo",
        smallest="v=1 seq_len=1024 sliding_window_size=3",
        applies=lambda problem: cuts_left(problem) and problem.window[1] == 0,
        replaced=(Replacement(query_blocks, "_keys_seen", _every_key),),
    ),
    Fault(
        name="backward_launches_masked_blocks",
        kind="Q",
        report="marin-community/marin/pull/9119",
        sentence="The backward computes blocks that the mask empties.",
        planted_in="halo",
        smallest="v=1 seq_len=1024 sliding_window_size=3",
        applies=cuts_left,
        replaced=(Replacement(query_blocks, "_keys_seen", _every_key, BACKWARD),),
    ),
    Fault(
        name="mask_from_a_table_of_all_pairs",
        kind="Q",
        report="NVIDIA-NeMo/Automodel/pull/2621",
        sentence="The mask is a constant of seq_len squared, built anew for every length and layer.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=cuts_left,
        replaced=(Replacement(xla, "visible_keys", _from_a_table),),
    ),
    Fault(
        name="program_grows_with_the_sequence",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="A loop over positions is unrolled while tracing.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=always,
        returned=_unrolled,
    ),
    Fault(
        name="residuals_without_names",
        kind="O",
        report=NOT_PUBLIC,
        sentence="Nothing is saved under a name: where layers are rematerialised the forward runs twice.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=always,
        replaced=(Replacement(sharded, "checkpoint_name", _unnamed),),
    ),
    Fault(
        name="halo_without_a_name",
        kind="O",
        report=NOT_PUBLIC,
        sentence="The halo is not saved under a name: where layers are rematerialised it travels again.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(sharded, "checkpoint_name", _halo_unnamed),),
    ),
    Fault(
        name="saved_lse_is_narrow",
        kind="O",
        report=NOT_PUBLIC,
        sentence="The log-sum-exp that the backward reads was saved in bfloat16.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=always,
        replaced=(Replacement(sharded, "checkpoint_name", _narrow_lse),),
    ),
    Fault(
        name="halo_sent_row_by_row",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="The halo travels in a loop over its rows: the right bytes, in a message for each key of the window.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(exchange, "exchange", _message_by_message),),
    ),
    Fault(
        name="no_block_skipped_without_documents",
        kind="Q",
        report=NOT_PUBLIC,
        sentence="Only the path for documents skips blocks: without segment ids every query meets every key.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=cuts_left,
        replaced=(Replacement(query_blocks, "_keys_seen", _every_key_without_documents),),
    ),
)
