"""The parts of arrays that this process holds: made from a case's seed, and read where the oracle was asked.

May touch: JAX arrays and the rows of inputs. Tests: tests/conformance/test_hosts_shards.py.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.inputs import rows_of
from conformance.mesh import shardings_of
from conformance.problem import Case, Problem
from conformance.value_kinds import draw_sinks

Index = tuple[slice, ...]

# Drawing a million tokens takes half an hour of CPU: in pieces, whose float64 stays small, on as many threads as pay.
_PIECE_VALUES = 1 << 21
_MAX_THREADS = 16


def placed_shards(
    case: Case, mesh: jax.sharding.Mesh, *, zero_at_empty_rows: bool, report: Callable[[str], None] = lambda phase: None
) -> dict[str, jax.Array]:
    """The arrays of the contract in layout order; each process makes the rows of its own devices, and no others.

    `zero_at_empty_rows`: the cotangents of rows without keys are zero, for targets that leave such rows undefined.
    `report` is told of every part, one device's rows of one array, before it is made.
    """
    problem = case.problem
    rows = (problem.batch, problem.seq_len)
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*rows, problem.num_query_heads, problem.head_dim),
        "key": (*rows, problem.num_kv_heads, problem.head_dim),
        "value": (*rows, problem.num_kv_heads, problem.value_dim),
        "dout": (*rows, problem.num_query_heads, problem.value_dim),
        "dlse": (*rows, problem.num_query_heads),
    }
    if problem.shared_kv:
        del shapes["value"]
    if problem.segments:
        shapes["segment_ids"] = rows
    if problem.sinks:
        shapes["sinks"] = (problem.num_query_heads,)
    places = shardings_of(problem, mesh)
    made = {}
    for name, shape in shapes.items():

        def part(index: Index | None, name: str = name, shape: tuple[int, ...] = shape) -> np.ndarray:
            assert index is not None, "these arrays have dimensions"
            report(f"making a part of {name}")
            return _part(case, name, index, shape, zero_at_empty_rows)

        made[name] = jax.make_array_from_callback(shape, places[name.removeprefix("d")], part)
    return made


def _part(case: Case, name: str, index: Index, shape: tuple[int, ...], zero_at_empty_rows: bool) -> np.ndarray:
    """The elements of one tensor at an index of the global array, in layout order."""
    if name == "sinks":
        return draw_sinks(case).astype(np.float32)[index[0]]
    batch_rows = np.arange(shape[0])[index[0]]
    positions = case.problem.positions()[index[1]]
    values_of_a_position = max(1, len(batch_rows) * int(np.prod(shape[2:])))
    in_a_piece = max(1, _PIECE_VALUES // values_of_a_position)

    def piece(start: int) -> np.ndarray:
        return _rows(case, name, batch_rows, positions[start : start + in_a_piece], index, zero_at_empty_rows)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        pieces = list(pool.map(piece, range(0, len(positions), in_a_piece)))
    return np.concatenate(pieces, axis=1)


def _rows(
    case: Case, name: str, batch_rows: np.ndarray, positions: np.ndarray, index: Index, zero_at_empty_rows: bool
) -> np.ndarray:
    """Some rows of one tensor; of `index` its axes behind the first two count."""
    heads = index[2] if len(index) > 2 else slice(None)
    rows = rows_of(case, name, batch_rows, positions, heads)
    rows = rows[(slice(None), slice(None), slice(None), *index[3:])[: len(index)]]
    if zero_at_empty_rows and name in ("dout", "dlse") and case.problem.padding is not None:
        is_token = rows_of(case, "segment_ids", batch_rows, positions) != case.problem.padding
        rows = np.where(is_token.reshape(*is_token.shape, *(1,) * (rows.ndim - 2)), rows, np.zeros((), rows.dtype))
    return rows


class HeldRows:
    """The rows of one output that this process's devices hold, indexed as the whole array would be."""

    def __init__(self, array: jax.Array) -> None:
        self._shards: list[tuple[list[range], np.ndarray]] = []
        for shard in array.addressable_shards:
            spans = [range(size)[part] for size, part in zip(array.shape, shard.index, strict=True)]
            self._shards.append((spans, np.asarray(shard.data)))
        self.ndim, self.dtype = array.ndim, array.dtype

    def holds(self, batch_row: int, index: int, head: int) -> bool:
        """Whether the row (batch row, index in the layout, head) is here."""
        place = (batch_row, index, head)
        return any(all(i in span for i, span in zip(place, spans, strict=False)) for spans, _ in self._shards)

    def __getitem__(self, place: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        """The rows at arrays of batch rows, indices and heads.

        Raises:
            KeyError: a row that this process does not hold.
        """
        return np.array([self._row(*map(int, one)) for one in zip(*place, strict=True)])

    def _row(self, *place: int) -> Any:
        for spans, data in self._shards:
            if all(i in span for i, span in zip(place, spans, strict=False)):
                return data[tuple(i - span.start for i, span in zip(place, spans, strict=False))]
        raise KeyError(f"this process holds no row {place}")


def queries_here(query: jax.Array, problem: Problem) -> dict[int, list[tuple[int, np.ndarray]]]:
    """By query head: (batch row, ascending positions) of the rows of the query that this process holds.

    Of the copies of a row one counts, wherever it is: over all processes every query is there once.
    """
    here: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for shard in query.addressable_shards:
        if shard.replica_id == 0:
            rows, indices, heads = (range(n)[part] for n, part in zip(query.shape[:3], shard.index[:3], strict=True))
            positions = np.sort(problem.positions()[indices.start : indices.stop])
            for head in heads:
                here[head] += [(row, positions) for row in rows]
    return here


def heads_here(dsinks: jax.Array) -> dict[int, float]:
    """What this process holds of dsinks, by head. (That copies are equal is asked where one process has them all.)"""
    held = {}
    for shard in dsinks.addressable_shards:
        heads = range(dsinks.shape[0])[shard.index[0]]
        held |= {head: float(of_head) for head, of_head in zip(heads, np.asarray(shard.data), strict=True)}
    return held


def not_finite_here(tensor: str, array: jax.Array) -> str | None:
    """ "NaN" or "infinity" if what this process holds of a tensor has it; the lse of a row without keys may be -inf."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    found = [_not_finite(tensor, np.asarray(shard.data)) for shard in array.addressable_shards]
    return next((what for what in ("NaN", "infinity") if what in found), None)


def _not_finite(tensor: str, data: np.ndarray) -> str | None:
    if np.isnan(data).any():
        return "NaN"
    infinity = np.array(np.inf, data.dtype)
    has_infinity = (data == infinity).any() or (tensor != "lse" and (data == -infinity).any())
    return "infinity" if has_infinity else None
