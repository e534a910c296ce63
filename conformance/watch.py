"""Tells a process that still gets somewhere from one that hangs, exhausts memory or prints without end.

A hang is judged by CPU time, not by the clock: a machine may be slow, a deadlock uses no CPU.
May touch: what the system says of processes. Tests: tests/conformance/test_watch.py, tests/conformance/test_process.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# A worker that uses less than IDLE_CPU_SECONDS of CPU in IDLE_SECONDS waits for something that will not come.
IDLE_SECONDS = 15.0
IDLE_CPU_SECONDS = 0.3
# A case takes a second or two of CPU, its compilation included; this is for a loop that never ends.
BUSY_CPU_SECONDS = 600.0
# Of the machine's memory, or of what its control group may use. Beyond it the system would end whom it likes.
MEMORY_SHARE = 0.5
PRINTED_BYTES = 64 << 20
HANGS = ("hangs without using CPU", "computes without end")
EXHAUSTS_MEMORY = "exhausts memory"
PRINTS_WITHOUT_END = "prints without end"
WITHOUT_END = (*HANGS, EXHAUSTS_MEMORY, PRINTS_WITHOUT_END)
"""How a process is lost that was ended from outside. To see it once more takes as long again: it is not shrunk."""

_POLL_SECONDS = 0.5
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Usage:
    """What a process and all that it started have used so far, and hold now."""

    cpu_seconds: float
    resident_bytes: int = 0
    printed_bytes: int = 0


class Watch:
    """Tells from what a process uses since its last message whether it may go on."""

    def __init__(self, before: Usage) -> None:
        self._started_at = self._used = before.cpu_seconds
        self._idle_since = self._looked_at = time.monotonic()

    def lost(self, usage: Callable[[], Usage]) -> str | None:
        """One of WITHOUT_END once it is so. It looks at `usage` now and then only: a look costs milliseconds."""
        now = time.monotonic()
        if now - self._looked_at < _POLL_SECONDS:
            return None
        self._looked_at, used = now, usage()
        if used.resident_bytes > memory_limit():
            return EXHAUSTS_MEMORY
        if used.printed_bytes > PRINTED_BYTES:
            return PRINTS_WITHOUT_END
        # It falls when a process that the worker started has ended.
        if abs(used.cpu_seconds - self._used) > IDLE_CPU_SECONDS:
            self._used, self._idle_since = used.cpu_seconds, now
        if now - self._idle_since > IDLE_SECONDS:
            return HANGS[0]
        return HANGS[1] if used.cpu_seconds - self._started_at > BUSY_CPU_SECONDS else None


def memory_limit() -> int:
    """Bytes that one worker and what it started may hold."""
    return int(MEMORY_SHARE * min([psutil.virtual_memory().total, *_group_limits()]))


def usage_of(pid: int) -> Usage:
    """Of a process and of every process it started; without `printed_bytes`."""
    seconds, resident = 0.0, 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                seconds += times.user + times.system
                resident += member.memory_info().rss
    return Usage(seconds, resident)


def _group_limits() -> Iterator[int]:
    for path in map(Path, _GROUP_LIMITS):
        with contextlib.suppress(OSError, ValueError):  # no such group; "max"
            yield int(path.read_text())
