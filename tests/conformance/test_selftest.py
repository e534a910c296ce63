"""The selftest: three faults that are seen, the same faults before blind checks, and what is said of both.

May touch: workers. What it tests: conformance/selftest.py, conformance/report/selftest_report.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from conformance import cli
from conformance.case_list import case_list
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.faults import CATALOGUE, Planted
from conformance.finding import Finding
from conformance.problem import Case
from conformance.report.selftest_report import print_selftest, selftest_content, write_selftest
from conformance.selftest import MAX_PROGRAMS, Correct, Selftest, Trial, in_order, selftest, spread

_DEVICES = Devices("cpu", 8)
_FAULTS = [CATALOGUE[name] for name in ("window_one_key_wide", "halo_gradient_added_twice", "soft_cap_has_no_backward")]


def _is_about_all(case: Case) -> bool:
    supported = all(Planted(fault, clean=False).supports(case.problem) is None for fault in _FAULTS)
    return supported and not case.problem.segments and case.problem.dtype == "float32"


def _some_cases() -> list[Case]:
    """A few small cases that each of the three faults says something about, without documents to cut the window."""
    return [case for case in in_order(case_list("quick", 0, 0, _DEVICES.count)) if _is_about_all(case)][:3]


def _printed(state: Selftest) -> str:
    console = Console(file=io.StringIO(), width=300)
    print_selftest(state, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]  # a StringIO, given above


@pytest.fixture(scope="module")
def seen() -> Selftest:
    return selftest(_FAULTS, _some_cases(), _DEVICES, tuple(CHECKS), lambda line: None)


def test_faults_are_seen_by_the_checks_they_are_the_business_of(seen: Selftest) -> None:
    wide, twice, refused = seen.trials
    assert [trial.verdict for trial in seen.trials] == ["seen"] * 3, _printed(seen)
    assert {"output", "gradients"} <= set(wide.seen), f"a wrong window is seen in out and in gradients: {wide.seen}"
    assert not {"output", "residuals"} & set(twice.seen), f"the forward is right: {twice.seen}"
    assert set(refused.seen) == {"contract"}, f"it raises, and has no other answer: {refused.seen}"


def test_correct_targets_and_twins_have_no_finding(seen: Selftest) -> None:
    assert set(seen.correct) >= {"halo", "all_gather", "ring", "halo_clean"}, f"tried: {sorted(seen.correct)}"
    assert not [finding for target in seen.correct.values() for finding in target.findings], _printed(seen)
    assert seen.passes


def test_a_fault_that_bites_before_blind_checks_is_said_to_be_unseen() -> None:
    blind = selftest(_FAULTS[:2], _some_cases()[:2], _DEVICES, ("contract",), lambda line: None)
    assert [trial.verdict for trial in blind.trials] == ["bites, unseen"] * 2, _printed(blind)
    assert not blind.passes
    assert "BITES, UNSEEN (a blind check): window_one_key_wide" in _printed(blind)


def test_a_fault_that_no_case_is_about_never_bites() -> None:
    nothing = selftest([CATALOGUE["device_number_for_rank"]], [], _DEVICES, ("contract",), lambda line: None)
    assert [(trial.verdict, trial.drawn) for trial in nothing.trials] == [("never bites", 0)]
    assert not nothing.passes
    assert "NEVER BITES (a gap of the case list): device_number_for_rank" in _printed(nothing)


def test_nothing_tried_is_no_pass() -> None:
    assert not Selftest("hash", 0, ("contract",), 0).passes


def _state(**changes: object) -> Selftest:
    fault = _FAULTS[0]
    trial = Trial(fault, drawn=9, programs=3, bites=2, seen=("output",))
    state = Selftest("0123456789abcdef", 9, ("contract", "output"), 1, [trial], {"halo": Correct("halo", 4)})
    return dataclasses.replace(state, **changes)  # pyright: ignore[reportArgumentType]  # names of fields


def test_one_finding_of_a_correct_target_fails_the_selftest(finding: object) -> None:
    assert _state().passes
    alarm: Finding = finding()  # pyright: ignore[reportCallIssue]  # the fixture makes findings
    state = _state(correct={"halo": Correct("halo", 4, [alarm])})
    assert not state.passes
    assert "FALSE ALARM output of out" in _printed(state)


def test_a_correct_target_that_ran_nothing_fails_the_selftest() -> None:
    assert not _state(correct={"halo": Correct("halo", 0)}).passes


def test_an_interrupted_selftest_does_not_pass() -> None:
    state = _state(num_faults=2, interrupted=True)
    assert not state.passes
    assert "1 faults were not tried to their end" in _printed(state)


def test_the_report_says_what_one_check_alone_sees(tmp_path: Path) -> None:
    assert "output alone sees 1 faults: window_one_key_wide" in _printed(_state())
    assert "checks that saw no fault: contract" in _printed(_state())
    path = write_selftest(_state(), {"seed": 0}, tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["seen_by_one_check_alone"] == {"output": ["window_one_key_wide"]}
    assert content["faults"][0]["seen"] == ["output"]
    assert content["list_hash"] == "0123456789abcdef"
    assert content == selftest_content(_state(), {"seed": 0}), "the file is not the content"


def test_small_cases_come_first() -> None:
    cases = case_list("quick", 0, 0, 16)
    ordered = in_order(cases)
    assert sorted(map(repr, ordered)) == sorted(map(repr, cases)), "a case was lost"
    first = [case.problem for case in ordered[:MAX_PROGRAMS]]
    assert max(p.batch * p.num_query_heads * p.seq_len**2 for p in first) < 64 * 2048, "a large case comes early"
    assert ordered == in_order(tuple(reversed(cases))), "the order depends on more than the cases"


def test_every_check_is_asked_within_the_programs_of_a_fault() -> None:
    cases = in_order(case_list("quick", 0, 0, 16))
    taken = spread(cases, tuple(CHECKS), MAX_PROGRAMS)
    assert len(set(map(format_case, taken))) == MAX_PROGRAMS, "a case was taken twice"
    for name, check in CHECKS.items():
        assert sum(check.asks_about(case) for case in taken) >= 2, f"{name} is asked on too few of {MAX_PROGRAMS} cases"
    assert taken[0] == cases[0], "the smallest case comes first"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--faults", "window_one_key_wid"], "the nearest fault is 'window_one_key_wide'"),
        (["--seed", "-1"], "--seed must be >= 0"),
        (["--report", "/dev/null/report"], "--report /dev/null/report cannot be written to"),
    ],
)
def test_what_cannot_start_says_why(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_every_fault_of_the_catalogue_is_seen_and_nothing_else(tmp_path: Path) -> None:
    status = cli.main(["selftest", "--report", str(tmp_path)])
    content = json.loads((tmp_path / "selftest.json").read_text(encoding="utf-8"))
    missed = [f"{fault['name']}: {fault['verdict']}" for fault in content["faults"] if fault["verdict"] != "seen"]
    assert not missed, f"not seen: {missed}"
    assert status == 0, content["correct_targets"]
