"""What a target sends against what its strategy may send: each way to be wrong is seen, and right targets are not.

Expected bytes are worked out by hand, from the window and the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.evidence import Evidence
from conformance.target import TargetDescription
from conformance.wire_plan import halo_rows, ring_steps, wire_plan

Judged = Callable[[str, str, str], Outcome]

_CASE = "v=1 seq_len=32 sliding_window_size=6 context_parallelism=4 num_query_heads=4 num_kv_heads=2 seed=1"
_BUNDLED = "conformance.targets.bundled:"


def _kinds(outcome: Outcome) -> set[tuple[str, str]]:
    return {(finding.tensor, finding.signature) for finding in outcome.findings}


@pytest.mark.parametrize(
    ("adapter_name", "case_text"),
    [
        ("sending:right_halo", _CASE),
        ("sending:right_halo", f"{_CASE} segments=true sinks=true data_parallelism=2 batch=2 tensor_parallelism=2"),
        ("sending:banded", _CASE),
        ("gathered:right", f"{_CASE} dtype=bfloat16 sinks=true"),
        (f"{_BUNDLED}halo", f"{_CASE} dtype=bfloat16 layout=dual_chunk_swap segments=true sinks=true"),
        (f"{_BUNDLED}halo", f"{_CASE} tensor_parallelism=4 axis_types=explicit device_order=reversed"),
        (f"{_BUNDLED}ring", f"{_CASE} dtype=bfloat16"),
    ],
)
def test_what_stays_within_its_plan_is_no_finding(judged: Judged, adapter_name: str, case_text: str) -> None:
    outcome = judged(adapter_name, case_text, "collectives")
    assert outcome.findings == (), "a right target"
    assert set(outcome.shares) == {"forward", "backward"}, "both were looked at"
    assert 0 < max(outcome.shares.values()) <= 1, "something was sent, and no more than the plan"


def test_a_halo_sends_all_that_its_plan_allows_and_not_a_byte_more(judged: Judged) -> None:
    outcome = judged(f"{_BUNDLED}halo", _CASE, "collectives")
    assert outcome.shares == {"forward": 1.0, "backward": 1.0}, "the plan is exact"


@pytest.mark.parametrize(
    ("adapter_name", "expected"),
    [
        ("gathers", {("forward", "uses all-gather"), ("backward", "uses reduce-scatter")}),
        (
            "whole_chunk",
            {
                ("forward", "sends too much by collective-permute"),
                ("backward", "sends too much by collective-permute"),
            },
        ),
        ("talks_to_the_host", {("forward", "talks to the host")}),
    ],
)
def test_a_halo_that_sends_something_else_is_found_out(
    judged: Judged, adapter_name: str, expected: set[tuple[str, str]]
) -> None:
    assert _kinds(judged(f"sending:{adapter_name}", _CASE, "collectives")) == expected, "what, and in which direction"


def test_what_the_partitioner_puts_in_is_seen_although_no_line_of_the_target_says_so(judged: Judged) -> None:
    outcome = judged("sending:gathers_at_the_border", _CASE, "collectives")
    assert ("forward", "uses all-gather") in _kinds(outcome), "the whole sequence was gathered and cut again"
    assert all("the compiler put it in" in finding.reading for finding in outcome.findings), "and who did it"


def test_gradients_summed_across_ranks_in_bfloat16_are_seen_in_every_form(judged: Judged) -> None:
    narrow = {("backward", f"sums {tensor} across ranks in less than float32") for tensor in ("dkey", "dvalue")}
    wide_case = f"{_CASE} dtype=float32"
    for name in ("sums_narrow", "right_halo"):  # by the collective itself; added on arrival
        found = _kinds(judged(f"sending:{name}", f"{_CASE} dtype=bfloat16", "collectives"))
        assert {kind for kind in found if kind[1].startswith("sums ")} == narrow, f"each gradient by itself: {name}"
        found = _kinds(judged(f"sending:{name}", wide_case, "collectives"))
        assert not narrow & found, "float32 is wide enough"


def test_rounded_partial_gradients_are_allowed_where_they_are_declared_and_narrow_sums_are_not() -> None:
    rounded, narrow = ["dkey", "reduce_scatter of what was rounded"], ["dvalue", "reduce_scatter of bfloat16"]
    both = {("backward", f"sums {tensor} across ranks in less than float32") for tensor in ("dkey", "dvalue")}
    assert _kinds(_made_up(narrow_sums=[rounded, narrow])) == both, "nothing is declared"
    declared = {"rounded_partials": True}
    assert _kinds(_made_up(declared, narrow_sums=[rounded, narrow])) == {max(both)}, "the sum is still owed in float32"


def test_rounded_rows_are_allowed_where_they_are_declared_and_reported(judged: Judged) -> None:
    outcome = judged("sending:rounded_halo", _CASE, "collectives")
    assert outcome.findings == (), "8 rows for the 5 that the window reaches, as declared"
    assert outcome.figures == {"halo rows allowed, of those the window reaches": 1.6}, "8 / 5"


def test_a_target_that_claims_nothing_is_not_judged(judged: Judged) -> None:
    assert judged("sending:claims_nothing", _CASE, "collectives") == Outcome(), "no share: it cannot conform"
    nothing = TargetDescription("m:t", "t")
    assert not CHECKS["collectives"].claims_any(nothing), "the verdict says not claimed"


def test_a_kernel_that_sends_by_itself_is_not_taken_for_one_that_sends_nothing(judged: Judged) -> None:
    outcome = judged("copying:copies_by_data", _CASE, "collectives")
    assert (outcome.shares, outcome.findings) == ({}, ()), "data decide whether it sends, so nothing conforms"
    assert outcome.cannot_ask.startswith("kernels of its own send to other devices"), "and the verdict says why"


def test_copies_of_a_kernel_are_held_to_what_its_strategy_may_send(judged: Judged) -> None:
    outcome = judged("copying:copies", _CASE, "collectives")
    assert (outcome.shares, outcome.findings) == ({"forward": 1.0, "backward": 1.0}, ()), "5 rows, the window's"
    (finding,) = judged("copying:copies_twice", _CASE, "collectives").findings
    assert (finding.tensor, finding.signature) == ("forward", "sends too much by copies of its kernels")
    # 5 rows of 2 heads of 8 features of key and of value, in float32.
    assert (finding.expected, finding.got, finding.share) == (5 * 128, 10 * 128, 2.0), "twice the rows"


@pytest.mark.parametrize(
    ("adapter_name", "dtype", "expected"),
    [
        ("copies_and_gathers", "float32", {("forward", "uses all-gather"), ("backward", "uses reduce-scatter")}),
        (
            "copies",
            "bfloat16",
            {("backward", f"sums {tensor} across ranks in less than float32") for tensor in ("dkey", "dvalue")},
        ),
    ],
)
def test_what_is_sent_beside_a_kernel_that_sends_by_itself_is_judged(
    judged: Judged, adapter_name: str, dtype: str, expected: set[tuple[str, str]]
) -> None:
    outcome = judged(f"copying:{adapter_name}", f"{_CASE} dtype={dtype}", "collectives")
    assert _kinds(outcome) == expected, "seen all the same"
    assert outcome.cannot_ask == "", "how much the copies send is known"


def test_an_interpreters_stand_in_for_a_copy_is_not_the_targets() -> None:
    gather = _permute("primal/attention", 5) | {"kind": "all-gather", "pairs": [], "groups": [[0, 1, 2, 3]]}
    named = gather | {"op_name": "jit(f)/shard_map/while/body/all_gather"}
    copies = [{"bytes": 640, "starts": 1, "phase": "primal/attention"}]
    assert _made_up(remote_copies=copies, compiled=[named]).findings == (), "the traced program has none"
    put_in = gather | {"op_name": "jit(f)/shard_map/dot_general"}
    assert _kinds(_made_up(remote_copies=copies, compiled=[put_in])) == {("forward", "uses all-gather")}, (
        "the compiler's"
    )


def _made_up(precision: Mapping[str, bool] = MappingProxyType({}), **facts: Any) -> Outcome:
    """The judgement of a halo whose programs have these facts."""
    description = TargetDescription("m:t", "t", communication="halo", precision=dict(precision))
    message = {"facts": {"traced": [], "compiled": [], "narrow_sums": [], "remote_copies": []} | facts}
    return CHECKS["collectives"].run(Evidence(description, parse_case(_CASE), message, {}))


def _permute(phase: str, rows: int, trips: int | None = 1, op_name: str = "x/ppermute") -> dict[str, Any]:
    """A collective of a compiled program: so many rows of two heads of 16 float32 features, from rank 0 to rank 1."""
    return {
        "kind": "collective-permute",
        "dtypes": ["f32"],
        "bytes": rows * 2 * 16 * 4,
        "pairs": [[0, 1]],
        "groups": [],
        "trips": trips,
        "op_name": op_name,
        "phase": phase,
    }


def test_each_phase_has_its_own_bound() -> None:
    five_each = [_permute(phase, 5) for phase in ("primal/attention", "forward/attention", "backward/attention")]
    assert _made_up(compiled=five_each).findings == (), "5 rows is what the window reaches, each time"
    (finding,) = _made_up(compiled=[_permute("primal/attention", 4), _permute("primal/attention", 2)]).findings
    assert (finding.expected, finding.got) == (5 * 128, 6 * 128), "together they are one row too many"
    assert finding.reading == (
        "the forward of a target that claims halo sends too much by collective-permute"
        " 768 bytes reach a device, the rows that the window reaches are 640"
    ), "a sentence"


def test_what_lost_its_phase_may_be_of_any_and_still_has_a_bound() -> None:
    assert _made_up(compiled=[_permute("", 15)]).findings == (), "a primal, a forward and a backward"
    assert _kinds(_made_up(compiled=[_permute("", 16)])) == {("forward", "sends too much by collective-permute")}, (
        "more"
    )


def test_what_stands_in_a_loop_without_a_known_end_has_no_bound() -> None:
    outcome = _made_up(compiled=[_permute("backward/attention", 1, trips=None)])
    assert _kinds(outcome) == {("backward", "uses collective-permute in a loop without a known end")}, "not guessed"


def test_a_permute_over_another_axis_is_told_from_one_too_many() -> None:
    across = parse_case(f"{_CASE} data_parallelism=2 batch=2")
    description = TargetDescription("m:t", "t", communication="halo")
    # Devices are numbered data first: 0 and 4 are the two data shards of rank 0.
    one = _permute("primal/attention", 1) | {"pairs": [[0, 4]]}
    facts = {"traced": [], "compiled": [one], "narrow_sums": [], "remote_copies": []}
    outcome = CHECKS["collectives"].run(Evidence(description, across, {"facts": facts}, {}))
    assert _kinds(outcome) == {("forward", "uses collective-permute over another axis")}, "over data"


def test_callbacks_of_an_interpreted_kernel_are_not_the_targets() -> None:
    callback = _permute("primal/attention", 0) | {"kind": "host callback", "pairs": []}
    assert _made_up(compiled=[callback]).findings == (), "the traced program has none"
    traced = {**callback, "axes": [], "group_size": None}
    assert _kinds(_made_up(traced=[traced])) == {("forward", "talks to the host")}, "it has one"


@pytest.mark.parametrize(
    ("text", "received_and_sent"),
    [
        ("seq_len=32 sliding_window_size=1 context_parallelism=4", (0, 0)),
        ("seq_len=32 sliding_window_size=6 context_parallelism=4", (5, 5)),
        # Two hops: 8 rows of the rank before, 3 of the one before that.
        ("seq_len=32 sliding_window_size=12 context_parallelism=4", (11, 11)),
        ("seq_len=32 sliding_window_size=99 context_parallelism=4", (24, 24)),
        ("seq_len=32 window=2,1 context_parallelism=4", (3, 3)),
        # Chunks of 4: rank 1 of 0 1 2 3 holds chunks 1 and 6, each with a predecessor elsewhere.
        ("seq_len=32 sliding_window_size=3 context_parallelism=4 layout=dual_chunk_swap", (4, 4)),
        # Two ranks: chunks 0 and 3, 1 and 2. Chunk 2 finds its predecessor at home.
        ("seq_len=32 sliding_window_size=3 context_parallelism=2 layout=dual_chunk_swap", (2, 2)),
    ],
)
def test_halo_rows_are_those_a_rank_sees_and_does_not_hold(text: str, received_and_sent: tuple[int, int]) -> None:
    assert halo_rows(parse_case(f"v=1 {text}").problem) == received_and_sent, "counted by hand"


def test_rows_are_rounded_run_by_run_and_never_beyond_a_chunk() -> None:
    problem = parse_case("v=1 seq_len=64 sliding_window_size=20 context_parallelism=4").problem  # 16 and 3 rows
    assert halo_rows(problem, 4) == (20, 20), "16, and 3 rounded up to 4"
    assert halo_rows(problem, 128) == (32, 32), "two whole chunks"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seq_len=32 sliding_window_size=5 context_parallelism=8", 2),  # from the rank before, and one turn more
        ("seq_len=32 sliding_window_size=6 context_parallelism=8", 3),  # five keys back, chunks of four
        ("seq_len=32 window=2,2 context_parallelism=8", 4),  # from either side: one and one more each way
        ("seq_len=32 sliding_window_size=2 context_parallelism=8 layout=dual_chunk_swap", 4),  # chunks r-1 and 14-r
        ("seq_len=32 sliding_window_size=32 context_parallelism=8", 8),  # seven, and never more than once around
        ("seq_len=32 sliding_window_size=1 context_parallelism=8", 0),  # nobody sees a neighbour's key
    ],
)
def test_a_ring_turns_as_far_as_the_window_reaches_and_once_more(text: str, expected: int) -> None:
    assert ring_steps(parse_case(f"v=1 {text}").problem) == expected, "counted by hand"


def test_a_ring_that_goes_all_the_way_round_for_a_short_window_sends_too_much(judged: Judged) -> None:
    case = "v=1 seq_len=32 sliding_window_size=3 context_parallelism=8 seed=1"
    outcome = judged("conformance.faults:ring_goes_all_the_way_round", case, "collectives")
    assert ("forward", "sends too much by collective-permute") in _kinds(outcome), "seven turns for one"


def test_a_plan_counts_a_row_as_its_heads_features_and_id() -> None:
    text = f"{_CASE} dtype=bfloat16 head_dim=16 value_dim=8 segments=true batch=3"
    plan = wire_plan(parse_case(text).problem, "halo")
    assert [allowance.bytes for allowance in plan.forward] == [3 * 5 * (2 * 24 * 2 + 4)], "bfloat16, and an id"
    assert [allowance.bytes for allowance in plan.backward] == [3 * 5 * 2 * 24 * 4], "float32, and no id"
    assert {kind for allowance in plan.forward for kind in allowance.kinds} == {"collective-permute"}, "halo's kind"


def test_sums_that_halo_may_make_are_those_of_sinks_and_of_replicated_kv_heads() -> None:
    problem = parse_case(f"{_CASE} sinks=true tensor_parallelism=4 data_parallelism=2 batch=2").problem
    sums = {a.axes[0]: a.bytes for a in wire_plan(problem, "halo").backward if "all-reduce" in a.kinds}
    # One sink a shard over data and context; 8 rows of 2 heads of 16 features, in float32.
    assert sums == {"data": 2 * 4, "tensor": 8 * 2 * 16 * 4}, "and nothing else of the kind"
    assert not any("all-reduce" in a.kinds for a in wire_plan(parse_case(_CASE).problem, "halo").backward), "else none"
