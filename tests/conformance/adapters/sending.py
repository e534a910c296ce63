"""A small right halo exchange, and targets that send, compute or accept what they should not.

The halo serves the case of one hop in a contiguous layout, which is enough to be wrong in. Its gradients are those of
autodiff, so that they travel in the inputs' dtype: right in float32, too narrow in bfloat16.
Owes nothing to `impl`. May touch: JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from gathered import Gathered, attend, visible
from jax.sharding import NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Halo:
    """`rows(problem)`: how many rows of the chunk before a rank asks for; `fetched(rows, pairs)` brings them."""

    name: str = "halo by hand"
    communication: str = "halo"
    empty_rows: str = "zero"
    halo_row_multiple: int = 1
    residual_names: tuple[str, ...] = ()
    rows: Callable[[Any], int] = lambda problem: problem.window[0]
    arrived: Callable[[Any, Any], Any] = lambda problem, rows: rows
    fetched: Callable[[Any, Any], Any] = lambda rows, pairs: jax.lax.ppermute(rows, "context", pairs)

    def supports(self, problem: Any) -> str | None:
        """One hop back, in a contiguous layout."""
        left, right = problem.window
        if left is None or not 0 <= left <= problem.chunk_len or right != 0:
            return "one hop back only"
        if problem.layout != "contiguous" or problem.ulysses_parallelism > 1:
            return "contiguous only"
        return "heads do not divide" if problem.num_kv_heads % problem.tensor_parallelism else None

    def attention(
        self, query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, segment_ids: Any = None, sinks: Any = None
    ) -> Any:
        """out, by the target contract."""
        rows, arrays = PartitionSpec("data", "context"), PartitionSpec("data", "context", "tensor")
        optional = {"ids": (segment_ids, rows), "sinks": (sinks, PartitionSpec("tensor"))}
        given = {name: pair for name, pair in optional.items() if pair[0] is not None}
        return jax.shard_map(
            lambda query, key, value, others: self._on_one_rank(problem, query, key, value, **others),
            mesh=mesh,
            in_specs=(arrays, arrays, arrays, {name: spec for name, (_, spec) in given.items()}),
            out_specs=arrays,
            check_vma=False,
        )(query, key, value, {name: array for name, (array, _) in given.items()})

    def _on_one_rank(self, problem: Any, query: Any, key: Any, value: Any, ids: Any = None, sinks: Any = None) -> Any:
        ranks, rows = problem.context_parallelism, self.rows(problem)
        pairs = [(rank, rank + 1) for rank in range(ranks - 1)]

        def with_halo(own: Any) -> Any:
            if rows == 0 or ranks == 1:
                return own
            arrived = self.fetched(own[:, own.shape[1] - rows :], pairs)
            return jnp.concatenate([self.arrived(problem, arrived), own], axis=1)

        keys, values = with_halo(key), with_halo(value)
        start = jax.lax.axis_index("context") * query.shape[1]
        positions = start + jnp.arange(query.shape[1])[None]
        key_positions = start + jnp.arange(keys.shape[1])[None] - (keys.shape[1] - query.shape[1])
        zeros = jnp.zeros((1, 1), jnp.int32)
        key_ids = zeros if ids is None else with_halo(ids)
        mask = visible(problem, positions, key_positions, zeros if ids is None else ids, key_ids)
        mask &= (key_positions >= 0)[:, None, :]
        wide = jnp.promote_types(query.dtype, jnp.float32)
        keys, values = (jnp.repeat(x.astype(wide), query.shape[2] // key.shape[2], axis=2) for x in (keys, values))
        scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", query.astype(wide), keys)
        if problem.attn_logits_soft_cap is not None:
            logits = problem.attn_logits_soft_cap * jnp.tanh(logits / problem.attn_logits_soft_cap)
        return attend(logits, mask, values, sinks).astype(query.dtype)


def _row_by_row(rows: Any, pairs: Any) -> Any:
    """As many bytes, and a message for each row."""
    _, brought = jax.lax.scan(
        lambda _, row: (None, jax.lax.ppermute(row, "context", pairs)), None, jnp.moveaxis(rows, 1, 0)
    )
    return jnp.moveaxis(brought, 0, 1)


@dataclass(frozen=True)
class _Around:
    """The halo by hand, with something done before it."""

    name: str
    before: Callable[..., Any]
    communication: str = "halo"
    empty_rows: str = "zero"

    def supports(self, problem: Any) -> str | None:
        """As the halo, on Auto axes."""
        return Halo().supports(problem) or (None if problem.axis_types == "auto" else "Auto axes only")

    def attention(self, query: Any, key: Any, value: Any, *, mesh: Any, **context: Any) -> Any:
        """out, by the target contract."""
        query, key, value = (self.before(mesh, x) for x in (query, key, value))
        return Halo().attention(query, key, value, mesh=mesh, **context)


def _replicated(mesh: Any, array: Any) -> Any:
    """Every rank holds the whole for a moment, as after a careless reordering: the partitioner gathers it."""
    whole = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec()))
    return jax.lax.with_sharding_constraint(whole * 1, NamedSharding(mesh, PartitionSpec("data", "context", "tensor")))


def _through_the_host(mesh: Any, array: Any) -> Any:
    del mesh
    jax.debug.callback(lambda: None)
    return array


class _SumsNarrow(Gathered):
    """Gathers K and V as they are: in bfloat16 their gradients are summed over ranks in bfloat16."""

    def _on_one_rank(self, problem: Any, query: Any, key: Any, value: Any, ids: Any, positions: Any, sinks: Any = None):
        key, value, key_ids, key_positions = (
            jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (key, value, ids, positions)
        )
        wide = jnp.promote_types(query.dtype, jnp.float32)
        heads = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, heads, axis=2).astype(wide) for x in (key, value))
        scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", query.astype(wide), key)
        mask = visible(problem, positions, key_positions, ids, key_ids)
        return attend(logits, mask, value, sinks).astype(query.dtype)


@dataclass(frozen=True)
class _Permissive(Gathered):
    """Accepts any window."""

    def supports(self, problem: Any) -> str | None:
        """Whatever divides, and every window that makes no sense."""
        return Gathered().supports(problem) if _valid(problem) else None


def _valid(problem: Any) -> bool:
    return problem.window[0] is None or problem.window[0] >= 0


class _FailsOnWindows(_Permissive):
    """Compares what it should have checked, and fails in its own way."""

    def attention(self, *arrays: Any, problem: Any, **context: Any) -> Any:
        """out, by the target contract."""
        if not _valid(problem):
            raise TypeError("'<' not supported between instances of 'NoneType' and 'int'")
        return super().attention(*arrays, problem=problem, **context)


@dataclass(frozen=True)
class _Banded(Halo):
    """The halo by hand, query block by query block: its cost follows the window."""

    block: int = 128

    def _on_one_rank(self, problem: Any, query: Any, key: Any, value: Any, ids: Any = None, sinks: Any = None) -> Any:
        chunk = query.shape[1]
        if chunk <= self.block or ids is not None or sinks is not None:
            return super()._on_one_rank(problem, query, key, value, ids, sinks)
        rows, ranks = self.rows(problem), problem.context_parallelism
        pairs = [(rank, rank + 1) for rank in range(ranks - 1)]
        keys, values = (jnp.concatenate([self.fetched(x[:, chunk - rows :], pairs), x], axis=1) for x in (key, value))
        start = jax.lax.axis_index("context") * chunk
        heads = query.shape[2] // key.shape[2]
        scale = problem.scale if problem.scale is not None else 1 / math.sqrt(problem.head_dim)

        def one_block(first: Any) -> Any:
            mine = jax.lax.dynamic_slice_in_dim(query, first, self.block, axis=1)
            near, near_values = (
                jnp.repeat(jax.lax.dynamic_slice_in_dim(x, first, self.block + rows, axis=1), heads, axis=2)
                for x in (keys, values)
            )
            positions = start + first + jnp.arange(self.block)[None]
            key_positions = start + first - rows + jnp.arange(self.block + rows)[None]
            zeros = jnp.zeros((1, 1), jnp.int32)
            mask = visible(problem, positions, key_positions, zeros, zeros) & (key_positions >= 0)[:, None, :]
            logits = scale * jnp.einsum("bqhd,bkhd->bhqk", mine, near)
            return attend(logits, mask, near_values, None)

        blocks = jax.lax.map(one_block, jnp.arange(0, chunk, self.block))
        return jnp.moveaxis(blocks, 0, 1).reshape(query.shape[0], chunk, *blocks.shape[3:]).astype(query.dtype)


right_halo = Halo()
rounded_halo = Halo(name="rounded_halo", halo_row_multiple=4, rows=lambda problem: -(-problem.window[0] // 4) * 4)
whole_chunk = Halo(name="whole_chunk", rows=lambda problem: problem.chunk_len)
gathers = Gathered(name="gathers", communication="halo")
claims_nothing = Gathered(name="claims_nothing", communication=None)
gathers_at_the_border = _Around("gathers_at_the_border", _replicated)
talks_to_the_host = _Around("talks_to_the_host", _through_the_host)
sums_narrow = _SumsNarrow(name="sums_narrow")
recomputes = Halo(name="recomputes", residual_names=("a name that nothing has",))
accepts_any_window = _Permissive(name="accepts_any_window")
fails_on_windows = _FailsOnWindows(name="fails_on_windows")
banded = _Banded(name="banded")
row_by_row = _Banded(name="row_by_row", fetched=_row_by_row)
dense_on_a_rank = Halo(name="dense_on_a_rank")
