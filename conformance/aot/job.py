"""Has processes compile a target's cases for a topology, and judges what is sent by the check `collectives`.

May touch: the processes (compiler.py), the check; never JAX. Tests: tests/conformance/test_aot_command.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conformance.aot.compiler import Message, answers
from conformance.aot.topologies import generation_of
from conformance.case_text import format_case
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.session import MAX_WORKERS_LOST
from conformance.target import TargetDescription, TargetError
from conformance.watch import WITHOUT_END

MISSING_LIBTPU = "compiling for an absent TPU needs libtpu: pip install 'halocheck[aot]'"


@dataclass(frozen=True)
class Compiled:
    """What one target's case became on one topology.

    `facts` are those of aot/program.py; empty where it was declined (`reason`) or did not compile (a finding).
    `shares`: of the strategy's bytes, forward and backward, the largest share that is sent; `cannot_ask`: why nobody
    knows what is sent.
    """

    target: str
    topology: str
    case: Case
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    cannot_ask: str = ""

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


def compile_target(spec: str, topology: str, cases: Sequence[Case], *, schedules: bool = False) -> Generator[Compiled]:
    """Compiles the cases, one after the other; `schedules`: with those of the kernels, and what remat runs again.

    A case that takes the compiler's process along, or on which it hangs, is a finding, and a new process goes on behind
    it; once so many are lost as a run may lose workers, the cases that are left are declined.

    Raises:
        TargetError: the target does not load, or the process ended before it had.
    """
    left, num_lost, name = list(cases), 0, spec
    while left and num_lost < MAX_WORKERS_LOST:
        with contextlib.closing(answers(spec, topology, left, schedules=schedules)) as told:
            description = _description(next(told))
            name = description.name
            for message in told:
                case = left.pop(0)
                if isinstance(message, WorkerLost):
                    num_lost += 1
                    yield Compiled(name, topology, case, findings=(_of_lost(description, case, message),))
                else:
                    yield _judged(description, topology, case, message)
    for case in left:
        reason = f"not tried: the compiler was lost on {num_lost} cases before it"
        yield Compiled(name, topology, case, reason=reason)


def _description(message: Message | WorkerLost) -> TargetDescription:
    if isinstance(message, WorkerLost):
        raise TargetError(f"the compiling process {message.how}\n{message.log}")
    if "load_error" in message:
        raise TargetError(message["load_error"])
    return TargetDescription(**message["description"] | {"platform": "tpu"})


def _judged(description: TargetDescription, topology: str, case: Case, message: Mapping[str, Any]) -> Compiled:
    if "declined" in message:
        return Compiled(description.name, topology, case, reason=message["declined"])
    if raised := message.get("raised"):
        what = f"does not compile ({raised['type']})"
        finding = _finding(description, case, what, raised["message"], raised["traceback"])
        return Compiled(description.name, topology, case, findings=(finding,))
    of_problem = description.of_problem(message.get("uses_tpu_precision", True))
    outcome = CHECKS["collectives"].run(Evidence(of_problem, case, message, {}))
    findings = (*outcome.findings, *_of_kernels(description, case, message))
    return Compiled(
        description.name, topology, case, message, findings, outcome.shares, cannot_ask=outcome.cannot_ask or ""
    )


def _of_kernels(description: TargetDescription, case: Case, message: Mapping[str, Any]) -> Iterator[Finding]:
    if interpreted := message.get("interpreted"):
        how = (
            f"{', '.join(interpreted)}: the program has no custom call of it. Whether to interpret is to be decided by "
            "the platform of mesh.devices: jax.default_backend() is cpu while one compiles for a TPU that is not there"
        )
        yield _finding(description, case, "interprets a kernel", how, "")
    directions = {phase.partition("/")[0] for phase in message.get("kernel_phases", ())}
    for direction in description.tpu_kernels:
        if direction not in directions:
            how = f"it claims Pallas kernels {' and '.join(description.tpu_kernels)} on TPUs, by its tpu_kernels"
            yield _finding(description, case, f"has no kernel in its {direction}", how, "")


def _of_lost(description: TargetDescription, case: Case, loss: WorkerLost) -> Finding:
    what = f"the compiler {loss.how}" if loss.how in WITHOUT_END else "takes the compiler's process along"
    return _finding(description, case, what, loss.how, loss.log)


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
