"""Tells a process that still gets somewhere from one that hangs, exhausts memory or prints without end.

A hang is judged by CPU time, not by the clock: a machine may be slow, a deadlock uses no CPU. Nor does it wait for any:
on a machine where others take every core, time in the queue for one tells who would go on if it could.
May touch: what the system says of processes. Tests: tests/conformance/test_watch.py, tests/conformance/test_process.py.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# A worker that uses less than IDLE_CPU_SECONDS of CPU in IDLE_SECONDS waits for something that will not come.
IDLE_SECONDS = 15.0
IDLE_CPU_SECONDS = 0.3
# Of a host with TPUs: while they compute, or a slice's other hosts have not come yet, it waits and uses none.
TPU_IDLE_SECONDS = 300.0
# What could go on waits for a core nearly all of the time; a hung process has threads that wake for a moment.
STARVED_SHARE = 0.2
# Who has had no core for so long is given up all the same.
STARVED_SECONDS = 600.0
# A case takes a second or two of CPU, its compilation included; this is for a loop that never ends.
BUSY_CPU_SECONDS = 600.0
# Of the machine's memory, or of what its control group may use. Beyond it the system would end whom it likes.
MEMORY_SHARE = 0.5
PRINTED_BYTES = 64 << 20
# What a target prints of one case beyond this buries what it has to say, in its user's logs too.
MANY_PRINTED_BYTES = 1 << 20
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
    queued_seconds: float = 0.0
    """How long its threads were ready to run and had no core."""


class Watch:
    """Tells from what a process uses since its last message whether it may go on.

    It begins with its first look: most messages are followed by another one sooner than by a look, which is dear.
    """

    def __init__(self, busy_cpu_seconds: float | None = None, platform: str = "cpu") -> None:
        """`busy_cpu_seconds` until it computes without end; None: BUSY_CPU_SECONDS. `platform`: of what computes for
        it, "cpu" or "tpu".
        """
        self._platform = platform
        self._busy_cpu_seconds = BUSY_CPU_SECONDS if busy_cpu_seconds is None else busy_cpu_seconds
        self._unused_since = self._idle_since = self._looked_at = time.monotonic()
        self._used = self._queued = 0.0
        self._before: Usage | None = None

    def lost(self, usage: Callable[[], Usage]) -> str | None:
        """One of WITHOUT_END once it is so. It looks at `usage` now and then only: a look costs milliseconds."""
        now = time.monotonic()
        if now - self._looked_at < _POLL_SECONDS:
            return None
        self._looked_at, usage_now = now, usage()
        used = usage_now.cpu_seconds
        if usage_now.resident_bytes > memory_limit():
            return EXHAUSTS_MEMORY
        if usage_now.printed_bytes > PRINTED_BYTES:
            return PRINTS_WITHOUT_END
        if self._before is None:
            self._before, self._used, self._queued = usage_now, used, usage_now.queued_seconds
            self._unused_since = self._idle_since = now
            return None
        # It falls when a process that the worker started has ended.
        if abs(used - self._used) > IDLE_CPU_SECONDS:
            self._used, self._unused_since = used, now
            self._idle_since, self._queued = now, usage_now.queued_seconds
        most_idle = IDLE_SECONDS if self._platform == "cpu" else TPU_IDLE_SECONDS
        if (idle := now - self._idle_since) > most_idle:
            is_starved = usage_now.queued_seconds - self._queued > STARVED_SHARE * idle
            if not is_starved or now - self._unused_since > STARVED_SECONDS:
                return HANGS[0]
            self._idle_since, self._queued = now, usage_now.queued_seconds
        return HANGS[1] if used - self._before.cpu_seconds > self._busy_cpu_seconds else None


def how_it_ended(status: int) -> str:
    """How a process was lost that ended by itself, of its exit status."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def memory_limit() -> int:
    """Bytes that one worker and what it started may hold."""
    return int(MEMORY_SHARE * min([psutil.virtual_memory().total, *_group_limits()]))


def usage_of(pid: int) -> Usage:
    """Of a process and of every process it started; without `printed_bytes`."""
    seconds, resident, queued = 0.0, 0, 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                seconds += times.user + times.system
                resident += member.memory_info().rss
                queued += sum(_queued_seconds(member.pid))
    return Usage(seconds, resident, queued_seconds=queued)


def _queued_seconds(pid: int) -> Iterator[float]:
    """Of each thread. Linux's own count, in nanoseconds; where there is none, nothing is known to wait."""
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has ended
            yield int(path.read_text().split()[1]) / 1e9


def _group_limits() -> Iterator[int]:
    for path in map(Path, _GROUP_LIMITS):
        with contextlib.suppress(OSError, ValueError):  # no such group; "max"
            yield int(path.read_text())
