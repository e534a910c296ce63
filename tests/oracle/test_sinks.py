"""oracle/sinks.py: the dense dsinks and the budget's allowance, from a stream over the queries."""

import dataclasses
import re
import tracemalloc

import numpy as np
import pytest

from oracle.budget import Precision, answer_with_allowances
from oracle.dense import attention_vjp
from oracle.outline import Outline
from oracle.sinks import NOTHING, SinkSums, dsink_with_allowance, every_query, sink_sums

SEQ, HEADS = 140, 4
SINKS = {"sinks": np.array([0.5, -1.0, 2.0, 0.0])}
DOCUMENTS = {"segment_ids": np.stack([np.arange(SEQ) // 37 % 3, np.arange(SEQ) % 5]), "padding_segment_id": 2}
VARIANTS = {
    "window": {"window": (30, 0)},
    "one key": {"window": (0, 0)},
    "two-sided": {"window": (20, 9), "attn_logits_soft_cap": 2.0},
    "full causal": {"window": (None, 0), "scale": 0.3},
    "documents and padding": {"window": (60, 2), **DOCUMENTS},
}
PRECISIONS = [
    (Precision("bfloat16"), False),
    (Precision("bfloat16", rounded_partials=True, prescaled_query=True), True),
    (Precision("float32"), False),
    (Precision("float32", matmul_passes=1), False),
    (Precision("float64"), True),
]
ARRAYS = ("query", "key", "value", "dout", "dlse")


def outline_of(case):
    options = {name: value for name, value in case.items() if name not in ARRAYS}
    batch, seq, query_heads, head_dim = case["query"].shape
    return Outline(batch, seq, query_heads, case["key"].shape[2], head_dim, **options)


def rows_of(case):
    return lambda tensor, row, positions, heads: case[tensor][row, positions, heads]


@pytest.fixture
def case(draw):
    return lambda variant: draw(seed=4, batch=2, seq=SEQ, heads=(HEADS, 2), dims=(8, 6), **SINKS, **VARIANTS[variant])


def streamed(case, numerics, queries=None):
    """[heads] of dsinks and of their allowances."""
    outline = outline_of(case)
    sums = [
        sink_sums(rows_of(case), outline, head, queries or every_query(outline), **numerics) for head in range(HEADS)
    ]
    return np.array([dsink_with_allowance(of_head, outline, **numerics) for of_head in sums]).T


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_stream_has_the_dense_answer_and_the_budgets_allowance(case, variant):
    case = case(variant)
    dense = attention_vjp(**case).dsinks
    for precision, is_structured in PRECISIONS:
        numerics = {"precision": precision, "structured_values": is_structured}
        _, allowed = answer_with_allowances(**case, **numerics)
        found, allowances = streamed(case, numerics)
        np.testing.assert_allclose(found, dense, rtol=1e-12, atol=1e-12, err_msg=str(precision))
        np.testing.assert_allclose(allowances, allowed.dsinks, rtol=1e-9, err_msg=str(precision))


def test_structured_values_are_off_unless_asked_for(case):
    case, precision = case("window"), Precision("bfloat16")
    plain, given, structured = (
        streamed(case, {"precision": precision, **more})[1]
        for more in ({}, {"structured_values": False}, {"structured_values": True})
    )
    assert np.array_equal(plain, given), "the default is False"
    assert (structured > 1.5 * plain).all(), "and the sum of sizes is what is larger"


def test_logits_of_rounded_queries_know_of_structured_values_too(draw):
    """64 features: beyond 25 the root of the squares is less than the sum of the sizes."""
    case = draw(seed=1, seq=8, heads=(HEADS, 2), dims=(64, 4), **SINKS)
    outline, precision = outline_of(case), Precision("bfloat16", prescaled_query=True)
    plain, given, structured = (
        sink_sums(rows_of(case), outline, 0, every_query(outline), precision=precision, **more)
        for more in ({}, {"structured_values": False}, {"structured_values": True})
    )
    assert plain == given, "the default is False"
    assert structured.sizes > plain.sizes, "and the sum of sizes is what is larger"


def test_sums_over_parts_of_the_queries_add_up_to_the_whole(case):
    """As of four hosts: striped positions of one batch row, halves of the other."""
    case, numerics = case("documents and padding"), {"precision": Precision("bfloat16")}
    outline = outline_of(case)
    everything = np.arange(SEQ)
    hosts = [[(0, everything[::2])], [(0, everything[1::2])], [(1, everything[:50])], [(1, everything[50:])]]
    merged = NOTHING
    for queries in hosts:
        merged = merged.plus(sink_sums(rows_of(case), outline, 1, queries, **numerics))
    whole = sink_sums(rows_of(case), outline, 1, every_query(outline), **numerics)
    np.testing.assert_allclose(merged, whole, rtol=1e-12)
    assert SinkSums(1.0, 2.0, 3.0, 4.0).plus(SinkSums(10.0, 20.0, 30.0, 40.0)) == (11.0, 22.0, 33.0, 44.0)


def test_the_cotangent_of_lse_counts_where_a_row_sees_nothing(draw):
    """A row of padding has lse = sink: its dlse goes to the sink whole, and nothing else does."""
    ids = np.full((1, 6), 7)
    case = draw(
        seed=1, batch=1, seq=6, heads=(HEADS, 2), dims=(4, 4), window=(2, 0), **SINKS, segment_ids=ids,
        padding_segment_id=7,
    )  # fmt: skip
    found, _ = streamed(case, {"precision": Precision("float32")})
    np.testing.assert_allclose(found, case["dlse"].astype(np.float64).sum(axis=(0, 1)), rtol=1e-15)


def test_memory_is_that_of_a_block():
    """2^14 tokens whose query alone would take 16 MiB: rows are made on demand, in runs of 128."""

    def rows(tensor, row, positions, heads):
        random = np.random.default_rng([int(positions[0]), len(tensor)])
        shape = (len(positions), heads.stop - heads.start)
        return random.normal(size=shape if tensor == "dlse" else (*shape, 128))

    outline = Outline(1, 2**14, 1, 1, 128, window=(15, 0), sinks=np.zeros(1))
    tracemalloc.start()
    sums = sink_sums(rows, outline, 0, every_query(outline), precision=Precision("bfloat16"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sums.worst > 0, "there was something to sum"
    assert peak < 6 * 2**20, f"{peak} bytes at the most"


@pytest.mark.parametrize(
    ("change", "head", "message"),
    [
        ({"sinks": None}, 0, "outline must have sinks, got sinks=None"),
        ({}, 4, "head must be >= 0 and < 4, got 4"),
        ({}, -1, "head must be >= 0 and < 4, got -1"),
        ({"window": (-1, 0)}, 0, "window left must be None or an integer >= 0, got -1"),
    ],
)
def test_what_is_not_a_head_of_a_case_with_sinks_is_refused(case, change, head, message):
    case = case("window")
    outline = dataclasses.replace(outline_of(case), **change)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sink_sums(rows_of(case), outline, head, every_query(outline), precision=Precision("float32"))
