"""The one file that knows how JAX's TPU interpret mode is switched on, and how it tells of a race.

What it tells is text: to standard output (JAX 0.10), or to a logger (JAX 0.12); told.py reads it. Before it is
believed, it must tell of a race that is planted here: where JAX has changed, `unavailable` gives the reason to decline.
May touch: JAX's interpreter, sys.stdout, the root logger. Tests: tests/conformance/test_races_program.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from conformance.races.told import races_told

MODES = ("eager", "on_wait")
"""When a copy is carried out: as soon as it is started, or as late as it can be, when somebody waits for it."""
_NEEDED = ("InterpretParams", "force_tpu_interpret_mode", "reset_tpu_interpret_mode_state")
# A racy kernel in a loop tells of the same race for every turn.
_MAX_CHARACTERS = 1_000_000
# What the other devices raise when one has.
_CONSEQUENCE = "Computation failed"


def interpreted(mode: str, at_grid_point: Callable[..., Any] | None = None) -> AbstractContextManager[Any]:
    """Every Pallas call that is traced inside runs interpreted, whatever its own `interpret=` says.

    Copies are carried out by `mode`, memory starts as NaN, reads out of bounds raise. `at_grid_point(token, point,
    core)` is called before each run of a kernel's body, and returns the token.
    """
    params: dict[str, Any] = {
        "detect_races": True,
        "dma_execution_mode": mode,
        "uninitialized_memory": "nan",
        "out_of_bounds_reads": "raise",
        "grid_point_recorder": at_grid_point,
    }
    if "on_race" in {field.name for field in dataclasses.fields(pltpu.InterpretParams)}:
        params["on_race"] = "warn"  # "raise" would end the kernel at its first race, and hide the others
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**params))


def start_afresh() -> None:
    """Forgets the simulated memory that a kernel has left which raised."""
    pltpu.reset_tpu_interpret_mode_state()


class Heard:
    """What was written meanwhile, up to a million characters, and where in a kernel stands what has raised."""

    def __init__(self) -> None:
        self._lock, self._parts, self._length = threading.Lock(), list[str](), 0
        self.place_of_failure: str | None = None

    def write(self, text: str) -> int:
        """Keeps a piece of text, as a stream does."""
        with self._lock:
            if self._length < _MAX_CHARACTERS:
                self._parts.append(text)
                self._length += len(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits to be written."""

    @property
    def text(self) -> str:
        """All of it."""
        with self._lock:
            return "".join(self._parts)


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Hears what the interpreter tells, on any thread; other prints are heard with it, and go no further."""
    heard = Heard()
    handler, root = _Handler(heard), logging.getLogger()
    kept, sys.stdout = sys.stdout, heard
    root.addHandler(handler)
    try:
        yield heard
    finally:
        root.removeHandler(handler)
        sys.stdout = kept


class _Handler(logging.Handler):
    """Hears what is logged; JAX logs what a callback raises, and keeps from its caller where that was."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.write(f"{record.getMessage()}\n")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not str(error).startswith(_CONSEQUENCE) and self._heard.place_of_failure is None:
            self._heard.place_of_failure = _place_in(error.__traceback__)


def _place_in(frames: TracebackType | None) -> str | None:
    """The place of the kernel's equation that the interpreter was about; None where JAX does not tell."""
    while frames is not None:
        info = frames.tb_frame.f_locals.get("source_info")
        if info is not None:
            return _place(info)
        frames = frames.tb_next
    return None


@functools.cache
def unavailable() -> str | None:
    """Why races cannot be looked for with the JAX that is installed; None if they can."""
    if missing := [name for name in _NEEDED if not hasattr(pltpu, name)]:
        return f"jax {jax.__version__} has no pltpu.{missing[0]}"
    try:
        races = [_races_of_probe(is_racy=is_racy) for is_racy in (True, False)]
    except Exception as error:  # noqa: BLE001  # a JAX that has changed may raise anything
        start_afresh()
        return f"jax {jax.__version__}: its TPU interpret mode raises {type(error).__name__} on a kernel of ours"
    if not races[0]:
        return f"jax {jax.__version__}: its TPU interpret mode does not tell of a planted race"
    return f"jax {jax.__version__}: its TPU interpret mode tells of a race where there is none" if races[1] else None


def _races_of_probe(*, is_racy: bool) -> int:
    """A copy that is read before or after it is waited for, on one device."""

    def kernel(source: Any, out: Any, buffer: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        if not is_racy:
            copy.wait()
        out[...] = buffer[...]
        if is_racy:
            copy.wait()

    def probe(source: Any) -> Any:
        scratch = [pltpu.VMEM(source.shape, source.dtype), pltpu.SemaphoreType.DMA]
        specs = [pl.BlockSpec(memory_space=pl.ANY)]
        shape = jax.ShapeDtypeStruct(source.shape, source.dtype)
        return pl.pallas_call(kernel, out_shape=shape, in_specs=specs, scratch_shapes=scratch)(source)

    with listening() as heard:
        with interpreted("eager"):
            traced = jax.jit(probe).trace(jnp.zeros((8, 128), jnp.float32))
        jax.block_until_ready(traced.lower().compile()(jnp.zeros((8, 128), jnp.float32)))
    return len(races_told(heard.text))


def places_of_waiting_devices() -> list[str]:
    """Where, in a kernel, each device waits at this moment: for the report of a kernel that never ends."""
    places = []
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_name in ("dma_wait", "semaphore_wait") and "interpret" in frame.f_code.co_filename:
                places.append(_waiting(frame.f_code.co_name, frame.f_locals))
                break
            frame = frame.f_back
    return sorted(set(places))


def _waiting(function: str, names: dict[str, Any]) -> str:
    what = "a copy" if function == "dma_wait" else "a signal"
    info = names.get("source_info")
    where = "" if info is None else f" at {_place(info)}"
    return f"device {names.get('device_id')} waits for {what} on semaphore {names.get('sem_id')}{where}"


def _place(source_info: Any) -> str:
    """file:line (function) of a kernel's equation, as the interpreter itself tells it."""
    try:
        from jax._src import source_info_util  # private: without it, the place is not told

        return source_info_util.summarize(source_info)
    except Exception:  # noqa: BLE001  # see above: only a message gets poorer
        return "an unknown place"
