"""Starts the processes of the hosts that this machine stands for, and makes one run of what all hosts found.

Without a place it stands for all of them; with one (place.py) for one host of a slice, and hears of the others.

A process that ends or hangs ends the run with a finding: the others wait for it in a collective for ever.
May touch: processes, temporary files; never JAX. Tests: tests/conformance/test_hosts_launch.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance.case_text import format_case
from conformance.devices import Devices, worker_environment
from conformance.hosts.merging import lost_on, result_of
from conformance.hosts.place import Place
from conformance.hosts.sinks import judged
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CaseResult
from conformance.target import TargetDescription, TargetError
from conformance.watch import Usage, Watch, how_it_ended, usage_of

_POLL_SECONDS = 0.2
# What the others do once one is gone is no news; they are given this long to end by themselves.
_GRACE_SECONDS = 2.0
# What another host has written is here at the latest so long after this one has ended: they end together.
_MOST_LAG_SECONDS = 300.0
Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class HostsRun:
    """What one target did on the cases, merged over the hosts, and the peak memory of each host in bytes."""

    description: TargetDescription
    results: tuple[CaseResult, ...]
    peak_bytes: tuple[int, ...]


CHECKS_OF_HOSTS = ("contract", "output", "residuals", "gradients")


def run_plan_on_hosts(
    plan: Plan, num_hosts: int, progress: Callable[[str], None], state: Run | None = None, place: Place | None = None
) -> Run:
    """Runs a plan's cases, every target in its turn, as `runner.run` does on one host; nothing is shrunk.

    Raises:
        TargetError: a target does not load.
        ValueError: the folder of `place` is that of another run.
    """
    started_at = time.monotonic()
    state = Run(plan) if state is None else state
    devices = Devices(plan.devices.platform, plan.devices.count // num_hosts)
    try:
        for index, spec in enumerate(plan.targets):
            here = place and place.of_target(index)
            done = run_on_hosts(spec, plan.cases, devices, num_hosts, progress, here)
            target = TargetRun(done.description, list(done.results))
            state.targets.append(target)
            if len(done.results) < len(plan.cases):
                target.stopped = "a host was lost, and the others with it"
            for finding in (finding for result in done.results for finding in result.findings):
                target.smallest.setdefault(finding.id, finding)
                progress(f"{done.description.name}: {finding.reading}")
            peak = max(done.peak_bytes, default=0) / 2**20
            progress(f"{done.description.name}: {len(done.results)} cases, at most {peak:.0f} MiB on a host")
    except KeyboardInterrupt:
        state.interrupted = True
    state.seconds = time.monotonic() - started_at
    return state


def run_on_hosts(
    spec: str,
    cases: Sequence[Case],
    devices_of_host: Devices,
    num_hosts: int,
    progress: Callable[[str], None],
    place: Place | None = None,
) -> HostsRun:
    """Runs the cases in `num_hosts` processes that are one mesh; cases of other sizes are declined.

    With a place only that host's process is started here; every host's command returns the same.

    Raises:
        TargetError: the target does not load, or a process ended before it had.
        ValueError: the folder of `place` is that of another run.
    """
    with tempfile.TemporaryDirectory() as directory:
        if place:
            place.prepare()
        hosts = _Hosts(spec, cases, devices_of_host, num_hosts, place or Path(directory))
        try:
            gone = hosts.wait(progress)
        finally:
            hosts.end()
        return _merged(spec, cases, hosts, gone)


class _Hosts:
    """The processes of one job. `where` is the place of the one to start here, or the folder of all of them."""

    def __init__(self, spec: str, cases: Sequence[Case], devices: Devices, num_hosts: int, where: Place | Path) -> None:
        self._place = where if isinstance(where, Place) else None
        directory = where.exchange if isinstance(where, Place) else where
        self.num_hosts, self._directory, self._platform = num_hosts, directory, devices.platform
        self._here = (self._place.number,) if self._place else tuple(range(num_hosts))
        job = {
            "target": spec,
            "cases": [format_case(case) for case in cases],
            "platform": devices.platform,
            "num_processes": num_hosts,
            "coordinator": self._place.coordinator if self._place else f"127.0.0.1:{_free_port()}",
            "results": str(directory),
        }
        file = directory / f"{self._here[0]}.job.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        self._logs = {number: open(directory / f"{number}.log", "w+b") for number in self._here}  # noqa: SIM115  # closed by end()
        self._processes = {
            number: subprocess.Popen(
                [sys.executable, "-P", "-m", "conformance.hosts.host", str(file), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(devices, enable_x64=False),
                start_new_session=True,
            )
            for number, log in self._logs.items()
        }

    def wait(self, progress: Callable[[str], None]) -> tuple[int, WorkerLost] | None:
        """The first process that was lost, and how; None if all came to their end."""
        watches = {number: Watch(platform=self._platform) for number in self._here}
        written, printed = dict.fromkeys(self._here, 0), dict.fromkeys(self._here, 0)
        ended_at: float | None = None
        while True:
            for number, process in self._processes.items():
                told = self.messages(number)
                if len(told) > written[number]:
                    begun = [said["begins"] for said in told[written[number] :] if "begins" in said]
                    written[number], watches[number] = len(told), Watch(platform=self._platform)
                    if begun:
                        printed[number] = self._printed_bytes(number)
                    if number == self._here[0] and begun:
                        progress(f"running {begun[-1]}")
                code = process.poll()
                if code not in (None, 0):
                    return self._told(number, how_it_ended(code))
                # Another host's command may start minutes later: how long to wait for it is jax.distributed's to say.
                waits_for_others = self._place is not None and not told
                usage = functools.partial(self._usage, number, printed[number])
                how = None if code == 0 or waits_for_others else watches[number].lost(usage)
                if how:
                    return self._told(number, how)
            if elsewhere := self._lost_elsewhere():
                return elsewhere
            if all(process.poll() == 0 for process in self._processes.values()):
                ended_at = ended_at or time.monotonic()
                silent = [number for number in range(self.num_hosts) if not self._has_ended(number)]
                if not silent or self._place is None:
                    return None
                if time.monotonic() - ended_at > _MOST_LAG_SECONDS:
                    return silent[0], WorkerLost("has not written that it ended", self._phase(silent[0]), "")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Ends every process."""
        deadline = time.monotonic() + _GRACE_SECONDS
        processes = self._processes.values()
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if all(process.poll() in (None, 0) for process in processes):
                break
            time.sleep(_POLL_SECONDS)
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self._logs.values():
            log.close()

    def _usage(self, number: int, printed_before: int) -> Usage:
        """Of a process on this machine; printed is what came since its case began."""
        printed = self._printed_bytes(number) - printed_before
        return dataclasses.replace(usage_of(self._processes[number].pid), printed_bytes=printed)

    def _printed_bytes(self, number: int) -> int:
        return os.fstat(self._logs[number].fileno()).st_size

    def messages(self, number: int) -> Messages:
        """What a host has written so far."""
        path = self._directory / f"{number}.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def _told(self, number: int, how: str) -> tuple[int, WorkerLost]:
        """A process of this machine that was lost; the other hosts are told."""
        lost = WorkerLost(how, self._phase(number), self._tail(number))
        if self._place:
            self._place.tell_lost(lost)
        return number, lost

    def _lost_elsewhere(self) -> tuple[int, WorkerLost] | None:
        for number in range(self.num_hosts if self._place else 0):
            if self._place and number != self._place.number and (lost := self._place.lost_at(number)):
                return number, lost
        return None

    def _has_ended(self, number: int) -> bool:
        return any("peak_bytes" in message or "load_error" in message for message in self.messages(number))

    def _phase(self, number: int) -> str:
        begun = sum("begins" in message for message in self.messages(number))
        return "running a case" if begun else "joining the other hosts"

    def _tail(self, number: int) -> str:
        return (self._directory / f"{number}.log").read_bytes()[-4000:].decode(errors="replace").strip()


def _merged(spec: str, cases: Sequence[Case], hosts: _Hosts, gone: tuple[int, WorkerLost] | None) -> HostsRun:
    messages = [hosts.messages(number) for number in range(hosts.num_hosts)]
    for said in messages:
        if said and "load_error" in said[0]:
            raise TargetError(said[0]["load_error"])
    described = next((said[0]["description"] for said in messages if said and "description" in said[0]), None)
    if described is None:
        assert gone is not None, "a host that comes to its end describes the target"
        raise TargetError(f"{spec}: a host {gone[1].how} while {gone[1].phase}\n{gone[1].log}")
    description = TargetDescription(**described)
    answers = [[one for one in said if "findings" in one or "declined" in one] for said in messages]
    done = min(map(len, answers))
    results = []
    for at, case in enumerate(cases[:done]):
        of_hosts = [host[at] for host in answers]
        of_problem = description.of_problem(all(said.get("uses_tpu_precision", True) for said in of_hosts))
        results.append(result_of(case, [*of_hosts, *judged(of_problem, case, of_hosts)]))
    if gone is not None and done < len(cases):
        results.append(lost_on(description, cases[done], hosts.num_hosts, gone, [host[done:] for host in answers]))
    peaks = tuple(one["peak_bytes"] for said in messages for one in said if "peak_bytes" in one)
    return HostsRun(description, tuple(results), peaks)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
