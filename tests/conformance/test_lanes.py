"""Who may start and who is judged: several targets, each at its own pace. Sessions are scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import lanes
from conformance.answers import CASES_CACHED
from conformance.case_text import parse_case
from conformance.lanes import Lane, next_judged
from conformance.problem import Case
from conformance.session import CONFORMS, CaseResult
from conformance.target import TargetDescription

_CASES = tuple(parse_case(f"v=1 seq_len=8 sliding_window_size=3 seed={seed}") for seed in range(12))


class _Session:
    """Stands in for `Session`: a case is ready at the `looks`-th look, and lost where its seed is in `lost`."""

    def __init__(self, name: str, diary: list[str], looks: int = 1, lost: tuple[int, ...] = ()) -> None:
        self.description = TargetDescription(name, name)
        self.check_names = ("contract",)
        self.diary, self.looks, self.lost = diary, looks, lost
        self.left = 0
        self.case = Case()

    def start(self, case: Case) -> None:
        self.case, self.left = case, self.looks
        self.diary.append(f"{self.description.name} starts {case.seed}")

    def ready(self, seconds: float) -> bool:
        self.left -= 1
        return self.left <= 0

    @property
    def needs_quiet(self) -> bool:
        return self.case.seed in self.lost

    def judge(self) -> CaseResult:
        self.diary.append(f"{self.description.name} ends {self.case.seed}")
        return CaseResult(self.case, CONFORMS)


Begin = Callable[..., tuple[list[Lane], list[str]]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Lanes over sessions given as name = keywords of _Session; and the diary of all of them, answers included."""

    def make(cases: tuple[Case, ...] = _CASES, cores: int = 2, **sessions: dict[str, Any]) -> Any:
        diary: list[str] = []
        monkeypatch.setattr(lanes.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(
            lanes, "answer_for", lambda target, case, draw, call: diary.append(f"answer {case.seed} {draw} {call}")
        )
        return [Lane(_Session(name, diary, **options), cases) for name, options in sessions.items()], diary  # type: ignore[arg-type]  # it stands in for a Session

    return make


def _run(running: list[Lane]) -> int:
    """Judges every case; the most lanes that ran at a time."""
    most = 0
    while (lane := next_judged(running)) is not None:
        most = max(most, sum(one.is_running for one in running))
        lane.judge()
    return most


def test_every_lane_runs_every_case_in_order(begin: Begin) -> None:
    running, diary = begin(a={}, b={"looks": 7})
    _run(running)
    for name in "ab":
        starts = [line for line in diary if line.startswith(f"{name} starts")]
        assert starts == [f"{name} starts {seed}" for seed in range(12)], name


def test_a_quick_lane_runs_ahead_as_far_as_the_answers_are_kept(begin: Begin) -> None:
    running, _ = begin(quick={}, slow={"looks": 1000})
    for _ in range(CASES_CACHED):
        lane = next_judged(running)
        assert lane is running[0], "the slow lane does not hold it up"
        lane.judge()
    assert [lane.num_done for lane in running] == [CASES_CACHED, 0], "while the slow one is at its first case"
    lane = next_judged(running)
    assert lane is running[1], "no further: the answers that the two share would be made twice"


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (2, 2), (8, 3)])
def test_no_more_lanes_run_at_a_time_than_there_are_cores(begin: Begin, cores: int, most: int) -> None:
    running, _ = begin(cores=cores, a={"looks": 3}, b={"looks": 3}, c={"looks": 3})
    assert _run(running) == most, "three lanes"


def test_the_lane_that_is_furthest_behind_starts_first(begin: Begin) -> None:
    running, diary = begin(_CASES[:2], cores=1, a={}, b={}, c={})
    _run(running)
    starts = [line for line in diary if " starts " in line]
    assert starts == ["a starts 0", "b starts 0", "c starts 0", "a starts 1", "b starts 1", "c starts 1"], "fair"


def test_a_case_to_be_run_again_alone_waits_until_the_others_are_idle(begin: Begin) -> None:
    running, diary = begin(lost={"lost": (1,)}, other={"looks": 5})
    _run(running)
    at = diary.index("lost ends 1")
    started = sum(" starts " in line for line in diary[:at])
    ended = sum(" ends " in line for line in diary[:at])
    assert started - ended == 1, "of what had started, only the lost case itself was not over"
    assert diary.count("lost ends 1") == 1, "once"
    assert [lane.num_done for lane in running] == [12, 12], "and the run went on"


def test_answers_are_computed_while_the_worker_computes_and_not_for_what_it_declines_at_once(begin: Begin) -> None:
    running, diary = begin(_CASES[:1], declines={}, computes={"looks": 50})
    _run(running)
    assert diary == [
        "declines starts 0",
        "declines ends 0",
        "computes starts 0",
        "answer 0 0 attention",
        "answer 0 1 attention",
        "computes ends 0",
    ], "each draw once"


def test_a_lane_that_is_ended_finishes_the_case_that_runs_and_starts_no_other(begin: Begin) -> None:
    running, diary = begin(a={"looks": 3}, b={"looks": 9})
    first = next_judged(running)
    assert first is running[0], "the quick one"
    first.judge()
    for lane in running:
        lane.end_at(0)
    _run(running)
    assert [line for line in diary if "ends" in line] == ["a ends 0", "b ends 0"], "b's first case had started"
