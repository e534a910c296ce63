"""The bytes that the table in docs/strategies.md states are those that the traced programs send."""

import math
import runpy
from pathlib import Path

import jax
import pytest

from impl.wire_bytes import LayerShape, wire_bytes

ROOT = Path(__file__).parents[2]


def bytes_received(jaxpr, rank: int, size: int, times: int = 1) -> int:
    """Adds up what reaches one rank in a traced program; the body of a scan counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        incoming = sum(math.prod(value.aval.shape) * value.aval.dtype.itemsize for value in equation.invars)
        if name == "ppermute":
            total += incoming * sum(destination == rank for _, destination in equation.params["perm"])
        elif name == "all_gather":
            total += incoming * (size - 1)
        elif name in ("all_to_all", "reduce_scatter"):
            total += incoming * (size - 1) // size
        elif name == "psum":
            total += incoming
        repeats = equation.params["length"] if name == "scan" else 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += repeats * bytes_received(inner, rank, size)
    return total


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap"])
@pytest.mark.parametrize("strategy", ["halo", "all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("window", [(0, 0), (7, 0), (20, 0), (3, 9)])
def test_a_traced_layer_sends_the_bytes_that_the_table_states(make_case, strategy, layout, window) -> None:
    case = make_case(
        strategy=strategy, layout=layout, context=4, seq_len=64, window=window, dtype="bfloat16", documents=(30, 34)
    )
    stated = wire_bytes(
        LayerShape(
            strategy=strategy,
            layout=layout,
            context_parallelism=4,
            seq_len=64,
            window=window,
            num_query_heads=case.num_query_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            value_dim=case.value_dim,
            batch=case.batch,
            has_segment_ids=True,
        )
    )
    arguments = case.arguments()
    forward = jax.make_jaxpr(case.attention)(*arguments[:5]).jaxpr
    both = jax.make_jaxpr(case.attention_and_gradients)(*arguments).jaxpr
    sent = [[bytes_received(program, rank, 4) for rank in range(4)] for program in (forward, both)]
    assert max(sent[0]) == stated.forward, "forward"
    backward = max(whole - part for whole, part in zip(sent[1], sent[0], strict=True))
    assert backward == stated.backward, "backward"


def test_the_table_in_the_documentation_is_the_computed_one() -> None:
    script = runpy.run_path(str(ROOT / "bench" / "wire_bytes.py"))
    page = (ROOT / "docs" / "strategies.md").read_text()
    assert script["table"]() in page, "docs/strategies.md is stale: python bench/wire_bytes.py prints the table"
