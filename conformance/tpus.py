"""The TPU devices of this machine, counted without importing JAX here: in a process that ends before a worker starts.

A TPU belongs to one process at a time. May touch: that process. Tests: tests/conformance/test_tpus.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

PLATFORM = "tpu"
_COUNT = "import jax; print('devices:', len(jax.devices('tpu')))"
_MOST_SECONDS = 300
# JAX adds how to hide the error from oneself.
_ADVICE = " (set JAX_PLATFORMS"


def num_tpu_devices() -> int:
    """How many TPU devices JAX finds on this machine.

    Raises:
        ValueError: none, in one line with JAX's own reason.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT],
            env=environment | {"JAX_PLATFORMS": PLATFORM},
            capture_output=True,
            text=True,
            check=False,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"mesh tpu: JAX did not answer in {_MOST_SECONDS} s whether this machine has a TPU") from error
    return count_told(ended.stdout, ended.stderr)


def count_told(stdout: str, stderr: str) -> int:
    """The number of devices out of what that process wrote.

    Raises:
        ValueError: it found none.
    """
    told = [line.split()[1] for line in stdout.splitlines() if line.startswith("devices: ")]
    if told and int(told[-1]) > 0:
        return int(told[-1])
    reason = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "JAX gave no reason")
    raise ValueError(f"mesh tpu: this machine has no TPU: {reason.partition(_ADVICE)[0]}")


def rule_broken(mesh: str, hosts: int, host: int | None) -> str | None:
    """What `--mesh`, `--hosts` and `--host` may not say together about TPUs; None if they may."""
    if mesh == PLATFORM and host is not None:
        return f"--host takes --mesh {PLATFORM}:N with the N devices of the whole slice: one host sees its own alone"
    if mesh.startswith(f"{PLATFORM}:") and host is None:
        return f"--mesh {mesh} is for --host, on a slice; the devices of one machine are --mesh {PLATFORM}"
    if mesh == PLATFORM and hosts > 1:
        return f"--hosts {hosts} with --mesh {PLATFORM} takes --host, on each of them: a TPU belongs to one process"
    return None
