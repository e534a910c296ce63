"""What ends the main job early, and what is kept then. Sessions are scripted (conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import lanes, runner
from conformance.case_text import format_case
from conformance.devices import Devices
from conformance.problem import Case
from conformance.runner import Plan, run
from conformance.session import MAX_WORKERS_LOST, CaseResult
from conformance.target import TargetError

Cases = tuple[Case, ...]


def test_seconds_cut_further_cases_and_never_the_covering_list(job: Any, conforms: Any, six_cases: Cases) -> None:
    _, sessions, lines = job(six_cases[:3], six_cases[3:], target=conforms, seconds=0.0)
    assert sessions["target"].ran == [format_case(case) for case in six_cases[:3]], "the covering list alone"
    assert lines == ["the time of --seconds is up", "of 6 cases: target 3 conforms"], "and it is said"


def test_a_target_that_keeps_losing_its_process_is_stopped_and_the_others_go_on(
    job: Any, conforms: Any, found: Any, six_cases: Cases
) -> None:
    def aborts(case: Case, session: Any) -> CaseResult:
        session.workers_lost += 1
        return found(case, "killed by SIGABRT while running draw 0", tensor="call", check="contract")

    state, sessions, lines = job(six_cases, aborts=aborts, right=conforms)
    assert len(state.targets[0].results) == MAX_WORKERS_LOST < len(six_cases), "the rest is not tried"
    assert state.targets[0].stopped == "its process was lost 4 times", "and it says why"
    assert "aborts: its process was lost 4 times; its remaining cases are not tried" in lines, "at once"
    assert len(sessions["right"].ran) == len(six_cases), "the other target is not affected"
    lost_while_shrinking = sessions["aborts"].workers_lost - MAX_WORKERS_LOST
    assert lost_while_shrinking <= MAX_WORKERS_LOST + 1, "shrinking costs a process an attempt: a few, then no more"


def test_an_interrupt_ends_the_run_with_what_was_found(job: Any, found: Any, six_cases: Cases) -> None:
    def behaves(case: Case, _: Any) -> CaseResult:
        if case.seed == 2:
            raise KeyboardInterrupt
        return found(case, "is wrong")

    state, sessions, _ = job(six_cases, target=behaves)
    assert state.interrupted, "the run says so"
    assert len(state.targets[0].results) == 2, "two cases were done"
    assert [kept.signature for kept in state.targets[0].smallest.values()] == ["is wrong"], "what they found"
    assert sessions["target"].closed == 1, "no process is left"


def test_an_interrupt_that_comes_with_the_line_that_tells_of_a_finding_does_not_lose_it(
    monkeypatch: pytest.MonkeyPatch, scripted_session: Any, found: Any, six_cases: Cases
) -> None:
    monkeypatch.setattr(
        runner, "Session", lambda spec, *_: scripted_session(spec, lambda case, _: found(case, "a", "b"))
    )
    monkeypatch.setattr(lanes, "answer_for", lambda *args: None)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    state = run(Plan(("m:t",), six_cases, (), Devices("cpu", 8), ("contract",)), interrupt)
    kept = {finding.signature for finding in state.targets[0].smallest.values()}
    assert kept == {"a", "b"}, "the one that was being told, and the one that was next"


def test_an_interrupt_while_one_target_is_judged_keeps_what_another_found(
    job: Any, monkeypatch: pytest.MonkeyPatch, found: Any, six_cases: Cases
) -> None:
    def interrupts(case: Case, _: Any) -> CaseResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes.os, "cpu_count", lambda: 2)
    state, _, _ = job(six_cases[:1], first=lambda case, _: found(case, "is wrong"), second=interrupts)
    assert len(state.targets[0].smallest) == 1, "found just before"
    assert state.targets[1].results == [], "the other has no result"


def test_an_interrupt_while_shrinking_keeps_the_smallest_case_so_far(job: Any, found: Any, six_cases: Cases) -> None:
    executions = 0

    def behaves(case: Case, _: Any) -> CaseResult:
        nonlocal executions
        executions += 1
        if executions == 3:
            raise KeyboardInterrupt
        return found(case, "is wrong")

    state, _, _ = job(six_cases[1:2], target=behaves)
    (kept,) = state.targets[0].smallest.values()
    assert state.interrupted, "the run says so"
    assert len(kept.case) < len(format_case(six_cases[1])), "one attempt had already made it smaller"


def test_a_target_that_does_not_load_ends_the_run_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, scripted_session: Any, conforms: Any, six_cases: Cases
) -> None:
    opened: list[Any] = []

    def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> Any:
        if spec == "second":
            raise TargetError("no such module")
        opened.append(scripted_session(spec, conforms))
        return opened[-1]

    monkeypatch.setattr(runner, "Session", session)
    plan = Plan(("first", "second"), six_cases, (), Devices("cpu", 8), ("contract",))
    with pytest.raises(TargetError, match="no such module"):
        run(plan, lambda line: None)
    assert [(one.ran, one.closed) for one in opened] == [([], 1)], "nothing ran, and no process is left"


def test_an_error_of_the_harness_ends_the_workers_too(job: Any, six_cases: Cases) -> None:
    sessions: dict[str, Any] = {}

    def fails(case: Case, session: Any) -> CaseResult:
        sessions["target"] = session
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        job(six_cases, target=fails)
    assert sessions["target"].closed == 1, "no process is left"
