"""How rounding in one block of attention reaches each tensor: the terms of the budget, to first order.

Works on the blocks of dense.py, whoever cuts them (dense, banded, probe), so no array exceeds a block. Every formula is
derived in docs/error-budgets.md. NumPy only. Tested in tests/oracle/test_budget_*.py.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from oracle.dense import Block, BlockForward, BlockGradients
from oracle.precision import Precision

# A float32 sum, or a chain of elementary functions, strays by at most this many eps32 of the sum of absolute values.
SUM_EPS = 8.0
# Independent roundings, each at most u of its term, stray by more than LAMBDA * u * root-sum-of-squares with
# probability below 2 exp(-1.5 LAMBDA^2) = 7e-24 an element (a rounding error is sub-Gaussian with variance u^2 / 3).
LAMBDA = 6.0


class Terms(NamedTuple):
    """Errors of one tensor. `worst` adds up as it stands; `powers` is a sum of `Roundings.power`s."""

    worst: Float64[np.ndarray, "*shape"]
    powers: Float64[np.ndarray, "*shape"]


class BlockTerms(NamedTuple):
    """The terms of a block. Those of dkey and dvalue are summed over the group and count its own queries only."""

    out: Terms  # [group, query, value_dim]
    lse: Terms  # [group, query]
    dquery: Terms  # [group, query, head_dim]
    dkey: Terms  # [key, head_dim]
    dvalue: Terms  # [key, value_dim]
    dsinks: Terms  # [group]


class SolvedBlock(NamedTuple):
    """A block with its cotangents and its answers."""

    block: Block
    dout: Float64[np.ndarray, "group query value_dim"]
    dlse: Float64[np.ndarray, "group query"]
    forward: BlockForward
    gradients: BlockGradients


@dataclasses.dataclass(frozen=True)
class Roundings:
    """Where numbers are rounded, and how those roundings add up.

    Independent roundings add in the 2-norm, times LAMBDA. Those of structured values may all point the same way: they
    add in the 1-norm, as a worst case.
    """

    precision: Precision
    structured_values: bool

    @property
    def sums(self) -> float:
        """How far a sum may stray, relative to its sum of absolute values."""
        return SUM_EPS * 2.0 * self.precision.statistics_roundoff

    @property
    def flush(self) -> float:
        """What is lost where a product, or a factor, is too small for a normal number (both may happen)."""
        return 2.0 * self.precision.smallest_normal

    def power(self, terms: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """The terms as they enter the sum inside a norm."""
        return np.abs(terms) if self.structured_values else np.square(terms)

    def coefficient(self, *roundoffs: float) -> float:
        """What a term's power is multiplied by when it is rounded once with each of these roundoffs."""
        return float(sum(self.power(np.asarray(roundoffs))))

    def products(
        self, coefficient: float, left: Float64[np.ndarray, "*rows inner"], right: Float64[np.ndarray, "inner column"]
    ) -> Float64[np.ndarray, "*rows column"]:
        """Powers of a matmul's roundings, all of its terms rounded with one coefficient."""
        if coefficient == 0.0:
            return np.zeros((*left.shape[:-1], right.shape[-1]))
        return coefficient * (self.power(left) @ self.power(right))

    def stored(self, tensor: str) -> float:
        """Relative: storing the answer, and what the roundings of all factors have in common (equal probabilities)."""
        if tensor in ("lse", "dsinks"):
            return self.precision.statistics_roundoff
        return self.precision.output_roundoff + self.precision.factor_roundoff + self.precision.input_roundoff

    def bound(self, powers: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """How far roundings may stray together, from the sum of their powers."""
        return powers if self.structured_values else LAMBDA * np.sqrt(powers)


def block_terms(solved: SolvedBlock, roundings: Roundings) -> BlockTerms:
    """The terms of every tensor."""
    softmax = _softmax_errors(solved.block, solved.forward, roundings)
    out = _out_terms(solved, softmax, roundings)
    delta = _delta_terms(solved, out, roundings)
    dproducts = _dproducts_terms(solved, softmax, delta, roundings)
    return BlockTerms(
        out=out,
        lse=Terms(softmax.lse, np.zeros_like(softmax.lse)),
        dquery=_dquery_terms(solved, dproducts, delta, roundings),
        dkey=_dkey_terms(solved, dproducts, delta, roundings),
        dvalue=_dvalue_terms(solved, softmax, roundings),
        dsinks=_dsinks_terms(solved, softmax, delta, roundings),
    )


def allowance(
    tensor: str, expected: Float64[np.ndarray, "*shape"], terms: Terms, roundings: Roundings
) -> Float64[np.ndarray, "*shape"]:
    """How far an element of a tensor (named as in `BlockTerms`) may miss its expected value, all its terms added up."""
    size = np.where(np.isneginf(expected), 0.0, np.abs(expected))  # lse of an empty row is -inf, exactly
    return roundings.stored(tensor) * size + roundings.bound(terms.powers) + terms.worst


class _SoftmaxErrors(NamedTuple):
    products: Float64[np.ndarray, "group query key"]  # absolute, of scale * query.key
    weights: Float64[np.ndarray, "group query key"]  # relative, of exp(logit - maximum)
    denominator: Float64[np.ndarray, "group query"]  # relative, of the sum of weights
    lse: Float64[np.ndarray, "group query"]  # absolute
    probabilities: Float64[np.ndarray, "group query key"]  # relative, of exp(logit - stored lse)
    sink_share: Float64[np.ndarray, "group query"]  # relative, of exp(sink - stored lse)


def _softmax_errors(block: Block, forward: BlockForward, roundings: Roundings) -> _SoftmaxErrors:
    """From the products to the probabilities, as the forward normalises them and as the backward recomputes them."""
    precision, sums = roundings.precision, roundings.sums
    absolute = abs(block.scale) * (np.abs(block.query) @ np.abs(block.key).T)
    products = (sums + precision.logits_roundoff) * absolute
    inputs = roundings.coefficient(precision.query_roundoff, precision.input_roundoff, precision.input_roundoff)
    products += abs(block.scale) * roundings.bound(roundings.products(inputs, block.query, block.key.T))
    logits = products * forward.slope
    if block.attn_logits_soft_cap is not None:
        logits += (sums + precision.logits_roundoff) * np.abs(forward.logits)
    is_empty = np.isneginf(forward.lse)
    lse = np.where(is_empty, 0.0, forward.lse)
    weights = logits + sums * (1.0 + np.abs(forward.logits - lse[..., None]))
    sinks = np.where(np.isneginf(block.sinks), 0.0, block.sinks)[:, None]
    sink = sums * (1.0 + np.abs(sinks - lse))
    denominator = (forward.probabilities * weights).sum(axis=-1) + forward.sink_share * sink
    lse_error = np.where(is_empty, 0.0, denominator + sums * (1.0 + np.abs(lse)))
    stored = lse_error + precision.statistics_roundoff * np.abs(lse)
    return _SoftmaxErrors(products, weights, denominator, lse_error, weights + stored[..., None], sink + stored)


def _out_terms(solved: SolvedBlock, softmax: _SoftmaxErrors, roundings: Roundings) -> Terms:
    """out = sum of probability * value, all of it divided by one denominator."""
    block, _, _, forward, _ = solved
    precision = roundings.precision
    flushed = roundings.flush * block.visible
    worst = (forward.probabilities * softmax.weights + flushed) @ np.abs(block.value) + flushed.sum(axis=-1)[:, None]
    worst += softmax.denominator[..., None] * np.abs(forward.out)
    factors = roundings.coefficient(precision.factor_roundoff, precision.input_roundoff)
    return Terms(worst, roundings.products(factors, forward.probabilities, block.value))


def _delta_terms(solved: SolvedBlock, out: Terms, roundings: Roundings) -> Terms:
    """delta = dout.out = sum of probability * its cotangent; it is taken from a whole row of cotangents of logits."""
    _, dout, dlse, forward, gradients = solved
    precision, sums = roundings.precision, roundings.sums
    by_dim = dout * forward.out
    worst = (np.abs(dout) * out.worst + sums * np.abs(by_dim)).sum(axis=-1) + sums * np.abs(dlse)
    by_key = forward.probabilities * gradients.dprobabilities
    factor = precision.factor_roundoff
    powers = roundings.coefficient(precision.stored_roundoff) * roundings.power(by_dim).sum(axis=-1)
    powers += roundings.coefficient(factor) * roundings.power(by_dim.sum(axis=-1))
    powers += roundings.coefficient(factor, factor, precision.input_roundoff) * roundings.power(by_key).sum(axis=-1)
    return Terms(worst, powers)


def _dproducts_terms(solved: SolvedBlock, softmax: _SoftmaxErrors, delta: Terms, roundings: Roundings) -> Terms:
    """dproducts = slope * probability * (its cotangent - delta + dlse), without what delta's roundings add."""
    block, dout, dlse, forward, gradients = solved
    precision, sums, size = roundings.precision, roundings.sums, np.abs(gradients.dlogits)
    dprobabilities = sums * (np.abs(dout) @ np.abs(block.value).T)
    inputs = roundings.coefficient(precision.input_roundoff, precision.input_roundoff)
    dprobabilities += roundings.bound(roundings.products(inputs, dout, block.value.T))
    dlogits = size * softmax.probabilities + forward.probabilities * (dprobabilities + delta.worst[..., None])
    worst = forward.slope * (dlogits + sums * size)
    if block.attn_logits_soft_cap is not None:
        tanh = np.abs(forward.logits) / block.attn_logits_soft_cap
        bend = 2.0 * tanh * forward.slope / block.attn_logits_soft_cap  # d slope / d product
        worst += size * (sums * tanh**2 + bend * softmax.products)
    row = dlse - (dout * forward.out).sum(axis=-1)
    worst += roundings.flush * block.visible * (1.0 + np.abs(gradients.dprobabilities + row[..., None]))
    factor = precision.factor_roundoff
    powers = roundings.coefficient(factor, factor, precision.input_roundoff) * roundings.power(gradients.dlogits)
    powers += roundings.coefficient(factor) * roundings.power(forward.probabilities * gradients.dprobabilities)
    return Terms(worst, roundings.power(forward.slope) * powers)


def _dquery_terms(solved: SolvedBlock, dproducts: Terms, delta: Terms, roundings: Roundings) -> Terms:
    """dquery = scale * sum over keys of dproducts * key. delta's roundings reach every key of a row alike."""
    block, forward, scale = solved.block, solved.forward, solved.block.scale
    worst = abs(scale) * (dproducts.worst @ np.abs(block.key))
    worst += roundings.flush * (1.0 + abs(scale)) * block.visible.sum(axis=-1)[:, None]
    together = (forward.slope * forward.probabilities) @ block.key
    powers = dproducts.powers @ roundings.power(block.key) + delta.powers[..., None] * roundings.power(together)
    return Terms(worst, roundings.coefficient(scale) * powers)


def _dkey_terms(solved: SolvedBlock, dproducts: Terms, delta: Terms, roundings: Roundings) -> Terms:
    """dkey = scale * sum over heads and queries of dproducts * query. delta differs from query to query."""
    block, forward, precision, scale = solved.block, solved.forward, roundings.precision, solved.block.scale
    worst = abs(scale) * (dproducts.worst.swapaxes(1, 2) @ np.abs(block.query))
    worst += roundings.flush * (1.0 + abs(scale)) * block.visible.sum(axis=0)[:, None]
    powers = dproducts.powers + roundings.power(forward.slope * forward.probabilities) * delta.powers[..., None]
    query = roundings.coefficient(precision.query_roundoff)
    powers += query * roundings.power(forward.slope * solved.gradients.dlogits)
    powers = roundings.coefficient(scale) * (powers.swapaxes(1, 2) @ roundings.power(block.query))
    return _summed_over_group(worst, powers, solved.gradients.dkey, roundings)


def _dvalue_terms(solved: SolvedBlock, softmax: _SoftmaxErrors, roundings: Roundings) -> Terms:
    """dvalue = sum over heads and queries of probability * dout."""
    block, dout, _, forward, gradients = solved
    precision = roundings.precision
    errors = forward.probabilities * (softmax.probabilities + roundings.sums)
    errors += roundings.flush * block.visible
    worst = errors.swapaxes(1, 2) @ np.abs(dout) + roundings.flush * block.visible.sum(axis=0)[:, None]
    factors = roundings.coefficient(precision.factor_roundoff, precision.input_roundoff)
    powers = roundings.products(factors, forward.probabilities.swapaxes(1, 2), dout)
    return _summed_over_group(worst, powers, gradients.dvalue, roundings)


def _summed_over_group(
    worst: Float64[np.ndarray, "group key dim"],
    powers: Float64[np.ndarray, "group key dim"],
    gradient: Float64[np.ndarray, "group key dim"],
    roundings: Roundings,
) -> Terms:
    """The query heads of a group may each round their part of the gradient before it is summed."""
    stored = roundings.coefficient(roundings.precision.stored_roundoff) * roundings.power(gradient)
    return Terms(worst.sum(axis=0), (powers + stored).sum(axis=0))


def _dsinks_terms(solved: SolvedBlock, softmax: _SoftmaxErrors, delta: Terms, roundings: Roundings) -> Terms:
    """dsinks = sum over queries of sink share * (dlse - delta)."""
    _, dout, dlse, forward, _ = solved
    row = np.abs(dlse - (dout * forward.out).sum(axis=-1))
    errors = forward.sink_share * (row * (softmax.sink_share + roundings.sums) + delta.worst)
    flushed = roundings.flush * (1.0 + row)
    powers = roundings.power(forward.sink_share) * delta.powers
    return Terms((errors + flushed).sum(axis=-1), powers.sum(axis=-1))
