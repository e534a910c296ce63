"""How far K and V rotate: to every rank that sees them and no further, however the window and the layout lie."""

import pytest

from impl.ring import rotations


def positions(layout: str, context_parallelism: int, seq_len: int, rank: int) -> list[int]:
    """DESIGN.md's layouts, written again."""
    rows = seq_len // context_parallelism
    if layout == "striped":
        return list(range(rank, seq_len, context_parallelism))
    if layout == "contiguous":
        return list(range(rank * rows, (rank + 1) * rows))
    half, mirror = rows // 2, 2 * context_parallelism - 1 - rank
    return [*range(rank * half, (rank + 1) * half), *range(mirror * half, (mirror + 1) * half)]


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap", "striped"])
@pytest.mark.parametrize("context_parallelism", [1, 2, 3, 5, 8])
def test_keys_reach_every_rank_that_sees_them(layout, context_parallelism) -> None:
    seq_len = 6 * context_parallelism
    held = [positions(layout, context_parallelism, seq_len, rank) for rank in range(context_parallelism)]
    for window in [(0, 0), (1, 0), (5, 0), (7, 0), (seq_len - 1, 0), (0, 4), (8, 3), (None, 0), (None, None)]:
        left, right = (seq_len if reach is None else reach for reach in window)
        upwards, downwards = rotations(layout, context_parallelism, seq_len, window)
        assert upwards + downwards < max(context_parallelism, 1), "no rank's keys come by twice"
        for rank in range(context_parallelism):
            visited = {(rank - step) % context_parallelism for step in range(-downwards, upwards + 1)}
            for owner in range(context_parallelism):
                seen = any(query - left <= key <= query + right for query in held[rank] for key in held[owner])
                assert not seen or owner in visited, f"rank {rank} never meets {owner} under {window}"


@pytest.mark.parametrize(
    ("layout", "window", "expected"),
    [
        ("contiguous", (0, 0), (0, 0)),
        ("contiguous", (7, 0), (1, 0)),
        ("contiguous", (8, 0), (1, 0)),
        ("contiguous", (9, 0), (2, 0)),
        ("contiguous", (3, 3), (1, 1)),
        ("contiguous", (None, 0), (7, 0)),
        ("dual_chunk_swap", (4, 0), (1, 1)),
        ("dual_chunk_swap", (None, 0), (7, 0)),
    ],
)
def test_keys_rotate_no_further_than_somebody_sees_them(layout, window, expected) -> None:
    assert rotations(layout, 8, 64, window) == expected, "chunks of 8 positions (4 under dual_chunk_swap), 8 ranks"
