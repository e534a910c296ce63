"""The arrays of a case: query, key, value, the cotangents, sinks and segment ids, in position order.

A value is a function of (seed, tensor, batch row, position, head, feature), whatever the layout, mesh or other shapes,
so any rows of it can be made alone. May touch: philox, value_kinds, segments, NumPy, ml_dtypes; never JAX.
Tests: tests/conformance/test_inputs.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped
from numpy.typing import ArrayLike

from conformance.philox import philox_words
from conformance.problem import Case
from conformance.segments import redrawn_documents, segment_id_rows
from conformance.value_kinds import STREAMS, STRUCTURED, draw_rows, draw_sinks

__all__ = ["NUM_DRAWS", "ROW_TENSORS", "STRUCTURED", "Inputs", "inputs_of", "redraw", "rows_of"]

NUM_DRAWS = 2
"""Data draws that each compiled program runs on, without being traced anew; `redraw` gives the data of each."""

ROW_TENSORS = ("query", "key", "value", "dout", "dlse", "segment_ids")


@dataclass(frozen=True)
class Inputs:
    """Read-only arrays in position order; `None` where the problem has no such input.

    query, key, value and dout have the problem's dtype. `key` is the very array `value` where the problem says
    `shared_kv`.
    """

    query: Float[np.ndarray, "batch seq num_query_heads head_dim"]
    key: Float[np.ndarray, "batch seq num_kv_heads head_dim"]
    value: Float[np.ndarray, "batch seq num_kv_heads value_dim"]
    dout: Float[np.ndarray, "batch seq num_query_heads value_dim"]
    dlse: Float32[np.ndarray, "batch seq num_query_heads"]
    sinks: Float32[np.ndarray, " num_query_heads"] | None
    segment_ids: Int32[np.ndarray, "batch seq"] | None


def inputs_of(case: Case) -> Inputs:
    """All arrays of a case."""
    problem = case.problem
    batch_rows, positions = np.arange(problem.batch), np.arange(problem.seq_len)

    def whole(tensor: str) -> np.ndarray:
        return rows_of(case, tensor, batch_rows, positions)

    key = whole("key")
    return Inputs(
        query=whole("query"),
        key=key,
        value=key if problem.shared_kv else whole("value"),
        dout=whole("dout"),
        dlse=whole("dlse"),
        sinks=_read_only(draw_sinks(case).astype(np.float32)) if problem.sinks else None,
        segment_ids=whole("segment_ids") if problem.segments else None,
    )


def rows_of(
    case: Case,
    tensor: str,
    batch_rows: Sequence[int] | np.ndarray,
    positions: Sequence[int] | np.ndarray,
    heads: slice = slice(None),
) -> Shaped[np.ndarray, "batch_rows positions ..."]:
    """The same values as `inputs_of`, for some batch rows, positions and heads only: what one shard of a million tokens
    needs. Segment ids have no heads.

    Raises:
        ValueError: `tensor` is none of ROW_TENSORS, or segment_ids of a problem without segments; a row or position is
            out of range.
    """
    problem = case.problem
    if tensor not in ROW_TENSORS:
        raise ValueError(f"tensor must be one of {', '.join(ROW_TENSORS)}, got {tensor!r}")
    rows = _indices("batch_rows", batch_rows, problem.batch)
    columns = _indices("positions", positions, problem.seq_len)
    if tensor == "segment_ids":
        if not problem.segments:
            raise ValueError("tensor must not be segment_ids of a problem with segments=false")
        return _read_only(segment_id_rows(case, rows, columns))
    if tensor == "value" and problem.shared_kv:
        tensor = "key"
    values = draw_rows(case, tensor, rows, columns, heads)
    return _read_only(round_to(values, "float32" if tensor == "dlse" else problem.dtype))


@functools.lru_cache(maxsize=64)
def redraw(case: Case, index: int) -> Case:
    """The same problem with other data: draw 0 is the case itself, draw k >= 1 has another seed and other documents.

    A compiled program must be right on several draws without being traced anew. Padding stays where the problem has a
    padding id, with other lengths; every other segment id is drawn.
    """
    if index == 0:
        return case
    words = philox_words((index, 0, 0, 0), (case.seed, STREAMS["redraw"]))
    redrawn = case.replace(seed=int(words[0]))
    if not case.problem.segments:
        return redrawn
    return redrawn.replace(documents=redrawn_documents(redrawn))


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values in `dtype`, each rounded once, to nearest even.

    bfloat16 is rounded here rather than by a cast, which may go through float32 and round twice.
    """
    if dtype != "bfloat16":
        return values.astype(dtype, order="C")
    # A float64 has 52 bits of mantissa, a bfloat16 has 7; both exponents cover every value drawn.
    dropped = np.uint64(52 - 7)
    bits = values.view(np.uint64)
    last_kept = (bits >> dropped) & np.uint64(1)
    half_less_one = np.uint64(2 ** (52 - 7 - 1) - 1)
    rounded = ((bits + half_less_one + last_kept) >> dropped) << dropped
    return rounded.view(np.float64).astype(ml_dtypes.bfloat16, order="C")


def _indices(name: str, indices: ArrayLike, bound: int) -> np.ndarray:
    array = np.asarray(indices, dtype=np.int64)
    if array.ndim != 1 or (array.size and (array.min() < 0 or array.max() >= bound)):
        raise ValueError(f"{name} must be a list of integers from 0 to {bound - 1}, got {indices!r}")
    return array


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
