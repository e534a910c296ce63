"""The check `aot` of a run: what is compiled is judged, what is not tried is never a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from conformance import cli, runner
from conformance.aot import check as aot
from conformance.aot.job import MISSING_LIBTPU, Compiled
from conformance.aot.topologies import GIB
from conformance.case_text import format_case, parse_case
from conformance.finding import Finding
from conformance.report.terminal import replay_command
from conformance.report.verdict import exit_status, verdict_of
from conformance.runner import Plan, Run, run
from conformance.session import CONFORMS, DECLINED, FINDING

_HALO = "conformance.targets.bundled:halo"
_CASE = parse_case("v=1 seq_len=131072 sliding_window_size=1024 context_parallelism=8 dtype=bfloat16 seed=1")
_FACTS = {"temporary_bytes": 4 * GIB, "argument_bytes": 3 * GIB, "output_bytes": GIB}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts these answers in the compiler's place."""

    def answers(*compiled: Compiled) -> None:
        monkeypatch.setattr(aot, "has_libtpu", lambda: True)
        monkeypatch.setattr(aot, "compile_target", lambda spec, topology, cases: iter(compiled))

    return answers


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """What the command line ran."""
    seen: list[Run] = []

    def keep(plan: Plan, progress: Any, state: Run) -> Run:
        seen.append(run(plan, progress, state))
        return seen[-1]

    monkeypatch.setattr(cli, "run", keep)
    return seen


def _cells(state: Run) -> dict[tuple[str, str], tuple[str, int]]:
    (target,) = state.targets
    return {(cell.check, cell.tensor): (cell.status, cell.cases) for cell in verdict_of(target, state).cells}


def test_what_compiles_conforms_with_its_share_of_memory_and_of_the_plan(compiler: Callable[..., None]) -> None:
    compiler(Compiled("halo", "v6e:2x4", _CASE, _FACTS, shares={"forward": 1.0, "backward": 0.5}))
    (result,) = aot.results_of(_HALO, "v6e:2x4", (_CASE,))
    assert result.status == CONFORMS, "no finding"
    assert result.shares == {("aot", "program"): 8 / 32, ("aot", "forward"): 1.0, ("aot", "backward"): 0.5}


def test_a_program_that_compiles_and_sends_nobody_knows_how_much_does_not_conform(
    compiler: Callable[..., None], runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(Compiled("halo", "v6e:2x4", _CASE, _FACTS, cannot_ask="kernels of its own send"))
    assert cli.main(["run", _HALO, "--checks", "aot"]) == 4, "what it claims was not looked at"
    (state,) = runs
    assert _cells(state)["aot", "forward"] == (DECLINED, 0), "not conforms, nor not claimed"
    assert "aot (not asked in 1 of 1 cases): kernels of its own send" in capsys.readouterr().out, "and why"


def test_its_findings_are_of_another_program_than_those_of_the_check_collectives(
    compiler: Callable[..., None], finding: Callable[..., Finding]
) -> None:
    found = finding(check="collectives", tensor="forward", signature="uses all-gather", case=format_case(_CASE))
    compiler(Compiled("halo", "v6e:2x4", _CASE, _FACTS, (found,), {"forward": 2.0}))
    (result,) = aot.results_of(_HALO, "v6e:2x4", (_CASE,))
    assert (result.status, result.findings) == (FINDING, (dataclasses.replace(found, check="aot"),))
    assert replay_command(result.findings[0], "m:t").endswith(" m:t --checks aot"), "compiled again, never executed"


def test_asked_alone_without_libtpu_it_is_declined_and_the_run_fails(
    monkeypatch: pytest.MonkeyPatch, runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "has_libtpu", lambda: False)
    assert cli.main(["run", _HALO, "--checks", "aot"]) == 4, "nothing was tried"
    (state,) = runs
    assert {result.status for result in state.targets[0].compiled} == {DECLINED}, "every one"
    told = capsys.readouterr().out
    assert f"halo declined 4: {MISSING_LIBTPU}" in told, "the line that says how to install it"
    assert "halo: aot was asked for, and nothing was compiled" in told, "and what that means"


def test_beside_other_checks_what_was_not_compiled_keeps_the_verdict_open(
    monkeypatch: pytest.MonkeyPatch, runs: list[Run]
) -> None:
    monkeypatch.setattr(aot, "has_libtpu", lambda: False)
    case = "v=1 seq_len=16 sliding_window_size=3 seed=1"
    assert cli.main(["replay", case, _HALO, "--checks", "output,aot"]) == 4, "the case conforms, but aot is open"
    cells = _cells(runs[0])
    assert cells["output", "out"] == (CONFORMS, 1), "the other check is answered"
    assert cells["aot", "program"] == (DECLINED, 0), "this one is not"


def test_asked_alone_nothing_is_executed_and_what_compiles_conforms(
    compiler: Callable[..., None], runs: list[Run]
) -> None:
    compiler(Compiled("halo", "v6e:2x4", _CASE, _FACTS, shares={"forward": 1.0, "backward": 1.0}))
    assert cli.main(["run", _HALO, "--checks", "aot"]) == 0, "it compiles, and sends what it may"
    (state,) = runs
    assert state.plan.cases == (), "no case of the list"
    assert _cells(state)["aot", "backward"] == (CONFORMS, 1), "in the verdict"


def test_a_finding_of_it_alone_fails_the_run_and_is_never_shrunk(
    compiler: Callable[..., None],
    finding: Callable[..., Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = finding(check="aot", tensor="program", signature="does not compile", case=format_case(_CASE))
    compiler(Compiled("halo", "v6e:2x4", _CASE, {}, (found,)))
    monkeypatch.setattr(runner, "shrink", lambda *args: pytest.fail("a full-size program runs on no CPU"))
    plan = Plan((_HALO,), (), (), cli._devices("cpu:2"), ("contract",), compiled=(_CASE,))
    state = run(plan, lambda line: None)
    assert exit_status(state) == 1, "a finding"
    assert list(state.targets[0].smallest.values()) == [found], "as it was found"
