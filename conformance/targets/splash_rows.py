"""Rows and masks as splash attention takes them: heads before rows, padded to whole blocks, the query scaled.

Shared by the adapters of JAX's and tokamax's splash attention. May touch: JAX.
Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from conformance.problem import Problem
from conformance.targets.gathered import in_window

BLOCK = 128
"""Rows of a block: the fewest that both libraries take."""


def padded_rows(array: jax.Array, axis: int) -> jax.Array:
    """The array with zeros after its rows, up to a whole number of blocks."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % BLOCK)
    return jnp.pad(array, widths)


def head_major(array: jax.Array) -> jax.Array:
    """[batch, rows, heads, dim] as [batch, heads, padded rows, dim]."""
    return padded_rows(jnp.swapaxes(array, 1, 2), axis=2)


def scaled_query(query: jax.Array, problem: Problem) -> jax.Array:
    """The query times the scale, in the query's dtype: splash attention knows no scale."""
    scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
    return query * jnp.asarray(scale, query.dtype)


def padded_window(problem: Problem, *, pad_each_rank_of_keys: bool) -> np.ndarray:
    """bool [queries, keys]: the window, in layout order, the rows of each rank padded to whole blocks.

    Gathered keys are padded once, at their end; keys that stay on their ranks, on each. Padding is in no window.
    """
    positions = problem.positions()
    ranks = problem.context_parallelism * problem.ulysses_parallelism
    queries = _padded(positions, ranks)
    keys = _padded(positions, ranks if pad_each_rank_of_keys else 1)
    inside = in_window(problem, queries[:, None] - keys[None, :])
    return inside & (queries >= 0)[:, None] & (keys >= 0)[None, :]


def _padded(positions: np.ndarray, parts: int) -> np.ndarray:
    """The positions of each part followed by -1 up to whole blocks."""
    rows = positions.reshape(parts, -1)
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)), constant_values=-1).reshape(-1)
