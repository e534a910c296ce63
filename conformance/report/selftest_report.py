"""What a selftest found, for a person and as `selftest.json`: each fault's verdict, the matrix fault × check, the gaps.

May touch: standard output, the report directory. Tests: tests/conformance/test_selftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance.faults import KINDS
from conformance.report.json_report import write_json
from conformance.selftest import Selftest, Trial

FILE_NAME = "selftest.json"
FORMAT_VERSION = 1


def print_selftest(state: Selftest, console: Console) -> None:
    """Prints the matrix, then what is missing."""
    for line in (*_matrix(state), *_remarks(state)):
        console.print(line, soft_wrap=True, markup=False)


def write_selftest(state: Selftest, about: Mapping[str, Any], directory: Path) -> Path:
    """Writes `directory/selftest.json`, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    return write_json(selftest_content(state, about), directory / FILE_NAME)


def selftest_content(state: Selftest, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole selftest as plain data."""
    return {
        "format": FORMAT_VERSION,
        **about,
        "list_hash": state.list_hash,
        "cases": state.num_cases,
        "checks": list(state.check_names),
        "passes": state.passes,
        "interrupted": state.interrupted,
        "seconds": round(state.seconds, 1),
        "faults": [_fault_content(trial) for trial in state.trials],
        "correct_targets": [
            {
                "name": target.name,
                "programs": target.programs,
                "findings": [finding.to_json() for finding in target.findings],
            }
            for target in state.correct.values()
        ],
        "seen_by_one_check_alone": seen_by_one_check(state),
    }


def seen_by_one_check(state: Selftest) -> dict[str, list[str]]:
    """For each check that alone sees some faults, which ones."""
    alone: dict[str, list[str]] = {}
    for trial in state.trials:
        if len(trial.seen) == 1:
            alone.setdefault(trial.seen[0], []).append(trial.fault.name)
    return alone


def _fault_content(trial: Trial) -> dict[str, Any]:
    fault = trial.fault
    return {
        "name": fault.name,
        "kind": fault.kind,
        "report": fault.report,
        "sentence": fault.sentence,
        "planted_in": fault.planted_in,
        "drawn": trial.drawn,
        "programs": trial.programs,
        "bites": trial.bites,
        "seen": list(trial.seen),
        "verdict": trial.verdict,
        "inconclusive": trial.inconclusive,
        "first_finding": None if trial.first_finding is None else trial.first_finding.to_json(),
    }


def _matrix(state: Selftest) -> Iterator[str]:
    """One line a fault; plain text, so that a log file holds all of it."""
    width = max((len(trial.fault.name) for trial in state.trials), default=0)
    yield f"{'fault':{width}} kind drawn run bites  seen by"
    for trial in state.trials:
        counts = f"{trial.fault.kind:>4} {trial.drawn:>5} {trial.programs:>3} {trial.bites:>5}"
        yield f"{trial.fault.name:{width}} {counts}  {', '.join(trial.seen) or trial.verdict.upper()}"


def _remarks(state: Selftest) -> Iterator[str]:
    """Line by line: what was seen of what, what was not, and what the correct targets were told."""
    verdicts = [trial.verdict for trial in state.trials]
    programs = sum(trial.programs for trial in state.trials)
    yield (
        f"{verdicts.count('seen')} of {state.num_faults} faults seen, {verdicts.count('bites, unseen')} bite and are "
        f"not seen, {verdicts.count('never bites')} never bite, in {programs} programs and {state.seconds:.0f} s; "
        f"{state.num_cases} cases, list {state.list_hash[:12]}"
    )
    if len(state.trials) < state.num_faults:
        yield f"interrupted: {state.num_faults - len(state.trials)} faults were not tried to their end"
    for verdict, means in (("bites, unseen", "a blind check"), ("never bites", "a gap of the case list")):
        for trial in state.trials:
            if trial.verdict == verdict:
                yield (
                    f"{verdict.upper()} ({means}): {trial.fault.name}, kind {trial.fault.kind} "
                    f"({KINDS[trial.fault.kind]}): {trial.fault.sentence}"
                )
    for check, names in seen_by_one_check(state).items():
        yield f"{check} alone sees {len(names)} faults: {', '.join(names)}"
    silent = [check for check in state.check_names if not any(check in trial.seen for trial in state.trials)]
    if silent:
        yield f"checks that saw no fault: {', '.join(silent)}"
    for target in state.correct.values():
        yield f"{target.name}: {len(target.findings)} findings in {target.programs} programs"
        for finding in target.findings:
            yield f"  FALSE ALARM {finding.check} of {finding.tensor}: {finding.reading} | {finding.case}"
