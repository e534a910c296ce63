"""From a failing case to the smallest one that still shows the same kind of finding: greedy, field by field.

Each candidate costs one execution of the target, so the large jumps come first. May touch: cases only; the caller runs
them. Tests: tests/conformance/test_shrink.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from conformance.case_text import format_case
from conformance.problem import Case, Document, InvalidCase, Problem

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


def case_size(case: Case) -> tuple[int, int, int]:
    """How much a person has to read and hold in mind: words of the text, tokens, letters."""
    text = format_case(case)
    return (len(text.split()), case.problem.seq_len * case.problem.batch, len(text))


def shrink(case: Case, shows: Callable[[Case], bool], executions: int) -> Case:
    """The smallest case reached for which `shows` is true, after at most `executions` calls of it.

    `case` itself is taken to show the finding. Every step makes `case_size` smaller, so it ends.
    """
    smallest = case
    tried = {format_case(case)}
    left = executions
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in _candidates(smallest):
            text = format_case(candidate)
            if text in tried or case_size(candidate) >= case_size(smallest):
                continue
            tried.add(text)
            left -= 1
            if shows(candidate):
                smallest, progress = candidate, True
                break
            if left == 0:
                break
    return smallest


def _candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, the largest jumps first."""
    documents = ("documents", "padding", "segments")
    for kept in ((), documents, ("dtype",), ("values",), ("sinks",)):
        yield from _with(case, {name: value for name, value in _PLAIN.items() if name not in kept})
    yield from _smaller_geometry(case)
    groups = (
        documents,
        ("padding",),
        ("num_query_heads", "num_kv_heads", "tensor_parallelism"),
        ("batch", "data_parallelism"),
        ("head_dim", "value_dim", "shared_kv"),
    )
    grouped = {name for group in groups for name in group}
    for group in (*groups, *((name,) for name in _PLAIN if name not in grouped)):
        yield from _with(case, {name: _PLAIN[name] for name in group})
    yield from _fewer_documents(case)


def _smaller_geometry(case: Case) -> Iterator[Case]:
    """Another layout, fewer ranks, shorter chunks, windows that lie alike against the chunk, a smaller window."""
    problem = case.problem
    if problem.layout != "contiguous":
        yield from _with_seq_len(case, problem.seq_len, layout="contiguous")
    for ranks in range(1, problem.context_parallelism):
        chunks = problem.num_chunks // problem.context_parallelism * ranks
        yield from _with_seq_len(case, problem.chunk_len * chunks, context_parallelism=ranks)
    size = problem.sliding_window_size
    for chunk in _SMALL_CHUNKS:
        if chunk >= problem.chunk_len:
            break
        for window_size in dict.fromkeys(_alike(size, problem.chunk_len, chunk)):
            yield from _with_seq_len(case, chunk * problem.num_chunks, sliding_window_size=window_size)
    if size is not None:
        for smaller in sorted({1, 2, size // 2, size - 1}):
            if 1 <= smaller < size:
                yield from _with(case, {"sliding_window_size": smaller})


def _alike(size: int | None, old_chunk: int, new_chunk: int) -> Iterator[int | None]:
    """Window sizes that reach into the same chunk: as far from its border, in proportion, or unchanged."""
    if size is None:
        yield None
        return
    hops, offset = divmod(size, old_chunk)
    if offset > old_chunk // 2:
        hops, offset = hops + 1, offset - old_chunk
    for candidate in (hops * new_chunk + offset, size * new_chunk // old_chunk, size):
        if candidate >= 1:
            yield candidate


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
    """The case at another length; its documents are cut off there."""
    documents = case.documents
    if documents is not None:
        documents = tuple(_cut(row, seq_len) for row in documents)
    yield from _with(case, {**changes, "seq_len": seq_len, "documents": documents})


def _cut(row: tuple[Document, ...], seq_len: int) -> tuple[Document, ...]:
    kept: list[Document] = []
    for document in row:
        length = min(document.length, seq_len - sum(earlier.length for earlier in kept))
        if length > 0:
            kept.append(dataclasses.replace(document, length=length))
    return tuple(kept)


def _with(case: Case, changes: dict[str, object]) -> Iterator[Case]:
    """The changed case, if there is such a case: fields bind each other, and a change that breaks a rule is none."""
    documents = changes.get("documents", case.documents)
    batch = changes.get("batch", case.problem.batch)
    if isinstance(documents, tuple) and isinstance(batch, int):
        changes = {**changes, "documents": documents[:batch]}
    try:
        yield case.replace(**changes)
    except InvalidCase:
        return
