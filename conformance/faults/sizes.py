"""Kind L: lengths and dimensions that are no multiple of something.

May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from conformance.faults.fault import Arrays, Fault
from conformance.faults.geometry import always
from conformance.faults.kernels import BACKWARD, LOGITS, operands_of_product, sees
from conformance.problem import Problem

_BLOCK = 8
_LANES = 128


def _has_partial_block(problem: Problem) -> bool:
    return problem.seq_len > _BLOCK and problem.seq_len % _BLOCK > 0


def _whole_blocks_of_keys(mask: Any, operands: Any, config: Any) -> Any:
    rows = operands.key.shape[1]
    return mask & (jnp.arange(rows) < rows // _BLOCK * _BLOCK) if rows > _BLOCK else mask


def _garbage_in_the_last_block(mask: Any, operands: Any, config: Any) -> Any:
    """Out-of-range keys of the last block are its first keys again; here: seen although the window has left them."""
    rows = operands.key.shape[1]
    if rows <= _BLOCK or rows % _BLOCK == 0:
        return mask
    start = rows // _BLOCK * _BLOCK
    index = jnp.arange(rows)
    return mask | (operands.query_positions[:, None] >= start) & (index == start)[None, :]


def _scale_of_padded_head_dim(problem: Problem) -> Problem:
    padded = -(-problem.head_dim // _BLOCK) * _BLOCK
    return problem.replace(scale=padded**-0.5)


def _scale_of_value_dim(problem: Problem) -> Problem:
    return problem.replace(scale=problem.value_dim**-0.5)


def _refuses(arrays: Arrays, problem: Problem) -> Arrays:
    raise NotImplementedError(f"seq_len {problem.seq_len} must be divisible by block_kv {_BLOCK}")


def _refuses_head_dim(arrays: Arrays, problem: Problem) -> Arrays:
    raise NotImplementedError(f"head_dim {problem.head_dim} must be a multiple of {_BLOCK}")


def _whole_lanes(query: Any, key: Any) -> tuple[Any, Any]:
    """What is beyond the last whole run of 128 features, if there is one, is not multiplied."""
    dims = query.shape[-1]
    whole = dims if dims < _LANES else dims // _LANES * _LANES
    return query[..., :whole], key[..., :whole]


FAULTS = (
    Fault(
        name="last_partial_block_of_keys_dropped",
        kind="L",
        report="jax-ml/jax/issues/23819",
        sentence="Keys beyond the last whole block are not read.",
        planted_in="all_gather",
        smallest="v=1 seq_len=10 sliding_window_size=2",
        applies=_has_partial_block,
        replaced=(sees(_whole_blocks_of_keys),),
    ),
    Fault(
        name="first_key_of_the_partial_block_always_seen",
        kind="L",
        report="jax-ml/jax/issues/23819",
        sentence="The first key of the last, partial block is seen by every query of that block.",
        planted_in="ulysses",
        smallest="v=1 seq_len=22 sliding_window_size=2",
        applies=lambda problem: _has_partial_block(problem) and problem.window[0] is not None,
        replaced=(sees(_garbage_in_the_last_block),),
    ),
    Fault(
        name="backward_drops_the_partial_block",
        kind="L",
        report="jax-ml/jax/pull/25647",
        sentence="The backward counts blocks by another size than the forward, and the last one is missing.",
        planted_in="all_gather",
        smallest="v=1 seq_len=10 sliding_window_size=2",
        applies=_has_partial_block,
        replaced=(sees(_whole_blocks_of_keys, BACKWARD),),
    ),
    Fault(
        name="scale_of_the_padded_head_dim",
        kind="L",
        report="jax-ml/jax/issues/26433",
        sentence="head_dim is padded to whole lanes, and the default scale is that of the padded one.",
        planted_in="halo",
        smallest="v=1 seq_len=4 head_dim=5 sliding_window_size=2",
        applies=lambda problem: problem.head_dim % _BLOCK > 0 and problem.scale is None,
        told=_scale_of_padded_head_dim,
    ),
    Fault(
        name="scale_of_value_dim",
        kind="L",
        report="jax-ml/jax/issues/26433",
        sentence="The default scale follows value_dim.",
        planted_in="ring",
        smallest="v=1 seq_len=4 head_dim=16 value_dim=8 sliding_window_size=2",
        applies=lambda problem: problem.head_dim != problem.value_dim and problem.scale is None,
        told=_scale_of_value_dim,
    ),
    Fault(
        name="lengths_off_the_block_refused",
        kind="L",
        report="pytorch/xla/pull/8671",
        sentence="A length that is no multiple of the block is an error.",
        planted_in="all_gather",
        smallest="v=1 seq_len=10 sliding_window_size=2",
        applies=_has_partial_block,
        given=_refuses,
    ),
    Fault(
        name="small_head_dim_refused",
        kind="L",
        report="jax-ml/jax/issues/26433",
        sentence="A head_dim that is no multiple of the lanes is an error.",
        planted_in="halo",
        smallest="v=1 seq_len=4 head_dim=5 sliding_window_size=2",
        applies=lambda problem: problem.head_dim % _BLOCK > 0,
        given=_refuses_head_dim,
    ),
    Fault(
        name="features_beyond_whole_lanes_dropped",
        kind="L",
        report="jax-ml/jax/issues/26433",
        sentence="A head_dim above 128 is cut down to whole lanes: of 192 features 128 are multiplied.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 head_dim=192 value_dim=128 sliding_window_size=2",
        applies=always,
        replaced=(operands_of_product(LOGITS, _whole_lanes),),
    ),
)
