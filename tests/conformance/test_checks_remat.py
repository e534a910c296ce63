"""What runs twice under rematerialisation, and whether the gradients are then the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.evidence import Evidence

Judged = Callable[[str, str, str], Outcome]
Build = Callable[..., Evidence]

_TEXT = "v=1 seq_len=16 sliding_window_size=4 num_query_heads=2 num_kv_heads=2 seed=13"
_CASE = parse_case(_TEXT)
_ONCE, _TWICE = {"matmul_flops": 300, "sent_bytes": 30}, {"matmul_flops": 400, "sent_bytes": 40}
_FACTS = {"plain": _ONCE, "nothing saved": _TWICE, "names saved": _ONCE}


def _judge(right_evidence: Build, facts: Any, changed: dict[str, float] | None = None) -> Outcome:
    """The judgement of right arrays, but that `changed` is added to some of them."""
    right = right_evidence(_CASE).arrays
    arrays = {
        f"remat/{program}/{tensor}": np.array(right[f"0/attention/{tensor}"])
        for program in facts
        if program != "plain" and "raised" not in facts[program]
        for tensor in ("out", "dquery", "dkey", "dvalue")
    }
    for name, error in (changed or {}).items():
        arrays[name] = arrays[name] + error
    return CHECKS["remat"].run(right_evidence(_CASE, arrays, {"misplaced": {}, "remat": facts}))


def _kinds(outcome: Outcome) -> set[tuple[str, str]]:
    return {(finding.tensor, finding.signature) for finding in outcome.findings}


def test_saved_residuals_and_the_same_gradients_are_right(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, _FACTS)
    assert outcome.findings == (), "nothing runs twice where it need not"
    assert set(outcome.shares) == {"program", "out", "dquery", "dkey", "dvalue"}, "all was looked at"


def test_what_runs_or_travels_again_although_it_is_saved_is_a_finding(right_evidence: Build) -> None:
    (found,) = _judge(right_evidence, _FACTS | {"names saved": {"matmul_flops": 450, "sent_bytes": 30}}).findings
    assert (found.expected, found.got, found.share) == (300, 450, 1.5), "how much more"
    computes = ("program", "computes its forward again although its residuals are saved")
    sends = ("program", "sends again although its residuals are saved")
    for saved, expected in (
        ({"matmul_flops": 301, "sent_bytes": 30}, {computes}),
        ({"matmul_flops": 300, "sent_bytes": 31}, {sends}),
        (_TWICE, {computes, sends}),
    ):
        assert _kinds(_judge(right_evidence, _FACTS | {"names saved": saved})) == expected, f"{saved}"


def test_without_names_only_the_answer_is_judged(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, {"plain": _ONCE, "nothing saved": _TWICE})
    assert outcome.findings == (), "everything may run twice"
    assert "program" not in outcome.shares, "and the program is not said to conform"


def test_a_gradient_that_rematerialising_changes_is_a_finding(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, _FACTS, {"remat/nothing saved/dkey": 1.0})
    assert _kinds(outcome) == {("dkey", "is wrong under jax.checkpoint, nothing saved")}, "which, and when"
    (found,) = outcome.findings
    _, position, _, _ = found.index or ()
    assert found.rank == position // 8, "where, in 16 positions on two ranks"
    assert float(found.got or 0) - float(found.expected or 0) == pytest.approx(1.0), "by how much"
    assert found.share == outcome.shares["dkey"], "of what rounding allows"
    assert outcome.shares["dkey"] > 1 > outcome.shares["dquery"], "and that alone"


def test_a_target_that_raises_under_rematerialisation_is_a_finding(right_evidence: Build) -> None:
    outcome = _judge(right_evidence, _FACTS | {"names saved": {"raised": ["TypeError", "TypeError(1)"]}})
    assert _kinds(outcome) == {("program", "raises TypeError under jax.checkpoint, names saved")}, "said"


def test_a_target_that_saves_what_it_names_runs_its_forward_once(judged: Judged) -> None:
    outcome = judged("conformance.targets.bundled:halo", f"{_TEXT} sinks=true", "remat")
    assert outcome.findings == (), "the bundled halo names all its residuals"
    assert set(outcome.shares) == {"program", "out", "dquery", "dkey", "dvalue", "dsinks"}, "all was looked at"


@pytest.mark.parametrize(
    ("strategy", "case_text"),
    [
        # The list asks ring too, so that here it may wait.
        pytest.param(
            "ring",
            "v=1 seq_len=8 num_query_heads=1 num_kv_heads=1 context_parallelism=2 seed=13",
            marks=pytest.mark.slow,
        ),
        ("ulysses", "v=1 seq_len=8 num_query_heads=2 num_kv_heads=1 context_parallelism=2 seed=13"),
        ("usp", "v=1 seq_len=8 num_query_heads=2 num_kv_heads=1 context_parallelism=2 ulysses_parallelism=2 seed=13"),
    ],
)
def test_the_strategies_for_global_layers_run_their_forward_once_where_it_is_saved(
    judged: Judged, strategy: str, case_text: str
) -> None:
    outcome = judged(f"conformance.targets.bundled:{strategy}", case_text, "remat")
    assert outcome.findings == (), "no case of the quick list asks ulysses and usp"
    assert set(outcome.shares) == {"program", "out", "dquery", "dkey", "dvalue"}, "all was looked at"


def test_a_target_that_names_residuals_and_saves_none_is_found_out(judged: Judged) -> None:
    assert _kinds(judged("sending:recomputes", _TEXT, "remat")) == {
        ("program", "computes its forward again although its residuals are saved"),
        ("program", "sends again although its residuals are saved"),
    }, "the names are nobody's"
    assert judged("sending:right_halo", _TEXT, "remat").findings == (), "the same target without names claims nothing"
