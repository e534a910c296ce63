"""Problem and case: what is filled in, what follows a change, the layouts and meshes they describe, what is refused."""

import numpy as np
import pytest

from conformance.problem import Case, Document, InvalidCase, Problem, documents_of, window_of


def test_the_window_is_derived_from_the_sliding_window_size():
    assert Problem(sliding_window_size=10).window == (9, 0), "W keys, the query's own included"
    assert Problem().window == (None, 0), "a GLOBAL layer sees its whole past"
    assert Problem(window=(3, 2)).window == (3, 2), "a given window stands"
    assert window_of(1) == (0, 0), "W = 1 sees itself alone"


def test_value_dim_is_head_dim_unless_given():
    assert Problem(head_dim=24).value_dim == 24, "filled in"
    assert Problem(head_dim=24, value_dim=16).value_dim == 16, "given"


def test_derived_fields_follow_a_change_and_given_ones_stay():
    derived = Problem(sliding_window_size=10, head_dim=8).replace(sliding_window_size=5, head_dim=16)
    assert (derived.window, derived.value_dim) == ((4, 0), 16), "both were derived, so both follow"
    given = Problem(window=(3, 2), value_dim=4).replace(head_dim=16)
    assert (given.window, given.value_dim) == ((3, 2), 4), "both were given, so both stay"
    assert Problem(sliding_window_size=10).replace(sliding_window_size=None).window == (None, 0), "now a GLOBAL layer"


def test_a_case_passes_changes_on_to_its_problem():
    case = Case(Problem(seq_len=32), seed=3).replace(seq_len=16, seed=4, values="peaked")
    assert (case.problem.seq_len, case.seed, case.values) == (16, 4, "peaked"), "each change at its place"


def test_problems_are_hashable_values():
    assert len({Problem(), Problem(), Problem(scale=1), Problem(scale=1.0)}) == 2, "equal problems are one problem"
    assert isinstance(Problem(scale=1).scale, float), "an integral scale is the float of its text"


@pytest.mark.parametrize(
    ("layout", "ranks", "positions", "chunks"),
    [
        ("contiguous", 2, [0, 1, 2, 3, 4, 5, 6, 7], 2),
        ("dual_chunk_swap", 2, [0, 1, 6, 7, 2, 3, 4, 5], 4),
        ("striped", 2, [0, 2, 4, 6, 1, 3, 5, 7], 2),
        ("dual_chunk_swap", 1, [0, 1, 2, 3, 4, 5, 6, 7], 2),
        ("contiguous", 8, [0, 1, 2, 3, 4, 5, 6, 7], 8),
    ],
)
def test_positions_and_chunks_are_those_of_the_layout(layout, ranks, positions, chunks):
    problem = Problem(seq_len=8, layout=layout, context_parallelism=ranks)
    np.testing.assert_array_equal(problem.positions(), positions)
    assert problem.positions().dtype == np.int32, "what a kernel compares"
    assert (problem.num_chunks, problem.chunk_len) == (chunks, 8 // chunks), "chunks"


def test_the_rank_of_a_position_is_that_of_its_chunk():
    problem = Problem(seq_len=8, layout="dual_chunk_swap", context_parallelism=2)
    assert [problem.rank_of(position) for position in range(8)] == [0, 0, 1, 1, 1, 1, 0, 0], "0 1 6 7 / 2 3 4 5"


def test_ulysses_ranks_lie_beside_the_context_axis_and_hold_the_sequence_too():
    problem = Problem(seq_len=8, context_parallelism=2, ulysses_parallelism=2, mesh_axes=("context", "tensor", "data"))
    assert problem.mesh_shape == (("context", 2), ("ulysses", 2), ("tensor", 1), ("data", 1)), "ulysses after context"
    assert (problem.num_devices, problem.num_chunks) == (4, 2), "the layout is that of the context axis alone"
    assert [problem.rank_of(position) for position in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1], "as without ulysses"
    with pytest.raises(InvalidCase, match="seq_len must be divisible by the 4 devices"):
        problem.replace(seq_len=6)
    assert [axis for axis, _ in Problem().mesh_shape] == ["data", "context", "tensor"], "no axis that nobody uses"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer >= 1, got 0"),
        ({"batch": True}, "batch must be an integer >= 1, got True"),
        ({"head_dim": "8"}, "head_dim must be an integer >= 1, got '8'"),
        ({"sliding_window_size": 0}, "sliding_window_size must be none or >= 1, got 0"),
        ({"sliding_window_size": -3}, "sliding_window_size must be none or >= 1, got -3"),
        ({"sliding_window_size": "5"}, "sliding_window_size must be none or >= 1, got '5'"),
        ({"window": (-1, 0)}, "window bounds must be none or >= 0, got (-1, 0)"),
        ({"window": (3,)}, "window must be a pair (left, right), got (3,)"),
        ({"window": [3, 0]}, "window must be a pair (left, right), got [3, 0]"),
        (
            {"window": (3, 0), "sliding_window_size": 5},
            "window must be left out beside sliding_window_size, or be (4, 0), got (3, 0)",
        ),
        ({"layout": "zigzag"}, "layout must be one of contiguous, dual_chunk_swap, striped, got 'zigzag'"),
        ({"axis_types": "manual"}, "axis_types must be one of auto, explicit, mixed, got 'manual'"),
        ({"device_order": "random"}, "device_order must be one of natural, reversed, rotated, got 'random'"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, float64, got 'float16'"),
        ({"precision": "high"}, "precision must be one of highest, default, got 'high'"),
        ({"sinks": 1}, "sinks must be true or false, got 1"),
        ({"scale": 0.0}, "scale must be none or a finite number > 0, got 0.0"),
        ({"scale": float("nan")}, "scale must be none or a finite number > 0, got nan"),
        ({"attn_logits_soft_cap": -5}, "attn_logits_soft_cap must be none or a finite number > 0, got -5.0"),
        ({"attn_logits_soft_cap": True}, "attn_logits_soft_cap must be none or a finite number > 0, got True"),
        ({"mesh_axes": ("data", "context")}, "mesh_axes must order data, context, tensor, got ('data', 'context')"),
        ({"mesh_axes": (1, 2, "data")}, "mesh_axes must order data, context, tensor, got (1, 2, 'data')"),
        (
            {"seq_len": 10, "layout": "dual_chunk_swap"},
            "seq_len must be divisible by the 4 chunks of dual_chunk_swap, got 10",
        ),
        ({"batch": 3, "data_parallelism": 2}, "batch must be divisible by data_parallelism=2, got 3"),
        ({"num_query_heads": 3, "num_kv_heads": 2}, "num_query_heads must be divisible by num_kv_heads=2, got 3"),
        (
            {"num_query_heads": 3, "tensor_parallelism": 2},
            "num_query_heads must be divisible by tensor_parallelism=2, got 3",
        ),
        ({"padding": 0}, "padding needs segments=true, got 0"),
        ({"padding": 2**31, "segments": True}, "padding must be none or fit an int32, got 2147483648"),
        ({"shared_kv": True, "value_dim": 4}, "shared_kv needs value_dim equal to head_dim, got True"),
    ],
    ids=str,
)
def test_a_problem_that_breaks_a_rule_is_refused_by_name_value_and_rule(change, message):
    with pytest.raises(InvalidCase) as error:
        Problem(**change)
    assert str(error.value) == message, "field, rule, value"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": "random"}, "values must be one of plain"),
        ({"seed": -1}, "seed must be an integer from 0 to 2**32 - 1, got -1"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 2**32 - 1, got 4294967296"),
        ({"documents": documents_of([[3, 4]])}, "documents must sum to seq_len=8, got 'sum 7'"),
        ({"documents": documents_of([[8], [8]])}, "documents must be one list for each of batch=1 rows, got '2 rows'"),
        ({"documents": documents_of([[8, 0]])}, "documents lengths must be integers >= 1, got [8, 0]"),
        ({"documents": ((Document(8, 2**31),),)}, "documents a segment id must fit an int32, got 2147483648"),
        ({"documents": ((Document(8, True),),)}, "documents a segment id must fit an int32, got True"),
    ],
)
def test_a_case_that_breaks_a_rule_is_refused(arguments, message):
    with pytest.raises(InvalidCase) as error:
        Case(Problem(seq_len=8, segments=True), **arguments)
    assert str(error.value).startswith(message), "field, rule, value"


def test_documents_need_segments():
    with pytest.raises(InvalidCase, match="documents needs segments=true, got 'given'"):
        Case(Problem(seq_len=8), documents_of([[4, 4]]))
