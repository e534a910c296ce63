"""Runs a program whose kernels copy by themselves under TPU interpret mode, several calls in a row: what it tells.

In the worker, on designated cases; the check `races` judges. May touch: JAX and the target, threads.
Tests: tests/conformance/test_races_program.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from conformance.calling import Named, Setting, forward_and_gradients
from conformance.mesh import shardings_of
from conformance.races import interpreter
from conformance.races.kernels import CopyingKernel
from conformance.races.skew import Skew
from conformance.races.told import left_over, place_told, races_told

CALLS = 3
"""Calls in a row of one program, with the same collective id; draw 0 and draw 1 by turns."""
# The parent gives a worker up that uses no CPU for 15 seconds: by then, its log tells where the kernel waits.
_STUCK_SECONDS = 8.0

Results = tuple[Named, dict[str, np.ndarray]]
Function = Callable[[Named], Named]


def race_facts(
    setting: Setting, draws: Sequence[Named], kernels: Sequence[CopyingKernel], report: Callable[[str], None]
) -> Results:
    """Facts of the program that the case is made of (`attention`, its VJP, its gradients), and its results.

    `kernels` are those of it that copy by themselves. Facts: `kernels`, as mappings; `declined`, why nothing could be
    run; otherwise see `watched`. Results are named `races mode number/…`, by the number of the call.
    """
    facts: Named = {"kernels": [dataclasses.asdict(kernel) for kernel in kernels]}
    if (platform := setting.mesh.devices.flat[0].platform) != "cpu":
        return facts | {"declined": f"races are looked for on simulated devices, not on {platform}"}, {}
    report("trying the race detector")
    if (reason := interpreter.unavailable()) is not None:
        return facts | {"declined": reason}, {}
    asked = dataclasses.replace(setting, calls=("attention",))
    skew = Skew(setting.problem.num_devices)

    def function(arrays: Named) -> Named:
        # What the forward waits for, and what its backward waits for besides.
        shardings = shardings_of(setting.problem, setting.mesh)
        held = {
            name: skew.late(arrays[name], setting.mesh, shardings[of]) for name, of in (("key", "key"), ("dout", "out"))
        }
        return forward_and_gradients(asked, {**arrays, **held})

    told, results = watched(function, [draws[call % len(draws)] for call in range(CALLS)], skew, report)
    return facts | told, results


def watched(
    function: Function, calls: Sequence[Named], skew: Skew, report: Callable[[str], None] = lambda phase: None
) -> Results:
    """Runs `function` on each of `calls`, in a row, in both modes of copying.

    Facts: `races` [mode, Race as a mapping, devices]; `left_over` [mode, LeftOver as a mapping, devices]; `raised`
    [mode, type, message, place or None], where a run raised: nothing is run after it. Results are named
    `races mode number/name`.
    """
    facts: Named = {"races": [], "left_over": [], "raised": None}
    results: dict[str, np.ndarray] = {}
    for mode in interpreter.MODES:
        report(f"looking for races, copies {mode}")
        text, raised, arrays = _in_own_thread(lambda mode=mode: _run(function, calls, skew, mode))
        results |= arrays
        facts["races"] += [[mode, dataclasses.asdict(race), devices] for race, devices in races_told(text).items()]
        facts["left_over"] += [
            [mode, dataclasses.asdict(semaphore), sorted(devices)] for semaphore, devices in left_over(text).items()
        ]
        if raised is not None:
            facts["raised"] = [mode, *raised]
            break
    return facts, results


class _Raised(NamedTuple):
    type: str
    message: str
    place: str | None


Told = tuple[str, _Raised | None, dict[str, np.ndarray]]


def _run(function: Function, calls: Sequence[Named], skew: Skew, mode: str) -> Told:
    """What the interpreter told, what it raised, and the results; memory that it has left is forgotten."""
    results: dict[str, np.ndarray] = {}
    raised: _Raised | None = None
    with interpreter.listening() as heard, _tells_if_stuck():
        try:
            with interpreter.interpreted(mode, skew.at_grid_point):
                traced = jax.jit(lambda arrays: function(arrays)).trace(calls[0])
            compiled = traced.lower().compile()
            for number, arrays in enumerate(calls):
                skew.begin(number)
                returned = jax.block_until_ready(compiled(arrays))
                results |= {f"races {mode} {number}/{name}": np.asarray(array) for name, array in returned.items()}
        except Exception as error:  # noqa: BLE001  # whatever foreign code raises is a finding, not a failure of ours
            place = heard.place_of_failure
            raised = _Raised(type(error).__name__, str(error), None if place is None else place_told(place))
            interpreter.start_afresh()
    return heard.text, raised, results


def _in_own_thread(run: Callable[[], Told]) -> Told:
    """JAX keeps callbacks of a thread in order: after a run that raised, all that follow on the thread would raise."""
    told: list[Told] = []
    config: Any = jax.config  # its options are not declared
    matmul_precision = config.jax_default_matmul_precision  # a thread begins with JAX's defaults

    def target() -> None:
        with jax.default_matmul_precision(matmul_precision):
            told.append(run())

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return told[0]


@contextlib.contextmanager
def _tells_if_stuck() -> Iterator[None]:
    """Writes to the worker's log where devices wait, if this takes long: the parent ends a worker that hangs."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_STUCK_SECONDS):
            for place in interpreter.places_of_waiting_devices():
                print(place, file=sys.stderr, flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()
