"""The order in which a TPU runs a program, read out of its scheduled HLO: which kernels, and what hides each transfer.

Pure text to data. May touch: nothing. Tests: tests/conformance/test_aot_schedule.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.hlo import COLLECTIVES, called_by, computations_of

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([^\s=]+) = (.*)")
_OPCODE = re.compile(r"(?<![\w.\-%\"])([a-z][\w\-]*)\(")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_CONTROL = ("body", "true_computation", "false_computation", "branch_computations")
Computations = Mapping[str, Sequence[str]]
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Transfer:
    """One collective of the program, as it stands there: in a loop it is one, however often the loop turns.

    `is_async`: it has a start and a done; `kernels` are those that run between the two, in loops there too, `cycles`
    what XLA expects its own fusions there to take. `computation`: the loop's body, or a branch; "" of the entry.
    """

    kind: str
    name: str
    is_async: bool
    kernels: tuple[str, ...] = ()
    cycles: int = 0
    computation: str = ""

    @property
    def is_hidden(self) -> bool:
        """Whether a kernel runs while it travels."""
        return bool(self.kernels)


def transfers_of(hlo: str) -> tuple[Transfer, ...]:
    """The collectives of a scheduled module: the entry's in their order, then those of its loops and branches."""
    computations = computations_of(hlo)
    return tuple(one for name in _run_from("", computations) for one in _transfers_in(name, computations))


def _transfers_in(computation: str, computations: Computations) -> Iterator[Transfer]:
    lines = list(_instructions(computations[computation]))
    for index, (name, text) in enumerate(lines):
        opcode = _opcode(text)
        kind = opcode.removesuffix("-start")
        if kind == "async":
            kind = next((one for one in COLLECTIVES if name.startswith(one)), kind)
        if kind not in COLLECTIVES:
            continue
        if not opcode.endswith("-start"):
            yield Transfer(kind, name, is_async=False, computation=computation)
            continue
        done = next((at for at in range(index + 1, len(lines)) if _is_done(name, lines[at][1])), len(lines))
        between = lines[index + 1 : done]
        kernels = tuple(kernel for inner, line in between for kernel in _kernels_of_line(inner, line, computations))
        cycles = sum(int(count) for _, line in between for count in _CYCLES.findall(line))
        yield Transfer(kind, name, True, kernels, cycles, computation)


def _run_from(name: str, computations: Computations) -> list[str]:
    """A computation, and all that its loops and branches run, each once; what a fusion calls is none of them."""
    found, waiting = list[str](), [name]
    while waiting:
        current = waiting.pop(0)
        if current in computations and current not in found:
            found.append(current)
            waiting += _run_by(computations[current])
    return found


def _run_by(lines: Sequence[str]) -> list[str]:
    return [called for line in lines for role, called in called_by(line) if role in _CONTROL or " call(" in line]


def _kernels_of_line(name: str, text: str, computations: Computations) -> Iterator[str]:
    """An instruction that is a kernel; or the kernels of the loop or branches that it is."""
    if _KERNEL in text:
        yield name
    for called in _run_by([text]):
        for inner in _run_from(called, computations):
            yield from (kernel for kernel, line in _instructions(computations[inner]) if _KERNEL in line)


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


def _instructions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of each instruction; a kernel's configuration may have lines of its own."""
    for line in lines:
        if found := _INSTRUCTION.match(line):
            yield found.group(1), found.group(2)


def _opcode(text: str) -> str:
    found = _OPCODE.search(text)
    return found.group(1) if found else ""


def _is_done(start: str, text: str) -> bool:
    opcode = _opcode(text)
    return opcode.endswith("-done") and re.search(rf"%{re.escape(start)}[\s,)]", text) is not None
