"""oracle/places.py: the places that a probe looks at by default are those where faults live."""

import numpy as np
import pytest

from oracle.outline import Outline
from oracle.places import UNBOUNDED_KEY_PAIRS, default_places


def outline(**changes):
    sizes = {"batch": 2, "seq_len": 4096, "num_query_heads": 8, "num_kv_heads": 4, "head_dim": 64, "window": (99, 0)}
    return Outline(**{**sizes, **changes})


def positions(places, side):
    return {place.position for place in places if place.side == side}


def test_both_sides_of_every_chunk_border_are_probed():
    places = default_places(outline(), chunk=512, seed=0, query_groups=1000, key_groups=1000)
    borders = {p for border in range(512, 4096, 512) for p in (border - 1, border)}
    assert borders <= positions(places, "query"), "queries on both sides"
    assert borders <= positions(places, "key"), "keys on both sides"


def test_the_edges_of_windows_across_a_border_are_probed():
    """W = 100, border 512: query 610 sees key 511 and 611 does not; query 512 sees key 413 and not 412."""
    places = default_places(outline(), chunk=512, seed=0, query_groups=1000, key_groups=1000)
    assert {610, 611} <= positions(places, "query")
    assert {412, 413} <= positions(places, "key")


def test_a_window_to_the_right_has_its_edges_too():
    """Right 7, border 512: query 505 sees key 512 and 504 does not; query 511 sees key 518 and not 519."""
    places = default_places(outline(window=(0, 7)), chunk=512, seed=0, query_groups=1000, key_groups=1000)
    assert {504, 505} <= positions(places, "query")
    assert {518, 519} <= positions(places, "key")


def test_the_first_and_the_last_token_are_always_probed():
    for seed in range(5):
        places = default_places(outline(), chunk=64, seed=seed, query_groups=2, key_groups=2)
        for side in ("query", "key"):
            assert positions(places, side) == {0, 1, 4094, 4095}, f"{side}, two groups"


def test_document_borders_are_probed():
    ids = np.zeros((2, 4096), int)
    ids[1, 1000:1003] = 1
    places = default_places(outline(segment_ids=ids), chunk=2048, seed=0, query_groups=1000, key_groups=1000)
    for side in ("query", "key"):
        assert {999, 1000, 1002, 1003} <= positions(places, side), side
        assert {2047, 2048} <= positions(places, side), f"{side}: beside the chunk borders"


def test_the_first_full_window_is_probed():
    """W = 100: query 99 is the first to see 100 keys, query 100 the first that does not see key 0."""
    places = default_places(outline(), chunk=4096, seed=0, query_groups=1000)
    assert {99, 100} <= positions(places, "query")


def test_a_random_sample_is_probed_beside_a_quarter_as_large():
    """16 borders and their 16 window edges, the two ends, the first window: 34 groups and a sample of 8."""
    places = default_places(outline(batch=1, num_kv_heads=1, seq_len=2**20), chunk=2**16, seed=1, query_groups=1000)
    borders = {p + side for p in range(2**16, 2**20, 2**16) for side in (-1, 0)}
    edges = {p + 98 + side for p in range(2**16, 2**20, 2**16) for side in (0, 1)}
    fixed = borders | edges | {0, 1, 2**20 - 2, 2**20 - 1, 99, 100}
    assert fixed <= positions(places, "query"), "all that is not random"
    assert len(positions(places, "query") - fixed) == (15 + 15 + 2 + 1) // 4, "a sample of a quarter"


@pytest.mark.parametrize(
    ("window", "pairs", "keys"),
    [
        ((None, 0), 64 * 10, set(range(54, 64))),  # key k has 64 - k readers, of which each may see 64 keys
        ((0, None), 64 * 10, set(range(11))),  # key k has k + 1 readers; 9 and 10 are one group
        ((3, 2), 6 * 5, {0, 1, 2, 61, 62, 63}),  # 6 readers in the middle; 1 and 61 have 5
        ((3, 2), 6 * 6, set(range(64))),
    ],
)
def test_which_keys_are_affordable(monkeypatch, window, pairs, keys):
    monkeypatch.setattr("oracle.places.UNBOUNDED_KEY_PAIRS" if None in window else "oracle.places.KEY_PAIRS", pairs)
    small = outline(batch=1, seq_len=64, window=window)
    found = positions(default_places(small, chunk=1, seed=0, key_groups=1000), "key")
    assert found == keys, "groups whose first key has few enough readers"


def test_every_batch_row_and_kv_head_is_looked_at():
    places = default_places(outline(), chunk=512, seed=3)
    assert {(p.batch_row, p.kv_head) for p in places} == {(b, h) for b in range(2) for h in range(4)}


def test_a_seed_decides_and_another_differs():
    first, again, other = (default_places(outline(), chunk=64, seed=seed) for seed in (7, 7, 8))
    assert first == again, "same seed, same places"
    assert first != other, "another seed, other places"


def test_no_more_groups_than_asked_for():
    places = default_places(outline(), chunk=16, seed=0, query_groups=5, key_groups=3)
    assert len(set(places)) == len(places), "no place twice"
    assert len([p for p in places if p.side == "query"]) <= 10, "five groups of at most two neighbours"
    assert len([p for p in places if p.side == "key"]) <= 6, "three groups of at most two neighbours"


def test_keys_with_too_many_readers_are_left_out():
    """Full causal at 2^17 tokens: key k has 2^17 - k readers, each with up to 2^17 keys."""
    big = outline(batch=1, seq_len=2**17, window=(None, 0))
    keys = positions(default_places(big, chunk=2**14, seed=0, key_groups=1000), "key")
    assert 2**17 - 1 in keys, "the last key has one reader"
    assert min(keys) >= 2**17 - UNBOUNDED_KEY_PAIRS // 2**17, "no key with more readers than is affordable"


@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_tiny_sequences_have_places(seq_len):
    places = default_places(outline(batch=1, seq_len=seq_len), chunk=1, seed=0)
    assert positions(places, "query") == positions(places, "key") == set(range(seq_len)), "all of them"


@pytest.mark.parametrize("name", ["chunk", "query_groups", "key_groups"])
def test_counts_are_at_least_one(name):
    arguments = {"chunk": 4, "query_groups": 4, "key_groups": 4, name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be >= 1, got 0$"):
        default_places(outline(), seed=0, **arguments)
