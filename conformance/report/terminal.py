"""The verdict as a person reads it: a table, then each kind of finding with its smallest case.

May touch: standard output. Tests: tests/conformance/test_report_terminal.py.
"""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.aot import check as aot
from conformance.case_text import parse_case
from conformance.devices import DEFAULT_DEVICES
from conformance.finding import Finding, plain
from conformance.report.verdict import KNOWN_ISSUE, NO_QUESTION, Cell, TargetVerdict, verdict_of
from conformance.runner import Run
from conformance.session import CONFORMS, DECLINED, FINDING
from conformance.target import TargetDescription

# What holds or does not: there is no error whose share of an allowance could be told.
_WITHOUT_SHARES = ("contract", "invariance")
# A number is never cut, in a terminal of 80 columns either.
_DETAIL_COLUMNS = {
    "tensor": False,
    "draw": False,
    "from": True,
    "share": False,
    "worst at": False,
    "expected": False,
    "got": False,
    "by rank": True,
}
_STYLES = {CONFORMS: "green", FINDING: "bold red", DECLINED: "yellow", KNOWN_ISSUE: "yellow"}


def print_run(run: Run, console: Console) -> None:
    """Prints the whole verdict of a run."""
    verdicts = [verdict_of(target, run) for target in run.targets]
    if verdicts:
        console.print(_table(verdicts))
        console.print("a cell: how many cases, and the largest error as a share of its allowance (above 1: a finding)")
    for target, verdict in zip(run.targets, verdicts, strict=True):
        _print_remarks(verdict, console)
        for finding, occurrences in verdict.findings:
            of = target.compiled if finding.check == aot.NAME else target.all_results
            print_finding(finding, target.description, f"{occurrences} of {len(of)} cases", console)
    if run.interrupted:
        console.print("interrupted: this is what was found so far")


def print_details(run: Run, console: Console) -> None:
    """Every array of a replayed case: its worst element, and its largest share of the allowance on each rank."""
    for target in run.targets:
        for result in target.all_results:
            if not result.details:
                continue
            console.print(
                "each array, its worst element (batch row, position, head, feature), its largest share by rank:"
            )
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for name, may_wrap in _DETAIL_COLUMNS.items():
                table.add_column(name, no_wrap=not may_wrap, overflow="fold")
            for detail in result.details:
                ranks = " ".join(f"{share:.2g}" for share in detail.by_rank)
                place = ",".join(map(str, detail.index))
                numbers = (f"{detail.share:.3g}", place, f"{detail.expected:.5g}", f"{detail.got:.5g}", ranks)
                table.add_row(detail.tensor, str(detail.draw), detail.source, *numbers)
            console.print(table)


def print_finding(finding: Finding, target: TargetDescription, occurrences: str, console: Console) -> None:
    """One finding: what, where, and the command that shows it again."""
    title = Text.assemble(
        ("FINDING ", "bold red"), f"{finding.id} {finding.target} {finding.check} of {finding.tensor}"
    )
    if occurrences:
        title.append(f" ({occurrences})")
    console.print(title, soft_wrap=True)
    # Long lines are left whole: a command must survive being copied.
    console.print(Text(f"  {plain(finding.reading)}"), soft_wrap=True)
    if finding.detail:
        console.print(
            Text("\n".join(f"  | {line}" for line in plain(finding.detail).splitlines()[-12:])), soft_wrap=True
        )
    console.print(Text(f"  {replay_command(finding, target.spec, target.platform)}"), soft_wrap=True)


def replay_command(finding: Finding, spec: str, platform: str = DEFAULT_DEVICES.platform) -> str:
    """The line that runs the finding's case again on this target; it names the mesh where the default will not do."""
    num_devices = parse_case(finding.case).problem.num_devices
    mesh = f" --mesh cpu:{num_devices}" if num_devices > DEFAULT_DEVICES.count else ""
    if platform != DEFAULT_DEVICES.platform and finding.check != aot.NAME:
        mesh = f" --mesh {platform}"
    # A full-size program runs on no CPU: it is compiled again.
    checks = f" --checks {aot.NAME}" if finding.check == aot.NAME else ""
    return f'halocheck replay "{finding.case}" {shlex.quote(spec)}{mesh}{checks}'


def _table(verdicts: list[TargetVerdict]) -> Table:
    table = Table("check", "tensor")
    for verdict in verdicts:
        table.add_column(Text(verdict.name))
    for cells in zip(*(verdict.cells for verdict in verdicts), strict=True):
        if all(cell.status == NO_QUESTION for cell in cells):
            continue  # said once, below: a row for each tensor would only be in the way
        table.add_row(cells[0].check, cells[0].tensor, *map(_cell_text, cells))
    table.add_section()
    table.add_row("cases", "", *(Text(_counts(verdict)) for verdict in verdicts))
    table.add_row("verdict", "", *(Text(verdict.status, _STYLES.get(verdict.status, "yellow")) for verdict in verdicts))
    return table


def _cell_text(cell: Cell) -> Text:
    text = Text(cell.status, _STYLES.get(cell.status, "dim"))
    if cell.findings:
        text.append(f" {cell.findings} of {cell.cases}", "default")
    elif cell.cases:
        text.append(f" {cell.cases}", "default")
    if cell.largest_share is not None and cell.check not in _WITHOUT_SHARES:
        text.append(f", {cell.largest_share:.3g}", "default")
    return text


def _counts(verdict: TargetVerdict) -> str:
    return ", ".join(f"{count} {status}" for status, count in verdict.counts.items() if count)


def _print_remarks(verdict: TargetVerdict, console: Console) -> None:
    for remark in verdict.remarks:
        console.print(Text(f"{verdict.name}: {remark}"), soft_wrap=True)
    for reason, count in verdict.declined:
        console.print(Text(f"{verdict.name} declined {count}: {plain(reason)}"), soft_wrap=True)
