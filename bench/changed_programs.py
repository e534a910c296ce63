"""Which cases' programs of one strategy does a changed copy of `impl` change? Asked by `mutate_impl.py`, line by line.

A program that JAX lowers to the very same text computes the same: a mutant is worth running on the cases alone whose
programs it changes, and where it changes none, on as many as were looked at, it changes no result there. For each
target that is asked for, the programs of the right copy are lowered first, and the lines of `impl` noted that each case
runs through; a mutant is then looked at only on cases that reach what it changes.
May touch: JAX, in a process of its own, on simulated devices.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
from coverage import Coverage

import impl
from conformance.calling import Setting, forward_and_gradients
from conformance.case_text import parse_case
from conformance.input_shapes import input_shapes, placed_shapes
from conformance.mesh import mesh_of
from conformance.problem import Case
from conformance.target import Target, TargetError, load_target

IMPL = str(Path(impl.__file__).parent)
Lines = dict[str, set[int]]
"""The lines that were run, by the file's name under impl, without .py."""


def main() -> None:
    """Answers one JSON line for each that comes in: the cases first, then questions."""
    strategy = sys.argv[1]
    cases = [parse_case(text) for text in json.loads(sys.stdin.readline())]
    right = [_observed(strategy, case) for case in cases]
    print(json.dumps({"observed": len(right)}), flush=True)
    for question in map(json.loads, sys.stdin):
        print(json.dumps(_changed(strategy, question, cases, right)), flush=True)


def _changed(strategy: str, question: Any, cases: list[Case], right: list[tuple[str, Lines]]) -> dict[str, Any]:
    """How many cases that reach the lines were looked at, and which of these have another program."""
    file, (first, last) = question["file"], question["lines"]
    reached = [
        number for number, (_, lines) in enumerate(right) if any(first <= line <= last for line in lines.get(file, ()))
    ]
    looked_at, changed = 0, []
    target = _load_anew(strategy)
    for number in reached[: question["at_most"]]:
        looked_at += 1
        if target is None or _program(target, cases[number]) != right[number][0]:
            changed.append(number)
        if len(changed) == question["enough"]:
            break
    return {"looked_at": looked_at, "changed": changed}


def _load_anew(strategy: str) -> Target | None:
    """The target of the copy as it is now; None if it does not load."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "impl"]:
        del sys.modules[name]
    sys.modules.pop("conformance.targets.bundled", None)
    jax.clear_caches()
    try:
        return load_target(f"conformance.targets.bundled:{strategy}")
    except TargetError:
        return None


def _observed(strategy: str, case: Case) -> tuple[str, Lines]:
    """The program, and the lines that were run; imported anew, or what one case caches would hide from the next."""
    coverage = Coverage(data_file=None, source=[IMPL])
    with coverage.collect():
        target = _load_anew(strategy)
        assert target is not None, f"{strategy} does not load"
        program = _program(target, case)
    data = coverage.get_data()
    names = {path: path[len(IMPL) + 1 : -len(".py")] for path in data.measured_files()}
    return program, {name: set(data.lines(path) or ()) for path, name in names.items()}


def _program(target: Target, case: Case) -> str:
    """A hash of the lowered program, forward and gradients with and without lse, or of what was raised instead."""
    problem = case.problem
    calls = ("attention", "attention_with_lse") if target.description.has_lse else ("attention",)
    try:
        mesh = mesh_of(problem, jax.devices())
        setting = Setting(target, problem, mesh, calls)
        shapes = input_shapes(problem)
        shapes["dlse"] = ((problem.batch, problem.seq_len, problem.num_query_heads), "float32")
        arrays = placed_shapes(problem, mesh, shapes)
        with jax.default_matmul_precision(problem.precision):
            text = jax.jit(lambda arrays: forward_and_gradients(setting, arrays)).trace(arrays).lower().as_text()
    except Exception as error:  # noqa: BLE001  # declining is an answer too
        text = f"{type(error).__name__}: {error}"
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
