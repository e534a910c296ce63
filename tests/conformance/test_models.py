"""Models as cases: their own ratios at a small size, their own shapes at full size; pull request 5608's eight cases."""

import math

import pytest

from conformance.models import MODELS, full_size_case, model_cases, pull_request_5608_cases, scaled_case

BY_NAME = {model.name: model for model in MODELS}


def test_every_model_of_the_table_is_there():
    assert set(BY_NAME) == {
        *("gemma-2-2b", "gemma-2-9b", "gemma-2-27b"),
        *("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"),
        *("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e2b", "gemma-4-e4b"),
        *("gpt-oss-20b", "mistral-7b-v0.1", "olmo-3-7b", "olmo-3-32b"),
    }, "the published models with sliding-window layers"
    assert all(model.source for model in MODELS), "each names where its values were read"


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_scaled_local_layer_keeps_the_models_ratios(name, layout):
    model = BY_NAME[name]
    problem = scaled_case(model, "local", layout).problem
    heads = model.local_heads
    assert problem.num_query_heads / problem.num_kv_heads == heads.num_query_heads / heads.num_kv_heads, "query to kv"
    assert problem.head_dim * 8 == heads.head_dim, "an eighth of head_dim"
    assert problem.scale == model.scale, "the scale is the model's own"
    real_ratio = model.sliding_window_size / (min(model.context, 131072) / problem.num_chunks)
    ratio = problem.sliding_window_size / problem.chunk_len
    assert ratio == real_ratio or problem.sliding_window_size == 4 > real_ratio * problem.chunk_len, "W to the chunk"


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("gemma-2-27b", "local", {"attn_logits_soft_cap": 50.0, "scale": 1 / 12, "sliding_window_size": 4096}),
        ("gemma-3-27b", "local", {"attn_logits_soft_cap": None, "scale": 1 / math.sqrt(168), "head_dim": 128}),
        ("gemma-3-4b", "global", {"window": (None, 0), "head_dim": 256, "scale": None}),
        ("gemma-4-31b", "local", {"num_kv_heads": 16, "head_dim": 256, "scale": 1.0, "sliding_window_size": 1024}),
        ("gemma-4-31b", "global", {"num_kv_heads": 4, "head_dim": 512, "scale": 1.0, "window": (None, 0)}),
        ("gemma-4-e2b", "local", {"num_query_heads": 8, "num_kv_heads": 1, "sliding_window_size": 512}),
        ("gpt-oss-20b", "local", {"sinks": True, "num_query_heads": 64, "head_dim": 64, "sliding_window_size": 128}),
        ("mistral-7b-v0.1", "local", {"num_query_heads": 32, "num_kv_heads": 8, "sliding_window_size": 4096}),
        ("olmo-3-32b", "local", {"num_query_heads": 40, "num_kv_heads": 8, "head_dim": 128}),
    ],
)
def test_full_size_layers_have_the_published_shapes(name, layer, expected):
    case = full_size_case(BY_NAME[name], layer)
    for field, value in expected.items():
        actual = getattr(case.problem, field)
        assert actual == (pytest.approx(value) if field == "scale" else value), f"{field} of {name}, {layer} layer"
    assert (case.problem.seq_len, case.problem.context_parallelism) == (131072, 8), "128K over 8 ranks"
    assert case.problem.dtype == "bfloat16", "as trained"


def test_a_layer_that_a_model_lacks_is_refused():
    with pytest.raises(ValueError, match=r"layer must be local for mistral-7b-v0.1, got 'global'"):
        scaled_case(BY_NAME["mistral-7b-v0.1"], "global")
    with pytest.raises(ValueError, match=r"layer must be local or global for olmo-3-7b, got 'middle'"):
        scaled_case(BY_NAME["olmo-3-7b"], "middle")


def test_model_cases_hold_every_local_layer_and_each_global_one_once():
    cases = model_cases(seed=100)
    local = [case for case in cases if case.problem.sliding_window_size]
    global_ = [case for case in cases if not case.problem.sliding_window_size]
    assert len(local) == len(MODELS), "one local layer a model"
    shapes = {case.problem.replace(layout="contiguous") for case in global_}
    assert len(shapes) == len(global_) >= 8, "no GLOBAL layer twice"
    assert {case.problem.layout for case in local} == {"contiguous", "dual_chunk_swap"}, "both layouts"
    assert [case.seed for case in cases] == list(range(100, 100 + len(cases))), "data of their own"
    assert all(len(case.documents[0]) == 2 for case in cases), "two documents, so that segment ids matter"


def test_pull_request_5608_has_its_eight_cases():
    cases = pull_request_5608_cases(seed=0)
    shapes = {
        (
            case.problem.context_parallelism,
            case.problem.data_parallelism,
            case.problem.layout,
            tuple(document.length for document in case.documents[0]),
        )
        for case in cases
    }
    assert shapes == {
        (ranks, data, layout, lengths)
        for ranks, data in ((2, 4), (4, 2))
        for layout in ("contiguous", "dual_chunk_swap")
        for lengths in ((1024,), (300, 400, 324))
    }, "meshes, layouts, documents"
    for case in cases:
        problem = case.problem
        assert (problem.batch, problem.seq_len, problem.head_dim) == (4, 1024, 64), "its sizes"
        assert (problem.num_query_heads, problem.num_kv_heads) == (4, 2), "its heads"
        assert (problem.sliding_window_size, problem.scale) == (128, 1.0), "its window and scale"
        assert [document.segment_id for document in case.documents[3]] in ([1], [1, 2, 3]), "ids from 1 up, in all rows"
