"""The Pallas halo kernels compile for every generation of TPU, at 128K tokens, whatever a layer has.

Needs libtpu (`pip install halocheck[aot]`); compiled, not executed. Each topology has a process of its own, since
libtpu reads the environment once.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from conformance.aot.compiler import compiler_environment
from conformance.aot.topologies import GENERATIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: halocheck[aot]"),
]

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import impl

topology, load_balance, transfer, layers = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:8]
mesh = Mesh(np.array(devices), ("context",))

def shape(*sizes, dtype=jnp.bfloat16, spec=PartitionSpec(None, "context")):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

def compiled(head_dim, window, everything):
    config = impl.AttentionConfig(
        local_context_parallel_strategy="halo", local_kernel="pallas_halo", halo_transfer=transfer,
        sliding_window_size=window,
        context_parallel_load_balance=load_balance, attn_logits_soft_cap=50.0 if everything else None,
    )
    extra = [shape(1, 131072, dtype=jnp.int32), shape(16, dtype=jnp.float32, spec=PartitionSpec())]

    def step(query, key, value, dout, *rest):
        segment_ids, sinks = rest or (None, None)
        def attention(query, key, value, sinks):
            return impl.attention(
                query, key, value, mesh=mesh, config=config, attention_type=impl.AttentionType.LOCAL_SLIDING,
                segment_ids=segment_ids, padding_segment_id=0 if everything else None, sinks=sinks,
            )
        out, vjp = jax.vjp(attention, query, key, value, sinks)
        return out, vjp(dout)

    query, key = shape(1, 131072, 16, head_dim), shape(1, 131072, 8, head_dim)
    hlo = jax.jit(step).lower(query, key, key, query, *(extra if everything else ())).compile().as_text()
    return {name: f"{name}" in hlo for name in ("pallas_halo_forward", "pallas_halo_backward", "collective-permute")}

results = {}
for head_dim, window, everything in layers:
    try:
        results[head_dim] = compiled(head_dim, window, everything)
    except Exception as error:
        results[head_dim] = str(error)[:500]
print(json.dumps(results))
"""


# (head_dim, window, with segment ids, sinks and a soft cap). A layer takes half a minute of CPU, of Gemma 4's window of
# 1024 a whole one: every head_dim, with and without, and each way to fetch the halo in each layout, but not all of all.
PERMUTE, REMOTE_COPY = "permute", "remote_copy"
LAYERS = {
    ("contiguous", PERMUTE): [(64, 512, True), (96, 512, False), (128, 512, True), (256, 1024, False)],
    ("dual_chunk_swap", PERMUTE): [(64, 512, False), (256, 512, True)],
    # A remote copy moves whole lanes: multiples of 128.
    ("contiguous", REMOTE_COPY): [(128, 1024, False), (256, 512, True)],
    ("dual_chunk_swap", REMOTE_COPY): [(128, 512, True), (256, 512, False)],
}


@pytest.mark.parametrize(("layout", "transfer"), LAYERS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_compiles_forward_and_backward(generation: str, layout: str, transfer: str) -> None:
    layers = LAYERS[layout, transfer]
    topology = GENERATIONS[generation].default_topology
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology, json.dumps(layout != "contiguous"), transfer, json.dumps(layers)],
        env=compiler_environment(topology),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert run.returncode == 0, f"compiling failed:\n{run.stderr[-3000:]}"
    results = json.loads(run.stdout.splitlines()[-1])
    assert len(results) == len(layers), "each layer tells"
    for head_dim, _, everything in layers:
        # Segment ids, four bytes a row, always travel by permute.
        permutes = transfer == PERMUTE or everything
        expected = {"pallas_halo_forward": True, "pallas_halo_backward": True, "collective-permute": permutes}
        kernels = results[str(head_dim)]
        assert kernels == expected, f"head_dim {head_dim}: both kernels, and what moves the halo, got {kernels}"
