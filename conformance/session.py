"""One target under test: its worker, replaced when lost, and the judgement of one case at a time.

A lost worker (crash or hang) is a finding only if it happens again, alone, in a fresh process; once a target has been
seen to be lost twice in the same way, the same way again needs no second look.
May touch: worker processes, checks; never JAX. Tests: tests/conformance/test_session.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.checks.contract import SPOILS_PROCESS, lost, meddling
from conformance.checks.contract import TENSOR as CALL
from conformance.checks.outcome import Detail
from conformance.designated import asks_fresh_process
from conformance.devices import Devices
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.inputs import NUM_DRAWS
from conformance.known_issues import KnownIssue
from conformance.problem import Case
from conformance.process import Reply, Worker, WorkerLost
from conformance.target import TargetDescription, TargetError
from conformance.variants import variants_of

# A target that keeps losing its process costs half a minute a case: after so many losses the rest is not tried.
MAX_WORKERS_LOST = 4
_POLL_SECONDS = 0.5
CONFORMS, FINDING, DECLINED, INCONCLUSIVE = "conforms", "finding", "declined", "inconclusive"


class HarnessError(Exception):
    """The harness itself failed: nothing can be said about the target."""


@dataclass(frozen=True)
class CaseResult:
    """What one target did on one case. `shares` is by (check, tensor); `reason` says why declined or inconclusive.

    `known` are issues that are known of the target and that the case showed; they are not among the findings.
    `no_question` and `cannot_ask`: the reasons of checks that had nothing to ask, or could not, by the check's name.
    `withheld`: why the oracle has no answer, by (check, tensor).
    """

    case: Case
    status: str
    findings: tuple[Finding, ...] = ()
    shares: Mapping[tuple[str, str], float] = field(default_factory=dict)
    reason: str = ""
    details: tuple[Detail, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    known: tuple[KnownIssue, ...] = ()
    no_question: Mapping[str, str] = field(default_factory=dict)
    cannot_ask: Mapping[str, str] = field(default_factory=dict)
    withheld: Mapping[tuple[str, str], str] = field(default_factory=dict)


class Session:
    """Runs cases on one target. `check_names` are keys of `CHECKS`."""

    def __init__(
        self,
        spec: str,
        devices: Devices,
        check_names: tuple[str, ...] = tuple(CHECKS),
        known_issues: tuple[KnownIssue, ...] = (),
    ) -> None:
        """Starts the worker. `known_issues` are those of this target.

        Raises:
            TargetError: the target does not load.
            ValueError: the contract is not among the checks: a target that raises must not conform unasked.
        """
        if "contract" not in check_names:
            raise ValueError(f"check_names must hold 'contract', got {check_names}")
        self._spec, self._devices, self.check_names = spec, devices, check_names
        self._workers: dict[bool, Worker] = {False: Worker(spec, devices)}
        self.description: TargetDescription = self._workers[False].description
        self.workers_lost = 0
        self.known_issues = known_issues
        self._confirmed: set[tuple[str, str]] = set()
        self._case = Case()
        self._reply: Reply | WorkerLost | None = None
        self._refusal: str | None = None
        self.evidence: Evidence | None = None
        """What the last case left to be judged: None where it was declined or its worker was lost."""

    def load(self, spec: str) -> None:
        """Goes on with another target in the same workers, without starting them anew.

        Raises:
            TargetError: the target does not load.
        """
        self._spec, self.workers_lost = spec, 0
        self._confirmed.clear()
        if not self._workers:
            self._workers[False] = Worker(spec, self._devices)
        for worker in self._workers.values():
            self.description = worker.load(spec)

    def run(self, case: Case) -> CaseResult:
        """Runs and judges one case."""
        self.start(case)
        while not self.ready(_POLL_SECONDS):
            pass
        return self.judge()

    def start(self, case: Case) -> None:
        """Has the worker begin with a case; once it is `ready`, `judge` follows. Other sessions may start meanwhile."""
        self._case, self._reply, self._refusal = case, None, self._refused(case)
        if self._refusal is None:
            self._reply = self._send(case)

    def ready(self, seconds: float) -> bool:
        """Whether the worker has answered, or is known to be lost, within `seconds`."""
        if self._reply is None and self._refusal is None:
            self._reply = self._poll(self._case, seconds)
        return self._reply is not None or self._refusal is not None

    @property
    def needs_quiet(self) -> bool:
        """Whether `judge` will run the case once more, alone: no other session may be running then."""
        return isinstance(self._reply, WorkerLost) and not self._is_confirmed(self._reply)

    def judge(self) -> CaseResult:
        """The result of the case, for a session that is ready; what is known of the target is no finding."""
        return self._without_known(self._judge())

    def _judge(self) -> CaseResult:
        case, reply = self._case, self._reply
        self.evidence = None
        if self._refusal is not None or reply is None:
            return CaseResult(case, DECLINED, reason=self._refusal or "not started")
        if not isinstance(reply, WorkerLost):
            return self._judged(case, reply)
        self.workers_lost += 1
        again = reply if self._is_confirmed(reply) else self._run_again(case)
        if isinstance(again, WorkerLost):
            self._confirmed.add((again.how, again.phase))
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

    def _refused(self, case: Case) -> str | None:
        """Why the harness does not put this case to the target."""
        if case.problem.num_devices > self._devices.count:
            return f"needs {case.problem.num_devices} devices, the mesh has {self._devices.count}"
        if case.problem.dtype == "float64" and self._devices.platform == "tpu":
            return "float64 is asked on simulated devices: a TPU's matrix units do not compute in it"
        if case.problem.dtype == "float64" and not self.description.exact:
            return "float64 is for targets that say `exact`: that they compute in float64 where the inputs are"
        return None

    def _send(self, case: Case) -> WorkerLost | None:
        """Has a worker begin with the case; a target that loaded once and then does not has lost its worker."""
        enable_x64 = _needs_x64(case)
        if enable_x64 in self._workers and "invariance" in self._asked(case) and asks_fresh_process(case):
            self._workers.pop(enable_x64).close()
        if enable_x64 not in self._workers:
            try:
                self._workers[enable_x64] = Worker(self._spec, self._devices, enable_x64=enable_x64)
            except TargetError as error:
                return WorkerLost("fails", "loading the target again", error.report)
        self._workers[enable_x64].send(format_case(case), self._asked(case))
        return None

    def _poll(self, case: Case, seconds: float) -> Reply | WorkerLost | None:
        reply = self._workers[_needs_x64(case)].poll(seconds)
        if isinstance(reply, WorkerLost):
            del self._workers[_needs_x64(case)]
        return reply

    def _run_again(self, case: Case) -> Reply | WorkerLost:
        reply = self._send(case)
        while reply is None:
            reply = self._poll(case, _POLL_SECONDS)
        return reply

    def _is_confirmed(self, loss: WorkerLost) -> bool:
        return (loss.how, loss.phase) in self._confirmed

    def _judged(self, case: Case, reply: Reply) -> CaseResult:
        message, arrays = reply
        if "harness_failed" in message:
            raise HarnessError(f"the worker failed on {format_case(case)}\n{message['harness_failed']}")
        if message.keys() & SPOILS_PROCESS:
            self._workers.pop(_needs_x64(case)).close()  # the next case must not find what this one has left
        if "declined" in message:
            meddled = meddling(self.description.name, format_case(case), message)
            return CaseResult(case, FINDING if meddled else DECLINED, meddled, reason=message["declined"])
        description = self.description.of_problem(message.get("uses_tpu_precision", True))
        evidence = Evidence(description, case, message, arrays, variants_of(case, self._asked(case)))
        self.evidence = evidence
        _require_complete(evidence)
        shares: dict[tuple[str, str], float] = {}
        findings: list[Finding] = []
        details: list[Detail] = []
        figures: dict[str, float] = {}
        no_question: dict[str, str] = {}
        cannot_ask: dict[str, str] = {}
        withheld: dict[tuple[str, str], str] = {}
        for name in self._asked(case):
            outcome = CHECKS[name].run(evidence)
            no_question |= {name: outcome.no_question} if outcome.no_question else {}
            cannot_ask |= {name: outcome.cannot_ask} if outcome.cannot_ask else {}
            withheld |= {(name, tensor): why for tensor, why in outcome.withheld.items()}
            shares |= {(name, tensor): share for tensor, share in outcome.shares.items()}
            findings.extend(outcome.findings)
            details.extend(outcome.details)
            figures |= outcome.figures
        status = FINDING if findings else CONFORMS
        result = CaseResult(case, status, tuple(findings), shares, details=tuple(details), figures=figures)
        return dataclasses.replace(result, no_question=no_question, cannot_ask=cannot_ask, withheld=withheld)

    def _without_known(self, result: CaseResult) -> CaseResult:
        known = tuple(issue for issue in self.known_issues if any(map(issue.explains, result.findings)))
        if not known:
            return result
        left = tuple(finding for finding in result.findings if not any(issue.explains(finding) for issue in known))
        return dataclasses.replace(result, status=FINDING if left else CONFORMS, findings=left, known=known)

    def _asked(self, case: Case) -> tuple[str, ...]:
        """The checks that have a question about this case."""
        return tuple(name for name in self.check_names if CHECKS[name].asks_about(case))


def _needs_x64(case: Case) -> bool:
    """float64 cases have a process of their own: the flag changes what every program means."""
    return case.problem.dtype == "float64"


def expected_names(evidence: Evidence) -> set[str]:
    """The arrays that a target owes that neither raised nor broke its contract: silence must not pass for agreement."""
    problem = evidence.case.problem
    gradients = {"dquery", "dkey"}
    gradients |= set() if problem.shared_kv else {"dvalue"}
    gradients |= {"dsinks"} if problem.sinks else set()
    names: set[str] = set()
    for data in (*range(NUM_DRAWS), *evidence.variants):
        for call in evidence.calls:
            outputs = {"out"} if call == "attention" else {"out", "lse"}
            names |= {f"{data}/{call}/{tensor}" for tensor in outputs}
            if call == "attention" or evidence.target.lse_grad:
                names |= {f"{data}/{call}/{tensor}" for tensor in gradients}
                names |= {f"{data}/{call}/{tensor} of vjp" for tensor in outputs}
    return names


def _require_complete(evidence: Evidence) -> None:
    if "raised" in evidence.message or "broken" in evidence.message:
        return
    arrays: Mapping[str, np.ndarray] = evidence.arrays
    # Those of further programs are asked for by the checks remat, invariance and races themselves.
    of_the_case = {name for name in arrays if not name.startswith(("remat/", "other_", "alone/", "races "))}
    if missing := expected_names(evidence) ^ of_the_case:
        raise HarnessError(f"the worker's outputs are not the ones owed: {sorted(missing)} on {evidence.case_text}")
