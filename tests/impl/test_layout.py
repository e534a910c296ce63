"""Reordering to and from the layouts: the published orders, exact inverses, and a compiled form without gathers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import impl
from impl import layout as layouts

ORDERS = {
    ("contiguous", 2): [0, 1, 2, 3, 4, 5, 6, 7],
    ("dual_chunk_swap", 2): [0, 1, 6, 7, 2, 3, 4, 5],
    ("dual_chunk_swap", 1): [0, 1, 2, 3, 4, 5, 6, 7],
    ("striped", 2): [0, 2, 4, 6, 1, 3, 5, 7],
    ("striped", 4): [0, 4, 1, 5, 2, 6, 3, 7],
}
ODD = {
    ("dual_chunk_swap", 3): [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7],
    ("striped", 3): [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11],
}


@pytest.mark.parametrize(("layout", "context_parallelism", "order"), [(*key, v) for key, v in (ORDERS | ODD).items()])
def test_positions_lie_where_the_design_says(layout, context_parallelism, order) -> None:
    positions = jnp.arange(len(order))
    placed = impl.reorder(positions, axis=0, layout=layout, context_parallelism=context_parallelism)
    assert placed.tolist() == order, f"{layout} on {context_parallelism} ranks"
    computed = layouts.all_positions(layout, len(order), context_parallelism)
    assert computed.tolist() == order, "positions computed on the device must agree with the reordering"


@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap", "striped"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_restore_is_the_inverse_along_any_axis(layout, axis) -> None:
    array = jnp.arange(12 * 24 * 36).reshape(12, 24, 36)
    there = impl.reorder(array, axis=axis, layout=layout, context_parallelism=3)
    back = impl.restore(there, axis=axis, layout=layout, context_parallelism=3)
    assert np.array_equal(back, array), "restoring a reordered array must give the array"
    assert np.array_equal(there, array) == (layout == "contiguous"), "only contiguous leaves positions where they are"


@pytest.mark.parametrize("function", [impl.reorder, impl.restore])
@pytest.mark.parametrize("layout", ["dual_chunk_swap", "striped"])
def test_reordering_compiles_to_neither_gather_nor_loop(function, layout) -> None:
    def reordered(array):
        return function(array, axis=1, layout=layout, context_parallelism=8)

    for program in (reordered, jax.grad(lambda array: (reordered(array) ** 2).sum())):
        text = jax.jit(program).lower(jnp.zeros((2, 64, 4))).compile().as_text()
        found = [name for name in (" gather(", " scatter(", " while(", " sort(") if name in text]
        assert not found, f"reordering must be slices and concatenations, found {found}"


@pytest.mark.parametrize(
    "types", [(AxisType.Explicit,) * 2, (AxisType.Auto, AxisType.Explicit)], ids=["all", "context"]
)
@pytest.mark.parametrize("layout", ["contiguous", "dual_chunk_swap", "striped"])
def test_along_explicit_axes_an_array_is_moved_and_lies_as_before(layout, types) -> None:
    """`jax.make_mesh` makes Explicit axes unless it is told otherwise: a caller's first mesh has them."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=types)
    positions = np.arange(2 * 16.0).reshape(2, 16)
    array = jax.device_put(positions, NamedSharding(mesh, PartitionSpec("data", "context")))
    move, back = (
        functools.partial(f, axis=1, layout=layout, context_parallelism=4) for f in (impl.reorder, impl.restore)
    )
    there = jax.jit(move)(array)
    assert np.array_equal(there, move(positions)), "the same order as of an array on one device"
    assert jax.typeof(there).sharding.spec == jax.typeof(array).sharding.spec, "along the same axes"
    assert np.array_equal(back(there), positions), "outside of jit too"
    gradient = jax.jit(jax.vjp(move, array)[1])(jax.jit(lambda array: 2 * array)(array))[0]
    assert np.array_equal(gradient, 2 * back(positions)), "a cotangent goes the way back"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "zigzag"}, "layout must be one of contiguous, dual_chunk_swap, striped, got 'zigzag'"),
        ({"context_parallelism": 0}, "context_parallelism must be >= 1, got 0"),
        ({"context_parallelism": 5}, "axis 0 of length 12 must divide into 10 equal pieces"),
    ],
)
def test_what_cannot_be_reordered_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        impl.reorder(jnp.arange(12), **({"axis": 0, "layout": "dual_chunk_swap", "context_parallelism": 2} | arguments))
