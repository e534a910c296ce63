"""oracle/banded.py: the dense answer, whatever the window, the documents and the places where tiles are cut."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from oracle import banded, tiles

BOUNDS = st.one_of(st.none(), st.integers(0, 3), st.integers(0, 400))


@st.composite
def cases(draw):
    """Arguments of `attention_vjp` whose sequences end on, before and after the cut of a tile."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    seq = draw(st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 255, 256, 257, 300])))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads = kv_heads * group
    case = {
        "query": random.normal(size=(batch, seq, heads, 3)) * draw(st.sampled_from([0.0, 1.0, 10.0])),
        "key": random.normal(size=(batch, seq, kv_heads, 3)),
        "value": random.normal(size=(batch, seq, kv_heads, 2)),
        "dout": random.normal(size=(batch, seq, heads, 2)),
        "dlse": random.normal(size=(batch, seq, heads)),
        "window": (draw(BOUNDS), draw(BOUNDS)),
    }
    if draw(st.booleans()):
        case["segment_ids"] = random.integers(-2, 2, size=(batch, seq))
        if draw(st.booleans()):
            case["padding_segment_id"] = -1
    if draw(st.booleans()):
        case["sinks"] = random.normal(size=heads)
    if draw(st.booleans()):
        case["attn_logits_soft_cap"] = 1.5
    return case


@settings(deadline=None, max_examples=150)
@given(cases())
def test_banded_is_dense_to_twelve_digits(case):
    forward = {name: value for name, value in case.items() if name not in ("dout", "dlse")}
    dense = {**oracle.attention(**forward)._asdict(), **oracle.attention_vjp(**case)._asdict()}
    found = {**banded.attention(**forward)._asdict(), **banded.attention_vjp(**case)._asdict()}
    for tensor, expected in dense.items():
        if expected is None:
            assert found[tensor] is None, f"no {tensor} without sinks"
        else:
            np.testing.assert_allclose(found[tensor], expected, rtol=1e-12, atol=1e-12, err_msg=tensor)


@pytest.mark.parametrize("tile_rows", [1, 7, 50, 1000])
def test_where_tiles_are_cut_changes_nothing(draw, monkeypatch, tile_rows):
    case = draw(seq=50, window=(9, 2), sinks=np.zeros(2))
    whole = banded.attention_vjp(**case)
    monkeypatch.setattr(tiles, "TILE_ROWS", tile_rows)
    for left, right in zip(whole, banded.attention_vjp(**case), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-13)


def test_memory_grows_with_the_window_and_not_with_the_square_of_the_sequence(draw):
    """At 16384 tokens one dense array of logits would take 2 GiB."""
    case = draw(seq=16384, heads=(1, 1), dims=(2, 2), window=(63, 0))
    tracemalloc.start()
    banded.attention_vjp(**case)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 2**20, f"peak of {peak / 2**20:.0f} MiB"


def test_banded_refuses_what_dense_refuses(draw):
    with pytest.raises(ValueError, match="window left must be None or an integer >= 0, got -1"):
        banded.attention_vjp(**draw(window=(-1, 0)))
