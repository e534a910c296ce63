"""Other problems called between two traces of a case's own: is each right? A part of the check invariance.

May touch: evidence, findings. Tests: tests/conformance/test_other_programs.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.answers import answer_for
from conformance.case_text import format_case, parse_case
from conformance.checks.compare import compare, element, sentence
from conformance.checks.outcome import Outcome
from conformance.designated import asks_programs
from conformance.evidence import Evidence
from conformance.finding import Finding

_OTHER = "is wrong for another problem in the same process"
_AGAIN = "is wrong when its problem is traced again after another"
_ALONE = "is wrong when no other gradient is taken"


def judge_programs(evidence: Evidence, check: str) -> Outcome:
    """Holds what `other_programs` ran against the oracle, within what rounding allows; one finding a tensor.

    Raises:
        KeyError: the case is designated and the worker ran no other program: silence must not pass.
    """
    if not evidence.variants or not asks_programs(evidence.case) or "raised" in evidence.message:
        return Outcome()
    facts = evidence.message["programs"]
    if "raised" in facts:
        program, kind, message = facts["raised"]
        words = f"raises {kind} when {program} is called in the same process"
        fields = {"expected": "an answer", "got": kind}
        return Outcome({"out": np.inf}, (_finding(evidence, check, "out", words, message, fields),))
    asked = [("alone", evidence.case, "out", _AGAIN), ("alone", evidence.case, f"d{facts['alone']}", _ALONE)]
    asked = [(name, parse_case(text), "out", _OTHER) for name, text in facts["others"].items()] + asked
    shares: dict[str, float] = {}
    findings: dict[str, Finding] = {}
    for program, case, tensor, words in asked:
        answer = answer_for(evidence.target, case, 0, "attention")
        got = evidence.in_position_order(f"{program}/attention/{tensor}")
        found = compare(got, answer.reference[tensor], answer.allowance[tensor], answer.compared.get(tensor))
        shares[tensor] = max(shares.get(tensor, 0.0), 0.0 if found.passes else np.inf)
        if not found.passes and tensor not in findings:
            how = f"{sentence(case, found)}, on {format_case(case)}"
            findings[tensor] = _finding(evidence, check, tensor, words, how, element(case, found))
    return Outcome(shares, tuple(findings.values()))


def _finding(
    evidence: Evidence, check: str, tensor: str, signature: str, how: str, fields: Mapping[str, Any]
) -> Finding:
    return Finding(
        target=evidence.target.name,
        check=check,
        tensor=tensor,
        signature=signature,
        case=evidence.case_text,
        reading=f"{tensor} {signature}: {how}",
        draw=0,
        **fields,
    )
