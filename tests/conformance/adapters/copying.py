"""The halo by hand of sending.py whose rows are fetched by a kernel's own copies, and targets that send more beside.

The gradients of those rows travel home by a permute. Owes nothing to `impl`. May touch: JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from sending import Halo


def _kernel(rows: Any, arrived: Any, sent: Any, received: Any) -> None:
    size, rank = jax.lax.axis_size("context"), jax.lax.axis_index("context")
    after: Any = {"context": jax.lax.rem(rank + 1, size)}
    copy = pltpu.make_async_remote_copy(rows, arrived, sent, received, device_id=after)
    copy.start()
    copy.wait()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copied(rows: Any, pairs: Any) -> Any:
    """The rows of the rank before, on a circle: of those of the last rank nothing is visible to rank 0."""
    del pairs
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
    )(rows)


def _home(pairs: Any, residuals: None, cotangent: Any) -> tuple[Any]:
    del residuals
    return (jax.lax.ppermute(cotangent, "context", [(to, source) for source, to in pairs]),)


_copied.defvjp(lambda rows, pairs: (_copied(rows, pairs), None), _home)


def _copied_but_for_the_first_rank(rows: Any, pairs: Any) -> Any:
    """Rank 0 takes its rows, which nobody sees, from a gathered sequence."""
    gathered = jax.lax.all_gather(rows, "context")
    return jnp.where(jax.lax.axis_index("context") == 0, gathered[-1], _copied(rows, tuple(pairs)))


copies = Halo(name="copies", fetched=lambda rows, pairs: _copied(rows, tuple(pairs)))
copies_and_gathers = Halo(name="copies_and_gathers", fetched=_copied_but_for_the_first_rank)
