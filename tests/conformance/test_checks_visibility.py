"""The masks that are read out: one wrong pair of a query and a key is seen in the tensor that has it, and told.

Evidence is made up by attention written out in NumPy (`modelled`), with a mask of its own for each tensor; a few wrong
targets run for real at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.checks import visibility
from conformance.checks.outcome import Outcome
from conformance.checks.words import place, relation
from conformance.evidence import Evidence
from conformance.finding import Finding
from conformance.problem import Case

Modelled = Callable[..., Evidence]
Judged = Callable[[str, str, str], Outcome]
Change = Callable[[np.ndarray], np.ndarray]

_PLAIN = "v=1 batch=2 seq_len=16 num_query_heads=4 num_kv_heads=2 sliding_window_size=5 context_parallelism=4"
_CASES = [
    _PLAIN,
    f"{_PLAIN} seed=1",
    _PLAIN.replace("context_parallelism=4", "layout=dual_chunk_swap sinks=true documents=5+11/16"),
    f"{_PLAIN} layout=striped documents=5@1+7@1+4@9/16@2 padding=9 attn_logits_soft_cap=5.0",
    "v=1 seq_len=16 window=2,3 head_dim=5 value_dim=7 scale=0.05 sinks=true",
    "v=1 seq_len=16 head_dim=16 num_query_heads=3 num_kv_heads=3 dtype=float64",
    "v=1 seq_len=16 sliding_window_size=1 shared_kv=true",
    "v=1 seq_len=16 window=0,none shared_kv=true sinks=true documents=7+9",
]


def _flip(batch_row: int, query: int, key: int) -> Change:
    """One pair the other way round."""

    def change(right: np.ndarray) -> np.ndarray:
        mask = right.copy()
        mask[batch_row, query, key] ^= True
        return mask

    return change


def _banded(left: int, right: int) -> Change:
    """Another window, whatever the documents."""

    def change(mask: np.ndarray) -> np.ndarray:
        positions = np.arange(mask.shape[1])
        ahead = positions[None, :] - positions[:, None]
        return np.broadcast_to((ahead >= -left) & (ahead <= right), mask.shape)

    return change


def _check(modelled: Modelled, case: Case | str, **how: object) -> Outcome:
    case = parse_case(case) if isinstance(case, str) else case
    return visibility.check(modelled(case, ("visibility",), **how))


def _by_variant(outcome: Outcome, variant: str) -> dict[str, Finding]:
    return {found.tensor: found for found in outcome.findings if found.detail.endswith(f"variant {variant}")}


# --- right masks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", _CASES)
def test_a_right_mask_is_no_finding_in_any_tensor(modelled: Modelled, text: str) -> None:
    outcome = _check(modelled, text)
    assert outcome.findings == (), "silent on the right one"
    tensors = {"out", "dquery", "dkey"} | ({"dvalue"} if "shared_kv" not in text else set())
    assert set(outcome.shares) == tensors, "and every tensor has been looked at"
    assert all(share < 1 for share in outcome.shares.values()), "float64 is far within what float32 may miss"


def test_nothing_is_said_where_the_program_was_not_run_on_codes(right_evidence: Callable[..., Evidence]) -> None:
    assert visibility.check(right_evidence(parse_case(_PLAIN))).shares == {}, "what was not asked was not tried"


# --- one pair -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "pair", "words"),
    [
        ("out", (0, 9, 4), "query 9 sees key 4, which is before its window (5 to 9)"),
        ("out", (1, 9, 5), "query 9 does not see key 5, which is in its window (5 to 9)"),
        ("out", (0, 9, 14), "query 9 sees key 14, which is after its window (5 to 9)"),
        ("dquery", (0, 9, 4), "query 9 sees key 4, which is before its window (5 to 9)"),
        ("dquery", (1, 9, 5), "query 9 does not see key 5, which is in its window (5 to 9)"),
        ("dkey", (0, 9, 4), "query 9 sees key 4, which is before its window (5 to 9)"),
        ("dvalue", (0, 9, 4), "query 9 sees key 4, which is before its window (5 to 9)"),
        ("dvalue", (1, 9, 5), "query 9 does not see key 5, which is in its window (5 to 9)"),
    ],
)
def test_one_wrong_pair_is_told_by_its_positions_in_its_own_tensor(
    modelled: Modelled, tensor: str, pair: tuple[int, int, int], words: str
) -> None:
    found = _by_variant(_check(modelled, f"{_PLAIN} seed=1", sees={tensor: _flip(*pair)}), "coded")
    assert set(found) == {tensor}, "that tensor's mask, and no other"
    assert words in found[tensor].reading, found[tensor].reading
    assert found[tensor].signature == "is not that of its mask", "the same kind whatever the pair"


def test_every_single_pair_of_a_mask_is_seen_but_where_two_keys_have_one_code(modelled: Modelled) -> None:
    # Blind, as docs/checks.md says: a query with one visible key that sees another one of the same class.
    case = parse_case("v=1 seq_len=8 num_query_heads=2 num_kv_heads=2 sliding_window_size=3 head_dim=8 seed=1")
    unseen = [
        (query, key)
        for query, key in np.ndindex(8, 8)
        if not _check(modelled, case, sees={"out": _flip(0, query, key)}).findings
    ]
    assert unseen == [], "two heads have two codes: not one pair is left"


@pytest.mark.parametrize("tensor", ["dquery", "dkey", "dvalue"])
def test_every_single_pair_of_a_backward_mask_is_seen(modelled: Modelled, tensor: str) -> None:
    # A query with one visible key has no gradient of the logits (p is 1): query 0 of this case, and rows without it.
    case = parse_case("v=1 seq_len=8 num_query_heads=2 num_kv_heads=2 sliding_window_size=3 sinks=true seed=1")
    unseen = [
        (query, key)
        for query, key in np.ndindex(8, 8)
        if not _check(modelled, case, sees={tensor: _flip(0, query, key)}).findings
    ]
    assert unseen == [], "with a sink even rows with one visible key are read"


def test_a_key_that_is_seen_by_one_head_alone_is_seen(modelled: Modelled) -> None:
    case = parse_case(f"{_PLAIN} seed=1")
    right, wrong = (modelled(case, ("visibility",), **how) for how in ({}, {"sees": {"out": _flip(0, 9, 4)}}))
    name = "coded/attention/out"
    array = right.arrays[name].copy()
    array[:, :, 3] = wrong.arrays[name][:, :, 3]
    (found,) = visibility.check(Evidence(right.target, case, {}, {**right.arrays, name: array}, ("coded",))).findings
    assert found.index is not None
    assert found.index[:3] == (0, 9, 3), "batch row, position, head"
    assert "query 9 sees key 4" in found.reading, found.reading


# --- patterns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ((5, 0), "as if the window had one key more on the left, on every rank"),
        ((3, 0), "as if the window had one key less on the left, on every rank"),
        ((4, 1), "as if the window had one key more on the right, on every rank"),
        ((99, 0), "as if the window had no end on the left, on every rank"),
    ],
)
@pytest.mark.parametrize("tensor", ["out", "dquery", "dkey", "dvalue"])
def test_a_wrong_window_is_named_in_every_tensor(
    modelled: Modelled, tensor: str, window: tuple[int, int], words: str
) -> None:
    found = _by_variant(_check(modelled, f"{_PLAIN} seed=1", sees={tensor: _banded(*window)}), "coded")
    assert words in found[tensor].reading, found[tensor].reading


def test_documents_that_are_ignored_are_named(modelled: Modelled) -> None:
    text = f"{_PLAIN} documents=6+10/16"
    found = _by_variant(_check(modelled, text, sees={"out": _banded(4, 0)}), "coded")["out"]
    assert "query 6 sees key 2, which is in another document" in found.reading, found.reading
    assert "as if there were no documents, on every rank where it shows" in found.reading, found.reading


def test_padding_that_is_read_is_named(modelled: Modelled) -> None:
    text = f"{_PLAIN} documents=10@1+6@9/16@1 padding=9"

    def as_a_document(right: np.ndarray) -> np.ndarray:
        mask = right.copy()
        mask[0, 10:, 10:] = _banded(4, 0)(mask)[0, 10:, 10:]
        return mask

    found = _by_variant(_check(modelled, text, sees={"out": as_a_document}), "coded")["out"]
    assert "query 10 sees key 10, which is padding" in found.reading, found.reading
    assert "as if padding were a document" in found.reading, found.reading


def test_a_mistake_that_spares_one_rank_is_told_so(modelled: Modelled) -> None:
    def but_on_rank_2(right: np.ndarray) -> np.ndarray:
        mask = _banded(5, 0)(right).copy()
        mask[:, 8:12] = right[:, 8:12]
        return mask

    found = _by_variant(_check(modelled, f"{_PLAIN} seed=1", sees={"out": but_on_rank_2}), "coded")["out"]
    assert "on every rank but 2" in found.reading, found.reading


def test_a_halo_that_never_arrives_is_told_so(modelled: Modelled) -> None:
    def own_keys(right: np.ndarray) -> np.ndarray:
        rank = np.arange(16) // 4
        return right & (rank[:, None] == rank[None, :])

    found = _by_variant(_check(modelled, f"{_PLAIN} seed=1", sees={"dkey": own_keys}), "coded")["dkey"]
    assert "as if keys of other ranks were not there, on every rank" in found.reading, found.reading


# --- what a finite mask lets through --------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [-60.0, -200.0, -500.0])
def test_a_mask_of_a_finite_number_is_seen_where_hidden_keys_are_loud(modelled: Modelled, hidden: float) -> None:
    found = _by_variant(_check(modelled, _PLAIN, hidden=hidden), "loud")
    assert set(found) == {"out", "dquery", "dkey", "dvalue"}, "in every tensor"
    assert found["out"].signature == "is not that of its mask, where hidden keys are loud"


def test_a_mask_of_a_very_large_number_hides(modelled: Modelled) -> None:
    assert _check(modelled, _PLAIN, hidden=-1e30).findings == (), "a thousand is no matter to it"


def test_a_trace_of_a_hidden_key_is_told_from_a_key(modelled: Modelled) -> None:
    found = _by_variant(_check(modelled, f"{_PLAIN} seed=1", hidden=-40.0), "coded")["out"]
    assert "has a trace, far less than one key's part, of what it must not see" in found.reading, found.reading


def test_what_is_not_finite_is_a_finding_without_being_decoded(modelled: Modelled) -> None:
    case = parse_case(f"{_PLAIN} seed=1")
    right = modelled(case, ("visibility",))
    arrays = {**right.arrays, "coded/attention/out": np.full_like(right.arrays["coded/attention/out"], np.nan)}
    (found,) = visibility.check(Evidence(right.target, case, {}, arrays, right.variants)).findings
    assert (found.tensor, str(found.got)) == ("out", "nan"), "NaN never passes"


# --- words ----------------------------------------------------------------------------------------------------


def test_how_a_key_lies_to_a_query_is_said_in_words() -> None:
    case = parse_case("v=1 seq_len=16 window=3,2 documents=8@1+4@2+4@9 padding=9")
    assert relation(case, 0, 6, 2) == "before its window (3 to 8)"
    assert relation(case, 0, 6, 9) == "after its window (3 to 8)"
    assert relation(case, 0, 6, 8) == "in another document"
    assert relation(case, 0, 6, 5) == "in its window (3 to 8)"
    assert relation(case, 0, 11, 12) == "padding"
    assert relation(case, 0, 12, 11) == "a key, though the query is padding"


def test_a_place_names_the_rank_and_the_row_of_its_chunk() -> None:
    text = "v=1 seq_len=16 context_parallelism=2"
    assert place(parse_case(f"{text} layout=dual_chunk_swap"), 13) == "rank 0 of 2, row 1 of 4 in chunk 3"
    assert place(parse_case(f"{text} layout=striped"), 13) == "rank 1 of 2", "no chunks there"


# --- wrong targets, for real ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("gathered:right", set()),
        ("wrong:one_key_too_many", {"out", "dquery", "dkey", "dvalue"}),
        ("wrong:loses_halo_gradient", {"dkey", "dvalue"}),
        ("blind:dquery_sees_one_more", {"dquery"}),
        ("blind:dkey_sees_one_more", {"dkey"}),
    ],
)
def test_a_wrong_target_is_found_in_the_tensors_that_are_wrong(judged: Judged, name: str, tensors: set[str]) -> None:
    outcome = judged(name, "v=1 seq_len=16 sliding_window_size=5 context_parallelism=2 seed=1", "visibility")
    assert {found.tensor for found in outcome.findings} == tensors


def test_documents_ignored_across_borders_are_found(judged: Judged) -> None:
    text = "v=1 seq_len=16 sliding_window_size=5 context_parallelism=2 documents=6+10 seed=1"
    found = judged("wrong:ignores_segments_across_borders", text, "visibility").findings[0]
    assert "query 8 sees key 4, which is in another document" in found.reading, found.reading
    assert "as if there were no documents in the keys of other ranks" in found.reading, found.reading
