"""One execution of a target: what it is given, what is looked at, and what is made of everything that goes wrong.

The targets here are linear in their inputs, so every expected value is known without attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance import Declined, execution
from conformance.case_text import parse_case
from conformance.evidence import Evidence
from conformance.execution import execute
from conformance.inputs import inputs_of, redraw
from conformance.session import expected_names
from conformance.target import make_target
from conformance.variants import variant_inputs

_CASE = parse_case(
    "v=1 seq_len=8 sliding_window_size=3 num_query_heads=2 num_kv_heads=2 head_dim=4 layout=dual_chunk_swap"
    " sinks=true documents=3@1+5@2 seed=4"
)


def _linear(query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, segment_ids: Any = None, sinks: Any = None):
    """query + 2 key + 3 value + 4 sinks, and the segment id: every input leaves its mark."""
    out = query + 2 * key + 3 * value
    out = out if sinks is None else out + 4 * sinks[:, None]
    return out if segment_ids is None else out + segment_ids[:, :, None, None].astype(query.dtype)


def _linear_with_lse(query: Any, key: Any, value: Any, **context: Any) -> Any:
    return _linear(query, key, value, **context), 5 * query.sum(axis=-1).astype(jnp.float32)


def _run(attention: Callable[..., Any], case: Any = _CASE, **of: Any) -> tuple[dict, dict, list[str]]:
    """Message, arrays and phases of one execution."""
    phases: list[str] = []
    message, arrays = execute(make_target(SimpleNamespace(attention=attention, **of), "m:t"), case, phases.append)
    return message, arrays, phases


def test_everything_that_is_owed_is_there_and_nothing_else() -> None:
    message, arrays, phases = _run(_linear, attention_with_lse=_linear_with_lse)
    description = make_target(
        SimpleNamespace(attention=_linear, attention_with_lse=_linear_with_lse), "m:t"
    ).description
    assert set(arrays) == expected_names(Evidence(description, _CASE, {}, {})), "what the session will ask for"
    assert message == {"misplaced": {}, "diverged": {}}, "nothing went wrong"
    assert phases == ["making inputs", "tracing and compiling", "running draw 0", "running draw 1"], "told in order"


def test_each_draw_has_its_own_data_in_layout_order() -> None:
    _, arrays, _ = _run(_linear)
    order = [0, 1, 6, 7, 2, 3, 4, 5]  # dual_chunk_swap of 8 positions on 2 ranks, DESIGN
    for draw in (0, 1):
        inputs = inputs_of(redraw(_CASE, draw))
        assert inputs.sinks is not None, "the case has sinks"
        assert inputs.segment_ids is not None, "the case has segments"
        expected = inputs.query + 2 * inputs.key + 3 * inputs.value + 4 * inputs.sinks[:, None]
        expected += inputs.segment_ids[:, :, None, None].astype(np.float32)
        for name in (f"{draw}/attention/out", f"{draw}/attention/out of vjp"):
            np.testing.assert_allclose(arrays[name], expected[:, order], rtol=1e-6, atol=1e-6, err_msg=name)
    assert not np.array_equal(arrays["0/attention/out"], arrays["1/attention/out"]), "the draws differ"


def test_gradients_are_those_of_the_cases_cotangents() -> None:
    _, arrays, _ = _run(_linear, attention_with_lse=_linear_with_lse)
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    inputs = inputs_of(_CASE)
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


def test_the_target_is_traced_for_the_primal_and_the_vjp_and_not_again_for_the_second_draw() -> None:
    calls: list[Any] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        calls.append(context)
        return _linear(*arrays, **context)

    _run(attention)
    assert len(calls) == 2, "one program, compiled once: the primal call and the VJP's forward"


def test_the_variants_that_checks_want_are_run_on_the_same_program() -> None:
    traces: list[Any] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        traces.append(context)
        return _linear(*arrays, **context)

    target, phases = make_target(SimpleNamespace(attention=attention), "m:t"), []
    message, arrays = execute(target, _CASE, phases.append, ("visibility", "invariance"))
    variants = ("coded", "loud", "poisoned_keys", "poisoned_queries", "changed", "lse_alone", "again")
    assert len(traces) == 2, "traced for the primal call and the VJP, and not again"
    assert message == {"misplaced": {}, "diverged": {}}, "nothing went wrong"
    assert phases[-7:] == [f"running variant {name}" for name in variants], "told in order, after the draws"
    assert set(arrays) == expected_names(Evidence(target.description, _CASE, {}, {}, variants)), "all that is owed"
    inputs = variant_inputs(_CASE, "coded")
    assert inputs.segment_ids is not None, "the case has segments"
    expected = inputs.query + 2 * inputs.key + 3 * inputs.value + inputs.segment_ids[:, :, None, None]
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    np.testing.assert_allclose(arrays["coded/attention/out"], expected[:, order], rtol=1e-6, err_msg="in layout order")
    assert np.array_equal(arrays["again/attention/out"], arrays["0/attention/out"]), "the first draw once more"


def test_a_program_without_gradients_runs_on_the_draws_alone() -> None:
    @jax.custom_vjp
    def undifferentiable(array: Any) -> Any:
        return array

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no gradient")

    undifferentiable.defvjp(refuse, refuse)

    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        return undifferentiable(_linear(query, key, value, **context))

    target = make_target(SimpleNamespace(attention=attention), "m:t")
    message, arrays = execute(target, _CASE, lambda phase: None, ("visibility", "invariance"))
    assert message["raised"]["where"] == "gradient", "a finding of the contract"
    assert set(arrays) == {"0/attention/out", "1/attention/out"}, "and its forward on the draws"


def test_the_target_is_told_the_problem_and_nothing_of_the_data() -> None:
    seen: list[tuple[Any, ...]] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        seen.append((arrays, context, jax.config.jax_default_matmul_precision))
        return _linear(*arrays, **context)

    _run(attention)
    arrays, context, precision = seen[0]
    assert set(context) == {"problem", "mesh", "segment_ids", "sinks"}, "the contract's arguments"
    assert context["problem"] == _CASE.problem, "the static half of the case"
    for array in (*arrays, context["segment_ids"], context["sinks"]):
        assert isinstance(array, jax.core.Tracer), "values are not there to be seen while it is traced"
    assert precision == "highest", "the problem's matmul precision"


def test_optional_inputs_are_passed_only_where_the_problem_has_them() -> None:
    seen: list[dict] = []

    def attention(*arrays: Any, **context: Any) -> Any:
        seen.append(context)
        return _linear(*arrays, **context)

    _run(attention, parse_case("v=1 seq_len=8 num_query_heads=1"))
    assert set(seen[0]) == {"problem", "mesh"}, "no segments, no sinks"


def test_shared_kv_is_one_array_with_one_gradient() -> None:
    same: list[bool] = []

    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        same.append(key is value)
        return _linear(query, key, value, **context)

    case = parse_case("v=1 seq_len=8 num_query_heads=1 shared_kv=true")
    _, arrays, _ = _run(attention, case)
    assert all(same), "the very same array"
    assert "0/attention/dvalue" not in arrays, "it has one gradient"
    np.testing.assert_allclose(arrays["0/attention/dkey"], 5 * inputs_of(case).dout, rtol=1e-6, err_msg="2 + 3")


@pytest.mark.parametrize("empty_rows", ["undefined", "zero"])
def test_cotangents_of_empty_rows_are_zero_only_for_a_target_that_leaves_them_undefined(empty_rows: str) -> None:
    case = parse_case("v=1 seq_len=8 num_query_heads=1 padding=-1 documents=5@1+3@-1")
    _, arrays, _ = _run(_linear, case, empty_rows=empty_rows)
    gradient = arrays["0/attention/dquery"]  # of a linear target: the cotangent itself
    assert (gradient[:, :5] != 0).any(), "tokens have cotangents"
    assert (gradient[:, 5:] == 0).all() == (empty_rows == "undefined"), "rows without keys"


def test_a_target_that_writes_into_what_it_is_given_does_not_reach_the_masters(
    monkeypatch: pytest.MonkeyPatch,
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
        return _linear(query, key, value, **context) + zero

    # One device: a callback under a mesh would need a shard_map. The VJP of a callback is not defined: no gradient.
    _run(attention, parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    fresh = inputs_of(parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    np.testing.assert_array_equal(masters[0].query, fresh.query, "the oracle reads the masters")


def test_declining_by_supports_or_by_the_exception_is_declining() -> None:
    def attention(*arrays: Any, **context: Any) -> Any:
        raise Declined("no cap here")

    def supports(problem: Any) -> str | None:
        raise Declined("no cap there")

    assert _run(attention)[0] == {"declined": "no cap here"}, "raised in the forward"
    assert _run(_linear, supports=supports)[0] == {"declined": "no cap there"}, "raised where it is asked"
    message, arrays, phases = _run(_linear, supports=lambda problem: "no sinks")
    assert (message, arrays, phases) == ({"declined": "no sinks"}, {}, []), "nothing was computed"


@pytest.mark.parametrize("answer", [True, False, 0, ["no"]])
def test_supports_that_does_not_give_a_reason_is_an_error_and_not_a_way_to_decline(answer: Any) -> None:
    raised = _run(_linear, supports=lambda problem: answer)[0]["raised"]
    assert (raised["type"], raised["where"]) == ("TypeError", "supports"), "True would have declined everything"
    assert repr(answer) in raised["message"], "the value is named"


def test_an_exception_of_supports_is_a_finding() -> None:
    raised = _run(_linear, supports=lambda problem: 1 / 0)[0]["raised"]
    assert (raised["type"], raised["where"]) == ("ZeroDivisionError", "supports"), "not the harness's failure"


def test_an_exception_of_the_forward_comes_with_the_users_lines() -> None:
    def attention(*arrays: Any, **context: Any) -> Any:
        raise RuntimeError("this target is broken")

    message, arrays, _ = _run(attention)
    raised = message["raised"]
    assert (raised["type"], raised["where"], raised["message"]) == ("RuntimeError", "forward", "this target is broken")
    assert "raise RuntimeError" in raised["traceback"], "the line itself"
    assert "During handling" not in raised["traceback"], "once, though the harness tried twice"
    assert arrays == {}, "nothing was computed"


def test_an_exception_that_cannot_even_be_printed_is_told() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def attention(*arrays: Any, **context: Any) -> Any:
        raise Unprintable

    assert _run(attention)[0]["raised"]["type"] == "Unprintable", "its author's mistake, not a failure of ours"


def test_an_exception_while_running_names_the_draw_and_keeps_what_came_before() -> None:
    runs: list[int] = []

    def fail_later(array: Any) -> np.ndarray:
        runs.append(1)
        if len(runs) > 2:
            raise RuntimeError("the third call fails")
        return np.asarray(array)

    @jax.custom_vjp
    def called_back(query: Any) -> Any:
        return jax.pure_callback(fail_later, jax.ShapeDtypeStruct(query.shape, query.dtype), query)

    called_back.defvjp(lambda query: (called_back(query), None), lambda _, cotangent: (cotangent,))

    def attention(query: Any, *others: Any, **context: Any) -> Any:
        return _linear(called_back(query), *others, **context)

    message, arrays, _ = _run(attention, parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    where = message["raised"]["where"]
    assert where in ("draw 0", "draw 1"), "XLA may call the primal and the VJP's forward once or twice"
    draws_before = {"draw 0": set(), "draw 1": {"0"}}[where]
    assert {name[0] for name in arrays} == draws_before, "what came before is kept"


def test_a_target_without_gradient_is_told_so_and_its_forward_is_still_compared() -> None:
    @jax.custom_vjp
    def forward_only(query: Any) -> Any:
        return query

    def backward(residuals: Any, cotangent: Any) -> Any:
        raise NotImplementedError("no backward pass yet")

    forward_only.defvjp(lambda query: (query, None), backward)

    def attention(query: Any, *others: Any, **context: Any) -> Any:
        return _linear(forward_only(query), *others, **context)

    message, arrays, _ = _run(attention)
    assert (message["raised"]["type"], message["raised"]["where"]) == ("NotImplementedError", "gradient")
    assert set(arrays) == {"0/attention/out", "1/attention/out"}, "the primal call on both draws"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda out: out[..., :-1], ["out", "shape", "(1, 8, 2, 4)", "(1, 8, 2, 3)"]),
        (lambda out: out[:, :1], ["out", "shape", "(1, 8, 2, 4)", "(1, 1, 2, 4)"]),
        (lambda out: out.astype(jnp.bfloat16), ["out", "dtype", "float32", "bfloat16"]),
        (lambda out: (out, out), ["out", "structure", "one array", "a tuple of 2"]),
        (lambda out: None, ["out", "structure", "one array", "a NoneType"]),
        (lambda out: np.zeros((1, 8, 2, 4), np.float32), ["out", "structure", "one array", "a ndarray"]),
    ],
    ids=["feature missing", "would broadcast", "dtype", "pair", "nothing", "no JAX array"],
)
def test_another_form_of_output_is_a_breach_of_contract(change: Callable[[Any], Any], broken: list[str]) -> None:
    message, arrays, _ = _run(lambda *arrays, **context: change(_linear(*arrays, **context)))
    assert (message, arrays) == ({"broken": broken}, {}), "tensor, quality, expected, got"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda out, lse: out, ["lse", "structure", "(out, lse)", "a JitTracer"]),
        (lambda out, lse: (out, lse.swapaxes(1, 2)), ["lse", "shape", "(1, 8, 2)", "(1, 2, 8)"]),
        (lambda out, lse: (out, lse.astype(jnp.bfloat16)), ["lse", "dtype", "float32", "bfloat16"]),
    ],
    ids=["out alone", "heads before positions", "dtype"],
)
def test_another_form_of_lse_is_a_breach_of_contract(change: Callable[..., Any], broken: list[str]) -> None:
    message, _, _ = _run(
        _linear, attention_with_lse=lambda *arrays, **context: change(*_linear_with_lse(*arrays, **context))
    )
    assert message["broken"][:3] == broken[:3], "tensor, quality, expected"


def test_outputs_in_another_place_are_named_with_both_places() -> None:
    def attention(query: Any, key: Any, value: Any, *, mesh: Any, **context: Any) -> Any:
        out = _linear(query, key, value, mesh=mesh, **context)
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(out, replicated)

    misplaced = _run(attention)[0]["misplaced"]
    assert "attention/out" in misplaced, "out is replicated"
    assert "'context'" in misplaced["attention/out"].partition("got")[0], "where it should lie"


def test_copies_that_differ_from_device_to_device_are_found_though_the_one_that_is_read_is_right() -> None:
    def attention(query: Any, key: Any, value: Any, *, mesh: Any, **context: Any) -> Any:
        rows = jax.sharding.PartitionSpec("data", "context")  # replicated over tensor, as one kv head is

        @jax.custom_vjp
        def same(key: Any) -> Any:
            return key

        def on_one_device(cotangent: Any) -> Any:
            return cotangent * (1 + jax.lax.axis_index("tensor")).astype(cotangent.dtype)

        backward = jax.shard_map(on_one_device, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        same.defvjp(lambda key: (key, None), lambda _, cotangent: (backward(cotangent),))
        return query + 2 * same(key)

    case = parse_case("v=1 seq_len=8 tensor_parallelism=2")
    message, arrays, _ = _run(attention, case)
    expected = 2 * inputs_of(case).dout.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(arrays["0/attention/dkey"], expected, rtol=1e-6, err_msg="the first copy")
    assert "attention/dkey" not in message["misplaced"], "it lies where it should"
    assert list(message["diverged"]) == ["attention/dkey"], "the other copy is twice as large"
    assert "hold different values" in message["diverged"]["attention/dkey"], "which devices"


def test_a_target_that_says_that_lse_has_no_gradient_is_not_asked_for_it() -> None:
    def broken_backward(query: Any, key: Any, value: Any, **context: Any) -> Any:
        out, lse = _linear_with_lse(query, key, value, **context)
        return out, jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(lse.shape, lse.dtype), lse)

    case = parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1")
    message, arrays, _ = _run(_linear, case, attention_with_lse=broken_backward, lse_grad=False)
    assert "raised" not in message, "its missing derivative is no finding"
    assert {name for name in arrays if name.startswith("0/attention_with_lse")} == {
        "0/attention_with_lse/out",
        "0/attention_with_lse/lse",
    }, "the forward alone"
    assert "0/attention/dquery" in arrays, "attention itself is differentiated all the same"
