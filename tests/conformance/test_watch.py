"""What a process may use before it is ended, at its borders."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import psutil
import pytest

from conformance import watch
from conformance.watch import EXHAUSTS_MEMORY, HANGS, PRINTS_WITHOUT_END, Usage, Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at every look."""
    ticks = itertools.count()
    monkeypatch.setattr(watch.time, "monotonic", lambda: float(next(ticks)))


def _watch_from(before: Usage) -> Watch:
    """A watch whose first look has seen this."""
    watched = Watch()
    assert watched.lost(lambda: before) is None, "there is nothing yet to hold it to"
    return watched


def test_a_message_that_is_followed_by_another_one_soon_costs_no_look() -> None:
    def look() -> Usage:
        raise AssertionError("a look costs milliseconds")

    assert Watch().lost(look) is None, "it has just begun"


def test_one_that_uses_cpu_is_no_hang_however_long_it_takes(clock: None) -> None:
    watched, seconds = _watch_from(Usage(0.0)), itertools.count(1)
    assert all(watched.lost(lambda: Usage(0.5 * next(seconds))) is None for _ in range(100)), "half a core"


def test_one_that_uses_none_hangs_after_its_time_and_not_before(clock: None) -> None:
    watched = _watch_from(Usage(0.0))
    answers = [watched.lost(lambda: Usage(0.1)) for _ in range(int(watch.IDLE_SECONDS) + 1)]
    assert answers == [None] * int(watch.IDLE_SECONDS) + [HANGS[0]], "at the end of the time"


def test_a_host_that_waits_for_its_tpus_is_no_hang_for_as_long_as_they_may_take(clock: None) -> None:
    """They compute while it uses none: a correct layer of a million tokens must not be ended like a deadlock."""
    watched = Watch(platform="tpu")
    answers = [watched.lost(lambda: Usage(0.0)) for _ in range(int(watch.TPU_IDLE_SECONDS) + 2)]
    assert answers == [None] * int(watch.TPU_IDLE_SECONDS + 1) + [HANGS[0]], "but not for ever"


def test_one_that_waits_for_a_core_on_a_full_machine_is_no_hang_until_it_has_had_none_for_long(clock: None) -> None:
    watched, seconds = _watch_from(Usage(0.0)), itertools.count(1)
    answers = [watched.lost(lambda: Usage(0.1, queued_seconds=0.5 * next(seconds))) for _ in range(620)]
    assert answers[:600] == [None] * 600, "others have the cores"
    assert HANGS[0] in answers[600:], "but not for ever"


def test_threads_that_wake_for_a_moment_now_and_then_make_no_progress(clock: None) -> None:
    watched, seconds = _watch_from(Usage(0.0, queued_seconds=7.0)), itertools.count(1)
    queued = [7.0 + 0.1 * next(seconds) for _ in range(int(watch.IDLE_SECONDS) + 1)]
    answers = [watched.lost(lambda so_far=so_far: Usage(0.1, queued_seconds=so_far)) for so_far in queued]
    assert answers == [None] * int(watch.IDLE_SECONDS) + [HANGS[0]], "a tenth of a second in each is no waiting"


def test_more_cpu_than_any_case_takes_is_too_much(clock: None) -> None:
    watched = _watch_from(Usage(10.0))
    assert watched.lost(lambda: Usage(10.0 + watch.BUSY_CPU_SECONDS)) is None, "since its last message"
    assert watched.lost(lambda: Usage(10.1 + watch.BUSY_CPU_SECONDS)) == HANGS[1]


def test_memory_and_printing_have_limits(clock: None) -> None:
    watched, limit = _watch_from(Usage(0.0)), watch.memory_limit()
    assert watched.lost(lambda: Usage(1.0, limit, watch.PRINTED_BYTES)) is None, "at both of them"
    assert watched.lost(lambda: Usage(2.0, limit + 1)) == EXHAUSTS_MEMORY
    assert watched.lost(lambda: Usage(3.0, 0, watch.PRINTED_BYTES + 1)) == PRINTS_WITHOUT_END


def test_the_memory_limit_is_half_of_the_machines_or_of_its_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "_GROUP_LIMITS", (str(tmp_path / "none"), str(tmp_path / "max")))
    (tmp_path / "max").write_text("max\n")
    assert watch.memory_limit() == psutil.virtual_memory().total // 2, "no group has a limit"
    (tmp_path / "max").write_text("1000\n")
    assert watch.memory_limit() == 500, "a container's own"


def test_usage_is_of_this_process_and_nothing_of_one_that_is_gone() -> None:
    here = watch.usage_of(os.getpid())
    assert here.cpu_seconds > 0, "it has run"
    assert here.resident_bytes > 1 << 20, "and holds something"
    assert watch.usage_of(2**22 + 1) == Usage(0.0, 0), "no such process"


def test_waiting_for_a_core_is_counted_thread_by_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for thread, counts in (("7", "5 2000000000 1\n"), ("8", "9 500000000 4\n"), ("9", "")):
        (tmp_path / "task" / thread).mkdir(parents=True)
        (tmp_path / "task" / thread / "schedstat").write_text(counts)
    monkeypatch.setattr(watch, "Path", lambda path: tmp_path / "task" if path == "/proc/7/task" else Path(path))
    assert sum(watch._queued_seconds(7)) == 2.5, (
        "seconds in the queue, not on a core; a thread that has gone counts not"
    )
