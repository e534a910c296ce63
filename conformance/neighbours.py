"""Problems that differ from a case's in one thing that a target may forget when it keeps something: window or heads.

May touch: problem. Tests: tests/conformance/test_other_programs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.problem import Case


def neighbours_of(case: Case) -> Iterator[Case]:
    """Two cases with the same documents and seed: another window, and twice the heads."""
    yield _other_window(case)
    yield _more_heads(case)


def argument_alone(case: Case) -> str:
    """The argument whose gradient is taken alone on a case."""
    problem = case.problem
    arguments = ["query", "key", *([] if problem.shared_kv else ["value"]), *(["sinks"] if problem.sinks else [])]
    return arguments[case.seed // 32 % len(arguments)]


def _other_window(case: Case) -> Case:
    """All shapes the same: one key more on the left, or half the sequence where there is no such key."""
    left, right = case.problem.window
    seq_len = case.problem.seq_len
    other = left + 1 if left is not None and left + 1 < seq_len else max(0, seq_len // 2 - 1)
    if right == 0:
        return case.replace(sliding_window_size=other + 1, window=None)
    return case.replace(sliding_window_size=None, window=(other, right))


def _more_heads(case: Case) -> Case:
    """Twice the query heads and twice the kv heads: every axis that divided them still does."""
    problem = case.problem
    return case.replace(num_query_heads=2 * problem.num_query_heads, num_kv_heads=2 * problem.num_kv_heads)
