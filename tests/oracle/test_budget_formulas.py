"""oracle/error_terms.py and budget.py against the formulas of docs/error-budgets.md, written down again in plain loops.

One number at a time, no arrays: an error of a factor, an axis or a sign in the vectorised code cannot be here too. The
right answer itself is taken from the dense oracle, which has tests of its own.
"""

import math
from itertools import product

import numpy as np
import pytest

import oracle
from oracle.budget import Precision, allowances

BF16, F32, F64 = 2.0**-8, 2.0**-24, 2.0**-53
# (output, sums, factors, inputs, query, logits, stored, partials) roundoffs and the smallest normal number, by hand.
PRECISIONS = {
    "float32": (Precision("float32"), (F32, F32, 0, 0, 0, 0, 0, 0), 2.0**-126),
    "bfloat16": (Precision("bfloat16"), (BF16, F32, BF16, 0, 0, 0, BF16, 0), 2.0**-126),
    "float64": (Precision("float64"), (F64, F64, 0, 0, 0, 0, 0, 0), 2.0**-1022),
    "bfloat16, all declared": (
        Precision("bfloat16", prescaled_query=True, rounded_logits=True, rounded_partials=True),
        (BF16, F32, BF16, 0, BF16, BF16, BF16, BF16),
        2.0**-126,
    ),
    "float32, rounded partials": (
        Precision("float32", rounded_partials=True),
        (F32, F32, 0, 0, 0, 0, 0, F32),
        2.0**-126,
    ),
    "bfloat16, unrounded": (
        Precision("bfloat16", rounded_probabilities=False),
        (BF16, F32, 0, 0, 0, 0, BF16, 0),
        2.0**-126,
    ),
    "float32, one pass": (Precision("float32", matmul_passes=1), (F32, F32, BF16, BF16, 0, 0, 0, 0), 2.0**-126),
    "float32, three passes": (
        Precision("float32", matmul_passes=3, prescaled_query=True),
        (F32, F32, 1.5 * 2.0**-16, 1.5 * 2.0**-16, F32, 0, 0, 0),
        2.0**-126,
    ),
    "float32, rounded probabilities": (
        Precision("float32", rounded_probabilities=True),
        (F32, F32, BF16, 0, 0, 0, 0, 0),
        2.0**-126,
    ),
}
CASES = {
    "plain": {"window": (2, 0)},
    "all at once": {
        "batch": 2,
        "window": (2, 1),
        "sinks": np.array([0.4, -1.0, 1.5, 0.0]),
        "attn_logits_soft_cap": 1.5,
        "scale": -0.8,
        "segment_ids": np.array([[1, 1, 7, 1, 1], [1, 2, 2, 2, 7]]),
        "padding_segment_id": 7,
    },
    "long sums": {"seq": 3, "window": (None, 0), "heads": (1, 1), "dims": (150, 130)},
    "long sums over a group": {"seq": 60, "window": (None, 0), "heads": (2, 1), "dims": (1, 1)},
    # Every other key, and the sink, has a weight of e^-100, which float32 cannot hold; the other keys have no value.
    "weights flushed to zero": {
        "window": (2, 0),
        "scale": 1.0,
        "query": np.ones((1, 5, 4, 2)),
        "key": np.tile(np.array([0.0, -50.0, 0.0, -50.0, 0.0])[None, :, None, None], (1, 1, 2, 2)),
        "value": np.tile(np.array([0.0, 1e35, 0.0, 1e35, 0.0])[None, :, None, None], (1, 1, 2, 3)),
        "sinks": np.full(4, -100.0),
    },
    "huge logits": {"window": (2, 0), "scale": 1e6},
    "beyond the cap": {"window": (2, 0), "scale": 1e3, "attn_logits_soft_cap": 50.0},
    "rows without keys": {
        "window": (1, 0),
        "segment_ids": np.array([[1, 1, 7, 2, 2]]),
        "padding_segment_id": 7,
    },
    # Each product is a difference of equal terms: 0, with an error that is large beside the cap.
    "cancelled beyond the cap": {
        "window": (2, 0),
        "scale": 1e9,
        "attn_logits_soft_cap": 0.01,
        "query": np.ones((1, 5, 4, 2)),
        "key": np.stack([np.arange(1.0, 11.0), -np.arange(1.0, 11.0)], axis=-1).reshape(1, 5, 2, 2),
    },
}


class Together:
    """Roundings that add up: squares and sizes."""

    def __init__(self):
        self.squares = self.sizes = 0.0

    def add(self, term, *roundoffs):
        for roundoff in roundoffs:
            self.squares += (roundoff * term) ** 2
            self.sizes += abs(roundoff * term)

    def add_all(self, other, factor):
        self.squares += other.squares * factor**2
        self.sizes += other.sizes * abs(factor)

    def bound(self, structured, in_common=0.0):
        return self.sizes if structured else min(self.sizes, 5 * math.sqrt(self.squares) + in_common)


def by_loops(case, roundoffs, tiny, structured):
    """The allowances of every tensor, one number at a time."""
    u_out, u_sum, u_factor, u_input, u_query, u_logit, u_stored, u_part = roundoffs
    query, key, value, dout, dlse = (case[name] for name in ("query", "key", "value", "dout", "dlse"))
    batch, seq, query_heads, head_dim = query.shape
    group, value_dim = query_heads // key.shape[2], value.shape[3]
    cap, sinks = case.get("attn_logits_soft_cap"), case.get("sinks")
    scale = case.get("scale") or head_dim**-0.5
    left, right = case["window"]
    most = min(seq, (seq if left is None else left) + right + 1)
    visible = oracle.mask.visible(
        seq,
        window=case["window"],
        segment_ids=case.get("segment_ids"),
        padding_segment_id=case.get("padding_segment_id"),
    )
    visible = np.broadcast_to(visible, (batch, seq, seq))
    forward = {name: array for name, array in case.items() if name not in ("dout", "dlse")}
    out, lse = oracle.attention(**forward)
    right_answer = oracle.attention_vjp(**case)

    def sums(terms):
        return max(16.0, 5 / 3 * math.sqrt(terms)) * u_sum

    few, flush = sums(1), 2 * tiny
    worst = {name: np.zeros_like(array) for name, array in (("out", out), ("lse", lse), ("dquery", query))}
    rounded = {name: np.empty(array.shape, object) for name, array in (("out", out), ("dquery", query))}
    worst["dkey"], worst["dvalue"] = np.zeros((batch, seq, query_heads, head_dim)), np.zeros(dout.shape)
    rounded["dkey"], rounded["dvalue"] = np.empty(query.shape, object), np.empty(dout.shape, object)
    for name in ("dkey", "dvalue"):
        for index in np.ndindex(rounded[name].shape):
            rounded[name][index] = Together()
    head_gradient = {"dkey": np.zeros(query.shape), "dvalue": np.zeros(dout.shape)}
    worst["dsinks"], rounded["dsinks"] = np.zeros(query_heads), [Together() for _ in range(query_heads)]

    for b, h, q in product(range(batch), range(query_heads), range(seq)):
        kv, keys = h // group, [k for k in range(seq) if visible[b, q, k]]
        read_lse = lse[b, q, h] if math.isfinite(lse[b, q, h]) else 0.0
        logit, slope, computed, steepest, bend, p, e_product, e_weight = {}, {}, {}, {}, {}, {}, {}, {}
        for k in keys:
            plain = scale * sum(query[b, q, h, d] * key[b, k, kv, d] for d in range(head_dim))
            size = abs(scale) * sum(abs(query[b, q, h, d] * key[b, k, kv, d]) for d in range(head_dim))
            inputs = Together()
            for d in range(head_dim):
                inputs.add(scale * query[b, q, h, d] * key[b, k, kv, d], u_query, u_input, u_input)
            partial = (size + abs(plain)) / 2  # the terms of one sign
            e_product[k] = sums(head_dim) * partial + u_logit * abs(plain) + inputs.bound(structured)
            logit[k] = plain if cap is None else cap * math.tanh(plain / cap)
            slope[k] = 1.0 if cap is None else 1 - math.tanh(plain / cap) ** 2
            e_logit, steepest[k], bend[k], computed[k] = e_product[k], 1.0, 0.0, slope[k]
            if cap is not None:
                steepest[k] = 1 / math.cosh(max(0.0, abs(plain) - e_product[k]) / cap) ** 2
                e_logit = min(steepest[k] * e_product[k], 2 * cap) + (few + u_logit) * abs(logit[k])
                tanh = min(1.0, (abs(plain) + e_product[k]) / cap)
                bend[k] = min(1.0, 2 * tanh * steepest[k] * e_product[k] / cap + few * (logit[k] / cap) ** 2)
                steepest[k] += few * (logit[k] / cap) ** 2
                computed[k] += few * (logit[k] / cap) ** 2
            e_weight[k] = math.expm1(min(100.0, e_logit + few * (1 + abs(logit[k] - read_lse))))
            p[k] = math.exp(logit[k] - read_lse)
        e_sink = few * (
            1 + (0.0 if sinks is None else abs(sinks[h] - read_lse)) + (abs(read_lse) if sinks is None else 0)
        )
        p_sink = 0.0 if sinks is None else math.exp(sinks[h] - read_lse)
        e_denominator = sum(p[k] * e_weight[k] for k in keys) + p_sink * e_sink + sums(most)
        if math.isfinite(lse[b, q, h]):
            worst["lse"][b, q, h] = e_denominator + few * abs(read_lse)
        e_lse = math.expm1(min(100.0, worst["lse"][b, q, h] + u_sum * abs(read_lse)))
        e_p = {k: e_weight[k] + e_lse + e_weight[k] * e_lse for k in keys}

        for v in range(value_dim):
            rounded["out"][b, q, h, v] = Together()
            for k in keys:
                worst["out"][b, q, h, v] += (p[k] * (e_weight[k] + sums(most)) + flush) * abs(
                    value[b, k, kv, v]
                ) + flush
                rounded["out"][b, q, h, v].add(p[k] * value[b, k, kv, v], u_factor, u_input, u_part)
            worst["out"][b, q, h, v] += e_denominator * abs(out[b, q, h, v])

        by_dim = [dout[b, q, h, v] * out[b, q, h, v] for v in range(value_dim)]
        row = dlse[b, q, h] - sum(by_dim)
        e_delta = few * abs(dlse[b, q, h]) + sum(
            abs(dout[b, q, h, v]) * worst["out"][b, q, h, v] + sums(value_dim) * abs(by_dim[v])
            for v in range(value_dim)
        )
        dp = {k: sum(dout[b, q, h, v] * value[b, k, kv, v] for v in range(value_dim)) for k in keys}
        delta = Together()
        for part in by_dim:
            delta.add(part, u_stored)
        delta.add(sum(by_dim), u_factor)
        for k in keys:
            delta.add(p[k] * dp[k], u_factor, u_factor, u_input)
            for v in range(value_dim):
                delta.add(p[k] * value[b, k, kv, v] * dout[b, q, h, v], u_part)

        for k in keys:
            inputs = Together()
            for v in range(value_dim):
                inputs.add(dout[b, q, h, v] * value[b, k, kv, v], u_input, u_input)
            size = sum(abs(dout[b, q, h, v] * value[b, k, kv, v]) for v in range(value_dim))
            e_dp = sums(value_dim) * (size + abs(dp[k])) / 2 + inputs.bound(structured)
            dlogit = p[k] * (dp[k] + row)
            e_dproduct = steepest[k] * (abs(dlogit) * (e_p[k] + few) + p[k] * (e_dp + e_delta)) + abs(dlogit) * bend[k]
            e_dproduct += flush * (1 + abs(dp[k] + row))
            dproduct = Together()
            dproduct.add(computed[k] * dlogit, u_factor, u_factor, u_input, u_part)
            dproduct.add(computed[k] * p[k] * dp[k], u_factor)
            for d in range(head_dim):
                q_d, k_d = query[b, q, h, d], key[b, k, kv, d]
                if rounded["dquery"][b, q, h, d] is None:
                    rounded["dquery"][b, q, h, d] = Together()
                worst["dquery"][b, q, h, d] += abs(scale * k_d) * (e_dproduct + sums(most) * slope[k] * abs(dlogit))
                worst["dquery"][b, q, h, d] += flush * (1 + abs(scale))
                rounded["dquery"][b, q, h, d].add_all(dproduct, scale * k_d)
                worst["dkey"][b, k, h, d] += abs(scale * q_d) * (
                    e_dproduct + sums(most * group) * slope[k] * abs(dlogit)
                )
                worst["dkey"][b, k, h, d] += flush * (1 + abs(scale))
                rounded["dkey"][b, k, h, d].add_all(dproduct, scale * q_d)
                rounded["dkey"][b, k, h, d].add_all(delta, scale * q_d * computed[k] * p[k])
                rounded["dkey"][b, k, h, d].add(scale * q_d * slope[k] * dlogit, u_query)
                head_gradient["dkey"][b, k, h, d] += scale * slope[k] * dlogit * q_d
            for v in range(value_dim):
                errors = p[k] * (e_p[k] + sums(most * group)) + flush
                worst["dvalue"][b, k, h, v] += errors * abs(dout[b, q, h, v]) + flush
                rounded["dvalue"][b, k, h, v].add(p[k] * dout[b, q, h, v], u_factor, u_input, u_part)
                head_gradient["dvalue"][b, k, h, v] += p[k] * dout[b, q, h, v]
        for d in range(head_dim):
            together = sum(scale * computed[k] * p[k] * key[b, k, kv, d] for k in keys)
            if rounded["dquery"][b, q, h, d] is None:
                rounded["dquery"][b, q, h, d] = Together()
            rounded["dquery"][b, q, h, d].add_all(delta, together)
        of_a_row = p_sink * (abs(row) * (e_sink + e_lse + sums(batch * seq)) + e_delta)
        rounded["dsinks"][h].squares += 3 * of_a_row**2
        rounded["dsinks"][h].sizes += of_a_row
        worst["dsinks"][h] += flush * (1 + abs(row))
        rounded["dsinks"][h].add_all(delta, p_sink)

    found = {"lse": worst["lse"] + u_sum * np.where(np.isfinite(lse), np.abs(lse), 0.0)}
    if sinks is not None:
        found["dsinks"] = np.array([
            worst["dsinks"][h]
            + u_sum * abs(right_answer.dsinks[h])
            + rounded["dsinks"][h].bound(structured, (u_factor + u_input + u_part + few) * abs(right_answer.dsinks[h]))
            for h in range(query_heads)
        ])  # fmt: skip
    for name, expected in (("out", out), ("dquery", right_answer.dquery)):
        found[name] = np.empty(expected.shape)
        for index in np.ndindex(expected.shape):
            size = abs(expected[index])
            stored = (u_out + (u_query if name == "dquery" else 0.0)) * size
            bound = rounded[name][index].bound(structured, (u_factor + u_input + u_part) * size)
            found[name][index] = stored + worst[name][index] + bound
    for name, expected in (("dkey", right_answer.dkey), ("dvalue", right_answer.dvalue)):
        found[name] = np.empty(expected.shape)
        for b, k, kv, d in np.ndindex(expected.shape):
            total, errors, size = Together(), 0.0, abs(expected[b, k, kv, d])
            for h in range(kv * group, (kv + 1) * group):
                errors += worst[name][b, k, h, d]
                total.add_all(rounded[name][b, k, h, d], 1.0)
                if group > 1:
                    total.add(head_gradient[name][b, k, h, d], u_stored)
            found[name][b, k, kv, d] = (
                u_out * size + errors + total.bound(structured, (u_factor + u_input + u_part) * size)
            )
    return found


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_allowances_follow_the_written_formulas(draw, name, precision, structured):
    changes = {"seq": 5, "heads": (4, 2), **CASES[name]}
    case = draw(seed=3, **changes)
    declared, roundoffs, tiny = PRECISIONS[precision]
    expected = by_loops(case, roundoffs, tiny, structured)
    found = allowances(**case, precision=declared, structured_values=structured)._asdict()
    for tensor, array in expected.items():
        np.testing.assert_allclose(found[tensor], array, rtol=1e-6, atol=0.0, err_msg=tensor)


def test_what_is_flushed_to_zero_is_allowed_for(draw):
    """Numbers below float32's range: the allowance is made of the flush terms alone, and covers an answer of zero."""
    tiny = {name: 1e-30 * draw(seed=1)[name] for name in ("query", "key", "value", "dout", "dlse")}
    case = {**draw(seed=1), **tiny, "scale": 1.0}
    roundoffs = PRECISIONS["float32"][1]
    expected = by_loops(case, roundoffs, 2.0**-126, structured=False)
    found = allowances(**case, precision=Precision("float32"))._asdict()
    for tensor in ("out", "dquery", "dkey", "dvalue"):
        np.testing.assert_allclose(found[tensor], expected[tensor], rtol=1e-6, atol=0.0, err_msg=tensor)
    assert (found["dkey"] >= np.abs(oracle.attention_vjp(**case).dkey)).all(), "1e-60 may become 0"
