"""The Pallas halo kernels compile for every generation of TPU, at 128K tokens, whatever a layer has.

Needs libtpu (`pip install halocheck[aot]`); compiled, not executed. Each topology has a process of its own, since
libtpu reads the environment once.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest

from conformance.aot.topologies import GENERATIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: halocheck[aot]"),
]

PROGRAM = """
import itertools, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import impl

topology, load_balance, transfer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:8]
mesh = Mesh(np.array(devices), ("context",))

def shape(*sizes, dtype=jnp.bfloat16, spec=PartitionSpec(None, "context")):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

def compiled(head_dim, everything):
    config = impl.AttentionConfig(
        local_context_parallel_strategy="halo", local_kernel="pallas_halo", halo_transfer=transfer,
        sliding_window_size=1024,
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
for head_dim, everything in itertools.product((64, 96, 128, 256), (False, True)):
    layer = f"head_dim {head_dim}, {'ids, sinks and cap' if everything else 'plain'}"
    try:
        results[layer] = compiled(head_dim, everything)
    except Exception as error:
        results[layer] = str(error)[:500]
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("load_balance", "transfer"),
    list(itertools.product((False, True), ("permute", "remote_copy_or_permute"))),
    ids=[f"{layout}{how}" for layout in ("contiguous", "dual_chunk_swap") for how in ("", " by remote copy")],
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_compiles_forward_and_backward(generation, load_balance, transfer) -> None:
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE=GENERATIONS[generation].accelerator,
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    topology = GENERATIONS[generation].default_topology
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology, json.dumps(load_balance), transfer],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert run.returncode == 0, f"compiling failed:\n{run.stderr[-3000:]}"
    results = json.loads(run.stdout.splitlines()[-1])
    assert len(results) == 8, "four head_dims, with and without ids, sinks and soft cap"
    for layer, kernels in results.items():
        # A remote copy moves whole lanes, and never segment ids.
        by_copy = transfer != "permute" and layer in ("head_dim 128, plain", "head_dim 256, plain")
        expected = {"pallas_halo_forward": True, "pallas_halo_backward": True, "collective-permute": not by_copy}
        assert kernels == expected, f"{layer} on {topology}: both kernels, and what moves the halo, got {kernels}"
