"""The main job's order of things: which cases run, what is kept of findings, when it stops. Sessions are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import lanes, runner, steering
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.known_issues import KnownIssue
from conformance.problem import Case
from conformance.runner import SHRINK_EXECUTIONS, Plan, Run, run
from conformance.session import CONFORMS, FINDING, MAX_WORKERS_LOST, CaseResult
from conformance.target import TargetDescription, TargetError
from conformance.watch import HANGS

Behaviour = Callable[[Case, "_Session"], CaseResult]

_CASES = tuple(parse_case(f"v=1 seq_len=32 sliding_window_size=9 sinks=true seed={seed}") for seed in range(6))


class _Session:
    """Stands in for `Session`, always ready: `behaves` answers each case; `ran` holds their texts.

    `closed` counts how often it was closed.
    """

    def __init__(self, name: str, behaves: Behaviour) -> None:
        self.description = TargetDescription(name, name)
        self.check_names = ("contract",)
        self.needs_quiet = False
        self.known_issues: tuple[KnownIssue, ...] = ()
        self.behaves = behaves
        self.workers_lost = 0
        self.ran: list[str] = []
        self.closed = 0
        self._case = Case()

    def start(self, case: Case) -> None:
        self._case = case

    def ready(self, seconds: float) -> bool:
        return True

    def judge(self) -> CaseResult:
        self.ran.append(format_case(self._case))
        return self.behaves(self._case, self)

    def run(self, case: Case) -> CaseResult:
        self.start(case)
        return self.judge()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, dict[str, _Session], list[str]]]:
    """Runs cases on named behaviours; gives the run, the sessions and the progress lines."""

    def begin(covering: tuple[Case, ...], further: tuple[Case, ...] = (), **options: Any) -> Any:
        behaviours = {name: options.pop(name) for name in list(options) if callable(options[name])}
        sessions: dict[str, _Session] = {}
        lines: list[str] = []

        def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> _Session:
            return sessions.setdefault(spec, _Session(spec, behaviours[spec]))

        monkeypatch.setattr(runner, "Session", session)
        monkeypatch.setattr(lanes, "answer_for", lambda *args: None)
        plan = Plan(tuple(behaviours), covering, further, Devices("cpu", 8), ("contract", "output"), **options)
        return run(plan, lines.append), sessions, lines

    return begin


def _conforms(case: Case, session: _Session) -> CaseResult:
    return CaseResult(case, CONFORMS)


def _found(case: Case, *signatures: str, tensor: str = "out", check: str = "output") -> CaseResult:
    findings = tuple(
        Finding("target", check, tensor, signature, format_case(case), f"{tensor} {signature} in {case.seed}")
        for signature in signatures
    )
    return CaseResult(case, FINDING if findings else CONFORMS, findings)


def test_every_target_runs_every_case_in_order(job: Any) -> None:
    state, sessions, lines = job(_CASES[:2], _CASES[2:4], first=_conforms, second=_conforms)
    expected = [format_case(case) for case in _CASES[:4]]
    for name, session in sessions.items():
        assert session.ran == expected, f"covering cases, then further ones, on {name}"
        assert session.closed == 1, f"the workers of {name} are ended"
    assert [len(target.results) for target in state.targets] == [4, 4], "all results are kept"
    assert lines == ["of 4 cases: first 4 conforms; second 4 conforms"], "plain progress"


def test_seconds_cut_further_cases_and_never_the_covering_list(job: Any) -> None:
    _, sessions, lines = job(_CASES[:3], _CASES[3:], target=_conforms, seconds=0.0)
    assert sessions["target"].ran == [format_case(case) for case in _CASES[:3]], "the covering list alone"
    assert lines == ["the time of --seconds is up", "of 6 cases: target 3 conforms"], "and it is said"


def test_a_kind_of_finding_is_told_once_and_kept_at_its_smallest_case(job: Any) -> None:
    small = parse_case("v=1 seq_len=4 sliding_window_size=9 sinks=true seed=9")
    state, _, lines = job(
        (_CASES[1], small, _CASES[2]), target=lambda case, _: _found(case, "is wrong"), shrink_findings=False
    )
    (kept,) = state.targets[0].smallest.values()
    assert kept.case == format_case(small), "the smallest case of the three"
    assert [line for line in lines if "is wrong" in line] == ["target: out is wrong in 1"], "told at first sight"


@pytest.mark.parametrize(
    "order", [("is wrong", "is wrong, on data draw 1 only"), ("is wrong, on data draw 1 only", "is wrong")]
)
def test_a_narrower_kind_is_no_kind_of_its_own_beside_the_general_one(job: Any, order: tuple[str, str]) -> None:
    def behaves(case: Case, _: _Session) -> CaseResult:
        return _found(case, order[case.seed])

    state, _, _ = job(_CASES[:2], target=behaves, shrink_findings=False)
    assert [kept.signature for kept in state.targets[0].smallest.values()] == ["is wrong"], "one fault, one finding"
    assert len(state.targets[0].results[1].findings) == 1, "each result keeps its own"


def test_a_kind_seen_in_one_circumstance_alone_is_kept_as_that(job: Any) -> None:
    signature = "is wrong, on data draw 1 only"
    state, _, _ = job(_CASES[:2], target=lambda case, _: _found(case, signature), shrink_findings=False)
    assert [kept.signature for kept in state.targets[0].smallest.values()] == [signature], "nothing explains it"


def test_findings_are_shrunk_each_within_its_executions(job: Any) -> None:
    def behaves(case: Case, _: _Session) -> CaseResult:
        signatures = ["is wrong"] if case.problem.sinks else []
        return _found(case, *signatures, *(["is off"] if case.problem.seq_len >= 8 else []))

    state, sessions, _ = job(_CASES[:1], target=behaves)
    texts = {kept.signature: kept.case for kept in state.targets[0].smallest.values()}
    assert texts == {
        "is wrong": "v=1 seq_len=4 sliding_window_size=1 sinks=true",
        "is off": "v=1 seq_len=8 sliding_window_size=1",
    }, "what a person would write"
    shrinking = sessions["target"].ran[1:-2]
    assert len(shrinking) <= 2 * SHRINK_EXECUTIONS == 80, "at most 40 executions a kind"
    assert len(set(shrinking)) == len(shrinking), "what one kind has run, another does not run again"
    assert len(state.targets[0].results) == 1, "the verdict counts the list's cases, not the shrinker's"


def test_a_hang_is_not_shrunk_and_other_kinds_beside_it_are(job: Any) -> None:
    def behaves(case: Case, session: _Session) -> CaseResult:
        if case.seed == 1:
            session.workers_lost += 1
            return _found(case, f"{HANGS[0]} while running draw 0", tensor="call", check="contract")
        return _found(case, "is wrong")

    state, sessions, _ = job(_CASES[:2], target=behaves)
    hang, wrong = sorted(state.targets[0].smallest.values(), key=lambda kept: kept.check)
    assert hang.case == format_case(_CASES[1]), "each attempt would cost a time-out"
    assert wrong.case == "v=1 seq_len=4 sliding_window_size=1", "the other kind is as small as ever"
    assert sessions["target"].workers_lost == 1, "no further hang was provoked"


def test_a_target_that_keeps_losing_its_process_is_stopped_and_the_others_go_on(job: Any) -> None:
    def aborts(case: Case, session: _Session) -> CaseResult:
        session.workers_lost += 1
        return _found(case, "killed by SIGABRT while running draw 0", tensor="call", check="contract")

    state, sessions, lines = job(_CASES, aborts=aborts, right=_conforms)
    assert len(state.targets[0].results) == MAX_WORKERS_LOST < len(_CASES), "the rest is not tried"
    assert state.targets[0].stopped == "its process was lost 4 times", "and it says why"
    assert "aborts: its process was lost 4 times; its remaining cases are not tried" in lines, "at once"
    assert len(sessions["right"].ran) == len(_CASES), "the other target is not affected"
    lost_while_shrinking = sessions["aborts"].workers_lost - MAX_WORKERS_LOST
    assert lost_while_shrinking <= MAX_WORKERS_LOST + 1, "shrinking costs a process an attempt: a few, then no more"


def test_the_smallest_case_is_run_again_alone_in_a_fresh_process(job: Any) -> None:
    state, sessions, _ = job(_CASES[:1], target=lambda case, _: _found(case, "is wrong"))
    (kept,) = state.targets[0].smallest.values()
    assert sessions["target"].ran[-1] == kept.case, "last of all, its own case"
    assert sessions["target"].closed == 2, "after the worker was ended; and once at the end"
    assert "fresh process" not in kept.reading, "it showed again: nothing to add"


def test_a_finding_that_takes_the_cases_before_it_says_so(job: Any) -> None:
    def behaves(case: Case, session: _Session) -> CaseResult:
        return _found(case, *(["is wrong"] if session.closed == 0 else []))

    state, _, _ = job(_CASES[:2], target=behaves)
    (kept,) = state.targets[0].smallest.values()
    assert kept.reading.endswith("; not in a fresh process, so it takes the cases that ran before"), "no false promise"
    assert kept.id == _found(_CASES[0], "is wrong").findings[0].id, "it is a finding all the same"


def test_an_interrupt_ends_the_run_with_what_was_found(job: Any) -> None:
    def behaves(case: Case, _: _Session) -> CaseResult:
        if case.seed == 2:
            raise KeyboardInterrupt
        return _found(case, "is wrong")

    state, sessions, _ = job(_CASES, target=behaves)
    assert state.interrupted, "the run says so"
    assert len(state.targets[0].results) == 2, "two cases were done"
    assert [kept.signature for kept in state.targets[0].smallest.values()] == ["is wrong"], "what they found"
    assert sessions["target"].closed == 1, "no process is left"


def test_an_interrupt_that_comes_with_the_line_that_tells_of_a_finding_does_not_lose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "Session", lambda spec, *_: _Session(spec, lambda case, _: _found(case, "a", "b")))
    monkeypatch.setattr(lanes, "answer_for", lambda *args: None)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    state = run(Plan(("m:t",), _CASES, (), Devices("cpu", 8), ("contract",)), interrupt)
    kept = {finding.signature for finding in state.targets[0].smallest.values()}
    assert kept == {"a", "b"}, "the one that was being told, and the one that was next"


def test_an_interrupt_while_one_target_is_judged_keeps_what_another_found(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(case: Case, _: _Session) -> CaseResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes.os, "cpu_count", lambda: 2)
    state, _, _ = job(_CASES[:1], first=lambda case, _: _found(case, "is wrong"), second=interrupts)
    assert len(state.targets[0].smallest) == 1, "found just before"
    assert state.targets[1].results == [], "the other has no result"


def test_an_interrupt_while_shrinking_keeps_the_smallest_case_so_far(job: Any) -> None:
    executions = 0

    def behaves(case: Case, _: _Session) -> CaseResult:
        nonlocal executions
        executions += 1
        if executions == 3:
            raise KeyboardInterrupt
        return _found(case, "is wrong")

    state, _, _ = job(_CASES[1:2], target=behaves)
    (kept,) = state.targets[0].smallest.values()
    assert state.interrupted, "the run says so"
    assert len(kept.case) < len(format_case(_CASES[1])), "one attempt had already made it smaller"


def test_a_target_that_does_not_load_ends_the_run_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[_Session] = []

    def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> _Session:
        if spec == "second":
            raise TargetError("no such module")
        opened.append(_Session(spec, _conforms))
        return opened[-1]

    monkeypatch.setattr(runner, "Session", session)
    plan = Plan(("first", "second"), _CASES, (), Devices("cpu", 8), ("contract",))
    with pytest.raises(TargetError, match="no such module"):
        run(plan, lambda line: None)
    assert [(one.ran, one.closed) for one in opened] == [([], 1)], "nothing ran, and no process is left"


def test_an_error_of_the_harness_ends_the_workers_too(job: Any) -> None:
    sessions: dict[str, _Session] = {}

    def fails(case: Case, session: _Session) -> CaseResult:
        sessions["target"] = session
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        job(_CASES, target=fails)
    assert sessions["target"].closed == 1, "no process is left"


@pytest.mark.parametrize("shown", [True, False])
def test_the_case_of_a_known_issue_is_run_every_time_and_must_show_it(
    monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    text = "v=1 seq_len=8 sliding_window_size=3 seed=77"
    issue = KnownIssue("m:t", "numpy", ("1",), "output", "out", "is wrong", text, "reported")

    def behaves(case: Case, _: _Session) -> CaseResult:
        known = (issue,) if shown and format_case(case) == text else ()
        return dataclasses.replace(_conforms(case, _), known=known)

    def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> _Session:
        made = _Session(spec, behaves)
        made.known_issues = known
        return made

    monkeypatch.setattr(runner, "Session", session)
    monkeypatch.setattr(runner, "issues_of", lambda spec, known: known)
    monkeypatch.setattr(lanes, "answer_for", lambda *args: None)
    plan = Plan(("m:t",), _CASES[:2], (), Devices("cpu", 8), ("contract", "output"), known_issues=(issue,))
    state = run(plan, lambda line: None)
    (target,) = state.targets
    assert [format_case(result.case) for result in target.beyond_list] == [text], "beside the list"
    assert len(target.results) == 2, "which is not changed"
    stale = [finding.signature for finding in target.smallest.values()]
    assert stale == ([] if shown else ["a known issue no longer fails: is wrong"]), "silence would hide a new fault"


@pytest.mark.parametrize("draws", [0, 2])
def test_what_hypothesis_drew_is_counted_and_told_apart_from_the_list(
    job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draws: int
) -> None:
    class Scripted(steering.Steering):
        def run(self, first_seed: int) -> None:
            for session in self._sessions:
                for seed in range(draws):
                    self._note(session, _found(_CASES[0].replace(seed=first_seed + seed), "drawn"))

    monkeypatch.setattr(steering, "Steering", Scripted)
    for name in ("STORAGE_DIRECTORY", "EXPERIMENTAL_OBSERVABILITY", "EXPERIMENTAL_OBSERVABILITY_NOCOVER"):
        monkeypatch.setenv(f"HYPOTHESIS_{name}", "")  # is then left as it is
    state, _, lines = job(
        _CASES[:1], a=_conforms, database=tmp_path, seconds=0.0, steering_seed=7, shrink_findings=False
    )
    (target,) = state.targets
    assert (len(target.results), target.num_drawn, len(target.beyond_list)) == (1, draws, draws), "beside the list"
    assert [finding.signature for finding in target.smallest.values()] == ["drawn"] * min(draws, 1), "a kind is a kind"
    assert any(line.startswith(f"hypothesis drew {draws} cases") for line in lines), "and the run says how many"


def test_a_plan_is_plain_data() -> None:
    plan = Plan(("m:t",), _CASES[:2], _CASES[2:3], Devices("cpu", 8), ("contract",))
    assert plan.cases == _CASES[:3], "covering cases first"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seconds = 1.0  # type: ignore[misc]  # that it cannot be assigned is the point
