"""Makes a target of a fault, and of its clean twin: the same wrapping around the same strategy, with nothing planted.

The wrapping is a custom VJP of its own, so that functions of `impl` can be replaced while the backward is traced, too.
May touch: JAX, the bundled targets, attributes of `impl`'s modules while they are traced.
Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax

from conformance.faults.fault import Arrays, Fault
from conformance.problem import Problem
from conformance.targets import bundled

CLEAN = "_clean"
_FLOATS = ("query", "key", "value", "sinks")
_replacing = threading.RLock()


class Planted:
    """A target by the contract. What the strategy declares of itself, this one declares too."""

    def __init__(self, fault: Fault, *, clean: bool) -> None:
        self._fault, self._clean = fault, clean
        self._right = getattr(bundled, fault.planted_in)
        self.name = f"{fault.name}{CLEAN}" if clean else fault.name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(self._right, attribute)

    def supports(self, problem: Problem) -> str | None:
        """Declines what the strategy declines, and what the fault says nothing about."""
        reason = self._right.supports(problem)
        if reason is None and not self._fault.applies(problem):
            return f"{self._fault.name} says nothing about such a problem"
        return reason

    def attention(self, query: Any, key: Any, value: Any, *, problem: Problem, mesh: Any, **optional: Any) -> Any:
        """out, by the target contract."""
        arrays = {"query": query, "key": key, "value": value, **optional}
        return self._call("attention", arrays, problem, mesh)["out"]

    def attention_with_lse(
        self, query: Any, key: Any, value: Any, *, problem: Problem, mesh: Any, **optional: Any
    ) -> tuple[Any, Any]:
        """(out, lse), by the target contract."""
        arrays = {"query": query, "key": key, "value": value, **optional}
        results = self._call("attention_with_lse", arrays, problem, mesh)
        return results["out"], results["lse"]

    def _call(self, call: str, arrays: Arrays, problem: Problem, mesh: Any) -> Arrays:
        function = functools.partial(self._results, call, problem, mesh)
        present = {name: array for name, array in arrays.items() if array is not None}

        @jax.custom_vjp
        def attend(arrays: Arrays) -> Arrays:
            with self._in_place("primal"):
                return function(arrays)

        def forward(arrays: Arrays) -> tuple[Arrays, Any]:
            with self._in_place("forward"):
                results, vjp = jax.vjp(function, arrays)
            return results, (vjp, arrays if self._changes_gradients else None)

        def backward(residuals: Any, cotangents: Arrays) -> tuple[Arrays]:
            vjp, arrays = residuals
            with self._in_place("backward"):
                (gradients,) = vjp(cotangents)
            if self._changes_gradients:
                floats = {name: gradients[name] for name in _FLOATS if name in gradients}
                gradients = self._fault.gradients(floats, cotangents, arrays, problem)  # pyright: ignore[reportOptionalCall]
            return ({name: gradients[name] if name in _FLOATS else None for name in present},)

        attend.defvjp(forward, backward)
        return attend(present)

    @property
    def _changes_gradients(self) -> bool:
        return not self._clean and self._fault.gradients is not None

    def _results(self, call: str, problem: Problem, mesh: Any, arrays: Arrays) -> Arrays:
        fault = self._fault
        given, told = arrays, problem
        if not self._clean:
            given = arrays if fault.given is None else fault.given(arrays, problem)
            told = problem if fault.told is None else fault.told(problem)
        returned = getattr(self._right, call)(**given, problem=told, mesh=mesh)
        results: Arrays = {"out": returned} if call == "attention" else {"out": returned[0], "lse": returned[1]}
        if self._clean or fault.returned is None:
            return results
        return fault.returned(results, arrays, problem)

    @contextlib.contextmanager
    def _in_place(self, phase: str) -> Iterator[None]:
        """The fault's replacements for this phase; what was there before is there again afterwards."""
        replaced = () if self._clean else [item for item in self._fault.replaced if phase in item.phases]
        with _replacing, contextlib.ExitStack() as undo:
            for item in replaced:
                right = getattr(item.module, item.name)
                undo.callback(setattr, item.module, item.name, right)
                setattr(item.module, item.name, functools.partial(item.wrong, right))
            yield
