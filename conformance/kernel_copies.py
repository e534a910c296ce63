"""How much a Pallas kernel sends to other devices by copies of its own: read from its traced program, never run.

A copy counts as often as it may be started: at the grid points at which the conditions around it can hold. What only
the rank decides may hold on some rank, and so counts; where data decide, or a loop without a known end, nobody knows.
May touch: jaxprs. Tests: tests/conformance/test_kernel_copies.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from conformance.traced import KERNELS, carry_of_scan, inner_jaxprs, is_transparent, is_variable, reached

_READS = ("get", "load", "masked_load")
_ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "div": lambda one, other: one / other if one.dtype.kind == "f" else np.trunc(one / other),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "or": np.bitwise_or,
    "not": np.logical_not,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
}


@dataclass(frozen=True)
class _Value:
    """A scalar of a kernel at every grid point: `known` there; or None, and the `same` at all of them or not.

    may: of a condition that is not known, where it can hold at all.
    """

    known: np.ndarray | None = None
    same: bool = False
    may: np.ndarray | None = None

    @property
    def is_same(self) -> bool:
        return self.same if self.known is None else bool((self.known == self.known.flat[0]).all())


@dataclass(frozen=True)
class _Place:
    """Where a kernel runs: the coordinates of its grid points, or of the device's cores, which then have named axes."""

    points: np.ndarray
    sizes: Sequence[int]
    axes: tuple[str, ...] = ()


_OF_RANK, _OF_DATA = _Value(same=True), _Value()
_Sent = list[tuple[int, "int | None"]]
"""(bytes, starts) of each copy to another device; starts None: not known."""


def is_remote_copy(equation: Any) -> bool:
    """A kernel's DMA that names another device: `dma_start` keeps its operands as a tree whose last leaf is that."""
    if equation.primitive.name != "dma_start":
        return False
    operands = jax.tree.unflatten(equation.params["tree"], equation.invars)
    return operands[-1] is not None


def kernel_copies(program: Any) -> list[dict[str, Any]]:
    """Of each copy to another device in the kernels of a closed jaxpr: `bytes` of one, `starts` on one device, all
    executions of its kernel together (None: not known), and the `phase`. Of rows that data count, bytes are unknown:
    such a copy has no `starts` either.
    """
    found = []
    for at in reached(program):
        if at.equation.primitive.name in KERNELS:
            for size, starts in _sent_by_kernel(at.equation):
                all_starts = None if starts is None or at.trips is None else starts * at.trips
                found.append({"bytes": size, "starts": all_starts, "phase": at.phase})
    return found


def _sent_by_kernel(equation: Any) -> _Sent:
    if equation.primitive.name == "pallas_call":
        return _sent_on_a_grid(equation)
    # pl.kernel and pl.core_map: every core of a mesh inside the device runs the same; some of them may be of each kind.
    params = equation.params
    meshes, kernels = params.get("meshes", (params.get("mesh"),)), params.get("jaxprs", (params.get("jaxpr"),))
    return [one for mesh, kernel in zip(meshes, kernels, strict=True) for one in _sent_on_cores(kernel, mesh)]


def _sent_on_cores(kernel: Any, mesh: Any) -> _Sent:
    axes, sizes = tuple(mesh.shape), tuple(mesh.shape.values())
    kernel = getattr(kernel, "jaxpr", kernel)
    points = _points(sizes)
    return _walk(kernel, {}, np.ones(points.shape[1], int), _Place(points, sizes, axes))


def _points(sizes: Sequence[int]) -> np.ndarray:
    return np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), int)


def _sent_on_a_grid(equation: Any) -> _Sent:
    mapping = equation.params["grid_mapping"]
    kernel = equation.params["jaxpr"]
    kernel = getattr(kernel, "jaxpr", kernel)
    if not any(is_remote_copy(inner) for inner in _all_equations(kernel)):
        return []
    sizes = mapping.grid
    if not all(isinstance(size, int) for size in sizes):
        return [(_bytes_of(inner) or 0, None) for inner in _all_equations(kernel) if is_remote_copy(inner)]
    points = _points(sizes)
    values: dict[Any, _Value] = {}
    blocks = list(mapping.block_mappings)[: mapping.num_inputs]
    for index, ref in enumerate(kernel.invars):
        block = index - mapping.num_index_operands
        # Scalars that are there before the grid, and inputs of which every point sees the same block, stay as they are.
        stays = block < 0 or (block < len(blocks) and _is_one_block(blocks[block]))
        values[ref] = _OF_RANK if stays else _OF_DATA
    return _walk(kernel, values, np.ones(points.shape[1], int), _Place(points, sizes))


def _is_one_block(block: Any) -> bool:
    index_map = block.index_map_jaxpr.jaxpr
    return not any(is_variable(var) for var in index_map.outvars)


def _walk(jaxpr: Any, values: dict[Any, _Value], active: np.ndarray, place: _Place) -> _Sent:
    """What is sent at the grid points where the jaxpr runs, as often as `active` says; fills in the values."""
    sent: _Sent = []

    def value(var: Any) -> _Value:
        if is_variable(var):
            return values.get(var, _OF_DATA)
        return _Value(np.broadcast_to(np.asarray(var.val), active.shape)) if np.ndim(var.val) == 0 else _OF_RANK

    for equation in jaxpr.eqns:
        inputs = [value(var) for var in equation.invars]
        results = [_result(equation, inputs, place)] * len(equation.outvars)
        if is_remote_copy(equation):
            size = _bytes_of(equation)
            sent.append((size or 0, None if size is None else int(active.sum())))
        elif equation.primitive.name == "cond":
            sent += _sent_by_branches(equation, inputs, active, place)
        else:
            for inner, turns in inner_jaxprs(equation):
                within = _entering(inner, equation, inputs, turns)
                once = _walk(inner, within, active, place)
                sent += [(size, None if starts is None or turns is None else starts * turns) for size, starts in once]
                if is_transparent(equation):
                    results = [within.get(var, _OF_DATA) if is_variable(var) else _OF_RANK for var in inner.outvars]
        values |= dict(zip(equation.outvars, results, strict=True))
    return sent


def _sent_by_branches(equation: Any, inputs: list[_Value], active: np.ndarray, place: _Place) -> _Sent:
    index, branches = inputs[0], equation.params["branches"]
    each: list[_Sent] = []
    for number, branch in enumerate(branches):
        runs = active
        if index.known is not None:
            runs = active * (index.known.astype(int) == number)
        elif index.may is not None and number > 0:
            runs = active * index.may
        entering = dict(zip(branch.jaxpr.invars, inputs[1:], strict=True))
        each.append(_walk(branch.jaxpr, entering, runs, place))
    if index.known is not None:
        return [one for sent in each for one in sent if one[1] != 0]
    if not index.same:
        return [(size, None) for sent in each for size, _ in sent]
    # A rank takes one branch, always the same: the one in which most is sent.
    return max(each, key=_amount)


def _amount(sent: _Sent) -> tuple[bool, int]:
    """Orders what branches send; what is not known comes last."""
    return any(starts is None for _, starts in sent), sum(size * (starts or 0) for size, starts in sent)


def _entering(inner: Any, equation: Any, inputs: list[_Value], turns: int | None) -> dict[Any, _Value]:
    """Values of an inner jaxpr's inputs, where these are the equation's own; what a loop changes is not followed."""
    if equation.primitive.name == "run_scoped":
        return dict(zip(inner.constvars, inputs, strict=True))
    if len(inner.invars) != len(inputs) or turns is None:
        return {}
    constant = carry_of_scan(equation, inner).start if equation.primitive.name == "scan" else len(inputs)
    return dict(zip(inner.invars[:constant], inputs[:constant], strict=True))


def _result(equation: Any, inputs: list[_Value], place: _Place) -> _Value:
    """What an equation gives, in its dtype: an overflow, a conversion to bool, decide what is sent as well."""
    result = _exact_result(equation, inputs, place)
    if result.known is None:
        return result
    with np.errstate(all="ignore"):
        return _Value(result.known.astype(equation.outvars[0].aval.dtype))


def _exact_result(equation: Any, inputs: list[_Value], place: _Place) -> _Value:
    name, params = equation.primitive.name, equation.params
    if name == "program_id":
        return _Value(place.points[params["axis"]])
    if name == "num_programs":
        return _Value(np.full(place.points.shape[1], place.sizes[params["axis"]]))
    if name == "axis_index":
        is_of_cores = params["axis_name"] in place.axes
        return _Value(place.points[place.axes.index(params["axis_name"])]) if is_of_cores else _OF_RANK
    if name in _READS or any(True for _ in inner_jaxprs(equation)):
        return _OF_RANK if inputs and all(one.is_same for one in inputs) and name in _READS else _OF_DATA
    if name == "convert_element_type":
        return inputs[0]
    if name == "and":
        return _both(*inputs)
    known = [one.known for one in inputs]
    if name in _ARITHMETIC and all(one is not None for one in known):
        with np.errstate(all="ignore"):
            return _Value(_ARITHMETIC[name](*known))
    return _OF_RANK if inputs and all(one.is_same for one in inputs) else _OF_DATA


def _both(one: _Value, other: _Value) -> _Value:
    """The conjunction: where one is known not to hold, the other does not matter."""
    if one.known is not None and other.known is not None:
        return _Value(np.bitwise_and(one.known, other.known))
    may = [side.may if side.known is None else side.known.astype(bool) for side in (one, other)]
    same = all(side.same or side.known is not None for side in (one, other))
    limits = [where for where in may if where is not None]
    return _Value(same=same, may=np.logical_and.reduce(limits) if limits else None)


def _bytes_of(equation: Any) -> int | None:
    """Of the rows that one copy reads; None where their number is not known before it runs."""
    source = jax.tree.unflatten(equation.params["tree"], [var.aval for var in equation.invars])[0]
    if not all(isinstance(size, int) for size in source.shape):
        return None
    return math.prod(source.shape) * np.dtype(source.dtype).itemsize


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner, _ in inner_jaxprs(equation):
            yield from _all_equations(inner)
