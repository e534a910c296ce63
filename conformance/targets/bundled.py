"""The bundled implementations as targets: `conformance.targets.bundled:halo`, and all_gather, ring, ulysses, usp.

Each also with JAX's splash attention as its local kernel, halo_splash and so on, and halo_pallas with our own Pallas
kernels, which in halo_pallas_remote_copy fetch the halo themselves where they can: interpreted, and slow, where there
is no TPU.
May touch: impl. Tests: tests/conformance/test_targets.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import impl
from conformance.input_shapes import input_shapes
from conformance.problem import Problem
from impl.config import resolve
from impl.dispatch import local_kernel
from impl.kernels import pallas_halo, splash
from impl.kernels.pallas_fetch import ROW_MULTIPLE

_OF_SPLASH = {"prescaled_query": True, "rounded_partials": True}


@dataclass(frozen=True)
class _Bundled:
    """One strategy of `impl.attention`, for LOCAL_SLIDING layers and, but for halo, for GLOBAL ones.

    Where the sequence lies on two axes, the model's global strategy is usp, and this one is that of its local layers.
    """

    communication: str
    local_kernel: str = ""
    halo_transfer: str = "permute"
    halo_row_multiple: int = 1
    empty_rows: str = "zero"
    residual_names: tuple[str, ...] = impl.RESIDUAL_NAMES

    @property
    def name(self) -> str:
        """The strategy, and the local kernel and the halo's transfer where these are not what suits the platform."""
        kernel = self.local_kernel.removesuffix("_halo")
        transfer = "" if self.halo_transfer == "permute" else self.halo_transfer.removesuffix("_or_permute")
        return "_".join(filter(None, (self.communication, kernel, transfer)))

    @property
    def exact(self) -> bool:
        """Whether it runs in float64."""
        return self.local_kernel == ""

    @property
    def tpu_kernels(self) -> tuple[str, ...]:
        """Where a kernel of Pallas is asked for, no program for a TPU is without it."""
        return ("forward", "backward") if self.local_kernel else ()

    @property
    def precision(self) -> dict[str, bool]:
        """Its numerics. Splash knows no scale, so the query carries it, rounded to the inputs' dtype; and it rounds its
        results, of which a rank adds up several. The pallas_halo kernels do neither: what is added up is float32."""
        return dict(_OF_SPLASH) if self.local_kernel == "splash" else {}

    @property
    def tpu_precision(self) -> dict[str, bool]:
        """Those of splash, which runs on a TPU what our own kernels decline, unless a kernel is asked for."""
        return dict(_OF_SPLASH) if self.local_kernel in ("", "splash") else {}

    def uses_tpu_precision(self, problem: Problem, mesh: Mesh) -> bool:
        """Whether the layer runs splash on these TPUs."""
        if self.local_kernel:
            return self.local_kernel == "splash"
        shapes = input_shapes(problem)
        operands = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
        operands = {"value": operands["key"], "segment_ids": None, **operands}
        config = self._config(problem)
        return local_kernel(operands, mesh, config, resolve(config, _attention_type(problem))) == "splash"

    def supports(self, problem: Problem) -> str | None:
        """The reason to decline: what the strategy, or its local kernel, cannot do by its nature."""
        strategy = self.communication
        if strategy == "halo" and problem.layout == "striped":
            return "halo needs chunks: the striped layout has none"
        if strategy == "halo" and problem.window[0] is None:
            return "halo is for LOCAL_SLIDING layers: this window is unbounded"
        if strategy == "usp" and problem.ulysses_parallelism == 1:
            return "usp needs the sequence on two axes: this mesh has no ulysses axis"
        if strategy != "usp" and problem.ulysses_parallelism > 1 and _is_global(problem):
            return f"{strategy} shards the sequence of a GLOBAL layer over the context axis alone"
        if problem.num_query_heads % self._head_shards(problem):
            return f"{strategy} cuts the query heads into {self._head_shards(problem)} shards on this mesh"
        if self.local_kernel == "splash":
            contiguous_keys = problem.layout != "striped" or strategy not in ("ring", "usp")
            return splash.unsupported(jnp.dtype(problem.dtype), contiguous_keys)
        if self.local_kernel == "pallas_halo":
            return pallas_halo.unsupported(jnp.dtype(problem.dtype), strategy, problem.window)
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
        exchanged = problem.context_parallelism if self.communication == "ulysses" else 1
        return problem.tensor_parallelism * problem.ulysses_parallelism * exchanged

    def _call(self, query: Any, key: Any, value: Any, *, problem: Problem, mesh: Any, **context: Any) -> Any:
        return impl.attention(
            query,
            key,
            value,
            mesh=mesh,
            config=self._config(problem),
            attention_type=_attention_type(problem),
            padding_segment_id=problem.padding,
            **context,
        )

    def _config(self, problem: Problem) -> impl.AttentionConfig:
        has_global_form = self.communication != "halo" and problem.ulysses_parallelism == 1
        global_strategy = self.communication if has_global_form else "all_gather"
        return impl.AttentionConfig(
            context_parallel_strategy="usp" if problem.ulysses_parallelism > 1 else global_strategy,
            local_context_parallel_strategy=self.communication,
            local_kernel=self.local_kernel,
            halo_transfer=self.halo_transfer,
            context_parallel_load_balance=problem.layout != "contiguous",
            context_parallel_reorder_strategy="striped" if problem.layout == "striped" else "dual_chunk_swap",
            window=None if _is_global(problem) else problem.window,
            attn_logits_soft_cap=problem.attn_logits_soft_cap,
            scale=problem.scale,
        )


def _attention_type(problem: Problem) -> impl.AttentionType:
    return impl.AttentionType.GLOBAL if _is_global(problem) else impl.AttentionType.LOCAL_SLIDING


def _is_global(problem: Problem) -> bool:
    return problem.window == (None, 0)


halo = _Bundled("halo")
all_gather = _Bundled("all_gather")
ring = _Bundled("ring")
ulysses = _Bundled("ulysses")
usp = _Bundled("usp")
halo_pallas = _Bundled("halo", "pallas_halo")
halo_pallas_remote_copy = _Bundled("halo", "pallas_halo", "remote_copy_or_permute", halo_row_multiple=ROW_MULTIPLE)
halo_splash = _Bundled("halo", "splash")
all_gather_splash = _Bundled("all_gather", "splash")
ring_splash = _Bundled("ring", "splash")
ulysses_splash = _Bundled("ulysses", "splash")
usp_splash = _Bundled("usp", "splash")
