"""The Pallas halo kernels, interpreted, agree with xla's, which the strategies' tests hold to the oracle exactly.

Small blocks, so that a chunk has several of them: a block's, a tile's and the window's edges fall in every way.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from impl.kernels import pallas_halo, xla
from impl.kernels.interface import KernelConfig, KernelOperands, RowCotangents
from impl.kernels.pallas_fit import Blocks
from impl.kernels.pallas_halo_backward import band_backward
from impl.kernels.pallas_halo_forward import band_forward

SMALL = Blocks(16, 8)
BATCH, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 2, 16, 8

CALLS = {
    "window of whole tiles": {"rows": 64, "left": 15, "first_position": 64},
    "window of whole blocks": {"rows": 64, "left": 31, "first_position": 192},
    "ragged window": {"rows": 64, "left": 20, "first_position": 64},
    "window shorter than a tile": {"rows": 48, "left": 3, "first_position": 48},
    "one key": {"rows": 32, "left": 0, "first_position": 64},
    "first chunk": {"rows": 64, "left": 23, "first_position": 0},
    "sequence begins inside the halo": {"rows": 64, "left": 40, "first_position": 24},
    "rows that fill no block": {"rows": 41, "left": 23, "first_position": 41},
    "halo longer than the chunk": {"rows": 16, "left": 47, "first_position": 48},
}
QUICK = {("rows that fill no block", False), ("first chunk", True)}
"""(call, whether it has ids, sinks and a soft cap): the others are slow to compile."""


def make_chunk(rows, left, first_position, *, ids, sinks, group=2):
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    return pallas_halo.ChunkRows(
        normal(BATCH, rows, KV_HEADS * group, HEAD_DIM),
        normal(BATCH, rows, KV_HEADS, HEAD_DIM),
        normal(BATCH, rows, KV_HEADS, VALUE_DIM),
        normal(BATCH, left, KV_HEADS, HEAD_DIM),
        normal(BATCH, left, KV_HEADS, VALUE_DIM),
        jnp.int32(first_position),
        jnp.asarray(random.integers(0, 3, (BATCH, rows)), jnp.int32) if ids else None,
        jnp.asarray(random.integers(0, 3, (BATCH, left)), jnp.int32) if ids else None,
        jnp.asarray(random.standard_normal(KV_HEADS * group), jnp.float32) if sinks else None,
    )


def as_one_run(chunk) -> KernelOperands:
    """The same call for the xla kernel: halo and own rows side by side."""
    rows, halo_rows = chunk.query.shape[1], chunk.halo_key.shape[1]
    positions = chunk.first_position + jnp.arange(-halo_rows, rows, dtype=jnp.int32)
    ids = chunk.segment_ids
    return KernelOperands(
        chunk.query,
        jnp.concatenate([chunk.halo_key, chunk.key], axis=1),
        jnp.concatenate([chunk.halo_value, chunk.value], axis=1),
        positions[halo_rows:],
        jnp.where(positions < 0, -1, positions),
        ids,
        None if ids is None else jnp.concatenate([chunk.halo_segment_ids, ids], axis=1),
        chunk.sinks,
    )


def computed_by_pallas(chunk, config, blocks=SMALL):
    """out, lse and the gradients by the two calls of a chunk, or one where it has no interior."""
    boundary, interior = pallas_halo.bands(chunk, config.window[0], blocks)
    result = None
    if interior is not None:
        result = band_forward(pallas_halo.band_operands(chunk, interior), interior, config)
    result = band_forward(pallas_halo.band_operands(chunk, boundary), boundary, config, result)
    return pallas_halo.forward_rows(result, chunk)


def gradients_by_pallas(chunk, rows, config, blocks=SMALL):
    boundary, interior = pallas_halo.bands(chunk, config.window[0], blocks)
    cotangents = pallas_halo.band_cotangents(rows, boundary)
    dtype = chunk.key.dtype
    result = band_backward(pallas_halo.band_operands(chunk, boundary), cotangents, boundary, config, dtype)
    if interior is not None:
        operands = pallas_halo.band_operands(chunk, interior)
        inner = band_backward(operands, cotangents, interior, config, dtype, result)
        result = inner._replace(dhalo_key=result.dhalo_key, dhalo_value=result.dhalo_value)
    own = [whole(gradient) for gradient in pallas_halo.own_key_gradients(result, chunk, config)]
    halo = pallas_halo.halo_gradients(result, chunk, config)
    keys = (jnp.concatenate(parts, axis=1) for parts in zip(halo, own, strict=True))
    return pallas_halo.query_gradient(result, chunk), *keys


def whole(gradient: pallas_halo.OwnKeyGradient):
    if gradient.final is None:
        return gradient.tail
    before = gradient.final.shape[1] - gradient.tail.shape[1]
    return jnp.concatenate([gradient.final[:, :before], gradient.tail], axis=1)


def run(function, *arguments):
    """Compiled without optimisation: in so small a program the compiler takes nearly all of the time."""
    return jax.jit(function).lower(*arguments).compile({"xla_backend_optimization_level": "0"})(*arguments)


def close(one, two, allowed, tensor) -> None:
    one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
    assert np.array_equal(np.isneginf(one), np.isneginf(two)), f"{tensor}: rows without keys differ"
    one, two = (np.where(np.isneginf(array), 0, array) for array in (one, two))
    assert np.abs(one - two).max() <= allowed * max(1, np.abs(one).max()), f"{tensor} differs"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        pytest.param(name, ids, marks=() if (name, ids) in QUICK else pytest.mark.slow)
        for name in CALLS
        for ids in (False, True)
    ],
)
def test_the_kernels_agree_with_xla(name, ids) -> None:
    call = CALLS[name]
    chunk = make_chunk(**call, ids=ids, sinks=ids)
    config = KernelConfig((call["left"], 0), 0.25, 5.0 if ids else None, 2 if ids else None, None, interpret=True)
    random = np.random.default_rng(1)
    dout = jnp.asarray(random.standard_normal((*chunk.query.shape[:3], VALUE_DIM)), jnp.float32)
    dlse = jnp.asarray(random.standard_normal(chunk.query.shape[:3]), jnp.float32)

    def both(chunk):
        one_run = as_one_run(chunk)
        out, lse = xla.launch(one_run, config)
        rows = RowCotangents(dout, lse, jnp.sum(dout * out, axis=-1) - dlse)
        expected = (out, lse, *xla.launch_backward(one_run, rows, config)[:3])
        # Half of the layers leave dout · out to the kernel.
        given = rows if ids else RowCotangents(dout, lse, -dlse, out)
        return expected, (*computed_by_pallas(chunk, config), *gradients_by_pallas(chunk, given, config))

    for tensor, one, two in zip(("out", "lse", "dquery", "dkey", "dvalue"), *run(both, chunk), strict=True):
        close(one, two, 2e-6, tensor)


def test_a_hidden_key_never_wins_over_visible_ones_however_low_their_logits_are() -> None:
    chunk = make_chunk(32, 3, 64, ids=False, sinks=False, group=1)
    # Every logit of query row 9 is far below -1e30; of the keys that it sees, rows 6 to 9, that of row 7 is highest.
    low = chunk.query.at[:, 9].set(-1e32)
    key = jnp.abs(chunk.key).at[:, 7].multiply(0.1)
    chunk = chunk._replace(query=low, key=key, halo_key=jnp.abs(chunk.halo_key))
    config = KernelConfig((3, 0), 0.25, None, None, None, interpret=True)
    dout = jnp.zeros((*chunk.query.shape[:3], VALUE_DIM), jnp.float32).at[:, 9].set(1)

    def computed(chunk):
        out, lse = computed_by_pallas(chunk, config)
        return out, gradients_by_pallas(chunk, RowCotangents(dout, lse, jnp.sum(dout * out, axis=-1)), config)

    out, (_, dkey, dvalue) = run(computed, chunk)
    assert np.array_equal(out[:, 9], chunk.value[:, 7]), "all of its weight is on the highest of the visible ones"
    unseen = np.ones(3 + 32, bool)
    unseen[3 + 6 : 3 + 10] = False  # behind the halo's three rows
    assert not np.any(dkey[:, unseen]), "its cotangents reach no key that it does not see"
    assert not np.any(dvalue[:, unseen]), "and no value"


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": "contiguous", "seq_len": 128, "window": (5, 0)},
        pytest.param(
            {
                "layout": "dual_chunk_swap",
                "seq_len": 128,
                "window": (9, 0),
                "tensor": 2,
                "num_kv_heads": 1,
                "documents": (50, 3, 40, 35),
                "padding": True,
                "sinks": True,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"layout": "dual_chunk_swap", "seq_len": 64, "window": (40, 0), "attn_logits_soft_cap": 2.0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"tensor": 4, "num_query_heads": 12, "num_kv_heads": 3, "context": 2, "window": (6, 0)},
            marks=pytest.mark.slow,
        ),
        pytest.param({"dtype": "bfloat16", "seq_len": 128, "window": (5, 0)}, marks=pytest.mark.slow),
    ],
    ids=["interior and boundary", "many features", "several hops", "copied kv heads", "bfloat16"],
)
def test_the_strategy_stays_within_its_allowance(fields, make_case, run_case, monkeypatch) -> None:
    monkeypatch.setattr(Blocks, "fitting", lambda *_: Blocks(8, 8))
    case = make_case(strategy="halo", local_kernel="pallas_halo", **{"dtype": "float32", "batch": 1, **fields})
    data = case.data_of()
    precision = oracle.budget.Precision(dtype=case.dtype, rounded_probabilities=case.dtype == "bfloat16")
    allowances = oracle.budget.allowances(
        data["query"],
        data["key"],
        data["value"],
        dout=data["dout"],
        dlse=data["dlse"],
        window=case.window,
        segment_ids=data["segment_ids"],
        padding_segment_id=case.padding_segment_id,
        attn_logits_soft_cap=case.attn_logits_soft_cap,
        sinks=data["sinks"],
        precision=precision,
        structured_values=False,
    )
    for name, (computed, expected) in run_case(case).items():
        same = np.isneginf(computed) & np.isneginf(expected)
        error = np.where(same, 0, np.abs(np.where(same, 0, computed) - np.where(same, 0, expected)))
        assert np.all(error <= getattr(allowances, name)), f"{name} strays beyond its allowance"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": jnp.dtype(jnp.float64)}, "float64"),
        ({"dtype": jnp.dtype(jnp.float16)}, "float16"),
        ({"strategy": "ring"}, "'ring'"),
        ({"window": (5, 1)}, r"\(5, 1\)"),
        ({"window": (None, 0)}, r"\(None, 0\)"),
    ],
)
def test_what_the_kernels_decline_has_a_reason(fields, reason) -> None:
    layer = {"dtype": jnp.dtype(jnp.bfloat16), "strategy": "halo", "window": (1023, 0)}
    assert pallas_halo.unsupported(**layer) is None, "a window and a halo"
    declined = pallas_halo.unsupported(**{**layer, **fields})
    assert declined is not None, "these kernels are wrong there"
    assert re.search(reason, declined), f"the reason must name what is declined, got {declined!r}"
