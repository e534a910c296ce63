"""Compiled for an absent v6e, at 128K tokens: what travels, how wide, behind which kernel, and in how much memory.

Needs libtpu (`pip install halocheck[aot]`); compiles in a process of its own, since libtpu reads the environment once.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

from impl.wire_bytes import LayerShape, WireBytes, wire_bytes

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

fields, kv_heads, dtype = json.loads(sys.argv[1])
topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4")
tensor, ulysses, head_dim = (fields.pop(*field) for field in (("tensor", 1), ("ulysses", 1), ("head_dim", 256)))
devices = np.array(topology.devices).reshape(8 // tensor // ulysses, ulysses, tensor)
mesh = Mesh(devices, ("context", "ulysses", "tensor"))
config = impl.AttentionConfig(sliding_window_size=1024, **fields)
local = config.local_context_parallel_strategy
kind = impl.AttentionType.LOCAL_SLIDING if local else impl.AttentionType.GLOBAL

def shape(heads):
    sequence = ("context", "ulysses") if ulysses > 1 else "context"
    spec = PartitionSpec(None, sequence, "tensor" if heads % tensor == 0 else None)
    return jax.ShapeDtypeStruct((1, 131072, heads, head_dim), dtype, sharding=NamedSharding(mesh, spec))

def step(query, key, value, dout):
    def attention(*inputs):
        return impl.attention(*inputs, mesh=mesh, config=config, attention_type=kind)
    out, vjp = jax.vjp(attention, query, key, value)
    return out, vjp(dout)

compiled = jax.jit(step).lower(shape(16), shape(kv_heads), shape(kv_heads), shape(16)).compile()
print(json.dumps({"hlo": compiled.as_text(), "temporary": compiled.memory_analysis().temp_size_in_bytes}))
"""

KERNEL = r"(?:splash_mha_(?:fwd|dq|dkv)|pallas_halo_(?:forward|backward))"
COLLECTIVE = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def compiled_for_v6e(kv_heads: int = 8, dtype: str = "bfloat16", **fields) -> dict:
    environment = dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v6e-8",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([fields, kv_heads, dtype])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, f"compiling failed:\n{run.stderr[-3000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def stated(strategy: str, load_balance: bool, window: tuple[int | None, int], ulysses: int = 1) -> WireBytes:
    """What docs/strategies.md states for the layer of PROGRAM."""
    return wire_bytes(
        LayerShape(
            strategy=strategy,
            layout="dual_chunk_swap" if load_balance else "contiguous",
            context_parallelism=8 // ulysses,
            ulysses_parallelism=ulysses,
            seq_len=131072,
            window=window,
            num_query_heads=16,
            num_kv_heads=8,
            head_dim=256,
            value_dim=256,
        )
    )


def schedule(hlo: str) -> list[str]:
    """The names of the collectives and kernels of the entry computation, in the order in which they run."""
    entry = hlo[hlo.index("ENTRY ") :]
    return re.findall(rf"%((?:{COLLECTIVE})(?:-start|-done)?(?:\.\d+)?|{KERNEL}\w*(?:\.\d+)?) = \(?[a-z]", entry)


def between(order: list[str], start: str) -> list[str]:
    return order[order.index(start) + 1 : order.index(start.replace("-start", "-done"))]


@pytest.mark.parametrize("load_balance", [False, True], ids=["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [("", "pallas_halo_forward", "pallas_halo_backward"), ("splash", "splash_mha_fwd", "splash_mha_d")],
    ids=["default", "splash"],
)
def test_the_interior_kernels_run_while_the_halo_travels(
    load_balance, kernel, forward, backward, received_in_hlo
) -> None:
    compiled = compiled_for_v6e(
        local_context_parallel_strategy="halo", context_parallel_load_balance=load_balance, local_kernel=kernel
    )
    order = schedule(compiled["hlo"])
    permutes = [name for name in order if name.startswith("collective-permute-start")]
    assert len(permutes) == (8 if load_balance else 4), "keys and values, forward and back, once for each chunk"
    behind = {start: [name for name in between(order, start) if re.match(KERNEL, name)] for start in permutes}
    assert all(behind.values()), f"a transfer is not hidden behind a kernel: {behind}"
    hiding = [name for kernels in behind.values() for name in kernels]
    for phase in (forward, backward):
        assert any(name.startswith(phase) for name in hiding), (
            f"hidden behind {phase} of the layer's kernel, got {hiding}"
        )
    others = [name for name in order if re.match(COLLECTIVE, name) and "collective-permute" not in name]
    assert others == [], f"halo needs no other collective: {others}"
    assert compiled["temporary"] < 2**30, "no array of the whole sequence's size"
    expected = stated("halo", load_balance, (1023, 0))
    received = received_in_hlo(compiled["hlo"], 8)
    assert received == expected.forward + expected.backward, "the bytes that the table states, and no more"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_smaller_head_dims_compile_too(head_dim) -> None:
    compiled = compiled_for_v6e(local_context_parallel_strategy="halo", head_dim=head_dim, local_kernel="splash")
    kernels = [name for name in schedule(compiled["hlo"]) if "splash" in name]
    assert len(kernels) >= 6, f"forward, dq and dkv of interior and boundary: {kernels}"


def collective_dtypes(hlo: str, kind: str) -> set[str]:
    return set(re.findall(rf"= \(?([a-z0-9]+)\[[^=]*? {kind}(?:-start)?\(", hlo))


def test_all_gather_sums_its_gradients_in_float32(received_in_hlo) -> None:
    hlo = compiled_for_v6e(context_parallel_strategy="all_gather")["hlo"]
    assert collective_dtypes(hlo, "reduce-scatter") == {"f32"}, "XLA narrows such sums unless it is kept from it"
    assert collective_dtypes(hlo, "all-reduce") == set(), "a reduce-scatter, not an all-reduce of twice the bytes"
    check_bytes(received_in_hlo(hlo, 8), stated("all_gather", False, (None, 0)))


def test_replicated_kv_heads_sum_their_gradients_in_float32() -> None:
    hlo = compiled_for_v6e(kv_heads=1, tensor=2, local_context_parallel_strategy="halo")["hlo"]
    assert collective_dtypes(hlo, "all-reduce") == {"f32"}, "the sum over tensor shards must not be rounded on the way"


def check_bytes(received: int, expected: WireBytes) -> None:
    """XLA may take from the forward what the backward would fetch again, and adds nothing."""
    assert expected.backward <= received <= expected.forward + expected.backward, "no more than the table states"


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize("load_balance", [False, True], ids=["contiguous", "dual_chunk_swap"])
def test_other_strategies_compile_and_fit(strategy, load_balance, received_in_hlo) -> None:
    ulysses = 2 if strategy == "usp" else 1
    compiled = compiled_for_v6e(
        context_parallel_strategy=strategy, context_parallel_load_balance=load_balance, ulysses=ulysses
    )
    assert compiled["temporary"] < 8 * 2**30, "fits beside a model in a v6e's 32 GiB"
    assert "splash_mha_fwd" in compiled["hlo"], "Pallas kernels, chosen by the platform of the mesh's devices"
    check_bytes(received_in_hlo(compiled["hlo"], 8), stated(strategy, load_balance, (None, 0), ulysses))
