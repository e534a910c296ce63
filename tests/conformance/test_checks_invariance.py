"""What must not move: each way of depending on something else is seen, and the right answer is left alone.

Evidence is made up by attention written out in NumPy (`modelled`); a few wrong targets run for real at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.checks import invariance
from conformance.checks.outcome import Outcome
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case
from conformance.variants import changed_part

Modelled = Callable[..., Evidence]
Judged = Callable[[str, str, str], Outcome]
Change = Callable[[np.ndarray], np.ndarray]

_VARIANTS = ("poisoned_keys", "poisoned_queries", "changed", "lse_alone", "again")
_PLAIN = "v=1 batch=2 seq_len=16 num_query_heads=4 num_kv_heads=2 sliding_window_size=3 context_parallelism=4"
_CASES = [
    _PLAIN,
    f"{_PLAIN} layout=striped sinks=true documents=5@1+7@1+4@9/16@2 padding=9 attn_logits_soft_cap=5.0 seed=1",
    f"{_PLAIN} values=huge dtype=bfloat16 seed=4",
    f"{_PLAIN} values=tiny documents=5+11/16 seed=9",
    f"{_PLAIN} values=needle dtype=float64 scale=1.0 seed=4",
    "v=1 seq_len=16 window=2,3 head_dim=5 value_dim=7 sinks=true values=peaked seed=5",
    "v=1 seq_len=16 num_query_heads=3 num_kv_heads=3 seed=6",
    "v=1 seq_len=16 window=none,none batch=2 seed=7",
    "v=1 seq_len=16 sliding_window_size=5 shared_kv=true layout=dual_chunk_swap seed=8",
]
_OF_CALL = "is not zero where its cotangents are"


def _check(modelled: Modelled, case: Case | str, **how: object) -> Outcome:
    case = parse_case(case) if isinstance(case, str) else case
    return invariance.check(modelled(case, ("invariance",), **how))


def _kinds(outcome: Outcome) -> dict[str, str]:
    return {found.tensor: found.signature for found in outcome.findings}


def _with(evidence: Evidence, changed: Mapping[str, np.ndarray]) -> Outcome:
    arrays = {**evidence.arrays, **changed}
    return invariance.check(Evidence(evidence.target, evidence.case, {}, arrays, evidence.variants))


def _wider(right: np.ndarray) -> np.ndarray:
    """One key more on the left."""
    return right | np.roll(right, -1, axis=2) & ~np.eye(right.shape[1], k=right.shape[1] - 1, dtype=bool)


# --- the right answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", _CASES)
def test_a_right_answer_does_not_move(modelled: Modelled, text: str) -> None:
    outcome = _check(modelled, text)
    assert outcome.findings == (), "silent on the right one"
    owed = {"out", "dquery", "dkey"} | ({"dvalue"} if "shared_kv" not in text else set())
    owed |= {"dsinks"} if "sinks" in text else set()
    assert set(outcome.shares) == owed, "and every tensor has been looked at"


def test_a_sign_of_zero_may_change_beside_poison_but_not_when_the_call_is_repeated(modelled: Modelled) -> None:
    evidence = modelled(parse_case(_PLAIN), ("invariance",))
    arrays = {f"{data}/attention/out": evidence.arrays[f"{data}/attention/out"].copy() for data in ("0", *_VARIANTS)}
    for name, array in arrays.items():
        array[0, 0, 0, :2] = (0.0 if name.startswith(("0", "again")) else -0.0), np.nan
    assert "out" not in _kinds(_with(evidence, arrays)), "0 times -1e30 is -0; a NaN that stays is of no variant"
    arrays["again/attention/out"][0, 0, 0, 0] = -0.0
    assert _kinds(_with(evidence, arrays)) == {"out": "differs when the same call is repeated"}, (
        "there, it is another bit"
    )


def test_nothing_is_said_where_the_program_ran_on_the_draws_alone(right_evidence: Callable[..., Evidence]) -> None:
    assert invariance.check(right_evidence(parse_case(_PLAIN))).shares == {}, "what was not asked was not tried"


# --- poison ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["out", "dquery"])
def test_a_row_of_queries_moves_with_a_key_outside_its_window(modelled: Modelled, tensor: str) -> None:
    outcome = _check(modelled, _PLAIN, sees={tensor: _wider})
    assert _kinds(outcome) == {tensor: "moves with keys that it must not see"}, "that tensor alone"
    assert "the nearest poisoned key" in outcome.findings[0].reading, outcome.findings[0].reading


@pytest.mark.parametrize("tensor", ["dkey", "dvalue"])
def test_a_row_of_keys_moves_with_a_query_that_must_not_see_it(modelled: Modelled, tensor: str) -> None:
    outcome = _check(modelled, _PLAIN, sees={tensor: _wider})
    assert _kinds(outcome) == {tensor: "moves with queries that it must not see"}, "that tensor alone"


def test_a_document_or_padding_that_is_read_moves_the_answer(modelled: Modelled) -> None:
    def all_one_document(right: np.ndarray) -> np.ndarray:
        distance = np.arange(16)[:, None] - np.arange(16)[None, :]
        return np.broadcast_to((distance >= 0) & (distance <= 2), right.shape)

    for text in (f"{_PLAIN} documents=5+11/9+7", f"{_PLAIN} documents=5@1+7@1+4@9/14@2+2@9 padding=9"):
        seeds = [
            _kinds(_check(modelled, f"{text} seed={seed}", sees={"out": all_one_document})) for seed in (0, 1, 2, 4)
        ]
        assert {"out": "moves with keys that it must not see"} in seeds, text
    assert all(seeds), "padding is poisoned on every case"


def test_a_mask_that_hides_too_little_for_large_logits_is_seen(modelled: Modelled) -> None:
    assert "out" in _kinds(_check(modelled, _PLAIN, hidden=-1e9)), "-1e9 hides no logit of 1e30"


def test_a_leak_far_below_rounding_is_seen(modelled: Modelled) -> None:
    outcome = _check(modelled, _PLAIN, leaks=1e-20)
    assert {"out", "dquery", "dkey"} <= set(_kinds(outcome)), "of another batch row's values"


# --- another batch row and head, cotangents that are zero -----------------------------------------------------


def test_the_rest_must_not_move_with_a_changed_batch_row_or_head(modelled: Modelled) -> None:
    case = parse_case(_PLAIN)
    evidence = modelled(case, ("invariance",))
    changed = changed_part(case)
    for tensor in ("out", "dquery"):
        name = f"changed/attention/{tensor}"
        for row, head in np.ndindex(changed.shape):
            array = evidence.arrays[name].copy()
            array[row, 3, head] += 1e-12 if tensor == "out" else 0.5
            kinds = _kinds(_with(evidence, {name: array}))
            if not changed[row, head]:
                assert kinds == {tensor: "moves with another batch row or head"}, f"{tensor} {row} {head}"
            else:
                assert kinds == ({} if tensor == "out" else {tensor: _OF_CALL}), f"{tensor} {row} {head}"


@pytest.mark.parametrize("tensor", ["dquery", "dkey", "dvalue"])
def test_a_gradient_is_zero_where_its_cotangents_are(modelled: Modelled, tensor: str) -> None:
    case = parse_case("v=1 seq_len=8 num_query_heads=2 num_kv_heads=2")
    evidence = modelled(case, ("invariance",))
    (head,) = np.flatnonzero(changed_part(case)[0])
    name = f"changed/attention/{tensor}"
    array = evidence.arrays[name].copy()
    array[0, 3, head, 2] = 1e-30
    (found,) = _with(evidence, {name: array}).findings
    assert (found.tensor, found.signature) == (tensor, _OF_CALL), "however small"
    assert (found.expected, found.got, found.index) == (0.0, 1e-30, (0, 3, head, 2))


def test_without_cotangent_of_lse_the_gradients_are_those_of_attention(right_evidence: Callable[..., Evidence]) -> None:
    case = parse_case("v=1 batch=2 seq_len=8 sliding_window_size=3")
    right = right_evidence(case, variants=("changed", "again"), has_lse=True)
    assert invariance.check(right).findings == (), "the oracle's"
    name = "changed/attention_with_lse/dkey"
    (found,) = _with(right, {name: right.arrays[name] * 1.01}).findings
    assert found.signature == "of attention_with_lse is not attention's where the cotangent of lse is zero"
    assert found.tensor == "dkey"


@pytest.mark.parametrize("tensor", ["dquery", "dkey", "dsinks"])
def test_gradients_that_are_lost_where_lse_alone_is_used_are_a_finding(
    right_evidence: Callable[..., Evidence], tensor: str
) -> None:
    case = parse_case("v=1 batch=2 seq_len=8 sliding_window_size=3 sinks=true")
    right = right_evidence(case, variants=("lse_alone", "again"), has_lse=True)
    assert invariance.check(right).findings == (), "the oracle's"
    name = f"lse_alone/attention_with_lse/{tensor}"
    (found,) = _with(right, {name: np.zeros_like(right.arrays[name])}).findings
    assert (found.tensor, found.signature) == (tensor, "is wrong where the cotangent of out is zero")
    assert found.got == 0, "no gradient"
    assert found.expected == pytest.approx(float(right.arrays[name][found.index])), "the oracle's to dlse alone"


def test_without_any_cotangent_no_gradient_is_the_least_above_zero(modelled: Modelled) -> None:
    evidence = modelled(parse_case(_PLAIN), ("invariance",))
    for tensor in ("dquery", "dkey", "dvalue"):
        name = f"lse_alone/attention/{tensor}"
        array = evidence.arrays[name].copy()
        assert not array.any(), "attention's own cotangent is that of out"
        array.flat[5] = 1e-30
        assert _kinds(_with(evidence, {name: array})) == {tensor: _OF_CALL}
    array = evidence.arrays["lse_alone/attention/out"] + 1e-12
    assert _kinds(_with(evidence, {"lse_alone/attention/out": array})) == {"out": "moves with its cotangents"}


# --- the same call again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["out", "out of vjp", "dquery", "dkey", "dvalue", "dsinks"])
def test_one_bit_that_differs_when_the_call_is_repeated_is_a_finding(modelled: Modelled, tensor: str) -> None:
    evidence = modelled(parse_case(f"{_PLAIN} sinks=true"), ("invariance",))
    name = f"again/attention/{tensor}"
    array = evidence.arrays[name].copy()
    array.flat[3] = np.nextafter(array.flat[3], np.inf)
    (found,) = _with(evidence, {name: array}).findings
    assert found.signature == "differs when the same call is repeated"
    assert found.tensor == tensor.removesuffix(" of vjp"), "the tensor"


def test_an_answer_that_is_another_one_each_time_is_called_that_and_nothing_else(modelled: Modelled) -> None:
    evidence = modelled(parse_case(_PLAIN), ("invariance",))
    names = [name for name in evidence.arrays if name.endswith("/out")]
    noise = {name: evidence.arrays[name] + 1e-9 * number for number, name in enumerate(names)}
    assert _kinds(_with(evidence, noise)) == {"out": "differs when the same call is repeated"}


def test_a_finding_says_where_and_by_what_the_answer_moved(modelled: Modelled) -> None:
    evidence = modelled(parse_case(_PLAIN), ("invariance",))
    array = evidence.arrays["again/attention/out"].copy()
    before = float(array[1, 9, 2, 5])
    array[1, 9, 2, 5] = 7.0
    (found,) = _with(evidence, {"again/attention/out": array}).findings
    assert isinstance(found, Finding)
    assert (found.index, found.rank, found.draw) == ((1, 9, 2, 5), 2, 0), "position 9 of 16 on 4 ranks"
    assert (found.expected, found.got) == (before, 7.0), "draw 0's, and what it became"
    assert "at batch row 1, position 9, head 2, feature 5 it is 7" in found.reading, found.reading
    assert "1 of 1024 elements" in found.reading, found.reading


# --- wrong targets, for real ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gathered:right", "context_parallelism=2 batch=2 num_kv_heads=2", {}),
        (
            "blind:leaks_batch_rows",
            "context_parallelism=2 batch=2",
            {"out": "moves with another batch row or head", "dvalue": _OF_CALL},
        ),
        ("blind:leaks_heads", "context_parallelism=2 num_kv_heads=2", {"out": "moves with another batch row or head"}),
        ("blind:counts", "context_parallelism=1", {"out": "differs when the same call is repeated"}),
    ],
)
def test_what_ordinary_data_do_not_show_is_found(
    judged: Judged, name: str, text: str, expected: dict[str, str]
) -> None:
    kinds = _kinds(judged(name, f"v=1 seq_len=16 sliding_window_size=5 {text} seed=1", "invariance"))
    assert expected.items() <= kinds.items(), kinds
    assert bool(kinds) == bool(expected), "the right one is left alone"
