"""What the main job keeps of findings: each kind once, shrunk, run again alone. Sessions are scripted (conftest.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conformance import lanes, runner
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.known_issues import KnownIssue
from conformance.problem import Case
from conformance.runner import SHRINK_EXECUTIONS, Plan, run
from conformance.session import CaseResult
from conformance.watch import HANGS

Cases = tuple[Case, ...]


def test_a_kind_of_finding_is_told_once_and_kept_at_its_smallest_case(job: Any, found: Any, six_cases: Cases) -> None:
    small = parse_case("v=1 seq_len=4 sliding_window_size=9 sinks=true seed=9")
    state, _, lines = job(
        (six_cases[1], small, six_cases[2]), target=lambda case, _: found(case, "is wrong"), shrink_findings=False
    )
    (kept,) = state.targets[0].smallest.values()
    assert kept.case == format_case(small), "the smallest case of the three"
    assert [line for line in lines if "is wrong" in line] == ["target: out is wrong in 1"], "told at first sight"


@pytest.mark.parametrize(
    "order", [("is wrong", "is wrong, on data draw 1 only"), ("is wrong, on data draw 1 only", "is wrong")]
)
def test_a_narrower_kind_is_no_kind_of_its_own_beside_the_general_one(
    job: Any, order: tuple[str, str], found: Any, six_cases: Cases
) -> None:
    def behaves(case: Case, _: Any) -> CaseResult:
        return found(case, order[case.seed])

    state, _, _ = job(six_cases[:2], target=behaves, shrink_findings=False)
    assert [kept.signature for kept in state.targets[0].smallest.values()] == ["is wrong"], "one fault, one finding"
    assert len(state.targets[0].results[1].findings) == 1, "each result keeps its own"


def test_a_kind_seen_in_one_circumstance_alone_is_kept_as_that(job: Any, found: Any, six_cases: Cases) -> None:
    signature = "is wrong, on data draw 1 only"
    state, _, _ = job(six_cases[:2], target=lambda case, _: found(case, signature), shrink_findings=False)
    assert [kept.signature for kept in state.targets[0].smallest.values()] == [signature], "nothing explains it"


def test_findings_are_shrunk_each_within_its_executions(job: Any, found: Any, six_cases: Cases) -> None:
    def behaves(case: Case, _: Any) -> CaseResult:
        signatures = ["is wrong"] if case.problem.sinks else []
        return found(case, *signatures, *(["is off"] if case.problem.seq_len >= 8 else []))

    state, sessions, _ = job(six_cases[:1], target=behaves)
    texts = {kept.signature: kept.case for kept in state.targets[0].smallest.values()}
    assert texts == {
        "is wrong": "v=1 seq_len=4 sliding_window_size=1 sinks=true",
        "is off": "v=1 seq_len=8 sliding_window_size=1",
    }, "what a person would write"
    shrinking = sessions["target"].ran[1:-2]
    assert len(shrinking) <= 2 * SHRINK_EXECUTIONS == 80, "at most 40 executions a kind"
    assert len(set(shrinking)) == len(shrinking), "what one kind has run, another does not run again"
    assert len(state.targets[0].results) == 1, "the verdict counts the list's cases, not the shrinker's"


def test_a_hang_is_not_shrunk_and_other_kinds_beside_it_are(job: Any, found: Any, six_cases: Cases) -> None:
    def behaves(case: Case, session: Any) -> CaseResult:
        if case.seed == 1:
            session.workers_lost += 1
            return found(case, f"{HANGS[0]} while running draw 0", tensor="call", check="contract")
        return found(case, "is wrong")

    state, sessions, _ = job(six_cases[:2], target=behaves)
    hang, wrong = sorted(state.targets[0].smallest.values(), key=lambda kept: kept.check)
    assert hang.case == format_case(six_cases[1]), "each attempt would cost a time-out"
    assert wrong.case == "v=1 seq_len=4 sliding_window_size=1", "the other kind is as small as ever"
    assert sessions["target"].workers_lost == 1, "no further hang was provoked"


def test_the_smallest_case_is_run_again_alone_in_a_fresh_process(job: Any, found: Any, six_cases: Cases) -> None:
    state, sessions, _ = job(six_cases[:1], target=lambda case, _: found(case, "is wrong"))
    (kept,) = state.targets[0].smallest.values()
    assert sessions["target"].ran[-1] == kept.case, "last of all, its own case"
    assert sessions["target"].closed == 2, "after the worker was ended; and once at the end"
    assert "fresh process" not in kept.reading, "it showed again: nothing to add"


def test_a_finding_that_takes_the_cases_before_it_says_so(job: Any, found: Any, six_cases: Cases) -> None:
    def behaves(case: Case, session: Any) -> CaseResult:
        return found(case, *(["is wrong"] if session.closed == 0 else []))

    state, _, _ = job(six_cases[:2], target=behaves)
    (kept,) = state.targets[0].smallest.values()
    assert kept.reading.endswith("; not in a fresh process, so it takes the cases that ran before"), "no false promise"
    assert kept.id == found(six_cases[0], "is wrong").findings[0].id, "it is a finding all the same"


@pytest.mark.parametrize("shown", [True, False])
def test_the_case_of_a_known_issue_is_run_every_time_and_must_show_it(
    monkeypatch: pytest.MonkeyPatch, shown: bool, scripted_session: Any, conforms: Any, six_cases: Cases
) -> None:
    text = "v=1 seq_len=8 sliding_window_size=3 seed=77"
    issue = KnownIssue("m:t", "numpy", ("1",), "output", "out", "is wrong", "seed=77", text, "reported")

    def behaves(case: Case, _: Any) -> CaseResult:
        known = (issue,) if shown and format_case(case) == text else ()
        return dataclasses.replace(conforms(case, _), known=known)

    def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> Any:
        made = scripted_session(spec, behaves)
        made.known_issues = known
        return made

    monkeypatch.setattr(runner, "Session", session)
    monkeypatch.setattr(runner, "issues_of", lambda spec, known: known)
    monkeypatch.setattr(lanes, "answer_for", lambda *args: None)
    plan = Plan(("m:t",), six_cases[:2], (), Devices("cpu", 8), ("contract", "output"), known_issues=(issue,))
    state = run(plan, lambda line: None)
    (target,) = state.targets
    assert [format_case(result.case) for result in target.beyond_list] == [text], "beside the list"
    assert len(target.results) == 2, "which is not changed"
    stale = [finding.signature for finding in target.smallest.values()]
    assert stale == ([] if shown else ["a known issue no longer fails: is wrong"]), "silence would hide a new fault"
