"""Tells XLA what Pallas kernels of somebody else's cost, so that its scheduler knows which of them can hide a transfer.

Without an estimate a kernel counts as next to nothing, and XLA waits for a transfer before or after it, not behind it.
Tested in tests/impl/wire/test_aot.py, on the schedule of a compiled program.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.extend import core


def with_cost(function: Callable[..., Any], cost: pl.CostEstimate) -> Callable[..., Any]:
    """`function`, each of whose Pallas kernels states `cost`: flops, transcendentals and bytes of the whole call."""

    def costed(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.tree.leaves(arguments)
        results = core.jaxpr_as_fun(_costed(closed, cost))(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return costed


def _costed(closed: Any, cost: pl.CostEstimate) -> Any:
    """A closed jaxpr (JAX 0.12 no longer exports the type's name), its kernels' cost replaced."""
    equations = [
        equation.replace(params={**equation.params, "cost_estimate": cost})
        if equation.primitive.name == "pallas_call"
        else equation
        for equation in closed.jaxpr.eqns
    ]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations))
