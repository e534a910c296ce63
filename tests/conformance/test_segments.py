"""Segment ids: given ones as they are; drawn ones repeat and are unsorted, never the padding id or a neighbour's."""

import itertools

import numpy as np

from conformance.inputs import inputs_of
from conformance.problem import Case, Document, Problem, documents_of
from conformance.segments import DRAWN_IDS, documents_with_ids


def many_documents(seed, padding=None):
    problem = Problem(batch=2, seq_len=64, segments=True, padding=padding)
    return Case(problem, documents_of([[4] * 16, [8] * 8]), seed=seed)


def test_given_ids_stand_at_their_positions():
    row = (Document(3, 7), Document(2, -4), Document(3, 7))
    case = Case(Problem(seq_len=8, segments=True), (row,))
    np.testing.assert_array_equal(inputs_of(case).segment_ids, [[7, 7, 7, -4, -4, 7, 7, 7]])


def test_one_document_a_row_where_the_case_names_none():
    segment_ids = inputs_of(Case(Problem(batch=2, segments=True))).segment_ids
    assert all(np.unique(row).size == 1 for row in segment_ids), "one id a row"


def test_drawn_ids_differ_from_their_neighbours_and_from_padding():
    for seed, padding in itertools.product(range(20), (None, 0, -1, 3)):
        case = many_documents(seed, padding)
        for row in range(2):
            ids = [document.segment_id for document in documents_with_ids(case, row)]
            assert padding is None or padding not in ids, f"no document is padding by accident: {ids}"
            assert all(a != b for a, b in itertools.pairwise(ids)), f"neighbours are different documents: {ids}"
            assert set(ids) <= set(DRAWN_IDS), f"few ids: {ids}"


def test_a_drawn_id_differs_from_a_given_one_on_either_side():
    problem = Problem(seq_len=8, segments=True)
    for seed in range(30):
        case = Case(problem, ((Document(2, 1), Document(3), Document(3, 2)),), seed=seed)
        drawn = documents_with_ids(case, 0)[1].segment_id
        assert drawn not in (1, 2), f"seed {seed}"


def test_drawn_ids_repeat_are_unsorted_and_include_zero_and_negative_ones():
    rows = [[document.segment_id for document in documents_with_ids(many_documents(seed), 0)] for seed in range(10)]
    assert all(len(set(row)) < len(row) for row in rows), "16 documents, 6 ids"
    assert all(row != sorted(row) for row in rows), "in no order"
    assert {segment_id for row in rows for segment_id in row} == set(DRAWN_IDS), "every id is used"
    assert {-(2**31), -1, 0, 2**31 - 1} < set(DRAWN_IDS), "whatever a target may have taken for a mark of its own"


def test_batch_rows_and_seeds_draw_ids_of_their_own():
    segment_ids = inputs_of(Case(Problem(batch=2, seq_len=64, segments=True), documents_of([[4] * 16] * 2))).segment_ids
    assert (segment_ids[0] != segment_ids[1]).any(), "batch rows"
    assert documents_with_ids(many_documents(1), 0) != documents_with_ids(many_documents(2), 0), "seeds"
