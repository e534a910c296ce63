"""Rows that a Pallas kernel sends to another rank by itself, by remote DMA, while its blocks are computed.

The copy starts at the grid's first step, once the receiver has said that it is there, and is waited for at the last:
what lies between hides it by construction. Called inside `jax.shard_map`. Tested in tests/impl/test_pallas_fetch.py.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from impl.kernels.pallas_ring import HBM

ROW_MULTIPLE = 8
"""Remote copies of tiled arrays begin and end at such rows: Mosaic compiles no others."""
NOBODY = -1


class Route(NamedTuple):
    """Who sends to whom, for each rank on a mesh axis, as pairs (sender, receiver) that name no rank twice in a role.

    collective_id: of the barrier. Calls with the same id must have the same pairs: a signal of one call may come while
    another rank is still in the call before it, and only from its one receiver may a sender expect any.
    """

    pairs: tuple[tuple[int, int], ...]
    axis_name: str
    axis_size: int
    collective_id: int

    def ends(self) -> Int32[Array, "2"]:
        """(receiver, sender) of this rank, or NOBODY."""
        table = [[NOBODY, NOBODY] for _ in range(self.axis_size)]
        for sender, receiver in self.pairs:
            table[sender][0], table[receiver][1] = receiver, sender
        return jnp.asarray(table, jnp.int32)[lax.axis_index(self.axis_name)]


class Cargo(NamedTuple):
    """What a call takes along: rows `first … first + sent − 1` of each array, of every head.

    They arrive as the last rows of as many arrays of `length` rows. With `filled`, this rank's own rows stand where
    nothing arrives, so that a kernel may multiply them by zero; otherwise such rows are undefined. Where nobody sends
    to a rank these are the same rows of `instead`, arrays of `arrays`' shapes, or of `arrays` themselves.
    """

    arrays: tuple[Shaped[Array, "heads rows dim"], ...]
    first: int
    sent: int
    length: int
    filled: bool
    route: Route
    instead: tuple[Shaped[Array, "heads rows dim"], ...] | None = None


def call_with_cargo(
    cargo: Cargo | None,
    kernel: Callable[..., None],
    operands: Sequence[Array],
    *,
    grid_spec: pltpu.PrefetchScalarGridSpec,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    compiler_params: pltpu.CompilerParams,
    interpret: Any,
    **options: Any,
) -> tuple[Sequence[Array], tuple[Shaped[Array, "heads length dim"], ...]]:
    """(results of `kernel`, what arrived of the cargo). The arguments are those of `pl.pallas_call`; its grid has one
    axis, whose steps run in order.
    """
    if cargo is None:
        options |= {"compiler_params": compiler_params, "interpret": interpret}
        return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=out_shape, **options)(*operands), ()
    kinds, num_results = len(cargo.arrays), len(out_shape)
    semaphores: Any = pltpu.SemaphoreType.DMA((len(_Semaphores._fields), kinds))
    scratch: Any = grid_spec.scratch_shapes
    sources = (*cargo.arrays, *(cargo.instead or ()))
    counts = (len(operands), len(sources), num_results)
    results = pl.pallas_call(
        lambda *refs: _with_transfer(kernel, cargo, counts, refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=grid_spec.num_scalar_prefetch,
            grid=grid_spec.grid,
            in_specs=[*grid_spec.in_specs, pl.BlockSpec(memory_space=pltpu.SMEM), *[HBM] * len(sources)],
            out_specs=[*grid_spec.out_specs, *[HBM] * kinds],
            scratch_shapes=[*scratch, semaphores],
        ),
        out_shape=[
            *out_shape,
            *(
                jax.ShapeDtypeStruct((array.shape[0], cargo.length, array.shape[2]), array.dtype)
                for array in cargo.arrays
            ),
        ],
        compiler_params=dataclasses.replace(
            compiler_params, collective_id=cargo.route.collective_id, has_side_effects=True
        ),
        # Plain interpretation knows no other device.
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        **options,
    )(*operands, cargo.route.ends(), *sources)
    return results[:num_results], tuple(results[num_results:])


class _Semaphores(NamedTuple):
    """Rows of one array of DMA semaphores, a column for each array of the cargo."""

    sent: int = 0
    arrived: int = 1
    filled: int = 2
    stood_in: int = 3


_SEMAPHORES = _Semaphores()


class _Transfer(NamedTuple):
    """References, and the ranks at the other ends: `receiver` or `sender` may be NOBODY."""

    cargo: Cargo
    sources: Sequence[Any]
    instead: Sequence[Any]
    targets: Sequence[Any]
    semaphores: Any
    receiver: Any
    sender: Any


def _with_transfer(
    kernel: Callable[..., None], cargo: Cargo, counts: tuple[int, int, int], refs: Sequence[Any]
) -> None:
    rest = iter(refs)
    num_operands, num_sources, num_results = counts
    kinds = len(cargo.arrays)
    operands = _take(rest, num_operands)
    ends, sources, instead = next(rest), _take(rest, kinds), _take(rest, num_sources - kinds)
    results, targets = _take(rest, num_results), _take(rest, kinds)
    *scratch, semaphores = rest
    transfer = _Transfer(cargo, sources, instead or sources, targets, semaphores, ends[0], ends[1])
    step = pl.program_id(0)
    pl.when(step == 0)(lambda: _begin(transfer))
    kernel(*operands, *results, *scratch)
    pl.when(step == pl.num_programs(0) - 1)(lambda: _finish(transfer))


def _begin(transfer: _Transfer) -> None:
    axis, barrier = transfer.cargo.route.axis_name, pltpu.get_barrier_semaphore()

    # A receiver signals that its arrays are there to be written to; its sender waits for nobody else.
    @pl.when(transfer.sender != NOBODY)
    def _is_ready() -> None:
        pl.semaphore_signal(barrier, 1, device_id={axis: transfer.sender})

    for copy in _fillings(transfer):
        copy.start()

    @pl.when(transfer.sender == NOBODY)
    def _stand_in() -> None:
        for copy in _stand_ins(transfer):
            copy.start()

    @pl.when(transfer.receiver != NOBODY)
    def _send() -> None:
        pl.semaphore_wait(barrier, 1)
        for copy in _remote_copies(transfer):
            copy.start()


def _finish(transfer: _Transfer) -> None:
    for copy in _fillings(transfer):
        copy.wait()

    @pl.when(transfer.sender == NOBODY)
    def _stood_in() -> None:
        for copy in _stand_ins(transfer):
            copy.wait()

    @pl.when(transfer.receiver != NOBODY)
    def _sent() -> None:
        for copy in _remote_copies(transfer):
            copy.wait_send()

    @pl.when(transfer.sender != NOBODY)
    def _arrived() -> None:
        for copy in _remote_copies(transfer):
            copy.wait_recv()


def _remote_copies(transfer: _Transfer) -> Iterator[Any]:
    cargo = transfer.cargo
    # Who only receives waits for a copy of this size, wherever it would go.
    receiver: Any = {cargo.route.axis_name: jnp.maximum(transfer.receiver, 0)}
    for kind, (source, target) in enumerate(zip(transfer.sources, transfer.targets, strict=True)):
        yield pltpu.make_async_remote_copy(
            source.at[:, pl.ds(cargo.first, cargo.sent)],
            target.at[:, pl.ds(cargo.length - cargo.sent, cargo.sent)],
            transfer.semaphores.at[_SEMAPHORES.sent, kind],
            transfer.semaphores.at[_SEMAPHORES.arrived, kind],
            device_id=receiver,
        )


def _fillings(transfer: _Transfer) -> Iterator[Any]:
    """Own rows in the place of those before the first that arrives."""
    cargo = transfer.cargo
    before = cargo.length - cargo.sent
    if cargo.filled and before:
        yield from _own_rows(transfer, transfer.sources, 0, 0, before, _SEMAPHORES.filled)


def _stand_ins(transfer: _Transfer) -> Iterator[Any]:
    """Own rows in the place of those that nobody sends."""
    cargo = transfer.cargo
    if cargo.filled:
        into = cargo.length - cargo.sent
        yield from _own_rows(transfer, transfer.instead, cargo.first, into, cargo.sent, _SEMAPHORES.stood_in)


def _own_rows(
    transfer: _Transfer, sources: Sequence[Any], first: int, into: int, count: int, semaphore: int
) -> Iterator[Any]:
    for kind, (source, target) in enumerate(zip(sources, transfer.targets, strict=True)):
        yield pltpu.make_async_copy(
            source.at[:, pl.ds(first, count)], target.at[:, pl.ds(into, count)], transfer.semaphores.at[semaphore, kind]
        )


def _take(refs: Iterator[Any], count: int) -> list[Any]:
    return [next(refs) for _ in range(count)]
