"""`halocheck selftest`: every fault of the catalogue against the checks, and the correct targets beside them.

A fault is tried on cases of the frozen list that it says anything about, small ones first. It *bites* where it differs
from its clean twin by more than rounding; it is *seen* where a check has a finding. Knows no check by name.
May touch: sessions, threads, the catalogue (which imports JAX, and runs nothing of it here).
Tests: tests/conformance/test_selftest.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

from threadpoolctl import threadpool_limits

from conformance.case_list import list_hash
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.designated import asks_programs
from conformance.devices import Devices
from conformance.difference import differs
from conformance.evidence import Evidence
from conformance.faults import CLEAN, Fault, Planted
from conformance.finding import Finding
from conformance.problem import Case
from conformance.session import DECLINED, INCONCLUSIVE, CaseResult, Session
from conformance.targets import bundled

MAX_PROGRAMS = 15
"""Cases that a fault is tried on at most."""
# Cases that each correct target is held to without the wrapping of the faults; with it, it is held to every case.
_CASES_OF_CORRECT_TARGETS = 8
_WORKERS = 2
_SMALL = 2048

STRATEGIES = ("halo", "all_gather", "ring", "ulysses", "usp")


@dataclass(frozen=True)
class Trial:
    """What became of one fault.

    drawn: cases of the list that it says anything about. programs: how many of them were run; on the last of them it
    was seen, if it was. bites: on how many it differs from its twin. seen: the checks that had a finding. inconclusive:
    cases whose worker was lost once and not again.
    """

    fault: Fault
    drawn: int
    programs: int = 0
    bites: int = 0
    seen: tuple[str, ...] = ()
    first_finding: Finding | None = None
    inconclusive: int = 0

    @property
    def verdict(self) -> str:
        """What the trial says: a check that is blind, or a list of cases that has a gap, are told apart."""
        if self.seen:
            return "seen"
        return "bites, unseen" if self.bites else "never bites"


@dataclass
class Correct:
    """A correct target: on how many cases it was tried, and what the checks had to say, which must be nothing."""

    name: str
    programs: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Selftest:
    """The state of a selftest; it stays valid when it is interrupted."""

    list_hash: str
    num_cases: int
    check_names: tuple[str, ...]
    num_faults: int
    trials: list[Trial] = field(default_factory=list)
    correct: dict[str, Correct] = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def passes(self) -> bool:
        """Every fault was tried and seen, and no correct target had a finding; and something was tried at all."""
        all_seen = all(trial.verdict == "seen" for trial in self.trials)
        no_alarm = all(target.programs > 0 and not target.findings for target in self.correct.values())
        return bool(self.trials) and len(self.trials) == self.num_faults and all_seen and no_alarm


Progress = Callable[[str], None]


def selftest(
    faults: Sequence[Fault],
    cases: Sequence[Case],
    devices: Devices,
    check_names: tuple[str, ...],
    progress: Progress,
) -> Selftest:
    """Tries the faults and the correct targets, two at a time. An interrupt ends it early with what was found so far.

    Raises:
        HarnessError: a worker failed for a reason of our own.
    """
    started_at = time.monotonic()
    state = Selftest(list_hash(cases), len(cases), check_names, len(faults))
    ordered = in_order(cases)
    bench = _Bench(devices, check_names, state)
    try:
        # The oracle's products are small, and the workers need the cores: BLAS threads that wait cost tenfold.
        with threadpool_limits(1), ThreadPoolExecutor(_WORKERS) as pool:
            tasks = [pool.submit(bench.try_fault, fault, ordered) for fault in faults]
            tasks += [pool.submit(bench.try_correct, strategy, ordered) for strategy in STRATEGIES]
            try:
                for number, task in enumerate(as_completed(tasks), 1):
                    progress(f"{number} of {len(tasks)}: {task.result()}")
            except BaseException:  # Ctrl-C included: what has not begun must not begin
                pool.shutdown(wait=False, cancel_futures=True)
                bench.close()
                raise
    except KeyboardInterrupt:
        state.interrupted = True
    finally:
        bench.close()
        state.trials.sort(key=lambda trial: [fault.name for fault in faults].index(trial.fault.name))
        state.seconds = time.monotonic() - started_at
    return state


def in_order(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Small programs first, otherwise mixed by a hash of the text."""
    return tuple(sorted(cases, key=_order))


def spread(cases: Sequence[Case], check_names: Sequence[str], at_most: int) -> list[Case]:
    """The first cases, each the first one of the question that has been asked least: none waits for ever.

    A check that is asked on few cases only would otherwise be asked on none of the few that a fault is tried on; so
    would the part of invariance that calls other problems.
    """
    questions = {name: CHECKS[name].asks_about for name in check_names} | {"other problems": asks_programs}
    left = [(case, frozenset(name for name, asks in questions.items() if asks(case))) for case in cases]
    asked = dict.fromkeys(questions, 0)
    taken: list[Case] = []
    while left and len(taken) < at_most:
        wanted = sorted(questions, key=lambda name: asked[name])
        case, asking = next((one for name in wanted for one in left if name in one[1]), left[0])
        left.remove((case, asking))
        taken.append(case)
        for name in asking:
            asked[name] += 1
    return taken


def _order(case: Case) -> tuple[int, str]:
    problem = case.problem
    pairs = problem.batch * problem.num_query_heads * problem.seq_len * max(problem.seq_len, problem.head_dim)
    size = max(0, math.ceil(math.log2(pairs / _SMALL)))
    return size // 4, hashlib.sha256(format_case(case).encode()).hexdigest()


@dataclass(frozen=True)
class _Look:
    """A fault on one case, kept until its twin has been run on it."""

    case: Case
    has_findings: bool
    evidence: Evidence | None


class _Bench:
    """The workers and what they share: the clean twins' evidence, by strategy and case."""

    def __init__(self, devices: Devices, check_names: tuple[str, ...], state: Selftest) -> None:
        self._devices, self._check_names, self._state = devices, check_names, state
        self._idle: queue.SimpleQueue[Session] = queue.SimpleQueue()
        self._sessions: list[Session] = []
        self._twins: dict[tuple[str, str], Evidence | None] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the workers."""
        for session in self._sessions:
            session.close()

    def try_correct(self, strategy: str, cases: Sequence[Case]) -> str:
        """The bundled target itself, without any wrapping."""
        supported = [case for case in cases if getattr(bundled, strategy).supports(case.problem) is None]
        if not supported:
            return f"{strategy} as it is: no case of the list is for it"
        with self._session(f"conformance.targets.bundled:{strategy}") as session:
            for case in spread(supported, self._check_names, _CASES_OF_CORRECT_TARGETS):
                self._note_correct(strategy, session.run(case))
        return f"{strategy} as it is: {len(self._state.correct[strategy].findings)} findings"

    def try_fault(self, fault: Fault, cases: Sequence[Case]) -> str:
        """The fault on its cases until a check sees it, then its clean twin on the same ones."""
        drawn = [case for case in cases if Planted(fault, clean=False).supports(case.problem) is None]
        trial = Trial(fault, len(drawn))
        looks: list[_Look] = []
        with self._session(f"conformance.faults:{fault.name}") as session:
            for case in spread(drawn, self._check_names, MAX_PROGRAMS):
                if asks_programs(case):
                    session.close()  # what earlier cases left to be kept may suit all of its problems by chance
                result = session.run(case)
                looks.append(_Look(case, bool(result.findings), session.evidence))
                trial = _noted(trial, result)
                if trial.seen:
                    break
            bites = sum(_bites(look, self._twin(fault, look.case, session)) for look in looks)
        trial = dataclasses.replace(trial, bites=bites)
        with self._lock:
            self._state.trials.append(trial)
        return f"{fault.name}: {trial.verdict} {', '.join(trial.seen)}"

    def _twin(self, fault: Fault, case: Case, session: Session) -> Evidence | None:
        """What the strategy gives in the same wrapping with nothing planted: the same for all faults of a strategy."""
        key = (fault.planted_in, format_case(case))
        if key not in self._twins:
            twin = f"conformance.faults:{fault.name}{CLEAN}"
            if session.description.spec != twin:
                session.load(twin)
            self._note_correct(f"{fault.planted_in}{CLEAN}", session.run(case))
            self._twins[key] = session.evidence
        return self._twins[key]

    def _note_correct(self, name: str, result: CaseResult) -> None:
        with self._lock:
            target = self._state.correct.setdefault(name, Correct(name))
            target.programs += result.status != DECLINED
            target.findings.extend(result.findings)

    @contextmanager
    def _session(self, spec: str) -> Iterator[Session]:
        """A session with the target loaded: one that is idle, or a new one."""
        try:
            session = self._idle.get_nowait()
            session.load(spec)
        except queue.Empty:
            session = Session(spec, self._devices, self._check_names)
            self._sessions.append(session)
        yield session
        self._idle.put(session)


def _noted(trial: Trial, result: CaseResult) -> Trial:
    """The trial after one more case."""
    return dataclasses.replace(
        trial,
        programs=trial.programs + 1,
        seen=tuple(dict.fromkeys(finding.check for finding in result.findings)),
        first_finding=result.findings[0] if result.findings else None,
        inconclusive=trial.inconclusive + (result.status == INCONCLUSIVE),
    )


def _bites(look: _Look, twin: Evidence | None) -> bool:
    """A worker that is lost leaves no evidence: it differs from a twin that answers if that is a finding."""
    if twin is None:
        return False
    return look.has_findings if look.evidence is None else differs(look.evidence, twin)
