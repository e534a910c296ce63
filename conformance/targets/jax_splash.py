"""JAX's Pallas splash attention as a target, by its own public face: `conformance.targets.jax_splash:splash_attention`.

Under context parallelism K and V are gathered, and the mask is sharded over the queries, as its authors mean it.
Interpreted, and slow, where there is no TPU. (`bundled:halo_splash` runs the same kernels under our own masks.)
May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import NamedSharding, PartitionSpec

from conformance.problem import Problem
from conformance.targets.gathered import Kernel, Rows, attention_on_gathered_keys, declined_problem, sequence_axes
from conformance.targets.splash_rows import BLOCK, padded_window, run_kernel

_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


@dataclass(frozen=True)
class _SplashAttention:
    """`make_splash_mha` on gathered keys."""

    name: str = "jax_splash"
    communication: str = "all_gather"
    precision: Mapping[str, bool] = field(default_factory=lambda: {"prescaled_query": True, "rounded_partials": True})

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline."""
        return declined_problem(problem)

    def attention(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem, mesh: Any, **context: Any
    ) -> jax.Array:
        """out, by the target contract."""

        def attend(rows: Rows, kernel: Any) -> jax.Array:
            return run_kernel(kernel, splash.SegmentIds, rows, problem)

        kernel = _kernel(problem, mesh)
        return attention_on_gathered_keys(
            query, key, value, problem=problem, mesh=mesh, attend=attend, kernel=kernel, **context
        )


def _kernel(problem: Problem, mesh: jax.sharding.Mesh) -> Kernel:
    """The kernel with its mask, and where each part of the mask lies."""
    window = splash_mask.NumpyMask(padded_window(problem, pad_each_rank_of_keys=False))
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([window] * problem.num_query_heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(_BLOCKS, BLOCK)),
        attn_logits_soft_cap=problem.attn_logits_soft_cap,
        head_shards=problem.tensor_parallelism,
        q_seq_shards=problem.context_parallelism * problem.ulysses_parallelism,
        interpret=next(iter(mesh.devices.flat)).platform != "tpu",
    )
    spec = PartitionSpec("tensor" if problem.tensor_parallelism > 1 else None, sequence_axes(problem))
    return Kernel(kernel, kernel.manual_sharding_spec(NamedSharding(mesh, spec)))


splash_attention = _SplashAttention()
