"""What XLA does around the Pallas halo kernels of a local layer, forward and gradients, by its own estimate of cycles.

Compiles the layer (128K tokens, 8 ranks, W = 1024, bfloat16) for an absent TPU; nothing is executed. Twice: with the
arrays' layouts left to XLA, as they are inside a model, and with those that arrays have when they enter a program,
where heads stand beside head_dim and must be moved. Needs libtpu (`pip install halocheck[aot]`).
`python bench/tpu_layer.py [v6e:2x4 | tpu7x:2x2x2]`
"""

import os
import re
import sys
from typing import Any

from conformance.aot.compiler import compiler_environment

MODELS = {"Gemma 4 26B-A4B": (16, 8, 256), "Gemma 3 27B": (32, 16, 128)}
"""Query heads, kv heads, head_dim of the local layers."""
TOKENS, WINDOW = 131072, 1024
LARGE = 50_000
"""Cycles from which an operation is named."""


def main(topology: str) -> None:
    """Prints a table, whose last column names each large operation."""
    os.environ.update(compiler_environment(topology))
    print("| topology | model | layouts | cycles around the kernels | temporary MiB | large operations |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        for layouts in ("left to XLA", "of arrays that enter the program"):
            compiled = compile_layer(topology, model, layouts == "left to XLA")
            operations = estimates(compiled.as_text())
            large = ", ".join(f"{name} {cycles}" for name, cycles in operations.items() if cycles >= LARGE)
            memory = compiled.memory_analysis().temp_size_in_bytes // 2**20
            figures = f"{sum(operations.values())} | {memory} | {large or '–'}"
            print(f"| {topology} | {model} | {layouts} | {figures} |", flush=True)


def estimates(hlo: str) -> dict[str, int]:
    """XLA's estimated cycles of each operation of the entry computation; kernels and transfers have none."""
    entry = hlo[hlo.index("ENTRY ") :]
    found = re.findall(r'(?m)^\s*(?:ROOT )?%?([\w.\-]+) = .*"estimated_cycles":"(\d+)"', entry)
    return {name: int(cycles) for name, cycles in found}


def compile_layer(topology: str, model: str, free_layouts: bool) -> Any:
    """The layer's forward and gradients, compiled for eight devices of a topology."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.layout import Format, Layout
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import impl

    query_heads, kv_heads, head_dim = MODELS[model]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:8]
    mesh = Mesh(np.array(devices), ("context",))
    config = impl.AttentionConfig(
        sliding_window_size=WINDOW,
        local_context_parallel_strategy="halo",
        local_kernel="pallas_halo",
        context_parallel_load_balance=False,
    )

    def layer(query: Any, key: Any, value: Any) -> Any:
        kind = impl.AttentionType.LOCAL_SLIDING
        return impl.attention(query, key, value, mesh=mesh, config=config, attention_type=kind)

    def step(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, vjp = jax.vjp(layer, query, key, value)
        return out, vjp(dout)

    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    placed = Format(Layout.AUTO, sharding) if free_layouts else sharding
    shapes = [
        jax.ShapeDtypeStruct((1, TOKENS, heads, head_dim), jnp.bfloat16)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    ]
    return jax.jit(step, in_shardings=placed, out_shardings=placed).lower(*shapes).compile()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["v6e:2x4"]))
