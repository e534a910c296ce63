"""From a run to its verdict: a cell for each check and tensor, a verdict for each target, the exit status.

Silence is not a pass: what was not tried, declined or lost is said. May touch: runs.
Tests: tests/conformance/test_report_verdict.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from conformance.aot import check as aot
from conformance.checks import CHECKS
from conformance.checks.collectives import ROWS_ALLOWED
from conformance.designated import asks_lse
from conformance.finding import Finding
from conformance.problem import Case, Problem
from conformance.report.uncovered import (
    has_several_ranks,
    looked_at_in_part,
    never_sharded,
    taken_cases,
    untaken_features,
)
from conformance.runner import Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE
from conformance.target import TargetDescription

NOT_TRIED, NOT_CLAIMED, NO_QUESTION, KNOWN_ISSUE = "not tried", "not claimed", "nothing to ask", "known issue"
EXIT_CONFORMS, EXIT_FINDING, EXIT_CANNOT_START, EXIT_HARNESS_FAILED, EXIT_INCONCLUSIVE, EXIT_INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    130,
)


@dataclass(frozen=True)
class Cell:
    """One check and tensor of one target: how it stands, on how many cases, the largest share of the allowance."""

    check: str
    tensor: str
    status: str
    cases: int
    findings: int
    largest_share: float | None


@dataclass(frozen=True)
class TargetVerdict:
    """One target's column: its cells, counts of cases by status, its kinds of finding, and why it is not conclusive."""

    name: str
    status: str
    cells: tuple[Cell, ...]
    counts: dict[str, int]
    declined: tuple[tuple[str, int], ...]
    findings: tuple[tuple[Finding, int], ...]
    remarks: tuple[str, ...]


def verdict_of(target: TargetRun, run: Run) -> TargetVerdict:
    """The verdict on one target."""
    results = target.all_results
    counts = {status: sum(result.status == status for result in results) for status in _STATUSES}
    counts[NOT_TRIED] = len(run.plan.cases) - len(target.results)
    tensors = {check: CHECKS[check].tensors for check in run.plan.check_names}
    tensors |= {aot.NAME: aot.TENSORS} if run.plan.compiled else {}
    cells = tuple(_cell(target, check, tensor) for check in tensors for tensor in tensors[check])
    findings = tuple((finding, _occurrences(finding, target)) for finding in target.smallest.values())
    declined = Counter(result.reason for result in (*results, *target.compiled) if result.status == DECLINED)
    doubts = _doubts(target, run, counts, cells)
    has_finding = any(result.status == FINDING for result in (*results, *target.compiled))
    status = FINDING if has_finding else INCONCLUSIVE if doubts else CONFORMS
    remarks = (*doubts, *_limits(target, run, counts))
    return TargetVerdict(
        target.description.name, status, cells, counts, tuple(declined.most_common()), findings, remarks
    )


def exit_status(run: Run) -> int:
    """0 conforms, 1 a finding, 4 inconclusive, 130 interrupted; 1 beats 4."""
    statuses = {verdict_of(target, run).status for target in run.targets}
    if run.interrupted:
        return EXIT_INTERRUPTED
    if FINDING in statuses:
        return EXIT_FINDING
    return EXIT_CONFORMS if statuses == {CONFORMS} else EXIT_INCONCLUSIVE


_STATUSES = (CONFORMS, FINDING, DECLINED, INCONCLUSIVE)


def _occurrences(finding: Finding, target: TargetRun) -> int:
    """Cases that showed this kind of finding, or a narrower one that it explains."""
    return sum(
        any(other.id == finding.id or finding.explains(other) for other in result.findings)
        for result in (*target.all_results, *target.compiled)
    )


def _cell(target: TargetRun, check: str, tensor: str) -> Cell:
    results = target.compiled if check == aot.NAME else target.all_results
    shares = [r.shares[check, tensor] for r in results if (check, tensor) in r.shares]
    findings = sum(any(f.check == check and f.tensor == tensor for f in r.findings) for r in results)
    if findings:
        status = FINDING
    elif not _is_claimed(target, check, tensor):
        status = NOT_CLAIMED
    elif any((issue.check, issue.tensor) == (check, tensor) for result in results for issue in result.known):
        status = KNOWN_ISSUE  # what is hidden among the findings does not conform for it
    elif shares:
        status = CONFORMS
    elif any(check in result.cannot_ask for result in results):
        status = DECLINED
    elif any(check in result.no_question for result in results):
        status = NO_QUESTION
    elif any(result.status == DECLINED and _has(target, result.case, check, tensor) for result in results):
        status = DECLINED
    else:
        status = NOT_TRIED
    return Cell(check, tensor, status, len(shares), findings, max(shares) if shares else None)


def _doubts(target: TargetRun, run: Run, counts: dict[str, int], cells: tuple[Cell, ...]) -> list[str]:
    """Why the absence of findings says nothing."""
    doubts: list[str] = []
    done = len(target.results)
    asked = [check for check in run.plan.check_names if check != "contract"]
    if done and asked and all(cell.status == NO_QUESTION for cell in cells if cell.check in asked):
        doubts.append("nothing was asked but whether it answers: no verdict")
    if not done and (run.plan.cases or not run.plan.compiled):
        doubts.append("nothing ran: no verdict")
    elif done and counts[DECLINED] == len(target.all_results):
        doubts.append("declined every case: no verdict")
    if unsharded := never_sharded(target, run):
        doubts.append(unsharded)
    if done < len(run.plan.covering):
        doubts.append(f"the covering list is unfinished: {done} of {len(run.plan.covering)} cases")
    if run.plan.database is not None and not target.num_drawn:
        doubts.append("hypothesis drew no case before the time was up")
    if counts[INCONCLUSIVE]:
        doubts.append(f"{counts[INCONCLUSIVE]} cases were lost once and passed when run again alone")
    if run.plan.compiled and all(result.status == DECLINED for result in target.compiled):
        doubts.append(f"{aot.NAME} was asked for, and nothing was compiled")
    owed = (cell for cell in cells if not cell.cases and _is_owed(target, cell))
    return doubts + [f"{cell.check} of {cell.tensor} was never tried" for cell in owed]


def _limits(target: TargetRun, run: Run, counts: dict[str, int]) -> list[str]:
    """What the verdict does not cover, or rests on."""
    limits: list[str] = []
    of, done = target.description, len(target.all_results)
    taken = [case.problem for case in taken_cases(target)]
    if done > counts[DECLINED] > done / 2:
        limits.append(f"declined more than half of the cases ({counts[DECLINED]} of {done})")
    limits += untaken_features(target)
    shown = Counter(issue for result in target.all_results for issue in result.known)
    for issue, cases in shown.items():
        where = f" ({issue.address})" if issue.address else ""
        limits.append(
            f"known, on {cases} cases: {issue.check} of {issue.tensor} {issue.signature}: {issue.note}{where}"
        )
    withheld = {cell: why for result in target.all_results for cell, why in result.withheld.items()}
    for (check, tensor), why in withheld.items():
        times = sum((check, tensor) in result.withheld for result in target.all_results)
        limits.append(f"{check} of {tensor} (not compared in {times} of {len(target.all_results)} cases): {why}")
    limits += looked_at_in_part(target, run)
    results = (*target.all_results, *target.compiled)
    not_asked = {check: why for result in results for check, why in result.cannot_ask.items()}
    shown_by = {check for result in target.all_results for check, _ in result.shares} | not_asked.keys()
    silent = {check: why for result in target.all_results for check, why in result.no_question.items()}
    limits += [f"{check}: {why}" for check, why in silent.items() if check not in shown_by]
    for check, why in not_asked.items():
        asked_of = target.compiled if check == aot.NAME else target.all_results
        times = sum(check in result.cannot_ask for result in asked_of)
        limits.append(f"{check} (not asked in {times} of {len(asked_of)} cases): {why}")
    if target.stopped:
        limits.append(f"stopped early: {target.stopped}")
    if of.changed_on_import:
        limits.append(
            f"importing it changes {'; '.join(of.changed_on_import)}: put back before its cases ran; what it needs "
            "must be set in the environment of halocheck"
        )
    if of.numerics:
        declared = ", ".join(f"{name}={value}" for name, value in of.numerics.items())
        where = ", where it says that it has them" if of.platform == "tpu" and of.tpu_precision_varies else ""
        limits.append(f"allowances are for the numerics it declares{where}: {declared}{_of_float32(of, taken)}")
    if allowed := [result.figures[ROWS_ALLOWED] for result in target.all_results if ROWS_ALLOWED in result.figures]:
        limits.append(
            f"collectives: it sends halo rows in multiples of {of.halo_row_multiple}, as it declares: up to "
            f"{max(allowed):.3g} times those that the window reaches are allowed"
        )
    if unasked := [name for name in CHECKS if name not in run.plan.check_names]:
        limits.append(f"not asked for: {', '.join(unasked)}")
    if of.has_lse and not of.lse_grad:
        limits.append("gradients through lse are not tried: it says lse_grad = False")
    if of.empty_rows == "undefined" and any(problem.padding is not None for problem in taken):
        limits.append("out and lse of rows without keys are not compared: it leaves them undefined")
    if taken and not any(map(has_several_ranks, taken)):
        limits.append("no case that it took has more than one rank")
    return limits


def _of_float32(of: TargetDescription, taken: list[Problem]) -> str:
    """What a declaration does to float32 cases that says nothing of them: it may have been meant for bfloat16."""
    declared = of.numerics
    rounds = (
        declared.get("rounded_probabilities") or declared.get("rounded_logits") or declared.get("matmul_passes") == 1
    )
    if not rounds or all(problem.dtype != "float32" for problem in taken):
        return ""
    return "; its float32 cases are held to roundings of bfloat16 with it, 65536 times those of float32"


def _is_owed(target: TargetRun, cell: Cell) -> bool:
    """Whether a case that the target took has the tensor, for this check, and the target claims it."""
    if cell.status == NO_QUESTION or not _is_claimed(target, cell.check, cell.tensor):
        return False
    if cell.check == aot.NAME:  # what compiles, and sends nobody knows how much
        return cell.tensor != "program" and any(result.cannot_ask for result in target.compiled)
    taken = (result.case for result in target.all_results if result.status != DECLINED)
    return any(_has(target, case, cell.check, cell.tensor) for case in taken)


def _is_claimed(target: TargetRun, check: str, tensor: str) -> bool:
    """Whether the check holds the target to something that it says of itself, or to what every target owes."""
    if check == aot.NAME:
        return tensor == "program" or target.description.communication is not None
    return CHECKS[check].is_claimed(target.description, tensor)


def _has(target: TargetRun, case: Case, check: str, tensor: str) -> bool:
    """Whether a target that takes the case has the tensor to show to the check."""
    if check == aot.NAME:
        return True
    if not CHECKS[check].asks_about(case):
        return False
    present = {
        "lse": target.description.has_lse and asks_lse(case),
        "dsinks": case.problem.sinks,
        "dvalue": not case.problem.shared_kv,
    }
    return present.get(tensor, True)
