"""TPU topologies to compile for: their names as libtpu takes them, and what a device of each has.

May touch: nothing. Tests: tests/conformance/test_aot_command.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
DEFAULT_TOPOLOGY = "v6e:2x4"


@dataclass(frozen=True)
class Generation:
    """One generation of TPU. `hbm_bytes`: of one device, of which a chip of v4 and TPU7x has two."""

    accelerator: str
    default_topology: str
    hbm_bytes: int
    devices_per_chip: int = 1


GENERATIONS = {
    "v4": Generation("v4-16", "v4:2x2x2", 16 * GIB, 2),
    "v5e": Generation("v5litepod-8", "v5e:2x4", 16 * GIB),
    "v5p": Generation("v5p-16", "v5p:2x2x2", 95 * GIB),
    "v6e": Generation("v6e-8", "v6e:2x4", 32 * GIB),
    "tpu7x": Generation("tpu7x-16", "tpu7x:2x2x2", 96 * GIB, 2),
}


def parse_topologies(text: str) -> tuple[str, ...]:
    """The topologies of `--topology`: one like `v6e:2x4`, several with commas, or `all`.

    Raises:
        ValueError: an unknown generation, or a text of another form.
    """
    if text == "all":
        return tuple(generation.default_topology for generation in GENERATIONS.values())
    names = tuple(text.split(","))
    for name in names:
        generation, _, shape = name.partition(":")
        if generation not in GENERATIONS or not shape or not all(size.isdigit() for size in shape.split("x")):
            known = ", ".join(generation.default_topology for generation in GENERATIONS.values())
            raise ValueError(f"topology must be like {known}, or all, got {name!r}")
    return names


def num_devices_of(topology: str) -> int:
    """How many devices a topology has."""
    _, _, shape = topology.partition(":")
    return math.prod(map(int, shape.split("x"))) * generation_of(topology).devices_per_chip


def generation_of(topology: str) -> Generation:
    """The generation of a topology's name."""
    return GENERATIONS[topology.partition(":")[0]]
