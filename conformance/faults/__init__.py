"""The catalogue of faults: known ways to be wrong, each planted in a correct target, each with a clean twin.

`conformance.faults:NAME` and `conformance.faults:NAME_clean` are targets like any other. Importing this imports JAX.
May touch: its own files. Tests: tests/conformance/test_faults.py.
"""

from __future__ import annotations

from conformance.faults import (
    circumstances,
    communication,
    cost,
    documents,
    gradients,
    halo_exchange,
    heads,
    layouts,
    mesh_axes,
    offsets,
    padding,
    precision,
    refusals,
    sinks_and_caps,
    sizes,
    softmax,
    state,
    window_dropped,
    window_edges,
    window_extremes,
)
from conformance.faults.fault import KINDS, NOT_PUBLIC, Fault
from conformance.faults.planting import CLEAN, Planted

_FAMILIES = (
    window_edges,
    window_extremes,
    window_dropped,
    offsets,
    halo_exchange,
    gradients,
    layouts,
    documents,
    padding,
    softmax,
    sinks_and_caps,
    heads,
    sizes,
    precision,
    mesh_axes,
    communication,
    cost,
    refusals,
    state,
    circumstances,
)

CATALOGUE: dict[str, Fault] = {fault.name: fault for family in _FAMILIES for fault in family.FAULTS}
"""By name, family by family."""


def __getattr__(name: str) -> Planted:
    """The target of a fault, or of its clean twin; made when it is asked for."""
    fault = CATALOGUE.get(name.removesuffix(CLEAN))
    if fault is None:
        raise AttributeError(name)
    planted = Planted(fault, clean=name.endswith(CLEAN))
    globals()[name] = planted
    return planted


__all__ = ["CATALOGUE", "CLEAN", "KINDS", "NOT_PUBLIC", "Fault", "Planted"]
