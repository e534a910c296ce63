"""Every strategy computes the oracle's attention and gradients, in float64 to 1e-12, whatever the layer and the mesh.

The dense float64 kernel leaves nothing for a collective fault to hide behind. Rounding dtypes are in test_precision.py.
"""

import pytest
from jax.sharding import AxisType

from impl import AttentionType, halo_spans

CHUNK = 6
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STRATEGIES = ("halo", "all_gather", "ring", "ulysses")
LAYOUTS = ("contiguous", "dual_chunk_swap")

EDGES = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1)


def sizes(layout: str, context: int) -> dict[str, int]:
    return {"context": context, "seq_len": CHUNK * context * (2 if layout == "dual_chunk_swap" else 1)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("edge", [*EDGES, "S-1", "S", "S+1"])
def test_halo_is_exact_at_every_edge_of_the_window(check_exact, layout, edge) -> None:
    mesh = sizes(layout, 3)
    size = edge if isinstance(edge, int) else mesh["seq_len"] + {"S-1": -1, "S": 0, "S+1": 1}[edge]
    documents = (mesh["seq_len"] - CHUNK - 4, CHUNK + 1, 3)
    check_exact(**mesh, layout=layout, window=(size - 1, 0), documents=documents, sinks=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("context", "size"), [(1, 1), (1, 50), (2, CHUNK + 1), (2, 20), (4, CHUNK + 1), (5, 1), (8, 20)]
)
def test_halo_is_exact_on_any_number_of_ranks(check_exact, layout, context, size) -> None:
    check_exact(**sizes(layout, context), layout=layout, window=(size - 1, 0), sinks=True)


@pytest.mark.parametrize("layout", [*LAYOUTS, "striped"])
@pytest.mark.parametrize(("context", "size"), [(1, 4), (3, 1), (3, 7), (4, 48)])
def test_all_gather_is_exact_with_a_window(check_exact, layout, context, size) -> None:
    check_exact(
        strategy="all_gather", layout=layout, context=context, seq_len=48, window=(size - 1, 0), documents=(20, 9, 19)
    )


@pytest.mark.parametrize("layout", ["dual_chunk_swap", "striped"])
@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_a_global_layer_sees_every_key_up_to_its_own(check_exact, strategy, layout) -> None:
    check_exact(strategy=strategy, layout=layout, attention_type=AttentionType.GLOBAL, window=(0, 0), sinks=True)


@pytest.mark.parametrize(
    ("layout", "context", "window"),
    [
        ("contiguous", 1, (4, 0)),
        ("contiguous", 4, (7, 0)),
        ("contiguous", 4, (20, 0)),
        ("dual_chunk_swap", 3, (0, 0)),
        ("dual_chunk_swap", 4, (7, 0)),
        ("dual_chunk_swap", 4, (3, 14)),
        ("dual_chunk_swap", 5, (None, 0)),
        ("striped", 4, (7, 0)),
        ("striped", 3, (0, 1)),
    ],
)
def test_ring_is_exact_with_a_window(check_exact, layout, context, window) -> None:
    check_exact(strategy="ring", layout=layout, context=context, seq_len=8 * context, window=window, sinks=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(3, 0), (2, 3)])
def test_halo_is_exact_where_a_chunk_is_split_to_hide_the_halo(check_exact, layout, window, monkeypatch) -> None:
    monkeypatch.setattr(halo_spans, "BOUNDARY_MULTIPLE", 4)
    check_exact(context=3, layout=layout, seq_len=96, window=window, documents=(30, 66), sinks=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "window",
    [
        (0, 7),
        (13, 20),
        (None, None),
        *(pytest.param(window, marks=pytest.mark.slow) for window in ((0, 1), (7, 7), (2, 5), (None, 0), (0, None))),
    ],
)
def test_halo_is_exact_from_both_sides(check_exact, layout, window) -> None:
    check_exact(context=4, layout=layout, seq_len=48, window=window, documents=(30, 18))


@pytest.mark.parametrize(
    ("strategy", "window"),
    [("halo", (2**31 - 1, 2**31 - 1)), ("halo", (2**63, 0)), ("ring", (3, 2**31 - 1)), ("all_gather", (3, 2**31))],
)
def test_a_window_that_is_meant_for_everything_is_exact(check_exact, strategy, window) -> None:
    check_exact(strategy=strategy, **sizes("dual_chunk_swap", 2), layout="dual_chunk_swap", window=window)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "usp"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_head_dims_of_published_models_are_exact(check_exact, strategy, head_dim) -> None:
    on_two_axes = {"ulysses": 2, "axes": ("context", "ulysses")} if strategy == "usp" else {}
    check_exact(
        strategy=strategy,
        layout="dual_chunk_swap",
        context=2,
        batch=1,
        seq_len=16,
        head_dim=head_dim,
        value_dim=head_dim,
        window=(6, 0),
        **on_two_axes,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_features_together_are_exact(check_exact, strategy, layout) -> None:
    check_exact(
        strategy=strategy,
        layout=layout,
        data=2,
        tensor=2,
        num_query_heads=8,
        num_kv_heads=4,
        documents=(13, 1, 10, 11, 13),
        padding=True,
        sinks=True,
        attn_logits_soft_cap=2.0,
        scale=0.7,
        window=(8, 0),
    )


@pytest.mark.parametrize("strategy", ["halo", pytest.param("ring", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "feature",
    [
        {},
        {"sinks": True, "padding": True, "documents": (5, 5, 38)},
        {"attn_logits_soft_cap": 1.5},
        {"scale": 1.0, "value_dim": 8, "num_kv_heads": 4},
        {"documents": (1, 11, 1, 11, 1, 23)},
        {"batch": 1, "num_kv_heads": 1},
    ],
    ids=lambda feature: "-".join(feature) or "plain",
)
def test_each_feature_alone_is_exact(check_exact, strategy, feature) -> None:
    check_exact(strategy=strategy, layout="dual_chunk_swap", context=3, **feature)


@pytest.mark.parametrize(
    ("strategy", "num_query_heads", "num_kv_heads", "tensor"),
    [
        ("halo", 4, 4, 2),
        ("halo", 8, 2, 4),
        ("halo", 4, 1, 2),
        ("halo", 6, 3, 2),
        ("halo", 12, 6, 4),
        ("all_gather", 10, 5, 2),
        ("ring", 12, 6, 4),
        ("ulysses", 8, 2, 4),
        ("ulysses", 24, 6, 4),
    ],
)
def test_heads_sharded_over_tensor_are_exact(check_exact, strategy, num_query_heads, num_kv_heads, tensor) -> None:
    check_exact(
        strategy=strategy,
        context=2,
        tensor=tensor,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        seq_len=16,
        sinks=True,
    )


@pytest.mark.parametrize(
    ("strategy", "axes", "axis_types"),
    [
        ("halo", ("context", "tensor", "data"), (AUTO, AUTO, AUTO)),
        ("halo", ("tensor", "data", "context"), (EXPLICIT, EXPLICIT, EXPLICIT)),
        ("halo", ("data", "context", "tensor"), (EXPLICIT, AUTO, EXPLICIT)),
        ("all_gather", ("tensor", "context", "data"), (AUTO, EXPLICIT, AUTO)),
        ("ring", ("context", "data", "tensor"), (EXPLICIT, EXPLICIT, EXPLICIT)),
        ("ulysses", ("tensor", "data", "context"), (EXPLICIT, EXPLICIT, AUTO)),
    ],
)
def test_mesh_axes_may_stand_in_any_order_and_be_of_any_type(check_exact, strategy, axes, axis_types) -> None:
    check_exact(
        strategy=strategy,
        layout="dual_chunk_swap",
        context=3,
        data=2,
        tensor=2,
        axes=axes,
        axis_types=axis_types,
        num_query_heads=12,
        num_kv_heads=1,
        documents=(20, 28),
        sinks=True,
    )


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("axes", [("context",), ("context", "data"), ("tensor", "context")])
def test_data_and_tensor_axes_may_be_missing(check_exact, axes, axis_type) -> None:
    size = {axis: 2 for axis in axes if axis != "context"}
    check_exact(axes=axes, axis_types=(axis_type,) * 3, sinks=True, **size)


@pytest.mark.parametrize("strategy", ["halo", "ulysses"])
def test_an_axis_that_the_layer_does_not_use_holds_replicas(check_exact, strategy) -> None:
    check_exact(strategy=strategy, context=2, data=2, axes=("data", "expert", "context"), seq_len=16, sinks=True)


@pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads", "context"),
    [(4, 4, 4), (4, 2, 4), (4, 1, 4), (6, 3, 2), (12, 4, 3)],
)
def test_ulysses_sends_each_rank_the_kv_heads_it_reads(check_exact, num_query_heads, num_kv_heads, context) -> None:
    heads = {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads}
    check_exact(strategy="ulysses", context=context, seq_len=24, window=(30, 0), sinks=True, **heads)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("usp", "contiguous"),
        ("usp", "dual_chunk_swap"),
        ("halo", "contiguous"),
        ("halo", "dual_chunk_swap"),
        ("all_gather", "striped"),
        ("ulysses", "dual_chunk_swap"),
    ],
)
def test_every_local_strategy_is_exact_in_a_model_with_usp(check_exact, strategy, layout) -> None:
    check_exact(
        strategy=strategy,
        global_strategy="usp",
        layout=layout,
        context=2,
        ulysses=2,
        tensor=2,
        axes=("tensor", "context", "ulysses", "data"),
        num_query_heads=8,
        num_kv_heads=2,
        seq_len=16,
        window=(6, 0),
        documents=(7, 9),
        sinks=True,
    )


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_usp_is_exact_in_a_global_layer(check_exact, axis_type) -> None:
    check_exact(
        strategy="usp",
        layout="dual_chunk_swap",
        attention_type=AttentionType.GLOBAL,
        context=3,
        ulysses=2,
        axes=("data", "context", "ulysses"),
        axis_types=(axis_type,) * 3,
        num_kv_heads=1,
        documents=(7, 41),
    )
