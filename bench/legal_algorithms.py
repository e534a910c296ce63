"""An enumerated zoo of legal attention algorithms in NumPy float32 and bfloat16: what the budget must let pass.

Every member computes the same mathematics with other roundings: block sizes, base of the exponential, what is rounded
to bfloat16, where delta comes from, order of summation, sums over heads and ranks. bench/calibrate_budget.py uses it to
choose the budget's constants and tests/oracle/test_budget_legal.py to hold them. Imports neither JAX nor the oracle.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

LOG2_E = np.float32(1.4426950408889634)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to compute attention and its gradients with float32 sums."""

    dtype: str = "float32"  # of inputs and outputs: "float32" or "bfloat16"
    key_block: int | None = None  # online softmax over blocks of keys; None = all keys at once
    base_two: bool = False  # exp2(logits * log2(e)) instead of exp(logits)
    rounded_probabilities: bool = False  # to bfloat16 before p.v and p.dout; dlogits before dlogits.key and .query
    normalised_first: bool = False  # p is divided by the denominator before it is rounded and multiplied by v
    rounded_dprobabilities: bool = False  # dout.v is stored in bfloat16, as automatic differentiation does
    delta: str = "out"  # sum of dout * "out" (as stored) | of dout * "accumulator" (before it is stored) | of "p" * dp
    rounded_delta: bool = False  # delta is stored in bfloat16
    order: str = "blas"  # of every sum over keys, queries and dims: "blas", "sequential", "reversed", "lanes"
    ranks: int = 1  # dkey and dvalue are summed over this many runs of queries first, then over the runs
    rounded_heads: bool = False  # dkey and dvalue of each query head are rounded to `dtype` before the group's sum
    prescaled_query: bool = False  # query * scale is rounded to `dtype` before the first matmul
    rounded_logits: bool = False  # logits are stored in bfloat16
    rounded_partials: bool = False  # what each of `ranks` runs of keys or queries contributes is stored in `dtype`
    matmul_passes: int = 6  # float32 matmuls as 1 or 3 bfloat16 passes, or 6 (exact products)


class Problem(NamedTuple):
    """One batch row. Float arrays hold values of the algorithm's dtype."""

    query: np.ndarray  # [query_heads, seq, head_dim]
    key: np.ndarray  # [kv_heads, seq, head_dim]
    value: np.ndarray  # [kv_heads, seq, value_dim]
    dout: np.ndarray  # [query_heads, seq, value_dim]
    dlse: np.ndarray  # [query_heads, seq]
    visible: np.ndarray  # [query, key]
    sinks: np.ndarray | None  # [query_heads]
    attn_logits_soft_cap: float | None
    scale: float


class Computed(NamedTuple):
    """What the algorithm returns, in its dtype (lse and dsinks float32)."""

    out: np.ndarray  # [query_heads, seq, value_dim]
    lse: np.ndarray  # [query_heads, seq]
    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dsinks: np.ndarray | None


def compute(algorithm: Algorithm, problem: Problem) -> Computed:
    """Run one member of the zoo."""
    group = problem.query.shape[0] // problem.key.shape[0]
    heads = [_head(algorithm, problem, head, head // group) for head in range(problem.query.shape[0])]
    out, lse, dquery, dkey, dvalue, dsinks = (np.stack(tensor) for tensor in zip(*heads, strict=True))
    return Computed(
        out=_stored(out, algorithm.dtype),
        lse=lse,
        dquery=_stored(dquery, algorithm.dtype),
        dkey=_group_sum(algorithm, dkey, group),
        dvalue=_group_sum(algorithm, dvalue, group),
        dsinks=None if problem.sinks is None else dsinks,
    )


def zoo(dtype: str) -> Iterator[Algorithm]:
    """The members that need no declaration beyond their dtype."""
    rounded = (False, True) if dtype == "bfloat16" else (False,)
    for key_block, base_two, delta in itertools.product((None, 16, 128), (False, True), ("out", "accumulator", "p")):
        for rounded_probabilities in rounded:
            yield Algorithm(dtype, key_block, base_two, rounded_probabilities, delta=delta)
    for order, ranks in itertools.product(("blas", "sequential", "reversed", "lanes"), (1, 8)):
        yield Algorithm(dtype, rounded_probabilities=rounded[-1], order=order, ranks=ranks)
    if dtype == "bfloat16":
        for normalised_first, rounded_dprobabilities, rounded_delta, rounded_heads in itertools.product(
            (False, True), repeat=4
        ):
            yield Algorithm(
                dtype,
                rounded_probabilities=True,
                normalised_first=normalised_first,
                rounded_dprobabilities=rounded_dprobabilities,
                rounded_delta=rounded_delta,
                rounded_heads=rounded_heads,
                ranks=4,
            )


def declared_zoo() -> Iterator[Algorithm]:
    """The members whose numerics an implementation must declare (oracle.budget.Precision)."""
    yield Algorithm("bfloat16", rounded_probabilities=True, prescaled_query=True)
    yield Algorithm("bfloat16", rounded_probabilities=True, prescaled_query=True, base_two=True, key_block=128)
    yield Algorithm("bfloat16", rounded_probabilities=True, rounded_logits=True)
    for ranks, prescaled_query in itertools.product((2, 5, 16), (False, True)):
        yield Algorithm(
            "bfloat16",
            rounded_probabilities=True,
            ranks=ranks,
            prescaled_query=prescaled_query,
            rounded_partials=True,
            rounded_heads=True,
        )
    yield Algorithm("float32", rounded_probabilities=True)
    yield Algorithm("float32", prescaled_query=True)
    for passes, delta in itertools.product((1, 3), ("out", "p")):
        yield Algorithm("float32", matmul_passes=passes, delta=delta)


def _head(algorithm: Algorithm, problem: Problem, head: int, kv_head: int) -> tuple[np.ndarray, ...]:
    """One query head: out, lse, dquery, dkey, dvalue, dsinks, all float32 and not stored yet."""
    query, key = problem.query[head].astype(np.float32), problem.key[kv_head].astype(np.float32)
    value, dout = problem.value[kv_head].astype(np.float32), problem.dout[head].astype(np.float32)
    sink = np.float32(-np.inf) if problem.sinks is None else np.float32(problem.sinks[head])
    factor = query
    if algorithm.prescaled_query:
        factor = _stored(query * np.float32(problem.scale), algorithm.dtype).astype(np.float32)
    logits, slope = _logits(algorithm, problem, factor, key)
    accumulator, lse = _merged_forward(algorithm, logits, value, sink)
    out = _stored(accumulator, algorithm.dtype).astype(np.float32)

    weights = _exp(algorithm, logits - np.where(np.isneginf(lse), np.float32(0), lse)[:, None])
    dweights = _matmul(algorithm, dout, value.T)
    if algorithm.rounded_dprobabilities:
        dweights = _bfloat16(dweights)
    delta = {
        "out": (dout * out).sum(axis=-1),
        "accumulator": (dout * accumulator).sum(axis=-1),
        "p": (weights * dweights).sum(axis=-1),
    }[algorithm.delta]
    if algorithm.rounded_delta:
        delta = _bfloat16(delta)
    row = problem.dlse[head].astype(np.float32) - delta
    dlogits = _factor(algorithm, weights * (dweights + row[:, None]) * slope)
    weights = _factor(algorithm, weights)
    sink_share = np.exp(sink - np.where(np.isneginf(lse), np.float32(0), lse))
    scale = np.float32(1.0 if algorithm.prescaled_query else problem.scale)
    return (
        accumulator,
        lse,
        _rank_sum(algorithm, dlogits.T, key, algorithm.ranks if algorithm.rounded_partials else 1)
        * np.float32(problem.scale),
        _rank_sum(algorithm, dlogits, factor, algorithm.ranks) * scale,
        _rank_sum(algorithm, weights, dout, algorithm.ranks),
        (sink_share * row).sum(dtype=np.float32),
    )


def _logits(
    algorithm: Algorithm, problem: Problem, query: np.ndarray, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits after the cap, -inf where hidden; and the cap's slope."""
    logits = _matmul(algorithm, query, key.T)
    if not algorithm.prescaled_query:
        logits = logits * np.float32(problem.scale)
    if algorithm.rounded_logits:
        logits = _bfloat16(logits)
    slope = np.ones_like(logits)
    if problem.attn_logits_soft_cap is not None:
        cap = np.float32(problem.attn_logits_soft_cap)
        tanh = np.tanh(logits / cap)
        logits, slope = cap * tanh, 1 - tanh * tanh
    return np.where(problem.visible, logits, np.float32(-np.inf)), slope


def _merged_forward(
    algorithm: Algorithm, logits: np.ndarray, value: np.ndarray, sink: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """out before it is stored, and lse; where partial results are rounded, those of runs of keys, merged by lse."""
    if not algorithm.rounded_partials:
        return _forward(algorithm, logits, value, sink)
    no_sink = np.float32(-np.inf)
    parts = [
        _forward(algorithm, logits[:, run], value[run], no_sink if index else sink)
        for index, run in enumerate(np.array_split(np.arange(len(value)), algorithm.ranks))
    ]
    lse = np.logaddexp.reduce([part_lse for _, part_lse in parts], axis=0)
    finite_lse = np.where(np.isneginf(lse), np.float32(0), lse)
    shares = (np.exp(part_lse - finite_lse)[:, None] for _, part_lse in parts)
    outs = (_stored(part, algorithm.dtype).astype(np.float32) for part, _ in parts)
    return np.sum([out * part_share for out, part_share in zip(outs, shares, strict=True)], axis=0), lse


def _forward(
    algorithm: Algorithm, logits: np.ndarray, value: np.ndarray, sink: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Online softmax over blocks of keys: out before it is stored, and lse."""
    queries, keys = logits.shape
    block = algorithm.key_block or keys
    largest = np.full(queries, sink)
    total = np.where(np.isneginf(largest), np.float32(0), np.float32(1))
    accumulator = np.zeros((queries, value.shape[1]), np.float32)
    for start in range(0, keys, block):
        part = logits[:, start : start + block]
        new_largest = np.maximum(largest, part.max(axis=-1))
        shift = np.where(np.isneginf(new_largest), np.float32(0), new_largest)
        weights = _exp(algorithm, part - shift[:, None])
        rescale = _exp(algorithm, largest - shift)
        total = total * rescale + weights.sum(axis=-1)
        if algorithm.normalised_first and block == keys:
            weights = weights / np.where(total == 0, np.float32(1), total)[:, None]
        product = _matmul(algorithm, _factor(algorithm, weights), value[start : start + block])
        accumulator = accumulator * rescale[:, None] + product
        largest = new_largest
    denominator = np.where(total == 0, np.float32(1), total)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, np.float32(-np.inf), largest + np.log(denominator))
    is_divided = algorithm.normalised_first and block == keys
    return accumulator if is_divided else accumulator / denominator[:, None], lse


def _exp(algorithm: Algorithm, exponents: np.ndarray) -> np.ndarray:
    return np.exp2(exponents * LOG2_E) if algorithm.base_two else np.exp(exponents)


def _factor(algorithm: Algorithm, factor: np.ndarray) -> np.ndarray:
    return _bfloat16(factor) if algorithm.rounded_probabilities else factor


def _matmul(algorithm: Algorithm, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right, in the algorithm's order of summation and number of bfloat16 passes."""
    if algorithm.matmul_passes == 1:
        return _ordered_matmul(algorithm, _bfloat16(left), _bfloat16(right))
    if algorithm.matmul_passes == 3:
        left_high, right_high = _bfloat16(left), _bfloat16(right)
        left_low, right_low = _bfloat16(left - left_high), _bfloat16(right - right_high)
        small = _ordered_matmul(algorithm, left_low, right_high) + _ordered_matmul(algorithm, left_high, right_low)
        return small + _ordered_matmul(algorithm, left_high, right_high)
    return _ordered_matmul(algorithm, left, right)


def _ordered_matmul(algorithm: Algorithm, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if algorithm.order == "blas":
        return left @ right
    if algorithm.order == "reversed":
        left, right = left[:, ::-1], right[::-1]
    lanes = 8 if algorithm.order == "lanes" else 1
    sums = np.zeros((lanes, left.shape[0], right.shape[1]), np.float32)
    for inner in range(left.shape[1]):  # one addition after the other, as a kernel with `lanes` accumulators does
        sums[inner % lanes] += left[:, inner, None] * right[inner]
    return sums.sum(axis=0)


def _rank_sum(algorithm: Algorithm, cotangents: np.ndarray, rows: np.ndarray, ranks: int) -> np.ndarray:
    """cotangents.T @ rows, each rank's rows first."""
    runs = np.array_split(np.arange(len(rows)), ranks)
    parts = [_matmul(algorithm, cotangents[run].T, rows[run]) for run in runs]
    if algorithm.rounded_partials:
        parts = [_stored(part, algorithm.dtype).astype(np.float32) for part in parts]
    return np.stack(parts).sum(axis=0)


def _group_sum(algorithm: Algorithm, gradients: np.ndarray, group: int) -> np.ndarray:
    if algorithm.rounded_heads:
        gradients = _stored(gradients, algorithm.dtype).astype(np.float32)
    by_group = gradients.reshape(-1, group, *gradients.shape[1:])
    return _stored(by_group.sum(axis=1, dtype=np.float32), algorithm.dtype)


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _bfloat16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)
