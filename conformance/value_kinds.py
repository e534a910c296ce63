"""The kinds of values (`problem.VALUE_KINDS`): each turns random numbers into inputs that make some mistake visible.

Logits have the spread of their kind whatever the scale and head_dim: only the query's amplitude follows those.
May touch: problem, philox, NumPy. The arrays are made in inputs.py. Tests: tests/conformance/test_inputs.py.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64

from conformance.philox import philox_words, standard_values
from conformance.problem import Case

# Second word of the generator's key: one number a tensor (or use), never changed within a version of the case text.
STREAMS = {
    "query": 0,
    "key": 1,
    "value": 2,
    "dout": 3,
    "dlse": 4,
    "sinks": 5,
    "segment_ids": 6,
    "needles": 7,
    "needle_direction": 8,
    "redraw": 9,
    "documents": 10,
    "further_cases": 11,
    "codes": 12,
    "code_signs": 13,
    "poison": 14,
    "changed": 15,
    "sink_heads": 16,
    "identities": 17,
}

# Kinds whose values depend on the position, as the probabilities do: their rounding errors need not be independent of
# each other, so an allowance must add them up plainly.
STRUCTURED = frozenset({"rank_coded", "cancelling", "constant"})

# Standard deviation of the logits, by kind. `cancelling` is nearly uniform so that sums do cancel.
LOGIT_STD = {
    "plain": 1.0,
    "peaked": 8.0,
    "uniform": 2.0**-6,
    "needle": 1.0,
    "rank_coded": 1.0,
    "cancelling": 2.0**-3,
    "constant": 1.0,
    "huge": 1.0,
    "tiny": 1.0,
}
# exp(88.7) is the largest number of float32: a needle beyond it tells who exponentiates before the largest logit is
# subtracted. In bfloat16, where a query may be rounded after it is scaled, that logit would be allowed a fifth of one.
NEEDLE_LOGIT = {"float32": 96.0, "float64": 96.0, "bfloat16": 16.0}
# A sink as high as those needles would leave nothing of all other keys.
_SINK_BESIDE_NEEDLES = 16.0
NEEDLE_RATE = 1 / 8
LARGEST_SINK = 30.0
_AMPLITUDE = {"huge": 2.0**40, "tiny": 2.0**-40}

Rows = Float64[np.ndarray, "batch_rows positions heads features"]


def draw_rows(
    case: Case,
    tensor: str,
    batch_rows: Int64[np.ndarray, " batch_rows"],
    positions: Int64[np.ndarray, " positions"],
    heads: slice,
) -> Float64[np.ndarray, "batch_rows positions heads ..."]:
    """Rows of query, key, value, dout or dlse (which has no feature axis) before they are rounded to their dtype."""
    make = {"query": _query, "key": _key, "value": _value, "dout": _dout, "dlse": _dlse}[tensor]
    problem = case.problem
    count = problem.num_kv_heads if tensor in ("key", "value") else problem.num_query_heads
    return make(case, batch_rows[:, None, None], positions[None, :, None], np.arange(count)[heads])


def draw_sinks(case: Case) -> Float64[np.ndarray, " num_query_heads"]:
    """One logit a head: half comparable to a row's largest logit, a quarter well above, a quarter below."""
    heads = np.arange(case.problem.num_query_heads)
    draws = standard_values(2, (heads, 0, 0), (case.seed, STREAMS["sinks"]))
    # Quartiles of a standard normal variable.
    offsets = np.select([draws[:, 1] > 0.6745, draws[:, 1] < -0.6745], [4.0, -4.0], default=0.0)
    return np.clip(typical_largest_logit(case) + offsets + draws[:, 0] / 2, -LARGEST_SINK, LARGEST_SINK)


def typical_largest_logit(case: Case) -> float:
    """About the largest logit of a row, after the cap: 2.5 standard deviations, or a needle's in bfloat16."""
    cap = case.problem.attn_logits_soft_cap
    largest = _SINK_BESIDE_NEEDLES if case.values == "needle" else 2.5 * logit_std(case)
    if cap is None:
        return largest
    # The Padé approximant of tanh, exact to 2 % up to the argument 3, where it is 1: no libm function.
    ratio = min(largest / cap, 3.0)
    return cap * ratio * (27.0 + ratio * ratio) / (27.0 + 9.0 * ratio * ratio)


def logit_std(case: Case) -> float:
    """Standard deviation of the logits before the cap: with a cap, some lie beyond it and most do not."""
    std, cap = LOGIT_STD[case.values], case.problem.attn_logits_soft_cap
    return std if cap is None or std < 1.0 else min(0.75 * cap, std + 4.0)


def _query(case: Case, batch_rows: np.ndarray, positions: np.ndarray, heads: np.ndarray) -> Rows:
    problem = case.problem
    values = _standard(case, "query", (heads, positions, batch_rows), problem.head_dim)
    # scale · |query| · sqrt(head_dim) is the logits' standard deviation for keys of standard deviation 1.
    amplitude = logit_std(case)
    if problem.scale is not None:
        amplitude /= problem.scale * math.sqrt(problem.head_dim)
    if case.values == "needle":
        kv_heads = heads // (problem.num_query_heads // problem.num_kv_heads)
        values = (values + 2.0 * _needle_direction(case)[kv_heads]) * (1.0 / math.sqrt(5.0))
    return amplitude * values


def _key(case: Case, batch_rows: np.ndarray, positions: np.ndarray, heads: np.ndarray) -> Rows:
    problem = case.problem
    values = _standard(case, "key", (heads, positions, batch_rows), problem.head_dim)
    if case.values != "needle":
        return values
    # Queries lean on the direction with 2 / sqrt(5) of their amplitude, so this length makes the logit NEEDLE_LOGIT.
    length = NEEDLE_LOGIT[problem.dtype] / logit_std(case) * math.sqrt(5.0) / 2.0 / math.sqrt(problem.head_dim)
    needles = length * _needle_direction(case)[heads] + values / 2.0
    return np.where(_is_needle(case, heads, positions, batch_rows)[..., None], needles, values)


def _value(case: Case, batch_rows: np.ndarray, positions: np.ndarray, heads: np.ndarray) -> Rows:
    if case.values == "rank_coded":
        # Every head and batch row at its own magnitude, all of them exact in bfloat16.
        magnitude = 1.0 + (heads % 4) / 4.0 + (batch_rows % 2) / 8.0
        return magnitude[..., None] * _position_signs(case, heads, positions)
    return _cotangent_or_value(case, "value", heads, (batch_rows, positions))


def _dout(case: Case, batch_rows: np.ndarray, positions: np.ndarray, heads: np.ndarray) -> Rows:
    return _cotangent_or_value(case, "dout", heads, (batch_rows, positions))


def _dlse(
    case: Case, batch_rows: np.ndarray, positions: np.ndarray, heads: np.ndarray
) -> Float64[np.ndarray, "rows positions heads"]:
    # dlse stands beside dout · value in the gradient of the logits: at another magnitude one of them would not be seen.
    amplitude = _AMPLITUDE.get(case.values, 1.0)
    amplitude = amplitude if case.problem.shared_kv else amplitude * amplitude
    return amplitude * _standard(case, "dlse", (heads, positions, batch_rows), 1)[..., 0]


def _cotangent_or_value(case: Case, tensor: str, heads: np.ndarray, place: tuple[np.ndarray, np.ndarray]) -> Rows:
    """Rows of value or dout of the kinds that treat both alike."""
    batch_rows, positions = place
    if case.values == "constant":
        constant = _standard(case, tensor, (heads, 0, 0), case.problem.value_dim)
        return np.broadcast_to(constant, (*np.broadcast_shapes(batch_rows.shape, positions.shape)[:2], *constant.shape))
    values = _standard(case, tensor, (heads, positions, batch_rows), case.problem.value_dim)
    if case.values == "cancelling":
        return _position_signs(case, heads, positions) * (1.0 + values / 16.0)
    return _AMPLITUDE.get(case.values, 1.0) * values


def _standard(case: Case, tensor: str, counter: tuple, num_features: int) -> np.ndarray:
    """Values of standard deviation 1; `counter` is (head, position, batch row)."""
    return standard_values(num_features, counter, (case.seed, STREAMS[tensor]))


def _position_signs(case: Case, heads: np.ndarray, positions: np.ndarray) -> Float64[np.ndarray, "1 positions heads f"]:
    """±1 by one bit of the position, another bit for each feature and head.

    Even features take bits from the lowest up (which tell neighbours apart), odd ones from the highest down (chunks).
    """
    num_bits = max(1, (case.problem.seq_len - 1).bit_length())
    features = heads[:, None] + np.arange(case.problem.value_dim)
    from_lowest = features // 2 % num_bits
    bits = np.where(features % 2 == 0, from_lowest, num_bits - 1 - from_lowest)
    return 1.0 - 2.0 * ((positions[..., None] >> bits) & 1)


def _needle_direction(case: Case) -> Float64[np.ndarray, "num_kv_heads head_dim"]:
    """±1 for each feature, another direction for each kv head: a query that reads the wrong head finds no needle."""
    heads = np.arange(case.problem.num_kv_heads)
    values = _standard(case, "needle_direction", (heads, 0, 0), case.problem.head_dim)
    return np.where(values < 0, -1.0, 1.0)


def _is_needle(case: Case, heads: np.ndarray, positions: np.ndarray, batch_rows: np.ndarray) -> np.ndarray:
    """bool [batch rows, positions, kv heads]: about one key in eight.

    Each needle is the last visible key of one query and just outside for the next, so a window that is off by one, or
    a halo that is short by one row, changes the answer altogether.
    """
    words = philox_words((0, heads, positions, batch_rows), (case.seed, STREAMS["needles"]))
    return words[0] < np.uint32(NEEDLE_RATE * 2**32)
