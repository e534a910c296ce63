"""The bundled implementations as targets: `conformance.targets.bundled:halo`, and all_gather, ring, ulysses, usp.

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
    """One strategy of `impl.attention`, for LOCAL_SLIDING layers and, but for halo, for GLOBAL ones.

    Where the sequence lies on two axes, the model's global strategy is usp, and this one is that of its local layers.
    """

    name: str
    empty_rows: str = "zero"
    exact: bool = True

    @property
    def communication(self) -> str:
        """What the strategy claims to send."""
        return self.name

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline: what the strategy cannot do by its nature."""
        if self.name == "halo" and problem.layout == "striped":
            return "halo needs chunks: the striped layout has none"
        if self.name == "halo" and problem.window[0] is None:
            return "halo is for LOCAL_SLIDING layers: this window is unbounded"
        if self.name == "usp" and problem.ulysses_parallelism == 1:
            return "usp needs the sequence on two axes: this mesh has no ulysses axis"
        if self.name != "usp" and problem.ulysses_parallelism > 1 and _is_global(problem):
            return f"{self.name} shards the sequence of a GLOBAL layer over the context axis alone"
        if problem.num_query_heads % self._head_shards(problem):
            return f"{self.name} cuts the query heads into {self._head_shards(problem)} shards on this mesh"
        return None

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, **context: Any) -> jax.Array:
        """out, by the target contract."""
        return self._call(query, key, value, return_lse=False, **context)

    def attention_with_lse(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **context: Any
    ) -> tuple[jax.Array, jax.Array]:
        """(out, lse), by the target contract."""
        return self._call(query, key, value, return_lse=True, **context)

    def _head_shards(self, problem: Problem) -> int:
        """Ranks that the query heads are spread over, for a while or for good."""
        exchanged = problem.context_parallelism if self.name == "ulysses" else 1
        return problem.tensor_parallelism * problem.ulysses_parallelism * exchanged

    def _call(self, query: Any, key: Any, value: Any, *, problem: Problem, mesh: Any, **context: Any) -> Any:
        has_global_form = self.name != "halo" and problem.ulysses_parallelism == 1
        global_strategy = self.name if has_global_form else "all_gather"
        config = impl.AttentionConfig(
            context_parallel_strategy="usp" if problem.ulysses_parallelism > 1 else global_strategy,
            local_context_parallel_strategy=self.name,
            context_parallel_load_balance=problem.layout != "contiguous",
            context_parallel_reorder_strategy="striped" if problem.layout == "striped" else "dual_chunk_swap",
            window=None if _is_global(problem) else problem.window,
            attn_logits_soft_cap=problem.attn_logits_soft_cap,
            scale=problem.scale,
        )
        return impl.attention(
            query,
            key,
            value,
            mesh=mesh,
            config=config,
            attention_type=impl.AttentionType.GLOBAL if _is_global(problem) else impl.AttentionType.LOCAL_SLIDING,
            padding_segment_id=problem.padding,
            **context,
        )


def _is_global(problem: Problem) -> bool:
    return problem.window == (None, 0)


halo = _Bundled("halo")
all_gather = _Bundled("all_gather")
ring = _Bundled("ring")
ulysses = _Bundled("ulysses")
usp = _Bundled("usp")
