"""Starts one process for each host on this machine, watches them, and makes one run of what all of them found.

A process that ends or hangs ends the run with a finding: the others wait for it in a collective for ever.
May touch: processes, temporary files; never JAX. Tests: tests/conformance/test_hosts_launch.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.case_text import format_case
from conformance.checks.contract import TENSOR as CALL
from conformance.checks.contract import lost
from conformance.devices import Devices, worker_environment
from conformance.finding import Finding
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE, CaseResult
from conformance.target import TargetDescription, TargetError
from conformance.watch import Usage, Watch, usage_of

_POLL_SECONDS = 0.2
# What the others do once one is gone is no news; they are given this long to end by themselves.
_GRACE_SECONDS = 2.0
Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class HostsRun:
    """What one target did on the cases, merged over the hosts, and the peak memory of each host in bytes."""

    description: TargetDescription
    results: tuple[CaseResult, ...]
    peak_bytes: tuple[int, ...]


CHECKS_OF_HOSTS = ("contract", "output", "residuals", "gradients")


def run_plan_on_hosts(plan: Plan, num_hosts: int, progress: Callable[[str], None], state: Run | None = None) -> Run:
    """Runs a plan's cases, every target in its turn, as `runner.run` does on one host; nothing is shrunk.

    Raises:
        TargetError: a target does not load.
    """
    started_at = time.monotonic()
    state = Run(plan) if state is None else state
    devices = Devices(plan.devices.platform, plan.devices.count // num_hosts)
    try:
        for spec in plan.targets:
            done = run_on_hosts(spec, plan.cases, devices, num_hosts, progress)
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
    spec: str, cases: Sequence[Case], devices_of_host: Devices, num_hosts: int, progress: Callable[[str], None]
) -> HostsRun:
    """Runs the cases in `num_hosts` processes that are one mesh; cases of other sizes are declined.

    Raises:
        TargetError: the target does not load, or a process ended before it had.
    """
    with tempfile.TemporaryDirectory() as directory:
        hosts = _Hosts(spec, cases, devices_of_host, num_hosts, Path(directory))
        try:
            gone = hosts.wait(progress)
        finally:
            hosts.end()
        return _merged(spec, cases, hosts, gone)


class _Hosts:
    """The processes of one job."""

    def __init__(self, spec: str, cases: Sequence[Case], devices: Devices, num_hosts: int, directory: Path) -> None:
        self.num_hosts, self._directory = num_hosts, directory
        job = {
            "target": spec,
            "cases": [format_case(case) for case in cases],
            "platform": devices.platform,
            "num_processes": num_hosts,
            "coordinator": f"127.0.0.1:{_free_port()}",
            "results": str(directory),
        }
        (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self._logs = [open(directory / f"{number}.log", "w+b") for number in range(num_hosts)]  # noqa: SIM115  # closed by end()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "conformance.hosts.host", str(directory / "job.json"), str(number)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=worker_environment(devices, enable_x64=False),
                start_new_session=True,
            )
            for number, log in enumerate(self._logs)
        ]

    def wait(self, progress: Callable[[str], None]) -> tuple[int, WorkerLost] | None:
        """The first process that was lost, and how; None if all came to their end."""
        watches = [Watch(Usage(0.0)) for _ in self._processes]
        written = [0] * self.num_hosts
        while True:
            for number, process in enumerate(self._processes):
                lines = len(self.messages(number))
                if lines > written[number]:
                    written[number], watches[number] = lines, Watch(usage_of(process.pid))
                    begun = [said["begins"] for said in self.messages(number)[-2:] if "begins" in said]
                    if number == 0 and begun:
                        progress(f"running {begun[-1]}")
                code = process.poll()
                if code not in (None, 0):
                    return number, WorkerLost(_ended(code), self._phase(number), self._tail(number))
                how = None if code == 0 else watches[number].lost(lambda pid=process.pid: usage_of(pid))
                if how:
                    return number, WorkerLost(how, self._phase(number), self._tail(number))
            if all(process.poll() == 0 for process in self._processes):
                return None
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Ends every process."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            if all(process.poll() in (None, 0) for process in self._processes):
                break
            time.sleep(_POLL_SECONDS)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in self._logs:
            log.close()

    def messages(self, number: int) -> Messages:
        """What a host has written so far."""
        path = self._directory / f"{number}.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

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
    results = [_result(case, [host[at] for host in answers]) for at, case in enumerate(cases[:done])]
    if gone is not None and done < len(cases):
        case = cases[done]
        finding = dataclasses.replace(lost(description.name, format_case(case), gone[1]), rank=None)
        finding = dataclasses.replace(finding, reading=f"host {gone[0]} of {hosts.num_hosts}: {finding.reading}")
        results.append(CaseResult(case, FINDING, (finding,), {("contract", CALL): 0.0}))
    peaks = tuple(one["peak_bytes"] for said in messages for one in said if "peak_bytes" in one)
    return HostsRun(description, tuple(results), peaks)


def _result(case: Case, answers: Sequence[Mapping[str, Any]]) -> CaseResult:
    """One case over all hosts: the largest share of each tensor, the worst finding of each kind."""
    reasons = [answer["declined"] for answer in answers if "declined" in answer]
    if len(reasons) == len(answers):
        return CaseResult(case, DECLINED, reason=reasons[0])
    answers = [answer for answer in answers if "declined" not in answer]
    shares: dict[tuple[str, str], float] = {}
    findings: dict[str, Finding] = {}
    for answer in answers:
        for check, tensor, share in answer["shares"]:
            shares[check, tensor] = max(share, shares.get((check, tensor), 0.0))
        for fields in answer["findings"]:
            finding = Finding(**{**fields, "index": tuple(fields["index"]) if fields["index"] else None})
            known = findings.get(finding.id)
            if known is None or (finding.share or 0.0) > (known.share or 0.0):
                findings[finding.id] = finding
    # What some hosts decline and others answer is never waved through: nobody has looked at all of it.
    status = FINDING if findings else INCONCLUSIVE if reasons else CONFORMS
    reason = f"some hosts decline it: {reasons[0]}" if reasons else ""
    return CaseResult(case, status, tuple(findings.values()), shares, reason)


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
