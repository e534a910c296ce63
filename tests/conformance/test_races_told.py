"""What the interpreter's text says of races and semaphores, in the words of both versions of JAX."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.races.told import Access, LeftOver, Race, left_over, place_told, races_told

_OLD = """RACE DETECTED
  read of ('vmem', 104, 2, 0)[()] from 2, 0, /home/me/my_kernel.py:30:18 (kernel)
  clock: [ 0  2 12  1  0  6
  0  0]
  write of ('vmem', 104, 2, 0)[(slice(0, 8, 1),)] from 101, 0 /home/me/my_kernel.py:26:8 (kernel)
  clock: [2 8 1 0 0 0 7 0]

"""
_NEW = """RACE DETECTED
  write of ('vmem', 104, 3, 0)[()] from (107, 0), /home/me/my_kernel.py:26:8 (kernel)
  clock: <jax.vector_clock.NpVectorClock object at 0x7f0d040785f0>
  read of ('vmem', 104, 3, 0)[()] from (3, 0), /home/me/my_kernel.py:30:18 (kernel)
  clock: <jax.vector_clock.NpVectorClock object at 0x7f0d04079f10>
"""
_READ = Access("read", "my_kernel.py:30 (kernel)", by_copy=False)
_WRITE = Access("write", "my_kernel.py:26 (kernel)", by_copy=True)


@pytest.mark.parametrize(("text", "device"), [(_OLD, 2), (_NEW, 3)])
def test_a_race_has_its_two_places_and_who_is_a_copy(text: str, device: int) -> None:
    assert races_told(text) == {Race(_READ, _WRITE, "vmem"): [device]}, "read by the kernel, written by a copy"


def test_a_race_told_of_several_devices_in_either_order_is_one() -> None:
    noise = "the target prints\n\n"
    told = races_told(noise + _NEW + noise + _OLD + _OLD)
    assert told == {Race(_READ, _WRITE, "vmem"): [2, 3]}, "one race, two devices"


def test_text_without_races_tells_of_none() -> None:
    for text in ("", "a write of something\n", "RACE DETECTED\n", _OLD.partition("clock")[0]):
        assert races_told(text) == {}, f"no two places in {text!r}"


def test_the_words_of_an_access_say_what_does_it() -> None:
    assert _READ.words == "a read at my_kernel.py:30 (kernel)", "the kernel's own"
    assert _WRITE.words == "the write of a copy started at my_kernel.py:26 (kernel)", "a copy is told by its start"


def test_what_moves_the_blocks_of_a_kernel_has_no_line() -> None:
    assert place_told("pallas_call") == "the kernel's own inputs and outputs", "in words of its author's"
    assert place_told("unknown") == "unknown", "as it was told"


def test_semaphores_left_over_are_barriers_or_the_kernels_own() -> None:
    text = (
        "Semaphore 2001 has non-zero count for 2 (global core 2) at kernel exit: 16384"
        "Semaphore 2001 has non-zero count for 0 (global core 0) at kernel exit: 8192\n"
        "Semaphore 7 has non-zero count for 1 (global core 1) at kernel exit: 1\n" * 2
    )
    own, barrier = LeftOver(2001, is_barrier=False), LeftOver(7, is_barrier=True)
    assert left_over(text) == {own: Counter({2: 2, 0: 2}), barrier: Counter({1: 2})}, "by semaphore and device"
