"""What a verdict does not cover though nothing failed: features of which every case was declined, and large cases.

Plain sentences for the remarks of verdict.py. May touch: runs; which heads and keys of a large case are looked at.
Tests: tests/conformance/test_report_uncovered.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.areas import AREAS
from conformance.key_identities import chosen_kv_heads, has_unprobed_keys, leaves_keys_unseen
from conformance.probed_answers import PROBE_BEYOND_PAIRS, visible_pairs
from conformance.problem import Case, Problem
from conformance.runner import Run, TargetRun
from conformance.session import DECLINED
from conformance.sink_answers import affordable_heads

# Areas whose names say too little by themselves.
_IN_WORDS = {
    "window": "a bounded window",
    "global": "a window of the whole past",
    "hops": "windows beyond a rank's rows",
    "right_window": "keys after the query",
    "heads": "several query heads a kv head",
    "mesh": "further mesh axes",
    "axis_types": "Explicit axes",
    "exact": "float64",
}


def has_several_ranks(problem: Problem) -> bool:
    """Whether the sequence lies on more than one device."""
    return problem.context_parallelism * problem.ulysses_parallelism > 1


def never_sharded(target: TargetRun, run: Run) -> str | None:
    """What to say of a target that declines all cases that it could have been wrong on as a sharded attention."""
    taken, declined = taken_cases(target), _declined_cases(target)
    fit = [case for case in declined if case.problem.num_devices <= run.plan.devices.count]
    sharded = sum(has_several_ranks(case.problem) for case in fit)
    if not taken or not sharded or any(has_several_ranks(case.problem) for case in taken):
        return None
    return f"declined all {sharded} cases with more than one rank: no verdict on a sharded sequence"


def untaken_features(target: TargetRun) -> Iterator[str]:
    """A sentence with the feature areas of which the target declined every case that it was asked."""
    taken, declined = taken_cases(target), _declined_cases(target)
    areas = [area for area, has in AREAS.items() if any(map(has, declined)) and not any(map(has, taken))]
    if taken and areas:
        words = ", ".join(_IN_WORDS.get(area, area.replace("_", " ")) for area in areas)
        yield f"nothing is known of it with: {words} (it took no such case)"


def looked_at_in_part(target: TargetRun, run: Run) -> Iterator[str]:
    """Sentences on cases that are too large to be compared everywhere: how much of them was."""
    hosts, asked = run.plan.num_hosts, len(target.all_results)
    large = [case for case in taken_cases(target) if visible_pairs(case) > PROBE_BEYOND_PAIRS]
    if large and "gradients" in run.plan.check_names:
        sampled = [*_sampled_sinks(large, hosts or 1), *([] if hosts else _sampled_keys(large))]
        yield "; ".join([f"large cases ({len(large)} of {asked}) are compared at chosen places", *sampled])
    if unseen := sum(leaves_keys_unseen(case, hosts is not None) for case in large):
        why = "every host has its own rows" if hosts is not None else "their values are structured"
        yield (
            f"gradients of dkey and dvalue (on {unseen} of {asked} cases, of the last keys alone): most keys have too "
            f"many readers to be probed, and are not summed up where {why}"
        )


def taken_cases(target: TargetRun) -> list[Case]:
    """Those that were not declined."""
    return [result.case for result in target.all_results if result.status != DECLINED]


def _declined_cases(target: TargetRun) -> list[Case]:
    return [result.case for result in target.all_results if result.status == DECLINED]


def _sampled_sinks(cases: list[Case], hosts: int) -> Iterator[str]:
    counts = [
        (len(affordable_heads(case, hosts)), case.problem.num_query_heads) for case in cases if case.problem.sinks
    ]
    if fewer := [count for count in counts if 0 < count[0] < count[1]]:  # none at all is withheld, and said to be
        heads, of = min(fewer)
        yield f"dsinks of a sample of heads, {heads} of {of} at the fewest"


def _sampled_keys(cases: list[Case]) -> Iterator[str]:
    summed = [case for case in cases if has_unprobed_keys(case)]
    counts = [(len(chosen_kv_heads(case)), case.problem.batch * case.problem.num_kv_heads) for case in summed]
    if fewer := [count for count in counts if count[0] < count[1]]:
        heads, of = min(fewer)
        yield f"keys with many readers summed up in a sample of kv heads, {heads} of {of} at the fewest"
