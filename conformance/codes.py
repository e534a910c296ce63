"""Inputs from which a mask can be read: logits that are equal for all visible keys, and keys that carry a code.

`coded_inputs` reads the masks of out, dquery, dkey and dvalue in one run; `loud_inputs` shows what a finite mask value
lets through. May touch: problem, philox, inputs, NumPy; never JAX. Tests: tests/conformance/test_variants.py.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64

from conformance.inputs import Inputs, round_to, rows_of
from conformance.philox import philox_words
from conformance.problem import Case, Problem
from conformance.value_kinds import STREAMS
from oracle.mask import most_visible

LOUD_LOGIT = 300.0
"""Beyond float32's exp on both sides: exp(300) is no float32, and exp(-300) is zero."""
_SILENT_QUERIES = 1 / 8


def coded_inputs(case: Case) -> Inputs:
    """Every visible key counts alike, and says by its code which it is.

    Queries lie in the first half of the features and keys in the second, so that every logit is exactly 0 and
    p = 1 / visible keys (a sink is 0, one more term). Keys, values and queries are one-hot at a class, cotangents of
    out are +-(1 to 2) at random, those of lse 0. So out counts the visible keys of each class, dquery adds up what each
    class of keys got, dkey what each class of queries gave, and dvalue is the sum of its readers' cotangents / visible.
    Under `shared_kv` dout lies in the second half as well: the first half of dkey is then key's, the second value's.
    """
    problem = case.problem
    half = problem.head_dim // 2
    key = _one_hot(_classes(case, 0, problem.num_kv_heads, problem.head_dim - half), half, problem.head_dim)
    query = _one_hot(_classes(case, 1, problem.num_query_heads, half), 0, problem.head_dim)
    dout = _random_signs(case, problem)
    if problem.shared_kv:
        dout[..., :half] = 0.0
    return _inputs(case, query, key, _coded_value(case), dout)


def loud_inputs(case: Case) -> Inputs:
    """Few keys at logit +300 and nearly all others at -300 (or as near as a soft cap lets them be), for every query.

    About half of the rows see no loud key: there the largest logit that the mask has to hide lies 600 above the largest
    that it has to show. As few tokens have a key that is zero in every feature and head, and some a query: whoever
    knows padding by that takes them for it. They are tokens like any other, and their logits are 0.
    """
    problem = case.problem
    scale = problem.scale if problem.scale is not None else 1.0 / math.sqrt(problem.head_dim)
    query = np.full(_shape(problem, problem.num_query_heads, problem.head_dim), LOUD_LOGIT / scale)
    code = _one_hot(_classes(case, 0, problem.num_kv_heads, problem.head_dim), 0, problem.head_dim)
    loud = _is_loud(case)
    key = np.where(loud[..., None], code, -code)
    key[_is_silent(case, 4, _few(problem)) & ~loud.any(axis=2)] = 0.0
    query[_is_silent(case, 5, _SILENT_QUERIES)] = 0.0
    return _inputs(case, query, key, _coded_value(case), _random_signs(case, problem))


def _inputs(case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray, dout: np.ndarray) -> Inputs:
    """The arrays in the problem's dtype, sinks and the cotangent of lse 0, and the documents of the case."""
    problem = case.problem
    rows, positions = np.arange(problem.batch), np.arange(problem.seq_len)
    stored_key = round_to(key, problem.dtype)
    return Inputs(
        query=round_to(query, problem.dtype),
        key=stored_key,
        value=stored_key if problem.shared_kv else round_to(value, problem.dtype),
        dout=round_to(dout, problem.dtype),
        dlse=np.zeros((problem.batch, problem.seq_len, problem.num_query_heads), np.float32),
        sinks=np.zeros(problem.num_query_heads, np.float32) if problem.sinks else None,
        segment_ids=rows_of(case, "segment_ids", rows, positions) if problem.segments else None,
    )


def _shape(problem: Problem, heads: int, features: int) -> tuple[int, int, int, int]:
    return problem.batch, problem.seq_len, heads, features


def _coded_value(case: Case) -> Float64[np.ndarray, "batch seq num_kv_heads value_dim"]:
    value_dim = case.problem.value_dim
    return _one_hot(_classes(case, 2, case.problem.num_kv_heads, value_dim), 0, value_dim)


def _classes(case: Case, stream: int, heads: int, num_classes: int) -> Int64[np.ndarray, "batch seq heads"]:
    """A random class for each position: every run of `num_classes` positions is a permutation of all of them.

    So keys in a row have different classes (a row that sees keys of one class alone tells nothing of dquery and dkey),
    and yet a class says nothing of a position far away, as `position % num_classes` would. -1: there are no classes.
    """
    problem = case.problem
    if num_classes == 0:
        return np.full((problem.batch, problem.seq_len, heads), -1)
    runs = -(-problem.seq_len // num_classes)
    counter = (
        np.arange(runs * num_classes)[:, None],
        np.arange(heads),
        np.arange(problem.batch)[:, None, None],
        stream,
    )
    words = philox_words(counter, (case.seed, STREAMS["codes"]))[0]
    classes = np.argsort(words.reshape(problem.batch, runs, num_classes, heads), axis=2)
    for run in range(1, runs if num_classes > 2 else 0):
        first, second, before = classes[:, run, 0], classes[:, run, 1], classes[:, run - 1, -1]
        swapped = np.where(first == before, second, first), np.where(first == before, first, second)
        classes[:, run, 0], classes[:, run, 1] = swapped
    return classes.reshape(problem.batch, runs * num_classes, heads)[:, : problem.seq_len]


def _one_hot(
    classes: Int64[np.ndarray, "batch seq heads"], first_feature: int, features: int
) -> Float64[np.ndarray, "batch seq heads features"]:
    return (classes[..., None] + first_feature == np.arange(features)).astype(np.float64) * (classes[..., None] >= 0)


def _random_signs(case: Case, problem: Problem) -> Float64[np.ndarray, "batch seq num_query_heads value_dim"]:
    """+-(1 + m / 8) with m from 0 to 7: never 0, and exact in every dtype. Four bits an element."""
    per_counter = 4 * 32 // 4
    counters = np.arange(-(-problem.value_dim // per_counter))
    heads, rows = np.arange(problem.num_query_heads)[:, None], np.arange(problem.batch)[:, None, None, None]
    positions = np.arange(problem.seq_len)[:, None, None]
    words = np.stack(philox_words((counters, positions, heads, rows), (case.seed, STREAMS["code_signs"])), axis=-1)
    nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & np.uint32(15)
    flat = nibbles.reshape(*words.shape[:3], -1)[..., : problem.value_dim].astype(np.float64)
    return np.where(flat < 8, 1.0, -1.0) * (1.0 + flat % 8 / 8.0)


def _is_loud(case: Case) -> np.ndarray:
    """bool [batch, seq, kv heads]: so few that about half of the queries see none; at least the last position's."""
    problem = case.problem
    counter = (np.arange(problem.seq_len)[:, None], np.arange(problem.num_kv_heads))
    words = philox_words((*counter, np.arange(problem.batch)[:, None, None], 3), (case.seed, STREAMS["codes"]))[0]
    loud = words < np.uint32(2**32 * _few(problem))
    loud[:, -1] = True
    return loud


def _is_silent(case: Case, stream: int, rate: float) -> np.ndarray:
    """bool [batch, seq]: tokens whose row is zero."""
    rows = np.arange(case.problem.batch)[:, None]
    words = philox_words((np.arange(case.problem.seq_len), 0, rows, stream), (case.seed, STREAMS["codes"]))[0]
    return words < np.uint32(2**32 * rate)


def _few(problem: Problem) -> float:
    """So many of all keys that about half of the queries see one."""
    return 0.7 / most_visible(problem.window, problem.seq_len)
