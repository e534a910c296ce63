"""oracle/precision.py: what can be declared, what cannot, and the roundoffs that follow."""

import re

import ml_dtypes
import numpy as np
import pytest

from oracle.budget import Precision
from oracle.precision import PASS_ROUNDOFF, SMALLEST_NORMAL, UNIT_ROUNDOFF


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_unit_roundoff_is_half_the_distance_from_one_to_the_next_number(dtype):
    assert float(ml_dtypes.finfo(dtype).eps) / 2 == UNIT_ROUNDOFF[dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_smallest_normal_number(dtype):
    assert float(np.finfo(dtype).smallest_normal) == SMALLEST_NORMAL[dtype]


@pytest.mark.parametrize("passes", [1, 3])
def test_a_product_of_bfloat16_pieces_strays_by_two_operand_roundoffs_at_most(passes):
    random = np.random.default_rng(passes)
    left, right = (random.uniform(1, 2, 200_000).astype(np.float32) for _ in range(2))

    def pieces(number):
        high = number.astype(ml_dtypes.bfloat16).astype(np.float32)
        low = (number - high).astype(ml_dtypes.bfloat16).astype(np.float32)
        return (high.astype(float), low.astype(float)) if passes == 3 else (high.astype(float), 0.0)

    (left_high, left_low), (right_high, right_low) = pieces(left), pieces(right)
    product = left_high * right_high + left_high * right_low + left_low * right_high
    exact = left.astype(float) * right.astype(float)
    error = np.abs(product / exact - 1).max()
    assert error <= 2 * PASS_ROUNDOFF[passes] * (1 + PASS_ROUNDOFF[passes]), "two operands, each rounded"
    assert error >= 0.5 * PASS_ROUNDOFF[passes], "and the bound is no more than a few times too large"


def test_defaults_are_the_usual_numerics_of_the_dtype():
    assert Precision("bfloat16").factor_roundoff == 2.0**-8, "probabilities are rounded to bfloat16"
    assert Precision("float32").factor_roundoff == 0.0, "nothing is rounded but sums"
    assert Precision("float64").statistics_roundoff == 2.0**-53, "sums are float64 in the exact tier"
    assert Precision("bfloat16").statistics_roundoff == 2.0**-24, "sums are float32"


def test_what_is_declared_shows_in_the_text_of_the_verdict():
    assert str(Precision("float32")) == "float32"
    assert str(Precision("float32", matmul_passes=1)) == "float32 matmul_passes=1"
    declared = Precision("bfloat16", prescaled_query=True, rounded_probabilities=False)
    assert str(declared) == "bfloat16 rounded_probabilities=False prescaled_query=True"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of bfloat16, float32, float64, got 'float8_e4m3fn'"),
        ({"dtype": "float32", "matmul_passes": 2}, "matmul_passes must be one of 1, 3, 6, got 2"),
        (
            {"dtype": "bfloat16", "matmul_passes": 1},
            "matmul_passes must be 6 unless dtype is float32, got 1 for bfloat16",
        ),
        ({"dtype": "float64", "rounded_logits": True}, "rounded_logits must not be declared for float64 "),
        ({"dtype": "float64", "prescaled_query": True}, "prescaled_query must not be declared for float64 "),
        ({"dtype": "float64", "rounded_partials": True}, "rounded_partials must not be declared for float64 "),
        (
            {"dtype": "float64", "rounded_probabilities": True},
            "rounded_probabilities must not be declared for float64 ",
        ),
        ({"dtype": "float32", "prescaled_query": 1}, "prescaled_query must be True or False, got 1"),
        ({"dtype": "float32", "rounded_partials": 1}, "rounded_partials must be True or False, got 1"),
        ({"dtype": "float32", "rounded_logits": None}, "rounded_logits must be True or False, got None"),
        ({"dtype": "float32", "rounded_probabilities": 1}, "rounded_probabilities must be True or False, got 1"),
    ],
)
def test_numerics_below_the_floor_cannot_be_declared(declared, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Precision(**declared)
