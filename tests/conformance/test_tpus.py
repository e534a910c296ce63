"""Real TPUs, as far as a machine without one can tell: what is asked for, what is refused, what a worker is given."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from conformance import cli, devices, tpus
from conformance.answers import precision_of
from conformance.case_text import parse_case
from conformance.checks import CHECKS
from conformance.devices import Devices, parse_devices, worker_environment
from conformance.hosts import launch
from conformance.hosts.place import Place
from conformance.mesh import mesh_of
from conformance.problem import Case
from conformance.production import foldings, production_cases
from conformance.runner import Plan, Run
from conformance.session import Session
from conformance.target import TargetDescription
from oracle.budget import Precision

_NO_TPU = (
    "Traceback (most recent call last):\n  File …\n"
    "RuntimeError: Unable to initialize backend 'tpu': NOT_FOUND: No jellyfish device found. "
    "(set JAX_PLATFORMS='' to automatically choose an available backend)\n"
)


@dataclass(frozen=True)
class _Device:
    """What a mesh asks of a device."""

    id: int
    platform: str = "tpu"
    device_kind: str = "TPU v6e"


def _list(profile: str, seed: int, examples: int | None, num_devices: int) -> tuple[Case, ...]:
    """In the place of the real list, which takes seconds to make: one case for each number of devices."""
    return tuple(
        Case().replace(context_parallelism=ranks, seq_len=8 * ranks, seed=seed) for ranks in range(1, num_devices + 1)
    )


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four TPU devices, as far as the parent process knows."""
    monkeypatch.setattr(devices, "num_tpu_devices", lambda: 4)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, Any]]:
    """What would run, with the place of this host."""
    seen: list[tuple[Plan, Any]] = []

    def keep(plan: Plan, progress: Any, state: Run) -> Run:
        seen.append((plan, None))
        return state

    def keep_hosts(plan: Plan, num_hosts: int, progress: Any, state: Run, place: Place | None) -> Run:
        seen.append((plan, place))
        return state

    monkeypatch.setattr(cli, "run", keep)
    monkeypatch.setattr(cli, "case_list", _list)
    monkeypatch.setattr(cli, "run_plan_on_hosts", keep_hosts)
    return seen


def test_the_devices_are_those_that_jax_counts_in_a_process_of_its_own(four: None) -> None:
    assert parse_devices("tpu") == Devices("tpu", 4), "all of them"
    assert parse_devices("tpu:32") == Devices("tpu", 32), "of a slice: nobody is asked"
    assert tpus.count_told("a line of libtpu's\ndevices: 8\n", "") == 8, "whatever else is printed"


def test_a_machine_without_one_is_refused_in_one_line_with_jaxs_reason() -> None:
    with pytest.raises(ValueError, match="mesh tpu: this machine has no TPU: RuntimeError: Unable to ini") as refused:
        tpus.count_told("", _NO_TPU)
    assert str(refused.value).endswith("No jellyfish device found."), "without JAX's advice on how not to see it"
    with pytest.raises(ValueError, match="gave no reason"):
        tpus.count_told("devices: 0", "")


def test_here_the_command_cannot_start() -> None:
    command = [sys.executable, "-m", "conformance.cli", "run", "conformance.targets.bundled:halo", "--mesh", "tpu"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 2, "cannot start"
    assert told.stdout == "", "nothing ran"
    assert told.stderr.startswith("halocheck: --mesh tpu: this machine has no TPU: "), told.stderr
    assert told.stderr.count("\n") == 1, "one line"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mesh tpu a:b c:d", "--mesh tpu takes one TARGET a run"),
        ("--mesh tpu:8 a:b", "--mesh tpu:8 is for --host, on a slice"),
        ("--mesh tpu a:b --hosts 2", "--hosts 2 with --mesh tpu takes --host"),
        ("--mesh tpu a:b --hosts 2 --host 0", "--host takes --mesh tpu:N"),
        ("--mesh tpu:8 a:b --hosts 2 --host 2", "--host must be from 0 to 1 with --hosts 2, got 2"),
        ("--mesh tpu:8 a:b --hosts 2 --host 1", "--coordinator must be ADDRESS:PORT of host 0, got None"),
        ("--mesh tpu:8 a:b --hosts 2 --host 1 --coordinator h:1", "--exchange must name a folder that every host sees"),
        ("--mesh gpu:8 a:b", "--mesh must be tpu, or cpu:N with N from 1 to 64, got 'gpu:8'"),
    ],
)
def test_what_would_not_run_on_tpus_is_refused(
    words: str, message: str, four: None, plans: list[tuple[Plan, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *words.split()]) == 2, "cannot start"
    assert message in capsys.readouterr().err, "the rule and the value"
    assert plans == [], "nothing ran"


def test_a_run_takes_the_list_of_cases_that_fit_the_machine(four: None, plans: list[tuple[Plan, Any]]) -> None:
    cli.main(["run", "a:b", "--mesh", "tpu"])
    ((plan, _),) = plans
    assert plan.devices == Devices("tpu", 4), "compiled for them"
    assert plan.cases == _list("quick", 0, None, 4), "of which none needs more than four"


def test_races_is_not_asked_there_unless_by_name(four: None, plans: list[tuple[Plan, Any]]) -> None:
    """It needs simulated devices: asked and declined, no run of a target whose kernels copy would ever conform."""
    cli.main(["run", "a:b", "--mesh", "tpu"])
    cli.main(["run", "a:b", "--mesh", "tpu", "--checks", "output,races"])
    (by_default, _), (by_name, _) = plans
    assert set(CHECKS) - set(by_default.check_names) == {"races"}, "all others are"
    assert by_name.check_names == ("contract", "output", "races"), "what is asked for is not left out without a word"


def test_nightly_runs_production_layers_shard_by_shard(four: None, plans: list[tuple[Plan, Any]]) -> None:
    cli.main(["run", "a:b", "--mesh", "tpu", "--profile", "nightly", "--seed", "3"])
    ((plan, _),) = plans
    assert plan.num_hosts == 1, "one process, which judges its own shards"
    assert set(plan.cases) == {case for case in production_cases(4, 3) if case.problem.num_devices == 4}, "what fits"
    assert min(case.problem.seq_len for case in plan.cases) == 128 * 1024, "tokens"
    assert plan.database is None, "hypothesis draws small cases: not here"


def test_one_command_a_host_is_one_run_of_a_slice(plans: list[tuple[Plan, Any]], tmp_path: Any) -> None:
    words = f"--mesh tpu:16 --profile nightly --hosts 4 --host 2 --coordinator h0:8476 --exchange {tmp_path}"
    cli.main(["run", "a:b", *words.split()])
    ((plan, place),) = plans
    assert (plan.num_hosts, place) == (4, Place(2, "h0:8476", tmp_path)), "this one's place"
    assert {case.problem.num_devices for case in plan.cases} == {16}, "every host holds some of each case"


@pytest.mark.parametrize("num_devices", [1, 4, 8, 16])
def test_every_production_case_folds_the_machines_devices_into_its_mesh(num_devices: int) -> None:
    fakes = [_Device(number) for number in range(num_devices)]
    seen = set()
    for case in production_cases(num_devices):
        if case.problem.num_devices == num_devices:
            mesh = mesh_of(case.problem, fakes)
            assert len({device.id for device in mesh.devices.flat}) == num_devices, "each device once"
            seen.add(tuple(mesh.shape[axis] for axis in ("data", "context", "tensor")))
    assert seen == set(foldings(num_devices)), "every data x context x tensor mesh of them"


def test_a_worker_on_tpus_has_the_callers_flags_alone() -> None:
    base = {"XLA_FLAGS": "--xla_dump_to=/somewhere", "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": "--own"}
    environment = worker_environment(Devices("tpu", 4), False, base)
    assert environment["JAX_PLATFORMS"] == "tpu,cpu", "the TPU is the default"
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/somewhere", "ours are about simulated devices"
    assert environment["LIBTPU_INIT_ARGS"] == "--own", "compiled as its user compiles"


@pytest.mark.parametrize(
    ("platform", "dtype", "matmul_precision", "passes"),
    [
        ("tpu", "float32", "default", 1),
        ("tpu", "float32", "highest", 6),
        ("cpu", "float32", "default", 6),
        ("tpu", "bfloat16", "default", 6),
    ],
)
def test_float32_is_allowed_one_bfloat16_pass_where_a_tpu_takes_one(
    platform: str, dtype: str, matmul_precision: str, passes: int
) -> None:
    target = TargetDescription("m:t", "t", platform=platform)
    assert precision_of(target, dtype, matmul_precision) == Precision(dtype, matmul_passes=passes), "the default"


def test_float64_is_declined_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.__new__(Session)
    session._devices, session.description = Devices("tpu", 4), TargetDescription("m:t", "t", exact=True)
    reason = session._refused(parse_case("v=1 dtype=float64"))
    assert reason == "float64 is asked on simulated devices: a TPU's matrix units do not compute in it"
    assert session._refused(Case()) is None, "anything else is run"


def test_the_hosts_processes_are_given_the_slices_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(spec: str, cases: Any, of_host: Devices, hosts: int, progress: Any, place: Place | None) -> Any:
        asked.append((of_host, hosts))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_on_hosts", run)
    launch.run_plan_on_hosts(Plan(("a:b",), (), (), Devices("tpu", 16), ("contract",)), 4, lambda line: None)
    assert asked == [(Devices("tpu", 4), 4)], "four a host"
