"""From a run to its verdict and exit status: silence is never a pass, and every reason to doubt is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.case_text import format_case, parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.finding import Finding
from conformance.problem import Case
from conformance.report.verdict import exit_status, verdict_of
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, FINDING, INCONCLUSIVE, CaseResult
from conformance.target import TargetDescription

_PLAIN = parse_case("v=1 seq_len=8 sliding_window_size=3")
_SINKS = parse_case("v=1 seq_len=8 sliding_window_size=3 sinks=true")
_SHARED = parse_case("v=1 seq_len=8 sliding_window_size=3 shared_kv=true")
_WITHOUT_LSE = (("contract", "call"), ("output", "out"), ("gradients", "dquery"), ("gradients", "dkey"))


def _passed(case: Case, share: float = 0.25, lse: bool = False) -> CaseResult:
    names = [*_WITHOUT_LSE]
    names += [] if case.problem.shared_kv else [("gradients", "dvalue")]
    names += [("gradients", "dsinks")] if case.problem.sinks else []
    names += [("residuals", "lse")] if lse else []
    names += [("visibility", tensor) for check, tensor in names if check == "gradients" and tensor != "dsinks"]
    names += [("visibility", "out")]
    names += [("invariance", tensor) for check, tensor in names if check in ("output", "residuals", "gradients")]
    return CaseResult(case, CONFORMS, shares=dict.fromkeys(names, share))


def _failed(case: Case, finding: Finding) -> CaseResult:
    return CaseResult(case, FINDING, (finding,), _passed(case, 3.0).shares)


def _declined(case: Case, reason: str = "no sinks") -> CaseResult:
    return CaseResult(case, DECLINED, reason=reason)


def _run(*results: CaseResult, planned: int | None = None, **options: Any) -> Run:
    """A run of one target on as many cases as there are results, or on `planned` covering ones."""
    count = len(results) if planned is None else planned
    covering = tuple(_PLAIN.replace(seed=seed) for seed in range(count))
    checks = options.pop("check_names", tuple(CHECKS))
    interrupted = options.pop("interrupted", False)
    target = TargetRun(TargetDescription("m:t", "target", **options), list(results))
    for result in results:
        target.smallest |= {finding.id: finding for finding in result.findings}
    return Run(Plan(("m:t",), covering, (), Devices("cpu", 8), checks), [target], interrupted)


def _status(run: Run) -> tuple[str, int]:
    return verdict_of(run.targets[0], run).status, exit_status(run)


def _remarks(run: Run) -> str:
    return "\n".join(verdict_of(run.targets[0], run).remarks)


def _cell(run: Run, tensor: str) -> tuple[str, int, int, float | None]:
    cell = next(cell for cell in verdict_of(run.targets[0], run).cells if cell.tensor == tensor)
    return cell.status, cell.cases, cell.findings, cell.largest_share


def test_a_tensor_that_is_withheld_is_said_to_be_and_owed_until_a_case_has_it() -> None:
    without = _passed(_SINKS)
    shares = {cell: share for cell, share in without.shares.items() if cell != ("gradients", "dsinks")}
    withheld = dataclasses.replace(without, shares=shares, withheld={("gradients", "dsinks"): "too many pairs"})
    run = _run(withheld, _passed(_PLAIN))
    assert _status(run) == (INCONCLUSIVE, 4), "nobody has looked at it"
    said = "gradients of dsinks (not compared in 1 of 2 cases): too many pairs"
    assert _remarks(run).splitlines() == ["gradients of dsinks was never tried", said], "and why"
    run = _run(withheld, _passed(_SINKS))
    assert _status(run) == (CONFORMS, 0), "another case has it"
    assert _remarks(run) == said, "a limit, and no silence"
    run.plan = dataclasses.replace(run.plan, num_hosts=2)
    assert _status(run) == (CONFORMS, 0), "over several hosts as in one process"


@pytest.mark.parametrize(
    ("changes", "num_hosts", "why"),
    [
        ({"window": (None, 0)}, 2, "every host has its own rows"),
        ({"window": (None, 0), "values": "constant"}, None, "their values are structured"),
        ({"window": (None, 0)}, None, None),
        ({"window": (99, 0), "values": "constant"}, 2, None),
        ({"window": (None, 0), "seq_len": 256}, 2, None),
    ],
)
def test_where_most_keys_of_a_large_case_are_not_looked_at_the_verdict_says_so(
    changes: dict[str, Any], num_hosts: int | None, why: str | None
) -> None:
    large = _PLAIN.replace(**{"seq_len": 8192, "sliding_window_size": None, **changes})
    run = _run(_passed(large), _passed(_PLAIN))
    run.plan = dataclasses.replace(run.plan, num_hosts=num_hosts)
    words = f"are not summed up where {why}"
    assert ("on 1 of 2 cases, of the last keys alone" in _remarks(run)) == (why is not None)
    assert why is None or words in _remarks(run), "and why"


def test_a_target_that_passed_every_case_conforms() -> None:
    run = _run(_passed(_SINKS, 0.25), _passed(_PLAIN, 0.5))
    assert _status(run) == (CONFORMS, 0), "nothing is left open"
    assert _remarks(run) == "", "nothing to add"
    assert _cell(run, "out") == (CONFORMS, 2, 0, 0.5), "on two cases, the larger share"
    assert _cell(run, "dsinks") == (CONFORMS, 1, 0, 0.25), "on the one that has sinks"
    assert _cell(run, "lse")[0] == "not tried", "it returns none, and none is claimed"


def test_one_finding_among_passes_is_a_finding(finding: Callable[..., Finding]) -> None:
    run = _run(_passed(_SINKS), _failed(_SINKS, finding()), _passed(_SINKS))
    assert _status(run) == (FINDING, 1), "one is enough"
    assert _cell(run, "out") == (FINDING, 3, 1, 3.0), "in 1 of 3"
    assert _cell(run, "dkey")[0] == CONFORMS, "the other tensors as they are"


def test_a_finding_that_was_not_yet_told_still_counts(finding: Callable[..., Finding]) -> None:
    run = _run(_failed(_SINKS, finding()))
    run.targets[0].smallest.clear()  # an interrupt between the result and its bookkeeping
    assert _status(run) == (FINDING, 1), "the results decide"


def test_a_finding_counts_the_cases_of_the_kinds_that_it_explains(finding: Callable[..., Finding]) -> None:
    narrow = finding(signature="exceeds its allowance, on data draw 1 only")
    run = _run(_failed(_SINKS, finding()), _failed(_SINKS, narrow), _passed(_SINKS))
    run.targets[0].smallest = {finding().id: finding()}
    assert [(found.signature, count) for found, count in verdict_of(run.targets[0], run).findings] == [
        ("exceeds its allowance", 2)
    ], "both cases show it"


@pytest.mark.parametrize(
    ("run", "remark"),
    [
        (_run(planned=0), "nothing ran: no verdict"),
        (_run(planned=3), "nothing ran: no verdict"),
        (_run(_declined(_SINKS), _declined(_PLAIN)), "declined every case: no verdict"),
        (_run(_passed(_SINKS), planned=2), "the covering list is unfinished: 1 of 2 cases"),
        (
            _run(_passed(_SINKS), CaseResult(_SINKS, INCONCLUSIVE, shares=_passed(_SINKS).shares, reason="lost")),
            "1 cases were lost once and passed when run again alone",
        ),
        (_run(CaseResult(_SINKS, CONFORMS, shares={("contract", "call"): 0.0})), "output of out was never tried"),
        (_run(_passed(_SINKS), has_lse=True), "residuals of lse was never tried"),
    ],
    ids=["no cases", "none done", "all declined", "unfinished", "lost once", "no values", "no lse"],
)
def test_what_leaves_the_question_open_is_inconclusive_and_said(run: Run, remark: str) -> None:
    assert _status(run) == (INCONCLUSIVE, 4), "never conforms"
    assert remark in _remarks(run), "and why"


def test_a_night_in_which_hypothesis_drew_nothing_does_not_conform(tmp_path: Path) -> None:
    run = _run(_passed(_SINKS), _passed(_PLAIN))
    run.plan = dataclasses.replace(run.plan, database=tmp_path, seconds=0.0)
    assert _status(run) == (INCONCLUSIVE, 4), "a tier that tried nothing has failed"
    assert _remarks(run).startswith("hypothesis drew no case before the time was up"), "and why"
    run.targets[0].num_drawn = 1
    assert _status(run) == (CONFORMS, 0), "one is no silence"


def test_a_run_without_targets_does_not_conform() -> None:
    run = Run(Plan((), (), (), Devices("cpu", 8), tuple(CHECKS)))
    assert exit_status(run) == 4, "nothing was asked"


@pytest.mark.parametrize("missing", ["dsinks", "dvalue", "dkey"])
def test_a_gradient_that_a_taken_case_has_and_nobody_saw_is_never_passed_over(missing: str) -> None:
    result = _passed(_SINKS)
    shares = {key: share for key, share in result.shares.items() if key[1] != missing}
    run = _run(CaseResult(_SINKS, CONFORMS, shares=shares), _declined(_SINKS, "something else"))
    assert _status(run) == (INCONCLUSIVE, 4), "silence is no pass"
    assert f"gradients of {missing} was never tried" in _remarks(run), "it is named"


def test_tensors_that_no_taken_case_has_are_not_owed() -> None:
    assert _status(_run(_passed(_SHARED))) == (CONFORMS, 0), "one key-value array, no sinks: nothing to see"


def test_lse_is_owed_by_cases_that_call_attention_with_lse_alone() -> None:
    not_called = _PLAIN.replace(seed=1)
    assert _status(_run(_passed(not_called), has_lse=True)) == (CONFORMS, 0), "one case in four calls it"
    assert _status(_run(_passed(_PLAIN), has_lse=True)) == (INCONCLUSIVE, 4), "this one does, and gave nothing"


def test_a_tensor_whose_every_case_was_declined_is_declined_and_counted() -> None:
    run = _run(_passed(_PLAIN), _declined(_SINKS), _passed(_PLAIN))
    assert _cell(run, "dsinks")[0] == DECLINED, "not 'not tried': the list had it"
    assert _status(run) == (CONFORMS, 0), "it claims nothing about sinks"
    verdict = verdict_of(run.targets[0], run)
    assert verdict.declined == (("no sinks", 1),), "reason and number"
    assert verdict.counts == {CONFORMS: 2, FINDING: 0, DECLINED: 1, INCONCLUSIVE: 0, "not tried": 0}, "all cases"


def test_declining_more_than_half_is_said_and_exactly_half_is_not() -> None:
    half = _run(_passed(_PLAIN), _declined(_SINKS))
    assert "declined" not in _remarks(half), "half"
    more = _run(_passed(_PLAIN), _declined(_SINKS), _declined(_SINKS, "no cap"))
    assert "declined more than half of the cases (2 of 3)" in _remarks(more), "more than half"
    assert _status(more)[0] == CONFORMS, "what it takes, it gets right"


def test_what_a_declared_multiple_of_rows_lets_a_halo_send_is_printed_with_the_verdict() -> None:
    figures = [{"halo rows allowed, of those the window reaches": times} for times in (1.5, 32.0)]
    results = [dataclasses.replace(_passed(_PLAIN), figures=some) for some in figures]
    run = _run(*results, halo_row_multiple=64)
    remarks = verdict_of(run.targets[0], run).remarks
    assert (
        "collectives: it sends halo rows in multiples of 64, as it declares: up to 32 times those that the window "
        "reaches are allowed"
    ) in remarks
    exact = _run(_passed(_PLAIN))
    assert not any("multiples" in remark for remark in verdict_of(exact.targets[0], exact).remarks)


def test_declared_numerics_are_printed_with_the_verdict() -> None:
    run = _run(_passed(_PLAIN), precision={"rounded_probabilities": True, "matmul_passes": 1})
    assert "allowances are for the numerics it declares: rounded_probabilities=True, matmul_passes=1" in _remarks(
        run
    ), "a wider allowance is no secret"


def test_numerics_that_some_problems_have_alone_are_not_said_of_all() -> None:
    run = _run(_passed(_PLAIN), platform="tpu", tpu_precision={"prescaled_query": True}, tpu_precision_varies=True)
    assert "the numerics it declares, where it says that it has them: prescaled_query=True" in _remarks(run)


def test_what_an_import_changed_and_was_put_back_is_said() -> None:
    run = _run(_passed(_PLAIN), changed_on_import=("XLA_FLAGS from unset to --a",))
    assert "importing it changes XLA_FLAGS from unset to --a: put back" in _remarks(run), "the verdict is without it"
    assert _status(run)[0] == CONFORMS, "an adapter may be a script"


def test_checks_that_were_not_asked_for_are_named() -> None:
    run = _run(_passed(_PLAIN), check_names=("contract", "output"))
    assert "not asked for: residuals, gradients" in _remarks(run), "the verdict covers less"
    assert {cell.check for cell in verdict_of(run.targets[0], run).cells} == {"contract", "output"}, "no other cells"


_PADDED = parse_case("v=1 seq_len=8 sliding_window_size=3 padding=-1 documents=6+2@-1")
_ONE_RANK = parse_case("v=1 seq_len=8 sliding_window_size=3 context_parallelism=1")


@pytest.mark.parametrize(
    ("case", "of", "remark"),
    [
        (_PLAIN, {"has_lse": True, "lse_grad": False}, "gradients through lse are not tried"),
        (_PADDED, {"empty_rows": "undefined"}, "out and lse of rows without keys are not compared"),
        (_ONE_RANK, {}, "no case that it took has more than one rank"),
    ],
)
def test_what_conforming_does_not_cover_is_said(case: Case, of: dict[str, Any], remark: str) -> None:
    run = _run(_passed(case, lse="has_lse" in of), **of)
    assert _status(run) == (CONFORMS, 0), "what was tried is right"
    assert remark in _remarks(run), "and what was not is named"


def test_nothing_is_said_of_limits_that_do_not_matter() -> None:
    assert _remarks(_run(_passed(_PLAIN), _passed(_ONE_RANK), empty_rows="undefined")) == "", "no padding, two ranks"
    assert _remarks(_run(_passed(_PADDED), empty_rows="zero")) == "", "rows without keys are compared"


def test_a_target_that_was_stopped_says_why(finding: Callable[..., Finding]) -> None:
    run = _run(_failed(_SINKS, finding()), planned=3)
    run.targets[0].stopped = "its process was lost 4 times"
    assert "stopped early: its process was lost 4 times" in _remarks(run), "why cases are missing"
    assert verdict_of(run.targets[0], run).counts["not tried"] == 2, "and how many"
    assert exit_status(run) == 1, "a finding beats inconclusive"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("conforms", "conforms"), 0),
        (("conforms", "finding"), 1),
        (("inconclusive", "finding"), 1),
        (("conforms", "inconclusive"), 4),
        (("inconclusive", "inconclusive"), 4),
    ],
)
def test_the_worst_target_decides_and_a_finding_beats_inconclusive(
    statuses: tuple[str, ...], expected: int, finding: Callable[..., Finding]
) -> None:
    runs = {
        "conforms": _run(_passed(_SINKS)),
        "finding": _run(_failed(_SINKS, finding())),
        "inconclusive": _run(_declined(_SINKS)),
    }
    run = Run(runs["conforms"].plan, [runs[status].targets[0] for status in statuses])
    assert exit_status(run) == expected, "DESIGN, exit status"


def test_an_interrupted_run_has_its_own_status_whatever_was_found(finding: Callable[..., Finding]) -> None:
    assert exit_status(_run(_failed(_SINKS, finding()), planned=9, interrupted=True)) == 130, "with a finding"
    assert exit_status(_run(_passed(_SINKS), planned=9, interrupted=True)) == 130, "without"
    assert exit_status(Run(_run().plan, [], interrupted=True)) == 130, "before any target was loaded"


def test_cells_stand_in_the_order_of_the_checks() -> None:
    cells = [(cell.check, cell.tensor) for cell in verdict_of(_run().targets[0], _run()).cells]
    assert cells == [
        ("contract", "call"),
        ("output", "out"),
        ("residuals", "lse"),
        ("gradients", "dquery"),
        ("gradients", "dkey"),
        ("gradients", "dvalue"),
        ("gradients", "dsinks"),
        *(("exact", tensor) for tensor in ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")),
        *(("visibility", tensor) for tensor in ("out", "dquery", "dkey", "dvalue")),
        *(("invariance", tensor) for tensor in ("out", "lse", "dquery", "dkey", "dvalue", "dsinks")),
        *(("collectives", tensor) for tensor in ("forward", "backward")),
        *(("work", tensor) for tensor in ("flops", "memory", "program", "loops")),
        *(("remat", tensor) for tensor in ("program", "out", "dquery", "dkey", "dvalue", "dsinks")),
        *(("races", tensor) for tensor in ("kernel", "out", "dquery", "dkey", "dvalue", "dsinks")),
        *(("errors", tensor) for tensor in ("window", "heads", "sequence", "segment_ids")),
    ], "one cell a check and tensor"


def test_a_lost_process_leaves_the_values_untried_and_is_still_a_finding(finding: Callable[..., Finding]) -> None:
    lost = finding(check="contract", tensor="call", signature="killed by SIGABRT while running draw 0")
    run = _run(CaseResult(_SINKS, FINDING, (lost,), {("contract", "call"): 0.0}))
    assert _cell(run, "call")[0] == FINDING, "the contract's cell"
    assert _cell(run, "out")[0] == "not tried", "no value was seen"
    assert exit_status(run) == 1, format_case(_SINKS)
