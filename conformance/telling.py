"""What a run tells while it goes on: its lines on the terminal, and in the report directory the report so far.

So a run that is killed, or that fails, loses nothing that it had found; and no closed pipe and no full disk ends it.
May touch: standard output and error, the report directory. Tests: tests/conformance/test_telling.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.finding import plain
from conformance.report.json_report import write_report
from conformance.runner import Run

_SECONDS_BETWEEN_REPORTS = 60.0


class Telling:
    """Called with each line of progress of `run`; `directory` is None where no report is asked for."""

    def __init__(self, run: Run, about: Mapping[str, Any], directory: Path | None) -> None:
        self._run, self._about, self._directory = run, about, directory
        self._written_at, self._num_written = 0.0, -1
        self.failed_to_print: OSError | None = None
        """Why standard output cannot be written to."""
        self.failed_to_write: OSError | None = None
        """Why the report could not be written the last time."""

    def __call__(self, line: str) -> None:
        """Prints the line; writes the report if there is a new kind of finding, or a minute has passed."""
        self.print(lambda: print(plain(line), flush=True))
        num_kinds = sum(len(target.smallest) for target in self._run.targets)
        if num_kinds != self._num_written or time.monotonic() - self._written_at > _SECONDS_BETWEEN_REPORTS:
            self._num_written = num_kinds
            self.write(dataclasses.replace(self._run, interrupted=True))  # what it would be if the run ended here

    def print(self, printing: Callable[[], None]) -> None:
        """Does what prints; what comes after a failure goes nowhere."""
        try:
            printing()
        except OSError as error:
            self.failed_to_print = error
            _silence_standard_output()
            print(f"halocheck: standard output cannot be written to: {error}; the run goes on", file=sys.stderr)

    def write(self, run: Run) -> None:
        """Writes the report of `run`, which is this one as it is to be told, whole or not at all."""
        if self._directory is None:
            return
        try:
            write_report(run, self._about, self._directory)
            self.failed_to_write = None
        except OSError as error:
            if self.failed_to_write is None:
                print(f"halocheck: the report cannot be written now: {error}", file=sys.stderr)
            self.failed_to_write = error
        self._written_at = time.monotonic()


def _silence_standard_output() -> None:
    """What is still in the buffer must not fail once more when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
