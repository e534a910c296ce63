"""Every strategy computes the oracle's attention and gradients, in float64 to 1e-12, whatever the layer and the mesh.

The dense float64 kernel leaves nothing for a collective fault to hide behind. Rounding dtypes are in test_precision.py.
"""

import pytest
from jax.sharding import AxisType

from impl import AttentionType

CHUNK = 6
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
STRATEGIES = ("halo", "all_gather")
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


@pytest.mark.parametrize("layout", [*LAYOUTS, "striped"])
def test_a_global_layer_sees_every_key_up_to_its_own(check_exact, layout) -> None:
    check_exact(strategy="all_gather", layout=layout, attention_type=AttentionType.GLOBAL, window=(0, 0), sinks=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(0, 1), (0, 7), (7, 7), (2, 5), (13, 20), (None, 0), (0, None), (None, None)])
def test_halo_is_exact_from_both_sides(check_exact, layout, window) -> None:
    check_exact(context=4, layout=layout, seq_len=48, window=window, documents=(30, 18))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_features_together_are_exact(check_exact, strategy, layout) -> None:
    check_exact(
        strategy=strategy,
        layout=layout,
        data=2,
        tensor=2,
        documents=(13, 1, 10, 11, 13),
        padding=True,
        sinks=True,
        attn_logits_soft_cap=2.0,
        scale=0.7,
        window=(8, 0),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads", "tensor"),
    [(4, 4, 2), (4, 2, 4), (4, 1, 2), (6, 3, 2), (12, 6, 4), (10, 5, 2)],
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("axes", "axis_types"),
    [
        (("context", "tensor", "data"), (AUTO, AUTO, AUTO)),
        (("tensor", "data", "context"), (EXPLICIT, EXPLICIT, EXPLICIT)),
        (("data", "context", "tensor"), (EXPLICIT, AUTO, EXPLICIT)),
        (("tensor", "context", "data"), (AUTO, EXPLICIT, AUTO)),
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
        num_kv_heads=1,
        documents=(20, 28),
        sinks=True,
    )


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("axes", [("context",), ("context", "data"), ("tensor", "context")])
def test_data_and_tensor_axes_may_be_missing(check_exact, axes, axis_type) -> None:
    size = {axis: 2 for axis in axes if axis != "context"}
    check_exact(axes=axes, axis_types=(axis_type,) * 3, sinks=True, **size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_axis_that_the_layer_does_not_use_holds_replicas(check_exact, strategy) -> None:
    check_exact(strategy=strategy, context=2, data=2, axes=("data", "expert", "context"), seq_len=16, sinks=True)
