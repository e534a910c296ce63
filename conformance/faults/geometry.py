"""What a fault asks of a problem to know whether it can say anything about it, and the problem told wrongly.

May touch: problems. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from conformance.problem import Problem, Window


def always(problem: Problem) -> bool:
    """Whatever the problem."""
    return True


def is_sharded(problem: Problem) -> bool:
    """The context axis has more than one rank."""
    return problem.context_parallelism > 1


def has_left(problem: Problem) -> bool:
    """The window is bounded before the query."""
    return problem.window[0] is not None


def cuts_left(problem: Problem) -> bool:
    """The window's left bound takes keys from some query."""
    left = problem.window[0]
    return left is not None and left < problem.seq_len - 1


def reach(problem: Problem) -> tuple[int, int]:
    """(left, right) with no bound beyond the sequence."""
    left, right = (problem.seq_len - 1 if bound is None else bound for bound in problem.window)
    return min(left, problem.seq_len - 1), min(right, problem.seq_len - 1)


def crosses(problem: Problem) -> bool:
    """Some query sees a key of another rank."""
    return is_sharded(problem) and max(reach(problem)) > 0


def hops(problem: Problem) -> int:
    """Chunks that the window reaches beyond a query's own."""
    return -(-max(reach(problem)) // problem.chunk_len)


def is_swapped(problem: Problem) -> bool:
    """dual_chunk_swap on more than one rank, where it differs from contiguous."""
    return problem.layout == "dual_chunk_swap" and is_sharded(problem)


def is_striped(problem: Problem) -> bool:
    """striped on more than one rank, where it differs from contiguous."""
    return problem.layout == "striped" and is_sharded(problem) and problem.seq_len > problem.context_parallelism


def rows_of_rank(problem: Problem) -> int:
    """Rows that one rank holds."""
    return problem.seq_len // problem.context_parallelism


def batch_rows(problem: Problem) -> int:
    """Batch rows that one device holds."""
    return problem.batch // problem.data_parallelism


def with_window(problem: Problem, window: Window) -> Problem:
    """The problem with another window."""
    return problem.replace(sliding_window_size=None, window=window)
