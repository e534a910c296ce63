"""The mesh of a problem over the devices of this process, and where each array of the contract lies on it.

May touch: JAX devices and shardings, in the worker process only. Tests: tests/conformance/test_mesh.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conformance.problem import Problem

# The context axis alone is Explicit under "mixed": the axis that a strategy's collectives run over.
_EXPLICIT_AXES = {"auto": (), "explicit": ("data", "context", "ulysses", "tensor"), "mixed": ("context", "ulysses")}


def mesh_of(problem: Problem, devices: Sequence[Any]) -> Mesh:
    """The problem's mesh: its axes in its order, of its axis types, over the first of `devices` (of JAX).

    Raises:
        ValueError: fewer devices than the problem's num_devices.
    """
    if len(devices) < problem.num_devices:
        raise ValueError(f"the problem's mesh takes {problem.num_devices} devices, got {len(devices)}")
    taken = list(devices[: problem.num_devices])
    if problem.device_order == "reversed":
        taken.reverse()
    elif problem.device_order == "rotated":
        # From three devices on it is not its own inverse: an order read the wrong way round shows.
        taken = taken[-1:] + taken[:-1]
    axes = [axis for axis, _ in problem.mesh_shape]
    sizes = [size for _, size in problem.mesh_shape]
    explicit = _EXPLICIT_AXES[problem.axis_types]
    types = tuple(AxisType.Explicit if axis in explicit else AxisType.Auto for axis in axes)
    return Mesh(np.array(taken).reshape(sizes), axes, axis_types=types)


def shardings_of(problem: Problem, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where each array lies, by its name: query, key, value, segment_ids, sinks, and the outputs out and lse."""
    context = ("context", "ulysses") if "ulysses" in mesh.axis_names else "context"
    kv_axis = "tensor" if problem.num_kv_heads % problem.tensor_parallelism == 0 else None
    specs = {
        "query": PartitionSpec("data", context, "tensor", None),
        "key": PartitionSpec("data", context, kv_axis, None),
        "value": PartitionSpec("data", context, kv_axis, None),
        "segment_ids": PartitionSpec("data", context),
        "sinks": PartitionSpec("tensor"),
        "out": PartitionSpec("data", context, "tensor", None),
        "lse": PartitionSpec("data", context, "tensor"),
    }
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
