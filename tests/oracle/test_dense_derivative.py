"""oracle/dense.py: the VJP is the derivative of the forward, at sizes beyond 50-digit arithmetic, by complex steps."""

import numpy as np
import pytest

import oracle

TENSORS = ("query", "key", "value", "sinks")
VARIANTS = {
    "window": {"window": (6, 0)},
    "capped and sunk": {"window": (None, 0), "attn_logits_soft_cap": 2.0, "sinks": np.array([0.5, -2.0, 1.0, 0.0])},
    "documents and padding": {
        "window": (9, 2),
        "segment_ids": np.repeat([[1, 2, 1, 0, 3]], 5, axis=1),
        "padding_segment_id": 0,
        "sinks": np.array([0.0, 1.0, 2.0, 3.0]),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tensor", [*TENSORS, "all"])
def test_vjp_agrees_with_a_complex_step_along_a_random_direction(draw, complex_step, variant, tensor):
    case = draw(seed=5, seq=25, heads=(4, 2), dims=(6, 4), **VARIANTS[variant])
    present = [name for name in TENSORS if name in case]
    if tensor not in [*present, "all"]:
        assert oracle.attention_vjp(**case).dsinks is None, "no sinks, no gradient"
        return
    random = np.random.default_rng(9)
    moves = {name: random.normal(size=case[name].shape) * (tensor in (name, "all")) for name in present}
    gradients = oracle.attention_vjp(**case)._asdict()
    along = sum((gradients[f"d{name}"] * moves[name]).sum() for name in present)
    assert along == pytest.approx(complex_step(case, moves), rel=1e-13, abs=1e-13), f"derivative by {tensor}"


def test_vjp_is_linear_in_the_cotangents(draw):
    case = draw(seed=1, seq=12)
    scaled = oracle.attention_vjp(**{**case, "dout": 3 * case["dout"], "dlse": 3 * case["dlse"]})
    for once, thrice in zip(oracle.attention_vjp(**case)[:3], scaled[:3], strict=True):
        np.testing.assert_allclose(3 * once, thrice, rtol=1e-13, atol=1e-15)


def test_a_missing_cotangent_of_lse_is_zero(draw):
    case = draw(seed=2)
    without = oracle.attention_vjp(**{**case, "dlse": None})
    zero = oracle.attention_vjp(**{**case, "dlse": np.zeros_like(case["dlse"])})
    for left, right in zip(without[:3], zero[:3], strict=True):
        np.testing.assert_array_equal(left, right)
