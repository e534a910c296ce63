"""What the check `races` makes of what the interpreter told; the planted races end to end are in the slow tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance import cli, watch
from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.devices import Devices
from conformance.evidence import Evidence
from conformance.races.planted import CLEAN, MISTAKES
from conformance.report.verdict import NO_QUESTION, TargetVerdict, verdict_of
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, CaseResult
from conformance.target import TargetDescription

Build = Callable[..., Evidence]

_TEXT = "v=1 seq_len=12 sliding_window_size=3 context_parallelism=3 num_query_heads=2 num_kv_heads=2 seed=7"
_CASE = parse_case(_TEXT)
_KERNEL = {"name": "kernel at k.py:7", "sends": True, "sends_before_barrier": False}
_NOTHING = {"kernels": [_KERNEL], "races": [], "left_over": [], "raised": None}
_READ = {"kind": "read", "place": "k.py:30 (kernel)", "by_copy": False}
_WRITE = {"kind": "write", "place": "k.py:26 (kernel)", "by_copy": True}
_RACE = {"first": _READ, "second": _WRITE, "memory": "vmem"}


def _judge(right_evidence: Build, facts: Any, changed: dict[str, float] | None = None) -> Outcome:
    """The judgement of right arrays of one call a mode, but that `changed` is added to some of them."""
    right = right_evidence(_CASE).arrays
    arrays = {
        f"races {mode} 1/attention/{tensor}": np.array(right[f"1/attention/{tensor}"])
        for mode in ("eager", "on_wait")
        for tensor in ("out", "out of vjp", "dquery", "dkey", "dvalue")
    }
    for name, error in (changed or {}).items():
        arrays[name] = arrays[name] + error
    return CHECKS["races"].run(right_evidence(_CASE, arrays, {"misplaced": {}, "races": facts}))


def _only(outcome: Outcome) -> Any:
    (finding,) = outcome.findings
    return finding


def test_silence_and_right_answers_conform(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, _NOTHING)
    assert outcome.findings == (), "nothing was told"
    assert set(outcome.shares) == {"kernel", "out", "dquery", "dkey", "dvalue"}, "and all was looked at"


def test_what_ran_for_it_is_nothing_to_the_other_checks(right_evidence: Build) -> None:
    right = right_evidence(_CASE).arrays
    arrays = {**right, "races eager 0/attention/out": np.zeros_like(right["0/attention/out"])}
    evidence = right_evidence(_CASE, arrays, {"misplaced": {}, "races": _NOTHING})
    assert _only(CHECKS["races"].run(evidence)).tensor == "out", "it is wrong, for one check"
    for name in ("output", "gradients", "invariance"):
        assert CHECKS[name].run(evidence).findings == (), f"and {name} has not looked at it"


def test_a_race_is_one_finding_in_both_modes_and_names_its_two_places(right_evidence: Build) -> None:
    told = [["eager", _RACE, [0, 2]], ["on_wait", _RACE, [1]]]
    finding = _only(_judge(right_evidence, _NOTHING | {"races": told}))
    assert finding.signature == (
        "race of a read at k.py:30 (kernel) with the write of a copy started at k.py:26 (kernel)"
    ), "two places"
    assert "in vmem of devices 0, 2, nothing orders the two (copies carried out when started)" in finding.reading


@pytest.mark.parametrize(
    ("semaphore", "words"),
    [
        ({"semaphore": 2001, "is_barrier": False}, "leaves a semaphore above zero: when the kernel ends, on device 1"),
        ({"semaphore": 7, "is_barrier": True}, "leaves the barrier semaphore of collective id 7 above zero"),
    ],
)
def test_a_semaphore_that_is_left_over_is_a_finding(right_evidence: Build, semaphore: Any, words: str) -> None:
    finding = _only(_judge(right_evidence, _NOTHING | {"left_over": [["on_wait", semaphore, [1]]]}))
    assert words in finding.reading, "which one, and where"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("…\nKeyError: ('vmem', 103, 2, 0)\n", "copies to or from a device that has not entered the kernel at k.py:26"),
        ("IndexError: Out-of-bounds read of (0 0 hbm 100): reading", "reads or writes out of bounds at k.py:26"),
        (
            "INTERNAL: CpuCallback\nValueError: one\n\nfoo.BarError: two\n",
            "raises foo.BarError under TPU interpret mode",
        ),
        ("no traceback at all", "raises SomeError under TPU interpret mode at k.py:26 (kernel): no traceback at all"),
    ],
)
def test_what_a_run_raises_is_told_by_its_kind(right_evidence: Build, message: str, words: str) -> None:
    facts = _NOTHING | {"raised": ["eager", "SomeError", message, "k.py:26 (kernel)"]}
    assert words in _only(_judge(right_evidence, facts)).reading, "in words, with the place"


def test_an_answer_that_is_wrong_out_of_step_is_a_finding_of_its_tensor(right_evidence: Build) -> None:
    name = "races on_wait 1/attention/dkey"
    for error in (0.5, float("nan")):
        finding = _only(_judge(right_evidence, _NOTHING, {name: error}))
        assert (finding.tensor, finding.signature) == ("dkey", "is wrong when devices are not in step"), f"{error}"


def test_sending_before_any_barrier_is_a_finding_even_where_nothing_can_run(right_evidence: Build) -> None:
    facts = {"kernels": [_KERNEL | {"sends_before_barrier": True}], "declined": "jax 9 has no pltpu.InterpretParams"}
    outcome = _judge(right_evidence, facts)
    assert "kernel at k.py:7 starts a copy to another device before" in _only(outcome).reading, "read from its code"
    assert outcome.cannot_ask == "jax 9 has no pltpu.InterpretParams", "and the rest was not tried"


def _verdict(result: CaseResult, *checks: str) -> TargetVerdict:
    run = Run(Plan((), (_CASE,), (), Devices("cpu", 8), ("contract", "races", *checks)))
    return verdict_of(TargetRun(TargetDescription("m:t", "t"), [result]), run)


def test_a_target_without_such_kernels_is_not_asked_and_that_alone_is_no_verdict(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, {"kernels": []})
    assert outcome.no_question == "no Pallas kernel of its program starts a copy", "the reason"
    result = CaseResult(_CASE, CONFORMS, shares={("contract", "call"): 0.0}, no_question={"races": outcome.no_question})
    verdict = _verdict(result)
    assert {cell.status for cell in verdict.cells if cell.check == "races"} == {NO_QUESTION}, "not `not tried`"
    assert verdict.status == "inconclusive", "nothing else was asked"
    window = dict.fromkeys([("contract", "call"), *(("errors", tensor) for tensor in CHECKS["errors"].tensors)], 0.0)
    verdict = _verdict(dataclasses.replace(result, shares=window), "errors")
    assert verdict.status == CONFORMS, "it owes nothing to a check that has no question"
    assert f"races: {outcome.no_question}" in verdict.remarks, "and that is said"


def test_what_cannot_be_asked_is_declined_with_its_reason_and_never_conforms() -> None:
    why = "jax 9 has no pltpu.InterpretParams"
    verdict = _verdict(CaseResult(_CASE, CONFORMS, shares={("contract", "call"): 0.0}, cannot_ask={"races": why}))
    assert {cell.status for cell in verdict.cells if cell.check == "races"} == {DECLINED}, "in the table"
    assert f"races (not asked in 1 of 1 cases): {why}" in verdict.remarks, "with its reason"
    assert verdict.status == "inconclusive", "silence is no pass"


@pytest.mark.parametrize(("name", "status"), [(CLEAN, 0), ("missing_send_wait", 1)])
def test_a_target_whose_kernel_is_for_tpus_alone_is_judged_by_the_command_line(
    name: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", _TEXT, f"conformance.races.planted:{name}", "--checks", "races", "--mesh", "cpu:3"]
    assert cli.main(arguments) == status, capsys.readouterr().out
    assert ("race of the read of a copy started at planted.py:" in capsys.readouterr().out) == bool(status), "shown"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_every_planted_race_is_a_finding_of_the_main_job(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_SECONDS", 12.0)
    arguments = ["replay", _TEXT, f"conformance.races.planted:{name}", "--checks", "races", "--mesh", "cpu:3"]
    assert cli.main(arguments) == 1, "a finding"
    shown = capsys.readouterr().out
    assert (watch.HANGS[0] in shown) == (name == "missing_signal"), "who waits for ever is ended, and told as such"
