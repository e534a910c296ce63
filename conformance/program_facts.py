"""Facts about a target's program, traced and compiled: what it sends, what it computes, how much memory it takes.

Plain data for the channel; the checks judge it. Kinds and counts come from the compiled program, dtypes and mesh axes
from the traced one: XLA's CPU compiler sends every bfloat16 as float32.
May touch: jaxprs, compiled programs. Tests: tests/conformance/test_program_facts.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from conformance.hlo import collectives_of
from conformance.kernel_copies import kernel_copies
from conformance.narrow_sums import narrow_sums
from conformance.traced import KERNELS, Reached, inner_jaxprs, is_variable, phase_of, reached

_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all",
    "debug_callback": "host callback",
    "debug_print": "host callback",
    "infeed": "infeed",
    "io_callback": "host callback",
    "outfeed": "outfeed",
    "pbroadcast": "collective-broadcast",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pure_callback": "host callback",
    "ragged_all_to_all": "ragged-all-to-all",
    "reduce_scatter": "reduce-scatter",
    "unreduced_psum": "all-reduce",
    "unreduced_reduce_scatter": "reduce-scatter",
}
"""Primitives that communicate, by what XLA calls them."""


def program_facts(traced: Any, compiled: Any, cotangents: Sequence[bool]) -> dict[str, Any]:
    """What `jax.jit(f).trace(…)` and its `.lower().compile()` say of a program; `cotangents` as in `narrow_sums`.

    `compiled`: hlo.Collective as mappings, with their `phase`; `traced`: likewise of primitives, with mesh `axes`;
    `narrow_sums`: (tensor, how) of each gradient that is made of one; `remote_copies`: as in `kernel_copies`.
    """
    equations = reached(traced.jaxpr)
    in_hlo = [
        {**dataclasses.asdict(collective), "phase": phase_of(collective.op_name)}
        for collective in collectives_of(compiled.as_text())
    ]
    return {
        "compiled": in_hlo,
        "traced": [_collective(at) for at in equations if at.equation.primitive.name in _KINDS],
        "narrow_sums": _narrow_sums_by_tensor(traced, cotangents),
        "remote_copies": kernel_copies(traced.jaxpr),
    }


def cost_facts(traced: Any, compiled: Any | None = None) -> dict[str, Any]:
    """How much a program computes and holds.

    `matmul_flops` and `elements` (of all intermediate arrays) count what stands in a loop as often as it runs; XLA's
    own cost analysis counts it once, and is given as `xla_flops`. `equations` is what JAX traces and XLA is handed,
    `constant_bytes` what tracing builds into it. `longest_loop` is the most turns that one loop takes, a kernel's grid
    aside; `messages` is how many collectives run. `unknown_loops` is how many equations with arrays stand in loops
    whose number of turns nobody knows, and so count once; scalars alone, a search say, cost nothing. `temporary_bytes`
    is of one device.
    """
    equations = reached(traced.jaxpr)
    leaves = [at for at in equations if not any(True for _ in inner_jaxprs(at.equation))]
    facts: dict[str, Any] = {
        "matmul_flops": matmul_flops(equations),
        "elements": sum((at.trips or 1) * sum(map(_elements, at.equation.outvars)) for at in leaves),
        "equations": len(equations),
        "constant_bytes": _constant_bytes(traced.jaxpr, equations),
        "longest_loop": max((at.equation.params["length"] for at in equations if _is_loop(at.equation)), default=0),
        "messages": sum(at.trips or 1 for at in leaves if at.equation.primitive.name in _KINDS),
        "unknown_loops": sum(at.trips is None and _has_arrays(at.equation) for at in leaves),
    }
    if compiled is not None:
        costs = compiled.cost_analysis()
        costs = costs[0] if isinstance(costs, list) else costs
        memory = compiled.memory_analysis()
        facts["xla_flops"] = float((costs or {}).get("flops", 0.0))
        facts["temporary_bytes"] = 0 if memory is None else int(memory.temp_size_in_bytes)
    return facts


def sent_bytes(traced: Any) -> int:
    """Operand bytes of every primitive that communicates, as often as it runs."""
    collectives = [_collective(at) for at in reached(traced.jaxpr) if at.equation.primitive.name in _KINDS]
    return sum(collective["bytes"] * (collective["trips"] or 1) for collective in collectives)


def kernel_runs(traced: Any) -> dict[str, int | None]:
    """How often each Pallas kernel runs on a device, by its name; None where it stands in a loop of unknown length."""
    runs: dict[str, int | None] = {}
    for at in reached(traced.jaxpr):
        if at.equation.primitive.name in KERNELS:
            name = _kernel_name(at.equation.params)
            before = runs.get(name, 0)
            runs[name] = None if before is None or at.trips is None else before + at.trips
    return runs


def interpreted_kernels(traced: Any) -> list[str]:
    """The names of the Pallas kernels that are traced to be interpreted: no compiler will see a kernel there."""
    kernels = (at.equation.params for at in reached(traced.jaxpr) if at.equation.primitive.name in KERNELS)
    return sorted({_kernel_name(params) for params in kernels if params.get("interpret")})


def kernel_phases(traced: Any) -> list[str]:
    """The phases, of `traced.scope`, in which a Pallas kernel runs that is not interpreted."""
    kernels = (at for at in reached(traced.jaxpr) if at.equation.primitive.name in KERNELS)
    return sorted({at.phase for at in kernels if not at.equation.params.get("interpret")})


def matmul_flops(equations: Iterable[Reached]) -> int:
    """Multiplications and additions of all matrix products, as often as they run."""
    total = 0
    for at in equations:
        if at.equation.primitive.name == "dot_general":
            (contracting, _), _ = at.equation.params["dimension_numbers"]
            shape = at.equation.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracting)
            total += (at.trips or 1) * 2 * depth * _elements(at.equation.outvars[0])
    return total


def _narrow_sums_by_tensor(traced: Any, cotangents: Sequence[bool]) -> list[list[str]]:
    """[tensor, how] of the results that are made of narrow sums; results are named "call/dkey"."""
    paths, _ = jax.tree_util.tree_flatten_with_path(traced.out_info)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in paths]
    sums = zip(names, narrow_sums(traced.jaxpr, cotangents), strict=True)
    return sorted(map(list, {(name.rpartition("/")[2], how) for name, hows in sums for how in hows}))


def _collective(at: Reached) -> dict[str, Any]:
    equation, params = at.equation, at.equation.params
    arrays = [var.aval for var in equation.invars if hasattr(var.aval, "dtype")]
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    groups = params.get("axis_index_groups")
    return {
        "kind": _KINDS[equation.primitive.name],
        "dtypes": sorted({str(array.dtype) for array in arrays}),
        "bytes": sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays),
        "axes": [axis for axis in axes if isinstance(axis, str)],
        "pairs": [list(map(int, pair)) for pair in params.get("perm", ())],
        "group_size": None if groups is None else max(len(group) for group in groups),
        "trips": at.trips,
        "phase": at.phase,
    }


def _kernel_name(params: Mapping[str, Any]) -> str:
    """As it was named, or as its function is called."""
    named = params.get("name") or getattr(params.get("name_and_src_info"), "name", None)
    return str(named or "unnamed")


def _is_loop(equation: Any) -> bool:
    """Whether it is a loop whose number of turns is known: JAX makes a scan of map and of fori_loop, too."""
    return equation.primitive.name == "scan"


def _has_arrays(equation: Any) -> bool:
    return any(_elements(var) > 1 for var in (*equation.invars, *equation.outvars))


def _elements(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _constant_bytes(program: Any, equations: Iterable[Reached]) -> int:
    """Arrays that tracing baked into the program, whether as constants of a jaxpr or as literals of an equation."""
    arrays = [*program.consts]
    for at in equations:
        for value in at.equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                arrays += getattr(item, "consts", ())
        arrays += [var.val for var in at.equation.invars if not is_variable(var)]
    return sum(int(getattr(array, "nbytes", 0)) for array in arrays if getattr(array, "ndim", 0))
