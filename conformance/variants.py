"""Variants: further inputs for the program of a case, each a pure function of the case and named by what it is for.

A program that is compiled already answers them at once: reading out its masks, or showing that it does not notice what
it must not see. May touch: codes, poison, inputs, designated; never JAX. Tests: tests/conformance/test_variants.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from conformance.codes import coded_inputs, loud_inputs
from conformance.designated import asks_lse
from conformance.inputs import Inputs, inputs_of, redraw
from conformance.philox import Draws
from conformance.poison import with_poisoned_keys, with_poisoned_queries
from conformance.probed_answers import PROBE_BEYOND_PAIRS, visible_pairs
from conformance.problem import Case
from conformance.value_kinds import STREAMS

# Beyond these a run takes a third of the time of compiling, and nearly as long as compiling.
_MANY_PRODUCTS = 1_500_000
MANY_LOGITS = 4_000_000

DrawInputs = Callable[[int], Inputs]
"""From a data draw to its inputs."""


@dataclass(frozen=True)
class Variant:
    """The check that wants it, how the inputs are made, given those of the data draws, and on which cases they are."""

    check: str
    build: Callable[[Case, DrawInputs], Inputs]
    applies: Callable[[Case], bool]


def variants_of(case: Case, checks: Collection[str]) -> tuple[str, ...]:
    """The variants of the case that these checks want, in the order in which they are run."""
    return tuple(name for name, variant in VARIANTS.items() if variant.check in checks and variant.applies(case))


def coded_variants_of(case: Case, checks: Collection[str]) -> tuple[str, ...]:
    """Those of them that the oracle is asked about: whose masks are read."""
    return tuple(name for name in variants_of(case, checks) if VARIANTS[name].check == "visibility")


def variant_inputs(case: Case, name: str, draws: Sequence[Inputs] = ()) -> Inputs:
    """The inputs of one variant, in position order. `draws`: the inputs of the data draws, for who has them already.

    Raises:
        ValueError: no variant has this name.
    """
    if name not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {name!r}")

    @functools.cache
    def draw_inputs(draw: int) -> Inputs:
        return draws[draw] if draw < len(draws) else inputs_of(redraw(case, draw))

    return VARIANTS[name].build(case, draw_inputs)


def changed_part(case: Case) -> Bool[np.ndarray, "batch num_query_heads"]:
    """Which batch rows and query heads the variant `changed` changes: one batch row and one kv head, if there are
    several; of a single kv head one query head; of a single query head all there is.
    """
    problem = case.problem
    draws = Draws(case.seed, STREAMS["changed"])
    changed = np.zeros((problem.batch, problem.num_query_heads), bool)
    if problem.batch > 1:
        changed[draws.below(problem.batch)] = True
    if problem.num_kv_heads > 1:
        group = problem.num_query_heads // problem.num_kv_heads
        first = draws.below(problem.num_kv_heads) * group
        changed[:, first : first + group] = True
    if not changed.any():
        changed[:, draws.below(problem.num_query_heads)] = True
    return changed


def _changed_inputs(case: Case, draws: DrawInputs) -> Inputs:
    """Draw 1 in the changed part, with cotangent 0 there; draw 0 elsewhere, with cotangent 0 for lse."""
    first, second = draws(0), draws(1)
    problem = case.problem
    queries = changed_part(case)
    keys: np.ndarray = np.all(queries.reshape(problem.batch, problem.num_kv_heads, -1), axis=2)
    rows: np.ndarray = np.all(queries, axis=1, keepdims=True)

    def mixed(name: str, where: np.ndarray) -> np.ndarray:
        return np.where(where[:, None, :, None], getattr(second, name), getattr(first, name))

    key = mixed("key", keys)
    ids = None
    if first.segment_ids is not None and second.segment_ids is not None:
        ids = np.where(rows, second.segment_ids, first.segment_ids)
    return dataclasses.replace(
        first,
        query=mixed("query", queries),
        key=key,
        value=key if problem.shared_kv else mixed("value", keys),
        dout=np.where(queries[:, None, :, None], np.zeros((), first.dout.dtype), first.dout),
        dlse=np.zeros_like(first.dlse),
        segment_ids=ids,
    )


def _lse_alone(draws: DrawInputs) -> Inputs:
    """Draw 0, of whose results lse alone is used."""
    first = draws(0)
    return dataclasses.replace(first, dout=np.zeros_like(first.dout))


def _variant(check: str, name: str, build: Callable[[Case, DrawInputs], Inputs]) -> Variant:
    """A variant, for every case whose program runs in a fraction of the time that it takes to compile (`loud`: for half
    of them, `lse_alone` for those that call attention_with_lse).

    Of a larger case the call is repeated, and one other variant is run, by turns of the seed; of a very large one, one
    variant. A case that is too large to be answered everywhere has none.
    """

    def applies(case: Case) -> bool:
        if visible_pairs(case) > PROBE_BEYOND_PAIRS:
            return False
        if _products(case) > _MANY_PRODUCTS:
            if _logits(case) > MANY_LOGITS:
                return name == _VERY_LARGE_TURNS[case.seed % len(_VERY_LARGE_TURNS)]
            return name in ("again", _LARGE_TURNS[case.seed % len(_LARGE_TURNS)])
        if name == "lse_alone":
            return asks_lse(case)
        return name != "loud" or case.seed % _LOUD_STRIDE == 0

    return Variant(check, build, applies)


def _logits(case: Case) -> int:
    problem = case.problem
    return problem.batch * problem.num_query_heads * problem.seq_len**2


def _products(case: Case) -> int:
    return _logits(case) * (case.problem.head_dim + case.problem.value_dim)


_LOUD_STRIDE = 2
_LARGE_TURNS = ("coded", "poisoned_keys", "poisoned_queries", "coded", "changed", "loud")
_VERY_LARGE_TURNS = ("again", "coded", "poisoned_keys", "poisoned_queries")

VARIANTS: dict[str, Variant] = {
    "coded": _variant("visibility", "coded", lambda case, draws: coded_inputs(case)),
    "loud": _variant("visibility", "loud", lambda case, draws: loud_inputs(case)),
    "poisoned_keys": _variant("invariance", "poisoned_keys", lambda case, draws: with_poisoned_keys(case, draws(0))),
    "poisoned_queries": _variant(
        "invariance", "poisoned_queries", lambda case, draws: with_poisoned_queries(case, draws(0))
    ),
    "changed": _variant("invariance", "changed", _changed_inputs),
    "lse_alone": _variant("invariance", "lse_alone", lambda case, draws: _lse_alone(draws)),
    # Last, so that whatever a target keeps from call to call has had its chance.
    "again": _variant("invariance", "again", lambda case, draws: draws(0)),
}
"""By name, in the order in which they are run after the data draws."""
