"""oracle/layout.py: permutations of positions, against hand-written ones and the words that define them."""

import numpy as np
import pytest

from oracle.layout import LAYOUTS, inverse_permutation, permutation


@pytest.mark.parametrize(
    ("layout", "seq_len", "ranks", "expected"),
    [
        ("contiguous", 8, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("dual_chunk_swap", 8, 2, [0, 1, 6, 7, 2, 3, 4, 5]),
        ("dual_chunk_swap", 6, 3, [0, 5, 1, 4, 2, 3]),
        ("dual_chunk_swap", 12, 3, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]),
        ("dual_chunk_swap", 4, 1, [0, 1, 2, 3]),
        ("striped", 8, 2, [0, 2, 4, 6, 1, 3, 5, 7]),
        ("striped", 6, 3, [0, 3, 1, 4, 2, 5]),
        ("striped", 3, 1, [0, 1, 2]),
    ],
)
def test_permutation_by_hand(layout, seq_len, ranks, expected):
    found = permutation(layout, seq_len, ranks)
    assert found.tolist() == expected, "permutation[i] is the position of index i"
    assert found.dtype == np.int64, "positions are int64"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_rank_r_holds_chunks_r_and_2n_minus_1_minus_r(ranks):
    chunk = 3
    held = permutation("dual_chunk_swap", 2 * ranks * chunk, ranks).reshape(ranks, 2, chunk)
    for rank in range(ranks):
        for half, index in enumerate((rank, 2 * ranks - 1 - rank)):
            assert held[rank, half].tolist() == [index * chunk + i for i in range(chunk)], f"half {half} of rank {rank}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_inverse_permutation_undoes_the_permutation(layout, ranks):
    tokens = np.arange(240) * 10
    in_layout = tokens[permutation(layout, 240, ranks)]
    np.testing.assert_array_equal(in_layout[inverse_permutation(layout, 240, ranks)], tokens, "there and back")
    assert sorted(in_layout) == sorted(tokens), "every token is in exactly one place"


@pytest.mark.parametrize(
    ("layout", "seq_len", "ranks", "message"),
    [
        ("zigzag", 8, 2, "layout must be one of contiguous, dual_chunk_swap, striped, got 'zigzag'"),
        ("contiguous", 9, 2, "seq_len must be a multiple of 2 for layout contiguous, got 9"),
        ("striped", 9, 2, "seq_len must be a multiple of 2 for layout striped, got 9"),
        ("dual_chunk_swap", 6, 2, "seq_len must be a multiple of 4 for layout dual_chunk_swap, got 6"),
        ("contiguous", 0, 2, "seq_len must be an integer >= 1, got 0"),
        ("contiguous", 8, 0, "context_parallelism must be an integer >= 1, got 0"),
        ("contiguous", 8, True, "context_parallelism must be an integer >= 1, got True"),
        ("contiguous", 8, 2.0, "context_parallelism must be an integer >= 1, got 2.0"),
    ],
)
@pytest.mark.parametrize("function", [permutation, inverse_permutation])
def test_bad_arguments_are_named(function, layout, seq_len, ranks, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        function(layout, seq_len, ranks)
