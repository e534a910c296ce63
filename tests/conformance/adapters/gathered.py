"""A small right attention that gathers K and V, with hooks where the adapters of this folder go wrong on purpose.

Owes nothing to `impl`: the harness is not tested with what it judges. May touch: JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def visible(problem: Any, positions: Any, key_positions: Any, ids: Any, key_ids: Any) -> Any:
    """The right mask, [batch, query, key]."""
    left, right = problem.window
    distance = positions[:, :, None] - key_positions[:, None, :]
    mask = ids[:, :, None] == key_ids[:, None, :]
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= distance >= -right
    if problem.padding is not None:
        mask &= (ids != problem.padding)[:, :, None]
    return mask


def attend(logits: Any, mask: Any, value: Any, sinks: Any) -> Any:
    """The right softmax over visible keys: logits [batch, head, query, key], value [batch, key, head, feature]."""
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    sink = jnp.full_like(highest, -jnp.inf) if sinks is None else jnp.broadcast_to(sinks[:, None, None], highest.shape)
    highest = jax.lax.stop_gradient(jnp.maximum(highest, sink))
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    weights = jnp.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - highest)
    # An empty row has total 0; its weights are 0 whatever they are divided by.
    return jnp.einsum("bhqk,bkhv->bqhv", weights / jnp.where(total == 0, 1, total), value)


@dataclass(frozen=True)
class Gathered:
    """A target. `fetched` sees the gathered keys and values, `mask` and `attend` replace the right functions."""

    mask: Callable[..., Any] = visible
    attend: Callable[..., Any] = attend
    fetched: Callable[..., Any] = lambda problem, rank, gathered: gathered
    name: str = "gathered"
    empty_rows: str = "zero"
    communication: str | None = "all_gather"

    def supports(self, problem: Any) -> str | None:
        """Kv heads must be sharded like query heads: this is a small target."""
        if problem.num_kv_heads % problem.tensor_parallelism or problem.ulysses_parallelism > 1:
            return "heads do not divide"
        if problem.window[0] is not None and problem.window[0] < 0:
            return "a window shows at least the query itself"
        return None

    def attention(
        self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, segment_ids: Any = None, sinks: Any = None
    ) -> Any:
        """out, by the target contract."""
        rows = PartitionSpec("data", "context")
        arrays = PartitionSpec("data", "context", "tensor")
        placed = NamedSharding(mesh, rows)
        if segment_ids is None:
            segment_ids = jax.device_put(jnp.zeros(query.shape[:2], jnp.int32), placed)
        positions = jax.device_put(jnp.broadcast_to(problem.positions(), query.shape[:2]), placed)
        optional = () if sinks is None else (sinks,)
        return jax.shard_map(
            lambda *shards: self._on_one_rank(problem, *shards),
            mesh=mesh,
            in_specs=(arrays, arrays, arrays, rows, rows, *(PartitionSpec("tensor") for _ in optional)),
            out_specs=arrays,
            check_vma=False,
        )(query, key, value, segment_ids, positions, *optional)

    def _on_one_rank(
        self, problem: Any, query: Any, key: Any, value: Any, ids: Any, positions: Any, sinks: Any = None
    ) -> Any:
        # Wide before they are gathered and repeated: their gradients are then summed over ranks and heads in float32.
        wide = jnp.float64 if problem.dtype == "float64" else jnp.float32
        shards = (key.astype(wide), value.astype(wide), ids, positions)
        gathered = tuple(jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in shards)
        key, value, key_ids, key_positions = self.fetched(problem, jax.lax.axis_index("context"), gathered)
        heads = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, heads, axis=2) for x in (key, value))
        scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", query.astype(wide), key)
        if problem.attn_logits_soft_cap is not None:
            logits = problem.attn_logits_soft_cap * jnp.tanh(logits / problem.attn_logits_soft_cap)
        mask = self.mask(problem, positions, key_positions, ids, key_ids)
        return self.attend(logits, mask, value, sinks).astype(query.dtype)


right = Gathered()
