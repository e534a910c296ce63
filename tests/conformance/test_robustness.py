"""A target that spoils its process: a finding with its case, and the next case is judged as if nothing had been.

Real workers, on one device. Hangs and deadlocks are in test_process.py and test_main_job.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest

from conformance import watch
from conformance.case_text import format_case, parse_case
from conformance.devices import Devices
from conformance.session import CONFORMS, FINDING, CaseResult, Session

Spec = Callable[[str], str]

_PLAIN = parse_case("v=1 seq_len=4 num_query_heads=1 head_dim=2 sliding_window_size=2 context_parallelism=1")
_SPOILED = _PLAIN.replace(attn_logits_soft_cap=5.0)
# Workers inherit it. Their own mark would not do: other tests run at the same time, and have workers too.
_MARK = "TESTED_FOR_WHAT_IT_LEAVES"


def _run(spec: str) -> tuple[CaseResult, CaseResult]:
    """The results of the case where the target spoils its process and of the next."""
    session = Session(spec, Devices("cpu", 1), ("contract", "output", "gradients"))
    try:
        return session.run(_SPOILED), session.run(_PLAIN)
    finally:
        session.close()


def _left(mark: str) -> list[psutil.Process]:
    """What still runs of all that was started with this mark in its environment; killed processes take a moment."""
    marked = [process for process in psutil.process_iter() if _is_marked(process, mark)]
    return [process for process in psutil.wait_procs(marked, timeout=5)[1] if _is_marked(process, mark)]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("segfaults", "killed by SIGSEGV while tracing and compiling"),
        ("prints_megabytes", "prints megabytes"),
        ("enables_x64", "changes jax_enable_x64"),
        ("leaves_a_daemon", "leaves processes running"),
        ("allocates", "exhausts memory while tracing and compiling"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("exits_at_once", "exited with status 9 while tracing and compiling"),
                ("forks_and_exits", "exited with status 9 while tracing and compiling"),
                ("prints_without_end", "prints without end while tracing and compiling"),
                ("never_leaves_x64", "changes jax_enable_x64"),
                ("lowers_precision", "changes jax_default_matmul_precision"),
                ("sets_platforms", "changes jax_platforms"),
                ("sets_xla_flags", "changes XLA_FLAGS"),
                ("leaves_a_process", "leaves processes running"),
            )
        ),
    ],
)
def test_what_spoils_its_process_is_a_finding_with_its_case_and_the_next_case_is_judged_alone(
    adapter: Spec, monkeypatch: pytest.MonkeyPatch, name: str, signature: str
) -> None:
    monkeypatch.setattr(watch, "memory_limit", lambda: 1 << 30)
    mark = f"{name} {os.getpid()}"
    monkeypatch.setenv(_MARK, mark)
    spoiled, plain = _run(adapter(f"spoiling:{name}"))
    of_contract = [found for found in spoiled.findings if found.check == "contract"]
    assert [found.signature for found in of_contract] == [signature], "what it did, and that alone"
    assert of_contract[0].case == format_case(_SPOILED), "where"
    assert spoiled.status == FINDING
    assert (plain.status, plain.findings) == (CONFORMS, ()), "the next case knows nothing of it"
    assert _left(mark) == [], "and no process is left"
