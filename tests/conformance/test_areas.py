"""Every case of a list stands under one area, one that it has, and no area of the quick list is left nearly empty."""

from __future__ import annotations

from conformance.areas import AREAS, by_area
from conformance.case_list import case_list
from conformance.case_text import parse_case


def test_every_case_of_the_quick_list_stands_under_exactly_one_area_that_it_has() -> None:
    cases = case_list("quick", 0)
    grouped = by_area(cases)
    assert sorted(sum(grouped.values(), ()), key=cases.index) == list(cases), "none twice, none lost"
    for area, members in grouped.items():
        assert all(AREAS[area](case) for case in members), f"what stands under {area} has it"


def test_each_area_has_enough_cases_to_mean_something() -> None:
    grouped = by_area(case_list("quick", 0))
    assert set(grouped) == set(AREAS), "all of them"
    assert min(map(len, grouped.values())) >= 10, {area: len(members) for area, members in grouped.items()}


def test_a_case_goes_where_the_fewest_are() -> None:
    cases = tuple(parse_case(f"v=1 seq_len=8 sliding_window_size=3 sinks=true seed={seed}") for seed in range(4))
    grouped = by_area(cases)
    assert {area: [case.seed for case in members] for area, members in grouped.items()} == {
        "window": [0, 2],
        "sinks": [1, 3],
    }, "it has a window and sinks: in turn"
