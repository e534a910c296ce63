"""oracle/tiles.py: a case cut into tiles and put together again is the whole case."""

import pytest

from oracle import tiles


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (127, 0), (128, 3), (None, 0), (0, None), (None, None), (500, 500)])
def test_every_query_is_in_one_run_with_all_keys_of_its_window(seq_len, window):
    queries = [(q, keys) for run, keys in tiles.runs(seq_len, window) for q in range(run.start, run.stop)]
    assert [q for q, _ in queries] == list(range(seq_len)), "each query once"
    for q, keys in queries:
        left, right = (seq_len if bound is None else bound for bound in window)
        first, last = max(q - left, 0), min(q + right, seq_len - 1)
        assert keys.start <= first, f"query {q} needs key {first}"
        assert last < keys.stop <= seq_len, f"query {q} needs key {last}"


@pytest.mark.parametrize("window", [(0, 0), (5, 0), (40, 7)])
def test_a_run_reads_no_more_keys_than_its_windows_reach(window):
    for queries, keys in tiles.runs(1000, window):
        assert keys.stop - keys.start <= queries.stop - queries.start + sum(window), "queries + left + right"
