"""Walks a call's queries in blocks, each beside only the keys that it may see: memory and work follow the window.

For kernels in plain jax.numpy, which would otherwise form logits for every pair of rows.
Tested in tests/impl/test_kernels.py.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from impl.kernels.interface import KernelConfig, KernelOperands, LocalGradients, RowCotangents

BLOCK = 256
"""Queries of a block. Calls with fewer run in one piece."""

Forward = Callable[[KernelOperands, KernelConfig], tuple[Array, Array]]
Backward = Callable[[KernelOperands, RowCotangents, KernelConfig], LocalGradients]


def forward_by_blocks(whole: Forward, operands: KernelOperands, config: KernelConfig) -> tuple[Array, Array]:
    """`whole(operands, config)`, block of queries by block of queries."""
    query_rows = operands.query.shape[1]
    if query_rows <= BLOCK:
        return whole(operands, config)

    def block_forward(block: tuple[KernelOperands, Array]) -> tuple[Array, Array]:
        queries, index = block
        return whole(_beside(queries, operands, _first_key(index, operands, config), config), config)

    out, lse = lax.map(block_forward, (_query_blocks(operands), _indices(query_rows)))
    return _joined(out, query_rows), _joined(lse, query_rows)


def backward_by_blocks(
    whole: Backward, operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig
) -> LocalGradients:
    """`whole(operands, cotangents, config)`, block by block; gradients of keys are summed in the accumulation dtype."""
    query_rows = operands.query.shape[1]
    if query_rows <= BLOCK:
        return whole(operands, cotangents, config)

    def step(totals: tuple[Array, Array, Any], block: Any) -> tuple[tuple[Array, Array, Any], Array]:
        dkey, dvalue, dsinks = totals
        queries, rows, index = block
        first = _first_key(index, operands, config)
        gradients = whole(_beside(queries, operands, first, config), rows, config)
        totals = (
            _added(dkey, gradients.dkey, first),
            _added(dvalue, gradients.dvalue, first),
            None if dsinks is None else dsinks + gradients.dsinks,
        )
        return totals, gradients.dquery

    dtype = cotangents.lse.dtype
    nothing = (
        jnp.zeros(operands.key.shape, dtype),
        jnp.zeros(operands.value.shape, dtype),
        None if operands.sinks is None else jnp.zeros(operands.sinks.shape, dtype),
    )
    # Rows padded on have no keys: their lse is −inf as that of any such row.
    rows = RowCotangents(_blocked(cotangents.dout), _blocked(cotangents.lse, fill=-jnp.inf), _blocked(cotangents.delta))
    (dkey, dvalue, dsinks), dquery = lax.scan(step, nothing, (_query_blocks(operands), rows, _indices(query_rows)))
    return LocalGradients(_joined(dquery, query_rows), dkey, dvalue, dsinks)


def _query_blocks(operands: KernelOperands) -> KernelOperands:
    """The query side of the operands as [blocks, …, BLOCK, …]; rows padded on have position −1."""
    ids = operands.query_segment_ids
    positions = operands.query_positions
    padding = -positions.shape[0] % BLOCK
    return KernelOperands(
        query=_blocked(operands.query),
        key=None,  # pyright: ignore[reportArgumentType] — `_beside` fills in the keys
        value=None,  # pyright: ignore[reportArgumentType] — likewise
        query_positions=jnp.pad(positions, (0, padding), constant_values=-1).reshape(-1, BLOCK),
        key_positions=None,  # pyright: ignore[reportArgumentType] — likewise
        query_segment_ids=None if ids is None else _blocked(ids),
    )


def _keys_seen(operands: KernelOperands, config: KernelConfig) -> int:
    """How many consecutive keys hold all that a block may see: fewer than all where the band is known while tracing."""
    left, right = config.window
    key_rows = operands.key.shape[1]
    if config.key_offset is None or left is None or right is None:
        return key_rows
    return min(key_rows, BLOCK + left + right)


def _first_key(index: Int32[Array, ""], operands: KernelOperands, config: KernelConfig) -> Int32[Array, ""]:
    seen, key_rows = _keys_seen(operands, config), operands.key.shape[1]
    if seen == key_rows or config.key_offset is None or config.window[0] is None:
        return jnp.int32(0)
    # At either end the run is moved inwards and holds more than is seen; the mask decides.
    return jnp.clip(index * BLOCK - config.window[0] - config.key_offset, 0, key_rows - seen)


def _beside(
    queries: KernelOperands, operands: KernelOperands, first: Int32[Array, ""], config: KernelConfig
) -> KernelOperands:
    seen = _keys_seen(operands, config)
    ids = operands.key_segment_ids
    return queries._replace(
        key=lax.dynamic_slice_in_dim(operands.key, first, seen, axis=1),
        value=lax.dynamic_slice_in_dim(operands.value, first, seen, axis=1),
        key_positions=lax.dynamic_slice_in_dim(operands.key_positions, first, seen),
        key_segment_ids=None if ids is None else lax.dynamic_slice_in_dim(ids, first, seen, axis=1),
        sinks=operands.sinks,
    )


def _added(total: Array, part: Array, first: Int32[Array, ""]) -> Array:
    there = lax.dynamic_slice_in_dim(total, first, part.shape[1], axis=1)
    return lax.dynamic_update_slice_in_dim(total, there + part, first, axis=1)


def _indices(query_rows: int) -> Int32[Array, " blocks"]:
    return jnp.arange(-(-query_rows // BLOCK), dtype=jnp.int32)


def _blocked(rows: Array, fill: float = 0) -> Array:
    """[batch, rows, …] → [blocks, batch, BLOCK, …]."""
    padding = [(0, 0)] * rows.ndim
    padding[1] = (0, -rows.shape[1] % BLOCK)
    padded = jnp.pad(rows, padding, constant_values=fill)
    return jnp.moveaxis(padded.reshape(rows.shape[0], -1, BLOCK, *rows.shape[2:]), 1, 0)


def _joined(blocks: Array, rows: int) -> Array:
    """[blocks, batch, BLOCK, …] → [batch, rows, …]."""
    moved = jnp.moveaxis(blocks, 0, 1)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])[:, :rows]
