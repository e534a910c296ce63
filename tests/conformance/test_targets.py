"""The adapters of this package: the bundled implementations and jax.nn conform, and decline what they do not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.problem import Case, Problem
from conformance.session import CONFORMS, FINDING, Session
from conformance.target import load_target

_HALO, _ALL_GATHER = "conformance.targets.bundled:halo", "conformance.targets.bundled:all_gather"
_RING, _ULYSSES, _USP = (f"conformance.targets.bundled:{name}" for name in ("ring", "ulysses", "usp"))
_JAX_NN = "conformance.targets.jax_nn:dot_product_attention"

_SMALL = "v=1 batch=2 seq_len=12 num_query_heads=4 num_kv_heads=2 head_dim=4 context_parallelism=3 data_parallelism=2"
_TWO_HOPS = f"{_SMALL} sliding_window_size=6 layout=dual_chunk_swap padding=7 documents=3@1+4@2+3@1+2@7/12@3"
_TWO_SIDED = f"{_SMALL} window=5,2 axis_types=explicit mesh_axes=tensor,context,data device_order=reversed"
_ONE_KEY = f"{_SMALL} sliding_window_size=1 dtype=bfloat16 documents=5+7/12"
_SINKS = f"{_SMALL} sliding_window_size=5 sinks=true attn_logits_soft_cap=5.0 value_dim=6 tensor_parallelism=2"
_EXACT = f"{_SMALL} sliding_window_size=5 dtype=float64 layout=dual_chunk_swap documents=5+7/12"
_STRIPED = f"{_SMALL} sliding_window_size=5 layout=striped axis_types=mixed"
_STRIPED_AUTO = f"{_SMALL} sliding_window_size=5 layout=striped"
_GLOBAL = f"{_SMALL} layout=dual_chunk_swap"
_SIX_HEADS = "v=1 batch=2 seq_len=12 num_query_heads=6 num_kv_heads=2 head_dim=4 context_parallelism=3"
_TWO_AXES_GLOBAL = "v=1 seq_len=16 num_query_heads=4 head_dim=4 ulysses_parallelism=2 layout=dual_chunk_swap"
_ROTATED = "v=1 seq_len=24 num_query_heads=6 num_kv_heads=3 head_dim=4 context_parallelism=3 device_order=rotated"
_ROTATED = f"{_ROTATED} sliding_window_size=10 tensor_parallelism=2"
# XLA's CPU compiler refused its own all-to-all where a rank gets a single row.
_ONE_ROW = "v=1 seq_len=2 num_query_heads=4 sliding_window_size=1 context_parallelism=1 ulysses_parallelism=2"
# The least int32 is an id like any other, beside padding too.
_LEAST_ID = f"{_SMALL} sliding_window_size=6 padding=7 documents=5@-2147483648+4@7+3@-2147483648/12@2"
_TWO_AXES = f"{_TWO_AXES_GLOBAL} sliding_window_size=6 documents=5+11 axis_types=explicit"


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (_HALO, [_TWO_HOPS, _LEAST_ID, _TWO_SIDED, _ONE_KEY, _SINKS, _EXACT, _TWO_AXES, _ONE_ROW, _ROTATED]),
        (_ALL_GATHER, [_TWO_HOPS, _TWO_SIDED, _ONE_KEY, _SINKS, _EXACT, _STRIPED, _GLOBAL, _ROTATED]),
        (_RING, [_TWO_HOPS, _SINKS, _STRIPED, _GLOBAL, _TWO_AXES, _ROTATED]),
        (_ULYSSES, [f"{_SIX_HEADS} sliding_window_size=5 sinks=true layout=dual_chunk_swap", _SIX_HEADS]),
        (_USP, [_TWO_AXES, _TWO_AXES_GLOBAL]),
        (_JAX_NN, [_TWO_HOPS, _LEAST_ID, _TWO_SIDED, _ONE_KEY, _STRIPED_AUTO, _GLOBAL]),
    ],
    ids=["halo", "all_gather", "ring", "ulysses", "usp", "jax.nn"],
)
def test_a_right_target_conforms_on_all_that_it_claims(spec: str, texts: list[str]) -> None:
    session = Session(spec, Devices("cpu", 16))
    try:
        for text in texts:
            result = session.run(parse_case(text))
            assert (result.status, result.findings) == (CONFORMS, ()), f"{text}: {result}"
    finally:
        session.close()


_JAX_SPLASH = "conformance.targets.jax_splash:splash_attention"
_TOKAMAX = "conformance.targets.tokamax_splash"
_SPLASH_ROWS = f"{_SMALL} sliding_window_size=6 layout=dual_chunk_swap padding=7 documents=3@1+4@2+3@1+2@7/12@3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (_JAX_SPLASH, [_SPLASH_ROWS, _TWO_SIDED, _SINKS, _STRIPED_AUTO]),
        (f"{_TOKAMAX}:splash_attention", [_SPLASH_ROWS, _TWO_SIDED, _SINKS, _STRIPED_AUTO]),
        (f"{_TOKAMAX}:ring_attention", [_SPLASH_ROWS, _TWO_SIDED, _STRIPED_AUTO]),
    ],
    ids=["jax_splash", "tokamax_splash", "tokamax_ring"],
)
def test_so_do_public_kernels_in_float32(spec: str, texts: list[str]) -> None:
    """In float32: what is known of them in bfloat16 stands in known_issues.json."""
    if spec.startswith(_TOKAMAX):
        pytest.importorskip("tokamax", reason="tokamax is an extra: pip install halocheck[tokamax]")
    test_a_right_target_conforms_on_all_that_it_claims(spec, texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halo", "all_gather", "ring", "ulysses", "usp"])
def test_so_do_the_strategies_with_splash_attention(name: str, small_cases: Callable[..., tuple[Case, ...]]) -> None:
    """On a spread of the case list: each case is compiled and interpreted for half a minute."""
    session = Session(f"conformance.targets.bundled:{name}_splash", Devices("cpu", 16))
    conforming = 0
    try:
        for case in small_cases(40):
            result = session.run(case)
            assert result.status != FINDING, f"{format_case(case)}: {result}"
            conforming += result.status == CONFORMS
    finally:
        session.close()
    assert conforming >= 5, "not declined altogether"


@pytest.mark.parametrize(
    ("spec", "changes", "reason"),
    [
        (_HALO, {"layout": "striped"}, "halo needs chunks"),
        (_HALO, {"sliding_window_size": None}, "halo is for LOCAL_SLIDING layers"),
        (_ALL_GATHER, {"ulysses_parallelism": 2, "sliding_window_size": None}, "over the context axis alone"),
        (_USP, {}, "needs the sequence on two axes"),
        (_USP, {"ulysses_parallelism": 4}, "cuts the query heads into 4 shards"),
        (_ULYSSES, {"context_parallelism": 4}, "cuts the query heads into 4 shards"),
        (f"{_HALO}_splash", {"layout": "striped"}, "halo needs chunks"),
        (f"{_HALO}_splash", {"dtype": "float64"}, "accumulates in float32"),
        (f"{_RING}_splash", {"layout": "striped"}, "needs keys in position order"),
        (_JAX_NN, {"sinks": True}, "has no sinks"),
        (_JAX_NN, {"attn_logits_soft_cap": 5.0}, "has no soft cap"),
        (_JAX_NN, {"value_dim": 4}, "has one head_dim"),
        (_JAX_NN, {"tensor_parallelism": 2}, "shards kv heads over the tensor axis"),
    ],
)
def test_what_a_target_does_not_have_it_declines_with_the_reason(spec: str, changes: dict, reason: str) -> None:
    problem = Problem(sliding_window_size=5).replace(**changes)
    declined = load_target(spec).supports(problem)
    assert declined is not None, "it would be a finding instead"
    assert reason in declined, "in words"


def test_the_bundled_ones_take_most_of_the_quick_list(small_cases: Callable[..., tuple[Case, ...]]) -> None:
    halo, all_gather = load_target(_HALO), load_target(_ALL_GATHER)
    for case in small_cases(60):
        problem = case.problem
        on_two_axes = problem.ulysses_parallelism > 1
        takes = not (on_two_axes and problem.window == (None, 0))
        assert (all_gather.supports(problem) is None) is takes, format_case(case)
        takes = problem.layout != "striped" and problem.window[0] is not None
        assert (halo.supports(problem) is None) is takes, format_case(case)


def test_each_says_what_it_claims_to_send() -> None:
    claims = {spec: load_target(spec).description.communication for spec in (_HALO, _ALL_GATHER, _JAX_NN)}
    assert claims == {_HALO: "halo", _ALL_GATHER: "all_gather", _JAX_NN: "all_gather"}, "a claim that is checked"


def test_splash_declares_how_it_rounds() -> None:
    declared = load_target(f"{_RING}_splash").description
    assert declared.precision == {"prescaled_query": True, "rounded_partials": True}, "and is allowed no less for it"
    assert (declared.communication, declared.name, declared.exact) == ("ring", "ring_splash", False), "ring, in float32"
    assert load_target(_RING).description.precision == {}, "plain XLA rounds as is usual"


_TAKEN_BY_OUR_KERNEL = {"sliding_window_size": 100, "head_dim": 128, "value_dim": 128}


@pytest.mark.parametrize(
    ("spec", "changes", "is_splash"),
    [
        (_HALO, {}, False),  # our own kernel, which rounds no more than is usual
        (_HALO, {"dtype": "bfloat16", "segments": True, "shared_kv": True}, False),
        (_HALO, {"sliding_window_size": None, "window": (100, 3)}, True),  # it knows no keys after the query
        (_HALO, {"sliding_window_size": 500_000}, True),  # whose band no VMEM holds
        (_ALL_GATHER, {}, True),
        (f"{_HALO}_splash", {}, True),
        (f"{_HALO}_pallas", {}, False),
    ],
)
def test_on_a_tpu_the_numerics_of_splash_are_for_what_splash_runs(spec: str, changes: dict, is_splash: bool) -> None:
    device = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    mesh: Any = SimpleNamespace(devices=np.array([device] * 4), shape={"context": 4}, axis_names=("context",))
    problem = Problem(seq_len=1 << 20, context_parallelism=4).replace(**_TAKEN_BY_OUR_KERNEL | changes)
    target = load_target(spec)
    on_tpu = dataclasses.replace(target.description, platform="tpu")
    numerics = on_tpu.of_problem(target.uses_tpu_precision(problem, mesh)).numerics
    assert (numerics == {"prescaled_query": True, "rounded_partials": True}) is is_splash, f"{spec}: {dict(numerics)}"
    assert is_splash or numerics == {}, "nothing to be excused for"


def test_jax_nn_returns_no_lse_and_leaves_empty_rows_undefined() -> None:
    description = load_target(_JAX_NN).description
    assert (description.has_lse, description.empty_rows) == (False, "undefined"), "softmax over nothing is uniform"
