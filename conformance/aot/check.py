"""The check `aot` of `halocheck run`: does the target compile for a TPU, and does the program send what it may?

Nothing is executed: full-size layers are compiled for the topology, and judged as `halocheck aot` does.
May touch: the compiling process, through job.py; never JAX. Tests: tests/conformance/test_aot_check.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from conformance.aot.job import MISSING_LIBTPU, Compiled, compile_target, has_libtpu
from conformance.problem import Case
from conformance.session import CONFORMS, DECLINED, FINDING, CaseResult

NAME = "aot"
TENSORS = ("program", "forward", "backward")
"""That it compiles, with the share of the device's memory that it needs; and what it sends, as a share of the plan."""


def results_of(spec: str, topology: str, cases: Sequence[Case]) -> list[CaseResult]:
    """What the compiler made of each case; without libtpu every one is declined, with the line that helps.

    Raises:
        TargetError: the target does not load.
    """
    if not has_libtpu():
        return [CaseResult(case, DECLINED, reason=MISSING_LIBTPU) for case in cases]
    return [_result(one) for one in compile_target(spec, topology, cases)]


def _result(one: Compiled) -> CaseResult:
    if one.reason:
        return CaseResult(one.case, DECLINED, reason=one.reason)
    # What the check `collectives` says of this program is of another one than what it says of a CPU's.
    findings = tuple(dataclasses.replace(finding, check=NAME) for finding in one.findings)
    shares = {(NAME, "program"): one.memory_share} | {(NAME, tensor): one.shares[tensor] for tensor in one.shares}
    cannot_ask = {NAME: one.cannot_ask} if one.cannot_ask else {}
    return CaseResult(one.case, FINDING if findings else CONFORMS, findings, shares, cannot_ask=cannot_ask)
