"""oracle/budget.py: the answer beside the allowances is the dense one, and a share of 1 is where passing ends."""

import ml_dtypes
import numpy as np
import pytest

import oracle
from oracle.budget import Precision, allowances, answer_with_allowances, share

VARIANTS = {
    "one tile": {"seq": 40, "window": (12, 0)},
    "many tiles": {"seq": 300, "window": (150, 3)},
    "everything": {
        "seq": 260,
        "batch": 2,
        "window": (140, 1),
        "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
        "attn_logits_soft_cap": 2.0,
        "segment_ids": np.repeat([[1, 2, 1, 9], [3, 3, 3, 9]], 65, axis=1),
        "padding_segment_id": 9,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_answer_is_the_dense_one(draw, variant):
    case = draw(seed=3, heads=(4, 2), dims=(8, 5), **VARIANTS[variant])
    answer, _ = answer_with_allowances(**case, precision=Precision("float64"))
    forward = {name: value for name, value in case.items() if name not in ("dout", "dlse")}
    dense = {**oracle.attention(**forward)._asdict(), **oracle.attention_vjp(**case)._asdict()}
    for tensor, expected in dense.items():
        if expected is None:
            assert getattr(answer, tensor) is None, f"{tensor} does not exist"
        else:
            np.testing.assert_allclose(getattr(answer, tensor), expected, rtol=1e-12, atol=1e-12, err_msg=tensor)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("structured_values", [False, True])
def test_allowances_are_finite_and_shaped_like_the_answer(draw, variant, dtype, structured_values):
    case = draw(seed=3, heads=(4, 2), dims=(8, 5), **VARIANTS[variant])
    answer, allowed = answer_with_allowances(**case, precision=Precision(dtype), structured_values=structured_values)
    for tensor, expected, allowance in zip(answer._fields, answer, allowed, strict=True):
        if expected is None:
            assert allowance is None, f"{tensor} does not exist"
        else:
            assert allowance.shape == expected.shape, tensor
            assert np.isfinite(allowance).all(), tensor
            assert (allowance >= 0).all(), tensor


def test_allowances_alone_are_those_beside_the_answer(draw):
    case = draw(sinks=np.zeros(2))
    precision = Precision("bfloat16")
    beside = answer_with_allowances(**case, precision=precision)[1]
    for left, right in zip(allowances(**case, precision=precision), beside, strict=True):
        np.testing.assert_array_equal(left, right)


def test_worst_case_allowances_are_the_larger_ones_where_many_roundings_add_up(draw):
    case = draw(seq=600, dims=(4, 4), window=(None, 0), sinks=np.zeros(2))
    case["query"] *= 0.1
    independent = allowances(**case, precision=Precision("bfloat16"))
    worst = allowances(**case, precision=Precision("bfloat16"), structured_values=True)
    for tensor in ("out", "dquery"):
        ratios = getattr(worst, tensor)[:, 300:] / getattr(independent, tensor)[:, 300:]
        assert ratios.min() > 1.2, f"{tensor}: n roundings add up to n, not to 6 sqrt(n), from n = 36 on"
    assert (worst.dsinks > 1.2 * independent.dsinks).all(), "dsinks sums over 600 queries"


def test_share_is_error_over_allowance():
    found = share(np.array([1.5, 3.0, 0.0]), np.array([1.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    assert found.tolist() == [0.5, 2.0, 0.0], "errors of 0.5, 2 and 0"


def test_equal_infinities_agree_and_unequal_ones_do_not():
    found = share(np.array([-np.inf, np.inf, 3.0]), np.array([-np.inf] * 3), np.zeros(3))
    assert found.tolist() == [0.0, np.inf, np.inf], "lse of an empty row is -inf exactly"


@pytest.mark.parametrize("allowance", [0.0, 1.0, 1e300, np.inf])
def test_nan_never_passes(allowance):
    assert share(np.array([np.nan]), np.array([0.0]), np.array([allowance])).item() > 1
    assert share(np.array([np.nan]), np.array([np.nan]), np.array([allowance])).item() > 1


def test_any_error_fails_without_an_allowance():
    assert share(np.array([1e-300]), np.array([0.0]), np.array([0.0])).item() == np.inf


def test_share_takes_the_dtype_of_the_implementation():
    found = share(np.array([1.5], ml_dtypes.bfloat16), np.array([1.0]), np.array([1.0]))
    assert found.tolist() == [0.5], "bfloat16 is widened first"
