"""The process that compiles for an absent TPU: what it tells is heard at once, and its loss costs one case alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import psutil
import pytest

from conformance import watch
from conformance.aot import compiler
from conformance.aot.compiler import answers, compiler_environment
from conformance.aot.job import compile_target
from conformance.case_text import parse_case
from conformance.process import WorkerLost
from conformance.session import MAX_WORKERS_LOST
from conformance.target import TargetDescription

_TOPOLOGY = "v6e:2x4"
_CASES = tuple(parse_case(f"v=1 seq_len=64 sliding_window_size=9 dtype=bfloat16 seed={seed}") for seed in (1, 3, 5))
# In the place of aot/program.py: it tells of the target, and of each case after it has met it.
_STAND_IN = """
import json, os, sys, time
job = json.load(sys.stdin)
with open(job["results"], "w") as results:
    def tell(message):
        print(json.dumps(message), file=results, flush=True)
    tell({"description": DESCRIPTION})
    for case in job["cases"]:
        MEETS
        tell({"declined": case.split()[-1]})
"""


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a process in the compiler's place that does this when it meets a case."""

    def put(meets: str) -> None:
        described = TargetDescription("m:t", "target")
        fields = {name: getattr(described, name) for name in described.__dataclass_fields__}
        program = _STAND_IN.replace("DESCRIPTION", repr(fields)).replace("MEETS", meets)
        monkeypatch.setattr(compiler, "PROGRAM", (sys.executable, "-c", program))

    return put


def test_what_was_compiled_is_told_while_the_next_case_still_compiles(compiles: Callable[[str], None]) -> None:
    compiles("if 'seed=3' in case: time.sleep(600)")
    with contextlib.closing(answers("m:t", _TOPOLOGY, _CASES, schedules=False)) as told:
        assert "description" in next(told), "the target comes first"
        assert next(told) == {"declined": "seed=1"}, "then the first case, though the second one takes minutes"
        (process,) = (one for one in psutil.Process().children() if "seed=3" in " ".join(one.cmdline()))
    assert not process.is_running(), "who stops listening leaves no process behind"


def test_a_case_that_aborts_the_compiler_is_a_finding_and_those_behind_it_are_compiled(
    compiles: Callable[[str], None],
) -> None:
    compiles("if 'seed=3' in case: print('CHECK failed', flush=True); os.abort()")
    before, lost, behind = compile_target("m:t", _TOPOLOGY, _CASES)
    assert (before.reason, behind.reason) == ("seed=1", "seed=5"), "each answered for itself, by two processes"
    (found,) = lost.findings
    assert found.signature == "takes the compiler's process along", "what the case did"
    assert ("killed by SIGABRT" in found.reading, found.detail) == (True, "CHECK failed"), "how, and its last words"


def test_a_case_on_which_the_compiler_hangs_is_a_finding(
    compiles: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_SECONDS", 1.0)
    compiles("if 'seed=1' in case: time.sleep(600)")
    lost, *others = compile_target("m:t", _TOPOLOGY, _CASES)
    assert [found.signature for found in lost.findings] == ["the compiler hangs without using CPU"]
    assert [one.reason for one in others] == ["seed=3", "seed=5"], "a new process goes on"


def test_a_compiler_that_is_lost_on_every_case_is_given_up_and_what_is_left_is_said_not_to_be_tried(
    compiles: Callable[[str], None],
) -> None:
    compiles("sys.exit(3)")
    done = list(compile_target("m:t", _TOPOLOGY, _CASES * MAX_WORKERS_LOST))
    assert [bool(one.findings) for one in done] == [True] * MAX_WORKERS_LOST + [False] * 2 * MAX_WORKERS_LOST
    assert done[-1].reason == f"not tried: the compiler was lost on {MAX_WORKERS_LOST} cases before it"


def test_a_compiler_that_ends_before_it_has_told_of_the_target_says_how(compiles: Callable[[str], None]) -> None:
    compiles("")
    broken = (*compiler.PROGRAM[:2], "print('no libtpu'); raise SystemExit(7)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "PROGRAM", broken)
        assert list(answers("m:t", _TOPOLOGY, _CASES, schedules=False)) == [
            WorkerLost("exited with status 7", "compiling", "no libtpu")
        ]


def test_libtpu_is_told_which_tpu_to_compile_for_and_to_look_for_none() -> None:
    environment = compiler_environment("v5e:2x4", {"HOME": "/home/user"})
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5litepod-8", "the accelerator of the topology"
    assert (environment["JAX_PLATFORMS"], environment["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1"), "none is looked for"
    assert environment["HOME"] == "/home/user", "everything else is the caller's"
