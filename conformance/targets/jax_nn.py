"""`jax.nn.dot_product_attention` as a target: `conformance.targets.jax_nn:dot_product_attention`.

Under context parallelism K and V are gathered, and the mask is passed as `mask=`.
Nobody here wrote the kernel. Its `local_window_size` knows no offset of the queries, so it cannot be used on gathered
keys. Declines what the function does not have. May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from conformance.problem import Problem


@dataclass(frozen=True)
class _DotProductAttention:
    """`jax.nn.dot_product_attention` on gathered keys."""

    name: str = "jax.nn"
    communication: str = "all_gather"

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline: features that `jax.nn.dot_product_attention` does not have."""
        if problem.sinks:
            return "jax.nn.dot_product_attention has no sinks"
        if problem.attn_logits_soft_cap is not None:
            return "jax.nn.dot_product_attention has no soft cap"
        if problem.value_dim != problem.head_dim:
            return "jax.nn.dot_product_attention has one head_dim"
        if problem.window[0] is not None and problem.window[0] < 0:
            return f"a window of {problem.window[0] + 1} keys shows nobody anything"
        if problem.num_kv_heads % problem.tensor_parallelism:
            return "this adapter shards kv heads over the tensor axis"
        return None

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        problem: Problem,
        mesh: jax.sharding.Mesh,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """out, by the target contract: one rank's queries against all keys of the sequence."""
        sequence = ("context", "ulysses") if problem.ulysses_parallelism > 1 else "context"
        arrays, rows = PartitionSpec("data", sequence, "tensor"), PartitionSpec("data", sequence)
        placed = jax.sharding.NamedSharding(mesh, rows)
        if segment_ids is None:
            segment_ids = jax.device_put(jnp.zeros(query.shape[:2], jnp.int32), placed)
        positions = jax.device_put(jnp.broadcast_to(problem.positions(), query.shape[:2]), placed)

        def on_one_rank(query: Any, key: Any, value: Any, ids: Any, positions: Any) -> Any:
            # Wide on the wire: the transpose of gathering sums gradients over ranks in the dtype that was gathered.
            wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (key, value))
            key, value, key_ids, key_positions = (
                jax.lax.all_gather(x, sequence, axis=1, tiled=True) for x in (*wide, ids, positions)
            )
            key, value = (x.astype(query.dtype) for x in (key, value))
            mask = _mask(problem, positions[:, :, None] - key_positions[:, None, :])
            mask &= ids[:, :, None] == key_ids[:, None, :]
            if problem.padding is not None:
                mask &= (ids != problem.padding)[:, :, None]
            return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], scale=problem.scale)

        sharded = jax.shard_map(
            on_one_rank, mesh=mesh, in_specs=(arrays, arrays, arrays, rows, rows), out_specs=arrays, check_vma=False
        )
        return sharded(query, key, value, segment_ids, positions)


def _mask(problem: Problem, distance: jax.Array) -> jax.Array:
    """The window, from how far each key lies before its query."""
    left, right = problem.window
    mask = jnp.ones(distance.shape, bool)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= distance >= -right
    return mask


dot_product_attention = _DotProductAttention()
