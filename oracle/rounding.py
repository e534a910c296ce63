"""How single roundings add up: independent ones by their squares, others by their sizes; and what a sum may stray.

The two constants of the budget live here. Derivation, sources and calibration: docs/error-budgets.md. NumPy only.
Tested in tests/oracle/test_rounding.py.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float64

# n roundings, each uniform within +-u of its term, stray together by more than LAMBDA * u * root-sum-of-squares with
# probability below 2 exp(-1.5 LAMBDA^2) = 1e-16 (Chernoff: a uniform variable is sub-Gaussian with its own variance).
LAMBDA = 5.0

# A chain of elementary functions, or a short sum, strays by at most this many unit roundoffs of its absolute terms.
SHORT_SUM = 16.0

Array = Float64[np.ndarray, "*shape"]


def sum_roundoffs(terms: int) -> float:
    """Unit roundoffs of the sum of absolute values by which a sum of so many terms may stray, in any order.

    The partial sums of a chain are rounded one by one. Where the terms are spread evenly they grow like j / n, so that
    their root-sum-of-squares is sqrt(n / 3), and the deviation LAMBDA * sqrt(n / 3) / sqrt(3). (Higham and Mary, A new
    approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019: sqrt(n) instead of n.)
    """
    return max(SHORT_SUM, LAMBDA / 3.0 * math.sqrt(terms))


@dataclasses.dataclass(frozen=True)
class Roundings:
    """A sum of roundings: the sum of their squares and the sum of their sizes, both 0.0 where nothing is rounded."""

    squares: Any  # Float64 array, or 0.0
    sizes: Any

    @staticmethod
    def of(terms: Array, *roundoffs: float) -> "Roundings":
        """Each term rounded once with each of these (relative) roundoffs."""
        if not any(roundoffs):
            return Roundings(0.0, 0.0)
        return Roundings(sum(u**2 for u in roundoffs) * np.square(terms), sum(roundoffs) * np.abs(terms))

    @staticmethod
    def bounded(errors: Array) -> "Roundings":
        """Errors that lie within these bounds and are otherwise unknown, each independent of the others.

        Hoeffding: sub-Gaussian with the square of the bound in place of a variance, three times that of a uniform one.
        """
        return Roundings(3.0 * np.square(errors), errors)

    def __add__(self, other: "Roundings") -> "Roundings":
        """Both together."""
        return Roundings(self.squares + other.squares, self.sizes + other.sizes)

    def times(self, factor: Array | float) -> "Roundings":
        """Roundings of a number that is multiplied by a factor afterwards."""
        return Roundings(self.squares * np.square(factor), self.sizes * np.abs(factor))

    def matmul(self, matrix: Array) -> "Roundings":
        """Roundings of the left factor of a matmul, in the product."""
        if self.is_nothing:
            return self
        return Roundings(self.squares @ np.square(matrix), self.sizes @ np.abs(matrix))

    def transposed_matmul(self, matrix: Array) -> "Roundings":
        """The same where the left factor [group, query, key] is transposed to [group, key, query] first."""
        if self.is_nothing:
            return self
        return Roundings(self.squares.swapaxes(1, 2), self.sizes.swapaxes(1, 2)).matmul(matrix)

    def sum(self, axis: int) -> "Roundings":
        """Roundings of terms that are added along an axis."""
        return (
            Roundings(np.sum(self.squares, axis=axis), np.sum(self.sizes, axis=axis)) if not self.is_nothing else self
        )

    def along(self, axis: int) -> "Roundings":
        """With one more axis, to be broadcast along."""
        return self if self.is_nothing else Roundings(*(np.expand_dims(x, axis) for x in (self.squares, self.sizes)))

    @property
    def is_nothing(self) -> bool:
        """Nothing is rounded (told by the type, so that no work is done for it)."""
        return type(self.sizes) is float  # a sum over all axes is a np.float64, which is a subclass

    def bound(self, independent: bool, in_common: Array | float = 0.0) -> Any:
        """How far they stray together: `sizes` at worst; if independent, no more than LAMBDA standard terms, beside
        what all of them have `in_common` (equal factors round equally)."""
        if not independent or self.is_nothing:
            return self.sizes
        return np.minimum(self.sizes, LAMBDA * np.sqrt(self.squares) + in_common)
