"""How rounding in one block of attention reaches each tensor: the terms of the budget, to first order.

softmax_errors.py has those up to the probabilities. Works on the blocks of dense.py, whoever cuts them (dense, banded,
probe), so no array exceeds a block. Every formula is derived in docs/error-budgets.md. NumPy only. Tested in
tests/oracle/test_budget_*.py.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from oracle.dense import Block, BlockForward, BlockGradients, SolvedBlock, vjp_block
from oracle.rounding import Roundings
from oracle.softmax_errors import Numerics, SoftmaxErrors, computed_slope, largest_partial_sum, softmax_errors


class Terms(NamedTuple):
    """Errors of one tensor: `worst` adds up as it stands, `roundings` by their own rule."""

    worst: Float64[np.ndarray, "*shape"]
    roundings: Roundings


class BlockTerms(NamedTuple):
    """The terms of a block. Those of dkey and dvalue are for each query head, of the block's own queries only."""

    out: Terms  # [group, query, value_dim]
    lse: Terms  # [group, query]
    dquery: Terms  # [group, query, head_dim]
    dkey: Terms  # [group, key, head_dim]
    dvalue: Terms  # [group, key, value_dim]
    dsinks: Terms  # [group]


def block_terms(solved: SolvedBlock, numerics: Numerics) -> BlockTerms:
    """The terms of every tensor."""
    softmax = softmax_errors(solved.block, solved.forward, numerics)
    out = _out_terms(solved.block, solved.forward, softmax, numerics)
    dprobabilities = solved.gradients.dprobabilities
    delta = _delta_terms(solved.block, solved.forward, solved.dout, solved.dlse, dprobabilities, out.worst, numerics)
    dproducts = _dproducts_terms(solved, softmax, delta, numerics)
    row = solved.dlse - (solved.dout * solved.forward.out).sum(axis=-1)
    return BlockTerms(
        out=out,
        lse=Terms(softmax.lse, Roundings(0.0, 0.0)),
        dquery=_dquery_terms(solved, dproducts, delta, numerics),
        dkey=_dkey_terms(solved, dproducts, delta, numerics),
        dvalue=_dvalue_terms(solved, softmax, numerics),
        dsinks=_dsinks_terms(solved.forward, row, softmax, delta, numerics),
    )


def key_terms(
    block: Block,
    forward: BlockForward,
    dout: Float64[np.ndarray, "group query value_dim"],
    dlse: Float64[np.ndarray, "group query"],
    columns: Int64[np.ndarray, " chosen"],
    numerics: Numerics,
) -> tuple[BlockGradients, Terms, Terms]:
    """Gradients, and the terms of dkey and dvalue, of some keys of a block only.

    Sums over a row take in all of the block's keys; for the others nothing else is formed.
    """
    softmax = softmax_errors(block, forward, numerics)
    out_worst = _out_worst(block, forward, softmax, numerics)
    delta = _delta_terms(block, forward, dout, dlse, dout @ block.value.T, out_worst, numerics)
    block = block._replace(key=block.key[columns], value=block.value[columns], visible=block.visible[:, columns])
    forward = forward._replace(**_columns_of(forward, ("products", "logits", "slope", "probabilities"), columns))
    softmax = softmax._replace(**_columns_of(softmax, ("slope", "bend", "weights", "probabilities"), columns))
    solved = SolvedBlock(block, dout, dlse, forward, vjp_block(block, forward, dout, dlse))
    dproducts = _dproducts_terms(solved, softmax, delta, numerics)
    dkey, dvalue = _dkey_terms(solved, dproducts, delta, numerics), _dvalue_terms(solved, softmax, numerics)
    return solved.gradients, dkey, dvalue


def sink_terms(
    block: Block,
    forward: BlockForward,
    dout: Float64[np.ndarray, "group query value_dim"],
    dlse: Float64[np.ndarray, "group query"],
    numerics: Numerics,
) -> tuple[Float64[np.ndarray, " group"], Terms]:
    """dsinks of a block's own queries, and its terms; no gradient of a key or query is formed."""
    softmax = softmax_errors(block, forward, numerics)
    out_worst = _out_worst(block, forward, softmax, numerics)
    delta = _delta_terms(block, forward, dout, dlse, dout @ block.value.T, out_worst, numerics)
    row = dlse - (dout * forward.out).sum(axis=-1)
    return (forward.sink_share * row).sum(axis=-1), _dsinks_terms(forward, row, softmax, delta, numerics)


def _columns_of(arrays: Any, names: tuple[str, ...], columns: Int64[np.ndarray, " chosen"]) -> dict[str, np.ndarray]:
    return {name: getattr(arrays, name)[..., columns] for name in names}


def allowance(
    tensor: str, expected: Float64[np.ndarray, "*shape"], terms: Terms, numerics: Numerics
) -> Float64[np.ndarray, "*shape"]:
    """How far an element of a tensor (named as in `BlockTerms`) may miss its expected value, all its terms added up."""
    precision = numerics.precision
    size = np.where(np.isneginf(expected), 0.0, np.abs(expected))  # lse of an empty row is -inf, exactly
    in_common = (precision.factor_roundoff + precision.input_roundoff + precision.partial_roundoff) * size
    if tensor in ("lse", "dsinks"):
        in_common += numerics.sums(1) * size
        bound = terms.roundings.bound(numerics.independent, in_common)
        return precision.statistics_roundoff * size + terms.worst + bound
    stored = precision.output_roundoff + (precision.query_roundoff if tensor == "dquery" else 0.0)
    return stored * size + terms.worst + terms.roundings.bound(numerics.independent, in_common)


def summed_over_group(by_head: Float64[np.ndarray, "*batch group key dim"], terms: Terms, numerics: Numerics) -> Terms:
    """Terms of dkey or dvalue, from those of the query heads that share a kv head: each may round its part of the
    gradient, `by_head`, before it is added."""
    roundings = terms.roundings
    if by_head.shape[-3] > 1:
        roundings += Roundings.of(by_head, numerics.precision.stored_roundoff)
    return Terms(terms.worst.sum(axis=-3), roundings.sum(axis=-3))


def _out_terms(block: Block, forward: BlockForward, softmax: SoftmaxErrors, numerics: Numerics) -> Terms:
    """out = sum of probability * value, all of it divided by one denominator."""
    precision = numerics.precision
    roundoffs = (precision.factor_roundoff, precision.input_roundoff, precision.partial_roundoff)
    factors = Roundings.of(forward.probabilities, *roundoffs)
    return Terms(_out_worst(block, forward, softmax, numerics), factors.matmul(block.value))


def _out_worst(
    block: Block, forward: BlockForward, softmax: SoftmaxErrors, numerics: Numerics
) -> Float64[np.ndarray, "group query value_dim"]:
    flushed = numerics.flush * block.visible
    sums = numerics.sums(numerics.visible_keys)
    worst = (forward.probabilities * (softmax.weights + sums) + flushed) @ np.abs(block.value)
    return worst + softmax.denominator[..., None] * np.abs(forward.out) + flushed.sum(axis=-1)[:, None]


def _delta_terms(
    block: Block,
    forward: BlockForward,
    dout: Float64[np.ndarray, "group query value_dim"],
    dlse: Float64[np.ndarray, "group query"],
    dprobabilities: Float64[np.ndarray, "group query key"],
    out_worst: Float64[np.ndarray, "group query value_dim"],
    numerics: Numerics,
) -> Terms:
    """delta = dout.out = sum of probability * its cotangent; it is taken from a whole row of cotangents of logits."""
    precision, factor = numerics.precision, numerics.precision.factor_roundoff
    by_dim = dout * forward.out
    by_key = forward.probabilities * dprobabilities
    sums = numerics.sums(dout.shape[-1])
    worst = (np.abs(dout) * out_worst + sums * np.abs(by_dim)).sum(axis=-1) + numerics.sums(1) * np.abs(dlse)
    roundings = Roundings.of(by_dim, precision.stored_roundoff).sum(axis=-1)
    roundings += Roundings.of(by_dim.sum(axis=-1), factor)
    roundings += Roundings.of(by_key, factor, factor, precision.input_roundoff).sum(axis=-1)
    partials = Roundings.of(forward.probabilities, precision.partial_roundoff).matmul(block.value)
    return Terms(worst, roundings + partials.times(dout).sum(axis=-1))


def _dproducts_terms(solved: SolvedBlock, softmax: SoftmaxErrors, delta: Terms, numerics: Numerics) -> Terms:
    """dproducts = slope * probability * (its cotangent - delta + dlse), without what delta's roundings add."""
    block, dout, dlse, forward, gradients = solved
    precision, few, size = numerics.precision, numerics.sums(1), np.abs(gradients.dlogits)
    absolute = np.abs(dout) @ np.abs(block.value).T
    dprobabilities = numerics.sums(dout.shape[-1]) * largest_partial_sum(absolute, gradients.dprobabilities)
    inputs = Roundings.of(dout, precision.input_roundoff, precision.input_roundoff)
    dprobabilities += inputs.matmul(block.value.T).bound(numerics.independent)
    dlogits = size * softmax.probabilities + forward.probabilities * (dprobabilities + delta.worst[..., None])
    worst = softmax.slope * (dlogits + few * size) + size * softmax.bend
    row = dlse - (dout * forward.out).sum(axis=-1)
    worst += numerics.flush * block.visible * (1.0 + np.abs(gradients.dprobabilities + row[..., None]))
    factor = precision.factor_roundoff
    roundoffs = (factor, factor, precision.input_roundoff, precision.partial_roundoff)
    roundings = Roundings.of(gradients.dlogits, *roundoffs)
    roundings += Roundings.of(forward.probabilities * gradients.dprobabilities, factor)
    return Terms(worst, roundings.times(computed_slope(block, forward, numerics)))


def _dquery_terms(solved: SolvedBlock, dproducts: Terms, delta: Terms, numerics: Numerics) -> Terms:
    """dquery = scale * sum over keys of dproducts * key. delta's roundings reach every key of a row alike."""
    block, forward, scale = solved.block, solved.forward, solved.block.scale
    sums = numerics.sums(numerics.visible_keys) * np.abs(solved.gradients.dlogits) * forward.slope
    worst = abs(scale) * ((dproducts.worst + sums) @ np.abs(block.key))
    worst += numerics.flush * (1.0 + abs(scale)) * block.visible.sum(axis=-1)[:, None]
    together = (computed_slope(block, forward, numerics) * forward.probabilities) @ block.key
    roundings = dproducts.roundings.matmul(block.key) + delta.roundings.along(-1).times(together)
    return Terms(worst, roundings.times(scale))


def _dkey_terms(solved: SolvedBlock, dproducts: Terms, delta: Terms, numerics: Numerics) -> Terms:
    """dkey = scale * sum over heads and queries of dproducts * query. delta differs from query to query."""
    block, forward, scale = solved.block, solved.forward, solved.block.scale
    readers = numerics.visible_keys * block.query.shape[0]
    size = forward.slope * np.abs(solved.gradients.dlogits)
    worst = (dproducts.worst + numerics.sums(readers) * size).swapaxes(1, 2) @ np.abs(block.query)
    worst = abs(scale) * worst + numerics.flush * (1.0 + abs(scale)) * block.visible.sum(axis=0)[:, None]
    weights = computed_slope(block, forward, numerics) * forward.probabilities
    roundings = dproducts.roundings + delta.roundings.along(-1).times(weights)
    roundings += Roundings.of(size, numerics.precision.query_roundoff)
    return Terms(worst, roundings.transposed_matmul(block.query).times(scale))


def _dvalue_terms(solved: SolvedBlock, softmax: SoftmaxErrors, numerics: Numerics) -> Terms:
    """dvalue = sum over heads and queries of probability * dout."""
    block, dout, _, forward, _ = solved
    readers = numerics.visible_keys * block.query.shape[0]
    errors = forward.probabilities * (softmax.probabilities + numerics.sums(readers)) + numerics.flush * block.visible
    worst = errors.swapaxes(1, 2) @ np.abs(dout) + numerics.flush * block.visible.sum(axis=0)[:, None]
    precision = numerics.precision
    roundoffs = (precision.factor_roundoff, precision.input_roundoff, precision.partial_roundoff)
    return Terms(worst, Roundings.of(forward.probabilities, *roundoffs).transposed_matmul(dout))


def _dsinks_terms(
    forward: BlockForward,
    row: Float64[np.ndarray, "group query"],
    softmax: SoftmaxErrors,
    delta: Terms,
    numerics: Numerics,
) -> Terms:
    """dsinks = sum over queries of sink share * row, where row is dlse - delta. What errors a row has in itself is
    another's no business: those of rows are independent."""
    size = np.abs(row)
    errors = forward.sink_share * (size * (softmax.sink_share + numerics.sums(numerics.rows)) + delta.worst)
    roundings = delta.roundings.times(forward.sink_share) + Roundings.bounded(errors)
    return Terms((numerics.flush * (1.0 + size)).sum(axis=-1), roundings.sum(axis=-1))
