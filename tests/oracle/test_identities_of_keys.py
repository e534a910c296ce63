"""oracle/identities.py: the right answer adds up, legal roundings stay within the allowance, a lost key does not."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import oracle
from oracle.budget import Precision
from oracle.identities import KeySide, QuerySide, identities
from oracle.outline import Outline

SEQ = 128
VARIANTS = {
    "full causal": {"window": (None, 0)},
    "window": {"window": (30, 0)},
    "everything": {
        "window": (None, None),
        "sinks": np.array([0.5, -1.0, 2.0, 0.0]),
        "attn_logits_soft_cap": 2.0,
        "scale": 0.3,
        "segment_ids": np.arange(SEQ)[None] // 37 % 3,
    },
}
FLOAT32 = Precision("float32")
ARRAYS = ("query", "key", "value", "dout", "dlse")


def outline_of(case):
    options = {name: value for name, value in case.items() if name not in ARRAYS}
    batch, seq, query_heads, head_dim = case["query"].shape
    return Outline(batch, seq, query_heads, case["key"].shape[2], head_dim, **options)


def flat(array, heads):
    return np.asarray(array)[0, :, heads].astype(np.float64).reshape(-1, array.shape[3])


def found(case, answer, kv_head=0, precision=FLOAT32, change=lambda side: side):
    """The identities of one kv head, of an answer with out, dquery, dkey and dvalue; `change` is made to the keys'."""
    outline = outline_of(case)
    group = outline.num_query_heads // outline.num_kv_heads
    heads, kv_heads = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    dlse = case["dlse"][0, :, heads].astype(np.float64).reshape(-1)
    queries = QuerySide.of(
        flat(case["query"], heads), flat(answer["dquery"], heads), flat(case["dout"], heads),
        flat(answer["out"], heads), dlse,
    )  # fmt: skip
    keys = KeySide.of(
        flat(case["key"], kv_heads), change(flat(answer["dkey"], kv_heads)), flat(case["value"], kv_heads),
        change(flat(answer["dvalue"], kv_heads)),
    )  # fmt: skip
    scale = outline.scale or outline.head_dim**-0.5
    return identities(queries, keys, outline, scale=scale, precision=precision)


def shares(*arguments, **options):
    result = found(*arguments, **options)
    return {name: (np.abs(one.got - one.expected) / one.allowance).max() for name, one in result.items()}


def right_answer(case):
    forward = {name: array for name, array in case.items() if name not in ("dout", "dlse")}
    gradients = oracle.attention_vjp(**case)
    return {"out": oracle.attention(**forward).out, **gradients._asdict()}


def without(*keys):
    def change(side):
        side = side.copy()
        side[list(keys)] = 0.0
        return side

    return change


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_head", [0, 1])
def test_the_right_answer_adds_up(draw, variant, kv_head):
    case = draw(seed=3, seq=SEQ, heads=(4, 2), dims=(8, 6), **VARIANTS[variant])
    answer = right_answer(case)
    for name, one in found(case, answer, kv_head).items():
        np.testing.assert_allclose(one.got, one.expected, rtol=1e-10, atol=1e-10, err_msg=name)
        assert (one.allowance > 0).all(), name
        assert one.expected.shape == {"dkey": (8, 8), "dvalue": (6, 6)}[name], "features by features"
    of_another = found(case, answer, 1 - kv_head)["dvalue"]
    assert not np.allclose(of_another.expected, one.expected), "each kv head has its own sums"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_key_that_nobody_probed_is_missed_and_so_is_one_rank(draw, dtype):
    """128 keys: key 12 has a tenth of them before it; rank 5 of 8 holds keys 80 to 95. Every kv head, six draws."""
    for seed in range(6):
        case = draw(seed=seed, seq=SEQ, heads=(4, 2), dims=(16, 16), window=(None, 0))
        answer = right_answer(case)
        for kv_head in (0, 1):
            options = {"kv_head": kv_head, "precision": Precision(dtype)}
            assert max(shares(case, answer, **options).values()) < 1e-6, "the right answer"
            for lost in ([12], range(80, 96)):
                seen = shares(case, answer, change=without(*lost), **options)
                assert seen["dvalue"] > 1, f"dvalue of {lost}, seed {seed}"
                assert seen["dkey"] > 1 or dtype == "bfloat16", f"dkey of {lost}, seed {seed}"


@pytest.fixture
def oracle_cases(legal_algorithms):
    """The kinds of values of bench/oracle_cases.py (bench is no package)."""
    path = Path(__file__).parents[2] / "bench" / "oracle_cases.py"
    spec = importlib.util.spec_from_file_location("oracle_cases", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["oracle_cases"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "peaked", "uniform", "tiny", "positive"])
def test_legal_algorithms_add_up_within_the_allowance(legal_algorithms, oracle_cases, dtype, kind):
    """Every sixth of the zoo, and all with declared numerics: no more than 0.6 of it."""
    shape = oracle_cases.Shape(seq=96, head_dim=16, value_dim=12, window=(None, 0), attn_logits_soft_cap=5.0)
    case = oracle_cases.draw(kind, 21, dtype, shape)
    members = [*list(legal_algorithms.zoo(dtype))[::6]]
    members += [member for member in legal_algorithms.declared_zoo() if member.dtype == dtype]
    for member in members:
        problem = legal_algorithms.Problem(
            **{name: case[name][0].swapaxes(0, 1) for name in ARRAYS},
            visible=oracle.mask.visible(96, window=(None, 0))[0],
            sinks=case["sinks"],
            attn_logits_soft_cap=5.0,
            scale=0.25,
        )
        computed = legal_algorithms.compute(member, problem)._asdict()
        answer = {name: computed[name].swapaxes(0, 1)[None] for name in ("out", "dquery", "dkey", "dvalue")}
        used = shares(case, answer, precision=oracle_cases.declared(member))
        assert max(used.values()) < 0.6, f"{used} of {member}"


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


def test_sides_over_parts_add_up_to_the_whole(draw):
    case = draw(seed=5, seq=SEQ, heads=(1, 1), dims=(8, 8), window=(None, 0))
    random = np.random.default_rng(0)
    rows = [random.normal(size=(SEQ, 8)) for _ in range(4)]
    dlse = random.normal(size=SEQ)
    whole = QuerySide.of(*rows, dlse)
    parts = QuerySide.of(*(r[:50] for r in rows), dlse[:50]).plus(QuerySide.of(*(r[50:] for r in rows), dlse[50:]))
    whole_keys = KeySide.of(*rows)
    parts_keys = KeySide.of(*(r[:50] for r in rows)).plus(KeySide.of(*(r[50:] for r in rows)))
    options = {"outline": outline_of(case), "scale": 0.5, "precision": Precision("bfloat16")}
    for name, one in identities(whole, whole_keys, **options).items():
        other = identities(parts, parts_keys, **options)[name]
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_allowance_grows_as_the_root_of_the_length(draw):
    """Of a window of fixed width, so that every row is alike: four times the rows, twice the allowance."""
    medians = []
    for seq in (256, 1024):
        case = draw(seed=2, seq=seq, heads=(1, 1), dims=(8, 8), window=(15, 0))
        medians.append({name: np.median(one.allowance) for name, one in found(case, right_answer(case)).items()})
    for name in ("dkey", "dvalue"):
        assert 1.6 < medians[1][name] / medians[0][name] < 2.6, name
