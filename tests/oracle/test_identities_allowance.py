"""oracle/identities.py: the allowance of the sums over keys, by hand and against its formula in plain loops."""

import math

import numpy as np
import pytest

from oracle.budget import Precision
from oracle.identities import KeySide, QuerySide, identities
from oracle.outline import Outline

FLOAT32 = Precision("float32")


def test_the_allowance_of_one_key_by_hand():
    """One query sees one key: p = 1, out = value, dvalue = dout; dquery and dkey are 0, as dp - delta is.

    value 2, dout 3: the sum is 6 on both sides, so each square is 36. Stored as bfloat16 and rounded as a factor: 2 u^2
    for out, as much for dvalue (no other head shares the key, so none is rounded first). Beside it, in float32, what a
    softmax may stray by: logits of at most 0.5 * 1 * 4 = 2, an lse of at most 2 + log 2.
    """
    one = np.ones((1, 1))
    queries = QuerySide.of(one, 0 * one, 3 * one, 2 * one, np.zeros(1))
    keys = KeySide.of(4 * one, 0 * one, 2 * one, 3 * one)
    outline = Outline(1, 1, 1, 1, 1, window=(None, 0))
    found = identities(queries, keys, outline, scale=0.5, precision=Precision("bfloat16"))
    u, few, lse = 2.0**-8, 16 * 2.0**-24, 2 + math.log(2)
    weights = math.expm1(few * 2 + few * (1 + 2 + lse))
    denominator = weights + few
    stored = math.expm1(denominator + (few + 2.0**-24) * lse)
    of_out = weights + denominator + few
    of_dvalue = (1 + weights) * (1 + stored) - 1 + 2 * few
    squares = 36 * (2 * u**2 + 3 * of_out**2) + 36 * (2 * u**2 + 3 * of_dvalue**2)
    in_common = (u + of_out + of_dvalue) * 12
    assert found["dvalue"].allowance.item() == pytest.approx(5 * math.sqrt(squares) + in_common, rel=1e-12)
    # delta is 6, and so is r: it reaches the row with (scale * largest key)^2 = 4, twice. Sum p^2 is 1, as 4 / 4.
    delta = 36 * (u**2 + u**2 + u**2 + 3 * (of_out**2 + few**2)) + u**2 * 36
    of_r = (4 * u**2 + 3 * of_dvalue**2) * 36
    of_products = 3 * few**2 * 36  # dout * value is 6
    squares = 2 * 4 * (delta + of_r + of_products)
    assert found["dkey"].allowance.item() == pytest.approx(5 * math.sqrt(squares), rel=1e-12)


BF16, F32 = 2.0**-8, 2.0**-24
# Unit roundoffs of: output, sums, factors, inputs, query, logits, stored by the backward, partial results.
ROUNDOFFS = {
    "bfloat16, all declared": (
        Precision("bfloat16", prescaled_query=True, rounded_logits=True, rounded_partials=True),
        (BF16, F32, BF16, 0, BF16, BF16, BF16, BF16),
    ),
    "float32, three passes": (
        Precision("float32", matmul_passes=3),
        (F32, F32, 1.5 * 2.0**-16, 1.5 * 2.0**-16, 0, 0, 0, 0),
    ),
    "bfloat16, unrounded": (Precision("bfloat16", rounded_probabilities=False), (BF16, F32, 0, 0, 0, 0, BF16, 0)),
    "float32, prescaled": (Precision("float32", prescaled_query=True), (F32, F32, 0, 0, F32, 0, 0, 0)),
    "bfloat16, rounded logits": (
        Precision("bfloat16", rounded_logits=True),
        (BF16, F32, BF16, 0, 0, BF16, BF16, 0),
    ),
}
SINKS = np.array([-9.0, 0.5, 1.0])
# Query and kv heads, (head_dim, value_dim), length, scale, size of the numbers, sinks.
SIZES = {
    "one head": ((1, 1), (2, 3), 6, -0.4, 1.0, SINKS[:1]),
    "three heads": ((3, 1), (2, 3), 6, -0.4, 1.0, SINKS),
    "two heads each": ((4, 2), (2, 3), 6, -0.4, 1.0, SINKS[[0, 0, 1, 2]]),
    "small": ((1, 1), (2, 3), 6, -0.4, 0.1, None),
    "huge logits": ((1, 1), (2, 3), 6, -4e5, 1.0, None),
    "long sums": ((4, 2), (100, 120), 70, -0.4, 1.0, None),
}


@pytest.mark.parametrize("numerics", ROUNDOFFS)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_allowance_is_the_formula_of_the_documentation(numerics, cap, sizes):
    """docs/error-budgets.md, number by number, of whatever a target may have returned: three features of each kind."""
    precision, (u_o, u_s, u_f, u_i, u_q, u_l, u_r, u_p) = ROUNDOFFS[numerics]
    heads, (head_dim, value_dim), seq, scale, size, sinks = SIZES[sizes]
    random, group = np.random.default_rng(7), heads[0] // heads[1]
    query, dquery = size * random.normal(size=(2, seq * group, head_dim))
    dout, out = size * random.normal(size=(2, seq * group, value_dim))
    key, dkey = size * random.normal(size=(2, seq, head_dim))
    value, dvalue = size * random.normal(size=(2, seq, value_dim))
    dlse = size * random.normal(size=seq * group)
    window = (3, 1) if seq == 6 else (60, 4)
    most = 5 if seq == 6 else 65
    outline = Outline(1, seq, *heads, head_dim, window=window, attn_logits_soft_cap=cap, sinks=sinks)
    found = identities(
        QuerySide.of(query, dquery, dout, out, dlse), KeySide.of(key, dkey, value, dvalue), outline,
        scale=scale, precision=precision,
    )  # fmt: skip

    def norms(rows):
        return max(math.sqrt(sum(x * x for x in row)) for row in rows)

    def sums(terms):
        return max(16, 5 / 3 * math.sqrt(terms)) * u_s

    few = sums(1)
    largest = -scale * norms(query) * norms(key)
    e_x = largest * (sums(head_dim) + u_l + 5 * math.sqrt(u_q**2 + 2 * u_i**2))
    highest = largest if cap is None else min(largest, cap)
    e_c = e_x if cap is None else min(e_x, 2 * cap) + (few + u_l) * highest
    e_t = 0 if cap is None else min(1, few + 2 * min(1, (largest + e_x) / cap) * e_x / cap)
    sink = 0 if sinks is None else 9
    lse = max(highest, sink) + math.log(most + 1)
    e_w = math.expm1(min(100, e_c + few * (1 + highest + lse)))
    e_z = max(e_w, few * (1 + sink + lse)) + sums(most)
    e_l = math.expm1(min(100, e_z + few * lse + u_s * lse))
    e_out, e_p = e_w + e_z + sums(most), (1 + e_w) * (1 + e_l) - 1 + sums(most * group) + few
    heads_rounded = u_r**2 if group > 1 else 0
    factors = u_f**2 + u_i**2 + u_p**2
    tau = 3 * u_f**2 + factors + 3 * e_p**2
    per_key = (value * value).sum() / seq  # E |value|^2

    def allowance(left, right, gradient, other, squares):
        in_common = (u_f + u_i + u_p + e_out + e_p + e_t) * (abs((left * right).sum()) + abs((gradient * other).sum()))
        return 5 * math.sqrt(squares) + in_common

    for name, dim in (("dkey", head_dim), ("dvalue", value_dim)):
        assert found[name].allowance.shape == (dim, min(dim, 32)), "every feature of the gradient, 32 of the other"
    for i in range(3):
        for j in range(3):
            squares = sum((dout[:, i] * out[:, j]) ** 2) * (u_o**2 + factors + 3 * e_out**2)
            squares += sum((dvalue[:, i] * value[:, j]) ** 2) * (u_o**2 + heads_rounded + factors + 3 * e_p**2)
            expected = allowance(dout[:, i], out[:, j], dvalue[:, i], value[:, j], squares)
            assert found["dvalue"].allowance[i, j] == pytest.approx(expected, rel=1e-12), f"dvalue {i}, {j}"
    for i in range(2):
        for j in range(2):
            squares = sum((query[:, i] * dquery[:, j]) ** 2) * (u_o**2 + u_q**2 + tau)
            squares += sum((dkey[:, i] * key[:, j]) ** 2) * (u_o**2 + u_q**2 + heads_rounded + tau)
            for q in range(seq * group):
                delta = sum(dout[q] * out[q])
                of_p = sum(out[q] ** 2) / per_key  # sum p^2
                reach = sum((dout[q] * out[q]) ** 2) * (
                    u_r**2 + u_f**2 + factors + 3 * e_out**2 + 3 * value_dim * sums(value_dim) ** 2
                )
                reach += u_f**2 * delta**2 + 3 * few**2 * dlse[q] ** 2
                reach += (tau + 3 * e_t**2) * (dlse[q] - delta) ** 2 * of_p
                dp = sum(dout[q] ** 2) * per_key / value_dim
                reach += (3 * value_dim * sums(value_dim) ** 2 + 2 * u_i**2 + 3 * e_t**2) * dp * of_p
                squares += 2 * scale**2 * max(abs(key[:, j])) ** 2 * query[q, i] ** 2 * reach
            expected = allowance(query[:, i], dquery[:, j], dkey[:, i], key[:, j], squares)
            assert found["dkey"].allowance[i, j] == pytest.approx(expected, rel=1e-12), f"dkey {i}, {j}"


def test_what_underflows_is_all_that_is_allowed_where_nothing_is_returned():
    """Every product of three tokens, two of them visible to two heads each, may be flushed, with what multiplies it."""
    size = 0.25
    rows, zero = np.full((6, 2), size), np.zeros((6, 2))
    for value in (0.5, 0.0):
        queries = QuerySide.of(rows, zero, zero, zero, np.zeros(6))
        keys = KeySide.of(np.full((3, 2), 0.125), zero[:3], np.full((3, 2), value), zero[:3])
        outline = Outline(1, 3, 2, 1, 2, window=(1, 0))
        flushed = 2 * 2.0**-126 * 3 * 2 * 2 * (1 + 0.5) * (1 + size) ** 3 * (1 + 0.125) * (1 + value * math.sqrt(6))
        for name, one in identities(queries, keys, outline, scale=-0.5, precision=FLOAT32).items():
            assert one.allowance.tolist() == pytest.approx(np.full((2, 2), flushed), rel=1e-12, abs=0.0), name
    largest = [QuerySide.of(*(rows * (1 + (i == at)) for at in range(4)), np.zeros(6)).largest for i in range(4)]
    assert largest == [0.5, 0.25, 0.5, 0.25], "of what is given, not of what is returned"
    assert QuerySide.of(rows, rows, rows, rows, np.full(6, -3.0)).largest == 3.0, "the cotangent of lse too"
    whole = QuerySide.of(rows, rows, rows, rows, np.full(6, -3.0)).plus(QuerySide.of(*[rows] * 4, np.zeros(6)))
    assert whole.largest == 3.0, "over parts"
