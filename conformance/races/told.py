"""Reads what JAX's TPU interpret mode tells: races, each with its two places in the kernel, and semaphores left over.

May touch: nothing; never JAX. Tests: tests/conformance/test_races_told.py.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

# The interpreter numbers its simulated copies from here, and devices below.
_FIRST_COPY = 100
# It numbers a kernel's own semaphores from here; below stand those of barriers, which are collective ids.
_FIRST_OWN_SEMAPHORE = 2000
_RACE = "RACE DETECTED"
_ACCESS = re.compile(
    r"^ *(?P<kind>read|write) of \('(?P<memory>\w+)', \d+, (?P<device>\d+), \d+\)\[(?P<range>.*)\]"
    r" from \(?(?P<by>\d+), \d+\)?,? (?P<place>.*)$"
)
_LEFT_OVER = re.compile(r"Semaphore (\d+) has non-zero count for (\d+) \(.*?\) at kernel exit: (-?\d+)")
_PLACE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)$")


@dataclass(frozen=True, order=True)
class Access:
    """One of the two sides of a race. `kind` is read or write; `place` is file:line (function) in the kernel.

    `by_copy`: an asynchronous copy does it, which was started at the place; else the kernel itself, at the place.
    """

    kind: str
    place: str
    by_copy: bool

    @property
    def words(self) -> str:
        """As in a sentence."""
        return (
            f"the {self.kind} of a copy started at {self.place}" if self.by_copy else f"a {self.kind} at {self.place}"
        )


@dataclass(frozen=True, order=True)
class Race:
    """Two accesses to the same memory that nothing orders, on whichever devices. `memory`: hbm, vmem, …"""

    first: Access
    second: Access
    memory: str


@dataclass(frozen=True, order=True)
class LeftOver:
    """A semaphore that is not zero when its kernel ends: somebody signals who is not waited for, or not in full."""

    semaphore: int
    is_barrier: bool


def races_told(text: str) -> dict[Race, list[int]]:
    """Every race of which the text tells, with the devices whose memory it is in."""
    found: dict[Race, list[int]] = {}
    for told in text.split(_RACE)[1:]:
        accesses = [match for match in map(_ACCESS.match, told.splitlines()) if match][:2]
        if len(accesses) < 2:
            continue
        first, second = sorted(_access(match) for match in accesses)
        devices = found.setdefault(Race(first, second, accesses[0]["memory"]), [])
        if int(accesses[0]["device"]) not in devices:
            devices.append(int(accesses[0]["device"]))
    return {race: sorted(devices) for race, devices in found.items()}


def left_over(text: str) -> dict[LeftOver, Counter[int]]:
    """Every semaphore that the text says was left above zero, with the devices, and how often on each."""
    found: dict[LeftOver, Counter[int]] = {}
    for number, device, _ in _LEFT_OVER.findall(text):
        semaphore = LeftOver(int(number), int(number) < _FIRST_OWN_SEMAPHORE)
        found.setdefault(semaphore, Counter())[int(device)] += 1
    return found


def place_told(told: str) -> str:
    """file:line (function), without the folder; `pallas_call` is what moves a kernel's blocks in and out."""
    match = _PLACE.match(told.strip())
    if match is None:
        return "the kernel's own inputs and outputs" if told.strip() == "pallas_call" else told.strip()
    return f"{PurePath(match['file']).name}:{match['line']} ({match['function']})"


def _access(match: re.Match[str]) -> Access:
    return Access(match["kind"], place_told(match["place"]), int(match["by"]) >= _FIRST_COPY)
