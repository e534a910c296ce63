"""What one grid step of the Pallas halo backward computes: gradients of its queries, and shares of those of its keys.

Logits are made once, keys by queries, so that of the five matmuls only dquery's reads anything transposed.
Used by pallas_halo_backward.py; tested in tests/impl/test_pallas_halo.py.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from impl.kernels import pallas_blocks as blocks
from impl.kernels.interface import KernelConfig
from impl.kernels.pallas_blocks import HIDDEN, LANES, LOG2_E, Band, Mask
from impl.kernels.pallas_flush import GradientRing
from impl.kernels.pallas_ring import KeyRing


class StepRefs(NamedTuple):
    """References of one grid step: blocks of its queries' rows, and the rings of keys and of their gradients."""

    query: Any
    dout: Any
    out: Any | None
    lse: Any
    delta: Any
    ring: KeyRing
    gradients: GradientRing
    mask: Mask
    dquery: Any


class _Column(NamedTuple):
    """One column of one query tile between its two stages: products of query with key, and of dout with value."""

    tile: int
    offsets: tuple[int, ...]
    products: Float[Array, "tile stacked"]
    dweights: Float[Array, "tile stacked"]


def compute_gradients(refs: StepRefs, band: Band, config: KernelConfig, step: Any, mask: Mask | None) -> None:
    """Adds the shares to the gradients of the step's keys; writes dquery. mask: None where only the window hides."""
    columns = [(tile, offsets) for tile in range(band.tiles_per_block) for offsets in band.columns]
    # The matmuls of a column are issued before the exponentials of the one before it, to run beside them.
    ahead = _products(refs, band, step, *columns[0])
    dquery: Any = None
    delta: Any = None
    for index in range(len(columns)):
        column = ahead
        if column.offsets == band.columns[0]:
            delta = _delta(refs, band, column.tile)
        if index + 1 < len(columns):
            ahead = _products(refs, band, step, *columns[index + 1])
        part = _gradients(refs, band, config, step, column, delta, mask)
        dquery = part if column.offsets == band.columns[0] else dquery + part
        if column.offsets == band.columns[-1]:
            rows = pl.ds(column.tile * band.tile, band.tile)
            scaled = (dquery * config.scale).reshape(band.group, band.tile, -1)
            refs.dquery[0, :, rows, :] = scaled.astype(refs.dquery.dtype)


def _products(refs: StepRefs, band: Band, step: Any, tile: int, offsets: tuple[int, ...]) -> _Column:
    head, block = band.head_and_block(step)
    key_buffer, value_buffer = refs.ring.buffers
    query, dout = _stacked(refs.query, band, tile), _stacked(refs.dout, band, tile)
    places = [band.ring_rows(head, block, tile + offset) for offset in offsets]
    products = [blocks.matmul(key_buffer[place, :], query, (1, 1)) for place in places]
    dweights = [blocks.matmul(value_buffer[place, :], dout, (1, 1)) for place in places]
    return _Column(
        tile,
        offsets,
        blocks.joined(band, products, keys_axis=0),
        blocks.joined(band, dweights, keys_axis=0),
    )


def _gradients(
    refs: StepRefs, band: Band, config: KernelConfig, step: Any, column: _Column, delta: Any, mask: Mask | None
) -> Array:
    """Adds a column's share to the gradients of its keys; returns that of the queries [stacked, head_dim], unscaled."""
    head, block = band.head_and_block(step)
    tile, offsets = column.tile, column.offsets
    logits = blocks.base2(column.products, config)
    visible = blocks.visible_column(band, block, tile, offsets, mask, keys_axis=0)
    seen = logits if visible is None else jnp.where(visible, logits, HIDDEN)
    weights = jnp.exp2(seen - _row(refs.lse, band, tile) * LOG2_E)
    dlogits = weights * (column.dweights - delta)
    if config.attn_logits_soft_cap is not None:
        # Of logits before the mask: the square of HIDDEN would be infinite, and 0 · ∞ is no gradient.
        dlogits = dlogits * (1 - jnp.square(logits * (1 / (config.attn_logits_soft_cap * LOG2_E))))
    query, dout = _stacked(refs.query, band, tile), _stacked(refs.dout, band, tile)
    dquery: Any = None
    parts = zip(
        offsets,
        blocks.split(band, weights.astype(dout.dtype), len(offsets), keys_axis=0),
        blocks.split(band, dlogits.astype(query.dtype), len(offsets), keys_axis=0),
        strict=True,
    )
    for offset, weights_part, dlogits_part in parts:
        place = band.ring_rows(head, block, tile + offset)
        dkey = blocks.matmul(dlogits_part, query, (1, 0))
        dvalue = blocks.matmul(weights_part, dout, (1, 0))
        for buffer, gradient in zip(refs.gradients.buffers, (dkey, dvalue), strict=True):
            # Queries come in order: the first to see a tile of the chunk's own keys are those of its own rows.
            buffer[place, :] = gradient if offset == 0 else buffer[place, :] + gradient
        part = blocks.matmul(dlogits_part, refs.ring.buffers[0][place, :], (0, 0))
        dquery = part if dquery is None else dquery + part
    return dquery


def _delta(refs: StepRefs, band: Band, tile: int) -> Float[Array, "1 stacked"]:
    """interface.RowCotangents' delta, to which dout · out is still missing where `out` is given."""
    delta = _row(refs.delta, band, tile)
    if refs.out is None:
        return delta
    products = _stacked(refs.dout, band, tile).astype(jnp.float32) * _stacked(refs.out, band, tile).astype(jnp.float32)
    by_lane = functools.reduce(jnp.add, jnp.split(products, products.shape[1] // LANES, axis=1))
    return delta + jnp.sum(by_lane.T, axis=0, keepdims=True)


def _stacked(ref: Any, band: Band, tile: int) -> Array:
    """[group, tile, dim] → [stacked, dim]."""
    return ref[0, :, pl.ds(tile * band.tile, band.tile), :].reshape(band.stacked, -1)


def _row(ref: Any, band: Band, tile: int) -> Array:
    """A number for each stacked row, [1, stacked]."""
    rows = pl.ds(tile * band.tile, band.tile)
    return jnp.concatenate([ref[0, pl.ds(member, 1), rows] for member in range(band.group)], axis=1)
