"""The bytes that the table in docs/strategies.md states are those that the traced programs send."""

import dataclasses
import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from impl.wire_bytes import LayerShape, wire_bytes

ROOT = Path(__file__).parents[3]


MESH = {"context": 4, "ulysses": 2}


def bytes_received(jaxpr, rank: int) -> int:
    """Adds up what reaches rank `rank` of the context axis in a traced program; the body of a scan counts as often as
    it runs. Ranks along the ulysses axis all receive the same."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        incoming = sum(math.prod(value.aval.shape) * value.aval.dtype.itemsize for value in equation.invars)
        if name == "ppermute":
            total += incoming * sum(destination == rank for _, destination in params["perm"])
        elif name in ("all_gather", "all_to_all", "reduce_scatter"):
            axis = params["axis_name"]
            size = MESH[axis if isinstance(axis, str) else axis[0]]
            total += incoming * (size - 1) if name == "all_gather" else incoming * (size - 1) // size
        elif name == "psum":
            total += incoming
        repeats = params["length"] if name == "scan" else 1
        for value in jax.tree.leaves(params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += repeats * bytes_received(inner, rank)
    return total


def layer(make_case, strategy: str, layout: str, window, **fields):
    """A small layer with documents, on four context ranks (and two ulysses ranks, where its model's strategy is usp);
    and its shape, as `wire_bytes` wants it."""
    on_two_axes = strategy == "usp" or fields.get("global_strategy") == "usp"
    axes = {"ulysses": 2, "axes": ("context", "ulysses")} if on_two_axes else {}
    case = make_case(
        strategy=strategy,
        layout=layout,
        context=MESH["context"],
        seq_len=64,
        window=window,
        documents=(30, 34),
        **axes,
        **fields,
    )
    shape = LayerShape(
        strategy=strategy,
        layout=layout,
        context_parallelism=MESH["context"],
        ulysses_parallelism=MESH["ulysses"] if on_two_axes else 1,
        seq_len=64,
        window=window,
        num_query_heads=case.num_query_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        value_dim=case.value_dim,
        batch=case.batch,
        itemsize=jnp.dtype(case.dtype).itemsize,
        has_segment_ids=True,
    )
    return case, shape


def check_traced(case, shape: LayerShape) -> None:
    """The traced forward and backward bring to the busiest rank what is stated, byte by byte."""
    stated = wire_bytes(shape)
    arguments = case.arguments()
    forward = jax.make_jaxpr(case.attention)(*arguments[:5]).jaxpr
    both = jax.make_jaxpr(case.attention_and_gradients)(*arguments).jaxpr
    sent = [[bytes_received(program, rank) for rank in range(4)] for program in (forward, both)]
    assert max(sent[0]) == stated.forward, "forward"
    backward = max(whole - part for whole, part in zip(sent[1], sent[0], strict=True))
    assert backward == stated.backward, "backward"


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("strategy", ["halo", "all_gather", "ring", "ulysses", "usp"])
@pytest.mark.parametrize("window", [(0, 0), (7, 0), (20, 0), (3, 9)])
def test_a_traced_layer_sends_the_bytes_that_the_table_states(make_case, strategy, layout, window) -> None:
    check_traced(*layer(make_case, strategy, layout, window, dtype="bfloat16"))


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses", "usp"])
def test_so_does_a_striped_one(make_case, strategy) -> None:
    check_traced(*layer(make_case, strategy, "striped", (2, 0), dtype="bfloat16"))


@pytest.mark.parametrize("strategy", ["halo", "all_gather", "ulysses"])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_so_does_a_local_layer_of_a_model_with_usp(make_case, strategy, num_kv_heads) -> None:
    heads = {"num_query_heads": 8, "num_kv_heads": num_kv_heads}
    check_traced(*layer(make_case, strategy, "contiguous", (7, 0), dtype="bfloat16", global_strategy="usp", **heads))


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "dual_chunk_swap"])
@pytest.mark.parametrize(
    "strategy",
    ["halo", "all_gather", "ulysses", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "usp"))],
)
def test_a_compiled_layer_receives_the_bytes_that_the_table_states(
    make_case, received_in_hlo, strategy, layout
) -> None:
    # float32: XLA widens every collective of bfloat16 on CPU. One hop of halo: the busiest rank is the same both ways.
    window = (7, 0) if strategy == "halo" else (20, 0)
    case, shape = layer(make_case, strategy, layout, window, dtype="float32")
    stated = wire_bytes(shape)
    arguments = case.arguments()

    def received(function, *arguments) -> int:
        return received_in_hlo(jax.jit(function).lower(*arguments).compile().as_text(), case.mesh.size)

    assert received(case.attention, *arguments[:5]) == stated.forward, "compiling adds nothing to the wire"
    both = received(case.attention_and_gradients, *arguments)
    if strategy in ("all_gather", "ring", "usp"):
        # What the backward fetches again XLA takes from the forward, where that is in the same program.
        assert stated.backward <= both <= stated.forward + stated.backward, "no more than stated"
    else:
        assert both == stated.forward + stated.backward, "compiling adds nothing to the wire"


def test_a_strategy_that_does_not_exist_has_no_bytes(make_case) -> None:
    _, shape = layer(make_case, "halo", "contiguous", (7, 0))
    with pytest.raises(ValueError, match="strategy must be one of"):
        wire_bytes(dataclasses.replace(shape, strategy="star"))


def test_the_table_in_the_documentation_is_the_computed_one() -> None:
    script = runpy.run_path(str(ROOT / "bench" / "wire_bytes.py"))
    page = (ROOT / "docs" / "strategies.md").read_text()
    assert script["table"]() in page, "docs/strategies.md is stale: python bench/wire_bytes.py prints the table"
