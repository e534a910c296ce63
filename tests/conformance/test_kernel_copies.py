"""How much a kernel sends by copies of its own is read from its program: its grid, conditions, branches and loops.

Expected counts follow from each kernel's text. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from conformance.checks.copied import copied, is_counted
from conformance.kernel_copies import kernel_copies
from conformance.traced import scope
from conformance.wire_plan import Allowance, WirePlan

_STEPS, _ROWS, _LANES = 4, 16, 128


def _copies(body: Callable[..., None]) -> list[dict[str, Any]]:
    """Of a kernel of four steps; `body` is given its step, a number in scalar memory and what sends eight rows."""

    def kernel(number: Any, rows: Any, arrived: Any, sent: Any, received: Any) -> None:
        def send(first: int = 0, count: int = 8) -> None:
            source, target = rows.at[pl.ds(first, count)], arrived.at[pl.ds(first, count)]
            pltpu.make_async_remote_copy(source, target, sent, received, device_id={"context": 1}).start()

        body(pl.program_id(0), number, send)

    def program(number: Any, rows: Any) -> Any:
        spec = pl.BlockSpec(memory_space=pl.ANY)
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(_STEPS,),
            in_specs=[spec],
            out_specs=spec,
            scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        )
        call = pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype))
        with scope("primal", "attention"):
            return call(number, rows)

    arguments = (jnp.zeros(_STEPS, jnp.int32), jnp.zeros((_ROWS, _LANES), jnp.bfloat16))
    return kernel_copies(jax.make_jaxpr(program, axis_env=[("context", 4)])(*arguments))


def _at_the_ends(step: Any, number: Any, send: Callable[..., None]) -> None:
    pl.when(step == 0)(send)
    pl.when(step == pl.num_programs(0) - 1)(send)


def _for_some_ranks(step: Any, number: Any, send: Callable[..., None]) -> None:
    pl.when((step == 0) & (number[0] >= 0))(send)


def _one_way_or_the_other(step: Any, number: Any, send: Callable[..., None]) -> None:
    jax.lax.cond(jax.lax.axis_index("context") == 0, lambda: send(0, 8), lambda: send(0, 16))


def _in_a_loop(step: Any, number: Any, send: Callable[..., None]) -> None:
    jax.lax.fori_loop(0, 3, lambda index, carry: (send(), carry)[1], 0)


def _as_data_say(step: Any, number: Any, send: Callable[..., None]) -> None:
    pl.when(number[step] > 0)(send)


def _in_a_loop_but_for_its_first_turn(step: Any, number: Any, send: Callable[..., None]) -> None:
    jax.lax.fori_loop(0, 3, lambda index, carry: (pl.when(index > 0)(send), carry)[1], 0)


def _where_an_unsigned_number_wraps(step: Any, number: Any, send: Callable[..., None]) -> None:
    pl.when(step.astype(jnp.uint32) - 1 > _STEPS)(send)


def _until_data_say(step: Any, number: Any, send: Callable[..., None]) -> None:
    jax.lax.while_loop(lambda index: index < number[0], lambda index: (send(), index + 1)[1], 0)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda step, number, send: send(), [(8, 4)]),
        (_at_the_ends, [(8, 1), (8, 1)]),
        (lambda step, number, send: pl.when(step % 2 == 1)(send), [(8, 2)]),
        (_for_some_ranks, [(8, 1)]),
        (_one_way_or_the_other, [(16, 4)]),
        (_in_a_loop, [(8, 12)]),
        (_in_a_loop_but_for_its_first_turn, [(8, None)]),
        (lambda step, number, send: pl.when(step.astype(bool))(send), [(8, 3)]),
        (lambda step, number, send: pl.when((step * 128).astype(jnp.int8) <= 0)(send), [(8, 4)]),
        (lambda step, number, send: pl.when(step.astype(jnp.float32) / 2 > 0)(send), [(8, 3)]),
        (_where_an_unsigned_number_wraps, [(8, 1)]),
        (_as_data_say, [(8, None)]),
        (_until_data_say, [(8, None)]),
        (lambda step, number, send: None, []),
    ],
    ids=[
        *("at every step", "first and last", "every second step", "where the rank says so", "the larger branch"),
        *("a loop of three", "a turn of a loop", "a number as a condition", "an overflow", "a fraction", "a wrap"),
        *("data by step", "a loop that data end", "nothing"),
    ],
)
def test_copies_count_as_often_as_they_may_be_started(body: Any, expected: list[tuple[int, int | None]]) -> None:
    counted = [(copy["bytes"], copy["starts"]) for copy in _copies(body)]
    assert counted == [(rows * _LANES * 2, starts) for rows, starts in expected], "bfloat16 rows of 128 lanes"


def _two_on_every_core(arrays: Any, cores: int) -> Any:
    """A kernel of `pl.kernel`: each core of a device sends eight rows, the last one all sixteen beside."""

    def kernel(rows: Any, arrived: Any, sent: Any, received: Any) -> None:
        def send(count: int) -> None:
            source, target = rows.at[pl.ds(0, count)], arrived.at[pl.ds(0, count)]
            pltpu.make_async_remote_copy(source, target, sent, received, device_id={"context": 1}).start()

        send(8)
        pl.when(jax.lax.axis_index("core") == cores - 1)(lambda: send(16))

    mesh = pltpu.create_tensorcore_mesh("core", num_cores=cores)
    out = jax.ShapeDtypeStruct(arrays.shape, arrays.dtype)
    return pl.kernel(kernel, out_type=out, mesh=mesh, scratch_types=[pltpu.SemaphoreType.DMA] * 2)(arrays)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_kernel_over_the_cores_of_a_device_sends_from_each_of_them() -> None:
    rows = jnp.zeros((_ROWS, _LANES), jnp.bfloat16)
    program = jax.make_jaxpr(lambda rows: _two_on_every_core(rows, 2), axis_env=[("context", 4)])(rows)
    counted = [(copy["bytes"], copy["starts"]) for copy in kernel_copies(program)]
    assert counted == [(8 * _LANES * 2, 2), (16 * _LANES * 2, 1)]


@pytest.mark.parametrize(
    ("says_so", "expected"),
    [(True, 1), (False, 0), (pltpu.SideEffectType.SIDE_EFFECTING, 1), (pltpu.SideEffectType.PURE, 0)],
)
def test_a_kernel_with_side_effects_counts_where_nobody_uses_its_result(says_so: Any, expected: int) -> None:
    """XLA keeps the one, and drops the other."""

    def kernel(rows: Any, arrived: Any, sent: Any, received: Any) -> None:
        pltpu.make_async_remote_copy(rows, arrived, sent, received, device_id={"context": 1}).start()

    def program(rows: Any) -> Any:
        spec = pl.BlockSpec(memory_space=pl.ANY)
        jax.jit(
            pl.pallas_call(
                kernel,
                out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
                in_specs=[spec],
                out_specs=spec,
                scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
                compiler_params=pltpu.CompilerParams(has_side_effects=says_so),
            )
        )(rows)
        return rows + 1

    traced = jax.make_jaxpr(program, axis_env=[("context", 4)])(jnp.zeros((_ROWS, _LANES), jnp.bfloat16))
    assert [copy["starts"] for copy in kernel_copies(traced)] == [1] * expected


def test_copies_and_the_collectives_of_the_plan_beside_them_share_one_allowance() -> None:
    rows = Allowance("rows", ("collective-permute",), ("context",), 8192)
    sums = Allowance("sums", ("all-reduce",), ("data",), 10**9)
    plan = WirePlan((rows,), (rows, sums))
    copies = _copies(lambda step, number, send: pl.when(step == 0)(send))
    assert is_counted(copies)
    assert not is_counted(_copies(_as_data_say)), "then nothing can be said"
    beside = {("primal/attention", "collective-permute"): 4096.0, ("primal/attention", "all-gather"): 10**6}
    (one,) = copied(copies, beside, plan, calls=2)
    # 8 rows of 128 lanes of 2 bytes; the gather, of which the plan has none, is a finding elsewhere.
    assert (one.tensor, one.by_copies, one.by_collectives, one.allowed) == ("forward", 2048, 4096, 8192)
    (lost,) = copied([copies[0] | {"phase": ""}], {}, plan, calls=2)
    assert lost.allowed == 2 * 3 * 8192, "of a primal, a forward or a backward of either call"
