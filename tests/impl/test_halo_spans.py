"""Splitting a chunk into spans loses no query and no key, and calls interior only what needs no halo."""

import pytest

from impl import halo_spans
from impl.exchange import halo_plan


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_query_meets_its_keys_in_exactly_one_span(layout, multiple, monkeypatch) -> None:
    monkeypatch.setattr(halo_spans, "BOUNDARY_MULTIPLE", multiple)
    for seq_len in (48, 96, 192):
        for window in [(0, 0), (1, 0), (5, 0), (7, 0), (20, 0), (3, 2), (0, 4), (None, 0), (2, None), (None, None)]:
            plan = halo_plan(layout, 3, seq_len, window)
            left, right = (seq_len if reach is None else reach for reach in window)
            for slot, run in enumerate(plan.key_runs):
                spans = halo_spans.spans_of(plan, window, slot)
                queries = [span.first_query + row for span in spans for row in range(span.queries)]
                assert queries == list(range(plan.chunk)), f"queries are lost or doubled: {spans}"
                last_key = run.rows_before + plan.chunk + run.rows_after - 1
                for span in spans:
                    keys = range(span.first_key, span.first_key + span.keys)
                    for query in range(span.first_query, span.first_query + span.queries):
                        row = run.rows_before + query
                        seen = range(max(0, row - left), min(last_key, row + right) + 1)
                        assert {seen[0], seen[-1]} <= set(keys), f"query {query} lacks keys in {span}"
                    own = range(run.rows_before, run.rows_before + plan.chunk)
                    inside = keys[0] in own and keys[-1] in own
                    assert span.interior == inside, f"interior means own keys only: {span}"


def test_half_of_a_chunk_must_be_interior_for_a_split_to_pay() -> None:
    def count(chunk: int) -> int:
        return len(halo_spans.spans_of(halo_plan("contiguous", 2, 2 * chunk, (500, 0)), (500, 0), 0))

    assert (count(1023), count(1024)) == (1, 2), "a boundary of 500 rows is rounded up to one block of 512"


def test_without_a_halo_everything_is_interior() -> None:
    plan = halo_plan("contiguous", 2, 64, (0, 0))
    assert [span.interior for span in halo_spans.spans_of(plan, (0, 0), 0)] == [True], "W = 1 waits for nobody"
