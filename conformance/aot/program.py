"""The process that compiles: `python -m conformance.aot.program` reads a job from standard input and writes what it
learnt, a line of JSON for each case, to the file that the job names.

May touch: JAX, libtpu, the target. Tests: tests/conformance/test_aot_compiled.py, where libtpu is installed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import jax
from jax.experimental import topologies

from conformance.aot.bundles import dumped_schedules
from conformance.aot.schedule import kernel_instructions, kernels_of, transfers_of
from conformance.calling import Named, Setting, call_target, numerics_facts
from conformance.case_text import parse_case
from conformance.input_shapes import input_shapes, placed_shapes
from conformance.loading import load_and_put_back
from conformance.mesh import mesh_of
from conformance.problem import Case
from conformance.program_facts import cost_facts, interpreted_kernels, kernel_phases, kernel_runs, program_facts
from conformance.remat_programs import gradient_programs
from conformance.target import Declined, Target, TargetError
from conformance.traced import scope


def main() -> None:
    """Compiles every case of the job, one after the other.

    `schedules` of the job is an empty folder, where libtpu writes them, or "": then neither the kernels' schedules nor
    their runs under rematerialisation are looked at, which halves the time.
    """
    job = json.load(sys.stdin)
    dump = Path(job["schedules"]) if job["schedules"] else None
    with open(job["results"], "w", encoding="utf-8") as results:
        try:
            target = load_and_put_back(job["target"])
        except TargetError as error:
            _tell(results, {"load_error": error.report})
            return
        _tell(results, {"description": dataclasses.asdict(target.description)})
        topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"])
        for text in job["cases"]:
            _tell(results, _compiled(target, parse_case(text), topology.devices, dump))


def _tell(results: TextIO, message: Named) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


def _compiled(target: Target, case: Case, devices: Any, dump: Path | None) -> Named:
    """What compiling one case tells; `declined`, `raised` or `facts`, as of execution.execute."""
    problem = case.problem
    if problem.num_devices > len(devices):
        return {"declined": f"needs {problem.num_devices} devices, the topology has {len(devices)}"}
    reason = target.supports(problem)
    if reason is not None:
        return {"declined": reason}
    setting = Setting(target, problem, mesh_of(problem, devices), ("attention",))
    arrays = placed_shapes(problem, setting.mesh, input_shapes(problem))
    try:
        numerics = numerics_facts(target, problem, setting.mesh)
        traced = jax.jit(lambda arrays: _step(setting, arrays)).trace(arrays)
        compiled = traced.lower().compile()
    except Declined as error:
        return {"declined": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever foreign code and the compiler raise is what was asked for
        told = str(error).strip().splitlines() or [""]
        return {"raised": {"type": type(error).__name__, "message": told[0][:400], "traceback": traceback.format_exc()}}
    hlo: Any = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    cotangents = [name == "dout" for name in sorted(arrays)]  # a dict's leaves are in this order
    kernels = kernels_of(hlo)
    facts: Named = {
        **numerics,
        "facts": program_facts(traced, compiled, cotangents),
        "cost": cost_facts(traced),
        "transfers": [dataclasses.asdict(transfer) for transfer in transfers_of(hlo)],
        "kernels": kernels,
        "instructions": kernel_instructions(hlo),
        # One that is interpreted on other platforms alone, by lax.platform_dependent, has a compiled twin of its name.
        "interpreted": [name for name in interpreted_kernels(traced) if name not in kernels],
        "kernel_phases": kernel_phases(traced) if kernels else [],
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
    }
    if dump is not None:
        facts["schedules"] = _schedules(dump, hlo)
        facts["runs"] = {name: _runs(program, arrays) for name, program in gradient_programs(setting).items()}
    return facts


def _schedules(dump: Path, hlo: str) -> dict[str, Named]:
    """The schedule of each kernel, by its instruction; what libtpu wrote of this program is then deleted."""
    schedules = dumped_schedules(dump, kernel_instructions(hlo))
    for path in dump.iterdir():
        path.unlink()
    return {name: dataclasses.asdict(schedule) for name, schedule in schedules.items()}


def _runs(program: Any, arrays: Named) -> dict[str, int | None] | str:
    """How often each kernel runs in a program, or what it raises."""
    try:
        return kernel_runs(program.trace(arrays))
    except Exception as error:  # noqa: BLE001  # the plain program is judged; this one is only counted
        return f"raises {type(error).__name__}"


def _step(setting: Setting, arrays: Named) -> Named:
    """One forward and its backward, as in a training step."""
    differentiable = {name: arrays[name] for name in ("query", "key", "value", "sinks") if name in arrays}
    others = {name: array for name, array in arrays.items() if name not in differentiable}
    with scope("forward", "attention"):
        outputs, vjp = jax.vjp(lambda inputs: call_target(setting, "attention", {**others, **inputs}), differentiable)
    with scope("backward", "attention"):
        (gradients,) = vjp({"out": arrays["dout"]})
    return {**outputs, **{f"d{name}": gradient for name, gradient in gradients.items()}}


if __name__ == "__main__":
    main()
