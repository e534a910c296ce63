"""The signature that every local kernel shares: attention over one rank's rows, forward and backward.

A kernel module exposes `launch(operands, config)`, whose raw result `finish(raw, operands, config)` turns into out and
lse; likewise `launch_backward(operands, cotangents, config)` and `finish_backward(raw, operands, cotangents, config)`,
which gives LocalGradients. A strategy may order the raw results before or after a transfer.
Tested in tests/impl/test_kernels.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class KernelOperands(NamedTuple):
    """Rows of queries and keys that one rank holds or has received.

    A position of −1 marks a row outside the sequence: it sees nothing and nobody sees it, whatever it holds.
    Segment ids are None where the layer has none; sinks likewise.
    """

    query: Float[Array, "batch query_rows num_query_heads head_dim"]
    key: Float[Array, "batch key_rows num_kv_heads head_dim"]
    value: Float[Array, "batch key_rows num_kv_heads value_dim"]
    query_positions: Int32[Array, " query_rows"]
    key_positions: Int32[Array, " key_rows"]
    query_segment_ids: Int32[Array, "batch query_rows"] | None = None
    key_segment_ids: Int32[Array, "batch key_rows"] | None = None
    sinks: Float[Array, " num_query_heads"] | None = None


class RowCotangents(NamedTuple):
    """What a backward needs to know of each query row. All of it is about the whole row, of which a call may hold only
    some keys: the gradients of a ring's steps add up.

    delta: `Σ dout·out − dlse`, so that dlogits = p · (dout·v − delta) with p = exp(logits − lse); FlashAttention's D
    (arXiv:2205.14135, section B.4), less the cotangent of lse. delta and lse are in the accumulation dtype.
    out: the layer's result, for strategies that ask for it (strategy.py): delta then lacks `Σ dout·out`, which their
    kernels add where they read dout anyway.
    """

    dout: Float[Array, "batch query_rows num_query_heads value_dim"]
    lse: Float[Array, "batch query_rows num_query_heads"]
    delta: Float[Array, "batch query_rows num_query_heads"]
    out: Float[Array, "batch query_rows num_query_heads value_dim"] | None = None


class LocalGradients(NamedTuple):
    """Gradients of one kernel call, unrounded: in `accumulation_dtype`, for the caller to sum and then round once."""

    dquery: Float[Array, "batch query_rows num_query_heads head_dim"]
    dkey: Float[Array, "batch key_rows num_kv_heads head_dim"]
    dvalue: Float[Array, "batch key_rows num_kv_heads value_dim"]
    dsinks: Float[Array, " num_query_heads"] | None


@dataclass(frozen=True)
class KernelConfig:
    """The static half of a kernel call.

    window: (left, right), keys visible before and after the query, None = unbounded.
    key_offset: position of key row 0 minus position of query row 0, where queries and keys are contiguous runs of
        positions and this is known while tracing; None otherwise.
    interpret: whether a Pallas kernel is interpreted, because the mesh is not of TPUs.
    vmem_bytes: of the mesh's TPUs, that a kernel may take; None where kernels are interpreted.
    """

    window: tuple[int | None, int | None]
    scale: float
    attn_logits_soft_cap: float | None = None
    padding_segment_id: int | None = None
    key_offset: int | None = None
    interpret: bool = False
    vmem_bytes: int | None = None


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of logits, softmax, sums and travelling gradients: float32, or float64 where the inputs are float64."""
    return jnp.promote_types(dtype, jnp.float32)
