"""How a batch row is cut into documents, and where its padding lies: the levels of two features of the space.

Each level is a rule over one row's length and chunk length; where it leaves a choice it draws.
May touch: problem, philox. Tests: tests/conformance/test_space.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from conformance.philox import Draws
from conformance.problem import Document


@dataclass(frozen=True)
class Stretch:
    """One batch row to be cut: its positions, the length of its layout's chunks, and the draws that are its own."""

    seq_len: int
    chunk_len: int
    draws: Draws

    def border(self) -> int:
        """A position at which a chunk starts, not the first; the middle where there is one chunk only."""
        inner = range(self.chunk_len, self.seq_len, self.chunk_len)
        return self.draws.choice(inner) if inner else self.seq_len // 2


@dataclass(frozen=True)
class Padding:
    """`place`: "tail", "head" or "scattered"; `segment_id`: the problem's padding_segment_id."""

    place: str
    segment_id: int


DocumentRule = Callable[[Stretch], tuple[Document, ...]]


def _one(stretch: Stretch) -> tuple[Document, ...]:
    return _cut(stretch, ())


def _border(stretch: Stretch) -> tuple[Document, ...]:
    return _cut(stretch, (stretch.border(), stretch.border()))


def _border_minus_1(stretch: Stretch) -> tuple[Document, ...]:
    return _cut(stretch, (stretch.border() - 1, stretch.border() - 1))


def _border_plus_1(stretch: Stretch) -> tuple[Document, ...]:
    return _cut(stretch, (stretch.border() + 1, stretch.border() + 1))


def _single_tokens(stretch: Stretch) -> tuple[Document, ...]:
    border = stretch.border()
    return _cut(stretch, (1, border - 1, border, border + 1, stretch.seq_len - 1))


def _many_small(stretch: Stretch) -> tuple[Document, ...]:
    longest = max(2, stretch.chunk_len // 2)
    lengths = (1 + stretch.draws.below(longest) for _ in range(stretch.seq_len))
    return _cut(stretch, itertools.accumulate(lengths))


def _straddling(stretch: Stretch) -> tuple[Document, ...]:
    start = 1 + stretch.draws.below(max(1, stretch.chunk_len - 1))
    return _cut(stretch, (start, start + 2 * stretch.chunk_len))


def _repeated_id(stretch: Stretch) -> tuple[Document, ...]:
    """Documents a, b, a, the middle one short, at a border: the last sees the first unless the window is too short."""
    start = max(1, stretch.border() - 1)
    documents = _cut(stretch, (start, start + 1 + stretch.draws.below(2)))
    first, middle = stretch.draws.sample((-2, 1, 2, 3), 2)
    return tuple(
        Document(document.length, segment_id)
        for document, segment_id in zip(documents, (first, middle, first), strict=False)
    )


def _cut(stretch: Stretch, cuts: Iterable[int]) -> tuple[Document, ...]:
    """Documents between the cuts that lie inside the row; their ids are left to the case's seed."""
    inside = sorted({cut for cut in cuts if 0 < cut < stretch.seq_len})
    return tuple(Document(end - start) for start, end in itertools.pairwise((0, *inside, stretch.seq_len)))


# None: the problem has no segment ids at all.
DOCUMENTS: dict[str, DocumentRule | None] = {
    "none": None,
    "one": _one,
    "border": _border,
    "border-1": _border_minus_1,
    "border+1": _border_plus_1,
    "single_tokens": _single_tokens,
    "many_small": _many_small,
    "straddling": _straddling,
    "repeated_id": _repeated_id,
}

PADDINGS: dict[str, Padding | None] = {
    "none": None,
    "tail": Padding("tail", 9),
    "tail_id_0": Padding("tail", 0),
    "head_id_-1": Padding("head", -1),
    "scattered": Padding("scattered", 9),
}


def padded(documents: tuple[Document, ...], padding: Padding, stretch: Stretch) -> tuple[Document, ...]:
    """The same documents with padding written over some of their positions; at least one position stays a token."""
    starts = _padding_positions(padding, stretch)
    # One label a position: the document it belongs to, or -1 for padding.
    labels = [index for index, document in enumerate(documents) for _ in range(document.length)]
    labels = [-1 if position in starts else label for position, label in enumerate(labels)]
    return tuple(
        Document(len(list(run)), padding.segment_id if label < 0 else documents[label].segment_id)
        for label, run in itertools.groupby(labels)
    )


def _padding_positions(padding: Padding, stretch: Stretch) -> set[int]:
    seq_len, chunk_len, draws = stretch.seq_len, stretch.chunk_len, stretch.draws
    if padding.place == "scattered":
        wanted = {draws.below(seq_len) for _ in range(max(1, seq_len // 6))} | {stretch.border() - 1, stretch.border()}
    else:
        # A part of a chunk, a whole one (a rank without any token), or more.
        length = draws.choice((1, max(1, chunk_len // 2), chunk_len, chunk_len + 1))
        wanted = set(range(seq_len - length, seq_len)) if padding.place == "tail" else set(range(length))
    kept = draws.below(seq_len) if padding.place == "scattered" else 0 if padding.place == "tail" else seq_len - 1
    return {position for position in wanted if 0 <= position < seq_len} - {kept}
