"""What a strategy may send, in one call and in its gradient: kinds of collectives, mesh axes, bytes.

Upper bounds, worked out here from the positions that a window reaches and from shapes alone; the implementations' own
plans are not looked at. May touch: problem. Tests: tests/conformance/test_checks_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conformance.problem import Problem

_INT32 = 4
_FLOAT32 = 4
_ITEMSIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
_SEQUENCE = ("context", "ulysses")
OF_ROUNDED = "of what was rounded"
"""How a sum in float32 of partial results that were rounded before is told: a target may declare that it does so."""


@dataclass(frozen=True)
class Allowance:
    """`bytes` that may reach one device by these kinds of collective, between devices along these axes alone."""

    what: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    bytes: float


@dataclass(frozen=True)
class WirePlan:
    """What one call may send, and what the backward of one call may send."""

    forward: tuple[Allowance, ...]
    backward: tuple[Allowance, ...]


@dataclass(frozen=True)
class _Shape:
    """One device's share of a problem. `kv_heads`: those it holds, or works with after heads were exchanged."""

    batch: int
    rows: int
    query_heads: int
    kv_heads: int
    dims: int
    ids: int
    wide: int


def wire_plan(problem: Problem, communication: str, halo_row_multiple: int = 1, *, widened: bool = False) -> WirePlan:
    """The plan of a strategy ("halo", "all_gather", "ring", "ulysses", "usp").

    A halo's rows are counted exactly: those that the busiest rank's queries see and it does not hold, each once, in the
    inputs' dtype (float32 if `widened`: as XLA's CPU compiler sends bfloat16); their gradients come home in float32.
    A ring's keys may pass as many ranks as the window makes them, and one more. The other strategies may send
    everything once in float32, positions and segment ids beside it.
    """
    shape = _shape_of(problem)
    forward, backward = {
        "halo": lambda: _halo(problem, shape, halo_row_multiple, widened),
        "all_gather": lambda: _all_gather(problem, shape),
        "ring": lambda: _ring(problem, shape, _SEQUENCE),
        "ulysses": lambda: _head_exchange(problem, shape, problem.context_parallelism, _SEQUENCE),
        "usp": lambda: _ring(problem, shape, ("context",)),
    }[communication]()
    if problem.ulysses_parallelism > 1:
        exchanged = _head_exchange(problem, shape, problem.ulysses_parallelism, ("ulysses",))
        forward, backward = forward + exchanged[0], backward + exchanged[1]
    return WirePlan(joined(forward), joined(backward + _sums(problem, shape)))


_Both = tuple[list[Allowance], list[Allowance]]


def _shape_of(problem: Problem) -> _Shape:
    tensor, exchanged = problem.tensor_parallelism, problem.ulysses_parallelism
    query_heads = problem.num_query_heads // tensor
    held = problem.num_kv_heads if problem.num_kv_heads % tensor else problem.num_kv_heads // tensor
    # Where heads are exchanged over the ulysses axis, each query head may come with a copy of its kv head.
    kv_heads = max(held, query_heads // exchanged) if exchanged > 1 else held
    return _Shape(
        batch=problem.batch // problem.data_parallelism,
        rows=problem.seq_len // (problem.context_parallelism * exchanged),
        query_heads=query_heads,
        kv_heads=kv_heads,
        dims=problem.head_dim + problem.value_dim,
        ids=_INT32 if problem.segments else 0,
        wide=max(_FLOAT32, _ITEMSIZE[problem.dtype]),
    )


def _halo(problem: Problem, shape: _Shape, multiple: int, widened: bool) -> _Both:
    received, sent = halo_rows(problem, multiple)
    itemsize = shape.wide if widened else _ITEMSIZE[problem.dtype]
    axes = _SEQUENCE if problem.ulysses_parallelism > 1 else ("context",)
    permute = ("collective-permute",)
    forward = shape.batch * received * (shape.kv_heads * shape.dims * itemsize + shape.ids)
    backward = shape.batch * sent * shape.kv_heads * shape.dims * shape.wide
    return (
        [Allowance("the rows that the window reaches", permute, axes, forward)],
        [Allowance("the gradients of the rows that the window reaches", permute, axes, backward)],
    )


@lru_cache(maxsize=64)
def halo_rows(problem: Problem, multiple: int = 1) -> tuple[int, int]:
    """(most rows that a rank receives, most that it sends), each run rounded up to `multiple` inside its chunk."""
    ranks, chunk = problem.context_parallelism, problem.chunk_len
    rank_of = _rank_of(problem)
    received, sent = np.zeros(ranks, int), np.zeros(ranks, int)
    for rank in range(ranks):
        seen = _seen_by(problem, rank_of, rank) & (rank_of != rank)
        for start in range(0, problem.seq_len, chunk):
            rounded = sum(-(-run // multiple) * multiple for run in _runs(seen[start : start + chunk]))
            received[rank] += min(rounded, chunk)
            sent[rank_of[start]] += min(rounded, chunk)
    return int(received.max()), int(sent.max())


def _rank_of(problem: Problem) -> np.ndarray:
    """The rank of the context axis that holds each position."""
    rank_of = np.empty(problem.seq_len, int)
    rank_of[problem.positions()] = np.arange(problem.seq_len) // (problem.seq_len // problem.context_parallelism)
    return rank_of


def _seen_by(problem: Problem, rank_of: np.ndarray, rank: int) -> np.ndarray:
    """Which positions some query of the rank sees by its window."""
    left, right = (problem.seq_len if reach is None else min(reach, problem.seq_len) for reach in problem.window)
    # How often a position is seen: +1 where a query's window starts, −1 behind its end.
    queries = np.flatnonzero(rank_of == rank)
    edges = np.zeros(problem.seq_len + 1, int)
    np.add.at(edges, np.maximum(queries - left, 0), 1)
    np.add.at(edges, np.minimum(queries + right + 1, problem.seq_len), -1)
    return np.cumsum(edges)[:-1] > 0


def _runs(flags: np.ndarray) -> Iterator[int]:
    """Lengths of the runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(int), [0]))))
    for start, end in edges.reshape(-1, 2):
        yield int(end - start)


def _all_gather(problem: Problem, shape: _Shape) -> _Both:
    others = problem.seq_len - shape.rows
    keys = shape.batch * shape.kv_heads * shape.dims * shape.wide
    gathered = Allowance("all keys", ("all-gather",), _SEQUENCE, others * (keys + shape.batch * 2 * _INT32))
    # A reduce-scatter that was compiled to an all-reduce holds the whole sequence.
    home = Allowance("the gradients of all keys", ("reduce-scatter", "all-reduce"), _SEQUENCE, problem.seq_len * keys)
    return [gathered], [gathered, home]


def _ring(problem: Problem, shape: _Shape, axes: tuple[str, ...]) -> _Both:
    """As far as the window makes keys pass; gradients once around, the step that brings them home included."""
    row = shape.batch * shape.kv_heads * shape.dims * shape.wide
    row_and_ids = row + shape.batch * 2 * _INT32
    held = problem.seq_len // problem.context_parallelism
    passed = ring_steps(problem) * held * row_and_ids
    permute = ("collective-permute",)
    return (
        [Allowance("all keys, as far as the window reaches", permute, axes, passed)],
        [
            Allowance(
                "all keys, as far as the window reaches, and their gradients, once around",
                permute,
                axes,
                passed + problem.seq_len * row,
            )
        ],
    )


@lru_cache(maxsize=64)
def ring_steps(problem: Problem) -> int:
    """How often keys may move on by a rank: the fewest steps that show everybody what it sees, one way or both ways.

    One more each way, since many rings turn once more than they must; never more than once around.
    """
    ranks, rank_of = problem.context_parallelism, _rank_of(problem)
    distances = {
        int(rank - owner) % ranks
        for rank in range(ranks)
        for owner in np.unique(rank_of[_seen_by(problem, rank_of, rank)])
    } - {0}
    ways = []
    for up in range(ranks):
        down = max((ranks - distance for distance in distances if distance > up), default=0)
        ways.append(up + down + (up > 0) + (down > 0))
    return min(ranks, *ways)


def _head_exchange(problem: Problem, shape: _Shape, size: int, axes: tuple[str, ...]) -> _Both:
    """Rows for heads: query, key and value (a copy a query head at most) there, out and lse back."""
    queries = problem.seq_len // problem.context_parallelism // problem.ulysses_parallelism * shape.query_heads
    others = shape.batch * queries * (size - 1) / size
    kv_heads = max(shape.kv_heads / shape.query_heads, 1.0)
    rows = shape.batch * problem.seq_len * 2 * _INT32
    there_and_back = others * (shape.dims * shape.wide * (1 + kv_heads) + shape.wide)
    ids = Allowance("segment ids and positions", ("all-gather",), axes, rows)
    return (
        [Allowance("exchanged heads", ("all-to-all",), axes, there_and_back), ids],
        # Out once more for those that have not kept it, and delta beside lse.
        [Allowance("exchanged heads", ("all-to-all",), axes, there_and_back * 2), ids],
    )


def _sums(problem: Problem, shape: _Shape) -> list[Allowance]:
    """Sums of gradients over axes along which an input is replicated."""
    sums = []
    if problem.sinks:
        sizes = dict(problem.mesh_shape)
        axes = tuple(axis for axis in ("data", *_SEQUENCE) if sizes.get(axis, 1) > 1)
        # One sum over all of them, or one after the other.
        floats = shape.query_heads * len(axes)
        sums.append(Allowance("the sum of dsinks", ("all-reduce",), ("data", *_SEQUENCE), floats * shape.wide))
    if problem.num_kv_heads % problem.tensor_parallelism:
        held = shape.batch * shape.rows * problem.num_kv_heads * shape.dims * shape.wide
        sums.append(Allowance("the sum over replicated kv heads", ("all-reduce",), ("tensor",), held))
    return sums


def joined(allowances: Iterable[Allowance]) -> tuple[Allowance, ...]:
    """Those for the same kind made one, since a collective cannot be told to be for the one or the other.

    What goes over the tensor axis is kept apart from what goes over the sequence's axes.
    """
    members: dict[tuple[str, bool], list[Allowance]] = {}
    for allowance in allowances:
        for kind in allowance.kinds:
            members.setdefault((kind, "tensor" in allowance.axes), []).append(allowance)
    return tuple(
        Allowance(
            " and ".join(dict.fromkeys(one.what for one in alike)),
            (kind,),
            tuple(dict.fromkeys(axis for one in alike for axis in one.axes)),
            sum(one.bytes for one in alike),
        )
        for (kind, _), alike in members.items()
    )
