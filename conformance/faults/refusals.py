"""Kind R: what is right is refused, and what is wrong is not, or not as it should be.

May touch: impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from typing import Any

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always, is_sharded
from conformance.problem import Problem
from impl import dispatch


def _compares_with_none(arrays: Arrays, problem: Problem) -> Arrays:
    raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")


def _asserts(arrays: Arrays, problem: Problem) -> Arrays:
    raise AssertionError("a window needs cp_size == 1 or a causal mask")


def _misses_an_argument(arrays: Arrays, problem: Problem) -> Arrays:
    raise TypeError("attention() missing 1 required keyword-only argument: 'segment_positions'")


def _accepts(right: Any, *arguments: Any) -> None:
    return None


def _asserts_instead(right: Any, *arguments: Any) -> None:
    try:
        right(*arguments)
    except ValueError as error:
        raise AssertionError(*error.args) from error


FAULTS = (
    Fault(
        name="none_compared_with_an_int",
        kind="R",
        report="modelscope/ms-swift/issues/8000",
        sentence="A bound that is None is compared with a number.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4",
        applies=lambda problem: None in problem.window,
        given=_compares_with_none,
    ),
    Fault(
        name="two_sided_windows_asserted_away",
        kind="R",
        report="NVIDIA/TransformerEngine/pull/1242",
        sentence="An assertion about windows under context parallelism refuses what is supported.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 window=1,1",
        applies=lambda problem: is_sharded(problem) and problem.window[1] not in (None, 0),
        given=_asserts,
    ),
    Fault(
        name="nothing_is_checked",
        kind="R",
        report="vllm-project/vllm-omni/pull/6841",
        sentence="Arrays are taken as they come: wrong shapes, dtypes and lengths are not refused.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        replaced=(Replacement(dispatch, "check_call", _accepts),),
    ),
    Fault(
        name="required_argument_of_a_newer_dependency",
        kind="R",
        report="AI-Hypercomputer/maxtext/pull/3589",
        sentence="A dependency has made an argument required that is not passed with packed input.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=lambda problem: problem.segments,
        given=_misses_an_argument,
    ),
    Fault(
        name="refused_by_an_assertion",
        kind="R",
        report=NOT_PUBLIC,
        sentence="What must be refused is refused by an AssertionError, which `python -O` drops.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        replaced=(Replacement(dispatch, "check_call", _asserts_instead),),
    ),
)
