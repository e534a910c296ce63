"""Which cases the costly checks are asked on, and that a worker does for them what it is asked and no more."""

from __future__ import annotations

import pytest

from conformance.case_list import case_list
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.designated import asks_fresh_process, asks_programs
from conformance.devices import Devices
from conformance.execution import execute
from conformance.problem import Case
from conformance.report.verdict import NOT_CLAIMED, verdict_of
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, CaseResult
from conformance.target import TargetDescription, load_target

_COSTLY = ("work", "remat", "errors")


@pytest.mark.parametrize("check", _COSTLY)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_each_costly_check_is_asked_on_a_few_cases_of_every_list(check: str, seed: int) -> None:
    asked = [case for case in case_list("quick", seed) if CHECKS[check].asks_about(case)]
    assert 2 <= len(asked) <= 12, "a few: every case would cost too much"
    assert len({case.problem.layout for case in asked}) >= 2, "and not all alike"


@pytest.mark.parametrize("check", _COSTLY)
def test_a_case_that_was_shrunk_does_not_pay_for_them(check: str) -> None:
    assert not CHECKS[check].asks_about(Case()), "the shrinker makes the seed zero where it can"


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_fresh_process_is_for_a_few_of_the_cases_that_call_other_problems(seed: int) -> None:
    cases = case_list("quick", seed)
    fresh = [case for case in cases if asks_fresh_process(case)]
    assert all(asks_programs(case) for case in fresh), "nothing else has a use for it"
    assert 1 <= len(fresh) <= 4 < sum(map(asks_programs, cases)), "a few: each costs two seconds"


def test_a_worker_does_only_what_it_is_asked() -> None:
    target = load_target("conformance.targets.bundled:halo")
    phases: list[str] = []
    case = parse_case("v=1 seq_len=8 sliding_window_size=2 context_parallelism=1")
    message, _ = execute(target, case, phases.append, ("errors",))
    assert message.keys() == {"misplaced", "diverged", "errors"}, "the answers to what no case may have"
    assert phases[-1] == "putting problems that no case may have", "and its phase is told"


def test_a_target_that_claims_nothing_is_said_to_claim_nothing_and_still_conforms() -> None:
    case = Case()
    run = Run(Plan((), (case,), (), Devices("cpu", 8), ("contract", "collectives", "work")))
    shares = {("contract", "call"): 0.0}
    target = TargetRun(TargetDescription("m:t", "t"), [CaseResult(case, CONFORMS, shares=shares)])
    verdict = verdict_of(target, run)
    assert {cell.status for cell in verdict.cells if cell.check != "contract"} == {NOT_CLAIMED}, "never conforms"
    assert verdict.status == CONFORMS, "it owes no claim"


def test_a_target_that_names_no_residuals_conforms_with_the_same_answer_alone() -> None:
    case = Case(seed=13)
    run = Run(Plan((), (case,), (), Devices("cpu", 8), ("contract", "remat")))
    answers = {("remat", tensor): 0.0 for tensor in ("out", "dquery", "dkey", "dvalue")}
    results = [CaseResult(case, CONFORMS, shares={("contract", "call"): 0.0} | answers)]
    verdict = verdict_of(TargetRun(TargetDescription("m:t", "t"), results), run)
    statuses = {cell.tensor: cell.status for cell in verdict.cells if cell.check == "remat"}
    assert statuses["program"] == NOT_CLAIMED, "nothing says that its forward runs once"
    assert (verdict.status, statuses["out"]) == (CONFORMS, CONFORMS), "and no doubt is left"
    naming = TargetDescription("m:t", "t", residual_names=("out",))
    assert "remat of program was never tried" in verdict_of(TargetRun(naming, results), run).remarks, "it owes that"


def test_a_target_that_claims_and_was_never_looked_at_does_not_conform() -> None:
    case = Case()
    run = Run(Plan((), (case,), (), Devices("cpu", 8), ("contract", "collectives")))
    shares = {("contract", "call"): 0.0}
    halo = TargetDescription("m:t", "t", communication="halo")
    verdict = verdict_of(TargetRun(halo, [CaseResult(case, CONFORMS, shares=shares)]), run)
    assert "collectives of forward was never tried" in verdict.remarks, "silence is no pass"
