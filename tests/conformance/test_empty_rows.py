"""Rows without a visible key: where they are, and that leaving them undefined changes nothing elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.empty_rows import empty_rows, without_empty_row_cotangents
from conformance.inputs import inputs_of

_PADDED = "v=1 batch=2 seq_len=8 sliding_window_size=3 padding=-1 documents=2@-1+5@4+1@-1/8@4"


def test_exactly_the_padding_positions_are_empty_rows() -> None:
    case = parse_case(_PADDED)
    expected = np.array([[1, 1, 0, 0, 0, 0, 0, 1], [0] * 8], bool)
    np.testing.assert_array_equal(empty_rows(inputs_of(case), case.problem), expected)


@pytest.mark.parametrize("text", ["v=1 seq_len=8 sliding_window_size=1", "v=1 seq_len=8 documents=3@-1+5@2"])
def test_without_a_padding_id_every_query_sees_at_least_itself(text: str) -> None:
    case = parse_case(text)
    assert empty_rows(inputs_of(case), case.problem) is None, "window bounds are >= 0: the query itself is visible"


def test_only_the_cotangents_of_empty_rows_become_zero() -> None:
    case = parse_case(_PADDED)
    inputs = inputs_of(case)
    changed = without_empty_row_cotangents(inputs, case.problem)
    is_empty = np.array([[1, 1, 0, 0, 0, 0, 0, 1], [0] * 8], bool)
    for name in ("dout", "dlse"):
        before, after = getattr(inputs, name), getattr(changed, name)
        assert (after[is_empty] == 0).all(), f"{name} at empty rows"
        np.testing.assert_array_equal(after[~is_empty], before[~is_empty], f"{name} elsewhere")
        assert (before[is_empty] != 0).any(), f"{name} of the masters is left as it was"
        assert after.dtype == before.dtype, f"dtype of {name}"
    for name in ("query", "key", "value", "segment_ids"):
        assert getattr(changed, name) is getattr(inputs, name), f"{name} is untouched"


def test_bfloat16_cotangents_stay_bfloat16() -> None:
    case = parse_case(_PADDED).replace(dtype="bfloat16")
    assert without_empty_row_cotangents(inputs_of(case), case.problem).dout.dtype.name == "bfloat16", "dtype of dout"
