"""The command line: what is asked for is what runs, bad words are refused by name, and exit statuses mean one thing."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import cli, telling
from conformance.case_list import case_list, list_hash
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, FINDING, CaseResult, HarnessError
from conformance.target import TargetDescription, TargetError

_list = functools.cache(case_list)
_SHARES = {
    ("contract", "call"): 0.0,
    ("output", "out"): 0.5,
    **{(check, "out"): 0.0 for check in ("visibility", "invariance")},
    **{
        (check, name): 0.5
        for check in ("gradients", "visibility", "invariance")
        for name in ("dquery", "dkey", "dvalue")
    },
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that commands would run; every case of them conforms."""
    seen: list[Plan] = []

    def conform(plan: Plan, progress: Callable[[str], None], state: Run) -> Run:
        seen.append(plan)
        progress("progress \x1b[31m")
        results = [CaseResult(case, CONFORMS, shares=_SHARES) for case in plan.cases]
        targets = [TargetRun(TargetDescription(spec, spec), list(results)) for spec in plan.targets]
        state.targets = targets
        return state

    monkeypatch.setattr(cli, "run", conform)
    monkeypatch.setattr(cli, "case_list", _list)
    return seen


def _exit_status(*arguments: str) -> int:
    """Of the command, whether it returns it or argparse raises it."""
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_command_line_imports_neither_jax_nor_a_target() -> None:
    program = "import sys, conformance.cli; print({'jax', 'jaxlib', 'impl'} & set(sys.modules) or 'none')"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "none", "nothing that takes seconds"


def test_run_without_a_target_checks_the_bundled_halo_and_all_gather(plans: list[Plan]) -> None:
    _exit_status("run")
    (plan,) = plans
    assert plan.targets == ("conformance.targets.bundled:halo", "conformance.targets.bundled:all_gather"), "both"
    assert plan.cases == _list("quick", 0, None, 16), "the quick list of 16 devices"
    assert plan.covering == _list("quick", 0, 0, 16), "the covering list and the models are never cut"
    assert plan.check_names == tuple(CHECKS), "every check"
    assert (plan.devices, plan.seconds, plan.shrink_findings) == (Devices("cpu", 16), None, True), "the defaults"


def test_options_reach_the_plan(plans: list[Plan]) -> None:
    words = "run a:b c:d --mesh cpu:8 --seed 3 --seconds 1.5 --checks gradients,output --examples 1"
    _exit_status(*words.split())
    (plan,) = plans
    assert plan.targets == ("a:b", "c:d"), "in order"
    assert plan.cases == _list("quick", 3, 1, 8) == plan.covering, "one example cuts no covering case"
    assert (plan.devices, plan.seconds) == (Devices("cpu", 8), 1.5), "mesh and time"
    assert plan.check_names == ("contract", "gradients", "output"), "the contract is always checked"


def test_replay_is_one_case_on_one_target_and_shrinks_nothing(plans: list[Plan]) -> None:
    assert _exit_status("replay", "v=1 seq_len=8 sliding_window_size=3", "a:b") == 0, "it conforms"
    (plan,) = plans
    assert plan.cases == plan.covering == (parse_case("v=1 seq_len=8 sliding_window_size=3"),), "the case"
    assert (plan.targets, plan.shrink_findings) == (("a:b",), False), "the target"
    _exit_status("replay", "v=1")
    assert plans[1].targets == ("conformance.targets.bundled:halo",), "by default the bundled halo"


def test_the_first_line_names_list_mesh_and_versions(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    _exit_status("run", "a:b", "--mesh", "cpu:8")
    lines = capsys.readouterr().out.splitlines()
    cases = case_list("quick", 0, None, 8)
    expected = (
        f"{len(cases)} cases ({len(case_list('quick', 0, 0, 8))} covering, list {list_hash(cases)[:12]}) on cpu:8"
    )
    assert expected in lines[0], "what was run can be told from the log"
    assert lines[1] == "progress \\x1b[31m", "progress lines are plain"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--sead", "3"], "unknown option '--sead'; the nearest option is '--seed'"),
        (["replay", "v=1", "--example=3"], "unknown option '--example'; the nearest option is '--examples'"),
        (["replay", "v=1", "a:b", "c:d"], "'c:d' is one argument too many"),
        (["run", "--mesh", "gpu"], "--mesh must be tpu, or cpu:N with N from 1 to 64, got 'gpu'"),
        (["run", "--checks", "gradient"], "--checks knows no 'gradient'; the nearest check is 'gradients'"),
        (["run", "--checks", ""], "--checks knows no ''"),
        (["run", "--examples", "0"], "--examples must be >= 1, got 0"),
        (["run", "--seconds", "nan"], "--seconds must be >= 0, got nan"),
        (["run", "--seconds", "-1"], "--seconds must be >= 0, got -1"),
        (["run", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["run", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["run", "--profile", "fast"], "invalid choice: 'fast'"),
        (["rn"], "invalid choice: 'rn'"),
        ([], "the following arguments are required: COMMAND"),
        (["replay", "v=1 seqlen=8"], "unknown key 'seqlen' in the case; the nearest key is 'seq_len'"),
        (["replay", "v=1 seq_len=eight"], "seq_len cannot be read from 'eight'"),
        (["replay", "v=1 seq_len=7"], "seq_len must be divisible by the 2 chunks of contiguous, got 7"),
        (["replay", "v=1 sliding_window_size=0"], "sliding_window_size must be none or >= 1, got 0"),
        (["replay", "seq_len"], "a case is key=value pairs, got 'seq_len'"),
    ],
)
def test_words_that_cannot_be_carried_out_are_named_and_nothing_runs(
    plans: list[Plan], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert _exit_status(*arguments) == 2, "cannot start"
    assert words in capsys.readouterr().err, "the word, the rule or the nearest right one"
    assert plans == [], "nothing has run"


def test_a_target_that_does_not_load_shows_its_own_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(plan: Plan, progress: Any, state: Run) -> Run:
        raise TargetError("Traceback (most recent call last):\n  my_adapter.py\nImportError: no kernel")

    monkeypatch.setattr(cli, "run", fail)
    assert _exit_status("replay", "v=1", "my_adapter:attention") == 2, "cannot start"
    error = capsys.readouterr().err
    assert error.endswith("my_adapter.py\nImportError: no kernel\n"), "the user's own lines"
    assert "conformance" not in error, "and none of ours"


@pytest.mark.parametrize("error", [HarnessError("outputs are not the ones owed"), ArithmeticError("no allowance")])
def test_a_failure_of_the_harness_has_its_own_status_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(plan: Plan, progress: Any, state: Run) -> Run:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert _exit_status("replay", "v=1", "a:b") == 3, "neither a finding nor a pass"
    shown = capsys.readouterr().err
    assert str(error) in shown, "the whole of it"
    assert "a fault of halocheck itself; nothing is said about the target" in shown, "in words"


def test_an_interrupt_outside_of_the_run_has_the_status_of_one_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "case_list", interrupt)
    assert _exit_status("run") == 130, "Ctrl-C while the cases are drawn"
    assert capsys.readouterr().err == "halocheck: interrupted\n", "a word is enough"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_with_what_was_found_and_a_second_one_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    finding: Callable[..., Finding],
    number: signal.Signals,
) -> None:
    def found_and_ended(plan: Plan, progress: Any, state: Run) -> Run:
        state.targets.append(_with_finding(plan, finding()))
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        return state

    heard_before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr(cli, "run", found_and_ended)
    assert _exit_status("replay", "v=1 seq_len=8", "a:b", "--report", str(tmp_path)) == 130, "interrupted"
    assert "FINDING" in capsys.readouterr().out, "what was found is told"
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["interrupted"], len(content["targets"][0]["findings"])) == (True, 1), "and written"
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == heard_before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HarnessError("outputs are not the ones owed"), "outputs are not the ones owed"),
        (OSError(28, "No space left on device"), "the run could not go on: [Errno 28] No space left on device"),
    ],
)
def test_a_run_that_fails_tells_and_writes_what_it_had_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    finding: Callable[..., Finding],
    error: Exception,
    words: str,
) -> None:
    def found_and_failed(plan: Plan, progress: Any, state: Run) -> Run:
        state.targets.append(_with_finding(plan, finding()))
        raise error

    monkeypatch.setattr(cli, "run", found_and_failed)
    assert _exit_status("replay", "v=1 seq_len=8", "a:b", "--report", str(tmp_path)) == 3, "the harness failed"
    shown = capsys.readouterr()
    assert "FINDING" in shown.out, "what was found before is told"
    assert words in shown.err, "and what went wrong"
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["interrupted"], len(content["targets"][0]["findings"])) == (True, 1), "and written, as unfinished"


def _with_finding(plan: Plan, found: Finding) -> TargetRun:
    result = CaseResult(plan.cases[0], FINDING, (found,))
    return TargetRun(TargetDescription("a:b", "b"), [result], {found.id: found})


def test_the_report_is_written_and_named(plans: list[Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "new" / "folder"
    assert _exit_status("replay", "v=1 seq_len=8", "a:b", "--report", str(where)) == 0, "it conforms"
    content = json.loads((where / "report.json").read_text())
    assert (content["case"], content["exit_status"], content["mesh"]) == ("v=1 seq_len=8", 0, "cpu:16"), (
        "what was asked"
    )
    assert content["list_hash"] == list_hash((parse_case("v=1 seq_len=8"),)), "the list"
    assert f"report: {where / 'report.json'}" in capsys.readouterr().out, "where it is"


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    plans: list[Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert _exit_status("run", "a:b", "--report", str(tmp_path / "file")) == 2, "hours are not spent first"
    assert "cannot be written to" in capsys.readouterr().err, "why"
    assert plans == [], "nothing has run"


def test_a_report_that_fails_in_the_end_is_a_failure_and_the_verdict_is_printed_all_the_same(
    plans: list[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_full(*arguments: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(telling, "write_report", disk_full)
    assert _exit_status("replay", "v=1 seq_len=8", "a:b", "--report", str(tmp_path)) == 3, "CI would look in vain"
    shown = capsys.readouterr()
    assert "No space left on device" in shown.err, "why"
    assert "verdict" in shown.out, "what was found is not lost"
