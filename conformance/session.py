"""One target under test: its worker, replaced when lost, and the judgement of one case at a time.

A lost worker (crash or hang) is a finding only if it happens again, alone, in a fresh process.
May touch: worker processes, checks; never JAX. Tests: tests/conformance/test_session.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.checks.contract import TENSOR as CALL
from conformance.checks.contract import lost
from conformance.devices import Devices
from conformance.evidence import NUM_DRAWS, Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.process import Reply, Worker, WorkerLost
from conformance.target import TargetDescription

CONFORMS, FINDING, DECLINED, INCONCLUSIVE = "conforms", "finding", "declined", "inconclusive"


class HarnessError(Exception):
    """The harness itself failed: nothing can be said about the target."""


@dataclass(frozen=True)
class CaseResult:
    """What one target did on one case. `shares` is by (check, tensor); `reason` says why declined or inconclusive."""

    case: Case
    status: str
    findings: tuple[Finding, ...] = ()
    shares: Mapping[tuple[str, str], float] = field(default_factory=dict)
    reason: str = ""


class Session:
    """Runs cases on one target. `check_names` are keys of `CHECKS`."""

    def __init__(self, spec: str, devices: Devices, check_names: tuple[str, ...] = tuple(CHECKS)) -> None:
        """Starts the worker.

        Raises:
            TargetError: the target does not load.
        """
        self._spec, self._devices, self._check_names = spec, devices, check_names
        self._workers: dict[bool, Worker] = {False: Worker(spec, devices)}
        self.description: TargetDescription = self._workers[False].description
        self.workers_lost = 0

    def run(self, case: Case, meanwhile: Callable[[TargetDescription, Case], None] | None = None) -> CaseResult:
        """Runs and judges one case; `meanwhile` is called while the worker computes."""
        if case.problem.num_devices > self._devices.count:
            reason = f"needs {case.problem.num_devices} devices, the mesh has {self._devices.count}"
            return CaseResult(case, DECLINED, reason=reason)
        reply = self._attempt(case, meanwhile)
        if not isinstance(reply, WorkerLost):
            return self._judged(case, reply)
        self.workers_lost += 1
        again = self._attempt(case, None)
        if isinstance(again, WorkerLost):
            finding = lost(self.description.name, format_case(case), again)
            return CaseResult(case, FINDING, (finding,), {("contract", CALL): 0.0})
        judged = self._judged(case, again)
        if judged.status == FINDING:
            return judged
        reason = f"the worker {reply.how} while {reply.phase}, and did not when the case was run again alone"
        return CaseResult(case, INCONCLUSIVE, shares=judged.shares, reason=reason)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _attempt(self, case: Case, meanwhile: Callable[[TargetDescription, Case], None] | None) -> Reply | WorkerLost:
        enable_x64 = case.problem.dtype == "float64"  # a process of its own: the flag changes what every program means
        worker = self._workers.get(enable_x64)
        if worker is None:
            worker = self._workers[enable_x64] = Worker(self._spec, self._devices, enable_x64=enable_x64)
        worker.send(format_case(case))
        if meanwhile is not None:
            meanwhile(self.description, case)
        reply = worker.wait()
        if isinstance(reply, WorkerLost):
            del self._workers[enable_x64]
        return reply

    def _judged(self, case: Case, reply: Reply) -> CaseResult:
        message, arrays = reply
        if "declined" in message:
            return CaseResult(case, DECLINED, reason=message["declined"])
        evidence = Evidence(self.description, case, message, arrays)
        _require_complete(evidence)
        shares: dict[tuple[str, str], float] = {}
        findings: list[Finding] = []
        for name in self._check_names:
            outcome = CHECKS[name].run(evidence)
            shares |= {(name, tensor): share for tensor, share in outcome.shares.items()}
            findings.extend(outcome.findings)
        return CaseResult(case, FINDING if findings else CONFORMS, tuple(findings), shares)


def expected_names(evidence: Evidence) -> set[str]:
    """The arrays that a target owes that neither raised nor broke its contract: silence must not pass for agreement."""
    problem = evidence.case.problem
    gradients = {"dquery", "dkey"}
    gradients |= set() if problem.shared_kv else {"dvalue"}
    gradients |= {"dsinks"} if problem.sinks else set()
    names: set[str] = set()
    for draw in range(NUM_DRAWS):
        for call in evidence.calls:
            outputs = {"out"} if call == "attention" else {"out", "lse"}
            names |= {f"{draw}/{call}/{tensor}" for tensor in outputs}
            if call == "attention" or evidence.target.lse_grad:
                names |= {f"{draw}/{call}/{tensor}" for tensor in gradients}
                names |= {f"{draw}/{call}/{tensor} of vjp" for tensor in outputs}
    return names


def _require_complete(evidence: Evidence) -> None:
    if "raised" in evidence.message or "broken" in evidence.message:
        return
    arrays: Mapping[str, np.ndarray] = evidence.arrays
    if missing := expected_names(evidence) ^ set(arrays):
        raise HarnessError(f"the worker's outputs are not the ones owed: {sorted(missing)} on {evidence.case_text}")
