"""The answers that a target is held to: the oracle's, for this draw, this call and the numerics that it declares."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import oracle
from conformance.answers import answer_for, precision_of
from conformance.case_text import parse_case
from conformance.inputs import inputs_of, redraw
from conformance.problem import Case
from conformance.target import TargetDescription
from oracle.budget import Allowances, Answer, Precision

_CASE = parse_case("v=1 seq_len=8 sliding_window_size=3 sinks=true documents=3@1+5@2 seed=3")
_PADDED = parse_case("v=1 seq_len=8 sliding_window_size=3 padding=-1 documents=3@1+5@-1 seed=3")


def _target(**of: Any) -> TargetDescription:
    return dataclasses.replace(TargetDescription("module:target", "target"), **of)


def _oracle(case: Case, dlse: bool) -> tuple[Any, Any]:
    """out, lse and the gradients, from the oracle's plain functions (answers.py takes another path to them)."""
    inputs, problem = inputs_of(case), case.problem
    options: dict[str, Any] = {
        "window": problem.window,
        "segment_ids": inputs.segment_ids,
        "padding_segment_id": problem.padding,
        "sinks": inputs.sinks,
    }
    forward = oracle.attention(inputs.query, inputs.key, inputs.value, **options)
    cotangents = {"dout": inputs.dout, "dlse": inputs.dlse if dlse else None}
    return forward, oracle.attention_vjp(inputs.query, inputs.key, inputs.value, **cotangents, **options)


@pytest.mark.parametrize("draw", [0, 1])
@pytest.mark.parametrize("call", ["attention", "attention_with_lse"])
def test_each_draw_and_call_has_its_own_answer(draw: int, call: str) -> None:
    answer = answer_for(_target(), _CASE, draw, call)
    forward, gradients = _oracle(redraw(_CASE, draw), dlse=call == "attention_with_lse")
    expected = {**forward._asdict(), **gradients._asdict()}
    assert set(answer.reference) == set(expected), "the tensors of a case with sinks"
    for name, array in expected.items():
        np.testing.assert_allclose(answer.reference[name], array, rtol=1e-12, atol=1e-14, err_msg=name)


def test_the_answer_is_read_only_and_every_allowance_finite() -> None:
    answer = answer_for(_target(), _PADDED, 0, "attention_with_lse")
    for name, allowance in answer.allowance.items():
        assert np.isfinite(allowance).all(), f"an infinite allowance of {name} would pass anything"
        assert allowance.shape == answer.reference[name].shape, f"one allowance an element of {name}"
        for array in (allowance, answer.reference[name]):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_shared_kv_has_one_gradient_the_sum_of_both() -> None:
    case = parse_case("v=1 seq_len=8 sliding_window_size=3 shared_kv=true")
    answer = answer_for(_target(), case, 0, "attention")
    _, gradients = _oracle(case, dlse=False)
    assert "dvalue" not in answer.reference, "key is value: there is one gradient"
    np.testing.assert_allclose(answer.reference["dkey"], gradients.dkey + gradients.dvalue, rtol=1e-12, atol=1e-14)


def test_no_sinks_no_gradient_of_them() -> None:
    answer = answer_for(_target(), _PADDED, 0, "attention")
    assert "dsinks" not in answer.reference, "the case has no sinks"


def test_a_target_that_defines_empty_rows_is_compared_everywhere() -> None:
    assert answer_for(_target(empty_rows="zero"), _PADDED, 0, "attention_with_lse").compared == {}, "no exception"


def test_a_target_that_leaves_empty_rows_undefined_is_not_compared_there_in_out_and_lse_alone() -> None:
    answer = answer_for(_target(empty_rows="undefined"), _PADDED, 0, "attention_with_lse")
    tokens = np.arange(8) < 3
    assert set(answer.compared) == {"out", "lse"}, "gradients are compared everywhere"
    for name, compared in answer.compared.items():
        assert compared.shape == answer.reference[name].shape, f"shape of {name}"
        assert (compared.any(axis=tuple(range(2, compared.ndim)))[0] == tokens).all(), f"{name} at tokens only"


def test_undefined_empty_rows_send_no_gradient_to_the_sinks() -> None:
    # With "zero", the cotangent of an empty row's lse reaches the sink.
    case = _PADDED.replace(sinks=True)
    undefined = answer_for(_target(empty_rows="undefined"), case, 0, "attention_with_lse").reference["dsinks"]
    defined = answer_for(_target(empty_rows="zero"), case, 0, "attention_with_lse").reference["dsinks"]
    empty_dlse = inputs_of(case).dlse[0, 3:].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(defined - undefined, empty_dlse, rtol=1e-12)


def test_declared_numerics_reach_the_allowance() -> None:
    plain = answer_for(_target(), _CASE, 0, "attention").allowance["out"]
    declared = answer_for(_target(precision={"rounded_probabilities": True}), _CASE, 0, "attention").allowance["out"]
    # Row 0 sees itself alone and a sink, so its probability is rounded too.
    assert (declared > 100 * plain).all(), "bfloat16 probabilities round 2**15 times as much as float32 ones"


@pytest.mark.parametrize(
    ("dtype", "declared", "expected"),
    [
        ("float32", {}, Precision("float32")),
        ("float32", {"matmul_passes": 1}, Precision("float32", matmul_passes=1)),
        ("bfloat16", {"matmul_passes": 1, "prescaled_query": True}, Precision("bfloat16", prescaled_query=True)),
        ("float64", {"matmul_passes": 1, "rounded_logits": True}, Precision("float64")),
    ],
)
def test_only_numerics_that_mean_something_for_a_dtype_count(
    dtype: str, declared: dict[str, Any], expected: Precision
) -> None:
    assert precision_of(_target(precision=declared), dtype) == expected, "the exact tier has no excuse"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"rounded_probabilites": True}, "precision has no field 'rounded_probabilites'; its fields are"),
        ({"dtype": "bfloat16"}, "precision has no field 'dtype'"),
        ({"matmul_passes": 2}, "matmul_passes must be one of"),
    ],
)
def test_numerics_that_do_not_exist_are_refused(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precision_of(_target(precision=declared), "float32")


@pytest.mark.parametrize(
    ("tensor", "reference", "allowance"),
    [("out", np.nan, 1.0), ("out", -np.inf, 1.0), ("lse", np.inf, 1.0), ("dkey", 1.0, np.inf), ("dkey", 1.0, np.nan)],
)
def test_an_oracle_that_could_fail_nobody_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tensor: str, reference: float, allowance: float
) -> None:
    shape = (1, 2, 1, 1)
    names = Answer._fields
    answers = Answer(*(np.full(shape, reference if name == tensor else 0.0) for name in names))
    allowances = Allowances(*(np.full(shape, allowance if name == tensor else 0.0) for name in names))
    monkeypatch.setattr(oracle.budget, "answer_with_allowances", lambda *args, **kwargs: (answers, allowances))
    with pytest.raises(ArithmeticError, match=f"no finite answer and allowance for {tensor}"):
        answer_for(_target(), parse_case("v=1 seq_len=2 context_parallelism=1 seed=77"), 0, "attention")
