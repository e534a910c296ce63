"""What a check looks at: rows at their positions, and where a tensor was given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from conformance.case_text import format_case, parse_case
from conformance.evidence import Evidence
from conformance.problem import Case
from conformance.target import TargetDescription, calls_of

_TARGET = TargetDescription("module:target", "target")


@pytest.mark.parametrize(
    ("layout", "positions"),
    [
        ("contiguous", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("dual_chunk_swap", [0, 1, 6, 7, 2, 3, 4, 5]),
        ("striped", [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_rows_in_a_layouts_order_are_put_at_their_positions(layout: str, positions: list[int]) -> None:
    # The orders are DESIGN's, written out by hand for 8 positions on 2 ranks.
    case = parse_case(f"v=1 seq_len=8 layout={layout}")
    lse = np.array(positions, np.float32)[None, :, None]
    evidence = Evidence(_TARGET, case, {}, {"0/attention_with_lse/lse": lse})
    np.testing.assert_array_equal(evidence.in_position_order("0/attention_with_lse/lse")[0, :, 0], np.arange(8))


def test_sinks_have_no_positions_and_stay_as_they_are() -> None:
    evidence = Evidence(_TARGET, parse_case("v=1 layout=striped"), {}, {"0/attention/dsinks": np.array([3.0, 1.0])})
    assert evidence.in_position_order("0/attention/dsinks").tolist() == [3.0, 1.0], "one number a head"


def test_every_place_where_a_tensor_was_given_is_found() -> None:
    target = dataclasses.replace(_TARGET, has_lse=True)
    names = [
        f"{draw}/{call}/out{where}"
        for draw in (0, 1)
        for call in ("attention", "attention_with_lse")
        for where in ("", " of vjp")
    ]
    evidence = Evidence(target, parse_case("v=1"), {}, dict.fromkeys(names, np.zeros(1)))
    assert [name for _, _, name in evidence.sources_of("out")] == names, "two draws, two calls, primal and VJP"
    assert list(evidence.sources_of("lse")) == [], "what was not given is not made up"


def test_a_target_without_lse_has_one_call_and_the_case_its_text() -> None:
    case = parse_case("v=1 seq_len=8 seed=4")
    evidence = Evidence(_TARGET, case, {}, {})
    assert evidence.calls == ("attention",), "no attention_with_lse"
    assert evidence.case_text == format_case(case) == "v=1 seq_len=8 seed=4", "the text that replays it"


def test_attention_with_lse_is_called_on_every_fourth_seed_of_a_target_that_has_it() -> None:
    calls = {
        (seed, has_lse): calls_of(TargetDescription("m:t", "t", has_lse=has_lse), Case(seed=seed))
        for seed in (0, 1, 2, 3, 4)
        for has_lse in (False, True)
    }
    both = {key for key, called in calls.items() if called == ("attention", "attention_with_lse")}
    assert both == {(0, True), (4, True)}, "a quarter of the cases, the shrunk ones (seed 0) among them"
    assert {called for key, called in calls.items() if key not in both} == {("attention",)}, "attention always"
