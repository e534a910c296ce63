"""What a host holds: its own rows of the inputs in any layout, and rows of the outputs that it can be asked for."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from conformance.case_text import parse_case
from conformance.hosts import host, shards
from conformance.hosts.shards import HeldRows, heads_here, not_finite_here, placed_shards, queries_here
from conformance.inputs import inputs_of
from conformance.mesh import mesh_of

_CASE = parse_case(
    "v=1 batch=2 seq_len=16 num_query_heads=4 num_kv_heads=2 value_dim=6 layout=dual_chunk_swap sliding_window_size=5 "
    "data_parallelism=2 tensor_parallelism=2 sinks=true padding=7 documents=5@7+11@1/16@2 dtype=bfloat16"
)


@pytest.mark.parametrize("values_of_a_piece", [shards._PIECE_VALUES, 50])
def test_the_arrays_are_those_of_the_case_in_layout_order(
    values_of_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole parts, and pieces of a position or two that threads make."""
    monkeypatch.setattr(shards, "_PIECE_VALUES", values_of_a_piece)
    mesh = mesh_of(_CASE.problem, jax.devices())
    placed = placed_shards(_CASE, mesh, zero_at_empty_rows=False)
    inputs, order = inputs_of(_CASE), _CASE.problem.positions()
    assert set(placed) == {"query", "key", "value", "dout", "dlse", "segment_ids", "sinks"}, "all that the problem has"
    for name, array in placed.items():
        master = getattr(inputs, name)
        expected = master if name == "sinks" else master[:, order]
        np.testing.assert_array_equal(np.asarray(array), expected, err_msg=name)


def test_every_part_is_told_before_it_is_made() -> None:
    """A million tokens take longer to draw than a process may compute without a word."""
    told: list[str] = []
    placed_shards(_CASE, mesh_of(_CASE.problem, jax.devices()), zero_at_empty_rows=False, report=told.append)
    num_devices = _CASE.problem.num_devices
    assert told.count("making a part of query") == num_devices, "each device's rows, of which no two are the same"
    assert {phase.removeprefix("making a part of ") for phase in told} >= {"key", "value", "dout"}, "of every array"


def test_cotangents_of_rows_without_keys_are_zero_for_targets_that_leave_them_undefined() -> None:
    placed = placed_shards(_CASE, mesh_of(_CASE.problem, jax.devices()), zero_at_empty_rows=True)
    is_padding = np.asarray(placed["segment_ids"]) == 7
    for name in ("dout", "dlse"):
        rows = np.asarray(placed[name], np.float32)
        assert not rows[is_padding].any(), f"{name} of padding"
        assert rows[~is_padding].all(), f"{name} of tokens is as drawn"


def test_rows_are_found_where_the_whole_array_would_have_them() -> None:
    mesh = mesh_of(_CASE.problem, jax.devices())
    array = placed_shards(_CASE, mesh, zero_at_empty_rows=False)["query"]
    held, whole = HeldRows(array), np.asarray(array)
    place = (np.array([0, 1, 1]), np.array([3, 15, 0]), np.array([2, 0, 3]))
    np.testing.assert_array_equal(held[place], whole[place])
    assert held.holds(1, 15, 3), "all shards are in this process"


def test_a_row_that_another_host_holds_is_neither_here_nor_made_up() -> None:
    half = jax.device_put(np.arange(8.0).reshape(1, 4, 2), jax.devices()[0])
    held = HeldRows(half)
    assert not held.holds(0, 4, 0), "beyond what is here"
    with pytest.raises(KeyError, match="holds no row"):
        held[np.array([0]), np.array([4]), np.array([0])]


def test_every_query_is_here_once_and_copies_do_not_count() -> None:
    """Halves of the heads on each side of the tensor axis; with kv heads that do not divide there are copies too."""
    placed = placed_shards(_CASE, mesh_of(_CASE.problem, jax.devices()), zero_at_empty_rows=False)
    here = queries_here(placed["query"], _CASE.problem)
    assert set(here) == {0, 1, 2, 3}, "all heads"
    for head, parts in here.items():
        found = sorted((row, int(position)) for row, positions in parts for position in positions)
        assert found == [(row, position) for row in (0, 1) for position in range(16)], f"head {head}"
        assert all((np.diff(positions) > 0).all() for _, positions in parts), "ascending, whatever the layout"
    replicated = jax.device_put(placed["query"], jax.sharding.NamedSharding(placed["query"].sharding.mesh, P()))
    assert [len(parts) for parts in queries_here(replicated, _CASE.problem).values()] == [2] * 4, "one copy of eight"
    sinks = heads_here(placed["sinks"])
    assert list(sinks.values()) == np.asarray(placed["sinks"]).tolist(), "by head"


@pytest.mark.parametrize(
    ("tensor", "value", "expected"),
    [
        ("out", 1.0, None),
        ("out", np.nan, "NaN"),
        ("dkey", np.inf, "infinity"),
        ("dkey", -np.inf, "infinity"),
        ("lse", -np.inf, None),
        ("lse", np.inf, "infinity"),
        ("lse", np.nan, "NaN"),
    ],
)
def test_what_is_not_finite_is_noticed_wherever_it_is(tensor: str, value: float, expected: str | None) -> None:
    array = np.zeros((4, 4), jax.numpy.bfloat16 if tensor == "out" else np.float32)
    array[3, 1] = value
    assert not_finite_here(tensor, jax.device_put(array)) == expected, "an element that no place asks for"


def test_a_phase_of_our_own_is_told_again_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle takes ten minutes of CPU for the longest windows: a target would be ended as one that never ends."""
    monkeypatch.setattr(host, "_TELL_SECONDS", 0.01)
    told: list[str] = []
    again = threading.Event()

    def report(phase: str) -> None:
        told.append(phase)
        if len(told) == 3:
            again.set()

    with host._telling(report, "judging"):
        assert again.wait(30), "not once alone"
    number = len(told)
    assert set(told) == {"judging"}, "the phase"
    assert len(told) == number, "and no more when it is over"
