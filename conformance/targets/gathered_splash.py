"""A splash attention on gathered keys as a target: what the adapters of JAX's and of tokamax's have in common.

K and V are gathered, and the mask is sharded over the queries, as the authors of both mean it.
May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from conformance.problem import Problem
from conformance.targets.gathered import Kernel, Rows, attention_on_gathered_keys, declined_problem
from conformance.targets.splash_rows import head_major, padded_rows, scaled_query


@dataclass(frozen=True)
class GatheredSplash:
    """A library's `make_splash_mha`: `kernel` makes it, with its mask, and says where each part of the mask lies.

    `segment_ids` is the library's own tuple of ids. Both libraries give a rank's gradients in the dtype of its keys.
    """

    name: str
    kernel: Callable[[Problem, Any], Kernel]
    segment_ids: Callable[..., Any]
    communication: str = "all_gather"
    precision: Mapping[str, bool] = field(default_factory=lambda: {"prescaled_query": True, "rounded_partials": True})

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline."""
        return declined_problem(problem)

    def attention(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem, mesh: Any, **context: Any
    ) -> jax.Array:
        """out, by the target contract."""

        def attend(rows: Rows, kernel: Any) -> jax.Array:
            ids = self.segment_ids(q=padded_rows(rows.query_ids, axis=1), kv=padded_rows(rows.key_ids, axis=1))
            arrays = (scaled_query(head_major(rows.query), problem), head_major(rows.key), head_major(rows.value))
            out = jax.vmap(lambda *row: kernel(*row, sinks=rows.sinks))(*arrays, ids)
            return jnp.swapaxes(out, 1, 2)[:, : rows.query.shape[1]]

        return attention_on_gathered_keys(
            query,
            key,
            value,
            problem=problem,
            mesh=mesh,
            attend=attend,
            kernel=self.kernel(problem, mesh),
            **context,
        )
