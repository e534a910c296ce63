"""The oracle's answer to a case, with the allowance of every element, for one data draw and one call of the target.

May touch: the oracle and the inputs' masters; never JAX, never anything that came from a target.
Tests: tests/conformance/test_answers.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

import oracle
from conformance.empty_rows import empty_rows, without_empty_row_cotangents
from conformance.inputs import STRUCTURED, Inputs, inputs_of, redraw, rows_of
from conformance.probed_answers import PROBE_BEYOND_PAIRS, IsHere, probed_answer, visible_pairs
from conformance.problem import Case, Problem
from conformance.sink_answers import affordable_heads, sink_answer, sink_sums_of, why_withheld
from conformance.target import TargetDescription
from conformance.variants import variant_inputs
from oracle.budget import Precision
from oracle.sinks import SinkSums

CASES_CACHED = 4
"""Targets that are no more cases apart than this share the answers: two draws and two calls a case."""


@dataclass(frozen=True)
class Answer:
    """By tensor name (out, lse, dquery, …), in position order: the reference and the allowance, float64 arrays.

    `compared` holds, for the tensors that are not compared everywhere, where they are. A case too large to be answered
    everywhere has `places` [n, 3] (batch row, position, head; of dsinks [n, 1], head): a row of the reference is then
    one of these, not a position. `withheld` says of a tensor that is owed, and of which nothing is known, why.
    """

    reference: Mapping[str, np.ndarray]
    allowance: Mapping[str, np.ndarray]
    compared: Mapping[str, np.ndarray]
    places: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    withheld: Mapping[str, str] = dataclasses.field(default_factory=dict)


def answer_for(target: TargetDescription, case: Case, draw: int, call: str) -> Answer:
    """The answer that the target's `call` ("attention" or "attention_with_lse") is held to on this draw of the case."""
    precision = precision_of(target, case.problem.dtype, case.problem.precision)
    return _answer(redraw(case, draw), call == "attention_with_lse", target.empty_rows == "zero", precision)


def precision_of(target: TargetDescription, dtype: str, matmul_precision: str = "highest") -> Precision:
    """The numerics that the target declares, as far as they mean anything for this dtype, on the platform it runs on.

    On a TPU the default matmul precision of the problem is one bfloat16 pass, whatever the target declares.

    Raises:
        ValueError: a field that Precision does not have, or a value below its floor.
    """
    known = {field.name for field in dataclasses.fields(Precision)} - {"dtype"}
    for name in (*target.precision, *(target.tpu_precision or ())):
        if name not in known:
            raise ValueError(f"precision has no field {name!r}; its fields are {', '.join(sorted(known))}")
    declared = dict(target.numerics)
    if dtype != "float32":
        declared.pop("matmul_passes", None)
    elif target.platform == "tpu" and matmul_precision == "default":
        declared["matmul_passes"] = 1
    return Precision(dtype) if dtype == "float64" else Precision(dtype, **declared)


def variant_answer(target: TargetDescription, case: Case, variant: str) -> Answer:
    """The answer to a variant whose cotangent of lse is 0: that of `attention` and of `attention_with_lse` alike."""
    precision = precision_of(target, case.problem.dtype, case.problem.precision)
    return _answer_to_variant(case, variant, target.empty_rows == "zero", precision)


@lru_cache(maxsize=2 * (CASES_CACHED + 1))
def _answer_to_variant(case: Case, variant: str, defines_empty_rows: bool, precision: Precision) -> Answer:
    # Coded values repeat, and so do the roundings of what they are multiplied with.
    return _to(case.problem, variant_inputs(case, variant), False, defines_empty_rows, (precision, True))


@lru_cache(maxsize=4 * (CASES_CACHED + 1))
def _answer(case: Case, with_lse: bool, defines_empty_rows: bool, precision: Precision) -> Answer:
    if visible_pairs(case) > PROBE_BEYOND_PAIRS:
        at_places = answer_at_places(case, with_lse, defines_empty_rows, precision)
        return _with_sinks(at_places, case, with_lse, defines_empty_rows, precision)
    return _whole(case, with_lse, defines_empty_rows, precision)


def answer_at_places(
    case: Case, with_lse: bool, defines_empty_rows: bool, precision: Precision, is_here: IsHere | None = None
) -> Answer:
    """The answer where faults live, for a case that is too large to be answered everywhere or held by many hosts.

    With `is_here` only where somebody holds the row. dsinks is not in it: no place has it.
    """
    probed = probed_answer(case, with_lse, defines_empty_rows, precision, is_here)
    compared: dict[str, np.ndarray] = {}
    if not defines_empty_rows and case.problem.padding is not None:
        for name in probed.reference.keys() & {"out", "lse"}:
            ids = [rows_of(case, "segment_ids", [row], [position])[0, 0] for row, position, _ in probed.places[name]]
            is_token = np.array(ids) != case.problem.padding
            shape = probed.reference[name].shape
            compared[name] = np.broadcast_to(is_token.reshape(-1, *(1,) * (len(shape) - 1)), shape)
    return _usable(Answer(probed.reference, probed.allowance, compared, probed.places))


def _with_sinks(answer: Answer, case: Case, with_lse: bool, defines_empty_rows: bool, precision: Precision) -> Answer:
    """The answer at places with dsinks of the heads that can be afforded."""
    if not case.problem.sinks:
        return answer
    problem = case.problem
    everything = [(row, np.arange(problem.seq_len)) for row in range(problem.batch)]
    sums = {
        head: sink_sums_of(
            case,
            head,
            everything,
            with_lse=with_lse,
            defines_empty_rows=defines_empty_rows,
            precision=precision,
        )
        for head in affordable_heads(case)
    }
    return with_sink_sums(answer, case, sums, precision)


def with_sink_sums(answer: Answer, case: Case, sums: Mapping[int, SinkSums], precision: Precision) -> Answer:
    """The answer with dsinks of some heads, from each one's sums over every query."""
    if not sums:
        return dataclasses.replace(answer, withheld={**answer.withheld, "dsinks": why_withheld(case)})
    found = np.array([sink_answer(case, of_head, precision) for of_head in sums.values()])
    sinks = Answer(
        {**answer.reference, "dsinks": found[:, 0]},
        {**answer.allowance, "dsinks": found[:, 1]},
        answer.compared,
        {**answer.places, "dsinks": np.array(list(sums))[:, None]},
        answer.withheld,
    )
    return _usable(sinks)


def _whole(case: Case, with_lse: bool, defines_empty_rows: bool, precision: Precision) -> Answer:
    return _to(case.problem, _inputs(case), with_lse, defines_empty_rows, (precision, case.values in STRUCTURED))


def _to(
    problem: Problem, inputs: Inputs, with_lse: bool, defines_empty_rows: bool, numerics: tuple[Precision, bool]
) -> Answer:
    """The answer to these inputs; `numerics` are the target's, and whether the values are structured."""
    precision, structured_values = numerics
    if not defines_empty_rows:
        inputs = without_empty_row_cotangents(inputs, problem)
    reference, allowance = oracle.budget.answer_with_allowances(
        inputs.query,
        inputs.key,
        inputs.value,
        dout=inputs.dout,
        dlse=inputs.dlse if with_lse else None,
        precision=precision,
        structured_values=structured_values,
        window=problem.window,
        segment_ids=inputs.segment_ids,
        padding_segment_id=problem.padding,
        attn_logits_soft_cap=problem.attn_logits_soft_cap,
        sinks=inputs.sinks,
        scale=problem.scale,
    )
    compared: dict[str, np.ndarray] = {}
    if not defines_empty_rows and (empty := empty_rows(inputs, problem)) is not None:
        rows = np.broadcast_to(~empty[:, :, None], reference.lse.shape)
        compared = {"lse": rows, "out": np.broadcast_to(rows[..., None], reference.out.shape)}
    return _usable(Answer(_by_name(reference, problem.shared_kv), _by_name(allowance, problem.shared_kv), compared))


@lru_cache(maxsize=2)
def _inputs(case: Case) -> Inputs:
    """The two calls on a draw share its inputs, which are read-only."""
    return inputs_of(case)


def _usable(answer: Answer) -> Answer:
    """The answer, read-only, once it is known to be able to fail somebody: an infinite allowance passes everything.

    Raises:
        ArithmeticError: a reference that is not finite (but for the -inf of an empty row's lse), or such an allowance.
    """
    for name, allowance in answer.allowance.items():
        reference = answer.reference[name]
        is_empty_row = np.isneginf(reference) if name == "lse" else False
        if not (np.isfinite(reference) | is_empty_row).all() or not np.isfinite(allowance).all():
            raise ArithmeticError(f"the oracle has no finite answer and allowance for {name}")
        reference.flags.writeable = allowance.flags.writeable = False
    return answer


def _by_name(tensors: object, shared_kv: bool) -> dict[str, np.ndarray]:
    """The named tensors that exist; one array passed as key and value gets both gradients, and both allowances."""
    named = {name: getattr(tensors, name) for name in ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")}
    if shared_kv:
        named["dkey"] = named["dkey"] + named["dvalue"]
        named["dvalue"] = None
    return {name: array for name, array in named.items() if array is not None}
