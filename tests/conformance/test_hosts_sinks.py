"""dsinks over hosts: what the hosts tell adds up, is compared once, and no host's copy goes unseen."""

from __future__ import annotations

import json

import numpy as np
import pytest

from conformance import sink_answers
from conformance.answers import answer_for
from conformance.case_text import parse_case
from conformance.hosts.sinks import judged, told_here
from conformance.target import TargetDescription

_TARGET = TargetDescription("module:target", "target")
_CASE = parse_case("v=1 seq_len=32 num_query_heads=4 num_kv_heads=2 sliding_window_size=5 sinks=true")
_NAMES = ("0/attention/dsinks", "1/attention/dsinks")


def _hosts(change: dict[int, float] | None = None) -> list[dict]:
    """Two hosts with half of the queries each, and all heads of the right dsinks; the second has `change` by head."""
    told = []
    for host in (0, 1):
        held = {name: {head: float(of_head) for head, of_head in enumerate(_right(int(name[0])))} for name in _NAMES}
        if host == 1:
            held[_NAMES[1]] |= change or {}
        queries = {head: [(0, np.arange(16 * host, 16 * host + 16))] for head in range(4)}
        sinks = told_here(_TARGET, _CASE, 2, held, queries)
        told.append(json.loads(json.dumps({"shares": [], "findings": [], "sinks": sinks})))
    return told


def _right(draw: int) -> np.ndarray:
    return answer_for(_TARGET, _CASE, draw, "attention").reference["dsinks"]


def test_the_sum_of_the_hosts_is_the_answer() -> None:
    for message in judged(_TARGET, _CASE, _hosts()):
        ((check, tensor, share),) = message["shares"]
        assert (check, tensor, message["findings"]) == ("gradients", "dsinks", []), "compared, and right"
        assert share < 1e-6, "far below an allowance of float32"


def test_a_copy_that_is_wrong_on_one_host_is_found() -> None:
    wrong = float(_right(1)[2]) + 0.01
    first, second = judged(_TARGET, _CASE, _hosts({2: wrong}))
    assert not first["findings"], "the first host's copy is right"
    (finding,) = second["findings"]
    assert (finding["tensor"], finding["index"], finding["got"]) == ("dsinks", (2,), wrong)
    assert finding["expected"] == pytest.approx(_right(1)[2], rel=1e-9)


def test_a_copy_that_is_no_number_is_found() -> None:
    _, second = judged(_TARGET, _CASE, _hosts({3: float("nan")}))
    assert second["findings"][0]["signature"].startswith("dsinks is not finite".removeprefix("dsinks ")), "NaN travels"


def test_a_host_that_has_lost_its_queries_sums_cannot_hide() -> None:
    """Were one host's sums left out, the right answer would not pass: nothing is compared with a part."""
    hosts = _hosts()
    hosts[0]["sinks"]["sums"] = []
    assert all(message["findings"] for message in judged(_TARGET, _CASE, hosts)), "half of the sum is not the sum"


def test_nothing_is_judged_where_a_host_has_not_answered_or_there_are_no_sinks() -> None:
    assert judged(_TARGET, _CASE, [*_hosts()[:1], {"declined": "not here"}]) == [], "its queries are missing"
    assert judged(_TARGET, _CASE.replace(sinks=False), [{"shares": [], "findings": []}]) == [], "no such tensor"


def test_what_is_too_dear_is_withheld_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 pairs a head, of which two hosts can afford 2 * 79."""
    monkeypatch.setattr(sink_answers, "SINK_PAIRS", 79)
    for message in judged(_TARGET, _CASE, _hosts()):
        reason = "one head has 160 pairs of a query and a key; at most 79 are summed up"
        assert (message["shares"], message["withheld"]) == ([], [["gradients", "dsinks", reason]])


def test_heads_that_only_another_host_holds_are_no_reason_to_withhold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_answers, "SINK_PAIRS", 80)  # one head of four, by two hosts
    hosts = _hosts()
    ((name, head, *_), *_) = hosts[0]["sinks"]["sums"]
    hosts[1]["sinks"]["held"] = [one for one in hosts[1]["sinks"]["held"] if one[1] != head and one[0] == name]
    _, second = judged(_TARGET, _CASE, hosts)
    assert (second["shares"], second["withheld"]) == ([], []), "the first host has it"
