"""Feature areas: a case list cut into parts by feature, so that a test run shows which area broke.

May touch: problems and cases; never JAX. Tests: tests/conformance/test_areas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conformance.problem import Case

AREAS: dict[str, Callable[[Case], bool]] = {
    "window": lambda case: case.problem.window[0] is not None,
    "global": lambda case: case.problem.window == (None, 0),
    "hops": lambda case: (case.problem.window[0] or 0) > case.problem.seq_len // case.problem.context_parallelism,
    "right_window": lambda case: case.problem.window[1] != 0,
    "dual_chunk_swap": lambda case: case.problem.layout == "dual_chunk_swap",
    "striped": lambda case: case.problem.layout == "striped",
    "documents": lambda case: case.problem.segments,
    "padding": lambda case: case.problem.padding is not None,
    "heads": lambda case: case.problem.num_kv_heads not in (1, case.problem.num_query_heads),
    "sinks": lambda case: case.problem.sinks,
    "soft_cap": lambda case: case.problem.attn_logits_soft_cap is not None,
    "mesh": lambda case: case.problem.num_devices != case.problem.context_parallelism,
    "axis_types": lambda case: case.problem.axis_types != "auto",
    "bfloat16": lambda case: case.problem.dtype == "bfloat16",
    "exact": lambda case: case.problem.dtype == "float64",
}
"""What a case must have to be counted under an area. Every case has one: a window, or it is GLOBAL."""


def by_area(cases: Sequence[Case]) -> dict[str, tuple[Case, ...]]:
    """Each case under one of the areas that it has, the one with the fewest cases so far; areas without cases left out.

    A covering list mixes features, so a broken one shows in several areas; in most of the cases of its own.
    """
    grouped: dict[str, list[Case]] = {area: [] for area in AREAS}
    for case in cases:
        grouped[min((area for area, has in AREAS.items() if has(case)), key=lambda area: len(grouped[area]))].append(
            case
        )
    return {area: tuple(members) for area, members in grouped.items() if members}
