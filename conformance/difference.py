"""Whether two targets differ on a case by more than rounding explains: what makes a fault *bite*, whoever sees it.

May touch: evidence and its answers; never a check. Tests: tests/conformance/test_difference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.evidence import Evidence

# What two runs of one program may tell differently: stack frames, and how long something took.
_VOLATILE = ("traceback", "seconds", "log")


def differs(one: Evidence, other: Evidence) -> bool:
    """Whether some element differs by more than its allowance, or one of the facts that came with the arrays does.

    Both are answers to the same case. What a program gave on further data differs where one is zero, or not finite, and
    the other is not; any other array that the oracle has no answer to, by any bit.
    """
    if _lasting(one.message) != _lasting(other.message) or one.arrays.keys() != other.arrays.keys():
        return True
    return any(_array_differs(one, other, name) for name in one.arrays)


def _lasting(fact: Any) -> Any:
    if isinstance(fact, Mapping):
        return {key: _lasting(value) for key, value in fact.items() if key not in _VOLATILE}
    return fact


def _array_differs(one: Evidence, other: Evidence, name: str) -> bool:
    got, wanted = one.arrays[name], other.arrays[name]
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return True
    if name.partition("/")[0] in one.variants:
        return bool(np.any((got == 0) != (wanted == 0)) or np.any(np.isfinite(got) != np.isfinite(wanted)))
    allowance = _allowance(one, name)
    if allowance is None:
        return got.tobytes() != wanted.tobytes()
    got, wanted = (array.astype(np.float64) for array in (got, wanted))
    with np.errstate(invalid="ignore"):
        agrees = (got == wanted) | (np.abs(got - wanted) <= allowance) | (np.isnan(got) & np.isnan(wanted))
    return not agrees.all()


def _allowance(evidence: Evidence, name: str) -> np.ndarray | float | None:
    """Of each element, in layout order; the smallest of all where the oracle answers in some places only."""
    draw, call, tensor = (*name.split("/"), "", "")[:3]
    if not draw.isdigit() or call not in evidence.calls:
        return None
    answer = evidence.answer(int(draw), call)
    allowance = answer.allowance.get(tensor.removesuffix(" of vjp"))
    if allowance is None:
        return None
    if answer.places:
        return float(allowance.max())
    return allowance if allowance.ndim < 2 else allowance[:, evidence.case.problem.positions()]
