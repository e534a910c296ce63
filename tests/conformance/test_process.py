"""The parent's hold on a worker process: crashes, hangs, noise and interrupts are told for what they are."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from conformance import watch
from conformance.devices import Devices
from conformance.process import Worker, WorkerLost
from conformance.target import TargetError
from conformance.watch import HANGS, Usage

_CASE = "v=1 seq_len=2 num_query_heads=1 head_dim=1 context_parallelism=1"
_ONE = Devices("cpu", 1)

Spec = Callable[[str], str]
Start = Callable[[str], Worker]


@pytest.fixture
def start(adapter: Spec) -> Iterator[Start]:
    """Starts workers on adapters/processes.py, and ends them after the test."""
    workers: list[Worker] = []

    def one(attribute: str) -> Worker:
        workers.append(Worker(adapter(f"processes:{attribute}"), _ONE))
        return workers[-1]

    yield one
    for worker in workers:
        worker.close()


def _pid(worker: Worker) -> int:
    return worker._process.pid


def _lost(worker: Worker) -> WorkerLost:
    reply = worker.run(_CASE)
    assert isinstance(reply, WorkerLost), f"the worker answered: {reply}"
    return reply


def test_a_worker_answers_one_case_after_another_whatever_its_target_prints(start: Start) -> None:
    worker = start("prints")
    for _ in range(2):
        reply = worker.run(_CASE)
        assert not isinstance(reply, WorkerLost), "printing is no message"
        message, arrays = reply
        assert message == {"misplaced": {}, "diverged": {}}, "the execution's own message"
        assert arrays["0/attention/out"].shape == (1, 2, 1, 1), "and its arrays"


def test_another_target_goes_on_in_the_same_process(start: Start, adapter: Spec) -> None:
    worker = start("answers")
    process_id = _pid(worker)
    assert worker.load(adapter("processes:exits")) == worker.description, "the description is the new target's"
    assert worker.description.spec.endswith("processes.py:exits")
    assert _pid(worker) == process_id, "no process was started"
    assert "exited with status 7" in _lost(worker).how, "the new target is the one that is called"


def test_a_target_that_does_not_load_leaves_a_worker_that_takes_another(start: Start, adapter: Spec) -> None:
    worker = start("answers")
    with pytest.raises(TargetError, match="no attribute 'answer'; did you mean 'answers'"):
        worker.load(adapter("processes:answer"))
    worker.load(adapter("processes:prints"))
    assert not isinstance(worker.run(_CASE), WorkerLost), "it answers again"


def test_an_abort_is_told_by_signal_and_phase_with_the_last_words(start: Start) -> None:
    lost = _lost(start("aborts"))
    assert (lost.how, lost.phase) == ("killed by SIGABRT", "tracing and compiling"), "how, and during what"
    assert "CHECK failed: the target's last words" in lost.log, "the end of what it printed"


def test_an_orderly_exit_is_told_by_its_status(start: Start) -> None:
    assert _lost(start("exits")).how == "exited with status 7", "sys.exit in a target is no decline"


def test_a_target_that_waits_for_nothing_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start("sleeps")
    monkeypatch.setattr(watch, "IDLE_SECONDS", 3.0)
    monkeypatch.setattr(watch, "IDLE_CPU_SECONDS", 0.05)  # a busy machine leaves a worker that works more than that
    lost = _lost(worker)
    assert (lost.how, lost.phase) == (HANGS[0], "tracing and compiling"), "no CPU is used"
    assert not psutil.pid_exists(_pid(worker)), "the process has been ended"


def test_a_target_that_computes_without_end_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start("spins")
    monkeypatch.setattr(watch, "BUSY_CPU_SECONDS", 1.0)
    assert _lost(worker).how == HANGS[1], "more CPU than any case takes"


def test_a_target_that_waits_for_a_process_of_its_own_does_not_hang(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start("waits_for_child")
    monkeypatch.setattr(watch, "IDLE_CPU_SECONDS", 0.02)
    monkeypatch.setattr(watch, "IDLE_SECONDS", 2.0)
    assert not isinstance(worker.run(_CASE), WorkerLost), "3 seconds of CPU of its process count as its own"


def test_cpu_time_that_falls_because_a_process_has_ended_is_not_idleness(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start("naps")
    falling = itertools.count(1000.0, -1.0)
    monkeypatch.setattr(Worker, "_usage", lambda self: Usage(next(falling)))
    monkeypatch.setattr(watch, "IDLE_SECONDS", 1.0)
    assert not isinstance(worker.run(_CASE), WorkerLost), "something has happened all the time"


def test_writing_to_the_harness_channel_loses_the_worker_and_not_the_run(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "IDLE_SECONDS", 5.0)
    assert _lost(start("writes_to_channel")).how == "writes to the channel of the harness", "no message, no belief"


def test_what_a_target_started_ends_with_its_worker(start: Start) -> None:
    lost = _lost(start("leaves_child"))
    child = int(lost.log.split()[-1])
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the whole process group should have been ended")


def test_a_worker_has_the_devices_asked_for_whatever_the_environment_says(
    adapter: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=5")
    worker = Worker(adapter("processes:answers"), Devices("cpu", 3))  # a TargetError if they were not three
    worker.close()


def test_a_target_that_takes_devices_away_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "import jax\njax.config.update('jax_num_cpu_devices', 2)\njax.devices()\n"
        "def attention(query, *_, **__): return query\n"
    )
    told = r"few\.py:attention: importing it changes jax_num_cpu_devices from -1 to 2, which cannot be put back"
    with pytest.raises(TargetError, match=told):
        Worker(f"{tmp_path}/few.py:attention", Devices("cpu", 3))


def test_what_an_import_changes_is_put_back_and_said(tmp_path: Path) -> None:
    (tmp_path / "boilerplate.py").write_text(
        "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\nimport jax\n"
        "jax.config.update('jax_enable_x64', True)\ndef attention(query, *_, **__): return query\n"
    )
    worker = Worker(f"{tmp_path}/boilerplate.py:attention", Devices("cpu", 3))  # three: the flag has had no effect
    worker.close()
    names = [change.partition(" ")[0] for change in worker.description.changed_on_import]
    assert names == ["XLA_FLAGS", "jax_enable_x64"], "for the verdict to say"


def test_a_target_that_does_not_import_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_kernel\n")
    with pytest.raises(TargetError, match="No module named 'no_such_kernel'"):
        Worker(f"{tmp_path}/broken.py:attention", _ONE)


def test_a_target_that_ends_its_process_when_imported_is_told_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nprint('no accelerator', flush=True)\nos._exit(3)\n")
    with pytest.raises(
        TargetError, match=r"exited with status 3 while .*dies.py:attention was imported\nno accelerator"
    ):
        Worker(f"{tmp_path}/dies.py:attention", _ONE)


def test_numerics_that_do_not_exist_do_not_load(tmp_path: Path) -> None:
    (tmp_path / "vague.py").write_text(
        "class target:\n precision = {'rounded': True}\n attention = staticmethod(lambda query, *_, **__: query)\n"
    )
    with pytest.raises(TargetError, match="precision has no field 'rounded'"):
        Worker(f"{tmp_path}/vague.py:target", _ONE)


def test_an_interrupt_while_the_target_is_imported_leaves_no_process(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(3600)\n"
    )

    def interrupt_once_it_sleeps() -> None:
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    heard_before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    try:
        threading.Thread(target=interrupt_once_it_sleeps).start()
        with pytest.raises(KeyboardInterrupt):
            Worker(f"{tmp_path}/slow.py:attention", _ONE)
    finally:
        signal.signal(signal.SIGINT, heard_before)
    assert not psutil.pid_exists(int(marker.read_text())), "the worker has been ended"


def test_a_file_of_the_working_directory_does_not_stand_in_for_one_of_ours(
    adapter: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = adapter("processes:answers")
    for name in ("conformance", "oracle"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    Worker(spec, _ONE).close()
