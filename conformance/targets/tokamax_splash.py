"""tokamax's splash attention and ring attention as targets (extra `tokamax`), by the modules that its tests use.

`conformance.targets.tokamax_splash:splash_attention` gathers K and V, with the mask sharded over the queries;
`…:ring_attention` leaves K and V on their ranks. Interpreted, and slow, where there is no TPU.
May touch: JAX, tokamax. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from conformance.problem import Problem
from conformance.targets.gathered import (
    Kernel,
    declined_problem,
    ids_that_tell_padding_apart,
    require_ids_of_rows,
    sequence_axes,
)
from conformance.targets.gathered_splash import GatheredSplash
from conformance.targets.splash_rows import BLOCK, head_major, padded_rows, padded_window, scaled_query

# By name: tokamax is an extra, and these modules are not part of its public face.
_KERNELS = "tokamax._src.ops.experimental.tpu.splash_attention"
base, ring_attention_kernel, splash, splash_mask = (
    importlib.import_module(f"{_KERNELS}.{name}")
    for name in ("base", "ring_attention_kernel", "splash_attention_kernel", "splash_attention_mask")
)

_BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")


@dataclass(frozen=True)
class _RingAttention:
    """`make_ring_attention`: K and V travel round the context axis.

    It claims no communication: this adapter pads each rank's rows to whole blocks, and the padding travels too.
    """

    name: str = "tokamax_ring"
    precision: Mapping[str, bool] = field(default_factory=lambda: {"prescaled_query": True, "rounded_partials": True})

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline: what the ring does not have."""
        if problem.ulysses_parallelism > 1:
            return "tokamax ring attention runs over one mesh axis"
        if problem.sinks:
            return "tokamax ring attention has no sinks"
        if problem.value_dim != problem.head_dim:
            return "tokamax ring attention has one head_dim"
        return declined_problem(problem)

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
        """out, by the target contract."""
        arrays, rows = PartitionSpec("data", "context", "tensor"), PartitionSpec("data", "context")
        if segment_ids is None:
            segment_ids = jax.device_put(jnp.zeros(query.shape[:2], jnp.int32), NamedSharding(mesh, rows))
        else:
            require_ids_of_rows(segment_ids, query)
        ring = ring_attention_kernel.make_ring_attention(
            padded_window(problem, pad_each_rank_of_keys=True),
            config=_config(problem, mesh),
            is_mqa=False,
            ring_axis="context",
            q_seq_shards=problem.context_parallelism,
            kv_seq_shards=problem.context_parallelism,
        )

        def on_one_rank(ring: Any, query: Any, key: Any, value: Any, ids: Any) -> Any:
            query_ids, key_ids = ids_that_tell_padding_apart(problem, ids, ids)
            segments = base.SegmentIds(q=padded_rows(query_ids, axis=1), kv=padded_rows(key_ids, axis=1))
            heads = (scaled_query(head_major(query), problem), head_major(key), head_major(value))
            out = jax.vmap(ring)(*heads, segments)
            return jnp.swapaxes(out, 1, 2)[:, : query.shape[1]]

        kernel = Kernel(ring, ring.manual_sharding_spec())
        return jax.shard_map(
            on_one_rank,
            mesh=mesh,
            in_specs=(kernel.spec, arrays, arrays, arrays, rows),
            out_specs=arrays,
            check_vma=False,
        )(kernel.placed(mesh), query, key, value, segment_ids)


def _splash_kernel(problem: Problem, mesh: jax.sharding.Mesh) -> Kernel:
    """The kernel with its mask, and where each part of the mask lies."""
    kernel = splash.make_splash_mha(
        splash_mask.NumpyMask(padded_window(problem, pad_each_rank_of_keys=False)),
        config=_config(problem, mesh),
        q_seq_shards=problem.context_parallelism * problem.ulysses_parallelism,
    )
    return Kernel(kernel, kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(sequence_axes(problem)))))


def _config(problem: Problem, mesh: jax.sharding.Mesh) -> Any:
    """Blocks of the smallest size; natural exponentials, as tokamax's own tests of the ring set them."""
    return splash.SplashConfig(
        **dict.fromkeys(_BLOCKS, BLOCK),
        attn_logits_soft_cap=problem.attn_logits_soft_cap,
        use_base2_exp=False,
        interpret=next(iter(mesh.devices.flat)).platform != "tpu",
    )


splash_attention = GatheredSplash("tokamax_splash", _splash_kernel, base.SegmentIds)
ring_attention = _RingAttention()
