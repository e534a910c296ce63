"""The oracle's answer to a case too large to answer everywhere: at the places where faults live, and at a sample.

Rows of the inputs are made where they are read, so no array of the whole sequence is formed here.
May touch: the oracle and the inputs' rows; never JAX. Tests: tests/conformance/test_probed_answers.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from conformance.inputs import STRUCTURED, rows_of
from conformance.problem import Case, Problem
from conformance.value_kinds import draw_sinks
from oracle.budget import Precision
from oracle.outline import Outline, Rows
from oracle.places import default_places
from oracle.probe import Place, Probed, probe

# Beyond so many pairs of a query and a key in its window, the whole answer takes minutes and gigabytes.
PROBE_BEYOND_PAIRS = 2**25


@dataclass(frozen=True)
class ProbedAnswer:
    """By tensor: `places` [n, 3] (batch row, position, head), with the reference and allowance of those rows."""

    places: Mapping[str, Int64[np.ndarray, "n 3"]]
    reference: Mapping[str, np.ndarray]
    allowance: Mapping[str, np.ndarray]


def visible_pairs(case: Case) -> int:
    """How many pairs of a query and a key the windows hold, over batch rows and query heads; documents aside."""
    problem = case.problem
    left, right = (
        problem.seq_len - 1 if bound is None else min(bound, problem.seq_len - 1) for bound in problem.window
    )
    return problem.batch * problem.num_query_heads * problem.seq_len * min(problem.seq_len, left + right + 1)


IsHere = Callable[[str, int, int, int], bool]
"""(tensor, batch row, position, head): whether somebody holds the row, and so wants to know."""


def probed_answer(
    case: Case, with_lse: bool, defines_empty_rows: bool, precision: Precision, is_here: IsHere | None = None
) -> ProbedAnswer:
    """The answer at `oracle.places.default_places`; dsinks, to which every query adds, is in sink_answers.py.

    With `is_here` only at those places whose row somebody holds.
    """
    problem, outline = case.problem, outline_of(case)
    places = default_places(outline, chunk=problem.chunk_len, seed=case.seed)
    if is_here is not None:
        places = [place for place in places if _is_held(place, problem, is_here)]
    is_structured = case.values in STRUCTURED
    rows = row_reader(case, with_lse, defines_empty_rows)
    probed = probe(rows, outline, places, precision=precision, structured_values=is_structured)
    return _by_tensor(case, list(probed))


def outline_of(case: Case) -> Outline:
    """A case as the oracle's probe wants it."""
    problem = case.problem
    batch_rows, positions = np.arange(problem.batch), np.arange(problem.seq_len)
    return Outline(
        batch=problem.batch,
        seq_len=problem.seq_len,
        num_query_heads=problem.num_query_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        window=problem.window,
        segment_ids=rows_of(case, "segment_ids", batch_rows, positions) if problem.segments else None,
        padding_segment_id=problem.padding,
        attn_logits_soft_cap=problem.attn_logits_soft_cap,
        sinks=draw_sinks(case).astype(np.float32) if problem.sinks else None,
        scale=problem.scale,
    )


def row_reader(case: Case, with_lse: bool, defines_empty_rows: bool) -> Rows:
    """Rows of the arrays of a call; the cotangents of rows without keys are zero for a target that leaves those
    undefined (of dout the oracle reads none there)."""

    def rows(tensor: str, batch_row: int, positions: np.ndarray, heads: slice) -> np.ndarray:
        if tensor == "dlse" and not with_lse:
            return np.zeros((len(positions), heads.stop - heads.start))
        found = rows_of(case, tensor, [batch_row], positions, heads)[0]
        if tensor != "dlse" or defines_empty_rows or case.problem.padding is None:
            return found
        is_token = rows_of(case, "segment_ids", [batch_row], positions)[0] != case.problem.padding
        return np.where(is_token[:, None], found, 0.0)

    return rows


def _is_held(place: Place, problem: Problem, is_here: IsHere) -> bool:
    """Whether all rows of a place are here: those of the query heads that share its kv head, or the key's own."""
    if place.side == "key":
        return is_here("dkey", place.batch_row, place.position, place.kv_head)
    group = problem.num_query_heads // problem.num_kv_heads
    heads = range(place.kv_head * group, (place.kv_head + 1) * group)
    return all(is_here("out", place.batch_row, place.position, head) for head in heads)


def _by_tensor(case: Case, probed: list[Probed]) -> ProbedAnswer:
    """One row for each probed (batch row, position, head) of each tensor."""
    group = case.problem.num_query_heads // case.problem.num_kv_heads
    places, reference, allowance = defaultdict(list), defaultdict(list), defaultdict(list)
    for place, expected, allowed in probed:
        if place.side == "key" and case.problem.shared_kv:  # one array was both, and gets both gradients
            expected = {"dkey": expected["dkey"] + expected["dvalue"]}
            allowed = {"dkey": allowed["dkey"] + allowed["dvalue"]}
        for tensor, rows in expected.items():
            heads = (
                range(place.kv_head * group, (place.kv_head + 1) * group) if place.side == "query" else [place.kv_head]
            )
            places[tensor] += [(place.batch_row, place.position, head) for head in heads]
            reference[tensor] += list(rows) if place.side == "query" else [rows]
            allowance[tensor] += list(allowed[tensor]) if place.side == "query" else [allowed[tensor]]
    return ProbedAnswer(*({name: np.array(rows) for name, rows in of.items()} for of in (places, reference, allowance)))
