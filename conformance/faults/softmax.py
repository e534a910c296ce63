"""Kind I: rows without keys, and partial results that are merged by their log-sum-exp.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always, crosses
from conformance.faults.kernels import FORWARD
from conformance.problem import Problem
from impl import local_attention, ring


def _can_have_empty_rows(problem: Problem) -> bool:
    return problem.padding is not None


def _can_be_large(problem: Problem) -> bool:
    """No cap holds the logits below 88; those of bfloat16 inputs are not drawn that large."""
    return problem.attn_logits_soft_cap is None and problem.dtype == "float32"


def _not_a_number(right: Any, operands: Any, cotangents: Any, *rest: Any, **named: Any) -> Any:
    """0 · NaN of one row's softmax reaches every gradient of its batch row."""
    gradients = right(operands, cotangents, *rest, **named)
    is_empty = jnp.any(jnp.isneginf(cotangents.lse), axis=(1, 2))[:, None, None, None]
    return gradients._replace(
        dquery=jnp.where(is_empty, jnp.nan, gradients.dquery),
        dkey=jnp.where(is_empty, jnp.nan, gradients.dkey),
        dvalue=jnp.where(is_empty, jnp.nan, gradients.dvalue),
    )


def _lse_of_empty_rows(value: float) -> Any:
    def returned(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
        if "lse" not in results:
            return results
        lse = results["lse"]
        return {**results, "lse": jnp.where(jnp.isneginf(lse), value, lse)}

    return returned


def _raw_exponentials(right: Any, one: Any, other: Any) -> Any:
    (one_out, one_lse), (other_out, other_lse) = one, other
    one_sum, other_sum = jnp.exp(one_lse), jnp.exp(other_lse)
    total = one_sum + other_sum
    weight, other_weight = (jnp.where(total > 0, part / total, 0)[..., None] for part in (one_sum, other_sum))
    return one_out * weight + other_out * other_weight, jnp.log(total)


def _plain_sum(right: Any, one: Any, other: Any) -> Any:
    (one_out, _), (other_out, _) = one, other
    return one_out + other_out, right(one, other)[1]


def _larger_lse(right: Any, one: Any, other: Any) -> Any:
    return right(one, other)[0], jnp.maximum(one[1], other[1])


def _base_two(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array / math.log(2) if name == "lse" else array for name, array in results.items()}


FAULTS = (
    Fault(
        name="empty_row_makes_gradients_nan",
        kind="I",
        report="pytorch/pytorch/pull/196170",
        sentence="One row without keys makes every gradient of its batch row NaN.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=lambda problem: _can_have_empty_rows(problem) and not problem.sinks,
        replaced=(Replacement(local_attention, "backward", _not_a_number),),
    ),
    Fault(
        name="lse_of_empty_rows_plus_infinity",
        kind="I",
        report="Dao-AILab/flash-attention/pull/978",
        sentence="The log-sum-exp of a row without keys is +inf.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=lambda problem: _can_have_empty_rows(problem) and not problem.sinks,
        returned=_lse_of_empty_rows(math.inf),
    ),
    Fault(
        name="lse_of_empty_rows_zero",
        kind="I",
        report="pytorch/pytorch/pull/134650",
        sentence="The log-sum-exp of a row without keys is 0.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=lambda problem: _can_have_empty_rows(problem) and not problem.sinks,
        returned=_lse_of_empty_rows(0.0),
    ),
    Fault(
        name="merge_overflows",
        kind="I",
        report="SHI-Labs/NATTEN/pull/202",
        sentence="Partial results are merged by exp(lse) itself, which is no number beyond 88.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 values=needle",
        applies=lambda problem: crosses(problem) and _can_be_large(problem),
        replaced=(Replacement(ring, "_merged", _raw_exponentials),),
    ),
    Fault(
        name="partial_results_added",
        kind="I",
        report=NOT_PUBLIC,
        sentence="Partial results of a ring are added without their weights.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=crosses,
        replaced=(Replacement(ring, "_merged", _plain_sum),),
    ),
    Fault(
        name="merged_lse_is_the_larger",
        kind="I",
        report=NOT_PUBLIC,
        sentence="The log-sum-exp of two parts is taken for the larger of theirs.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=crosses,
        replaced=(Replacement(ring, "_merged", _larger_lse, FORWARD),),
    ),
    Fault(
        name="lse_in_base_two",
        kind="I",
        report=NOT_PUBLIC,
        sentence="The log-sum-exp that is returned is the kernel's own, in base 2.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        returned=_base_two,
    ),
)
