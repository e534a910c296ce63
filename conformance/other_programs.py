"""Further programs beside a case's own, on designated cases: other problems, then the first one traced once more.

What a target keeps from trace to trace (a mask by shape, a plan by layout) is then used where it does not belong. The
second trace takes the gradient of one argument alone. In the worker; the check `invariance` judges.
May touch: JAX and the target. Tests: tests/conformance/test_other_programs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from conformance.calling import Named, Setting, call_target
from conformance.case_text import format_case
from conformance.inputs import Inputs, inputs_of
from conformance.mesh import mesh_of
from conformance.neighbours import argument_alone, neighbours_of
from conformance.problem import Case
from conformance.target import Declined

Place = Callable[[Setting, Inputs], Named]
Results = tuple[Named, dict[str, np.ndarray]]


def other_programs(setting: Setting, case: Case, arrays: Named, place: Place) -> Results:
    """Calls the target on the case's neighbours (`other_0/attention/out`, …), then on the case (`alone/attention/…`).

    `arrays` are the case's placed inputs, `place` makes such of other inputs. The message is {"programs": {"others":
    the text of each neighbour that the target takes, by its name, "alone": the argument, "raised": (program, type,
    message)}}.
    """
    facts: Named = {"others": {}, "alone": argument_alone(case)}
    results: dict[str, np.ndarray] = {}
    program = "another problem"
    try:
        for number, neighbour in enumerate(neighbours_of(case)):
            if setting.target.supports(neighbour.problem) is not None:
                continue
            mesh = mesh_of(neighbour.problem, jax.devices())
            other = dataclasses.replace(setting, problem=neighbour.problem, mesh=mesh)
            placed = place(other, inputs_of(neighbour))
            with contextlib.suppress(Declined):
                results |= _run(f"other_{number}", _forward(other), placed)
                facts["others"][f"other_{number}"] = format_case(neighbour)
        program = "the first problem again"
        results |= _run("alone", _gradient_alone(setting, facts["alone"]), arrays)
    except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
        facts["raised"] = [program, type(error).__name__, repr(error)[:1000]]
    return {"programs": facts}, results


def _forward(setting: Setting) -> Callable[[Named], Named]:
    return lambda arrays: call_target(setting, "attention", arrays)


def _gradient_alone(setting: Setting, argument: str) -> Callable[[Named], Named]:
    """The forward, and the gradient of one argument; the others are not differentiated at all."""

    def gradient(arrays: Named) -> Named:
        def of_argument(array: Any) -> Any:
            return call_target(setting, "attention", {**arrays, argument: array})["out"]

        out, vjp = jax.vjp(of_argument, arrays[argument])
        return {"out": out, f"d{argument}": vjp(arrays["dout"])[0]}

    return gradient


def _run(program: str, function: Callable[[Named], Named], arrays: Named) -> dict[str, np.ndarray]:
    results = jax.block_until_ready(jax.jit(function)(arrays))
    return {f"{program}/attention/{tensor}": np.asarray(array) for tensor, array in results.items()}
