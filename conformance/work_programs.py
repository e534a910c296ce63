"""Compiles a target's program for the same problem at two lengths and two windows, to see what its cost follows.

In the worker, nothing runs; the check `work` judges. May touch: JAX and the target.
Tests: tests/conformance/test_checks_work.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from conformance.calling import Setting, forward_and_gradients
from conformance.input_shapes import input_shapes, placed_shapes
from conformance.mesh import mesh_of
from conformance.problem import Problem
from conformance.program_facts import cost_facts
from conformance.target import Declined

# Chunks are long against the window, and the window against nothing: whatever a kernel's block size is, a few of them
# fit, and a cost that is a square of the chunk's length outgrows the rest.
_CHUNK, _WINDOW = 1024, 128
FACTOR = 4
"""How much longer the longer sequence is, and how much wider the wider window."""


def work_facts(setting: Setting) -> dict[str, Any]:
    """cost_facts of the programs "base", "longer" (the sequence) and "wider" (the window).

    The first two are compiled where the target claims `halo`; everything else is traced only.

    `raised` (type and message), where one of them raises; `declined`, where the target declines one.
    """
    facts: dict[str, Any] = {}
    # Compiling costs twice what the whole case does, and only a halo is judged by what it tells more: memory.
    is_judged = setting.target.description.communication == "halo"
    for name, problem, is_compared in _problems(setting.problem):
        try:
            if (reason := setting.target.supports(problem)) is not None:
                return {"declined": reason}
            facts[name] = _costs(setting, problem, is_judged and is_compared)
        except Declined as error:
            return {"declined": str(error)}
        except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
            return {"raised": [type(error).__name__, repr(error)[:1000]]}
    return facts


def _problems(of_case: Problem) -> Iterator[tuple[str, Problem, bool]]:
    """Like the case's problem, on at most two ranks: only their chunks' lengths and windows differ."""
    ranks = min(2, of_case.context_parallelism)
    chunks = ranks * (of_case.num_chunks // of_case.context_parallelism)
    base = of_case.replace(
        context_parallelism=ranks,
        batch=of_case.data_parallelism,
        seq_len=chunks * _CHUNK,
        sliding_window_size=_WINDOW,
        window=None,
    )
    yield "base", base, True
    yield "longer", base.replace(seq_len=FACTOR * base.seq_len), True
    yield "wider", base.replace(sliding_window_size=FACTOR * _WINDOW, window=None), False


def _costs(setting: Setting, problem: Problem, compiles: bool) -> dict[str, Any]:
    asked = Setting(setting.target, problem, mesh_of(problem, jax.devices()), ("attention",))
    shapes = placed_shapes(problem, asked.mesh, input_shapes(problem))
    traced = jax.jit(lambda arrays: forward_and_gradients(asked, arrays)).trace(shapes)
    cheaply: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}  # nothing of it will run
    return cost_facts(traced, traced.lower().compile(cheaply) if compiles else None)
