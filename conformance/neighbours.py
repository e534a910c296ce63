"""Problems that differ from a case's in one thing that a target may forget when it keeps something: window or heads.

May touch: problem. Tests: tests/conformance/test_other_programs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.problem import Case


def neighbours_of(case: Case) -> Iterator[Case]:
    """Cases with the same documents and seed: another window, twice the heads, and a window that reaches a chunk more.

    The last only where the sequence has that chunk.
    """
    yield _other_window(case)
    yield _more_heads(case)
    left, _ = case.problem.window
    if left is not None and left + case.problem.chunk_len < case.problem.seq_len:
        # Plans that are kept for every window of as many hops are right for one key more.
        yield _with_left(case, left + case.problem.chunk_len)


def argument_alone(case: Case) -> str:
    """The argument whose gradient is taken alone on a case."""
    problem = case.problem
    arguments = ["query", "key", *([] if problem.shared_kv else ["value"]), *(["sinks"] if problem.sinks else [])]
    return arguments[case.seed // 32 % len(arguments)]


def _other_window(case: Case) -> Case:
    """All shapes the same: one key more on the left, or half the sequence where there is no such key."""
    left, _ = case.problem.window
    seq_len = case.problem.seq_len
    return _with_left(case, left + 1 if left is not None and left + 1 < seq_len else max(0, seq_len // 2 - 1))


def _with_left(case: Case, left: int) -> Case:
    """Another reach to the left, to the right the same."""
    _, right = case.problem.window
    if right == 0:
        return case.replace(sliding_window_size=left + 1, window=None)
    return case.replace(sliding_window_size=None, window=(left, right))


def _more_heads(case: Case) -> Case:
    """Twice the query heads and twice the kv heads: every axis that divided them still does."""
    problem = case.problem
    return case.replace(num_query_heads=2 * problem.num_query_heads, num_kv_heads=2 * problem.num_kv_heads)
