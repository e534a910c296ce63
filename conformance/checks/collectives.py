"""Does the target send what its strategy may send, and nothing else: kinds, mesh axes, bytes, forward and backward?

A target that claims no `communication` is not judged, and never conforms; nor does one whose own kernels send nobody
knows how much, of which what else it sends can still be a finding. Gradients that are summed across ranks in less than
float32 are one, too. May touch: evidence, findings, wire_plan, copied. Tests:
tests/conformance/test_checks_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.checks import copied
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.hlo import HOST, Collective
from conformance.problem import Problem
from conformance.wire_plan import OF_ROUNDED, Allowance, WirePlan, halo_rows, joined, wire_plan

TENSORS = ("forward", "backward")
# The figure that says what a declared halo_row_multiple lets a halo send.
ROWS_ALLOWED = "halo rows allowed, of those the window reaches"
# What XLA names a collective after that the target itself wrote.
_EXPLICIT = ("all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all", "reduce_scatter")

_SENDS_BY_ITSELF = "kernels of its own send to other devices, how much is not known: only what else it sends is judged"


@dataclass(frozen=True)
class _Sent:
    """One collective: its kind, the axes of size above 1 between whose devices it sends, bytes that reach each device.

    `trips_known` is False for one in a loop whose number of turns nobody knows.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: np.ndarray
    phase: str
    inserted: bool
    trips_known: bool


def check(evidence: Evidence) -> Outcome:
    """Holds the traced and the compiled program against the plan of the claimed strategy."""
    facts, claim = evidence.message.get("facts"), evidence.target.communication
    if facts is None or claim is None:
        return Outcome()
    problem = evidence.case.problem
    multiple = evidence.target.halo_row_multiple
    traced = [_of_traced(collective, problem) for collective in facts["traced"]]
    # Every callback of the target's stands in the traced program; others are the interpreter's, of a TPU kernel on CPU.
    compiled = [_of_compiled(one, problem) for one in facts["compiled"] if one["kind"] != "host callback"]
    if facts["remote_copies"]:
        # An interpreter's stand for such copies and are named like the target's own, which stand in the traced program.
        compiled = [one for one in compiled if one.inserted]
    shares: dict[str, float] = {}
    findings: dict[tuple[str, str], Finding] = {}
    for sent, widened in ((traced, False), (compiled, True)):
        plan = wire_plan(problem, claim, multiple, widened=widened)
        for tensor in TENSORS:
            judged = _Judgement(evidence, tensor, claim)
            judged.judge(sent, plan)
            if tensor == "forward" or evidence.message.get("raised") is None:
                shares[tensor] = max(shares.get(tensor, 0.0), judged.share)
            findings = judged.findings | findings
    is_counted = copied.is_counted(facts["remote_copies"])
    if is_counted:
        plan = wire_plan(problem, claim, multiple)
        for one in copied.copied(facts["remote_copies"], _moved(traced), plan, len(evidence.calls)):
            shares[one.tensor] = max(shares.get(one.tensor, 0.0), one.share)
            judged = _Judgement(evidence, one.tensor, claim)
            judged.judge_copies(one)
            findings |= judged.findings
    for tensor, how in facts["narrow_sums"]:
        if evidence.target.numerics.get("rounded_partials") and how.endswith(OF_ROUNDED):
            continue  # declared, and so told with the verdict; the sum itself is still owed in float32
        judged = _Judgement(evidence, "backward", claim)
        judged.add(f"sums {tensor} across ranks in less than float32", f"({how})", expected="float32", got=how)
        findings |= judged.findings
    if not is_counted:
        # What is seen can be too much; that it is not does not make the whole conform.
        return Outcome(findings=tuple(findings.values()), cannot_ask=_SENDS_BY_ITSELF)
    return Outcome(shares, tuple(findings.values()), figures=_figures(problem, claim, multiple))


def _figures(problem: Problem, claim: str, multiple: int) -> dict[str, float]:
    """How much more than its window's rows a halo may send, as it declares."""
    if claim != "halo" or multiple == 1 or not halo_rows(problem)[0]:
        return {}
    return {ROWS_ALLOWED: halo_rows(problem, multiple)[0] / halo_rows(problem)[0]}


class _Judgement:
    """Collects what is wrong with one direction of one program, and its largest share of an allowance."""

    def __init__(self, evidence: Evidence, tensor: str, claim: str) -> None:
        self._evidence, self._tensor, self._claim = evidence, tensor, claim
        self.share = 0.0
        self.findings: dict[tuple[str, str], Finding] = {}

    def judge(self, sent: Iterable[_Sent], plan: WirePlan) -> None:
        """Every phase on its own, but sums, which XLA may join over calls."""
        by_phase: dict[str, list[_Sent]] = {}
        for one in sent:
            is_backward = one.phase.startswith("backward/")
            if is_backward == (self._tensor == "backward"):
                by_phase.setdefault(one.phase, []).append(one)
        calls = len(self._evidence.calls)
        for phase, members in by_phase.items():
            allowances = plan.backward if self._tensor == "backward" else plan.forward
            if phase == "":  # XLA has not kept where it came from: it may be of any phase
                allowances = joined([*plan.forward, *plan.forward, *plan.backward])
            for kind, axes in sorted({(one.kind, one.axes) for one in members}):
                self._judge_kind(kind, axes, members, allowances)
            for allowance in allowances:
                fitting = [one for one in members if _fits(one, allowance)]
                over_calls = phase == "" or "all-reduce" in allowance.kinds
                self._judge_bytes(fitting, allowance, calls if over_calls else 1)

    def _judge_kind(self, kind: str, axes: tuple[str, ...], members: list[_Sent], plan: Sequence[Allowance]) -> None:
        mine = [one for one in members if (one.kind, one.axes) == (kind, axes)]
        by = "; the compiler put it in" if all(one.inserted for one in mine) else ""
        if kind in HOST:
            self.add("talks to the host", f"({kind})", expected="nothing", got=kind)
        elif all(one.bytes.max() == 0 for one in mine):
            return  # among a single device, or sent by each to itself
        elif not any(kind in allowance.kinds for allowance in plan):
            how = f"over {' and '.join(axes)}, and the plan of {self._claim} has none{by}"
            kinds = sorted({planned for allowance in plan for planned in allowance.kinds})
            self.add(f"uses {kind}", how, expected=" or ".join(kinds) or "nothing", got=kind)
        elif not any(_fits(one, allowance) for one in mine for allowance in plan):
            planned = sorted({axis for allowance in plan if kind in allowance.kinds for axis in allowance.axes})
            fields = {"expected": " or ".join(planned), "got": " and ".join(axes)}
            self.add(f"uses {kind} over another axis", f"({' and '.join(axes)}){by}", **fields)
        elif not all(one.trips_known for one in mine):
            self.add(f"uses {kind} in a loop without a known end", "so what it sends has no bound")

    def _judge_bytes(self, fitting: list[_Sent], allowance: Allowance, times: int) -> None:
        if not fitting:
            return
        # The device that receives most.
        by_device = np.sum([one.bytes for one in fitting], axis=0)
        received = float(by_device.max())
        allowed = allowance.bytes * times
        share = received / allowed if allowed else float("inf") if received else 0.0
        self.share = max(self.share, share)
        if received > allowed:
            by = "; the compiler put some of it in" if any(one.inserted for one in fitting) else ""
            kind = " or ".join(allowance.kinds)
            self.add(
                f"sends too much by {kind}",
                f"{received:.0f} bytes reach a device, {allowance.what} are {allowed:.0f}{by}",
                expected=allowed,
                got=received,
                share=share,
                rank=_rank_of_device(int(by_device.argmax()), self._evidence.case.problem),
            )

    def judge_copies(self, one: copied.Copied) -> None:
        """Of kernels' own copies and the collectives beside them."""
        if one.got > one.allowed:
            beside = f", {one.by_collectives:.0f} of them by collectives" if one.by_collectives else ""
            how = f"{one.got:.0f} bytes a device{beside}, {one.what} are {one.allowed:.0f}"
            fields = {"expected": one.allowed, "got": one.got, "share": one.share}
            self.add("sends too much by copies of its kernels", how, **fields)

    def add(self, what: str, how: str, **fields: Any) -> None:
        """One finding a kind."""
        evidence, tensor = self._evidence, self._tensor
        self.findings.setdefault(
            (tensor, what),
            Finding(
                target=evidence.target.name,
                check="collectives",
                tensor=tensor,
                signature=what,
                case=evidence.case_text,
                reading=f"the {tensor} of a target that claims {self._claim} {what} {how}",
                **fields,
            ),
        )


def _moved(sent: Iterable[_Sent]) -> dict[tuple[str, str], float]:
    """Bytes that each kind brings to the device that receives most, by (phase, kind)."""
    by_kind: dict[tuple[str, str], np.ndarray] = {}
    for one in sent:
        by_kind[one.phase, one.kind] = by_kind.get((one.phase, one.kind), 0) + one.bytes
    return {where: float(by_device.max()) for where, by_device in by_kind.items()}


def _rank_of_device(device: int, problem: Problem) -> int:
    """The coordinate along the context axis of a device, counted as it stands in the mesh."""
    axes = [axis for axis, _ in problem.mesh_shape]
    return int(np.unravel_index(device, [size for _, size in problem.mesh_shape])[axes.index("context")])


def _fits(one: _Sent, allowance: Allowance) -> bool:
    return one.kind in allowance.kinds and set(one.axes) <= set(allowance.axes)


def _of_traced(facts: Mapping[str, Any], problem: Problem) -> _Sent:
    """A primitive: its pairs count along its own axes, whatever the others are."""
    sizes = dict(problem.mesh_shape)
    axes = tuple(axis for axis in facts["axes"] if sizes.get(axis, 1) > 1)
    size = int(np.prod([sizes[axis] for axis in axes], initial=1))
    pairs = tuple((source, to) for source, to in facts["pairs"])
    groups = () if pairs else (tuple(range(facts["group_size"] or size)),)
    one = Collective(facts["kind"], (), facts["bytes"], pairs, groups, facts["trips"])
    coordinates = np.indices([size for _, size in problem.mesh_shape]).reshape(len(sizes), -1)
    places = [list(sizes).index(axis) for axis in axes]
    ranks = np.zeros(problem.num_devices, int)
    for place, axis in zip(places, axes, strict=True):
        ranks = ranks * sizes[axis] + coordinates[place]
    # Every group is as good as the first.
    received = np.array([one.bytes_received(rank if pairs else 0) for rank in range(size)])
    return _Sent(one.kind, axes, received[ranks], facts["phase"], False, True)


def _of_compiled(facts: Mapping[str, Any], problem: Problem) -> _Sent:
    """An instruction: its devices are numbered as they stand in the mesh."""
    shape = tuple(size for _, size in problem.mesh_shape)
    pairs = tuple((source, to) for source, to in facts["pairs"])
    groups = tuple(tuple(group) for group in facts["groups"])
    fields = {name: facts[name] for name in ("kind", "bytes", "trips", "op_name")}
    one = Collective(dtypes=tuple(facts["dtypes"]), pairs=pairs, groups=groups, **fields)
    varying = np.zeros(len(shape), bool)
    for group in pairs or groups:
        coordinates = np.array(np.unravel_index(np.array(group), shape))
        varying |= (coordinates != coordinates[:, :1]).any(axis=1)
    axes = tuple(axis for (axis, _), varies in zip(problem.mesh_shape, varying, strict=True) if varies)
    received = np.array([one.bytes_received(device) for device in range(problem.num_devices)])
    inserted = one.op_name.rsplit("/", 1)[-1].removesuffix("_invariant") not in _EXPLICIT
    return _Sent(one.kind, axes, received, facts["phase"], inserted, one.trips is not None)
