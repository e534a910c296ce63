"""How a case is cut into tiles (some queries, and the run of keys in their window), and put together again.

The walk behind banded.py and budget.py: time and memory grow with seq * window. NumPy only.
Tested in tests/oracle/test_tiles.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from oracle.arguments import Arguments, Window
from oracle.dense import Block, block_of

# Queries of a tile. A tile reads `TILE_ROWS + left + right` keys: fewer rows waste time on calls, more waste it on keys
# that are hidden from most of them (measured at windows of 1 to 4096: within 10 % of the best from 64 to 256).
TILE_ROWS = 128


class Tile(NamedTuple):
    """One batch row, one kv head and its query heads, a run of queries and the run of keys that holds all they see."""

    row: int
    kv_head: int
    heads: slice
    queries: slice
    keys: slice
    block: Block


class PerTensor(NamedTuple):
    """One array for each tensor of an answer: head-major, so that a tile is a slice, and with the gradients of key and
    value still apart for each query head."""

    out: Float64[np.ndarray, "batch num_query_heads seq value_dim"]
    lse: Float64[np.ndarray, "batch num_query_heads seq"]
    dquery: Float64[np.ndarray, "batch num_query_heads seq head_dim"]
    dkey: Float64[np.ndarray, "batch num_query_heads seq head_dim"]
    dvalue: Float64[np.ndarray, "batch num_query_heads seq value_dim"]
    dsinks: Float64[np.ndarray, " num_query_heads"]


def tiles_of(arguments: Arguments) -> Iterator[Tile]:
    """Every tile of a case. Each query is in exactly one tile of its head."""
    batch, seq_len = arguments.is_token.shape
    for row, kv_head in np.ndindex(batch, arguments.key.shape[2]):
        for queries, keys in runs(seq_len, arguments.window):
            block = block_of(arguments, row, kv_head, np.arange(seq_len)[queries], np.arange(seq_len)[keys])
            yield Tile(row, kv_head, arguments.heads_of(kv_head), queries, keys, block)


def runs(seq_len: int, window: Window) -> Iterator[tuple[slice, slice]]:
    """Runs of at most TILE_ROWS queries, each with the run of positions that its windows reach."""
    left, right = window
    for start in range(0, seq_len, TILE_ROWS):
        stop = min(start + TILE_ROWS, seq_len)
        first_key = 0 if left is None else max(start - left, 0)
        end_key = seq_len if right is None else min(stop + right, seq_len)
        yield slice(start, stop), slice(first_key, end_key)


def zeros(arguments: Arguments) -> PerTensor:
    """Where tiles add up."""
    batch, seq_len, num_query_heads, head_dim = arguments.query.shape
    rows, value_dim = (batch, num_query_heads, seq_len), arguments.value.shape[3]
    return PerTensor(
        out=np.zeros((*rows, value_dim)),
        lse=np.zeros(rows),
        dquery=np.zeros((*rows, head_dim)),
        dkey=np.zeros((*rows, head_dim)),
        dvalue=np.zeros((*rows, value_dim)),
        dsinks=np.zeros(num_query_heads),
    )


def add(total: PerTensor, tile: Tile, parts: PerTensor) -> None:
    """Put a tile's arrays where they belong: queries are its own, keys (and sinks) it shares with others."""
    total.out[tile.row, tile.heads, tile.queries] = parts.out
    total.lse[tile.row, tile.heads, tile.queries] = parts.lse
    total.dquery[tile.row, tile.heads, tile.queries] = parts.dquery
    total.dkey[tile.row, tile.heads, tile.keys] += parts.dkey
    total.dvalue[tile.row, tile.heads, tile.keys] += parts.dvalue
    total.dsinks[tile.heads] += parts.dsinks


def by_group(by_head: Float64[np.ndarray, "batch num_query_heads seq dim"], arguments: Arguments) -> np.ndarray:
    """`by_head` with the query heads of a kv head on an axis of their own: [batch, num_kv_heads, group, seq, dim]."""
    batch, _, *rest = by_head.shape
    return by_head.reshape(batch, -1, arguments.heads_per_group, *rest)
