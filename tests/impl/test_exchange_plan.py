"""The halo plan, simulated with Python sets: every query gets exactly its keys, no row travels twice, none for nothing.

Exhaustive over S <= 48, N <= 8, every window W <= S and both layouts; right and two-sided windows are sampled.
No JAX runs here. What the plan does on a mesh is tested in test_halo.py.
"""

import pytest

from impl.exchange import HaloPlan, halo_plan

LONGEST = 48


def chunks_held(layout: str, context_parallelism: int, rank: int) -> list[int]:
    """DESIGN.md's words, written again: rank r holds chunk r, or chunks r and 2N−1−r."""
    return [rank] if layout == "contiguous" else [rank, 2 * context_parallelism - 1 - rank]


def lengths(layout: str, context_parallelism: int) -> list[int]:
    multiple = context_parallelism * (1 if layout == "contiguous" else 2)
    return list(range(multiple, LONGEST + 1, multiple))


def rows_delivered(plan: HaloPlan) -> list[list[list[int]]]:
    """For each permute, for each rank, the positions it brought there, in order ([] where nothing was sent)."""
    delivered = []
    for permute in plan.permutes:
        sources = [source for source, _ in permute.pairs]
        destinations = [destination for _, destination in permute.pairs]
        assert len(set(sources)) == len(sources), f"a rank sends twice in one permute: {permute}"
        assert len(set(destinations)) == len(destinations), f"a rank receives twice in one permute: {permute}"
        assert all(source != destination for source, destination in permute.pairs), f"a rank sends to itself: {permute}"
        assert permute.rows > 0, f"an empty permute: {permute}"
        assert 0 <= permute.start <= permute.start + permute.rows <= plan.chunk, f"rows outside the chunk: {permute}"
        brought: list[list[int]] = [[] for _ in range(plan.context_parallelism)]
        for source, destination in permute.pairs:
            chunk = chunks_held(plan.layout, plan.context_parallelism, source)[permute.slot]
            first = chunk * plan.chunk + permute.start
            brought[destination] = list(range(first, first + permute.rows))
        delivered.append(brought)
    return delivered


def assembled_run(plan: HaloPlan, delivered: list[list[list[int]]], rank: int, slot: int) -> list[int | None]:
    """The positions in one chunk's key run as the plan assembles it; None where the plan names no source."""
    run: list[int | None] = []
    for piece in plan.key_runs[slot].pieces:
        sources = [source for source in piece.sources if rank in source.ranks]
        assert len(sources) <= 1, f"two sources for the same rows on rank {rank}: {piece}"
        for source in sources:
            if source.permute is None:
                first = chunks_held(plan.layout, plan.context_parallelism, rank)[source.slot] * plan.chunk
                rows = list(range(first, first + plan.chunk))
            else:
                rows = delivered[source.permute][rank]
            rows = rows[source.start : source.start + piece.rows]
            assert len(rows) == piece.rows, f"a piece reads past what rank {rank} holds: {piece}"
            run.extend(rows)
        if not sources:
            run.extend([None] * piece.rows)
    return run


def check_plan(plan: HaloPlan, window: tuple[int | None, int | None]) -> None:
    last = plan.seq_len - 1
    left, right = (last if reach is None else reach for reach in window)
    delivered = rows_delivered(plan)
    for rank in range(plan.context_parallelism):
        chunks = chunks_held(plan.layout, plan.context_parallelism, rank)
        own = {chunk * plan.chunk + row for chunk in chunks for row in range(plan.chunk)}
        received = [position for brought in delivered for position in brought[rank]]
        visible = {key for query in own for key in range(max(0, query - left), min(last, query + right) + 1)}
        assert len(set(received)) == len(received), f"rank {rank} receives a row twice: {sorted(received)}"
        assert set(received) == visible - own, f"rank {rank} must receive exactly the rows it sees and does not hold"
        assert plan.rows_received(rank) == len(received), f"rows_received miscounts rank {rank}"
        for slot, chunk in enumerate(chunks):
            run = assembled_run(plan, delivered, rank, slot)
            key_run = plan.key_runs[slot]
            first = chunk * plan.chunk - key_run.rows_before
            expected = [position if 0 <= position <= last else None for position in range(first, first + len(run))]
            assert run == expected, f"the key run of rank {rank}, slot {slot} is not contiguous in position"
            assert len(run) == key_run.rows_before + plan.chunk + key_run.rows_after, "a key run's length is wrong"
            held = {position for position in run if position is not None}
            for query in range(chunk * plan.chunk, (chunk + 1) * plan.chunk):
                seen = set(range(max(0, query - left), min(last, query + right) + 1))
                assert seen <= held, f"query {query} on rank {rank} lacks keys {sorted(seen - held)}"


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("context_parallelism", range(1, 9))
def test_every_query_gets_exactly_its_keys_for_every_window(layout: str, context_parallelism: int) -> None:
    for seq_len in lengths(layout, context_parallelism):
        for sliding_window_size in range(1, seq_len + 1):
            window = (sliding_window_size - 1, 0)
            check_plan(halo_plan(layout, context_parallelism, seq_len, window), window)


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("context_parallelism", range(1, 9))
def test_right_and_two_sided_windows_get_exactly_their_keys(layout: str, context_parallelism: int) -> None:
    for seq_len in lengths(layout, context_parallelism)[-3:]:
        chunk = seq_len // (context_parallelism * (1 if layout == "contiguous" else 2))
        reaches = sorted({0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 3 * chunk, seq_len - 1})
        windows = [(left, right) for left in reaches for right in reaches if right]
        for window in [*windows, (None, 0), (0, None), (None, None)]:
            check_plan(halo_plan(layout, context_parallelism, seq_len, window), window)


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
def test_a_window_of_one_key_sends_nothing(layout: str) -> None:
    plan = halo_plan(layout, 4, 32, (0, 0))
    assert plan.permutes == (), "W = 1 sees only the query's own key"


def test_one_hop_sends_to_the_successor_and_never_wraps_around() -> None:
    plan = halo_plan("contiguous", 4, 32, (5, 0))
    assert [permute.pairs for permute in plan.permutes] == [((0, 1), (1, 2), (2, 3))], "rank 0 receives nothing"
    assert [(permute.start, permute.rows) for permute in plan.permutes] == [(3, 5)], "the last W − 1 rows of a chunk"


def test_high_chunks_travel_the_other_way_and_the_last_pair_meets_inside_the_rank() -> None:
    plan = halo_plan("dual_chunk_swap", 4, 64, (5, 0))
    pairs = {permute.slot: permute.pairs for permute in plan.permutes}
    assert pairs == {0: ((0, 1), (1, 2), (2, 3)), 1: ((1, 0), (2, 1), (3, 2))}, "chunks 3 and 4 lie both on rank 3"


def test_two_hops_cross_from_a_low_chunk_to_another_ranks_high_chunk() -> None:
    plan = halo_plan("dual_chunk_swap", 4, 64, (8 + 3, 0))
    crossing = [permute for permute in plan.permutes if permute.pairs == ((3, 2),) and permute.slot == 0]
    assert [(permute.start, permute.rows) for permute in crossing] == [(5, 3)], "chunk 5 (rank 2) reads chunk 3's tail"


@pytest.mark.parametrize("seq_len", [0, -8, 30])
def test_a_length_that_does_not_divide_into_chunks_is_refused(seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"seq_len must be a positive multiple of 8 .* got {seq_len}"):
        halo_plan("dual_chunk_swap", 4, seq_len, (3, 0))


def test_striped_has_no_chunks_and_is_refused() -> None:
    with pytest.raises(ValueError, match="layout must be contiguous or dual_chunk_swap to have chunks, got 'striped'"):
        halo_plan("striped", 4, 32, (3, 0))
