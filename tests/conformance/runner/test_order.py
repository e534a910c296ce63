"""The main job's order of things: which cases run, and what is counted. Sessions are scripted (conftest.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conformance import steering
from conformance.case_text import format_case
from conformance.devices import Devices
from conformance.problem import Case
from conformance.runner import Plan

Cases = tuple[Case, ...]


def test_every_target_runs_every_case_in_order(job: Any, conforms: Any, six_cases: Cases) -> None:
    state, sessions, lines = job(six_cases[:2], six_cases[2:4], first=conforms, second=conforms)
    expected = [format_case(case) for case in six_cases[:4]]
    for name, session in sessions.items():
        assert session.ran == expected, f"covering cases, then further ones, on {name}"
        assert session.closed == 1, f"the workers of {name} are ended"
    assert [len(target.results) for target in state.targets] == [4, 4], "all results are kept"
    assert lines == ["of 4 cases: first 4 conforms; second 4 conforms"], "plain progress"


@pytest.mark.parametrize("draws", [0, 2])
def test_what_hypothesis_drew_is_counted_and_told_apart_from_the_list(
    job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draws: int, conforms: Any, found: Any, six_cases: Cases
) -> None:
    class Scripted(steering.Steering):
        def run(self, first_seed: int) -> None:
            for session in self._sessions:
                for seed in range(draws):
                    self._note(session, found(six_cases[0].replace(seed=first_seed + seed), "drawn"))

    monkeypatch.setattr(steering, "Steering", Scripted)
    for name in ("STORAGE_DIRECTORY", "EXPERIMENTAL_OBSERVABILITY", "EXPERIMENTAL_OBSERVABILITY_NOCOVER"):
        monkeypatch.setenv(f"HYPOTHESIS_{name}", "")  # is then left as it is
    state, _, lines = job(
        six_cases[:1], a=conforms, database=tmp_path, seconds=0.0, steering_seed=7, shrink_findings=False
    )
    (target,) = state.targets
    assert (len(target.results), target.num_drawn, len(target.beyond_list)) == (1, draws, draws), "beside the list"
    assert [finding.signature for finding in target.smallest.values()] == ["drawn"] * min(draws, 1), "a kind is a kind"
    assert any(line.startswith(f"hypothesis drew {draws} cases") for line in lines), "and the run says how many"


def test_a_plan_is_plain_data(six_cases: Cases) -> None:
    plan = Plan(("m:t",), six_cases[:2], six_cases[2:3], Devices("cpu", 8), ("contract",))
    assert plan.cases == six_cases[:3], "covering cases first"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seconds = 1.0  # type: ignore[misc]  # that it cannot be assigned is the point
