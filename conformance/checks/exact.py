"""In float64, where rounding is out of the way: is every tensor right to about 1e-12 of its sums of absolute values?

A fault of the exchange cannot hide behind rounding here: the collectives are those of every dtype, only the arithmetic
of the local kernel is wider. May touch: evidence, findings. Tests: tests/conformance/test_checks_values.py.
"""

from conformance.checks.compare import check_tensors
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

TENSORS = ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")


def check(evidence: Evidence) -> Outcome:
    """Compares every tensor of a float64 case with the oracle's, element by element."""
    return check_tensors("exact", TENSORS, evidence)
