"""Further inputs for a compiled program: what each is made of, where poison lies, and which cases have which."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.case_list import case_list
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.inputs import Inputs, inputs_of, redraw
from conformance.poison import poisoned_keys, poisoned_queries, touched, visible
from conformance.problem import Case
from conformance.variants import VARIANTS, changed_part, variant_inputs, variants_of

_BOTH = ("visibility", "invariance")
_CASE = parse_case(
    "v=1 batch=2 seq_len=24 num_query_heads=4 num_kv_heads=2 sliding_window_size=4"
    " documents=10@1+14@2/20@3+4@7 padding=7"
)
_TENSORS = ("query", "key", "value", "dout", "dlse", "segment_ids")


def _logits(case: Case, inputs: Inputs) -> np.ndarray:
    group = case.problem.num_query_heads // case.problem.num_kv_heads
    scale = case.problem.scale or 1 / math.sqrt(case.problem.head_dim)
    keys = np.repeat(inputs.key.astype(float), group, axis=2)
    return scale * np.einsum("bqhd,bkhd->bhqk", inputs.query.astype(float), keys)


# --- what is run on which case --------------------------------------------------------------------------------


def test_a_small_case_has_every_variant_and_half_of_them_the_loud_one() -> None:
    assert variants_of(_CASE, _BOTH) == tuple(VARIANTS), "seed 0: all, in order"
    assert "loud" not in variants_of(_CASE.replace(seed=1), _BOTH), "an odd seed"
    assert "lse_alone" not in variants_of(_CASE.replace(seed=2), _BOTH), "a case whose lse nobody asks for"


def test_only_variants_of_checks_that_were_asked_are_run() -> None:
    assert variants_of(_CASE, ("contract", "output")) == (), "none of theirs"
    assert variants_of(_CASE, ("visibility",)) == ("coded", "loud")
    assert variants_of(_CASE, ("invariance",)) == (
        "poisoned_keys",
        "poisoned_queries",
        "changed",
        "lse_alone",
        "again",
    )


def test_a_large_case_is_repeated_and_takes_the_others_by_turns() -> None:
    large = parse_case("v=1 seq_len=512 num_query_heads=4 head_dim=64 sliding_window_size=64")
    turns = [variants_of(large.replace(seed=seed), _BOTH) for seed in range(6)]
    assert all(len(turn) == 2 and turn[1] == "again" for turn in turns), "two more runs of the program"
    assert {turn[0] for turn in turns} == set(VARIANTS) - {"again", "lse_alone"}, "each has its turn"


def test_a_very_large_case_has_one_variant_by_turns() -> None:
    very_large = parse_case("v=1 batch=4 seq_len=1024 num_query_heads=4 head_dim=64 sliding_window_size=64")
    turns = [variants_of(very_large.replace(seed=seed), _BOTH) for seed in range(4)]
    assert turns == [("again",), ("coded",), ("poisoned_keys",), ("poisoned_queries",)], "one more run"
    asked = [CHECKS["visibility"].asks_about(very_large.replace(seed=seed)) for seed in range(4)]
    assert asked == [False, True, False, False], "a check without a variant has no question there"


def test_a_case_that_is_only_probed_has_no_variants() -> None:
    assert variants_of(parse_case("v=1 seq_len=131072 sliding_window_size=1024"), _BOTH) == ()


def test_an_unknown_variant_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"variant must be one of coded, loud, .* got 'other'"):
        variant_inputs(_CASE, "other")


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_variant_is_a_pure_function_of_the_case_with_its_shapes_and_dtypes(name: str, dtype: str) -> None:
    case = _CASE.replace(dtype=dtype)
    plain, one = inputs_of(case), variant_inputs(case, name)
    other = variant_inputs(case, name, (plain, inputs_of(redraw(case, 1))))
    for tensor in _TENSORS:
        array = getattr(one, tensor)
        assert (array.shape, array.dtype) == (getattr(plain, tensor).shape, getattr(plain, tensor).dtype), tensor
        assert array.tobytes() == getattr(other, tensor).tobytes(), f"{tensor}: the same with the draws at hand"


@pytest.mark.parametrize("name", list(VARIANTS))
def test_shared_kv_stays_one_array(name: str) -> None:
    inputs = variant_inputs(_CASE.replace(shared_kv=True), name)
    assert inputs.value is inputs.key, "the very same"


def test_the_repeated_call_has_the_data_of_the_first_draw() -> None:
    again, first = variant_inputs(_CASE, "again"), inputs_of(_CASE)
    for tensor in _TENSORS:
        assert np.array_equal(getattr(again, tensor), getattr(first, tensor)), tensor


def test_of_lse_alone_is_the_first_draw_with_no_other_cotangent() -> None:
    alone, first = variant_inputs(_CASE, "lse_alone"), inputs_of(_CASE)
    assert not alone.dout.any(), "out is not used"
    assert first.dlse.any(), "lse is"
    for tensor in set(_TENSORS) - {"dout"}:
        assert np.array_equal(getattr(alone, tensor), getattr(first, tensor)), tensor


# --- coded and loud inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["", "head_dim=5 value_dim=3", "head_dim=1", "shared_kv=true", "dtype=bfloat16"])
def test_coded_inputs_have_logit_zero_everywhere_and_one_class_a_key(dims: str) -> None:
    case = parse_case(f"v=1 batch=2 seq_len=24 num_query_heads=4 num_kv_heads=2 {dims} sinks=true")
    inputs = variant_inputs(case, "coded")
    assert not _logits(case, inputs).any(), "every visible key counts alike"
    for name in ("key", "value"):
        codes = getattr(inputs, name).astype(float)
        assert (codes.sum(axis=3) == 1).all(), f"{name}: one class each"
        assert ((codes == 0) | (codes == 1)).all(), f"{name}: and nothing else"
    assert inputs.sinks is not None
    assert not inputs.sinks.any(), "a sink is one more key"
    assert not inputs.dlse.any(), "attention and attention_with_lse have one answer"


def test_classes_are_random_and_differ_between_neighbours_heads_and_batch_rows() -> None:
    case = parse_case("v=1 batch=2 seq_len=64 num_kv_heads=2")
    classes = variant_inputs(case, "coded").value.argmax(axis=3)
    assert (classes[:, 1:] != classes[:, :-1]).all(), "a row that sees two keys sees two classes"
    agree = (classes[:, 8:] == classes[:, :-8]).mean()
    assert agree < 0.3, "no class is the position modulo the number of classes: a wrong chunk would have the same"
    assert not np.array_equal(classes[0], classes[1]), "other codes in another batch row"
    assert not np.array_equal(classes[:, :, 0], classes[:, :, 1]), "and in another head"


def test_cotangents_of_coded_inputs_are_never_zero_and_exact_in_bfloat16() -> None:
    narrow = variant_inputs(_CASE.replace(dtype="bfloat16"), "coded").dout.astype(float)
    wide = variant_inputs(_CASE, "coded").dout.astype(float)
    assert np.array_equal(narrow, wide), "no rounding"
    assert (np.abs(wide) >= 1).all(), "none is zero"
    assert len(np.unique(wide)) == 16, "signs and sizes"


@pytest.mark.parametrize("scale", ["", "scale=0.05", "scale=1.0"])
def test_loud_inputs_have_logits_of_300_and_many_rows_that_see_no_loud_key(scale: str) -> None:
    case = parse_case(f"v=1 batch=2 seq_len=128 num_query_heads=4 num_kv_heads=2 sliding_window_size=6 {scale}")
    logits = _logits(case, variant_inputs(case, "loud"))
    np.testing.assert_allclose(np.abs(logits[logits != 0]), 300.0, rtol=1e-6)
    seen = visible(case)[:, None]
    sees_loud, sees_a_zero = (((level > 0) & seen).any(axis=3) for level in (logits, logits == 0))
    assert 0.3 < sees_loud.mean() < 0.7, "about half"
    assert (~sees_loud & ~sees_a_zero).mean() > 0.1, "many have to be shown a logit 600 below one that is hidden"


@pytest.mark.parametrize("text", ["sliding_window_size=6", "window=none,none dtype=bfloat16", "shared_kv=true"])
def test_some_tokens_of_loud_inputs_have_a_key_or_a_query_of_zeros_in_every_head(text: str) -> None:
    case = parse_case(f"v=1 batch=2 seq_len=128 num_query_heads=4 num_kv_heads=2 {text}")
    inputs = variant_inputs(case, "loud")
    keys, queries = ((~array.any(axis=3)).all(axis=2) for array in (inputs.key, inputs.query))
    seen = visible(case)
    assert (keys[:, None, :] & seen & ~queries[:, :, None]).any(axis=2).mean() > 0.05, "many rows see such a key"
    assert 0.05 < queries.mean() < 0.25, "one query in eight"
    assert not np.array_equal(keys, queries), "not the same tokens"
    assert not np.array_equal(keys[0], keys[1]) or keys.sum() <= 2, "nor the same in every batch row"


# --- poison ---------------------------------------------------------------------------------------------------


def _small_list() -> list[Case]:
    return [case for case in case_list("quick", 0, 0) if case.problem.seq_len * case.problem.batch <= 128][::9]


@pytest.mark.parametrize("case", _small_list(), ids=lambda case: str(case.seed))
def test_poison_lies_where_it_is_said_and_nowhere_else(case: Case) -> None:
    plain = inputs_of(case)
    size = 1e30 if case.values != "huge" else 1e30 / 2**41
    group = case.problem.num_query_heads // case.problem.num_kv_heads
    keys, queries = poisoned_keys(case), np.repeat(poisoned_queries(case), group, axis=2)
    for name, where, tensors in (
        ("poisoned_keys", keys, {"key", "value"}),
        ("poisoned_queries", queries, {"query", "dout", "dlse"}),
    ):
        inputs = variant_inputs(case, name)
        for tensor in ("query", "key", "value", "dout", "dlse"):
            array, before = getattr(inputs, tensor).astype(float), getattr(plain, tensor).astype(float)
            poisoned = where if tensor in tensors else np.zeros(array.shape[:3], bool)
            if array.ndim == 4:
                poisoned = np.broadcast_to(poisoned[..., None], array.shape)
            np.testing.assert_allclose(np.abs(array[poisoned]), size, rtol=2**-8, err_msg=tensor)
            assert np.array_equal(array[~poisoned], before[~poisoned]), f"{name} leaves the rest of {tensor} alone"


def test_padding_is_poisoned_always_and_every_batch_row_and_head_has_rows_of_its_own() -> None:
    padding = np.zeros((2, 24), bool)
    padding[1, 20:] = True
    for where in (poisoned_keys(_CASE), poisoned_queries(_CASE)):
        assert where[padding].all(), "padding"
        assert len({where[row, :20, head].tobytes() for row in (0, 1) for head in (0, 1)}) == 4, "others in each"


def test_poison_leaves_much_that_must_not_move() -> None:
    shares = []
    for case in case_list("quick", 0, 0):
        if case.problem.seq_len <= 256:
            shares.append(1 - touched(poisoned_keys(case), visible(case)).mean())
    assert np.mean(shares) > 0.4, f"of all queries {np.mean(shares):.2f} see no poisoned key"
    assert np.mean(np.array(shares) > 0) > 0.9, "nearly every case has some"


def test_who_is_touched_is_who_sees_a_poisoned_row_of_its_own_batch_row_and_head() -> None:
    sees = np.tri(4, dtype=bool)[None] & ~np.tri(4, k=-2, dtype=bool)[None]  # each query sees itself and the one before
    poisoned = np.zeros((1, 4, 2), bool)
    poisoned[0, 1, 0] = True
    assert touched(poisoned, sees)[0].T.tolist() == [[False, True, True, False], [False] * 4]


# --- another batch row and head -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("v=1 batch=3 seq_len=8 num_query_heads=4 num_kv_heads=2", 3 * 4 - 2 * 2),
        ("v=1 batch=3 seq_len=8 num_query_heads=1 num_kv_heads=1", 1),
        ("v=1 seq_len=8 num_query_heads=6 num_kv_heads=3", 2),
        ("v=1 seq_len=8 num_query_heads=4 num_kv_heads=1", 1),
        ("v=1 seq_len=8 num_query_heads=1", 1),
    ],
)
def test_one_batch_row_and_one_kv_head_change_or_one_query_head(text: str, changed: int) -> None:
    assert changed_part(parse_case(text)).sum() == changed, "as many (batch row, query head) pairs"


def test_the_changed_part_has_other_data_and_no_cotangent_and_the_rest_stays() -> None:
    case = _CASE
    changed, plain, inputs = changed_part(case), inputs_of(case), variant_inputs(case, "changed")
    for row, head in np.ndindex(changed.shape):
        same = np.array_equal(inputs.query[row, :, head], plain.query[row, :, head])
        assert same != changed[row, head], "queries"
        assert inputs.dout[row, :, head].any() != changed[row, head], "cotangents"
        same_keys = np.array_equal(inputs.key[row, :, head // 2], plain.key[row, :, head // 2])
        assert same_keys != changed[row, head], "keys"
    (row,) = np.flatnonzero(changed.all(axis=1))
    assert inputs.segment_ids is not None
    assert plain.segment_ids is not None
    assert not np.array_equal(inputs.segment_ids[row], plain.segment_ids[row]), "other documents"
    assert np.array_equal(inputs.segment_ids[1 - row], plain.segment_ids[1 - row]), "in that row alone"
    assert not inputs.dlse.any(), "and no cotangent of lse"
