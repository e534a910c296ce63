"""Which devices a run uses (`--mesh cpu:16`, `tpu`), and the environment of a worker for them before it imports JAX.

May touch: environment variables of the worker to be; tpus.py, which counts in a process of its own. Never imports JAX.
Tests: tests/conformance/test_devices.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from conformance.tpus import PLATFORM, num_tpu_devices

MAX_SIMULATED_DEVICES = 64
# XLA aborts the whole process when a collective waits this long, a slow but correct rank included. Whether a
# program hangs is judged by the parent, from the CPU time that the worker uses.
_XLA_COLLECTIVE_TIMEOUT_SECONDS = 3600


@dataclass(frozen=True)
class Devices:
    """`platform` is "cpu" (simulated devices) or "tpu" (all that the machine has), `count` how many there are."""

    platform: str
    count: int


DEFAULT_DEVICES = Devices("cpu", 16)


def parse_devices(text: str) -> Devices:
    """The devices of a `--mesh` option: `cpu:N`, `tpu`, or `tpu:N` of a slice over several hosts, taken at its word.

    Raises:
        ValueError: another platform, a count that is no integer from 1 to 64, or a machine without a TPU.
    """
    if text == PLATFORM:
        return Devices(PLATFORM, num_tpu_devices())
    platform, _, count = text.partition(":")
    if platform == PLATFORM and count.isdigit() and int(count) > 0:
        return Devices(PLATFORM, int(count))
    if platform != "cpu" or not count.isdigit() or not 1 <= int(count) <= MAX_SIMULATED_DEVICES:
        raise ValueError(f"mesh must be tpu, or cpu:N with N from 1 to {MAX_SIMULATED_DEVICES}, got {text!r}")
    return Devices(platform, int(count))


def worker_environment(devices: Devices, enable_x64: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a worker process: the caller's, with JAX pinned to the devices.

    XLA_FLAGS of the caller are kept; of two equal flags the last wins. JAX_NUM_CPU_DEVICES would beat the flag. Kernels
    for a TPU are compiled as its user would: none of our flags, which are about simulated devices.
    """
    if devices.platform == PLATFORM:
        return {**base, "JAX_PLATFORMS": f"{PLATFORM},cpu", "JAX_ENABLE_X64": "false"}
    flags = (
        f"--xla_force_host_platform_device_count={devices.count}",
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={_XLA_COLLECTIVE_TIMEOUT_SECONDS}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={_XLA_COLLECTIVE_TIMEOUT_SECONDS}",
        f"--xla_cpu_collective_timeout_seconds={_XLA_COLLECTIVE_TIMEOUT_SECONDS}",
    )
    return {
        **{name: value for name, value in base.items() if name != "JAX_NUM_CPU_DEVICES"},
        "JAX_PLATFORMS": devices.platform,
        "JAX_ENABLE_X64": "true" if enable_x64 else "false",
        "XLA_FLAGS": " ".join((*_cheap_compilation(version("jaxlib")), base.get("XLA_FLAGS", ""), *flags)),
        # Nobody reads the programs of a worker: the frames behind each operation are a twentieth of a case's time.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "TF_CPP_MIN_LOG_LEVEL": base.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _cheap_compilation(jaxlib_version: str) -> tuple[str, ...]:
    """A case is compiled once and run twice: XLA's and LLVM's optimisations cost three times what they save.

    Every core has a target of its own: cutting one program into parts for more threads only costs CPU time.
    An unknown flag aborts the process, and jaxlib 0.12 no longer has the third one.
    """
    flags = ("--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1")
    if tuple(map(int, jaxlib_version.split(".")[:2])) < (0, 11):
        flags += ("--xla_cpu_use_fusion_emitters=false",)
    return flags
