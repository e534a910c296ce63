"""Where a query and a key lie to each other, in the words of a reading.

Shared by the checks visibility and invariance. May touch: cases. Tests: tests/conformance/test_checks_visibility.py.
"""

from __future__ import annotations

import numpy as np

from conformance.inputs import rows_of
from conformance.problem import Case


def relation(case: Case, batch_row: int, query: int, key: int) -> str:
    """How a key lies to a query: "before its window (29 to 129)", "in another document", "padding", "in its window"."""
    problem = case.problem
    (ids,) = segment_ids_of(case)[batch_row][None]
    left, right = problem.window
    first = 0 if left is None else max(0, query - left)
    last = problem.seq_len - 1 if right is None else min(problem.seq_len - 1, query + right)
    window = f"its window ({first} to {last})"
    if key < first:
        return f"before {window}"
    if key > last:
        return f"after {window}"
    if problem.padding is not None and problem.padding in (ids[query], ids[key]):
        return "padding" if ids[key] == problem.padding else "a key, though the query is padding"
    return "in another document" if ids[query] != ids[key] else f"in {window}"


def place(case: Case, position: int) -> str:
    """The rank of a position, and how far it is into its chunk."""
    problem = case.problem
    words = f"rank {problem.rank_of(position)} of {problem.context_parallelism}"
    if problem.layout == "striped":
        return words
    chunk, offset = divmod(position, problem.chunk_len)
    return f"{words}, row {offset} of {problem.chunk_len} in chunk {chunk}"


def segment_ids_of(case: Case) -> np.ndarray:
    """int32 [batch, seq], zeros where the problem has no segments."""
    problem = case.problem
    rows, positions = np.arange(problem.batch), np.arange(problem.seq_len)
    if not problem.segments:
        return np.zeros((problem.batch, problem.seq_len), np.int32)
    return rows_of(case, "segment_ids", rows, positions)
