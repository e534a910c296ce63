"""What a verdict says of itself: features that the target took no case of, large cases looked at in part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices
from conformance.known_issues import KnownIssue
from conformance.models import MODELS, full_size_case
from conformance.problem import Case
from conformance.report.uncovered import looked_at_in_part
from conformance.report.verdict import KNOWN_ISSUE, exit_status, verdict_of
from conformance.runner import Plan, Run, TargetRun
from conformance.session import CONFORMS, DECLINED, INCONCLUSIVE, CaseResult
from conformance.target import TargetDescription

_PLAIN = parse_case("v=1 seq_len=8 sliding_window_size=3")
_ONE_RANK = _PLAIN.replace(context_parallelism=1)
_SHARES = {
    (check, tensor): 0.5
    for check in ("contract", "output", "gradients")
    for tensor in CHECKS[check].tensors
    if tensor != "dsinks"
}


def _taken(case: Case, **changes: Any) -> CaseResult:
    sinks = {("gradients", "dsinks"): 0.5} if case.problem.sinks else {}
    return CaseResult(case, CONFORMS, shares={**_SHARES, **sinks}, **changes)


def _declined(case: Case) -> CaseResult:
    return CaseResult(case, DECLINED, reason="not mine")


def _run(*results: CaseResult, devices: int = 8, num_hosts: int | None = None, **of: Any) -> Run:
    target = TargetRun(TargetDescription("m:t", "target", **of), list(results))
    cases = tuple(result.case for result in results)
    checks = ("contract", "output", "gradients")
    return Run(Plan(("m:t",), cases, (), Devices("cpu", devices), checks, num_hosts=num_hosts), [target])


def _remarks(run: Run) -> str:
    return "\n".join(verdict_of(run.targets[0], run).remarks)


def test_features_of_which_every_case_was_declined_are_named() -> None:
    padded = parse_case("v=1 seq_len=8 sliding_window_size=3 padding=-1 documents=6+2@-1")
    run = _run(_taken(_PLAIN), _declined(padded), _declined(_PLAIN.replace(sinks=True)))
    assert "nothing is known of it with: documents, padding, sinks (it took no such case)" in _remarks(run)
    assert exit_status(run) == 0, "what it takes, it gets right"
    run = _run(_taken(_PLAIN.replace(sinks=True)), _declined(padded), _declined(_PLAIN.replace(sinks=True, seed=1)))
    assert "with: documents, padding (" in _remarks(run), "of sinks one case was taken"
    assert "nothing is known" not in _remarks(_run(_taken(_PLAIN), _declined(_PLAIN.replace(seed=1)))), "no feature"


def test_a_target_that_declines_every_sharded_sequence_does_not_conform() -> None:
    run = _run(_taken(_ONE_RANK), _declined(_PLAIN), _declined(_PLAIN.replace(context_parallelism=4)))
    assert (verdict_of(run.targets[0], run).status, exit_status(run)) == (INCONCLUSIVE, 4)
    assert "declined all 2 cases with more than one rank: no verdict on a sharded sequence" in _remarks(run)


@pytest.mark.parametrize(
    "run",
    [
        _run(_taken(_ONE_RANK), _taken(_PLAIN), _declined(_PLAIN.replace(seed=1))),
        _run(_taken(_ONE_RANK), _declined(_PLAIN), devices=1),
        _run(_taken(_ONE_RANK)),
    ],
    ids=["one was taken", "there are no devices for any", "none was asked"],
)
def test_otherwise_it_does(run: Run) -> None:
    assert exit_status(run) == 0
    assert "no verdict" not in _remarks(run)


def test_a_cell_whose_findings_a_known_issue_hides_does_not_say_that_it_conforms() -> None:
    issue = KnownIssue("m:t", "numpy", ("1",), "output", "out", "is wrong", "seed=0", "v=1", "reported")
    run = _run(_taken(_PLAIN), _taken(_PLAIN.replace(seed=1), known=(issue,)))
    statuses = {(cell.check, cell.tensor): cell.status for cell in verdict_of(run.targets[0], run).cells}
    assert statuses["output", "out"] == KNOWN_ISSUE
    assert statuses["gradients", "dquery"] == CONFORMS, "no other cell"
    assert "known, on 1 cases: output of out is wrong" in _remarks(run), "and which"


@pytest.mark.parametrize(
    ("numerics", "dtype", "is_said"),
    [
        ({"rounded_logits": True}, "float32", True),
        ({"rounded_probabilities": True}, "float32", True),
        ({"rounded_probabilities": True}, "bfloat16", False),
        ({"rounded_probabilities": False}, "float32", False),
        ({"prescaled_query": True, "rounded_partials": True}, "float32", False),
    ],
)
def test_a_declaration_that_lets_float32_stray_as_bfloat16_is_said_to(
    numerics: dict[str, Any], dtype: str, is_said: bool
) -> None:
    run = _run(_taken(_PLAIN.replace(dtype=dtype)), precision=numerics)
    assert ("its float32 cases are held to roundings of bfloat16" in _remarks(run)) == is_said


def test_of_large_cases_how_much_is_looked_at_is_said() -> None:
    """gpt-oss: 64 query heads on 8 kv heads, 2^17 tokens. dsinks of 2^27 / 2^24 heads, sums of 4 kv heads."""
    model = next(model for model in MODELS if model.name == "gpt-oss-20b")
    local, whole = (full_size_case(model, layer) for layer in ("local", "global"))
    assert local.problem.sinks, "it has sinks"
    run = _run(_taken(_PLAIN), _taken(local))
    (told,) = looked_at_in_part(run.targets[0], run)
    assert (
        told == "large cases (1 of 2) are compared at chosen places; dsinks of a sample of heads, 8 of 64 at the fewest"
    )
    run = _run(_taken(whole))
    (told,) = looked_at_in_part(run.targets[0], run)
    assert told.endswith("; keys with many readers summed up in a sample of kv heads, 4 of 8 at the fewest")
    run.plan = dataclasses.replace(run.plan, num_hosts=2)
    first, second = looked_at_in_part(run.targets[0], run)
    assert "sample of kv heads" not in first, "hosts sum up none"
    assert "every host has its own rows" in second
    assert list(looked_at_in_part(_run(_taken(_PLAIN)).targets[0], run)) == [], "a small case is looked at everywhere"
