"""Races planted in a kernel that fetches a halo from the previous rank, and its clean twin.

`conformance.races.planted:missing_send_wait`, and so on, are targets like any other: the bundled halo, whose exchange
of keys and values is done by the kernel. May touch: JAX, impl. Tests: tests/conformance/test_races_program.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from conformance.faults.fault import NOT_PUBLIC, Fault, Replacement
from conformance.faults.planting import Planted
from conformance.problem import Problem
from impl import exchange

CLEAN = "clean"
MISTAKES = {
    "missing_barrier": "no device waits until the next one has entered the kernel",
    "missing_send_wait": "the next head's rows are loaded while the last one's may still be on their way out",
    "missing_receive_wait": "rows are taken out of the buffer before they are known to have arrived",
    "early_reuse": "rows are sent into a buffer whose owner may still read the last ones",
    "wrong_semaphore": "each wait is for the semaphore of the other end of the copy",
    "wrong_neighbour": "rows go to the rank after the next, which has asked somebody else for them",
    "missing_signal": "nobody says that its buffer is free again, and everybody waits for it",
    "unbalanced_barrier": "every device signals twice and waits for one: the next call finds the barrier open",
}
"""What each of them does wrong, by name."""
_COLLECTIVE_ID = 7


def fetch_halo(rows: jax.Array, halo_rows: int, axis: str, mistake: str = CLEAN) -> jax.Array:
    """[heads, rows, dim] → [heads, halo_rows, dim]: the last rows of the previous rank on the axis, on a circle.

    To be called inside `jax.shard_map`. Every head goes through the same two buffers, and there must be two or more.
    """
    heads, _, dim = rows.shape
    buffer = pltpu.VMEM((halo_rows, dim), rows.dtype)
    return pl.pallas_call(
        functools.partial(_fetch_kernel, axis=axis, mistake=mistake),
        out_shape=jax.ShapeDtypeStruct((heads, halo_rows, dim), rows.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[buffer, buffer, *[pltpu.SemaphoreType.DMA] * 3, pltpu.SemaphoreType.REGULAR],
        compiler_params=pltpu.CompilerParams(collective_id=_COLLECTIVE_ID, has_side_effects=True),
    )(rows)


def _fetch_kernel(
    rows: Any,
    halo: Any,
    outgoing: Any,
    incoming: Any,
    moved: Any,
    sent: Any,
    arrived: Any,
    is_free: Any,
    *,
    axis: str,
    mistake: str,
) -> None:
    size, rank = lax.axis_size(axis), lax.axis_index(axis)
    before: Any = {axis: lax.rem(rank + size - 1, size)}
    after: Any = {axis: lax.rem(rank + 1, size)}
    heads, halo_rows, _ = halo.shape
    tail = pl.ds(rows.shape[1] - halo_rows, halo_rows)
    if mistake != "missing_barrier":
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 2 if mistake == "unbalanced_barrier" else 1, device_id=before)
        pl.semaphore_wait(barrier, 1)
    to: Any = {axis: lax.rem(rank + 2, size)} if mistake == "wrong_neighbour" else after

    @pl.loop(0, heads)
    def _each(head: Any) -> None:
        load = pltpu.make_async_copy(rows.at[head, tail], outgoing, moved)
        load.start()
        load.wait()
        if mistake != "early_reuse":
            pl.when(head > 0)(lambda: pl.semaphore_wait(is_free, 1))
        send = pltpu.make_async_remote_copy(outgoing, incoming, sent, arrived, device_id=to)
        send.start()
        if mistake == "wrong_semaphore":
            send = pltpu.make_async_remote_copy(outgoing, incoming, arrived, sent, device_id=to)
        if mistake != "missing_receive_wait":
            send.wait_recv()
        store = pltpu.make_async_copy(incoming, halo.at[head], moved)
        store.start()
        store.wait()
        if mistake not in ("early_reuse", "missing_signal"):
            pl.when(head < heads - 1)(lambda: pl.semaphore_signal(is_free, 1, device_id=before))
        if mistake != "missing_send_wait":
            send.wait_send()


def _exchange(right: Any, rows: Any, plan: Any, axis_name: str, *, mistake: str) -> tuple[Any, ...]:
    """In the place of `impl.exchange.exchange`: keys and values by the kernel, segment ids as before."""
    if rows.ndim != 4:
        return right(rows, plan, axis_name)
    (permute,) = plan.permutes
    batch, length, heads, dim = rows.shape
    by_head = rows.transpose(0, 2, 1, 3).reshape(batch * heads, length, dim)
    halo = fetch_halo(by_head, permute.rows, axis_name, mistake)
    # The first rank has nobody before it, and the circle gave it the last one's rows.
    halo = jnp.where(lax.axis_index(axis_name) == 0, jnp.zeros_like(halo), halo)
    return (halo.reshape(batch, heads, permute.rows, dim).transpose(0, 2, 1, 3),)


def _applies(problem: Problem) -> bool:
    """One hop to the rank before, several heads for the buffers to be used by, and a rank after the next."""
    left, right = problem.window
    local_heads = problem.batch * problem.num_kv_heads // problem.data_parallelism
    return (
        problem.layout == "contiguous"
        and problem.dtype != "float64"
        and problem.context_parallelism >= 3
        and problem.ulysses_parallelism == problem.tensor_parallelism == 1
        and right == 0
        and left is not None
        and 0 < left <= problem.chunk_len
        and local_heads >= 2
    )


def _target(name: str, sentence: str) -> Planted:
    """Not in the catalogue of faults: whoever runs that does not wait for an interpreter."""
    fault = Fault(
        name=name,
        kind="P",
        report=NOT_PUBLIC,
        sentence=sentence,
        planted_in="halo",
        smallest="v=1 seq_len=12 sliding_window_size=3 context_parallelism=3 num_query_heads=2 num_kv_heads=2 seed=7",
        applies=_applies,
        replaced=(
            Replacement(exchange, "exchange", functools.partial(_exchange, mistake=name), ("primal", "forward")),
        ),
    )
    return Planted(fault, clean=False)


def __getattr__(name: str) -> Planted:
    """The target of a mistake, or the clean one."""
    if name not in (*MISTAKES, CLEAN):
        raise AttributeError(name)
    return _target(name, MISTAKES.get(name, "nothing is wrong"))
