"""oracle/dense.py against 50-digit arithmetic: forward by definition, every gradient by finite differences."""

import numpy as np
import pytest

import oracle

SINKS = np.array([0.7, -1.3])
CASES = {
    "causal window": {},
    "two-sided window": {"window": (1, 2)},
    "full causal with scale": {"window": (None, 0), "scale": -1.7},
    "everything visible": {"window": (None, None), "dims": (3, 1)},
    "soft cap": {"attn_logits_soft_cap": 0.8, "scale": 2.0},
    "sinks": {"sinks": SINKS},
    "kv head each": {"heads": (2, 2), "sinks": SINKS},
    "segments that repeat": {"segment_ids": np.array([[3, -1, 3, 3, -1, 0]]), "window": (4, 1)},
    "padding": {"segment_ids": np.array([[1, 1, 0, 0, 1, 0]]), "padding_segment_id": 0},
    "all at once": {
        "segment_ids": np.array([[2, 2, 9, 5, 2, 5]]), "padding_segment_id": 9, "sinks": SINKS,
        "attn_logits_soft_cap": 1.5, "scale": 1.1, "window": (5, 1),
    },
    "two batch rows": {"batch": 2, "seq": 3, "segment_ids": np.array([[0, 0, 1], [0, 1, 1]])},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answer_and_gradients_have_fifteen_digits(draw, fifty_digits, name):
    case = draw(seed=len(name), **CASES[name])
    exact = fifty_digits(case)
    forward = {key: value for key, value in case.items() if key not in ("dout", "dlse")}
    found = {**oracle.attention(**forward)._asdict(), **oracle.attention_vjp(**case)._asdict()}
    for tensor, expected in exact.items():
        np.testing.assert_allclose(found[tensor], expected, rtol=1e-14, atol=1e-14, err_msg=tensor)
