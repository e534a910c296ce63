"""Are the gradients right, for random cotangents of out and of lse?

May touch: evidence, findings. Tests: tests/conformance/test_checks_values.py.
"""

from conformance.checks.compare import check_tensors
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

TENSORS = ("dquery", "dkey", "dvalue", "dsinks")


def check(evidence: Evidence) -> Outcome:
    """Compares dquery, dkey, dvalue and dsinks with the oracle's, element by element."""
    return check_tensors("gradients", TENSORS, evidence)
