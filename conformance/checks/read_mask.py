"""Which mask a target applied, decoded from its answers to coded inputs: a key at one row, and a pattern over all rows.

Every logit of coded inputs is 0, so attention under any mask is a few sums. Used only once something is known to be
wrong. May touch: evidence, codes; never JAX. Tests: tests/conformance/test_checks_visibility.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

import oracle
from conformance.checks.words import place, relation, segment_ids_of
from conformance.empty_rows import without_empty_row_cotangents
from conformance.evidence import Evidence
from conformance.inputs import Inputs
from conformance.poison import visible
from conformance.problem import Case
from conformance.variants import variant_inputs

Mask = Bool[np.ndarray, "batch query key"]
_OF_KEYS = ("dkey", "dvalue")
# Two dozen attentions a tensor beyond this size take longer than the case itself.
_MANY_LOGITS = 500_000


@dataclass(frozen=True)
class WrongMask:
    """One array read from coded inputs, in position order: what it is, what it should be, and where it is not that."""

    evidence: Evidence
    tensor: str
    got: Float64[np.ndarray, "batch seq heads features"]
    allowance: Float64[np.ndarray, "batch seq heads features"]
    wrong: Bool[np.ndarray, "batch seq heads features"]


def reading_of(found: WrongMask, index: tuple[int, ...]) -> str:
    """Plain words: what the row at `index` sees or misses, where that lies, and what all wrong rows have in common."""
    case = found.evidence.case
    sees = np.broadcast_to(visible(case), (case.problem.batch, case.problem.seq_len, case.problem.seq_len))
    inputs = variant_inputs(case, "coded")
    if found.evidence.target.empty_rows == "undefined":
        inputs = without_empty_row_cotangents(inputs, case.problem)
    coded = _Coded.of(case, inputs)
    right = read_under(coded, found.tensor, sees, sees)
    by_a_key = found.wrong.any(axis=3) & ~_agree(found.got, right, found.allowance)
    rows: np.ndarray = np.any(found.wrong, axis=(2, 3))
    if by_a_key.any() and not by_a_key[index[:2]].any():
        index = tuple(int(i) for i in np.argwhere(by_a_key)[0])
    where = f"{place(case, index[1])}; {int(rows.sum())} of {rows.size} rows of {found.tensor} are wrong"
    if not by_a_key.any():
        who = f"{'key' if found.tensor in _OF_KEYS else 'query'} {index[1]}"
        return f"the row of {who} has a trace, far less than one key's part, of what it must not see; {where}"
    usual = _usual(found, coded, sees, by_a_key)
    if usual is None:
        return f"{_key_at(found, coded, index, sees)}; {where}{_on_ranks(case, rows, np.ones_like(rows))}"
    words, mask, read = usual
    bites: np.ndarray = np.any(~_agree(right, read, found.allowance), axis=2)
    return f"{_pair_of(found, index, sees, mask)}; {where}, {words}{_on_ranks(case, rows, bites)}"


@dataclass(frozen=True)
class _Coded:
    """Coded inputs as [batch, query head, seq, features], float64; each query head has its keys beside it."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    dout: np.ndarray
    sink: float
    scale: float
    group: int
    shared_kv: bool

    def at(self, batch_row: int) -> _Coded:
        """One batch row alone."""
        rows = {name: getattr(self, name)[batch_row][None] for name in ("query", "key", "value", "dout")}
        return dataclasses.replace(self, **rows)

    @staticmethod
    def of(case: Case, inputs: Inputs) -> _Coded:
        problem = case.problem
        group = problem.num_query_heads // problem.num_kv_heads
        names = ("query", "key", "value", "dout")
        wide = {name: getattr(inputs, name).astype(np.float64).swapaxes(1, 2) for name in names}
        key, value = (np.repeat(wide[name], group, axis=1) for name in ("key", "value"))
        scale = problem.scale if problem.scale is not None else 1.0 / math.sqrt(problem.head_dim)
        return _Coded(wide["query"], key, value, wide["dout"], float(problem.sinks), scale, group, problem.shared_kv)


def read_under(coded: _Coded, tensor: str, forward: Mask, backward: Mask) -> Float64[np.ndarray, "batch seq heads f"]:
    """What would be read from a target that applies one mask in its forward and another one in its backward.

    Every logit is 0: p = 1 / (keys that the forward sees + sinks).
    """
    terms = forward.sum(axis=2) + coded.sink
    share = (1.0 / np.where(terms == 0, 1.0, terms))[:, None, :, None]
    out = (forward[:, None] * share) @ coded.value
    p = backward[:, None] * share
    dlogits = p * (coded.dout @ coded.value.swapaxes(2, 3) - (coded.dout * out).sum(axis=3, keepdims=True))
    if tensor == "out":
        return out.swapaxes(1, 2)
    if tensor == "dquery":
        return (coded.scale * dlogits @ coded.key).swapaxes(1, 2)
    by_query_head: np.ndarray = np.zeros((1, 1, 1, 1))
    if tensor == "dkey":
        by_query_head = coded.scale * dlogits.swapaxes(2, 3) @ coded.query
    if tensor == "dvalue" or coded.shared_kv:
        by_query_head = by_query_head + p.swapaxes(2, 3) @ coded.dout
    batch, heads, seq, features = by_query_head.shape
    return by_query_head.reshape(batch, heads // coded.group, coded.group, seq, features).sum(axis=2).swapaxes(1, 2)


def _key_at(found: WrongMask, coded: _Coded, index: tuple[int, ...], sees: Mask) -> str:
    """The one key (of a row of queries) or query (of a row of keys) that explains the row, if there is one.

    Of several with the same code the one nearest to the edge of the window is told.
    """
    case, (batch_row, position) = found.evidence.case, index[:2]
    of_keys = found.tensor in _OF_KEYS
    got, allowance = (array[batch_row, position] for array in (found.got, found.allowance))
    heads = found.wrong[batch_row, position].any(axis=1)
    explains = np.zeros(case.problem.seq_len, bool)
    read = _of_key_row if of_keys else _of_query_row
    for candidate in read(coded, found.tensor, batch_row, position, sees[batch_row]):
        explains |= _agree(got, candidate, allowance)[:, heads].all(axis=1)
    who = f"key {position}" if of_keys else f"query {position}"
    if not explains.any():
        return f"the row of {who} is not that of its mask, by more than one key"
    row = sees[batch_row, :, position] if of_keys else sees[batch_row, position]
    seen = np.flatnonzero(row)
    edges = np.array([position] if not seen.size else [seen[0], seen[-1]])
    others = np.flatnonzero(explains)
    other = int(others[np.abs(others[:, None] - edges).min(axis=1).argmin()])
    query, key = (other, position) if of_keys else (position, other)
    words = _told(case, batch_row, query, key, seen=not sees[batch_row, query, key])
    return words if len(others) == 1 else f"{words} (or another of {len(others)} with this code)"


def _of_query_row(
    coded: _Coded, tensor: str, batch_row: int, query: int, sees: Bool[np.ndarray, "query key"]
) -> Iterator[Float64[np.ndarray, "hypothesis heads features"]]:
    """The row of `out` or `dquery` if one key were the other way round, for each key: in both passes, in one."""
    right = np.broadcast_to(sees[query], sees.shape)
    flipped = sees[query] ^ np.eye(len(sees), dtype=bool)
    value, key, dout = coded.value[batch_row], coded.key[batch_row], coded.dout[batch_row, :, query]
    for forward in (flipped, right):
        terms = forward.sum(axis=1) + coded.sink
        share = (1.0 / np.where(terms == 0, 1.0, terms))[:, None]
        out = (forward * share) @ value  # [head, hypothesis, value_dim]
        if tensor == "out":
            yield out.swapaxes(0, 1)
            return
        dprobabilities = value @ dout[:, :, None]  # [head, key, 1]
        delta = out @ dout[:, :, None]  # [head, hypothesis, 1]
        dlogits = coded.scale * (flipped * share) * (dprobabilities.swapaxes(1, 2) - delta)
        yield (dlogits @ key).swapaxes(0, 1)


def _of_key_row(
    coded: _Coded, tensor: str, batch_row: int, key: int, sees: Bool[np.ndarray, "query key"]
) -> Iterator[Float64[np.ndarray, "hypothesis kv_heads features"]]:
    """The row of `dkey` or `dvalue` if one query saw it or did not, for each query: in both passes, in the backward."""
    right = read_under(coded.at(batch_row), tensor, sees[None], sees[None])[0, key]
    value, dout = coded.value[batch_row], coded.dout[batch_row]
    count = sees.sum(axis=1) + coded.sink
    out = sees @ value / np.where(count == 0, 1.0, count)[:, None]  # [head, query, value_dim]
    for more in (1, 0):
        terms = np.where(count + more == 0, 1.0, count + more)[:, None]
        seen_out = (out * count[:, None] + more * value[:, key, None]) / terms
        p = np.where(sees[:, key, None], 1.0 / np.where(count == 0, 1.0, count)[:, None], 1.0 / terms)
        row_out = np.where(sees[:, key, None], out, seen_out)
        dlogits = p * ((dout * value[:, key, None]).sum(axis=2, keepdims=True) - (dout * row_out).sum(2, keepdims=True))
        gives: np.ndarray = np.zeros((1, 1, 1))
        if tensor == "dkey":
            gives = coded.scale * dlogits * coded.query[batch_row]
        if tensor == "dvalue" or coded.shared_kv:
            gives = gives + p * dout
        num_query_heads, seq, features = gives.shape
        gives = gives.reshape(num_query_heads // coded.group, coded.group, seq, features).sum(axis=1).swapaxes(0, 1)
        yield right + np.where(sees[:, key, None, None], -gives, gives)


def _usual(
    found: WrongMask, coded: _Coded, sees: Mask, by_a_key: Bool[np.ndarray, "batch seq heads"]
) -> tuple[str, Mask, np.ndarray] | None:
    """The usual mistake that all rows agree with, or else all wrong rows: its name, its mask, what it would read."""
    of_wrong_rows = None
    if found.got.shape[0] * coded.query.shape[1] * found.got.shape[1] ** 2 > _MANY_LOGITS:
        return None
    for words, mask in _usual_mistakes(found.evidence.case):
        for forward in (mask, sees):
            read = read_under(coded, found.tensor, forward, mask)
            agrees = _agree(found.got, read, found.allowance)
            if agrees.all():
                return words, mask, read
            if of_wrong_rows is None and agrees[by_a_key].all():
                of_wrong_rows = words, mask, read
    return of_wrong_rows


def _pair_of(found: WrongMask, index: tuple[int, ...], sees: Mask, mask: Mask) -> str:
    """One pair on which two masks differ: of the row at `index`, or of its batch row."""
    batch_row, position = index[:2]
    differs = sees[batch_row] ^ mask[batch_row]
    in_row = np.zeros_like(differs)
    if found.tensor in _OF_KEYS:
        in_row[:, position] = True
    else:
        in_row[position] = True
    pairs = np.argwhere(differs & in_row if (differs & in_row).any() else differs)
    query, key = (int(i) for i in pairs[0])
    return _told(found.evidence.case, batch_row, query, key, seen=bool(mask[batch_row, query, key]))


def _told(case: Case, batch_row: int, query: int, key: int, *, seen: bool) -> str:
    verb = "sees" if seen else "does not see"
    return f"query {query} {verb} key {key}, which is {relation(case, batch_row, query, key)}"


def _usual_mistakes(case: Case) -> Iterator[tuple[str, Mask]]:
    """Wrong masks with a name."""
    problem = case.problem
    ids = segment_ids_of(case)

    def mask(window: oracle.Window, segment_ids: np.ndarray = ids, padding: int | None = problem.padding) -> Mask:
        return oracle.mask.visible(problem.seq_len, window=window, segment_ids=segment_ids, padding_segment_id=padding)

    left, right = problem.window
    if left is not None:
        yield "as if the window had one key more on the left", mask((left + 1, right))
        if left > 0:
            yield "as if the window had one key less on the left", mask((left - 1, right))
        yield "as if the window had no end on the left", mask((None, right))
    if right is not None:
        yield "as if the window had one key more on the right", mask((left, right + 1))
        if right > 0:
            yield "as if the window had one key less on the right", mask((left, right - 1))
        yield "as if the window had no end on the right", mask((left, None))
    if problem.segments:
        yield "as if there were no documents", mask(problem.window, np.zeros_like(ids), None)
        yield "as if padding were a document", mask(problem.window, ids, None)
    if left is not None and left < problem.seq_len - 1:
        positions = np.arange(problem.seq_len)
        behind = positions[:, None] + problem.seq_len - positions[None, :]
        yield "as if the first position followed the last", mask(problem.window) | (behind <= left)
    rank_of = np.argsort(problem.positions()) // (problem.seq_len // problem.context_parallelism)
    own = rank_of[:, None] == rank_of[None, :]
    yield "as if keys of other ranks were not there", mask(problem.window) & own
    if problem.segments:
        no_documents = mask(problem.window, np.zeros_like(ids), None)
        chunk_of = rank_of if problem.layout == "striped" else np.arange(problem.seq_len) // problem.chunk_len
        for words, part_of in (("ranks", rank_of), ("chunks", chunk_of)):
            elsewhere = part_of[:, None] != part_of[None, :]
            yield (
                f"as if there were no documents in the keys of other {words}",
                np.where(elsewhere, no_documents, mask(problem.window)),
            )


def _on_ranks(case: Case, wrong: np.ndarray, bites: np.ndarray) -> str:
    """The ranks with a wrong row, against those where the mistake would show; both [batch, seq]."""
    problem = case.problem
    rank_of = np.argsort(problem.positions()) // (problem.seq_len // problem.context_parallelism)
    with_wrong = sorted(set(rank_of[np.flatnonzero(wrong.any(axis=0))].tolist()))
    with_bites = sorted(set(rank_of[np.flatnonzero(bites.any(axis=0))].tolist()))
    spared = [rank for rank in with_bites if rank not in with_wrong]
    if not spared:
        return ", on every rank" if len(with_bites) == problem.context_parallelism else ", on every rank where it shows"
    if len(spared) == 1 and len(with_wrong) > 1:
        return f", on every rank but {spared[0]}"
    return f", on rank{'s' * (len(with_wrong) > 1)} {', '.join(map(str, with_wrong))} only"


def _agree(got: np.ndarray, read: np.ndarray, allowance: np.ndarray) -> np.ndarray:
    """bool, without the feature axis: whether two readings are equal up to rounding."""
    # Allowances are those of the right mask, under which an element may be exactly zero; of a row the largest will do.
    slack = 2.0 * allowance.max(axis=-1, keepdims=True)
    return (np.abs(got - read) <= slack).all(axis=-1)
