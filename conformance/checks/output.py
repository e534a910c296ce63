"""Is the output right: in the primal call and in the VJP's own forward, on each data draw?

May touch: evidence, findings. Tests: tests/conformance/test_checks_values.py.
"""

from conformance.checks.compare import check_tensors
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

TENSORS = ("out",)


def check(evidence: Evidence) -> Outcome:
    """Compares out [batch, seq_len, num_query_heads, value_dim] with the oracle's, element by element."""
    return check_tensors("output", TENSORS, evidence)
