"""What a check looks at: a case, what one target did on it, and the answers it should have given.

May touch: answers.py; never JAX, never the target. Tests: tests/conformance/test_evidence.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.answers import Answer, answer_for, variant_answer
from conformance.case_text import format_case
from conformance.inputs import NUM_DRAWS
from conformance.problem import Case
from conformance.target import TargetDescription, calls_of


@dataclass(frozen=True)
class Evidence:
    """One execution: the message and the arrays that the worker sent, in layout order.

    Arrays are named `draw/call/tensor`, and `variant/call/tensor` for the `variants` (names of variants.VARIANTS) that
    the same program was run on as well.
    """

    target: TargetDescription
    case: Case
    message: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    variants: tuple[str, ...] = ()
    answers: Callable[[int, str], Answer] | None = None
    """(draw, call) to what is owed, for who has asked the oracle elsewhere; None: answer_for."""

    @property
    def calls(self) -> tuple[str, ...]:
        """The functions of the target that were called."""
        return calls_of(self.target, self.case)

    @property
    def case_text(self) -> str:
        """The case as one line."""
        return format_case(self.case)

    def answer(self, draw: int, call: str) -> Answer:
        """What the target should have returned."""
        return self.answers(draw, call) if self.answers else answer_for(self.target, self.case, draw, call)

    def answer_to_variant(self, variant: str) -> Answer:
        """What the target should have returned on a variant with cotangent 0 of lse, in each of its calls."""
        return variant_answer(self.target, self.case, variant)

    def in_position_order(self, name: str) -> np.ndarray:
        """An output with its rows at their positions (dsinks has no rows and comes as it is)."""
        array = self.arrays[name]
        if array.ndim < 3:
            return array
        ordered = np.empty_like(array)
        ordered[:, self.case.problem.positions()] = array
        return ordered

    def at_places(self, name: str, places: np.ndarray) -> np.ndarray:
        """The rows of an output at `places` [n, 3]: batch row, position, head; of dsinks at [n, 1], the head."""
        if places.shape[1] == 1:
            return self.arrays[name][places[:, 0]]
        index_of = np.argsort(self.case.problem.positions())
        batch_rows, positions, heads = places.T
        return self.arrays[name][batch_rows, index_of[positions], heads]

    def sources_of(self, tensor: str) -> Iterator[tuple[int, str, str]]:
        """(draw, call, name in `arrays`) of each place where the target gave `tensor`; of vjp after primal."""
        for draw in range(NUM_DRAWS):
            for call in self.calls:
                for name in (f"{draw}/{call}/{tensor}", f"{draw}/{call}/{tensor} of vjp"):
                    if name in self.arrays:
                        yield draw, call, name
