"""The process that compiles: `python -m conformance.aot.program` reads a job from standard input and writes what it
learnt, a line of JSON for each case, to the file that the job names.

May touch: JAX, libtpu, the target. Tests: tests/conformance/test_aot_command.py (with libtpu), in the slow tier.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import topologies

from conformance.aot.schedule import kernels_of, transfers_of
from conformance.calling import Named, Setting, call_target
from conformance.case_text import parse_case
from conformance.mesh import mesh_of, shardings_of
from conformance.problem import Case, Problem
from conformance.program_facts import cost_facts, program_facts
from conformance.target import Declined, Target, TargetError, load_target
from conformance.traced import scope


def main() -> None:
    """Compiles every case of the job, one after the other."""
    job = json.load(sys.stdin)
    with open(job["results"], "w", encoding="utf-8") as results:
        try:
            target = load_target(job["target"])
        except TargetError as error:
            _tell(results, {"load_error": error.report})
            return
        _tell(results, {"description": dataclasses.asdict(target.description)})
        topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"])
        for text in job["cases"]:
            _tell(results, _compiled(target, parse_case(text), topology.devices))


def _tell(results: TextIO, message: Named) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


def _compiled(target: Target, case: Case, devices: Any) -> Named:
    """What compiling one case tells; `declined`, `raised` or `facts`, as of execution.execute."""
    problem = case.problem
    if problem.num_devices > len(devices):
        return {"declined": f"needs {problem.num_devices} devices, the topology has {len(devices)}"}
    reason = target.supports(problem)
    if reason is not None:
        return {"declined": reason}
    setting = Setting(target, problem, mesh_of(problem, devices), ("attention",))
    arrays = _abstract_arrays(problem, setting.mesh)
    try:
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
    return {
        "facts": program_facts(traced, compiled, cotangents),
        "cost": cost_facts(traced),
        "transfers": [dataclasses.asdict(transfer) for transfer in transfers_of(hlo)],
        "kernels": kernels_of(hlo),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
    }


def _step(setting: Setting, arrays: Named) -> Named:
    """One forward and its backward, as in a training step."""
    differentiable = {name: arrays[name] for name in ("query", "key", "value", "sinks") if name in arrays}
    others = {name: array for name, array in arrays.items() if name not in differentiable}
    with scope("forward", "attention"):
        outputs, vjp = jax.vjp(lambda inputs: call_target(setting, "attention", {**others, **inputs}), differentiable)
    with scope("backward", "attention"):
        (gradients,) = vjp({"out": arrays["dout"]})
    return {**outputs, **{f"d{name}": gradient for name, gradient in gradients.items()}}


def _abstract_arrays(problem: Problem, mesh: jax.sharding.Mesh) -> Named:
    """The shapes, dtypes and placements of the arrays of the contract."""
    rows = (problem.batch, problem.seq_len)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*rows, problem.num_query_heads, problem.head_dim),
        "key": (*rows, problem.num_kv_heads, problem.head_dim),
        "value": (*rows, problem.num_kv_heads, problem.value_dim),
        "dout": (*rows, problem.num_query_heads, problem.value_dim),
    }
    if problem.shared_kv:
        del shapes["value"]
    dtypes = dict.fromkeys(shapes, np.dtype(jax.numpy.dtype(problem.dtype)))
    if problem.segments:
        shapes["segment_ids"], dtypes["segment_ids"] = rows, np.dtype(np.int32)
    if problem.sinks:
        shapes["sinks"], dtypes["sinks"] = (problem.num_query_heads,), np.dtype(np.float32)
    places = shardings_of(problem, mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, dtypes[name], sharding=places[name.removeprefix("d")])
        for name, shape in shapes.items()
    }


if __name__ == "__main__":
    main()
