"""The right answer, with its allowances, at chosen queries and keys only: an oracle for a million tokens.

Reads the rows that the chosen places can see and no others. A query costs a window, a key a window squared (its
readers, each with all that it sees). NumPy only. Tested in tests/oracle/test_probe.py.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from oracle.dense import SolvedBlock, forward_block, vjp_block
from oracle.error_terms import Terms, allowance, block_terms, key_terms, summed_over_group
from oracle.mask import most_visible
from oracle.outline import Outline, Positions, Reader, Rows, reader
from oracle.precision import Precision
from oracle.rounding import Roundings
from oracle.softmax_errors import Numerics

# Places of one head that lie within so many positions of each other share one walk over what they see.
CLUSTER = 64
# The readers of a key are taken in runs that see about so many keys in all: arrays of 1 to 2 MiB for each query head.
READER_PAIRS = 2**17


class Place(NamedTuple):
    """Where to probe: a position, as a query of all heads that share a kv head, or as a key of that kv head."""

    side: Literal["query", "key"]
    batch_row: int
    kv_head: int
    position: int


class Probed(NamedTuple):
    """The right answer at a place, and how far it may be missed, by tensor.

    At a query: out [group, value_dim], lse [group] and dquery [group, head_dim]. At a key: dkey [head_dim] and dvalue
    [value_dim]. dsinks, to which every query of the sequence adds, is summed up in sinks.py.
    """

    place: Place
    expected: dict[str, Float64[np.ndarray, "..."]]
    allowance: dict[str, Float64[np.ndarray, "..."]]


def probe(
    rows: Rows, outline: Outline, places: Iterable[Place], *, precision: Precision, structured_values: bool = False
) -> Iterator[Probed]:
    """Every place once, neighbours together, in ascending order of side, batch row, kv head and position.

    Args:
        rows: reads the case's arrays.
        outline: the rest of the case.
        places: where to probe; `oracle.places.default_places` knows where faults live.
        precision: the implementation's declared numerics.
        structured_values: as in `oracle.budget.answer_with_allowances`.

    Raises:
        ValueError: names the argument, its value and the rule it breaks.
    """
    source = reader(rows, outline)
    visible_keys = most_visible(source.window, source.seq_len)
    numerics = Numerics(precision, structured_values, visible_keys, rows=source.is_token.size)
    for side, row, kv_head, positions in _clusters(places, outline):
        walk = _probe_queries if side == "query" else _probe_keys
        expected, allowed = walk(source, row, kv_head, positions, numerics)
        for index, position in enumerate(positions):
            place = Place(side, row, kv_head, int(position))
            yield Probed(place, _at(expected, index), _at(allowed, index))


_ByTensor = dict[str, np.ndarray]  # of a cluster: its places are the last axis but one (the last, for lse)


def _clusters(
    places: Iterable[Place], outline: Outline
) -> Iterator[tuple[Literal["query", "key"], int, int, Positions]]:
    """Places of one side, batch row and kv head, with ascending positions at most CLUSTER apart."""
    limits = {"batch_row": outline.batch, "kv_head": outline.num_kv_heads, "position": outline.seq_len}
    distinct = sorted(set(places))
    for place in distinct:
        if place.side not in ("query", "key"):
            raise ValueError(f"side of a place must be 'query' or 'key', got {place.side!r}")
        for name, limit in limits.items():
            if not 0 <= getattr(place, name) < limit:
                raise ValueError(f"{name} of a place must be >= 0 and < {limit}, got {getattr(place, name)}")
    for (side, row, kv_head), same in itertools.groupby(distinct, key=lambda place: place[:3]):
        positions = np.array([place.position for place in same])
        while len(positions):
            is_near = positions - positions[0] <= CLUSTER
            yield side, row, kv_head, positions[is_near]
            positions = positions[~is_near]


def _probe_queries(
    source: Reader, row: int, kv_head: int, positions: Positions, numerics: Numerics
) -> tuple[_ByTensor, _ByTensor]:
    """One block: these queries and what they see."""
    heads = source.heads_of(kv_head)
    block, _ = source.block(row, heads, positions, also=positions)
    dout, dlse = source.cotangents(row, heads, positions)
    forward = forward_block(block)
    solved = SolvedBlock(block, dout, dlse, forward, vjp_block(block, forward, dout, dlse))
    terms = block_terms(solved, numerics)
    expected = {"out": forward.out, "lse": forward.lse, "dquery": solved.gradients.dquery}
    allowed = {name: allowance(name, answer, getattr(terms, name), numerics) for name, answer in expected.items()}
    return expected, allowed


def _probe_keys(
    source: Reader, row: int, kv_head: int, positions: Positions, numerics: Numerics
) -> tuple[_ByTensor, _ByTensor]:
    """A block for each run of readers, with all that those see: their rows must be whole for the keys' columns."""
    sums: dict[str, list[Any]] = {"dkey": [0.0] * 4, "dvalue": [0.0] * 4}  # gradient by head, worst, squares, sizes
    readers, heads = source.readers_of(row, positions), source.heads_of(kv_head)
    run = max(16, READER_PAIRS // numerics.visible_keys)
    for start in range(0, len(readers), run):
        queries = readers[start : start + run]
        block, keys = source.block(row, heads, queries, also=positions)
        dout, dlse = source.cotangents(row, heads, queries)
        columns = np.searchsorted(keys, positions)
        gradients, *terms = key_terms(block, forward_block(block), dout, dlse, columns, numerics)
        for (name, total), term in zip(sums.items(), terms, strict=True):
            parts = (getattr(gradients, name), term.worst, term.roundings.squares, term.roundings.sizes)
            sums[name] = [old + new for old, new in zip(total, parts, strict=True)]
    expected, allowed = {}, {}
    for name, (by_head, worst, squares, sizes) in sums.items():
        expected[name] = np.sum(by_head, axis=0)
        terms = summed_over_group(by_head, Terms(worst, Roundings(squares, sizes)), numerics)
        allowed[name] = allowance(name, expected[name], terms, numerics)
    return expected, allowed


def _at(cluster: _ByTensor, index: int) -> _ByTensor:
    return {name: array[..., index] if name == "lse" else array[..., index, :] for name, array in cluster.items()}
