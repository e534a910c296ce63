"""What a target's own arrays say of gradients of keys that are too dear to probe: sums that must be equal.

Of a large case under a window without bound, or of more than 8,192 keys. The inputs are made block by block; nothing of
the sequence is formed beside what the target gave. May touch: the oracle and the inputs' rows; never JAX.
Tests: tests/conformance/test_key_identities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from conformance.inputs import STRUCTURED, rows_of
from conformance.philox import Draws
from conformance.probed_answers import PROBE_BEYOND_PAIRS, outline_of, visible_pairs
from conformance.problem import Case, Problem
from conformance.value_kinds import STREAMS
from oracle import places
from oracle.budget import Precision
from oracle.identities import Identity, KeySide, QuerySide, identities

# Numbers of query and dout that are made for an answer, unless one kv head has more: a minute or two of a processor.
NUMBERS = 2**29
ROWS = 4096

Rows = Callable[[str, int, slice, slice], np.ndarray]
"""(tensor, batch row, indices in the layout, heads) to rows [rows, heads, ...]."""


def has_unprobed_keys(case: Case) -> bool:
    """Whether most keys have more readers than a probe can afford, and roundings are independent of each other."""
    return _leaves_keys_out(case) and case.values not in STRUCTURED


def leaves_keys_unseen(case: Case, in_parts: bool) -> bool:
    """Whether nothing is known of most keys' gradients: too dear to probe, and no sum of all is at hand.

    `in_parts`: every host holds rows of its own.
    """
    is_asked = has_unprobed_keys(case) and not in_parts
    return _leaves_keys_out(case) and visible_pairs(case) > PROBE_BEYOND_PAIRS and not is_asked


def _leaves_keys_out(case: Case) -> bool:
    return places.leaves_keys_out(case.problem.window, case.problem.seq_len)


def chosen_kv_heads(case: Case) -> tuple[tuple[int, int], ...]:
    """(batch row, kv head) of those that are looked at: all, or a sample that the seed decides."""
    problem = case.problem
    group = problem.num_query_heads // problem.num_kv_heads
    everything = list(np.ndindex(problem.batch, problem.num_kv_heads))
    count = max(1, NUMBERS // (problem.seq_len * group * (problem.head_dim + problem.value_dim)))
    return tuple(sorted(Draws(case.seed, STREAMS["identities"]).sample(everything, min(count, len(everything)))))


def key_identities(
    case: Case, arrays: Mapping[str, np.ndarray], with_lse: bool, precision: Precision
) -> dict[tuple[str, int, int], Identity]:
    """By (tensor, batch row, kv head). `arrays` are out, dquery, dkey and dvalue of one call, in layout order."""
    problem, outline = case.problem, outline_of(case)
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    found: dict[tuple[str, int, int], Identity] = {}
    for row, kv_head in chosen_kv_heads(case):
        queries, keys = _sides(case, arrays, row, kv_head, with_lse)
        both = identities(queries, keys, outline, scale=scale, precision=precision)
        if problem.shared_kv:  # one array was both, and gets both gradients
            dkey, dvalue = both["dkey"], both["dvalue"]
            both = {
                "dkey": Identity(dkey.expected + dvalue.expected, dkey.got, dkey.allowance + dvalue.allowance),
            }
        found |= {(tensor, row, kv_head): identity for tensor, identity in both.items()}
    return found


def _sides(
    case: Case, arrays: Mapping[str, np.ndarray], row: int, kv_head: int, with_lse: bool
) -> tuple[QuerySide, KeySide]:
    problem = case.problem
    group = problem.num_query_heads // problem.num_kv_heads
    heads, kv_heads = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    queries: QuerySide | None = None
    keys: KeySide | None = None
    for start in range(0, problem.seq_len, ROWS):
        indices = slice(start, start + ROWS)
        positions = problem.positions()[indices]
        is_token = _is_token(case, row, positions)

        def given(
            tensor: str, heads: slice, positions: np.ndarray = positions, kept: np.ndarray = is_token
        ) -> np.ndarray:
            rows = rows_of(case, tensor, [row], positions, heads)[0]
            return _flat(rows[kept])

        def returned(tensor: str, heads: slice, indices: slice = indices, kept: np.ndarray = is_token) -> np.ndarray:
            return _flat(arrays[tensor][row, indices, heads][kept])

        dlse = given("dlse", heads)[:, 0] if with_lse else np.zeros(int(is_token.sum()) * group)
        of_queries = QuerySide.of(
            given("query", heads), returned("dquery", heads), given("dout", heads), returned("out", heads), dlse
        )
        dkey = returned("dkey", kv_heads)
        dvalue = dkey if problem.shared_kv else returned("dvalue", kv_heads)
        of_keys = KeySide.of(given("key", kv_heads), dkey, given("value", kv_heads), dvalue)
        queries = of_queries if queries is None else queries.plus(of_queries)
        keys = of_keys if keys is None else keys.plus(of_keys)
    assert queries is not None, "a sequence has positions"
    assert keys is not None, "a sequence has positions"
    return queries, keys


def _is_token(case: Case, row: int, positions: np.ndarray) -> np.ndarray:
    problem: Problem = case.problem
    if problem.padding is None:
        return np.ones(len(positions), bool)
    return rows_of(case, "segment_ids", [row], positions)[0] != problem.padding


def _flat(rows: np.ndarray) -> np.ndarray:
    """[rows, heads, dim] as float64 [rows * heads, dim]; dlse, which has no dim, gets one."""
    rows = rows.astype(np.float64)
    return rows.reshape(-1, rows.shape[2]) if rows.ndim == 3 else rows.reshape(-1, 1)
