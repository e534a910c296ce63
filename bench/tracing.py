"""What tracing and lowering a halo layer costs as the sequence grows: our kernels, and splash attention's own masks.

    python bench/tracing.py [--longest 1048576]

A LOCAL_SLIDING layer with W = 1024 on 8 ranks, forward and gradients, from abstract arrays: equations of its jaxpr,
bytes of its StableHLO, seconds of processor, for each local kernel. Beside them the tables that JAX splash attention
builds on the host for one rank's rows and their halo, where it is given a mask (`make_splash_mha`) instead of visited
blocks.
Prints a Markdown table for docs/strategies.md.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")

import jax  # after its environment
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import impl

RANKS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 8, 4, 256, 1024


class Cost(NamedTuple):
    """What one program, or one mask, costs before anything is compiled; seconds of processor."""

    counts: str
    seconds: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=2**20, help="longest sequence, tokens")
    arguments = parser.parse_args()
    columns: dict[str, Callable[[int], Cost]] = {
        "kernel xla: equations, StableHLO": lambda seq_len: layer(seq_len, "xla"),
        "kernel splash: equations, StableHLO": lambda seq_len: layer(seq_len, "splash"),
        "splash's own mask: blocks, tables": splash_tables,
    }
    print(f"| tokens | rows of a rank | {' | '.join(columns)} |")
    print(f"| --- | --- |{' --- |' * len(columns)}")
    lengths = [2**power for power in range(14, 21, 2) if 2**power <= arguments.longest]
    for seq_len in lengths:
        costs = [column(seq_len) for column in columns.values()]
        cells = " | ".join(f"{cost.counts}, {cost.seconds:.1f} s" for cost in costs)
        print(f"| {seq_len:,} | {seq_len // RANKS:,} | {cells} |", flush=True)


def layer(seq_len: int, local_kernel: str) -> Cost:
    """The whole layer and its VJP, traced and lowered."""
    mesh = Mesh(np.array(jax.devices()), ("context",))
    config = impl.AttentionConfig(
        local_context_parallel_strategy="halo", sliding_window_size=WINDOW, local_kernel=local_kernel
    )

    def abstract(heads: int) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
        return jax.ShapeDtypeStruct((1, seq_len, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding)

    def step(query: Any, key: Any, value: Any, dout: Any) -> Any:
        def attention(*inputs: Any) -> Any:
            kind = impl.AttentionType.LOCAL_SLIDING
            return impl.attention(*inputs, mesh=mesh, config=config, attention_type=kind)

        out, vjp = jax.vjp(attention, query, key, value)
        return out, vjp(dout)

    started_at = time.process_time()
    traced = jax.jit(step).trace(abstract(HEADS), abstract(KV_HEADS), abstract(KV_HEADS), abstract(HEADS))
    text = traced.lower().as_text()
    seconds = time.process_time() - started_at
    return Cost(f"{equations(traced.jaxpr.jaxpr):,}, {len(text) / 2**10:,.0f} KiB", seconds)


def equations(jaxpr: Any) -> int:
    """All equations, those of inner programs included."""
    count = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            count += equations(inner) if hasattr(inner, "eqns") else 0
    return count


def splash_tables(seq_len: int) -> Cost:
    """Splash's own way: the mask of one rank's queries over its halo and its rows, made into tables on the host."""
    rows, block = seq_len // RANKS, min(512, seq_len // RANKS)
    local = splash_mask.LocalMask((rows, rows + WINDOW), (WINDOW - 1, 0), WINDOW)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    started_at = time.process_time()
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([local] * HEADS), head_shards=1, q_seq_shards=1, block_sizes=sizes
    )
    seconds = time.process_time() - started_at
    tables = sum(leaf.nbytes for leaf in jax.tree.leaves(kernel) if hasattr(leaf, "nbytes"))
    blocks = (rows // block) * ((rows + WINDOW) // block)
    return Cost(f"{blocks:,}, {tables / 2**10:,.0f} KiB", seconds)


if __name__ == "__main__":
    main()
