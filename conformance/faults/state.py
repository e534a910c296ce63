"""Kinds S and P: what a target keeps from one call to the next, and inputs that share or lose their memory.

Their state lives as long as the process. May touch: JAX, impl. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax import lax

from conformance.faults.fault import NOT_PUBLIC, Arrays, Fault, Replacement
from conformance.faults.geometry import always, crosses, cuts_left, has_left, with_window
from conformance.problem import Problem
from impl import exchange, ring


def _first_of(key: Callable[[Problem], Hashable], field: str) -> Callable[[Problem], Problem]:
    """What is compiled for one value of a field is used for every later one with the same key."""
    kept: dict[Hashable, Any] = {}

    def told(problem: Problem) -> Problem:
        value = kept.setdefault(key(problem), getattr(problem, field))
        if field == "window":
            return with_window(problem, value)
        return problem.replace(**{field: value})

    return told


def _place(problem: Problem) -> Hashable:
    return problem.layout, problem.context_parallelism


def _first_scale() -> Callable[[Problem], Problem]:
    kept: list[float] = []

    def told(problem: Problem) -> Problem:
        kept.append(problem.head_dim**-0.5)
        return problem.replace(scale=kept[0])

    return told


def _wrong_from_the_second_call() -> Callable[[Problem], Problem]:
    """The first call of a problem builds its mask; what the later ones find in the cache has no window."""
    built: set[Problem] = set()

    def told(problem: Problem) -> Problem:
        if problem not in built:
            built.add(problem)
            return problem
        return with_window(problem, (None, problem.window[1]))

    return told


def _kept_results(num_key_arguments: int) -> Callable[..., Any]:
    """A cache that keys by some of the arguments only."""
    kept: dict[Hashable, Any] = {}

    def wrong(right: Any, *arguments: Any) -> Any:
        key = arguments[:num_key_arguments]
        if key not in kept:
            kept[key] = right(*arguments)
        return kept[key]

    return wrong


def _first_ids() -> Callable[[Arrays, Problem], Arrays]:
    """Segment ids are read once a problem, by the host, and never again."""
    kept: dict[Problem, np.ndarray] = {}

    def given(arrays: Arrays, problem: Problem) -> Arrays:
        ids = arrays["segment_ids"]
        first = jax.pure_callback(
            lambda seen: kept.setdefault(problem, np.array(seen)), jax.ShapeDtypeStruct(ids.shape, ids.dtype), ids
        )
        return {**arrays, "segment_ids": first}

    return given


def _gone_after_the_first_call() -> Callable[[Arrays, Problem], Arrays]:
    """The first call of a problem donates its query: the later ones, which get the same array, find zeros."""
    donated: set[Problem] = set()

    def given(arrays: Arrays, problem: Problem) -> Arrays:
        if problem not in donated:
            donated.add(problem)
            return arrays
        return {**arrays, "query": 0 * arrays["query"]}

    return given


def _one_gradient_for_both(arrays: Arrays, problem: Problem) -> Arrays:
    """key and value are one array: it is fetched once, and its gradient as value is not added to that as key."""
    return {**arrays, "value": lax.stop_gradient(arrays["value"])}


FAULTS = (
    Fault(
        name="compiled_for_another_window",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The key of the compiled function forgets the window: the first one of a layout is used for all.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: cuts_left(problem) and problem.ulysses_parallelism == 1,
        told=_first_of(_place, "window"),
    ),
    Fault(
        name="compiled_for_another_soft_cap",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The key of the compiled function forgets the soft cap.",
        planted_in="ring",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=always,
        told=_first_of(_place, "attn_logits_soft_cap"),
    ),
    Fault(
        name="scale_of_an_earlier_head_dim",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The default scale is computed once, for the first head_dim that is seen.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.scale is None,
        told=_first_scale(),
    ),
    Fault(
        name="halo_plan_of_another_window",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The cache of halo plans is keyed by layout, ranks and length, and not by the window.",
        planted_in="halo",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=has_left,
        replaced=(Replacement(exchange, "halo_plan", _kept_results(3)),),
    ),
    Fault(
        name="stale_number_of_rotations",
        kind="P",
        report="tenstorrent/tt-metal/pull/49511",
        sentence="A cached program keeps the ring steps of the length and window that it was made for.",
        planted_in="ring",
        smallest="v=1 seq_len=8 sliding_window_size=3",
        applies=crosses,
        replaced=(Replacement(ring, "rotations", _kept_results(2)),),
    ),
    Fault(
        name="wrong_from_the_second_call_on",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The first call of a problem is right; the second finds a mask in a cache that has no window.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: cuts_left(problem) and problem.ulysses_parallelism == 1,
        told=_wrong_from_the_second_call(),
    ),
    Fault(
        name="documents_of_the_first_batch_for_ever",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The segment ids of the first batch are baked into the program.",
        planted_in="all_gather",
        smallest="v=1 seq_len=4 sliding_window_size=2 documents=1+3",
        applies=lambda problem: problem.segments and problem.axis_types == "auto",
        given=_first_ids(),
    ),
    Fault(
        name="donated_query_used_again",
        kind="S",
        report=NOT_PUBLIC,
        sentence="The query's buffer is given away by the first call: a second call with it reads zeros.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2",
        applies=lambda problem: problem.seq_len > 1,
        given=_gone_after_the_first_call(),
    ),
    Fault(
        name="aliased_key_and_value_lose_a_gradient",
        kind="S",
        report=NOT_PUBLIC,
        sentence="Where key and value are one array only one of its two gradients is returned.",
        planted_in="halo",
        smallest="v=1 seq_len=4 sliding_window_size=2 shared_kv=true",
        applies=lambda problem: problem.shared_kv,
        given=_one_gradient_for_both,
    ),
)
