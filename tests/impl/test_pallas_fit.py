"""Blocks of the Pallas halo kernels fit into VMEM, and the default local kernel is chosen by the mesh's own devices.

Nothing is compiled: what a generation holds is checked by compiling in test_pallas_aot.py.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from impl import AttentionConfig, AttentionType, dispatch
from impl.config import resolve
from impl.kernels.pallas_fit import MIB, Blocks, RowSizes, vmem_of

GEMMA_4 = RowSizes(dims=512, group=2, itemsize=2, segment_ids=False)


def mesh_of(platform: str, kind: str) -> SimpleNamespace:
    """A mesh of eight devices that are not there, of which only what a choice may look at is known."""
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device] * 8), shape={"context": 8}, axis_names=("context",))


def kernel_on(mesh: SimpleNamespace, window: int = 1024, dtype=jnp.bfloat16, **fields) -> str:
    config = AttentionConfig(sliding_window_size=window, **{"local_context_parallel_strategy": "halo", **fields})
    query, key = (jax.ShapeDtypeStruct((1, 131072, heads, 256), dtype) for heads in (16, 8))
    operands = {"query": query, "key": key, "value": key, "segment_ids": None, "sinks": None}
    return dispatch.local_kernel(operands, mesh, config, resolve(config, AttentionType.LOCAL_SLIDING))


@pytest.mark.parametrize(
    ("kind", "mib", "block"),
    [
        ("TPU v4", 15, 256),
        ("TPU v5 lite", 100, 1024),
        ("TPU v5", 60, 1024),
        ("TPU v6 lite", 100, 1024),
        ("TPU7x", 60, 1024),
    ],
)
def test_a_layer_has_the_longest_blocks_that_a_generation_holds(kind, mib, block) -> None:
    vmem = vmem_of(SimpleNamespace(device_kind=kind))
    assert vmem // MIB == mib, "0.95 of the core's VMEM, at most 100 MiB"
    assert Blocks.fitting(16384, 1023, GEMMA_4, vmem) == Blocks(block, 256), "v4 alone has too little"


def test_what_the_compiler_counted_for_v4_is_no_more_than_the_estimate() -> None:
    # libtpu 0.0.42.1: "Used 18.95M of 16.00M vmem" by the backward, 19.69M with segment ids.
    blocks = Blocks(512, 256)
    assert 18.95 <= blocks.vmem_bytes(16384, 1023, GEMMA_4) / MIB < 20.5, "an estimate, on the safe side"
    with_ids = RowSizes(dims=512, group=2, itemsize=2, segment_ids=True)
    assert 19.69 <= blocks.vmem_bytes(16384, 1023, with_ids) / MIB < 21.5, "likewise with segment ids"


def test_what_the_compiler_reported_for_v6e_is_no_more_than_the_estimate() -> None:
    # libtpu 0.0.42.1, `python bench/tpu_vmem.py v6e:2x4`: of the backward with head_dim 256, of the forward with 128.
    gemma_3 = RowSizes(dims=256, group=2, itemsize=2, segment_ids=False)
    assert 26.7 <= Blocks(1024, 256).vmem_bytes(16384, 1023, GEMMA_4) / MIB < 28.5, "an estimate, on the safe side"
    assert 18.9 <= Blocks(1024, 256).vmem_bytes(16384, 1023, gemma_3) / MIB < 23.5, "likewise"


def test_a_long_window_has_shorter_blocks_where_the_compiler_refused_the_longest() -> None:
    # libtpu 0.0.42.1 for v6e, the forward of Mistral 7B: "size 113.23M and limit 100.00M".
    mistral = RowSizes(dims=256, group=4, itemsize=2, segment_ids=False)
    assert 113.23 <= Blocks(1024, 256).vmem_bytes(16384, 4095, mistral) / MIB < 140, "an estimate, on the safe side"
    assert Blocks.fitting(16384, 4095, mistral, 100 * MIB) == Blocks(256, 256), "which fits"
    assert 68.0 <= Blocks(512, 256).vmem_bytes(16384, 4095, mistral) / MIB < 72, "as reported, on the safe side"


def test_nothing_limits_blocks_that_are_interpreted() -> None:
    assert Blocks.fitting(2**17, 2**17, GEMMA_4, None) is not None, "an interpreter has no VMEM"


@pytest.mark.parametrize(("window_left", "block"), [(1023, 1024), (2047, 512), (4095, 256), (8191, 256)])
def test_the_longer_the_window_the_fewer_tiles_has_a_block(window_left, block) -> None:
    # A tile of queries has logits with 4, 8, 16 and 32 tiles of keys (the window's two edges fill one between them).
    assert Blocks.fitting(2**17, window_left, GEMMA_4, None) == Blocks(block, 256), (
        "at most 20 in all, or those of one tile of queries"
    )


def test_blocks_are_not_much_longer_than_the_window() -> None:
    assert Blocks.fitting(16384, 511, GEMMA_4, None) == Blocks(512, 256), "1024 would fetch twice the halo"
    assert Blocks.fitting(16384, 127, GEMMA_4, None) == Blocks(512, 128), "short tiles for a short window"


@pytest.mark.parametrize(
    ("mesh", "fields", "kernel"),
    [
        (mesh_of("tpu", "TPU v6 lite"), {}, "pallas_halo"),
        (mesh_of("tpu", "TPU v4"), {}, "pallas_halo"),
        (mesh_of("tpu", "TPU v6 lite"), {"window": 65536}, "splash"),
        (mesh_of("tpu", "TPU v6 lite"), {"local_context_parallel_strategy": "ring"}, "splash"),
        (mesh_of("tpu", "TPU v6 lite"), {"dtype": jnp.float16}, "xla"),
        (mesh_of("cpu", "cpu"), {}, "xla"),
    ],
    ids=["TPU", "least VMEM", "too large a window", "no halo", "float16", "CPU"],
)
def test_the_default_kernel_suits_the_devices_of_the_mesh(mesh, fields, kernel) -> None:
    assert kernel_on(mesh, **fields) == kernel, "by the mesh's devices, whatever backend the process has"


def test_a_kernel_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"local_kernel 'pallas_halo' cannot run this layer: .*VMEM.*\(65535, 0\)"):
        kernel_on(mesh_of("tpu", "TPU v4"), window=65536, local_kernel="pallas_halo")
