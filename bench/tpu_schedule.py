"""Bundles that the Pallas halo kernels take by libtpu's static schedule, beside splash attention's and the limit.

Compiles, for an absent TPU, the interior call of one local layer's chunk (128K tokens, 8 ranks, W = 1024, bfloat16);
nothing is executed. JAX's and, where it is installed, tokamax's splash attention run with the best of three sizes of
blocks. Needs libtpu (`pip install halocheck[aot]`).
`python bench/tpu_schedule.py [v6e:2x4 | tpu7x:2x2x2 …]`
"""

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interior_calls import ROWS, LayerHeads, ShapesAndDtypes, interior_calls

from conformance.aot.bundles import Schedule, dump_arguments, schedule_of
from conformance.aot.compiler import compiler_environment

TOPOLOGIES = ("v6e:2x4", "tpu7x:2x2x2")
WINDOW, QUERIES = 1024, 512
MODELS = {
    "Gemma 4 26B-A4B": LayerHeads(16, 8, 256, WINDOW),
    "Gemma 3 27B": LayerHeads(32, 16, 128, WINDOW),
}
LIBRARIES = {
    "jax": "jax.experimental.pallas.ops.tpu.splash_attention",
    "tokamax": "tokamax._src.ops.experimental.tpu.splash_attention",
}
"""Where each keeps its splash attention."""
KERNELS = tuple(
    f"{name}_{way}"
    for name in ("pallas_halo", *(f"{library}_splash" for library in LIBRARIES if importlib.util.find_spec(library)))
    for way in ("forward", "backward")
)
SPLASH_BLOCKS = (256, 512, 1024)
MATRIX_UNIT = 4 * 256 * 256
"""Multiplications that a v6e's matrix units do a bundle."""


def main(topologies: list[str]) -> None:
    """Prints a table: hot · steps, and program · steps as the bound when every step ran every branch."""
    print("| topology | model | kernel | bundles for 512 queries of a head | if every branch ran | matrix-unit limit |")
    print("| --- | --- | --- | --- | --- | --- |")
    for topology in topologies:
        for model, layer in MODELS.items():
            for kernel in KERNELS:
                matmuls = 2 if kernel.endswith("forward") else 5
                limit = matmuls * QUERIES * WINDOW * layer.head_dim // MATRIX_UNIT
                hot, every, block = best(topology, model, kernel)
                with_blocks = f", blocks of {block}" if block else ""
                print(f"| {topology} | {model} | {kernel}{with_blocks} | {hot} | {every} | {limit} |", flush=True)


def best(topology: str, model: str, kernel: str) -> tuple[int, int, int]:
    """(hot · steps, program · steps, block) with the blocks that take the fewest bundles; ours know their own: 0."""
    tried = []
    for block in SPLASH_BLOCKS if "splash" in kernel else (0,):
        schedule, steps = compiled_schedule(topology, model, kernel, block)
        tried.append((round(schedule.hot * steps), round(schedule.program * steps), block))
    return min(tried)


def compiled_schedule(topology: str, model: str, kernel: str, block: int) -> tuple[Schedule, float]:
    """The schedule of a kernel, and the grid steps that compute for 512 queries of one head.

    Compiled in a process of its own, since libtpu reads where to dump once.
    """
    with tempfile.TemporaryDirectory() as dump:
        environment = compiler_environment(topology) | {"LIBTPU_INIT_ARGS": dump_arguments(Path(dump))}
        command = [sys.executable, __file__, "--compile", topology, model, kernel, str(block)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"compiling {kernel} for {topology} failed:\n{run.stderr[-2000:]}")
        steps = json.loads(run.stdout.splitlines()[-1])
        # A program that differentiates splash contains its forward too.
        own = "splash_mha_fwd" if kernel.endswith("forward") else "splash_mha_d"
        name = own if "splash" in kernel else kernel
        files = [
            path
            for path in Path(dump).glob("*-final_bundles.txt")
            if name in path.name and "schedule-analysis" not in path.name
        ]
        if len(files) != 1:
            raise RuntimeError(f"{kernel}: one kernel of that name was to be scheduled, found {len(files)}")
        return schedule_of(files[0].read_text(encoding="utf-8")), steps


def compile_kernel(topology: str, model: str, kernel: str, block: int) -> float:
    """Compiles one kernel for the first device of a topology; returns its steps for 512 queries of one head."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    sharding = NamedSharding(Mesh(np.array(description.devices[:1]), ("one",)), PartitionSpec())
    program, shapes, steps = _splash(model, kernel, block) if block else _pallas_halo(model, kernel)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    jax.jit(program).lower(*arguments).compile()
    return steps


def _pallas_halo(model: str, kernel: str) -> tuple[Callable[..., Any], ShapesAndDtypes, float]:
    from impl.kernels.pallas_fit import VMEM_OF_OTHERS, Blocks

    layer, blocks = MODELS[model], Blocks(1024, 256)
    calls = interior_calls(layer, blocks.block, blocks.tile, VMEM_OF_OTHERS)
    steps = QUERIES / (blocks.block * (layer.num_query_heads // layer.num_kv_heads))
    return *calls[kernel.removeprefix("pallas_halo_")], steps


def _splash(model: str, kernel: str, block: int) -> tuple[Callable[..., Any], ShapesAndDtypes, float]:
    import jax
    import jax.numpy as jnp

    library = LIBRARIES[kernel.partition("_")[0]]
    splash = importlib.import_module(f"{library}.splash_attention_kernel")
    masks = importlib.import_module(f"{library}.splash_attention_mask")
    num_query_heads, num_kv_heads, dim, _ = MODELS[model]
    rows = ROWS // 4  # Of the schedule's length nothing depends on the rows, but splash builds its mask on the host.
    mask = masks.LocalMask((rows, rows), (WINDOW - 1, 0), 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = dict.fromkeys(names, block) | {"use_fused_bwd_kernel": True}
    if library == LIBRARIES["jax"]:
        masks_of_heads = masks.MultiHeadMask([mask] * num_query_heads)
        block_sizes = splash.BlockSizes(**sizes)
        attend = splash.make_splash_mha(masks_of_heads, block_sizes=block_sizes, head_shards=1, q_seq_shards=1)
    else:
        attend = splash.make_splash_mha(mask, config=splash.SplashConfig(**sizes), q_seq_shards=1)
    queries, keys = (num_query_heads, rows, dim), (num_kv_heads, rows, dim)
    shapes: ShapesAndDtypes = [(queries, jnp.bfloat16), (keys, jnp.bfloat16), (keys, jnp.bfloat16)]

    blocks_of_keys = -(-(WINDOW - 1) // block) + 1
    steps = QUERIES / block * blocks_of_keys
    if kernel.endswith("forward"):
        return attend, shapes, steps
    return lambda *inputs: jax.vjp(attend, *inputs[:3])[1](inputs[3]), [*shapes, (queries, jnp.bfloat16)], steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        topology, model, kernel, block = sys.argv[2:6]
        print(json.dumps(compile_kernel(topology, model, kernel, int(block))))
    else:
        main(sys.argv[1:] or list(TOPOLOGIES))
