"""From a failing case to the smallest one that still shows the same kind of finding: greedy, field by field.

Each candidate costs one execution of the target, so large jumps come first. May touch: cases; the caller runs them.
Tests: tests/conformance/test_shrink.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from conformance.case_text import format_case
from conformance.problem import Case, Document, InvalidCase, Problem, Window

# What a person leaves out of a case first, and what it is then. Geometry is not among it.
_PLAIN: dict[str, object] = {
    "dtype": "float32",
    "values": "plain",
    "data_parallelism": 1,
    "tensor_parallelism": 1,
    "ulysses_parallelism": 1,
    "mesh_axes": Problem.mesh_axes,
    "axis_types": "auto",
    "device_order": "natural",
    "attn_logits_soft_cap": None,
    "scale": None,
    "sinks": False,
    "shared_kv": False,
    "num_query_heads": Problem.num_query_heads,
    "num_kv_heads": Problem.num_kv_heads,
    "head_dim": Problem.head_dim,
    "value_dim": None,
    "batch": 1,
    "documents": None,
    "padding": None,
    "segments": False,
    "seed": 0,
}
_SMALL_CHUNKS = (2, 4, 8, 16, 32)

Step = Callable[[Case], Iterator[Case]]
"""From a case to simpler ones, the simplest first."""


def case_size(case: Case) -> tuple[int, int, int, int]:
    """How much a person has to read and hold in mind: words of the text, tokens, reach of the window, letters.

    seq_len counts as tokens, not as a word: four tokens are less than the 64 of the default, which the text leaves out.
    """
    text, problem = format_case(case), case.problem
    words = sum(not word.startswith("seq_len=") for word in text.split())
    reach = sum(problem.seq_len if bound is None else bound for bound in problem.window)
    return (words, problem.seq_len * problem.batch, reach, len(text))


def shrink(case: Case, shows: Callable[[Case], bool], executions: int) -> Case:
    """The smallest case reached for which `shows` is true, after at most `executions` calls of it.

    `case` itself is taken to show the finding. Every step makes `case_size` smaller, so it ends.
    """
    smallest, left = case, executions
    tried = {format_case(case)}

    def takes(step: Step) -> bool:
        """Goes on with the first candidate of the step that shows the finding, if there is one."""
        nonlocal smallest, left
        for candidate in step(smallest):
            text = format_case(candidate)
            if text in tried or case_size(candidate) >= case_size(smallest):
                continue
            if left == 0:
                return False
            tried.add(text)
            left -= 1
            if shows(candidate):
                smallest = candidate
                return True
        return False

    for jump in _JUMPS:
        if takes(jump):
            break
    while sum(takes(step) for step in _STEPS):  # a round is every step in turn; the last one changes nothing
        pass
    return smallest


def _all_but(*kept: str) -> Step:
    """Everything plain at once, but for some fields."""
    return _set_plain(*(name for name in _PLAIN if name not in kept))


def _set_plain(*names: str) -> Step:
    return lambda case: _with(case, {name: _PLAIN[name] for name in names})


def _contiguous(case: Case) -> Iterator[Case]:
    if case.problem.layout != "contiguous":
        yield from _with_seq_len(case, case.problem.seq_len, layout="contiguous")


def _fewer_ranks(case: Case) -> Iterator[Case]:
    """Chunks stay as long as they are; the sequence loses its end, or its beginning. The default number comes first: it
    is no word of the text.
    """
    problem = case.problem
    for ranks in sorted(range(1, problem.context_parallelism), key=lambda n: (n != Problem.context_parallelism, n)):
        chunks = problem.num_chunks // problem.context_parallelism * ranks
        yield from _with_seq_len(case, problem.chunk_len * chunks, context_parallelism=ranks)


def _shorter_chunks(case: Case) -> Iterator[Case]:
    """With a window and documents that lie alike against them."""
    problem = case.problem
    for chunk in _SMALL_CHUNKS:
        if chunk >= problem.chunk_len:
            return
        bounds = (_alike(bound, problem.chunk_len, chunk) for bound in problem.window)
        for window in dict.fromkeys(zip(*bounds, strict=True)):
            documents = _documents_alike(case, chunk)
            yield from _with(case, {**_written(window), "seq_len": chunk * problem.num_chunks, "documents": documents})


def _alike(bound: int | None, old_chunk: int, new_chunk: int) -> tuple[int | None, ...]:
    """Bounds that reach into the same chunk: at the same distance from its border, in proportion, or unchanged."""
    if bound is None:
        return (None, None, None)
    # What stands in relation to a chunk is the number of visible keys, the query's own included.
    hops, offset = divmod(bound + 1, old_chunk)
    if offset > old_chunk // 2:
        hops, offset = hops + 1, offset - old_chunk
    sizes = (hops * new_chunk + offset, (bound + 1) * new_chunk // old_chunk, bound + 1)
    return tuple(max(size, 1) - 1 for size in sizes)


def _documents_alike(case: Case, new_chunk: int) -> tuple[tuple[Document, ...], ...] | None:
    """Documents that end in the same chunks, on a border or inside as they did; those that come out empty are gone."""
    if case.documents is None:
        return None
    old_chunk = case.problem.chunk_len
    rows = []
    for row in case.documents:
        start = end = 0
        kept: list[Document] = []
        for document in row:
            end += document.length
            hops, offset = divmod(end, old_chunk)
            new_end = hops * new_chunk + min(offset, new_chunk - 1)
            if new_end > start:
                kept.append(dataclasses.replace(document, length=new_end - start))
                start = new_end
        rows.append(tuple(kept))
    return tuple(rows)


def _smaller_window(case: Case) -> Iterator[Case]:
    """One bound smaller, the right one first: without it the window is a sliding_window_size."""
    left, right = case.problem.window
    if (left, right) == (None, 0):
        return  # a GLOBAL layer has no smaller window
    windows = [(left, smaller) for smaller in _smaller_bounds(right)]
    for window in [*windows, *((smaller, right) for smaller in _smaller_bounds(left))]:
        yield from _with(case, _written(window))


def _smaller_bounds(bound: int | None) -> list[int]:
    if bound is None:
        return [0, 1, 2]
    return sorted({0, 1, bound // 2, bound - 1} & set(range(bound)))


def _written(window: Window) -> dict[str, object]:
    """The fields that say this window: sliding_window_size where it is one."""
    left, right = window
    if right == 0 and left is not None:
        return {"sliding_window_size": left + 1, "window": None}
    return {"sliding_window_size": None, "window": window}


def _fewer_documents(case: Case) -> Iterator[Case]:
    """Each pair of neighbours made one document."""
    if case.documents is None:
        return
    for row_number, row in enumerate(case.documents):
        for i in range(len(row) - 1):
            merged = Document(row[i].length + row[i + 1].length, row[i].segment_id)
            new_row = (*row[:i], merged, *row[i + 2 :])
            rows = (*case.documents[:row_number], new_row, *case.documents[row_number + 1 :])
            yield from _with(case, {"documents": rows})


def _with_seq_len(case: Case, seq_len: int, **changes: object) -> Iterator[Case]:
    """The case at another length; its documents are cut off at the end, or at the beginning."""
    if case.documents is None:
        yield from _with(case, {**changes, "seq_len": seq_len})
        return
    ends = tuple(_cut(row, seq_len) for row in case.documents)
    beginnings = tuple(_cut(row[::-1], seq_len)[::-1] for row in case.documents)
    for documents in dict.fromkeys((ends, beginnings)):
        yield from _with(case, {**changes, "seq_len": seq_len, "documents": documents})


def _cut(row: tuple[Document, ...], seq_len: int) -> tuple[Document, ...]:
    """The first `seq_len` positions of the documents."""
    kept: list[Document] = []
    for document in row:
        length = min(document.length, seq_len - sum(earlier.length for earlier in kept))
        if length > 0:
            kept.append(dataclasses.replace(document, length=length))
    return tuple(kept)


def _with(case: Case, changes: dict[str, object]) -> Iterator[Case]:
    """The changed case, if there is such a case: fields bind each other, and a change that breaks a rule is none.

    Of fewer batch rows those with the most documents stay.
    """
    documents = changes.get("documents", case.documents)
    batch = changes.get("batch", case.problem.batch)
    if isinstance(documents, tuple) and isinstance(batch, int) and batch < len(documents):
        changes = {**changes, "documents": tuple(sorted(documents, key=len, reverse=True)[:batch])}
    try:
        yield case.replace(**changes)
    except InvalidCase:
        return


_DOCUMENTS = ("documents", "padding", "segments")
_JUMPS = tuple(
    _all_but(*kept) for kept in ((), _DOCUMENTS, ("sinks",), (*_DOCUMENTS, "sinks"), ("dtype",), ("values",))
)
# Fields that bind each other change together.
_GROUPS = (
    _DOCUMENTS,
    ("padding",),
    ("num_query_heads", "num_kv_heads", "tensor_parallelism"),
    ("num_query_heads", "num_kv_heads"),
    ("batch", "data_parallelism"),
    ("head_dim", "value_dim", "shared_kv"),
)
_ALONE = tuple(name for name in _PLAIN if not any(name in group for group in _GROUPS))
_STEPS = (
    *(_contiguous, _fewer_ranks, _shorter_chunks, _smaller_window),
    *(_set_plain(*names) for names in (*_GROUPS, *((name,) for name in _ALONE))),
    _fewer_documents,
)
