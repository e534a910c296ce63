"""The parent's hold on one worker process: starting it, one request at a time, and telling a crash from a hang.

A hang is judged by CPU time, not by the clock: a machine may be slow, a deadlock uses no CPU.
May touch: processes, sockets, a temporary log file; never JAX. Tests: tests/conformance/test_process.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from conformance.answers import precision_of
from conformance.channel import Channel, ChannelClosed, ChannelGarbled
from conformance.devices import Devices, worker_environment
from conformance.problem import DTYPES
from conformance.target import TargetDescription, TargetError

# A worker that uses less than IDLE_CPU_SECONDS of CPU in IDLE_SECONDS waits for something that will not come.
IDLE_SECONDS = 15.0
IDLE_CPU_SECONDS = 0.3
# A case takes a second or two of CPU, its compilation included; this is for a loop that never ends.
BUSY_CPU_SECONDS = 600.0
HANGS = ("hangs without using CPU", "computes without end")
_POLL_SECONDS = 0.5
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class WorkerLost:
    """A worker died or hung: `how` in a stable word or two, the phase it was in, and the end of what it printed."""

    how: str
    phase: str
    log: str


class Watch:
    """Tells from the CPU time that a worker has used since its last message whether it still gets anywhere."""

    def __init__(self, cpu_seconds: float) -> None:
        self._started_at = self._used = cpu_seconds
        self._idle_since = self._looked_at = time.monotonic()

    def hangs(self, cpu_seconds: Callable[[], float]) -> str | None:
        """One of HANGS once it is so. It looks at `cpu_seconds` now and then only: a look costs a millisecond."""
        now = time.monotonic()
        if now - self._looked_at < _POLL_SECONDS:
            return None
        self._looked_at, now_used = now, cpu_seconds()
        if abs(now_used - self._used) > IDLE_CPU_SECONDS:  # it falls when a process that the worker started has ended
            self._used, self._idle_since = now_used, now
        if now - self._idle_since > IDLE_SECONDS:
            return HANGS[0]
        if now_used - self._started_at > BUSY_CPU_SECONDS:
            return HANGS[1]
        return None


Reply = tuple[dict[str, Any], dict[str, np.ndarray]]


class Worker:
    """One worker process with one target loaded at a time."""

    def __init__(self, spec: str, devices: Devices, *, enable_x64: bool = False) -> None:
        """Starts the process and loads the target.

        Raises:
            TargetError: the target does not load.
        """
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        self._process = subprocess.Popen(
            # -P: a file of the working directory must not stand in for one of ours before the target is loaded.
            [sys.executable, "-P", "-m", "conformance.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=worker_environment(devices, enable_x64),
            start_new_session=True,  # Ctrl-C is the parent's; and the whole group can be ended
        )
        theirs.close()
        self._channel = Channel(ours, stalled_after=IDLE_SECONDS)
        self._devices = devices
        self._closed = False
        try:
            self.description = self.load(spec)
        except BaseException:  # Ctrl-C included: nobody else holds the process yet
            self.close()
            raise

    def run(self, case_text: str, checks: Collection[str] = ()) -> Reply | WorkerLost:
        """Has the target run one case: see `execution.execute` for the reply. Use `send` and `wait` to overlap."""
        self.send(case_text, checks)
        return self.wait()

    def send(self, case_text: str, checks: Collection[str] = ()) -> None:
        """Starts a case for these checks; `wait` gives its reply."""
        self._phase = "starting"
        self._watch = Watch(self._cpu_seconds())
        with contextlib.suppress(ChannelClosed):  # a worker that is gone shows in wait()
            self._channel.send({"do": "execute", "case": case_text, "checks": list(checks)})

    def wait(self) -> Reply | WorkerLost:
        """The reply to the case that was sent, or how the worker was lost."""
        while (reply := self.poll(_POLL_SECONDS)) is None:
            pass
        return reply

    def poll(self, seconds: float) -> Reply | WorkerLost | None:
        """What `wait` gives, if it is known within `seconds`; else None."""
        try:
            while self._has_message(seconds):
                message, arrays = self._channel.receive()
                if "result" in message:
                    return message["result"], arrays
                self._phase = message["phase"]
                self._watch = Watch(self._cpu_seconds())
        except ChannelClosed:
            return self._lost(self._how_it_ended())
        except ChannelGarbled:
            return self._lost("writes to the channel of the harness")
        how = self._watch.hangs(self._cpu_seconds)
        return self._lost(how) if how else None

    def close(self) -> None:
        """Ends the process and whatever it started."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        self._log.close()

    def load(self, spec: str) -> TargetDescription:
        """Puts another target in the place of the one that is loaded. What that one left in the process stays there.

        Raises:
            TargetError: the target does not load.
        """
        self.description = self._load(spec, self._devices)
        return self.description

    def _load(self, spec: str, devices: Devices) -> TargetDescription:
        self._phase, self._watch = "loading the target", Watch(self._cpu_seconds())
        try:
            self._channel.send({"do": "load", "target": spec})
            how = self._wait_for_message()
            answer, _ = ({}, {}) if how else self._channel.receive()
        except ChannelClosed:
            how, answer = self._how_it_ended(), {}
        except ChannelGarbled:
            how, answer = "wrote to the channel of the harness", {}
        if how:
            lost = self._lost(how)
            raise TargetError(f"the worker process {lost.how} while {spec} was imported\n{lost.log}")
        if "load_error" in answer:
            raise TargetError(answer["load_error"])
        if answer["num_devices"] != devices.count:
            raise TargetError(
                f"{spec}: importing it leaves JAX with {answer['num_devices']} devices of the {devices.count} asked for"
            )
        return _checked(TargetDescription(**answer["description"]))

    def _wait_for_message(self) -> str | None:
        """None once a message or the end of the channel is there to read; else how the worker hangs."""
        how = None
        while how is None and not self._has_message(_POLL_SECONDS):
            how = self._watch.hangs(self._cpu_seconds)
        return how

    def _has_message(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._channel], [], [], seconds)
        return bool(readable)

    def _cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=IDLE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def _lost(self, how: str) -> WorkerLost:
        lost = WorkerLost(how, self._phase, self._tail())
        self.close()
        return lost

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()


def _checked(description: TargetDescription) -> TargetDescription:
    """The description, once the numerics that it declares are known to mean something for every dtype."""
    try:
        for dtype in DTYPES:
            precision_of(description, dtype)
    except (TypeError, ValueError) as error:
        raise TargetError(f"{description.spec}: {error}") from error
    return description


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of every process it started."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                total += times.user + times.system
    return total
