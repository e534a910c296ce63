"""Finds gradients that are summed across ranks in less than float32, in a traced program.

A sum by the collective itself (psum, reduce_scatter) of narrow or rounded terms, or partial gradients that travel
narrow, or were rounded before they travel, and are added on arrival. Ordinary data do not show it: one rounding more
is inside what rounding allows. XLA's CPU compiler widens these, so the traced program is the place to look.
May touch: JAX (jaxprs). Tests: tests/conformance/test_program_facts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.traced import KERNELS, carry_of_scan, inner_jaxprs, is_transparent, is_variable
from conformance.wire_plan import OF_ROUNDED

State = frozenset[str]
# What is known of a value: it depends on an input; on a cotangent; it is a cotangent that was rounded to fewer bits, or
# that travelled so; moved and perhaps widened since, but not yet computed with. And which narrow sums it is made of.
_NOTHING: State = frozenset()
_INPUT, _COTANGENT, _ROUNDED, _TRAVELLED = "input", "cotangent", "rounded", "travelled"
_TRAVELLED_WIDE = "travelled in float32, rounded before"
_SUM = "sum: "
_NOT_COMPUTED_WITH = {_ROUNDED, _TRAVELLED, _TRAVELLED_WIDE}

_SUMS_OVER_RANKS = ("psum", "psum_invariant", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter")
_TRAVELS = ("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "ragged_all_to_all")
_MOVES = (
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "mul",
    "name",
    "optimization_barrier",
    "pad",
    "pvary",
    "reduce_precision",
    "reshape",
    "rev",
    "scatter",
    "select_n",
    "sharding_constraint",
    "slice",
    "split",
    "squeeze",
    "transpose",
)
_ADDS = ("add", "add_any", "cumsum", "reduce_sum", "scatter-add", "sub")
# They sum wide inside, and may give what comes out rounded.
_SUMS_INSIDE = ("dot_general", "run_state", *KERNELS)
_MANTISSA_BITS_OF_FLOAT32 = 23
_NARROW = ("bfloat16", "float16", "float8")


def narrow_sums(program: Any, cotangents: Sequence[bool]) -> list[list[str]]:
    """For each output of a closed jaxpr, the sums across ranks in fewer bits than float32 that it is made of.

    Those of something that depends on a cotangent, as "psum of bfloat16"; `cotangents` says which inputs are.
    """
    states = [frozenset({_INPUT, _COTANGENT}) if is_one else frozenset({_INPUT}) for is_one in cotangents]
    outputs = _flow(program.jaxpr, states)
    return [sorted(fact.removeprefix(_SUM) for fact in state if fact.startswith(_SUM)) for state in outputs]


def _flow(jaxpr: Any, states: Sequence[State]) -> list[State]:
    """The states of the jaxpr's outputs, from those of its inputs."""
    known = dict(zip(jaxpr.invars, states, strict=True))
    for equation in jaxpr.eqns:
        inputs = [known.get(var, _NOTHING) if is_variable(var) else _NOTHING for var in equation.invars]
        known.update(zip(equation.outvars, _after(equation, inputs), strict=True))
    return [known.get(var, _NOTHING) if is_variable(var) else _NOTHING for var in jaxpr.outvars]


def _after(equation: Any, inputs: list[State]) -> list[State]:
    """The states of an equation's outputs."""
    name = equation.primitive.name
    if is_transparent(equation):
        ((inner, _),) = inner_jaxprs(equation)
        return _flow(inner, inputs)
    if name == "scan":
        return _after_scan(equation, inputs)
    if name == "while":
        return _after_while(equation, inputs)
    if name == "cond":
        branches = [_flow(inner, inputs[1:]) for inner, _ in inner_jaxprs(equation)]
        return [frozenset().union(*outputs) for outputs in zip(*branches, strict=True)]
    together: State = frozenset().union(*inputs)
    dtypes = [str(var.aval.dtype) for var in equation.invars if hasattr(var.aval, "dtype")]
    narrow = next((dtype for dtype in dtypes if dtype.startswith(_NARROW)), None)
    sums: State = frozenset()
    if name in _SUMS_OVER_RANKS and narrow and _COTANGENT in together:
        sums |= {f"{_SUM}{name} of {narrow}"}
    if name in _SUMS_OVER_RANKS and _ROUNDED in together and not narrow:
        sums |= {f"{_SUM}{name} {OF_ROUNDED}"}
    if name in _ADDS and _TRAVELLED in together:
        sums |= {f"{_SUM}adding what arrived narrow"}
    elif name in _ADDS and _TRAVELLED_WIDE in together:
        sums |= {f"{_SUM}adding what arrived, {OF_ROUNDED}"}
    keeps = name in (*_MOVES, *_TRAVELS) and not (name == "mul" and all(_INPUT in state for state in inputs))
    if not keeps:
        together -= _NOT_COMPUTED_WITH
    if _rounds(equation) and not narrow and _COTANGENT in together:
        together |= {_ROUNDED}
    rounded = {_ROUNDED} if name in _SUMS_INSIDE and _COTANGENT in together else _NOTHING
    if name in _TRAVELS and _COTANGENT in together and (narrow or _ROUNDED in together):
        together |= {_TRAVELLED if narrow else _TRAVELLED_WIDE}
    takes_each_alone = name in (*_MOVES, *_TRAVELS, *_SUMS_OVER_RANKS)
    if takes_each_alone and len(inputs) == len(equation.outvars) > 1:  # several arrays at once: each goes its own way
        return [(state & together if keeps else state - _NOT_COMPUTED_WITH) | sums for state in inputs]
    return [together | sums | (rounded if _is_narrow(var) else _NOTHING) for var in equation.outvars]


def _rounds(equation: Any) -> bool:
    """Whether it rounds to fewer bits than float32 has: by a dtype, or by reduce_precision, which keeps the dtype."""
    if equation.primitive.name == "reduce_precision":
        return equation.params["mantissa_bits"] < _MANTISSA_BITS_OF_FLOAT32
    return equation.primitive.name == "convert_element_type" and str(equation.outvars[0].aval.dtype).startswith(_NARROW)


def _is_narrow(var: Any) -> bool:
    return str(getattr(var.aval, "dtype", "")).startswith(_NARROW)


def _after_scan(equation: Any, inputs: list[State]) -> list[State]:
    ((inner, _),) = inner_jaxprs(equation)
    return _settled(inner, inputs, carry_of_scan(equation, inner))


def _after_while(equation: Any, inputs: list[State]) -> list[State]:
    skipped = equation.params["cond_nconsts"]
    first = equation.params["body_nconsts"]
    return _settled(equation.params["body_jaxpr"].jaxpr, inputs[skipped:], slice(first, None))


def _settled(inner: Any, inputs: list[State], carry: slice) -> list[State]:
    """The outputs of a loop's body once another turn adds nothing to the states of what it carries."""
    states = list(inputs)
    while True:
        outputs = _flow(inner, states)
        carried = [old | new for old, new in zip(states[carry], outputs, strict=False)]
        if carried == states[carry]:
            return outputs
        states[carry] = carried
