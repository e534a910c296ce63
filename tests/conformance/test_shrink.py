"""The shrinker: what it reaches is what a person would write, in few executions, and still shows the finding.

A finding is a predicate here: the fault's own condition, written from its description.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.case_list import case_list
from conformance.case_text import format_case, parse_case
from conformance.problem import Case
from conformance.shrink import case_size, shrink

Shows = Callable[[Case], bool]
_EXECUTIONS = 40


def _counted(shows: Shows) -> tuple[Shows, list[Case]]:
    calls: list[Case] = []

    def counting(case: Case) -> bool:
        calls.append(case)
        return shows(case)

    return counting, calls


def _halo_is_read(case: Case) -> bool:
    """A query of one rank sees a key of another: W > 1 over at least two ranks."""
    left, _ = case.problem.window
    return case.problem.context_parallelism > 1 and (left is None or left > 0)


def _window_is_shorter_than_its_sequence(case: Case) -> bool:
    """W + 1 shows."""
    left, _ = case.problem.window
    return left is not None and left + 1 < case.problem.seq_len


def _two_hops(case: Case) -> bool:
    left, _ = case.problem.window
    return case.problem.num_chunks > 2 and left is not None and left > case.problem.chunk_len


def _document_crosses_a_border(case: Case) -> bool:
    """Some document other than the first begins within a chunk whose halo reaches before it."""
    for row in case.documents or ():
        start = 0
        for document in row[:-1]:
            start += document.length
            if start % case.problem.chunk_len and start > case.problem.chunk_len and case.problem.window[0] != 0:
                return True
    return False


_FAULTS: dict[str, tuple[Shows, int]] = {
    "everything": (lambda case: True, 3),
    "halo": (_halo_is_read, 3),
    "one key too many": (_window_is_shorter_than_its_sequence, 3),
    "two hops": (_two_hops, 4),
    "documents": (_document_crosses_a_border, 5),
    "sinks": (lambda case: case.problem.sinks, 4),
    "cap": (lambda case: case.problem.attn_logits_soft_cap is not None, 4),
    "bfloat16": (lambda case: case.problem.dtype == "bfloat16", 4),
    "right bound": (lambda case: case.problem.window[1] != 0, 3),
    "dual_chunk_swap": (lambda case: case.problem.layout == "dual_chunk_swap" and _halo_is_read(case), 4),
    "tensor axis": (lambda case: case.problem.tensor_parallelism > 1, 6),
    "three ranks": (lambda case: case.problem.context_parallelism >= 3, 4),
    "needles in bfloat16": (lambda case: (case.values, case.problem.dtype) == ("needle", "bfloat16"), 5),
}
_STARTS = [
    (name, case)
    for name, (shows, _) in _FAULTS.items()
    for case in [case for case in case_list("quick", 0, 0) if shows(case)][::9]
]


@pytest.mark.parametrize("fault", _FAULTS)
def test_every_case_shrinks_to_few_words_in_few_executions_and_still_shows(fault: str) -> None:
    shows, words = _FAULTS[fault]
    starts = [case for name, case in _STARTS if name == fault]
    assert starts, "the quick list has such cases"
    for start in starts:
        counting, calls = _counted(shows)
        smallest = shrink(start, counting, _EXECUTIONS)
        text = format_case(smallest)
        assert len(calls) <= _EXECUTIONS, f"executions from {format_case(start)}"
        assert shows(smallest), f"the finding is still there: {text}"
        assert case_size(smallest) <= case_size(start), "never larger"
        # That one rank is enough is said in a word, and worth it.
        said = [word for word in text.split() if word != "context_parallelism=1"]
        assert len(said) <= words, f"from {format_case(start)}: {text}"
        assert smallest.problem.seq_len <= 32, f"few tokens: {text}"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("halo", "v=1 seq_len=4 sliding_window_size=2"),
        ("one key too many", "v=1 seq_len=4 sliding_window_size=1"),
        ("sinks", "v=1 seq_len=4 sliding_window_size=1 sinks=true"),
        ("dual_chunk_swap", "v=1 seq_len=8 sliding_window_size=2 layout=dual_chunk_swap"),
    ],
)
def test_a_case_with_everything_in_it_becomes_the_one_a_person_would_write(fault: str, expected: str) -> None:
    start = parse_case(
        "v=1 batch=4 seq_len=96 num_query_heads=6 num_kv_heads=2 head_dim=16 value_dim=8 sliding_window_size=17"
        " layout=dual_chunk_swap context_parallelism=3 data_parallelism=2 tensor_parallelism=2"
        " mesh_axes=tensor,context,data axis_types=mixed device_order=reversed dtype=bfloat16"
        " attn_logits_soft_cap=5.0 scale=0.05 sinks=true padding=-1 values=needle seed=7"
        " documents=50@3+40+6@-1/96/1+95/20@-1+76"
    )
    shows, _ = _FAULTS[fault]
    assert format_case(shrink(start, shows, _EXECUTIONS)) == expected, "few words, the field's smallest sizes"


def test_one_case_is_never_run_twice_nor_is_the_first_one_again() -> None:
    start = next(case for name, case in _STARTS if name == "documents")
    counting, calls = _counted(_document_crosses_a_border)
    shrink(start, counting, 1000)
    texts = [format_case(case) for case in (start, *calls)]
    assert len(set(texts)) == len(texts), "each candidate costs an execution"


@pytest.mark.parametrize("executions", [0, 1, 5])
def test_the_number_of_executions_is_a_bound(executions: int) -> None:
    counting, calls = _counted(lambda case: False)
    start = _STARTS[0][1]
    assert shrink(start, counting, executions) == start, "nothing smaller shows it"
    assert len(calls) == executions, "all of them are used in the search"


def test_what_nothing_smaller_shows_stays_as_it_is() -> None:
    start = _STARTS[0][1]
    counting, calls = _counted(lambda case: False)
    assert shrink(start, counting, 10_000) == start, "the finding's own case"
    assert len(calls) < 200, "the neighbourhood is finite"


def test_window_sizes_keep_their_distance_from_a_chunk_border() -> None:
    # Shows only for W = C + 1, whatever C is: halving the chunk alone would lose it.
    def shows(case: Case) -> bool:
        return case.problem.sliding_window_size == case.problem.chunk_len + 1

    start = parse_case("v=1 seq_len=64 sliding_window_size=17 context_parallelism=4 seed=3")
    assert format_case(shrink(start, shows, _EXECUTIONS)) == "v=1 seq_len=4 sliding_window_size=3", "C = 2, W = 3"


def test_a_window_with_two_bounds_becomes_a_sliding_window_size_where_the_right_one_does_not_matter() -> None:
    start = parse_case("v=1 seq_len=64 window=18,17 context_parallelism=4 seed=3")
    assert format_case(shrink(start, _halo_is_read, _EXECUTIONS)) == "v=1 seq_len=4 sliding_window_size=2", (
        "the field's word"
    )


def test_documents_keep_their_ids_when_a_finding_needs_them() -> None:
    def shows(case: Case) -> bool:
        ids = [document.segment_id for row in case.documents or () for document in row]
        return ids.count(5) >= 2

    start = parse_case("v=1 batch=2 seq_len=16 sliding_window_size=4 documents=4@5+3@2+5@5+4@1/16@3 seed=8")
    smallest = shrink(start, shows, _EXECUTIONS)
    assert shows(smallest), "two documents with id 5"
    assert smallest.problem.batch == 1, "the other batch row is not needed"
    assert len(format_case(smallest).split()) <= 4, format_case(smallest)


def test_documents_keep_their_place_against_the_chunk_borders_when_chunks_become_shorter() -> None:
    # 20 is 4 into the second chunk of 16, 32 is a border, 33 is one beyond it.
    def shows(case: Case) -> bool:
        chunk, (row,) = case.problem.chunk_len, case.documents or ((),)
        ends = [sum(document.length for document in row[:i]) for i in range(1, len(row))]
        return any(end // chunk == 1 and end % chunk for end in ends) and 2 * chunk in ends and 2 * chunk + 1 in ends

    start = parse_case("v=1 seq_len=64 sliding_window_size=20 context_parallelism=4 documents=20+12+1+31 seed=3")
    assert shows(start), "as written above"
    smallest = shrink(start, shows, _EXECUTIONS)
    assert shows(smallest), "the same places"
    assert smallest.problem.chunk_len == 2, f"the shortest chunks: {format_case(smallest)}"


def test_a_document_border_near_the_end_survives_having_fewer_ranks() -> None:
    def shows(case: Case) -> bool:
        return any(len(row) > 1 for row in case.documents or ())

    start = parse_case("v=1 seq_len=80 sliding_window_size=20 context_parallelism=5 documents=79+1 seed=3")
    assert format_case(shrink(start, shows, _EXECUTIONS)) == "v=1 seq_len=4 sliding_window_size=1 documents=3+1", (
        "N = 2"
    )


def test_case_size_puts_words_before_tokens_and_tokens_before_letters() -> None:
    fewer_words = parse_case("v=1 seq_len=64 sliding_window_size=30")
    fewer_tokens = parse_case("v=1 seq_len=8 sliding_window_size=3 seed=1")
    assert case_size(fewer_words) < case_size(fewer_tokens), "a person reads words"
    shorter_window = parse_case("v=1 seq_len=8 sliding_window_size=2 seed=1")
    assert case_size(shorter_window) < case_size(fewer_tokens), "a shorter reach is simpler"
