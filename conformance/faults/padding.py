"""Kind H: positions that are no tokens see, are seen, or leave something where zeros belong.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always
from conformance.faults.kernels import BACKWARD, distance_of, sees
from conformance.problem import Problem
from impl import local_attention
from impl.kernels import xla
from impl.kernels.interface import KernelConfig, KernelOperands


def _is_padded(problem: Problem) -> bool:
    return problem.padding is not None


def _in_window(operands: KernelOperands, config: KernelConfig) -> Any:
    distance, (left, right) = distance_of(operands), config.window
    inside = operands.key_positions[None, :] >= 0
    inside = inside if left is None else inside & (distance <= left)
    return inside if right is None else inside & (distance >= -right)


def _padding_keys_seen(mask: Any, operands: KernelOperands, config: KernelConfig) -> Any:
    if operands.query_segment_ids is None or operands.key_segment_ids is None or config.padding_segment_id is None:
        return mask
    is_token = operands.query_segment_ids[:, :, None] != config.padding_segment_id
    is_padding = operands.key_segment_ids[:, None, :] == config.padding_segment_id
    return mask | (_in_window(operands, config)[None] & is_token & is_padding)


def _no_padding_id(problem: Problem) -> Problem:
    return problem.replace(padding=None)


def _zero_times_infinity(right: Any, operands: Any, cotangents: Any, *rest: Any, **named: Any) -> Any:
    """Rows without keys have lse -inf; what is multiplied by their zero probability is not finite."""
    gradients = right(operands, cotangents, *rest, **named)
    is_empty = jnp.any(jnp.isneginf(cotangents.lse), axis=(1, 2))[:, None, None, None]
    return gradients._replace(
        dkey=jnp.where(is_empty, jnp.nan, gradients.dkey), dvalue=jnp.where(is_empty, jnp.nan, gradients.dvalue)
    )


def _padding_seen_in_backward(right: Any, operands: Any, config: Any) -> Any:
    return right(operands, dataclasses.replace(config, padding_segment_id=None))


def _is_padding(arrays: Arrays, problem: Problem) -> Any:
    return (arrays["segment_ids"] == problem.padding)[:, :, None, None]


def _workspace_left_in_out(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    out = results["out"]
    return {**results, "out": jnp.where(_is_padding(arrays, problem), jnp.ones_like(out), out)}


def _workspace_left_in_dquery(gradients: Arrays, cotangents: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    dquery = gradients["query"]
    return {**gradients, "query": jnp.where(_is_padding(arrays, problem), jnp.ones_like(dquery), dquery)}


def _rounded_up(results: Arrays, arrays: Arrays, problem: Problem) -> Arrays:
    out = results["out"]
    return {**results, "out": jnp.pad(out, ((0, 0), (0, -out.shape[1] % 8), (0, 0), (0, 0)))}


def _id_zero_is_padding(mask: Any, operands: KernelOperands, config: KernelConfig) -> Any:
    ids = operands.query_segment_ids
    return mask if ids is None else mask & (ids != 0)[:, :, None]


def _negative_ids_are_padding(mask: Any, operands: KernelOperands, config: KernelConfig) -> Any:
    ids = operands.query_segment_ids
    return mask if ids is None else mask & (ids >= 0)[:, :, None]


def _ids_dropped(problem: Problem) -> Problem:
    return problem.replace(segments=False, padding=None)


def _without_ids(arrays: Arrays, problem: Problem) -> Arrays:
    return {name: array for name, array in arrays.items() if name != "segment_ids"}


def _zeros_are_padding(mask: Any, operands: Any, config: Any) -> Any:
    return mask & jnp.any(operands.key != 0, axis=(2, 3))[:, None, :]


FAULTS = (
    Fault(
        name="tokens_see_padding",
        kind="H",
        report="AI-Hypercomputer/maxtext/pull/4016",
        sentence="Tokens attend to padding keys inside their window.",
        planted_in="halo",
        smallest="v=1 seq_len=4 window=1,1 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        replaced=(sees(_padding_keys_seen),),
    ),
    Fault(
        name="padding_sees_padding",
        kind="H",
        report="AI-Hypercomputer/maxtext/pull/4908",
        sentence="Padding is a document like any other: its rows see each other.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        told=_no_padding_id,
    ),
    Fault(
        name="padding_makes_key_gradients_infinite",
        kind="H",
        report="AI-Hypercomputer/maxtext/pull/4924",
        sentence="Rows of padded queries have no key, and zero times infinity reaches dkey and dvalue.",
        planted_in="ulysses",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        replaced=(Replacement(local_attention, "backward", _zero_times_infinity),),
    ),
    Fault(
        name="padding_seen_in_the_backward",
        kind="H",
        report="hao-ai-lab/FastVideo/pull/925",
        sentence="The backward's mask takes padding for tokens.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        replaced=(Replacement(xla, "visible_keys", _padding_seen_in_backward, BACKWARD),),
    ),
    Fault(
        name="out_of_padding_not_zeroed",
        kind="H",
        report="NVIDIA/TransformerEngine/pull/1012",
        sentence="Rows of padding hold what the workspace held.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        returned=_workspace_left_in_out,
    ),
    Fault(
        name="dquery_of_padding_not_zeroed",
        kind="H",
        report="NVIDIA/TransformerEngine/pull/1012",
        sentence="Rows of padding in dquery hold what the workspace held.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 padding=0 documents=3@1+1@0",
        applies=_is_padded,
        gradients=_workspace_left_in_dquery,
    ),
    Fault(
        name="output_longer_than_the_input",
        kind="H",
        report="xdit-project/xDiT/issues/471",
        sentence="The length is rounded up, and the result is not cut again.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.seq_len % 8 > 0 and problem.axis_types == "auto",
        returned=_rounded_up,
    ),
    Fault(
        name="id_zero_taken_for_padding",
        kind="H",
        report=NOT_PUBLIC,
        sentence="The segment id 0 means padding, whatever the padding id is.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=2@0+2@1",
        applies=lambda problem: problem.segments,
        replaced=(sees(_id_zero_is_padding),),
    ),
    Fault(
        name="negative_ids_taken_for_padding",
        kind="H",
        report="AI-Hypercomputer/maxtext/pull/4908",
        sentence="Negative segment ids mean padding, whatever the padding id is.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=2@-3+2@1",
        applies=lambda problem: problem.segments,
        replaced=(sees(_negative_ids_are_padding),),
    ),
    Fault(
        name="ids_dropped_for_long_sequences",
        kind="H",
        report="AI-Hypercomputer/maxtext/pull/4929",
        sentence="Segment ids do not fit for long sequences and are left out there, the padding with them.",
        planted_in="all_gather",
        smallest="v=1 seq_len=128 sliding_window_size=2 documents=60+68",
        applies=lambda problem: problem.segments and problem.seq_len >= 128,
        told=_ids_dropped,
        given=_without_ids,
    ),
    Fault(
        name="keys_of_zeros_are_padding",
        kind="H",
        report=NOT_PUBLIC,
        sentence="Padding is known by its rows: a token whose key is zero in every head is hidden.",
        planted_in="all_gather",
        smallest="v=1 seq_len=16 sliding_window_size=5",
        applies=always,
        replaced=(sees(_zeros_are_padding),),
    ),
)
