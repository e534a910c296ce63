"""The local kernels agree: splash, interpreted, with xla, which the strategies' tests hold to the oracle exactly.

Called as a strategy calls them: rows outside the sequence, offsets traced and static, rows without keys, odd lengths.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from impl.kernels import query_blocks, splash, xla
from impl.kernels.interface import KernelConfig, KernelOperands, RowCotangents

CALLS = {
    "halo of a first chunk": {"queries": 130, "keys": 200, "first_query": 0, "key_offset": -70, "window": (70, 0)},
    "halo of a middle chunk": {"queries": 96, "keys": 130, "first_query": 96, "key_offset": -31, "window": (31, 3)},
    "keys at a traced offset": {
        "queries": 40,
        "keys": 300,
        "first_query": 200,
        "key_offset": None,
        "window": (None, 0),
    },
    "keys that nobody sees": {"queries": 40, "keys": 40, "first_query": 200, "key_offset": None, "window": (9, 0)},
}


def make_call(
    queries, keys, first_query, window, key_offset=None, *, dtype, sinks
) -> tuple[KernelOperands, KernelConfig]:
    random = np.random.default_rng(0)
    first_key = 0 if key_offset is None else first_query + key_offset
    key_positions = first_key + np.arange(keys)
    operands = KernelOperands(
        jnp.asarray(random.standard_normal((1, queries, 2, 16)), dtype),
        jnp.asarray(random.standard_normal((1, keys, 1, 16)), dtype),
        jnp.asarray(random.standard_normal((1, keys, 1, 8)), dtype),
        jnp.asarray(first_query + np.arange(queries), jnp.int32),
        jnp.asarray(np.where(key_positions < 0, -1, key_positions), jnp.int32),
        jnp.asarray(random.integers(0, 3, (1, queries)), jnp.int32),
        jnp.asarray(random.integers(0, 3, (1, keys)), jnp.int32),
        jnp.asarray(random.standard_normal(2), jnp.float32) if sinks else None,
    )
    return operands, KernelConfig(window, 0.25, 5.0, padding_segment_id=2, key_offset=key_offset, interpret=True)


def forward(kernel, operands, config):
    return kernel.finish(kernel.launch(operands, config), operands, config)


def backward(kernel, operands, cotangents, config):
    return kernel.finish_backward(kernel.launch_backward(operands, cotangents, config), operands, cotangents, config)


@pytest.mark.parametrize(
    ("name", "dtype", "sinks"),
    [
        ("halo of a first chunk", "float32", False),
        ("halo of a middle chunk", "bfloat16", True),
        ("keys at a traced offset", "float32", True),
        ("keys that nobody sees", "float32", False),
    ],
)
def test_splash_agrees_with_xla(name, dtype, sinks) -> None:
    operands, config = make_call(**CALLS[name], dtype=dtype, sinks=sinks)
    random = np.random.default_rng(1)
    dout = jnp.asarray(random.standard_normal((*operands.query.shape[:3], 8)), dtype)
    delta = jnp.asarray(random.standard_normal(operands.query.shape[:3]), jnp.float32)

    def both(operands):
        _, lse = xla.launch(operands, config)
        cotangents = RowCotangents(dout, lse, delta)
        return {
            kernel.__name__: (*forward(kernel, operands, config), *backward(kernel, operands, cotangents, config))
            for kernel in (xla, splash)
        }

    program = jax.jit(both).lower(operands).compile(compiler_options={"xla_backend_optimization_level": 0})
    expected, computed = program(operands).values()
    # float32 accumulates some hundred terms; bfloat16 splash rounds p, dlogits and its results besides.
    allowed = 2e-2 if dtype == "bfloat16" else 2e-6
    for tensor, one, two in zip(("out", "lse", "dquery", "dkey", "dvalue", "dsinks"), expected, computed, strict=True):
        assert (one is None) == (two is None), f"{tensor} must exist in both or neither"
        if one is not None:
            assert np.array_equal(np.isneginf(one), np.isneginf(two)), f"{tensor}: rows without keys differ"
            one, two = (np.where(np.isneginf(array), 0, array) for array in (one, two))
            assert np.abs(one - two).max() <= allowed * max(1, np.abs(one).max()), f"{tensor} differs"


@pytest.mark.parametrize(
    "ids",
    [[0, 0, 0], [5, 6, 7], [2**31 - 1, -(2**31)], [2**31 - 1, -(2**31), -(2**31) + 1], [-1, 1, -1], [2**31 - 1]],
)
def test_an_unused_id_occurs_nowhere(ids) -> None:
    unused = int(splash._unused_id(jnp.asarray([ids], jnp.int32)))
    assert unused not in ids, "an id that hides a row must not be anybody's own"


@pytest.mark.parametrize(
    "call",
    [
        {"queries": 300, "keys": 370, "first_query": 300, "key_offset": -70, "window": (70, 0)},
        {"queries": 520, "keys": 530, "first_query": 4, "key_offset": -4, "window": (9, 6)},
        {"queries": 260, "keys": 270, "first_query": 0, "key_offset": -10, "window": (10, 0)},
        {"queries": 300, "keys": 100, "first_query": 200, "window": (None, 0)},
    ],
    ids=["halo", "both sides, run cut short", "first chunk", "traced offset"],
)
def test_walking_in_blocks_of_queries_changes_nothing(call, monkeypatch) -> None:
    operands, config = make_call(**call, dtype="float64", sinks=True)
    random = np.random.default_rng(1)
    dout, delta = (jnp.asarray(random.standard_normal((1, call["queries"], 2, *size))) for size in ((8,), ()))

    def run(operands):
        out, lse = forward(xla, operands, config)
        return out, lse, *backward(xla, operands, RowCotangents(dout, lse, delta), config)

    blocked = jax.jit(run)(operands)
    monkeypatch.setattr(query_blocks, "BLOCK", 1000)
    whole = jax.jit(lambda operands: run(operands))(operands)
    for tensor, one, two in zip(("out", "lse", "dquery", "dkey", "dvalue", "dsinks"), blocked, whole, strict=True):
        assert np.array_equal(np.isneginf(one), np.isneginf(two)), f"{tensor}: rows without keys differ"
        one, two = (np.where(np.isneginf(array), 0, array) for array in (one, two))
        assert np.abs(one - two).max() <= 1e-12, f"{tensor} differs"


def test_temporary_memory_follows_the_window_not_the_square_of_the_rows() -> None:
    def temporary_bytes(rows: int) -> int:
        shape = {"queries": rows, "keys": rows + 64, "first_query": 0, "key_offset": -64, "window": (64, 0)}
        operands, config = make_call(**shape, dtype="float32", sinks=False)
        compiled = jax.jit(lambda operands: forward(xla, operands, config)).lower(operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 3 * temporary_bytes(2048), "twice the rows may take twice the memory, not four times"


@pytest.mark.parametrize("kernel", [xla, splash], ids=["xla", "splash"])
def test_a_call_with_more_keys_traces_to_the_same_program(kernel, traced_equations) -> None:
    """Tracing builds no mask of the sequence's size: only shapes differ between a short and a long one."""

    def equations(rows: int) -> int:
        shape = {"queries": rows, "keys": rows + 512, "first_query": 0, "key_offset": -512, "window": (512, 0)}
        _, config = make_call(**(shape | {"queries": 8, "keys": 8}), dtype="bfloat16", sinks=True)
        operands = KernelOperands(
            jax.ShapeDtypeStruct((1, rows, 2, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, rows + 512, 1, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((1, rows + 512, 1, 8), jnp.bfloat16),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows + 512,), jnp.int32),
            sinks=jax.ShapeDtypeStruct((2,), jnp.float32),
        )
        return len(traced_equations(lambda call: forward(kernel, call, config), operands))

    assert equations(2**20) == equations(2**14), "nothing in the traced program may grow with the sequence"
