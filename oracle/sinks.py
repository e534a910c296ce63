"""dsinks of a case too long to be held, with its allowance: a stream over the queries that add to it.

One head at a time, a run of queries at a time, keeping four numbers a head; sums over some of the queries (those of one
host) add up to the whole. NumPy only. Tested in tests/oracle/test_sinks.py.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from oracle.dense import forward_block
from oracle.error_terms import Terms, allowance, sink_terms
from oracle.mask import most_visible
from oracle.outline import Outline, Positions, Reader, Rows, reader
from oracle.precision import Precision
from oracle.rounding import Roundings
from oracle.softmax_errors import Numerics
from oracle.tiles import TILE_ROWS

# A run of queries sees no more keys in all than this, unless it has no more than the fewest rows: arrays of 8 MiB.
RUN_PAIRS = 2**20
FEWEST_ROWS = 16


class SinkSums(NamedTuple):
    """Over some of the queries of one head: the gradient of its sink, and the terms of its allowance."""

    dsink: float
    worst: float
    squares: float
    sizes: float

    def plus(self, other: "SinkSums") -> "SinkSums":
        """Over both sets of queries, which have none in common."""
        return SinkSums(*(one + two for one, two in zip(self, other, strict=True)))


NOTHING = SinkSums(0.0, 0.0, 0.0, 0.0)


def every_query(outline: Outline) -> Iterator[tuple[int, Positions]]:
    """(batch row, all its positions), for `sink_sums` of the whole case."""
    for row in range(outline.batch):
        yield row, np.arange(outline.seq_len)


def sink_sums(
    rows: Rows,
    outline: Outline,
    head: int,
    queries: Iterable[tuple[int, Positions]],
    *,
    precision: Precision,
    structured_values: bool = False,
) -> SinkSums:
    """The sums over some queries of one query head.

    Args:
        rows: reads the case's arrays.
        outline: the rest of the case; it has sinks.
        head: the query head.
        queries: (batch row, ascending positions), no query twice.
        precision: the implementation's declared numerics.
        structured_values: as in `oracle.budget.answer_with_allowances`.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    source, numerics = reader(rows, outline), _numerics(outline, precision, structured_values)
    if source.sinks is None:
        raise ValueError("outline must have sinks, got sinks=None")
    if not 0 <= head < outline.num_query_heads:
        raise ValueError(f"head must be >= 0 and < {outline.num_query_heads}, got {head}")
    sums = NOTHING
    run = min(TILE_ROWS, max(FEWEST_ROWS, RUN_PAIRS // numerics.visible_keys))
    for row, positions in queries:
        for start in range(0, len(positions), run):
            sums = sums.plus(_of_run(source, row, head, positions[start : start + run], numerics))
    return sums


def dsink_with_allowance(
    sums: SinkSums, outline: Outline, *, precision: Precision, structured_values: bool = False
) -> tuple[float, float]:
    """The right answer for one head, and how far it may be missed, from its sums over every query of the case."""
    dsink, worst, squares, sizes = np.array(sums)[:, None]
    terms = Terms(worst, Roundings(squares, sizes))
    (allowed,) = allowance("dsinks", dsink, terms, _numerics(outline, precision, structured_values))
    return sums.dsink, float(allowed)


def _numerics(outline: Outline, precision: Precision, structured_values: bool) -> Numerics:
    visible_keys = most_visible(outline.window, outline.seq_len)
    return Numerics(precision, structured_values, visible_keys, rows=outline.batch * outline.seq_len)


def _of_run(source: Reader, row: int, head: int, queries: Positions, numerics: Numerics) -> SinkSums:
    """One block: these queries and what they see; at least one key, which may be hidden from all of them."""
    heads = slice(head, head + 1)
    block, _ = source.block(row, heads, queries, also=queries[:1])
    dsinks, terms = sink_terms(block, forward_block(block), *source.cotangents(row, heads, queries), numerics)
    parts = (dsinks, terms.worst, terms.roundings.squares, terms.roundings.sizes)
    return SinkSums(*(float(np.sum(part)) for part in parts))
