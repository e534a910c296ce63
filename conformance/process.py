"""The parent's hold on one worker process: starting it, one request at a time, telling a crash from a hang (watch.py).

What it prints goes to a file that holds one case's at most; what it starts is ended with it.
May touch: processes, sockets, a temporary log file; never JAX. Tests: tests/conformance/test_process.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from conformance import watch
from conformance.answers import precision_of
from conformance.channel import Channel, ChannelClosed, ChannelGarbled
from conformance.devices import Devices, worker_environment
from conformance.problem import DTYPES
from conformance.target import TargetDescription, TargetError
from conformance.watch import EXHAUSTS_MEMORY, MANY_PRINTED_BYTES, Usage, Watch, how_it_ended, usage_of

_POLL_SECONDS = 0.5
_LOG_TAIL_BYTES = 4000
# What a target started for a moment may still be about to end when the case is answered.
_GRACE_SECONDS = 2.0
_MARK = "HALOCHECK_WORKER"
"""An environment variable that everything has inherited which a worker started, whatever its process group."""


@dataclass(frozen=True)
class WorkerLost:
    """A worker died or hung: `how` in a stable word or two, the phase it was in, and the end of what it printed."""

    how: str
    phase: str
    log: str


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
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied while the worker writes
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            # -P: a file of the working directory must not stand in for one of ours before the target is loaded.
            [sys.executable, "-P", "-m", "conformance.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=worker_environment(devices, enable_x64) | {_MARK: self._mark},
            start_new_session=True,  # Ctrl-C is the parent's; and the whole group can be ended
        )
        theirs.close()
        self._channel = Channel(ours, stalled_after=watch.IDLE_SECONDS)
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
        os.ftruncate(self._log.fileno(), 0)
        self._watch = Watch(platform=self._devices.platform)
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
                    return message["result"] | self._left_behind(), arrays
                self._phase = message["phase"]
                self._watch = Watch(platform=self._devices.platform)
        except ChannelClosed:
            return self._lost(self._how_it_ended())
        except ChannelGarbled:
            return self._lost("writes to the channel of the harness")
        how = self._watch.lost(self._usage)
        if how is None and self._process.poll() is not None and not self._has_message(0):
            how = self._how_it_ended()  # though a process that it has forked holds the channel open
        return self._lost(how) if how else None

    def close(self) -> None:
        """Ends the process and whatever it started, in its process group or not."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in self._started():
            with contextlib.suppress(psutil.Error):
                process.kill()
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
        self._phase, self._watch = "loading the target", Watch(platform=devices.platform)
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
        return _checked(TargetDescription(**answer["description"] | {"platform": devices.platform}))

    def _wait_for_message(self) -> str | None:
        """None once a message or the end of the channel is there to read; else how the worker hangs."""
        how = None
        while how is None and not self._has_message(_POLL_SECONDS):
            how = self._watch.lost(self._usage)
        return how

    def _has_message(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._channel], [], [], seconds)
        return bool(readable)

    def _usage(self) -> Usage:
        return dataclasses.replace(usage_of(self._process.pid), printed_bytes=self._printed_bytes())

    def _printed_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _left_behind(self) -> dict[str, Any]:
        """What is not as it should be once a case is answered, for the message: `printed_bytes`, `left_running`."""
        left: dict[str, Any] = {}
        if (printed := self._printed_bytes()) > MANY_PRINTED_BYTES:
            left["printed_bytes"] = printed
        if started := self._started():
            _, still_there = psutil.wait_procs(started, timeout=_GRACE_SECONDS)
            if running := [process for process in still_there if _runs(process)]:
                left["left_running"] = [_command_line(process) for process in running]
        return left

    def _started(self) -> list[psutil.Process]:
        """Every other process that has this worker's mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self._process.pid and process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=watch.IDLE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return how_it_ended(code)

    def _lost(self, how: str) -> WorkerLost:
        log = self._tail()
        if how == EXHAUSTS_MEMORY:
            log = f"a worker may hold {watch.memory_limit() / 2**30:.1f} GiB on this machine\n{log}".rstrip()
        lost = WorkerLost(how, self._phase, log)
        self.close()
        return lost

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return "a process that has ended since"


def _checked(description: TargetDescription) -> TargetDescription:
    """The description, once the numerics that it declares are known to mean something for every dtype."""
    try:
        for dtype in DTYPES:
            precision_of(description, dtype)
    except (TypeError, ValueError) as error:
        raise TargetError(f"{description.spec}: {error}") from error
    return description
