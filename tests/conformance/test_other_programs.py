"""Another problem between two traces of a case's own: which, and what is made of the target's answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.case_list import case_list
from conformance.case_text import parse_case
from conformance.checks import invariance
from conformance.checks.outcome import Outcome
from conformance.designated import asks_programs
from conformance.neighbours import argument_alone, neighbours_of

Judged = Callable[[str, str, str], Outcome]

_CASE = "v=1 seq_len=16 sliding_window_size=5 context_parallelism=2 seed=3"


def _kinds(outcome: Outcome) -> dict[str, str]:
    return {found.tensor: found.signature for found in outcome.findings}


def test_a_few_cases_of_a_list_are_designated_and_no_shrunk_one() -> None:
    cases = case_list("quick", 0)
    designated = [case for case in cases if asks_programs(case)]
    assert 8 <= len(designated) <= 10, "one in 32: each compiles three programs more"
    assert not asks_programs(parse_case("v=1")), "the shrinker makes the seed zero where it can"
    assert {argument_alone(case) for case in designated} >= {"query", "key", "value"}, "each argument has its turn"


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("v=1 seq_len=16 sliding_window_size=5", (5, 0)),
        ("v=1 seq_len=16 sliding_window_size=16", (7, 0)),
        ("v=1 seq_len=16 sliding_window_size=99", (7, 0)),
        ("v=1 seq_len=16", (7, 0)),
        ("v=1 seq_len=16 window=2,3", (3, 3)),
        ("v=1 seq_len=16 window=none,none", (7, None)),
        ("v=1 seq_len=1 context_parallelism=1", (0, 0)),
    ],
)
def test_a_neighbour_has_another_window_or_more_heads_and_all_else_alike(text: str, window: tuple) -> None:
    case = parse_case(text)
    other_window, more_heads, *_ = neighbours_of(case)
    assert other_window.problem.window == window, "all shapes alike"
    assert other_window.replace(sliding_window_size=None, window=case.problem.window) == case.replace(
        sliding_window_size=None, window=case.problem.window
    ), "and all data"
    heads = (more_heads.problem.num_query_heads, more_heads.problem.num_kv_heads)
    assert heads == (2 * case.problem.num_query_heads, 2 * case.problem.num_kv_heads), "twice the heads"
    assert more_heads.problem.window == case.problem.window, "the same window"


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("v=1 seq_len=16 sliding_window_size=5 context_parallelism=4", [(8, 0)]),
        ("v=1 seq_len=16 window=5,2 context_parallelism=4", [(9, 2)]),
        ("v=1 seq_len=16 sliding_window_size=5 context_parallelism=4 layout=dual_chunk_swap", [(6, 0)]),
        ("v=1 seq_len=16 sliding_window_size=12 context_parallelism=4", [(15, 0)]),
        ("v=1 seq_len=16 sliding_window_size=13 context_parallelism=4", []),
        ("v=1 seq_len=16 sliding_window_size=5 context_parallelism=1", []),
        ("v=1 seq_len=16 window=none,none context_parallelism=4", []),
    ],
)
def test_a_last_neighbour_reads_one_chunk_more_where_there_is_one(text: str, windows: list[tuple[int, int]]) -> None:
    _, _, _, *further = neighbours_of(parse_case(text))
    assert [case.problem.window for case in further] == windows, "as many keys more as a chunk has"


@pytest.mark.parametrize(
    ("text", "window", "dims"),
    [
        ("sliding_window_size=5", (2**31 - 1, 2**31 - 1), (192, 128)),
        ("sliding_window_size=5 seed=35", (2**31 - 1, 0), (192, 128)),
        ("window=5,2 seed=35", (2**31 - 1, 2**31 - 1), (192, 128)),
        ("window=none,3 shared_kv=true", (None, 2**31 - 1), (192, 192)),
        ("window=2,none", (2**31 - 1, None), (192, 128)),
    ],
)
def test_a_neighbour_of_a_small_case_has_sizes_far_out(text: str, window: tuple, dims: tuple[int, int]) -> None:
    _, _, far_out, *_ = neighbours_of(parse_case(f"v=1 seq_len=16 {text}"))
    assert far_out.problem.window == window, "all keys, and beyond int32 for who adds a position to it"
    assert (far_out.problem.head_dim, far_out.problem.value_dim) == dims, "no multiple of 128, no power of two"
    large = neighbours_of(parse_case(f"v=1 seq_len=512 {text}"))
    assert all(case.problem.head_dim == 8 for case in large), "the oracle would take longer than the case"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gathered:right", {}),
        ("blind:wraps_around", {"out": "is wrong for another problem in the same process"}),
        ("blind:keeps_window", {"out": "is wrong for another problem in the same process"}),
        (
            "blind:wears_out",
            {
                "out": "is wrong when its problem is traced again after another",
                "dquery": "is wrong when no other gradient is taken",
            },
        ),
    ],
)
def test_what_is_kept_from_trace_to_trace_is_found(judged: Judged, name: str, expected: dict[str, str]) -> None:
    assert _kinds(judged(name, _CASE, "invariance")) == expected


def test_a_worker_that_ran_no_other_program_does_not_pass(modelled: Callable) -> None:
    with pytest.raises(KeyError, match="programs"):
        invariance.check(modelled(parse_case(_CASE), ("invariance",)))


def test_what_the_target_raises_on_another_problem_is_a_finding(modelled: Callable) -> None:
    evidence = modelled(parse_case(_CASE), ("invariance",))
    evidence.message["programs"] = {"other": None, "alone": "query", "raised": ["another problem", "KeyError", "'w'"]}
    (found,) = invariance.check(evidence).findings
    assert found.signature == "raises KeyError when another problem is called in the same process"
