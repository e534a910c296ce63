"""JAX's Pallas splash attention as a target, by its own public face: `conformance.targets.jax_splash:splash_attention`.

Interpreted, and slow, where there is no TPU. (`bundled:halo_splash` runs the same kernels under our own masks.)
May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import NamedSharding, PartitionSpec

from conformance.problem import Problem
from conformance.targets.gathered import Kernel, sequence_axes
from conformance.targets.gathered_splash import GatheredSplash
from conformance.targets.splash_rows import BLOCK, padded_window

_BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


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


splash_attention = GatheredSplash("jax_splash", _kernel, splash.SegmentIds)
