"""oracle/rounding.py: how single roundings add up, against numbers worked out by hand and simulated ones."""

import numpy as np
import pytest

from oracle.rounding import Roundings, sum_roundoffs


def test_each_term_is_rounded_once_with_each_roundoff():
    found = Roundings.of(np.array([3.0, -2.0]), 0.5, 0.25)
    assert found.squares.tolist() == [9 * (0.25 + 0.0625), 4 * (0.25 + 0.0625)], "u^2 x^2, added over roundoffs"
    assert found.sizes.tolist() == [3 * 0.75, 2 * 0.75], "u |x|, added over roundoffs"


def test_errors_of_which_only_a_bound_is_known_stay_within_theirs_even_if_each_reaches_it():
    """Signs alone are drawn: no distribution within the bound spreads more. 5 sqrt(3) standard deviations."""
    bounds = np.arange(1.0, 401.0)
    together = Roundings.bounded(bounds).sum(axis=0)
    assert together.sizes == 400 * 401 / 2, "the sum of the bounds"
    limit = together.bound(independent=True)
    assert limit == pytest.approx(5 * np.sqrt(3 * np.square(bounds).sum())), "less than a third of that sum"
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(20_000, 400))
    assert np.abs(signs @ bounds).max() < 0.7 * limit, (
        "5.5 of 8.7 standard deviations are never reached in 20,000 draws"
    )


def test_roundings_add_by_square_and_by_size():
    total = Roundings.of(np.array([3.0]), 1.0) + Roundings.of(np.array([4.0]), 1.0)
    assert total.squares.tolist() == [25.0], "9 + 16"
    assert total.sizes.tolist() == [7.0], "3 + 4"


def test_a_factor_scales_what_it_multiplies():
    found = Roundings.of(np.array([3.0]), 1.0).times(-2.0)
    assert (found.squares.tolist(), found.sizes.tolist()) == ([36.0], [6.0])


def test_a_matmul_adds_the_roundings_of_its_left_factor():
    found = Roundings.of(np.array([[1.0, 2.0]]), 1.0).matmul(np.array([[3.0], [-4.0]]))
    assert found.squares.tolist() == [[1 * 9 + 4 * 16.0]]
    assert found.sizes.tolist() == [[1 * 3 + 2 * 4.0]]


def test_a_transposed_matmul_sums_over_queries():
    left = np.array([[[1.0, 2.0], [3.0, 4.0]]])  # [group, query, key]
    found = Roundings.of(left, 1.0).transposed_matmul(np.array([[1.0], [10.0]]))
    assert found.sizes.tolist() == [[[31.0], [42.0]]], "key 0: 1 + 30, key 1: 2 + 40"


def test_sum_and_along_reshape():
    found = Roundings.of(np.array([[3.0, 4.0]]), 1.0)
    assert found.sum(axis=-1).squares.tolist() == [25.0], "summed along the last axis"
    assert found.along(-1).sizes.tolist() == [[[3.0], [4.0]]], "one axis more"


def test_what_rounds_nothing_stays_nothing():
    nothing = Roundings.of(np.ones((2, 2)), 0.0, 0.0)
    for found in (nothing, nothing.matmul(np.ones((2, 2))), nothing.transposed_matmul(np.ones((2, 2))),
                  nothing.sum(axis=-1), nothing.along(-1), nothing + nothing):  # fmt: skip
        assert found.is_nothing, "no array was formed"
        assert found.bound(independent=True, in_common=1.0) == 0.0, "and nothing is allowed for it"


def test_independent_roundings_are_bounded_by_the_smaller_of_both_rules():
    few, many = Roundings(np.array([25.0]), np.array([7.0])), Roundings(np.array([100.0]), np.array([1000.0]))
    assert few.bound(independent=True).tolist() == [7.0], "no more than their sizes"
    assert many.bound(independent=True).tolist() == [50.0], "no more than five standard terms"
    assert many.bound(independent=True, in_common=3.0).tolist() == [53.0], "beside what they have in common"
    assert many.bound(independent=False).tolist() == [1000.0], "their sizes, where they need not be independent"


def test_simulated_roundings_stay_within_five_standard_terms_and_come_near():
    """200,000 sums of 200 uniform roundings: none exceeds the bound, the largest takes more than half of it."""
    random = np.random.default_rng(0)
    terms = random.normal(size=200)
    errors = np.abs(random.uniform(-1, 1, size=(200_000, 200)) @ terms).max()
    bound = Roundings.of(terms, 1.0).sum(axis=-1).bound(independent=True)
    assert errors <= bound, f"{errors} of {bound}"
    assert errors >= bound / 2, f"{errors} of {bound}: the bound has no slack to hide a fault in"


@pytest.mark.parametrize(("terms", "expected"), [(1, 16.0), (92, 16.0), (144, 20.0), (3600, 100.0)])
def test_a_sum_strays_like_the_root_of_its_length(terms, expected):
    assert sum_roundoffs(terms) == pytest.approx(expected), "5/3 sqrt(n), and no less than 16"


@pytest.mark.parametrize("terms", [64, 1024, 16384])
def test_a_chain_of_float32_additions_stays_within_its_bound(terms):
    """The worst order there is: one accumulator, terms of one sign."""
    random = np.random.default_rng(terms)
    numbers = random.uniform(0.5, 1, size=(500, terms)).astype(np.float32)
    errors = np.abs(np.cumsum(numbers, axis=1)[:, -1].astype(float) / numbers.sum(axis=1, dtype=float) - 1).max()
    assert errors <= sum_roundoffs(terms) * 2.0**-24, f"{errors * 2**24:.1f} unit roundoffs"
