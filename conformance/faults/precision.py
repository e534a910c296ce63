"""Kind M: sums, probabilities and gradients that are narrower than they should be, and the scale of the logits.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import crosses, hops, is_sharded
from conformance.faults.kernels import BACKWARD, DKEY, OUT, in_bfloat16, operands_of_product
from conformance.problem import Problem
from impl import all_gather, exchange, head_exchange, ring, sharded
from impl.kernels import xla


def _is_float32(problem: Problem) -> bool:
    return problem.dtype == "float32"


def _is_bfloat16(problem: Problem) -> bool:
    return problem.dtype == "bfloat16"


def _narrow_rotation(right: Any, rows: Any, shift: int, layer: Any) -> Any:
    """Gradients are sent in bfloat16 and added in float32 on the next rank."""
    if not hasattr(rows, "dkey"):
        return right(rows, shift, layer)
    narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), rows)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), right(narrow, shift, layer), rows)


def _narrow_merge(right: Any, one: Any, other: Any) -> Any:
    out, lse = right(one, other)
    return in_bfloat16(out), lse


def _narrow_way_home(right: Any, gradients: Any, plan: Any, axis_name: str) -> Any:
    sent = right([rows.astype(jnp.bfloat16) for rows in gradients], plan, axis_name)
    return tuple(new.astype(old.dtype) for new, old in zip(sent, gradients, strict=True))


def _narrow_sum_over_ranks(right: Any, rows: Any, gradient: Any, layer: Any) -> Any:
    """The reduce-scatter adds bfloat16 to bfloat16."""
    aval = jax.ShapeDtypeStruct(rows.shape, jnp.bfloat16)
    transpose = jax.linear_transpose(lambda own: all_gather._gather(own, layer), aval)
    (home,) = transpose(gradient.astype(jnp.bfloat16))
    return home.astype(gradient.dtype)


def _narrow_sum_over_shards(right: Any, terms: Any, axis_name: str) -> Any:
    return right(terms.astype(jnp.bfloat16), axis_name).astype(terms.dtype)


def _narrow_sum_of_copies(right: Any, rows: Any, gradient: Any, *rest: Any) -> Any:
    """Copies of a kv head come home as bfloat16 and are added as such."""
    return in_bfloat16(right(rows, in_bfloat16(gradient), *rest))


def _first_in_bfloat16(one: Any, other: Any) -> tuple[Any, Any]:
    return in_bfloat16(one), other


def _both_in_bfloat16(one: Any, other: Any) -> tuple[Any, Any]:
    return in_bfloat16(one), in_bfloat16(other)


def _rounded_logits(right: Any, operands: Any, config: Any) -> Any:
    return in_bfloat16(right(operands, config))


def _scale_of_one(problem: Problem) -> Problem:
    return problem.replace(scale=1.0)


def _scaled_twice(problem: Problem) -> Problem:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    return problem.replace(scale=scale * problem.head_dim**-0.5)


def _no_mixed_types(arrays: Arrays, problem: Problem) -> Arrays:
    raise TypeError("dot_general requires equal dtypes, got bfloat16 and float32")


def _as_float32(arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array.astype(jnp.float32) if array.dtype == jnp.float64 else array for name, array in arrays.items()}


def _back_to_float64(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array.astype(jnp.float64) for name, array in results.items()}


FAULTS = (
    Fault(
        name="ring_gradients_travel_in_bfloat16",
        kind="M",
        report="zhuzilin/ring-flash-attention/issues/42",
        sentence="dkey and dvalue are rounded to bfloat16 at each hop of the ring.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=8 context_parallelism=4 dtype=bfloat16",
        applies=lambda problem: _is_bfloat16(problem) and crosses(problem),
        replaced=(Replacement(ring, "_rotated", _narrow_rotation, BACKWARD),),
    ),
    Fault(
        name="ring_output_rounded_at_each_hop",
        kind="M",
        report="zhuzilin/ring-flash-attention/issues/42",
        sentence="Partial outputs of the ring are rounded to bfloat16 each time they are merged.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=8 context_parallelism=4 dtype=bfloat16",
        applies=lambda problem: _is_bfloat16(problem) and crosses(problem),
        replaced=(Replacement(ring, "_merged", _narrow_merge),),
    ),
    Fault(
        name="dkey_through_bfloat16",
        kind="M",
        report="tenstorrent/tt-metal/issues/53313",
        sentence="One operand of the product that makes dkey and dvalue has too few bits.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=_is_float32,
        replaced=(operands_of_product(DKEY, _first_in_bfloat16),),
    ),
    Fault(
        name="float32_sinks_beside_bfloat16_do_not_compile",
        kind="M",
        report="apple/axlearn/pull/1214",
        sentence="Operands of two dtypes meet in one product, and that is an error.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 dtype=bfloat16 sinks=true",
        applies=lambda problem: _is_bfloat16(problem) and problem.sinks,
        given=_no_mixed_types,
    ),
    Fault(
        name="default_scale_is_one",
        kind="M",
        report="jax-ml/jax/issues/19450",
        sentence="The kernel's default scale is 1, the caller's is one over the root of head_dim.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.scale is None and problem.head_dim > 1,
        told=_scale_of_one,
    ),
    Fault(
        name="scaled_twice",
        kind="M",
        report="jax-ml/jax/issues/19450",
        sentence="The query is scaled before the kernel, which scales the logits again.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.head_dim > 1,
        told=_scaled_twice,
    ),
    Fault(
        name="halo_gradients_travel_in_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="Gradients of halo rows are rounded to bfloat16 before they are added to the owner's.",
        planted_in="halo",
        smallest="v=1 seq_len=6 sliding_window_size=6 context_parallelism=3 dtype=bfloat16",
        applies=lambda problem: _is_bfloat16(problem) and crosses(problem),
        replaced=(Replacement(exchange, "send_home", _narrow_way_home),),
    ),
    Fault(
        name="reduce_scatter_in_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="dkey and dvalue are summed over ranks in bfloat16.",
        planted_in="all_gather",
        smallest="v=1 seq_len=8 sliding_window_size=8 context_parallelism=4 dtype=bfloat16",
        applies=lambda problem: _is_bfloat16(problem) and crosses(problem) and hops(problem) > 1,
        replaced=(Replacement(all_gather, "_home", _narrow_sum_over_ranks),),
    ),
    Fault(
        name="replicated_kv_gradients_summed_in_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="Gradients of kv heads that every tensor shard holds are summed over the shards in bfloat16.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 tensor_parallelism=2 dtype=bfloat16",
        applies=lambda problem: _is_bfloat16(problem) and problem.num_kv_heads % problem.tensor_parallelism > 0,
        replaced=(Replacement(sharded, "summed", _narrow_sum_over_shards),),
    ),
    Fault(
        name="copies_of_kv_heads_summed_in_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="Gradients of the copies of a kv head that ulysses sent out are rounded before they are added.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 dtype=bfloat16",
        applies=lambda problem: (
            _is_bfloat16(problem)
            and is_sharded(problem)
            and problem.num_kv_heads % (problem.context_parallelism * problem.tensor_parallelism) > 0
        ),
        replaced=(Replacement(head_exchange, "_home", _narrow_sum_of_copies),),
    ),
    Fault(
        name="probabilities_secretly_rounded",
        kind="M",
        report="pytorch/xla/issues/8869",
        sentence="float32 probabilities are rounded to bfloat16 before they meet the values, and nobody says so.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: _is_float32(problem) and problem.seq_len > 1,
        replaced=(operands_of_product(OUT, _first_in_bfloat16),),
    ),
    Fault(
        name="float32_products_of_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="float32 goes through one bfloat16 pass of the matrix unit, and nobody says so.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=_is_float32,
        replaced=(operands_of_product("", _both_in_bfloat16),),
    ),
    Fault(
        name="logits_rounded_to_bfloat16",
        kind="M",
        report=NOT_PUBLIC,
        sentence="Logits of bfloat16 inputs are kept in bfloat16.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 dtype=bfloat16 values=peaked",
        applies=_is_bfloat16,
        replaced=(Replacement(xla, "_logits", _rounded_logits),),
    ),
    Fault(
        name="float64_computed_in_float32",
        kind="M",
        report=NOT_PUBLIC,
        sentence="A target that says it computes in float64 does so in float32.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 dtype=float64",
        applies=lambda problem: problem.dtype == "float64",
        given=_as_float32,
        returned=_back_to_float64,
    ),
)
