"""A finding: an id that stays, what makes two the same kind, and strict JSON whatever was found."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from conformance.finding import Finding, plain

Build = Callable[..., Finding]


def test_the_id_is_the_hash_of_check_tensor_and_signature(finding: Build) -> None:
    expected = hashlib.sha256(b"output\0out\0exceeds its allowance").hexdigest()[:10]
    assert finding().id == expected == "58435bb935", "waivers and reports rest on this id: it must never change"


@pytest.mark.parametrize(
    "occurrence",
    [{"case": "v=1 seq_len=8"}, {"target": "another"}, {"draw": 1}, {"got": 3.0}, {"reading": "other words"}],
    ids=lambda change: next(iter(change)),
)
def test_where_a_finding_was_met_does_not_change_its_id(finding: Build, occurrence: dict) -> None:
    assert finding(**occurrence).id == finding().id, "the same kind"


@pytest.mark.parametrize("kind", [{"check": "gradients"}, {"tensor": "dkey"}, {"signature": "is not finite"}])
def test_another_kind_has_another_id(finding: Build, kind: dict) -> None:
    assert finding(**kind).id != finding().id, "another kind"


def test_wrong_everywhere_explains_wrong_in_one_circumstance_and_not_the_other_way_round(finding: Build) -> None:
    general = finding(signature="exceeds its allowance")
    narrow = finding(signature="exceeds its allowance, on data draw 1 only")
    assert general.explains(narrow), "the general kind explains the narrow one"
    assert not narrow.explains(general), "the narrow kind leaves cases unexplained"
    assert not general.explains(general), "a kind is itself, not its explanation"


@pytest.mark.parametrize(
    "other",
    [
        {"tensor": "dkey", "signature": "exceeds its allowance, on data draw 1 only"},
        {"check": "gradients", "signature": "exceeds its allowance, on data draw 1 only"},
        {"signature": "is not finite, on data draw 1 only"},
        {"signature": "exceeds its allowances twice"},
    ],
)
def test_another_tensor_check_or_defect_is_not_explained(finding: Build, other: dict) -> None:
    assert not finding().explains(finding(**other)), "it would hide another defect"


def test_json_is_strict_and_keeps_zeros(finding: Build) -> None:
    found = finding(draw=0, rank=0, got=math.nan, expected=-math.inf, share=math.inf, allowance=0.0)
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (content["got"], content["expected"], content["share"]) == ("nan", "-inf", "inf"), "not finite: strings"
    assert (content["draw"], content["rank"], content["allowance"]) == (0, 0, 0.0), "zero is a value"
    assert content["index"] == [0, 3, 1, 2], "the index is a list"
    assert content["id"] == found.id, "the id stands in the report"
    assert "detail" not in content, "what is absent is left out"


def test_control_characters_of_a_message_are_escaped_and_letters_are_not() -> None:
    shown = plain("\x1b[31mred\x1b[0m\tα × β\r\nnext\x00 \udc80")
    assert shown == "\\x1b[31mred\\x1b[0m\\tα × β\\r\nnext\\x00 \\udc80", "only line breaks stay"


def test_numbers_of_numpy_and_nested_values_become_plain() -> None:
    content = plain({"a": (np.float64("inf"), [np.float64(1.5)]), 3: "x"})
    assert json.loads(json.dumps(content, allow_nan=False)) == {"a": ["inf", [1.5]], "3": "x"}, "strict JSON"
