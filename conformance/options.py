"""The options of the command line, and what is said of one that does not exist.

May touch: nothing. Tests: tests/conformance/test_cli.py.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.aot import check as aot
from conformance.aot.command import DEFAULT_MODELS, NIGHTLY
from conformance.aot.topologies import DEFAULT_TOPOLOGY
from conformance.case_list import STRENGTH
from conformance.checks import CHECKS
from conformance.devices import DEFAULT_DEVICES
from conformance.known_issues import BUNDLED
from conformance.report.verdict import EXIT_CANNOT_START

DEFAULT_TARGETS = ("conformance.targets.bundled:halo", "conformance.targets.bundled:all_gather")
ALL_CHECKS = ",".join(CHECKS)
NIGHTLY_SECONDS = 7200.0
_DATABASE = Path(".halocheck")

Command = Callable[[argparse.Namespace], int]
Adder = Callable[..., argparse.ArgumentParser]


def parse_options(arguments: list[str], commands: Mapping[str, Command]) -> argparse.Namespace:
    """The options of one command; `command` among them is its function. Exits on what it does not know."""
    parser, known_options = make_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            parser.exit(EXIT_CANNOT_START, f"halocheck: {name!r} is one argument too many\n")
        nearest = difflib.get_close_matches(name, known_options, n=1, cutoff=0.0)[0]
        parser.exit(EXIT_CANNOT_START, f"halocheck: unknown option {name!r}; the nearest option is {nearest!r}\n")
    return options


def version_of(distribution: str) -> str:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def make_parser(commands: Mapping[str, Command]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and every option it knows (for suggestions)."""
    parser = argparse.ArgumentParser(
        prog="halocheck",
        description="Holds sliding-window attention under context parallelism against a float64 oracle.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"halocheck {version_of('halocheck')}")
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    common = _common()
    parsers = {
        "run": _run_parser(add, common),
        "replay": _replay_parser(add, common),
        "aot": _aot_parser(add),
        "selftest": _selftest_parser(add),
    }
    for name, command_parser in parsers.items():
        command_parser.set_defaults(command=commands[name])
    return parser, [option for one in parsers.values() for option in one._option_string_actions]


def _common() -> argparse.ArgumentParser:
    """The options of every command that runs cases."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    mesh = f"{DEFAULT_DEVICES.platform}:{DEFAULT_DEVICES.count}"
    said = f"cpu:N simulated devices, or tpu: those of this machine (default {mesh})"
    common.add_argument("--mesh", default=mesh, metavar="MESH", help=said)
    common.add_argument(
        "--checks", default=ALL_CHECKS, metavar="A,B", help=f"which checks (default {ALL_CHECKS}; also {aot.NAME})"
    )
    common.add_argument("--report", type=Path, metavar="DIR", help="write DIR/report.json")
    return common


def _run_parser(add: Adder, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    said = "the main job: targets on the case list, and a verdict"
    parser = add("run", parents=[common], allow_abbrev=False, help=said)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="module:attribute or file.py:attribute (default: the bundled ones)"
    )
    parser.add_argument("--profile", choices=tuple(STRENGTH), default="quick", help="which case list (default quick)")
    parser.add_argument("--examples", type=int, metavar="N", help="cases in all (default: the profile's)")
    parser.add_argument(
        "--seconds", type=float, metavar="T", help="stop after T seconds (nightly: 7200); finishes the covering list"
    )
    _add_directory(
        parser, "--database", _DATABASE, f"nightly: hypothesis's examples and observations (default {_DATABASE})"
    )
    parser.add_argument(
        "--known-issues", type=Path, default=BUNDLED, metavar="FILE", help="JSON (default: those of the public kernels)"
    )
    parser.add_argument(
        "--hosts", type=int, default=1, metavar="N", help="share the devices among N processes (default 1)"
    )
    parser.add_argument("--host", type=int, metavar="I", help="this command is host I of --hosts, of a slice of TPUs")
    parser.add_argument("--coordinator", metavar="ADDRESS:PORT", help="with --host: where host 0 is reached")
    parser.add_argument("--exchange", type=Path, metavar="DIR", help="with --host: a folder that every host sees")
    _add_seed(parser)
    return parser


def _replay_parser(add: Adder, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add("replay", parents=[common], allow_abbrev=False, help="one case, every check, in full detail")
    parser.add_argument("case", metavar="CASE", help='the text of a case: "v=1 seq_len=64 …"')
    parser.add_argument("target", nargs="?", default=DEFAULT_TARGETS[0], metavar="TARGET")
    return parser


def _aot_parser(add: Adder) -> argparse.ArgumentParser:
    said = "compile for a TPU that is not there: transfers, bytes, overlap, memory"
    parser = add("aot", allow_abbrev=False, help=said)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: the bundled halo and all_gather")
    for name, default, metavar, also in (
        ("topology", DEFAULT_TOPOLOGY, "NAME", "; several with commas, or all"),
        ("models", ",".join(DEFAULT_MODELS), "A,B", f"; {NIGHTLY}: what a nightly run on TPUs runs"),
        ("layers", "local", "A,B", "; local, global, or both"),
        ("layouts", "contiguous,dual_chunk_swap", "A,B", ""),
    ):
        parser.add_argument(f"--{name}", default=default, metavar=metavar, help=f"default {default}{also}")
    _add_directory(parser, "--report", None, "write DIR/aot.json")
    return parser


def _selftest_parser(add: Adder) -> argparse.ArgumentParser:
    parser = add("selftest", allow_abbrev=False, help="known faults against the checks: which check sees which")
    parser.add_argument("--faults", metavar="A,B", help="which faults (default: the whole catalogue)")
    _add_seed(parser)
    _add_directory(parser, "--report", None, "write DIR/selftest.json")
    return parser


def _add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the case list (default 0)")


def _add_directory(parser: argparse.ArgumentParser, name: str, default: Any, help_: str) -> None:
    parser.add_argument(name, type=Path, default=default, metavar="DIR", help=help_)
