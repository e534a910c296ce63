"""oracle/probe.py: at any place, the dense answer and the budget's allowances, from the rows in sight only."""

import dataclasses
import re

import numpy as np
import pytest

from oracle.budget import Precision, answer_with_allowances
from oracle.outline import Outline, reader
from oracle.probe import Place, probe

SEQ = 200
VARIANTS = {
    "window": {"window": (30, 0)},
    "two-sided": {"window": (20, 9)},
    "full causal": {"window": (None, 0)},
    "everything": {
        "window": (60, 2),
        "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
        "attn_logits_soft_cap": 2.0,
        "scale": 0.3,
        "segment_ids": np.stack([np.arange(SEQ) // 37 % 3, np.arange(SEQ) % 5]),
        "padding_segment_id": 2,
    },
}
ARRAYS = ("query", "key", "value", "dout", "dlse")


def outline_of(case):
    options = {name: value for name, value in case.items() if name not in ARRAYS}
    batch, seq, query_heads, head_dim = case["query"].shape
    return Outline(batch, seq, query_heads, case["key"].shape[2], head_dim, **options)


def rows_of(case):
    return lambda tensor, row, positions, heads: case[tensor][row, positions, heads]


@pytest.fixture
def case(draw):
    return lambda variant: draw(seed=4, batch=2, seq=SEQ, heads=(4, 2), dims=(8, 6), **VARIANTS[variant])


def every_place(case, positions):
    return [
        Place(side, row, head, p) for side in ("query", "key") for row in (0, 1) for head in (0, 1) for p in positions
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        (Precision("bfloat16"), {}),
        (Precision("bfloat16", rounded_partials=True), {"structured_values": True}),
        (Precision("float32"), {"structured_values": False}),
    ],
    ids=["bfloat16", "bfloat16, partials, structured", "float32"],
)
def test_every_place_has_the_dense_answer_and_the_budgets_allowances(case, monkeypatch, variant, precision, options):
    monkeypatch.setattr("oracle.probe.READER_PAIRS", 1)  # runs of 16 readers: several for each key
    case = case(variant)
    options = {"precision": precision, **options}
    answer, allowed = answer_with_allowances(**case, **options)
    places = every_place(case, [0, 1, 36, 37, 74, 75, 110, 150, 151, SEQ - 1])
    seen = []
    for place, expected, allowance in probe(rows_of(case), outline_of(case), places, **options):
        seen.append(place)
        heads = slice(2 * place.kv_head, 2 * place.kv_head + 2) if place.side == "query" else place.kv_head
        assert set(expected) == ({"out", "lse", "dquery"} if place.side == "query" else {"dkey", "dvalue"})
        for tensor, found in expected.items():
            at = (place.batch_row, place.position, heads)
            np.testing.assert_allclose(
                found, getattr(answer, tensor)[at], rtol=1e-12, atol=1e-12, err_msg=f"{tensor} {place}"
            )
            np.testing.assert_allclose(allowance[tensor], getattr(allowed, tensor)[at], rtol=1e-9, atol=1e-30)
    assert sorted(seen) == sorted(places), "every place once"


def test_only_rows_in_sight_are_read(case):
    """W = 31: a query reads itself and 30 keys before it, a key the 30 queries after it and what those see."""
    case, read = case("window"), {}

    def rows(tensor, row, positions, heads):
        read.setdefault(tensor, set()).update(positions.tolist())
        return case[tensor][row, positions, heads]

    list(probe(rows, outline_of(case), [Place("query", 0, 0, 100)], precision=Precision("float32")))
    assert read == {
        "query": {100}, "dout": {100}, "dlse": {100}, "key": set(range(70, 101)), "value": set(range(70, 101)),
    }, "what query 100 sees"  # fmt: skip
    read.clear()
    list(probe(rows, outline_of(case), [Place("key", 0, 0, 100)], precision=Precision("float32")))
    assert read["query"] == read["dout"] == set(range(100, 131)), "the readers of key 100"
    assert read["key"] == set(range(70, 131)), "and what they see"


def test_other_documents_are_not_read(case):
    """Documents of 20 tokens: key 100 starts one, so that only 100 to 119 see it, and see each other."""
    case, read = {**case("window"), "segment_ids": np.tile(np.arange(SEQ) // 20, (2, 1))}, {}

    def rows(tensor, row, positions, heads):
        read.setdefault(tensor, set()).update(positions.tolist())
        return case[tensor][row, positions, heads]

    list(probe(rows, outline_of(case), [Place("key", 0, 0, 100)], precision=Precision("float32")))
    assert read == {tensor: set(range(100, 120)) for tensor in ARRAYS}, "one document"


def test_no_more_than_a_window_is_looked_at(case):
    source = reader(rows_of(case("two-sided")), outline_of(case("two-sided")))  # left 20, right 9
    assert source.seen_by(np.array([50, 60])).tolist() == list(range(30, 70)), "50 - 20 to 60 + 9"
    assert source.readers_of(0, np.array([50, 60])).tolist() == list(range(41, 81)), "50 - 9 to 60 + 20"
    assert source.seen_by(np.array([5, 195])).tolist() == list(range(SEQ)), "the sequence ends"


def test_only_the_heads_of_the_place_are_read(case):
    case, heads_read = case("window"), set()

    def rows(tensor, row, positions, heads):
        heads_read.add((tensor in ("key", "value"), heads.start, heads.stop))
        return case[tensor][row, positions, heads]

    list(probe(rows, outline_of(case), [Place("key", 1, 1, 9)], precision=Precision("float32")))
    assert heads_read == {(True, 1, 2), (False, 2, 4)}, "kv head 1 and its query heads 2 and 3"


@pytest.mark.parametrize(("positions", "walks"), [((100, 101, 164), 1), ((100, 165), 2), ((100, 164, 165, 228), 2)])
def test_neighbours_within_64_positions_share_one_walk(case, positions, walks):
    case, calls = case("window"), []

    def rows(tensor, row, at, heads):
        calls.append(tensor)
        return case[tensor][row, at % SEQ, heads]

    outline = dataclasses.replace(outline_of(case), seq_len=300)
    places = [Place("query", 0, 0, position) for position in positions]
    list(probe(rows, outline, places, precision=Precision("float32")))
    assert calls.count("query") == walks, f"{positions} take {walks} walks"


def test_padding_may_hold_anything_and_other_rows_may_not(case):
    case = case("everything")
    padding = case["segment_ids"] == 2
    poisoned = {**case, **{name: np.where(padding[..., None, None], np.nan, case[name]) for name in ARRAYS[:4]}}
    places = every_place(case, [0, 10, 80, 199])
    clean = list(probe(rows_of(case), outline_of(case), places, precision=Precision("float32")))
    found = list(probe(rows_of(poisoned), outline_of(case), places, precision=Precision("float32")))
    for left, right in zip(clean, found, strict=True):
        for tensor in left.expected:
            np.testing.assert_array_equal(left.expected[tensor], right.expected[tensor], f"{tensor} {left.place}")
    poisoned["value"] = np.full_like(case["value"], np.nan)
    with pytest.raises(ValueError, match="value must be finite where it is read, got nan"):
        list(probe(rows_of(poisoned), outline_of(case), places, precision=Precision("float32")))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Place("value", 0, 0, 0), "side of a place must be 'query' or 'key', got 'value'"),
        (Place("query", 2, 0, 0), "batch_row of a place must be >= 0 and < 2, got 2"),
        (Place("key", 0, 2, 0), "kv_head of a place must be >= 0 and < 2, got 2"),
        (Place("key", 0, 0, -1), "position of a place must be >= 0 and < 200, got -1"),
    ],
)
def test_a_place_must_exist(case, place, message):
    case = case("window")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(probe(rows_of(case), outline_of(case), [place], precision=Precision("float32")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be >= 1, got 0"),
        ({"num_kv_heads": 3}, "num_query_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"window": (-1, 0)}, "window left must be None or an integer >= 0, got -1"),
        ({"sinks": np.zeros(2)}, "sinks must have shape [num_query_heads] = (4,), got (2,)"),
    ],
)
def test_an_outline_is_held_to_the_rules_of_attention(change, message):
    sizes = {"batch": 1, "seq_len": 8, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 4, "window": (3, 0)}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(probe(lambda *_: np.zeros(0), Outline(**{**sizes, **change}), [], precision=Precision("float32")))


def test_a_million_tokens_take_no_array_of_the_sequence():
    """Rows are made on demand, at places in the middle of 2^20 tokens."""

    def rows(tensor, row, positions, heads):
        random = np.random.default_rng(int(positions[0]) + len(tensor))
        shape = (len(positions), heads.stop - heads.start)
        return random.normal(size=shape if tensor == "dlse" else (*shape, 4))

    outline = Outline(1, 2**20, 2, 1, 4, window=(63, 0))
    places = [Place("query", 0, 0, 2**19), Place("key", 0, 0, 2**19 + 5)]
    found = list(probe(rows, outline, places, precision=Precision("bfloat16")))
    assert [place for place, *_ in found] == sorted(places), "both were probed"
