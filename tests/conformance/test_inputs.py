"""The arrays of a case: a pure function of seed and place, the same in whole and in part, of the kind asked for."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from conformance.inputs import ROW_TENSORS, STRUCTURED, inputs_of, redraw, round_to, rows_of
from conformance.problem import VALUE_KINDS, Case, Document, Problem, documents_of

PROBLEM = Problem(
    batch=2, seq_len=64, num_query_heads=4, num_kv_heads=2, head_dim=8, value_dim=12, sinks=True, segments=True
)
CASE = Case(PROBLEM, documents_of([[10, 54], [33, 31]]), seed=11)
PLAIN = ("query", "key", "value", "dout", "dlse")


def logits_of(case):
    """float64 [batch, num_query_heads, seq, seq]: scale · q·k, before the cap."""
    inputs, problem = inputs_of(case), case.problem
    key = np.repeat(inputs.key.astype(np.float64), problem.num_query_heads // problem.num_kv_heads, axis=2)
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    return scale * np.einsum("bqhd,bkhd->bhqk", inputs.query.astype(np.float64), key)


def test_shapes_and_dtypes_are_those_of_the_problem():
    for dtype in ("float32", "bfloat16", "float64"):
        inputs = inputs_of(CASE.replace(dtype=dtype))
        expected = {
            "query": ((2, 64, 4, 8), dtype),
            "key": ((2, 64, 2, 8), dtype),
            "value": ((2, 64, 2, 12), dtype),
            "dout": ((2, 64, 4, 12), dtype),
            "dlse": ((2, 64, 4), "float32"),
            "sinks": ((4,), "float32"),
            "segment_ids": ((2, 64), "int32"),
        }
        actual = {name: (array.shape, array.dtype.name) for name, array in vars(inputs).items()}
        assert actual == expected, f"arrays of a {dtype} problem"


def test_inputs_that_the_problem_lacks_are_none():
    inputs = inputs_of(Case(Problem()))
    assert inputs.sinks is None, "no sinks in the problem"
    assert inputs.segment_ids is None, "no segment ids in the problem"


def test_masters_are_read_only():
    for name, array in vars(inputs_of(CASE)).items():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        assert array.flags.c_contiguous, f"{name} is stored in its own order"


def test_shared_kv_is_one_array():
    inputs = inputs_of(Case(Problem(shared_kv=True)))
    assert inputs.key is inputs.value, "the key is the value, not a copy of it"


def test_the_first_values_never_change():
    """Recorded from version 1 of the case text: a saved case must mean the same data for ever, on every machine."""
    inputs = inputs_of(Case(Problem(batch=2, seq_len=8, dtype="float64"), seed=7))
    recorded = {
        "query": RECORDED_QUERY,
        "key": RECORDED_KEY,
        "value": RECORDED_VALUE,
        "dout": RECORDED_DOUT,
        "dlse": RECORDED_DLSE,
    }
    for name, values in recorded.items():
        array = getattr(inputs, name)[1, 3, 0]
        np.testing.assert_array_equal(np.atleast_1d(array)[:2], values, err_msg=f"{name}[1, 3, 0, :2] of seed 7")


RECORDED_QUERY = [-0.06438103893629414, -1.287197914759142]
RECORDED_KEY = [0.9102146884096758, 0.2894503852341106]
RECORDED_VALUE = [-1.0709029957711982, -1.143371308071411]
RECORDED_DOUT = [-0.3104350095836252, 0.12249840536523947]
RECORDED_DLSE = [-2.1968047618865967]


@pytest.mark.parametrize("values", VALUE_KINDS)
def test_values_do_not_depend_on_layout_mesh_or_other_shapes(values):
    whole = inputs_of(CASE.replace(values=values))
    changes = {
        "layout": {"layout": "dual_chunk_swap"},
        "ranks": {"context_parallelism": 4},
        "mesh": {"data_parallelism": 2, "tensor_parallelism": 2, "mesh_axes": ("tensor", "context", "data")},
        "window": {"sliding_window_size": 5},
        "batch": {"batch": 1, "documents": CASE.documents[:1]},
    }
    for name, change in changes.items():
        other = inputs_of(CASE.replace(values=values, **change))
        for tensor in PLAIN:
            batch = getattr(other, tensor).shape[0]
            np.testing.assert_array_equal(
                getattr(other, tensor), getattr(whole, tensor)[:batch], err_msg=f"{tensor} after another {name}"
            )


def test_values_do_not_depend_on_the_number_of_heads_or_features():
    whole = inputs_of(CASE)
    fewer_heads = inputs_of(CASE.replace(num_query_heads=2, num_kv_heads=1))
    fewer_features = inputs_of(CASE.replace(head_dim=5, value_dim=3))
    for tensor in ("query", "key", "value", "dout"):
        few = getattr(fewer_heads, tensor)
        np.testing.assert_array_equal(few, getattr(whole, tensor)[:, :, : few.shape[2]], err_msg=f"{tensor}, heads")
        few = getattr(fewer_features, tensor)
        np.testing.assert_array_equal(few, getattr(whole, tensor)[..., : few.shape[3]], err_msg=f"{tensor}, features")


@pytest.mark.parametrize("values", VALUE_KINDS)
def test_rows_made_alone_are_the_rows_of_the_whole(values):
    case = CASE.replace(values=values, dtype="bfloat16")
    whole = inputs_of(case)
    batch_rows, positions = [1], [63, 0, 17, 18]
    for tensor in ROW_TENSORS:
        rows = rows_of(case, tensor, batch_rows, positions)
        expected = getattr(whole, tensor)[np.ix_(batch_rows, positions)]
        np.testing.assert_array_equal(rows, expected, err_msg=f"{tensor} of kind {values}")
        assert rows.dtype == expected.dtype, f"{tensor} of kind {values}"


@pytest.mark.parametrize("values", VALUE_KINDS)
def test_heads_made_alone_are_those_of_the_whole(values):
    case = CASE.replace(values=values)
    for tensor in (tensor for tensor in ROW_TENSORS if tensor != "segment_ids"):
        whole = rows_of(case, tensor, [0, 1], range(7))
        for heads in (slice(0, 1), slice(1, 2)):
            alone = rows_of(case, tensor, [0, 1], range(7), heads)
            np.testing.assert_array_equal(alone, whole[:, :, heads], err_msg=f"{tensor} {heads}")


def test_rows_of_a_million_tokens_need_no_whole_array():
    case = Case(Problem(seq_len=2**20, context_parallelism=8))
    rows = rows_of(case, "key", [0], range(2**20 - 3, 2**20))
    assert rows.shape == (1, 3, 1, 8), "three rows"


def test_rows_of_refuses_what_is_not_there():
    with pytest.raises(ValueError, match=r"tensor must be one of query.*got 'sinks'"):
        rows_of(CASE, "sinks", [0], [0])
    with pytest.raises(ValueError, match="segments=false"):
        rows_of(Case(Problem()), "segment_ids", [0], [0])
    with pytest.raises(ValueError, match="positions must be a list of integers from 0 to 63, got"):
        rows_of(CASE, "key", [0], [64])
    with pytest.raises(ValueError, match="batch_rows must be"):
        rows_of(CASE, "key", [-1], [0])


def test_tensors_heads_rows_and_seeds_have_values_of_their_own():
    inputs, other = inputs_of(CASE), inputs_of(CASE.replace(seed=12))
    streams = {
        "query": inputs.query[..., 0],
        "dout": inputs.dout[..., 0],
        "dlse": inputs.dlse,
        "query of another seed": other.query[..., 0],
    }
    for name, values in streams.items():
        for again, others in streams.items():
            correlation = np.corrcoef(values.ravel(), others.ravel())[0, 1]
            # 512 independent values: standard deviation 0.044.
            assert name == again or abs(correlation) < 0.2, f"{name} and {again} are correlated: {correlation}"
    heads = np.corrcoef(inputs.query.transpose(0, 2, 1, 3).reshape(8, -1))
    assert np.abs(heads - np.eye(8)).max() < 0.25, "batch rows and heads are independent of one another"


@pytest.mark.parametrize(
    "change", [{}, {"scale": 1.0}, {"scale": 0.05}, {"head_dim": 64}, {"dtype": "bfloat16"}], ids=str
)
def test_logits_have_the_spread_of_their_kind_whatever_the_scale(change):
    for values, expected in (("plain", 1.0), ("peaked", 8.0), ("uniform", 0.0156), ("huge", 1.0), ("tiny", 1.0)):
        spread = logits_of(CASE.replace(values=values, **change)).std()
        assert expected / 1.15 < spread < expected * 1.15, f"logits of kind {values}: {spread}"


def test_a_soft_cap_has_logits_on_both_sides_of_it():
    for values in ("plain", "peaked"):
        share = (np.abs(logits_of(CASE.replace(values=values, attn_logits_soft_cap=5.0))) > 5.0).mean()
        assert 0.05 < share < 0.5, f"{share} of the {values} logits lie beyond the cap of 5"
    share = (np.abs(logits_of(CASE.replace(values="peaked", attn_logits_soft_cap=50.0))) > 25.0).mean()
    assert share > 0.02, "a cap of 50 bends some of the peaked logits"


def test_needles_are_rare_and_far_above_the_rest_for_their_own_heads_alone():
    logits = logits_of(CASE.replace(values="needle"))
    per_key = logits.mean(axis=2)
    needles = per_key > 48
    assert 0.03 < needles.mean() < 0.3, f"{needles.mean()} of the keys are needles"
    assert per_key[needles].mean() == pytest.approx(96, rel=0.15), "beyond the logarithm of float32's largest number"
    assert np.abs(per_key[~needles]).max() < 4, "all other keys are far below"
    in_bfloat16 = logits_of(CASE.replace(values="needle", dtype="bfloat16")).mean(axis=2)
    assert in_bfloat16[needles].mean() == pytest.approx(16, rel=0.15), "the same needles, where logits are coarse"
    same_group = (needles[:, 0] == needles[:, 1]).all() and (needles[:, 2] == needles[:, 3]).all()
    assert same_group, "query heads of one group see the needles of their one kv head"
    assert (needles[:, 0] != needles[:, 2]).any(), "kv heads have needles of their own"


def test_rank_coded_values_name_their_position():
    value = inputs_of(CASE.replace(values="rank_coded", dtype="bfloat16", value_dim=12)).value.astype(np.float64)
    signs = np.sign(value[0, :, 0])
    assert len(np.unique(signs, axis=0)) == 64, "64 positions, 64 codes"
    np.testing.assert_array_equal(np.abs(value[0, :, 0]), 1.0, err_msg="head 0, row 0: magnitude 1")
    np.testing.assert_array_equal(np.abs(value[1, :, 1]), 1.375, err_msg="head 1, row 1: 1 + 1/4 + 1/8")


def test_cancelling_values_and_cotangents_nearly_cancel():
    case = CASE.replace(values="cancelling", seq_len=64)
    inputs = inputs_of(case)
    for name in ("value", "dout"):
        array = getattr(inputs, name).astype(np.float64)
        assert np.abs(array).min() > 0.7, f"{name} itself is of magnitude 1"
        assert np.abs(array.mean(axis=1)).max() < 0.05, f"{name} cancels over the sequence"
    halves = inputs.value.astype(np.float64).reshape(2, 2, 32, 2, 12).mean(axis=2)
    assert np.abs(halves).max() > 0.9, "in some features the two halves of the sequence cancel each other"


def test_constant_values_and_cotangents_do_not_depend_on_the_position():
    inputs = inputs_of(CASE.replace(values="constant"))
    for name in ("value", "dout"):
        array = getattr(inputs, name)
        np.testing.assert_array_equal(array, np.broadcast_to(array[:1, :1], array.shape), err_msg=name)
    assert np.unique(inputs.value[0, 0]).size == 24, "heads and features still differ"
    assert np.std(inputs.query[0, :, 0, 0]) > 0.5, "query and key stay plain"


def test_huge_and_tiny_scale_value_and_cotangents_by_a_power_of_two():
    plain = inputs_of(CASE)
    for values, power in (("huge", 2.0**40), ("tiny", 2.0**-40)):
        scaled = inputs_of(CASE.replace(values=values))
        np.testing.assert_array_equal(scaled.value, plain.value * np.float32(power), err_msg=f"{values} value")
        np.testing.assert_array_equal(scaled.dout, plain.dout * np.float32(power), err_msg=f"{values} dout")
        # dlse is added to dout · value where the logits' gradient is made.
        np.testing.assert_array_equal(scaled.dlse, plain.dlse * np.float32(power**2), err_msg=f"{values} dlse")
        np.testing.assert_array_equal(scaled.query, plain.query, err_msg=f"{values} query")
        np.testing.assert_array_equal(scaled.key, plain.key, err_msg=f"{values} key")


def test_sinks_are_comparable_to_the_largest_logit_and_bounded():
    for values, cap in (("plain", None), ("peaked", None), ("plain", 5.0), ("peaked", 50.0), ("needle", None)):
        dtype = "bfloat16" if values == "needle" else "float32"
        problem = Problem(num_query_heads=64, num_kv_heads=1, sinks=True, attn_logits_soft_cap=cap, dtype=dtype)
        case = Case(problem, values=values, seed=3)
        logits = logits_of(case.replace(num_query_heads=2))
        largest = np.median((logits if cap is None else cap * np.tanh(logits / cap)).max(axis=-1))
        sinks = inputs_of(case).sinks
        assert np.abs(sinks).max() <= 30, f"{values}, cap {cap}: |sink| <= 30"
        assert (sinks > largest).mean() > 0.05, f"{values}, cap {cap}: some sinks lie above the largest logit {largest}"
        assert (sinks < largest).mean() > 0.05, f"{values}, cap {cap}: some lie below it"
        assert np.abs(np.median(sinks) - largest) < 6, f"{values}, cap {cap}: {np.median(sinks)} beside {largest}"
        high_needles = inputs_of(case.replace(values="needle", dtype="float32")).sinks
        assert np.abs(high_needles).max() <= 30, "a sink as high as a needle of float32 would leave no other key"


def test_structured_names_the_kinds_whose_values_follow_the_position():
    assert {"rank_coded", "cancelling", "constant"} == STRUCTURED, "what a budget must sum plainly"
    assert set(VALUE_KINDS) > STRUCTURED, "they are kinds of values"


def test_rounding_to_bfloat16_is_to_nearest_even_and_done_once():
    # Halfway between 1 and 1 + 2**-7 goes to the even 1; a hair above goes up, although float32 cannot hold the hair.
    values = np.array([1 + 2**-8, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**40 * 1.001, 0.0, -0.0])
    expected = [1.0, 1 + 2**-7, 1 + 2**-6, -1.0, 2.0**40, 0.0, 0.0]
    np.testing.assert_array_equal(round_to(values, "bfloat16").astype(np.float64), expected)
    random = np.random.default_rng(0).normal(size=10000).astype(np.float32)
    np.testing.assert_array_equal(
        round_to(random.astype(np.float64), "bfloat16"),
        random.astype(ml_dtypes.bfloat16),
        err_msg="where float32 holds the value, one cast is the same",
    )


def test_float64_values_use_the_whole_mantissa():
    query = inputs_of(CASE.replace(dtype="float64")).query
    assert (query != query.astype(np.float32)).mean() > 0.9, "a float32 in float64 clothes would hide rounding"


def test_draw_0_is_the_case_itself_and_others_keep_the_problem():
    assert redraw(CASE, 0) is CASE, "draw 0"
    draws = [redraw(CASE, index) for index in range(4)]
    assert [draw.problem for draw in draws] == [CASE.problem] * 4, "one program serves them all"
    assert len({draw.seed for draw in draws}) == 4, "values of their own"
    assert len({draw.documents for draw in draws}) == 4, "documents of their own"
    assert draws == [redraw(CASE, index) for index in range(4)], "deterministic"
    assert all(draw.values == "plain" for draw in draws), "the same kind of values"


def test_a_redraw_has_several_documents_even_where_the_case_has_one():
    whole = Case(dataclasses.replace(PROBLEM), None, seed=5)
    assert all(len(row) >= 2 for row in redraw(whole, 1).documents), "a target that ignores segment ids is seen"
    plain = redraw(Case(Problem()), 1)
    assert plain.documents is None, "no documents where the problem has no segment ids"


@pytest.mark.parametrize("seq_len", [1, 2, 3, 64])
def test_a_redraw_keeps_padding_and_leaves_tokens(seq_len):
    problem = Problem(batch=3, seq_len=seq_len, context_parallelism=1, segments=True, padding=-1)
    row = (Document(1),) if seq_len == 1 else (Document(1), Document(seq_len - 1, -1))
    for index in (1, 2, 3):
        for redrawn in redraw(Case(problem, (row,) * 3, seed=9), index).documents:
            padded = [document.segment_id == -1 for document in redrawn]
            assert sum(document.length for document in redrawn) == seq_len, "the whole row"
            assert not all(padded), "some tokens are left"
            assert any(padded) or seq_len == 1, "padding stays padding"
            assert padded[-1] or seq_len == 1, "padding at the tail stays at the tail"
