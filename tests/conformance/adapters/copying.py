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


def _kernel(rows: Any, arrived: Any, sent: Any, received: Any, *, times: int = 1) -> None:
    for _ in range(times):
        _copy(rows, arrived, sent, received)


def _kernel_of_data(first: Any, rows: Any, arrived: Any, sent: Any, received: Any) -> None:
    """Sends if the data say so at the grid's second step; they always do."""
    step = pl.program_id(0)
    pl.when(first[step] < jnp.inf)(lambda: pl.when(step == 1)(lambda: _copy(rows, arrived, sent, received)))


def _copy(rows: Any, arrived: Any, sent: Any, received: Any) -> None:
    size, rank = jax.lax.axis_size("context"), jax.lax.axis_index("context")
    after: Any = {"context": jax.lax.rem(rank + 1, size)}
    copy = pltpu.make_async_remote_copy(rows, arrived, sent, received, device_id=after)
    copy.start()
    copy.wait()


def _call(rows: Any, times: int, of_data: bool) -> Any:
    spec = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        _kernel_of_data if of_data else functools.partial(_kernel, times=times),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 if of_data else 0,
            grid=(2,) if of_data else (),
            in_specs=[spec],
            out_specs=spec,
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        ),
        compiler_params=pltpu.CompilerParams(has_side_effects=True),
    )
    return call(rows.ravel()[:2].astype(jnp.float32), rows) if of_data else call(rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _copied(rows: Any, pairs: Any, times: int = 1, of_data: bool = False) -> Any:
    """The rows of the rank before, on a circle: of those of the last rank nothing is visible to rank 0."""
    del pairs
    return _call(rows, times, of_data)


def _home(pairs: Any, times: int, of_data: bool, residuals: None, cotangent: Any) -> tuple[Any]:
    del residuals, times, of_data
    return (jax.lax.ppermute(cotangent, "context", [(to, source) for source, to in pairs]),)


_copied.defvjp(lambda rows, pairs, times, of_data: (_copied(rows, pairs, times, of_data), None), _home)


def _copied_but_for_the_first_rank(rows: Any, pairs: Any) -> Any:
    """Rank 0 takes its rows, which nobody sees, from a gathered sequence."""
    gathered = jax.lax.all_gather(rows, "context")
    return jnp.where(jax.lax.axis_index("context") == 0, gathered[-1], _copied(rows, tuple(pairs)))


copies = Halo(name="copies", fetched=lambda rows, pairs: _copied(rows, tuple(pairs)))
copies_twice = Halo(name="copies_twice", fetched=lambda rows, pairs: _copied(rows, tuple(pairs), 2))
copies_by_data = Halo(name="copies_by_data", fetched=lambda rows, pairs: _copied(rows, tuple(pairs), 1, True))
copies_and_gathers = Halo(name="copies_and_gathers", fetched=_copied_but_for_the_first_rank)
