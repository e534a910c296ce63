"""The one public entry of the implementations: validates a call, resolves its layer, and runs the layer's strategy.

Touches no numbers. Tested in tests/impl/test_strategies.py, test_errors.py.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from impl import layout as layouts
from impl.all_gather import all_gather
from impl.config import AttentionConfig, AttentionType, ResolvedLayer, resolve
from impl.halo import halo
from impl.heads import plan_heads
from impl.kernels import pallas_halo, splash
from impl.kernels.interface import KernelConfig
from impl.kernels.pallas_fit import Blocks, RowSizes, vmem_of
from impl.layer import Layer
from impl.ring import ring
from impl.strategy import Operands
from impl.ulysses import ulysses
from impl.usp import usp
from impl.validation import check_call

STRATEGIES: dict[str, Callable[[Operands, Layer, Mesh], tuple[Array, Array]]] = {
    "all_gather": all_gather,
    "halo": halo,
    "ring": ring,
    "ulysses": ulysses,
    "usp": usp,
}


def attention(
    query: Float[Array, "batch seq_len num_query_heads head_dim"],
    key: Float[Array, "batch seq_len num_kv_heads head_dim"],
    value: Float[Array, "batch seq_len num_kv_heads value_dim"],
    *,
    mesh: Mesh,
    config: AttentionConfig,
    attention_type: AttentionType,
    segment_ids: Int32[Array, "batch seq_len"] | None = None,
    padding_segment_id: int | None = None,
    sinks: Float[Array, " num_query_heads"] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention of one layer over a sequence that is sharded over `mesh`'s context axis.

    Arrays are global, in the layout's order (`impl.reorder`), placed as PartitionSpec(data, context, tensor, None); kv
    heads are replicated where the tensor axis does not divide them. query, key and value share one dtype: bfloat16,
    float16, float32 or float64. Returns out `[batch, seq_len, num_query_heads, value_dim]` with dtype and placement of
    query; with `return_lse` also lse `[batch, seq_len, num_query_heads]`, float32 (float64 where the inputs are). A row
    that sees no key has out 0 and lse −inf, or its sink. Differentiable in query, key, value and sinks, for cotangents
    of both results.

    `ValueError` names the argument, its value and the rule, before anything is computed.
    """
    resolved = resolve(config, attention_type)
    operands = {"query": query, "key": key, "value": value, "segment_ids": segment_ids, "sinks": sinks}
    check_call(operands, mesh, config, resolved, padding_segment_id)
    layer = _layer(operands, mesh, config, resolved, padding_segment_id)
    out, lse = STRATEGIES[resolved.strategy](Operands(**operands), layer, mesh)
    return (out, lse) if return_lse else out


def _layer(
    operands: dict, mesh: Mesh, config: AttentionConfig, resolved: ResolvedLayer, padding_segment_id: int | None
) -> Layer:
    _, seq_len, num_query_heads, head_dim = operands["query"].shape
    tensor_axis = config.tensor_axis if config.tensor_axis in mesh.axis_names else None
    ulysses_axis = config.ulysses_axis if config.context_parallel_strategy == "usp" else None
    return Layer(
        layout=resolved.layout,
        seq_len=seq_len,
        context_parallelism=mesh.shape[config.context_axis],
        heads=plan_heads(
            num_query_heads, operands["key"].shape[2], 1 if tensor_axis is None else mesh.shape[tensor_axis]
        ),
        kernel=local_kernel(operands, mesh, config, resolved),
        kernel_config=KernelConfig(
            window=_within(resolved.window, seq_len),
            scale=1 / math.sqrt(head_dim) if config.scale is None else float(config.scale),
            attn_logits_soft_cap=None if config.attn_logits_soft_cap is None else float(config.attn_logits_soft_cap),
            padding_segment_id=None if padding_segment_id is None else int(padding_segment_id),
            interpret=not _is_tpu(mesh),
            vmem_bytes=vmem_of(mesh.devices.flat[0]) if _is_tpu(mesh) else None,
        ),
        context_axis=config.context_axis,
        data_axis=config.data_axis if config.data_axis in mesh.axis_names else None,
        tensor_axis=tensor_axis,
        ulysses_axis=ulysses_axis,
        ulysses_parallelism=1 if ulysses_axis is None else mesh.shape[ulysses_axis],
        halo_transfer=config.halo_transfer,
    )


def _within(window: tuple[int | None, int | None], seq_len: int) -> tuple[int | None, int | None]:
    """The window's bounds no longer than the sequence: whoever means "everything" by 2**31 - 1 must not have a position
    and a bound add up beyond int32."""
    left, right = (None if reach is None else min(reach, seq_len - 1) for reach in window)
    return left, right


def local_kernel(operands: dict, mesh: Mesh, config: AttentionConfig, resolved: ResolvedLayer) -> str:
    """The local kernel: the one that the config names, or on TPUs the first of our own and splash that runs the layer,
    and xla elsewhere. `operands`: query, key, value and segment_ids (or None), or their shapes."""
    dtype = jnp.dtype(operands["query"].dtype)
    contiguous_keys = (resolved.strategy, resolved.layout) not in (("ring", "striped"), ("usp", "striped"))
    reasons = {
        "pallas_halo": pallas_halo.unsupported(dtype, resolved.strategy, resolved.window)
        or _unfitting(operands, mesh, config, resolved),
        "splash": splash.unsupported(dtype, contiguous_keys),
        "xla": None,
    }
    if config.local_kernel and reasons[config.local_kernel] is not None:
        reason = reasons[config.local_kernel]
        raise ValueError(f"local_kernel {config.local_kernel!r} cannot run this layer: {reason}")
    suitable = [kernel for kernel, reason in reasons.items() if reason is None] if _is_tpu(mesh) else ["xla"]
    return config.local_kernel or suitable[0]


def _unfitting(operands: dict, mesh: Mesh, config: AttentionConfig, resolved: ResolvedLayer) -> str | None:
    """Why the band of a block of queries does not fit into these TPUs' VMEM, or None."""
    left = resolved.window[0]
    if not _is_tpu(mesh) or left is None:
        return None
    _, seq_len, num_query_heads, head_dim = operands["query"].shape
    rows = seq_len // (mesh.shape[config.context_axis] * layouts.chunks_per_rank(resolved.layout))
    group = num_query_heads // operands["key"].shape[2]
    sizes = RowSizes.of(operands["query"], operands["value"], group, operands["segment_ids"] is not None)
    vmem = vmem_of(mesh.devices.flat[0])
    if Blocks.fitting(rows, min(left, seq_len - 1), sizes, vmem) is not None:
        return None
    return (
        f"it holds all keys that a block of queries sees in VMEM, of which these TPUs have {vmem >> 20} MiB to spare: "
        f"too little for window {resolved.window} with head_dim {head_dim} and {group} query heads a kv head"
    )


def _is_tpu(mesh: Mesh) -> bool:
    """By the mesh's own devices, never the default backend: they may be of a TPU that is not there."""
    return mesh.devices.flat[0].platform == "tpu"
