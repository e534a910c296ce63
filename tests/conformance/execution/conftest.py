"""What the tests of one execution share: targets that are linear in their inputs, so that every value is known.

May touch: JAX and conformance.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from conformance.case_text import parse_case
from conformance.execution import execute
from conformance.target import make_target


@pytest.fixture
def small_case() -> Case:
    """Two ranks, two chunks each, two documents, sinks."""
    return parse_case(
        "v=1 seq_len=8 sliding_window_size=3 num_query_heads=2 num_kv_heads=2 head_dim=4 layout=dual_chunk_swap"
        " sinks=true documents=3@1+5@2 seed=4"
    )


def _linear(query: Any, key: Any, value: Any, *, problem: Any, mesh: Any, segment_ids: Any = None, sinks: Any = None):
    """query + 2 key + 3 value + 4 sinks, and the segment id: every input leaves its mark."""
    out = query + 2 * key + 3 * value
    out = out if sinks is None else out + 4 * sinks[:, None]
    return out if segment_ids is None else out + segment_ids[:, :, None, None].astype(query.dtype)


def _linear_with_lse(query: Any, key: Any, value: Any, **context: Any) -> Any:
    return _linear(query, key, value, **context), 5 * query.sum(axis=-1).astype(jnp.float32)


@pytest.fixture
def linear() -> Callable[..., Any]:
    """The target `_linear`."""
    return _linear


@pytest.fixture
def linear_with_lse() -> Callable[..., Any]:
    """The target `_linear_with_lse`."""
    return _linear_with_lse


@pytest.fixture
def run(small_case: Case) -> Callable[..., tuple[dict, dict, list[str]]]:
    """From an attention (and a case, and further attributes of a target) to message, arrays and phases."""

    def execution(attention: Callable[..., Any], case: Case = small_case, **of: Any) -> tuple[dict, dict, list[str]]:
        phases: list[str] = []
        target = make_target(SimpleNamespace(attention=attention, **of), "m:t")
        message, arrays = execute(target, case, phases.append)
        return message, arrays, phases

    return execution
