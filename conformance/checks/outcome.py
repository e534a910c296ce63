"""What a check answers: findings, and how much of its allowance each tensor used.

May touch: findings. Tests: tests/conformance/test_checks_values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.target import TargetDescription


@dataclass(frozen=True)
class Detail:
    """How one array of a target compares: where it came from, its worst element, the largest share on each rank.

    `by_rank` is empty for a tensor without positions (dsinks).
    """

    tensor: str
    source: str
    draw: int
    share: float
    index: tuple[int, ...]
    expected: float
    got: float
    by_rank: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """`shares` has one entry for each tensor that was looked at: the largest error as a share of its allowance.

    A tensor without numbers (the contract's) has share 0 when it holds. What is not in `shares` was not tried.
    `figures` are numbers to report that no verdict depends on, by what they say. `no_question`: why there was
    nothing to ask of this target; `cannot_ask`: why there was, and it could not be tried; `withheld`: by tensor, why
    the oracle has no answer to hold it to.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    details: tuple[Detail, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    no_question: str = ""
    cannot_ask: str = ""
    withheld: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check: the tensors it looks at, in the order of the verdict table, its one function, the dtypes it is for.

    `designates` picks the cases that it is asked on, where every case would cost too much; a pure function of the case.
    `is_claimed`: a target, and one of the tensors, for which it is False is "not claimed" in the verdict, whatever was
    measured.
    """

    tensors: tuple[str, ...]
    run: Callable[[Evidence], Outcome]
    dtypes: tuple[str, ...]
    designates: Callable[[Case], bool] = lambda case: True
    is_claimed: Callable[[TargetDescription, str], bool] = lambda target, tensor: True

    def asks_about(self, case: Case) -> bool:
        """Whether the check has a question about this case."""
        return case.problem.dtype in self.dtypes and self.designates(case)

    def claims_any(self, target: TargetDescription) -> bool:
        """Whether the target says anything of itself that the check holds it to, or owes it an answer anyway."""
        return any(self.is_claimed(target, tensor) for tensor in self.tensors)
