"""The feature matrix: every feature and layout has a cell for every target, and no cell is blank."""

from __future__ import annotations

from collections.abc import Callable

from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.events import EVENTS
from conformance.finding import Finding
from conformance.problem import LAYOUTS
from conformance.report.matrix import feature_matrix
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, CaseResult
from conformance.target import TargetDescription

_SINKS = parse_case("v=1 seq_len=8 sinks=true")
_CAP = parse_case("v=1 seq_len=8 attn_logits_soft_cap=5.0 layout=dual_chunk_swap")
_STRIPED = parse_case("v=1 seq_len=8 sinks=true layout=striped")


def _cells(*results: CaseResult) -> dict[tuple[str, str], str]:
    plan = Plan(("m:t",), (), (), Devices("cpu", 8), tuple(CHECKS))
    text = feature_matrix(Run(plan, [TargetRun(TargetDescription("m:t", "target"), list(results))]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {(event, layout): cell for event, layout, cell in rows}


def test_every_feature_and_layout_has_a_cell_even_if_nothing_ran() -> None:
    cells = _cells()
    assert set(cells) == {(event, layout) for event in EVENTS for layout in LAYOUTS}, "a row each"
    assert set(cells.values()) == {"not drawn"}, "said, not left blank"


def test_a_cell_counts_the_cases_that_exercise_its_feature_in_its_layout(finding: Callable[..., Finding]) -> None:
    cells = _cells(
        CaseResult(_SINKS, CONFORMS),
        CaseResult(_SINKS, CONFORMS),
        CaseResult(_CAP, FINDING, (finding(),)),
        CaseResult(_CAP, CONFORMS),
        CaseResult(_STRIPED, DECLINED, reason="needs chunks | or so"),
    )
    assert cells["sinks", "contiguous"] == "checked on 2", "both"
    assert cells["soft cap", "dual_chunk_swap"] == "finding on 1 of 2", "a finding outranks what passed"
    assert cells["sinks", "striped"] == "declined: needs chunks / or so", "with its reason, in one cell"
    assert cells["soft cap", "contiguous"] == "not drawn", "other layouts are other cells"
