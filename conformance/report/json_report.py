"""report.json: the whole run in a stable, versioned form (docs/report.md), written at once or not at all.

May touch: the report directory. Tests: tests/conformance/test_report_json.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.case_text import format_case
from conformance.finding import plain
from conformance.report.matrix import feature_matrix
from conformance.report.terminal import replay_command
from conformance.report.verdict import exit_status, verdict_of
from conformance.runner import Run, TargetRun
from conformance.session import CaseResult

FORMAT_VERSION = 1
FILE_NAME = "report.json"
MATRIX_NAME = "matrix.md"


def prepare_directory(directory: Path) -> None:
    """Makes the directory and proves that a file can be written there, before hours are spent on a run.

    Raises:
        OSError: it cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=directory):
        pass


def write_report(run: Run, about: Mapping[str, Any], directory: Path) -> Path:
    """Writes `directory/report.json`, and the feature matrix beside it in `matrix.md`.

    `about` is what the caller knows of versions, options and the case list.

    Raises:
        OSError: it cannot be written; an earlier report is then still whole.
    """
    content = report_content(run, about)
    _write_whole(directory / MATRIX_NAME, feature_matrix(run))
    return write_json(content, directory / FILE_NAME)


def write_json(content: Any, path: Path) -> Path:
    """Writes the content as strict JSON, whole or not at all.

    Raises:
        OSError: it cannot be written; an earlier file is then still whole.
    """
    _write_whole(path, json.dumps(plain(content), indent=1, allow_nan=False))
    return path


def _write_whole(path: Path, content: str) -> None:
    """A reader finds the old file or the new one, never half of one."""
    unfinished = path.parent / f".{path.name}.{os.getpid()}"
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def report_content(run: Run, about: Mapping[str, Any]) -> dict[str, Any]:
    """The report as JSON values; floats may still be infinite (see `finding.plain`)."""
    return {
        "format": "halocheck-report",
        "version": FORMAT_VERSION,
        **about,
        "interrupted": run.interrupted,
        "seconds": round(run.seconds, 1),
        "exit_status": exit_status(run),
        "targets": [_target_content(target, run) for target in run.targets],
    }


def _target_content(target: TargetRun, run: Run) -> dict[str, Any]:
    verdict = verdict_of(target, run)
    return {
        "target": asdict(target.description),
        "verdict": verdict.status,
        "remarks": list(verdict.remarks),
        "counts": verdict.counts,
        "cells": [asdict(cell) for cell in verdict.cells],
        "declined": [{"reason": reason, "cases": count} for reason, count in verdict.declined],
        "findings": [
            {
                **finding.to_json(),
                "cases": occurrences,
                "replay": replay_command(finding, target.description.spec, target.description.platform),
            }
            for finding, occurrences in verdict.findings
        ],
        "results": [_result_content(result) for result in target.all_results],
        "compiled": [_result_content(result) for result in target.compiled],
    }


def _result_content(result: CaseResult) -> dict[str, Any]:
    return {
        "case": format_case(result.case),
        "status": result.status,
        "reason": result.reason,
        "shares": {f"{check}/{tensor}": share for (check, tensor), share in result.shares.items()},
        "figures": dict(result.figures),
        "findings": [finding.to_json() for finding in result.findings],
    }
