"""The main job: every target on every case of the list, and for each kind of finding the smallest case that shows it.

May touch: sessions, the clock; never JAX. Tests: tests/conformance/runner/test_*.py.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from threadpoolctl import threadpool_limits

from conformance.aot import check as aot
from conformance.aot.topologies import DEFAULT_TOPOLOGY
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.events import EVENTS
from conformance.finding import Finding
from conformance.known_issues import KnownIssue, issues_of
from conformance.lanes import Lane, next_judged
from conformance.problem import Case
from conformance.session import FINDING, MAX_WORKERS_LOST, CaseResult, Session
from conformance.shrink import case_size, shrink
from conformance.target import TargetDescription
from conformance.watch import WITHOUT_END

SHRINK_EXECUTIONS = 40


@dataclass(frozen=True)
class Plan:
    """What to run: `covering` cases are never cut by `seconds`, `further` ones are.

    With a `database` (a directory of hypothesis's examples), hypothesis draws cases after the list, from
    `steering_seed` on, until `seconds` are over.
    """

    targets: tuple[str, ...]
    covering: tuple[Case, ...]
    further: tuple[Case, ...]
    devices: Devices
    check_names: tuple[str, ...]
    seconds: float | None = None
    shrink_findings: bool = True
    database: Path | None = None
    steering_seed: int = 0
    known_issues: tuple[KnownIssue, ...] = ()
    num_hosts: int | None = None
    """The processes that hold and judge shards, as on so many hosts; None: all is judged here."""
    compiled: tuple[Case, ...] = ()
    """The cases of the check `aot`, for DEFAULT_TOPOLOGY."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """The whole list, in order."""
        return self.covering + self.further


@dataclass
class TargetRun:
    """What one target did so far: `results` on the list's cases, `beyond_list` on others.

    Those are the cases of its known issues, and what hypothesis drew. `compiled` are those of the check `aot`, of which
    nothing was executed. `smallest` holds, for each kind of finding, its smallest case after shrinking.
    """

    description: TargetDescription
    results: list[CaseResult] = field(default_factory=list)
    smallest: dict[str, Finding] = field(default_factory=dict)
    stopped: str = ""
    beyond_list: list[CaseResult] = field(default_factory=list)
    num_drawn: int = 0
    """How many of those hypothesis drew."""
    compiled: list[CaseResult] = field(default_factory=list)

    @property
    def all_results(self) -> list[CaseResult]:
        """Those of the list, then the others."""
        return self.results + self.beyond_list


@dataclass
class Run:
    """The state of a run; it stays valid when the run is interrupted."""

    plan: Plan
    targets: list[TargetRun] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0


Progress = Callable[[str], None]


def run(plan: Plan, progress: Progress, state: Run | None = None) -> Run:
    """Runs the plan. An interrupt (Ctrl-C) ends it early with what was found so far.

    `state`, an empty `Run(plan)`, is filled while it runs and returned: for who needs what was found by then, at each
    line of progress and if it does not return.

    Raises:
        TargetError: a target does not load; nothing has run then.
        HarnessError: the harness failed on a case.
    """
    started_at = time.monotonic()
    state = Run(plan) if state is None else state
    sessions: list[Session] = []
    try:
        for spec in plan.targets:
            known = issues_of(spec, plan.known_issues)
            sessions.append(Session(spec, plan.devices, plan.check_names, known))
            state.targets.append(TargetRun(sessions[-1].description))
        # The oracle's products are small, and the workers need the cores: BLAS threads that wait cost tenfold.
        with threadpool_limits(1):
            _run_cases(state, sessions, progress, started_at)
            _run_known_issues(state, sessions, progress)
            _compile(state, progress)
            if plan.database is not None and plan.seconds is not None:
                _steer(state, sessions, progress, plan.database, started_at + plan.seconds)
            if plan.shrink_findings:
                _shrink_findings(state, sessions, progress)
    except KeyboardInterrupt:
        state.interrupted = True
        for target in state.targets:
            if target.all_results:
                _note_findings(target, target.all_results[-1], lambda line: None)
    finally:
        for session in sessions:
            session.close()
        state.seconds = time.monotonic() - started_at
    return state


def _run_cases(state: Run, sessions: Sequence[Session], progress: Progress, started_at: float) -> None:
    """Every case on every target, each target at its own pace: what one declines costs the others no time."""
    plan = state.plan
    lanes = [Lane(session, plan.cases) for session in sessions]
    targets = dict(zip(lanes, state.targets, strict=True))
    told_at = time.monotonic()
    time_is_up = False
    while (lane := next_judged(lanes)) is not None:
        target = targets[lane]
        target.results.append(lane.judge())
        _note_findings(target, target.results[-1], progress)
        if lane.session.workers_lost >= MAX_WORKERS_LOST:
            lane.end_at(0)
            target.stopped = f"its process was lost {lane.session.workers_lost} times"
            progress(f"{target.description.name}: {target.stopped}; its remaining cases are not tried")
        if not time_is_up and plan.seconds is not None and time.monotonic() - started_at > plan.seconds:
            time_is_up = True
            for other in lanes:
                other.end_at(len(plan.covering))
        if time.monotonic() - told_at > 10:
            told_at = time.monotonic()
            progress(f"of {len(plan.cases)} cases: {_counts(state)}")
    if time_is_up and any(len(target.results) < len(plan.cases) and not target.stopped for target in state.targets):
        progress("the time of --seconds is up")
    progress(f"of {len(plan.cases)} cases: {_counts(state)}")


def _run_known_issues(state: Run, sessions: Sequence[Session], progress: Progress) -> None:
    """Runs the case of each known issue: one that does not show it is a finding."""
    for target, session in zip(state.targets, sessions, strict=True):
        for issue in session.known_issues:
            if issue.check not in state.plan.check_names or target.stopped:
                continue
            result = session.run(parse_case(issue.case))
            if issue not in result.known:
                stale = issue.no_longer_fails(target.description.name)
                result = dataclasses.replace(result, status=FINDING, findings=(*result.findings, stale))
            target.beyond_list.append(result)
            _note_findings(target, result, progress)


def _compile(state: Run, progress: Progress) -> None:
    """The check `aot`: compiles its cases for every target."""
    for spec, target in zip(state.plan.targets, state.targets, strict=True):
        if state.plan.compiled:
            progress(f"{target.description.name}: compiling {len(state.plan.compiled)} programs for {DEFAULT_TOPOLOGY}")
            target.compiled = aot.results_of(spec, DEFAULT_TOPOLOGY, state.plan.compiled)
        for result in target.compiled:
            _note_findings(target, result, progress)


def _steer(state: Run, sessions: Sequence[Session], progress: Progress, database: Path, ends_at: float) -> None:
    """Lets hypothesis draw cases until the time is up."""
    # Read where hypothesis is imported: it writes what it ran beside its database, a line of JSON for each case.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(database))
    os.environ.setdefault("HYPOTHESIS_EXPERIMENTAL_OBSERVABILITY", "1")
    if sys.version_info < (3, 12):  # which of our own lines ran says nothing of the target, and costs much here
        os.environ.setdefault("HYPOTHESIS_EXPERIMENTAL_OBSERVABILITY_NOCOVER", "1")
    from conformance.steering import Steering

    targets = dict(zip(sessions, state.targets, strict=True))

    def note(session: Session, result: CaseResult) -> None:
        targets[session].beyond_list.append(result)
        targets[session].num_drawn += 1
        _note_findings(targets[session], result, progress)

    steering = Steering(sessions, database / "examples", state.plan.devices.count, ends_at, note)
    steering.run(state.plan.steering_seed)
    drawn = max((target.num_drawn for target in state.targets), default=0)
    progress(f"hypothesis drew {drawn} cases; {steering.num_luck} excesses did not show again on other data")
    if missed := sorted(set(EVENTS) - set(steering.events)):
        progress(f"events that none of them reached: {', '.join(missed)}")


def _note_findings(target: TargetRun, result: CaseResult, progress: Progress) -> None:
    """Keeps the smallest case of each kind of finding of a result, and tells of new kinds."""
    for finding in result.findings:
        if any(known.explains(finding) for known in target.smallest.values()):
            continue
        known = target.smallest.get(finding.id)
        if known is None or case_size(result.case) < case_size(parse_case(known.case)):
            # Kept before it is told: an interrupt may come with the line.
            target.smallest = {i: other for i, other in target.smallest.items() if not finding.explains(other)}
            target.smallest[finding.id] = finding
        if known is None:
            progress(f"{target.description.name}: {finding.reading}")


def _counts(state: Run) -> str:
    """Per target: how many cases ended how."""
    parts = []
    for target in state.targets:
        statuses = [result.status for result in target.results]
        counted = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
        parts.append(f"{target.description.name} {counted}")
    return "; ".join(parts)


def _shrink_findings(state: Run, sessions: Sequence[Session], progress: Progress) -> None:
    for target, session in zip(state.targets, sessions, strict=True):
        # A hang takes too long, and a full-size program runs on no CPU.
        findings = [
            finding
            for finding in target.smallest.values()
            if not finding.signature.startswith(WITHOUT_END) and finding.check != aot.NAME
        ]
        if not findings:
            continue
        progress(f"{target.description.name}: looking for the smallest case of {len(findings)} kinds of finding")
        findings_of = _remembered(session)
        for finding in findings:
            _shrink_one(target, finding, findings_of)
        for finding in findings:
            _replay_alone(target, target.smallest[finding.id], session)


def _remembered(session: Session) -> Callable[[Case], tuple[Finding, ...]]:
    """What the target does on a case, run once. After too many lost processes no further case is tried."""
    seen: dict[str, tuple[Finding, ...]] = {}
    lost_before = session.workers_lost

    def findings_of(case: Case) -> tuple[Finding, ...]:
        text = format_case(case)
        if text not in seen and session.workers_lost - lost_before < MAX_WORKERS_LOST:
            seen[text] = session.run(case).findings
        return seen.get(text, ())

    return findings_of


def _shrink_one(target: TargetRun, finding: Finding, findings_of: Callable[[Case], tuple[Finding, ...]]) -> None:
    """Puts the same kind of finding on the smallest case that the shrinker reaches in its place."""

    def shows(case: Case) -> bool:
        same = [candidate for candidate in findings_of(case) if candidate.id == finding.id]
        if same:
            target.smallest[finding.id] = same[0]
        return bool(same)

    shrink(parse_case(finding.case), shows, SHRINK_EXECUTIONS)


def _replay_alone(target: TargetRun, finding: Finding, session: Session) -> None:
    """Holds the promise that the case's text shows the finding again, in a process that has run nothing before it.

    A target that keeps something from one problem to the next may be wrong only then; the reading says so.
    """
    session.close()
    again = session.run(parse_case(finding.case)).findings
    if not any(other.id == finding.id or finding.explains(other) for other in again):
        reading = f"{finding.reading}; not in a fresh process, so it takes the cases that ran before"
        target.smallest[finding.id] = dataclasses.replace(finding, reading=reading)
