"""The mesh of a problem and the place of each array on it, as the contract in DESIGN and docs/targets.md says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from conformance.checks import Outcome
from conformance.mesh import mesh_of, shardings_of
from conformance.problem import Problem

_PROBLEM = Problem(batch=2, num_query_heads=4, num_kv_heads=2, data_parallelism=2, tensor_parallelism=2)


@pytest.mark.parametrize("axes", list(itertools.permutations(("data", "context", "tensor"))), ids=",".join)
def test_axes_stand_in_the_problems_order_with_its_sizes(axes: tuple[str, str, str]) -> None:
    mesh = mesh_of(_PROBLEM.replace(mesh_axes=axes, context_parallelism=3, seq_len=6), jax.devices())
    assert mesh.axis_names == axes, "order"
    assert dict(mesh.shape) == {"data": 2, "context": 3, "tensor": 2}, "sizes"


@pytest.mark.parametrize(
    ("axis_types", "explicit"), [("auto", set()), ("explicit", {"data", "context", "tensor"}), ("mixed", {"context"})]
)
def test_axes_have_the_problems_types(axis_types: str, explicit: set[str]) -> None:
    mesh = mesh_of(_PROBLEM.replace(axis_types=axis_types), jax.devices())
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis, of in types.items():
        assert of == (AxisType.Explicit if axis in explicit else AxisType.Auto), axis


def test_devices_stand_in_natural_reversed_or_rotated_order_of_the_first_ones() -> None:
    devices = jax.devices()
    first = devices[:8]
    assert mesh_of(_PROBLEM, devices).devices.flatten().tolist() == first, "natural"
    reversed_order = mesh_of(_PROBLEM.replace(device_order="reversed"), devices).devices.flatten().tolist()
    assert reversed_order == first[::-1], "the same devices, reversed"
    rotated = mesh_of(_PROBLEM.replace(device_order="rotated"), devices).devices.flatten().tolist()
    assert rotated == [first[7], *first[:7]], "device i stands at place i + 1"


def test_too_few_devices_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match="takes 8 devices, got 7"):
        mesh_of(_PROBLEM, jax.devices()[:7])


def test_every_array_lies_where_the_contract_says() -> None:
    specs = {name: of.spec for name, of in shardings_of(_PROBLEM, mesh_of(_PROBLEM, jax.devices())).items()}
    arrays = P("data", "context", "tensor", None)
    assert specs == {
        "query": arrays,
        "key": arrays,
        "value": arrays,
        "out": arrays,
        "lse": P("data", "context", "tensor"),
        "segment_ids": P("data", "context"),
        "sinks": P("tensor"),
    }, "DESIGN, A target"


def test_kv_heads_that_do_not_divide_are_replicated_and_query_heads_are_not() -> None:
    problem = _PROBLEM.replace(num_kv_heads=1)
    specs = {name: of.spec for name, of in shardings_of(problem, mesh_of(problem, jax.devices())).items()}
    assert specs["key"] == specs["value"] == P("data", "context", None, None), "one kv head on two tensor shards"
    assert specs["query"] == P("data", "context", "tensor", None), "query heads always divide"


def test_under_ulysses_the_sequence_lies_on_both_axes() -> None:
    problem = _PROBLEM.replace(ulysses_parallelism=2)
    mesh = mesh_of(problem, jax.devices())
    assert mesh.axis_names == ("data", "context", "ulysses", "tensor"), "ulysses stands after context"
    assert shardings_of(problem, mesh)["segment_ids"].spec == P("data", ("context", "ulysses")), "both axes"


@pytest.mark.parametrize(
    ("name", "order", "is_seen"),
    [
        ("device_order_for_its_inverse", "natural", False),
        ("device_order_for_its_inverse", "reversed", False),  # an order that is its own inverse tells nothing
        ("device_order_for_its_inverse", "rotated", True),
        ("device_order_inverted", "rotated", False),
    ],
)
def test_a_device_order_taken_for_its_inverse_is_seen_on_rotated_devices(
    judged: Callable[[str, str, str], Outcome], name: str, order: str, is_seen: bool
) -> None:
    text = f"v=1 seq_len=12 sliding_window_size=3 context_parallelism=3 device_order={order}"
    outcome = judged(f"wrong:{name}", text, "output")
    assert bool(outcome.findings) == is_seen, f"{name} on {order} devices: {outcome.findings}"
    assert "out" in outcome.shares, "asked"
