"""The checks of values: exact answers pass, one element beyond its allowance does not, and the finding says where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS, compare
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence

Build = Callable[..., Evidence]

_CASE = parse_case("v=1 seq_len=16 sliding_window_size=3 layout=dual_chunk_swap sinks=true documents=5@1+11@2 seed=4")
_PADDED = parse_case("v=1 seq_len=8 sliding_window_size=3 padding=-1 documents=3@1+5@-1")
_CHECK_OF = {
    "out": "output",
    "lse": "residuals",
    **dict.fromkeys(("dquery", "dkey", "dvalue", "dsinks"), "gradients"),
}


def _outcomes(evidence: Evidence) -> dict[str, Outcome]:
    return {name: CHECKS[name].run(evidence) for name in ("output", "residuals", "gradients")}


def _changed(evidence: Evidence, name: str, index: tuple[int, ...], by: float) -> dict[str, np.ndarray]:
    """One element of one array moved by a multiple of its allowance; `index` counts positions."""
    draw, call, tensor = name.split("/")
    answer, tensor = evidence.answer(int(draw), call), tensor.removesuffix(" of vjp")
    array = evidence.in_position_order(name).copy()
    array[index] = answer.reference[tensor][index] + by * answer.allowance[tensor][index]
    return {name: array if array.ndim < 3 else array[:, evidence.case.problem.positions()]}


def test_the_right_answer_passes_everywhere_with_share_zero(right_evidence: Build) -> None:
    outcomes = _outcomes(right_evidence(_CASE, has_lse=True))
    shares = {tensor: share for outcome in outcomes.values() for tensor, share in outcome.shares.items()}
    assert shares == dict.fromkeys(_CHECK_OF, 0.0), "every tensor was looked at, and none is off"
    assert not any(outcome.findings for outcome in outcomes.values()), "no finding"


_PLACES = [
    (f"{draw}/{call}/{tensor}{where}", tensor)
    for draw in (0, 1)
    for call in ("attention", "attention_with_lse")
    for tensor, where in (("out", ""), ("out", " of vjp"), ("dquery", ""), ("dkey", ""), ("dvalue", ""), ("dsinks", ""))
] + [(f"{draw}/attention_with_lse/lse{where}", "lse") for draw in (0, 1) for where in ("", " of vjp")]


@pytest.mark.parametrize(("name", "tensor"), _PLACES)
@pytest.mark.parametrize(("by", "passes"), [(0.99, True), (-0.99, True), (1.01, False), (-1.01, False)])
def test_an_element_passes_up_to_its_allowance_and_not_beyond_in_every_place(
    right_evidence: Build, name: str, tensor: str, by: float, passes: bool
) -> None:
    right = right_evidence(_CASE, has_lse=True)
    index = {"dsinks": (1,), "lse": (0, 9, 1)}.get(tensor, (0, 9, 0, 3))
    evidence = right_evidence(_CASE, _changed(right, name, index, by), has_lse=True)
    outcomes = _outcomes(evidence)
    findings = [finding for outcome in outcomes.values() for finding in outcome.findings]
    assert outcomes[_CHECK_OF[tensor]].shares[tensor] == pytest.approx(abs(by), rel=1e-6), "the share of the allowance"
    assert [(found.check, found.tensor, found.index) for found in findings] == (
        [] if passes else [(_CHECK_OF[tensor], tensor, index)]
    ), "one finding, at that element, or none"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["out", "lse", "dquery", "dkey", "dvalue", "dsinks"])
def test_an_element_that_is_not_finite_never_passes(right_evidence: Build, tensor: str, value: float) -> None:
    name = f"0/attention_with_lse/{tensor}"
    array = right_evidence(_CASE, has_lse=True).arrays[name].copy()
    array.flat[1] = value
    (found,) = _outcomes(right_evidence(_CASE, {name: array}, has_lse=True))[_CHECK_OF[tensor]].findings
    assert found.signature.startswith("is not finite"), "the signature tells it from a wrong number"
    assert found.share == np.inf, "no allowance covers it"
    assert str(found.got) == str(float(value)), "what was got"


def test_one_nan_among_errors_is_found_whatever_their_size() -> None:
    got, reference = np.array([1e30, 0.0, 0.0]), np.zeros(3)
    got[2] = np.nan
    assert not compare.compare(got, reference, np.full(3, 1e-3), None).passes, "NaN compares false with everything"
    assert not compare.compare(got[1:], reference[1:], np.full(2, np.inf), None).passes, "even with infinite allowance"


def test_an_error_where_nothing_is_allowed_is_a_finding_however_small() -> None:
    # dquery of a row whose one visible key is itself is exactly 0.
    tiny = np.array([0.0, np.finfo(np.float64).smallest_subnormal])
    comparison = compare.compare(tiny, np.zeros(2), np.zeros(2), None)
    assert (comparison.passes, comparison.index, comparison.share) == (False, (1,), np.inf), "no allowance, no error"


def test_an_allowance_that_is_no_number_passes_nothing_but_the_reference_itself() -> None:
    allowance = np.full(2, np.nan)
    assert not compare.compare(np.array([1.0, 2.0]), np.array([1.0, 2.1]), allowance, None).passes, "NaN allows nothing"


@pytest.mark.parametrize("shape", [(1,), (4, 1), (1, 3), (3, 4), (12,)])
def test_an_array_of_another_shape_is_never_stretched_to_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        compare.compare(np.zeros(shape), np.zeros((4, 3)), np.ones((4, 3)), None)


def test_an_element_that_fails_outranks_one_that_passes_at_the_same_share() -> None:
    # error / allowance rounds to 1 for both; only the second is above its allowance.
    allowance = np.array([1.0, 1.0])
    got = np.array([1.0, np.nextafter(1.0, 2.0)])
    comparison = compare.compare(got, np.zeros(2), allowance, None)
    assert (comparison.passes, comparison.index) == (False, (1,)), "the finding is at the element that fails"
    assert comparison.share > 1, "and its share says so"


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (["1/{call}/out", "1/{call}/out of vjp"], ", on data draw 1 only"),
        (["0/{call}/out", "1/{call}/out"], ", in the primal call only"),
        (["0/{call}/out of vjp", "1/{call}/out of vjp"], ", in the VJP's forward only"),
        (["0/{call}/out", "0/{call}/out of vjp"], ""),
        (["0/{call}/out", "1/{call}/out of vjp"], ""),
        (["0/{call}/out", "0/{call}/out of vjp", "1/{call}/out", "1/{call}/out of vjp"], ""),
    ],
)
def test_the_signature_says_in_which_circumstance_alone_it_fails(
    right_evidence: Build, places: list[str], words: str
) -> None:
    right, changed = right_evidence(_CASE), {}
    for place in places:
        changed |= _changed(right, place.format(call="attention"), (0, 2, 1, 0), by=3.0)
    (found,) = _outcomes(right_evidence(_CASE, changed))["output"].findings
    assert found.signature == f"exceeds its allowance{words}", "what is part of the finding's kind"


@pytest.mark.parametrize("call", ["attention", "attention_with_lse"])
def test_the_signature_says_in_which_function_alone_it_fails(right_evidence: Build, call: str) -> None:
    right, changed = right_evidence(_CASE, has_lse=True), {}
    for draw in (0, 1):
        changed |= _changed(right, f"{draw}/{call}/dkey", (0, 2, 0, 0), by=3.0)
    (found,) = _outcomes(right_evidence(_CASE, changed, has_lse=True))["gradients"].findings
    assert found.signature == f"exceeds its allowance, in {call} only", "part of the kind"


def test_a_finding_names_case_draw_rank_and_chunk_of_its_worst_element(right_evidence: Build) -> None:
    right = right_evidence(_CASE)
    # 16 positions on 2 ranks of 2 chunks of 4: position 9 is row 1 of chunk 2, which rank 1 holds.
    changed = _changed(right, "1/attention/dkey", (0, 9, 0, 3), by=5.0)
    (found,) = _outcomes(right_evidence(_CASE, changed))["gradients"].findings
    reference = right.answer(1, "attention")
    assert (found.target, found.draw, found.rank, found.index) == ("target", 1, 1, (0, 9, 0, 3)), "where"
    assert parse_case(found.case) == _CASE, "the case can be run again"
    assert found.expected == reference.reference["dkey"][0, 9, 0, 3], "what was expected"
    assert found.allowance == reference.allowance["dkey"][0, 9, 0, 3], "what was allowed"
    assert found.share == pytest.approx(5.0, rel=1e-6), "by how much it is beyond"
    for words in ("batch row 0, position 9, head 0, feature 3", "rank 1 of 2", "row 1 of 4 in chunk 2"):
        assert words in found.reading, "the sentence says it in words"


def test_the_worst_element_of_all_places_is_the_one_that_is_told(right_evidence: Build) -> None:
    right = right_evidence(_CASE)
    changed = _changed(right, "0/attention/out", (0, 1, 0, 0), by=2.0)
    changed |= _changed(right, "1/attention/out of vjp", (0, 14, 1, 2), by=-9.0)
    (found,) = _outcomes(right_evidence(_CASE, changed))["output"].findings
    assert (found.index, found.draw) == ((0, 14, 1, 2), 1), "9 allowances rather than 2"
    assert "the forward of its VJP" in found.detail, "which call it was"


def test_a_striped_layout_has_ranks_but_no_chunks_to_name(right_evidence: Build) -> None:
    case = _CASE.replace(layout="striped")
    changed = _changed(right_evidence(case), "0/attention/out", (0, 9, 0, 0), by=2.0)
    (found,) = _outcomes(right_evidence(case, changed))["output"].findings
    assert found.rank == 1, "position 9 lies on rank 9 % 2"
    assert "chunk" not in found.reading, "striped has no chunks"


def test_what_was_not_given_is_not_tried(right_evidence: Build) -> None:
    outcomes = _outcomes(right_evidence(parse_case("v=1 seq_len=8 sliding_window_size=3 shared_kv=true")))
    assert set(outcomes["gradients"].shares) == {"dquery", "dkey"}, "one key-value array, no sinks"
    assert outcomes["residuals"].shares == {}, "the target has no lse"


def test_undefined_rows_may_hold_any_number_but_no_nan(right_evidence: Build) -> None:
    name, row = "0/attention_with_lse/out", (0, 5)
    right = right_evidence(_PADDED, has_lse=True, empty_rows="undefined")
    for value, passes in ((1e30, True), (np.nan, False), (np.inf, False)):
        array = right.arrays[name].copy()
        array[row] = value
        outcome = _outcomes(right_evidence(_PADDED, {name: array}, has_lse=True, empty_rows="undefined"))["output"]
        assert (not outcome.findings) is passes, f"out of a row without keys is {value}"
        defined = _outcomes(right_evidence(_PADDED, {name: array}, has_lse=True, empty_rows="zero"))["output"]
        assert defined.findings, f"{value} is not the zero that the target promised"


def test_lse_of_an_undefined_row_may_be_its_right_value_minus_infinity(right_evidence: Build) -> None:
    right = right_evidence(_PADDED, has_lse=True, empty_rows="undefined")
    name = "0/attention_with_lse/lse"
    assert np.isneginf(right.arrays[name][0, 5]).all(), "the reference of an empty row"
    assert not _outcomes(right)["residuals"].findings, "the right value passes"
    for value, passes in ((-1e30, True), (np.inf, False), (np.nan, False)):
        array = right.arrays[name].copy()
        array[0, 5] = value
        outcome = _outcomes(right_evidence(_PADDED, {name: array}, has_lse=True, empty_rows="undefined"))["residuals"]
        assert (not outcome.findings) is passes, f"lse of a row without keys is {value}"


def test_rows_with_keys_are_compared_though_others_are_undefined(right_evidence: Build) -> None:
    right = right_evidence(_PADDED, empty_rows="undefined")
    changed = _changed(right, "0/attention/out", (0, 2, 0, 0), by=2.0)
    assert _outcomes(right_evidence(_PADDED, changed, empty_rows="undefined"))["output"].findings, (
        "position 2 is a token"
    )


def test_a_gradient_at_padding_is_wrong_unless_zero(right_evidence: Build) -> None:
    array = right_evidence(_PADDED).arrays["0/attention/dkey"].copy()
    array[0, 5, 0, 0] = 1e-30
    (found,) = _outcomes(right_evidence(_PADDED, {"0/attention/dkey": array}))["gradients"].findings
    assert (found.index, found.expected) == ((0, 5, 0, 0), 0.0), "nobody sees a padding position"


def test_details_give_the_largest_share_of_each_rank_by_positions_not_by_layout(right_evidence: Build) -> None:
    right = right_evidence(_CASE)
    name = "1/attention/dkey"
    position = 13  # chunk 3 of 4 under dual_chunk_swap over two ranks: rank 0 holds chunks 0 and 3
    outcome = CHECKS["gradients"].run(right_evidence(_CASE, _changed(right, name, (0, position, 0, 2), 0.5)))
    (detail,) = [detail for detail in outcome.details if (detail.tensor, detail.draw) == ("dkey", 1)]
    assert detail.by_rank == (pytest.approx(0.5, rel=1e-3), 0.0), "rank 0 alone is off"
    assert detail.index == (0, position, 0, 2), "and where"
    assert [d.by_rank for d in outcome.details if d.tensor == "dsinks"] == [(), ()], "dsinks lies on no rank"
