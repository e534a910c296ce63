"""Which queries of a chunk wait for the halo: splits a chunk into spans, so that the others run while the halo travels.

Plain integers; no arrays, no JAX. Tested in tests/impl/test_halo_spans.py.
"""

import itertools
from dataclasses import dataclass

from impl.exchange import HaloPlan

BOUNDARY_MULTIPLE = 512
"""A boundary is rounded up to whole blocks of Pallas kernels, which would compute on padding otherwise."""


@dataclass(frozen=True)
class Span:
    """Queries `first_query … first_query + queries − 1` of the chunk in `slot`, and rows `first_key …
    first_key + keys − 1` of the slot's key run, all that they may see. `interior`: all of them in their own chunk."""

    slot: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    interior: bool

    def key_offset(self, rows_before: int) -> int:
        """Position of the span's first key minus that of its first query."""
        return self.first_key - rows_before - self.first_query


def spans_of(plan: HaloPlan, window: tuple[int | None, int | None], slot: int) -> tuple[Span, ...]:
    """The spans of a chunk, in order. One span, unless splitting pays: when at least half of the chunk is interior.

    Below that the interior is too short to hide the wire, and two small kernel calls cost more than a larger one.
    """
    run = plan.key_runs[slot]
    whole = Span(slot, 0, plan.chunk, 0, run.rows_before + plan.chunk + run.rows_after, interior=not plan.permutes)
    front, back = _boundary(run.rows_before), _boundary(run.rows_after)
    if whole.interior or 2 * (front + back) > plan.chunk:
        return (whole,)
    left, right = window
    cuts = [0, front, plan.chunk - back, plan.chunk]
    spans = []
    for start, stop in itertools.pairwise(cuts):
        if start == stop:
            continue
        first_key = 0 if left is None else max(0, run.rows_before + start - left)
        end_key = whole.keys if right is None else min(whole.keys, run.rows_before + stop + right)
        interior = first_key >= run.rows_before and end_key <= run.rows_before + plan.chunk
        spans.append(Span(slot, start, stop - start, first_key, end_key - first_key, interior))
    return tuple(spans)


def _boundary(halo_rows: int) -> int:
    return -(-halo_rows // BOUNDARY_MULTIPLE) * BOUNDARY_MULTIPLE
