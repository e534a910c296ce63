"""Documents and their segment ids: the ids a case leaves to its seed, each position's id, documents for another draw.

May touch: problem, philox, NumPy. The ways of cutting documents that the feature space draws are in document_levels.py.
Tests: tests/conformance/test_segments.py.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Int32, Int64

from conformance.philox import Draws
from conformance.problem import Case, Document
from conformance.value_kinds import STREAMS

# Few ids, so that they repeat; unsorted, negative and zero, none of which may mean anything to a target, and neither
# may the least and the largest int32. The other large ones are no bfloat16 and no float32: ids that travel so come back
# changed.
DRAWN_IDS = (-(2**31), -1, 0, 1, 2, 3, 1027, 2**24 + 1, 2**31 - 1)
_MOST_REDRAWN_DOCUMENTS = 6


def segment_id_rows(
    case: Case, batch_rows: Int64[np.ndarray, " batch_rows"], positions: Int64[np.ndarray, " positions"]
) -> Int32[np.ndarray, "batch_rows positions"]:
    """The segment id of each position of some batch rows."""
    rows = []
    for batch_row in batch_rows.tolist():
        documents = documents_with_ids(case, batch_row)
        ends = np.cumsum([document.length for document in documents])
        ids = np.array([document.segment_id for document in documents], dtype=np.int32)
        rows.append(ids[np.searchsorted(ends, positions, side="right")])
    return np.stack(rows) if rows else np.zeros((0, positions.size), np.int32)


def documents_with_ids(case: Case, batch_row: int) -> tuple[Document, ...]:
    """The documents of a batch row, every id filled in: a drawn one is neither the padding id nor a neighbour's."""
    documents = list((Document(case.problem.seq_len),) if case.documents is None else case.documents[batch_row])
    draws = Draws(case.seed, STREAMS["segment_ids"], batch_row)
    for index, document in enumerate(documents):
        if document.segment_id is None:
            neighbours = [other.segment_id for other in documents[max(0, index - 1) : index + 2]]
            free = [drawn for drawn in DRAWN_IDS if drawn != case.problem.padding and drawn not in neighbours]
            documents[index] = Document(document.length, draws.choice(free))
    return tuple(documents)


def redrawn_documents(case: Case) -> tuple[tuple[Document, ...], ...]:
    """Other documents than the case's, drawn from its seed: 2 to 6 a row (fewer where seq_len is), one of them padding
    where there is a padding id.
    """
    seq_len = case.problem.seq_len
    rows = []
    for batch_row in range(case.problem.batch):
        old = (Document(seq_len),) if case.documents is None else case.documents[batch_row]
        draws = Draws(case.seed, STREAMS["redraw"], batch_row)
        lengths = _draw_lengths(draws, seq_len)
        if lengths == [document.length for document in old]:
            lengths = _draw_lengths(draws, seq_len)
        padding = _draw_padding(draws, case, old, len(lengths))
        rows.append(
            tuple(
                Document(length, case.problem.padding if index in padding else None)
                for index, length in enumerate(lengths)
            )
        )
    return tuple(rows)


def _draw_lengths(draws: Draws, seq_len: int) -> list[int]:
    count = min(2 + draws.below(_MOST_REDRAWN_DOCUMENTS - 1), seq_len)
    cuts: set[int] = set()
    while len(cuts) < count - 1:
        cuts.add(1 + draws.below(seq_len - 1))
    edges = [0, *sorted(cuts), seq_len]
    return [end - start for start, end in itertools.pairwise(edges)]


def _draw_padding(draws: Draws, case: Case, old: tuple[Document, ...], count: int) -> set[int]:
    """Indices of the padding documents: as many as before but at least one, the last one if it was one, never all."""
    if case.problem.padding is None or count == 1:
        return set()
    was_padding = [document.segment_id == case.problem.padding for document in old]
    wanted = min(max(1, sum(was_padding)), count - 1)
    chosen = {count - 1} if was_padding[-1] or not any(was_padding) else set()
    others = draws.sample(range(count - 1), wanted - len(chosen))
    return chosen | set(others)
