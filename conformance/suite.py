"""The suite as single questions, for pytest: does this check hold on the cases of this feature area of a target?

The cases of an area run once, whatever the number of checks that ask. May touch: sessions, the case list; never JAX,
never pytest. Tests: tests/conformance/test_suite.py.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from threadpoolctl import threadpool_limits

from conformance.areas import by_area
from conformance.case_list import case_list
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.known_issues import BUNDLED, issues_of, load_known_issues
from conformance.problem import Case
from conformance.runner import SHRINK_EXECUTIONS
from conformance.session import DECLINED, INCONCLUSIVE, CaseResult, Session
from conformance.shrink import case_size, shrink
from conformance.watch import WITHOUT_END

EVERYTHING = "everything"
"""The area of the one question that is about no area: that the target does not decline every case."""


class SuiteFailure(Exception):
    """A check found something; the message is for the target's author, and ends with the line that replays it."""


class NothingTried(Exception):
    """The check looked at nothing on these cases; the message says why."""


class Suite:
    """Asks a target; `tests` are the questions, as (check, area)."""

    def __init__(self, devices: Devices, profile: str = "quick", seed: int = 0, examples: int | None = None) -> None:
        self._devices = devices
        self._list = (profile, seed, examples, devices.count)
        self._sessions: dict[str, Session] = {}
        self._results: dict[tuple[str, str], tuple[CaseResult, ...]] = {}

    @cached_property
    def areas(self) -> dict[str, tuple[Case, ...]]:
        """The list of cases, cut into areas."""
        return by_area(case_list(*self._list))

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        """(check, area), area by area: neighbours share their cases' results. A check that has no case is left out."""
        pairs = [
            (name, area)
            for area, cases in self.areas.items()
            for name, check in CHECKS.items()
            if any(check.asks_about(case) for case in cases)
        ]
        return (("contract", EVERYTHING), *pairs)

    def hold(self, target: str, check: str, area: str) -> None:
        """Asks one question.

        Raises:
            SuiteFailure: the answer is no, or a worker was lost in a way that did not repeat.
            NothingTried: the target declined these cases, or the check has nothing to look at in them.
            TargetError: the target does not load.
        """
        if area == EVERYTHING:
            self._hold_that_something_is_tried(target)
            return
        results = self._results_of(target, area)
        findings = [finding for result in results for finding in result.findings if finding.check == check]
        if findings:
            raise SuiteFailure(self._told(target, check, findings))
        if check == "contract" and (lost := [result for result in results if result.status == INCONCLUSIVE]):
            raise SuiteFailure(f"inconclusive: {lost[0].reason}")
        if not CHECKS[check].claims_any(self._session(target).description):
            raise NothingTried("not claimed: the check holds a target to what it says of itself")
        if not any(looked_at == check for result in results for looked_at, _ in result.shares):
            raise NothingTried(_why_not(results))

    def close(self) -> None:
        """Ends the workers."""
        for session in self._sessions.values():
            session.close()

    def _hold_that_something_is_tried(self, target: str) -> None:
        reasons: Counter[str] = Counter()
        for area in self.areas:
            for result in self._results_of(target, area):
                if result.status != DECLINED:
                    return
                reasons[result.reason] += 1
        told = "; ".join(f"{reason} ({count} cases)" for reason, count in reasons.most_common(3))
        raise SuiteFailure(f"{target} declines every case, so nothing is known of it: {told}")

    def _results_of(self, target: str, area: str) -> tuple[CaseResult, ...]:
        if (target, area) not in self._results:
            session = self._session(target)
            with threadpool_limits(1):  # as in the main job: BLAS threads that wait cost tenfold beside busy workers
                self._results[target, area] = tuple(session.run(case) for case in self.areas[area])
        return self._results[target, area]

    def _session(self, target: str) -> Session:
        if target not in self._sessions:
            known = issues_of(target, load_known_issues(BUNDLED))
            self._sessions[target] = Session(target, self._devices, known_issues=known)
        return self._sessions[target]

    def _told(self, target: str, check: str, findings: list[Finding]) -> str:
        """One paragraph a kind of finding, at its smallest case; the first kind is shrunk."""
        smallest: dict[str, Finding] = {}
        for finding in sorted(findings, key=lambda finding: case_size(parse_case(finding.case))):
            smallest.setdefault(finding.id, finding)
        first, *others = smallest.values()
        told = [_reading(target, self._shrunk(target, first))]
        told += [_reading(target, finding) for finding in others]
        cases = len({finding.case for finding in findings})
        return "\n\n".join([f"{check}: {len(smallest)} kinds of finding in {cases} cases", *told])

    def _shrunk(self, target: str, finding: Finding) -> Finding:
        if finding.signature.startswith(WITHOUT_END):
            return finding
        session, found = self._session(target), [finding]

        def shows(case: Case) -> bool:
            same = [other for other in session.run(case).findings if other.id == finding.id]
            found.extend(same[:1])
            return bool(same)

        with threadpool_limits(1):
            shrink(parse_case(finding.case), shows, SHRINK_EXECUTIONS)
        return found[-1]


def _reading(target: str, finding: Finding) -> str:
    return f'{finding.reading}\n  halocheck replay "{finding.case}" {target}'


def _why_not(results: tuple[CaseResult, ...]) -> str:
    """Why a check looked at nothing."""
    reasons = Counter(result.reason for result in results if result.status == DECLINED)
    if sum(reasons.values()) == len(results):
        return "declined: " + "; ".join(reason for reason, _ in reasons.most_common(3))
    return "the check has nothing to look at in these cases"
