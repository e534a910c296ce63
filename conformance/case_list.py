"""The deterministic list of cases of a profile: a covering list, published models, the exact tier, a long chunk, more.

A pure function of (profile, seed, number of cases, devices): no state, no database; `list_hash` names a list.
May touch: space, covering, models, long_chunks, philox. Tests: tests/conformance/test_case_list.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from conformance.case_text import format_case
from conformance.covering import covering_rows
from conformance.long_chunks import long_chunk_case, uneven_long_chunk_case
from conformance.models import model_cases, pull_request_5608_cases
from conformance.philox import Draws
from conformance.problem import Case
from conformance.space import FEATURES, Row, case_of, features_for, forbidden_pairs, is_allowed
from conformance.value_kinds import STREAMS

# Strength of the covering list, and the number of cases where the user names none.
STRENGTH = {"quick": 2, "ci": 3, "nightly": 3}
EXAMPLES = {"quick": 284, "ci": 1600, "nightly": 0}

# One covering case in so many stands in the list a second time, in float64: all its features but dtype are covered
# beside each other already, and the exact tier asks about the exchange alone.
_EXACT_STRIDE = 5

# Further cases look where mistakes live and where a program is cheap to compile: windows over chunks, a few hops.
# A level stands here as often as it is to be drawn; features that are not named draw each of their levels alike.
_FURTHER_LEVELS = {
    "layout": ("contiguous", "dual_chunk_swap", "dual_chunk_swap"),
    "ranks": ("1", "2", "2", "2", "3", "3", "3", "4", "4", "5", "8"),
    "mesh": ("1x1", "1x1", "2x1", "2x1", "1x2", "1x2", "2x2", "3x1", "1x1x2"),
    "dims": ("8/8", "8/8", "16/8", "4/12", "5/5", "64/64", "128/128", "shared"),
    "chunk_len": ("4", "7", "8", "12", "16"),
    "window": (
        *("1", "2", "C-1", "C", "C+1", "2C-1", "2C+1", "S-1", "S+1"),
        *("2", "C-1", "C", "C+1", "two_sided_small", "two_sided_beyond_chunk", "right_only"),
    ),
    "values": ("plain", "plain", "plain", "peaked", "needle", "needle", "rank_coded", "cancelling", "uniform", "huge"),
}


def case_list(profile: str, seed: int, examples: int | None = None, num_devices: int = 8) -> tuple[Case, ...]:
    """The cases of `profile` ("quick", "ci" or "nightly"): `examples` different ones, each for at most `num_devices`.

    The covering list and the models are never cut, so there may be more. After the list of nightly, hypothesis draws.

    Raises:
        ValueError: an unknown profile.
    """
    if profile not in STRENGTH:
        raise ValueError(f"profile must be one of {', '.join(STRENGTH)}, got {profile!r}")
    wanted = EXAMPLES[profile] if examples is None else examples
    rows = covering_rows(features_for(num_devices), forbidden_pairs(num_devices), STRENGTH[profile], seed)
    cases = [case_of(row, _case_seed(seed, index)) for index, row in enumerate(rows)]
    for fixed in (pull_request_5608_cases, model_cases):
        cases += [case for case in fixed(_case_seed(seed, len(cases))) if case.problem.num_devices <= num_devices]
    cases += [_exact(case, seed, len(cases) + offset) for offset, case in enumerate(cases[: len(rows) : _EXACT_STRIDE])]
    for long_case in (long_chunk_case,) if profile == "quick" else (long_chunk_case, uneven_long_chunk_case):
        case = long_case(_case_seed(seed, len(cases)))
        cases += [case] if case.problem.num_devices <= num_devices else []
    while len(cases) < wanted:
        cases.append(further_case(seed, len(cases), num_devices))
    return tuple(cases)


def _exact(case: Case, seed: int, index: int) -> Case:
    """The case in float64: what is wrong there is not rounding."""
    return case.replace(dtype="float64", seed=_case_seed(seed, index))


def further_case(seed: int, index: int, num_devices: int) -> Case:
    """Case `index` of the endless list of `seed`: a row drawn level by level, drawn again while it is forbidden."""
    draws = Draws(seed, STREAMS["further_cases"], index)
    forbidden = forbidden_pairs(num_devices)
    row = _draw_row(draws)
    while not is_allowed(row, forbidden):
        row = _draw_row(draws)
    return case_of(row, _case_seed(seed, index))


def list_hash(cases: Sequence[Case]) -> str:
    """64 hexadecimal digits: the SHA-256 of the cases' texts, one a line."""
    return hashlib.sha256("".join(f"{format_case(case)}\n" for case in cases).encode()).hexdigest()


def _draw_row(draws: Draws) -> Row:
    levels = {feature.name: _FURTHER_LEVELS.get(feature.name, tuple(feature.levels)) for feature in FEATURES}
    return {name: draws.choice(choices) for name, choices in levels.items()}


def _case_seed(seed: int, index: int) -> int:
    """Another seed for each case of a list, so that no two texts are equal; in the list of seed 0 it is the index."""
    return (seed * 100_003 + index) % 2**32
