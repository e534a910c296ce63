"""Devices that are not in step: one that comes late, another with every call, and pauses at kernels' grid points.

May touch: the clock, callbacks of JAX. Tests: tests/conformance/test_races_program.py.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

# A late device comes once the others have used next to no CPU for a while: they wait for it, or they have ended.
_LOOK_SECONDS = 0.05
_QUIET_LOOKS = 3
_QUIET_CPU_SECONDS = 0.01
_MAX_HOLD_SECONDS = 5.0
# Pauses of all devices in one call, together.
_MAX_PAUSES_SECONDS = 0.3
_PAUSES = (0.0, 0.0, 0.005, 0.02)


class Skew:
    """Which device is late, and the pauses at grid points, of one call after the other."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices, self._late = num_devices, 0
        self._random, self._left, self._lock = random.Random(0), 0.0, threading.Lock()

    def begin(self, call: int) -> None:
        """What follows belongs to call number `call`: the late device, and the order of pauses, change with it."""
        self._late = (self._num_devices - 1 - call) % self._num_devices
        self._random, self._left = random.Random(call), _MAX_PAUSES_SECONDS

    def late(self, array: jax.Array, mesh: Mesh, sharding: NamedSharding) -> jax.Array:
        """The array, which the late device has only when the others have gone as far as they can; traced."""

        def of_device(part: jax.Array) -> jax.Array:
            device = lax.axis_index(mesh.axis_names)
            return jax.pure_callback(self._hold, jax.ShapeDtypeStruct(part.shape, part.dtype), part, device)

        specs = sharding.spec
        return jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)(array)

    def at_grid_point(self, token: Any, *_: Any) -> Any:
        """Pauses now and then; for the interpreter, which calls it from every device's own thread."""
        with self._lock:
            pause = min(self._random.choice(_PAUSES), self._left)
            self._left -= pause
        time.sleep(pause)
        return np.asarray(token)

    def _hold(self, part: Any, device: Any) -> np.ndarray:
        if int(device) == self._late:
            _until_quiet()
        return np.asarray(part)


def _until_quiet() -> None:
    quiet, until = 0, time.monotonic() + _MAX_HOLD_SECONDS
    while quiet < _QUIET_LOOKS and time.monotonic() < until:
        used = time.process_time()
        time.sleep(_LOOK_SECONDS)
        quiet = quiet + 1 if time.process_time() - used < _QUIET_CPU_SECONDS else 0
