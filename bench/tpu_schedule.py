"""Bundles that the Pallas halo kernels take by libtpu's static schedule, beside JAX's splash attention and the limit.

Compiles, for an absent TPU, the interior call of one local layer's chunk (128K tokens, 8 ranks, W = 1024, bfloat16);
nothing is executed. Needs libtpu (`pip install halocheck[aot]`).
`python bench/tpu_schedule.py [v6e:2x4 | tpu7x:2x2x2 …]`
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TOPOLOGIES = ("v6e:2x4", "tpu7x:2x2x2")
MODELS = {"Gemma 4 26B-A4B": (16, 8, 256), "Gemma 3 27B": (32, 16, 128)}
"""Query heads, kv heads, head_dim of the local layers."""
KERNELS = ("pallas_halo_forward", "pallas_halo_backward", "splash_forward", "splash_backward")
ROWS, WINDOW, BLOCK = 131072 // 8, 1024, 512
MATRIX_UNIT = 4 * 256 * 256
"""Multiplications that a v6e's matrix units do a bundle."""


class Schedule(NamedTuple):
    """Of one kernel. hot: bundles of its longest stretch without a branch. program: all its bundles, each counted once.
    steps: grid steps that compute for 512 queries of one head."""

    hot: int
    program: int
    steps: float


def main(topologies: list[str]) -> None:
    """Prints a table: hot · steps, and program · steps as the bound when every step ran every branch."""
    print("| topology | model | kernel | bundles for 512 queries of a head | if every branch ran | matrix-unit limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for topology in topologies:
        for model, (_, _, head_dim) in MODELS.items():
            for kernel in KERNELS:
                schedule = schedule_of(topology, model, kernel)
                matmuls = 2 if kernel.endswith("forward") else 5
                limit = matmuls * BLOCK * WINDOW * head_dim // MATRIX_UNIT
                hot, every = (round(bundles * schedule.steps) for bundles in schedule[:2])
                print(f"| {topology} | {model} | {kernel} | {hot} | {every} | {limit} |", flush=True)


def schedule_of(topology: str, model: str, kernel: str) -> Schedule:
    """Compiles a kernel in a process of its own, since libtpu reads where to dump once."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v6e-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, __file__, "--compile", topology, model, kernel]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"compiling {kernel} for {topology} failed:\n{run.stderr[-2000:]}")
        steps = json.loads(run.stdout.splitlines()[-1])
        # A program that differentiates splash contains its forward too.
        name = {"splash_forward": "splash_mha_fwd", "splash_backward": "splash_mha_d"}.get(kernel, kernel)
        files = [
            path
            for path in Path(dump).glob("*-final_bundles.txt")
            if name in path.name and "schedule-analysis" not in path.name
        ]
        counts = [bundles_of(path.read_text()) for path in files]
        if len(counts) != 1:
            raise RuntimeError(f"{kernel}: one kernel of that name was to be scheduled, found {len(counts)}")
        return Schedule(*counts[0], steps)


def bundles_of(text: str) -> tuple[int, int]:
    """(bundles of the longest stretch without branch or label, all bundles) of a kernel's final program."""
    bundles = re.findall(r"(?m)^\s*(?:0x[0-9a-f]+|0)\s+((?:L[BHE]|P[BF]|CT)?)\s*:(.*)$", text)
    cuts = [0, *(index for index, (label, body) in enumerate(bundles) if label or "sbr." in body), len(bundles)]
    return max(after - before for before, after in itertools.pairwise(cuts)), len(bundles)


def compile_kernel(topology: str, model: str, kernel: str) -> float:
    """Compiles one kernel for the first device of a topology; returns its steps for 512 queries of one head."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    sharding = NamedSharding(Mesh(np.array(description.devices[:1]), ("one",)), PartitionSpec())
    program, shapes, steps = (_splash if kernel.startswith("splash") else _pallas_halo)(model, kernel)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    jax.jit(program).lower(*arguments).compile()
    return steps


def _pallas_halo(model: str, kernel: str) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]], float]:
    import jax.numpy as jnp

    from impl.kernels.interface import KernelConfig
    from impl.kernels.pallas_blocks import Band
    from impl.kernels.pallas_halo import Blocks
    from impl.kernels.pallas_halo_backward import BackwardResult, BandCotangents, band_backward
    from impl.kernels.pallas_halo_forward import BandOperands, band_forward

    num_query_heads, num_kv_heads, dim = MODELS[model]
    group, blocks = num_query_heads // num_kv_heads, Blocks.fitting(ROWS, WINDOW - 1)
    outer = -(-(WINDOW - 1) // blocks.block)
    inner, final = ROWS // blocks.block - outer, (ROWS - WINDOW + 1) // blocks.block
    band = Band(WINDOW - 1, blocks.block, blocks.tile, outer, inner, num_kv_heads, num_kv_heads, group, final)
    config = KernelConfig((WINDOW - 1, 0), dim**-0.5)
    narrow, wide = jnp.bfloat16, jnp.float32
    queries, keys = ((num_kv_heads, group, ROWS, dim), narrow), ((num_kv_heads, ROWS, dim), narrow)
    rows, tail = (queries[0][:3], wide), ((num_kv_heads, outer * blocks.block, dim), wide)
    shapes = [((1,), jnp.int32), queries, keys, keys]
    steps = BLOCK / (blocks.block * group)

    def forward(lowest: Any, query: Any, key: Any, value: Any) -> Any:
        return band_forward(BandOperands(query, key, value, None, None, lowest), band, config)

    def backward(lowest: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        dout, lse, dlse, out, dquery, tail_key, tail_value = rest
        operands = BandOperands(query, key, value, None, None, lowest)
        into = BackwardResult(dquery, None, None, tail_key, tail_value, None, None)
        return band_backward(operands, BandCotangents(dout, lse, dlse, out), band, config, narrow, into)

    if kernel.endswith("forward"):
        return forward, shapes, steps
    return backward, [*shapes, queries, rows, rows, queries, queries, tail, tail], steps


def _splash(model: str, kernel: str) -> tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]], float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    num_query_heads, num_kv_heads, dim = MODELS[model]
    rows = ROWS // 4  # Of the schedule's length nothing depends on the rows, but splash builds its mask on the host.
    mask = masks.MultiHeadMask([masks.LocalMask((rows, rows), (WINDOW - 1, 0), 0)] * num_query_heads)
    sizes = splash.BlockSizes(
        block_q=BLOCK,
        block_kv=BLOCK,
        block_kv_compute=BLOCK,
        block_q_dkv=BLOCK,
        block_kv_dkv=BLOCK,
        block_kv_dkv_compute=BLOCK,
        use_fused_bwd_kernel=True,
    )
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    queries, keys = (num_query_heads, rows, dim), (num_kv_heads, rows, dim)
    shapes: list[tuple[tuple[int, ...], Any]] = [(queries, jnp.bfloat16), (keys, jnp.bfloat16), (keys, jnp.bfloat16)]

    steps = float((WINDOW - 1 + BLOCK) // BLOCK + 1)
    if kernel.endswith("forward"):
        return attend, shapes, steps
    return lambda *inputs: jax.vjp(attend, *inputs[:3])[1](inputs[3]), [*shapes, (queries, jnp.bfloat16)], steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        print(json.dumps(compile_kernel(*sys.argv[2:5])))
    else:
        main(sys.argv[1:] or list(TOPOLOGIES))
