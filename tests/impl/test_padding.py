"""A sequence of any length, padded, attended under halo and unpadded, is the oracle's attention of that sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import impl
import oracle
from impl import padding


def test_a_padded_sequence_attends_as_if_it_were_not() -> None:
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((1, 21, 2, 4)) for _ in range(3))
    mesh = jax.make_mesh((3,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    config = impl.AttentionConfig(
        local_context_parallel_strategy="halo", context_parallel_load_balance=True, sliding_window_size=5
    )
    length = padding.padded_length(21, layout="dual_chunk_swap", context_parallelism=3)

    @jax.jit
    def attend(*arrays):
        layout = {"axis": 1, "layout": "dual_chunk_swap", "context_parallelism": 3}
        inputs = [impl.reorder(padding.pad_sequence(array, length), **layout) for array in arrays]
        ids = impl.reorder(padding.pad_segment_ids(jnp.zeros((1, 21), jnp.int32), length, -1), **layout)
        out = impl.attention(
            *inputs,
            mesh=mesh,
            config=config,
            attention_type=impl.AttentionType.LOCAL_SLIDING,
            segment_ids=ids,
            padding_segment_id=-1,
        )
        return padding.unpad_sequence(impl.restore(out, **layout), 21)

    expected = oracle.attention(query, key, value, window=(4, 0)).out
    assert np.abs(attend(query, key, value) - expected).max() <= 1e-12, "padding must not change a token"


@pytest.mark.parametrize(
    ("seq_len", "layout", "ulysses", "expected"),
    [
        (21, "contiguous", 1, 24),
        (24, "contiguous", 1, 24),
        (1, "dual_chunk_swap", 1, 8),
        (17, "dual_chunk_swap", 2, 32),
    ],
)
def test_the_padded_length_is_the_next_that_divides(seq_len, layout, ulysses, expected) -> None:
    length = padding.padded_length(seq_len, layout=layout, context_parallelism=4, ulysses_parallelism=ulysses)
    assert length == expected, "a multiple of the chunks, as short as possible"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: padding.padded_length(0, layout="striped", context_parallelism=2), "seq_len must be >= 1, got 0"),
        (lambda: padding.padded_length(8, layout="zigzag", context_parallelism=2), "layout must be one of"),
        (lambda: padding.pad_sequence(jnp.zeros((1, 9, 2)), 8), "length must be at least the array's own 9, got 8"),
        (lambda: padding.pad_segment_ids(jnp.zeros((1, 9), jnp.int32), 8, 0), "length must be at least"),
        (lambda: padding.unpad_sequence(jnp.zeros((1, 8)), 9), "seq_len must be at most the array's 8, got 9"),
    ],
)
def test_nothing_is_cut_off_in_silence(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
