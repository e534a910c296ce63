"""Under rematerialisation, does the forward run once where its residuals are saved, and is the gradient the same?

With a checkpoint policy that saves the target's `residual_names` no matrix product of the forward runs again and
nothing travels again; a target that names none is asked for the same answer alone.
May touch: evidence, findings. Tests: tests/conformance/test_checks_remat.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.checks.compare import compare, element, of_the_whole, sentence
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.target import TargetDescription

TENSORS = ("program", "out", "dquery", "dkey", "dvalue", "dsinks")
_SAVED = "names saved"


def is_claimed(target: TargetDescription, tensor: str) -> bool:
    """Every target owes the same answer; that nothing runs twice is said by those that name their residuals."""
    return tensor != "program" or bool(target.residual_names)


def check(evidence: Evidence) -> Outcome:
    """Judges the programs under `jax.checkpoint`: what they repeat, and each gradient against the oracle's."""
    facts = evidence.message.get("remat")
    if facts is None:
        return Outcome()
    findings: list[Finding] = []
    shares: dict[str, float] = {}
    for program in (name for name in facts if name != "plain"):
        if "raised" in facts[program]:
            kind, message = facts[program]["raised"]
            what = f"raises {kind} under jax.checkpoint, {program}"
            findings.append(_finding(evidence, "program", what, message, expected="an answer", got=kind))
            continue
        for tensor in TENSORS[1:]:
            name = f"remat/{program}/{tensor}"
            if tensor in evidence.answer(0, "attention").reference and tensor != "lse":
                shares[tensor] = max(shares.get(tensor, 0.0), _compare(evidence, name, tensor, program, findings))
    if _SAVED in facts and "raised" not in facts[_SAVED]:
        shares["program"] = 0.0
        findings += _repeated(evidence, facts)
    unique = {finding.kind: finding for finding in reversed(findings)}
    return Outcome(shares, tuple(unique.values()))


def _repeated(evidence: Evidence, facts: Mapping[str, Any]) -> list[Finding]:
    """What the program with saved residuals does again that the plain one does once."""
    findings = []
    for measure, what in (
        ("matmul_flops", "computes its forward again although its residuals are saved"),
        ("sent_bytes", "sends again although its residuals are saved"),
    ):
        plain, saved, nothing = (facts[name][measure] for name in ("plain", _SAVED, "nothing saved"))
        if saved > plain:
            unit = "floating-point operations" if measure == "matmul_flops" else "bytes sent"
            how = f"{saved} {unit} beside {plain} without rematerialisation, and {nothing} with nothing saved"
            share = saved / plain if plain else float("inf")
            findings.append(_finding(evidence, "program", what, how, expected=plain, got=saved, share=share))
    return findings


def _compare(evidence: Evidence, name: str, tensor: str, program: str, findings: list[Finding]) -> float:
    """The largest share of one array's allowance; adds a finding where it is exceeded."""
    answer = evidence.answer(0, "attention")
    places = answer.places.get(tensor) if answer.places else None
    got = evidence.in_position_order(name) if places is None else evidence.at_places(name, places)
    found = compare(np.asarray(got), answer.reference[tensor], answer.allowance[tensor], answer.compared.get(tensor))
    if not found.passes:
        found = found if places is None else of_the_whole(found, places)
        what, how = f"is wrong under jax.checkpoint, {program}", sentence(evidence.case, found)
        findings.append(_finding(evidence, tensor, what, how, **element(evidence.case, found)))
    return found.share


def _finding(evidence: Evidence, tensor: str, what: str, how: str, **fields: Any) -> Finding:
    subject = "the target" if tensor == "program" else tensor
    return Finding(
        target=evidence.target.name,
        check="remat",
        tensor=tensor,
        signature=what,
        case=evidence.case_text,
        reading=f"{subject} {what}: {how}",
        draw=0,
        **fields,
    )
