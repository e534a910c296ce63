"""What a target can change for whoever comes after it in its process: JAX's options, and the environment it reads.

May touch: jax.config, environment variables; in the worker process only. Tests: tests/conformance/test_global_state.py.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax

# The rest of the environment is nobody's business: libraries keep notes there when they are first used.
_PREFIXES = ("JAX_", "XLA_", "LIBTPU_INIT_ARGS")

State = dict[str, Any]
"""Values by name: options of JAX (`jax_enable_x64`), and environment variables (`XLA_FLAGS`)."""


def global_state() -> State:
    """The state as it is now; an option that a context manager has set counts as what it is set to."""
    options = {name: getattr(jax.config, name, None) for name in jax.config.values}
    return options | {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def changes(before: State, after: State) -> list[str]:
    """What is not as it was, as "jax_enable_x64 from False to True", by name."""
    names = sorted({*before, *after})
    return [
        f"{name} from {before.get(name, 'unset')!s} to {after.get(name, 'unset')!s}"
        for name in names
        if repr(before.get(name)) != repr(after.get(name))
    ]


def put_back(before: State) -> None:
    """Sets what can be set back to what it was; a context that was entered and never left cannot be."""
    after = global_state()
    for name in {*before, *after}:
        if repr(before.get(name)) == repr(after.get(name)):
            continue
        if name.startswith(_PREFIXES):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        else:
            with contextlib.suppress(
                Exception
            ):  # some options cannot be set once devices exist; the caller looks again
                jax.config.update(name, before[name])
