"""The trust anchor: attention and its derivative in float64, short enough to read in one sitting.

NumPy only; nothing rounds below float64. The banded and probe oracles and the budget rest on the two block functions.
Tested in tests/oracle/test_dense_*.py: by hand, against 50-digit arithmetic, against a complex-step derivative.
"""

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import numpy as np
from jaxtyping import Bool, Float64, Int64

from oracle.arguments import Arguments, AttentionOptions, validated, validated_cotangents
from oracle.mask import visible_pairs


class AttentionResult(NamedTuple):
    """The answer, and the natural log of the softmax denominator (-inf where a row sees nothing and has no sink)."""

    out: Float64[np.ndarray, "batch seq num_query_heads value_dim"]
    lse: Float64[np.ndarray, "batch seq num_query_heads"]


class AttentionGradients(NamedTuple):
    """Gradients, each of its input's shape; `dsinks` is None where there are no sinks."""

    dquery: Float64[np.ndarray, "batch seq num_query_heads head_dim"]
    dkey: Float64[np.ndarray, "batch seq num_kv_heads head_dim"]
    dvalue: Float64[np.ndarray, "batch seq num_kv_heads value_dim"]
    dsinks: Float64[np.ndarray, " num_query_heads"] | None


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Unpack[AttentionOptions]
) -> AttentionResult:
    """Attention by docs/semantics.md, in float64. Arrays are in position order, of any float dtype.

    Args:
        query: [batch, seq, num_query_heads, head_dim].
        key: [batch, seq, num_kv_heads, head_dim]; query head h reads kv head `h // (num_query_heads // num_kv_heads)`.
        value: [batch, seq, num_kv_heads, value_dim].
        **options: `AttentionOptions`; `window` is required.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    arguments = validated(query, key, value, **options)
    out = np.zeros((*arguments.query.shape[:3], arguments.value.shape[3]))
    lse = np.zeros(arguments.query.shape[:3])
    for row, kv_head, block in _whole_blocks(arguments):
        forward = forward_block(block)
        heads = arguments.heads_of(kv_head)
        out[row, :, heads] = forward.out.swapaxes(0, 1)
        lse[row, :, heads] = forward.lse.T
    return AttentionResult(out, lse)


def attention_vjp(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    """The gradient of `sum(dout * out) + sum(dlse * lse)` with respect to query, key, value and sinks.

    Args:
        query, key, value, options: as `attention`.
        dout: cotangent of out, [batch, seq, num_query_heads, value_dim].
        dlse: cotangent of lse, [batch, seq, num_query_heads]; None = zero.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    arguments = validated(query, key, value, **options)
    cotangents = validated_cotangents(arguments, dout, dlse)
    dquery, dkey, dvalue = np.zeros_like(arguments.query), np.zeros_like(arguments.key), np.zeros_like(arguments.value)
    dsinks = np.zeros(arguments.query.shape[2])
    for row, kv_head, block in _whole_blocks(arguments):
        heads = arguments.heads_of(kv_head)
        block_dout = cotangents.dout[row, :, heads].swapaxes(0, 1)
        gradients = vjp_block(block, forward_block(block), block_dout, cotangents.dlse[row, :, heads].T)
        dquery[row, :, heads] = gradients.dquery.swapaxes(0, 1)
        dkey[row, :, kv_head] = gradients.dkey.sum(axis=0)
        dvalue[row, :, kv_head] = gradients.dvalue.sum(axis=0)
        dsinks[heads] += gradients.dsinks
    return AttentionGradients(dquery, dkey, dvalue, None if arguments.sinks is None else dsinks)


class Block(NamedTuple):
    """Some query rows of the `group` heads that share one kv head, and every key that they see (and perhaps others)."""

    query: Float64[np.ndarray, "group query head_dim"]
    key: Float64[np.ndarray, "key head_dim"]
    value: Float64[np.ndarray, "key value_dim"]
    visible: Bool[np.ndarray, "query key"]
    sinks: Float64[np.ndarray, " group"]  # -inf = no sink
    attn_logits_soft_cap: float | None
    scale: float


class BlockForward(NamedTuple):
    """The answer of a block, and what its derivative needs. Hidden keys have probability 0."""

    products: Float64[np.ndarray, "group query key"]  # scale * query.key, hidden keys too
    logits: Float64[np.ndarray, "group query key"]  # the same after the cap
    slope: Float64[np.ndarray, "group query key"]  # d (logits after the cap) / d (logits before it)
    probabilities: Float64[np.ndarray, "group query key"]
    sink_share: Float64[np.ndarray, "group query"]  # probability of the sink
    out: Float64[np.ndarray, "group query value_dim"]
    lse: Float64[np.ndarray, "group query"]


class BlockGradients(NamedTuple):
    """The gradients of a block; those of key and value, per query head, count the block's own query rows only."""

    dprobabilities: Float64[np.ndarray, "group query key"]
    dlogits: Float64[np.ndarray, "group query key"]  # after the cap
    dquery: Float64[np.ndarray, "group query head_dim"]
    dkey: Float64[np.ndarray, "group key head_dim"]
    dvalue: Float64[np.ndarray, "group key value_dim"]
    dsinks: Float64[np.ndarray, " group"]


class SolvedBlock(NamedTuple):
    """A block with its cotangents and its answers."""

    block: Block
    dout: Float64[np.ndarray, "group query value_dim"]
    dlse: Float64[np.ndarray, "group query"]
    forward: BlockForward
    gradients: BlockGradients


def forward_block(block: Block) -> BlockForward:
    """Attention of a block's query rows (docs/semantics.md, 1 to 5)."""
    products = block.scale * (block.query @ block.key.T)
    logits, slope = soft_capped(products, block.attn_logits_soft_cap)
    masked = np.where(block.visible, logits, -np.inf)
    sinks = block.sinks[:, None]
    largest = np.maximum(masked.max(axis=-1), sinks)
    shift = np.where(np.isneginf(largest), 0.0, largest)  # any shift gives the same answer; -inf would give NaN
    weights = np.exp(masked - shift[..., None])
    sink_weight = np.exp(sinks - shift)
    total = weights.sum(axis=-1) + sink_weight
    is_empty = total == 0.0
    denominator = np.where(is_empty, 1.0, total)
    probabilities = weights / denominator[..., None]
    return BlockForward(
        products=products,
        logits=logits,
        slope=slope,
        probabilities=probabilities,
        sink_share=sink_weight / denominator,
        out=probabilities @ block.value,
        lse=np.where(is_empty, -np.inf, shift + np.log(denominator)),
    )


def vjp_block(
    block: Block,
    forward: BlockForward,
    dout: Float64[np.ndarray, "group query value_dim"],
    dlse: Float64[np.ndarray, "group query"],
) -> BlockGradients:
    """The derivative of `forward_block` (docs/semantics.md, 6)."""
    dprobabilities = dout @ block.value.T
    row = dlse - (dout * forward.out).sum(axis=-1)  # what every logit of a row gets, the sink's too
    dlogits = forward.probabilities * (dprobabilities + row[..., None])
    dproducts = block.scale * forward.slope * dlogits  # of the plain products q.k
    return BlockGradients(
        dprobabilities=dprobabilities,
        dlogits=dlogits,
        dquery=dproducts @ block.key,
        dkey=dproducts.swapaxes(1, 2) @ block.query,
        dvalue=forward.probabilities.swapaxes(1, 2) @ dout,
        dsinks=(forward.sink_share * row).sum(axis=-1),
    )


def soft_capped(
    logits: Float64[np.ndarray, "*shape"], attn_logits_soft_cap: float | None
) -> tuple[Float64[np.ndarray, "*shape"], Float64[np.ndarray, "*shape"]]:
    """`cap * tanh(logits / cap)` and its slope `1 - tanh^2`, the latter without cancellation where tanh is near 1."""
    if attn_logits_soft_cap is None:
        return logits, np.ones_like(logits)
    ratio = logits / attn_logits_soft_cap
    decay = np.exp(-2.0 * np.abs(ratio))
    return attn_logits_soft_cap * np.tanh(ratio), 4.0 * decay / (1.0 + decay) ** 2


def _whole_blocks(arguments: Arguments) -> Iterator[tuple[int, int, Block]]:
    """(batch row, kv head, all its queries and keys)."""
    positions = np.arange(arguments.query.shape[1])
    for row, kv_head in np.ndindex(arguments.query.shape[0], arguments.key.shape[2]):
        yield row, kv_head, block_of(arguments, row, kv_head, positions, positions)


def block_of(
    arguments: Arguments,
    row: int,
    kv_head: int,
    query_positions: Int64[np.ndarray, " query"],
    key_positions: Int64[np.ndarray, " key"],
) -> Block:
    """The block of one batch row and one kv head at the given positions."""
    heads = arguments.heads_of(kv_head)
    group = arguments.heads_per_group
    segment_ids, is_token = arguments.segment_ids[row], arguments.is_token[row]
    return Block(
        query=arguments.query[row, query_positions, heads].swapaxes(0, 1),
        key=arguments.key[row, key_positions, kv_head],
        value=arguments.value[row, key_positions, kv_head],
        visible=visible_pairs(query_positions, key_positions, arguments.window, segment_ids, is_token),
        sinks=np.full(group, -np.inf) if arguments.sinks is None else arguments.sinks[heads],
        attn_logits_soft_cap=arguments.attn_logits_soft_cap,
        scale=arguments.scale,
    )
