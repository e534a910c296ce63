"""oracle/dense.py against values that a reader can work out: each test says why its number is right."""

import math

import numpy as np
import pytest

import oracle


def column(*numbers):
    """One batch row, one head, one feature: [1, seq, 1, 1]."""
    return np.array(numbers, np.float64).reshape(1, -1, 1, 1)


def test_equal_logits_average_the_visible_values():
    out, lse = oracle.attention(column(0, 0, 0, 0), column(1, 2, 3, 4), column(8, 4, 2, 1), window=(1, 0))
    assert out.ravel().tolist() == [8.0, 6.0, 3.0, 1.5], "the query's own value and the one before it, averaged"
    np.testing.assert_allclose(lse.ravel(), [0, math.log(2), math.log(2), math.log(2)], atol=1e-15)


def test_probabilities_follow_exp_of_the_logits():
    """Logits log 1 and log 3 give probabilities 1/4 and 3/4 and a denominator of 4."""
    out, lse = oracle.attention(column(0, 1), column(0, math.log(3)), column(8, 16), window=(1, 0), scale=1.0)
    np.testing.assert_allclose(out.ravel(), [8, 8 / 4 + 16 * 3 / 4], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [0, math.log(4)], rtol=1e-15, atol=1e-15)


def test_default_scale_is_one_over_root_head_dim():
    query = np.ones((1, 1, 1, 16))
    key, value = np.ones((1, 1, 1, 16)), np.ones((1, 1, 1, 1))
    assert oracle.attention(query, key, value, window=(0, 0)).lse.item() == pytest.approx(16 / 4), "16 / sqrt(16)"


def test_window_right_of_the_query_reads_later_keys():
    out, _ = oracle.attention(column(0, 0, 0), column(0, 0, 0), column(1, 3, 8), window=(0, 1))
    assert out.ravel().tolist() == [2.0, 5.5, 8.0], "the query's own value and the next one, averaged"


def test_no_value_leaks_across_segments():
    segments = np.array([[4, 4, -4, -4]])
    out, lse = oracle.attention(
        column(0, 0, 0, 0), column(0, 0, 0, 0), column(1, 3, 10, 30), window=(None, 0), segment_ids=segments
    )
    assert out.ravel().tolist() == [1.0, 2.0, 10.0, 20.0], "averages start again at position 2"
    np.testing.assert_allclose(np.exp(lse.ravel()), [1, 2, 1, 2], rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_neighbouring_ids_that_no_float_can_tell_apart_are_two_segments(draw, dtype):
    ids = np.array([[2**60, 2**60, 2**60, 2**60 + 1, 2**60 + 1, 2**60 + 1]], dtype)
    case = draw(window=(None, 0), segment_ids=ids)
    out, _ = oracle.attention(**{name: case[name] for name in ("query", "key", "value", "window", "segment_ids")})
    np.testing.assert_allclose(out[0, 3, 0], case["value"][0, 3, 0])


def test_a_padding_row_is_empty_and_its_contents_reach_nobody():
    poison = np.array([np.nan, np.inf, -1e30])
    segments = np.array([[0, 7, 0, 7, 7]])
    key, value = column(0, poison[0], 0, poison[1], poison[2]), column(1, poison[1], 3, poison[2], poison[0])
    query, dout = column(0, poison[2], 0, poison[0], poison[1]), column(1, np.nan, 1, np.inf, np.nan)
    options = {"window": (None, 0), "segment_ids": segments, "padding_segment_id": 7}
    out, lse = oracle.attention(query, key, value, **options)
    assert out.ravel().tolist() == [1.0, 0.0, 2.0, 0.0, 0.0], "an empty row has out 0"
    assert lse.ravel()[[1, 3, 4]].tolist() == [-math.inf] * 3, "and lse -inf"
    dlse = np.full((1, 5, 1), np.nan)
    dlse[0, [0, 2]] = 0.0
    gradients = oracle.attention_vjp(query, key, value, dout=dout, dlse=dlse, **options)
    assert gradients.dvalue.ravel().tolist() == [1.5, 0.0, 0.5, 0.0, 0.0], "value 0 is read by 1 and half of 1"
    for gradient in gradients[:3]:
        assert not gradient[0, [1, 3, 4]].any(), "no gradient flows to padding"
    assert gradients.dsinks is None, "no sinks, no dsinks"


def test_an_empty_row_with_a_sink_has_the_sinks_lse_and_sends_it_the_cotangent_of_lse():
    options = {
        "window": (None, 0),
        "segment_ids": np.array([[0, 7]]),
        "padding_segment_id": 7,
        "sinks": np.array([3.0]),
    }
    out, lse = oracle.attention(column(0, 0), column(0, 0), column(1, 1), **options)
    assert lse.ravel()[1] == 3.0, "the sink is the only term of the denominator"
    assert out.ravel()[1] == 0.0, "and has no value"
    dlse = np.array([0.0, 5.0]).reshape(1, 2, 1)
    gradients = oracle.attention_vjp(column(0, 0), column(0, 0), column(1, 1), dout=column(0, 9), dlse=dlse, **options)
    assert gradients.dsinks == pytest.approx([5.0]), "d lse / d sink = 1"
    assert not any(gradient.any() for gradient in gradients[:3]), "nothing else depends on that row"


def test_a_sink_takes_a_share_of_the_probability_and_has_no_value():
    """A sink of log 2 beside two logits of 0: the denominator is 4 and the values get a quarter each."""
    out, lse = oracle.attention(column(0, 0), column(0, 0), column(8, 4), window=(1, 0), sinks=np.array([math.log(2)]))
    np.testing.assert_allclose(out.ravel(), [8 / 3, 8 / 4 + 4 / 4], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [math.log(3), math.log(4)], rtol=1e-15)


def test_a_sink_is_neither_scaled_nor_capped():
    out, lse = oracle.attention(
        column(0), column(0), column(1), window=(0, 0), sinks=np.array([10.0]), scale=0.01, attn_logits_soft_cap=2.0
    )
    assert lse.item() == pytest.approx(math.log(1 + math.exp(10.0)), rel=1e-15), "exp(10), not exp(2 tanh 5)"
    assert out.item() == pytest.approx(1 / (1 + math.exp(10.0)), rel=1e-13)


def test_each_head_has_its_own_sink():
    zeros = np.zeros((1, 1, 2, 1))
    out, _ = oracle.attention(zeros, zeros, np.ones((1, 1, 2, 1)), window=(0, 0), sinks=np.array([0.0, math.log(3)]))
    np.testing.assert_allclose(out.ravel(), [1 / 2, 1 / 4], rtol=1e-15)


def test_soft_cap_comes_after_the_scale():
    logit = oracle.attention(column(3), column(4), column(1), window=(0, 0), scale=0.5, attn_logits_soft_cap=5.0).lse
    assert logit.item() == pytest.approx(5 * math.tanh(6 / 5), rel=1e-15), "cap * tanh(scale * 3 * 4 / cap)"


def test_a_hidden_key_stays_hidden_under_a_cap():
    """A cap applied after the mask would lift -inf to -cap: the huge hidden value would show."""
    out, _ = oracle.attention(column(0, 0), column(0, 0), column(1, 1e30), window=(1, 0), attn_logits_soft_cap=5.0)
    assert out.ravel()[0] == 1.0, "query 0 sees value 0 only"


def test_the_caps_slope_scales_the_gradient():
    """One key and a sink of 0, logit x capped to c = 5 tanh(x/5): d lse/dx = p (1 - tanh(x/5)^2), p = e^c/(e^c + 1)."""
    capped, slope = 5 * math.tanh(2 / 5), 1 - math.tanh(2 / 5) ** 2
    probability = math.exp(capped) / (math.exp(capped) + 1)
    gradients = oracle.attention_vjp(
        column(2), column(1), column(0), dout=column(0), dlse=np.ones((1, 1, 1)),
        window=(0, 0), scale=1.0, attn_logits_soft_cap=5.0, sinks=np.zeros(1),
    )  # fmt: skip
    assert gradients.dquery.item() == pytest.approx(probability * slope * 1, rel=1e-14), "times the key, 1"
    assert gradients.dkey.item() == pytest.approx(probability * slope * 2, rel=1e-14), "times the query, 2"


def test_the_slope_of_a_saturated_cap_is_tiny_and_not_zero():
    gradients = oracle.attention_vjp(
        column(100), column(1), column(0), dout=column(0), dlse=np.ones((1, 1, 1)),
        window=(0, 0), scale=1.0, attn_logits_soft_cap=5.0, sinks=np.array([-100.0]),
    )  # fmt: skip
    assert gradients.dquery.item() == pytest.approx(4 * math.exp(-40.0), rel=1e-12), "1 - tanh(20)^2 = 4 exp(-40)"


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 3), (6, 2), (6, 1), (6, 6)])
def test_query_head_h_reads_kv_head_h_over_group(query_heads, kv_heads):
    query = np.zeros((1, 1, query_heads, 1))
    value = np.arange(kv_heads, dtype=float).reshape(1, 1, kv_heads, 1)
    out, _ = oracle.attention(query, np.zeros((1, 1, kv_heads, 1)), value, window=(0, 0))
    assert out.ravel().tolist() == [h // (query_heads // kv_heads) for h in range(query_heads)], "head h // group"


def test_kv_gradients_add_over_the_heads_of_a_group_and_nothing_else():
    zeros = np.zeros((1, 1, 4, 1))
    dout = np.array([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 4, 1)
    gradients = oracle.attention_vjp(zeros, zeros[:, :, :2], zeros[:, :, :2], dout=dout, window=(0, 0))
    assert gradients.dvalue.ravel().tolist() == [11.0, 1100.0], "query heads 0, 1 read kv head 0; 2, 3 read 1"


def test_value_dim_may_differ_from_head_dim():
    out, _ = oracle.attention(
        np.zeros((1, 2, 1, 3)), np.zeros((1, 2, 1, 3)), np.array([[[[2.0, 4.0]], [[4.0, 8.0]]]]), window=(None, 0)
    )
    assert out.tolist() == [[[[2.0, 4.0]], [[3.0, 6.0]]]], "averages of values with two features"


def test_batch_rows_are_independent():
    value = np.array([1.0, 3.0, 10.0, 30.0]).reshape(2, 2, 1, 1)
    zeros = np.zeros((2, 2, 1, 1))
    out, _ = oracle.attention(zeros, zeros, value, window=(None, 0), segment_ids=np.array([[0, 0], [0, 1]]))
    assert out.ravel().tolist() == [1.0, 2.0, 10.0, 30.0], "the second row has two documents"


def test_logits_beyond_the_range_of_exp_do_no_harm():
    out, lse = oracle.attention(column(1, 1), column(1e4, 2e4), column(1, 2), window=(1, 0), scale=1.0)
    assert out.ravel().tolist() == [1.0, 2.0], "the larger logit takes it all"
    assert lse.ravel().tolist() == [1e4, 2e4]


def test_a_hidden_key_moves_no_bit():
    """A key of 1e30 that query 0 does not see leaves query 0's whole answer as it is, gradients included."""
    dout = column(1, 0)
    clean = oracle.attention_vjp(column(1, 1), column(1, 2), column(1, 2), dout=dout, window=(1, 0))
    poisoned = oracle.attention_vjp(column(1, 1), column(1, 1e30), column(1, -1e30), dout=dout, window=(1, 0))
    for left, right in zip(clean[:3], poisoned[:3], strict=True):
        assert left[0, 0] == right[0, 0], "position 0's gradients"


def test_gradient_of_a_uniform_average_in_rationals():
    """query = 0, keys (1, 3), values (0, 1): at query 1: p = 1/2, dp = (0, 1), delta = 1/2, dlogits = (-1/4, 1/4)."""
    gradients = oracle.attention_vjp(
        column(0, 0), column(1, 3), column(0, 1), dout=column(0, 1), window=(1, 0), scale=2.0
    )
    assert gradients.dquery.ravel().tolist() == [0.0, 2 * (-1 / 4 * 1 + 1 / 4 * 3)], "scale * sum dlogits * key"
    assert gradients.dkey.ravel().tolist() == [0.0, 0.0], "scale * dlogits * query, and the query is 0"
    assert gradients.dvalue.ravel().tolist() == [0.5, 0.5], "p * dout"


def test_the_cotangent_of_lse_reaches_query_and_key_and_no_value():
    """d lse / d logit = p: with dout = 0 the gradients are p * dlse times the other factor."""
    dlse = np.array([0.0, 8.0]).reshape(1, 2, 1)
    gradients = oracle.attention_vjp(
        column(0, 0), column(1, 3), column(5, 7), dout=column(0, 0), dlse=dlse, window=(1, 0), scale=1.0
    )
    assert gradients.dquery.ravel().tolist() == [0.0, 8 * (1 / 2 + 3 / 2)], "8 * (p0 * 1 + p1 * 3)"
    assert not gradients.dvalue.any(), "lse does not depend on values"
