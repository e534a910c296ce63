"""Mutation testing of `impl` with the suite as the killer: does every small change of the code become a finding?

    python bench/mutate_impl.py [--files exchange,halo,ring] [--every N] [--programs N]

Changes one thing at a time in a copy of the code: a comparison's sign, an index or offset by one, a sum to a
difference, the ends of a permutation's pairs. Each mutant runs as the target of its strategy on cases of the quick
list, small ones first, until a check has a finding. Survivors are printed with their line, to be looked at: either
they change no result, or the suite is blind. Exit status 1 if any survives. May touch: a temporary copy.
"""

import argparse
import ast
import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case_list import case_list
from conformance.devices import DEFAULT_DEVICES
from conformance.problem import Case
from conformance.selftest import in_order
from conformance.session import DECLINED, FINDING, Session
from conformance.target import TargetError

ROOT = Path(__file__).resolve().parent.parent
# The strategies that a file's code runs in; a mutant survives only if none of them shows it.
STRATEGIES = {
    "exchange": ("halo",),
    "halo": ("halo",),
    "halo_spans": ("halo",),
    "all_gather": ("all_gather",),
    "ring": ("ring",),
    "ulysses": ("ulysses",),
    "usp": ("usp",),
    "head_exchange": ("ulysses", "usp"),
    "heads": ("halo", "all_gather"),
    "layout": ("halo", "ring"),
    "local_attention": ("halo", "all_gather"),
    "sharded": ("halo",),
    "wide_sums": ("halo", "all_gather"),
    "kernels/xla": ("halo", "all_gather"),
}
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file (under impl, without .py), the line, what was changed, and the whole new source."""

    file: str
    line: int
    change: str
    source: str


def main() -> None:
    """Tries the mutants and prints what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default=",".join(STRATEGIES), help="files of impl, without .py")
    parser.add_argument("--every", type=int, default=1, help="only every N-th mutant")
    parser.add_argument("--programs", type=int, default=40, help="cases that a mutant is tried on, of each strategy")
    options = parser.parse_args()
    cases = in_order(case_list("quick", 0, num_devices=DEFAULT_DEVICES.count))
    mutants = [mutant for file in options.files.split(",") for mutant in mutants_of(file)][:: options.every]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory)
        for package in ("oracle", "impl", "conformance"):
            shutil.copytree(ROOT / package, copied / package, ignore=shutil.ignore_patterns("__pycache__"))
        os.environ["PYTHONPATH"] = directory
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of one second would share compiled code
        for number, mutant in enumerate(mutants, 1):
            killed = tried(mutant, copied, cases, options.programs)
            survivors += killed is None
            verdict = "SURVIVES" if killed is None else f"killed by {killed}"
            print(
                f"{number}/{len(mutants)} impl/{mutant.file}.py:{mutant.line}: {mutant.change}: {verdict}", flush=True
            )
    print(f"{len(mutants)} mutants, {survivors} survive")
    sys.exit(1 if survivors else 0)


def tried(mutant: Mutant, copied: Path, cases: tuple[Case, ...], programs: int) -> str | None:
    """What kills the mutant: a check, or that it does not load; None if it survives."""
    path = copied / "impl" / f"{mutant.file}.py"
    right = path.read_text()
    path.write_text(mutant.source)
    try:
        for strategy in STRATEGIES[mutant.file]:
            if killer := _killer(f"conformance.targets.bundled:{strategy}", cases, programs):
                return killer
        return None
    finally:
        path.write_text(right)


def _killer(spec: str, cases: tuple[Case, ...], programs: int) -> str | None:
    try:
        session = Session(spec, DEFAULT_DEVICES)
    except TargetError:
        return "not loading"
    ran = 0
    try:
        for case in cases:
            result = session.run(case)
            if result.status == FINDING:
                return f"{result.findings[0].check} on program {ran + 1}"
            ran += result.status != DECLINED
            if ran >= programs:
                break
        return None
    finally:
        session.close()


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOT / "impl" / f"{file}.py").read_text())
    for index, node in enumerate(ast.walk(tree)):
        for change, mutate in _changes(node):
            changed = copy.deepcopy(tree)
            at = next(other for number, other in enumerate(ast.walk(changed)) if number == index)
            mutate(at)
            yield Mutant(file, getattr(node, "lineno", 0), change, ast.unparse(changed))


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """(what, how) of each change of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        flipped = _COMPARISONS[type(node.ops[0])]

        def flip(at: ast.Compare) -> None:
            at.ops[0] = flipped()

        yield f"{ast.unparse(node)} with {flipped.__name__}", flip
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub if isinstance(node.op, ast.Add) else ast.Add

        def turn(at: ast.BinOp) -> None:
            at.op = other()

        yield f"{ast.unparse(node)} with {other.__name__}", turn
    if isinstance(node, ast.BinOp | ast.Subscript | ast.Slice | ast.Compare):
        for field, child in ast.iter_fields(node):
            if isinstance(child, ast.Constant) and type(child.value) is int:
                for by in (1, -1):

                    def shift(at: ast.AST, field: str = field, by: int = by) -> None:
                        getattr(at, field).value += by

                    yield f"{ast.unparse(node)} with {child.value + by}", shift
    if (
        isinstance(node, ast.ListComp | ast.GeneratorExp)
        and isinstance(node.elt, ast.Tuple)
        and len(node.elt.elts) == 2
    ):

        def swap(at: ast.ListComp | ast.GeneratorExp) -> None:
            assert isinstance(at.elt, ast.Tuple)
            at.elt.elts.reverse()

        yield f"{ast.unparse(node.elt)} reversed", swap


if __name__ == "__main__":
    main()
