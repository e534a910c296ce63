"""The static schedule of a Pallas kernel, out of the files that libtpu writes: its hot region, matrix units, loops.

A TPU core runs one bundle a cycle unless it stalls, so this is a figure of speed free of noise, for one libtpu.
May touch: the folder that libtpu was told to write to. Tests: tests/conformance/test_aot_bundles.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = re.compile(r"(?m)^\s*(?:0x[0-9a-f]+|0)\s+((?:L[BHE]|P[BF]|CT)?)\s*:(.*)$")
_LOOP_EXIT = re.compile(r"scmp\.ge\S* \S+ (\d+) /\* loop exit test \*/")
_BUNDLES, _SLOTS = "final_bundles", "final_hlo-static-per-bundle-utilization"


@dataclass(frozen=True)
class Schedule:
    """One kernel's program.

    `hot`: bundles of its longest stretch without branch or label, where the matrix products stand. `program`: all
    bundles, each counted once. `trips`: turns of each loop whose end is a constant; a pipelined grid takes a few more
    than it has steps. `matrix_units`: of the hot region's matrix-unit slots the share that is used; None: not written.
    """

    hot: int
    program: int
    trips: tuple[int, ...] = ()
    matrix_units: float | None = None


def dump_arguments(directory: Path) -> str:
    """LIBTPU_INIT_ARGS that have libtpu write schedules, and nothing of its other hundred passes, to a folder."""
    return (
        f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=({_BUNDLES}|{_SLOTS})"
    )


def dumped_schedules(directory: Path, kernels: Iterable[str]) -> dict[str, Schedule]:
    """The schedules in a folder of those of `kernels` (names of HLO instructions) that libtpu wrote one of."""
    schedules = {}
    for name in kernels:
        # A file is named by a time stamp, the instruction, the number of the pass and the pass.
        paths = [path for path in directory.glob(f"*-{name}-*-{_BUNDLES}.txt") if "schedule-analysis" not in path.name]
        if len(paths) == 1:
            slots = list(directory.glob(f"*-{name}-*-{_SLOTS}.txt"))
            text = slots[0].read_text(encoding="utf-8") if len(slots) == 1 else ""
            schedules[name] = schedule_of(paths[0].read_text(encoding="utf-8"), text)
    return schedules


def schedule_of(bundles: str, slots: str = "") -> Schedule:
    """The schedule of a kernel from its final bundles, and from the slots that each of them uses, if known."""
    found = _BUNDLE.findall(bundles)
    cuts = [0, *(index for index, (label, body) in enumerate(found) if label or "sbr." in body), len(found)]
    start, end = max(itertools.pairwise(cuts), key=lambda stretch: stretch[1] - stretch[0])
    trips = tuple(int(turns) for turns in _LOOP_EXIT.findall(bundles))
    return Schedule(end - start, len(found), trips, _matrix_units(slots, len(found), slice(start, end)))


def _matrix_units(slots: str, num_bundles: int, hot: slice) -> float | None:
    """The used share of the matrix units' slots: the first column (MXU), of its capacity."""
    capacities, _, used = slots.partition("UTILIZATION:")
    capacity = re.search(r"(?m)^MXU.*\n\s*(\d+)", capacities)
    rows = [int(line.split()[0]) for line in used.splitlines() if line.strip()]
    if capacity is None or len(rows) != num_bundles or not rows[hot]:
        return None
    return sum(rows[hot]) / (int(capacity.group(1)) * len(rows[hot]))
