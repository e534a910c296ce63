"""oracle/mask.py: which keys a query sees, against hand-written masks."""

import numpy as np
import pytest

from oracle.mask import visible, window_of

S, H = True, False  # sees, hidden


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, 0), [[S, H, H, H], [H, S, H, H], [H, H, S, H], [H, H, H, S]]),
        ((1, 0), [[S, H, H, H], [S, S, H, H], [H, S, S, H], [H, H, S, S]]),
        ((2, 0), [[S, H, H, H], [S, S, H, H], [S, S, S, H], [H, S, S, S]]),
        ((0, 1), [[S, S, H, H], [H, S, S, H], [H, H, S, S], [H, H, H, S]]),
        ((1, 1), [[S, S, H, H], [S, S, S, H], [H, S, S, S], [H, H, S, S]]),
        ((None, 0), [[S, H, H, H], [S, S, H, H], [S, S, S, H], [S, S, S, S]]),
        ((0, None), [[S, S, S, S], [H, S, S, S], [H, H, S, S], [H, H, H, S]]),
        ((3, 0), [[S, H, H, H], [S, S, H, H], [S, S, S, H], [S, S, S, S]]),
        ((99, 99), [[S] * 4] * 4),
        ((None, None), [[S] * 4] * 4),
    ],
)
def test_window_counts_keys_before_and_after_the_query_itself(window, expected):
    np.testing.assert_array_equal(visible(4, window=window)[0], expected, "visible[q, k]")


@pytest.mark.parametrize("size", [1, 2, 5, 8, 20])
def test_sliding_window_of_size_w_shows_w_keys_self_included(size):
    seen = visible(8, window=window_of(size))[0].sum(axis=1)
    assert seen.tolist() == [min(size, q + 1) for q in range(8)], "min(W, q + 1) keys are visible to query q"


def test_segments_see_only_themselves():
    expected = [[S, H, H, H], [S, S, H, H], [H, H, S, H], [H, H, S, S]]
    np.testing.assert_array_equal(visible(4, window=(None, 0), segment_ids=np.array([[7, 7, 3, 3]]))[0], expected)


def test_a_repeated_id_is_the_same_segment():
    """Ids are compared for equality and nothing else: the two runs of 5 see each other over the run of 6."""
    expected = [[S, H, H, H], [H, S, H, H], [S, H, S, H], [H, S, H, S]]
    np.testing.assert_array_equal(visible(4, window=(None, 0), segment_ids=np.array([[5, 6, 5, 6]]))[0], expected)


def test_zero_and_negative_ids_are_ids_like_any_other():
    expected = [[S, H, H, H], [S, S, H, H], [H, H, S, H], [H, H, S, S]]
    np.testing.assert_array_equal(visible(4, window=(None, 0), segment_ids=np.array([[0, 0, -1, -1]]))[0], expected)


def test_padding_sees_nothing_and_nobody_sees_it():
    expected = [[S, H, H, H], [H, H, H, H], [S, H, S, H], [H, H, H, H]]
    seen = visible(4, window=(None, 0), segment_ids=np.array([[0, 9, 0, 9]]), padding_segment_id=9)
    np.testing.assert_array_equal(seen[0], expected)


def test_batch_rows_have_their_own_segments():
    seen = visible(2, window=(None, 0), segment_ids=np.array([[1, 1], [1, 2]], np.int32))
    np.testing.assert_array_equal(seen, [[[S, H], [S, S]], [[S, H], [H, S]]])


@pytest.mark.parametrize("size", [0, -1, True, 1.0, None, "2"])
def test_a_sliding_window_shows_at_least_one_key(size):
    with pytest.raises(ValueError, match=r"sliding_window_size must be an integer >= 1, got"):
        window_of(size)
