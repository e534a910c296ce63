"""Targets that go wrong on one host of several, and are right until then."""

from __future__ import annotations

import os
import time
from typing import Any

import jax

from conformance.targets.bundled import halo


def _on_the_second(goes_wrong: Any) -> Any:
    def attention(*arrays: Any, **context: Any) -> Any:
        if jax.process_index() == 1:
            goes_wrong()
        return halo.attention(*arrays, **context)

    return attention


aborts_on_the_second = _on_the_second(os.abort)
sleeps_on_the_second = _on_the_second(lambda: time.sleep(3600))
prints_on_the_second = _on_the_second(lambda: print("x" * (2 << 20)))
