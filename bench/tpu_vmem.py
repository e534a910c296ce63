"""What libtpu counts of VMEM for the Pallas halo kernels, beside the estimate by which their blocks are chosen.

Compiles the interior calls of published models' local layers (128K tokens, 8 ranks, bfloat16) for an absent TPU, and
reads the compiler's own report, spills included. Needs libtpu (`pip install halocheck[aot]`).
`python bench/tpu_vmem.py [v6e:2x4 | tpu7x:2x2x2]`
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from interior_calls import ROWS, LayerHeads, interior_calls

from conformance.aot.bundles import dump_arguments
from conformance.aot.compiler import compiler_environment

MODELS = {
    "Gemma 4 26B-A4B": LayerHeads(16, 8, 256, 1024),
    "Gemma 3 27B": LayerHeads(32, 16, 128, 1024),
    "Mistral 7B v0.1": LayerHeads(32, 8, 128, 4096),
    "gpt-oss 20B": LayerHeads(64, 8, 128, 128),
}
MIB = 2**20


def main(topology: str) -> None:
    """Prints a table, a kernel a line."""
    with tempfile.TemporaryDirectory() as dump:
        os.environ.update(compiler_environment(topology) | {"LIBTPU_INIT_ARGS": dump_arguments(Path(dump))})
        measure(topology, Path(dump))


def measure(topology: str, dump: Path) -> None:
    """libtpu, which reads the environment once, writes its reports to `dump`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from impl.kernels.pallas_fit import Blocks, RowSizes, vmem_of

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    print("| topology | model | block | kernel | reported MiB | estimated MiB | limit MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model, layer in MODELS.items():
        sizes = RowSizes(2 * layer.head_dim, layer.num_query_heads // layer.num_kv_heads, 2, segment_ids=False)
        blocks = Blocks.fitting(ROWS, layer.window - 1, sizes, vmem_of(device))
        if blocks is None:
            print(f"| {topology} | {model} | declined | – | – | – | {vmem_of(device) // MIB} |", flush=True)
            continue
        estimated = blocks.vmem_bytes(ROWS, layer.window - 1, sizes) / MIB
        calls = interior_calls(layer, blocks.block, blocks.tile, vmem_of(device))
        for name, (program, shapes) in calls.items():
            arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
            jax.jit(program).lower(*arguments).compile()
            figures = f"{reported(dump, name):.1f} | {estimated:.1f} | {vmem_of(device) // MIB}"
            print(f"| {topology} | {model} | {blocks.block} | {name} | {figures} |", flush=True)


def reported(dump: Path, name: str) -> float:
    """MiB of the kernel's whole allocation, out of the newest of the reports that name it."""
    start = f'"pallas_halo_{name}.1": '
    for path in sorted(dump.glob("*-vmem_report.html"), reverse=True):
        _, found, rest = path.read_text(encoding="utf-8").partition(start)
        if found:
            kernel, _ = json.JSONDecoder().raw_decode(rest)
            return kernel["total_size"] / MIB
    raise RuntimeError(f"libtpu wrote no report of pallas_halo_{name}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["v6e:2x4"]))
