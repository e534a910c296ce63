"""What the tests of the main job share: sessions that answer by a script.

May touch: conformance; JAX never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import lanes, runner
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.known_issues import KnownIssue
from conformance.problem import Case
from conformance.runner import Plan, Run, run
from conformance.session import CONFORMS, FINDING, CaseResult
from conformance.target import TargetDescription

Behaviour = Callable[[Case, "_Session"], CaseResult]


class _Session:
    """Stands in for `Session`, always ready: `behaves` answers each case; `ran` holds their texts.

    `closed` counts how often it was closed.
    """

    def __init__(self, name: str, behaves: Behaviour) -> None:
        self.description = TargetDescription(name, name)
        self.check_names = ("contract",)
        self.needs_quiet = False
        self.known_issues: tuple[KnownIssue, ...] = ()
        self.behaves = behaves
        self.workers_lost = 0
        self.ran: list[str] = []
        self.closed = 0
        self._case = Case()

    def start(self, case: Case) -> None:
        self._case = case

    def ready(self, seconds: float) -> bool:
        return True

    def judge(self) -> CaseResult:
        self.ran.append(format_case(self._case))
        return self.behaves(self._case, self)

    def run(self, case: Case) -> CaseResult:
        self.start(case)
        return self.judge()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, dict[str, _Session], list[str]]]:
    """Runs cases on named behaviours; gives the run, the sessions and the progress lines."""

    def begin(covering: tuple[Case, ...], further: tuple[Case, ...] = (), **options: Any) -> Any:
        behaviours = {name: options.pop(name) for name in list(options) if callable(options[name])}
        sessions: dict[str, _Session] = {}
        lines: list[str] = []

        def session(spec: str, devices: Devices, check_names: tuple[str, ...], known: Any) -> _Session:
            return sessions.setdefault(spec, _Session(spec, behaviours[spec]))

        monkeypatch.setattr(runner, "Session", session)
        monkeypatch.setattr(lanes, "answer_for", lambda *args: None)
        plan = Plan(tuple(behaviours), covering, further, Devices("cpu", 8), ("contract", "output"), **options)
        return run(plan, lines.append), sessions, lines

    return begin


@pytest.fixture
def scripted_session() -> type[_Session]:
    """The class of those sessions."""
    return _Session


@pytest.fixture
def six_cases() -> tuple[Case, ...]:
    """Cases that differ in their seeds, 0 to 5."""
    return tuple(parse_case(f"v=1 seq_len=32 sliding_window_size=9 sinks=true seed={seed}") for seed in range(6))


@pytest.fixture
def conforms() -> Behaviour:
    """Every case conforms."""
    return lambda case, session: CaseResult(case, CONFORMS)


@pytest.fixture
def found() -> Callable[..., CaseResult]:
    """From a case and signatures to its result: a finding for each."""

    def result(case: Case, *signatures: str, tensor: str = "out", check: str = "output") -> CaseResult:
        findings = tuple(
            Finding("target", check, tensor, signature, format_case(case), f"{tensor} {signature} in {case.seed}")
            for signature in signatures
        )
        return CaseResult(case, FINDING if findings else CONFORMS, findings)

    return result
