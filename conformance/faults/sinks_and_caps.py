"""Kind J: attention sinks and the soft cap of the logits.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import is_sharded
from conformance.problem import Problem
from impl import ring, sharded
from impl.kernels import xla


def _has_sinks(problem: Problem) -> bool:
    return problem.sinks


def _has_cap(problem: Problem) -> bool:
    return problem.attn_logits_soft_cap is not None


def _without_sinks(arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "sinks"}


def _told_no_sinks(problem: Problem) -> Problem:
    return problem.replace(sinks=False)


def _factor_forgotten(right: Any, dlogits: Any, logits: Any, config: Any) -> Any:
    return dlogits


def _no_backward(right: Any, dlogits: Any, logits: Any, config: Any) -> Any:
    if config.attn_logits_soft_cap is not None:
        raise NotImplementedError("the backward of attn_logits_soft_cap")
    return right(dlogits, logits, config)


def _factor_twice(right: Any, dlogits: Any, logits: Any, config: Any) -> Any:
    return right(right(dlogits, logits, config), logits, config)


def _capped_before_scaling(right: Any, operands: Any, config: Any) -> Any:
    return right(operands, dataclasses.replace(config, scale=1.0)) * config.scale


def _told_no_cap(problem: Problem) -> Problem:
    return problem.replace(attn_logits_soft_cap=None)


def _only_this_data_shard(right: Any, gradients: Any, operands: Any, layer: Any) -> Any:
    summed = right(gradients, operands, layer)
    if gradients.dsinks is None:
        return summed
    axes = tuple(axis for axis in (layer.context_axis, layer.ulysses_axis) if axis is not None)
    return summed._replace(dsinks=lax.psum(gradients.dsinks, axes).astype(operands.sinks.dtype))


def _sinks_beside_every_chunk(right: Any, operands: Any, keys: Any, layer: Any, distance: Any) -> Any:
    return [call._replace(sinks=operands.sinks) for call in right(operands, keys, layer, distance)]


def _sinks_scaled(arrays: Arrays, problem: Problem) -> Arrays:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    return {**arrays, "sinks": arrays["sinks"] * scale}


def _minus_forgotten(right: Any, sinks: Any, lse: Any, delta: Any) -> Any:
    gradient = right(sinks, lse, delta)
    return None if gradient is None else -gradient


FAULTS = (
    Fault(
        name="sinks_dropped",
        kind="J",
        report="NVIDIA/TransformerEngine/pull/3551",
        sentence="The kind of softmax is not passed down: no sink in the output, a sink gradient of exactly 0.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=_has_sinks,
        given=_without_sinks,
        told=_told_no_sinks,
    ),
    Fault(
        name="sinks_swallowed_when_sharded",
        kind="J",
        report="PrimeIntellect-ai/prime-rl/pull/3397",
        sentence="A catch-all of keywords swallows the sinks, under context parallelism only.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=lambda problem: problem.sinks and is_sharded(problem),
        given=_without_sinks,
        told=_told_no_sinks,
    ),
    Fault(
        name="soft_cap_factor_forgotten",
        kind="J",
        report="openxla/tokamax/pull/1121",
        sentence="The backward lacks the derivative of the soft cap.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 attn_logits_soft_cap=5.0",
        applies=_has_cap,
        replaced=(Replacement(xla, "_through_soft_cap", _factor_forgotten),),
    ),
    Fault(
        name="soft_cap_has_no_backward",
        kind="J",
        report="openxla/tokamax/pull/1121",
        sentence="The soft cap's backward is not there.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 attn_logits_soft_cap=5.0",
        applies=_has_cap,
        replaced=(Replacement(xla, "_through_soft_cap", _no_backward),),
    ),
    Fault(
        name="soft_cap_factor_applied_twice",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The derivative of the soft cap is multiplied in twice.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 attn_logits_soft_cap=5.0",
        applies=_has_cap,
        replaced=(Replacement(xla, "_through_soft_cap", _factor_twice),),
    ),
    Fault(
        name="soft_cap_before_scale",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The cap is applied to q·k, and the scale afterwards.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 attn_logits_soft_cap=5.0",
        applies=lambda problem: _has_cap(problem) and problem.scale != 1,
        replaced=(Replacement(xla, "_logits", _capped_before_scaling),),
    ),
    Fault(
        name="soft_cap_dropped",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The strategy for context parallelism does not pass the soft cap on.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 attn_logits_soft_cap=5.0",
        applies=_has_cap,
        told=_told_no_cap,
    ),
    Fault(
        name="sink_gradient_of_one_data_shard",
        kind="J",
        report="NVIDIA/Megatron-LM/issues/7452",
        sentence="Other data shards' part of the sink gradient is missing.",
        planted_in="halo",
        smallest="v=1 batch=2 seq_len=4 sliding_window_size=2 data_parallelism=2 sinks=true",
        applies=lambda problem: problem.sinks and problem.data_parallelism > 1,
        replaced=(Replacement(sharded, "_summed_over_mesh", _only_this_data_shard),),
    ),
    Fault(
        name="sink_counted_for_every_chunk_of_keys",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The sink is added with each chunk of a rank's own keys, not once.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap sinks=true",
        applies=lambda problem: problem.sinks and problem.layout == "dual_chunk_swap",
        replaced=(Replacement(ring, "_kernel_calls", _sinks_beside_every_chunk),),
    ),
    Fault(
        name="sinks_scaled_like_logits",
        kind="J",
        report=NOT_PUBLIC,
        sentence="Sinks are multiplied by the logits' scale.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=lambda problem: problem.sinks and problem.scale != 1,
        given=_sinks_scaled,
    ),
    Fault(
        name="sink_gradient_has_the_wrong_sign",
        kind="J",
        report=NOT_PUBLIC,
        sentence="The gradient of the sinks lacks its minus.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 sinks=true",
        applies=_has_sinks,
        replaced=(Replacement(xla, "sink_gradient", _minus_forgotten),),
    ),
)
