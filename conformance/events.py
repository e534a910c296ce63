"""What a case really exercises, by name: compiled kernels have no branches to count, so events are the coverage.

Worked out from the finished case, not from the levels it was drawn with: a border level on one chunk cuts no border.
May touch: problem, designated, segments, value_kinds, NumPy. Tests: tests/conformance/test_events.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from conformance.designated import asks_remat
from conformance.problem import Case, Document, Problem
from conformance.segments import documents_with_ids
from conformance.value_kinds import STRUCTURED, draw_sinks, logit_std, typical_largest_logit


def events_of(case: Case) -> frozenset[str]:
    """The names of the events that happen in a case; `EVENTS` has all names."""
    return frozenset(name for name, happens in _all_events(case).items() if happens)


def _all_events(case: Case) -> dict[str, bool]:
    problem = case.problem
    return {
        **_window_events(problem),
        **_mesh_events(problem),
        **_document_events(case),
        **_value_events(case),
        **_input_events(problem),
        **_asked_events(case),
    }


def _window_events(problem: Problem) -> dict[str, bool]:
    left, right = problem.window
    chunk, seq_len = problem.chunk_len, problem.seq_len
    halo = problem.layout != "striped"
    hops = max(_hops(problem, left), _hops(problem, right))
    return {
        **{f"{count} hops": halo and hops == count for count in (0, 1, 2)},
        "3 or more hops": halo and hops >= 3,
        "halo of every other chunk": halo and problem.num_chunks > 1 and hops == problem.num_chunks - 1,
        "pair meets inside the rank": problem.layout == "dual_chunk_swap" and hops >= 1,
        "window starts on a chunk border": left is not None and 0 < left < seq_len and left % chunk == 0,
        "window of exactly a chunk": (left, right) == (chunk - 1, 0),
        "window of the query alone": (left, right) == (0, 0),
        "window longer than the sequence": left is not None and left >= seq_len,
        "window of the whole past": left is None,
        "window of the whole future": right is None,
        "keys after the query": right != 0,
        "keys on both sides": left != 0 and right != 0,
    }


def _hops(problem: Problem, reach: int | None) -> int:
    """The distance in chunks of the furthest chunk that a window reaching so far touches."""
    others = problem.num_chunks - 1
    return others if reach is None else min(-(-reach // problem.chunk_len), others)


def _mesh_events(problem: Problem) -> dict[str, bool]:
    ranks, tensor = problem.context_parallelism, problem.tensor_parallelism
    group, shard = problem.num_query_heads // problem.num_kv_heads, problem.num_query_heads // tensor
    replicated = problem.num_kv_heads % tensor != 0
    return {
        "one rank": ranks == 1,
        "odd number of ranks": ranks > 1 and ranks % 2 == 1,
        "three or more batch rows a shard": problem.batch // problem.data_parallelism >= 3,
        "five or more ranks beside another axis": ranks >= 5 and problem.num_devices > ranks,
        "sequence on two axes": problem.ulysses_parallelism > 1,
        "data and tensor axes at once": problem.data_parallelism > 1 and tensor > 1,
        "context is not the middle axis": problem.mesh_axes[1] != "context" and problem.num_devices > ranks > 1,
        "kv heads replicated over tensor": replicated,
        "tensor shards cut kv groups unevenly": group % shard != 0 and shard % group != 0,
        "several query heads a kv head": 1 < group < problem.num_query_heads,
        "one kv head for all": problem.num_kv_heads == 1 < problem.num_query_heads,
    }


def _document_events(case: Case) -> dict[str, bool]:
    problem = case.problem
    rows = [tuple(_placed(documents_with_ids(case, row))) for row in range(problem.batch)] if problem.segments else []
    documents = [document for row in rows for document in row]
    tokens = [placed for placed in documents if placed[2] != problem.padding]
    starts = {start for start, _, _ in documents if start > 0}
    borders = range(problem.chunk_len, problem.seq_len, problem.chunk_len)
    padding = len(tokens) < len(documents)
    inner = [sum(start < border < end for border in borders) for start, end, _ in tokens]
    return {
        "document starts on a chunk border": any(border in starts for border in borders),
        "document starts one before a chunk border": any(border - 1 in starts for border in borders),
        "document starts one after a chunk border": any(border + 1 in starts for border in borders),
        "document over a chunk border": any(count >= 1 for count in inner),
        "document over several chunk borders": any(count >= 2 for count in inner),
        "document of one token": any(end - start == 1 for start, end, _ in tokens),
        "id seen again across another document": any(_sees_id_again(row, problem) for row in rows),
        "batch rows cut differently": len({tuple((start, end) for start, end, _ in row) for row in rows}) > 1,
        "negative id": any(segment_id < 0 for _, _, segment_id in tokens),
        "id 0": any(segment_id == 0 for _, _, segment_id in tokens),
        "empty row": padding and not problem.sinks,
        "empty row with a sink": padding and problem.sinks,
        "padding id 0": padding and problem.padding == 0,
        "negative padding id": padding and problem.padding is not None and problem.padding < 0,
        "chunk without tokens": padding and any(_has_empty_chunk(row, problem) for row in rows),
    }


Placed = tuple[int, int, int]


def _placed(documents: tuple[Document, ...]) -> Iterator[Placed]:
    """(start, end, segment id) of each document of a row, `end` exclusive."""
    ends = list(itertools.accumulate(document.length for document in documents))
    for document, end in zip(documents, ends, strict=True):
        assert document.segment_id is not None, "documents_with_ids fills in every id"
        yield end - document.length, end, document.segment_id


def _sees_id_again(row: tuple[Placed, ...], problem: Problem) -> bool:
    """Whether some query sees a key of its own id on the other side of a document with another id."""
    left, right = (problem.seq_len if reach is None else reach for reach in problem.window)
    for (index, first), (later_index, later) in itertools.combinations(enumerate(row), 2):
        apart = any(between[2] != first[2] for between in row[index + 1 : later_index])
        same = first[2] == later[2] != problem.padding
        if same and apart and later[0] - (first[1] - 1) <= max(left, right):
            return True
    return False


def _has_empty_chunk(row: tuple[Placed, ...], problem: Problem) -> bool:
    if problem.layout == "striped":
        return False
    padded = {
        position for start, end, segment_id in row if segment_id == problem.padding for position in range(start, end)
    }
    chunks = (range(start, start + problem.chunk_len) for start in range(0, problem.seq_len, problem.chunk_len))
    return any(padded.issuperset(chunk) for chunk in chunks)


def _value_events(case: Case) -> dict[str, bool]:
    problem = case.problem
    cap = problem.attn_logits_soft_cap
    return {
        # Three standard deviations: about one logit in four hundred lies beyond.
        "logits beyond the cap": cap is not None and 3 * logit_std(case) > cap,
        "sink dominates": problem.sinks and float(draw_sinks(case).max()) > typical_largest_logit(case) + 3.0,
        "structured values": case.values in STRUCTURED,
        "value is the key": problem.shared_kv,
        "value_dim differs from head_dim": problem.value_dim != problem.head_dim,
    }


def _input_events(problem: Problem) -> dict[str, bool]:
    return {
        "bfloat16": problem.dtype == "bfloat16",
        "float64": problem.dtype == "float64",
        "sinks": problem.sinks,
        "soft cap": problem.attn_logits_soft_cap is not None,
        "scale given": problem.scale is not None,
        "documents": problem.segments,
        "padding": problem.padding is not None,
        "head_dim of 64 or more": problem.head_dim >= 64,
        "Explicit axes": problem.axis_types == "explicit",
        "mixed axis types": problem.axis_types == "mixed",
        "devices reversed": problem.device_order == "reversed",
    }


def _asked_events(case: Case) -> dict[str, bool]:
    """The check `remat`, asked where a strategy can run that spreads the query heads over the ranks of the sequence."""
    problem = case.problem
    ranks, ulysses = problem.context_parallelism * problem.ulysses_parallelism, problem.ulysses_parallelism
    heads_a_shard, rest = divmod(problem.num_query_heads, problem.tensor_parallelism)
    asked = asks_remat(case) and rest == 0
    return {
        "remat with heads for every rank": asked and ranks > 1 and heads_a_shard % ranks == 0,
        "remat with the sequence on two axes": asked and ulysses > 1 and heads_a_shard % ulysses == 0,
    }


EVENTS: tuple[str, ...] = tuple(_all_events(Case()))
