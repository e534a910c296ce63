"""What a check answers: findings, and how much of its allowance each tensor used.

May touch: findings. Tests: tests/conformance/test_checks_values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conformance.evidence import Evidence
from conformance.finding import Finding


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
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    details: tuple[Detail, ...] = ()


@dataclass(frozen=True)
class Check:
    """A check: the tensors it looks at, in the order of the verdict table, its one function, the dtypes it is for."""

    tensors: tuple[str, ...]
    run: Callable[[Evidence], Outcome]
    dtypes: tuple[str, ...]
