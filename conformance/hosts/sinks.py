"""dsinks over many hosts: each streams its own queries' sums, and only numbers travel; their total is compared once.

`told_here` runs in every host's process, `judged` where the hosts' messages are merged.
May touch: the oracle, plain numbers; never JAX. Tests: tests/conformance/test_hosts_sinks.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conformance.answers import Answer, precision_of, with_sink_sums
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.inputs import redraw
from conformance.problem import Case
from conformance.sink_answers import affordable_heads, sink_sums_of
from conformance.target import TargetDescription
from oracle.sinks import NOTHING, SinkSums

Message = dict[str, Any]
HeldQueries = Mapping[int, Sequence[tuple[int, np.ndarray]]]


def told_here(
    description: TargetDescription,
    case: Case,
    num_hosts: int,
    held: Mapping[str, Mapping[int, float]],
    queries: HeldQueries,
) -> Message:
    """What a host tells the others: of `held`, by name `draw/call/dsinks` and head, the sums over its own `queries`."""
    precision = precision_of(description, case.problem.dtype, case.problem.precision)
    sums = []
    for name in held:
        draw, call, _ = name.split("/")
        drawn = redraw(case, int(draw))
        for head in affordable_heads(drawn, num_hosts):
            if head in queries:
                of_head = sink_sums_of(
                    drawn,
                    head,
                    queries[head],
                    with_lse=call == "attention_with_lse",
                    defines_empty_rows=description.empty_rows == "zero",
                    precision=precision,
                )
                sums.append([name, head, *of_head])
    return {
        "sums": sums,
        "held": [[name, head, got] for name, by_head in held.items() for head, got in by_head.items()],
    }


def judged(description: TargetDescription, case: Case, answers: Sequence[Message]) -> list[Message]:
    """What every host's copy of dsinks comes to against the sums of all: shares and findings, as a host gives them.

    Nothing, where a host has not answered: what it has not added is not known.
    """
    if not case.problem.sinks or not all("sinks" in answer for answer in answers):
        return []
    totals: dict[str, dict[int, SinkSums]] = {}
    for answer in answers:
        for name, head, *sums in answer["sinks"]["sums"]:
            by_head = totals.setdefault(name, {})
            by_head[head] = by_head.get(head, NOTHING).plus(SinkSums(*sums))
    return [_of_host(description, case, answer["sinks"]["held"], totals) for answer in answers]


def _of_host(
    description: TargetDescription,
    case: Case,
    held: Sequence[Sequence[Any]],
    totals: Mapping[str, Mapping[int, SinkSums]],
) -> Message:
    arrays: dict[str, np.ndarray] = {}
    for name, head, got in held:
        arrays.setdefault(name, np.full(case.problem.num_query_heads, np.nan))[head] = got
    precision = precision_of(description, case.problem.dtype, case.problem.precision)

    def answer(draw: int, call: str) -> Answer:
        name = f"{draw}/{call}/dsinks"
        here = {head for of, head, _ in held if of == name}
        sums = {head: of_head for head, of_head in totals.get(name, {}).items() if head in here}
        if totals.get(name) and not sums:
            return Answer({}, {}, {})  # the heads that are compared are held elsewhere
        return with_sink_sums(Answer({}, {}, {}), redraw(case, draw), sums, precision)

    outcome = CHECKS["gradients"].run(Evidence(description, case, {}, arrays, answers=answer))
    return {
        "shares": [["gradients", tensor, share] for tensor, share in outcome.shares.items()],
        "findings": [dataclasses.asdict(finding) for finding in outcome.findings],
        "withheld": [["gradients", tensor, why] for tensor, why in outcome.withheld.items()],
    }
