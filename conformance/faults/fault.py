"""What a fault of the catalogue is: plain data that says how a correct target is made wrong, and who reported it.

May touch: problems, modules of `impl` by reference; never a check, never a case list. planting.py carries it out.
Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from conformance.problem import Problem

KINDS = {
    "A": "window edge: inclusive or exclusive",
    "B": "window sentinels and extremes",
    "C": "window, or one of its bounds, silently dropped",
    "D": "mask offsets, halos of several hops, sharded query positions",
    "E": "ring wrap-around and ownership of halo rows and their gradients",
    "F": "layout permutation and its inverse",
    "G": "segment ids and packed documents across shard borders",
    "H": "padding",
    "I": "empty rows, NaN, merging by log-sum-exp",
    "J": "attention sinks and soft cap",
    "K": "heads: GQA, MQA, head exchange",
    "L": "sizes: blocks, head_dim, divisibility",
    "M": "precision and scale",
    "N": "batch axis and other mesh axes",
    "O": "autodiff, shard_map, XLA, rematerialisation",
    "P": "races, and collectives that do not match",
    "Q": "cost",
    "R": "configuration and validation",
    "S": "wrong in one circumstance only",
}
"""A to R are kinds of public reports, S are those that no report tells of."""

NOT_PUBLIC = "not found in public"
PHASES = ("primal", "forward", "backward")
"""What JAX traces of a differentiable function: the primal call, the VJP's own forward, the VJP's backward."""

Arrays = dict[str, Any]
"""By name: query, key, value and, where the problem has them, segment_ids and sinks; of results, out and maybe lse."""


@dataclass(frozen=True)
class Replacement:
    """While a phase of the target is traced, `wrong(right, …)` stands for the function `right` that `module` has."""

    module: ModuleType
    name: str
    wrong: Callable[..., Any]
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to be wrong, planted in a bundled strategy.

    report: the public report's address, relative to github.com, or NOT_PUBLIC. smallest: the text of a case that shows
    it. applies: whether the fault can say anything at all about a problem, from its nature.
    How it is planted, any of: `told(problem)` is what the target is told in place of the problem; `given(arrays,
    problem)` changes its inputs, differentiably; `returned(results, arrays, problem)` its results, likewise;
    `gradients(gradients, cotangents, arrays, problem)` its gradients; `replaced` functions of `impl`.
    """

    name: str
    kind: str
    report: str
    sentence: str
    planted_in: str
    smallest: str
    applies: Callable[[Problem], bool]
    told: Callable[[Problem], Problem] | None = None
    given: Callable[[Arrays, Problem], Arrays] | None = None
    returned: Callable[[Arrays, Arrays, Problem], Arrays] | None = None
    gradients: Callable[[Arrays, Arrays, Arrays, Problem], Arrays] | None = None
    replaced: tuple[Replacement, ...] = ()
