"""Which host of a slice a command is, where each host's command is started on that host and not by one launcher.

All that they share is a folder, in which each writes what it finds. May touch: that folder.
Tests: tests/conformance/test_hosts_place.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.process import WorkerLost


@dataclass(frozen=True)
class Place:
    """Host `number`; `coordinator` is host 0's address and port, `exchange` a folder that all hosts see."""

    number: int
    coordinator: str
    exchange: Path

    def of_target(self, index: int) -> Place:
        """The same host's place for the run's target `index`: a port and a folder of its own."""
        address, _, port = self.coordinator.rpartition(":")
        return Place(self.number, f"{address}:{int(port) + index}", self.exchange / str(index))

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            ValueError: what this host wrote in another run is in it: the other hosts could take it for news.
        """
        self.exchange.mkdir(parents=True, exist_ok=True)
        if (self.exchange / f"{self.number}.jsonl").exists():
            raise ValueError(f"exchange must be a folder of this run alone: {self.exchange} holds another's results")

    def tell_lost(self, lost: WorkerLost) -> None:
        """Tells the other hosts that this one's process is gone."""
        waiting = self.exchange / f"{self.number}.lost.part"
        waiting.write_text(json.dumps(dataclasses.asdict(lost)), encoding="utf-8")
        waiting.rename(self.exchange / f"{self.number}.lost.json")  # whole or not at all

    def lost_at(self, number: int) -> WorkerLost | None:
        """How another host's process was lost, if it has told so."""
        with contextlib.suppress(FileNotFoundError):
            told: dict[str, Any] = json.loads((self.exchange / f"{number}.lost.json").read_text(encoding="utf-8"))
            return WorkerLost(**told)
        return None


def parse_place(number: int, num_hosts: int, coordinator: str | None, exchange: Path | None) -> Place:
    """The place that the options of a command name.

    Raises:
        ValueError: a number that no host has, a coordinator without a port, or no folder.
    """
    if not 0 <= number < num_hosts:
        raise ValueError(f"host must be from 0 to {num_hosts - 1} with --hosts {num_hosts}, got {number}")
    address, _, port = (coordinator or "").rpartition(":")
    if not address or not port.isdigit():
        raise ValueError(f"coordinator must be ADDRESS:PORT of host 0, got {coordinator!r}")
    if exchange is None:
        raise ValueError("exchange must name a folder that every host sees, got None")
    return Place(number, coordinator or "", exchange)
