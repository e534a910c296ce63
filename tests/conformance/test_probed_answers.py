"""Large cases: the answer at chosen places is the whole one's, and one wrong element at such a place is found."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

import oracle
from conformance import answers
from conformance.answers import Answer, answer_for
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.evidence import Evidence
from conformance.inputs import inputs_of
from conformance.problem import Case
from conformance.session import expected_names
from conformance.target import TargetDescription

_TARGET = TargetDescription("module:target", "target")
_CASES = [
    "v=1 batch=2 seq_len=64 num_query_heads=4 num_kv_heads=2 sliding_window_size=9 layout=dual_chunk_swap "
    "context_parallelism=4 documents=20@1+44/64 padding=1 sinks=true",
    "v=1 batch=2 seq_len=64 num_query_heads=4 num_kv_heads=2 sliding_window_size=9 layout=dual_chunk_swap "
    "context_parallelism=4 documents=20@1+44/64 padding=1",
    "v=1 seq_len=48 sliding_window_size=7 context_parallelism=3 sinks=true shared_kv=true attn_logits_soft_cap=5.0",
    "v=1 seq_len=40 window=3,2 layout=striped context_parallelism=4 dtype=bfloat16 value_dim=4",
]


@pytest.fixture
def probing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every case counts as large."""
    monkeypatch.setattr(answers, "PROBE_BEYOND_PAIRS", 0)
    answers._answer.cache_clear()
    yield
    answers._answer.cache_clear()


def _whole(case: Case, call: str) -> Answer:
    return answers._whole(case, call == "attention_with_lse", False, answers.precision_of(_TARGET, case.problem.dtype))


@pytest.mark.parametrize("text", _CASES)
@pytest.mark.parametrize("call", ["attention", "attention_with_lse"])
def test_the_answer_at_a_place_is_the_whole_answers(probing: None, text: str, call: str) -> None:
    case = parse_case(text)
    probed, whole = answer_for(_TARGET, case, 0, call), _whole(case, call)
    assert set(probed.reference) == set(whole.reference), "every tensor"
    for name, places in probed.places.items():
        at = tuple(places.T)
        assert name != "dsinks" or set(at[0]) == set(range(case.problem.num_query_heads)), "of every head"
        np.testing.assert_allclose(probed.reference[name], whole.reference[name][at], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(probed.allowance[name], whole.allowance[name][at], rtol=1e-6)
        if name in whole.compared:
            assert np.array_equal(probed.compared[name], whole.compared[name][at]), "undefined at the same rows"


def _right(case: Case) -> Evidence:
    """A right target: it gives the whole answer."""
    empty = Evidence(_TARGET, case, {"misplaced": {}}, {})
    arrays = {}
    for name in expected_names(empty):
        draw, call, tensor = name.split("/")
        reference = _whole(answers.redraw(case, int(draw)), call).reference[tensor.removesuffix(" of vjp")]
        arrays[name] = reference if reference.ndim < 3 else reference[:, case.problem.positions()]
    return Evidence(_TARGET, case, {"misplaced": {}}, arrays)


@pytest.mark.parametrize("values", ["plain", "uniform", "cancelling"])
def test_what_a_rank_owes_to_the_sinks_is_missed(probing: None, values: str) -> None:
    """Rank 1 of 3 holds queries 16 to 31."""
    case = parse_case(_CASES[2].replace("shared_kv=true ", "")).replace(values=values)
    right = _right(case)
    assert CHECKS["gradients"].run(right).shares["dsinks"] == 0.0, "the right target passes"
    inputs = inputs_of(case)
    lost = oracle.attention_vjp(
        inputs.query, inputs.key, inputs.value, dout=inputs.dout * (np.arange(48) // 16 == 1)[:, None, None],
        window=case.problem.window, sinks=inputs.sinks, attn_logits_soft_cap=5.0,
    ).dsinks  # fmt: skip
    arrays = {**right.arrays, "0/attention/dsinks": right.arrays["0/attention/dsinks"] - lost}
    (finding,) = CHECKS["gradients"].run(Evidence(_TARGET, case, {"misplaced": {}}, arrays)).findings
    assert finding.tensor == "dsinks"
    assert finding.index is not None
    assert abs(finding.got - finding.expected + lost[finding.index[0]]) < 1e-9, "the head, and what it lacks"


@pytest.mark.parametrize(("check", "tensor"), [("output", "out"), ("gradients", "dkey"), ("gradients", "dquery")])
def test_one_wrong_element_at_a_place_is_found_and_named(probing: None, check: str, tensor: str) -> None:
    case = parse_case(_CASES[2].replace("shared_kv=true ", ""))
    right = _right(case)
    assert not CHECKS[check].run(right).findings, "the right target passes"
    answer = answer_for(_TARGET, case, 0, "attention")
    batch_row, position, head = (int(i) for i in answer.places[tensor][3])
    wrong = right.arrays[f"0/attention/{tensor}"].copy()
    wrong[batch_row, np.flatnonzero(case.problem.positions() == position)[0], head, 5] += 0.1
    arrays = {**right.arrays, f"0/attention/{tensor}": wrong}
    (finding,) = CHECKS[check].run(Evidence(_TARGET, case, {"misplaced": {}}, arrays)).findings
    assert finding.index == (batch_row, position, head, 5), "where it is wrong"


def test_a_million_tokens_are_never_formed() -> None:
    case = parse_case("v=1 seq_len=1048576 sliding_window_size=64 context_parallelism=8 num_query_heads=8 head_dim=32")
    one_array = 1048576 * 8 * 32 * 4
    tracemalloc.start()
    answer = answer_for(_TARGET, case, 0, "attention")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < one_array / 8, f"{peak} bytes at the most, of {one_array} for the query alone"
    borders = {position for _, position, _ in answer.places["out"].tolist()} & set(range(131072, 1048576, 131072))
    assert borders, "chunk borders are among the places"
