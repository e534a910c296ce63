"""Facts read out of traced programs: what is sent in which phase, how often, how wide; what is computed; what is dead.

The programs here are small enough to count by hand. Nothing is compiled but where the compiled text is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conformance.narrow_sums import narrow_sums
from conformance.program_facts import cost_facts, interpreted_kernels, kernel_phases, program_facts, sent_bytes
from conformance.traced import phase_of, scope

_RANKS = 4
_SHIFT = [(rank, rank + 1) for rank in range(_RANKS - 1)]


def _on_ranks(function: Callable[..., Any], dtype: str = "float32", inputs: int = 1) -> tuple[Any, list[Any]]:
    """A jitted function of arrays [16], spread over four ranks of the axis "context"; and the shapes it takes."""
    mesh = Mesh(np.array(jax.devices()[:_RANKS]), ("context",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("context")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * inputs, out_specs=spec, check_vma=False)
    shape = jax.ShapeDtypeStruct((16,), jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
    return mapped, [shape] * inputs


def _traced(function: Callable[..., Any], *shapes: Any) -> Any:
    return jax.jit(function).trace(*shapes)


def _with_own_gradient(step: Callable[..., Any]) -> Callable[..., Any]:
    own = jax.custom_vjp(step)
    own.defvjp(lambda x: (step(x), None), lambda _, cotangent: (cotangent,))
    return own


def _facts(traced: Any, cotangents: list[bool] | None = None) -> dict[str, Any]:
    return program_facts(traced, traced.lower().compile(), cotangents or [False] * len(traced.jaxpr.jaxpr.invars))


def test_a_primitive_comes_with_its_dtype_axes_pairs_and_bytes() -> None:
    mapped, shapes = _on_ranks(lambda x: lax.ppermute(x, "context", _SHIFT) + lax.psum(x, "context"), "bfloat16")
    facts = _facts(_traced(mapped, *shapes))
    by_kind = {one["kind"]: one for one in facts["traced"]}
    assert by_kind.keys() == {"collective-permute", "all-reduce"}, "both are there"
    assert all(one["dtypes"] == ["bfloat16"] and one["bytes"] == 4 * 2 for one in by_kind.values()), "4 rows of a rank"
    assert all(one["axes"] == ["context"] for one in by_kind.values()), "over its axis"
    assert by_kind["collective-permute"]["pairs"] == [[0, 1], [1, 2], [2, 3]], "from rank to rank"
    assert {one["dtypes"] for one in facts["compiled"]} == {("f32",)}, "XLA for CPU widens: its text deceives"


@pytest.mark.parametrize(
    ("wrap", "times"),
    [
        (lambda step: lambda x: lax.scan(lambda c, _: (step(c), None), x, length=5)[0], 5),
        (lambda step: jax.jit(step), 1),
        (lambda step: jax.checkpoint(step), 1),
        (lambda step: lambda x: lax.cond(x.sum() > 0, step, lambda x: x, x), 1),
        (lambda step: _with_own_gradient(step), 1),
        (lambda step: lambda x: lax.scan(lambda c, _: (jax.jit(jax.checkpoint(step))(c), None), x, length=3)[0], 3),
    ],
    ids=["scan", "jit", "checkpoint", "cond", "custom_vjp", "nested"],
)
def test_what_is_nested_is_found_and_counted_as_often_as_it_runs(wrap: Any, times: int) -> None:
    mapped, shapes = _on_ranks(wrap(lambda x: lax.ppermute(x, "context", _SHIFT)))
    traced = _traced(mapped, *shapes)
    assert sent_bytes(traced) == times * 16, "4 float32 rows, each time"


def test_a_loop_without_a_known_end_says_so() -> None:
    def until_large(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: lax.ppermute(c, "context", _SHIFT) + 1, x)

    mapped, shapes = _on_ranks(until_large)
    facts = _facts(_traced(mapped, *shapes))
    assert {one["trips"] for one in facts["traced"] if one["kind"] == "collective-permute"} == {None}, "traced"
    assert {one["trips"] for one in facts["compiled"] if one["kind"] == "collective-permute"} == {None}, "and compiled"


def test_what_no_result_needs_is_not_counted() -> None:
    def wasteful(x: Any) -> Any:
        lax.ppermute(x, "context", _SHIFT)
        unused, used = lax.all_gather(x, "context"), x * 2
        return (used, unused)[0]

    mapped, shapes = _on_ranks(wasteful)
    assert sent_bytes(_traced(mapped, *shapes)) == 0, "XLA removes it too"


def test_each_phase_of_an_execution_has_its_own_collectives() -> None:
    mapped, shapes = _on_ranks(lambda x: lax.ppermute(x * x, "context", _SHIFT))

    def program(x: Any, cotangent: Any) -> Any:
        with scope("primal", "attention"):
            out = mapped(x)
        with scope("forward", "attention_with_lse"):
            again, vjp = jax.vjp(mapped, x)
        with scope("backward", "attention_with_lse"):
            return out, again, vjp(cotangent)

    facts = _facts(_traced(program, *shapes * 2))
    phases = {"primal/attention", "forward/attention_with_lse", "backward/attention_with_lse"}
    assert {one["phase"] for one in facts["traced"]} == phases, "of the traced program"
    compiled = {one["phase"] for one in facts["compiled"]}
    assert "backward/attention_with_lse" in compiled, "XLA's own names tell as well"
    assert compiled <= phases, "though equal forwards are one to it"


def test_a_phase_is_the_outermost_since_a_backward_names_its_forward() -> None:
    stack = "jit(f)/halocheck_backward_attention/transpose(halocheck_forward_attention)/jvp()/ppermute"
    assert phase_of(stack) == "backward/attention", "it runs in the backward"
    assert phase_of("jit(f)/shard_map/ppermute") == "", "nothing is made up"


def _narrow(function: Callable[..., Any], dtype: str = "bfloat16") -> list[str]:
    """narrow_sums of a function of two arrays, the second of which is a cotangent."""
    mapped, shapes = _on_ranks(function, dtype, inputs=2)
    (sums,) = narrow_sums(_traced(mapped, *shapes).jaxpr, [False, True])
    return sums


def _rounded(array: Any) -> Any:
    """float32 whose values have the bits of bfloat16."""
    return array.astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)


def _product(x: Any, cotangent: Any, dtype: str = "bfloat16") -> Any:
    """A matrix product with a cotangent, whose sums come out in `dtype`."""
    return jnp.einsum("a,b->b", x, cotangent, preferred_element_type=jnp.dtype(dtype))


def _kernel_of(first: str, second: str, summed: int) -> Callable[..., Any]:
    """A Pallas kernel with two results of these dtypes, one of which is summed over ranks in float32."""

    def backward(x: Any, cotangent: Any) -> Any:
        def kernel(keys: Any, cotangents: Any, one: Any, other: Any) -> None:
            one[...] = (keys[...] * cotangents[...]).astype(one.dtype)
            other[...] = (keys[...] + cotangents[...]).astype(other.dtype)

        shapes = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)) for dtype in (first, second)]
        results = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x, cotangent)
        return lax.psum(results[summed].astype(jnp.float32), "context").astype(x.dtype)

    return backward


def _ring_of(dtype: Any) -> Callable[..., Any]:
    """The gradient of passing keys rotates in `dtype`, and each rank adds its own part."""

    def backward(x: Any, cotangent: Any) -> Any:
        def step(passing: Any, _: Any) -> Any:
            arrived = lax.ppermute(passing.astype(dtype), "context", _SHIFT).astype(jnp.float32)
            return arrived + cotangent.astype(jnp.float32), None

        total, _ = lax.scan(step, jnp.zeros(x.shape, jnp.float32), length=3)
        return total.astype(x.dtype)

    return backward


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, ct: lax.psum(ct, "context"), ["psum of bfloat16"]),
        (lambda x, ct: lax.psum_scatter(lax.all_gather(ct, "context"), "context"), ["reduce_scatter of bfloat16"]),
        (lambda x, ct: lax.psum(ct.astype(jnp.float32), "context").astype(x.dtype), []),
        (lambda x, ct: lax.psum(x, "context") + ct, []),
        (lambda x, ct: ct + lax.ppermute(ct, "context", _SHIFT), ["adding what arrived narrow"]),
        (
            lambda x, ct: (
                ct + jnp.pad(lax.ppermute(ct[:2], "context", _SHIFT).astype("float32"), (0, 2)).astype(x.dtype)
            ),
            ["adding what arrived narrow"],
        ),
        (lambda x, ct: ct + lax.ppermute(ct.astype(jnp.float32), "context", _SHIFT).astype(x.dtype), []),
        (lambda x, ct: ct + lax.ppermute(x, "context", _SHIFT), []),
        (lambda x, ct: x + x * lax.ppermute(ct, "context", _SHIFT), []),
        (_ring_of(jnp.bfloat16), ["adding what arrived narrow"]),
        (_ring_of(jnp.float32), []),
        (lambda x, ct: lax.psum(_rounded(x * ct), "context").astype(x.dtype), ["psum of what was rounded"]),
        (
            lambda x, ct: (_rounded(x * ct) + lax.ppermute(_rounded(x * ct), "context", _SHIFT)).astype(x.dtype),
            ["adding what arrived, of what was rounded"],
        ),
        (lambda x, ct: lax.psum(_product(x, ct).astype("float32"), "context"), ["psum of what was rounded"]),
        (lambda x, ct: lax.psum(_product(x, ct, "float32"), "context"), []),
        (lambda x, ct: _product(x, ct).astype("float32") * 2.0 + x, []),
        (_kernel_of("bfloat16", "float32", summed=0), ["psum of what was rounded"]),
        (_kernel_of("bfloat16", "float32", summed=1), []),
        (
            lambda x, ct: lax.reduce_precision(lax.all_gather(x.astype("float32") * ct, "context"), 8, 7).sum(0),
            [],
        ),
        (lambda x, ct: _rounded(lax.psum(x.astype("float32") * ct, "context")), []),
        (lambda x, ct: _rounded(x.astype("float32") * ct) + lax.ppermute(x.astype("float32"), "context", _SHIFT), []),
    ],
    ids=[
        *("psum", "reduce_scatter", "wide psum", "psum of keys", "permute and add", "padded and widened, then added"),
        *("wide permute", "keys travel narrow", "a cotangent that is computed with", "narrow ring", "wide ring"),
        *("rounded psum", "rounded, then sent and added", "a product that comes out rounded", "a wide product"),
        *(
            "a rounded product that stays",
            "a kernel's rounded result",
            "a kernel's wide result",
            "gathered, then rounded",
            "rounded after the sum",
            "rounded, and never sent",
        ),
    ],
)
def test_sums_of_gradients_in_less_than_float32_are_told_from_all_others(function: Any, expected: list[str]) -> None:
    assert _narrow(function) == expected, "what is a sum across ranks of a gradient, and how wide"


def test_a_narrow_sum_belongs_to_the_gradients_that_are_made_of_it() -> None:
    mapped, shapes = _on_ranks(lambda x, ct: lax.psum(ct, "context"), "bfloat16", inputs=2)

    def program(x: Any, ct: Any) -> dict[str, Any]:
        return {"attention/dkey": ct.astype(jnp.float32), "attention/dsinks": mapped(x, ct) * 2, "attention/out": x}

    traced = _traced(program, *shapes)
    facts = program_facts(traced, traced.lower().compile(), [False, True])
    assert facts["narrow_sums"] == [["dsinks", "psum of bfloat16"]], "dkey is none of it"


def test_matrix_products_are_counted_through_loops_and_both_sides() -> None:
    def program(a: Any, b: Any) -> Any:
        return lax.scan(lambda c, _: (c @ b, None), a, length=7)[0]

    shapes = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 5), jnp.float32)
    traced = _traced(program, *shapes)
    facts = cost_facts(traced, traced.lower().compile())
    assert facts["matmul_flops"] == 7 * 2 * 3 * 5 * 5, "a multiplication and an addition for each triple"
    assert facts["xla_flops"] < facts["matmul_flops"], "XLA's own count holds one turn of the loop: why we count"
    assert facts["temporary_bytes"] >= 0, "of one device"


def test_constants_and_intermediate_arrays_are_counted() -> None:
    mask = np.tri(16, dtype=np.float32)

    def program(x: Any) -> Any:
        return (x[:, None] * jnp.asarray(mask)).sum(axis=1)

    facts = cost_facts(_traced(program, jax.ShapeDtypeStruct((16,), jnp.float32)))
    assert facts["constant_bytes"] == 16 * 16 * 4, "the mask is built in"
    assert facts["elements"] >= 16 * 16, "its size shows in what is computed"
    small = cost_facts(_traced(lambda x: x + 1, jax.ShapeDtypeStruct((16,), jnp.float32)))
    assert (small["constant_bytes"], small["elements"]) == (0, 16), "one array of 16"


@pytest.mark.parametrize(("on_arrays", "expected"), [(True, 1), (False, 0)])
def test_loops_whose_turns_nobody_knows_are_told_where_they_compute_with_arrays(on_arrays: bool, expected: int) -> None:
    def program(x: Any, turns: Any) -> Any:
        if on_arrays:
            return jax.lax.fori_loop(0, turns, lambda _, product: product @ x, x)
        return x * jax.lax.while_loop(lambda step: step < turns, lambda step: 2 * step + 1, 0)

    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert cost_facts(_traced(program, *shapes))["unknown_loops"] == expected


@pytest.mark.parametrize(("interpret", "expected"), [(True, ["mine"]), (False, [])])
def test_a_kernel_that_is_traced_to_be_interpreted_is_named(interpret: bool, expected: list[str]) -> None:
    def kernel(source: Any, out: Any) -> None:
        out[...] = source[...]

    shape = jax.ShapeDtypeStruct((8, 128), np.float32)
    call: Any = pl.pallas_call(kernel, out_shape=shape, interpret=interpret, name="mine")

    def program(array: Any) -> Any:
        with scope("forward", "attention"):
            return call(array)

    traced = jax.jit(program).trace(shape)
    assert interpreted_kernels(traced) == expected, "no compiler will see it as a kernel"
    assert kernel_phases(traced) == ([] if interpret else ["forward/attention"]), "the others, by where they run"
