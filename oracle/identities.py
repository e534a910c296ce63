"""Sums over every key that must equal sums over every query: what holds gradients of keys that are too dear to probe.

sum dkey (x) key = sum query (x) dquery and sum dvalue (x) value = sum dout (x) out, matrices of features by
features, by batch row and kv head: along a linear map of the keys that is taken back at the queries no logit changes.
Time grows with the sequence alone. The allowance is derived in docs/error-budgets.md. NumPy only. Tested in
tests/oracle/test_identities_*.py.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from oracle.mask import most_visible
from oracle.outline import Outline
from oracle.precision import Precision
from oracle.rounding import LAMBDA
from oracle.softmax_errors import Numerics

Rows = Float64[np.ndarray, "rows dim"]
Matrix = Float64[np.ndarray, "left right"]


# Features of what stands on the right: enough to look at every feature on the left, and so few that the time is that of
# making the inputs.
RIGHT = 32


class Sums(NamedTuple):
    """Products of a gradient with what it is the gradient of: their sum over rows, and the sum of their squares."""

    total: Matrix
    squares: Matrix

    @staticmethod
    def of(left: Rows, right: Rows) -> "Sums":
        """sum over rows of left[i] * right[j], the first features of the right."""
        right = right[:, :RIGHT]
        return Sums(left.T @ right, np.square(left).T @ np.square(right))

    def plus(self, other: "Sums") -> "Sums":
        """Over the rows of both."""
        return Sums(self.total + other.total, self.squares + other.squares)


class QuerySide(NamedTuple):
    """Of the queries that read one kv head, all of its heads: the sums, and what their errors are made of."""

    query_dquery: Sums
    dout_out: Sums
    weighted: Float64[np.ndarray, "head_dim 5"]  # sums over rows of query[i]^2 times each column of `_row_sizes`
    query_norm: float  # the largest of a row
    largest: float  # of any number in query, dout and dlse

    @staticmethod
    def of(query: Rows, dquery: Rows, dout: Rows, out: Rows, dlse: Float64[np.ndarray, " rows"]) -> "QuerySide":
        """Rows of tokens alone."""
        sizes = _row_sizes(dout, out, dlse)
        return QuerySide(
            Sums.of(query, dquery),
            Sums.of(dout, out),
            np.square(query).T @ sizes,
            float(np.sqrt(np.square(query).sum(axis=1).max(initial=0.0))),
            float(max(np.abs(array).max(initial=0.0) for array in (query, dout, dlse))),
        )

    def plus(self, other: "QuerySide") -> "QuerySide":
        """Over the rows of both."""
        return QuerySide(
            self.query_dquery.plus(other.query_dquery),
            self.dout_out.plus(other.dout_out),
            self.weighted + other.weighted,
            max(self.query_norm, other.query_norm),
            max(self.largest, other.largest),
        )


def _row_sizes(dout: Rows, out: Rows, dlse: Float64[np.ndarray, " rows"]) -> Float64[np.ndarray, "rows 5"]:
    """By row: sum (dout out)^2, delta^2, dlse^2, r^2 |out|^2 and |dout|^2 |out|^2, where r is dlse - delta."""
    products = dout * out
    delta, size = products.sum(axis=1), np.square(out).sum(axis=1)
    columns = (
        np.square(products).sum(axis=1),
        np.square(delta),
        np.square(dlse),
        np.square(dlse - delta) * size,
        np.square(dout).sum(axis=1) * size,
    )
    return np.stack(columns, axis=1)


class KeySide(NamedTuple):
    """Of the keys of one kv head."""

    dkey_key: Sums
    dvalue_value: Sums
    key_norm: float  # the largest of a row
    largest_key: Float64[np.ndarray, " right"]  # by feature
    value_squares: float
    rows: int

    @staticmethod
    def of(key: Rows, dkey: Rows, value: Rows, dvalue: Rows) -> "KeySide":
        """Rows of tokens alone."""
        return KeySide(
            Sums.of(dkey, key),
            Sums.of(dvalue, value),
            float(np.sqrt(np.square(key).sum(axis=1).max(initial=0.0))),
            np.abs(key[:, :RIGHT]).max(axis=0, initial=0.0),
            float(np.square(value).sum()),
            len(key),
        )

    def plus(self, other: "KeySide") -> "KeySide":
        """Over the rows of both."""
        return KeySide(
            self.dkey_key.plus(other.dkey_key),
            self.dvalue_value.plus(other.dvalue_value),
            max(self.key_norm, other.key_norm),
            np.maximum(self.largest_key, other.largest_key),
            self.value_squares + other.value_squares,
            self.rows + other.rows,
        )


class Identity(NamedTuple):
    """What the keys' side must equal, what it is, and how far they may differ: by feature and feature."""

    expected: Matrix
    got: Matrix
    allowance: Matrix


def identities(
    queries: QuerySide, keys: KeySide, outline: Outline, *, scale: float, precision: Precision
) -> dict[str, Identity]:
    """Of "dkey" and of "dvalue" of one batch row and kv head, for values without structure (random signs).

    Args:
        queries: over every token and every query head of the kv head.
        keys: over every token.
        outline: the case.
        scale: of the logits.
        precision: the implementation's declared numerics.
    """
    errors = _relative_errors(queries, keys, outline, scale, precision)
    flushed = errors.flush * outline.seq_len * errors.visible_keys * errors.group
    flushed *= (1.0 + abs(scale)) * (1.0 + queries.largest) ** 3 * (1.0 + float(keys.largest_key.max(initial=0.0)))
    flushed *= 1.0 + math.sqrt(keys.value_squares)
    return {
        "dkey": _identity(queries.query_dquery, keys.dkey_key, _dkey_squares(queries, keys, errors), errors, flushed),
        "dvalue": _identity(
            queries.dout_out, keys.dvalue_value, _dvalue_squares(queries, keys, errors), errors, flushed
        ),
    }


def _identity(expected: Sums, got: Sums, squares: Matrix, errors: "_Errors", flushed: float) -> Identity:
    in_common = errors.in_common * (np.abs(expected.total) + np.abs(got.total))
    return Identity(expected.total, got.total, LAMBDA * np.sqrt(squares) + in_common + flushed)


@dataclasses.dataclass(frozen=True)
class _Errors:
    """Relative errors: of terms, bounded whatever the pair of query and key, and the roundoffs of `Precision`."""

    precision: Precision
    group: int
    visible_keys: int
    scale: float
    out: float
    probabilities: float  # of the backward, and of a sum over keys or queries
    slope: float
    products: float  # of dout.value, relative to |dout| |value|
    short: float

    @property
    def flush(self) -> float:
        return 2.0 * self.precision.smallest_normal

    @property
    def factors(self) -> float:
        """Squares of what a term loses as a factor of a matmul and in a partial sum."""
        precision = self.precision
        return precision.factor_roundoff**2 + precision.input_roundoff**2 + precision.partial_roundoff**2

    @property
    def in_common(self) -> float:
        precision = self.precision
        common = precision.factor_roundoff + precision.input_roundoff + precision.partial_roundoff
        return common + self.out + self.probabilities + self.slope

    @property
    def of_a_head(self) -> float:
        return self.precision.stored_roundoff**2 if self.group > 1 else 0.0


def _relative_errors(
    queries: QuerySide, keys: KeySide, outline: Outline, scale: float, precision: Precision
) -> _Errors:
    """The formulas of softmax_errors.py at the largest logits that the norms of queries and keys allow."""
    visible_keys = most_visible(outline.window, outline.seq_len)
    group = outline.num_query_heads // outline.num_kv_heads
    numerics = Numerics(precision, False, visible_keys, rows=outline.batch * outline.seq_len)
    few, cap = numerics.sums(1), outline.attn_logits_soft_cap
    largest = abs(scale) * queries.query_norm * keys.key_norm
    inputs = LAMBDA * math.sqrt(precision.query_roundoff**2 + 2.0 * precision.input_roundoff**2)
    products = largest * (numerics.sums(outline.head_dim) + precision.logits_roundoff + inputs)
    logits, slope, highest = products, 0.0, largest
    if cap is not None:
        highest = min(largest, cap)
        logits = min(products, 2.0 * cap) + (few + precision.logits_roundoff) * highest
        slope = min(1.0, few + 2.0 * min(1.0, (largest + products) / cap) * products / cap)
    sink = 0.0 if outline.sinks is None else float(np.abs(outline.sinks).max())
    lse = max(highest, sink) + math.log(visible_keys + 1.0)
    weights = _grown(logits + few * (1.0 + highest + lse))
    denominator = max(weights, few * (1.0 + sink + lse)) + numerics.sums(visible_keys)
    stored = _grown(denominator + (few + precision.statistics_roundoff) * lse)
    return _Errors(
        precision=precision,
        group=group,
        visible_keys=visible_keys,
        scale=scale,
        out=weights + denominator + numerics.sums(visible_keys),
        probabilities=weights + stored + weights * stored + numerics.sums(visible_keys * group) + few,
        slope=slope,
        products=numerics.sums(keys.dvalue_value.total.shape[0]),
        short=few,
    )


def _grown(exponent_error: float) -> float:
    return math.expm1(min(exponent_error, 100.0))


def _dvalue_squares(queries: QuerySide, keys: KeySide, errors: _Errors) -> Matrix:
    """out on the one side, dvalue on the other. Bounded errors count thrice: Hoeffding's bound beside Chernoff's."""
    stored = errors.precision.output_roundoff**2
    of_out = queries.dout_out.squares * (stored + errors.factors + 3.0 * errors.out**2)
    of_dvalue = stored + errors.of_a_head + errors.factors + 3.0 * errors.probabilities**2
    return of_out + keys.dvalue_value.squares * of_dvalue


def _dkey_squares(queries: QuerySide, keys: KeySide, errors: _Errors) -> Matrix:
    """dquery on the one side, dkey on the other, and what reaches a whole row of either."""
    precision = errors.precision
    value_dim = keys.dvalue_value.total.shape[0]
    factor, query = precision.factor_roundoff**2, precision.query_roundoff**2
    stored = precision.output_roundoff**2
    terms = 3.0 * factor + errors.factors + 3.0 * errors.probabilities**2
    of_dquery = queries.query_dquery.squares * (stored + query + terms)
    of_dkey = keys.dkey_key.squares * (stored + query + errors.of_a_head + terms)
    products, delta, dlse, with_row, with_dout = queries.weighted.T
    of_delta = precision.stored_roundoff**2 + factor + errors.factors
    of_delta += 3.0 * (errors.out**2 + value_dim * errors.products**2)
    rows = of_delta * products + factor * delta + 3.0 * errors.short**2 * dlse
    # What one key has of a row in the mean over its keys, sum p^2: out says it, as values have random signs.
    mean_square = keys.value_squares / max(1, keys.rows)
    if mean_square > 0.0:
        of_slope = 3.0 * errors.slope**2
        of_products = 3.0 * value_dim * errors.products**2 + 2.0 * precision.input_roundoff**2
        rows = rows + (terms + of_slope) * with_row / mean_square
        rows = rows + (of_products + of_slope) * with_dout / value_dim
    of_rows = 2.0 * errors.scale**2 * rows[:, None] * np.square(keys.largest_key)[None, :]
    return of_dquery + of_dkey + of_rows
