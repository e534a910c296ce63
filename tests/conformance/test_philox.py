"""Philox against Random123's known answers, and what is built on it: values of deviation 1, draws for decisions."""

import numpy as np
import pytest

from conformance.philox import Draws, philox_words, standard_values

# Random123, tests/kat_vectors, philox 4x32 10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_words_are_random123s(counter, key, output):
    words = philox_words(counter, key)
    assert tuple(int(word) for word in words) == output, "the known answer of Random123"


def test_arrays_of_counters_give_the_words_of_each_counter():
    first, second = np.arange(5)[:, None], np.arange(3)[None, :]
    words = philox_words((first, second, 7, 9), (1, 2))
    for i in range(5):
        for j in range(3):
            alone = philox_words((i, j, 7, 9), (1, 2))
            assert [int(word[i, j]) for word in words] == [int(word) for word in alone], f"counter ({i}, {j}, 7, 9)"


def test_long_arrays_give_the_words_of_each_counter():
    positions = np.arange(20_000)
    words = philox_words((1, positions, 2, 3), (4, 5))
    for position in (0, 8191, 8192, 16_384, 19_999):
        alone = philox_words((1, position, 2, 3), (4, 5))
        assert [int(word[position]) for word in words] == [int(word) for word in alone], f"position {position}"


def test_standard_values_are_the_centred_sum_of_four_16_bit_fields():
    words = [int(word) for word in philox_words((0, 5, 6, 7), (1, 2))]
    fields = [half for word in words for half in (word >> 16, word & 0xFFFF)]
    deviation = (4 * (65536**2 - 1) / 12) ** 0.5
    expected = [(sum(fields[:4]) - 131070) / deviation, (sum(fields[4:]) - 131070) / deviation]
    values = standard_values(2, (5, 6, 7), (1, 2))
    np.testing.assert_allclose(values, expected, rtol=1e-15, err_msg="two values from one block of four words")


def test_standard_values_have_mean_0_and_deviation_1():
    values = standard_values(8, (np.arange(4), np.arange(2000)[:, None], 0), (3, 4))
    # 64,000 values: the mean's own deviation is 0.004, the deviation's 0.0024 (kurtosis 2.7); five of them either way.
    assert abs(values.mean()) < 0.02, f"mean {values.mean()}"
    assert abs(values.std() - 1) < 0.012, f"standard deviation {values.std()}"
    assert np.abs(values).max() <= 131070 / 37837.2, "the sum of four fields is bounded"


def test_a_feature_has_the_same_value_whatever_the_number_of_features():
    many = standard_values(9, (1, 2, 3), (4, 5))
    for num_features in range(1, 9):
        few = standard_values(num_features, (1, 2, 3), (4, 5))
        np.testing.assert_array_equal(few, many[:num_features], err_msg=f"{num_features} of 9 features")


def test_draws_are_the_same_for_the_same_key_and_differ_for_another():
    def first(*key):
        draws = Draws(*key)
        return [draws.below(1000) for _ in range(300)]

    assert first(1, 2) == first(1, 2), "a pure function of the key"
    for other in ((1, 3), (2, 2), (1,), (1, 2, 0), (1, 2 + 2**32)):
        # Two independent sequences of 300 agree in 0.3 places of 300 on average.
        agreeing = sum(a == b for a, b in zip(first(1, 2), first(*other), strict=True))
        assert agreeing < 6, f"key {other} repeats key (1, 2)"


def test_draws_below_a_bound_reach_every_integer_below_it_about_alike():
    draws = Draws(5)
    counts = np.bincount([draws.below(7) for _ in range(7000)], minlength=7)
    assert len(counts) == 7, "never the bound itself"
    assert counts.min() > 850, f"1000 each expected, standard deviation 29, got {counts}"


def test_a_sample_has_different_items_and_a_full_one_is_a_shuffle():
    draws = Draws(6)
    shuffled = draws.sample(range(20), 20)
    assert sorted(shuffled) == list(range(20)), "every item once"
    assert shuffled != list(range(20)), "in another order"
    assert len(set(draws.sample("abcdef", 4))) == 4, "no item twice"
