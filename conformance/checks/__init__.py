"""The checks: one question a file, each usable alone as `check(evidence) -> Outcome`.

May touch: evidence and findings; never JAX, never a fault of the catalogue. Tests: tests/conformance/test_checks_*.py.
"""

from conformance.checks import contract, gradients, output, residuals
from conformance.checks.outcome import Check, Outcome

CHECKS: dict[str, Check] = {
    "contract": Check((contract.TENSOR,), contract.check),
    "output": Check(output.TENSORS, output.check),
    "residuals": Check(residuals.TENSORS, residuals.check),
    "gradients": Check(gradients.TENSORS, gradients.check),
}
"""By the name that `--checks` takes, in the order of the verdict table."""

__all__ = ["CHECKS", "Check", "Outcome"]
