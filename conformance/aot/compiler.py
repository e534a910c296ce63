"""A process that compiles cases for an absent TPU: started, watched (watch.py), its answers as they come.

May touch: a process, temporary files; never JAX, libtpu. Tests: tests/conformance/test_aot_compiler.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from conformance.aot.bundles import dump_arguments
from conformance.aot.topologies import generation_of
from conformance.case_text import format_case
from conformance.problem import Case
from conformance.process import WorkerLost
from conformance.watch import Watch, how_it_ended, usage_of

Message = Mapping[str, Any]
PROGRAM = (sys.executable, "-P", "-m", "conformance.aot.program")
# Of one layer. It compiles in some seconds; a program without a kernel, of a hundred thousand rows, takes minutes.
_BUSY_CPU_SECONDS = 3600.0
_POLL_SECONDS = 0.2
_TAIL_CHARACTERS = 3000


def answers(spec: str, topology: str, cases: Sequence[Case], *, schedules: bool) -> Generator[Message | WorkerLost]:
    """What the process tells (aot/program.py): of the target, then of each case; WorkerLost once it tells no more.

    The process is ended with the iterator.
    """
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "log", "w+", encoding="utf-8") as log:
        results, dump = Path(directory) / "results.jsonl", Path(directory) / "schedules"
        dump.mkdir()
        results.touch()
        job = {
            "target": spec,
            "topology": topology,
            "cases": [format_case(case) for case in cases],
            "results": str(results),
            "schedules": str(dump) if schedules else "",
        }
        environment = compiler_environment(topology)
        if schedules:  # of two equal flags the last wins
            own = environment.get("LIBTPU_INIT_ARGS", "")
            environment["LIBTPU_INIT_ARGS"] = f"{own} {dump_arguments(dump)}".strip()
        # libtpu writes pages to both streams: they go to a file, of which the end is shown if the process fails.
        process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's; and the whole group can be ended
            text=True,
        )
        try:
            assert process.stdin is not None, "a pipe was asked for"
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # one that is gone shows below
                pipe.write(json.dumps(job))
            yield from _told(process, results, log, 1 + len(cases))
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compiler_environment(topology: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which libtpu compiles without looking for a TPU, several processes at once if need be."""
    return {
        **base,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": generation_of(topology).accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": base.get("TPU_LOG_DIR", "disabled"),
        "TF_CPP_MIN_LOG_LEVEL": base.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }


def _told(
    process: subprocess.Popen[str], results: Path, log: TextIO, num_messages: int
) -> Generator[Message | WorkerLost]:
    """So many messages, or fewer and how the process was lost."""
    watch, told, begun = Watch(_BUSY_CPU_SECONDS), 0, ""
    with open(results, encoding="utf-8") as lines:
        while True:
            status = process.poll()  # before the file is read: what was written before the end is told
            *whole, begun = (begun + lines.read()).split("\n")
            for line in whole:
                told, watch = told + 1, Watch(_BUSY_CPU_SECONDS)
                yield json.loads(line)
            if told == num_messages:
                return
            how = how_it_ended(status) if status is not None else watch.lost(lambda: _usage(process.pid, log))
            if how:
                yield WorkerLost(how, "compiling", _tail(log))
                return
            time.sleep(_POLL_SECONDS)


def _usage(pid: int, log: TextIO) -> Any:
    return dataclasses.replace(usage_of(pid), printed_bytes=os.fstat(log.fileno()).st_size)


def _tail(log: TextIO) -> str:
    log.seek(0)
    return log.read()[-_TAIL_CHARACTERS:].strip()
