"""The halo plan: which rows of keys travel from which rank to which, as plain integers, and its execution on a mesh.

`halo_plan` is pure Python and is simulated exhaustively in tests/impl/test_exchange_plan.py; `exchange` and `key_runs`
carry it out inside `jax.shard_map`, `send_home` and `add_arrived` bring the gradients back.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from impl import layout as layouts


@dataclass(frozen=True)
class Permute:
    """One `lax.ppermute`: every source rank sends rows `start … start + rows − 1` of the chunk in its `slot`."""

    slot: int
    start: int
    rows: int
    pairs: tuple[tuple[int, int], ...]
    """(source rank, destination rank); ranks that are no destination get zeros."""


@dataclass(frozen=True)
class Source:
    """Where some ranks find a piece of a key run: in what a permute brought, or (`permute` None) in their own chunk."""

    permute: int | None
    slot: int
    start: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """`rows` consecutive rows of a key run. A rank in no source has no such rows: its sequence ends before them."""

    rows: int
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class KeyRun:
    """The contiguous keys that the chunk in one slot reads: halo before it, the chunk itself, halo after it."""

    rows_before: int
    rows_after: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class HaloPlan:
    """What every rank sends, and how a rank assembles a key run for each of its chunks. All counts are rows of keys."""

    layout: str
    context_parallelism: int
    seq_len: int
    chunk: int
    permutes: tuple[Permute, ...]
    key_runs: tuple[KeyRun, ...]

    def rows_received(self, rank: int) -> int:
        """Rows of keys that reach `rank` over the wire."""
        return sum(permute.rows for permute in self.permutes for _, destination in permute.pairs if destination == rank)


@functools.lru_cache(maxsize=256)
def halo_plan(layout: str, context_parallelism: int, seq_len: int, window: tuple[int | None, int | None]) -> HaloPlan:
    """Plans the exchange for `window = (left, right)`, None meaning unbounded.

    A rank receives exactly the rows that one of its queries sees and that it does not hold, each once, however many of
    its chunks read them. `ValueError` for a layout without chunks or a length that does not divide into them.
    """
    chunks_each = layouts.chunks_per_rank(layout)
    num_chunks = chunks_each * context_parallelism
    if seq_len < 1 or seq_len % num_chunks:
        raise ValueError(f"seq_len must be a positive multiple of {num_chunks} for layout {layout!r}, got {seq_len}")
    chunk = seq_len // num_chunks
    # No query sees beyond the sequence, so the longest halo is all chunks but one's own.
    left, right = (seq_len - chunk if reach is None else min(reach, seq_len - chunk) for reach in window)
    geometry = _Geometry(layout, context_parallelism, chunk, num_chunks, chunks_each, left, right)
    transfers = _transfers(geometry)
    permutes, index_of = _grouped_into_permutes(geometry, transfers)
    runs = tuple(_key_run(geometry, transfers, index_of, slot) for slot in range(chunks_each))
    return HaloPlan(layout, context_parallelism, seq_len, chunk, permutes, runs)


@dataclass(frozen=True)
class _Geometry:
    layout: str
    context_parallelism: int
    chunk: int
    num_chunks: int
    chunks_each: int
    left: int
    right: int

    def chunk_of(self, rank: int, slot: int) -> int:
        return layouts.chunk_of(self.context_parallelism, rank, slot)

    def hops(self) -> range:
        """Every distance `reader − owner` in chunks at which rows are needed, farthest predecessor first."""
        before, after = -(-self.left // self.chunk), -(-self.right // self.chunk)
        return range(before, -after - 1, -1)

    def rows_at(self, hop: int) -> tuple[int, int]:
        """Rows `[start, stop)` of a chunk that the chunk `hop` after it (before it, if negative) needs."""
        if hop == 0:
            return 0, self.chunk
        if hop > 0:
            return self.chunk - max(0, min(self.left - (hop - 1) * self.chunk, self.chunk)), self.chunk
        return 0, max(0, min(self.right - (-hop - 1) * self.chunk, self.chunk))


@dataclass(frozen=True)
class _Transfer:
    """Rows `[start, stop)` of `chunk` on their way to `rank`, for the reader in `slot` at distance `hop`."""

    rank: int
    chunk: int
    start: int
    stop: int
    slot: int
    hop: int


def _transfers(geometry: _Geometry) -> dict[tuple[int, int], list[_Transfer]]:
    """For each (destination rank, chunk): the disjoint runs of rows that travel."""
    transfers: dict[tuple[int, int], list[_Transfer]] = {}
    for rank in range(geometry.context_parallelism):
        own = [geometry.chunk_of(rank, slot) for slot in range(geometry.chunks_each)]
        for slot, reader in enumerate(own):
            for hop in geometry.hops():
                chunk = reader - hop
                if chunk in own or not 0 <= chunk < geometry.num_chunks:
                    continue
                need = _Transfer(rank, chunk, *geometry.rows_at(hop), slot, hop)
                transfers[rank, chunk] = _merged(transfers.get((rank, chunk), []), need)
    return transfers


def _merged(runs: list[_Transfer], need: _Transfer) -> list[_Transfer]:
    """Adds `need` to disjoint runs: rows that two of a rank's chunks read travel once."""
    for other in runs:
        if need.start <= other.stop and other.start <= need.stop:
            start, stop = min(need.start, other.start), max(need.stop, other.stop)
            # Named after the reader that was there first: which one is immaterial, but it must be one.
            joined = _Transfer(other.rank, other.chunk, start, stop, other.slot, other.hop)
            return [joined if run is other else run for run in runs]
    return [*runs, need]


def _grouped_into_permutes(
    geometry: _Geometry, transfers: dict[tuple[int, int], list[_Transfer]]
) -> tuple[tuple[Permute, ...], dict[_Transfer, int]]:
    """One permute for each (reader's slot, hop, owner's slot, rows): all ranks run one program and must send alike.

    Reader and owner determine each other within such a group, so no rank sends or receives twice in one permute.
    """
    groups: dict[tuple[int, int, int, int, int], list[_Transfer]] = {}
    for runs in transfers.values():
        for run in runs:
            _, owner_slot = layouts.owner_of(geometry.layout, geometry.context_parallelism, run.chunk)
            groups.setdefault((abs(run.hop), run.hop, run.slot, owner_slot, run.start - run.stop), []).append(run)
    permutes, index_of = [], {}
    for index, key in enumerate(sorted(groups)):
        owners = [layouts.owner_of(geometry.layout, geometry.context_parallelism, run.chunk) for run in groups[key]]
        first = groups[key][0]
        pairs = tuple((owner, run.rank) for (owner, _), run in zip(owners, groups[key], strict=True))
        permutes.append(Permute(owners[0][1], first.start, first.stop - first.start, pairs))
        index_of.update(dict.fromkeys(groups[key], index))
    return tuple(permutes), index_of


def _key_run(
    geometry: _Geometry,
    transfers: dict[tuple[int, int], list[_Transfer]],
    index_of: dict[_Transfer, int],
    slot: int,
) -> KeyRun:
    pieces, rows_before, rows_after = [], 0, 0
    for hop in geometry.hops():
        start, stop = geometry.rows_at(hop)
        ranks_of: dict[tuple[int | None, int, int], list[int]] = {}
        for rank in range(geometry.context_parallelism):
            chunk = geometry.chunk_of(rank, slot) - hop
            own = [geometry.chunk_of(rank, own_slot) for own_slot in range(geometry.chunks_each)]
            if chunk in own:
                ranks_of.setdefault((None, own.index(chunk), start), []).append(rank)
            for run in transfers.get((rank, chunk), []):
                if run.start <= start and stop <= run.stop:
                    ranks_of.setdefault((index_of[run], 0, start - run.start), []).append(rank)
        sources = tuple(Source(*where, tuple(ranks)) for where, ranks in ranks_of.items())
        if not sources:
            continue  # Beyond either end of the sequence for every rank: a low chunk has at most N − 1 before it.
        rows_before += stop - start if hop > 0 else 0
        rows_after += stop - start if hop < 0 else 0
        pieces.append(Piece(stop - start, sources))
    return KeyRun(rows_before, rows_after, tuple(pieces))


def exchange(
    rows: Shaped[Array, "batch rows ..."], plan: HaloPlan, axis_name: str
) -> tuple[Shaped[Array, "batch halo_rows ..."], ...]:
    """Sends one rank's rows by the plan; returns what each permute brought (zeros where a rank is no destination)."""
    received = []
    for permute in plan.permutes:
        first = permute.slot * plan.chunk + permute.start
        outgoing = lax.slice_in_dim(rows, first, first + permute.rows, axis=1)
        received.append(lax.ppermute(outgoing, axis_name, permute.pairs))
    return tuple(received)


def send_home(
    gradients: Sequence[Float[Array, "batch halo_rows ..."]], plan: HaloPlan, axis_name: str
) -> tuple[Float[Array, "batch halo_rows ..."], ...]:
    """The way back of `exchange`: the gradients of what each permute brought reach the rank that sent it."""
    return tuple(
        lax.ppermute(rows, axis_name, [(destination, source) for source, destination in permute.pairs])
        for rows, permute in zip(gradients, plan.permutes, strict=True)
    )


def add_arrived(
    own: Float[Array, "batch rows ..."], arrived: Sequence[Float[Array, "batch halo_rows ..."]], plan: HaloPlan
) -> Float[Array, "batch rows ..."]:
    """Adds gradients that `send_home` brought to those of the rank's own rows."""
    for rows, permute in zip(arrived, plan.permutes, strict=True):
        first = permute.slot * plan.chunk + permute.start
        padding = [(0, 0)] * own.ndim
        padding[1] = (first, own.shape[1] - first - permute.rows)
        own = own + jnp.pad(rows, padding)
    return own


def key_runs(
    rows: Shaped[Array, "batch rows ..."],
    received: Sequence[Shaped[Array, "batch halo_rows ..."]],
    plan: HaloPlan,
    rank: Int32[Array, ""],
) -> tuple[Shaped[Array, "batch run_rows ..."], ...]:
    """Assembles the contiguous key run of each of a rank's chunks. Rows outside the sequence hold arbitrary values."""
    runs = []
    for run in plan.key_runs:
        pieces = [_piece(rows, received, plan, piece, rank) for piece in run.pieces]
        runs.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))
    return tuple(runs)


def halos(
    rows: Shaped[Array, "batch rows ..."],
    received: Sequence[Shaped[Array, "batch halo_rows ..."]],
    plan: HaloPlan,
    rank: Int32[Array, ""],
) -> tuple[Shaped[Array, "batch rows_before ..."], ...]:
    """The part of each key run that precedes its chunk: the halo alone, none of the chunk's own rows."""
    result = []
    for run in plan.key_runs:
        ends = itertools.accumulate(piece.rows for piece in run.pieces)
        before = [piece for piece, end in zip(run.pieces, ends, strict=True) if end <= run.rows_before]
        pieces = [_piece(rows, received, plan, piece, rank) for piece in before] or [rows[:, :0]]
        result.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1))
    return tuple(result)


def _piece(rows: Array, received: Sequence[Array], plan: HaloPlan, piece: Piece, rank: Int32[Array, ""]) -> Array:
    candidates = []
    for source in piece.sources:
        array = rows if source.permute is None else received[source.permute]
        first = source.start + (source.slot * plan.chunk if source.permute is None else 0)
        candidates.append(lax.slice_in_dim(array, first, first + piece.rows, axis=1))
    if len(candidates) == 1:
        return candidates[0]
    choice = [0] * plan.context_parallelism
    for index, source in enumerate(piece.sources):
        for source_rank in source.ranks:
            choice[source_rank] = index
    mine = lax.dynamic_index_in_dim(jnp.asarray(choice, jnp.int32), rank, keepdims=False)
    return lax.select_n(mine, *candidates) if len(candidates) > 2 else lax.select_n(mine == 1, *candidates)


def chunk_positions(plan: HaloPlan, slot: int, rank: Int32[Array, ""]) -> Int32[Array, " chunk_rows"]:
    """The positions of the chunk that this rank holds in `slot`."""
    chunk = layouts.chunk_of(plan.context_parallelism, rank, slot)
    return jnp.asarray(chunk, jnp.int32) * plan.chunk + jnp.arange(plan.chunk, dtype=jnp.int32)


def key_positions(plan: HaloPlan, slot: int, rank: Int32[Array, ""]) -> Int32[Array, " run_rows"]:
    """The positions of the key run of the chunk in `slot`, −1 for rows outside the sequence."""
    run = plan.key_runs[slot]
    chunk = layouts.chunk_of(plan.context_parallelism, rank, slot)
    offsets = jnp.arange(-run.rows_before, plan.chunk + run.rows_after, dtype=jnp.int32)
    positions = jnp.asarray(chunk, jnp.int32) * plan.chunk + offsets
    return jnp.where((positions >= 0) & (positions < plan.seq_len), positions, -1)
