"""The order in which a TPU runs a program, read out of its scheduled HLO: which kernels, and what hides each transfer.

Pure text to data. May touch: nothing. Tests: tests/conformance/test_aot_schedule.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from conformance.hlo import COLLECTIVES

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([^\s=]+) = (.*)")
_OPCODE = re.compile(r"(?<![\w.\-%\"])([a-z][\w\-]*)\(")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Transfer:
    """One collective of the entry computation.

    `is_async`: it has a start and a done; `kernels` are those that run between the two, `cycles` what XLA expects its
    own fusions there to take.
    """

    kind: str
    name: str
    is_async: bool
    kernels: tuple[str, ...] = ()
    cycles: int = 0

    @property
    def is_hidden(self) -> bool:
        """Whether a kernel runs while it travels."""
        return bool(self.kernels)


def transfers_of(hlo: str) -> tuple[Transfer, ...]:
    """The collectives of a scheduled module's entry computation, in their order."""
    lines = list(_entry(hlo))
    transfers = []
    for index, (name, text) in enumerate(lines):
        opcode = _opcode(text)
        kind = opcode.removesuffix("-start")
        if kind == "async":
            kind = next((one for one in COLLECTIVES if name.startswith(one)), kind)
        if kind not in COLLECTIVES:
            continue
        if not opcode.endswith("-start"):
            transfers.append(Transfer(kind, name, is_async=False))
            continue
        done = next((at for at in range(index + 1, len(lines)) if _is_done(name, lines[at][1])), len(lines))
        between = lines[index + 1 : done]
        kernels = tuple(inner for inner, line in between if _KERNEL in line)
        cycles = sum(int(count) for _, line in between for count in _CYCLES.findall(line))
        transfers.append(Transfer(kind, name, True, kernels, cycles))
    return tuple(transfers)


def kernels_of(hlo: str) -> dict[str, int]:
    """How often each Pallas kernel stands in the module, by its name without the compiler's numbering."""
    counts: dict[str, int] = {}
    for instruction in kernel_instructions(hlo):
        name = kernel_of(instruction)
        counts[name] = counts.get(name, 0) + 1
    return counts


def kernel_instructions(hlo: str) -> tuple[str, ...]:
    """The names of the instructions that are Pallas kernels, in any computation of the module."""
    found = (_INSTRUCTION.match(line) for line in hlo.splitlines() if _KERNEL in line)
    return tuple(match.group(1) for match in found if match)


def kernel_of(instruction: str) -> str:
    """The name of a kernel, from that of its instruction."""
    return re.sub(r"(\.\d+)+$", "", instruction)


def _entry(hlo: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the instructions of the entry computation."""
    inside = False
    for line in hlo.splitlines():
        if line.startswith("ENTRY"):
            inside = True
        elif inside and line == "}":  # a kernel's configuration may have lines of its own that begin with one
            return
        elif inside and (found := _INSTRUCTION.match(line)):
            yield found.group(1), found.group(2)


def _opcode(text: str) -> str:
    found = _OPCODE.search(text)
    return found.group(1) if found else ""


def _is_done(start: str, text: str) -> bool:
    opcode = _opcode(text)
    return opcode.endswith("-done") and re.search(rf"%{re.escape(start)}[\s,)]", text) is not None
