"""What is made of everything that goes wrong in one execution: declined, raised, broken, misplaced, diverged.

The targets are linear in their inputs (conftest.py), so every expected value is known without attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance import Declined
from conformance.case_text import parse_case
from conformance.execution import execute
from conformance.inputs import inputs_of
from conformance.target import make_target

Run = Callable[..., tuple[dict, dict, list[str]]]


def test_a_program_without_gradients_runs_on_the_draws_alone(linear: Any, small_case: Case) -> None:
    @jax.custom_vjp
    def undifferentiable(array: Any) -> Any:
        return array

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no gradient")

    undifferentiable.defvjp(refuse, refuse)

    def attention(query: Any, key: Any, value: Any, **context: Any) -> Any:
        return undifferentiable(linear(query, key, value, **context))

    target = make_target(SimpleNamespace(attention=attention), "m:t")
    message, arrays = execute(target, small_case, lambda phase: None, ("visibility", "invariance"))
    assert message["raised"]["where"] == "gradient", "a finding of the contract"
    assert set(arrays) == {"0/attention/out", "1/attention/out"}, "and its forward on the draws"


def test_declining_by_supports_or_by_the_exception_is_declining(run: Run, linear: Any) -> None:
    def attention(*arrays: Any, **context: Any) -> Any:
        raise Declined("no cap here")

    def supports(problem: Any) -> str | None:
        raise Declined("no cap there")

    assert run(attention)[0] == {"declined": "no cap here"}, "raised in the forward"
    assert run(linear, supports=supports)[0] == {"declined": "no cap there"}, "raised where it is asked"
    message, arrays, phases = run(linear, supports=lambda problem: "no sinks")
    assert (message, arrays, phases) == ({"declined": "no sinks"}, {}, []), "nothing was computed"


@pytest.mark.parametrize("answer", [True, False, 0, ["no"]])
def test_supports_that_does_not_give_a_reason_is_an_error_and_not_a_way_to_decline(
    answer: Any, run: Run, linear: Any
) -> None:
    raised = run(linear, supports=lambda problem: answer)[0]["raised"]
    assert (raised["type"], raised["where"]) == ("TypeError", "supports"), "True would have declined everything"
    assert repr(answer) in raised["message"], "the value is named"


def test_an_exception_of_supports_is_a_finding(run: Run, linear: Any) -> None:
    raised = run(linear, supports=lambda problem: 1 / 0)[0]["raised"]
    assert (raised["type"], raised["where"]) == ("ZeroDivisionError", "supports"), "not the harness's failure"


def test_an_exception_of_the_forward_comes_with_the_users_lines(run: Run) -> None:
    def attention(*arrays: Any, **context: Any) -> Any:
        raise RuntimeError("this target is broken")

    message, arrays, _ = run(attention)
    raised = message["raised"]
    assert (raised["type"], raised["where"], raised["message"]) == ("RuntimeError", "forward", "this target is broken")
    assert "raise RuntimeError" in raised["traceback"], "the line itself"
    assert "During handling" not in raised["traceback"], "once, though the harness tried twice"
    assert arrays == {}, "nothing was computed"


def test_an_exception_that_cannot_even_be_printed_is_told(run: Run) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def attention(*arrays: Any, **context: Any) -> Any:
        raise Unprintable

    assert run(attention)[0]["raised"]["type"] == "Unprintable", "its author's mistake, not a failure of ours"


def test_an_exception_while_running_names_the_draw_and_keeps_what_came_before(run: Run, linear: Any) -> None:
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
        return linear(called_back(query), *others, **context)

    message, arrays, _ = run(attention, parse_case("v=1 seq_len=8 num_query_heads=1 context_parallelism=1"))
    where = message["raised"]["where"]
    assert where in ("draw 0", "draw 1"), "XLA may call the primal and the VJP's forward once or twice"
    draws_before = {"draw 0": set(), "draw 1": {"0"}}[where]
    assert {name[0] for name in arrays} == draws_before, "what came before is kept"


def test_a_target_without_gradient_is_told_so_and_its_forward_is_still_compared(run: Run, linear: Any) -> None:
    @jax.custom_vjp
    def forward_only(query: Any) -> Any:
        return query

    def backward(residuals: Any, cotangent: Any) -> Any:
        raise NotImplementedError("no backward pass yet")

    forward_only.defvjp(lambda query: (query, None), backward)

    def attention(query: Any, *others: Any, **context: Any) -> Any:
        return linear(forward_only(query), *others, **context)

    message, arrays, _ = run(attention)
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
def test_another_form_of_output_is_a_breach_of_contract(
    change: Callable[[Any], Any], broken: list[str], run: Run, linear: Any
) -> None:
    message, arrays, _ = run(lambda *arrays, **context: change(linear(*arrays, **context)))
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
def test_another_form_of_lse_is_a_breach_of_contract(
    change: Callable[..., Any], broken: list[str], run: Run, linear: Any, linear_with_lse: Any
) -> None:
    message, _, _ = run(
        linear, attention_with_lse=lambda *arrays, **context: change(*linear_with_lse(*arrays, **context))
    )
    assert message["broken"][:3] == broken[:3], "tensor, quality, expected"


def test_outputs_in_another_place_are_named_with_both_places(run: Run, linear: Any) -> None:
    def attention(query: Any, key: Any, value: Any, *, mesh: Any, **context: Any) -> Any:
        out = linear(query, key, value, mesh=mesh, **context)
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.lax.with_sharding_constraint(out, replicated)

    misplaced = run(attention)[0]["misplaced"]
    assert "attention/out" in misplaced, "out is replicated"
    assert "'context'" in misplaced["attention/out"].partition("got")[0], "where it should lie"


def test_copies_that_differ_from_device_to_device_are_found_though_the_one_that_is_read_is_right(run: Run) -> None:
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
    message, arrays, _ = run(attention, case)
    expected = 2 * inputs_of(case).dout.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(arrays["0/attention/dkey"], expected, rtol=1e-6, err_msg="the first copy")
    assert "attention/dkey" not in message["misplaced"], "it lies where it should"
    assert list(message["diverged"]) == ["attention/dkey"], "the other copy is twice as large"
    assert "hold different values" in message["diverged"]["attention/dkey"], "which devices"
