"""Whether a target's kernels send too much by copies of their own: more than its plan allows collectives to bring.

Counted together with the collectives beside them that the plan has, but for sums: a kernel is free to do by itself what
its strategy does by any collective. May touch: wire_plan. Tests: tests/conformance/test_kernel_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.wire_plan import Allowance, WirePlan, joined


@dataclass(frozen=True)
class Copied:
    """What one device sends in a phase by its kernels' copies, and receives by collectives, beside what it may."""

    tensor: str
    by_copies: int
    by_collectives: float
    allowed: float
    what: str

    @property
    def got(self) -> float:
        return self.by_copies + self.by_collectives

    @property
    def share(self) -> float:
        """Of the allowance."""
        return self.got / self.allowed if self.allowed else float("inf")


def is_counted(copies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is known how much these copies, facts of `kernel_copies`, send."""
    return all(copy["starts"] is not None for copy in copies)


def copied(
    copies: Sequence[Mapping[str, Any]], beside: Mapping[tuple[str, str], float], plan: WirePlan, calls: int
) -> Iterator[Copied]:
    """Phase by phase. `beside`: bytes that a kind of collective brings to a device, by (phase, kind); `calls`: of the
    target in the program, of any of which a copy without a phase may be."""
    by_phase: dict[str, int] = {}
    for copy in copies:
        by_phase[copy["phase"]] = by_phase.get(copy["phase"], 0) + copy["bytes"] * copy["starts"]
    for phase, sent in by_phase.items():
        is_backward = phase.startswith("backward/")
        allowances: Sequence[Allowance] = plan.backward if is_backward else plan.forward
        if phase == "":
            allowances = joined([*plan.forward, *plan.forward, *plan.backward])
        moving = [one for one in allowances if "all-reduce" not in one.kinds]
        allowed = sum(one.bytes for one in moving) * (calls if phase == "" else 1)
        # A kind that the plan has not is a finding of its own, and no matter here.
        planned = {kind for one in moving for kind in one.kinds}
        by_collectives = sum(beside.get((phase, kind), 0) for kind in planned)
        what = " and ".join(one.what for one in moving) or "nothing may be sent: all"
        yield Copied("backward" if is_backward else "forward", sent, by_collectives, allowed, what)
