"""What halo sends, and nothing else: kinds in compiled HLO, rows and dtypes in the jaxpr, rows that must not matter."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from impl.exchange import halo_plan

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
LAYOUTS = ("contiguous", "dual_chunk_swap")


def collectives_in_hlo(case) -> Counter:
    arguments = case.arguments()
    text = jax.jit(case.attention_and_gradients).lower(*arguments).compile().as_text()
    return Counter(re.findall(rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_collective_permutes_appear(make_case, layout) -> None:
    found = collectives_in_hlo(make_case(layout=layout, documents=(20, 28), window=(8, 0)))
    assert set(found) == {"collective-permute"}, f"halo may use no other collective: {found}"


def test_sinks_add_one_all_reduce_and_replicated_kv_heads_one_each(make_case) -> None:
    found = collectives_in_hlo(make_case(sinks=True, context=2, seq_len=16))
    assert found["all-reduce"] == 1, "dsinks is summed over ranks, nothing else is"
    replicated = make_case(context=2, seq_len=16, tensor=2, num_kv_heads=1)
    found = collectives_in_hlo(replicated)
    assert found["all-reduce"] in (1, 2), "dkey and dvalue of replicated heads are summed over tensor, merged or not"
    assert set(found) == {"collective-permute", "all-reduce"}, f"and nothing else: {found}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_one_key_sends_nothing(make_case, layout) -> None:
    case = make_case(layout=layout, window=(0, 0), documents=(20, 28))
    assert collectives_in_hlo(case) == Counter(), "W = 1 needs no communication at all"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(5, 0), (14, 0), (3, 9)])
def test_each_row_travels_once_forward_and_once_back_in_float32(make_case, traced_equations, layout, window) -> None:
    case = make_case(layout=layout, window=window, documents=(20, 28), dtype="bfloat16")
    program = traced_equations(case.attention_and_gradients, *case.arguments())
    travelling = [equation.invars[0].aval for equation in program if equation.primitive.name == "ppermute"]
    rows = [permute.rows for permute in halo_plan(layout, case.context, case.seq_len, window).permutes]
    keys = [(case.batch, count, case.num_kv_heads, case.head_dim) for count in rows]
    values = [(case.batch, count, case.num_kv_heads, case.value_dim) for count in rows]
    ids = [(case.batch, count) for count in rows]
    expected = Counter((shape, dtype) for shape in keys + values for dtype in ("bfloat16", "float32"))
    expected += Counter((shape, "int32") for shape in ids)
    found = Counter((value.shape, value.dtype.name) for value in travelling)
    assert found == expected, "rows forward in their own dtype, their gradients back in float32, segment ids once"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_no_query_of_a_rank_sees_move_no_bit(make_case, layout) -> None:
    case = make_case(layout=layout, window=(5, 0), dtype="float32", num_kv_heads=4)
    program = jax.jit(case.attention_and_gradients)
    clean = case.data_of()
    poisoned = {name: None if array is None else array.copy() for name, array in clean.items()}
    last = case.seq_len - 1
    for name in ("key", "value"):
        poisoned[name][:, last] = 1e30
    names = ("query", "key", "value", "sinks", "segment_ids", "dout", "dlse")
    results = []
    for data in (clean, poisoned):
        arguments = [None if data[name] is None else case.place(name, data[name]) for name in names]
        (out, lse), (dquery, _, _) = program(*arguments)
        results.append(
            [case.collect(name, array)[:, :last] for name, array in zip("olq", (out, lse, dquery), strict=True)]
        )
    for name, one, two in zip(("out", "lse", "dquery"), *results, strict=True):
        assert np.array_equal(one, two), f"{name} of earlier queries must not depend on the last key"


def test_wire_rows_do_not_grow_with_the_sequence() -> None:
    rows = {halo_plan("dual_chunk_swap", 8, seq_len, (1023, 0)).rows_received(3) for seq_len in (2**17, 2**20)}
    assert rows == {2 * 1023}, "W − 1 rows for each of a rank's two chunks, however long the sequence"


def test_halo_is_kept_for_the_backward_in_the_dtype_in_which_it_came(make_case) -> None:
    case = make_case(dtype="bfloat16", window=(5, 0))
    _, residuals = jax.eval_shape(
        lambda *arguments: jax.vjp(lambda *inputs: case.attention(*inputs, None, None), *arguments),
        *case.arguments()[:3],
    )
    kept = [leaf for leaf in jax.tree.leaves(residuals) if leaf.shape == (2, 5 * case.context, 2, 8)]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16], "the received keys are a residual, once, unwidened"
