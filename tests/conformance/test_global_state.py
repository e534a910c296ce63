"""What a target changes of JAX's options and environment is told by name, and put back where it can be."""

from __future__ import annotations

import os

import jax
import pytest

from conformance.global_state import changes, global_state, put_back


def test_nothing_changed_is_nothing_told() -> None:
    assert changes(global_state(), global_state()) == [], "reading changes nothing"


def test_options_and_variables_are_told_by_name_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.delenv("JAX_DEBUG_NANS", raising=False)
    before = global_state()
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    os.environ["XLA_FLAGS"] = "--b"
    os.environ["JAX_DEBUG_NANS"] = "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")
    told = changes(before, global_state())
    put_back(before)
    assert told == [
        "JAX_DEBUG_NANS from unset to 1",
        "XLA_FLAGS from --a to --b",
        "jax_default_matmul_precision from None to bfloat16",
    ], "what was, and what it has become"
    assert changes(before, global_state()) == [], "as before"


def test_a_context_that_is_never_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = global_state()
    with jax.enable_x64(True):
        assert changes(before, global_state()) == ["jax_enable_x64 from False to True"], "though it is of this thread"
        put_back(before)
        assert changes(before, global_state()) == ["jax_enable_x64 from False to True"], "and cannot be put back"
