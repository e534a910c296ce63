"""One execution of a target: what it is given, how often it is traced, and all that is owed of it.

The targets are linear in their inputs (conftest.py), so every expected value is known without attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from conformance import execution
from conformance.case_text import parse_case
from conformance.evidence import Evidence
from conformance.execution import execute
from conformance.inputs import inputs_of, redraw
from conformance.session import expected_names
from conformance.target import make_target
from conformance.variants import variant_inputs

Run = Callable[..., tuple[dict, dict, list[str]]]


def test_everything_that_is_owed_is_there_and_nothing_else(
    run: Run, linear: Any, linear_with_lse: Any, small_case: Case
) -> None:
    message, arrays, phases = run(linear, attention_with_lse=linear_with_lse)
    description = make_target(SimpleNamespace(attention=linear, attention_with_lse=linear_with_lse), "m:t").description
    assert set(arrays) == expected_names(Evidence(description, small_case, {}, {})), "what the session will ask for"
    assert message == {"misplaced": {}, "diverged": {}}, "nothing went wrong"
    assert phases == ["making inputs", "tracing and compiling", "running draw 0", "running draw 1"], "told in order"


def test_each_draw_has_its_own_data_in_layout_order(run: Run, linear: Any, small_case: Case) -> None:
    _, arrays, _ = run(linear)
    order = [0, 1, 6, 7, 2, 3, 4, 5]  # dual_chunk_swap of 8 positions on 2 ranks, DESIGN
    for draw in (0, 1):
        inputs = inputs_of(redraw(small_case, draw))
        assert inputs.sinks is not None, "the case has sinks"
        assert inputs.segment_ids is not None, "the case has segments"
        expected = inputs.query + 2 * inputs.key + 3 * inputs.value + 4 * inputs.sinks[:, None]
        expected += inputs.segment_ids[:, :, None, None].astype(np.float32)
        for name in (f"{draw}/attention/out", f"{draw}/attention/out of vjp"):
            np.testing.assert_allclose(arrays[name], expected[:, order], rtol=1e-6, atol=1e-6, err_msg=name)
    assert not np.array_equal(arrays["0/attention/out"], arrays["1/attention/out"]), "the draws differ"


def test_gradients_are_those_of_the_cases_cotangents(
    run: Run, linear: Any, linear_with_lse: Any, small_case: Case
) -> None:
    _, arrays, _ = run(linear, attention_with_lse=linear_with_lse)
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    inputs = inputs_of(small_case)
    dout, dlse = inputs.dout[:, order], inputs.dlse[:, order]
    for name, expected in (
        ("attention/dquery", dout),
        ("attention/dkey", 2 * dout),
        ("attention/dvalue", 3 * dout),
        ("attention/dsinks", 4 * dout.sum(axis=(0, 1, 3))),
        ("attention_with_lse/dquery", dout + 5 * dlse[..., None]),
        ("attention_with_lse/dkey", 2 * dout),
    ):
        np.testing.assert_allclose(arrays[f"0/{name}"], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_target_is_traced_for_the_primal_and_the_vjp_and_not_again_for_the_second_draw(
    run: Run, linear: Any
) -> None:
    calls: list[Any] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        calls.append(context)
        return linear(*arrays, **context)

    run(attention)
    assert len(calls) == 2, "one program, compiled once: the primal call and the VJP's forward"


def test_the_variants_that_checks_want_are_run_on_the_same_program(linear: Any, small_case: Case) -> None:
    traces: list[Any] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        traces.append(context)
        return linear(*arrays, **context)

    target, phases = make_target(SimpleNamespace(attention=attention), "m:t"), []
    message, arrays = execute(target, small_case, phases.append, ("visibility", "invariance"))
    variants = ("coded", "loud", "poisoned_keys", "poisoned_queries", "changed", "lse_alone", "again")
    assert len(traces) == 2, "traced for the primal call and the VJP, and not again"
    assert message == {"misplaced": {}, "diverged": {}}, "nothing went wrong"
    assert phases[-7:] == [f"running variant {name}" for name in variants], "told in order, after the draws"
    assert set(arrays) == expected_names(Evidence(target.description, small_case, {}, {}, variants)), "all that is owed"
    inputs = variant_inputs(small_case, "coded")
    assert inputs.segment_ids is not None, "the case has segments"
    expected = inputs.query + 2 * inputs.key + 3 * inputs.value + inputs.segment_ids[:, :, None, None]
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    np.testing.assert_allclose(arrays["coded/attention/out"], expected[:, order], rtol=1e-6, err_msg="in layout order")
    assert np.array_equal(arrays["again/attention/out"], arrays["0/attention/out"]), "the first draw once more"


def test_the_target_is_told_the_problem_and_nothing_of_the_data(run: Run, linear: Any, small_case: Case) -> None:
    seen: list[tuple[Any, ...]] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        seen.append((arrays, context, jax.config.jax_default_matmul_precision))
        return linear(*arrays, **context)

    run(attention)
    arrays, context, precision = seen[0]
    assert set(context) == {"problem", "mesh", "segment_ids", "sinks"}, "the contract's arguments"
    assert context["problem"] == small_case.problem, "the static half of the case"
    for array in (*arrays, context["segment_ids"], context["sinks"]):
        assert isinstance(array, jax.core.Tracer), "values are not there to be seen while it is traced"
    assert precision == "highest", "the problem's matmul precision"


def test_optional_inputs_are_passed_only_where_the_problem_has_them(run: Run, linear: Any) -> None:
    seen: list[dict] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        seen.append(context)
        return linear(*arrays, **context)

    run(attention, parse_case("v=1 seq_len=8 num_query_heads=1"))
    assert set(seen[0]) == {"problem", "mesh"}, "no segments, no sinks"


def test_shared_kv_is_one_array_with_one_gradient(run: Run, linear: Any) -> None:
    same: list[bool] = []

    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        same.append(key is value)
        return linear(query, key, value, **context)

    case = parse_case("v=1 seq_len=8 num_query_heads=1 shared_kv=true")
    _, arrays, _ = run(attention, case)
    assert all(same), "the very same array"
    assert "0/attention/dvalue" not in arrays, "it has one gradient"
    np.testing.assert_allclose(arrays["0/attention/dkey"], 5 * inputs_of(case).dout, rtol=1e-6, err_msg="2 + 3")


@pytest.mark.parametrize("empty_rows", ["undefined", "zero"])
def test_cotangents_of_empty_rows_are_zero_only_for_a_target_that_leaves_them_undefined(
    empty_rows: str, run: Run, linear: Any
) -> None:
    case = parse_case("v=1 seq_len=8 num_query_heads=1 padding=-1 documents=5@1+3@-1")
    _, arrays, _ = run(linear, case, empty_rows=empty_rows)
    gradient = arrays["0/attention/dquery"]  # of a linear target: the cotangent itself
    assert (gradient[:, :5] != 0).any(), "tokens have cotangents"
    assert (gradient[:, 5:] == 0).all() == (empty_rows == "undefined"), "rows without keys"


def test_a_target_that_writes_into_what_it_is_given_does_not_reach_the_masters(
    monkeypatch: pytest.MonkeyPatch, run: Run, linear: Any
) -> None:
    masters: list[Any] = []
    monkeypatch.setattr(execution, "inputs_of", lambda case: masters.append(inputs_of(case)) or masters[-1])

    def overwrite(array: Any) -> np.ndarray:
        view = np.asarray(array)
        try:
            view.flags.writeable = True
            view[...] = 0
        except ValueError:
            pass  # it belongs to someone who does not let it
        return np.zeros_like(array)

    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        zero = jax.pure_callback(overwrite, jax.ShapeDtypeStruct(query.shape, query.dtype), query)
        return linear(query, key, value, **context) + zero

    # One device: a callback under a mesh would need a shard_map. The VJP of a callback is not defined: no gradient.
    run(attention, parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    fresh = inputs_of(parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    np.testing.assert_array_equal(masters[0].query, fresh.query, "the oracle reads the masters")


def test_a_target_that_says_that_lse_has_no_gradient_is_not_asked_for_it(
    run: Run, linear: Any, linear_with_lse: Any
) -> None:
    def broken_backward(query: Any, key: Any, value: Any, **context: Any) -> Any:
        out, lse = linear_with_lse(query, key, value, **context)
        return out, jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(lse.shape, lse.dtype), lse)

    case = parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1")
    message, arrays, _ = run(linear, case, attention_with_lse=broken_backward, lse_grad=False)
    assert "raised" not in message, "its missing derivative is no finding"
    assert {name for name in arrays if name.startswith("0/attention_with_lse")} == {
        "0/attention_with_lse/out",
        "0/attention_with_lse/lse",
    }, "the forward alone"
    assert "0/attention/dquery" in arrays, "attention itself is differentiated all the same"
