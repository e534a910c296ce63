"""Does the target keep its contract: it answers, with gradients, in the right shape, dtype and place, and does no more?

May touch: evidence, findings. Tests: tests/conformance/test_checks_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.process import WorkerLost

TENSOR = "call"
SPOILS_PROCESS = {"changed", "left_running"}
"""Keys of a message that tell of something left in the process: what runs there next would be judged in its shadow."""


def check(evidence: Evidence) -> Outcome:
    """Findings for what the target raised, returned in another form, left in another place, or differently in two."""
    message = evidence.message
    findings: list[Finding] = []
    if raised := message.get("raised"):
        findings.append(_raised(evidence, raised))
    if broken := message.get("broken"):
        tensor, quality, expected, got = broken
        reading = f"{tensor} has the wrong {quality}: expected {expected}, got {got}"
        findings.append(_finding(evidence, f"wrong {quality} of {tensor}", reading, expected=expected, got=got))
    for tensor, place in _by_tensor(message.get("misplaced", {})).items():
        reading = f"{tensor} lies elsewhere: {place}"
        expected, _, got = place.removeprefix("expected ").partition(", got ")
        findings.append(_finding(evidence, f"wrong placement of {tensor}", reading, expected=expected, got=got))
    for tensor, difference in _by_tensor(message.get("diverged", {})).items():
        reading = f"{tensor} is replicated, and its copies differ: {difference}"
        fields = {"expected": "the same bits on every device", "got": difference}
        findings.append(_finding(evidence, f"copies of {tensor} differ", reading, **fields))
    for tensor, what in _by_tensor(message.get("not_finite", {})).items():
        reading = f"{tensor} holds {what}; on many hosts each looks at all of its rows for that"
        findings.append(_finding(evidence, f"{what} in {tensor}", reading, expected="finite numbers", got=what))
    findings += meddling(evidence.target.name, evidence.case_text, message)
    return Outcome({TENSOR: 0.0}, tuple(findings))


def _by_tensor(said: Mapping[str, str]) -> dict[str, str]:
    """One remark a tensor, whichever call and draw it came from."""
    return {name.partition("/")[2].removesuffix(" of vjp"): words for name, words in said.items()}


def meddling(target_name: str, case_text: str, message: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Findings for what the target did to its process besides answering, or declining, the case."""
    found: list[tuple[str, str, dict[str, str]]] = []
    for change in message.get("changed", ()):
        name, _, values = change.partition(" from ")
        before, _, after = values.partition(" to ")
        found.append(
            (f"changes {name}", f"changes {change}, for the whole process", {"expected": before, "got": after})
        )
    if running := message.get("left_running"):
        told = f"leaves {len(running)} processes running: {'; '.join(running[:3])}"
        found.append(("leaves processes running", told, {"expected": "no process", "got": running[0]}))
    if printed := message.get("printed_bytes"):
        told = f"{printed / 2**20:.1f} MiB"
        few = {"expected": "at most 1 MiB", "got": told}
        found.append(("prints megabytes", f"prints {told} while it answers this case", few))
    return tuple(
        Finding(target_name, "contract", TENSOR, signature, case_text, f"the target {reading}", **values)  # type: ignore[arg-type]  # expected and got
        for signature, reading, values in found
    )


def lost(target_name: str, case_text: str, how: WorkerLost) -> Finding:
    """The finding for a target that took its process along, or never came back."""
    return Finding(
        target=target_name,
        check="contract",
        tensor=TENSOR,
        signature=f"{how.how} while {how.phase}",
        case=case_text,
        reading=f"the target's process {how.how} while {how.phase}",
        expected="an answer",
        got=how.how,
        detail=how.log,
    )


def _raised(evidence: Evidence, raised: dict[str, str]) -> Finding:
    where = raised["where"]
    place = {"gradient": "when its gradients are taken", "forward": "in its forward"}.get(where, f"in {where}")
    reading = f"raises {raised['type']} {place}: {raised['message'].splitlines()[0] if raised['message'] else ''}"
    fields = {"expected": "an answer", "got": raised["type"], "detail": raised["traceback"]}
    return _finding(evidence, f"raises {raised['type']} {place}", reading, **fields)


def _finding(evidence: Evidence, signature: str, reading: str, **fields: Any) -> Finding:
    return Finding(
        target=evidence.target.name,
        check="contract",
        tensor=TENSOR,
        signature=signature,
        case=evidence.case_text,
        reading=reading,
        **fields,
    )
