"""The feature matrix of a run: for each thing that cases exercise, each layout and each target, what came of it.

A cell is `checked` on so many cases, `finding`, `declined` with its reason, or `not drawn`: nothing is left blank.
May touch: runs and events. Tests: tests/conformance/test_report_matrix.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from conformance.events import EVENTS, events_of
from conformance.problem import LAYOUTS
from conformance.runner import Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, CaseResult


def feature_matrix(run: Run) -> str:
    """The matrix as a Markdown table: a row for each event and layout, a column for each target."""
    names = [target.description.name for target in run.targets]
    lines = [f"| feature | layout | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
    results_of = [_by_feature(target) for target in run.targets]
    for event in EVENTS:
        for layout in LAYOUTS:
            cells = [_cell(results.get((event, layout), ())) for results in results_of]
            lines.append(f"| {event} | {layout} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_feature(target: TargetRun) -> dict[tuple[str, str], list[CaseResult]]:
    results: dict[tuple[str, str], list[CaseResult]] = {}
    for result in target.all_results:
        for event in events_of(result.case):
            results.setdefault((event, result.case.problem.layout), []).append(result)
    return results


def _cell(results: Iterable[CaseResult]) -> str:
    results = list(results)
    counts = Counter(result.status for result in results)
    if counts[FINDING]:
        return f"finding on {counts[FINDING]} of {len(results)}"
    if counts[CONFORMS]:
        return f"checked on {counts[CONFORMS]}"
    if counts[DECLINED]:
        (reason, _), *_ = Counter(result.reason for result in results if result.status == DECLINED).most_common(1)
        return f"declined: {reason.replace('|', '/')}"
    return "inconclusive" if results else "not drawn"
