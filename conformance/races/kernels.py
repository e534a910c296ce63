"""The Pallas kernels of a traced program that start copies by themselves, and what their code says of a barrier.

May touch: jaxprs. Tests: tests/conformance/test_races_program.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conformance.kernel_copies import is_remote_copy
from conformance.traced import KERNELS, inner_jaxprs, reached


@dataclass(frozen=True)
class CopyingKernel:
    """A kernel that starts copies. `name` is its function, and where that is written, as far as JAX tells.

    sends: some copy goes to another device. sends_before_barrier: in the order of its code, one is started before any
    wait that a barrier could be: the kernel may not have been entered by the device that the copy goes to.
    """

    name: str
    sends: bool
    sends_before_barrier: bool


def copying_kernels(traced: Any) -> tuple[CopyingKernel, ...]:
    """Those of what `jax.jit(f).trace(…)` gives, without repetition."""
    calls = (at.equation for at in reached(traced.jaxpr) if at.equation.primitive.name in KERNELS)
    found = (_kernel(call) for call in calls)
    return tuple(dict.fromkeys(kernel for kernel in found if kernel is not None))


def _kernel(call: Any) -> CopyingKernel | None:
    equations = [equation for inner, _ in inner_jaxprs(call) for equation in _in_order(inner)]
    names = [equation.primitive.name for equation in equations]
    if "dma_start" not in names:
        return None
    sends = [index for index, equation in enumerate(equations) if is_remote_copy(equation)]
    barrier = names.index("get_barrier_semaphore") if "get_barrier_semaphore" in names else len(names)
    waits = [index for index, name in enumerate(names) if name == "semaphore_wait" and index > barrier]
    return CopyingKernel(_name(call), bool(sends), bool(sends) and (not waits or sends[0] < waits[0]))


def _in_order(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of branches and loops included, in the order of the code."""
    for equation in jaxpr.eqns:
        yield equation
        for inner, _ in inner_jaxprs(equation):
            yield from _in_order(inner)


def _name(call: Any) -> str:
    debug_info = getattr(call.params.get("jaxpr"), "debug_info", None)
    name = getattr(debug_info, "func_src_info", None) or call.params.get("name")
    # "function at folder/file.py:line": the folder is no part of what the kernel is.
    return re.sub(r" at .*[/\\\\]", " at ", str(name)) if name else "a kernel without a name"
