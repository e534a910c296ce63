"""`halocheck aot`: compiles targets for TPUs that are not there, and prints what they would do.

May touch: the terminal. Tests: tests/conformance/test_aot_command.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from conformance.aot.job import Compiled, compile_target
from conformance.aot.schedule import kernel_of
from conformance.aot.topologies import GIB, generation_of
from conformance.case_text import format_case
from conformance.models import MODELS, RANKS, full_size_case
from conformance.problem import Case
from conformance.production import production_cases

NIGHTLY = "nightly"
DEFAULT_MODELS = ("gemma-4-26b-a4b", "gemma-3-27b")
# One call a step: an odd seed has no attention_with_lse.
_SEED = 1
# The program without rematerialisation (remat_programs.PLAIN; that file imports JAX).
_PLAIN = "plain"


def model_cases(
    names: Sequence[str], layers: Sequence[str], layouts: Sequence[str], num_devices: int = RANKS
) -> tuple[Case, ...]:
    """Full-size layers of published models: 128K tokens over 8 ranks, bfloat16.

    NIGHTLY in the place of names is the production cases of `num_devices`, whatever their layers and layouts.

    Raises:
        ValueError: a name that no model has.
    """
    if tuple(names) == (NIGHTLY,):
        return production_cases(num_devices)
    by_name = {model.name: model for model in MODELS}
    for name in names:
        if name not in by_name:
            raise ValueError(f"model must be one of {', '.join(by_name)}, or {NIGHTLY} alone, got {name!r}")
    return tuple(
        full_size_case(by_name[name], layer, layout, _SEED)
        for name in names
        for layer in layers
        for layout in layouts
        if layer == "local" or by_name[name].global_heads is not None
    )


def compile_all(
    targets: Sequence[str],
    topologies: Sequence[str],
    cases_of: Callable[[str], Sequence[Case]],
    console: Console,
    keep: Callable[[Sequence[Compiled]], None],
) -> tuple[Compiled, ...]:
    """Compiles everything, printing a table for each target and topology, then the findings.

    `cases_of` gives the cases for a topology; `keep` is handed all that was compiled so far, after each case. An
    interrupt prints what there is, and goes on to the caller.

    Raises:
        TargetError: a target does not load.
    """
    everything: list[Compiled] = []
    try:
        for target in targets:
            for topology in topologies:
                _compile_one(target, topology, cases_of(topology), console, everything, keep)
    finally:
        for one in everything:
            for finding in one.findings:
                console.print(
                    f"FINDING {finding.id} {one.target} on {one.topology}: {finding.reading}",
                    markup=False,
                    soft_wrap=True,
                )
                console.print(f"  {finding.case}", markup=False, soft_wrap=True)
        for why in dict.fromkeys(one.cannot_ask for one in everything if one.cannot_ask):
            console.print(f"not known what it sends: {why}", markup=False, soft_wrap=True)
        console.print("compiled, not executed", markup=False)
    return tuple(everything)


def _compile_one(
    target: str,
    topology: str,
    cases: Sequence[Case],
    console: Console,
    everything: list[Compiled],
    keep: Callable[[Sequence[Compiled]], None],
) -> None:
    """Adds what a target compiles to on a topology to `everything`, and prints its tables."""
    done: list[Compiled] = []
    told = f"{target} on {topology}: {{}} of {len(cases)} layers"
    try:
        with (
            console.status(told.format(0)) as status,
            contextlib.closing(compile_target(target, topology, cases, schedules=True)) as compiled,
        ):
            for one in compiled:
                done.append(one)
                everything.append(one)
                keep(everything)
                status.update(told.format(len(done)))
    finally:
        if done:
            console.print(_table(target, topology, done))
        if any(one.facts.get("kernels") for one in done):
            console.print(_kernel_table(done))


def to_json(one: Compiled) -> dict[str, Any]:
    """One entry of aot.json."""
    hidden, transfers = one.hidden
    return {
        "target": one.target,
        "topology": one.topology,
        "case": format_case(one.case),
        "status": _status(one),
        "reason": one.reason,
        "shares_of_plan": dict(one.shares),
        "sent_not_known": one.cannot_ask,
        "hidden_transfers": hidden,
        "transfers": transfers,
        "memory_share": one.memory_share,
        "facts": {name: one.facts[name] for name in one.facts if name != "facts"},
        "findings": [finding.to_json() for finding in one.findings],
    }


def _table(target: str, topology: str, done: Sequence[Compiled]) -> Table:
    hbm = generation_of(topology).hbm_bytes // GIB
    table = Table(title=f"{target} on {topology}", title_justify="left")
    columns = ("layer", "status", "sent, of the plan", "hidden", "kernels", f"temporary, all of {hbm} GiB")
    for column in columns:
        table.add_column(column)
    for one in done:
        hidden, transfers = one.hidden
        kernels = ", ".join(f"{count} {name}" for name, count in one.facts.get("kernels", {}).items())
        memory = f"{one.facts['temporary_bytes'] / GIB:.2f} GiB, {one.memory_share:.0%}" if one.facts else ""
        counts = f"{hidden} of {transfers}" if one.facts else ""
        table.add_row(_layer(one.case), _status(one) or one.reason, _sent(one), counts, kernels, memory)
    return table


def _sent(one: Compiled) -> str:
    if one.cannot_ask:
        return "not known"
    shares = ", ".join(f"{direction} {share:.2f}" for direction, share in one.shares.items())
    return shares or ("not claimed" if one.facts else "")


def _kernel_table(done: Sequence[Compiled]) -> Table:
    """Each kernel that stands in a program: its static schedule, and how often it runs in a step."""
    table = Table(title="kernels: bundles of the hot region, and of all", title_justify="left")
    for column in ("layer", "kernel", "hot", "of all", "matrix units", "turns of its loops", "runs", "under remat"):
        table.add_column(column)
    for one in done:
        schedules = one.facts.get("schedules", {})
        for instruction in one.facts.get("instructions", ()):
            # Of kernels that are alike libtpu schedules one.
            alike = [name for name in schedules if kernel_of(name) == kernel_of(instruction)]
            schedule = schedules.get(instruction)
            figures = _figures(schedule) if schedule else [f"as {alike[0]}" if alike else "not written", "", "", ""]
            plain, *rematerialised = _runs_of(kernel_of(instruction), one.facts.get("runs", {}))
            table.add_row(_layer(one.case), instruction, *figures, plain, "; ".join(rematerialised))
    return table


def _figures(schedule: Mapping[str, Any]) -> list[str]:
    used = schedule["matrix_units"]
    turns = ", ".join(map(str, schedule["trips"]))
    return [str(schedule["hot"]), str(schedule["program"]), "unknown" if used is None else f"{used:.0%}", turns]


def _runs_of(kernel: str, runs: Mapping[str, Any]) -> list[str]:
    """How often a kernel runs in each program, the plain one first; what was saved is named."""
    told = []
    # A kernel without a name has one of the compiler's, which no traced program knows.
    is_named = any(kernel in counts for counts in runs.values() if not isinstance(counts, str))
    for program, counts in runs.items():
        times = counts if isinstance(counts, str) else counts.get(kernel, 0 if is_named else "unknown")
        told.append(str(times) if program == _PLAIN else f"{times} with {program}")
    return told or [""]


def _status(one: Compiled) -> str:
    if one.findings:
        return "finding"
    return f"declined: {one.reason}" if one.reason else "compiles"


def _layer(case: Case) -> str:
    """A layer in a few words: heads, head_dim, window, layout."""
    problem = case.problem
    window = "GLOBAL" if problem.sliding_window_size is None else f"W {problem.sliding_window_size}"
    heads = f"{problem.num_query_heads}/{problem.num_kv_heads} heads of {problem.head_dim}"
    return f"{problem.seq_len // 1024}K, {heads}, {window}, {problem.layout}"
