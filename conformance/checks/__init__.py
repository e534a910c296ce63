"""The checks: one question a file, each usable alone as `check(evidence) -> Outcome`.

May touch: evidence and findings; never JAX, never a fault of the catalogue. Tests: tests/conformance/test_checks_*.py.
"""

from conformance.checks import (
    collectives,
    contract,
    errors,
    exact,
    gradients,
    invariance,
    output,
    races,
    remat,
    residuals,
    visibility,
    work,
)
from conformance.checks.outcome import Check, Outcome
from conformance.designated import asks_errors, asks_lse, asks_races, asks_remat, asks_work
from conformance.problem import DTYPES

_ROUNDED = ("float32", "bfloat16")

CHECKS: dict[str, Check] = {
    "contract": Check((contract.TENSOR,), contract.check, DTYPES),
    "output": Check(output.TENSORS, output.check, _ROUNDED),
    "residuals": Check(residuals.TENSORS, residuals.check, _ROUNDED, asks_lse),
    "gradients": Check(gradients.TENSORS, gradients.check, _ROUNDED),
    "exact": Check(exact.TENSORS, exact.check, ("float64",)),
    visibility.NAME: Check(visibility.TENSORS, visibility.check, DTYPES, visibility.designates),
    invariance.NAME: Check(invariance.TENSORS, invariance.check, DTYPES, invariance.designates),
    "collectives": Check(
        collectives.TENSORS, collectives.check, DTYPES, is_claimed=lambda target, _: target.communication is not None
    ),
    "work": Check(
        work.TENSORS, work.check, DTYPES, asks_work, is_claimed=lambda target, _: target.communication == "halo"
    ),
    "remat": Check(remat.TENSORS, remat.check, DTYPES, asks_remat, remat.is_claimed),
    "races": Check(races.TENSORS, races.check, _ROUNDED, asks_races),
    "errors": Check(errors.TENSORS, errors.check, DTYPES, asks_errors),
}
"""By the name that `--checks` takes, in the order of the verdict table."""

__all__ = ["CHECKS", "Check", "Outcome"]
