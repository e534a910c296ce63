"""Are the gradients right, for random cotangents of out and of lse?

May touch: evidence, findings. Tests: tests/conformance/test_checks_values.py, test_key_identities.py.
"""

import dataclasses

from conformance.checks.adding_up import check_keys_add_up
from conformance.checks.compare import check_tensors
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

TENSORS = ("dquery", "dkey", "dvalue", "dsinks")


def check(evidence: Evidence) -> Outcome:
    """Compares dquery, dkey, dvalue and dsinks with the oracle's, element by element; and where the oracle cannot
    afford most keys, their sum with what it must be."""
    outcome, of_all_keys = check_tensors("gradients", TENSORS, evidence), check_keys_add_up(evidence)
    shares = {**outcome.shares}
    for tensor, share in of_all_keys.shares.items():
        shares[tensor] = max(share, shares.get(tensor, 0.0))
    return dataclasses.replace(outcome, shares=shares, findings=(*outcome.findings, *of_all_keys.findings))
