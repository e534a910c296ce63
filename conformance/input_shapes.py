"""The shapes of a problem's inputs and cotangents, placed as the contract says: for programs that are only compiled.

May touch: JAX. Tests: tests/conformance/test_checks_work.py, test_checks_errors.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from conformance.mesh import shardings_of
from conformance.problem import Problem

ShapesAndDtypes = dict[str, tuple[tuple[int, ...], str]]


def input_shapes(problem: Problem) -> ShapesAndDtypes:
    """Shape and dtype of each input that the problem has, by its name, and of `dout`."""
    rows = (problem.batch, problem.seq_len)
    queries, keys = (*rows, problem.num_query_heads), (*rows, problem.num_kv_heads)
    shapes: ShapesAndDtypes = {
        "query": ((*queries, problem.head_dim), problem.dtype),
        "key": ((*keys, problem.head_dim), problem.dtype),
        "dout": ((*queries, problem.value_dim), problem.dtype),
    }
    if not problem.shared_kv:
        shapes["value"] = ((*keys, problem.value_dim), problem.dtype)
    if problem.segments:
        shapes["segment_ids"] = (rows, "int32")
    if problem.sinks:
        shapes["sinks"] = ((problem.num_query_heads,), "float64" if problem.dtype == "float64" else "float32")
    return shapes


def placed_shapes(
    problem: Problem, mesh: Mesh, shapes: ShapesAndDtypes, placed: Mapping[str, NamedSharding] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes where the contract puts them, but for those of `placed`."""
    shardings = {**shardings_of(problem, mesh), **(placed or {})}
    return {
        name: jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=shardings[name.removeprefix("d")])
        for name, (shape, dtype) in shapes.items()
    }
