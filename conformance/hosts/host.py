"""The process of one host: `python -m conformance.hosts.host JOB PROCESS_ID` runs the job's cases with all others.

Every process holds its shards against the oracle at the places where faults live, sums up its queries' share of dsinks,
and writes a line of JSON a case.
May touch: JAX, the target, the oracle's probe. Tests: tests/conformance/test_hosts_launch.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from conformance.answers import Answer, answer_at_places, precision_of
from conformance.calling import ContractBroken, Setting, forward_and_gradients, numerics_facts
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.execution import compiled_program, misplacement, what_was_raised
from conformance.global_state import changes, global_state
from conformance.hosts.shards import HeldRows, heads_here, not_finite_here, placed_shards, queries_here
from conformance.hosts.sinks import told_here
from conformance.inputs import NUM_DRAWS, redraw
from conformance.loading import load_and_put_back
from conformance.mesh import mesh_of
from conformance.problem import Case
from conformance.target import Declined, Target, TargetDescription, TargetError, calls_of
from conformance.watch import MANY_PRINTED_BYTES

_TELL_SECONDS = 60.0
_OF_VALUES = ("output", "residuals", "gradients")


def main() -> None:
    """Runs every case of the job."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    process_id = int(sys.argv[2])
    with open(Path(job["results"]) / f"{process_id}.jsonl", "w", encoding="utf-8") as results:
        try:
            target = load_and_put_back(job["target"])
        except TargetError as error:
            _tell(results, {"load_error": error.report})
            return
        if job["platform"] == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if job["num_processes"] > 1:
            jax.distributed.initialize(job["coordinator"], job["num_processes"], process_id)
        target = dataclasses.replace(
            target, description=dataclasses.replace(target.description, platform=job["platform"])
        )
        _tell(results, {"description": dataclasses.asdict(target.description)})
        for text in job["cases"]:
            _tell(results, {"begins": text})
            _tell(results, _result(target, parse_case(text), lambda phase: _tell(results, {"phase": phase})))
        # Kilobytes on Linux: what this host needed at the most, the programs included.
        _tell(results, {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
        if job["num_processes"] > 1:
            jax.distributed.shutdown()


def _tell(results: TextIO, message: Mapping[str, Any]) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


def _result(target: Target, case: Case, report: Callable[[str], None]) -> dict[str, Any]:
    """What this process found on one case: `declined`, or `shares` and `findings`; `report` says that it gets on."""
    problem = case.problem
    if problem.num_devices != jax.device_count():
        return {"declined": f"takes {problem.num_devices} of {jax.device_count()} devices: every host must hold some"}
    if reason := target.supports(problem):
        return {"declined": reason}
    setting = Setting(target, problem, mesh_of(problem, jax.devices()), calls_of(target.description, case))
    message: dict[str, Any] = {}
    ran, before, printed = _Ran(), global_state(), _printed_bytes()
    try:
        with jax.default_matmul_precision(problem.precision):
            message = _run(setting, case, ran, report)
    except Declined as error:
        return {"declined": str(error)}
    except ContractBroken as error:
        message = {"broken": [error.tensor, error.quality, error.expected, error.got]}
    except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
        message = what_was_raised(error, "forward")
    if changed := changes(before, global_state()):
        message = {**message, "changed": changed}
    if (more := _printed_bytes() - printed) > MANY_PRINTED_BYTES:
        message = {**message, "printed_bytes": more}
    numerics = numerics_facts(target, problem, setting.mesh)
    description = target.description.of_problem(not numerics)
    answers = _Answers(description, case, ran.arrays)
    with _telling(report, "judging"):
        outcomes = _judged(Evidence(description, case, message, ran.arrays, answers=answers))
    told = {
        **numerics,
        "shares": [[check, tensor, share] for check, of in outcomes.items() for tensor, share in of.shares.items()],
        "findings": [dataclasses.asdict(finding) for of in outcomes.values() for finding in of.findings],
    }
    if problem.sinks and not outcomes["contract"].findings:
        with _telling(report, "summing up dsinks"):
            told["sinks"] = told_here(description, case, jax.process_count(), ran.dsinks, ran.queries)
    return told


@contextlib.contextmanager
def _telling(report: Callable[[str], None], phase: str) -> Iterator[None]:
    """Tells of a phase now and again while it lasts: the oracle, which is ours and not the target's, may take longer
    for a long window than a target may compute without a word."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_TELL_SECONDS):
            report(phase)

    report(phase)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _printed_bytes() -> int:
    """What this process has printed so far: its standard output is a file of whoever started it."""
    return os.fstat(sys.stdout.fileno()).st_size


@dataclasses.dataclass
class _Ran:
    """What is here of what a case left: rows of outputs, dsinks by head, and which queries are this process's."""

    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    dsinks: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
    queries: dict[int, list[tuple[int, np.ndarray]]] = dataclasses.field(default_factory=dict)


def _run(setting: Setting, case: Case, ran: _Ran, report: Callable[[str], None]) -> dict[str, Any]:
    undefined = setting.target.description.empty_rows == "undefined"
    misplaced: dict[str, str] = {}
    not_finite: dict[str, str] = {}
    program = None
    for draw in range(NUM_DRAWS):
        report(f"making draw {draw}")
        placed = placed_shards(redraw(case, draw), setting.mesh, zero_at_empty_rows=undefined, report=report)
        ran.queries = queries_here(placed["query"], case.problem)
        report("tracing and compiling")
        program = program or compiled_program(setting, forward_and_gradients, placed)
        report(f"running draw {draw}")
        results = jax.block_until_ready(program.compiled(placed))
        del placed  # the devices hold one draw at a time, as a program that was compiled for them counts on
        report(f"fetching draw {draw}")
        for name in sorted(results):
            array = results.pop(name)
            tensor = name.partition("/")[2].removesuffix(" of vjp")
            has_undefined_rows = undefined and case.problem.padding is not None and tensor in ("out", "lse")
            if place := misplacement(setting, name, array):
                misplaced[name] = place
            elif not has_undefined_rows and (what := not_finite_here(tensor, array)):
                not_finite[name] = what
            if array.ndim >= 3:
                ran.arrays[f"{draw}/{name}"] = HeldRows(array)
            elif tensor.endswith("dsinks"):
                ran.dsinks[f"{draw}/{name}"] = heads_here(array)
            del array
    return {"misplaced": misplaced, "diverged": {}, "not_finite": not_finite}


def _judged(evidence: Evidence) -> dict[str, Outcome]:
    outcomes = {"contract": CHECKS["contract"].run(evidence)}
    if not outcomes["contract"].findings:
        outcomes |= {name: CHECKS[name].run(evidence) for name in _OF_VALUES}
    return outcomes


class _Answers:
    """The oracle's answers at those of the places where faults live that this process holds."""

    def __init__(self, target: TargetDescription, case: Case, arrays: Mapping[str, HeldRows]) -> None:
        self._target, self._case, self._arrays = target, case, arrays
        self._made: dict[tuple[int, str], Answer] = {}

    def __call__(self, draw: int, call: str) -> Answer:
        if (draw, call) not in self._made:
            self._made[draw, call] = self._answer(draw, call)
        return self._made[draw, call]

    def _answer(self, draw: int, call: str) -> Answer:
        case = redraw(self._case, draw)
        precision = precision_of(self._target, case.problem.dtype, case.problem.precision)
        index_of = np.argsort(case.problem.positions())
        held = {
            tensor: rows
            for name, rows in self._arrays.items()
            for tensor in [name.rpartition("/")[2].removesuffix(" of vjp")]
        }

        def is_here(tensor: str, batch_row: int, position: int, head: int) -> bool:
            return tensor in held and held[tensor].holds(batch_row, int(index_of[position]), head)

        with_lse, defines_empty_rows = call == "attention_with_lse", self._target.empty_rows == "zero"
        return answer_at_places(case, with_lse, defines_empty_rows, precision, is_here)


if __name__ == "__main__":
    main()
