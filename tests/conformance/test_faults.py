"""The fault catalogue: well formed, loadable as targets, wrong where it says so, and its clean twins right.

May touch: workers. What it tests: conformance/faults.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import conformance.faults
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.faults import CATALOGUE, CLEAN, KINDS, NOT_PUBLIC, Planted
from conformance.faults.fault import PHASES
from conformance.faults.table import faults_by_kind
from conformance.process import Worker
from conformance.targets import bundled

FAULTS = list(CATALOGUE.values())
_DEVICES = Devices("cpu", 8)
# One of each way to plant a fault: told, given, returned, gradients, replaced in one phase, replaced in all.
_SAMPLE = (
    "window_one_key_wide",
    "sinks_dropped",
    "lse_in_base_two",
    "dquery_always_zero",
    "backward_attends_everywhere",
    "first_rank_reads_the_last_ranks_tail",
)


def test_the_catalogue_holds_at_least_85_faults_under_their_own_names() -> None:
    families = conformance.faults._FAMILIES
    assert sum(len(family.FAULTS) for family in families) == len(CATALOGUE), "two faults have one name"
    assert len(CATALOGUE) >= 85, f"the catalogue holds {len(CATALOGUE)} faults"
    for name in CATALOGUE:
        assert isinstance(getattr(conformance.faults, name), Planted), f"{name} is also the name of a module"
        assert not name.endswith(CLEAN), f"{name} reads as the name of a clean twin"


def test_every_kind_has_a_fault() -> None:
    found = {fault.kind for fault in FAULTS}
    assert found == set(KINDS), f"kinds without a fault: {sorted(set(KINDS) - found)}; unknown: {found - set(KINDS)}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_well_formed(fault: conformance.faults.Fault) -> None:
    address = re.fullmatch(r"[\w.-]+/[\w.-]+/(pull|issues)/\d+", fault.report)
    assert address or fault.report == NOT_PUBLIC, f"not an address relative to github.com: {fault.report}"
    assert re.fullmatch(r".+[^.]\.", fault.sentence), f"not a sentence: {fault.sentence}"
    planted = [fault.told, fault.given, fault.returned, fault.gradients, *fault.replaced]
    assert any(planted), "nothing is planted"
    for replacement in fault.replaced:
        assert callable(getattr(replacement.module, replacement.name)), f"no function {replacement.name} to replace"
        assert set(replacement.phases) <= set(PHASES), f"unknown phases {replacement.phases}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_smallest_case_is_one_that_the_fault_is_about(fault: conformance.faults.Fault) -> None:
    case = parse_case(fault.smallest)
    assert format_case(case) == fault.smallest, "the text is not the canonical one"
    assert case.problem.num_devices <= _DEVICES.count, "a smallest case needs few devices"
    assert Planted(fault, clean=False).supports(case.problem) is None, "the fault declines its own smallest case"
    assert Planted(fault, clean=True).supports(case.problem) is None, "the twin declines what the fault does not"


def test_an_unknown_name_is_no_target() -> None:
    with pytest.raises(AttributeError):
        conformance.faults.no_such_fault  # noqa: B018  # the access is what is tested


def test_a_fault_declares_what_its_strategy_declares() -> None:
    for strategy in ("halo", "all_gather", "ring", "ulysses", "usp"):
        fault = next(fault for fault in FAULTS if fault.planted_in == strategy)
        for planted in (Planted(fault, clean=False), Planted(fault, clean=True)):
            right = getattr(bundled, strategy)
            for attribute in ("communication", "empty_rows", "exact"):
                assert getattr(planted, attribute) == getattr(right, attribute), f"{attribute} of {planted.name}"


def test_a_fault_applies_to_some_problems_only_where_it_says_so() -> None:
    fault = CATALOGUE["window_in_natural_order"]  # about dual_chunk_swap alone
    swapped = parse_case(fault.smallest).problem
    assert Planted(fault, clean=False).supports(swapped.replace(layout="contiguous")) is not None
    assert Planted(fault, clean=True).supports(swapped.replace(layout="contiguous")) is not None


def test_functions_are_put_back_after_a_call_and_after_an_error() -> None:
    for fault in FAULTS:
        before = [getattr(item.module, item.name) for item in fault.replaced]
        planted = Planted(fault, clean=False)
        with pytest.raises(RuntimeError), planted._in_place("backward"):
            raise RuntimeError("what a target raises while it is traced")
        assert [getattr(item.module, item.name) for item in fault.replaced] == before, f"{fault.name} left something"


def test_the_table_of_the_documentation_is_the_catalogue() -> None:
    written = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert written.endswith(faults_by_kind()), "docs/faults.md: run python -m conformance.faults.table"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    running = Worker("conformance.targets.bundled:halo", _DEVICES)
    yield running
    running.close()


@pytest.fixture
def answer(worker: Worker) -> Callable[[str, str], dict[str, np.ndarray]]:
    def run(spec: str, case: str) -> dict[str, np.ndarray]:
        worker.load(spec)
        reply = worker.run(case)
        assert isinstance(reply, tuple), f"{spec} lost its worker: {reply}"
        assert not reply[0].get("raised"), f"{spec} raised {reply[0]['raised']}"
        return reply[1]

    return run


@pytest.mark.parametrize("name", _SAMPLE)
def test_a_fault_changes_its_smallest_case_and_its_twin_is_the_bundled_target(
    name: str, answer: Callable[[str, str], dict[str, np.ndarray]]
) -> None:
    fault = CATALOGUE[name]
    right = answer(f"conformance.targets.bundled:{fault.planted_in}", fault.smallest)
    wrong = answer(f"conformance.faults:{name}", fault.smallest)
    clean = answer(f"conformance.faults:{name}{CLEAN}", fault.smallest)
    assert right.keys() == clean.keys(), "the twin answers with other arrays"
    for array in right:
        np.testing.assert_array_equal(clean[array], right[array], f"{array} of the twin is not the bundled target's")
    assert any(np.abs(wrong[array] - right[array]).max() > 1e-3 for array in right), "the fault changes nothing"


def test_a_fault_is_frozen_data() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FAULTS[0].name = "another"  # pyright: ignore[reportAttributeAccessIssue]
