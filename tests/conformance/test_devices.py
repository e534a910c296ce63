"""The devices that `--mesh` names, and the environment that gives them to a worker whatever the caller has set."""

from __future__ import annotations

import pytest

from conformance import devices
from conformance.devices import Devices, parse_devices, worker_environment


@pytest.mark.parametrize(("text", "count"), [("cpu:1", 1), ("cpu:16", 16), ("cpu:64", 64)])
def test_a_mesh_of_simulated_devices_is_read(text: str, count: int) -> None:
    assert parse_devices(text) == Devices("cpu", count), text


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu:", "cpu:0", "cpu:65", "cpu:-1", "cpu:1.5", "cpu:8:8", "tpu:", "tpu:0", "gpu:8"]
)
def test_any_other_mesh_is_refused_with_the_rule_and_the_value(text: str) -> None:
    with pytest.raises(ValueError, match="mesh must be tpu, or cpu:N with N from 1 to 64, got") as refused:
        parse_devices(text)
    assert repr(text) in str(refused.value), "the message names the value"


def _flags(environment: dict[str, str]) -> list[str]:
    return environment["XLA_FLAGS"].split()


def test_the_callers_flags_stay_and_ours_come_after_them() -> None:
    # Of two equal flags XLA takes the last.
    base = {"XLA_FLAGS": "--xla_dump_to=/somewhere --xla_force_host_platform_device_count=3"}
    flags = _flags(worker_environment(Devices("cpu", 8), False, base))
    assert "--xla_dump_to=/somewhere" in flags, "a flag of the caller's"
    counts = [flag for flag in flags if flag.startswith("--xla_force_host_platform_device_count=")]
    assert counts[-1].endswith("=8"), "the last count is ours"


def test_nothing_of_the_callers_moves_the_worker_to_other_devices() -> None:
    base = {"JAX_PLATFORMS": "tpu", "JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_X64": "true", "HOME": "/home/user"}
    environment = worker_environment(Devices("cpu", 8), False, base)
    assert environment["JAX_PLATFORMS"] == "cpu", "the platform is that of the mesh"
    assert "JAX_NUM_CPU_DEVICES" not in environment, "it would beat the number of devices asked for"
    assert environment["JAX_ENABLE_X64"] == "false", "float64 has a process of its own"
    assert environment["HOME"] == "/home/user", "everything else is the caller's"


def test_float64_is_enabled_where_it_is_asked_for() -> None:
    assert worker_environment(Devices("cpu", 8), True, {})["JAX_ENABLE_X64"] == "true", "the exact tier's process"


def test_xla_does_not_end_a_worker_before_the_parent_can_judge_it() -> None:
    # XLA's defaults are 20, 40 and 30 s; a slow rank on a busy machine waits longer than that.
    for flag in _flags(worker_environment(Devices("cpu", 8), False, {})):
        name, _, value = flag.partition("=")
        if "collective" in name:
            assert int(value) >= 3600, name


@pytest.mark.parametrize(("jaxlib", "expected"), [("0.10.2", True), ("0.11.0", False), ("0.12.1", False)])
def test_a_flag_that_a_later_jaxlib_dropped_is_not_passed_to_it(
    monkeypatch: pytest.MonkeyPatch, jaxlib: str, expected: bool
) -> None:
    # XLA aborts the whole process at an unknown flag.
    monkeypatch.setattr(devices, "version", lambda distribution: jaxlib)
    flags = _flags(worker_environment(Devices("cpu", 8), False, {}))
    assert ("--xla_cpu_use_fusion_emitters=false" in flags) is expected, jaxlib
