"""Production shapes: what they cover, that they fold into any machine, and that each one is among what is compiled."""

from __future__ import annotations

import math

import pytest

from conformance.aot.command import model_cases
from conformance.aot.topologies import GENERATIONS, num_devices_of
from conformance.models import MODELS
from conformance.problem import Case
from conformance.production import foldings, production_cases


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (1, {(1, 1, 1)}),
        (4, {(1, 4, 1), (1, 2, 2), (2, 2, 1)}),
        (8, {(1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 4, 1), (2, 2, 2), (4, 2, 1)}),
        (6, {(1, 4, 1), (1, 2, 2), (2, 2, 1)}),
    ],
)
def test_devices_fold_into_every_mesh_with_a_context_axis(num_devices: int, expected: set[tuple[int, ...]]) -> None:
    assert set(foldings(num_devices)) == expected, "data, context, tensor"


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16, 32])
def test_they_are_whole_layers_from_128k_to_a_million_tokens(num_devices: int) -> None:
    problems = [case.problem for case in production_cases(num_devices)]
    assert {problem.dtype for problem in problems} == {"bfloat16"}, "as in training"
    lengths = {problem.seq_len for problem in problems}
    assert (min(lengths), max(lengths)) == (128 * 1024, 1024 * 1024), "tokens"
    widths = {(p.num_query_heads, p.num_kv_heads, p.head_dim, p.sliding_window_size) for p in problems}
    for model in MODELS:
        heads = model.local_heads
        published = (heads.num_query_heads, heads.num_kv_heads, heads.head_dim, model.sliding_window_size)
        assert published in widths, f"the local layer of {model.name}"
    fitting = [problem for problem in problems if problem.num_devices <= num_devices]
    assert len(fitting) >= len(MODELS), "the others are declined: they need 8 devices"
    assert {case.seed % 2 for case in production_cases(num_devices)} == {1}, "attention alone: half the memory"


def test_on_eight_devices_each_folding_is_run_and_both_layouts_are_packed_and_not() -> None:
    cases = production_cases(8)
    meshes = {
        (case.problem.data_parallelism, case.problem.context_parallelism, case.problem.tensor_parallelism)
        for case in cases
    }
    assert meshes == set(foldings(8)), "all of them"
    assert all(case.problem.num_devices == 8 for case in cases), "so that a job over several hosts takes them too"
    kinds = {(case.problem.layout, case.problem.segments) for case in cases}
    assert len(kinds) == 4, "contiguous and dual_chunk_swap, one document and four"


def test_another_seed_is_other_data_of_the_same_programs() -> None:
    first, second = production_cases(8, 0), production_cases(8, 1)
    assert [case.problem for case in first] == [case.problem for case in second], "what is compiled"
    assert not {case.seed for case in first} & {case.seed for case in second}, "no data twice"


@pytest.mark.parametrize("topology", [generation.default_topology for generation in GENERATIONS.values()])
def test_every_nightly_case_is_one_of_those_that_are_compiled(topology: str) -> None:
    num_devices = num_devices_of(topology)
    compiled = model_cases(("nightly",), ("local",), ("contiguous",), num_devices)
    nightly = production_cases(num_devices, seed=7)
    assert {_program(case) for case in nightly} <= {_program(case) for case in compiled}, (
        "halocheck aot --models nightly"
    )


def _program(case: Case) -> object:
    """All that the compiler sees of a case."""
    return case.problem


def test_the_devices_of_a_topology_are_counted_by_its_shape() -> None:
    counts = {name: num_devices_of(generation.default_topology) for name, generation in GENERATIONS.items()}
    assert counts == {"v4": 16, "v5e": 8, "v5p": 8, "v6e": 8, "tpu7x": 16}, "v4 and TPU7x have two to a chip"
    assert num_devices_of("v6e:4x4") == math.prod((4, 4)), "any other"
