"""The bundled implementations as targets: `conformance.targets.bundled:halo` and `:all_gather`.

May touch: impl. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

import impl
from conformance.problem import Problem


@dataclass(frozen=True)
class _Bundled:
    """One strategy of `impl.attention` for LOCAL_SLIDING layers, and for GLOBAL ones where it has them."""

    name: str
    empty_rows: str = "zero"
    exact: bool = True

    @property
    def communication(self) -> str:
        """What the strategy claims to send."""
        return self.name

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline, from what DESIGN says of the strategy."""
        if self.name == "halo" and problem.layout == "striped":
            return "halo needs chunks: the striped layout has none"
        if self.name == "halo" and problem.window[0] is None:
            return "halo is for LOCAL_SLIDING layers: this window is unbounded"
        if problem.ulysses_parallelism > 1:
            return f"{self.name} shards the sequence over the context axis alone"
        return None

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, **context: Any) -> jax.Array:
        """out, by the target contract."""
        return self._call(query, key, value, return_lse=False, **context)

    def attention_with_lse(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **context: Any
    ) -> tuple[jax.Array, jax.Array]:
        """(out, lse), by the target contract."""
        return self._call(query, key, value, return_lse=True, **context)

    def _call(self, query: Any, key: Any, value: Any, *, problem: Problem, mesh: Any, **context: Any) -> Any:
        is_global = problem.window == (None, 0)
        config = impl.AttentionConfig(
            local_context_parallel_strategy=self.name,
            context_parallel_load_balance=problem.layout != "contiguous",
            context_parallel_reorder_strategy="striped" if problem.layout == "striped" else "dual_chunk_swap",
            window=None if is_global else problem.window,
            attn_logits_soft_cap=problem.attn_logits_soft_cap,
            scale=problem.scale,
        )
        return impl.attention(
            query,
            key,
            value,
            mesh=mesh,
            config=config,
            attention_type=impl.AttentionType.GLOBAL if is_global else impl.AttentionType.LOCAL_SLIDING,
            padding_segment_id=problem.padding,
            **context,
        )


halo = _Bundled("halo")
all_gather = _Bundled("all_gather")
