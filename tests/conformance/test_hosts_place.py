"""One command a host: each starts its own process, and all of them tell the same."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conformance.case_text import parse_case
from conformance.devices import Devices
from conformance.hosts.launch import HostsRun, run_on_hosts
from conformance.hosts.place import Place, parse_place
from conformance.process import WorkerLost
from conformance.session import CONFORMS, FINDING

_CASE = parse_case("v=1 seq_len=32 num_query_heads=2 sliding_window_size=9 context_parallelism=4 seed=1")


def _run_on_two(spec: str, exchange: Path) -> list[HostsRun]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{one.getsockname()[1]}"

    def command(number: int) -> HostsRun:
        place = Place(number, coordinator, exchange)
        return run_on_hosts(spec, (_CASE,), Devices("cpu", 2), 2, lambda line: None, place)

    with ThreadPoolExecutor(2) as both:
        return list(both.map(command, (0, 1)))


def test_each_host_has_its_own_command_and_every_command_tells_the_whole(tmp_path: Path) -> None:
    exchange = tmp_path / "run"
    for done in _run_on_two("conformance.targets.bundled:halo", exchange):
        (result,) = done.results
        assert result.status == CONFORMS, result.findings
        assert 0 < result.shares["gradients", "dkey"] < 1, "a real comparison"
        assert len(done.peak_bytes) == 2, "of both"
    with pytest.raises(ValueError, match=r"exchange must be a folder of this run alone: .* holds another's results"):
        Place(1, "h:1", exchange).prepare()


def test_a_host_that_is_lost_ends_the_commands_of_both(adapter: Callable[[str], str], tmp_path: Path) -> None:
    for done in _run_on_two(adapter("hosts:aborts_on_the_second"), tmp_path):
        (result,) = done.results
        assert result.status == FINDING, "neither waits for ever"
        assert result.findings[0].tensor == "call", "the loss"
    assert (tmp_path / "1.lost.json").exists() or (tmp_path / "0.lost.json").exists(), "told to the other"


def test_how_a_process_was_lost_is_told_to_the_others_as_it_was(tmp_path: Path) -> None:
    lost = WorkerLost("killed by SIGABRT", "running a case", "its last words")
    here, there = Place(1, "h:1", tmp_path), Place(0, "h:1", tmp_path)
    assert there.lost_at(1) is None, "nothing yet"
    here.tell_lost(lost)
    assert there.lost_at(1) == lost, "word for word"


def test_each_target_of_a_run_has_a_port_and_a_folder_of_its_own(tmp_path: Path) -> None:
    place = parse_place(3, 4, "host-0:8476", tmp_path)
    assert place.of_target(1) == Place(3, "host-0:8477", tmp_path / "1"), "the second"
