"""Which blocks splash attention's kernels visit, computed on the device from positions: no mask is built on the host.

So tracing time does not grow with the sequence, and a rank's offset may be traced.
Tested in tests/impl/test_kernels.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Array, Bool, Int32

from impl.kernels.interface import KernelConfig, KernelOperands


@dataclass(frozen=True)
class Window:
    """The mask function that splash evaluates in the kernel, on indices into the key run."""

    left: int | None
    right: int | None

    def __call__(self, query: Array, key: Array) -> Bool[Array, "..."]:
        visible = jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), jnp.bool_)
        if self.left is not None:
            visible &= key >= query - self.left
        if self.right is not None:
            visible &= key <= query + self.right
        return visible


@dataclass(frozen=True)
class Band:
    """The blocks to visit: for each block of queries its blocks of keys, and the other way round."""

    by_query: mask_info.MaskInfo
    by_key: mask_info.MaskInfo


def band_of(operands: KernelOperands, config: KernelConfig, query_block: int, key_block: int) -> Band:
    """The visits of a call whose keys are a contiguous run and whose query positions ascend.

    With a `key_offset` both runs are contiguous, and the grid is as narrow as the band; otherwise it spans all blocks,
    and those that nobody sees are skipped without being fetched.
    """
    if config.key_offset is None:
        first_key = operands.key_positions[0]
    else:
        first_key = operands.query_positions[0] + config.key_offset
    query_rows, key_rows = operands.query.shape[1], operands.key.shape[1]
    # Queries as indices into the key run; rows that only fill a block repeat the last.
    filling = whole(query_rows, query_block) - query_rows
    queries = jnp.pad(operands.query_positions - first_key, (0, filling), mode="edge")
    by_block = queries.reshape(-1, query_block)
    visits = _block_visits(by_block.min(axis=1), by_block.max(axis=1), config, key_block, whole(key_rows, key_block))
    return Band(
        by_query=_visits_by_row(visits, _width(config, query_block, key_block), queries),
        by_key=_transposed(_visits_by_row(visits.T, _width(config, key_block, query_block), queries)),
    )


def whole(rows: int, block: int) -> int:
    """`rows`, rounded up to whole blocks."""
    return -(-rows // block) * block


def _block_visits(
    lowest: Int32[Array, " query_blocks"],
    highest: Int32[Array, " query_blocks"],
    config: KernelConfig,
    key_block: int,
    key_rows: int,
) -> Bool[Array, "query_blocks key_blocks"]:
    left, right = config.window
    start = jnp.arange(key_rows // key_block, dtype=jnp.int32)[None] * key_block
    visits = jnp.ones((lowest.shape[0], start.shape[1]), jnp.bool_)
    if left is not None:
        visits &= start + key_block > lowest[:, None] - left
    if right is not None:
        visits &= start <= highest[:, None] + right
    return visits


def _width(config: KernelConfig, row_block: int, column_block: int) -> int | None:
    """The most blocks of `column_block` that one block of `row_block` meets, where that is known while tracing."""
    left, right = config.window
    if config.key_offset is None or left is None or right is None:
        return None
    return (row_block - 1 + left + right) // column_block + 2


def _visits_by_row(visits: Bool[Array, "rows columns"], width: int | None, queries: Array) -> mask_info.MaskInfo:
    """Splash's description of visits: for each row the columns to fetch, in order, and whether to compute on them.

    A step that computes nothing repeats a column that is fetched anyway. The tables live in scalar memory, which is
    small: hence their narrow dtypes.
    """
    rows, columns = visits.shape
    width = columns if width is None else min(width, columns)
    step = jnp.arange(width, dtype=jnp.int32)[None]
    first = jnp.argmax(visits, axis=1).astype(jnp.int32)[:, None]  # 0 for a row that meets nobody
    count = jnp.sum(visits, axis=1, dtype=jnp.int32)[:, None]
    fetch = jnp.clip(first + jnp.minimum(step, jnp.maximum(count - 1, 0)), 0, columns - 1)
    compute = jnp.broadcast_to(step < count, (rows, width))
    narrow = next(dtype for dtype in (jnp.int8, jnp.int16, jnp.int32) if columns - 1 <= jnp.iinfo(dtype).max)
    return mask_info.MaskInfo(
        data_next=fetch.astype(narrow)[None],
        mask_next=None,
        block_mask=compute.astype(jnp.int8)[None],
        partial_mask_blocks=None,
        q_sequence=queries,  # pyright: ignore[reportArgumentType] — declared an ndarray, used as an operand
    )


def _transposed(visits: mask_info.MaskInfo) -> mask_info.MaskInfo:
    """The kernel that walks over keys wants its tables with steps first."""
    assert visits.data_next is not None, "these visits are always given as tables"
    assert visits.block_mask is not None, "these visits are always given as tables"
    return visits._replace(
        data_next=visits.data_next.swapaxes(1, 2),
        block_mask=visits.block_mask.swapaxes(1, 2),
    )
