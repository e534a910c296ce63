"""The process that imports JAX and the target: `python -m conformance.worker DESCRIPTOR` answers requests on a socket.

It judges nothing. Its standard output and error belong to the target and go to a file of the parent's.
May touch: JAX, the target, the socket it was given. Tests: tests/conformance/test_process.py.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from conformance.channel import Channel, ChannelClosed
from conformance.target import Target, TargetError

# Compiled programs are kept by JAX for ever; a case is never run twice in a row, so they are let go now and then.
_CASES_BETWEEN_CLEARING = 25
_ALLOCATIONS_BETWEEN_COLLECTIONS = 200_000


def main() -> None:
    """Serves requests until the parent closes the channel."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        _serve(channel)
    except ChannelClosed:
        return


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot end a worker whose target hangs, nor what that has started."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)  # the parent has made it a group of its own


def _serve(channel: Channel) -> None:
    from conformance.case_text import parse_case
    from conformance.execution import execute  # imports JAX: only here, once the environment is known to be ours
    from conformance.global_state import changes, global_state

    # Tracing allocates much and frees little: looking for cycles at Python's pace is a tenth of a case's time.
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS_BETWEEN_COLLECTIONS, 20, 100)
    target: Target | None = None
    served = 0
    while True:
        request, _ = channel.receive()
        if request["do"] == "load":
            target, answer = _load(request["target"])
            channel.send(answer)
            continue
        assert target is not None, "a case was sent before a target was loaded"
        try:
            case, checks = parse_case(request["case"]), request["checks"]
            before = global_state()
            message, arrays = execute(target, case, lambda phase: channel.send({"phase": phase}), checks)
            if changed := changes(before, global_state()):
                message = {**message, "changed": changed}
        except ChannelClosed:
            raise
        except Exception:  # noqa: BLE001  # execute answers for whatever the target raises: this is a fault of ours
            message, arrays = {"harness_failed": traceback.format_exc()}, {}
        channel.send({"result": message}, arrays)
        served += 1
        if served % _CASES_BETWEEN_CLEARING == 0:
            import jax

            jax.clear_caches()


def _load(spec: str) -> tuple[Target | None, dict[str, Any]]:
    import jax

    from conformance.loading import load_and_put_back

    try:
        target = load_and_put_back(spec)  # before JAX looks for devices: those of the machine that was asked for
    except TargetError as error:
        return None, {"load_error": error.report}
    return target, {"description": dataclasses.asdict(target.description), "num_devices": jax.device_count()}


if __name__ == "__main__":
    main()
