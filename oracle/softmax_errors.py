"""How rounding reaches the softmax of one block: from the products of query and key to the probabilities.

The first half of the budget's terms, to first order; error_terms.py goes on from there. Every formula is derived in
docs/error-budgets.md. NumPy only. Tested in tests/oracle/test_budget_*.py.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from oracle.dense import Block, BlockForward, soft_capped
from oracle.precision import Precision
from oracle.rounding import Roundings, sum_roundoffs


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What the implementation declares, and what of the case decides how its errors add up."""

    precision: Precision
    structured_values: bool  # values follow a pattern: no roundings count as independent
    visible_keys: int  # the most that a query sees, and so the most queries that see a key
    rows: int  # of all batch rows together, which dsinks sums over

    def sums(self, terms: int) -> float:
        """How far a sum of so many terms may stray, relative to its sum of absolute values."""
        return sum_roundoffs(terms) * self.precision.statistics_roundoff

    @property
    def flush(self) -> float:
        """What is lost where a product, or a factor, is too small for a normal number (both may happen)."""
        return 2.0 * self.precision.smallest_normal

    @property
    def independent(self) -> bool:
        """Whether roundings count as independent."""
        return not self.structured_values


class SoftmaxErrors(NamedTuple):
    """How far each quantity of a softmax may stray, before it meets values or cotangents (docs/error-budgets.md)."""

    slope: Float64[np.ndarray, "group query key"]  # the cap's steepest within reach of the errors
    bend: Float64[np.ndarray, "group query key"]  # absolute, of the cap's slope
    weights: Float64[np.ndarray, "group query key"]  # relative, of exp(logit - maximum)
    denominator: Float64[np.ndarray, "group query"]  # relative, of the sum of weights
    lse: Float64[np.ndarray, "group query"]  # absolute
    probabilities: Float64[np.ndarray, "group query key"]  # relative, of exp(logit - stored lse)
    sink_share: Float64[np.ndarray, "group query"]  # relative, of exp(sink - stored lse)


def softmax_errors(block: Block, forward: BlockForward, numerics: Numerics) -> SoftmaxErrors:
    """From the products to the probabilities, as the forward normalises them and as the backward recomputes them."""
    precision, few = numerics.precision, numerics.sums(1)
    products = _products_error(block, forward, numerics)
    logits, slope, bend = _capped_errors(block, forward, products, numerics)
    is_empty = np.isneginf(forward.lse)
    lse = np.where(is_empty, 0.0, forward.lse)
    weights = _grown(logits + few * (1.0 + np.abs(forward.logits - lse[..., None])))
    sinks = np.where(np.isneginf(block.sinks), 0.0, block.sinks)[:, None]
    sink = few * (1.0 + np.abs(sinks - lse))
    denominator = (forward.probabilities * weights).sum(axis=-1) + forward.sink_share * sink
    denominator += numerics.sums(numerics.visible_keys)
    lse_error = np.where(is_empty, 0.0, denominator + few * np.abs(lse))
    stored = lse_error + precision.statistics_roundoff * np.abs(lse)
    stored = _grown(stored)[..., None]
    return SoftmaxErrors(
        slope=slope,
        bend=bend,
        weights=weights,
        denominator=denominator,
        lse=lse_error,
        probabilities=weights + stored + weights * stored,
        sink_share=sink + stored[..., 0],
    )


def _capped_errors(
    block: Block, forward: BlockForward, products: Float64[np.ndarray, "group query key"], numerics: Numerics
) -> tuple[Float64[np.ndarray, "group query key"], ...]:
    """What the cap makes of the products' errors, which may be large beside it: the error of the logits, the steepest
    slope within reach, and the error of the slope."""
    cap, few = block.attn_logits_soft_cap, numerics.sums(1)
    if cap is None:
        return products, forward.slope, np.zeros_like(products)
    size = np.abs(forward.products)
    _, slope = soft_capped(np.maximum(size - products, 0.0), cap)
    logits = np.minimum(slope * products, 2.0 * cap)
    logits += (few + numerics.precision.logits_roundoff) * np.abs(forward.logits)
    tanh = np.minimum((size + products) / cap, 1.0)  # no smaller than any within reach
    rounding = few * np.square(forward.logits / cap)  # all that is left of the slope where tanh is 1
    bend = 2.0 * tanh * slope * products / cap + rounding
    return logits, slope + rounding, np.minimum(bend, 1.0)


def computed_slope(block: Block, forward: BlockForward, numerics: Numerics) -> Float64[np.ndarray, "group query key"]:
    """The cap's slope, and what rounding makes of 1 - tanh²: what other roundings are multiplied by."""
    if block.attn_logits_soft_cap is None:
        return forward.slope
    return forward.slope + numerics.sums(1) * np.square(forward.logits / block.attn_logits_soft_cap)


def _grown(exponent_error: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Relative error of exp(x) where x is wrong by so much: e^error - 1, no overflow (nothing is certain by then)."""
    return np.expm1(np.minimum(exponent_error, 100.0))


def _products_error(block: Block, forward: BlockForward, numerics: Numerics) -> Float64[np.ndarray, "group query key"]:
    """Of scale * query.key. Rounded inputs are shared by all keys of a query: within its logits, not across them, do
    their roundings count as independent."""
    precision = numerics.precision
    absolute = abs(block.scale) * (np.abs(block.query) @ np.abs(block.key).T)
    sums = numerics.sums(block.key.shape[1]) * largest_partial_sum(absolute, forward.products)
    inputs = (precision.query_roundoff, precision.input_roundoff, precision.input_roundoff)
    rounded = Roundings.of(block.query, *inputs).matmul(block.key.T).times(block.scale)
    return sums + precision.logits_roundoff * np.abs(forward.products) + rounded.bound(numerics.independent)


def largest_partial_sum(
    absolute: Float64[np.ndarray, "*shape"], total: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """The positive terms alone, or the negative ones, from the sum of absolute values and the sum: no order of
    summation comes to more."""
    return (absolute + np.abs(total)) / 2.0
