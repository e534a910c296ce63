"""The halo by remote copy gives the very bits that `ppermute` gives, in both layouts; where it is not for a layer, that
is refused, or goes by permute if that was asked for. Interpreted on simulated devices, copies early and late.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import impl
from impl.kernels.pallas_fit import Blocks

RANKS = 3


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("context",))


def compiled(function, *arguments, mode: Any):
    """Results, under TPU interpretation, which knows other devices; nearly all of the time is the compiler's."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode)):
        lowered = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    return lowered.compile({"xla_backend_optimization_level": "0"})(*arguments)


def placed(array, *axes):
    """On the mesh; without axes, by rows."""
    spec = PartitionSpec(*(axes or (None, "context")))
    return jax.device_put(array, NamedSharding(mesh(), spec))


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


TWO_CHUNKS = {"layout": "dual_chunk_swap"}


@pytest.mark.parametrize(
    ("mode", "fields", "arrays"),
    [
        pytest.param("on_wait", {}, {}, marks=pytest.mark.slow),
        pytest.param("eager", {"window": 10}, {}, marks=pytest.mark.slow),
        pytest.param("eager", {"cap": 2.0}, {"everything": True}, marks=pytest.mark.slow),
        pytest.param("on_wait", {"window": 15}, {"dtype": jnp.bfloat16, "num_kv_heads": 2}, marks=pytest.mark.slow),
        ("eager", TWO_CHUNKS, {"seq_len": 192}),
        pytest.param("on_wait", TWO_CHUNKS | {"window": 10}, {"seq_len": 192}, marks=pytest.mark.slow),
        pytest.param("eager", TWO_CHUNKS | {"cap": 2.0}, {"seq_len": 192, "everything": True}, marks=pytest.mark.slow),
        pytest.param(
            "on_wait",
            TWO_CHUNKS | {"window": 15},
            {"seq_len": 192, "dtype": jnp.bfloat16, "num_kv_heads": 2},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        *("plain", "rows off the eights", "ids, sinks and cap", "bfloat16"),
        *("two chunks", "two chunks, rows off the eights", "two chunks, ids, sinks and cap", "two chunks, bfloat16"),
    ],
)
def test_the_halo_by_remote_copy_gives_the_bits_that_a_permute_gives(mode, fields, arrays, monkeypatch) -> None:
    monkeypatch.setattr(Blocks, "fitting", lambda *_: Blocks(8, 8))
    given = layer_arrays(**arrays)
    by_copy, by_permute = (
        compiled(layer_step(transfer, **fields), *given, mode=mode) for transfer in ("remote_copy", "permute")
    )
    jax.tree.map(lambda one, two: np.testing.assert_array_equal(one, two), by_copy, by_permute)


def traced(transfer: str, fields: dict[str, Any], arrays: dict[str, Any]) -> str:
    return str(jax.jit(layer_step(transfer, **fields)).trace(*layer_arrays(**arrays)).jaxpr)


@pytest.mark.parametrize(
    ("fields", "arrays", "refused"),
    [
        ({}, {}, None),
        (TWO_CHUNKS, {"seq_len": 192}, None),
        ({"window": 40}, {}, "chunks of 32 rows and queries that see 40 rows before their own"),
        ({"window": 20}, {}, "chunks of 32 rows and queries that see 20 rows before their own"),
        ({}, {"seq_len": 60}, "moves 8 at a time, got chunks of 20 rows"),
    ],
    ids=["one hop", "two chunks", "two hops", "no interior", "chunk off the eights"],
)
def test_what_a_remote_copy_is_not_for_is_refused_or_goes_by_permute_on_demand(fields, arrays, refused) -> None:
    program = traced("remote_copy_or_permute", fields, arrays)
    by_copy, by_permute = "get_barrier_semaphore" in program, "ppermute" in program
    assert (by_copy, by_permute) == (refused is None, refused is not None), "one way, and which"
    if refused is None:
        assert traced("remote_copy", fields, arrays) == program, "what it can do it does when it must"
        return
    with pytest.raises(ValueError, match=rf"^halo_transfer 'remote_copy' cannot run this layer: .*{refused}"):
        traced("remote_copy", fields, arrays)


def test_a_layer_without_a_halo_sends_nothing_whatever_the_transfer() -> None:
    program = traced("remote_copy", {"window": 0}, {})
    assert "get_barrier_semaphore" not in program
    assert "ppermute" not in program


def test_a_transfer_that_the_kernel_does_not_do_is_refused() -> None:
    names = "'permute', 'remote_copy', 'remote_copy_or_permute'"
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"halo_transfer": "remote_copy", "local_kernel": "xla"}, "local_kernel 'xla'"),
        ({"halo_transfer": "remote_copy_or_permute"}, "local_kernel ''"),
        ({"halo_transfer": "telepathy"}, f"halo_transfer must be one of {names}, got 'telepathy'"),
    )
    for fields, rule in refused:
        config = impl.AttentionConfig(local_context_parallel_strategy="halo", sliding_window_size=8, **fields)
        with pytest.raises(ValueError, match=rule):
            impl.attention(
                *layer_arrays()[:3], mesh=mesh(), config=config, attention_type=impl.AttentionType.LOCAL_SLIDING
            )
