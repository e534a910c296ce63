"""Mutation testing of `impl` with the suite as the killer: does every small change of the code become a finding?

    python bench/mutate_impl.py [--files exchange,halo,ring] [--every N] [--from N] [--lowered N] [--programs N]

Changes one thing at a time in a copy of the code (`mutants.py`). `changed_programs.py` tells which cases of the quick
list it gives another program; on these it runs as a target of its file's strategies until a check has a finding. Where
it changes no program, it is put to two cases that ask `errors`: what is refused is in no program. What no check sees is
put to the file's tests in `tests/impl`. Survivors are printed with their line, to be looked at: either they change no
result, or the suite is blind (docs/mutation.md). Exit status 1 if any mutant survives both.
May touch: a temporary copy, worker processes.
"""

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mutants import ROOT, Mutant, mutants_of

from conformance.case_list import case_list
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.devices import DEFAULT_DEVICES, worker_environment
from conformance.long_chunks import long_chunk_case
from conformance.problem import Case
from conformance.selftest import in_order, spread
from conformance.session import FINDING, Session
from conformance.target import TargetError

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
    "layout": (("halo", "all_gather", "ulysses", "ring"), ("layout",)),
    "local_attention": (("halo", "all_gather"), ("kernels",)),
    "sharded": (("halo", "usp"), ()),
    "wide_sums": (("halo", "all_gather"), ()),
    "kernels/xla": (("all_gather", "halo"), ("kernels",)),
    "kernels/query_blocks": (("all_gather", "halo"), ("kernels",)),
}
# A target like any other: each mutant is another file, so that it is imported anew by a worker that goes on.
_TARGET = """import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "impl"]:
    del sys.modules[name]
sys.modules.pop("conformance.targets.bundled", None)
from conformance.targets.bundled import all_gather, halo, ring, ulysses, usp
"""


def main() -> None:
    """Tries the mutants and prints what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default=",".join(STRATEGIES), help="files of impl, without .py")
    parser.add_argument("--every", type=int, default=1, help="only every N-th mutant")
    parser.add_argument("--from", type=int, default=0, dest="first", help="where to begin to count them")
    parser.add_argument("--lowered", type=int, default=60, help="cases a strategy whose programs are looked at")
    parser.add_argument("--programs", type=int, default=8, help="cases a strategy that are run, of these")
    options = parser.parse_args()
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
        trial = Trial(copied, options.lowered, options.programs)
        for number, mutant in enumerate(mutants, 1):
            verdict = trial.verdict(mutant, number)
            survivors += verdict.startswith("SURVIVES")
            print(
                f"{number}/{len(mutants)} impl/{mutant.file}.py:{mutant.line}: {mutant.change}: {verdict}", flush=True
            )
        trial.close()
    print(f"{len(mutants)} mutants, {survivors} survive")
    sys.exit(1 if survivors else 0)


class Trial:
    """Puts one mutant after the other to the checks, in worker processes that go on, and then to the tests."""

    def __init__(self, copied: Path, lowered: int, programs: int) -> None:
        self._copied, self._lowered, self._programs = copied, lowered, programs
        listed = in_order(case_list("quick", 0, num_devices=DEFAULT_DEVICES.count))
        listed = tuple(case for case in listed if case.problem.dtype != "float64")
        self._cases = [*spread(listed, tuple(CHECKS), 150), long_chunk_case(seed=0)]
        self._refusing = [case for case in listed if CHECKS["errors"].asks_about(case)][:2]
        self._lowering: dict[str, subprocess.Popen[str]] = {}
        self._session: Session | None = None

    def verdict(self, mutant: Mutant, number: int) -> str:
        """What kills the mutant: a check, that it does not load, or the tests alone; or that it survives, and how."""
        strategies, tests = STRATEGIES[mutant.file]
        for strategy in strategies:
            if strategy not in self._lowering:
                self._lowering[strategy] = self._started(strategy)  # while the copy is right
        path = self._copied / "impl" / f"{mutant.file}.py"
        right = path.read_text()
        path.write_text(mutant.source)
        target = self._copied / f"mutant_{number}.py"
        target.write_text(_TARGET)
        looked = []
        try:
            for strategy in strategies:
                changed = self._changed(strategy, mutant)
                cases = [self._cases[index] for index in changed["changed"]]
                if killer := self._check(f"{target}:{strategy}", cases or self._refusing):
                    return f"killed by {killer}"
                looked.append(f"{strategy}: {len(cases)} of {changed['looked_at']} programs change")
            return "killed by the tests alone" if self._test(tests) else f"SURVIVES ({'; '.join(looked)})"
        finally:
            path.write_text(right)

    def close(self) -> None:
        """Ends the worker processes."""
        for process in self._lowering.values():
            process.kill()
        if self._session is not None:
            self._session.close()

    def _started(self, strategy: str) -> subprocess.Popen[str]:
        """A process that has lowered the right programs of a strategy."""
        command = [sys.executable, str(Path(__file__).parent / "changed_programs.py"), strategy]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._copied,
            env=worker_environment(DEFAULT_DEVICES, enable_x64=False),
        )
        if _answer(process, [format_case(case) for case in self._cases], 1800) is None:
            raise RuntimeError(f"the right programs of {strategy} were not lowered")
        return process

    def _changed(self, strategy: str, mutant: Mutant) -> dict[str, Any]:
        question = {
            "file": mutant.file,
            "lines": mutant.lines,
            "at_most": self._lowered,
            "enough": self._programs,
        }
        answer = _answer(self._lowering[strategy], question, 300)
        if answer is None:  # it hangs while it is traced, on the first case at the latest
            self._lowering.pop(strategy).kill()
            answer = {"looked_at": 1, "changed": [0]}
        return answer

    def _check(self, spec: str, cases: list[Case]) -> str | None:
        try:
            if self._session is None:
                self._session = Session(spec, DEFAULT_DEVICES)
            else:
                self._session.load(spec)
        except TargetError:
            self._session = None  # it has lost its worker
            return "not loading"
        for number, case in enumerate(cases, 1):
            result = self._session.run(case)
            if result.status == FINDING:
                return f"{result.findings[0].check} on case {number} of {len(cases)}"
        return None

    def _test(self, names: tuple[str, ...]) -> bool:
        if not names:
            return False
        files = [f"tests/impl/test_{name}.py" for name in names]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:halocheck", "-qx", *files]
        ran = subprocess.run(command, cwd=self._copied, capture_output=True, text=True)
        if ran.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)} ends with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr}")
        return ran.returncode == 1


def _answer(process: subprocess.Popen[str], question: Any, seconds: float) -> Any:
    """What the process says to one line; None if it says nothing in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    readable, _, _ = select.select([process.stdout], [], [], seconds)
    return json.loads(process.stdout.readline()) if readable else None


if __name__ == "__main__":
    main()
