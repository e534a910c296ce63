"""Targets that are right, and do something to their process where the problem has a soft cap."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from gathered import right

_SLEEPS = [sys.executable, "-S", "-c", "__import__('time').sleep(3600)"]
_held: list[Any] = []


@dataclass(frozen=True)
class _Spoils:
    """The right target, which calls `spoil` first."""

    spoil: Callable[[], object]
    empty_rows: str = "zero"

    def attention(self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, **optional: Any) -> Any:
        if problem.attn_logits_soft_cap is not None:
            self.spoil()
        return right.attention(query, key, value, problem=problem, mesh=mesh, **optional)


def _allocate() -> None:
    """A GiB, every page of it, and then on."""
    _held.extend(np.ones(1 << 24) for _ in range(8))
    time.sleep(3600)


def _print_without_end() -> None:
    while True:
        print("x" * (1 << 20))


def _daemonise() -> None:
    """Starts what has left the process group and whose parent has gone."""
    daemon = f"import subprocess; subprocess.Popen({_SLEEPS!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", daemon], check=True)


def _fork_and_exit() -> None:
    """The child has every descriptor of the worker."""
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(9)


segfaults = _Spoils(lambda: ctypes.string_at(0))
exits_at_once = _Spoils(lambda: os._exit(9))
forks_and_exits = _Spoils(_fork_and_exit)
allocates = _Spoils(_allocate)
prints_without_end = _Spoils(_print_without_end)
prints_megabytes = _Spoils(lambda: [print("x" * (1 << 20), file=to) for to in (sys.stdout, sys.stderr)])
enables_x64 = _Spoils(lambda: jax.config.update("jax_enable_x64", True))
never_leaves_x64 = _Spoils(lambda: jax.enable_x64(True).__enter__())
lowers_precision = _Spoils(lambda: jax.config.update("jax_default_matmul_precision", "bfloat16"))
sets_platforms = _Spoils(lambda: jax.config.update("jax_platforms", "cpu,tpu"))
sets_xla_flags = _Spoils(lambda: os.environ.update(XLA_FLAGS="--xla_cpu_enable_fast_math=true"))
leaves_a_process = _Spoils(lambda: subprocess.Popen(_SLEEPS))
leaves_a_daemon = _Spoils(_daemonise)
