"""A session: what is made of answers, declines and lost workers, one case at a time. Workers are scripted here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance import session
from conformance.case_text import parse_case
from conformance.checks import Check
from conformance.devices import Devices
from conformance.evidence import Evidence
from conformance.known_issues import KnownIssue
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE, HarnessError, Session
from conformance.target import TargetDescription, TargetError

Build = Callable[..., Evidence]

_CASE = parse_case("v=1 seq_len=8 sliding_window_size=3 seed=1")
_OTHER = parse_case("v=1 seq_len=8 sliding_window_size=3 seed=2")
_ABORT = WorkerLost("killed by SIGABRT", "running draw 0", "last words")
_OF_VALUES = ("contract", "output", "residuals", "gradients", "exact")
_HANG = WorkerLost("hangs without using CPU", "running draw 1", "")


class _Script:
    """Stands in for `Worker`: each run of a case takes the next reply; `started` records (x64, cases) a worker."""

    def __init__(self, *replies: Any, **declared: Any) -> None:
        self.replies = list(replies)
        self.declared = declared
        self.started: list[tuple[bool, list[str]]] = []
        self.open = 0

    def __call__(self, spec: str, devices: Devices, *, enable_x64: bool = False) -> Any:
        if self.started and self.replies and isinstance(self.replies[0], TargetError):
            raise self.replies.pop(0)
        script, cases = self, []
        self.started.append((enable_x64, cases))
        self.open += 1

        class _Worker:
            description = TargetDescription(spec, "target", **script.declared)

            def load(self, spec: str) -> TargetDescription:
                return TargetDescription(spec, "target", **script.declared)

            def send(self, case_text: str, checks: Any = ()) -> None:
                cases.append(case_text)

            def poll(self, seconds: float) -> Any:
                reply = script.replies.pop(0)
                script.open -= isinstance(reply, WorkerLost)
                return reply

            def close(self) -> None:
                script.open -= 1

        return _Worker()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Session, _Script]]:
    """A session on eight devices whose workers give these replies, one a run."""

    def begin(*replies: Any, checks: tuple[str, ...] = _OF_VALUES, **declared: Any) -> tuple[Session, _Script]:
        script = _Script(*replies, **declared)
        monkeypatch.setattr(session, "Worker", script)
        return Session("m:t", Devices("cpu", 8), checks), script

    return begin


def _reply(evidence: Evidence) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return dict(evidence.message), dict(evidence.arrays)


def _wrong(evidence: Evidence) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    message, arrays = _reply(evidence)
    return message, arrays | {"0/attention/out": arrays["0/attention/out"] + 1}


def test_right_answers_conform_with_a_share_for_each_tensor(start: Any, right_evidence: Build) -> None:
    held, _ = start(_reply(right_evidence(_CASE)))
    result = held.run(_CASE)
    assert (result.status, result.findings) == (CONFORMS, ()), "nothing is wrong"
    assert set(result.shares) == {
        ("contract", "call"),
        ("output", "out"),
        *(("gradients", tensor) for tensor in ("dquery", "dkey", "dvalue")),
    }, "what was looked at"


def test_a_wrong_answer_is_a_finding_beside_the_shares(start: Any, right_evidence: Build) -> None:
    held, _ = start(_wrong(right_evidence(_CASE)))
    result = held.run(_CASE)
    assert result.status == FINDING, "out is off by one"
    assert [found.tensor for found in result.findings] == ["out"], "and out alone"
    assert result.shares["gradients", "dkey"] == 0, "the rest was looked at too"


def test_a_problem_is_held_to_the_numerics_that_it_is_said_to_have(start: Any, right_evidence: Build) -> None:
    declared = {"platform": "tpu", "tpu_precision": {"rounded_probabilities": True}, "tpu_precision_varies": True}
    message, arrays = _reply(right_evidence(_CASE))
    # Off by a ten-thousandth: far more than float32 rounds, far less than probabilities in bfloat16 do.
    off = arrays | {"0/attention/out": arrays["0/attention/out"] * (1 + 1e-4)}
    held, _ = start((message, off), (message | {"uses_tpu_precision": False}, off), **declared)
    shares = [held.run(case).shares["output", "out"] for case in (_CASE, _CASE)]
    assert shares[0] < 1 < shares[1], "the same error, with and without the excuse"


_FRESH = parse_case("v=1 seq_len=8 sliding_window_size=3 seed=67")


@pytest.mark.parametrize(
    ("case", "checks", "processes"),
    [
        (_FRESH, ("contract", "invariance"), 2),
        (_FRESH, ("contract", "output"), 1),  # it calls no other problem then
        (_OTHER, ("contract", "invariance"), 1),
    ],
)
def test_some_cases_that_call_other_problems_start_where_nothing_else_has_run(
    start: Any, case: Case, checks: tuple[str, ...], processes: int
) -> None:
    declined = ({"declined": "not for me"}, {})
    held, script = start(declined, declined, checks=checks)
    held.run(_CASE)
    held.run(case)
    ran = [len(cases) for _, cases in script.started]
    assert ran == ([2] if processes == 1 else [1, 1]), "in one process, or the second in one of its own"
    assert script.open == 1, "the other one was ended"


def test_what_is_known_of_a_target_is_no_finding_and_is_said(
    monkeypatch: pytest.MonkeyPatch, right_evidence: Build
) -> None:
    wrong = _wrong(right_evidence(_CASE))
    monkeypatch.setattr(session, "Worker", _Script(wrong, wrong))
    (found,) = Session("m:t", Devices("cpu", 8), _OF_VALUES).run(_CASE).findings
    kind = (found.check, found.tensor, found.signature)
    issue = KnownIssue("m:t", "numpy", ("1",), *kind, f"seed={_CASE.seed}", found.case, "reported")
    result = Session("m:t", Devices("cpu", 8), _OF_VALUES, (issue,)).run(_CASE)
    assert (result.status, result.findings, result.known) == (CONFORMS, (), (issue,)), "hidden, not forgotten"
    other = dataclasses.replace(issue, signature="is wrong elsewhere")
    monkeypatch.setattr(session, "Worker", _Script(wrong))
    assert Session("m:t", Devices("cpu", 8), _OF_VALUES, (other,)).run(_CASE).status == FINDING, "another kind"
    other = dataclasses.replace(issue, only=f"seed={_CASE.seed + 1}")
    monkeypatch.setattr(session, "Worker", _Script(wrong))
    assert Session("m:t", Devices("cpu", 8), _OF_VALUES, (other,)).run(_CASE).status == FINDING, "on another case"


def test_a_decline_carries_its_reason_and_nothing_else(start: Any) -> None:
    held, _ = start(({"declined": "no cap"}, {}))
    result = held.run(_CASE)
    assert (result.status, result.reason, result.shares) == (DECLINED, "no cap", {}), "silence is no share"


def test_a_case_for_more_devices_than_there_are_is_declined_without_a_run(start: Any) -> None:
    held, script = start()
    result = held.run(_CASE.replace(context_parallelism=4, data_parallelism=3, batch=3))
    assert (result.status, result.reason) == (DECLINED, "needs 12 devices, the mesh has 8"), "said, not skipped"
    assert script.started[0][1] == [], "no worker was asked"


def test_a_worker_lost_once_is_inconclusive_and_the_case_was_run_again_in_a_fresh_one(
    start: Any, right_evidence: Build
) -> None:
    held, script = start(_ABORT, _reply(right_evidence(_CASE)))
    result = held.run(_CASE)
    assert result.status == INCONCLUSIVE, "it did not happen again: no finding, and no conformance either"
    assert "killed by SIGABRT while running draw 0" in result.reason, "the reason says what happened"
    assert [len(cases) for _, cases in script.started] == [1, 1], "a second worker ran it once"
    assert held.workers_lost == 1, "counted"


def test_a_worker_lost_twice_is_a_finding_with_the_last_words(start: Any) -> None:
    held, _ = start(_ABORT, _ABORT)
    (found,) = held.run(_CASE).findings
    assert found.signature == "killed by SIGABRT while running draw 0", "how and when"
    assert (found.check, found.detail) == ("contract", "last words"), "by the contract, with its log"


def test_the_same_loss_needs_no_second_look_and_another_one_does(start: Any, right_evidence: Build) -> None:
    held, script = start(_ABORT, _ABORT, _ABORT, _HANG, _reply(right_evidence(_OTHER)))
    assert held.run(_CASE).status == FINDING, "seen twice"
    assert held.run(_OTHER).status == FINDING, "the same way again"
    assert [len(cases) for _, cases in script.started] == [1, 1, 1], "one run for the second case"
    assert held.run(_OTHER).status == INCONCLUSIVE, "a hang has not been seen before: looked at again"


def test_what_is_wrong_when_run_again_is_a_finding_of_its_own(start: Any, right_evidence: Build) -> None:
    held, _ = start(_ABORT, _wrong(right_evidence(_CASE)))
    result = held.run(_CASE)
    assert [found.check for found in result.findings] == ["output"], "the wrong answer counts"


def test_a_target_that_does_not_load_again_is_lost_and_does_not_end_the_run(start: Any) -> None:
    held, _ = start(_ABORT, TargetError("Traceback: gone"), TargetError("Traceback: gone"), TargetError("gone"))
    (found,) = held.run(_CASE).findings
    assert found.signature == "fails while loading the target again", "its own finding"
    assert found.detail == "Traceback: gone", "with the user's traceback"
    assert held.run(_OTHER).status == FINDING, "and the run goes on"


def test_another_target_goes_on_in_the_same_workers_with_a_clean_record(start: Any, right_evidence: Build) -> None:
    held, script = start(_ABORT, _ABORT, _reply(right_evidence(_CASE)), _ABORT, _reply(right_evidence(_CASE)))
    assert held.run(_CASE).status == FINDING, "the first target was lost twice"
    held.load("m:other")
    assert (held.description.spec, held.workers_lost) == ("m:other", 0), "the losses were the first one's"
    assert held.run(_CASE).status == CONFORMS
    assert held.evidence is not None, "what was judged is there to look at"
    assert len(script.started) == 3, "one worker was started for the second target, the others had been lost"
    assert held.run(_CASE).status == INCONCLUSIVE, "an abort of this target has not been seen before"


def test_float64_cases_have_a_worker_of_their_own(start: Any, right_evidence: Build) -> None:
    exact = _CASE.replace(dtype="float64")
    held, script = start(*(_reply(right_evidence(case)) for case in (_CASE, exact, _CASE, exact)), exact=True)
    for case in (_CASE, exact, _CASE, exact):
        assert held.run(case).status == CONFORMS, "each in its own process"
    assert [(x64, len(cases)) for x64, cases in script.started] == [(False, 2), (True, 2)], "two workers, reused"


def test_float64_is_judged_by_the_exact_check_alone(start: Any, right_evidence: Build) -> None:
    exact = _CASE.replace(dtype="float64")
    held, _ = start(_reply(right_evidence(exact)), exact=True)
    tensors = {("exact", tensor) for tensor in ("out", "dquery", "dkey", "dvalue")}
    assert set(held.run(exact).shares) == {("contract", "call"), *tensors}, "and by the contract"


def test_what_rounding_would_excuse_is_a_finding_of_the_exact_tier(start: Any, right_evidence: Build) -> None:
    exact = _CASE.replace(dtype="float64")
    right = right_evidence(exact)
    name = "0/attention/dkey"
    held, _ = start(_reply(right_evidence(exact, {name: right.arrays[name] * (1 + 1e-8)})), exact=True)
    assert [finding.kind[:2] for finding in held.run(exact).findings] == [("exact", "dkey")], "1e-8 is no rounding here"


def test_float64_is_not_put_to_a_target_that_does_not_claim_it(start: Any) -> None:
    held, script = start()
    result = held.run(_CASE.replace(dtype="float64"))
    assert (result.status, "exact" in result.reason) == (DECLINED, True), "the reason names the attribute"
    assert [cases for _, cases in script.started] == [[]], "nothing ran"


@pytest.mark.parametrize("name", ["0/attention/out", "1/attention/dkey", "1/attention/out of vjp"])
def test_an_array_that_is_owed_and_missing_fails_the_harness(start: Any, right_evidence: Build, name: str) -> None:
    message, arrays = _reply(right_evidence(_CASE))
    del arrays[name]
    held, _ = start((message, arrays))
    with pytest.raises(HarnessError, match=name):
        held.run(_CASE)


def test_an_array_that_nobody_asked_for_fails_the_harness(start: Any, right_evidence: Build) -> None:
    message, arrays = _reply(right_evidence(_CASE))
    held, _ = start((message, arrays | {"2/attention/out": arrays["0/attention/out"]}))
    with pytest.raises(HarnessError, match="2/attention/out"):
        held.run(_CASE)


def test_variants_are_owed_where_a_check_wants_them(start: Any, right_evidence: Build) -> None:
    checks = (*_OF_VALUES, "visibility")
    wanted = ("coded",)  # of this case: `loud` is for even seeds
    held, _ = start(_reply(right_evidence(_CASE, variants=wanted)), _reply(right_evidence(_CASE)), checks=checks)
    result = held.run(_CASE)
    assert result.status == CONFORMS, "the oracle's own answers"
    assert {tensor for check, tensor in result.shares if check == "visibility"} == {"out", "dquery", "dkey", "dvalue"}
    with pytest.raises(HarnessError, match="coded/attention/dkey"):
        held.run(_CASE)


def test_no_arrays_at_all_fail_the_harness_rather_than_conform(start: Any) -> None:
    held, _ = start(({"misplaced": {}}, {}))
    with pytest.raises(HarnessError):
        held.run(_CASE)


def test_arrays_of_another_shape_fail_the_harness(start: Any, right_evidence: Build) -> None:
    message, arrays = _reply(right_evidence(_CASE))
    held, _ = start((message, arrays | {"0/attention/out": arrays["0/attention/out"][..., :1]}))
    with pytest.raises(ValueError, match="shapes differ"):
        held.run(_CASE)


def test_a_failure_of_the_harness_in_the_worker_is_not_blamed_on_the_target(start: Any) -> None:
    held, _ = start(({"harness_failed": "Traceback: inputs.py"}, {}))
    with pytest.raises(HarnessError, match=r"(?s)seed=1\nTraceback: inputs\.py"):
        held.run(_CASE)


def test_only_what_was_raised_or_broken_excuses_missing_arrays(start: Any, right_evidence: Build) -> None:
    raised = {"type": "NotImplementedError", "message": "", "traceback": "", "where": "gradient"}
    arrays = {name: array for name, array in _reply(right_evidence(_CASE))[1].items() if name.endswith("/out")}
    held, _ = start(({"misplaced": {}, "raised": raised}, arrays), ({"broken": ["out", "shape", "a", "b"]}, {}))
    first, second = held.run(_CASE), held.run(_OTHER)
    assert [found.signature for found in first.findings] == [
        "raises NotImplementedError when its gradients are taken"
    ], "a finding stands in for what is missing"
    assert ("output", "out") in first.shares, "the forward is compared all the same"
    assert [found.signature for found in second.findings] == ["wrong shape of out"], "and here too"


def test_the_contract_is_always_checked(start: Any) -> None:
    with pytest.raises(ValueError, match="check_names must hold 'contract'"):
        Session("m:t", Devices("cpu", 8), ("output",))


def test_an_exception_of_a_check_is_not_swallowed(
    start: Any, right_evidence: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(evidence: Evidence) -> Any:
        raise ZeroDivisionError

    held, _ = start(_reply(right_evidence(_CASE)))
    monkeypatch.setitem(session.CHECKS, "gradients", Check(("dquery",), fails, ("float32",)))
    with pytest.raises(ZeroDivisionError):
        held.run(_CASE)


def test_closing_ends_every_worker_and_the_next_case_starts_a_fresh_one(start: Any, right_evidence: Build) -> None:
    exact = _CASE.replace(dtype="float64")
    held, script = start(*(_reply(right_evidence(case)) for case in (_CASE, exact, _CASE)), exact=True)
    held.run(_CASE)
    held.run(exact)
    held.close()
    assert script.open == 0, "both have been ended"
    held.run(_CASE)
    assert [len(cases) for _, cases in script.started] == [1, 1, 1], "a process that has run nothing before it"
    held.close()
    assert script.open == 0, "and ended again"
