"""Is what must be refused refused, with a ValueError or by declining, before anything runs?

What a target owes: a sliding window below 1 is refused, as a ValueError or declined. Arrays that contradict each other
have no right answer, so they are not answered (JAX's own TypeError will do). A problem that has an answer after all
(a length that does not divide, ids of another dtype) may be answered. Nothing may end in any other exception.
May touch: evidence, findings. Tests: tests/conformance/test_checks_errors.py.
"""

from __future__ import annotations

from typing import Any

from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding

TENSORS = ("window", "heads", "sequence", "segment_ids")
_MAY_BE_ANSWERED = ("a length that does not divide into chunks", "segment_ids of float32")


def check(evidence: Evidence) -> Outcome:
    """Judges the answers to problems that no case may have; one finding a kind of problem and answer."""
    answers = evidence.message.get("errors")
    if answers is None:
        return Outcome()
    findings = {}
    for answer in answers:
        if what := _what_is_wrong(answer):
            finding = _finding(evidence, answer, what)
            findings.setdefault(finding.kind, finding)
    return Outcome({answer["tensor"]: 0.0 for answer in answers}, tuple(findings.values()))


def _what_is_wrong(answer: dict[str, Any]) -> str | None:
    if answer["how"] == "answered":
        return None if answer["words"] in _MAY_BE_ANSWERED else "is answered"
    if answer["how"] == "raised":
        is_refusal = answer["type"] == "TypeError" and answer["tensor"] != "window"
        return None if is_refusal else f"ends in {answer['type']}"
    return None


def _finding(evidence: Evidence, answer: dict[str, Any], what: str) -> Finding:
    # Zero and a negative size are one kind of problem.
    words = "sliding_window_size below 1" if answer["tensor"] == "window" else answer["words"]
    return Finding(
        target=evidence.target.name,
        check="errors",
        tensor=answer["tensor"],
        signature=f"{words}: {what}",
        case=evidence.case_text,
        reading=f"put to the target beside this case, {answer['words']} {what}; it should be refused with a ValueError",
        expected="a ValueError, or declined",
        got=what.removeprefix("is ").removeprefix("ends in "),
        detail=answer.get("message", ""),
    )
