"""How far finite precision may stray from the right answer, element by element: derived, not picked.

`allowances` is what a check compares an error with; softmax_errors.py and error_terms.py have the formulas, block by
block, and docs/error-budgets.md their derivation. NumPy only. Tested in tests/oracle/test_budget_*.py.
"""

from typing import Any, NamedTuple, Unpack

import numpy as np
from jaxtyping import Float64

from oracle import banded, tiles
from oracle.arguments import AttentionOptions, validated, validated_cotangents
from oracle.dense import SolvedBlock
from oracle.error_terms import Terms, allowance, block_terms, summed_over_group
from oracle.mask import most_visible
from oracle.precision import Precision
from oracle.rounding import Roundings
from oracle.softmax_errors import Numerics

__all__ = ["Allowances", "Answer", "Precision", "allowances", "answer_with_allowances", "share"]


class Answer(NamedTuple):
    """The right answer, float64. `dsinks` is None where there are no sinks."""

    out: Float64[np.ndarray, "batch seq num_query_heads value_dim"]
    lse: Float64[np.ndarray, "batch seq num_query_heads"]
    dquery: Float64[np.ndarray, "batch seq num_query_heads head_dim"]
    dkey: Float64[np.ndarray, "batch seq num_kv_heads head_dim"]
    dvalue: Float64[np.ndarray, "batch seq num_kv_heads value_dim"]
    dsinks: Float64[np.ndarray, " num_query_heads"] | None


class Allowances(NamedTuple):
    """How far each element of an `Answer` may be missed, float64, >= 0. `dsinks` is None where there are no sinks."""

    out: Float64[np.ndarray, "batch seq num_query_heads value_dim"]
    lse: Float64[np.ndarray, "batch seq num_query_heads"]
    dquery: Float64[np.ndarray, "batch seq num_query_heads head_dim"]
    dkey: Float64[np.ndarray, "batch seq num_kv_heads head_dim"]
    dvalue: Float64[np.ndarray, "batch seq num_kv_heads value_dim"]
    dsinks: Float64[np.ndarray, " num_query_heads"] | None


def share(
    actual: np.ndarray, expected: Float64[np.ndarray, "*shape"], allowance: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """Error as a share of the allowance; an element passes if its share is <= 1.

    Equal numbers (equal infinities too: lse of an empty row) have share 0; a NaN, or an error without allowance, inf.
    """
    actual = np.asarray(actual).astype(np.float64)
    is_equal = actual == expected
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.abs(actual - expected) / allowance
    return np.where(is_equal, 0.0, np.where(np.isnan(shares), np.inf, shares))


def allowances(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    precision: Precision,
    structured_values: bool = False,
    **options: Unpack[AttentionOptions],
) -> Allowances:
    """The second half of `answer_with_allowances`."""
    return answer_with_allowances(
        query,
        key,
        value,
        dout=dout,
        dlse=dlse,
        precision=precision,
        structured_values=structured_values,
        **options,
    )[1]


def answer_with_allowances(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    precision: Precision,
    structured_values: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Answer, Allowances]:
    """The right answer, and how far an implementation of the given precision may miss it, from one walk over blocks.

    Args:
        query, key, value, options: as `oracle.attention`; the values that the implementation is given, already rounded
            to its dtype.
        dout, dlse: as `oracle.attention_vjp`.
        precision: the implementation's declared numerics.
        structured_values: the values repeat or follow a pattern, so that roundings need not be independent: they are
            then added as a worst case.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    arguments = validated(query, key, value, **options)
    cotangents = validated_cotangents(arguments, dout, dlse)
    visible_keys = most_visible(arguments.window, arguments.query.shape[1])
    numerics = Numerics(precision, structured_values, visible_keys, rows=arguments.is_token.size)
    answer, worst, squares, sizes = (tiles.zeros(arguments) for _ in range(4))
    for tile in tiles.tiles_of(arguments):
        solved = banded.solved(tile, cotangents)
        terms = block_terms(solved, numerics)
        tiles.add(answer, tile, _answers(solved))
        tiles.add(worst, tile, tiles.PerTensor(*(term.worst for term in terms)))
        tiles.add(squares, tile, tiles.PerTensor(*(term.roundings.squares for term in terms)))
        tiles.add(sizes, tile, tiles.PerTensor(*(term.roundings.sizes for term in terms)))
    answers, allowed = {}, {}
    for tensor, expected, errors, *roundings in zip(answer._fields, answer, worst, squares, sizes, strict=True):
        terms = Terms(errors, Roundings(*roundings))
        if tensor in ("dkey", "dvalue"):
            expected, errors, *roundings = (tiles.by_group(a, arguments) for a in (expected, errors, *roundings))
            terms = summed_over_group(expected, Terms(errors, Roundings(*roundings)), numerics)
            expected = expected.sum(axis=2)
        answers[tensor] = expected
        allowed[tensor] = allowance(tensor, expected, terms, numerics)
    has_sinks = arguments.sinks is not None
    return Answer(**_in_position_order(answers, has_sinks)), Allowances(**_in_position_order(allowed, has_sinks))


def _answers(solved: SolvedBlock) -> tiles.PerTensor:
    forward, gradients = solved.forward, solved.gradients
    return tiles.PerTensor(
        forward.out, forward.lse, gradients.dquery, gradients.dkey, gradients.dvalue, gradients.dsinks
    )


def _in_position_order(tensors: dict[str, np.ndarray], has_sinks: bool) -> dict[str, Any]:
    dsinks = tensors.pop("dsinks")
    by_position = {name: tensor.swapaxes(1, 2) for name, tensor in tensors.items()}
    return {**by_position, "dsinks": dsinks if has_sinks else None}
