"""Walks a traced program: every equation that its results need, through nested jaxprs, with how often it runs and in
which phase of an execution (primal call, the VJP's own forward, backward).

May touch: jaxprs. Tests: tests/conformance/test_program_facts.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax

PHASES = ("primal", "forward", "backward")
"""The primal call, the forward that belongs to a VJP, its backward."""

# Equations whose one inner jaxpr takes the equation's own inputs and gives its own outputs.
TRANSPARENT = ("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2")
KERNELS = ("pallas_call", "core_map", "mpmd_map")
"""Calls of Pallas kernels: `pl.pallas_call`, `pl.core_map`, `pl.kernel`."""
_SCOPE = re.compile(rf"halocheck_({'|'.join(PHASES)})_(\w+?)(?![a-z_])")


@dataclass(frozen=True)
class Reached:
    """An equation, how often it runs (None: in a loop whose number of turns is not known), and its phase.

    `phase` is "phase/call" as in "backward/attention", or "" outside of any.
    """

    equation: Any
    trips: int | None
    phase: str


def scope(phase: str, call: str) -> AbstractContextManager[Any]:
    """What is traced inside belongs to this phase of this call of the target."""
    return jax.named_scope(f"halocheck_{phase}_{call}")


def phase_of(name: str) -> str:
    """The phase that a name stack, or XLA's op_name, tells of: the outermost, since a backward names its forward."""
    found = _SCOPE.search(name)
    return "/".join(found.groups()) if found else ""


def reached(program: Any) -> list[Reached]:
    """The equations of a closed jaxpr that its outputs depend on, in no particular order; of branches, all."""
    found: list[Reached] = []
    _visit(program.jaxpr, [True] * len(program.jaxpr.outvars), 1, "", found)
    return found


def _visit(jaxpr: Any, used: Sequence[bool], trips: int | None, phase: str, found: list[Reached]) -> list[bool]:
    """Which of the jaxpr's inputs the used outputs need."""
    needed = {var for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and is_variable(var)}
    for equation in reversed(jaxpr.eqns):
        outputs = [var in needed for var in equation.outvars]
        if not any(outputs) and not _is_kept(equation):
            continue
        own = phase or phase_of(str(equation.source_info.name_stack))
        found.append(Reached(equation, trips, own))
        inputs = _visit_inner(equation, outputs, trips, own, found)
        needed |= {var for var, is_used in zip(equation.invars, inputs, strict=True) if is_used and is_variable(var)}
    return [var in needed for var in jaxpr.invars]


def _is_kept(equation: Any) -> bool:
    """Whether XLA keeps an equation of which no result is used: it has effects, or a kernel inside says it has some."""
    # A collective's only effect is to need its axis.
    has_effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
    return has_effects or _has_an_effectful_kernel(equation)


def _has_an_effectful_kernel(equation: Any) -> bool:
    if equation.primitive.name in KERNELS:
        says = getattr(equation.params["compiler_params"], "has_side_effects", False)
        # Kernels of the other SideEffectTypes may be removed where they are not used.
        return getattr(says, "value", says) in (True, "side_effecting")
    return any(_has_an_effectful_kernel(within) for inner, _ in inner_jaxprs(equation) for within in inner.eqns)


def _visit_inner(equation: Any, outputs: list[bool], trips: int | None, phase: str, found: list[Reached]) -> list[bool]:
    if is_transparent(equation):
        ((inner, _),) = inner_jaxprs(equation)
        return _visit(inner, outputs, trips, phase, found)
    for inner, turns in inner_jaxprs(equation):
        times = None if trips is None or turns is None else trips * turns
        _visit(inner, [True] * len(inner.outvars), times, phase, found)
    return [True] * len(equation.invars)


def is_variable(var: Any) -> bool:
    """Whether it stands for a value that something computes, and is no literal."""
    return not hasattr(var, "val")


def is_transparent(equation: Any) -> bool:
    """Whether the equation only gives its one inner jaxpr a name, a place or a rule."""
    if equation.primitive.name not in (*TRANSPARENT, "shard_map"):
        return False
    inner = list(inner_jaxprs(equation))
    return len(inner) == 1 and len(inner[0][0].invars) == len(equation.invars)


def inner_jaxprs(equation: Any) -> Iterator[tuple[Any, int | None]]:
    """(jaxpr, turns) of what runs inside an equation; turns None: not known before it runs."""
    name, params = equation.primitive.name, equation.params
    turns: int | None = 1
    if name == "scan":
        turns = params["length"]
    elif name == "while":
        turns = None
    elif name == "pallas_call":
        grid = params["grid_mapping"].grid
        turns = math.prod(grid) if all(isinstance(size, int) for size in grid) else None
    values = [params["callee"]] if name == "linear_call" else list(params.values())
    for value in values:
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner, turns


def carry_of_scan(equation: Any, inner: Any) -> slice:
    """Which of a scan's inputs are its carry: before are constants, behind is what is scanned over.

    The parameters that say how many there are of each are not the same in every JAX; that a turn sees one dimension
    less of what is scanned or stacked is.
    """
    scanned = _with_another_rank(equation.invars, inner.invars)
    carried = len(equation.outvars) - _with_another_rank(equation.outvars, inner.outvars)
    last = len(equation.invars) - scanned
    return slice(last - carried, last)


def _with_another_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(getattr(one.aval, "shape", ())) != len(getattr(other.aval, "shape", ())) for one, other in pairs)
