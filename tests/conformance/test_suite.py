"""One question at a time: what fails, what is skipped and what is said. Sessions are scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import suite
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.problem import Case
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE, CaseResult
from conformance.suite import EVERYTHING, NothingTried, Suite, SuiteFailure
from conformance.target import TargetDescription

_SHARES = {("contract", "call"): 0.0, ("output", "out"): 0.5}


class _Session:
    """Stands in for `Session`; `ran` are the texts of the cases, in order."""

    def __init__(self, behaves: Callable[[Case], CaseResult]) -> None:
        self.behaves, self.ran, self.closed = behaves, [], 0
        self.description = TargetDescription("m:t", "t")

    def run(self, case: Case) -> CaseResult:
        self.ran.append(format_case(case))
        return self.behaves(case)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Suite, _Session]]:
    """A suite over four small cases, two with sinks and two with a soft cap, and its one session."""

    def begin(behaves: Callable[[Case], CaseResult]) -> Any:
        session = _Session(behaves)
        monkeypatch.setattr(suite, "Session", lambda spec, devices, known_issues: session)
        features = ("sinks=true", "attn_logits_soft_cap=5.0")
        cases = [f"v=1 seq_len=16 sliding_window_size=3 {feature}" for feature in features]
        made = tuple(parse_case(f"{text} seed={seed}") for text in cases for seed in (1, 2))
        monkeypatch.setattr(suite, "case_list", lambda *args: made)
        monkeypatch.setattr(suite, "by_area", lambda cases: {"sinks": tuple(cases[:2]), "soft_cap": tuple(cases[2:])})
        return Suite(Devices("cpu", 8)), session

    return begin


def _conforms(case: Case) -> CaseResult:
    return CaseResult(case, CONFORMS, shares=_SHARES)


def _wrong(case: Case) -> CaseResult:
    finding = Finding("m:t", "output", "out", "is off", format_case(case), f"out is off in seed {case.seed}")
    return CaseResult(case, FINDING, (finding,), _SHARES)


def test_the_questions_are_every_check_on_every_area_and_one_about_everything(ask: Any) -> None:
    asked, _ = ask(_conforms)
    tests = asked.tests
    assert tests[0] == ("contract", EVERYTHING), "that something is tried at all"
    assert {area for _, area in tests[1:]} == {"sinks", "soft_cap"}, "the areas of the list"
    assert ("output", "sinks") in tests, "a check of values"
    assert ("exact", "sinks") not in tests, "none of the cases is float64"


def test_what_a_target_does_not_claim_is_skipped_whatever_was_measured(ask: Any) -> None:
    asked, _ = ask(lambda case: CaseResult(case, CONFORMS, shares={**_SHARES, ("work", "flops"): 2.0}))
    with pytest.raises(NothingTried, match="not claimed"):
        asked.hold("m:t", "work", "sinks")


def test_the_cases_of_an_area_run_once_for_all_checks(ask: Any) -> None:
    asked, session = ask(_conforms)
    for check in ("contract", "output"):
        asked.hold("m:t", check, "sinks")
    assert len(session.ran) == 2, "two cases, two questions"


def test_a_finding_fails_its_own_check_and_no_other(ask: Any) -> None:
    asked, _ = ask(_wrong)
    asked.hold("m:t", "contract", "sinks")
    with pytest.raises(SuiteFailure, match="output: 1 kinds of finding in 2 cases"):
        asked.hold("m:t", "output", "sinks")


def test_a_failure_ends_with_the_line_that_replays_its_shrunk_case(ask: Any) -> None:
    asked, _ = ask(_wrong)
    with pytest.raises(SuiteFailure) as failed:
        asked.hold("m:t", "output", "sinks")
    last = str(failed.value).splitlines()[-1].strip()
    assert last.startswith('halocheck replay "v=1 seq_len='), last
    assert last.endswith('" m:t'), "with the target"
    assert len(last) < len('halocheck replay "v=1 seq_len=16 sliding_window_size=3 sinks=true seed=1" m:t'), "smaller"


def test_what_is_declined_is_skipped_with_its_reason(ask: Any) -> None:
    asked, _ = ask(
        lambda case: CaseResult(case, DECLINED, reason="no sinks") if case.problem.sinks else _conforms(case)
    )
    with pytest.raises(NothingTried, match="declined: no sinks"):
        asked.hold("m:t", "output", "sinks")
    asked.hold("m:t", "output", "soft_cap")
    asked.hold("m:t", "contract", EVERYTHING)


def test_a_target_that_declines_everything_fails(ask: Any) -> None:
    asked, _ = ask(lambda case: CaseResult(case, DECLINED, reason="not today"))
    with pytest.raises(SuiteFailure, match=r"declines every case.*not today \(4 cases\)"):
        asked.hold("m:t", "contract", EVERYTHING)


def test_a_check_that_looked_at_nothing_is_no_pass(ask: Any) -> None:
    asked, _ = ask(lambda case: CaseResult(case, CONFORMS, shares={("contract", "call"): 0.0}))
    with pytest.raises(NothingTried, match="nothing to look at"):
        asked.hold("m:t", "output", "sinks")


def test_a_worker_that_was_lost_once_is_no_pass_either(ask: Any) -> None:
    asked, _ = ask(lambda case: CaseResult(case, INCONCLUSIVE, reason="the worker hung once"))
    with pytest.raises(SuiteFailure, match="inconclusive: the worker hung once"):
        asked.hold("m:t", "contract", "sinks")


def test_closing_ends_the_workers(ask: Any) -> None:
    asked, session = ask(_conforms)
    asked.hold("m:t", "output", "sinks")
    asked.close()
    assert session.closed == 1, "the one that was started"
