"""Hypothesis strategies over the feature space: every level is drawn on purpose, and a window of any size besides.

Some are made for the check `remat`, which the quick list never asks where heads go round all ranks.
The deterministic lists are in case_list.py. May touch: hypothesis, space, events, designated.
Tests: tests/conformance/test_fuzz.py.
"""

from __future__ import annotations

import math

from hypothesis import event
from hypothesis import strategies as st

from conformance.designated import seed_that_asks_remat
from conformance.events import events_of
from conformance.problem import Case
from conformance.space import DRAWN_ALONE, Row, case_of, features_for, forbidden_pairs


def cases(num_devices: int = 16) -> st.SearchStrategy[Case]:
    """Cases for a mesh of at most `num_devices`; each shrinks towards the first level of every feature."""
    return _cases(num_devices)


def record_events(case: Case) -> None:
    """Tells hypothesis what the case exercises: its statistics then show how much of the space was reached."""
    for name in sorted(events_of(case)):
        event(name)


@st.composite
def _cases(draw: st.DrawFn, num_devices: int) -> Case:
    row = draw(_rows(num_devices))
    # A third batch row costs half as much again: in an eighth of the cases.
    if draw(st.sampled_from((False,) * 7 + (True,))):
        row = {**row, "rows_per_shard": draw(st.sampled_from(list(DRAWN_ALONE["rows_per_shard"])))}
    case = case_of(row, draw(st.integers(0, 2**32 - 1)))
    # Levels are the borders of the space; in a quarter of the cases, a window of any size, which no level names.
    if draw(st.sampled_from((False, False, False, True))):
        case = case.replace(sliding_window_size=draw(st.integers(1, case.problem.seq_len + 1)), window=None)
    if draw(st.sampled_from((False,) * 7 + (True,))):
        case = _for_remat(case, draw(st.integers(0, 2**20)))
    return case


def _for_remat(case: Case, number: int) -> Case:
    """The case with a seed on which `remat` is asked, and as many query heads as go round all ranks."""
    problem = case.problem
    shards = problem.tensor_parallelism * problem.context_parallelism * problem.ulysses_parallelism
    heads = math.lcm(problem.num_query_heads, shards)
    return case.replace(num_query_heads=heads, seed=seed_that_asks_remat(number))


@st.composite
def _rows(draw: st.DrawFn, num_devices: int) -> Row:
    """One level a feature, each drawn from those that go with the levels before it, so that nothing is thrown away."""
    forbidden = forbidden_pairs(num_devices)
    row: dict[str, str] = {}
    for feature in features_for(num_devices):
        further = DRAWN_ALONE["device_order"] if feature.name == "device_order" else ()
        levels = [
            level
            for level in (*feature.levels, *further)
            if not any(frozenset((choice, (feature.name, level))) in forbidden for choice in row.items())
        ]
        row[feature.name] = draw(st.sampled_from(levels))
    return row
