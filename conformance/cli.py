"""The command line: `halocheck run`, `replay`, `aot` and `selftest`. Exit status: see docs/command-line.md.

Imports neither JAX nor a target, so `--help` is instant and nothing a target does can take the report along.
Tests: tests/conformance/test_cli.py.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from conformance.about import about_run, header, versions
from conformance.aot import check as aot
from conformance.aot.command import DEFAULT_MODELS, NIGHTLY, compile_all, model_cases, to_json
from conformance.aot.job import MISSING_LIBTPU, Compiled, has_libtpu
from conformance.aot.topologies import num_devices_of, parse_topologies
from conformance.case_list import case_list
from conformance.case_text import format_case, parse_case
from conformance.checks import CHECKS, races
from conformance.devices import Devices, parse_devices
from conformance.hosts.launch import CHECKS_OF_HOSTS, run_plan_on_hosts
from conformance.hosts.place import parse_place
from conformance.known_issues import KnownIssuesError, load_known_issues
from conformance.models import LAYERS, MODELS
from conformance.options import ALL_CHECKS, DEFAULT_TARGETS, NIGHTLY_SECONDS, parse_options
from conformance.problem import LAYOUTS, Case, InvalidCase
from conformance.production import production_cases
from conformance.report.json_report import FILE_NAME, prepare_directory, write_json
from conformance.report.terminal import print_details, print_run
from conformance.report.verdict import (
    EXIT_CANNOT_START,
    EXIT_CONFORMS,
    EXIT_FINDING,
    EXIT_HARNESS_FAILED,
    EXIT_INCONCLUSIVE,
    EXIT_INTERRUPTED,
    exit_status,
)
from conformance.runner import Plan, Run, run
from conformance.signals import hearing_signals
from conformance.target import TargetError
from conformance.telling import Telling
from conformance.tpus import PLATFORM as TPU
from conformance.tpus import rule_broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    commands = {"run": _run, "replay": _replay, "aot": _aot, "selftest": _selftest}
    options = parse_options(sys.argv[1:] if arguments is None else list(arguments), commands)
    try:
        with hearing_signals():
            return options.command(options)
    except KeyboardInterrupt:  # before the first case or after the last: the run itself answers for the time between
        print("halocheck: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (TargetError, KnownIssuesError, _CannotStart) as error:
        print(f"halocheck: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except Exception as error:  # noqa: BLE001  # a fault of the harness has an exit status of its own
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            print(f"halocheck: the run could not go on: {error}", file=sys.stderr)
            return EXIT_HARNESS_FAILED
        traceback.print_exc()
        print("halocheck: this is a fault of halocheck itself; nothing is said about the target", file=sys.stderr)
        return EXIT_HARNESS_FAILED


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _CannotStart(Exception):
    """The command's words cannot be carried out."""


def _run(options: argparse.Namespace) -> int:
    if broken := rule_broken(options.mesh, options.hosts, options.host):
        raise _CannotStart(broken)
    devices = _devices(options.mesh)
    for name, lowest in (("examples", 1), ("seconds", 0), ("seed", 0), ("hosts", 1)):
        value = getattr(options, name)
        if value is not None and not value >= lowest:  # "not >=": NaN is refused too
            raise _CannotStart(f"--{name} must be >= {lowest}, got {value}")
    check_names, compiled = _checks(options.checks, devices), _compiled_cases(options.checks, options.profile)
    if (options.profile, devices.platform) == (NIGHTLY, TPU) and options.checks != aot.NAME:
        # No process could hold a million tokens whole: even where it is the only one it makes and judges shards.
        return _run_on_hosts(options, devices, production_cases(devices.count, options.seed))
    # Asked for `aot` alone, nothing is executed.
    never_cut = () if options.checks == aot.NAME else case_list(options.profile, options.seed, 0, devices.count)
    cases = never_cut and case_list(options.profile, options.seed, options.examples, devices.count)
    if options.hosts > 1 or options.host is not None:
        return _run_on_hosts(options, devices, cases)
    targets = tuple(options.targets) or DEFAULT_TARGETS
    if devices.platform == TPU and len(targets) > 1:
        raise _CannotStart(f"--mesh {TPU} takes one TARGET a run: a TPU belongs to one process at a time")
    steered = options.profile == "nightly" and options.checks != aot.NAME
    if steered:
        _prepare("--database", options.database)
    plan = Plan(
        targets=targets,
        covering=never_cut,
        further=cases[len(never_cut) :],
        devices=devices,
        check_names=check_names,
        seconds=NIGHTLY_SECONDS if steered and options.seconds is None else options.seconds,
        known_issues=load_known_issues(options.known_issues),
        database=options.database if steered else None,
        steering_seed=options.seed,
        compiled=compiled,
    )
    return _carry_out(plan, options, {"profile": options.profile, "seed": options.seed})


def _run_on_hosts(options: argparse.Namespace, devices: Devices, cases: tuple[Case, ...]) -> int:
    """The cases that take all devices, on processes that have some of them each."""
    if devices.count % options.hosts:
        raise _CannotStart(f"--hosts must divide the {devices.count} devices of --mesh, got {options.hosts}")
    asked = options.checks.split(",") if options.checks != ALL_CHECKS else ()
    if others := [name for name in asked if name not in CHECKS_OF_HOSTS]:
        raise _CannotStart(f"--checks over several hosts must be of {', '.join(CHECKS_OF_HOSTS)}, got {others[0]!r}")
    if options.seconds is not None:
        raise _CannotStart(f"--seconds is not kept over several hosts, got {options.seconds}: use --examples")
    place = None
    if options.host is not None:
        try:
            place = parse_place(options.host, options.hosts, options.coordinator, options.exchange)
        except ValueError as error:
            raise _CannotStart(f"--{error}") from error
        options.report = options.report if place.number == 0 else None  # one report of one run
    if options.report is not None:
        _prepare("--report", options.report)
    targets = tuple(options.targets) or DEFAULT_TARGETS
    cases = tuple(case for case in cases if case.problem.num_devices == devices.count)
    plan = Plan(targets, cases, (), devices, CHECKS_OF_HOSTS, shrink_findings=False, num_hosts=options.hosts)
    about = about_run(options.mesh, plan) | {"profile": options.profile, "seed": options.seed, "hosts": options.hosts}
    state = Run(plan)
    telling = Telling(state, about, options.report)
    telling(header(about))
    try:
        state = run_plan_on_hosts(plan, options.hosts, telling, state, place)
    except ValueError as error:
        raise _CannotStart(f"--{error}") from error
    return _tell_verdict(state, telling, options)


def _replay(options: argparse.Namespace) -> int:
    try:
        case = parse_case(options.case)
    except InvalidCase as error:
        raise _CannotStart(str(error)) from error
    devices = _devices(options.mesh)
    plan = Plan(
        targets=(options.target,),
        covering=() if options.checks == aot.NAME else (case,),
        further=(),
        devices=devices,
        check_names=_checks(options.checks, devices),
        shrink_findings=False,
        compiled=(case,) if aot.NAME in options.checks.split(",") else (),
    )
    return _carry_out(plan, options, {"case": format_case(case)}, in_detail=True)


def _aot(options: argparse.Namespace) -> int:
    """1 on anything that a strategy forbids or that does not compile."""
    if not has_libtpu():
        raise _CannotStart(MISSING_LIBTPU)
    chosen = {name: tuple(getattr(options, name).split(",")) for name in ("models", "layers", "layouts")}
    for name, known in (("layers", LAYERS), ("layouts", LAYOUTS)):
        if unknown := [value for value in chosen[name] if value not in known]:
            raise _CannotStart(f"--{name} must be of {', '.join(known)}, got {unknown[0]!r}")
    try:
        topologies = parse_topologies(options.topology)
        asked = (chosen["models"], chosen["layers"], chosen["layouts"])
        cases = {topology: model_cases(*asked, num_devices_of(topology)) for topology in topologies}
    except ValueError as error:
        raise _CannotStart(f"--{error}") from error
    if options.report is not None:
        _prepare("--report", options.report)
    targets = tuple(options.targets) or DEFAULT_TARGETS
    path = None if options.report is None else options.report / "aot.json"

    def keep(so_far: Sequence[Compiled]) -> None:
        if path is not None:
            write_json([to_json(one) for one in so_far], path)

    done = compile_all(targets, topologies, cases.__getitem__, Console(highlight=False, width=160), keep)
    if path is not None:
        print(f"report: {path}")
    if any(one.findings for one in done):
        return EXIT_FINDING
    is_known = any(one.facts for one in done) and not any(one.cannot_ask for one in done)
    return EXIT_CONFORMS if is_known else EXIT_INCONCLUSIVE


def _selftest(options: argparse.Namespace) -> int:
    # Imported here, because the catalogue of faults imports JAX: nothing else of this command line does.
    from conformance.selftest_command import run_selftest

    if options.report is not None:
        _prepare("--report", options.report)
    try:
        return run_selftest(options.faults, options.seed, options.report, versions())
    except ValueError as error:
        raise _CannotStart(f"--{error}") from error


def _carry_out(plan: Plan, options: argparse.Namespace, asked: dict[str, Any], *, in_detail: bool = False) -> int:
    if options.report is not None:
        _prepare("--report", options.report)
    about = about_run(options.mesh, plan) | asked
    state = Run(plan)
    telling = Telling(state, about, options.report)
    telling(header(about))
    try:
        state = run(plan, telling, state)
    except (Exception, KeyboardInterrupt):
        if state.targets:  # else nothing has run
            state.interrupted = True
            _tell_verdict(state, telling, options)
        raise
    return _tell_verdict(state, telling, options, in_detail=in_detail)


def _tell_verdict(state: Run, telling: Telling, options: argparse.Namespace, *, in_detail: bool = False) -> int:
    """Writes the report, prints the verdict, and gives the exit status.

    The report comes first: a closed pipe must not cost it.
    """
    telling.write(state)
    console = Console(highlight=False)
    if in_detail:
        telling.print(lambda: print_details(state, console))
    telling.print(lambda: print_run(state, console))
    if telling.failed_to_write is not None:
        print(f"halocheck: the report could not be written: {telling.failed_to_write}", file=sys.stderr)
    elif options.report is not None:
        telling.print(lambda: print(f"report: {options.report / FILE_NAME}", flush=True))
    is_told = telling.failed_to_write is None and telling.failed_to_print is None
    return exit_status(state) if is_told else EXIT_HARNESS_FAILED


def _prepare(option: str, directory: Path) -> None:
    try:
        prepare_directory(directory)
    except OSError as error:
        raise _CannotStart(f"{option} {directory} cannot be written to: {error}") from error


def _devices(text: str) -> Devices:
    try:
        return parse_devices(text)
    except ValueError as error:
        raise _CannotStart(f"--{error}") from error


def _checks(text: str, devices: Devices) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in (*CHECKS, aot.NAME):
            nearest = difflib.get_close_matches(name, (*CHECKS, aot.NAME), n=1, cutoff=0.0)[0]
            raise _CannotStart(f"--checks knows no {name!r}; the nearest check is {nearest!r}")
    if devices.platform == TPU and text == ALL_CHECKS:
        names = tuple(name for name in names if name != races.NAME)  # nobody asked for it by name, and it could not run
    # The contract is always checked: a target that raises must not conform because nobody asked.
    return tuple(dict.fromkeys(("contract", *(name for name in names if name != aot.NAME))))


def _compiled_cases(checks: str, profile: str) -> tuple[Case, ...]:
    """What the check `aot` compiles, if it is asked for: more layers in the longer profiles."""
    if aot.NAME not in checks.split(","):
        return ()
    names = {"quick": DEFAULT_MODELS, "ci": tuple(model.name for model in MODELS), "nightly": (NIGHTLY,)}
    return model_cases(names[profile], ("local",), ("contiguous", "dual_chunk_swap"))


if __name__ == "__main__":
    sys.exit(main())
