"""Has a process compile a target's cases for a topology, and judges what it sends by the check `collectives`.

May touch: a process, temporary files, the check; never JAX. Tests: tests/conformance/test_aot_command.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.aot.bundles import dump_arguments
from conformance.aot.topologies import generation_of
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.target import TargetDescription, TargetError

MISSING_LIBTPU = "compiling for an absent TPU needs libtpu: pip install 'halocheck[aot]'"


@dataclass(frozen=True)
class Compiled:
    """What one target's case became on one topology.

    `facts` are those of aot/program.py; empty where it was declined (`reason`) or did not compile (a finding).
    `shares`: of the strategy's bytes, forward and backward, the largest share that is sent.
    """

    target: str
    topology: str
    case: Case
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def hidden(self) -> tuple[int, int]:
        """(transfers that a kernel hides, all transfers)."""
        transfers = self.facts.get("transfers", ())
        return sum(bool(one["kernels"]) for one in transfers), len(transfers)

    @property
    def memory_share(self) -> float:
        """Arguments, results and temporaries as a share of the device's memory."""
        used = sum(self.facts.get(f"{name}_bytes", 0) for name in ("temporary", "argument", "output"))
        return used / generation_of(self.topology).hbm_bytes


def has_libtpu() -> bool:
    """Whether this interpreter could compile for TPUs."""
    return importlib.util.find_spec("libtpu") is not None


def compile_target(spec: str, topology: str, cases: Sequence[Case], *, schedules: bool = False) -> Iterator[Compiled]:
    """Compiles the cases, one after the other; `schedules`: with those of the kernels, and what remat runs again.

    Raises:
        TargetError: the target does not load, or the process ended before it had.
    """
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "log", "w+", encoding="utf-8") as log:
        results, dump = Path(directory) / "results.jsonl", Path(directory) / "schedules"
        dump.mkdir()
        job = {
            "target": spec,
            "topology": topology,
            "cases": [format_case(case) for case in cases],
            "results": str(results),
            "schedules": str(dump) if schedules else "",
        }
        environment = compiler_environment(topology)
        if schedules:  # of two equal flags the last wins
            own = environment.get("LIBTPU_INIT_ARGS", "")
            environment["LIBTPU_INIT_ARGS"] = f"{own} {dump_arguments(dump)}".strip()
        # libtpu writes pages to both streams: they go to a file, of which the end is shown if the process fails.
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "conformance.aot.program"],
            input=json.dumps(job),
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
        log.seek(0)
        tail = log.read()[-3000:].strip()
        written = results.read_text(encoding="utf-8") if results.exists() else ""
        messages = [json.loads(line) for line in written.splitlines()]
    if not messages:
        raise TargetError(f"the compiling process exited with status {ended.returncode}\n{tail}")
    if "load_error" in messages[0]:
        raise TargetError(messages[0]["load_error"])
    description = TargetDescription(**messages[0]["description"] | {"platform": "tpu"})
    for case, message in zip(cases, messages[1:], strict=False):
        yield _judged(description, topology, case, message)
    for case in cases[len(messages) - 1 :]:
        finding = _finding(description, case, "takes the compiler's process along", f"status {ended.returncode}", tail)
        yield Compiled(description.name, topology, case, findings=(finding,))


def compiler_environment(topology: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which libtpu compiles without looking for a TPU, several processes at once if need be."""
    return {
        **base,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": generation_of(topology).accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": base.get("TPU_LOG_DIR", "disabled"),
        "TF_CPP_MIN_LOG_LEVEL": base.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _judged(description: TargetDescription, topology: str, case: Case, message: Mapping[str, Any]) -> Compiled:
    if "declined" in message:
        return Compiled(description.name, topology, case, reason=message["declined"])
    if raised := message.get("raised"):
        how = f"{raised['type']}: {raised['message']}"
        finding = _finding(description, case, f"does not compile ({raised['type']})", how, raised["traceback"])
        return Compiled(description.name, topology, case, findings=(finding,))
    of_problem = description.of_problem(message.get("uses_tpu_precision", True))
    outcome = CHECKS["collectives"].run(Evidence(of_problem, case, message, {}))
    return Compiled(description.name, topology, case, message, outcome.findings, outcome.shares)


def _finding(description: TargetDescription, case: Case, what: str, how: str, detail: str) -> Finding:
    return Finding(
        target=description.name,
        check="aot",
        tensor="program",
        signature=what,
        case=format_case(case),
        reading=f"{what}: {how}",
        detail=detail,
    )
