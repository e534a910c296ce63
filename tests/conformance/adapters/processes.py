"""Targets that do something to their process while they are traced. What they return otherwise is the query."""

from __future__ import annotations

import functools
import os
import signal
import stat
import subprocess
import sys
import time
from typing import Any


def answers(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Does nothing but return."""
    return query


def prints(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Prints to both streams, as text and to the descriptors."""
    print("a line of the target's", flush=True)
    print("another one", file=sys.stderr, flush=True)
    os.write(1, b"\x00\xffraw\n")
    return query


def aborts(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Takes the process along, as a failed CHECK in native code does."""
    print("CHECK failed: the target's last words", flush=True)
    os.abort()


def exits(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Ends the process in an orderly way."""
    sys.exit(7)


def sleeps(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Waits for something that will not come."""
    time.sleep(3600)
    return query


def spins(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Computes without end."""
    while True:
        pass


def naps(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Takes its time, twice."""
    time.sleep(1.5)
    return query


@functools.cache
def _compute_in_a_process(seconds: int) -> None:
    program = f"while __import__('time').process_time() < {seconds}: pass"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)


def waits_for_child(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Uses no CPU itself while a process that it started computes."""
    _compute_in_a_process(3)
    return query


def leaves_child(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Starts a process that would outlive it, and says which."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "__import__('time').sleep(3600)"])
    print(f"child {child.pid}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def writes_to_channel(query: Any, key: Any, value: Any, **context: Any) -> Any:
    """Writes to every socket it finds: a descriptor that is not its own."""
    for descriptor in range(64):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            continue
        if is_socket:
            os.write(descriptor, b"a line for somebody else's log\n" * 10)
    time.sleep(3600)
    return query
