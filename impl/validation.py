"""Checks of a call's arrays and mesh, before anything runs: every mistake is a ValueError that names it.

Reads shapes, dtypes and mesh axes only, so it works on tracers. Tested in tests/impl/test_errors.py.
"""

import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from impl.config import AttentionConfig, ResolvedLayer

INPUT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_call(
    operands: dict[str, Any], mesh: Mesh, config: AttentionConfig, layer: ResolvedLayer, padding_segment_id: int | None
) -> None:
    """Checks `operands` (query, key, value, segment_ids, sinks by name; the last two may be None) against the mesh.

    `ValueError` on: something that is no array, wrong ranks, shapes that do not belong together, unequal or
    unsupported dtypes, head counts, batch or length that do not divide, a mesh without an axis that the layer needs.
    """
    check_mesh(mesh, config)
    for name, array in operands.items():
        if array is None and name in ("segment_ids", "sinks"):
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{name} must be an array, got {array!r}")
    _check_inputs(operands)
    _check_heads(operands, mesh, config, layer.strategy)
    _check_lengths(operands, mesh, config, layer.layout)
    _check_segment_ids(operands, padding_segment_id)
    _check_sinks(operands)


def check_mesh(mesh: Mesh, config: AttentionConfig) -> None:
    """Checks that `mesh` is a mesh of devices and has the axes that the sequence lies on."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if config.context_axis not in mesh.axis_names:
        raise ValueError(
            f"context_axis must be an axis of the mesh, got {config.context_axis!r}, the mesh has {mesh.axis_names}"
        )
    if config.context_parallel_strategy == "usp" and config.ulysses_axis not in mesh.axis_names:
        raise ValueError(
            f"ulysses_axis must be an axis of the mesh for 'usp', got {config.ulysses_axis!r}, "
            f"the mesh has {mesh.axis_names}"
        )


def _axis_size(mesh: Mesh, axis: str) -> int:
    return mesh.shape[axis] if axis in mesh.axis_names else 1


def _check_inputs(operands: dict[str, Any]) -> None:
    for name, axes in (
        ("query", "[batch, seq_len, num_query_heads, head_dim]"),
        ("key", "[batch, seq_len, num_kv_heads, head_dim]"),
        ("value", "[batch, seq_len, num_kv_heads, value_dim]"),
    ):
        shape, dtype = operands[name].shape, jnp.dtype(operands[name].dtype)
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"{name} must have shape {axes} without an empty axis, got {shape}")
        if dtype.name not in INPUT_DTYPES:
            raise ValueError(f"{name} must have dtype {', '.join(INPUT_DTYPES)}, got {dtype.name}")
        if dtype != operands["query"].dtype:
            raise ValueError(f"{name} must have the dtype of query, {operands['query'].dtype}, got {dtype.name}")
    query, key, value = operands["query"].shape, operands["key"].shape, operands["value"].shape
    if key[:2] != query[:2]:
        raise ValueError(f"key must have batch and seq_len of query, {query[:2]}, got {key[:2]}")
    if key[3] != query[3]:
        raise ValueError(f"key must have head_dim of query, {query[3]}, got {key[3]}")
    if value[:3] != key[:3]:
        raise ValueError(f"value must have batch, seq_len and num_kv_heads of key, {key[:3]}, got {value[:3]}")


def _check_heads(operands: dict[str, Any], mesh: Mesh, config: AttentionConfig, strategy: str) -> None:
    tensor_parallelism = _axis_size(mesh, config.tensor_axis)
    num_query_heads, num_kv_heads = operands["query"].shape[2], operands["key"].shape[2]
    if num_query_heads % num_kv_heads:
        raise ValueError(f"num_query_heads must be a multiple of num_kv_heads {num_kv_heads}, got {num_query_heads}")
    if num_query_heads % tensor_parallelism:
        raise ValueError(
            f"num_query_heads must be a multiple of the tensor axis's size {tensor_parallelism}, got {num_query_heads}"
        )
    exchanging = {config.ulysses_axis} if config.context_parallel_strategy == "usp" else set()
    exchanging |= {config.context_axis} if strategy == "ulysses" else set()
    shards = tensor_parallelism * math.prod(mesh.shape[axis] for axis in exchanging)
    if num_query_heads % shards:
        raise ValueError(
            f"num_query_heads must be a multiple of {shards}, the ranks that {' and '.join(sorted(exchanging))} "
            f"(strategy {strategy!r}) and the tensor axis spread them over, got {num_query_heads}"
        )


def _check_lengths(operands: dict[str, Any], mesh: Mesh, config: AttentionConfig, layout: str) -> None:
    batch, seq_len = operands["query"].shape[:2]
    data_parallelism = _axis_size(mesh, config.data_axis)
    if batch % data_parallelism:
        raise ValueError(f"batch must be a multiple of the data axis's size {data_parallelism}, got {batch}")
    context_parallelism = mesh.shape[config.context_axis]
    pieces = context_parallelism * (2 if layout == "dual_chunk_swap" else 1)
    if config.context_parallel_strategy == "usp":
        pieces = math.lcm(pieces, context_parallelism * mesh.shape[config.ulysses_axis])
    if seq_len % pieces:
        raise ValueError(
            f"seq_len must be a multiple of {pieces} ({layout} on {context_parallelism} ranks), got {seq_len}"
        )


def _check_segment_ids(operands: dict[str, Any], padding_segment_id: int | None) -> None:
    ids, query = operands["segment_ids"], operands["query"]
    if padding_segment_id is not None:
        if not isinstance(padding_segment_id, numbers.Integral) or isinstance(padding_segment_id, bool):
            raise ValueError(f"padding_segment_id must be None or an int, got {padding_segment_id!r}")
        if not -(2**31) <= padding_segment_id < 2**31:
            raise ValueError(f"padding_segment_id must fit int32, got {padding_segment_id}")
        if ids is None:
            raise ValueError(f"padding_segment_id needs segment_ids, got {padding_segment_id} without them")
    if ids is None:
        return
    if ids.shape != query.shape[:2]:
        raise ValueError(f"segment_ids must have shape [batch, seq_len] = {query.shape[:2]}, got {ids.shape}")
    if ids.dtype != jnp.int32:
        raise ValueError(f"segment_ids must have dtype int32, got {ids.dtype}")


def _check_sinks(operands: dict[str, Any]) -> None:
    sinks, query = operands["sinks"], operands["query"]
    if sinks is None:
        return
    if sinks.shape != query.shape[2:3]:
        raise ValueError(f"sinks must have shape [num_query_heads] = {query.shape[2:3]}, got {sinks.shape}")
    if sinks.dtype != jnp.float32 and not (sinks.dtype == jnp.float64 and query.dtype == jnp.float64):
        raise ValueError(f"sinks must have dtype float32 (or float64 beside float64 inputs), got {sinks.dtype}")
