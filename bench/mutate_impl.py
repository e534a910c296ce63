"""Mutation testing of `impl` with the suite as the killer: does every small change of the code become a finding?

    python bench/mutate_impl.py [--files exchange,halo,ring] [--every N] [--from N] [--programs N]

Changes one thing at a time in a copy of the code: a comparison, a number by one, a sum to a difference, a sign, an axis
for another, the larger for the smaller, the ends of a permutation's pairs. Each mutant runs as a target of its file's
strategies on cases of the quick list until a check has a finding; what no check sees is put to the file's tests in
`tests/impl`. Survivors are printed with their line, to be looked at: either they change no result, or the suite is
blind (docs/mutation.md). Exit status 1 if any mutant survives both. May touch: a temporary copy, worker processes.
"""

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.case_list import case_list
from conformance.checks import CHECKS
from conformance.devices import DEFAULT_DEVICES
from conformance.problem import Case
from conformance.selftest import in_order, spread
from conformance.session import DECLINED, FINDING, Session
from conformance.target import TargetError

ROOT = Path(__file__).resolve().parent.parent
# The strategies that a file's code runs in, and the tests of `tests/impl` that know it best.
STRATEGIES = {
    "exchange": (("halo",), ("exchange_plan",)),
    "halo": (("halo",), ("halo",)),
    "halo_spans": (("halo",), ("halo_spans",)),
    "all_gather": (("all_gather",), ()),
    "ring": (("ring", "usp"), ("ring",)),
    "ulysses": (("ulysses",), ()),
    "usp": (("usp",), ()),
    "head_exchange": (("ulysses", "usp"), ()),
    "heads": (("halo", "usp"), ("heads",)),
    "layout": (("halo", "ulysses", "ring"), ("layout",)),
    "local_attention": (("halo", "all_gather"), ("kernels",)),
    "sharded": (("halo", "usp"), ()),
    "wide_sums": (("halo", "all_gather"), ()),
    "kernels/xla": (("all_gather", "halo"), ("kernels",)),
    "kernels/query_blocks": (("all_gather", "halo"), ("kernels",)),
}
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And}
_NAMES = {
    "context_axis": "data_axis",
    "data_axis": "context_axis",
    "tensor_axis": "context_axis",
    "ulysses_axis": "context_axis",
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "rows_before": "rows_after",
    "rows_after": "rows_before",
}
# A target like any other: each mutant is another file, so that it is imported anew by a worker that goes on.
_TARGET = """import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "impl"]:
    del sys.modules[name]
sys.modules.pop("conformance.targets.bundled", None)
from conformance.targets.bundled import all_gather, halo, ring, ulysses, usp
"""


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
    parser.add_argument("--from", type=int, default=0, dest="first", help="where to begin to count them")
    parser.add_argument("--programs", type=int, default=40, help="cases that a mutant is tried on, of each strategy")
    options = parser.parse_args()
    cases = spread(in_order(case_list("quick", 0, num_devices=DEFAULT_DEVICES.count)), tuple(CHECKS), 150)
    mutants = [mutant for file in options.files.split(",") for mutant in mutants_of(file)]
    mutants = mutants[options.first :: options.every]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory)
        for package in ("oracle", "impl", "conformance", "tests"):
            shutil.copytree(ROOT / package, copied / package, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / file, copied / file)
        os.environ["PYTHONPATH"] = directory
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of one second would share compiled code
        trial = Trial(copied, cases, options.programs)
        for number, mutant in enumerate(mutants, 1):
            killer = trial.killer(mutant, number)
            survivors += killer is None
            verdict = "SURVIVES" if killer is None else f"killed by {killer}"
            print(
                f"{number}/{len(mutants)} impl/{mutant.file}.py:{mutant.line}: {mutant.change}: {verdict}", flush=True
            )
        trial.close()
    print(f"{len(mutants)} mutants, {survivors} survive")
    sys.exit(1 if survivors else 0)


class Trial:
    """Puts one mutant after the other to the checks, in worker processes that go on, and then to the tests."""

    def __init__(self, copied: Path, cases: list[Case], programs: int) -> None:
        self._copied, self._cases, self._programs = copied, cases, programs
        self._session: Session | None = None

    def killer(self, mutant: Mutant, number: int) -> str | None:
        """What kills the mutant: a check, that it does not load, or the tests alone; None if it survives."""
        strategies, tests = STRATEGIES[mutant.file]
        path = self._copied / "impl" / f"{mutant.file}.py"
        right = path.read_text()
        path.write_text(mutant.source)
        target = self._copied / f"mutant_{number}.py"
        target.write_text(_TARGET)
        try:
            for strategy in strategies:
                if killer := self._check(f"{target}:{strategy}"):
                    return killer
            return self._test(tests)
        finally:
            path.write_text(right)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._session is not None:
            self._session.close()

    def _check(self, spec: str) -> str | None:
        try:
            if self._session is None:
                self._session = Session(spec, DEFAULT_DEVICES)
            else:
                self._session.load(spec)
        except TargetError:
            self.close()
            self._session = None
            return "not loading"
        ran = 0
        for case in self._cases:
            result = self._session.run(case)
            if result.status == FINDING:
                return f"{result.findings[0].check} on program {ran + 1}"
            ran += result.status != DECLINED
            if ran >= self._programs:
                break
        return None

    def _test(self, names: tuple[str, ...]) -> str | None:
        if not names:
            return None
        files = [f"tests/impl/test_{name}.py" for name in names]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:halocheck", "-qx", *files]
        ran = subprocess.run(command, cwd=self._copied, capture_output=True, text=True)
        if ran.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)} ends with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr}")
        return "the tests alone" if ran.returncode else None


def mutants_of(file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOT / "impl" / f"{file}.py").read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for index, node in enumerate(ast.walk(tree)):
        for change, mutate in _changes(node):
            changed = copy.deepcopy(tree)
            mutate(next(other for number, other in enumerate(ast.walk(changed)) if number == index))
            around = ast.unparse(parents.get(node, node))[:90].replace("\n", " ")
            line = getattr(node, "lineno", 0)
            found.append(Mutant(file, line, f"{change} in {around}", ast.unparse(changed)))
    yield from sorted(found, key=lambda mutant: mutant.line)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """(what, how) of each change of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        comparison = _COMPARISONS[type(node.ops[0])]
        yield f"{ast.unparse(node)} with {comparison.__name__}", lambda at: at.ops.__setitem__(0, comparison())
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        operator = _OPERATORS[type(node.op)]
        yield f"{ast.unparse(node)[:60]} with {operator.__name__}", lambda at: setattr(at, "op", operator())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield f"{ast.unparse(node)[:60]} without its sign", lambda at: setattr(at, "op", ast.UAdd())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield f"{node.value} as {value}", lambda at, value=value: setattr(at, "value", value)
    for field in ("id", "attr"):
        name = getattr(node, field, None)
        if name in _NAMES and isinstance(getattr(node, "ctx", None), ast.Load):
            yield f"{name} as {_NAMES[name]}", lambda at, field=field, name=name: setattr(at, field, _NAMES[name])
    if (
        isinstance(node, ast.ListComp | ast.GeneratorExp)
        and isinstance(node.elt, ast.Tuple)
        and len(node.elt.elts) == 2
    ):
        yield f"{ast.unparse(node.elt)} reversed", lambda at: at.elt.elts.reverse()


if __name__ == "__main__":
    main()
