"""Whatever a user may get wrong is refused with a ValueError that names the argument, its value and the rule."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import impl
from impl import AttentionConfig, AttentionType


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def call(*, mesh_shape=(2, 4, 2), mesh=None, attention_type=AttentionType.LOCAL_SLIDING, config=None, **arguments):
    """Traces (never runs) a call that is right but for `arguments` and the fields of `config`."""
    if mesh is None:
        mesh = jax.make_mesh(mesh_shape, ("data", "context", "tensor"))
    operands = {"query": shape(2, 32, 4, 8), "key": shape(2, 32, 2, 8), "value": shape(2, 32, 2, 8)} | arguments
    if not isinstance(config, AttentionConfig) and config is not None:
        config = AttentionConfig(**({"sliding_window_size": 4} | config))
    config = AttentionConfig(sliding_window_size=4) if config is None else config
    static = {name: value for name, value in operands.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    traced = {name: value for name, value in operands.items() if name not in static}

    def attention(traced):
        return impl.attention(**traced, **static, mesh=mesh, config=config, attention_type=attention_type)

    return jax.eval_shape(attention, traced)


def test_the_call_that_the_other_tests_break_is_right() -> None:
    mesh = jax.make_mesh((2, 4, 2), ("data", "context", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    assert call(mesh=mesh).shape == (2, 32, 4, 8), "the unbroken call must pass"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sliding_window_size": None}, "sliding_window_size must be set for a LOCAL_SLIDING layer, got None"),
        ({"sliding_window_size": 0}, "sliding_window_size must be >= 1, got 0"),
        ({"sliding_window_size": -4}, "sliding_window_size must be >= 1, got -4"),
        ({"sliding_window_size": True}, "sliding_window_size must be an int, got True"),
        ({"sliding_window_size": 4.0}, "sliding_window_size must be an int, got 4.0"),
        ({"sliding_window_size": "4"}, "sliding_window_size must be an int, got '4'"),
        ({"window": 4}, "window must be a tuple (left, right), got 4"),
        ({"window": (1, 2, 3)}, "window must be a tuple (left, right), got (1, 2, 3)"),
        ({"window": (-1, 0)}, "window must hold None or ints >= 0, got left = -1"),
        ({"window": (1, False)}, "window must hold None or ints >= 0, got right = False"),
        ({"context_parallel_strategy": "halo"}, "context_parallel_strategy must not be 'halo'"),
        ({"context_parallel_strategy": "all_gahter"}, "got 'all_gahter'; did you mean 'all_gather'?"),
        ({"context_parallel_strategy": ""}, "context_parallel_strategy must be one of"),
        ({"context_parallel_strategy": None}, "context_parallel_strategy must be one of"),
        ({"context_parallel_strategy": ["halo"]}, "context_parallel_strategy must be one of"),
        ({"local_context_parallel_strategy": "hallo"}, "got 'hallo'; did you mean 'halo'?"),
        ({"local_context_parallel_strategy": None}, "local_context_parallel_strategy must be one of"),
        ({"local_kernel": "flash"}, "local_kernel must be one of"),
        ({"context_parallel_load_balance": 1}, "context_parallel_load_balance must be a bool, got 1"),
        ({"context_parallel_reorder_strategy": "stripd"}, "got 'stripd'; did you mean 'striped'?"),
        ({"attn_logits_soft_cap": 0.0}, "attn_logits_soft_cap must be None or a finite number > 0, got 0.0"),
        ({"attn_logits_soft_cap": "50"}, "attn_logits_soft_cap must be None or a finite number > 0, got '50'"),
        ({"attn_logits_soft_cap": float("nan")}, "attn_logits_soft_cap must be None or a finite number > 0, got nan"),
        ({"scale": float("inf")}, "scale must be None or a finite number, got inf"),
        ({"scale": "1"}, "scale must be None or a finite number, got '1'"),
        ({"context_axis": "sequence"}, "context_axis must be an axis of the mesh, got 'sequence'"),
        ({"tensor_axis": None}, "tensor_axis must be the name of a mesh axis, got None"),
        (
            {"data_axis": "context"},
            "context_axis, data_axis, tensor_axis, ulysses_axis must differ",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_configuration_is_refused(config, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(config=config)


def test_halo_refuses_striped_because_it_has_no_chunks() -> None:
    config = {
        "local_context_parallel_strategy": "halo",
        "context_parallel_load_balance": True,
        "context_parallel_reorder_strategy": "striped",
    }
    with pytest.raises(ValueError, match=r"'halo' needs a layout with chunks, got .* 'striped'"):
        call(config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": shape(2, 32, 4)}, "query must have shape [batch, seq_len, num_query_heads, head_dim]"),
        ({"query": shape(2, 0, 4, 8)}, "without an empty axis, got (2, 0, 4, 8)"),
        ({"query": [[1.0]]}, "query must be an array, got [[1.0]]"),
        ({"key": None}, "key must be an array, got None"),
        ({"query": shape(2, 32, 4, 8, dtype=jnp.int32)}, "query must have dtype bfloat16, float16, float32, float64"),
        ({"key": shape(2, 32, 2, 8, dtype=jnp.bfloat16)}, "key must have the dtype of query, float32, got bfloat16"),
        ({"key": shape(2, 16, 2, 8)}, "key must have batch and seq_len of query, (2, 32), got (2, 16)"),
        ({"key": shape(2, 32, 2, 16)}, "key must have head_dim of query, 8, got 16"),
        ({"value": shape(2, 32, 4, 8)}, "value must have batch, seq_len and num_kv_heads of key"),
        (
            {"key": shape(2, 32, 3, 8), "value": shape(2, 32, 3, 8)},
            "num_query_heads must be a multiple of num_kv_heads 3, got 4",
        ),
        (
            {"query": shape(2, 32, 3, 8), "key": shape(2, 32, 1, 8), "value": shape(2, 32, 1, 8)},
            "num_query_heads must be a multiple of the tensor axis's size 2, got 3",
        ),
        (
            {"query": shape(3, 32, 4, 8), "key": shape(3, 32, 2, 8), "value": shape(3, 32, 2, 8)},
            "batch must be a multiple of the data axis's size 2, got 3",
        ),
        (
            {"query": shape(2, 30, 4, 8), "key": shape(2, 30, 2, 8), "value": shape(2, 30, 2, 8)},
            "seq_len must be a multiple of 4 (contiguous on 4 ranks), got 30",
        ),
        ({"segment_ids": shape(2, 16, dtype=jnp.int32)}, "segment_ids must have shape [batch, seq_len] = (2, 32)"),
        ({"segment_ids": shape(32, dtype=jnp.int32)}, "segment_ids must have shape [batch, seq_len] = (2, 32)"),
        ({"segment_ids": shape(2, 32)}, "segment_ids must have dtype int32, got float32"),
        ({"segment_ids": [0] * 32}, "segment_ids must be an array"),
        ({"padding_segment_id": 0}, "padding_segment_id needs segment_ids, got 0 without them"),
        ({"padding_segment_id": 0.5}, "padding_segment_id must be None or an int, got 0.5"),
        ({"padding_segment_id": 2**31}, "padding_segment_id must fit int32, got 2147483648"),
        ({"sinks": shape(2)}, "sinks must have shape [num_query_heads] = (4,), got (2,)"),
        ({"sinks": shape(4, dtype=jnp.bfloat16)}, "sinks must have dtype float32"),
        ({"attention_type": "local_sliding"}, "attention_type must be an AttentionType, got 'local_sliding'"),
        ({"mesh": "cpu:8"}, "mesh must be a jax.sharding.Mesh, got 'cpu:8'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**arguments)


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("config must be an AttentionConfig, got {}")):
        impl.attention(
            *[jnp.zeros((1, 8, 1, 8))] * 3, mesh=jax.make_mesh((1,), ("context",)), config={}, attention_type=None
        )


def test_dual_chunk_swap_needs_two_chunks_a_rank() -> None:
    arguments = {"query": shape(2, 36, 4, 8), "key": shape(2, 36, 2, 8), "value": shape(2, 36, 2, 8)}
    with pytest.raises(ValueError, match=re.escape("seq_len must be a multiple of 8 (dual_chunk_swap on 4 ranks)")):
        call(config={"context_parallel_load_balance": True}, **arguments)


def test_a_mesh_without_the_context_axis_is_refused() -> None:
    mesh = Mesh(jax.devices()[:2], ("model",))
    with pytest.raises(ValueError, match=re.escape("context_axis must be an axis of the mesh, got 'context'")):
        call(mesh=mesh)


def test_the_local_strategy_never_applies_to_a_global_layer() -> None:
    config = AttentionConfig(local_context_parallel_strategy="halo", sliding_window_size=None)
    resolved = impl.config.resolve(config, AttentionType.GLOBAL)
    assert (resolved.strategy, resolved.window) == ("all_gather", (None, 0)), "GLOBAL ignores everything local"


def test_an_empty_local_strategy_inherits_the_global_one() -> None:
    config = AttentionConfig(context_parallel_strategy="all_gather", sliding_window_size=4)
    resolved = impl.config.resolve(config, AttentionType.LOCAL_SLIDING)
    assert (resolved.strategy, resolved.window) == ("all_gather", (3, 0)), '"" inherits'


@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({}, jnp.float64, "splash attention accumulates in float32, got float64 inputs"),
        ({}, jnp.float16, "splash attention runs bfloat16 and float32 on TPU, got float16 inputs"),
        ({"context_parallel_strategy": "ring", "context_parallel_load_balance": True}, jnp.float32, "a ring's keys"),
    ],
)
def test_splash_declines_what_it_cannot_run(fields, dtype, message) -> None:
    config = {"local_kernel": "splash", "context_parallel_reorder_strategy": "striped", **fields}
    operands = {name: shape(2, 32, 4, 8, dtype=dtype) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=re.escape("local_kernel 'splash' cannot run this layer: ") + ".*" + message):
        call(config=config, **operands)


def test_usp_as_local_strategy_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="local_context_parallel_strategy must not be 'usp' unless"):
        call(config={"local_context_parallel_strategy": "usp"})


def test_usp_needs_its_axis() -> None:
    with pytest.raises(ValueError, match="ulysses_axis must be an axis of the mesh for 'usp', got 'ulysses'"):
        call(config={"context_parallel_strategy": "usp"})


def test_ulysses_needs_query_heads_for_every_rank() -> None:
    with pytest.raises(ValueError, match="num_query_heads must be a multiple of 8, the ranks that context"):
        call(config={"context_parallel_strategy": "ulysses"})
