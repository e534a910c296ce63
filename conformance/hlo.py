"""What a compiled program sends: its collectives, read out of the text of its HLO, with how often each one runs.

Pure text to data, the same for XLA's CPU and TPU compilers. May touch: nothing. Tests: tests/conformance/test_hlo.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
HOST = ("host callback", "infeed", "outfeed", "recv", "send")
"""Kinds of traffic with the host (send and recv may also go to other devices): no attention has a use for them."""

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = (.*)")
_CALLED = re.compile(
    r"\b(body|condition|to_apply|calls|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([^()]*\))?)\))?"
    r" ?\{((?:'[^']*'(?::\(\d+\)\d+)?,?)*)\}"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"\bconstant\((-?\d+)\)")


@dataclass(frozen=True)
class Collective:
    """One instruction that communicates.

    `bytes` is the size of its operands on one device, each time it runs; `dtypes` are those of the operands. `pairs`
    are (source, destination) of a permute, `groups` the devices that talk to each other; both in the numbering of the
    program's devices. `trips`: how often it runs, None where a loop's number of turns is not in the text. `op_name` is
    XLA's record of the operation it came from, "" for one that a pass made up.
    """

    kind: str
    dtypes: tuple[str, ...]
    bytes: int
    pairs: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    trips: int | None = 1
    is_async: bool = False
    op_name: str = ""

    def bytes_received(self, device: int) -> float:
        """Bytes that reach `device` from others, over all its runs (one run where `trips` is unknown).

        An all-reduce counts its operands once: what each device must learn at least.
        """
        times = 1 if self.trips is None else self.trips
        if self.pairs:
            return times * self.bytes * sum(to == device != source for source, to in self.pairs)
        size = next((len(group) for group in self.groups if device in group), 1)
        if size == 1:
            return 0
        share = {"all-gather": size - 1, "all-reduce": 1.0, "collective-broadcast": 1.0}
        return times * self.bytes * share.get(self.kind, (size - 1) / size)


def collectives_of(hlo: str) -> tuple[Collective, ...]:
    """The collectives of a module's text, and its traffic with the host.

    A `-start` and `-done` pair is one collective; one in the body of a loop has as many `trips` as the loop has turns,
    by its `known_trip_count` or by the constant its condition compares with. Of a conditional's branches all count.
    """
    computations = computations_of(hlo)
    header = hlo[: hlo.find("\n\n")]
    found = re.search(r"num_partitions=(\d+)", header)
    num_devices = int(found.group(1)) if found else 1
    collectives: list[Collective] = []
    for name, times in _runs(computations):
        for line in computations[name]:
            collective = _collective(line, num_devices)
            if collective is not None:
                trips = None if times is None else times * (collective.trips or 1)
                collectives.append(_with_trips(collective, trips))
    return tuple(collectives)


def _with_trips(collective: Collective, trips: int | None) -> Collective:
    fields = {name: getattr(collective, name) for name in collective.__dataclass_fields__}
    return Collective(**{**fields, "trips": trips})


def computations_of(hlo: str) -> dict[str, list[str]]:
    """The instruction lines of each computation; the entry's key is ""."""
    computations: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in hlo.splitlines():
        if not line or line[0] in " }":
            if current is not None and line[:1] == " ":
                current.append(line)
            continue
        current = None
        if line.endswith("{") and not line.startswith("HloModule"):
            name = "" if line.startswith("ENTRY") else line.split(None, 1)[0].lstrip("%")
            current = computations.setdefault(name, [])
    return computations


def _runs(computations: dict[str, list[str]]) -> Iterator[tuple[str, int | None]]:
    """(computation, times) of every way in which the entry comes to run a computation."""
    waiting: list[tuple[str, int | None]] = [("", 1)] if "" in computations else []
    while waiting:
        name, times = waiting.pop()
        yield name, times
        for line in computations[name]:
            if "=%" not in line and "={%" not in line:
                continue
            for role, called in called_by(line):
                if called in computations:
                    turns = _turns(line, computations) if role in ("body", "condition") else 1
                    waiting.append((called, None if times is None or turns is None else times * turns))


def called_by(line: str) -> Iterator[tuple[str, str]]:
    """(role, computation) of each that an instruction names: the body of a loop, the branches of a conditional."""
    for role, names in _CALLED.findall(line):
        for name in names.strip("{}").split(","):
            yield role, name.strip().lstrip("%")


def _turns(line: str, computations: dict[str, list[str]]) -> int | None:
    """How often a loop's body runs."""
    if known := _TRIP_COUNT.search(line):
        return int(known.group(1))
    condition = next((name for role, name in called_by(line) if role == "condition"), "")
    lines = list(computations.get(condition, ()))
    for inner in tuple(lines):
        lines += [text for _, name in called_by(inner) for text in computations.get(name, ())]
    bounds = {int(n) for text in lines if (found := _INTEGER.search(text)) for n in [found.group(1)]}
    inclusive = any("direction=LE" in text for text in lines)
    compares = inclusive or any("direction=LT" in text for text in lines)
    # JAX's loops count from zero by one; anything else is not guessed at.
    return bounds.pop() + inclusive if compares and len(bounds) == 1 else None


def _collective(line: str, num_devices: int) -> Collective | None:
    """The collective of an instruction's line, once."""
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    result, opcode, rest = _split(found.group(2))
    is_async = opcode.endswith("-start")
    kind = opcode.removesuffix("-start")
    if opcode == "custom-call" and re.search(r'custom_call_target="[^"]*callback', rest):
        kind = "host callback"
    if kind not in COLLECTIVES and kind not in HOST:
        return None  # every other opcode, and the -done of a pair
    name = re.search(r'op_name="([^"]*)"', rest)
    groups = _groups(rest, num_devices) if kind in COLLECTIVES else ()
    dtypes, size = _dtypes_and_bytes(_operands(kind, is_async, result))
    if groups and not is_async:
        group = max(map(len, groups))
        # The text may leave the operands' types out, so they are worked out from the result's.
        size = {"all-gather": size // group, "reduce-scatter": size * group}.get(kind, size)
    pairs = _pairs(rest) if kind == "collective-permute" else ()
    return Collective(
        kind, dtypes, size, pairs, () if pairs else groups, 1, is_async, name.group(1) if name is not None else ""
    )


def _split(instruction: str) -> tuple[str, str, str]:
    """(type of the result, opcode, the rest) of what stands after an instruction's "="."""
    end = _end_of_type(instruction, " ")
    opcode, _, rest = instruction[end:].strip().partition("(")
    return instruction[:end], opcode, rest


def _operands(kind: str, is_async: bool, result: str) -> str:
    """The type of the operands, from the result's: the start of a pair holds (operands, results, …); an all-reduce's
    holds its results alone.
    """
    if not is_async or kind == "all-reduce" or not result.startswith("("):
        return result
    return result[1 : 1 + _end_of_type(result[1:], ",")]


def _end_of_type(text: str, separator: str) -> int:
    """Where the type that `text` begins with ends: at the first separator outside of any bracket."""
    depth = 0
    for index, letter in enumerate(text):
        if letter == separator and depth == 0:
            return index
        depth += (letter in "([{") - (letter in ")]}")
    return len(text)


def _dtypes_and_bytes(of_type: str) -> tuple[tuple[str, ...], int]:
    dtypes, bits = [], 0
    for dtype, dims in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", of_type)):
        width = _BITS.get(dtype)
        if width is None:
            digits = re.match(r"[a-z]+(\d+)", dtype)
            width = int(digits.group(1)) if digits else 0
        dtypes.append(dtype)
        bits += width * math.prod(int(n.strip(" <=")) for n in dims.split(",") if n.strip())
    return tuple(dict.fromkeys(dtypes)), bits // 8


def _pairs(rest: str) -> tuple[tuple[int, int], ...]:
    listed = re.search(r"source_target_pairs=\{(.*?)\}(?:,|\s|$|\})(?!\{)", rest)
    found = re.findall(r"\{?(\d+),(\d+)\}", listed.group(0)) if listed else []
    return tuple((int(source), int(to)) for source, to in found)


def _groups(rest: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Replica groups: lists `{{0,1},{2,3}}`, an iota `[2,4]<=[4,2]T(1,0)`, axes of a mesh, or none (all devices).

    Raises:
        ValueError: another notation; guessing would be a verdict on nothing.
    """
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        shape, dims = (tuple(map(int, part.split(","))) for part in iota.groups()[:2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota.group(3):
            ids = ids.transpose(tuple(map(int, iota.group(3).split(","))))
        return _as_groups(ids.reshape(shape[0], -1))
    mesh = _MESH_GROUPS.search(rest)
    if mesh:
        return _mesh_groups(*mesh.groups())
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest)
    if listed is None and "replica_groups=" in rest:
        raise ValueError(f"replica groups in an unknown notation: {rest[rest.index('replica_groups=') :][:80]}")
    groups = re.findall(r"\{([\d,]+)\}", listed.group(1)) if listed else []
    if not groups:
        return (tuple(range(num_devices)),)
    return tuple(tuple(map(int, group.split(","))) for group in groups)


def _mesh_groups(axes: str, order: str | None, inside: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh: `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`.

    device_ids is the device at each place of the mesh where they do not simply count up: a list, or an iota of the
    given shape, transposed. `'b':(2)2` is the part of axis b of size 2 that has a part of size 2 before it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if order and order.startswith("["):
        shape, _, transposed = order.partition("T")
        ids = ids.reshape([int(n) for n in re.findall(r"\d+", shape)])
        ids = ids.transpose([int(n) for n in re.findall(r"\d+", transposed)] or None)
    elif order:
        ids = np.array([int(n) for n in order.split(",")])
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", inside)
    ]
    dims, places = [], {}
    for name, size in sizes.items():
        done = 1
        for part in sorted(part for part in wanted if part[0] == name):
            dims += [part[1] // done, part[2]]
            places[part], done = len(dims) - 1, part[1] * part[2]
        dims.append(size // done)
    inner = [places[part] for part in wanted]
    ids = np.moveaxis(ids.reshape(dims), inner, range(-len(inner), 0))
    return _as_groups(ids.reshape(-1, math.prod(ids.shape[ids.ndim - len(inner) :])))


def _as_groups(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(device) for device in group) for group in ids)
