"""The feature space: every level gives the geometry that its name says, and only what cannot exist is forbidden."""

import itertools

import pytest

from conformance.document_levels import PADDINGS
from conformance.problem import Document
from conformance.segments import documents_with_ids
from conformance.space import FEATURES, case_of, features_for, forbidden_pairs, is_allowed

PLAIN_ROW = {
    "layout": "contiguous",
    "ranks": "4",
    "mesh": "1x1",
    "mesh_axes": "data,context,tensor",
    "axis_types": "auto",
    "device_order": "natural",
    "chunk_len": "8",
    "window": "C",
    "rows_per_shard": "1",
    "heads": "4/2",
    "dims": "8/8",
    "dtype": "float32",
    "cap": "none",
    "scale": "none",
    "sinks": "no",
    "documents": "none",
    "padding": "none",
    "values": "plain",
}


def row_of(**levels):
    """The plain row with some levels changed; three tensor shards take heads that they divide."""
    heads = {"heads": "6/2"} if levels.get("mesh") == "1x3" else {}
    return {**PLAIN_ROW, **heads, **levels}


def case(seed=0, **levels):
    return case_of(row_of(**levels), seed)


def edges(row):
    """Where the documents of a row start, the first one excluded."""
    return [sum(document.length for document in row[:index]) for index in range(1, len(row))]


def test_the_plain_row_names_every_feature_and_is_allowed():
    assert list(PLAIN_ROW) == [feature.name for feature in FEATURES], "the test knows all features"
    assert is_allowed(PLAIN_ROW, forbidden_pairs(8)), "and its plain row may be run"


@pytest.mark.parametrize(("feature", "level"), [(f.name, level) for f in FEATURES for level in f.levels])
def test_every_level_makes_a_case_alone_and_beside_dual_chunk_swap(feature, level):
    row = row_of(**{"documents": "one", feature: level})
    if feature == "documents":
        row["padding"] = "none"
    for layout in ("contiguous", "dual_chunk_swap", "striped"):
        made = case_of(row if feature == "layout" else {**row, "layout": layout}, seed=1)
        assert made == case_of(row if feature == "layout" else {**row, "layout": layout}, seed=1), "deterministic"


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("1", (0, 0)),
        ("2", (1, 0)),
        ("C-1", (6, 0)),
        ("C", (7, 0)),
        ("C+1", (8, 0)),
        ("2C-1", (14, 0)),
        ("2C+1", (16, 0)),
        ("S-1", (30, 0)),
        ("S", (31, 0)),
        ("S+1", (32, 0)),
        ("two_sided_small", (2, 1)),
        ("two_sided_beyond_chunk", (10, 9)),
        ("right_only", (0, 3)),
        ("left_and_whole_future", (2, None)),
        ("global", (None, 0)),
    ],
)
def test_windows_are_measured_in_chunks(window, expected):
    problem = case(window=window).problem
    assert problem.window == expected, "4 ranks, chunks of 8, 32 positions"


def test_the_chunk_is_the_layouts_own():
    assert case(chunk_len="7", layout="contiguous").problem.seq_len == 28, "4 chunks of 7"
    swapped = case(chunk_len="7", layout="dual_chunk_swap", window="C+1").problem
    assert (swapped.seq_len, swapped.chunk_len, swapped.window) == (56, 7, (7, 0)), "two chunks a rank"


def test_windows_of_the_smallest_chunk_are_still_windows():
    for ranks, window in itertools.product(("1", "2"), ("1", "C-1", "2C-1", "S-1")):
        left, right = case(chunk_len="1", ranks=ranks, window=window).problem.window
        assert left >= 0 == right, f"{window} of chunks of 1 over {ranks} ranks"


def test_batch_heads_dims_and_mesh_are_those_of_the_levels():
    problem = case(
        mesh="3x1", rows_per_shard="2", heads="6/3", dims="4/12", mesh_axes="tensor,context,data", sinks="yes"
    ).problem
    assert (problem.batch, problem.data_parallelism, problem.tensor_parallelism) == (6, 3, 1), (
        "two rows on each of three"
    )
    assert (problem.num_query_heads, problem.num_kv_heads) == (6, 3), "heads"
    assert (problem.head_dim, problem.value_dim) == (4, 12), "dims"
    assert problem.mesh_axes == ("tensor", "context", "data"), "order of the mesh"
    assert problem.sinks, "sinks"
    assert case(dims="shared").problem.shared_kv, "key and value in one"


@pytest.mark.parametrize(("level", "distance"), [("border", 0), ("border-1", -1), ("border+1", 1)])
def test_documents_start_at_and_beside_chunk_borders(level, distance):
    for seed in range(10):
        starts = edges(case(seed, documents=level).documents[0])
        assert starts, "at least two documents"
        assert {(start - distance) % 8 for start in starts} == {0}, f"chunks of 8, starts {starts}"


def test_documents_of_one_token_lie_at_both_ends_and_at_a_border():
    row = case(documents="single_tokens").documents[0]
    assert row[0].length == row[-1].length == 1, "first and last position"
    starts = edges(row)
    around = [start for start in starts if start % 8 == 0 and {start - 1, start + 1} <= set(starts)]
    assert around, f"alone on either side of a chunk border: {starts}"


def test_many_small_documents_are_shorter_than_a_chunk():
    row = case(documents="many_small").documents[0]
    assert len(row) > 8, "many of them"
    assert max(document.length for document in row) <= 4, "no longer than half a chunk of 8"


def test_a_straddling_document_lies_on_three_chunks():
    for seed in range(10):
        start, end = edges(case(seed, documents="straddling").documents[0])
        borders = [border for border in (8, 16, 24) if start < border < end]
        assert len(borders) >= 2, f"from {start} to {end}"


def test_a_repeated_id_stands_on_both_sides_of_a_short_document():
    first, middle, last = case(documents="repeated_id").documents[0]
    assert first.segment_id == last.segment_id != middle.segment_id, "a, b, a"
    assert middle.length <= 2, "the last document sees the first through any window of four"


def test_batch_rows_are_cut_independently():
    documents = case(documents="many_small", rows_per_shard="2").documents
    assert documents[0] != documents[1], "two rows, two ways to cut"


@pytest.mark.parametrize("level", [level for level in PADDINGS if level != "none"])
@pytest.mark.parametrize("documents", ["one", "many_small", "repeated_id"])
def test_padding_lies_where_it_says_and_leaves_tokens(level, documents):
    for seed, chunk_len in itertools.product(range(5), ("1", "8")):
        made = case(seed, documents=documents, padding=level, chunk_len=chunk_len)
        row = documents_with_ids(made, 0)
        padded = [document.segment_id == made.problem.padding for document in row]
        assert any(padded), "some padding"
        assert not all(padded), "some tokens"
        if level.startswith("tail"):
            assert padded == [False] * (len(row) - 1) + [True], "one stretch, at the end"
        elif level.startswith("head"):
            assert padded == [True] + [False] * (len(row) - 1), "one stretch, at the start"
        elif chunk_len == "8":
            assert sum(padded) >= 2, "several stretches"


def test_padding_keeps_the_documents_around_it():
    whole, padded = case(3, documents="border"), case(3, documents="border", padding="tail_id_0")
    assert padded.problem.padding == 0, "id 0 is padding here"
    kept = [start for start in edges(whole.documents[0]) if start < 32 - padded.documents[0][-1].length]
    assert edges(padded.documents[0])[: len(kept)] == kept, "documents before the padding start where they did"
    assert padded.documents[0][-1] == Document(padded.documents[0][-1].length, 0), "padding has the padding id"


@pytest.mark.parametrize("num_devices", [1, 8, 16])
def test_allowed_rows_fit_the_mesh(num_devices):
    levels = {feature.name: feature.levels for feature in FEATURES}
    forbidden = forbidden_pairs(num_devices)
    for ranks, mesh in itertools.product(levels["ranks"], levels["mesh"]):
        row = row_of(ranks=ranks, mesh=mesh)
        fits = case_of(row, 0).problem.num_devices <= num_devices
        assert is_allowed(row, forbidden) == fits, f"{ranks} ranks beside {mesh} on {num_devices} devices"


@pytest.mark.parametrize(("num_devices", "ranks", "meshes"), [(1, 1, 1), (2, 2, 4), (4, 4, 8), (8, 6, 8)])
def test_a_small_mesh_has_only_the_levels_that_fit_it(num_devices, ranks, meshes):
    counts = {feature.name: len(feature.levels) for feature in features_for(num_devices)}
    assert (counts["ranks"], counts["mesh"]) == (ranks, meshes), f"levels that fit {num_devices} devices"
    others = {feature.name: len(feature.levels) for feature in FEATURES if feature.name not in ("ranks", "mesh")}
    assert {name: counts[name] for name in others} == others, "all levels of the other features"


def test_only_impossible_pairs_are_forbidden():
    reasons = {frozenset(name for name, _ in pair) for pair in forbidden_pairs(8)}
    assert reasons == {
        frozenset(("ranks", "mesh")),
        frozenset(("mesh", "heads")),
        frozenset(("documents", "padding")),
        frozenset(("dims", "values")),
    }, "devices, heads over tensor, padding without ids, codes in a shared key"
    assert not is_allowed({**PLAIN_ROW, "mesh": "1x2", "heads": "3/3"}, forbidden_pairs(8)), "3 heads on 2 shards"
    assert is_allowed({**PLAIN_ROW, "mesh": "1x2", "heads": "4/1"}, forbidden_pairs(8)), "1 kv head is replicated"
