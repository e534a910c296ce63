"""Hypothesis at the wheel: cases drawn over the feature space and steered towards large shares, until the time is up.

Kinds of finding go into hypothesis's example database and are tried first by the next run; events count what was
reached. May touch: lanes and sessions, hypothesis; never JAX. Tests: tests/conformance/test_steering.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance.case_text import format_case
from conformance.events import events_of
from conformance.finding import Finding
from conformance.fuzz import cases, record_events
from conformance.lanes import Lane, next_judged
from conformance.problem import Case
from conformance.session import CONFORMS, MAX_WORKERS_LOST, CaseResult, Session

_CASES_A_BATCH = 60
# An excess found while steering may be luck in one element of millions: it counts if other data show it too.
_FRESH_DRAWS = 3
_OF_VALUES = ("output", "residuals", "gradients")

Note = Callable[[Session, CaseResult], None]


class _NewKind(Exception):
    """Raised inside hypothesis, so that it keeps the example; a subclass for each kind, so that it keeps each."""


class Steering:
    """One run: draws cases until `ends_at` (time.monotonic), runs each on every session, and notes the results."""

    def __init__(
        self, sessions: Sequence[Session], database: Path, num_devices: int, ends_at: float, note: Note
    ) -> None:
        """`database` is a directory; hypothesis reads and writes there."""
        self._sessions = sessions
        self._database = DirectoryBasedExampleDatabase(database)
        self._num_devices, self._ends_at, self._note = num_devices, ends_at, note
        self._known: set[str] = set()
        self._results: dict[str, list[tuple[Session, CaseResult]]] = {}
        self.events: Counter[str] = Counter()
        self.num_luck = 0
        """Excesses that no other data of the same program showed again."""

    def run(self, first_seed: int) -> None:
        """Tries what the database holds, then batches of drawn cases."""
        phases = (Phase.reuse, Phase.generate, Phase.target)
        self._batch(phases, first_seed)
        for number in itertools.count(1):
            if self._is_over():
                return
            self._batch(phases[1:], first_seed + number)

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def _batch(self, phases: tuple[Phase, ...], batch_seed: int) -> None:
        """Hypothesis runs a failing example twice and must see the same: `_known` changes between batches only."""
        found: set[str] = set()
        self._results.clear()

        @settings(
            max_examples=_CASES_A_BATCH,
            database=self._database,
            phases=phases,
            deadline=None,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
            print_blob=False,
        )
        @seed(batch_seed)  # below the settings: it would take the database away from them
        @given(cases(self._num_devices))
        def one(case: Case) -> None:
            if self._is_over() and format_case(case) not in self._results:
                return
            results = self._results_of(case)
            record_events(case)
            for session, result in results:
                for (check, tensor), share in result.shares.items():
                    if check in _OF_VALUES and math.isfinite(share):
                        target(share, label=f"{session.description.name} {check} {tensor}")
            for finding in (finding for _, result in results for finding in result.findings):
                if _kind(finding) not in self._known:
                    found.add(_kind(finding))
                    raise type(f"Kind_{finding.id}", (_NewKind,), {})(finding.reading)

        try:
            one()
        except (_NewKind, ExceptionGroup) as error:
            if not _all_new_kinds(error):
                raise
        self._known |= found

    def _results_of(self, case: Case) -> list[tuple[Session, CaseResult]]:
        """The result on every session that still runs; each case runs once."""
        text = format_case(case)
        if text not in self._results:
            lanes = [Lane(session, (case,)) for session in self._sessions if session.workers_lost < MAX_WORKERS_LOST]
            results = []
            while (lane := next_judged(lanes)) is not None:
                results.append((lane.session, lane.judge()))
            self._results[text] = [(session, self._confirmed(session, result)) for session, result in results]
            for session, result in self._results[text]:
                self._note(session, result)
            self.events.update(events_of(case))
        return self._results[text]

    def _confirmed(self, session: Session, result: CaseResult) -> CaseResult:
        """The result without those excesses that no fresh data of the same problem show again."""
        doubtful = {finding.id for finding in result.findings if finding.check in _OF_VALUES}
        if not doubtful:
            return result
        shown: set[str] = set()
        for offset in range(1, _FRESH_DRAWS + 1):
            if doubtful <= shown:
                break
            again = session.run(result.case.replace(seed=(result.case.seed + offset) % 2**32))
            shown |= {finding.id for finding in again.findings}
        luck = doubtful - shown
        self.num_luck += len(luck)
        findings = tuple(finding for finding in result.findings if finding.id not in luck)
        return dataclasses.replace(result, findings=findings, status=result.status if findings else CONFORMS)


def _kind(finding: Finding) -> str:
    return f"{finding.target} {finding.id}"


def _all_new_kinds(error: BaseException) -> bool:
    if isinstance(error, ExceptionGroup):
        return all(map(_all_new_kinds, error.exceptions))
    return isinstance(error, _NewKind)
