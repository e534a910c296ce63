"""Kind K: which key head a query head reads, and where the gradients of shared key heads are summed.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.geometry import is_sharded
from conformance.faults.kernels import BACKWARD, DKEY
from conformance.problem import Problem
from impl import heads, local_attention, sharded
from impl.kernels import xla


def _has_groups(problem: Problem) -> bool:
    return problem.num_query_heads > problem.num_kv_heads


def _has_groups_in_a_shard(problem: Problem) -> bool:
    return problem.num_query_heads > problem.num_kv_heads > problem.tensor_parallelism and (
        problem.num_kv_heads % problem.tensor_parallelism == 0
    )


def _interleaved(num_query_heads: int, num_kv_heads: int) -> Any:
    """Query heads in the order in which h reads key head h mod num_kv_heads."""
    return jnp.arange(num_query_heads).reshape(-1, num_kv_heads).T.reshape(-1)


def _forward_of_interleaved_heads(right: Any, operands: Any, *rest: Any, **named: Any) -> Any:
    order = _interleaved(operands.query.shape[2], operands.key.shape[2])
    sinks = None if operands.sinks is None else operands.sinks[order]
    out, lse = right(operands._replace(query=operands.query[:, :, order], sinks=sinks), *rest, **named)
    back = jnp.argsort(order)
    return out[:, :, back], lse[:, :, back]


def _backward_of_interleaved_heads(right: Any, operands: Any, cotangents: Any, *rest: Any, **named: Any) -> Any:
    order = _interleaved(operands.query.shape[2], operands.key.shape[2])
    sinks = None if operands.sinks is None else operands.sinks[order]
    rows = type(cotangents)(*(array[:, :, order] for array in cotangents))
    gradients = right(operands._replace(query=operands.query[:, :, order], sinks=sinks), rows, *rest, **named)
    back = jnp.argsort(order)
    dsinks = None if gradients.dsinks is None else gradients.dsinks[back]
    return gradients._replace(dquery=gradients.dquery[:, :, back], dsinks=dsinks)


def _first_kv_heads_for_all(right: Any, rows: Any, plan: Any, shard: Any) -> Any:
    return right(rows, plan, 0 * shard)


def _averaged(right: Any, gradient: Any, heads_held: Any, layer: Any) -> Any:
    total = right(gradient, heads_held, layer)
    is_summed = not layer.heads.kv_sharded and layer.tensor_axis is not None
    return (total / lax.axis_size(layer.tensor_axis)).astype(total.dtype) if is_summed else total


def _first_query_head_alone(right: Any, pattern: str, one: Any, other: Any) -> Any:
    """dkey and dvalue of a group: [batch, kv_head, group, query, key] and [batch, query, kv_head, group, dim]."""
    if pattern != DKEY:
        return right(pattern, one, other)
    return right(pattern, one[:, :, :1], other[:, :, :, :1])


FAULTS = (
    Fault(
        name="kv_heads_interleaved",
        kind="K",
        report="vllm-project/vllm-omni/pull/5716",
        sentence="Query head h reads key head h mod num_kv_heads.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 num_query_heads=4 num_kv_heads=2 sliding_window_size=2",
        applies=_has_groups_in_a_shard,
        replaced=(
            Replacement(local_attention, "forward", _forward_of_interleaved_heads),
            Replacement(local_attention, "backward", _backward_of_interleaved_heads),
        ),
    ),
    Fault(
        name="every_rank_gets_the_first_kv_head",
        kind="K",
        report="hiyouga/LlamaFactory/pull/10794",
        sentence="With fewer kv heads than ranks every rank is given the same ones.",
        planted_in="ulysses",
        smallest="v=1 seq_len=8 num_query_heads=4 num_kv_heads=2 sliding_window_size=2 context_parallelism=4",
        applies=lambda problem: (
            is_sharded(problem)
            and problem.num_kv_heads > 1
            and problem.num_kv_heads % (problem.context_parallelism * problem.tensor_parallelism) > 0
        ),
        replaced=(Replacement(heads, "select", _first_kv_heads_for_all),),
    ),
    Fault(
        name="replicated_kv_gradients_averaged",
        kind="K",
        report="hiyouga/LlamaFactory/pull/10794",
        sentence="Gradients of kv heads that every tensor shard holds are averaged over the shards, not summed.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 tensor_parallelism=2",
        applies=lambda problem: problem.num_kv_heads % problem.tensor_parallelism > 0,
        replaced=(Replacement(sharded, "_whole_kv_heads", _averaged),),
    ),
    Fault(
        name="replicated_kv_gradients_not_summed",
        kind="K",
        report=NOT_PUBLIC,
        sentence="Gradients of kv heads that every tensor shard holds stay each shard's own: the copies differ.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 tensor_parallelism=2",
        applies=lambda problem: problem.num_kv_heads % problem.tensor_parallelism > 0,
        replaced=(Replacement(sharded, "summed", lambda right, terms, axis_name: terms),),
    ),
    Fault(
        name="group_gradient_of_its_first_query_head",
        kind="K",
        report=NOT_PUBLIC,
        sentence="dkey and dvalue of a kv head hold what the first query head of its group gives, and no more.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=_has_groups,
        replaced=(Replacement(xla, "_einsum", _first_query_head_alone, BACKWARD),),
    ),
    Fault(
        name="heads_of_another_shard",
        kind="K",
        report=NOT_PUBLIC,
        sentence="Where group borders cut through tensor shards each shard takes the first shard's heads.",
        planted_in="ring",
        smallest="v=1 seq_len=4 num_query_heads=6 num_kv_heads=3 sliding_window_size=2 tensor_parallelism=2",
        applies=lambda problem: problem.num_kv_heads > 1 and problem.num_kv_heads % problem.tensor_parallelism > 0,
        replaced=(Replacement(heads, "_first_kv_head", lambda right, plan, shard: right(plan, 0 * shard)),),
    ),
)
