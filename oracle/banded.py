"""The dense answer in time and memory that grow with seq * window: the whole of a long sequence, tile by tile.

The formulas are those of dense.py, on its blocks; what is new is which keys a run of queries can see, and where its
gradients add up (tiles.py). NumPy only. Tested in tests/oracle/test_banded.py, against the dense oracle.
"""

from typing import Unpack

import numpy as np

from oracle import tiles
from oracle.arguments import AttentionOptions, Cotangents, validated, validated_cotangents
from oracle.dense import AttentionGradients, AttentionResult, SolvedBlock, forward_block, vjp_block


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Unpack[AttentionOptions]
) -> AttentionResult:
    """As `oracle.attention`, whose arguments and errors it has."""
    arguments = validated(query, key, value, **options)
    out = np.zeros((*arguments.query.shape[:3], arguments.value.shape[3]))
    lse = np.zeros(arguments.query.shape[:3])
    for tile in tiles.tiles_of(arguments):
        forward = forward_block(tile.block)
        out[tile.row, tile.queries, tile.heads] = forward.out.swapaxes(0, 1)
        lse[tile.row, tile.queries, tile.heads] = forward.lse.T
    return AttentionResult(out, lse)


def attention_vjp(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    """As `oracle.attention_vjp`, whose arguments and errors it has."""
    arguments = validated(query, key, value, **options)
    cotangents = validated_cotangents(arguments, dout, dlse)
    dquery, dkey, dvalue = np.zeros_like(arguments.query), np.zeros_like(arguments.key), np.zeros_like(arguments.value)
    dsinks = np.zeros(arguments.query.shape[2])
    for tile in tiles.tiles_of(arguments):
        gradients = solved(tile, cotangents).gradients
        dquery[tile.row, tile.queries, tile.heads] = gradients.dquery.swapaxes(0, 1)
        dkey[tile.row, tile.keys, tile.kv_head] += gradients.dkey.sum(axis=0)
        dvalue[tile.row, tile.keys, tile.kv_head] += gradients.dvalue.sum(axis=0)
        dsinks[tile.heads] += gradients.dsinks
    return AttentionGradients(dquery, dkey, dvalue, None if arguments.sinks is None else dsinks)


def solved(tile: tiles.Tile, cotangents: Cotangents) -> SolvedBlock:
    """A tile's block with its cotangents and its answers."""
    dout = cotangents.dout[tile.row, tile.queries, tile.heads].swapaxes(0, 1)
    dlse = cotangents.dlse[tile.row, tile.queries, tile.heads].T
    forward = forward_block(tile.block)
    return SolvedBlock(tile.block, dout, dlse, forward, vjp_block(tile.block, forward, dout, dlse))
