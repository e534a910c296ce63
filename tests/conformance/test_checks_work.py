"""What a target's cost follows: right where it follows the window, a finding where it is a square of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance.case_text import parse_case
from conformance.checks import CHECKS, Outcome
from conformance.evidence import Evidence
from conformance.target import TargetDescription

Judged = Callable[[str, str, str], Outcome]

_CASE = "v=1 seq_len=16 sliding_window_size=4 num_query_heads=2 num_kv_heads=2 seed=21"
_COSTS = {
    "matmul_flops": 1000,
    "elements": 1000,
    "temporary_bytes": 1000,
    "constant_bytes": 1000,
    "equations": 100,
    "longest_loop": 2,
    "messages": 6,
    "unknown_loops": 0,
    "xla_flops": 10.0,
}


def _made_up(communication: str | None = "halo", **longer: float) -> Outcome:
    """The judgement of a target whose program costs fourfold on a sequence four times as long, but for `longer`."""
    costs = {name: 4 * value for name, value in _COSTS.items()} | {"equations": 100} | longer
    facts = {"base": _COSTS, "longer": costs, "wider": {"matmul_flops": 2000}, "rows": 4096}
    message = {"work": {"contiguous": facts, "dual_chunk_swap": {"declined": "not its layout"}}}
    description = TargetDescription("m:t", "t", communication=communication)
    return CHECKS["work"].run(Evidence(description, parse_case(_CASE), message, {}))


def test_costs_in_proportion_to_the_sequence_are_right() -> None:
    outcome = _made_up()
    assert outcome.findings == (), "fourfold, for four times as much to do"
    half = {"flops": 0.5, "memory": 0.5, "program": 0.5}
    assert outcome.shares == half | {"loops": 8 / 4096}, "half of what would be a finding; a loop over blocks"
    assert outcome.figures["matmul_flops, window 4 times as wide, contiguous"] == 2.0, "reported"


@pytest.mark.parametrize(
    ("measure", "value", "tensor"),
    [
        ("matmul_flops", 16000, "flops"),
        ("elements", 16000, "memory"),
        ("temporary_bytes", 16000, "memory"),
        ("constant_bytes", 16000, "program"),
        ("equations", 400, "program"),
    ],
)
def test_each_cost_that_outgrows_the_sequence_is_a_finding_of_its_own(measure: str, value: int, tensor: str) -> None:
    (finding,) = _made_up(**{measure: value}).findings
    assert finding.tensor == tensor, "which cost"
    assert "16" not in finding.signature, "a kind holds no numbers of a case"
    assert f"{value:.4g}" in finding.reading, "the reading does"
    assert (finding.got, finding.share) == (value, 2.0), "twice what is allowed"
    assert finding.expected == value / 2


@pytest.mark.parametrize(("base", "longer", "is_finding"), [(1024, 4096, True), (1024, 1024, False), (32, 128, False)])
def test_a_loop_over_rows_is_a_finding_for_whoever_claims_a_strategy(base: int, longer: int, is_finding: bool) -> None:
    costs = {name: _COSTS | {"longest_loop": turns} for name, turns in (("base", base), ("longer", longer))}
    message = {"work": {"contiguous": {"declined": "no"}, "dual_chunk_swap": costs | {"wider": {}, "rows": 4096}}}
    for communication, judges in (("halo", True), ("ulysses", True), (None, False)):
        evidence = Evidence(TargetDescription("m:t", "t", communication=communication), parse_case(_CASE), message, {})
        signatures = [finding.signature for finding in CHECKS["work"].run(evidence).findings]
        expected = ["a loop of its program turns once for every row"] if is_finding and judges else []
        assert signatures == expected, f"{communication}: {base} turns, then {longer}, of 4096 rows"


@pytest.mark.parametrize(
    ("base", "wider", "is_finding"), [(127, 511 * 6, True), (128, 512, True), (16, 64, False), (700, 700, False)]
)
def test_as_many_messages_as_the_window_has_keys_are_a_finding(base: int, wider: int, is_finding: bool) -> None:
    costs = {name: _COSTS | {"messages": sent} for name, sent in (("base", base), ("longer", base), ("wider", wider))}
    message = {"work": {"contiguous": costs | {"rows": 4096, "wider_window": 512}}}
    for communication, judges in (("halo", True), ("ring", True), (None, False)):
        evidence = Evidence(TargetDescription("m:t", "t", communication=communication), parse_case(_CASE), message, {})
        signatures = [finding.signature for finding in CHECKS["work"].run(evidence).findings]
        expected = ["sends as many messages as its window has keys"] if is_finding and judges else []
        assert signatures == expected, f"{communication}: {base} messages for 128 keys, {wider} for 512"


@pytest.mark.parametrize(("base", "longer", "is_finding"), [(2**17, 2**21, True), (2**15, 2**19, False), (0, 0, False)])
def test_a_constant_with_a_bit_for_every_pair_of_rows_is_a_finding(base: int, longer: int, is_finding: bool) -> None:
    costs = {name: _COSTS | {"constant_bytes": size} for name, size in (("base", base), ("longer", longer))}
    message = {"work": {"contiguous": costs | {"wider": {}, "rows": 4096}}}
    evidence = Evidence(TargetDescription("m:t", "t", communication="all_gather"), parse_case(_CASE), message, {})
    signatures = [finding.signature for finding in CHECKS["work"].run(evidence).findings]
    expected = ["constants built into its program hold a value for every pair of rows"] if is_finding else []
    assert signatures == expected, "4096 rows squared are 2 MiB of bits"


def test_a_layout_that_hides_its_cost_is_not_made_good_by_the_other() -> None:
    plain = dict.fromkeys(("base", "longer", "wider"), _COSTS) | {"rows": 4096}
    hidden = plain | dict.fromkeys(("base", "longer", "wider"), _COSTS | {"unknown_loops": 3})
    for layouts in ((plain, hidden), (hidden, plain)):
        message = {"work": dict(zip(("contiguous", "dual_chunk_swap"), layouts, strict=True))}
        evidence = Evidence(TargetDescription("m:t", "t", communication="halo"), parse_case(_CASE), message, {})
        outcome = CHECKS["work"].run(evidence)
        assert outcome.withheld.keys() == {"flops", "memory", "loops"}, "the cost of one layout is not known"
        assert not outcome.withheld.keys() & outcome.shares.keys(), "so neither is said to conform"


def test_a_loop_whose_turns_nobody_knows_is_never_said_to_conform() -> None:
    outcome = _made_up(unknown_loops=3)
    assert outcome.findings == (), "nobody knows"
    assert outcome.withheld.keys() == {"flops", "memory", "loops"}, "they count turns; the reason is told"
    assert outcome.shares == {"program": 0.5}, "the size of the program knows no turns"
    (finding,) = _made_up(unknown_loops=3, matmul_flops=16000).findings
    assert finding.tensor == "flops", "what one turn does outgrows the sequence by itself"


def test_only_a_halo_owes_it_and_the_others_figures_are_reported() -> None:
    outcome = _made_up("all_gather", matmul_flops=16000)
    assert outcome.findings == (), "it sees the whole sequence by its nature"
    assert outcome.figures["matmul_flops, sequence 4 times as long, contiguous"] == 16.0, "said"
    assert not CHECKS["work"].claims_any(TargetDescription("m:t", "t", communication="all_gather")), "not claimed"
    assert CHECKS["work"].claims_any(TargetDescription("m:t", "t", communication="halo")), "claimed"


def test_a_longer_sequence_that_is_declined_is_not_judged_and_one_that_raises_is_a_finding() -> None:
    halo = TargetDescription("m:t", "t", communication="halo")

    def run(work: dict[str, Any]) -> Outcome:
        return CHECKS["work"].run(Evidence(halo, parse_case(_CASE), {"work": {"contiguous": work}}, {}))

    assert run({"declined": "too long"}) == Outcome(), "nothing was seen"
    (finding,) = run({"raised": ["IndexError", "IndexError(9)"]}).findings
    assert finding.signature == "raises IndexError on a longer sequence", "a right target does not"


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("banded", set()),
        ("row_by_row", {"loops"}),
        ("dense_on_a_rank", {"flops", "memory"}),
    ],
)
def test_programs_are_compared_as_they_are_traced_and_compiled(judged: Judged, name: str, tensors: set[str]) -> None:
    outcome = judged(f"sending:{name}", _CASE, "work")
    assert {finding.tensor for finding in outcome.findings} == tensors, "what does not follow the window"
    assert set(outcome.shares) == {"flops", "memory", "program", "loops"}, "all were looked at"
