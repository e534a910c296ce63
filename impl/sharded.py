"""What every strategy shares: the shard_map around it, the custom VJP around that, and the sums over mesh axes.

A strategy is two functions of one rank's rows (strategy.py); here they become one differentiable function of global
arrays. The VJP stands outside of shard_map, so the way home of every gradient is written down, in float32.
Tested in tests/impl/test_strategies.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float

from impl import heads
from impl.head_exchange import with_head_exchange
from impl.kernels.interface import LocalGradients, RowCotangents, accumulation_dtype
from impl.layer import Layer
from impl.local_attention import tensor_shard
from impl.strategy import Operands, Received, Strategy
from impl.wide_sums import summed

RESIDUAL_NAMES = ("attention_out", "attention_lse", "attention_halo")
"""Checkpoint names of what the backward needs besides the inputs, for `jax.checkpoint_policies.save_only_these_names`.
With the first two saved no kernel runs again; with all three nothing travels again either."""


def sharded_attention(
    operands: Operands, strategy: Strategy, layer: Layer, mesh: Mesh
) -> tuple[Float[Array, "batch seq num_query_heads value_dim"], Float[Array, "batch seq num_query_heads"]]:
    """out (dtype and placement of query) and lse (accumulation dtype) of global arrays, differentiable in both."""
    if layer.ulysses_axis is not None:
        strategy = with_head_exchange(strategy, over="ulysses")
    return _attention(operands, strategy, layer, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _attention(operands: Operands, strategy: Strategy, layer: Layer, mesh: Mesh) -> tuple[Array, Array]:
    out, lse, _ = _forward(operands, strategy, layer, mesh)
    return out, lse


def _attention_forward(operands: Operands, strategy: Strategy, layer: Layer, mesh: Mesh):
    out, lse, received = _forward(operands, strategy, layer, mesh)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    received = checkpoint_name(received, "attention_halo")
    return (out, lse), (operands, received, out, lse)


def _attention_backward(strategy: Strategy, layer: Layer, mesh: Mesh, residuals, cotangents) -> tuple[Operands]:
    operands, received, out, lse = residuals
    cotangents = jax.tree.map(_placed_like, cotangents, (out, lse))
    specs = _operand_specs(operands, layer)

    def rank_backward(operands: Operands, received: Received, result, cotangents) -> LocalGradients:
        rows = (_raw_cotangents if strategy.adds_out else _row_cotangents)(result, cotangents)
        gradients = strategy.backward(_selected(operands, layer), received, rows, layer)
        return _summed_over_mesh(gradients, operands, layer)

    result_specs = (layer.query_spec, layer.lse_spec)
    gradient_specs = LocalGradients(layer.query_spec, layer.key_spec, layer.key_spec, specs.sinks)
    gradients = jax.shard_map(
        rank_backward,
        mesh=mesh,
        in_specs=(specs, _received_specs(layer), result_specs, result_specs),
        out_specs=gradient_specs,
        check_vma=False,
    )(operands, received, (out, lse), cotangents)
    return (Operands(gradients.dquery, gradients.dkey, gradients.dvalue, None, gradients.dsinks),)


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(operands: Operands, strategy: Strategy, layer: Layer, mesh: Mesh) -> tuple[Array, Array, Received]:
    def rank_forward(operands: Operands) -> tuple[Array, Array, Received]:
        out, lse, received = strategy.forward(_selected(operands, layer), layer)
        return out.astype(operands.query.dtype), lse, received

    return jax.shard_map(
        rank_forward,
        mesh=mesh,
        in_specs=(_operand_specs(operands, layer),),
        out_specs=(layer.query_spec, layer.lse_spec, _received_specs(layer)),
        check_vma=False,
    )(operands)


def _placed_like(cotangent: Array, result: Array) -> Array:
    """JAX 0.12 makes the zero cotangent of an unused result without its sharding; Explicit axes do not forgive that."""
    sharding = jax.typeof(result).sharding
    return cotangent if jax.typeof(cotangent).sharding == sharding else jax.reshard(cotangent, sharding)


def _row_cotangents(result: tuple[Array, Array], cotangents: tuple[Array, Array]) -> RowCotangents:
    (out, lse), (dout, dlse) = result, cotangents
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - dlse
    return RowCotangents(dout, lse, delta)


def _raw_cotangents(result: tuple[Array, Array], cotangents: tuple[Array, Array]) -> RowCotangents:
    (out, lse), (dout, dlse) = result, cotangents
    return RowCotangents(dout, lse, -dlse, out)


def _operand_specs(operands: Operands, layer: Layer) -> Any:
    return Operands(
        layer.query_spec,
        layer.key_spec,
        layer.key_spec,
        None if operands.segment_ids is None else layer.segment_ids_spec,
        None if operands.sinks is None else layer.sinks_spec,
    )


def _received_specs(layer: Layer) -> Any:
    # What shards received differs along every axis, selected kv heads too: as global arrays the pieces lie side by side
    # along the context and the heads axis.
    return Received(
        key=layer.query_spec, value=layer.query_spec, segment_ids=layer.segment_ids_spec, query=layer.query_spec
    )


def _selected(operands: Operands, layer: Layer) -> Operands:
    """The kv heads that this tensor shard reads: only they travel."""
    shard = tensor_shard(layer)
    return operands._replace(
        key=heads.select(operands.key, layer.heads, shard), value=heads.select(operands.value, layer.heads, shard)
    )


def _summed_over_mesh(gradients: LocalGradients, operands: Operands, layer: Layer) -> LocalGradients:
    """Sums, unrounded, over the mesh axes along which an input is replicated; rounds once, to the inputs' dtypes."""
    dsinks = gradients.dsinks
    if operands.sinks is not None and dsinks is not None:
        axes = tuple(axis for axis in (layer.data_axis, layer.context_axis, layer.ulysses_axis) if axis is not None)
        dsinks = lax.psum(dsinks, axes).astype(operands.sinks.dtype)
    return LocalGradients(
        gradients.dquery.astype(operands.query.dtype),
        _whole_kv_heads(gradients.dkey, operands.key, layer),
        _whole_kv_heads(gradients.dvalue, operands.value, layer),
        dsinks,
    )


def _whole_kv_heads(gradient: Array, heads_held: Array, layer: Layer) -> Array:
    if layer.heads.kv_sharded or layer.tensor_axis is None:
        return gradient.astype(heads_held.dtype)
    shard = tensor_shard(layer)
    aval = jax.ShapeDtypeStruct(heads_held.shape, accumulation_dtype(heads_held.dtype))
    (placed,) = jax.linear_transpose(lambda rows: heads.select(rows, layer.heads, shard), aval)(gradient)
    return summed(placed, layer.tensor_axis).astype(heads_held.dtype)
