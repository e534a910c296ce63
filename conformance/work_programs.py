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


def work_facts(setting: Setting, compiles: bool) -> dict[str, Any]:
    """By layout (the case's own, and the other one that has chunks): cost_facts of the programs "base", "longer" (the
    sequence) and "wider" (the window), how many `rows` a rank holds in the longer, and how many keys the
    `wider_window` has.

    The first two of the case's own layout are compiled where the target claims `halo`, if `compiles`; all else is
    traced only. `raised` (type and message), where one of them raises; `declined`, where the target declines one.
    """
    # Compiling costs twice what the whole case does, and only a halo is judged by what it tells more: memory.
    compiles = compiles and setting.target.description.communication == "halo"
    own = setting.problem.layout
    layouts = dict.fromkeys((own, "dual_chunk_swap" if own == "contiguous" else "contiguous"))
    return {layout: _facts_of(setting, layout, compiles and layout == own) for layout in layouts}


def _facts_of(setting: Setting, layout: str, compiles: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, problem in _problems(setting.problem, layout):
        try:
            if (reason := setting.target.supports(problem)) is not None:
                return {"declined": reason}
            facts[name] = _costs(setting, problem, compiles and name != "wider")
        except Declined as error:
            return {"declined": str(error)}
        except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
            return {"raised": [type(error).__name__, repr(error)[:1000]]}
        if name == "longer":
            facts["rows"] = problem.seq_len // problem.context_parallelism
        if name == "wider":
            facts["wider_window"] = FACTOR * _WINDOW
    return facts


def _problems(of_case: Problem, layout: str) -> Iterator[tuple[str, Problem]]:
    """Like the case's problem, on two ranks where there are devices: only chunks' lengths and windows differ.

    In a layout that is not the case's there are no documents: a cost may hide where they are as well as where not.
    """
    has_documents = of_case.segments and layout == of_case.layout
    fits_two = 2 * of_case.num_devices // of_case.context_parallelism <= len(jax.devices())
    ranks = 2 if fits_two else min(2, of_case.context_parallelism)
    chunk = _CHUNK if _CHUNK % of_case.ulysses_parallelism == 0 else _CHUNK * of_case.ulysses_parallelism
    base = of_case.replace(
        layout=layout,
        segments=has_documents,
        padding=of_case.padding if has_documents else None,
        context_parallelism=ranks,
        batch=of_case.data_parallelism,
        seq_len=ranks * (2 if layout == "dual_chunk_swap" else 1) * chunk,
        sliding_window_size=_WINDOW,
        window=None,
    )
    yield "base", base
    yield "longer", base.replace(seq_len=FACTOR * base.seq_len)
    yield "wider", base.replace(sliding_window_size=FACTOR * _WINDOW, window=None)


def _costs(setting: Setting, problem: Problem, compiles: bool) -> dict[str, Any]:
    asked = Setting(setting.target, problem, mesh_of(problem, jax.devices()), ("attention",))
    shapes = placed_shapes(problem, asked.mesh, input_shapes(problem))
    traced = jax.jit(lambda arrays: forward_and_gradients(asked, arrays)).trace(shapes)
    cheaply: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}  # nothing of it will run
    return cost_facts(traced, traced.lower().compile(cheaply) if compiles else None)
