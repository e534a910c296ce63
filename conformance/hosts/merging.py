"""One case's result out of what every host has answered, or of what they had when one of them was lost.

May touch: messages and findings; never JAX. Tests: tests/conformance/test_hosts_launch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.case_text import format_case
from conformance.checks.contract import TENSOR as CALL
from conformance.checks.contract import lost
from conformance.finding import Finding
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE, CaseResult
from conformance.target import TargetDescription


def lost_on(
    description: TargetDescription,
    case: Case,
    num_hosts: int,
    gone: tuple[int, WorkerLost],
    left: Sequence[Sequence[Mapping[str, Any]]],
) -> CaseResult:
    """The case on which a host was lost; `left`: what each host has answered from it on.

    A host that raised or declined it comes first: one that waited for that host in a collective is lost after it.
    """
    number, how = gone
    answered = {at: of_host[0] for at, of_host in enumerate(left) if of_host}
    finding = dataclasses.replace(lost(description.name, format_case(case), how), rank=None)
    reading = f"host {number} of {num_hosts}: {finding.reading}"
    if declined := {at: answer["declined"] for at, answer in answered.items() if "declined" in answer}:
        reading += f"; {', '.join(f'host {at} declines it: {why}' for at, why in declined.items())}"
    told = result_of(case, list(answered.values())) if answered else CaseResult(case, FINDING)
    findings = (*told.findings, dataclasses.replace(finding, reading=reading))
    return CaseResult(case, FINDING, findings, {("contract", CALL): 0.0})


def result_of(case: Case, answers: Sequence[Mapping[str, Any]]) -> CaseResult:
    """One case over all hosts: the largest share of each tensor, the worst finding of each kind."""
    reasons = [answer["declined"] for answer in answers if "declined" in answer]
    if len(reasons) == len(answers):
        return CaseResult(case, DECLINED, reason=reasons[0])
    answers = [answer for answer in answers if "declined" not in answer]
    shares: dict[tuple[str, str], float] = {}
    findings: dict[str, Finding] = {}
    withheld: dict[tuple[str, str], str] = {}
    for answer in answers:
        withheld |= {(check, tensor): why for check, tensor, why in answer.get("withheld", ())}
        for check, tensor, share in answer["shares"]:
            shares[check, tensor] = max(share, shares.get((check, tensor), 0.0))
        for fields in answer["findings"]:
            finding = Finding(**{**fields, "index": tuple(fields["index"]) if fields["index"] else None})
            known = findings.get(finding.id)
            if known is None or (finding.share or 0.0) > (known.share or 0.0):
                findings[finding.id] = finding
    # What some hosts decline and others answer is never waved through: nobody has looked at all of it.
    status = FINDING if findings else INCONCLUSIVE if reasons else CONFORMS
    reason = f"some hosts decline it: {reasons[0]}" if reasons else ""
    return CaseResult(case, status, tuple(findings.values()), shares, reason, withheld=withheld)
