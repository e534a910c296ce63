"""A kernel that sends rows to another rank computes what it did, and the rows arrive. Interpreted on simulated devices,
copies carried out early and late. The halo strategy on top of it: test_halo_fetch.py.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conformance.races.program import CALLS, watched
from conformance.races.skew import Skew
from impl.kernels import pallas_fetch
from impl.kernels.pallas_fetch import Cargo, Route, call_with_cargo

RANKS, HEADS, ROWS, DIM = 3, 2, 32, 4
FORWARD, HOME = ((0, 1), (1, 2)), ((1, 0), (2, 1))
MODES = ("eager", "on_wait")


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("context",))


def compiled(function, *arguments, mode: Any = "on_wait"):
    """Results, under TPU interpretation, which knows other devices; nearly all of the time is the compiler's."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode)):
        lowered = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    return lowered.compile({"xla_backend_optimization_level": "0"})(*arguments)


def doubled_with_cargo(rows, *, first, sent, length, filled, pairs):
    """(2 · rows, what arrived) of every rank, side by side: rows are [heads, ranks · rows, dim]."""

    def kernel(given, result):
        result[...] = 2 * given[...]

    def of_rank(rows):
        spec = pl.BlockSpec((1, ROWS, DIM), lambda head: (head, 0, 0))
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0, grid=(HEADS,), in_specs=[spec], out_specs=[spec], scratch_shapes=[]
        )
        (doubled,), (arrived,) = call_with_cargo(
            Cargo((rows,), first, sent, length, filled, Route(pairs, "context", RANKS, 7)),
            kernel,
            [rows],
            grid_spec=grid_spec,
            out_shape=[jax.ShapeDtypeStruct(rows.shape, rows.dtype)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            interpret=True,
        )
        return doubled, arrived

    spec = PartitionSpec(None, "context")
    return jax.shard_map(of_rank, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)(rows)


def placed(array, *axes):
    """On the mesh; without axes, by rows."""
    spec = PartitionSpec(*(axes or (None, "context")))
    return jax.device_put(array, NamedSharding(mesh(), spec))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pairs", [FORWARD, HOME], ids=["forward", "home"])
def test_rows_arrive_at_the_receiver_and_nobody_elses_are_touched(pairs, mode) -> None:
    rows = np.random.default_rng(0).standard_normal((HEADS, RANKS * ROWS, DIM)).astype(np.float32)
    program = functools.partial(doubled_with_cargo, first=ROWS - 8, sent=8, length=24, filled=True, pairs=pairs)
    doubled, arrived = compiled(program, placed(rows), mode=mode)
    assert np.array_equal(doubled, 2 * rows), "the kernel computes what it did"
    of_rank, arrived = np.split(rows, RANKS, axis=1), np.split(np.asarray(arrived), RANKS, axis=1)
    sender_of = {receiver: sender for sender, receiver in pairs}
    for rank in range(RANKS):
        tail = of_rank[sender_of.get(rank, rank)][:, -8:]
        assert np.array_equal(arrived[rank][:, -8:], tail), (
            f"rank {rank}: the sender's tail, or its own where nobody is"
        )
        assert np.array_equal(arrived[rank][:, :-8], of_rank[rank][:, :16]), f"rank {rank}: own rows fill the rest"


class Without:
    """A copy that is never waited for on one of its sides."""

    def __init__(self, copy, wait):
        self.start, self.wait_send, self.wait_recv = copy.start, copy.wait_send, copy.wait_recv
        setattr(self, wait, lambda: None)


def without_wait(wait):
    copies_of = pallas_fetch._remote_copies
    return lambda transfer: (Without(copy, wait) for copy in copies_of(transfer))


MISTAKES = {
    "barrier": (pl, "semaphore_wait", lambda *_: None),
    "wait for what arrives": (pallas_fetch, "_remote_copies", without_wait("wait_recv")),
    "wait for what is sent": (pallas_fetch, "_remote_copies", without_wait("wait_send")),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_race_check_is_silent_and_sees_each_step_that_is_left_out(mistake, monkeypatch) -> None:
    if mistake is not None:
        monkeypatch.setattr(*MISTAKES[mistake])
    rows = np.arange(HEADS * RANKS * ROWS * DIM, dtype=np.float32).reshape(HEADS, RANKS * ROWS, DIM)
    skew = Skew(RANKS)
    spec = placed(rows).sharding

    def function(arrays):
        given = skew.late(arrays["rows"], mesh(), spec)
        _, arrived = doubled_with_cargo(given, first=ROWS - 8, sent=8, length=8, filled=True, pairs=FORWARD)
        return {"arrived": arrived}

    facts, results = watched(function, [{"rows": placed(rows + call)} for call in range(CALLS)], skew)
    told = facts["races"] or facts["left_over"] or facts["raised"]
    assert bool(told) == (mistake is not None), f"{told}"
    if mistake is None:
        tails = rows.reshape(HEADS, RANKS, ROWS, DIM)[:, [0, 0, 1], -8:].reshape(HEADS, RANKS * 8, DIM)
        assert len(results) == 2 * CALLS, "every call in both modes"
        for name, arrived in results.items():
            np.testing.assert_array_equal(arrived, tails + int(name.split()[2][0]), err_msg=name)
