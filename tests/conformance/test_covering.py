"""Covering lists: every allowed pair or triple of levels is there, no forbidden one is, the same list every time."""

import itertools
import math

import pytest

from conformance.covering import covering_rows
from conformance.space import FEATURES, Feature, features_for, forbidden_pairs


def toy_features(*sizes):
    return tuple(Feature(f"f{i}", {str(level): level for level in range(size)}) for i, size in enumerate(sizes))


def held_combinations(rows, strength):
    """Every combination of `strength` (feature, level) choices that some row holds."""
    return {combination for row in rows for combination in itertools.combinations(sorted(row.items()), strength)}


def allowed_combinations(features, forbidden, strength):
    """By brute force: all choices of levels of `strength` different features without a forbidden pair."""
    found = set()
    for chosen in itertools.combinations(sorted(features, key=lambda feature: feature.name), strength):
        for levels in itertools.product(*[feature.levels for feature in chosen]):
            combination = tuple(zip([feature.name for feature in chosen], levels, strict=True))
            if not any(frozenset(pair) in forbidden for pair in itertools.combinations(combination, 2)):
                found.add(combination)
    return found


@pytest.mark.parametrize(("strength", "num_devices"), [(2, 8), (2, 16), (2, 4), (2, 1), (3, 8)])
def test_the_feature_space_is_covered(strength, num_devices):
    features, forbidden = features_for(num_devices), forbidden_pairs(num_devices)
    rows = covering_rows(features, forbidden, strength)
    missing = allowed_combinations(features, forbidden, strength) - held_combinations(rows, strength)
    assert not missing, f"{len(missing)} combinations never stand together, such as {next(iter(missing))}"
    held_pairs = {frozenset(pair) for pair in held_combinations(rows, 2)}
    assert not held_pairs & forbidden, "a forbidden pair stands in a row"
    assert all(list(row) == [feature.name for feature in FEATURES] for row in rows), "one level for each feature"


@pytest.mark.parametrize(("strength", "factor"), [(2, 1.3), (3, 1.8)])
def test_the_list_is_not_much_longer_than_it_must_be(strength, factor):
    sizes = sorted((len(feature.levels) for feature in FEATURES), reverse=True)
    fewest = math.prod(sizes[:strength])
    rows = covering_rows(FEATURES, forbidden_pairs(8), strength)
    assert len(rows) < factor * fewest, f"{len(rows)} rows, {fewest} at the very least"


def test_every_level_of_every_feature_is_covered_at_strength_1():
    rows = covering_rows(toy_features(2, 5, 3), frozenset(), 1)
    assert len(rows) == 5, "as many rows as the longest feature has levels"


def test_full_strength_is_the_whole_product():
    rows = covering_rows(toy_features(2, 3, 2), frozenset(), 3)
    assert len(rows) == 12, "each of the 12 combinations once"


def test_the_list_is_a_pure_function_of_its_arguments():
    forbidden = forbidden_pairs(8)
    assert covering_rows(FEATURES, forbidden, 2) == covering_rows(FEATURES, forbidden, 2), (
        "the same call, the same list"
    )
    assert covering_rows(FEATURES, forbidden, 2, seed=1) != covering_rows(FEATURES, forbidden, 2), "another seed"


def test_forbidden_pairs_of_one_level_with_all_of_another_feature_are_refused():
    features = toy_features(2, 2, 2)
    forbidden = frozenset(frozenset((("f0", "0"), ("f1", level))) for level in "01")
    with pytest.raises(ValueError, match="no level of feature 1 is allowed"):
        covering_rows(features, forbidden, 2)


@pytest.mark.parametrize("strength", [0, 4])
def test_a_strength_beyond_the_features_is_refused(strength):
    with pytest.raises(ValueError, match=f"strength must be from 1 to 3, got {strength}"):
        covering_rows(toy_features(2, 2, 2), frozenset(), strength)
