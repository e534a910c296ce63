"""Covering lists: few rows of levels in which every allowed pair (or triple) of levels stands together at least once.

Greedy, one row at a time, and deterministic. May touch: NumPy, philox, the Feature of space.py.
Tests: tests/conformance/test_covering.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from conformance.philox import Draws
from conformance.space import Choice, Feature, Row


def covering_rows(
    features: Sequence[Feature], forbidden: frozenset[frozenset[Choice]], strength: int, seed: int = 0
) -> tuple[Row, ...]:
    """Rows that hold every allowed combination of `strength` levels of different features, and no forbidden pair.

    Each row starts from a combination that is still missing; then, feature by feature in random order, it takes the
    level that adds the most missing combinations with those already taken. Ties go to a level drawn at random.

    Raises:
        ValueError: strength is not from 1 to the number of features, or an allowed combination cannot be completed.
    """
    if not 1 <= strength <= len(features):
        raise ValueError(f"strength must be from 1 to {len(features)}, got {strength}")
    names = [(feature.name, level) for feature in features for level in feature.levels]
    ends = np.cumsum([len(feature.levels) for feature in features])
    columns = [range(end - len(feature.levels), end) for feature, end in zip(features, ends.tolist(), strict=True)]
    allowed = _allowed_pairs(names, columns, forbidden)
    missing = _all_combinations(allowed, strength)
    draws = Draws(seed, strength, len(features))
    rows: list[Row] = []
    while True:
        first = _draw_missing(missing, draws)
        if first is None:
            return tuple(rows)
        taken = _complete(first, columns, allowed, missing, draws)
        missing[np.ix_(*[taken] * strength)] = False
        rows.append(dict(names[level] for level in sorted(taken)))


def _allowed_pairs(
    names: list[Choice], columns: list[range], forbidden: frozenset[frozenset[Choice]]
) -> Bool[np.ndarray, "levels levels"]:
    """Which levels, numbered over all features, may share a row: not two of one feature, not a forbidden pair."""
    allowed = np.ones((len(names), len(names)), bool)
    for column in columns:
        allowed[column.start : column.stop, column.start : column.stop] = False
    for left, right in itertools.combinations(range(len(names)), 2):
        if frozenset((names[left], names[right])) in forbidden:
            allowed[left, right] = allowed[right, left] = False
    return allowed


def _all_combinations(allowed: Bool[np.ndarray, "levels levels"], strength: int) -> Bool[np.ndarray, "..."]:
    """Symmetric, with one axis a member: true for each combination of levels that are allowed with one another."""
    num_levels = allowed.shape[0]
    combinations = np.ones((num_levels,) * strength, bool)
    for axes in itertools.combinations(range(strength), 2):
        shape = [num_levels if axis in axes else 1 for axis in range(strength)]
        combinations &= allowed.reshape(shape)
    return combinations


def _draw_missing(missing: Bool[np.ndarray, "..."], draws: Draws) -> list[int] | None:
    """A combination that is still missing, or None."""
    flat = np.flatnonzero(missing)
    if not flat.size:
        return None
    return [int(level) for level in np.unravel_index(flat[draws.below(flat.size)], missing.shape)]


def _complete(
    first: list[int],
    columns: list[range],
    allowed: Bool[np.ndarray, "levels levels"],
    missing: Bool[np.ndarray, "..."],
    draws: Draws,
) -> list[int]:
    """One level for each feature: those of `first`, the others greedily."""
    taken = list(first)
    others = [column for column in columns if not any(level in column for level in first)]
    for column in draws.sample(others, len(others)):
        levels = [level for level in column if allowed[taken, level].all()]
        if not levels:
            raise ValueError(f"no level of feature {columns.index(column)} is allowed beside the levels {taken}")
        gains = missing[np.ix_(*[taken] * (missing.ndim - 1), levels)].reshape(-1, len(levels)).sum(axis=0)
        best = [level for level, gain in zip(levels, gains, strict=True) if gain == gains.max()]
        taken.append(draws.choice(best))
    return taken
