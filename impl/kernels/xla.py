"""Local attention in plain jax.numpy: works on any platform, takes any mask that positions and segments can state.

Logits, softmax and gradients in float32 (float64 for float64 inputs); probabilities are never rounded. Its signature is
that of interface.py. Tested in tests/impl/test_kernels.py.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from impl.kernels.interface import KernelConfig, KernelOperands, LocalGradients, RowCotangents, accumulation_dtype
from impl.kernels.query_blocks import backward_by_blocks, forward_by_blocks


def launch(
    operands: KernelOperands, config: KernelConfig
) -> tuple[
    Float[Array, "batch query_rows num_query_heads value_dim"], Float[Array, "batch query_rows num_query_heads"]
]:
    """out and lse, both in the accumulation dtype. A row that sees no key: out 0, lse −inf (or its sink)."""
    return forward_by_blocks(_forward_whole, operands, config)


def finish(launched: tuple[Array, Array], operands: KernelOperands, config: KernelConfig) -> tuple[Array, Array]:
    """Nothing is left to do."""
    del operands, config
    return launched


def launch_backward(operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig) -> LocalGradients:
    """Gradients in the accumulation dtype: dlogits = p · (dout·v − delta), through the soft cap and the scale."""
    return backward_by_blocks(_backward_whole, operands, cotangents, config)


def finish_backward(
    launched: LocalGradients, operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig
) -> LocalGradients:
    """Nothing is left to do."""
    del operands, cotangents, config
    return launched


def _forward_whole(operands: KernelOperands, config: KernelConfig) -> tuple[Array, Array]:
    visible = visible_keys(operands, config)[:, None, None]
    logits = jnp.where(visible, _logits(operands, config), -jnp.inf)  # [batch, kv_head, group, query, key]
    sinks = _sinks(operands, logits.dtype)
    maximum = jnp.max(logits, axis=-1, initial=-jnp.inf)  # [batch, kv_head, group, query]
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks)
    finite_maximum = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.where(visible, jnp.exp(logits - finite_maximum[..., None]), 0)
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks - finite_maximum)
    lse = finite_maximum + jnp.log(total)
    weighted = _einsum("bngqk,bknd->bngqd", weights, operands.value)
    out = jnp.where(total[..., None] > 0, weighted / jnp.where(total > 0, total, 1)[..., None], 0)
    return _query_major(out), _query_major(lse)


def _backward_whole(operands: KernelOperands, cotangents: RowCotangents, config: KernelConfig) -> LocalGradients:
    batch, query_rows, num_query_heads, _ = operands.query.shape
    num_kv_heads = operands.key.shape[2]
    grouped = (batch, query_rows, num_kv_heads, num_query_heads // num_kv_heads)
    query = operands.query.reshape(*grouped, -1)
    dout = cotangents.dout.reshape(*grouped, -1)
    visible = visible_keys(operands, config)[:, None, None]
    logits = _logits(operands, config)  # [batch, kv_head, group, query, key]
    # Only rows without any visible key have lse −inf; they have no probability to scale.
    lse = jnp.where(jnp.isneginf(cotangents.lse), 0, cotangents.lse)
    probabilities = jnp.where(visible, jnp.exp(logits - _head_major(lse.reshape(grouped))[..., None]), 0)
    dprobabilities = _einsum("bqngd,bknd->bngqk", dout, operands.value)
    delta = _head_major(cotangents.delta.reshape(grouped))[..., None]
    dlogits = jnp.where(visible, probabilities * (dprobabilities - delta), 0)
    dlogits = _through_soft_cap(dlogits, logits, config) * config.scale
    return LocalGradients(
        dquery=_einsum("bngqk,bknd->bqngd", dlogits, operands.key).reshape(operands.query.shape),
        dkey=_einsum("bngqk,bqngd->bknd", dlogits, query),
        dvalue=_einsum("bngqk,bqngd->bknd", probabilities, dout),
        dsinks=sink_gradient(operands.sinks, lse, cotangents.delta),
    )


def sink_gradient(
    sinks: Float[Array, " num_query_heads"] | None,
    lse: Float[Array, "batch query_rows num_query_heads"],
    delta: Float[Array, "batch query_rows num_query_heads"],
) -> Float[Array, " num_query_heads"] | None:
    """A sink is one more logit of every row, without a value: its dP is 0. None without sinks."""
    if sinks is None:
        return None
    return -jnp.sum(jnp.exp(sinks.astype(lse.dtype) - lse) * delta, axis=(0, 1))


def visible_keys(operands: KernelOperands, config: KernelConfig) -> Bool[Array, "batch_or_1 query_rows key_rows"]:
    """Which keys each query sees: the window over positions, equal segment ids, no padding on either side."""
    query, key = operands.query_positions[:, None], operands.key_positions[None, :]
    left, right = config.window
    visible = (query >= 0) & (key >= 0)
    if left is not None:
        visible &= key >= query - left
    if right is not None:
        visible &= key <= query + right
    visible = visible[None]
    if operands.query_segment_ids is not None and operands.key_segment_ids is not None:
        query_ids, key_ids = operands.query_segment_ids[:, :, None], operands.key_segment_ids[:, None, :]
        visible = visible & (query_ids == key_ids)
        if config.padding_segment_id is not None:
            # Equal ids: that the query is no padding says the same of the key.
            visible &= query_ids != config.padding_segment_id
    return visible


def _logits(operands: KernelOperands, config: KernelConfig) -> Float[Array, "batch kv_head group query key"]:
    batch, query_rows, num_query_heads, head_dim = operands.query.shape
    num_kv_heads = operands.key.shape[2]
    query = operands.query.reshape(batch, query_rows, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    logits = _einsum("bqngd,bknd->bngqk", query, operands.key) * config.scale
    if config.attn_logits_soft_cap is not None:
        logits = config.attn_logits_soft_cap * jnp.tanh(logits / config.attn_logits_soft_cap)
    return logits


def _through_soft_cap(dlogits: Array, logits: Array, config: KernelConfig) -> Array:
    if config.attn_logits_soft_cap is None:
        return dlogits
    return dlogits * (1 - jnp.square(logits / config.attn_logits_soft_cap))


def _sinks(operands: KernelOperands, dtype: jnp.dtype) -> Float[Array, "1 kv_head group 1"] | None:
    if operands.sinks is None:
        return None
    return operands.sinks.astype(dtype).reshape(1, operands.key.shape[2], -1, 1)


def _einsum(pattern: str, left: Array, right: Array) -> Array:
    """A contraction with the accuracy of the accumulation dtype on every platform.

    Two bfloat16 operands have exact products in float32; anything else is widened first, and HIGHEST keeps TPUs from
    splitting float32 into a single bfloat16 pass.
    """
    dtype = accumulation_dtype(jnp.promote_types(left.dtype, right.dtype))
    if left.dtype != right.dtype:
        left, right = left.astype(dtype), right.astype(dtype)
    return jnp.einsum(pattern, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)


def _query_major(rows: Array) -> Array:
    """[batch, kv_head, group, query, …] → [batch, query, query_head, …]."""
    moved = jnp.moveaxis(rows, 3, 1)
    return moved.reshape(*moved.shape[:2], moved.shape[2] * moved.shape[3], *moved.shape[4:])


def _head_major(rows: Float[Array, "batch query kv_head group"]) -> Float[Array, "batch kv_head group query"]:
    return jnp.moveaxis(rows, 1, 3)
