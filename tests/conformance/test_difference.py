"""What makes a fault bite: two answers that differ by more than rounding, or in a fact.

May touch: evidence. What it tests: conformance/difference.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conformance.case_text import parse_case
from conformance.difference import differs
from conformance.evidence import Evidence

_CASE = parse_case("v=1 seq_len=8 sliding_window_size=3 layout=dual_chunk_swap seed=1")
_OUT = "0/attention/out"


@pytest.fixture
def right(right_evidence: Callable[..., Evidence]) -> Evidence:
    return right_evidence(_CASE)


def test_an_answer_does_not_differ_from_itself(right: Evidence) -> None:
    assert not differs(right, right)


def test_a_difference_is_measured_at_its_own_element(right: Evidence, right_evidence: Callable[..., Evidence]) -> None:
    allowance = right.answer(0, "attention").allowance["out"][:, _CASE.problem.positions()]
    for times, expected in ((0.9, False), (1.1, True)):
        changed = right.arrays[_OUT].copy()
        changed[0, 5, 1, 2] += times * allowance[0, 5, 1, 2]
        assert differs(right, right_evidence(_CASE, {_OUT: changed})) is expected, f"{times} allowances"


def test_nan_differs_from_a_number_and_not_from_nan(right: Evidence, right_evidence: Callable[..., Evidence]) -> None:
    changed = right.arrays[_OUT].copy()
    changed[0, 0, 0, 0] = np.nan
    wrong = right_evidence(_CASE, {_OUT: changed})
    assert differs(right, wrong), "NaN against a number"
    assert not differs(wrong, wrong), "NaN against NaN"


def test_an_array_without_an_answer_differs_by_any_bit(right_evidence: Callable[..., Evidence]) -> None:
    one = right_evidence(_CASE, {"readout/mask": np.array([1.0, 2.0])})
    same = right_evidence(_CASE, {"readout/mask": np.array([1.0, 2.0])})
    other = right_evidence(_CASE, {"readout/mask": np.array([1.0, np.nextafter(2.0, 3.0)])})
    assert not differs(one, same)
    assert differs(one, other)


def test_further_data_differ_where_one_is_zero_or_not_finite(right: Evidence) -> None:
    def read_out(*values: float) -> Evidence:
        arrays = {**right.arrays, "coded/attention/out": np.array(values)}
        return Evidence(right.target, right.case, right.message, arrays, ("coded",))

    assert not differs(read_out(1.0, 0.0), read_out(1.0 + 1e-9, 0.0)), "another rounding of the same read-out"
    assert differs(read_out(1.0, 0.0), read_out(1.0, 1e-30)), "a cell that is seen"
    assert differs(read_out(1.0, 0.0), read_out(np.inf, 0.0)), "a cell that is not finite"


def test_a_missing_array_is_a_difference(right: Evidence) -> None:
    rest = {name: array for name, array in right.arrays.items() if name != _OUT}
    assert differs(right, Evidence(right.target, right.case, right.message, rest))


def test_facts_differ_but_for_stack_frames_and_times(right_evidence: Callable[..., Evidence]) -> None:
    one = right_evidence(_CASE, message={"bytes": 8, "raised": {"type": "TypeError", "traceback": "line 1"}})
    same = right_evidence(_CASE, message={"bytes": 8, "raised": {"type": "TypeError", "traceback": "line 2"}})
    other = right_evidence(_CASE, message={"bytes": 9, "raised": {"type": "TypeError", "traceback": "line 1"}})
    assert not differs(one, same)
    assert differs(one, other)
