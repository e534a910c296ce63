"""A kernel that sends rows to another rank computes what it did, and the rows arrive; the halo strategy on top of it
gives the very bits that `ppermute` gives. Interpreted on simulated devices, copies carried out early and late.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import impl
from conformance.races.program import CALLS, watched
from conformance.races.skew import Skew
from impl.kernels import pallas_fetch
from impl.kernels.pallas_fetch import Cargo, Route, call_with_cargo
from impl.kernels.pallas_fit import Blocks

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


def layer_step(transfer, *, window=7, layout="contiguous", cap=None):
    """out, lse and gradients of a layer as one function of its arrays."""
    config = impl.AttentionConfig(
        local_context_parallel_strategy="halo",
        local_kernel="pallas_halo",
        halo_transfer=transfer,
        window=(window, 0),
        attn_logits_soft_cap=cap,
        context_parallel_load_balance=layout != "contiguous",
    )

    def step(query, key, value, dout, segment_ids=None, sinks=None):
        def attention(query, key, value, sinks):
            return impl.attention(
                query,
                key,
                value,
                mesh=mesh(),
                config=config,
                attention_type=impl.AttentionType.LOCAL_SLIDING,
                segment_ids=segment_ids,
                sinks=sinks,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(attention, query, key, value, sinks)
        return {"out": out, "lse": lse, "gradients": vjp((dout, jnp.cos(lse)))}

    return step


def layer_arrays(*, seq_len=96, num_kv_heads=1, dtype=jnp.float32, everything=False):
    random = np.random.default_rng(1)
    heads_and_dims = ((2, 8), (num_kv_heads, 8), (num_kv_heads, 4), (2, 4))
    arrays = [placed(jnp.asarray(random.standard_normal((1, seq_len, *shape)), dtype)) for shape in heads_and_dims]
    if everything:
        arrays.append(placed(jnp.asarray(np.repeat([[4, 1, 4, 0]], seq_len // 4, axis=1), jnp.int32)))
        arrays.append(placed(jnp.asarray(random.standard_normal(2), jnp.float32), None))
    return arrays


@pytest.mark.parametrize(
    ("mode", "fields", "arrays"),
    [
        ("on_wait", {}, {}),
        pytest.param("eager", {"window": 10}, {}, marks=pytest.mark.slow),
        pytest.param("eager", {"cap": 2.0}, {"everything": True}, marks=pytest.mark.slow),
        pytest.param("on_wait", {"window": 15}, {"dtype": jnp.bfloat16, "num_kv_heads": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "rows off the eights", "ids, sinks and cap", "bfloat16"],
)
def test_the_halo_by_remote_copy_gives_the_bits_that_a_permute_gives(mode, fields, arrays, monkeypatch) -> None:
    monkeypatch.setattr(Blocks, "fitting", lambda *_: Blocks(8, 8))
    given = layer_arrays(**arrays)
    by_copy, by_permute = (
        compiled(layer_step(transfer, **fields), *given, mode=mode) for transfer in ("remote_copy", "permute")
    )
    jax.tree.map(lambda one, two: np.testing.assert_array_equal(one, two), by_copy, by_permute)


@pytest.mark.parametrize(
    ("fields", "arrays", "travels"),
    [
        ({}, {}, "remote_copy"),
        ({"window": 0}, {}, "nothing"),
        ({"window": 40}, {}, "permute"),
        ({"window": 20}, {}, "permute"),
        ({}, {"seq_len": 60}, "permute"),
        ({"layout": "dual_chunk_swap"}, {"seq_len": 192}, "permute"),
    ],
    ids=["one hop", "no halo", "two hops", "no interior to hide behind", "chunk off the eights", "two chunks"],
)
def test_rows_travel_by_permute_where_a_remote_copy_is_not_for_them(fields, arrays, travels) -> None:
    program = str(jax.jit(layer_step("remote_copy", **fields)).trace(*layer_arrays(**arrays)).jaxpr)
    expected = {"remote_copy": (True, False), "permute": (False, True), "nothing": (False, False)}[travels]
    assert ("get_barrier_semaphore" in program, "ppermute" in program) == expected, f"expected {travels}"


def test_a_transfer_that_the_kernel_does_not_do_is_refused() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"halo_transfer": "remote_copy", "local_kernel": "xla"}, "local_kernel 'xla'"),
        ({"halo_transfer": "telepathy"}, "halo_transfer must be one of 'permute', 'remote_copy', got 'telepathy'"),
    )
    for fields, rule in refused:
        config = impl.AttentionConfig(local_context_parallel_strategy="halo", sliding_window_size=8, **fields)
        with pytest.raises(ValueError, match=rule):
            impl.attention(
                *layer_arrays()[:3], mesh=mesh(), config=config, attention_type=impl.AttentionType.LOCAL_SLIDING
            )
