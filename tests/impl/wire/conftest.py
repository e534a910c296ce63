"""What the tests of bytes on the wire share: how many a compiled program brings to a device, read out of its HLO.

Knows nothing of `conformance.hlo`, which it could otherwise agree with in the wrong. May touch: nothing.
"""

import math
import re
from collections.abc import Callable

import pytest

HLO_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "f64": 8,
    "s64": 8,
}
COLLECTIVE = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) (?P<kind>all-gather|all-to-all|collective-permute|reduce-scatter)(?P<start>-start)?\("
)


def bytes_received_in_hlo(hlo: str, devices: int) -> int:
    """What all but all-reduces of a compiled program bring to the device that receives most. A scan's body counts as
    often as it runs."""
    # A computation runs from its header to the next: a kernel's attributes may hold lines of any form.
    _, *parts = re.split(r"(?m)^(?:ENTRY )?%(\S+) \(.*\{$", hlo)
    computations = dict(zip(parts[::2], parts[1::2], strict=True))
    entry = re.search(r"(?m)^ENTRY %(\S+) ", hlo)
    assert entry is not None, "every HLO module has an entry computation"

    def trips(line: str) -> int:
        condition = re.search(r"condition=%([^\s,)]+)", line)
        if condition is None:
            return 1
        # A scan counts from 0 by 1 while it is below its length, the only number in its condition.
        (length,) = re.findall(r"= s(?:32|64)\[\]\S* constant\((\d+)\)", computations[condition[1]])
        return int(length)

    def reaches(device: int, name: str) -> int:
        total = 0
        for line in computations[name].splitlines():
            if collective := COLLECTIVE.search(line):
                total += _bytes_of_collective(collective, line, device)
            inner = re.findall(r"(?:body|calls|to_apply)=%([^\s,)]+)", line)
            total += trips(line) * sum(reaches(device, called) for called in inner)
        return total

    return max(reaches(device, entry[1]) for device in range(devices))


def _bytes_of_collective(collective: re.Match, line: str, device: int) -> int:
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", collective["shape"])
    sizes = [HLO_BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in shapes]
    if collective["kind"] == "collective-permute":
        arriving = sizes[1] if collective["start"] else sizes[0]  # a started one holds its operand, then its result
        return arriving * len(re.findall(rf"\{{\d+,{device}\}}", line.partition("source_target_pairs=")[2]))
    ranks = _ranks_of_a_group(line)
    if collective["kind"] == "all-gather":
        return sizes[-1] * (ranks - 1) // ranks
    if collective["kind"] == "reduce-scatter":
        return sizes[-1] * (ranks - 1)
    return sum(sizes) * (ranks - 1) // ranks


def _ranks_of_a_group(line: str) -> int:
    """From `replica_groups` in any of XLA's three forms: {{0,1},{2,3}}, [2,2]<=[4], mesh['a'=2,'b'=2] {'b'}."""
    groups = line.partition("replica_groups=")[2]
    if groups.startswith("mesh"):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", groups)}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", groups[groups.index("{") : groups.index("}")]))
    first = re.match(r"\{\{([\d,]+)\}|\[\d+,(\d+)\]", groups)
    assert first is not None, f"a collective without groups: {line}"
    return len(first[1].split(",")) if first[1] else int(first[2])


@pytest.fixture
def received_in_hlo() -> Callable[[str, int], int]:
    return bytes_received_in_hlo
