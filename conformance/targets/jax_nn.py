"""`jax.nn.dot_product_attention` as a target: `conformance.targets.jax_nn:dot_product_attention`.

Under context parallelism K and V are gathered, and the mask is passed as `mask=`.
Nobody here wrote the kernel. Its `local_window_size` knows no offset of the queries, so it cannot be used on gathered
keys. Declines what the function does not have. May touch: JAX. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from conformance.problem import Problem
from conformance.targets.gathered import Rows, attention_on_gathered_keys, declined_problem, in_window


@dataclass(frozen=True)
class _DotProductAttention:
    """`jax.nn.dot_product_attention` on gathered keys. Gradients come in the dtype of key: each rank's are rounded."""

    name: str = "jax.nn"
    communication: str = "all_gather"
    precision: Mapping[str, bool] = field(default_factory=lambda: {"rounded_partials": True})

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline: features that `jax.nn.dot_product_attention` does not have."""
        if problem.sinks:
            return "jax.nn.dot_product_attention has no sinks"
        if problem.attn_logits_soft_cap is not None:
            return "jax.nn.dot_product_attention has no soft cap"
        if problem.value_dim != problem.head_dim:
            return "jax.nn.dot_product_attention has one head_dim"
        return declined_problem(problem)

    def attention(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, problem: Problem, **context: Any
    ) -> jax.Array:
        """out, by the target contract."""

        def attend(rows: Rows, _: None) -> jax.Array:
            mask = in_window(problem, rows.distance) & (rows.query_ids[:, :, None] == rows.key_ids[:, None, :])
            return jax.nn.dot_product_attention(
                rows.query, rows.key, rows.value, mask=mask[:, None], scale=problem.scale
            )

        return attention_on_gathered_keys(query, key, value, problem=problem, attend=attend, **context)


dot_product_attention = _DotProductAttention()
