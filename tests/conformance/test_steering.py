"""Hypothesis at the wheel: what is kept of findings, what counts as luck, when it stops. Sessions are scripted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import lanes, steering
from conformance.case_text import format_case
from conformance.finding import Finding
from conformance.problem import Case
from conformance.session import CONFORMS, FINDING, MAX_WORKERS_LOST, CaseResult
from conformance.steering import Steering
from conformance.target import TargetDescription


class _Session:
    """Stands in for `Session`, always ready; `ran` are its cases."""

    needs_quiet = False

    def __init__(self, behaves: Callable[[Case], CaseResult]) -> None:
        self.description = TargetDescription("m:t", "target")
        self.check_names = ("contract",)
        self.behaves, self.ran, self.workers_lost = behaves, [], 0

    def start(self, case: Case) -> None:
        self.ran.append(case)

    def ready(self, seconds: float) -> bool:
        return True

    def judge(self) -> CaseResult:
        return self.behaves(self.ran[-1])

    def run(self, case: Case) -> CaseResult:
        self.start(case)
        return self.judge()


Steer = Callable[..., tuple[Steering, _Session, list[CaseResult]]]


@pytest.fixture
def steer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steer:
    """Steers one session for so many looks at the clock; gives the steering, the session and what was noted."""

    def go(behaves: Callable[[Case], CaseResult], looks: int = 150) -> Any:
        monkeypatch.setattr(lanes, "answer_for", lambda *args: None)
        clock = itertools.count()
        monkeypatch.setattr(steering.time, "monotonic", lambda: next(clock))
        session, noted = _Session(behaves), []
        made = Steering([session], tmp_path, 8, looks, lambda _, result: noted.append(result))  # type: ignore[list-item]  # it stands in for a Session
        made.run(0)
        return made, session, noted

    return go


def _result(case: Case, *findings: tuple[str, str], share: float = 0.5) -> CaseResult:
    found = tuple(
        Finding("target", check, "out", signature, format_case(case), signature) for check, signature in findings
    )
    return CaseResult(case, FINDING if found else CONFORMS, found, {("output", "out"): share})


def test_cases_are_drawn_until_the_time_is_up_and_each_is_noted(steer: Steer) -> None:
    made, session, noted = steer(_result)
    assert 60 < len(noted) == len(session.ran) < 150, "more than a batch, and then no more"
    assert len({format_case(case) for case in session.ran}) > 50, "different ones"
    assert made.events["bfloat16"] > 5, "what they reached is counted"


def test_each_kind_is_told_once_and_the_next_run_tries_it_first(steer: Steer) -> None:
    def behaves(case: Case) -> CaseResult:
        kinds = [("contract", "aborts")] if case.problem.sinks else []
        return _result(case, *kinds, *([("visibility", "sees more")] if case.problem.segments else []))

    _, _, first = steer(behaves)
    assert {finding.signature for result in first for finding in result.findings} == {"aborts", "sees more"}, "both"
    _, session, _ = steer(behaves, looks=2)
    assert session.ran, "no time to draw any, but what the database holds is tried"
    assert all(case.problem.sinks or case.problem.segments for case in session.ran[:2]), "the examples of the first run"


def test_an_excess_that_no_other_data_show_is_luck_and_counted(steer: Steer) -> None:
    seen: set[str] = set()

    def once(case: Case) -> CaseResult:
        new = case.problem.sinks and not seen
        seen.update({"excess"} if new else ())
        return _result(case, *([("output", "exceeds its allowance")] if new else []), share=1.01 if new else 0.5)

    made, session, noted = steer(once)
    assert made.num_luck == 1, "counted"
    assert not any(result.findings for result in noted), "no finding"
    lucky = next(index for index, case in enumerate(session.ran) if case.problem.sinks)
    again = session.ran[lucky + 1 : lucky + 4]
    assert [case.replace(seed=0) for case in again] == [session.ran[lucky].replace(seed=0)] * 3, "the same program"
    assert len({case.seed for case in again}) == 3, "on three other draws"


def test_an_excess_that_other_data_show_too_is_a_finding(steer: Steer) -> None:
    def always(case: Case) -> CaseResult:
        return _result(case, *([("output", "exceeds its allowance")] if case.problem.sinks else []), share=1.01)

    made, _, noted = steer(always)
    assert made.num_luck == 0, "no luck"
    assert all(bool(result.findings) == result.case.problem.sinks for result in noted), "every case that shows it"


def test_a_target_that_keeps_losing_its_process_is_left_alone(steer: Steer) -> None:
    def loses(case: Case) -> CaseResult:
        session.workers_lost += 1
        return _result(case, ("contract", "killed"))

    session: Any = None
    real = _Session.__init__

    def keep(self: _Session, behaves: Any) -> None:
        nonlocal session
        real(self, behaves)
        session = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Session, "__init__", keep)
        _, ran, _ = steer(loses)
    assert len(ran.ran) == MAX_WORKERS_LOST, "no process more"


def test_a_damaged_database_loses_no_more_than_the_damaged_example(steer: Steer, tmp_path: Path) -> None:
    steer(lambda case: _result(case, ("contract", "aborts")))
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept, "the kind's example"
    for path in kept:
        path.write_bytes(b"\xff\x00 no example")
    _, _, noted = steer(_result)
    assert len(noted) > 60, "the run goes on"
