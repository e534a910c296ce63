"""dsinks of a case too large to be answered whole, or held by many hosts: of as many heads as can be afforded.

Every query of a head adds to it, so a head is streamed whole; on many hosts each streams its own queries.
May touch: the oracle and the inputs' rows; never JAX. Tests: tests/conformance/test_sink_answers.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from conformance.inputs import STRUCTURED
from conformance.philox import Draws
from conformance.probed_answers import outline_of, row_reader, visible_pairs
from conformance.problem import Case
from conformance.value_kinds import STREAMS
from oracle.budget import Precision
from oracle.sinks import SinkSums, dsink_with_allowance, sink_sums

# Pairs of a query and a key in its window, over the heads that are compared: 20 to 40 seconds of one processor.
SINK_PAIRS = 2**27


def affordable_heads(case: Case, hosts: int = 1) -> tuple[int, ...]:
    """The query heads whose sinks' gradients are compared: all, or a sample that the seed decides; perhaps none.

    Hosts share the work, so that more can be afforded.
    """
    heads = range(case.problem.num_query_heads)
    count = min(len(heads), hosts * SINK_PAIRS // pairs_of_a_head(case))
    return tuple(sorted(Draws(case.seed, STREAMS["sink_heads"]).sample(heads, count)))


def pairs_of_a_head(case: Case) -> int:
    """How many pairs of a query and a key the windows of one head hold, over batch rows; documents aside."""
    return visible_pairs(case) // case.problem.num_query_heads


def why_withheld(case: Case) -> str:
    """What to say of a case none of whose heads can be afforded."""
    return f"one head has {pairs_of_a_head(case)} pairs of a query and a key; at most {SINK_PAIRS} are summed up"


def sink_sums_of(
    case: Case,
    head: int,
    queries: Iterable[tuple[int, np.ndarray]],
    *,
    with_lse: bool,
    defines_empty_rows: bool,
    precision: Precision,
) -> SinkSums:
    """The sums over some queries, (batch row, ascending positions), of one head, as a target's call owes them."""
    return sink_sums(
        row_reader(case, with_lse, defines_empty_rows),
        outline_of(case),
        head,
        queries,
        precision=precision,
        structured_values=case.values in STRUCTURED,
    )


def sink_answer(case: Case, sums: SinkSums, precision: Precision) -> tuple[float, float]:
    """The right dsinks of a head and its allowance, from its sums over all queries."""
    return dsink_with_allowance(
        sums, outline_of(case), precision=precision, structured_values=case.values in STRUCTURED
    )
