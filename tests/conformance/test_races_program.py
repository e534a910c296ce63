"""A race detector is tested on both sides: every planted race is seen, and the clean kernel is silent."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conformance.races import interpreter
from conformance.races.kernels import copying_kernels
from conformance.races.planted import CLEAN, MISTAKES, fetch_halo
from conformance.races.program import CALLS, watched
from conformance.races.skew import Skew

_RANKS, _HEADS, _ROWS, _HALO_ROWS, _DIM = 3, 2, 4, 2, 4
_SPEC = PartitionSpec(None, "context")


@functools.cache
def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:_RANKS]), ("context",))


def _sharding() -> NamedSharding:
    return NamedSharding(_mesh(), _SPEC)


def _rows(call: int) -> np.ndarray:
    count = _HEADS * _RANKS * _ROWS * _DIM
    return np.arange(count, dtype=np.float32).reshape(_HEADS, _RANKS * _ROWS, _DIM) + 1000 * call


def _halo(call: int) -> np.ndarray:
    """What every rank must have: the last rows of the rank before it, on a circle."""
    tails = _rows(call).reshape(_HEADS, _RANKS, _ROWS, _DIM)[:, :, _ROWS - _HALO_ROWS :]
    return np.roll(tails, 1, axis=1).reshape(_HEADS, _RANKS * _HALO_ROWS, _DIM)


def _fetch(mistake: str, rows: Any) -> Any:
    of_rank = functools.partial(fetch_halo, halo_rows=_HALO_ROWS, axis="context", mistake=mistake)
    return jax.shard_map(of_rank, mesh=_mesh(), in_specs=_SPEC, out_specs=_SPEC, check_vma=False)(rows)


def _watched(mistake: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    skew = Skew(_RANKS)

    def function(arrays: dict[str, Any]) -> dict[str, Any]:
        return {"halo": _fetch(mistake, skew.late(arrays["rows"], _mesh(), _sharding()))}

    return watched(function, [{"rows": jax.device_put(_rows(call), _sharding())} for call in range(CALLS)], skew)


def _wrong(results: dict[str, np.ndarray]) -> list[str]:
    return [name for name, got in results.items() if not np.array_equal(got, _halo(int(name.split()[2][0])))]


def _places(facts: dict[str, Any]) -> set[tuple[str, str]]:
    """The kinds of the two accesses of each race that was told."""
    return {(race["first"]["kind"], race["second"]["kind"]) for _, race, _ in facts["races"]}


def test_the_clean_kernel_is_silent_in_both_modes_and_every_call_is_right() -> None:
    facts, results = _watched(CLEAN)
    assert facts == {"races": [], "left_over": [], "raised": None}, "no race, no semaphore left over"
    assert len(results) == CALLS * len(interpreter.MODES), "every call of both modes has answered"
    assert _wrong(results) == [], "and rightly"


def test_a_send_that_is_not_waited_for_races_with_the_next_load() -> None:
    facts, _ = _watched("missing_send_wait")
    assert ("read", "write") in _places(facts), "the copy on its way out reads what the next load writes"
    assert {semaphore["semaphore"] for _, semaphore, _ in facts["left_over"]} == {2001}, (
        "and its semaphore is left over"
    )
    (race,) = {(race["first"]["place"], race["second"]["place"]) for _, race, _ in facts["races"]}
    assert all(place.startswith("planted.py:") for place in race), "both places are lines of the kernel"
    assert race[0] != race[1], "two different ones"


@pytest.mark.parametrize("mistake", ["missing_receive_wait", "wrong_semaphore", "early_reuse"])
def test_a_buffer_that_is_read_too_early_or_overwritten_is_a_race(mistake: str) -> None:
    facts, results = _watched(mistake)
    assert ("read", "write") in _places(facts), "what arrives races with what is taken out of the buffer"
    assert facts["raised"] is None, "told without raising"
    if mistake == "missing_receive_wait":
        unread = [name for name in _wrong(results) if name.startswith("races on_wait")]
        assert len(unread) == CALLS, "a copy that nobody waits for is never carried out"
        assert np.isnan(results[unread[0]]).all(), "and memory starts as NaN"


@pytest.mark.parametrize("mistake", ["missing_barrier", "wrong_neighbour"])
def test_memory_of_a_device_that_comes_late_is_not_there(mistake: str) -> None:
    facts, _ = _watched(mistake)
    (mode, _, message, place) = facts["raised"]
    assert mode == "eager", "the first call of the first mode has its last device late"
    assert "KeyError: ('vmem'" in message, "its buffer does not exist yet"
    assert place.startswith("planted.py:"), "the place is the copy's"


def test_a_barrier_that_is_signalled_too_often_is_left_over_for_the_next_call() -> None:
    facts, results = _watched("unbalanced_barrier")
    assert [semaphore["is_barrier"] for _, semaphore, _ in facts["left_over"]] == [True, True], "in both modes"
    assert (facts["races"], _wrong(results)) == ([], []), "and nothing else tells of it"


def test_what_one_run_has_broken_the_next_one_does_not_feel() -> None:
    assert _watched("wrong_neighbour")[0]["raised"] is not None, "the interpreter was left in the middle of a kernel"
    facts, results = _watched(CLEAN)
    assert (facts["raised"], _wrong(results)) == (None, []), "a clean one runs in the same process"


def test_the_code_tells_a_kernel_that_sends_before_any_barrier() -> None:
    for mistake in (CLEAN, *MISTAKES):
        rows = jax.device_put(_rows(0), _sharding())
        (kernel,) = copying_kernels(jax.jit(functools.partial(_fetch, mistake)).trace(rows))
        assert kernel.sends, "it copies to another device"
        assert kernel.sends_before_barrier == (mistake == "missing_barrier"), f"{mistake}"
        assert "_fetch_kernel at planted.py:" in kernel.name, "its function and file, without the folder"


def test_a_program_without_kernels_has_none_that_copies() -> None:
    assert copying_kernels(jax.jit(lambda rows: rows + 1).trace(_rows(0))) == (), "nothing to look at"


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is known of the interpreter is forgotten before and after the test."""
    interpreter.unavailable.cache_clear()
    yield
    interpreter.unavailable.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_jax_without_the_interpreter_or_whose_detector_is_blind_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreter.unavailable() is None, "this JAX is fit"
    interpreter.unavailable.cache_clear()
    monkeypatch.setattr(interpreter, "races_told", lambda text: {})
    assert "does not tell of a planted race" in str(interpreter.unavailable()), "its words are not understood"
    interpreter.unavailable.cache_clear()
    monkeypatch.setattr(interpreter, "races_told", lambda text: {"a": [], "b": []})
    assert "where there is none" in str(interpreter.unavailable()), "or it tells of too many"
    interpreter.unavailable.cache_clear()
    monkeypatch.delattr(pltpu, "InterpretParams")
    assert "has no pltpu.InterpretParams" in str(interpreter.unavailable()), "or it is not there"
