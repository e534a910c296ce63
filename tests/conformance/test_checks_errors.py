"""What must be refused, and how: each kind of answer, and each kind of target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.evidence import Evidence
from conformance.problem import Problem
from conformance.refusals import unchecked
from conformance.target import TargetDescription

Judged = Callable[[str, str, str], Outcome]

_CASE = "v=1 seq_len=16 sliding_window_size=4 num_query_heads=2 num_kv_heads=2 seed=5"
_WINDOW = ("window", "sliding_window_size 0")
_IDS = ("segment_ids", "segment_ids of another length")
_LENGTH = ("sequence", "a length that does not divide into chunks")


def _kinds(outcome: Outcome) -> set[tuple[str, str]]:
    return {(finding.tensor, finding.signature) for finding in outcome.findings}


def _made_up(request: tuple[str, str], **answer: Any) -> Outcome:
    message = {"errors": [{"tensor": request[0], "words": request[1], **answer}]}
    return CHECKS["errors"].run(Evidence(TargetDescription("m:t", "t"), parse_case(_CASE), message, {}))


@pytest.mark.parametrize("request_", [_WINDOW, _IDS, _LENGTH])
def test_a_refusal_is_right(request_: tuple[str, str]) -> None:
    outcome = _made_up(request_, how="refused")
    assert (outcome.findings, outcome.shares) == ((), {request_[0]: 0.0}), "and counts as looked at"


@pytest.mark.parametrize(
    ("request_", "signature"),
    [
        (_WINDOW, "sliding_window_size below 1: is answered"),
        (_IDS, "segment_ids of another length: is answered"),
        (_LENGTH, None),
        (("segment_ids", "segment_ids of float32"), None),
    ],
)
def test_an_answer_is_wrong_where_no_right_one_exists(request_: tuple[str, str], signature: str | None) -> None:
    expected = set() if signature is None else {(request_[0], signature)}
    assert _kinds(_made_up(request_, how="answered")) == expected, "what has a right answer may be answered"


@pytest.mark.parametrize(
    ("request_", "kind", "is_finding"),
    [
        (_WINDOW, "TypeError", True),
        (_WINDOW, "ZeroDivisionError", True),
        (_IDS, "TypeError", False),
        (_IDS, "AssertionError", True),
        (_LENGTH, "IndexError", True),
        (_LENGTH, "an answer of another form", True),
    ],
)
def test_another_exception_is_no_refusal_but_for_jaxs_own_on_shapes(
    request_: tuple[str, str], kind: str, is_finding: bool
) -> None:
    outcome = _made_up(request_, how="raised", type=kind, message="m")
    assert bool(outcome.findings) == is_finding, "a window has no JAX error of its own"
    assert all(finding.signature.endswith(f"ends in {kind}") for finding in outcome.findings), "and says which"


def test_zero_and_negative_sizes_are_one_kind() -> None:
    requests = [{"tensor": "window", "words": f"sliding_window_size {size}", "how": "answered"} for size in (0, -3)]
    evidence = Evidence(TargetDescription("m:t", "t"), parse_case(_CASE), {"errors": requests}, {})
    (finding,) = CHECKS["errors"].run(evidence).findings
    assert finding.signature == "sliding_window_size below 1: is answered", "one finding, without a number"
    assert (finding.expected, finding.got) == ("a ValueError, or declined", "answered")


def test_a_problem_can_be_made_that_its_own_rules_forbid() -> None:
    problem = unchecked(Problem(sliding_window_size=4), sliding_window_size=0, window=(-1, 0))
    assert (problem.sliding_window_size, problem.window, problem.seq_len) == (0, (-1, 0), 64), "as asked, else the same"
    assert hash(problem) != hash(Problem(sliding_window_size=4)), "and it is as hashable as any"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gathered:right", set()),
        ("conformance.targets.bundled:halo", set()),
        ("conformance.targets.jax_nn:dot_product_attention", set()),
        ("sending:accepts_any_window", {("window", "sliding_window_size below 1: is answered")}),
        ("sending:fails_on_windows", {("window", "sliding_window_size below 1: ends in TypeError")}),
    ],
)
def test_targets_are_held_to_it(judged: Judged, name: str, expected: set[tuple[str, str]]) -> None:
    outcome = judged(name, _CASE, "errors")
    assert _kinds(outcome) == expected, "and to nothing else"
    assert set(outcome.shares) == {"window", "heads", "sequence", "segment_ids"}, "everything was put to it"
