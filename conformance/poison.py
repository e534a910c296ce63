"""Which rows are poisoned so that many others must not notice, and inputs with +-1e30 planted there.

A pure function of the case. Every batch row and kv head has poisoned rows of its own, so that one that leaks into
another's is seen. May touch: problem, philox, inputs, the oracle's mask; never JAX.
Tests: tests/conformance/test_variants.py.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
from jaxtyping import Bool

import oracle.mask
from conformance.inputs import Inputs, round_to, rows_of
from conformance.philox import Draws, philox_words
from conformance.problem import Case
from conformance.value_kinds import STREAMS

POISON = 1e30
"""Finite, as are its products with ordinary numbers: 0 · inf would reach every row of a right kernel as NaN."""

_LARGE_VALUES = 2.0**41  # `huge` values and cotangents are about 2^40: their products with the poison stay finite too
_CANDIDATES = 6

Poisoned = Bool[np.ndarray, "batch seq num_kv_heads"]


def visible(case: Case) -> Bool[np.ndarray, "batch query key"]:
    """Who sees whom in a case, in position order; one batch row where all are alike."""
    problem = case.problem
    rows, positions = np.arange(problem.batch), np.arange(problem.seq_len)
    return oracle.mask.visible(
        problem.seq_len,
        window=problem.window,
        segment_ids=rows_of(case, "segment_ids", rows, positions) if problem.segments else None,
        padding_segment_id=problem.padding,
    )


@lru_cache(maxsize=4)
def poisoned_keys(case: Case) -> Poisoned:
    """Positions whose key and value are poisoned; a query that sees none of them must not notice."""
    return _chosen(case, visible(case), 0)


@lru_cache(maxsize=4)
def poisoned_queries(case: Case) -> Poisoned:
    """Positions whose queries and cotangents are poisoned, in every query head of a kv head; a key that none of them
    sees must not notice.
    """
    return _chosen(case, visible(case).swapaxes(1, 2), 1)


def touched(poisoned: Poisoned, sees: Bool[np.ndarray, "batch row poisoned_row"]) -> Poisoned:
    """Rows that see a poisoned row of their own batch row and kv head."""
    seen = sees.astype(np.float32) @ poisoned.astype(np.float32)
    return seen > 0


def with_poisoned_keys(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with +-1e30 in key and value at `poisoned_keys`."""
    where = poisoned_keys(case)
    key = _planted(case, inputs.key, where, 0)
    value = key if inputs.value is inputs.key else _planted(case, inputs.value, where, 1)
    return dataclasses.replace(inputs, key=key, value=value)


def with_poisoned_queries(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with +-1e30 in query, dout and dlse at `poisoned_queries`."""
    group = case.problem.num_query_heads // case.problem.num_kv_heads
    where = np.repeat(poisoned_queries(case), group, axis=2)
    return dataclasses.replace(
        inputs,
        query=_planted(case, inputs.query, where, 2),
        dout=_planted(case, inputs.dout, where, 3),
        dlse=_planted(case, inputs.dlse[..., None], where, 4)[..., 0],
    )


def _chosen(case: Case, sees: np.ndarray, stream: int) -> Poisoned:
    """For each batch row and kv head the best of some candidates, and padding always.

    The best has the most pairs of an untouched row and a poisoned one. Where every candidate touches everything, every
    second batch row and kv head is poisoned altogether, and the others not at all.
    """
    problem = case.problem
    poisoned = np.zeros((problem.batch, problem.seq_len, problem.num_kv_heads), bool)
    draws = Draws(case.seed, STREAMS["poison"], stream)
    for row in range(problem.batch):
        row_sees = sees[row % len(sees)].astype(np.float32)
        for head in range(problem.num_kv_heads):
            candidates = np.stack([_candidate(draws, number, problem.seq_len) for number in range(_CANDIDATES)], axis=1)
            untouched = (row_sees @ candidates.astype(np.float32) == 0).sum(axis=0)
            pairs = untouched * candidates.sum(axis=0)
            all_or_nothing = np.full(problem.seq_len, (row + head) % 2 == 0)
            poisoned[row, :, head] = candidates[:, pairs.argmax()] if pairs.any() else all_or_nothing
    return poisoned | _is_padding(case)[..., None]


def _candidate(draws: Draws, number: int, seq_len: int) -> Bool[np.ndarray, " seq"]:
    """The first positions, the last ones, or a run somewhere: their length is drawn."""
    length = 1 + draws.below(max(1, seq_len // 2))
    start = {0: 0, 1: seq_len - length}.get(number, draws.below(seq_len))
    positions = np.arange(seq_len)
    return (positions >= start) & (positions < start + length)


def _is_padding(case: Case) -> Bool[np.ndarray, "batch seq"]:
    problem = case.problem
    if problem.padding is None:
        return np.zeros((problem.batch, problem.seq_len), bool)
    ids = rows_of(case, "segment_ids", np.arange(problem.batch), np.arange(problem.seq_len))
    return ids == problem.padding


def _planted(case: Case, array: np.ndarray, where: np.ndarray, stream: int) -> np.ndarray:
    """The array with +-poison in every feature of the rows `where`, the sign at random."""
    size = POISON / _LARGE_VALUES if case.values == "huge" else POISON
    features = np.arange(array.shape[-1])
    heads, rows = np.arange(array.shape[2])[:, None], np.arange(array.shape[0])[:, None, None, None]
    words = philox_words((stream, features // 32, heads, rows), (case.seed, STREAMS["poison"]))[0]
    signs = np.where((words >> (features % 32).astype(np.uint32)) & np.uint32(1), -1.0, 1.0)
    return np.where(where[..., None], round_to(size * signs, array.dtype.name), array)
