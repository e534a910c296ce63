"""oracle/arguments.py: what callers may pass, and the sentence they get for what they may not."""

import re

import ml_dtypes
import numpy as np
import pytest

import oracle


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": (-1, 0)}, "window left must be None or an integer >= 0, got -1"),
        ({"window": (0, -1)}, "window right must be None or an integer >= 0, got -1"),
        ({"window": (1.0, 0)}, "window left must be None or an integer >= 0, got 1.0"),
        ({"window": (0, True)}, "window right must be None or an integer >= 0, got True"),
        ({"window": None}, "window must be a tuple (left, right), got None"),
        ({"window": 4}, "window must be a tuple (left, right), got 4"),
        ({"window": (1, 0, 0)}, "window must be a tuple (left, right), got (1, 0, 0)"),
        ({"query": np.zeros((1, 6, 2))}, "query must have 4 dimensions, got shape (1, 6, 2)"),
        ({"key": np.zeros((1, 6, 2))}, "key must have 4 dimensions, got shape (1, 6, 2)"),
        ({"value": np.zeros((1, 6, 3))}, "value must have 4 dimensions, got shape (1, 6, 3)"),
        ({"query": np.zeros((1, 0, 2, 2))}, "query, key and value must not be empty, got shapes (1, 0, 2, 2), "),
        ({"query": np.zeros((1, 6, 2, 2), int)}, "query must have a dtype of bfloat16, float16, float32, float64, got"),
        ({"key": np.zeros((1, 5, 1, 2))}, "key must have query's batch and seq (1, 6), got (1, 5)"),
        ({"key": np.zeros((2, 6, 1, 2))}, "key must have query's batch and seq (1, 6), got (2, 6)"),
        ({"key": np.zeros((1, 6, 1, 4))}, "key must have query's head_dim 2, got 4"),
        (
            {"value": np.zeros((1, 6, 2, 3))},
            "value must have key's batch, seq and num_kv_heads (1, 6, 1), got (1, 6, 2)",
        ),
        ({"heads": (4, 3)}, "num_query_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"segment_ids": np.zeros((1, 6))}, "segment_ids must be integers, got dtype float64"),
        ({"segment_ids": np.zeros((1, 5), int)}, "segment_ids must have shape [batch, seq] = (1, 6), got (1, 5)"),
        ({"padding_segment_id": 0}, "padding_segment_id needs segment_ids, got 0 without them"),
        (
            {"segment_ids": np.zeros((1, 6), int), "padding_segment_id": 0.5},
            "padding_segment_id must be None or an integer, got 0.5",
        ),
        ({"attn_logits_soft_cap": 0.0}, "attn_logits_soft_cap must be None or a finite number > 0, got 0.0"),
        ({"attn_logits_soft_cap": -1.0}, "attn_logits_soft_cap must be None or a finite number > 0, got -1.0"),
        ({"attn_logits_soft_cap": np.inf}, "attn_logits_soft_cap must be None or a finite number > 0, got inf"),
        ({"attn_logits_soft_cap": "50"}, "attn_logits_soft_cap must be None or a finite number > 0, got '50'"),
        ({"attn_logits_soft_cap": True}, "attn_logits_soft_cap must be None or a finite number > 0, got True"),
        ({"scale": np.nan}, "scale must be None or a finite number, got nan"),
        ({"scale": False}, "scale must be None or a finite number, got False"),
        ({"sinks": np.zeros(1)}, "sinks must have shape [num_query_heads] = (2,), got (1,)"),
        ({"sinks": np.zeros((2, 1))}, "sinks must have 1 dimensions, got shape (2, 1)"),
        ({"sinks": np.array([0.0, -np.inf])}, "sinks must be finite, got [  0. -inf]"),
        ({"dout": np.zeros((1, 6, 2, 2))}, "dout must have the shape of out (1, 6, 2, 3), got (1, 6, 2, 2)"),
        ({"dout": np.zeros((1, 6, 2))}, "dout must have 4 dimensions, got shape (1, 6, 2)"),
        ({"dlse": np.zeros((1, 6, 2, 3))}, "dlse must have 3 dimensions, got shape (1, 6, 2, 3)"),
        ({"dlse": np.zeros((1, 6, 1))}, "dlse must have the shape of lse (1, 6, 2), got (1, 6, 1)"),
    ],
)
def test_bad_arguments_are_named_with_their_value_and_the_rule(draw, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        oracle.attention_vjp(**draw(**changes))


@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dlse"])
def test_a_number_that_is_read_must_be_finite(draw, name):
    case = draw()
    index = (0, 3, 0, 1)[: case[name].ndim]
    case[name][index] = np.nan
    with pytest.raises(
        ValueError, match=rf"^{name} must be finite where it is read, got nan at {re.escape(str(index))}$"
    ):
        oracle.attention_vjp(**case)


def test_an_unknown_option_is_refused(draw):
    with pytest.raises(TypeError, match="soft_cap"):
        oracle.attention_vjp(**draw(soft_cap=5.0))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_inputs_are_taken_at_their_stored_precision(draw, dtype):
    case = draw()
    tensors = ("query", "key", "value", "dout", "dlse")
    stored = {**case, **{name: case[name].astype(dtype) for name in tensors}}
    widened = {**case, **{name: stored[name].astype(np.float64) for name in tensors}}
    for low, wide in zip(oracle.attention_vjp(**stored)[:3], oracle.attention_vjp(**widened)[:3], strict=True):
        np.testing.assert_array_equal(low, wide, "nothing in the oracle rounds")
        assert low.dtype == np.float64, "answers are float64"


def test_numpy_scalars_are_accepted(draw):
    window = (np.int32(3), np.int64(0))
    case = draw(window=window, scale=np.float32(0.5), attn_logits_soft_cap=np.float32(4.0))
    plain = {**case, "window": (3, 0), "scale": 0.5, "attn_logits_soft_cap": 4.0}
    np.testing.assert_array_equal(oracle.attention_vjp(**case).dkey, oracle.attention_vjp(**plain).dkey)
