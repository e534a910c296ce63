"""Loads a target in the process that is to run it, and puts back what importing it changed there.

Workers, the processes of hosts and compilers do so alike: what is under test is the target, not what its module does to
JAX. May touch: JAX's options and the environment of the process. Tests: tests/conformance/test_global_state.py.
"""

from __future__ import annotations

import dataclasses

import jax

from conformance.global_state import changes, global_state, put_back
from conformance.target import Target, TargetError, load_target


def load_and_put_back(spec: str) -> Target:
    """The target that `spec` names; its description says what importing it changed. JAX must not have devices yet.

    Raises:
        TargetError: it does not load, or what importing it changed cannot be put back.
    """
    before = global_state()
    target = load_target(spec)
    jax.clear_caches()  # what was traced for another target is not this one's
    changed = changes(before, global_state())
    put_back(before)
    if left := changes(before, global_state()):
        raise TargetError(f"{spec}: importing it changes {'; '.join(left)}, which cannot be put back")
    description = dataclasses.replace(target.description, changed_on_import=tuple(changed))
    return dataclasses.replace(target, description=description)
