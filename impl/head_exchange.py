"""Exchanges sequence shards for head shards around an inner strategy, by all_to_all: what ulysses and usp share.

A rank gives each other rank of the axis the heads that are that rank's, and gets its rows of its own heads. The inner
strategy sees more rows and fewer heads. Tested in tests/impl/test_strategies.py.
"""

import functools
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from impl import heads
from impl.kernels.interface import LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer
from impl.local_attention import tensor_shard
from impl.strategy import Operands, Received, Strategy


@functools.lru_cache
def with_head_exchange(inner: Strategy, over: Literal["context", "ulysses"]) -> Strategy:
    """`inner` on exchanged heads. The exchanged query, key and value are kept for the backward: no more rows than their
    originals, which are then free."""

    def forward(operands: Operands, layer: Layer) -> tuple[Array, Array, Received]:
        exchanged = _exchanged(operands, layer, over)
        out, lse, received = inner.forward(exchanged, _inner_layer(layer, over))
        ids = () if exchanged.segment_ids is None else (exchanged.segment_ids,)
        kept = Received(
            query=(exchanged.query, *received.query),
            key=(exchanged.key, *received.key),
            value=(exchanged.value, *received.value),
            segment_ids=(*ids, *received.segment_ids),
        )
        axis, _ = _axis(layer, over)
        # Rounded before it travels; nothing is summed on the way.
        return _gather_heads(out.astype(operands.query.dtype), axis), _gather_heads(lse, axis), kept

    def backward(operands: Operands, received: Received, cotangents: RowCotangents, layer: Layer) -> LocalGradients:
        axis, _ = _axis(layer, over)
        query, *queries = received.query
        (key, *keys), (value, *values) = received.key, received.value
        ids, *other_ids = received.segment_ids or (None,)
        exchanged = Operands(query, key, value, ids, _sinks_of_shard(operands.sinks, layer, over))
        rest = Received(tuple(keys), tuple(values), tuple(other_ids), tuple(queries))
        rows = jax.tree.map(lambda array: _scatter_heads(array, axis), cotangents)
        gradients = inner.backward(exchanged, rest, rows, _inner_layer(layer, over))
        return LocalGradients(
            dquery=_gather_heads(gradients.dquery.astype(operands.query.dtype), axis),
            dkey=_home(operands.key, gradients.dkey, layer, over),
            dvalue=_home(operands.value, gradients.dvalue, layer, over),
            dsinks=_all_sinks(operands.sinks, gradients.dsinks, layer, over),
        )

    return Strategy(forward, backward)


def _axis(layer: Layer, over: str) -> tuple[str, int]:
    if over == "ulysses":
        assert layer.ulysses_axis is not None, "a layer without a ulysses axis exchanges no heads over it"
        return layer.ulysses_axis, layer.ulysses_parallelism
    return layer.context_axis, layer.context_parallelism


def _exchanged(operands: Operands, layer: Layer, over: str) -> Operands:
    axis, _ = _axis(layer, over)
    ids = operands.segment_ids
    return Operands(
        _scatter_heads(operands.query, axis),
        _exchange_kv(operands.key, layer, over),
        _exchange_kv(operands.value, layer, over),
        None if ids is None else lax.all_gather(ids, axis, axis=1, tiled=True),
        _sinks_of_shard(operands.sinks, layer, over),
    )


def _scatter_heads(
    rows: Shaped[Array, "batch rows heads ..."], axis: str
) -> Shaped[Array, "batch all_rows shard_heads ..."]:
    """[batch, rows of this rank, all heads, …] → [batch, rows of all ranks, heads of this rank, …]."""
    size = lax.axis_size(axis)
    batch, count, heads_, *rest = rows.shape
    by_owner = jnp.moveaxis(rows.reshape(batch, count, size, heads_ // size, *rest), 2, 0)
    by_rank = _swap_ranks(by_owner, axis)  # [rank, batch, row, head, …]
    return jnp.moveaxis(by_rank, 0, 1).reshape(batch, size * count, heads_ // size, *rest)


def _gather_heads(
    rows: Shaped[Array, "batch all_rows shard_heads ..."], axis: str
) -> Shaped[Array, "batch rows heads ..."]:
    """The inverse of `_scatter_heads`."""
    size = lax.axis_size(axis)
    batch, count, heads_, *rest = rows.shape
    by_rank = jnp.moveaxis(rows.reshape(batch, size, count // size, heads_, *rest), 1, 0)
    by_owner = _swap_ranks(by_rank, axis)  # [owner of the heads, batch, row, head, …]
    return jnp.moveaxis(by_owner, 0, 2).reshape(batch, count // size, size * heads_, *rest)


def _swap_ranks(blocks: Shaped[Array, "rank ..."], axis: str) -> Shaped[Array, "rank ..."]:
    """Block i goes to rank i. Over a leading axis: on any other, libtpu took minutes to compile an lse's.

    XLA's CPU compiler simplifies the blocks of a single row one by one, gives them different layouts, and then refuses
    its own all-to-all; behind a barrier it leaves them alone.
    """
    if blocks.shape[2] == 1:
        blocks = lax.optimization_barrier(blocks)
    return lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0)


def _plan(layer: Layer, over: str) -> heads.HeadPlan:
    """Which kv heads each rank of the axis needs for its query heads, among those of this tensor shard."""
    kv_heads = layer.heads.shard_kv_heads if layer.heads.aligned else layer.heads.shard_query_heads
    return heads.plan_heads(layer.heads.shard_query_heads, kv_heads, _axis(layer, over)[1])


def _inner_layer(layer: Layer, over: str) -> Layer:
    plan = _plan(layer, over)
    kv_heads = plan.shard_kv_heads if plan.aligned else plan.shard_query_heads
    return replace(layer, heads=heads.plan_heads(plan.shard_query_heads, kv_heads, 1), ulysses_axis=None)


def _exchange_kv(rows: Array, layer: Layer, over: str) -> Array:
    """Gives each rank of the axis the kv heads that its query heads read, copies included; linear in `rows`."""
    rows = heads.expand(rows, layer.heads, tensor_shard(layer))
    plan = _plan(layer, over)
    if not plan.aligned:
        rows = jnp.repeat(rows, plan.group, axis=2)
    elif not plan.kv_sharded:
        copies = [heads.select(rows, plan, jnp.int32(rank)) for rank in range(plan.tensor_parallelism)]
        rows = jnp.concatenate(copies, axis=2)
    return _scatter_heads(rows, _axis(layer, over)[0])


def _home(rows: Array, gradient: Array, layer: Layer, over: str) -> Array:
    """The transpose of `_exchange_kv`, in the accumulation dtype: gradients of a head's copies are summed at home."""
    aval = jax.ShapeDtypeStruct(rows.shape, accumulation_dtype(rows.dtype))
    (home,) = jax.linear_transpose(lambda own: _exchange_kv(own, layer, over), aval)(gradient)
    return home


def _sinks_of_shard(sinks: Array | None, layer: Layer, over: str) -> Array | None:
    if sinks is None:
        return None
    axis, size = _axis(layer, over)
    count = sinks.shape[0] // size
    return lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * count, count)


def _all_sinks(sinks: Array | None, gradient: Array | None, layer: Layer, over: str) -> Array | None:
    """This rank's share of the gradient of all sinks: zero but for those of its heads."""
    if sinks is None or gradient is None:
        return None
    axis, _ = _axis(layer, over)
    first = lax.axis_index(axis) * gradient.shape[0]
    return lax.dynamic_update_slice_in_dim(jnp.zeros(sinks.shape, gradient.dtype), gradient, first, axis=0)
