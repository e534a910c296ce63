"""oracle/budget.py: errors that must never fit into the allowance, each the size a real fault would have."""

import ml_dtypes
import numpy as np
import pytest

import oracle
from oracle.budget import Precision, answer_with_allowances, share
from oracle.dense import Block, SolvedBlock, forward_block, vjp_block
from oracle.error_terms import allowance, block_terms
from oracle.softmax_errors import Numerics


@pytest.fixture
def case(draw):
    return draw(seed=8, seq=96, heads=(4, 2), dims=(32, 32), window=(31, 0), sinks=np.array([1.0, 0.0, -1.0, 2.0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_key_too_many_in_4096_is_seen(dtype):
    """One query whose window of 4096 keys is one key too wide: an element moves by about 1/4096 of a value."""
    random = np.random.default_rng(4096)
    keys, dims = 4097, 64
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    query, dout = (random.normal(size=(1, 1, dims)).astype(stored).astype(float) for _ in range(2))
    key, value = (random.normal(size=(keys, dims)).astype(stored).astype(float) for _ in range(2))
    visible = np.arange(keys)[None, :] > 0
    right = Block(query, key, value, visible, np.array([-np.inf]), None, dims**-0.5)
    forward = forward_block(right)
    dlse = np.zeros((1, 1))
    numerics = Numerics(Precision(dtype), structured_values=False, visible_keys=4096, rows=1)
    solved = SolvedBlock(right, dout, dlse, forward, vjp_block(right, forward, dout, dlse))
    allowed = allowance("out", forward.out, block_terms(solved, numerics).out, numerics)
    wrong = forward_block(right._replace(visible=np.ones_like(visible))).out
    assert share(wrong.astype(stored), forward.out, allowed).max() > 1, "the extra key shows in some feature of out"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("structured_values", [False, True])
@pytest.mark.parametrize("tensor", ["out", "lse", "dquery", "dkey", "dvalue", "dsinks"])
def test_an_all_zero_answer_fails(case, dtype, structured_values, tensor):
    answer, allowed = answer_with_allowances(**case, precision=Precision(dtype), structured_values=structured_values)
    expected = getattr(answer, tensor)
    assert share(np.zeros_like(expected), expected, getattr(allowed, tensor)).max() > 1, f"{tensor} = 0"


def test_all_zero_dsinks_fail_in_every_draw_of_a_long_sequence(draw):
    """A plain sum of absolute values would let them pass in most draws: the terms of dsinks cancel."""
    for seed in range(24):
        case = draw(seed=seed, seq=512, heads=(1, 1), dims=(16, 16), window=(63, 0), sinks=np.array([1.0]), dlse=None)
        answer, allowed = answer_with_allowances(**case, precision=Precision("bfloat16"))
        assert share(np.zeros(1), answer.dsinks, allowed.dsinks).item() > 1, f"dsinks = 0 at seed {seed}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_eighth_of_the_queries_is_missed_in_dsinks_of_a_long_sequence(draw, dtype):
    """As where one rank of eight loses its part, which is a random sum: so in most draws."""
    seen = 0
    for seed in range(24):
        case = draw(seed=seed, seq=1024, heads=(1, 1), dims=(16, 16), window=(31, 0), sinks=np.array([2.0]), dlse=None)
        answer, allowed = answer_with_allowances(**case, precision=Precision(dtype))
        without = case["dout"].copy()
        without[:, 384:512] = 0.0
        wrong = oracle.attention_vjp(**{**case, "dout": without}).dsinks
        seen += share(wrong, answer.dsinks, allowed.dsinks).item() > 1
    assert seen >= 20, f"{seen} of 24"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("change", [{"window": (32, 0)}, {"window": (30, 0)}, {"window": (31, 1)}, {"sinks": None}])
def test_the_answer_to_another_question_fails_in_every_tensor(case, dtype, change):
    answer, allowed = answer_with_allowances(**case, precision=Precision(dtype))
    wrong, _ = answer_with_allowances(**{**case, **change}, precision=Precision(dtype))
    for tensor, expected, allowance_ in zip(answer._fields, answer, allowed, strict=True):
        if getattr(wrong, tensor) is not None:
            assert share(getattr(wrong, tensor), expected, allowance_).max() > 1, f"{tensor} under {change}"


@pytest.mark.parametrize("tensor", ["out", "lse", "dquery", "dkey", "dvalue", "dsinks"])
def test_the_exact_tier_sees_an_error_of_a_billionth(case, tensor):
    answer, allowed = answer_with_allowances(**case, precision=Precision("float64"))
    expected = getattr(answer, tensor)
    assert share(expected + 1e-9, expected, getattr(allowed, tensor)).min() > 1, "every element is held to 1e-9"
    assert share(expected * (1 + 1e-16), expected, getattr(allowed, tensor)).max() < 1, "and may round"


def test_the_exact_tier_passes_another_order_of_summation(case):
    answer, allowed = answer_with_allowances(**case, precision=Precision("float64"))
    backwards = {name: case[name][:, ::-1] for name in ("query", "key", "value", "dout", "dlse")}
    mirrored = oracle.attention_vjp(**{**case, **backwards, "window": (0, 31)})
    for tensor in ("dquery", "dkey", "dvalue"):
        found = getattr(mirrored, tensor)[:, ::-1]
        assert share(found, getattr(answer, tensor), getattr(allowed, tensor)).max() < 1, tensor


def test_a_poisoned_hidden_key_widens_no_allowance(case):
    """1e30 in rows that nobody may read leaves every allowance as it was."""
    segments = np.zeros((1, 96), int)
    segments[0, 40:50] = 1
    options = {"segment_ids": segments, "padding_segment_id": 1, "precision": Precision("bfloat16")}
    poisoned = {**case, **{name: case[name].copy() for name in ("query", "key", "value", "dout")}}
    for name in ("query", "key", "value", "dout"):
        poisoned[name][0, 40:50] = 1e30
    clean = answer_with_allowances(**case, **options)[1]
    for tensor, left, right in zip(clean._fields, clean, answer_with_allowances(**poisoned, **options)[1], strict=True):
        np.testing.assert_array_equal(left, right, tensor)


def test_a_poisoned_key_outside_the_window_widens_no_allowance_of_those_who_do_not_see_it(case):
    poisoned = {**case, "key": case["key"].copy(), "value": case["value"].copy()}
    poisoned["key"][0, 0], poisoned["value"][0, 0] = 1e30, -1e30
    clean = answer_with_allowances(**case, precision=Precision("float32"))[1]
    found = answer_with_allowances(**poisoned, precision=Precision("float32"))[1]
    for tensor in ("out", "lse", "dquery"):
        np.testing.assert_allclose(getattr(found, tensor)[:, 32:], getattr(clean, tensor)[:, 32:], rtol=1e-12)
