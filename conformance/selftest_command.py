"""What `halocheck selftest` does with its options: chooses the faults and the list, and answers with an exit status.

May touch: standard output, the report directory; imports JAX with the catalogue.
Tests: tests/conformance/test_selftest.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from conformance.case_list import case_list, list_hash
from conformance.checks import CHECKS
from conformance.devices import DEFAULT_DEVICES
from conformance.faults import CATALOGUE
from conformance.finding import plain
from conformance.report.selftest_report import print_selftest, write_selftest
from conformance.report.verdict import EXIT_CONFORMS, EXIT_FINDING, EXIT_INTERRUPTED
from conformance.selftest import selftest


def run_selftest(faults: str | None, seed: int, directory: Path | None, versions: Mapping[str, str]) -> int:
    """The exit status, once everything is printed and, where there is a directory, written.

    `faults` are names with commas between them; None is the whole catalogue.

    Raises:
        ValueError: an unknown fault, or a seed below 0.
    """
    names = tuple(CATALOGUE) if faults is None else tuple(dict.fromkeys(faults.split(",")))
    for name in names:
        if name not in CATALOGUE:
            nearest = difflib.get_close_matches(name, CATALOGUE, n=1, cutoff=0.0)[0]
            raise ValueError(f"faults knows no {name!r}; the nearest fault is {nearest!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    cases = case_list("quick", seed, None, DEFAULT_DEVICES.count)
    print(
        f"{len(names)} faults and the correct targets on {len(cases)} cases, list {list_hash(cases)[:12]}", flush=True
    )
    chosen = [CATALOGUE[name] for name in names]
    state = selftest(chosen, cases, DEFAULT_DEVICES, tuple(CHECKS), lambda line: print(plain(line), flush=True))
    if directory is not None:
        print(f"report: {write_selftest(state, {'seed': seed, 'versions': dict(versions)}, directory)}")
    print_selftest(state, Console(highlight=False))
    if state.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_CONFORMS if state.passes else EXIT_FINDING
