"""Problems that differ from a case's in what a target may forget when it keeps something, window or heads; and one
whose sizes no list of cases has.

May touch: problem. Tests: tests/conformance/test_other_programs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.problem import Case

_EVERYTHING = 2**31 - 1
"""The largest int32: a position added to it wraps around."""
_FEW_LOGITS = 200_000


def neighbours_of(case: Case) -> Iterator[Case]:
    """Cases with the same documents and seed: another window, twice the heads, sizes far out, and a window that reaches
    a chunk more.

    Sizes far out only of a small case, the last only where the sequence has that chunk.
    """
    yield _other_window(case)
    yield _more_heads(case)
    if case.problem.batch * case.problem.num_query_heads * case.problem.seq_len**2 <= _FEW_LOGITS:
        yield _far_out(case)
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


def _far_out(case: Case) -> Case:
    """Bounds of the window where they are as one writes them who means everything, and a head_dim of one lane and a
    half. In every second case the right bound of a causal window is such a one, too."""
    left, right = case.problem.window
    left, right = (None if reach is None else _EVERYTHING for reach in (left, right))
    if case.problem.window[1] == 0 and case.seed // 32 % 2:
        right = 0
    dims = {"head_dim": 192, "value_dim": 192 if case.problem.shared_kv else 128}
    return case.replace(sliding_window_size=None, window=(left, right), **dims)


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
