"""Which keys does each query see: the masks that the target applies in out, dquery, dkey and dvalue, read from codes.

On coded inputs every visible key counts alike, so one key too many or too few changes the row; on loud ones a mask that
hides by a finite number lets keys through. How a wrong row is decoded is in read_mask.py. May touch: evidence,
findings. Tests: tests/conformance/test_checks_visibility.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conformance.checks.compare import Comparison, compare
from conformance.checks.outcome import Outcome
from conformance.checks.read_mask import WrongMask, reading_of
from conformance.checks.words import place
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.variants import VARIANTS, variants_of

NAME = "visibility"
TENSORS = ("out", "dquery", "dkey", "dvalue")

_SIGNATURES = {
    "coded": "is not that of its mask",
    "loud": "is not that of its mask, where hidden keys are loud",
}


def designates(case: Case) -> bool:
    """Whether the case has any variant of this check."""
    return bool(variants_of(case, (NAME,)))


def check(evidence: Evidence) -> Outcome:
    """Holds what was read from coded and from loud inputs against the oracle; one finding a variant and tensor."""
    shares: dict[str, float] = {}
    findings: list[Finding] = []
    for variant in evidence.variants:
        if VARIANTS[variant].check != NAME:
            continue
        for tensor in TENSORS:
            read = list(_readings(evidence, variant, tensor))
            if not read:
                continue
            worst = max(read, key=lambda reading: reading.found.share)
            shares[tensor] = max(shares.get(tensor, 0.0), worst.found.share)
            if not worst.found.passes:
                findings.append(_finding(evidence, variant, tensor, worst))
    return Outcome(shares, tuple(findings))


@dataclass(frozen=True)
class _Reading:
    """One array of a variant, and how it compares."""

    call: str
    of_vjp: bool
    got: np.ndarray
    found: Comparison


def _readings(evidence: Evidence, variant: str, tensor: str) -> Iterator[_Reading]:
    answer = evidence.answer_to_variant(variant)
    for call in evidence.calls:
        for name in (f"{variant}/{call}/{tensor}", f"{variant}/{call}/{tensor} of vjp"):
            if name not in evidence.arrays:
                continue
            got = evidence.in_position_order(name)
            found = compare(got, answer.reference[tensor], answer.allowance[tensor], answer.compared.get(tensor))
            yield _Reading(call, name.endswith(" of vjp"), got, found)


def _finding(evidence: Evidence, variant: str, tensor: str, reading: _Reading) -> Finding:
    case, found = evidence.case, reading.found
    signature = _SIGNATURES[variant] if np.isfinite(found.got) else "is not finite"
    words = _loud_words(evidence, tensor, found)
    if variant == "coded" and np.isfinite(reading.got).all():
        allowance = evidence.answer_to_variant(variant).allowance[tensor]
        wrong = WrongMask(evidence, tensor, reading.got.astype(np.float64), allowance, found.shares > 1)
        words = reading_of(wrong, found.index)
    return Finding(
        target=evidence.target.name,
        check=NAME,
        tensor=tensor,
        signature=signature,
        case=evidence.case_text,
        reading=f"{tensor} {signature}: {words}",
        rank=case.problem.rank_of(found.index[1]),
        index=found.index,
        expected=found.expected,
        got=found.got,
        allowance=found.allowance,
        share=found.share,
        detail=f"in {reading.call}{', the forward of its VJP' * reading.of_vjp}, variant {variant}",
    )


def _loud_words(evidence: Evidence, tensor: str, found: Comparison) -> str:
    names = ("batch row", "position", "head", "feature")
    where = ", ".join(f"{name} {i}" for name, i in zip(names, found.index, strict=True))
    rows = int((found.shares > 1).any(axis=(2, 3)).sum())
    words = f"at {where} it is {found.got:.6g}, expected {found.expected:.6g}; {place(evidence.case, found.index[1])}"
    return f"{words}; {rows} of {found.shares.shape[0] * found.shares.shape[1]} rows of {tensor} are wrong"
