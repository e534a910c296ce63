"""Does what a target computes and holds follow the window, and not the square of the sequence?

Two programs of one problem are compared that differ in the sequence's length alone. Their costs are those of the traced
and compiled program, so that no clock is asked. A finding only for a target that claims `halo`: the others may see the
whole sequence by their nature, and their figures are reported.
May touch: evidence, findings. Tests: tests/conformance/test_checks_work.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding

TENSORS = ("flops", "memory", "program")
# The sequence is four times as long: what grows in proportion grows fourfold, what grows with its square sixteenfold,
# and halfway between (on the scale where both are powers) is eightfold.
_LENGTH_FACTOR = 4
_HALFWAY = _LENGTH_FACTOR**1.5
# What is traced and handed to XLA should not grow at all; halfway to "in proportion" is twofold.
_PROGRAM_HALFWAY = math.sqrt(_LENGTH_FACTOR)

_MEASURES = (
    ("flops", "matmul_flops", "floating-point operations of its matrix products", _HALFWAY),
    ("memory", "elements", "elements of its intermediate arrays", _HALFWAY),
    ("memory", "temporary_bytes", "bytes of temporary memory", _HALFWAY),
    ("program", "constant_bytes", "bytes of constants built into its program", _HALFWAY),
    ("program", "equations", "equations of its program", _PROGRAM_HALFWAY),
)


def check(evidence: Evidence) -> Outcome:
    """Compares the costs at one length with those at four times that length, and (figures only) at a wider window."""
    facts = evidence.message.get("work")
    if facts is None or "declined" in facts:
        return Outcome()
    judges = evidence.target.communication == "halo"
    if "raised" in facts:
        kind, message = facts["raised"]
        what = f"raises {kind} on a longer sequence"
        return Outcome({"program": 0.0}, (_finding(evidence, "program", what, message),) if judges else ())
    shares: dict[str, float] = {}
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    for tensor, measure, words, limit in _MEASURES:
        if measure not in facts["longer"]:
            continue  # known of compiled programs alone
        growth = _growth(facts, "longer", measure)
        figures[f"{measure}, sequence {_LENGTH_FACTOR} times as long"] = growth
        if measure in facts["wider"]:
            figures[f"{measure}, window {_LENGTH_FACTOR} times as wide"] = _growth(facts, "wider", measure)
        shares[tensor] = max(shares.get(tensor, 0.0), growth / limit)
        if judges and growth > limit:
            base, longer = facts["base"][measure], facts["longer"][measure]
            how = f"{base:.4g} become {longer:.4g} where only the sequence is {_LENGTH_FACTOR} times as long"
            findings.append(_finding(evidence, tensor, f"{words} do not follow the window", how))
    return Outcome(shares, tuple(findings), figures=figures)


def _growth(facts: Mapping[str, Any], name: str, measure: str) -> float:
    return facts[name][measure] / max(facts["base"][measure], 1)


def _finding(evidence: Evidence, tensor: str, what: str, how: str) -> Finding:
    return Finding(
        target=evidence.target.name,
        check="work",
        tensor=tensor,
        signature=what,
        case=evidence.case_text,
        reading=f"{what}: {how}",
    )
