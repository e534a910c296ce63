"""A small hybrid decoder: blocks of local and global attention layers under one configuration, and nothing else.

Each layer projects, attends by its own resolved strategy, and adds to the residual stream; blocks are scanned over. For
meshes with Auto axes. Tested in tests/impl/test_hybrid.py against the same model in NumPy on the oracle.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from impl.config import AttentionConfig, AttentionType
from impl.dispatch import attention
from impl.sharded import RESIDUAL_NAMES


class LayerParameters(NamedTuple):
    """The weights of one layer, or of the layers at one place of the pattern in all blocks (a leading axis more)."""

    query: Float[Array, "model num_query_heads head_dim"]
    key: Float[Array, "model num_kv_heads head_dim"]
    value: Float[Array, "model num_kv_heads value_dim"]
    out: Float[Array, "num_query_heads value_dim model"]
    sinks: Float[Array, " num_query_heads"] | None = None


@dataclass(frozen=True)
class HybridConfig:
    """pattern: the layers of one block, in order, as (LOCAL_SLIDING,) * 5 + (GLOBAL,) in Gemma 3.

    remat: "none"; "full" recomputes a block in the backward; "attention" does too, but saves what attention needs, so
    that no attention kernel runs twice and nothing travels twice.
    """

    attention: AttentionConfig
    pattern: tuple[AttentionType, ...]
    remat: Literal["none", "full", "attention"] = "none"


def decode(
    parameters: tuple[LayerParameters, ...],
    hidden: Float[Array, "batch seq_len model"],
    *,
    mesh: Mesh,
    config: HybridConfig,
    segment_ids: Int32[Array, "batch seq_len"] | None = None,
) -> Float[Array, "batch seq_len model"]:
    """The residual stream after all blocks, in the layout of `hidden`, in its dtype.

    `parameters[i]` holds the layers at place i of the pattern, stacked over blocks. `ValueError` if there is not one
    for each place, or for an unknown remat, or whatever `impl.attention` refuses.
    """
    if len(parameters) != len(config.pattern):
        raise ValueError(f"parameters must hold {len(config.pattern)} layers, one a place, got {len(parameters)}")

    def block(hidden: Array, layers: tuple[LayerParameters, ...]) -> tuple[Array, None]:
        for layer, attention_type in zip(layers, config.pattern, strict=True):
            hidden = _layer(layer, hidden, attention_type, mesh, config.attention, segment_ids)
        return hidden, None

    hidden, _ = jax.lax.scan(_rematerialised(block, config.remat), hidden, parameters)
    return hidden


def _rematerialised(block: Any, remat: str) -> Any:
    policies = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "attention": jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
    }
    if remat == "none":
        return block
    if remat not in policies:
        raise ValueError(f"remat must be one of none, full, attention, got {remat!r}")
    # Inside a scan nothing can merge the two forwards anyway.
    return jax.checkpoint(block, policy=policies[remat], prevent_cse=False)


def _layer(
    layer: LayerParameters,
    hidden: Array,
    attention_type: AttentionType,
    mesh: Mesh,
    config: AttentionConfig,
    segment_ids: Array | None,
) -> Array:
    query, key, value = (
        _placed(_project("bsm,mhd->bshd", hidden, weights), mesh, config)
        for weights in (layer.query, layer.key, layer.value)
    )
    attended = attention(
        query,
        key,
        value,
        mesh=mesh,
        config=config,
        attention_type=attention_type,
        segment_ids=segment_ids,
        sinks=layer.sinks,
    )
    assert isinstance(attended, jax.Array), "without return_lse attention gives its output alone"
    return hidden + _project("bshd,hdm->bsm", attended, layer.out)


def _project(pattern: str, rows: Array, weights: Array) -> Array:
    """A projection in the activations' dtype, accumulated in float32 (float64 for float64 activations)."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    product = jnp.einsum(pattern, rows, weights.astype(rows.dtype), preferred_element_type=wide)
    return product.astype(rows.dtype)


def _placed(heads: Array, mesh: Mesh, config: AttentionConfig) -> Array:
    """Says where attention wants its inputs, so that the projections are computed there."""
    axis = {name: name if name in mesh.axis_names else None for name in (config.data_axis, config.tensor_axis)}
    tensor = axis[config.tensor_axis]
    if tensor is not None and heads.shape[2] % mesh.shape[tensor]:
        tensor = None
    uses_usp = config.context_parallel_strategy == "usp"
    sequence = (config.context_axis, config.ulysses_axis) if uses_usp else config.context_axis
    spec = PartitionSpec(axis[config.data_axis], sequence, tensor, None)
    return jax.lax.with_sharding_constraint(heads, NamedSharding(mesh, spec))
