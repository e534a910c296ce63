"""What a run tells while it goes on: when the report is written, and what a terminal or disk that fails costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import telling
from conformance.case_text import parse_case
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.runner import Plan, Run, TargetRun
from conformance.session import FINDING, CaseResult
from conformance.target import TargetDescription
from conformance.telling import Telling

_CASE = parse_case("v=1 seq_len=4 sliding_window_size=2")


@pytest.fixture
def run() -> Run:
    """A run that has begun."""
    return Run(Plan(("m:t",), (_CASE,), (), Devices("cpu", 2), ("contract", "output")))


def _find(run: Run, found: Finding) -> None:
    result = CaseResult(_CASE, FINDING, (found,))
    run.targets[:] = [TargetRun(TargetDescription("m:t", "target"), [result], {found.id: found})]


def _written(directory: Path) -> Any:
    return json.loads((directory / "report.json").read_text())


def test_the_report_is_there_from_the_first_line_on_and_has_each_new_kind_at_once(
    run: Run, tmp_path: Path, finding: Callable[..., Finding]
) -> None:
    told = Telling(run, {"seed": 7}, tmp_path)
    told("begins")
    assert (_written(tmp_path)["interrupted"], _written(tmp_path)["targets"]) == (True, []), "no older one stays"
    _find(run, finding())
    told("found")
    content = _written(tmp_path)
    assert [found["signature"] for found in content["targets"][0]["findings"]] == ["exceeds its allowance"]
    assert (content["seed"], content["exit_status"]) == (7, 130), "as a run that ended here"
    assert run.interrupted is False, "the run itself goes on"


def test_lines_without_news_write_it_once_a_minute(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finding: Callable[..., Finding]
) -> None:
    written: list[float] = []
    now = [100.0]
    monkeypatch.setattr(telling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(telling, "write_report", lambda *_: written.append(now[0]))
    told = Telling(run, {}, tmp_path)
    for now[0] in (100.0, 101.0, 159.0, 161.0, 162.0):
        told("of 9 cases")
    assert written == [100.0, 161.0], "at first, and after a minute"


def test_a_full_disk_costs_no_run_and_is_said_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    told = Telling(run, {}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(telling, "write_report", disk_full)
        told("begins")
        told.write(run)
        assert told.failed_to_write is not None, "known"
    assert capsys.readouterr().err.count("No space left on device") == 1, "and said"
    told.write(run)
    assert told.failed_to_write is None, "there is room again"


@pytest.mark.parametrize("into", ["/dev/full", "a closed pipe"])
def test_a_terminal_that_cannot_be_written_to_costs_no_run(into: str, tmp_path: Path) -> None:
    program = (
        "import sys; from conformance import cli\n"
        "def run(plan, progress, state):\n    [progress(str(n)) for n in range(9)]; print('went on', file=sys.stderr)\n"
        "    return state\n"
        f"cli.run = run; sys.exit(cli.main(['replay', 'v=1', 'a:b', '--report', {str(tmp_path)!r}]))"
    )
    with open(into if into.startswith("/") else "/dev/null", "w") as out:
        running = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=out if into.startswith("/") else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    if running.stdout is not None:
        running.stdout.close()
    _, told = running.communicate()
    assert running.returncode == 3, told
    assert told.count("standard output cannot be written to") == 1, "said where it can be"
    assert "went on" in told, "and the run goes on"
    assert "Traceback" not in told, "without noise"
    assert _written(tmp_path)["interrupted"] is False, "its report is whole"
