"""What ends a run from outside: SIGINT, SIGTERM and SIGHUP interrupt it, and it still tells what it found.

May touch: signal handlers of the main thread, put back afterwards. Tests: tests/conformance/test_cli.py.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def hearing_signals() -> Iterator[None]:
    """Any of _SIGNALS interrupts the run; what comes after the first cannot keep it from telling what it found.

    A shell starts what runs in the background with SIGINT ignored, and Python leaves it so: a run must hear it. A
    SIGHUP that is ignored (nohup) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in _SIGNALS if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]

    def interrupt(*_: Any) -> None:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
