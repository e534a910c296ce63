"""What a person reads: a table, each kind of finding, and a command that survives being copied."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable

from rich.console import Console

from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.checks.outcome import Detail
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.report.terminal import print_details, print_finding, print_run, replay_command
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, CaseResult
from conformance.target import TargetDescription

Build = Callable[..., Finding]

_CASE = parse_case("v=1 seq_len=8 sliding_window_size=3")
_SHARES = {
    ("contract", "call"): 0.0,
    ("output", "out"): 0.123,
    **{(check, "out"): 0.0 for check in ("visibility", "invariance")},
    **{
        (check, name): 0.5
        for check in ("gradients", "visibility", "invariance")
        for name in ("dquery", "dkey", "dvalue")
    },
}


def _printed(run: Run, width: int = 100) -> str:
    text = io.StringIO()
    print_run(run, Console(file=text, width=width, highlight=False))
    return text.getvalue()


def _run(*results: CaseResult, name: str = "target", interrupted: bool = False, **of: object) -> Run:
    target = TargetRun(TargetDescription("module:target", name, **of), list(results))  # type: ignore[arg-type]  # by name
    for result in results:
        target.smallest |= {finding.id: finding for finding in result.findings}
    return Run(
        Plan(("module:target",), (_CASE,) * len(results), (), Devices("cpu", 8), tuple(CHECKS)), [target], interrupted
    )


def _row(text: str, *starts: str) -> str:
    return next(line for line in text.splitlines() if all(start in line for start in starts))


def test_the_table_says_how_many_cases_and_the_largest_share_of_the_allowance() -> None:
    text = _printed(_run(CaseResult(_CASE, CONFORMS, shares=_SHARES), CaseResult(_CASE, DECLINED, reason="no cap")))
    assert "conforms 1, 0.123" in _row(text, "output", "out"), "a tensor's cell"
    assert "conforms 1 " in _row(text, "contract", "call"), "the contract has no share"
    assert "not tried" in _row(text, "residuals", "lse"), "no silence"
    assert "1 conforms, 1 declined" in _row(text, "cases"), "the counts"
    assert "conforms" in _row(text, "verdict"), "the verdict"
    assert "target declined 1: no cap" in text, "each reason"


def test_a_finding_shows_kind_place_words_of_the_target_and_a_replay_line(finding: Build) -> None:
    found = finding(detail="\n".join(f"line {i}" for i in range(20)))
    text = _printed(_run(CaseResult(_CASE, FINDING, (found,), _SHARES), CaseResult(_CASE, CONFORMS, shares=_SHARES)))
    assert f"FINDING {found.id} target output of out (1 of 2 cases)" in text, "kind and number"
    assert found.reading in text, "the sentence"
    assert "| line 19" in text, "the end of the details"
    assert "| line 7\n" not in text, "no more than the last twelve lines"
    assert '  halocheck replay "v=1 seq_len=4 sliding_window_size=2" module:target\n' in text, "on a line of its own"
    assert "finding 1 of 2, 0.123" in _row(text, "output", "out"), "the cell"


def test_a_long_replay_line_is_never_broken(finding: Build) -> None:
    case = (
        "v=1 seq_len=4 " + "documents=1@-1+1@-2+1@-3+1@-4 " + "mesh_axes=tensor,context,data axis_types=mixed seed=99"
    )
    text = _printed(_run(CaseResult(_CASE, FINDING, (finding(case=case),), _SHARES)), width=60)
    (line,) = [line for line in text.splitlines() if "halocheck replay" in line]
    assert shlex.split(line) == ["halocheck", "replay", case, "module:target"], "a shell reads it as it was meant"


def test_a_spec_with_spaces_is_quoted_for_the_shell(finding: Build) -> None:
    command = replay_command(finding(), "my files/adapter.py:attention")
    assert shlex.split(command)[-1] == "my files/adapter.py:attention", "one argument"


def test_a_case_for_more_devices_than_the_default_names_its_mesh(finding: Build) -> None:
    wide = finding(case="v=1 batch=4 seq_len=8 context_parallelism=8 data_parallelism=4")
    assert shlex.split(replay_command(wide, "m:t"))[-2:] == ["--mesh", "cpu:32"], "replay has 16 devices by default"
    assert "--mesh" not in replay_command(finding(), "m:t"), "no word that is not needed"
    assert shlex.split(replay_command(wide, "m:t", "tpu"))[-2:] == ["--mesh", "tpu"], "what was found there"


def test_what_a_target_says_cannot_paint_the_terminal_nor_be_taken_for_markup(finding: Build) -> None:
    found = finding(reading="raises E: \x1b[31mred\x1b[0m [bold]x[/bold]", detail="[red]\x07bell")
    text = io.StringIO()
    print_finding(found, TargetDescription("m:t", "t"), "", Console(file=text, width=80))
    assert "\x1b" not in text.getvalue(), "no escape sequence"
    assert "\x07" not in text.getvalue(), "no bell"
    assert "[bold]x[/bold]" in text.getvalue(), "brackets are text"
    assert "[red]" in text.getvalue(), "here too"


def test_an_interrupted_run_says_so() -> None:
    assert "interrupted: this is what was found so far" in _printed(_run(interrupted=True)), "not a whole run"
    assert "interrupted" not in _printed(_run()), "a whole run"


def test_a_run_interrupted_before_any_target_was_loaded_prints_no_table() -> None:
    run = Run(Plan(("m:t",), (_CASE,), (), Devices("cpu", 8), tuple(CHECKS)), [], interrupted=True)
    assert _printed(run) == "interrupted: this is what was found so far\n", "there is nothing else to say"


def test_two_targets_stand_side_by_side(finding: Build) -> None:
    run = _run(CaseResult(_CASE, CONFORMS, shares=_SHARES), name="first")
    run.targets += _run(CaseResult(_CASE, FINDING, (finding(target="second"),), _SHARES), name="second").targets
    text = _printed(run, width=160)
    assert "second" in _row(text, "check", "first"), "a column each"
    assert "finding" in _row(text, "verdict", "conforms"), "a verdict each"


def _details(detail: Detail, width: int) -> str:
    case = parse_case("v=1 seq_len=16 sliding_window_size=3")
    plan = Plan(("m:t",), (case,), (), Devices("cpu", 8), tuple(CHECKS))
    target = TargetRun(TargetDescription("m:t", "target"), [CaseResult(case, CONFORMS, details=(detail,))])
    text = io.StringIO()
    print_details(Run(plan, [target]), Console(file=text, width=width))
    return text.getvalue()


def test_details_show_each_array_with_its_worst_element_and_its_ranks() -> None:
    text = _details(Detail("dkey", "attention", 1, 1.5, (0, 13, 0, 2), 0.25, 0.5, (1.5, 0.125)), width=160)
    (row,) = [line for line in text.splitlines() if "dkey" in line]
    cells = re.split(" {2,}", row.strip())
    assert cells == ["dkey", "1", "attention", "1.5", "0,13,0,2", "0.25", "0.5", "1.5 0.12"], "one row an array"


def test_no_number_of_the_details_is_cut_in_a_terminal_of_80_columns() -> None:
    source, shares = "attention_with_lse, forward of its VJP", (1.44e6,) + (1.5e5,) * 7
    text = _details(Detail("dvalue", source, 1, 1.44e6, (1, 127, 15, 63), -0.0135441, -0.164338, shares), width=80)
    (row,) = [line for line in text.splitlines() if "dvalue" in line]
    numbers = ["1.44e+06", "1,127,15,63", "-0.013544", "-0.16434"]
    assert [word for word in row.split() if word in numbers] == numbers, row
    assert "…" not in text, "what is too long goes on in the next line"
