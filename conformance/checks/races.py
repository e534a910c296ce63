"""Do the target's kernels that copy by themselves (DMAs, to other devices too) order what they do, on every device?

They run under TPU interpret mode, copies carried out as early and as late as can be, one device late: a race, a wait
that is missing, memory read before it is written or where there is none, an answer that is wrong then, are findings.
May touch: evidence, findings. Tests: tests/conformance/test_checks_races.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from conformance.checks.compare import compare
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.inputs import NUM_DRAWS
from conformance.races.told import Access

NAME = "races"
TENSORS = ("kernel", "out", "dquery", "dkey", "dvalue", "dsinks")
_NO_QUESTION = "no Pallas kernel of its program starts a copy"
_ABSENT_MEMORY = re.compile(r"KeyError: \('(\w+)', \d+, (\d+), \d+\)")
_OUT_OF_BOUNDS = re.compile(r"\w+Error: (Out-of-bounds [^\n]*)")
_LAST_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): ?([^\n]*)", re.MULTILINE)


def check(evidence: Evidence) -> Outcome:
    """Judges what the interpreter told, and every answer under it against the oracle's."""
    facts = evidence.message.get(NAME)
    if facts is None:
        return Outcome()
    if not facts["kernels"]:
        return Outcome(no_question=_NO_QUESTION)
    findings = [*_without_barrier(evidence, facts)]
    if "declined" in facts:
        shares = {"kernel": 0.0} if findings else {}
        return Outcome(shares, tuple(findings), cannot_ask=facts["declined"])
    findings += [*_races(evidence, facts), *_left_over(evidence, facts)]
    if facts["raised"] is not None:
        findings.append(_raised(evidence, *facts["raised"]))
    shares = {"kernel": 0.0}
    for name in evidence.arrays:
        if name.startswith(f"{NAME} "):
            _compare(evidence, name, shares, findings)
    unique = {finding.kind: finding for finding in reversed(findings)}
    return Outcome(shares, tuple(reversed(unique.values())))


def _without_barrier(evidence: Evidence, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Read from the code: whether the interpreter's devices are out of step when it matters is luck."""
    for kernel in facts["kernels"]:
        if kernel["sends_before_barrier"]:
            how = f"{kernel['name']} starts a copy to another device before it waits for a barrier semaphore"
            yield _finding(evidence, "sends to a device that may not have entered the kernel", how)


def _races(evidence: Evidence, facts: Mapping[str, Any]) -> Iterator[Finding]:
    for mode, race, devices in facts["races"]:
        first, second = Access(**race["first"]), Access(**race["second"])
        signature = f"race of {first.words} with {second.words}"
        yield _finding(evidence, signature, f"in {race['memory']} of {_listed(devices)}, nothing orders the two", mode)


def _left_over(evidence: Evidence, facts: Mapping[str, Any]) -> Iterator[Finding]:
    for mode, semaphore, devices in facts["left_over"]:
        what = (
            f"the barrier semaphore of collective id {semaphore['semaphore']}"
            if semaphore["is_barrier"]
            else "a semaphore"
        )
        then = "the next call with this id goes on before it may" if semaphore["is_barrier"] else "a wait is missing"
        signature = f"leaves {what} above zero"
        yield _finding(evidence, signature, f"when the kernel ends, on {_listed(devices)}: {then}", mode)


def _raised(evidence: Evidence, mode: str, kind: str, message: str, place: str | None) -> Finding:
    """What a run raised: most of all, an access to memory that is not there."""
    at = "" if place is None else f" at {place}"
    if absent := _ABSENT_MEMORY.search(message):
        what = f"copies to or from a device that has not entered the kernel{at}"
        return _finding(evidence, what, f"device {absent[2]} has no such memory in {absent[1]} yet, or no more", mode)
    if outside := _OUT_OF_BOUNDS.search(message):
        return _finding(evidence, f"reads or writes out of bounds{at}", outside[1], mode)
    errors = _LAST_ERROR.findall(message)
    kind, told = errors[-1] if errors else (kind, message.strip().partition("\n")[0])
    return _finding(evidence, f"raises {kind} under TPU interpret mode{at}", told, mode, message)


def _compare(evidence: Evidence, name: str, shares: dict[str, float], findings: list[Finding]) -> None:
    """Holds one array, named `races mode number/call/tensor`, to the oracle's answer to its data draw."""
    prefix, call, source = name.split("/")
    _, mode, number = prefix.split()
    tensor = source.removesuffix(" of vjp")
    draw = int(number) % NUM_DRAWS
    answer = evidence.answer(draw, call)
    places = answer.places.get(tensor) if answer.places else None
    got = evidence.in_position_order(name) if places is None else evidence.at_places(name, places)
    found = compare(np.asarray(got), answer.reference[tensor], answer.allowance[tensor], answer.compared.get(tensor))
    shares[tensor] = max(shares.get(tensor, 0.0), found.share)
    if not found.passes:
        how = f"it is {found.got:.6g} at {found.index}, expected {found.expected:.6g}"
        what = "is wrong when devices are not in step"
        findings.append(_finding(evidence, what, how, mode, tensor=tensor, share=found.share, draw=draw))


def _finding(
    evidence: Evidence, what: str, how: str, mode: str = "", detail: str = "", tensor: str = "kernel", **numbers: Any
) -> Finding:
    subject = "a kernel: " if tensor == "kernel" else f"{tensor} "
    seen = {"eager": " (copies carried out when started)", "on_wait": " (copies carried out when waited for)"}.get(
        mode, ""
    )
    return Finding(
        target=evidence.target.name,
        check=NAME,
        tensor=tensor,
        signature=what,
        case=evidence.case_text,
        reading=f"{subject}{what}: {how}{seen}",
        detail=detail,
        **numbers,
    )


def _listed(devices: list[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
