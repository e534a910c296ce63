"""The contract: what a target raised, returned in another form or left elsewhere is a finding of its own kind."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import contract
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.process import WorkerLost
from conformance.target import TargetDescription

_CASE = "v=1 seq_len=8 sliding_window_size=2"


def _findings(message: dict[str, Any]) -> tuple[Finding, ...]:
    outcome = contract.check(Evidence(TargetDescription("m:t", "target"), parse_case(_CASE), message, {}))
    assert outcome.shares == {"call": 0.0}, "the contract has been looked at"
    return outcome.findings


def test_a_target_that_answers_in_form_keeps_its_contract() -> None:
    assert _findings({"misplaced": {}}) == (), "nothing to say"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("forward", "in its forward"),
        ("gradient", "when its gradients are taken"),
        ("supports", "in supports"),
        ("draw 1", "in draw 1"),
    ],
)
def test_an_exception_is_told_by_type_and_place_with_its_traceback(where: str, words: str) -> None:
    raised = {"type": "ValueError", "message": "no rows left\nat all", "traceback": "Traceback: …", "where": where}
    (found,) = _findings({"raised": raised})
    assert found.signature == f"raises ValueError {words}", "the message may hold addresses: it is no part of the kind"
    assert found.reading == f"raises ValueError {words}: no rows left", "the first line of the message"
    assert (found.detail, found.case) == ("Traceback: …", _CASE), "all of it, and the case"


def test_an_exception_without_a_message_is_told_too() -> None:
    (found,) = _findings({"raised": {"type": "AssertionError", "message": "", "traceback": "", "where": "forward"}})
    assert found.reading == "raises AssertionError in its forward: ", "no message to show"


def test_what_is_not_finite_in_rows_that_nobody_compares_is_told_by_tensor_once() -> None:
    message = {"not_finite": {"attention/dkey": "NaN", "attention_with_lse/dkey": "NaN", "attention/out": "infinity"}}
    nan, infinity = _findings(message)
    assert (nan.signature, nan.expected, nan.got) == ("NaN in dkey", "finite numbers", "NaN"), "its own kind"
    assert infinity.signature == "infinity in out", "another one"


def test_another_form_is_told_by_tensor_and_quality() -> None:
    (found,) = _findings({"broken": ["lse", "dtype", "float32", "bfloat16"]})
    assert found.signature == "wrong dtype of lse", "its kind"
    assert found.reading == "lse has the wrong dtype: expected float32, got bfloat16", "what was expected and got"
    assert (found.expected, found.got) == ("float32", "bfloat16"), "by themselves too"


def test_each_misplaced_tensor_is_one_finding_however_often_it_is_misplaced() -> None:
    misplaced = {
        "attention/out": "expected A, got B",
        "attention/out of vjp": "expected A, got B",
        "attention_with_lse/dkey": "expected C, got D",
    }
    found = _findings({"misplaced": misplaced})
    assert [finding.signature for finding in found] == ["wrong placement of out", "wrong placement of dkey"], (
        "two tensors"
    )
    assert [(finding.expected, finding.got) for finding in found] == [("A", "B"), ("C", "D")]


def test_copies_that_differ_are_a_finding_of_their_tensor() -> None:
    (found,) = _findings({"misplaced": {}, "diverged": {"attention/dsinks": "cpu:0 and cpu:1 hold different values"}})
    assert found.signature == "copies of dsinks differ", "its kind"
    assert "cpu:0 and cpu:1" in found.reading, "which devices"


def test_two_breaches_are_two_findings() -> None:
    raised = {"type": "NotImplementedError", "message": "", "traceback": "", "where": "gradient"}
    found = _findings({"raised": raised, "misplaced": {"attention/out": "expected A, got B"}})
    assert len({finding.id for finding in found}) == 2, "the forward alone may be misplaced as well"


def test_a_lost_process_is_told_by_how_and_when_with_its_last_words() -> None:
    found = contract.lost("target", _CASE, WorkerLost("killed by SIGABRT", "running draw 1", "CHECK failed: x"))
    assert found.signature == "killed by SIGABRT while running draw 1", "its kind"
    assert (found.check, found.tensor, found.case) == ("contract", "call", _CASE), "where it belongs"
    assert found.detail == "CHECK failed: x", "the end of what it printed"
    assert (found.expected, found.got) == ("an answer", "killed by SIGABRT")


def test_what_a_target_does_to_its_process_is_told_kind_by_kind() -> None:
    found = _findings(
        {"changed": ["jax_enable_x64 from False to True"], "left_running": ["sleep 9", "cat"], "printed_bytes": 3 << 20}
    )
    assert [(finding.signature, finding.expected, finding.got) for finding in found] == [
        ("changes jax_enable_x64", "False", "True"),
        ("leaves processes running", "no process", "sleep 9"),
        ("prints megabytes", "at most 1 MiB", "3.0 MiB"),
    ]
    assert found[1].reading == "the target leaves 2 processes running: sleep 9; cat"
