"""Is the log-sum-exp right that `attention_with_lse` returns beside its output?

May touch: evidence, findings. Tests: tests/conformance/test_checks_values.py.
"""

from conformance.checks.compare import check_tensors
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

TENSORS = ("lse",)


def check(evidence: Evidence) -> Outcome:
    """Compares lse [batch, seq_len, num_query_heads] with the oracle's, element by element."""
    return check_tensors("residuals", TENSORS, evidence)
